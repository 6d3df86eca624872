"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // Tables: a click on a heading sorts, numbers descending, words ascending; a second click reverses. Missing values stay last.
  const words = new Intl.Collator(undefined, { numeric: true });
  const valueOf = (cell) => (cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent.trim());
  const isMissing = (value) => value === "–" || value === "";
  function sortBy(table, column, heading) {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => ({ row, value: valueOf(row.cells[column]) }));
    const isNumber = rows.some(({ value }) => typeof value === "number");
    const first = isNumber ? "descending" : "ascending";
    const second = isNumber ? "ascending" : "descending";
    const order = heading.getAttribute("aria-sort") === first ? second : first;
    const sign = order === "ascending" ? 1 : -1;
    rows.sort((a, b) => {
      if (isMissing(a.value) || isMissing(b.value)) return isMissing(a.value) - isMissing(b.value);
      return sign * (isNumber ? a.value - b.value : words.compare(a.value, b.value));
    });
    all("th[aria-sort]", table).forEach((other) => other.removeAttribute("aria-sort"));
    heading.setAttribute("aria-sort", order);
    body.append(...rows.map(({ row }) => row));
  }
  for (const table of all("table.sortable")) {
    all("thead th", table).forEach((heading, column) => {
      heading.querySelector("button")?.addEventListener("click", () => sortBy(table, column, heading));
    });
  }

  // The tooltip beside the pointer.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  function showTip(event, text) {
    tip.textContent = text;
    tip.hidden = !text;
    const left = event.clientX + 14 + tip.offsetWidth > innerWidth ? event.clientX - tip.offsetWidth - 10 : event.clientX + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 4))}px`;
  }
  const hideTip = () => { tip.hidden = true; };

  // Curves: show the values at the pointer, at most eight classes. The axes are those of charts.py.
  const axes = { left: 46, right: 448, top: 12, bottom: 268 };
  for (const svg of all("svg.curves")) {
    const cursor = svg.querySelector(".cursor");
    svg.addEventListener("pointermove", (event) => {
      const frame = svg.getBoundingClientRect();
      const share = (((event.clientX - frame.left) / frame.width) * svg.viewBox.baseVal.width - axes.left) / (axes.right - axes.left);
      if (share < 0 || share > 1) { cursor.setAttribute("visibility", "hidden"); hideTip(); return; }
      const seen = all("polyline", svg).filter((line) => getComputedStyle(line).visibility !== "hidden");
      const index = Math.round(share * 100);
      const values = seen.map((line) => {
        const value = (axes.bottom - line.points[index].y) / (axes.bottom - axes.top);
        return { name: line.dataset.name, value, isMean: line.classList.contains("mean"), isLit: line.classList.contains("lit") };
      });
      const means = values.filter((line) => line.isMean);
      const rest = values.filter((line) => !line.isMean).sort((a, b) => b.isLit - a.isLit || b.value - a.value);
      const left = rest.length > 8 ? `\n… ${rest.length - 8} more` : "";
      const lines = [...means, ...rest.slice(0, 8)].map((line) => `${line.value.toFixed(3)}  ${line.name}`);
      cursor.setAttribute("visibility", "visible");
      cursor.setAttribute("x1", axes.left + (index / 100) * (axes.right - axes.left));
      cursor.setAttribute("x2", axes.left + (index / 100) * (axes.right - axes.left));
      showTip(event, `${svg.dataset.y} at ${svg.dataset.x} ${(index / 100).toFixed(2)}\n${lines.join("\n")}${left}`);
    });
    svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); hideTip(); });
  }

  // A click on a class in the legend highlights its curves in all charts.
  const lit = new Set();
  for (const button of all(".legend button[data-class]")) {
    button.addEventListener("click", () => {
      const id = button.dataset.class;
      if (!lit.delete(id)) lit.add(id);
      all(".legend button[data-class]").forEach((other) => other.setAttribute("aria-pressed", lit.has(other.dataset.class)));
      all("polyline.class").forEach((line) => line.classList.toggle("lit", lit.has(line.dataset.class)));
      document.body.classList.toggle("some-lit", lit.size > 0);
    });
  }

  // Confusion matrix and reliability bars: show a cell's values.
  for (const svg of all("svg.confusion")) {
    const names = all(".labels li", svg.closest("section")).map((label) => label.textContent);
    svg.addEventListener("pointermove", (event) => {
      const { r, c, n } = event.target.dataset;
      if (n === undefined) { hideTip(); return; }
      const isMissed = Number(r) === names.length, isBackground = Number(c) === names.length;
      const truth = isBackground ? "true class: background" : `true class: ${names[c]}`;
      showTip(event, `${n} × ${isMissed ? "missed" : `predicted: ${names[r]}`}\n${truth}`);
    });
    svg.addEventListener("pointerleave", hideTip);
  }
  for (const mark of all("[data-tip]")) {
    mark.addEventListener("pointermove", (event) => showTip(event, mark.dataset.tip));
    mark.addEventListener("pointerleave", hideTip);
  }

  // Gallery: a click on a picture enlarges it; the buttons change the order.
  const dialog = document.querySelector("dialog");
  for (const button of all(".zoom")) {
    button.addEventListener("click", () => {
      all("img", dialog).forEach((old) => old.remove());
      dialog.append(button.querySelector("img").cloneNode());
      dialog.showModal();
    });
  }
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  for (const button of all(".order button")) {
    button.addEventListener("click", () => {
      const gallery = document.querySelector(".gallery");
      const count = (card) => Number(card.dataset[button.dataset.by]);
      gallery.append(...all("article", gallery).sort((a, b) => count(b) - count(a)));
      all(".order button").forEach((other) => other.setAttribute("aria-pressed", other === button));
    });
  }
})();
