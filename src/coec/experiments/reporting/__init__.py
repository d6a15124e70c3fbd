"""The report of a sweep: rows → one data frame of cells → tables and figures → files."""
