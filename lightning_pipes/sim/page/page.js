"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const host = document.getElementById("timeline");
  const told = document.getElementById("told");
  const SVG = "http://www.w3.org/2000/svg";
  const LEFT = 60, RIGHT = 76, HEAD = 24, AXIS = 24, GAP = 10;
  const ranks = data.ranks;
  const row = ranks > 16 ? 19 : 30, bar = ranks > 16 ? 11 : 20, thin = ranks > 16 ? 2 : 3, memoryRow = ranks > 16 ? 22 : 38;
  const view = { from: 0, to: data.span };
  let chosen = null; // {panel, rank, at}: `at` numbers the rank's computations
  let width = 0, plot = 1;

  // Events of every panel by rank and lane: 0 computes, 1 sends forward, 2 sends backward.
  for (const panel of data.panels) {
    panel.lanes = Array.from({ length: ranks }, () => [[], [], []]);
    const e = panel.events;
    for (let n = 0; n < e.rank.length; n++) {
      const kind = data.kinds[e.kind[n]];
      panel.lanes[e.rank[n]][kind === "SF" ? 1 : kind === "SB" ? 2 : 0].push(n);
    }
    panel.longest = {}; // label of each kind: all numbers of a kind are shown, or none
    e.kind.forEach((kind, n) => (panel.longest[data.kinds[kind]] = Math.max(panel.longest[data.kinds[kind]] || 0, data.labels[e.label[n]].length)));
    panel.place = new Map(); // where the other panel has the same instruction
    for (let n = 0; n < e.rank.length; n++) panel.place.set(key(e, n), n);
  }

  function key(e, n) { return e.kind[n] + ":" + e.stage[n] + ":" + e.job[n] + ":" + e.batch[n] + ":" + e.span[n]; }
  function make(tag, attributes, parent, text) {
    const node = document.createElementNS(SVG, tag);
    for (const name in attributes) node.setAttribute(name, attributes[name]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  }
  function seconds(ns) {
    for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["us", 1e3]]) {
      if (Math.abs(ns) >= size) return Number((ns / size).toPrecision(ns >= 1000 * size ? 6 : 4)) + " " + unit;
    }
    return Number(ns.toPrecision(3)) + " ns";
  }
  function bytes(size) {
    for (const [unit, factor] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (size >= factor) return Number((size / factor).toPrecision(3)) + " " + unit;
    }
    return size + " bytes";
  }
  const x = (t) => LEFT + ((t - view.from) / (view.to - view.from)) * plot;
  const time = (px) => view.from + ((px - LEFT) / plot) * (view.to - view.from);

  // ---- what stays as long as the width does

  let svg, tip, cursor, outline, axis, grid, memoryPaths = [], layers = [];
  const colours = [];
  for (const kind of ["F", "R", "B", "I", "W", "STEP"]) for (const chunk of [0, 1, 2]) colours.push(kind + chunk);
  colours.push("SF0", "SB0");

  function build() {
    host.replaceChildren();
    width = host.clientWidth;
    plot = Math.max(50, width - LEFT - RIGHT);
    let y = 0;
    for (const panel of data.panels) {
      panel.top = y + HEAD;
      y = panel.top + row * ranks + GAP;
    }
    const memoryTop = y + HEAD;
    if (data.memory) y = memoryTop + memoryRow * ranks + GAP;
    const height = y + AXIS;
    svg = make("svg", { height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, host);
    const clip = make("clipPath", { id: "plot" }, make("defs", {}, svg));
    make("rect", { x: LEFT, y: 0, width: plot, height }, clip);
    grid = make("g", {}, svg);
    layers = data.panels.map((panel) => {
      make("text", { x: 0, y: panel.top - 9, class: "name" }, svg, `${panel.name}: ${panel.heading}`);
      for (let r = 0; r < ranks; r++) {
        const middle = panel.top + r * row + row / 2;
        make("text", { x: 0, y: middle + 4, class: r === data.slow ? "name" : "soft" }, svg, `rank ${r}`);
        make("text", { x: width - RIGHT + 8, y: middle + 4, class: "soft" }, svg, panel.bubble.length ? `${Math.round(100 * panel.bubble[r])}% idle` : "");
      }
      const group = make("g", { "clip-path": "url(#plot)" }, svg);
      const idle = make("path", { class: "idle" }, group);
      const paths = colours.map((name) => make("path", { style: `fill:var(--${name})` }, group));
      return { idle, paths, labels: make("g", {}, group) };
    });
    memoryPaths = [];
    if (data.memory) {
      make("text", { x: 0, y: memoryTop - 9, class: "name" }, svg, data.memory.title);
      data.memory.top = memoryTop;
      for (let r = 0; r < ranks; r++) {
        const bottom = memoryTop + (r + 1) * memoryRow - 4;
        make("text", { x: 0, y: bottom - memoryRow / 2 + 8, class: "soft" }, svg, `rank ${r}`);
        make("text", { x: width - RIGHT + 8, y: bottom - memoryRow / 2 + 8, class: "soft" }, svg, bytes(data.memory.peaks[r]));
        const group = make("g", { "clip-path": "url(#plot)" }, svg);
        memoryPaths.push(make("path", { class: "area" }, group));
        make("path", { class: "grid", d: `M${LEFT} ${bottom}h${plot}` }, group);
        if (data.memory.limits[r] && data.memory.limits[r] <= data.memory.most) {
          const at = bottom - (data.memory.limits[r] / data.memory.most) * (memoryRow - 8);
          make("path", { class: "limit", d: `M${LEFT} ${at}h${plot}` }, group);
        }
      }
    }
    axis = make("g", {}, svg);
    axis.bottom = height - AXIS;
    outline = make("path", { class: "chosen" }, svg);
    cursor = make("path", { class: "cursor", d: "" }, svg);
    tip = document.createElement("div");
    tip.id = "tip";
    tip.hidden = true;
    host.appendChild(tip);
    draw();
  }

  // ---- what changes with the view

  function first(events, lane, t) { // the first of the lane that ends after t; a lane's computations do not overlap
    let low = 0, high = lane.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (events.start[lane[middle]] + events.took[lane[middle]] <= t) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function draw() {
    host.dataset.from = Math.round(view.from);
    host.dataset.to = Math.round(view.to);
    data.panels.forEach((panel, number) => {
      const e = panel.events, parts = colours.map(() => []), idle = [];
      const labels = document.createDocumentFragment();
      for (let r = 0; r < ranks; r++) {
        const top = panel.top + r * row + (row - bar) / 2;
        const end = Math.min(x(panel.makespan), LEFT + plot);
        if (end > LEFT) idle.push(`M${LEFT} ${top}H${end}V${top + bar}H${LEFT}z`);
        panel.lanes[r].forEach((lane, way) => {
          const low = way === 0 ? top : way === 1 ? top + bar + 1 : top - thin - 1;
          const high = way === 0 ? bar : thin;
          const drawn = {};
          for (let at = way === 0 ? first(e, lane, view.from) : 0; at < lane.length; at++) {
            const n = lane[at];
            if (e.start[n] > view.to) break;
            if (e.start[n] + e.took[n] < view.from) continue;
            const kind = data.kinds[e.kind[n]];
            const colour = kind + (way === 0 ? Math.min(2, e.chunk[n]) : 0);
            const x0 = Math.max(x(e.start[n]), LEFT - 3), x1 = Math.min(x(e.start[n] + e.took[n]), LEFT + plot + 3);
            const long = x1 - x0;
            if (long < 1 && x0 < drawn[colour]) continue; // the pixel has this colour already
            const shown = Math.max(long > 4 ? long - 1 : long, 0.8);
            drawn[colour] = x0 + shown;
            parts[colours.indexOf(colour)].push(`M${x0.toFixed(1)} ${low}h${shown.toFixed(1)}v${high}h${(-shown).toFixed(1)}z`);
            if (way === 0) {
              const text = data.labels[e.label[n]];
              if (long > 6.5 * panel.longest[kind] + 2 && bar > 12) {
                const dark = e.chunk[n] > 0 && kind !== "STEP";
                make("text", { x: (x0 + x1) / 2, y: low + bar / 2 + 4, class: dark ? "on dark" : "on" }, labels, text);
              }
            }
          }
        });
      }
      layers[number].idle.setAttribute("d", idle.join(""));
      layers[number].paths.forEach((path, n) => path.setAttribute("d", parts[n].join("")));
      layers[number].labels.replaceChildren(labels);
    });
    if (data.memory) drawMemory();
    drawAxis();
    drawChosen();
  }

  function drawMemory() {
    const { curves, most, top } = data.memory;
    curves.forEach(([times, sizes], r) => {
      const bottom = top + (r + 1) * memoryRow - 4;
      const level = (size) => (bottom - (size / most) * (memoryRow - 8)).toFixed(1);
      let at = 0;
      while (at + 1 < times.length && times[at + 1] <= view.from) at++;
      const parts = [`M${LEFT} ${bottom}V${level(sizes[at])}`];
      let column = -1, highest = 0, last = sizes[at];
      for (at++; at < times.length && times[at] < view.to; at++) {
        const px = Math.round(x(times[at]));
        if (px !== column) highest = 0;
        if (px !== column || sizes[at] > highest) parts.push(`H${px}V${level(sizes[at])}`);
        highest = Math.max(highest, sizes[at]);
        column = px;
        last = sizes[at];
      }
      const end = Math.min(x(data.memory.makespan), LEFT + plot);
      parts.push(`V${level(last)}H${end}V${bottom}z`);
      memoryPaths[r].setAttribute("d", parts.join(""));
    });
  }

  function drawAxis() {
    axis.replaceChildren();
    grid.replaceChildren();
    const rough = ((view.to - view.from) / plot) * 110;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * (rough / power > 5 ? 10 : rough / power > 2 ? 5 : rough / power > 1 ? 2 : 1);
    for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
      const at = Math.round(x(t)) + 0.5;
      make("path", { class: "grid", d: `M${at} 0V${axis.bottom}` }, grid);
      make("text", { x: Math.min(at, LEFT + plot - 8), y: axis.bottom + 14, class: "soft", "text-anchor": "middle" }, axis, t === 0 ? "0" : seconds(t));
    }
  }

  function drawChosen() {
    outline.setAttribute("d", "");
    if (!chosen) return;
    const panel = data.panels[chosen.panel], e = panel.events, n = panel.lanes[chosen.rank][0][chosen.at];
    const top = panel.top + chosen.rank * row + (row - bar) / 2;
    const x0 = Math.max(LEFT, x(e.start[n])), x1 = Math.min(LEFT + plot, x(e.start[n] + e.took[n]));
    if (x1 > x0) outline.setAttribute("d", `M${x0} ${top}H${x1}V${top + bar}H${x0}z`);
  }

  // ---- what an event says

  function words(panel, n) {
    const e = panel.events, kind = data.kinds[e.kind[n]], end = e.start[n] + e.took[n];
    const [low, high] = data.spans[e.span[n]];
    const lines = [`${data.words[kind]}, stage ${e.stage[n]}` + (kind === "STEP" ? "" : `, micro-batch ${data.labels[e.label[n]]} (samples ${low} to ${high - 1})`)];
    lines.push(e.target[n] < 0 ? `on rank ${e.rank[n]}, ${panel.name}` : `from rank ${e.rank[n]} to rank ${e.target[n]}, ${panel.name}`);
    lines.push(`${seconds(e.took[n])}: from ${seconds(e.start[n])} to ${seconds(end)}`);
    for (const other of data.panels) {
      const same = other === panel ? undefined : other.place.get(key(e, n));
      if (same !== undefined) lines.push(`${other.name}: ${seconds(other.events.took[same])}, from ${seconds(other.events.start[same])}`);
    }
    return lines;
  }

  function under(px, py) {
    const t = time(px);
    for (const panel of data.panels) {
      const r = Math.floor((py - panel.top) / row);
      if (r < 0 || r >= ranks || py < panel.top) continue;
      const off = py - panel.top - r * row, edge = (row - bar) / 2;
      const wanted = off < edge ? 2 : off >= edge + bar ? 1 : 0;
      const e = panel.events, near = ((view.to - view.from) / plot) * 2;
      for (const n of panel.lanes[r][wanted]) {
        if (e.start[n] - near > t) break;
        if (e.start[n] + e.took[n] + near >= t) return words(panel, n);
      }
      return [`${panel.bubble.length ? "idle" : "nothing of this sibling"} on rank ${r}, ${panel.name}`, `at ${seconds(Math.max(0, t))}`];
    }
    if (data.memory && py >= data.memory.top) {
      const r = Math.floor((py - data.memory.top) / memoryRow);
      if (r < ranks) {
        const [times, sizes] = data.memory.curves[r];
        let at = 0;
        while (at + 1 < times.length && times[at + 1] <= t) at++;
        return [`${bytes(sizes[at])} on rank ${r}`, `at ${seconds(Math.max(0, t))}`];
      }
    }
    return null;
  }

  // ---- hands

  function show(from, to) {
    const least = Math.max(data.span / 1e5, 10), most = data.span;
    const long = Math.min(Math.max(to - from, least), most);
    from = Math.min(Math.max(from + (to - from - long) / 2, 0), data.span - long);
    view.from = from;
    view.to = from + long;
    draw();
  }
  function zoom(factor, at = (view.from + view.to) / 2) {
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }
  function move(share) {
    const by = (view.to - view.from) * share;
    const from = Math.min(Math.max(view.from + by, 0), data.span - (view.to - view.from));
    show(from, from + view.to - view.from);
  }
  function choose(rank, step, panel = chosen ? chosen.panel : 0) {
    const known = chosen && chosen.rank === rank && chosen.panel === panel;
    const lane = data.panels[panel].lanes[rank][0], e = data.panels[panel].events;
    if (!lane.length) return;
    const t = chosen ? data.panels[chosen.panel].events.start[data.panels[chosen.panel].lanes[chosen.rank][0][chosen.at]] : view.from;
    const at = known ? chosen.at + step : first(e, lane, t);
    chosen = { panel, rank, at: Math.min(Math.max(at, 0), lane.length - 1) };
    const n = lane[chosen.at], middle = e.start[n] + e.took[n] / 2, half = (view.to - view.from) / 2;
    if (e.start[n] < view.from || e.start[n] + e.took[n] > view.to) show(middle - half, middle + half);
    else draw();
    told.textContent = words(data.panels[panel], n).join("; ");
  }
  function rankBy(step) {
    const panels = data.panels.length;
    const place = chosen ? chosen.panel * ranks + chosen.rank + step : 0;
    const bounded = Math.min(Math.max(place, 0), panels * ranks - 1);
    choose(bounded % ranks, 0, Math.floor(bounded / ranks));
  }

  const actions = {
    in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.25), right: () => move(0.25),
    all: () => { chosen = null; told.textContent = "\u00a0"; show(0, data.span); },
  };
  for (const button of document.querySelectorAll("button[data-do]")) {
    button.addEventListener("click", () => actions[button.dataset.do]());
  }
  const keys = {
    "+": actions.in, "=": actions.in, "-": actions.out, _: actions.out, ArrowLeft: actions.left, ArrowRight: actions.right,
    0: actions.all, Home: actions.all, Escape: () => { chosen = null; draw(); },
    ".": () => choose(chosen ? chosen.rank : 0, 1), ",": () => choose(chosen ? chosen.rank : 0, -1),
    ArrowUp: () => rankBy(-1), ArrowDown: () => rankBy(1),
  };
  host.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  host.addEventListener("wheel", (event) => {
    const mine = event.ctrlKey || event.metaKey || document.activeElement === host;
    if (!mine && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return; // the page scrolls
    event.preventDefault();
    const px = event.clientX - host.getBoundingClientRect().left;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / plot);
    else zoom(1.0015 ** event.deltaY, time(px));
  }, { passive: false });
  host.addEventListener("dblclick", (event) => zoom(0.4, time(event.clientX - host.getBoundingClientRect().left)));

  let held = null;
  host.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    held = { x: event.clientX, from: view.from, to: view.to };
    host.setPointerCapture(event.pointerId);
    host.focus({ preventScroll: true });
  });
  host.addEventListener("pointermove", (event) => {
    const box = host.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    if (held) {
      host.classList.add("moving");
      const by = ((held.x - event.clientX) / plot) * (held.to - held.from);
      const from = Math.min(Math.max(held.from + by, 0), data.span - (held.to - held.from));
      show(from, from + held.to - held.from);
    }
    const inside = px >= LEFT && px <= LEFT + plot;
    cursor.setAttribute("d", inside ? `M${Math.round(px) + 0.5} 0V${axis.bottom}` : "");
    const lines = inside && !held ? under(px, py) : null;
    tip.hidden = !lines;
    if (lines) {
      tip.textContent = lines.join("\n");
      tip.style.left = Math.min(px + 14, width - tip.offsetWidth - 4) + "px";
      tip.style.top = py + 18 + "px";
    }
  });
  const release = () => { held = null; host.classList.remove("moving"); };
  host.addEventListener("pointerup", release);
  host.addEventListener("pointercancel", release);
  host.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("d", ""); });

  build();
  new ResizeObserver(() => { if (host.clientWidth !== width) build(); }).observe(host);
})();
