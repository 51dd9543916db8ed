"use strict";
// Opens pages of kiln in headless Chromium: `cargo xtask pages` runs it. Arguments: a folder for screenshots, the address of a `kiln watch`, the folder
// that it serves, a report of the same runs, then other pages. Every page is looked at in two widths and both colour schemes.
const { chromium } = require("playwright-core");
const fs = require("fs"), path = require("path");
const [shots, address, folder, report, ...others] = process.argv.slice(2);
const axe = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const problems = [];
const expect = (is, what) => { if (!is) problems.push(what); };

// A page that tells on itself: errors, and requests that leave it.
const open = async (browser, url, { width = 1280, colorScheme = "light" } = {}) => {
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, offline: url.startsWith("file:") }), page = await context.newPage();
  page.on("console", (m) => { if (["error", "warning"].includes(m.type())) problems.push(`${url}: ${m.text()}`); });
  page.on("pageerror", (e) => problems.push(`${url}: ${e.stack}`));
  page.on("request", (r) => { if (!r.url().startsWith(url.startsWith("file:") ? url : address) && !r.url().startsWith("data:")) problems.push(`${url} asks for ${r.url()}`); });
  await page.goto(url);
  await page.waitForFunction(() => !document.getElementById("state")?.textContent.startsWith("Reading"));
  await page.waitForTimeout(300);
  return page;
};

// Fits its width, passes the accessibility check, has its charts drawn.
const look = async (browser, name, url) => {
  for (const width of [1280, 390]) for (const colorScheme of ["light", "dark"]) {
    const page = await open(browser, url, { width, colorScheme }), at = `${name}, ${width} wide, ${colorScheme}`;
    const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    expect(over <= 0, `${at}: ${over} pixels wider than the window`);
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
  const summaries = (await (await fetch(`${address}api/runs`)).json()).runs;
  for (const s of summaries) {
    const row = page.locator(`#runs tr[data-run="${s.name}"]`), shown = await row.locator("[data-value]").evaluateAll((all) => all.map((e) => Number(e.dataset.value)));
    for (const v of [s.step, s.best?.value, s.per_second].filter((v) => v !== null && v !== undefined)) expect(shown.includes(v), `${name}: the table lacks ${v} of ${s.name}`);
    expect((await row.textContent()).includes(s.status), `${name}: the table lacks the status of ${s.name}`);
  }
  let seen = 0;
  const charts = await page.evaluate(() => [...document.querySelectorAll("#curves figure")].flatMap((f) => f.kilnChart.series.filter((s) => !s.guide).map((s) => [f.dataset.id, s.name, s.points])));
  for (const s of summaries) {
    const last = new Map();
    for (const line of fs.readFileSync(path.join(folder, s.name, "metrics.jsonl"), "utf8").trim().split("\n")) { const r = JSON.parse(line); for (const [k, v] of Object.entries(r)) if (k !== "step" && v !== null) last.set(`${k} ${r.step}`, [k, r.step, v]); }
    for (const [key, step, value] of last.values()) {
      const bare = key.replace(/^(val|epoch)_/, ""), base = bare.split(".")[0];
      const found = charts.some(([id, , points]) => [`${s.recipe}|${bare}|`, `${s.recipe}|${base}|${s.name}`, `${s.recipe}|${key}|`].includes(id) && points.some((p) => p[0] === step && p[1] === value));
      expect(found, `${name}: no curve has ${key} = ${value} of step ${step} of ${s.name}`);
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
  const count = await page.locator("#curves figure").count(), box = page.locator("#runs input").first();
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
  expect((await page.evaluate(() => document.documentElement.dataset.theme)) === "dark", "the button does not change the colours");
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
  for (const file of others) await look(browser, path.basename(file, ".html"), `file://${path.resolve(file)}`);
  for (const [name, url] of [["watch", address], ["report", local]]) {
    const page = await open(browser, url);
    await numbers(page, name);
    await keyboard(page);
    if (name === "report") await live(await open(browser, address), fs.readdirSync(folder).sort()[0]);
  }
  await browser.close();
  problems.forEach((p) => console.error(p));
  console.log(`${problems.length} problems; screenshots in ${shots}`);
  process.exit(problems.length ? 1 : 0);
})().catch((e) => { problems.forEach((p) => console.error(p)); console.error(e); process.exit(1); });
