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

// A table that is wider than its box says so while there is more to the right, and as many of its
// first columns as leave most of the box to the numbers stay in sight.
const LABELS = 0.55;
for (const frame of document.querySelectorAll(".frame")) {
  const box = frame.querySelector(".scroll");
  const rows = [...box.querySelectorAll("tr")];
  const labels = rows[rows.length - 1].querySelectorAll("th").length;
  const stick = () => {
    const wide = box.scrollWidth > box.clientWidth + 1;
    frame.classList.toggle("wide", wide);
    let left = 0;
    for (let column = 0; column < labels; column += 1) {
      const width = rows[0].cells[column].offsetWidth;
      const stays = wide && (column === 0 || left + width <= LABELS * box.clientWidth) && left >= 0;
      for (const row of rows) {
        row.cells[column].classList.toggle("stuck", stays);
        row.cells[column].style.left = stays ? `${left}px` : "";
      }
      left = stays ? left + width : -1;
    }
    const stuck = rows[0].querySelectorAll(".stuck").length;
    for (const row of rows) {
      [...row.cells].forEach((cell, column) => cell.classList.toggle("edge", column === stuck - 1));
    }
    show();
  };
  const show = () => {
    const rest = box.scrollWidth - box.clientWidth - box.scrollLeft;
    frame.classList.toggle("more", rest > 1);
  };
  box.addEventListener("scroll", show, { passive: true });
  new ResizeObserver(stick).observe(box);
  stick();
}
