"use strict";
(() => {
  const find = (selector) => document.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const stage = find("#stage"), choice = find("#photo"), worlds = all(".world"), lists = all("nav ol");
  const views = worlds.map(() => null); // where each photograph was left: scale, and its corner's place on the stage
  let shown = 0, error = -1; // the number of the error shown, counted over all entries of the list

  // Below each outline a wider dark or light one, so that it is seen on any photograph.
  for (const group of all("g")) {
    const edges = group.cloneNode(true);
    edges.classList.add("edges");
    group.before(edges);
  }

  const sizeOf = (world) => ({ width: Number(world.dataset.width), height: Number(world.dataset.height) });
  function fitted(world) {
    const { width, height } = sizeOf(world);
    const scale = Math.min(stage.clientWidth / width, stage.clientHeight / height);
    return { scale, x: (stage.clientWidth - width * scale) / 2, y: (stage.clientHeight - height * scale) / 2 };
  }
  function draw() {
    const world = worlds[shown], view = views[shown];
    world.style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.scale})`;
    world.classList.toggle("large", view.scale >= 2);
    find("#scale").textContent = `${Math.round(100 * view.scale)} %`;
  }
  // Scale around a point of the stage, which stays where it is.
  function zoom(factor, x = stage.clientWidth / 2, y = stage.clientHeight / 2) {
    const view = views[shown];
    const scale = Math.min(16, Math.max(fitted(worlds[shown]).scale / 2, view.scale * factor));
    views[shown] = { scale, x: x - ((x - view.x) * scale) / view.scale, y: y - ((y - view.y) * scale) / view.scale };
    draw();
  }
  function move(x, y) {
    views[shown] = { ...views[shown], x: views[shown].x + x, y: views[shown].y + y };
    draw();
  }
  function show(number) {
    shown = number;
    error = -1;
    choice.value = String(number);
    worlds.forEach((world, index) => { world.hidden = index !== number; });
    lists.forEach((list, index) => { list.hidden = index !== number; });
    all("[aria-current]").forEach((item) => item.removeAttribute("aria-current"));
    const picture = worlds[number].querySelector("img");
    if (!picture.src) picture.src = picture.dataset.src;
    views[number] ??= fitted(worlds[number]);
    draw();
  }
  // An entry of the list stands for all errors of a kind and class: each with its entry and box.
  const errorsOf = (list) => all("button", list).flatMap((button) =>
    button.dataset.boxes.split(";").map((box) => ({ button, box: box.split(" ").map(Number) })));
  function showError(number) {
    const { button, box: [left, top, right, bottom] } = errorsOf(lists[shown])[number];
    const scale = Math.min(3, (0.8 * stage.clientWidth) / Math.max(right - left, 40), (0.8 * stage.clientHeight) / Math.max(bottom - top, 40));
    views[shown] = { scale, x: stage.clientWidth / 2 - (scale * (left + right)) / 2, y: stage.clientHeight / 2 - (scale * (top + bottom)) / 2 };
    all("[aria-current]").forEach((item) => item.removeAttribute("aria-current"));
    button.setAttribute("aria-current", "true");
    error = number;
    draw();
  }
  function nextError(only) {
    const errors = errorsOf(lists[shown]);
    const numbers = errors.map((_, number) => number).filter((number) => !only || errors[number].button === only);
    if (!numbers.length) return;
    const next = numbers.find((number) => number > error) ?? numbers[0];
    errors[next].button.scrollIntoView({ block: "nearest" });
    showError(next);
  }
  function whole() { views[shown] = fitted(worlds[shown]); draw(); }
  function toggle(name) { const box = find(`#show-${name}`); box.checked = !box.checked; box.dispatchEvent(new Event("change")); }

  for (const name of ["truth", "predictions"]) {
    find(`#show-${name}`).addEventListener("change", (event) => stage.classList.toggle(`no-${name}`, !event.target.checked));
  }
  find("#zoom-in").addEventListener("click", () => zoom(1.5));
  find("#zoom-out").addEventListener("click", () => zoom(1 / 1.5));
  find("#fit").addEventListener("click", whole);
  find("#actual").addEventListener("click", () => zoom(1 / views[shown].scale));
  find("#next-error").addEventListener("click", () => nextError());
  choice.addEventListener("change", () => show(Number(choice.value)));
  lists.forEach((list) => all("button", list).forEach((button) => button.addEventListener("click", () => nextError(button))));

  stage.addEventListener("wheel", (event) => {
    event.preventDefault();
    const frame = stage.getBoundingClientRect();
    zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX - frame.left, event.clientY - frame.top);
  }, { passive: false });
  stage.addEventListener("pointerdown", (event) => { stage.setPointerCapture(event.pointerId); stage.classList.add("moving"); });
  stage.addEventListener("pointermove", (event) => { if (stage.hasPointerCapture(event.pointerId)) move(event.movementX, event.movementY); });
  for (const name of ["pointerup", "pointercancel"]) stage.addEventListener(name, () => stage.classList.remove("moving"));
  const actions = {
    "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), 0: whole, 1: () => zoom(1 / views[shown].scale),
    t: () => toggle("truth"), p: () => toggle("predictions"), e: () => nextError(), n: () => show((shown + 1) % worlds.length),
    ArrowLeft: () => move(80, 0), ArrowRight: () => move(-80, 0), ArrowUp: () => move(0, 80), ArrowDown: () => move(0, -80),
  };
  document.addEventListener("keydown", (event) => {
    const action = actions[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey || event.target === choice) return;
    event.preventDefault();
    action();
  });
  addEventListener("resize", () => { views.fill(null); whole(); });
  addEventListener("hashchange", () => show(numberOf(location.hash)));
  function numberOf(hash) { const number = Number(hash.slice(1)); return Number.isInteger(number) && worlds[number] ? number : 0; }
  show(numberOf(location.hash));
})();
