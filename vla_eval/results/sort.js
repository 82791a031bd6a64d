// Sort a table by a click on its heading: by number where every key is one, else as text; cells without a value stay at the end.
"use strict";
for (const head of document.querySelectorAll("th button")) {
  head.addEventListener("click", () => {
    const cell = head.parentElement, column = cell.cellIndex, body = cell.closest("table").tBodies[0];
    const down = cell.getAttribute("aria-sort") === "ascending";
    for (const other of cell.parentElement.cells) other.removeAttribute("aria-sort");
    cell.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.key;
    const rows = [...body.rows], filled = rows.filter((row) => key(row) !== ""), numbers = filled.every((row) => !Number.isNaN(Number(key(row))));
    filled.sort((a, b) => (numbers ? Number(key(a)) - Number(key(b)) : key(a).localeCompare(key(b))) * (down ? -1 : 1));
    body.append(...filled, ...rows.filter((row) => key(row) === ""));
  });
}
