"use strict";
// A click on a head sorts ascending, then descending, then restores the order of the report.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const next = { none: "ascending", ascending: "descending", descending: "none" };
  const key = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.key;
    if (text === undefined) return null;
    const number = Number(text);
    return text.trim() === "" || Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  };
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const order = next[head.getAttribute("aria-sort")];
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", order);
      const sign = order === "descending" ? -1 : 1;
      const sorted = order === "none" ? original : [...original].sort((a, b) => {
        const [x, y] = [key(a, column), key(b, column)];
        // what was not measured stays at the end in both directions
        if (x === null || y === null) return (x === null) - (y === null);
        return sign * compare(x, y);
      });
      body.append(...sorted);
    });
  });
}
