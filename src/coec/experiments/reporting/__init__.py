"""The report of a sweep: rows → tables and figures as values → Markdown, LaTeX, one page."""
