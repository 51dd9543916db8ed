"use strict";
// Opens pages of kiln in headless Chromium: `cargo xtask pages` runs it. Arguments: a folder for screenshots, the address of a `kiln watch`, the folder
// that it serves, a report of the same runs, the address of a `kiln watch` of fifty runs, then other pages. Every page is looked at in several widths
// and both color schemes.
const { chromium } = require("playwright-core");
const fs = require("fs"), path = require("path");
const [shots, address, folder, report, fifty, ...others] = process.argv.slice(2);
const axe = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const problems = [];
const expect = (is, what) => { if (!is) problems.push(what); };

// A page that tells on itself: errors, and requests that leave it.
const open = async (browser, url, { width = 1280, colorScheme = "light" } = {}) => {
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, offline: url.startsWith("file:") }), page = await context.newPage();
  page.on("console", (m) => { if (["error", "warning"].includes(m.type())) problems.push(`${url}: ${m.text()}`); });
  page.on("pageerror", (e) => problems.push(`${url}: ${e.stack}`));
  page.on("request", (r) => { if (!r.url().startsWith(url.startsWith("file:") ? url : new URL(url).origin) && !r.url().startsWith("data:")) problems.push(`${url} asks for ${r.url()}`); });
  await page.goto(url);
  await page.waitForFunction(() => !document.getElementById("state")?.textContent.startsWith("Reading"));
  await page.waitForTimeout(300);
  return page;
};

// Fits its width, passes the accessibility check, has its charts drawn.
const look = async (browser, name, url) => {
  for (const width of [1920, 1280, 390]) for (const colorScheme of ["light", "dark"]) {
    const page = await open(browser, url, { width, colorScheme }), at = `${name}, ${width} wide, ${colorScheme}`;
    const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    expect(over <= 0, `${at}: ${over} pixels wider than the window`);
    // Every axis of x has ticks, and where charts say what is in memory they are of the same nodes.
    const ticks = await page.evaluate(() => [...document.querySelectorAll("figure")].filter((f) => f.kilnChart).map((f) => [f.kilnChart.kind, [...f.querySelectorAll(".tick")].map((t) => `${t.textContent} ${t.getAttribute("x")}`).join()]));
    for (const [kind, text] of ticks) expect(text.includes(","), `${at}: ${kind} with the ticks '${text}'`);
    const boxes = ticks.filter(([kind]) => kind === "boxes"), areas = ticks.filter(([kind]) => kind === "area");
    expect(boxes.every(([, text], i) => text === areas[i][1]), `${at}: ${boxes.join("; ")} and ${areas.join("; ")}`);
    expect((await page.locator("figure[data-chart], #curves figure").count()) === (await page.locator("figure[data-chart] > svg, #curves figure > svg").count()), `${at}: a chart is not drawn`);
    await page.evaluate(() => document.querySelectorAll("details").forEach((d) => (d.open = true)));
    await page.evaluate(axe);
    const found = await page.evaluate(() => axe.run());
    for (const v of found.violations) problems.push(`${at}: ${v.id}, ${v.nodes.length} times: ${v.help}: ${v.nodes[0].html.slice(0, 200)}`);
    expect(found.passes.length > 10, `${at}: axe checked next to nothing`);
    await page.evaluate(() => document.querySelectorAll("details").forEach((d) => (d.open = false)));
    await page.screenshot({ path: path.join(shots, `${name}-${width}-${colorScheme}.png`), fullPage: true });
    await page.context().close();
  }
};

// The page shows what metrics.jsonl has: the table's numbers, and every point of every curve.
const numbers = async (page, name) => {
  const summaries = (await (await fetch(address.replace("?", "api/runs?"))).json()).runs;
  for (const s of summaries) {
    const row = page.locator(`#runs tr[data-run="${s.name}"]`), shown = await row.locator("[data-value]").evaluateAll((all) => all.map((e) => Number(e.dataset.value)));
    for (const v of [s.step, s.best?.value, s.per_second].filter((v) => v !== null && v !== undefined)) expect(shown.includes(v), `${name}: the table lacks ${v} of ${s.name}`);
    expect((await row.textContent()).includes(s.status), `${name}: the table lacks the status of ${s.name}`);
  }
  let seen = 0;
  const zero = await page.evaluate(() => [...document.querySelectorAll("#curves .zero")].map((p) => p.textContent).join(" "));
  const charts = await page.evaluate(() => [...document.querySelectorAll("#curves figure")].flatMap((f) => f.kilnChart.series.filter((s) => !s.guide).map((s) => [f.dataset.id, s.name, s.points])));
  for (const s of summaries) {
    const last = new Map();
    for (const line of fs.readFileSync(path.join(folder, s.name, "metrics.jsonl"), "utf8").trim().split("\n")) { const r = JSON.parse(line); for (const [k, v] of Object.entries(r)) if (k !== "step" && v !== null) last.set(`${k} ${r.step}`, [k, r.step, v]); }
    for (const [key, step, value] of last.values()) {
      const bare = key.replace(/^(val|epoch)_/, ""), base = bare.split(".")[0];
      const of = (id) => id.startsWith(`${bare}|`) || id.startsWith(`${key}|`) || (id.startsWith(`${base}|`) && id.endsWith(`|${s.name}`));
      const found = charts.some(([id, , points]) => of(id) && points.some((p) => p[0] === step && p[1] === value));
      expect(found || (value === 0 && zero.includes(bare)), `${name}: no curve has ${key} = ${value} of step ${step} of ${s.name}`);
      seen += 1;
    }
  }
  expect(seen > 100, `${name}: only ${seen} numbers were compared`);
};

// Everything can be done with the keyboard.
const keyboard = async (page) => {
  await page.keyboard.press("Tab");
  expect(await page.evaluate(() => document.activeElement.className === "skip"), "the first stop of the keyboard is not the link to the content");
  const chart = page.locator("#curves figure > svg").first();
  await chart.focus();
  const before = Number(await chart.getAttribute("aria-valuenow"));
  await page.keyboard.press("ArrowLeft");
  const after = Number(await page.locator("#curves figure > svg").first().getAttribute("aria-valuenow"));
  expect(after < before, `the arrow keys do not move in a chart: ${before}, ${after}`);
  expect((await page.locator("#curves figure .readout").first().textContent()).startsWith(`step ${after}`), "a chart does not say what it shows there");
  const count = await page.locator("#curves figure").count(), box = page.locator("#runs tr[data-run=a-decoder] input");
  await box.focus();
  await page.keyboard.press("Space");
  const lines = await page.evaluate(() => document.querySelectorAll("#curves path").length);
  await page.keyboard.press("Space");
  expect((await page.evaluate(() => document.querySelectorAll("#curves path").length)) > lines && (await page.locator("#curves figure").count()) === count, "hiding a run hides none of its curves");
  const summary = page.locator("#curves figure details summary").first();
  await summary.focus();
  await page.keyboard.press("Enter");
  expect(await page.waitForFunction(() => document.querySelectorAll("#curves figure details td").length > 10, undefined, { timeout: 5000 }).then(() => true, () => false), "a chart's numbers do not open");
  await page.locator("#theme").focus();
  await page.keyboard.press("Enter");
  expect((await page.evaluate(() => document.documentElement.dataset.theme)) === "dark", "the button does not change the colors");
};

// With fifty runs: the newest are on top and ticked, the table is the legend, and it is sorted by click and by keyboard.
const many = async (browser) => {
  const page = await open(browser, fifty, { width: 1920 });
  const order = () => page.locator("#runs tbody tr").evaluateAll((all) => all.map((tr) => Number(tr.dataset.run.split("-")[1])));
  const falling = Array.from({ length: 50 }, (_, i) => 50 - i), same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const ticked = () => page.locator("#runs tbody tr:has(input:checked)").evaluateAll((all) => all.map((tr) => Number(tr.dataset.run.split("-")[1])));
  expect(same(await order(), falling), `fifty runs are not in the order of their age: ${await order()}`);
  expect(same(await ticked(), falling.slice(0, 8)), `at first these are ticked: ${await ticked()}`);
  const lines = () => page.evaluate(() => document.querySelector("#curves figure").kilnChart.series.filter((s) => !s.guide).length);
  expect((await lines()) === 16, `${await lines()} lines of eight runs`);
  expect((await page.locator("#curves .legend li").count()) === 0, "a chart has a legend of runs beside the table's");
  // Sorted by the best validation: rising, falling, and as before.
  const head = page.locator("#runs th[data-sort=best]");
  await head.locator("button").click();
  expect((await head.getAttribute("aria-sort")) === "ascending" && same(await order(), [...falling].reverse()), "a click does not sort");
  await head.locator("button").focus();
  await page.keyboard.press("Enter");
  expect((await head.getAttribute("aria-sort")) === "descending" && same(await order(), falling), "the keyboard does not turn the order around");
  await page.keyboard.press("Enter");
  expect((await head.getAttribute("aria-sort")) === null, "the third time does not bring the usual order back");
  // Every run can be ticked, and all are told apart.
  await page.locator("#all").click();
  expect(await page.waitForFunction(() => document.querySelector("#curves figure").kilnChart.series.length >= 100, undefined, { timeout: 10000 }).then(() => true, () => false), "not all runs are drawn");
  const looks = await page.locator("#runs .swatch line").evaluateAll((all) => all.map((e) => `${e.getAttribute("stroke")} ${e.getAttribute("stroke-dasharray")}`));
  expect(looks.length === 50 && new Set(looks).size >= 48, `${new Set(looks).size} looks of ${looks.length} runs`);
  // The table stays beside the charts, and they grow with the window.
  await page.evaluate(() => scrollTo(0, document.body.scrollHeight));
  const box = await page.locator("#list .scroll").boundingBox();
  expect(box.y >= 0 && box.y + box.height <= 901 && box.x < 20, `the table is at ${JSON.stringify(box)}`);
  const width = () => page.evaluate(() => document.querySelector("#curves figure").clientWidth);
  const before = await width();
  await page.setViewportSize({ width: 2560, height: 1300 });
  expect((await width()) > 1.2 * before && before > 500, `charts are ${before} wide, and ${await width()} on a wide screen`);
  // What is always 0 takes a line, until it is not.
  const skipped = () => page.evaluate(() => [[...document.querySelectorAll("#curves .zero")].some((p) => p.textContent.includes("skipped")), [...document.querySelectorAll("#curves figcaption")].some((c) => c.textContent.startsWith("skipped"))]);
  expect(same(await skipped(), [false, true]), "a number that is not always 0 is not drawn");
  await page.locator("#none").click();
  await page.locator("#runs tr[data-run=run-3] input").check();
  expect(same(await skipped(), [true, false]), "a number that is always 0 takes a chart");
  await page.context().close();
  // One that runs comes first, however old it is.
  const running = await browser.newPage();
  await running.route("**/api/runs?*", async (route) => {
    const answer = await (await route.fetch()).json();
    answer.runs.find((r) => r.name === "run-1").status = "running";
    await route.fulfill({ json: answer });
  });
  await running.goto(fifty);
  await running.waitForSelector("#runs tbody tr");
  const first = await running.locator("#runs tbody tr:has(input:checked)").evaluateAll((all) => all.map((tr) => tr.dataset.run));
  expect(first.join() === [1, 50, 49, 48, 47, 46, 45, 44].map((i) => `run-${i}`).join(), `with run-1 running these are ticked: ${first}`);
  await running.close();
  // A page without the token has nothing.
  const answer = await fetch(fifty.split("?")[0] + "api/runs");
  expect(answer.status === 403, `without a token: ${answer.status}`);
};

// Runs of several recipes share the charts of what they have in common, unless they are asked to be apart.
const together = async (page) => {
  const losses = () => page.evaluate(() => [...document.querySelectorAll("#curves figcaption")].map((c) => c.firstChild.textContent).filter((t) => /^loss\b/.test(t)).sort());
  expect((await losses()).join() === "loss", `charts of the loss: ${await losses()}`);
  await page.locator("#apart").check();
  expect((await losses()).includes("loss of decoder") && (await losses()).includes("loss of hydra"), `charts of the loss, apart: ${await losses()}`);
  await page.locator("#apart").uncheck();
  const pictures = await page.locator("#pictures figcaption").allTextContents();
  expect(pictures.length > 0 && !pictures.some((p) => p.includes("loss.svg")), `pictures: ${pictures}`);
};

// What a run records appears without reloading.
const live = async (page, run) => {
  const file = path.join(folder, run, "metrics.jsonl"), last = JSON.parse(fs.readFileSync(file, "utf8").trim().split("\n").pop());
  const figure = page.locator("#curves figure").first();
  await figure.evaluate((f) => { f.kilnMark = true; });
  fs.appendFileSync(file, JSON.stringify({ ...last, step: last.step + 5, loss: 123.5, own_number: 7 }) + "\n");
  const there = (want) => page.waitForFunction(want, undefined, { timeout: 10000 }).then(() => true, () => false);
  expect(await there(() => [...document.querySelectorAll("#curves figure")].some((f) => f.kilnChart.series.some((s) => s.points.some((p) => p[1] === 123.5)))), "a new record does not appear");
  expect(await there(() => [...document.querySelectorAll("#curves figcaption")].some((c) => c.textContent.startsWith("own_number"))), "a metric that nobody declared is not drawn");
};

(async () => {
  const browser = await chromium.launch({ executablePath: process.env.KILN_CHROMIUM, args: ["--no-sandbox"] });
  const local = `file://${path.resolve(report)}`;
  await look(browser, "watch", address);
  await look(browser, "report", local);
  await look(browser, "fifty", fifty);
  await many(browser);
  for (const file of others) await look(browser, path.basename(file, ".html"), `file://${path.resolve(file)}`);
  for (const [name, url] of [["watch", address], ["report", local]]) {
    const page = await open(browser, url);
    await numbers(page, name);
    await keyboard(page);
    await together(page);
    if (name === "report") await live(await open(browser, address), fs.readdirSync(folder).sort()[0]);
  }
  await browser.close();
  problems.forEach((p) => console.error(p));
  console.log(`${problems.length} problems; screenshots in ${shots}`);
  process.exit(problems.length ? 1 : 0);
})().catch((e) => { problems.forEach((p) => console.error(p)); console.error(e); process.exit(1); });
