"use strict";
(() => {
  const by = id => document.getElementById(id);
  const make = (tag, props = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), props);
    node.append(...children);
    return node;
  };
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

  // ---------------------------------------------------------------- tables that sort
  const numberOf = text => /^[+\-\u2212]?[\d.,]+/.test(text) ? parseFloat(text.replace("\u2212", "-").replace(/,/g, "")) : NaN;
  function sortBy(table, column, isUp) {
    const rows = [...table.rows].slice(1), cell = row => row.cells[column]?.textContent.trim() ?? "";
    const isLast = row => /^peak allocated$/.test(row.cells[0]?.textContent ?? "");  // a sum stays below
    rows.sort((a, b) => {
      if (isLast(a) !== isLast(b)) return isLast(a) ? 1 : -1;
      const [x, y] = [numberOf(cell(a)), numberOf(cell(b))];
      const order = Number.isNaN(x) || Number.isNaN(y) ? cell(a).localeCompare(cell(b)) : x - y;
      return isUp ? order : -order;
    });
    rows.forEach(row => row.parentNode.append(row));
    [...table.rows[0].cells].forEach((th, i) => th.setAttribute("aria-sort", i !== column ? "none" : isUp ? "ascending" : "descending"));
  }
  for (const table of document.querySelectorAll("table:not(.live)")) {
    if (table.rows.length < 3) continue;
    [...table.rows[0].cells].forEach((th, column) => {
      if (!th.textContent) return;
      const button = make("button", { type: "button", textContent: th.textContent });
      button.addEventListener("click", () => sortBy(table, column, th.getAttribute("aria-sort") === "descending"));
      th.replaceChildren(button);
    });
  }

  // ---------------------------------------------------------------- one step
  const holder = by("step-data");
  if (!holder) return;
  const data = JSON.parse(holder.textContent), UNIT = 512, last = data.points - 1;
  const isLarge = data.peak_bytes >= 2 ** 30, SIZE = isLarge ? 2 ** 30 : 2 ** 20, WORD = isLarge ? "GiB" : "MiB";
  const size = (units, digits = isLarge ? 3 : 2) => (units * UNIT / SIZE).toFixed(digits);
  const said = (units, digits) => units * UNIT < SIZE / 100 && units ? units / 2 + " KiB" : size(units, digits) + " " + WORD;
  const AREAS = ["params", "grads", "optimizer", "activations", "buckets", "gathered", "temporaries", "rest"];
  const areaOf = data.kinds.map(kind => Math.max(0, AREAS.includes(kind) ? AREAS.indexOf(kind) : AREAS.length - 1));
  let start, stop, site, units, reservedAt, reservedUnits, levels, totals, reserved;
  let cursor = data.peak, low = 0, high = last, hover = null, picked = null, opened = [], order = [1, false];

  async function load() {
    const packed = Uint8Array.from(atob(data.columns), c => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const all = new Uint32Array(await new Response(stream).arrayBuffer());
    const n = data.rows, m = data.changes;
    [start, stop, site, units] = [0, 1, 2, 3].map(i => all.subarray(i * n, i * n + n));
    reservedAt = all.subarray(4 * n, 4 * n + m);
    reservedUnits = all.subarray(4 * n + m);
    levels = AREAS.map(() => new Float64Array(data.points + 1));
    for (let i = 0; i < n; i++) {
      const level = levels[areaOf[data.sites[site[i]][0]]];
      level[start[i]] += units[i];
      level[stop[i]] -= units[i];
    }
    totals = new Float64Array(data.points);
    for (const level of levels)
      for (let i = 0, sum = 0; i < data.points; i++) { sum += level[i]; level[i] = sum; totals[i] += sum; }
    reserved = new Float64Array(data.points);
    for (let i = 0, at = 0, now = 0; i < data.points; i++) {
      while (at < m && reservedAt[at] <= i) now = reservedUnits[at++];
      reserved[i] = now;
    }
  }

  // ---------------------------------------------------------------- the chart
  const canvas = by("areas"), style = () => getComputedStyle(document.documentElement);
  const colours = {};
  function readColours() {
    for (const area of AREAS) {
      const probe = make("i", { className: area });
      canvas.parentNode.append(probe);
      colours[area] = getComputedStyle(probe).backgroundColor;
      probe.remove();
    }
    for (const name of ["ink", "muted", "line", "page", "box"]) colours[name] = style().getPropertyValue("--" + name).trim();
  }
  const LEFT = 52, TOP = 30, BOTTOM = 34;
  let wide = 0, tall = 0, top = 1;
  // Whole pixels: a column of one pixel that is spread over two has half of its colour.
  const x = point => Math.round(LEFT + (wide - LEFT - 8) * (point - low) / Math.max(1, high + 1 - low));
  const y = level => tall - BOTTOM - (tall - BOTTOM - TOP) * level / top;
  const pointAt = px => clamp(Math.floor(low + (px - LEFT) / (wide - LEFT - 8) * (high + 1 - low)), low, high);

  // For every pixel the fullest of its events, so that no peak is lost.
  function columns() {
    const num = Math.min(high + 1 - low, Math.max(1, Math.floor(wide - LEFT - 8))), found = [];
    for (let c = 0; c < num; c++) {
      const from = low + Math.floor(c * (high + 1 - low) / num), to = low + Math.floor((c + 1) * (high + 1 - low) / num);
      let best = from;
      for (let i = from + 1; i < to; i++) if (totals[i] > totals[best]) best = i;
      found.push([from, best]);
    }
    return found;
  }
  function draw() {
    const ratio = Math.max(devicePixelRatio || 1, matchMedia("print").matches ? 3 : 1), box = canvas.getBoundingClientRect();
    wide = box.width; tall = box.height;
    canvas.width = wide * ratio; canvas.height = tall * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    const found = columns();
    let highest = 1;
    for (const [, best] of found) highest = Math.max(highest, totals[best], reserved[best]);
    const limit = data.limit_bytes / UNIT, hasLimit = limit > 0 && limit < 1.5 * highest;
    top = 1.08 * (hasLimit ? Math.max(limit, highest) : highest);
    drawGrid(pen);
    const floor = new Float64Array(found.length);
    AREAS.forEach((area, a) => {
      pen.fillStyle = colours[area];
      pen.beginPath();
      const upper = found.map(([from, best], c) => [from, floor[c] + levels[a][best]]);
      trace(pen, upper, true);
      for (let c = found.length - 1; c >= 0; c--) {
        pen.lineTo(x(c + 1 < found.length ? found[c + 1][0] : high + 1), y(floor[c]));
        pen.lineTo(x(found[c][0]), y(floor[c]));
      }
      pen.fill();
      upper.forEach(([, level], c) => { floor[c] = level; });
    });
    pen.strokeStyle = colours.ink; pen.lineWidth = 1.5;
    pen.setLineDash([5, 3]); pen.beginPath();
    trace(pen, found.map(([from, best]) => [from, reserved[best]]), true);
    pen.stroke(); pen.setLineDash([]);
    if (hasLimit) {
      pen.lineWidth = 2.5; pen.beginPath(); pen.moveTo(LEFT, y(limit)); pen.lineTo(wide - 8, y(limit)); pen.stroke();
      label(pen, data.gpu + ": " + said(limit, 2), LEFT + 4, y(limit) - 4);
    }
    drawPhases(pen); drawPicked(pen); drawCursor(pen);
    canvas.dataset.view = low + " " + high;
    if (data.refused_bytes && high === last) {
      const text = "OOM: " + said(data.refused_bytes / UNIT, 2) + " more";
      label(pen, text, wide - 12 - pen.measureText(text).width, TOP + 12);
    }
  }
  function trace(pen, steps, isFirst) {
    steps.forEach(([from, level], c) => {
      if (!c && isFirst) pen.moveTo(x(from), y(level)); else pen.lineTo(x(from), y(level));
      pen.lineTo(x(c + 1 < steps.length ? steps[c + 1][0] : high + 1), y(level));
    });
  }
  function label(pen, text, left, bottom) {
    const width = pen.measureText(text).width;
    pen.fillStyle = colours.page; pen.fillRect(left - 2, bottom - 12, width + 4, 15);
    pen.fillStyle = colours.ink; pen.fillText(text, left, bottom);
  }
  function drawGrid(pen) {
    const rough = top * UNIT / SIZE / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= rough);
    pen.textAlign = "right"; pen.lineWidth = 1;
    for (let value = 0; value * SIZE / UNIT <= top; value += step) {
      const at = y(value * SIZE / UNIT);
      pen.strokeStyle = colours.line; pen.beginPath(); pen.moveTo(LEFT, at); pen.lineTo(wide - 8, at); pen.stroke();
      pen.fillStyle = colours.ink; pen.fillText(+value.toPrecision(6) + "", LEFT - 5, at + 4);
    }
    pen.textAlign = "left"; pen.fillText(WORD, 2, 12);
    pen.fillText("event " + low, LEFT, tall - 4);
    pen.textAlign = "right"; pen.fillText(String(high), wide - 8, tall - 4); pen.textAlign = "left";
  }
  function drawPhases(pen) {
    for (const [name, from, to] of data.spans) {
      const [a, b] = [clamp(x(from), LEFT, wide - 8), clamp(x(to), LEFT, wide - 8)];
      if (b <= a) continue;
      pen.fillStyle = colours.box; pen.strokeStyle = colours.ink; pen.lineWidth = .8;
      pen.fillRect(a, 2, b - a, 19); pen.strokeRect(a, 2, b - a, 19);
      const text = [name, name[0]].find(t => pen.measureText(t).width + 4 < b - a);
      pen.fillStyle = colours.ink;
      if (text) { pen.textAlign = "center"; pen.fillText(text, (a + b) / 2, 16); pen.textAlign = "left"; }
    }
  }
  function drawPicked(pen) {  // lifetimes below the axis
    if (picked === null) return;
    pen.fillStyle = colours.ink;
    for (let i = 0; i < data.rows; i++) {
      if (!picked(i) || stop[i] <= low || start[i] > high) continue;
      const a = clamp(x(start[i]), LEFT, wide - 8), b = clamp(x(stop[i]), LEFT, wide - 8);
      pen.fillRect(a, tall - BOTTOM + 4, Math.max(1, b - a), 7);
    }
  }
  function drawCursor(pen) {
    for (const [point, dash] of [[cursor, []], [hover, [2, 3]]]) {
      if (point === null || point < low || point > high) continue;
      const at = (x(point) + x(point + 1)) / 2;
      for (const [colour, width] of [[colours.page, 4], [colours.ink, 1.8]]) {
        pen.strokeStyle = colour; pen.lineWidth = width; pen.setLineDash(dash);
        pen.beginPath(); pen.moveTo(at, TOP - 6); pen.lineTo(at, tall - BOTTOM + 3); pen.stroke();
      }
      pen.setLineDash([]);
    }
  }

  // ---------------------------------------------------------------- what is live
  const lineOf = ([, , , , line, caller]) => caller ? caller + ", backward of " + line : line;
  const when = (from, to) => (from ? "event " + from : "before the step") + " to " + (to > last ? "after the step" : "event " + to);
  const phaseAt = point => (data.spans.find(([, from, to]) => from < point && point <= to) ?? [""])[0];
  function live(point) {
    const found = [];
    for (let i = 0; i < data.rows; i++) if (start[i] <= point && point < stop[i]) found.push(i);
    return found;
  }
  // The tensor drawn at a height: those of one kind are stacked in the order of their allocation.
  function tensorAt(point, level) {
    let a = 0, floor = 0;
    while (a < AREAS.length && floor + levels[a][point] <= level) floor += levels[a++][point];
    if (a === AREAS.length) return null;
    for (const i of live(point)) {
      if (areaOf[data.sites[site[i]][0]] !== a) continue;
      floor += units[i];
      if (floor > level) return i;
    }
    return null;
  }
  const words = i => {
    const place = data.sites[site[i]], line = lineOf(place);
    return [said(units[i]) + " " + data.kinds[place[0]], place[1] || "outside of modules", place[2], line,
      data.sources[place[4]] ?? "", when(start[i], stop[i])].filter(Boolean);
  };
  function changeAt(point) {
    for (let i = 0; i < data.rows; i++) {
      if (point && start[i] === point) return "allocates " + words(i).join(", ");
      if (point && stop[i] === point) return "frees " + words(i).join(", ");
    }
    return "the step begins";
  }
  function showNow() {
    const phase = phaseAt(cursor);
    by("now").textContent = "Event " + cursor + " of " + last + (phase ? " (" + phase + ")" : "") + ": " + said(totals[cursor])
      + " allocated, " + said(reserved[cursor]) + " reserved" + (cursor === data.peak ? ", the peak" : "") + "; " + changeAt(cursor)
      + (cursor === last && data.refused_bytes ? "; then OOM: " + said(data.refused_bytes / UNIT) + " more are requested" : "") + ".";
    by("at").value = cursor;
    by("at").setAttribute("aria-valuetext", "event " + cursor + (phase ? ", " + phase : "") + ", " + said(totals[cursor]) + " allocated");
    by("legend").replaceChildren(...AREAS.flatMap((area, a) => levels[a].some(v => v > 0)
      ? [make("li", {}, make("i", { className: area }), area + " " + said(levels[a][cursor]))] : []));
  }

  // ---------------------------------------------------------------- flame graph
  function pathOf(place) {
    const [, name, op, phase, line, caller] = place, module = by("rows").value === "layers" ? layers(name) : name;
    const inner = [...(module ? module.split(".") : ["outside of modules"])];
    if (by("by").value === "module") return [...inner, op || phase || "setup"];
    return [caller || line || "no line", ...(caller ? ["backward of " + line] : []), module || "outside of modules", op || "setup"];
  }
  function tree(rows) {
    const root = { name: "allocated", units: 0, kinds: {}, children: new Map() };
    const places = new Map();
    for (const i of rows) places.set(site[i], (places.get(site[i]) ?? 0) + units[i]);
    for (const [place, held] of places) {
      const area = AREAS[areaOf[data.sites[place][0]]];
      let node = root;
      const add = () => { node.units += held; node.kinds[area] = (node.kinds[area] ?? 0) + held; };
      add();
      for (const name of pathOf(data.sites[place])) {
        if (!node.children.has(name)) node.children.set(name, { name, units: 0, kinds: {}, children: new Map() });
        node = node.children.get(name);
        add();
      }
    }
    return root;
  }
  function drawFlame(rows) {
    let root = tree(rows);
    const shown = [];
    opened = opened.filter(name => { const next = root.children.get(name); if (next) { shown.push(root); root = next; } return next; });
    const flame = by("flame"), focus = flame.contains(document.activeElement) ? document.activeElement.dataset.path : null;
    flame.replaceChildren();
    let depth = 0;
    const place = (node, left, width, level, path) => {
      depth = Math.max(depth, level);
      const area = Object.entries(node.kinds).sort((a, b) => b[1] - a[1])[0]?.[0] ?? "rest";
      const text = node.name + " " + said(node.units);
      const kinds = Object.entries(node.kinds).map(([kind, held]) => kind + " " + said(held)).join(", ");
      const button = make("button", { type: "button", className: area, textContent: text, title: text + ": " + kinds, tabIndex: -1 });
      button.setAttribute("aria-label", text + ": " + kinds);
      Object.assign(button.style, { left: 100 * left + "%", width: 100 * width + "%", top: 1.55 * level + "rem" });
      Object.assign(button.dataset, { path: path.join("\u0001"), level });
      button.addEventListener("click", () => { opened = path.slice(); follow(); });
      flame.append(button);
    };
    shown.forEach((node, level) => place(node, 0, 1, level, opened.slice(0, level)));
    const descend = (node, left, width, level, path) => {
      place(node, left, width, level, path);
      let at = left;
      for (const child of [...node.children.values()].sort((a, b) => b.units - a.units)) {
        const share = width * child.units / Math.max(1, node.units);
        if (share > 0.003) descend(child, at, share, level + 1, [...path, child.name]);
        at += share;
      }
    };
    descend(root, 0, 1, shown.length, opened);
    flame.style.height = 1.55 * (depth + 1) + "rem";
    const again = [...flame.children].find(b => b.dataset.path === focus);
    (again ?? flame.children[shown.length]).tabIndex = 0;
    if (focus !== null) (again ?? flame.children[shown.length]).focus();
  }
  function moveInFlame(event) {
    const all = [...by("flame").children], at = document.activeElement, level = +at.dataset.level;
    const left = parseFloat(at.style.left), row = n => all.filter(b => +b.dataset.level === n);
    const same = row(level), place = same.indexOf(at);
    const next = { ArrowLeft: same[place - 1], ArrowRight: same[place + 1],
      ArrowUp: row(level - 1).findLast(b => parseFloat(b.style.left) <= left + 1e-9),
      ArrowDown: row(level + 1).find(b => b.dataset.path.startsWith(at.dataset.path)) }[event.key];
    if (event.key === "Escape" && opened.length) { opened.pop(); follow(); event.preventDefault(); }
    if (event.key.startsWith("Arrow")) event.preventDefault();
    if (next) { at.tabIndex = -1; next.tabIndex = 0; next.focus(); }
  }

  // ---------------------------------------------------------------- table
  const COLUMNS = ["held for", WORD, "tensors", "module", "operator", "line", "live"];
  const MAX = 100, layers = module => module.replace(/\.\d+(?=\.|$)/g, ".*");
  let together = null;  // number of a site with its layers together, by the number of the site
  function keyFor(rows) {
    if (rows === "tensors") return i => i;
    if (rows === "places") return i => site[i];
    const numbers = new Map();
    together ??= data.sites.map(([kind, module, ...rest]) => {
      const name = JSON.stringify([kind, layers(module), ...rest]);
      return numbers.get(name) ?? numbers.set(name, numbers.size).get(name);
    });
    return i => together[site[i]];
  }
  function drawTable(rows) {
    const groups = new Map(), keyOf = keyFor(by("rows").value), isLayers = by("rows").value === "layers";
    for (const i of rows) {
      const key = keyOf(i), group = groups.get(key);
      if (!group) { groups.set(key, { key, place: data.sites[site[i]], units: units[i], count: 1, from: start[i], to: stop[i] }); continue; }
      group.units += units[i]; group.count++;
      group.from = Math.min(group.from, start[i]); group.to = Math.max(group.to, stop[i]);
    }
    const cells = g => [data.kinds[g.place[0]], g.units, g.count, isLayers ? layers(g.place[1]) : g.place[1], g.place[2],
      lineOf(g.place), g.from];
    const [column, isUp] = order;
    const sorted = [...groups.values()].map(g => [g, cells(g)]).sort(([, a], [, b]) => {
      const found = typeof a[column] === "number" ? a[column] - b[column] : a[column].localeCompare(b[column]);
      return isUp ? found : -found;
    });
    by("live").tBodies[0].replaceChildren(...sorted.slice(0, MAX).map(([g, c]) => {
      const button = make("button", { type: "button", textContent: c[0], title: "mark its lifetime in the chart" });
      const isOn = picked !== null && picked.key === g.key;
      button.setAttribute("aria-pressed", isOn);
      button.addEventListener("click", () => {
        const key = g.key;
        picked = isOn ? null : Object.assign(i => keyOf(i) === key, { key });
        follow();
      });
      const line = make("td", { className: "text", textContent: c[5], title: data.sources[g.place[4]] ?? "" });
      const row = make("tr", { className: isOn ? "on" : "" }, make("td", { className: "text" }, make("i", { className: "key " + c[0] }), button),
        make("td", { textContent: size(c[1]) }), make("td", { textContent: c[2] }), make("td", { className: "text", textContent: c[3] }),
        make("td", { className: "text", textContent: c[4] }), line, make("td", { className: "text", textContent: when(g.from, g.to) }));
      return row;
    }));
    const rest = sorted.slice(MAX);
    by("more").textContent = rest.length ? "The first " + MAX + "; " + rest.length + " more hold "
      + said(rest.reduce((sum, [g]) => sum + g.units, 0)) + "." : "";
    by("live").tHead.replaceChildren(make("tr", {}, ...COLUMNS.map((name, i) => {
      const button = make("button", { type: "button", textContent: name });
      button.addEventListener("click", () => {
        order = [i, order[0] === i ? !order[1] : ![1, 2].includes(i)];
        drawTable(live(cursor));
        by("live").tHead.rows[0].cells[i].firstChild.focus();
      });
      const th = make("th", { className: [1, 2].includes(i) ? "" : "text" }, button);
      th.setAttribute("aria-sort", i !== column ? "none" : isUp ? "ascending" : "descending");
      return th;
    })));
  }

  // ---------------------------------------------------------------- moves
  function follow() {
    if (cursor < low || cursor > high) {
      const width = high - low;
      low = clamp(cursor - Math.floor(width / 2), 0, last - width); high = low + width;
    }
    const rows = live(cursor);
    draw(); showNow(); drawFlame(rows); drawTable(rows);
  }
  function go(point) { cursor = clamp(point, 0, last); follow(); }
  function zoom(factor, centre = cursor) {
    const width = clamp(Math.round((high - low) * factor), Math.min(last, 8), last), share = (centre - low) / Math.max(1, high - low);
    low = clamp(Math.round(centre - share * width), 0, last - width); high = low + width;
    draw();
  }
  function whole() { low = 0; high = last; draw(); }
  function phase(step) {
    const ends = [...new Set([0, ...data.spans.flatMap(([, from, to]) => [from, to]), last])].sort((a, b) => a - b);
    go((step > 0 ? ends.find(e => e > cursor) : ends.findLast(e => e < cursor)) ?? cursor);
  }
  const keys = { p: () => go(data.peak), "+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), "0": whole,
    "[": () => phase(-1), "]": () => phase(1) };
  function listen() {
    const slider = by("at");
    slider.max = last;
    slider.addEventListener("input", () => go(+slider.value));
    slider.addEventListener("keydown", event => {
      const tenth = Math.max(1, Math.round((high - low) / 10)), step = { PageUp: tenth, PageDown: -tenth }[event.key];
      if (step) { event.preventDefault(); go(cursor + step); }
    });
    by("instrument").addEventListener("keydown", event => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
      if (by("flame").contains(event.target)) moveInFlame(event);
      if (event.key in keys) { event.preventDefault(); keys[event.key](); }
    });
    for (const [id, key] of [["to-peak", "p"], ["in", "+"], ["out", "-"], ["whole", "0"]]) by(id).addEventListener("click", keys[key]);
    by("by").addEventListener("change", () => { opened = []; follow(); });
    by("rows").addEventListener("change", () => { picked = null; opened = []; follow(); });
    let from = null;
    canvas.addEventListener("pointerdown", event => { from = event.offsetX; });
    canvas.addEventListener("pointermove", event => {
      hover = pointAt(event.offsetX);
      draw(); showTip(event.offsetX, event.offsetY);
      if (from !== null && event.buttons) {
        const pen = canvas.getContext("2d");
        pen.globalAlpha = .25; pen.fillStyle = colours.ink;
        pen.fillRect(Math.min(from, event.offsetX), TOP, Math.abs(event.offsetX - from), tall - TOP - BOTTOM);
        pen.globalAlpha = 1;
      }
    });
    canvas.addEventListener("pointerup", event => {
      const [a, b] = [from ?? event.offsetX, event.offsetX].sort((p, q) => p - q).map(pointAt);
      const isDrag = from !== null && Math.abs(event.offsetX - from) > 6 && b > a;
      from = null;
      if (isDrag) { low = a; high = Math.min(last, Math.max(b, a + 8)); draw(); } else go(pointAt(event.offsetX));
    });
    canvas.addEventListener("pointerleave", () => { hover = from = null; by("tip").hidden = true; draw(); });
    canvas.addEventListener("dblclick", whole);
    canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey) return;  // the wheel alone scrolls the page
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : .8, pointAt(event.offsetX));
    }, { passive: false });
    const redraw = () => { readColours(); draw(); };
    new ResizeObserver(redraw).observe(canvas);
    for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", redraw);
    for (const event of ["beforeprint", "afterprint"]) addEventListener(event, redraw);
  }
  function showTip(px, py) {
    const tip = by("tip"), level = (tall - BOTTOM - py) / (tall - BOTTOM - TOP) * top;
    const i = py > TOP ? tensorAt(hover, level) : null;
    tip.replaceChildren(make("b", { textContent: "event " + hover + ": " + said(totals[hover]) }),
      ...(i === null ? [] : words(i).map(text => make("div", { textContent: text }))));
    tip.hidden = false;
    tip.style.top = "2.2rem";
    Object.assign(tip.style, px > wide / 2 ? { left: "auto", right: wide - px + 14 + "px" } : { right: "auto", left: px + 14 + "px" });
  }

  load().then(() => {
    if (!data.sites.some(place => place[4])) by("by").replaceChildren(make("option", { value: "module", textContent: "module" }));
    readColours(); listen(); follow();
    document.body.dataset.ready = "yes";
  });
})();
