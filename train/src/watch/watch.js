"use strict";
// The page of runs. A served page asks its server for what is new; a report has everything inside. Both show the same.
(() => {
  const { html, number, draw, table, color, dash, swatch, plain } = kiln, $ = (id) => document.getElementById(id);
  const report = $("report") ? kiln.data("report") : null;
  const runs = new Map(); // by name: { summary, details, series: Map(key -> [[step, value]]), color, shown, bytes, file }
  const token = new URLSearchParams(location.search).get("token");
  let now = report ? report.written : 0, paused = false, colors = 0;

  // ---- what runs say
  const add = (summary) => {
    const run = runs.get(summary.name) || { series: new Map(), color: null, shown: true, bytes: 0, file: summary.file, details: null };
    run.summary = summary;
    runs.set(summary.name, run);
    return run;
  };
  // Many runs are more than a chart can show: of those that are there at first, the running ones and the newest are ticked.
  const FIRST = 8;
  const tick = () => sorted().forEach((run, i) => { run.shown = i < FIRST || run.summary.status === "running"; });
  // By step; of a step that is repeated, the last value counts. Of very many points every n-th is kept: a chart is not so wide.
  const most = (run) => Math.max(500, Math.min(10000, Math.floor(640000 / run.series.size)));
  const put = (points, step, value, most) => {
    let [from, to] = [0, points.length];
    while (from < to) { const m = (from + to) >> 1; points[m][0] < step ? (from = m + 1) : (to = m); }
    if (from < points.length && points[from][0] === step) { points[from][1] = value; return; }
    points.seen = (points.seen ?? 0) + 1;
    points.every ??= 1;
    if (points.seen % points.every !== 0) return;
    points.splice(from, 0, [step, value]);
    if (points.length <= 2 * most) return;
    points.splice(0, points.length, ...points.filter((_, i) => i % 2 === 1));
    points.every *= 2;
  };
  const take = (run, some) => {
    for (const [key, points] of Object.entries(some)) {
      if (!run.series.has(key)) run.series.set(key, []);
      for (const [step, value] of points) put(run.series.get(key), step, value, most(run));
    }
  };
  // Everything that is asked for has the token that the page was opened with.
  const address = (path, query) => path + "?" + Object.entries(token === null ? query : { ...query, token }).map(([k, v]) => `${k}=${encodeURIComponent(v)}`).join("&");
  const ask = async (path, query = {}) => {
    const answer = await fetch(address(path, query));
    if (!answer.ok) throw new Error(`${path}: ${answer.status} ${(await answer.text()).trim()}`);
    return answer.json();
  };
  const PARTS = 8;
  const own = (object, key) => (object && Object.hasOwn(object, key) ? object[key] : undefined);
  // What is wrong with one run is said there, and keeps no other from being shown.
  const caughtUp = (run) => catchUp(run).then((changed) => { run.lost = null; return changed; }, (e) => {
    if (e instanceof TypeError) throw e; // nobody answers
    const changed = run.lost !== e.message;
    run.lost = e.message;
    return changed;
  });
  const catchUp = async (run) => {
    const { name, bytes, file, status } = run.summary;
    if (file !== run.file || bytes < run.bytes) Object.assign(run, { series: new Map(), bytes: 0, file });
    const grew = run.bytes < bytes;
    // A long file comes over several rounds: other runs are drawn meanwhile.
    for (let parts = 0; run.bytes < bytes && parts < PARTS; parts++) {
      const part = await ask("/api/metrics", { run: name, from: run.bytes });
      take(run, part.points);
      if (part.next === run.bytes) break;
      run.bytes = part.next;
    }
    const unknown = [...run.series.keys()].some((key) => !own(run.details?.metrics, key));
    if (!run.details || unknown || run.status !== status) run.details = await ask("/api/details", { run: name });
    const changed = grew || run.status !== status;
    run.status = status;
    return changed;
  };
  const poll = async () => {
    const answer = await ask("/api/runs");
    now = answer.now;
    const there = new Set(answer.runs.map((s) => s.name));
    for (const name of runs.keys()) if (!there.has(name)) runs.delete(name);
    const first = runs.size === 0;
    answer.runs.forEach(add);
    if (first) tick();
    const changed = await load();
    const more = answer.more ? ` ${answer.more} more in this folder are not shown: open a folder in it, or one run.` : "";
    say(`${count(runs.size, "run")}, ${[...runs.values()].filter((r) => r.summary.status === "running").length} running.${more}`);
    rows();
    if (changed || there.size !== drawn) { drawn = there.size; all(); }
  };
  // What ticked runs recorded since they were asked last.
  const load = async () => (await Promise.all([...runs.values()].filter((run) => run.shown).map(caughtUp))).some(Boolean);
  // Ticks runs, or takes the ticks away; one that was not drawn before is read first.
  const show = (some, on) => {
    some.forEach((run) => { run.shown = on; });
    all();
    if (on && !report) load().then(all).catch(lost);
  };
  const lost = (e) => say(`kiln watch does not answer (${e.message}): what is shown may be old.`);
  let drawn = -1;
  const say = (text) => { if ($("state").textContent !== text) $("state").textContent = text; };
  const kind = (recipe) => recipe || "a recipe that cannot be read";
  const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

  // ---- the table of runs; cells are changed in place, so that the keyboard stays where it is
  const ago = (seconds) => seconds < 90 ? `${Math.max(0, Math.round(seconds))} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
  const value = (v, shown) => html("span", { "data-value": v }, shown);
  const since = (time) => [time ? ago(now - time) : "-"];
  const cells = (run) => {
    const s = run.summary;
    return [
      [html("span", { class: `status-${s.status}` }, s.status), s.problem ? html("span", { class: "problem" }, s.problem) : null],
      s.best ? [`${s.best.metric} `, value(s.best.value, s.best.shown), ` at step ${s.best.step}`] : ["-"],
      [value(s.step, s.steps ? `${s.step} of ${s.steps} ` : `${s.step}`), s.steps ? html("progress", { max: s.steps, value: Math.min(s.step, s.steps), "aria-label": `steps of ${s.name}` }) : null],
      [`${s.recipe} ${s.preset}`],
      s.per_second === null ? ["-"] : [value(s.per_second, number(s.per_second, "")), ` ${s.work}/s`],
      since(s.started),
      since(s.written),
    ];
  };
  const matches = (run) => run.summary.name.toLowerCase().includes($("filter").value.toLowerCase());
  // What a column is sorted by; what is not there comes last.
  const COLUMNS = {
    run: (s) => [s.name],
    status: (s) => [s.status],
    best: (s) => (s.best ? [s.best.metric, s.best.value] : [null]),
    step: (s) => [s.step],
    recipe: (s) => [s.recipe, s.preset],
    speed: (s) => [s.per_second],
    began: (s) => [s.started],
    last: (s) => [s.written],
  };
  const LARGEST_FIRST = ["step", "speed", "began", "last"];
  let column = null, down = false;
  const compare = (a, b, sign) => {
    for (const [i, v] of a.entries()) {
      if (v === b[i]) continue;
      if (v === null || b[i] === null) return v === null ? 1 : -1;
      return sign * (typeof v === "number" ? v - b[i] : v.localeCompare(b[i], "en", { numeric: true }));
    }
    return 0;
  };
  // Without a column: running ones, then the newest.
  const usual = (s) => [s.status === "running" ? 1 : 0, s.started ?? s.written ?? 0];
  const sorted = () => [...runs.values()].sort((a, b) => {
    const [p, q] = [a.summary, b.summary];
    return (column && compare(COLUMNS[column](p), COLUMNS[column](q), down ? -1 : 1)) || compare(usual(p), usual(q), -1) || compare([p.name], [q.name], 1);
  });
  // A click sorts, the next one turns the order around, and the next has the usual one again.
  const sort = (name) => {
    const first = LARGEST_FIRST.includes(name);
    if (column !== name) [column, down] = [name, first];
    else if (down === first) down = !down;
    else column = null;
    document.querySelectorAll("#runs th[data-sort]").forEach((th) => (th.dataset.sort === column ? th.setAttribute("aria-sort", down ? "descending" : "ascending") : th.removeAttribute("aria-sort")));
    all();
  };
  document.querySelectorAll("#runs th[data-sort]").forEach((th) => th.firstChild.addEventListener("click", () => sort(th.dataset.sort)));
  // The curves of the run under the pointer, or at the keyboard, stand out.
  let named = null;
  const point = (name) => {
    named = name;
    document.querySelectorAll("#curves [data-of]").forEach((e) => e.classList.toggle("pale", name !== null && e.dataset.of !== name));
  };
  const sample = (run) => (run.color === null ? html("span", { class: "none" }, swatch({ kind: "line" })) : swatch({ kind: "line", color: color(run.color), dashes: dash({}, run.color) }));
  const row = (run) => {
    const { name } = run.summary, box = html("input", { type: "checkbox", "aria-label": `Show ${name}` });
    box.addEventListener("change", () => show([run], box.checked));
    const tr = html("tr", { "data-run": name }, html("td", {}, box), html("th", { scope: "row" }), cells(run).map(() => html("td")));
    for (const [on, off] of [["pointerenter", "pointerleave"], ["focusin", "focusout"]]) {
      tr.addEventListener(on, () => point(run.shown ? name : null));
      tr.addEventListener(off, () => point(null));
    }
    return tr;
  };
  const rows = () => {
    const body = $("runs").tBodies[0], had = new Map([...body.rows].map((r) => [r.dataset.run, r])), list = sorted();
    const ordered = list.map((run) => had.get(run.summary.name) ?? row(run)), focused = ordered.findIndex((tr) => tr.contains(document.activeElement));
    // Moving a focused element would take the focus away: the others are put around it.
    if (ordered.some((tr, i) => tr !== body.rows[i])) ordered.forEach((tr, i) => (i < focused ? ordered[focused].before(tr) : i > focused ? body.append(tr) : null));
    list.forEach((run, i) => {
      const tr = ordered[i];
      had.delete(run.summary.name);
      tr.hidden = !matches(run);
      tr.querySelector("input").checked = run.shown;
      [[html("span", { class: "named" }, sample(run), html("span", {}, run.summary.name))], ...cells(run)].forEach((parts, at) => {
        const cell = tr.cells[at + 1], text = JSON.stringify(parts.map((p) => p?.outerHTML ?? p));
        if (cell.kilnText !== text) { cell.replaceChildren(...parts.filter((p) => p !== null).map((p) => (typeof p === "string" ? plain(p) : p))); cell.kilnText = text; }
      });
    });
    had.forEach((tr) => tr.remove());
    // Of a run alone the table is one line, and needs no place beside the charts.
    $("board").classList.toggle("one", runs.size === 1);
  };

  // ---- curves: by group, by metric; recipes that have a metric of the same name and unit share its chart, unless they are asked to be apart
  const smooth = (points, weight) => {
    let [sum, share] = [0, 0];
    return points.map(([x, y]) => { sum = sum * weight + y * (1 - weight); share = share * weight + 1 - weight; return [x, sum / share]; });
  };
  const MARKS = { training: null, validation: "hollow", "mean of the epoch": "full" };
  // What the optimizer is told, such as the learning rate, has no noise to be smoothed away.
  const line = (run, key, { of, group }) => {
    const points = run.series.get(key), weight = group === "Optimizer" || of !== "training" ? 0 : Number($("smoothing").value);
    return { of: run.summary.name, points, marks: MARKS[of], smooth: weight > 0 && points.length > 2 ? smooth(points, weight) : null };
  };
  const UNKNOWN = { of: "training", group: "More", order: 1e9, unit: "", better: "neither", about: "" };
  // { id, title, about, group, order, unit, series, floors } of every chart.
  const charts = () => {
    const found = new Map();
    for (const run of shown()) for (const key of [...run.series.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }))) {
      const m = own(run.details?.metrics, key) || { ...UNKNOWN, metric: key };
      const { name, recipe, floor } = run.summary, bare = key.replace(/^(val|epoch)_/, ""), member = m.metric !== bare && bare.startsWith(m.metric + ".") ? bare.slice(m.metric.length + 1) : null;
      const id = [m.metric, m.unit, m.better, $("apart").checked ? recipe : "", member === null ? "" : name].join("|");
      if (!found.has(id)) found.set(id, { id, title: m.metric + (member === null ? "" : `, ${name}`), meanings: new Map(), group: m.group, order: m.order, unit: m.unit, series: [], floors: new Map() });
      const chart = found.get(id), about = [m.about, m.better === "neither" ? "" : `${m.better} is better`].filter(Boolean).join("; ");
      chart.meanings.set(about, (chart.meanings.get(about) ?? new Set()).add(kind(recipe)));
      chart.order = Math.min(chart.order, m.order);
      if (m.metric === "loss" && floor) chart.floors.set(`${floor.name} ${number(floor.value, "")}`, floor.value);
      chart.series.push({ ...line(run, key, m), ...(member === null ? { name: name + (m.of === "training" ? "" : `, ${m.of}`), color: run.color, keyed: true } : { name: member, color: chart.series.length }) });
    }
    const list = [...found.values()], names = (some) => [...some].sort().join(", "), alike = list.filter((c) => list.some((other) => other !== c && other.title === c.title));
    for (const c of list) c.about = [...c.meanings].map(([about, recipes]) => (c.meanings.size > 1 ? `${names(recipes)}: ${about}` : about));
    for (const c of alike) c.title += ` of ${names(new Set([...c.meanings.values()].flatMap((recipes) => [...recipes])))}`;
    return list.sort((a, b) => a.order - b.order || b.series.length - a.series.length || a.title.localeCompare(b.title));
  };
  const isZero = (chart) => chart.series.every((s) => s.points.every((p) => p[1] === 0));
  const UNITS = ["bytes", "share", "seconds"];
  // So many are drawn; a page of thousands would not answer.
  const CHARTS = 200;
  // Headings, and a figure for every chart; those that are there already stay the same elements.
  const build = (box, whole) => {
    const list = whole.slice(0, CHARTS), had = new Map([...box.querySelectorAll("figure")].map((f) => [f.dataset.id, f])), parts = [];
    for (const group of new Set(list.map((c) => c.group))) {
      const [zero, some] = [true, false].map((is) => list.filter((c) => c.group === group && isZero(c) === is));
      parts.push(html("h2", {}, group), html("div", { class: "charts" }, some.map((c) => had.get(c.id) || html("figure", { "data-id": c.id }, html("figcaption")))));
      if (zero.length) parts.push(html("p", { class: "soft zero" }, `Always 0: ${zero.map((c) => c.title).join(", ")}.`));
    }
    if (whole.length > CHARTS) parts.push(html("p", { class: "soft" }, `${whole.length - CHARTS} more charts are not drawn: tick fewer runs.`));
    box.replaceChildren(...(list.length ? parts : [html("p", {}, "No run that is shown has records yet.")]));
  };
  const curves = () => {
    const box = $("curves"), list = charts(), drawn = new Map(list.map((c) => [c.id, c])), shape = JSON.stringify(list.map((c) => [c.id, c.title, c.group, isZero(c)]));
    // Moving a focused element would take the focus away: only where the charts are others.
    if (box.kilnShape !== shape) { build(box, list); box.kilnShape = shape; }
    for (const figure of box.querySelectorAll("figure")) {
      const c = drawn.get(figure.dataset.id), log = $("log").checked;
      const steps = c.series.flatMap((s) => [s.points[0][0], s.points[s.points.length - 1][0]]);
      if (figure.kilnAbout !== c.title + c.about) { figure.firstChild.replaceChildren(plain(c.title), ...c.about.map((about) => html("small", {}, about))); figure.kilnAbout = c.title + c.about; }
      for (const [name, at] of c.floors) c.series.push({ name, guide: true, dashed: true, color: "ink", points: [[Math.min(...steps), at], [Math.max(...steps), at]] });
      draw(figure, { kind: "plot", x: { label: "step", unit: "", log: false }, y: { label: UNITS.includes(c.unit) ? "" : c.unit, unit: UNITS.includes(c.unit) ? c.unit : "", log }, series: c.series });
    }
    point(named);
  };

  // ---- what is shown below
  // A run has a color from when it is drawn first, so that the first ones have those that are told apart best.
  const shown = () => sorted().filter((r) => r.shown && matches(r)).map((r) => { r.color ??= colors++; return r; });
  const text = (v) => v === undefined ? "-" : typeof v === "string" ? v || "\u201c\u201d" : JSON.stringify(v);
  const captioned = (caption, headers, body) => { const t = table(headers, body); t.setAttribute("aria-label", caption); t.firstChild.prepend(html("caption", {}, caption)); return t; };
  const settings = () => {
    const own = shown().filter((r) => r.details), parts = [];
    for (const recipe of [...new Set(own.map((r) => r.summary.recipe))].sort()) {
      const same = own.filter((r) => r.summary.recipe === recipe), keys = [...new Set(same.flatMap((r) => Object.keys(r.details.settings)))].sort();
      const differ = keys.filter((k) => new Set(same.map((r) => text(r.details.settings[k]))).size > 1);
      if (same.length > 1) parts.push(differ.length ? captioned(`Settings that differ between the runs of ${kind(recipe)}`, ["key", ...same.map((r) => r.summary.name)], differ.map((k) => [k, ...same.map((r) => text(r.details.settings[k]))])) : html("p", {}, `The runs of ${kind(recipe)} have the same settings.`));
    }
    for (const r of own.filter((one) => one.details.changed)) parts.push(html("details", { open: own.length === 1 }, html("summary", {}, `${r.summary.name}: ${count(r.details.changed.length, "setting")} unlike the preset ${r.summary.preset}`),
      captioned(`${r.summary.name} against its preset`, ["key", "here", "preset"], r.details.changed.map((c) => [c.key, text(c.value), text(c.preset ?? undefined)]))));
    return parts;
  };
  // Of every run that is drawn, what `one` makes of it. Where that fails, it is said of this run.
  const each = (what, one) => shown().filter((r) => r.details).flatMap((r) => {
    try { return one(r); } catch (e) { return [html("p", { class: "problem" }, `${r.summary.name}: its ${what} cannot be shown (${e.message}).`)]; }
  });
  const notes = () => shown().flatMap((r) => [...(r.details?.notes ?? []), ...(r.lost ? [r.lost] : [])].map((note) => html("p", { class: "problem" }, `${r.summary.name}: ${note}`)));
  const samples = () => each("samples", (r) => r.details.samples.slice(-3).reverse().map((s) => html("div", {}, html("h3", {}, `${r.summary.name}, step ${s.step}`), html("pre", {}, s.text))));
  const pictures = () => each("pictures", (r) => r.details.pictures.map((name) => html("figure", {}, html("figcaption", {}, `${r.summary.name}: ${name}`),
    html("img", { alt: `${name} of run ${r.summary.name}`, src: report ? r.details.inside[name] : address("/picture", { run: r.summary.name, name, at: r.summary.written }) }))));
  const receipts = () => each("receipts", (r) => !r.details.receipts ? [] : html("details", {}, html("summary", {}, r.summary.name), Object.entries(r.details.receipts).map(([program, list]) => {
    if (!Array.isArray(list)) return html("p", {}, `${list.data * list.tensor} ${program} (data ${list.data}, tensor ${list.tensor})${list.over ? ` over ${list.over}` : ""}`);
    const busy = list.filter((p) => p.applied + p.declined.length > 0);
    return captioned(`${r.summary.name}, program ${program}: ${busy.length} of ${list.length} passes have something to do`, ["pass", "mode", "sites", "applied", "declined", "notes"], busy.map((p) => [p.pass, p.mode, p.sites, p.applied, p.declined.length, [...new Set([...p.notes, ...p.declined.map((d) => (Array.isArray(d) ? d.join(": ") : typeof d === "string" ? d : JSON.stringify(d)))])].slice(0, 5).join("; ")]));
  })));
  const fill = (id, parts) => {
    const box = $(id), key = parts.map((p) => p.outerHTML).join("");
    if (box.kilnKey === key) return;
    const open = new Set([...box.querySelectorAll("details[open] > summary")].map((s) => s.textContent));
    box.replaceChildren(...parts);
    box.parentNode.hidden = parts.length === 0;
    box.querySelectorAll("details").forEach((d) => { if (open.has(d.firstChild.textContent)) d.open = true; });
    box.kilnKey = key;
  };
  const all = () => { curves(); rows(); fill("notes", notes()); fill("settings", settings()); fill("samples", samples()); fill("pictures", pictures()); fill("receipts", receipts()); };

  // ---- controls
  $("key").replaceChildren(...Object.entries(MARKS).map(([what, marks]) => html("span", {}, swatch({ kind: "line", color: "var(--ink)", marks }), what)));
  $("controls").addEventListener("submit", (e) => e.preventDefault());
  $("filter").addEventListener("input", all);
  for (const id of ["log", "apart"]) $(id).addEventListener("change", curves);
  $("smoothing").addEventListener("input", () => { $("smoothing-value").textContent = $("smoothing").value; curves(); });
  for (const [id, on] of [["all", true], ["none", false]]) $(id).addEventListener("click", () => show([...runs.values()].filter(matches), on));
  if (report) {
    for (const r of report.runs) Object.assign(add(r.summary), { details: r.details, series: new Map(Object.entries(r.series)) });
    tick();
    say(`${count(runs.size, "run")}, as of ${new Date(1000 * report.written).toISOString().slice(0, 16).replace("T", " ")} UTC, written by kiln ${report.version}.`);
    all();
    return;
  }
  $("pause").hidden = false;
  $("pause").addEventListener("click", () => { paused = !paused; $("pause").setAttribute("aria-pressed", paused); $("pause").textContent = paused ? "Go on" : "Pause"; });
  const again = async () => {
    if (!paused && !document.hidden) await poll().catch(lost);
    setTimeout(again, 2000);
  };
  again();
})();
