"use strict";
(() => {
  const find = (selector) => document.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (name, properties, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };
  const { results, names, lowest, root, command, photos } = JSON.parse(find("#data").textContent);
  const folder = "photographs";
  const FALSE = results.indexOf("false"), CONFUSED = results.indexOf("confused");
  const isError = ([result]) => result > 0;
  const countOf = (rows, result) => rows.filter((row) => row[0] === result).length;
  photos.forEach((photo) => { photo.matches = photo.rows; });

  // --- the list: a row is [result, class, confidence in %, left, top, right, bottom, the detection's class] ---
  const list = find("#list"), end = find("#end"), CHUNK = 60;
  const controls = { kind: find("#kind"), class: find("#class"), low: find("#low"), high: find("#high"), order: find("#order") };
  const cards = new Map();
  let order = photos, shown = null;
  controls.class.append(...names.map((name, number) => make("option", { value: number }, name)));
  Object.assign(controls.low, { min: lowest, value: lowest });
  controls.high.min = lowest;
  find("#command").textContent = command;
  const collator = new Intl.Collator(undefined, { numeric: true });

  function summary(photo) {
    const counts = results.map((name, result) => [countOf(photo.rows, result), name]);
    const objects = photo.rows.length - counts[FALSE][0];
    const errors = counts.slice(1).filter(([number]) => number).map(([number, name]) => `${number} ${name}`);
    return `${objects} object${objects === 1 ? "" : "s"}, ${errors.join(", ") || "no errors"}`;
  }
  function card(photo) {
    if (!cards.has(photo.id)) {
      const image = make("img", { loading: "lazy", decoding: "async", alt: "", width: photo.size[0], height: photo.size[1], src: `${folder}/small/${photo.id}.jpg` });
      const button = make("button", { type: "button" }, image, make("b", {}, photo.file), make("span", {}, summary(photo)));
      button.addEventListener("click", () => show(photo));
      cards.set(photo.id, make("li", {}, button));
    }
    return cards.get(photo.id);
  }
  function more() {
    list.append(...order.slice(list.childElementCount, list.childElementCount + CHUNK).map(card));
    observer.unobserve(end); // observed anew, it tells again whether the end is near
    if (list.childElementCount < order.length) observer.observe(end);
  }
  const observer = new IntersectionObserver((entries) => { if (entries.some((entry) => entry.isIntersecting)) more(); }, { rootMargin: "800px" });

  function select() {
    const kind = controls.kind.value, wanted = results.indexOf(kind);
    const number = controls.class.value === "" ? null : Number(controls.class.value);
    const percent = (input, usual) => Math.round(100 * (input.value === "" ? usual : input.value));
    const low = percent(controls.low, controls.low.min), high = percent(controls.high, controls.high.max);
    const isWhole = low <= 100 * controls.low.min && high >= 100;
    const hasClass = (row) => number === null || row[1] === number || row[7] === number;
    const hasKind = (row) => kind === "" || kind === "none" || (kind === "error" ? isError(row) : row[0] === wanted);
    const fits = (row) => hasKind(row) && hasClass(row) && (isWhole || (row[2] >= low && row[2] <= high)); // a missed label has -1
    const takesAll = number === null && isWhole && (kind === "" || kind === "none");
    for (const photo of photos) photo.matches = photo.rows.filter(fits);
    order = photos.filter((photo) => (takesAll || photo.matches.length) && !(kind === "none" && photo.rows.some(isError)));
    const by = controls.order.value, result = results.indexOf(by);
    const scores = (photo) => photo.matches.map((row) => row[2]).filter((score) => score >= 0);
    const keys = { sure: (photo) => -Math.max(...scores(photo), -1), unsure: (photo) => Math.min(...scores(photo), 101) };
    const key = keys[by] ?? ((photo) => -(by === "error" ? photo.matches.filter(isError).length : countOf(photo.matches, result)));
    const rank = new Map(order.map((photo) => [photo, by === "name" ? 0 : key(photo)]));
    order.sort((a, b) => rank.get(a) - rank.get(b) || collator.compare(a.file, b.file));
    const told = (many) => many.toLocaleString("en");
    const matches = order.reduce((sum, photo) => sum + photo.matches.length, 0);
    find("#count").textContent = `${told(order.length)} of ${told(photos.length)} photographs` + (takesAll ? "" : `, ${told(matches)} object${matches === 1 ? "" : "s"}`);
    find("#save").disabled = !order.length;
    list.replaceChildren();
    more();
  }
  for (const control of Object.values(controls)) control.addEventListener("input", select);
  find("#save").addEventListener("click", () => {
    const lines = order.map((photo) => `${root === "/" ? "" : root}/${photo.file}\n`);
    const href = URL.createObjectURL(new Blob(lines, { type: "text/plain" }));
    make("a", { href, download: "photographs.txt" }).click();
    URL.revokeObjectURL(href);
  });

  // --- the large view ---
  const dialog = find("#large"), stage = find("#stage"), errors = find("#errors"), toggles = all(".toggle");
  const drawings = new Map(all("#drawings svg").map((drawing) => [Number(drawing.dataset.id), drawing]));
  // Below each outline a wider dark or light one, so that it is seen on any photograph.
  for (const group of all("#drawings g")) {
    const edges = group.cloneNode(true);
    edges.classList.add("edges");
    group.before(edges);
  }
  let world = null, view = null, boxes = [], error = -1; // the scale and the corner's place on the stage; the errors' boxes

  function fitted() {
    const [width, height] = shown.size;
    const scale = Math.min(stage.clientWidth / width, stage.clientHeight / height);
    return { scale, x: (stage.clientWidth - width * scale) / 2, y: (stage.clientHeight - height * scale) / 2 };
  }
  function draw() {
    world.style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.scale})`;
    world.style.setProperty("--pixel", `${1 / view.scale}px`);
    world.classList.toggle("large", drawings.has(shown.id) && view.scale >= 2);
    find("#scale").textContent = `${Math.round(100 * view.scale)} %`;
  }
  // Scale around a point of the stage, which stays where it is.
  function zoom(factor, x = stage.clientWidth / 2, y = stage.clientHeight / 2) {
    const whole = fitted().scale;
    const scale = Math.min(Math.max(16, 4 * whole), Math.max(whole / 2, view.scale * factor));
    view = { scale, x: x - ((x - view.x) * scale) / view.scale, y: y - ((y - view.y) * scale) / view.scale };
    draw();
  }
  function move(x, y) { view = { ...view, x: view.x + x, y: view.y + y }; draw(); }
  function whole() { view = fitted(); draw(); }

  function show(photo) {
    shown = photo;
    if (!dialog.open) dialog.showModal();
    const place = order.indexOf(photo), drawing = drawings.get(photo.id), [width, height] = photo.size;
    find("#file").textContent = `${photo.file}${place < 0 ? "" : ` (${place + 1} of ${order.length})`}: ${summary(photo)}`;
    const name = drawing ? photo.full : `small/${photo.id}`;
    world = make("div", { className: "world" }, make("img", { alt: photo.file, width, height, src: `${folder}/${name}.jpg`, draggable: false }));
    if (drawing) world.append(drawing);
    stage.replaceChildren(world);
    toggles.forEach((toggle) => { toggle.hidden = !drawing; });
    listErrors();
    whole();
    history.replaceState(null, "", `#${photo.id}`);
  }
  function step(by) {
    const place = order.indexOf(shown);
    if (order.length) show(order[place < 0 ? 0 : (place + by + order.length) % order.length]);
  }
  // An entry stands for all errors of a kind and class.
  function listErrors() {
    const entries = new Map();
    for (const row of shown.rows.filter(isError)) {
      const words = `${results[row[0]]}: ${names[row[1]]}` + (row[0] === CONFUSED && row.length > 7 ? ` taken for ${names[row[7]]}` : "");
      if (!entries.has(words)) entries.set(words, []);
      entries.get(words).push(row);
    }
    boxes = [];
    error = -1;
    const items = [...entries].sort((a, b) => b[1].length - a[1].length).map(([words, rows]) => {
      const scores = rows.map((row) => row[2]).filter((score) => score >= 0).sort((a, b) => b - a).map((score) => (score / 100).toFixed(2));
      const button = make("button", { type: "button" }, make("span", { className: `key ${results[rows[0][0]]}` }), `${rows.length} × ${words}`);
      if (scores.length) button.append(make("small", {}, ` ${scores.slice(0, 6).join(" ")}${scores.length > 6 ? " …" : ""}`));
      boxes.push(...rows.filter((row) => row.length > 3).map((row) => ({ button, box: row.slice(3, 7) })));
      button.addEventListener("click", () => nextError(button));
      return make("li", {}, button);
    });
    errors.replaceChildren(...(items.length ? items : [make("li", { className: "none" }, "no errors")]));
    find("#next-error").disabled = !boxes.length;
  }
  function showError(number) {
    const { button, box: [left, top, right, bottom] } = boxes[number];
    const most = Math.max(3, 2 * fitted().scale); // of a small photograph twice the whole
    const scale = Math.min(most, (0.8 * stage.clientWidth) / Math.max(right - left, 40), (0.8 * stage.clientHeight) / Math.max(bottom - top, 40));
    view = { scale, x: stage.clientWidth / 2 - (scale * (left + right)) / 2, y: stage.clientHeight / 2 - (scale * (top + bottom)) / 2 };
    all("[aria-current]", errors).forEach((item) => item.removeAttribute("aria-current"));
    button.setAttribute("aria-current", "true");
    world.querySelector(".spot")?.remove();
    const spot = make("div", { className: "spot" });
    Object.assign(spot.style, { left: `${left}px`, top: `${top}px`, width: `${right - left}px`, height: `${bottom - top}px` });
    world.append(spot);
    error = number;
    draw();
  }
  function nextError(only) {
    const numbers = boxes.map((_, number) => number).filter((number) => !only || boxes[number].button === only);
    if (!numbers.length) return;
    const next = numbers.find((number) => number > error) ?? numbers[0];
    boxes[next].button.scrollIntoView({ block: "nearest" });
    showError(next);
  }
  function toggle(name) { const box = find(`#show-${name}`); box.checked = !box.checked; box.dispatchEvent(new Event("change")); }

  for (const name of ["truth", "predictions"]) {
    find(`#show-${name}`).addEventListener("change", (event) => stage.classList.toggle(`no-${name}`, !event.target.checked));
  }
  const actual = () => zoom(1 / view.scale);
  const clicks = { previous: () => step(-1), next: () => step(1), "next-error": () => nextError(), "zoom-in": () => zoom(1.5), "zoom-out": () => zoom(1 / 1.5), fit: whole, actual, close: () => dialog.close() };
  for (const [id, action] of Object.entries(clicks)) find(`#${id}`).addEventListener("click", action);
  dialog.addEventListener("close", () => {
    history.replaceState(null, "", location.pathname + location.search);
    const button = cards.get(shown.id)?.querySelector("button");
    if (button?.isConnected) button.focus();
  });

  stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    const frame = stage.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX - frame.left, event.clientY - frame.top);
  }, { passive: false });
  stage.addEventListener("pointerdown", (event) => { stage.setPointerCapture(event.pointerId); stage.classList.add("moving"); });
  stage.addEventListener("pointermove", (event) => { if (stage.hasPointerCapture(event.pointerId)) move(event.movementX, event.movementY); });
  for (const name of ["pointerup", "pointercancel"]) stage.addEventListener(name, () => stage.classList.remove("moving"));
  const arrows = { ArrowLeft: [80, 0], ArrowRight: [-80, 0], ArrowUp: [0, 80], ArrowDown: [0, -80] };
  const actions = {
    "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: whole, 1: actual, e: () => nextError(),
    t: () => toggle("truth"), p: () => toggle("predictions"), n: () => step(1), ArrowLeft: () => step(-1), ArrowRight: () => step(1),
  };
  document.addEventListener("keydown", (event) => {
    const isMove = arrows[event.key] && (event.shiftKey || !actions[event.key]);
    const action = isMove ? () => move(...arrows[event.key]) : actions[event.key];
    if (!dialog.open || !action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  });
  addEventListener("resize", () => { if (dialog.open) whole(); });
  function follow() { const photo = photos.find(({ id }) => location.hash === `#${id}`); if (photo) show(photo); }
  addEventListener("hashchange", follow);
  select();
  follow();
})();
