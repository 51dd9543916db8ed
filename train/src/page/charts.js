"use strict";
// Charts as inline SVG, drawn from JSON. Every chart has a legend that does not rely on color alone, is read with the arrow keys (as a slider), and
// has its numbers as a table below it. `kiln.draw(figure, chart)` draws one; figures that hold a chart are drawn when the page is there.
const kiln = (() => {
  // Control characters, and what turns the direction of writing, are seen and have no effect.
  const plain = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, (c) => `\\u{${c.charCodeAt(0).toString(16)}}`);
  const make = (ns) => (name, attributes = {}, ...children) => {
    const e = ns ? document.createElementNS(ns, name) : document.createElement(name);
    for (const [k, v] of Object.entries(attributes)) if (v !== null && v !== undefined && v !== false) e.setAttribute(k, v === true ? "" : v);
    e.append(...children.flat().filter((c) => c !== null && c !== undefined).map((c) => (typeof c === "string" ? plain(c) : c)));
    return e;
  };
  const html = make(null), svg = make("http://www.w3.org/2000/svg");
  const ok = (v) => typeof v === "number" && isFinite(v);

  // ---- numbers
  const scaled = (v, base, units) => {
    let u = 0;
    while (Math.abs(v) >= base - 0.5 && u + 1 < units.length) { v /= base; u++; }
    const a = Math.abs(v);
    return v.toFixed(u === 0 && Number.isInteger(v) ? 0 : a < 9.995 ? 2 : a < 99.95 ? 1 : 0) + units[u];
  };
  // As people read it; `unit` is "bytes", "share", "seconds", or "" for a plain number.
  const number = (v, unit) => {
    if (!ok(v)) return "-";
    const a = Math.abs(v);
    if (unit === "bytes") return scaled(v, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
    if (unit === "share") return (100 * v).toFixed(2) + "%";
    if (unit === "seconds") return a < 1e-3 ? trim((1e6 * v).toPrecision(4)) + " \u00b5s" : a < 1 ? trim((1e3 * v).toPrecision(4)) + " ms" : a < 120 ? trim(v.toPrecision(4)) + " s"
      : a < 7200 ? (v / 60).toFixed(1) + " min" : (v / 3600).toFixed(1) + " h";
    if (v === 0) return "0";
    if (a >= 1e15 || a < 1e-3) return Number(v.toPrecision(3)).toExponential();
    if (a >= 1e5) return scaled(v, 1000, ["", "K", "M", "G", "T"]);
    return trim(v.toPrecision(a >= 1e4 ? 5 : 4));
  };
  const trim = (s) => (s.includes(".") && !s.includes("e") ? s.replace(/\.?0+$/, "") : s);

  // ---- axes
  const ticks = (low, high, count, log, unit) => {
    if (log) {
      const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))], every = Math.ceil((to - from) / count), all = [];
      for (let e = from; e <= to; e += Math.max(1, every)) for (const m of to - from <= 2 ? [1, 2, 5] : [1]) all.push(m * 10 ** e);
      return all.filter((t) => t >= low * 0.999 && t <= high * 1.001);
    }
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw)), all = [];
    const step = unit === "bytes" ? 2 ** Math.ceil(Math.log2(raw)) : [1, 2, 5, 10].find((m) => m * power >= raw) * power;
    for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) all.push(Math.abs(t) < step * 1e-9 ? 0 : t);
    return all;
  };
  const range = (values, log, pad) => {
    let [low, high] = [Infinity, -Infinity];
    for (const v of values) if (ok(v) && (!log || v > 0)) { low = Math.min(low, v); high = Math.max(high, v); }
    if (low > high) return log ? [1, 10] : [0, 1];
    // What a number can hold has an end, at which a logarithm is infinite.
    const within = (v) => Math.max(Number.MIN_VALUE, Math.min(Number.MAX_VALUE, v));
    if (log) return (low === high ? [low / 2, high * 2] : [low / (1 + pad), high * (1 + pad)]).map(within);
    if (low === 0 && high === 0) return [0, 1];
    // What differs by rounding alone is a flat line.
    const size = Math.max(Math.abs(low), Math.abs(high)), middle = (low + high) / 2;
    if (high - low < 1e-5 * size) return [middle - 0.05 * size, middle + 0.05 * size];
    return [low - pad * (high - low), high + pad * (high - low)];
  };
  const scale = ([low, high], from, to, log) => {
    const f = log ? Math.log10 : (v) => v, [a, b] = [f(low), f(high)];
    return (v) => from + ((f(v) - a) / (b - a)) * (to - from);
  };
  // "1.50M" is "1.5M" on an axis, and "2.00 GiB" is "2 GiB".
  const axisNumber = (v, axis, step) => (axis.unit === "share" ? trim((100 * v).toPrecision(4)) + "%" : axis.unit ? number(v, axis.unit)
    : step && step < 1e-3 * Math.abs(v) && Math.abs(v) < 1e4 ? v.toFixed(Math.ceil(-Math.log10(step))) : Math.abs(v) >= 1e4 ? scaled(v, 1000, ["", "K", "M", "G", "T", "P"]) : number(v, "")).replace(/(\.\d*?)0+(\D*)$/, "$1$2").replace(/\.(\D*)$/, "$1");
  // The SVG with its axes, and where a value lies in it.
  const frame = (chart, width, xs, ys, height = Math.round(Math.max(260, Math.min(440, width / 2)))) => {
    const [left, right, top, bottom] = [64, 14, 24, 42], { x, y } = chart;
    const X = scale(xs, left, width - right, x.log), Y = scale(ys, height - bottom, top, y.log);
    const s = svg("svg", { viewBox: `0 0 ${width} ${height}`, height });
    const rows = ticks(...ys, 5, y.log, y.unit);
    for (const t of rows) s.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: Y(t), y2: Y(t) }), svg("text", { x: left - 6, y: Y(t) + 4, "text-anchor": "end" }, axisNumber(t, y, y.log ? 0 : rows[1] - rows[0])));
    for (const t of ticks(...xs, width < 500 ? 4 : 8, x.log, x.unit)) s.append(svg("line", { class: "axis", x1: X(t), x2: X(t), y1: height - bottom, y2: height - bottom + 4 }), svg("text", { class: "tick", x: X(t), y: height - bottom + 18, "text-anchor": "middle" }, axisNumber(t, x)));
    s.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }), svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, x.label), svg("text", { x: 2, y: 12 }, y.label));
    return { s, X, Y, left, right: width - right, top, bottom: height - bottom };
  };
  // Twelve colors, and the same again with other dashes: 48 lines in one chart are told apart.
  const HUES = 12, DASHES = [null, "9 4", "2 3", "10 3 2 3"];
  const color = (i) => (typeof i === "string" ? `var(--${i})` : `var(--c${i % HUES})`);
  const dash = (s, i) => (s.guide && s.dashed ? "1 3" : s.dashed ? "7 4" : DASHES[Math.floor(i / HUES) % DASHES.length]);
  // A circle on a line: "hollow" or "full".
  const mark = (cx, cy, stroke, marks) => svg("circle", { cx, cy, r: 3, stroke, "stroke-width": 1.5, fill: marks === "full" ? stroke : "var(--back)" });
  // How an entry of a legend is drawn: { color, kind: "line", "dots" or "fill", dashes, marks }.
  const swatch = ({ color, kind, dashes, marks }) => svg("svg", { class: "swatch", width: 22, height: 12, "aria-hidden": "true" },
    kind === "dots" ? svg("circle", { cx: 11, cy: 6, r: 4, fill: color }) : kind === "fill" ? svg("rect", { x: 4, width: 14, height: 12, fill: color })
      : [svg("line", { x1: 0, x2: 22, y1: 6, y2: 6, stroke: color, "stroke-width": 2, "stroke-dasharray": dashes }), marks ? mark(11, 6, color, marks) : null]);
  const legend = (entries) => entries.length < 1 ? null : html("ul", { class: "legend" }, entries.map((e) => html("li", {}, swatch(e), html("span", {}, e.name))));
  // A line to move over the values of x with pointer and arrow keys; `say` is what the chart says there: { head, parts: entries with a text each }.
  const reader = (f, label, at, say) => {
    const out = html("div", { class: "readout", "aria-hidden": "true" }), cursor = svg("line", { class: "cursor", y1: f.top, y2: f.bottom, visibility: "hidden" });
    if (at.length === 0) return out;
    let now = at.length - 1;
    const show = (i) => {
      now = Math.max(0, Math.min(at.length - 1, i));
      const px = f.X(at[now]);
      for (const k of ["x1", "x2"]) cursor.setAttribute(k, px);
      f.s.setAttribute("aria-valuenow", at[now]);
      const { head, parts } = say(at[now]);
      f.s.setAttribute("aria-valuetext", `${head}: ${parts.map((p) => p.text).join(", ")}`);
      return html("div", {}, html("span", {}, head), parts.map((p) => html("span", {}, swatch(p), p.text)));
    };
    Object.entries({ role: "slider", tabindex: 0, "aria-label": label, "aria-valuemin": at[0], "aria-valuemax": at[at.length - 1] }).forEach(([k, v]) => f.s.setAttribute(k, v));
    show(now);
    const visible = (i) => { out.replaceChildren(show(i)); cursor.setAttribute("visibility", "visible"); f.s.kilnAt = at[now]; };
    // Where a drawing was that this one takes the place of.
    f.s.kilnReturn = (x) => visible(Math.max(0, at.findLastIndex((one) => one <= x)));
    f.s.append(cursor);
    f.s.addEventListener("pointermove", (e) => {
      const px = (e.clientX - f.s.getBoundingClientRect().left) * (f.s.viewBox.baseVal.width / f.s.getBoundingClientRect().width);
      let [a, b] = [0, at.length - 1];
      while (b - a > 1) { const m = (a + b) >> 1; f.X(at[m]) <= px ? (a = m) : (b = m); }
      visible(Math.abs(f.X(at[a]) - px) <= Math.abs(f.X(at[b]) - px) ? a : b);
    });
    f.s.addEventListener("keydown", (e) => {
      const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: Math.ceil(at.length / 10), PageDown: -Math.ceil(at.length / 10), Home: -at.length, End: at.length }[e.key];
      if (by) { e.preventDefault(); visible(now + by); }
    });
    return out;
  };
  // Circles of a line at most: more would hide it.
  const MARKS = 24;
  // Of every pixel's points the first, the lowest, the highest and the last.
  const thin = (points, pixels) => {
    if (points.length <= 4 * pixels) return points;
    const size = Math.ceil(points.length / pixels), all = [];
    for (let i = 0; i < points.length; i += size) {
      const part = points.slice(i, i + size), by = part.slice().sort((a, b) => a[1] - b[1]);
      all.push(...new Set([part[0], by[0], by[by.length - 1], part[part.length - 1]].sort((a, b) => a[0] - b[0])));
    }
    return all;
  };
  const path = (points, X, Y) => points.map((p, i) => `${i ? "L" : "M"}${X(p[0]).toFixed(1)} ${Y(p[1]).toFixed(1)}`).join("");
  const table = (headers, rows) => html("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": headers.join(", ") }, html("table", {}, html("thead", {}, html("tr", {}, headers.map((h) => html("th", { scope: "col" }, h)))),
    html("tbody", {}, rows.map((r) => html("tr", {}, r.map((c) => html("td", { class: typeof c === "number" ? "number" : null }, c === null || c === undefined ? "" : String(c))))))));

  // ---- kinds: what is drawn, and the same as a table
  const kinds = {
    // Lines and dots over two axes, each perhaps logarithmic: curves, rooflines. Where a series has `smooth`, that is the line, its own points are pale,
    // and are what is said and listed.
    plot(chart, width, title) {
      const good = (p) => ok(p[0]) && ok(p[1]) && (!chart.x.log || p[0] > 0) && (!chart.y.log || p[1] > 0), all = chart.series.map((s) => s.points.filter(good));
      const xs = range(all.flat().map((p) => p[0]), chart.x.log, chart.x.log ? 0.3 : 0.01), ys = chart.y.range || range(all.flat().map((p) => p[1]), chart.y.log, chart.y.log ? 0.3 : 0.06);
      const f = frame(chart, width, xs, ys), clip = "c" + Math.random().toString(36).slice(2);
      f.s.append(svg("clipPath", { id: clip }, svg("rect", { x: f.left, y: f.top, width: f.right - f.left, height: f.bottom - f.top })));
      const g = svg("g", { "clip-path": `url(#${clip})` });
      chart.series.forEach((s, i) => {
        const c = color(s.color ?? i), points = all[i], own = svg("g", { "data-of": s.of });
        g.append(own);
        if (s.dots) points.forEach((p) => own.append(svg("circle", { cx: f.X(p[0]), cy: f.Y(p[1]), r: 4, fill: c, "fill-opacity": 0.75 }, svg("title", {}, `${p[2] ?? s.name}: ${number(p[0], chart.x.unit)}, ${number(p[1], chart.y.unit)}`))));
        else if (points.length === 1) own.append(svg("circle", { cx: f.X(points[0][0]), cy: f.Y(points[0][1]), r: 3, fill: c }));
        else {
          const line = (some, faint) => own.append(svg("path", { d: path(thin(some, width), f.X, f.Y), fill: "none", stroke: c, "stroke-width": faint ? 1 : 2, "stroke-opacity": faint ? 0.35 : 1, "stroke-dasharray": dash(s, s.color ?? i) }));
          line(points, Boolean(s.smooth));
          if (s.smooth) line(s.smooth.filter(good), false);
          const every = Math.ceil(points.length / MARKS);
          if (s.marks) points.filter((_, n) => (points.length - 1 - n) % every === 0).forEach((p) => own.append(mark(f.X(p[0]), f.Y(p[1]), c, s.marks)));
        }
      });
      f.s.append(g);
      const told = chart.series.map((s, i) => ({ s, by: new Map(all[i].map((p) => [p[0], p])) }));
      const at = [...new Set(told.filter((t) => !t.s.guide).flatMap((t) => [...t.by.keys()]))].sort((a, b) => a - b);
      const entry = (s, i) => ({ name: s.name, color: color(s.color ?? i), kind: s.dots ? "dots" : "line", dashes: dash(s, s.color ?? i), marks: s.marks });
      // As the lines lie, from the top.
      const there = (x) => told.flatMap((t, i) => { const p = t.by.get(x); return p ? [{ ...entry(t.s, i), y: p[1], text: `${p[2] ?? t.s.name} ${number(p[1], chart.y.unit)}` }] : []; });
      const say = (x) => ({ head: `${chart.x.label} ${number(x, chart.x.unit)}`, parts: there(x).sort((a, b) => b.y - a.y) });
      return [f.s, reader(f, title, at, say), legend(chart.series.map(entry).filter((_, i) => !chart.series[i].keyed))];
    },
    // Horizontal bars with an interval each, all from zero, or over a logarithmic axis.
    bars(chart, width, title) {
      const log = chart.x.log, ends = chart.bars.flatMap((b) => [b.value, b.low, b.high, ...(log ? [] : [0])]), [left, right, row, foot] = [6, 74, 38, 20], unit = chart.x.unit;
      // Over a logarithmic axis there is no zero: bars begin a power of ten below the smallest.
      let xs = range(ends, log, 0.02);
      if (log) xs = [xs[0] / 10, xs[1]];
      const X0 = scale(xs, left, width - right, log), zero = X0(log ? xs[0] : 0), X = (v) => (log && v <= 0 ? zero : X0(v)), bottom = chart.bars.length * row + 6, height = bottom + foot;
      const s = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${title}: ` + chart.bars.map((b) => `${b.name} ${b.shown ?? number(b.value, unit)}`).join(", ") });
      for (const t of ticks(...xs, width < 500 ? 4 : 8, log, unit)) s.append(svg("line", { class: "grid", x1: X(t), x2: X(t), y1: 0, y2: bottom }), svg("text", { class: "tick", x: Math.max(X(t), 24), y: bottom + 14, "text-anchor": "middle" }, axisNumber(t, chart.x)));
      chart.bars.forEach((b, i) => {
        const y = i * row + 4, [a, z] = [zero, X(ok(b.value) ? b.value : 0)].sort((p, q) => p - q);
        s.append(svg("text", { class: "name", x: left, y: y + 11 }, b.name), svg("line", { class: "axis", x1: zero, x2: zero, y1: y + 14, y2: y + 32 }), svg("rect", { x: a, y: y + 16, width: Math.max(1, z - a), height: 14, fill: color(b.color ?? 0), "fill-opacity": b.faint ? 0.4 : 0.9 }, svg("title", {}, b.note || b.name)),
          svg("text", { x: X(Math.max(...[b.value, b.high, 0].filter(ok))) + 6, y: y + 27 }, b.shown ?? number(b.value, unit)));
        if (ok(b.low) && ok(b.high)) for (const [x1, x2, y1, y2] of [[b.low, b.high, 23, 23], [b.low, b.low, 18, 28], [b.high, b.high, 18, 28]]) s.append(svg("line", { class: "cursor", x1: X(x1), x2: X(x2), y1: y + y1, y2: y + y2, "stroke-width": 1.5 }));
      });
      return [s, chart.x.label ? html("p", { class: "readout" }, chart.x.label) : null];
    },
    // Series stacked over shared values of x.
    area(chart, width, title) {
      const total = chart.at.map((_, i) => chart.series.reduce((sum, s) => sum + (s.values[i] || 0), 0));
      const f = frame(chart, width, chart.x.range || range(chart.at, false, 0), [0, range(total, false, 0.05)[1]]), below = chart.at.map(() => 0);
      chart.series.forEach((s, i) => {
        const low = chart.at.map((x, j) => [x, below[j]]), high = chart.at.map((x, j) => [x, (below[j] += s.values[j] || 0)]);
        f.s.append(svg("path", { d: path(high, f.X, f.Y) + path(low.reverse(), f.X, f.Y).replace("M", "L") + "Z", fill: color(s.color ?? i), "fill-opacity": 0.8 }, svg("title", {}, s.name)));
      });
      const index = new Map(chart.at.map((x, i) => [x, i]));
      const entries = chart.series.map((s, i) => ({ name: s.name, color: color(s.color ?? i), kind: "fill" }));
      const there = (x) => chart.series.flatMap((s, i) => { const v = s.values[index.get(x)]; return v ? [{ ...entries[i], text: `${s.name} ${number(v, chart.y.unit)}` }] : []; });
      const say = (x) => ({ head: `${chart.x.label} ${number(x, chart.x.unit)}, all ${number(total[index.get(x)], chart.y.unit)}`, parts: there(x) });
      return [f.s, reader(f, title, chart.at, say), legend(entries)];
    },
    // Rectangles over two axes, colored by group: what lies in memory where and for how long.
    boxes(chart, width, title) {
      const groups = [...new Set(chart.boxes.map((b) => b.group))], f = frame(chart, width, chart.x.range || range(chart.boxes.flatMap((b) => b.x), false, 0), range(chart.boxes.flatMap((b) => b.y), false, 0), 420);
      const out = html("p", { class: "readout" });
      chart.boxes.forEach((b) => {
        const r = svg("rect", { x: f.X(b.x[0]), y: f.Y(b.y[1]), width: Math.max(0.5, f.X(b.x[1]) - f.X(b.x[0])), height: Math.max(0.5, f.Y(b.y[0]) - f.Y(b.y[1])), fill: color(groups.indexOf(b.group)), "fill-opacity": 0.75, stroke: "var(--back)", "stroke-width": 0.5 }, svg("title", {}, `${b.name} (${b.group})`));
        r.addEventListener("pointerenter", () => { out.textContent = `${b.name} (${b.group}): ${number(b.y[1] - b.y[0], chart.y.unit)}, ${chart.x.label} ${b.x[0]} to ${b.x[1]}`; });
        f.s.append(r);
      });
      f.s.setAttribute("role", "img");
      f.s.setAttribute("aria-label", `${title}: ${chart.boxes.length} boxes; the table below has them`);
      return [f.s, out, legend(groups.map((g, i) => ({ name: g, color: color(i), kind: "fill" })))];
    },
  };
  const MOST = 1000;
  const tables = {
    plot(c) {
      const own = c.series;
      if (own.some((s) => s.dots)) return table(["name", c.x.label, c.y.label], own.flatMap((s) => s.points.map((p) => [p[2] ?? s.name, p[0], p[1]])).slice(0, MOST));
      const by = own.map((s) => new Map(s.points.map((p) => [p[0], p[1]]))), xs = [...new Set(own.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
      return table([c.x.label, ...own.map((s) => s.name)], xs.slice(-MOST).map((x) => [x, ...by.map((m) => m.get(x))]));
    },
    bars: (c) => table(["name", c.x.label || "value", "low", "high", "note"], c.bars.map((b) => [b.name, b.shown ?? b.value, b.low, b.high, b.note])),
    area: (c) => table([c.x.label, ...c.series.map((s) => s.name)], c.at.slice(0, MOST).map((x, i) => [x, ...c.series.map((s) => s.values[i])])),
    boxes: (c) => table(["name", "group", `${c.x.label} from`, "to", `${c.y.label} from`, "to"], c.boxes.slice(0, MOST).map((b) => [b.name, b.group, ...b.x, ...b.y])),
  };
  // Draws `chart` into a figure, again whenever its width changes; the figcaption stays.
  const draw = (figure, chart) => {
    const title = figure.querySelector("figcaption")?.firstChild?.textContent ?? "chart";
    const width = Math.max(280, figure.clientWidth), had = figure.querySelector(":scope > svg"), focused = had && had === document.activeElement;
    const held = had && (focused || had.matches(":hover")) ? had.kilnAt : undefined;
    figure.kilnChart = chart;
    figure.kilnWidth = figure.clientWidth;
    const drawn = html("div", {}, kinds[chart.kind](chart, width, title));
    figure.querySelectorAll(":scope > svg, :scope > .legend, :scope > .readout").forEach((e) => e.remove());
    const details = figure.querySelector(":scope > details") || html("details", {}, html("summary", {}, `Numbers of \u201c${title}\u201d`));
    const fill = () => { details.querySelector(".scroll")?.remove(); if (details.open) details.append(tables[figure.kilnChart.kind](figure.kilnChart)); };
    if (!details.parentNode) { figure.append(details); details.addEventListener("toggle", fill); }
    details.before(...drawn.childNodes);
    fill();
    const now = figure.querySelector(":scope > svg");
    if (focused) now.focus();
    if (held !== undefined) now.kilnReturn?.(held);
    if (!figure.kilnSeen) { figure.kilnSeen = new ResizeObserver(() => { if (figure.clientWidth && figure.clientWidth !== figure.kilnWidth) draw(figure, figure.kilnChart); }); figure.kilnSeen.observe(figure); }
  };
  const data = (id) => JSON.parse(document.getElementById(id).textContent);

  // ---- light and dark: as the system has it, until the button is pressed
  const dark = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
  let chosen = null;
  try { chosen = localStorage.getItem("kiln-theme"); } catch { /* not from disk, in some browsers */ }
  const theme = () => { root.dataset.theme = chosen || (dark.matches ? "dark" : "light"); };
  theme();
  dark.addEventListener("change", theme);
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => { button.textContent = root.dataset.theme === "dark" ? "Light colors" : "Dark colors"; };
    button.addEventListener("click", () => { chosen = root.dataset.theme === "dark" ? "light" : "dark"; try { localStorage.setItem("kiln-theme", chosen); } catch { /* as above */ } theme(); name(); });
    name();
    document.querySelectorAll("figure[data-chart]").forEach((f) => draw(f, data(f.dataset.chart)));
  });
  return { html, number, draw, data, table, color, dash, swatch, plain };
})();
