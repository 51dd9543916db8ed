"use strict";
// The page of runs. A served page asks its server for what is new; a report has everything inside. Both show the same.
(() => {
  const { html, number, draw, table, colour } = kiln, $ = (id) => document.getElementById(id);
  const report = $("report") ? kiln.data("report") : null;
  const runs = new Map(); // by name: { summary, details, series: Map(key -> [[step, value]]), color, shown, bytes, file }
  let now = report ? report.written : 0, paused = false;

  // ---- what runs say
  const add = (summary) => {
    const run = runs.get(summary.name) || { series: new Map(), color: runs.size, shown: true, bytes: 0, file: summary.file, details: null };
    run.summary = summary;
    runs.set(summary.name, run);
    return run;
  };
  // By step; of a step that is repeated, the last value counts.
  const put = (points, step, value) => {
    let at = points.length;
    while (at > 0 && points[at - 1][0] > step) at--;
    if (at > 0 && points[at - 1][0] === step) points[at - 1][1] = value;
    else points.splice(at, 0, [step, value]);
  };
  const take = (run, text) => {
    for (const line of text.split("\n")) {
      let record;
      try { record = JSON.parse(line); } catch { continue; }
      if (record === null || typeof record.step !== "number") continue;
      for (const [key, value] of Object.entries(record)) {
        if (key === "step" || typeof value !== "number") continue;
        if (!run.series.has(key)) run.series.set(key, []);
        put(run.series.get(key), record.step, value);
      }
    }
  };
  const ask = async (path, query = {}) => {
    const answer = await fetch(path + "?" + Object.entries(query).map(([k, v]) => `${k}=${encodeURIComponent(v)}`).join("&"));
    if (!answer.ok) throw new Error(`${path}: ${answer.status} ${(await answer.text()).trim()}`);
    return answer.json();
  };
  const catchUp = async (run) => {
    const { name, bytes, file, status } = run.summary;
    if (file !== run.file || bytes < run.bytes) Object.assign(run, { series: new Map(), bytes: 0, file });
    const grew = run.bytes < bytes;
    while (run.bytes < bytes) {
      const part = await ask("/api/metrics", { run: name, from: run.bytes });
      take(run, part.text);
      if (part.next === run.bytes) break;
      run.bytes = part.next;
    }
    const unknown = [...run.series.keys()].some((key) => !run.details?.metrics[key]);
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
    const changed = (await Promise.all(answer.runs.map((s) => catchUp(add(s))))).some(Boolean);
    say(`${count(runs.size, "run")}, ${[...runs.values()].filter((r) => r.summary.status === "running").length} running.`);
    rows();
    if (changed || there.size !== drawn) { drawn = there.size; all(); }
  };
  let drawn = -1;
  const say = (text) => { if ($("state").textContent !== text) $("state").textContent = text; };
  const kind = (recipe) => recipe || "a recipe that cannot be read";
  const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

  // ---- the table of runs; cells are changed in place, so that the keyboard stays where it is
  const ago = (seconds) => seconds < 90 ? `${Math.max(0, Math.round(seconds))} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
  const value = (v, shown) => html("span", { "data-value": v }, shown);
  const cells = (run) => {
    const s = run.summary;
    return [
      [html("span", { class: `status-${s.status}` }, s.status), s.problem ? html("span", { class: "problem" }, s.problem) : null],
      [`${s.recipe} ${s.preset}`],
      [value(s.step, s.steps ? `${s.step} of ${s.steps} ` : `${s.step}`), s.steps ? html("progress", { max: s.steps, value: Math.min(s.step, s.steps), "aria-label": `steps of ${s.name}` }) : null],
      s.best ? [`${s.best.metric} `, value(s.best.value, s.best.shown), ` at step ${s.best.step}`] : ["-"],
      s.per_second === null ? ["-"] : [value(s.per_second, number(s.per_second, "")), ` ${s.work}/s`],
      [s.written ? ago(now - s.written) : "-"],
    ];
  };
  const matches = (run) => run.summary.name.toLowerCase().includes($("filter").value.toLowerCase());
  const rows = () => {
    const body = $("runs").tBodies[0], had = new Map([...body.rows].map((r) => [r.dataset.run, r]));
    for (const [name, run] of runs) {
      let row = had.get(name);
      if (!row) {
        const box = html("input", { type: "checkbox", "aria-label": `Show ${name}` });
        box.addEventListener("change", () => { run.shown = box.checked; all(); });
        row = html("tr", { "data-run": name }, html("td", {}, box), html("th", { scope: "row" }, html("span", { class: "swatch", style: `background: ${colour(run.color)}` }), name), cells(run).map(() => html("td")));
        body.append(row);
      }
      had.delete(name);
      row.hidden = !matches(run);
      row.querySelector("input").checked = run.shown;
      cells(run).forEach((parts, i) => {
        const cell = row.cells[i + 2], text = JSON.stringify(parts.map((p) => p?.outerHTML ?? p));
        if (cell.kilnText !== text) { cell.replaceChildren(...parts.filter((p) => p !== null)); cell.kilnText = text; }
      });
    }
    had.forEach((row) => row.remove());
  };

  // ---- curves: by recipe, by group, by metric
  const smooth = (points, weight) => {
    let [sum, share] = [0, 0];
    return points.map(([x, y]) => { sum = sum * weight + y * (1 - weight); share = share * weight + 1 - weight; return [x, sum / share]; });
  };
  // What the optimizer is told, such as the learning rate, has no noise to be smoothed away.
  const lines = (run, key, name, color, { of, group }) => {
    const points = run.series.get(key), weight = group === "Optimizer" ? 0 : Number($("smoothing").value);
    if (of !== "training") return [{ name, points, color, dashed: true }];
    return [{ name, points, color, smooth: weight > 0 && points.length > 2 ? smooth(points, weight) : null }];
  };
  // { id, recipe, group, order, title, about, series } of every chart.
  const charts = () => {
    const found = new Map();
    for (const run of shown()) for (const key of [...run.series.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }))) {
      const m = run.details?.metrics[key] || { metric: key, of: "training", group: "More", order: 1e9, unit: "", better: "neither", about: "" };
      const bare = key.replace(/^(val|epoch)_/, ""), member = m.metric !== bare && bare.startsWith(m.metric + ".") ? bare.slice(m.metric.length + 1) : null;
      const recipe = run.summary.recipe, id = [recipe, m.metric, member === null ? "" : run.summary.name].join("|");
      if (!found.has(id)) found.set(id, { id, recipe, group: m.group, order: m.order, unit: m.unit, about: [m.about, m.better === "neither" ? "" : `${m.better} is better`].filter(Boolean).join("; "), title: m.metric + (member === null ? "" : `, ${run.summary.name}`), series: [], members: 0, floor: m.metric === "loss" ? run.summary.floor : null });
      const chart = found.get(id), label = member !== null ? member : run.summary.name + (m.of === "training" ? "" : `, ${m.of}`);
      chart.series.push(...lines(run, key, label, member === null ? run.color : chart.members++, m));
    }
    return [...found.values()].sort((a, b) => a.recipe.localeCompare(b.recipe) || a.order - b.order || a.title.localeCompare(b.title));
  };
  const UNITS = ["bytes", "share", "seconds"];
  // Headings, and a figure for every chart; those that are there already stay the same elements.
  const build = (box, list) => {
    const had = new Map([...box.querySelectorAll("figure")].map((f) => [f.dataset.id, f])), parts = [];
    let [recipe, group, grid] = [null, null, null];
    for (const chart of list) {
      if (chart.recipe !== recipe) { parts.push(html("h2", {}, `Curves of ${kind(chart.recipe)}`)); group = null; }
      if (chart.group !== group) { grid = html("div", { class: "charts" }); parts.push(html("h3", {}, chart.group), grid); }
      [recipe, group] = [chart.recipe, chart.group];
      grid.append(had.get(chart.id) || html("figure", { "data-id": chart.id }, html("figcaption", {}, chart.title, html("small", {}, chart.about))));
    }
    box.replaceChildren(...(list.length ? parts : [html("p", {}, "No run that is shown has records yet.")]));
  };
  const curves = () => {
    const box = $("curves"), list = charts(), shape = JSON.stringify(list.map((c) => [c.id, c.group]));
    // Moving a focused element would take the focus away: only where the charts are others.
    if (box.kilnShape !== shape) { build(box, list); box.kilnShape = shape; }
    for (const figure of box.querySelectorAll("figure")) {
      const c = list.find((one) => one.id === figure.dataset.id), log = $("log").checked;
      const steps = c.series.flatMap((s) => [s.points[0][0], s.points[s.points.length - 1][0]]);
      if (c.floor) c.series.push({ name: `${c.floor.name} ${number(c.floor.value, "")}`, guide: true, dashed: true, color: "ink", points: [[Math.min(...steps), c.floor.value], [Math.max(...steps), c.floor.value]] });
      draw(figure, { kind: "plot", x: { label: "step", unit: "", log: false }, y: { label: UNITS.includes(c.unit) ? "" : c.unit, unit: UNITS.includes(c.unit) ? c.unit : "", log }, series: c.series });
    }
  };

  // ---- what is shown below
  const shown = () => [...runs.values()].filter((r) => r.shown && matches(r) && r.series);
  const text = (v) => v === undefined ? "-" : typeof v === "string" ? v || "\u201c\u201d" : JSON.stringify(v);
  const named = (caption, headers, body) => { const t = table(headers, body); t.setAttribute("aria-label", caption); t.firstChild.prepend(html("caption", {}, caption)); return t; };
  const settings = () => {
    const own = shown().filter((r) => r.details), parts = [];
    for (const recipe of [...new Set(own.map((r) => r.summary.recipe))].sort()) {
      const same = own.filter((r) => r.summary.recipe === recipe), keys = [...new Set(same.flatMap((r) => Object.keys(r.details.settings)))].sort();
      const differ = keys.filter((k) => new Set(same.map((r) => text(r.details.settings[k]))).size > 1);
      if (same.length > 1) parts.push(differ.length ? named(`Settings that differ between the runs of ${kind(recipe)}`, ["key", ...same.map((r) => r.summary.name)], differ.map((k) => [k, ...same.map((r) => text(r.details.settings[k]))])) : html("p", {}, `The runs of ${kind(recipe)} have the same settings.`));
    }
    for (const r of own.filter((one) => one.details.changed)) parts.push(html("details", { open: own.length === 1 }, html("summary", {}, `${r.summary.name}: ${count(r.details.changed.length, "setting")} unlike the preset ${r.summary.preset}`),
      named(`${r.summary.name} against its preset`, ["key", "here", "preset"], r.details.changed.map((c) => [c.key, text(c.value), text(c.preset ?? undefined)]))));
    return parts;
  };
  const samples = () => shown().filter((r) => r.details?.samples.length).flatMap((r) => r.details.samples.slice(-3).reverse().map((s) => html("div", {}, html("h3", {}, `${r.summary.name}, step ${s.step}`), html("pre", {}, s.text))));
  const pictures = () => shown().flatMap((r) => (r.details?.pictures || []).map((name) => html("figure", {}, html("figcaption", {}, `${r.summary.name}: ${name}`),
    html("img", { alt: `${name} of run ${r.summary.name}`, src: report ? r.details.inside[name] : `/picture?run=${encodeURIComponent(r.summary.name)}&name=${encodeURIComponent(name)}&at=${r.summary.written}` }))));
  const receipts = () => shown().filter((r) => r.details?.receipts).map((r) => html("details", {}, html("summary", {}, r.summary.name), Object.entries(r.details.receipts).map(([program, list]) => {
    if (!Array.isArray(list)) return html("p", {}, `${list.data * list.tensor} ${program} (data ${list.data}, tensor ${list.tensor})${list.over ? ` over ${list.over}` : ""}`);
    const busy = list.filter((p) => p.applied + p.declined.length > 0);
    return named(`${r.summary.name}, program ${program}: ${busy.length} of ${list.length} passes have something to do`, ["pass", "mode", "sites", "applied", "declined", "notes"], busy.map((p) => [p.pass, p.mode, p.sites, p.applied, p.declined.length, [...new Set([...p.notes, ...p.declined.map((d) => (Array.isArray(d) ? d.join(": ") : typeof d === "string" ? d : JSON.stringify(d)))])].slice(0, 5).join("; ")]));
  })));
  const fill = (id, parts) => {
    const box = $(id), key = parts.map((p) => p.outerHTML).join("");
    if (box.kilnKey === key) return;
    const open = new Set([...box.querySelectorAll("details[open] > summary")].map((s) => s.textContent));
    box.replaceChildren(...(parts.length ? parts : [html("p", { class: "soft" }, "None yet.")]));
    box.querySelectorAll("details").forEach((d) => { if (open.has(d.firstChild.textContent)) d.open = true; });
    box.kilnKey = key;
  };
  const all = () => { rows(); curves(); fill("settings", settings()); fill("samples", samples()); fill("pictures", pictures()); fill("receipts", receipts()); };

  // ---- controls
  $("controls").addEventListener("submit", (e) => e.preventDefault());
  $("filter").addEventListener("input", all);
  $("log").addEventListener("change", curves);
  $("smoothing").addEventListener("input", () => { $("smoothing-value").textContent = $("smoothing").value; curves(); });
  for (const [id, on] of [["all", true], ["none", false]]) $(id).addEventListener("click", () => { for (const r of runs.values()) if (matches(r)) r.shown = on; all(); });
  if (report) {
    for (const r of report.runs) Object.assign(add(r.summary), { details: r.details, series: new Map(Object.entries(r.series)) });
    say(`${count(runs.size, "run")}, as of ${new Date(1000 * report.written).toISOString().slice(0, 16).replace("T", " ")} UTC, written by kiln ${report.version}.`);
    all();
    return;
  }
  $("pause").hidden = false;
  $("pause").addEventListener("click", () => { paused = !paused; $("pause").setAttribute("aria-pressed", paused); $("pause").textContent = paused ? "Go on" : "Pause"; });
  const again = async () => {
    if (!paused && !document.hidden) await poll().catch((e) => say(`kiln watch does not answer (${e.message}): what is shown may be old.`));
    setTimeout(again, 2000);
  };
  again();
})();
