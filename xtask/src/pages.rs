//! `cargo xtask pages`: kiln's pages in headless Chromium. Node, npm and a Chromium are needed, so it is no part of `cargo xtask test`, whose own tests look
//! at what the pages are made of.

use crate::{cargo, has, root, run};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const PACKAGES: [&str; 2] = ["playwright-core@1", "axe-core@4"];
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Short runs of several recipes, two of them to compare.
const RUNS: &[(&str, &str)] = &[
    ("a-decoder", "decoder --steps 12 --set log_every=1 --set eval_every=4 --set eval_batches=1 --set batch=2"),
    ("b-decoder", "decoder --steps 8 --set log_every=1 --set eval_every=4 --set eval_batches=1 --set batch=2 --seed 3"),
    ("hydra", "hydra --steps 8 --set log_every=1 --set eval_every=4 --set eval_batches=1 --set batch=2"),
    ("lior", "lior --steps 6"),
    ("vision", "vision_bdh --steps 6 --set log_every=1 --set eval_every=3 --set eval_batches=2"),
];

/// Pages of other commands.
const MORE: [(&str, &str); 2] = [
    ("ledger.html", "bench decoder --device cpu --set layers=1 --set batch=1 --repeat 1 --rounds 3 --steps-for-error 1 --ledger"),
    ("memory.html", "plan hydra"),
];

/// Ended with this.
struct Served(Child);

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Checks the live page, a report, pages of other commands, and those that are named.
pub fn pages(others: &[String]) -> Result<(), String> {
    let browser = std::env::var("KILN_CHROMIUM").ok().or_else(|| BROWSERS.iter().find(|b| has(b, &["--version"])).and_then(|b| which(b)));
    let browser = browser.ok_or("there is no Chromium: install one (Debian's package is `chromium`), or name one in KILN_CHROMIUM")?;
    if !has("node", &["--version"]) || !has("npm", &["--version"]) {
        return Err("node and npm are needed to drive the browser".into());
    }
    let place = crate::mpich::target_dir().join("pages");
    let shots = place.join("shots");
    let runs = place.join("runs");
    let _ = std::fs::remove_dir_all(&runs);
    std::fs::create_dir_all(&shots).map_err(|e| format!("{}: {e}", shots.display()))?;
    if !PACKAGES.iter().all(|p| place.join("node_modules").join(p.split('@').next().unwrap_or(p)).is_dir()) {
        run(Command::new("npm").args(["install", "--no-audit", "--no-fund", "--prefix"]).arg(&place).args(PACKAGES))?;
    }
    cargo(&["build", "--package", "kiln"])?;
    let kiln = crate::kiln();
    for (name, args) in RUNS {
        let mut train = Command::new(&kiln);
        train.args(["train", "--device", "cpu"]).args(args.split(' ')).arg("--out").arg(runs.join(name)).stdout(Stdio::null());
        run(&mut train)?;
    }
    let report = place.join("report.html");
    run(Command::new(&kiln).arg("report").arg(&runs).arg("--out").arg(&report))?;
    let more = MORE.map(|(name, args)| (place.join(name), args));
    for (page, args) in &more {
        run(Command::new(&kiln).args(args.split(' ')).arg("--html").arg(page).stdout(Stdio::null()))?;
    }
    let fifty = place.join("fifty");
    many(&runs.join("a-decoder"), &fifty).map_err(|e| format!("{}: {e}", fifty.display()))?;
    let (_served, address) = served(&kiln, &runs)?;
    let (_served_too, many) = served(&kiln, &fifty)?;
    let mut check = Command::new("node");
    check.arg(root().join("xtask/pages/check.js")).arg(&shots).arg(address).arg(&runs).arg(&report).arg(many);
    check.args(more.iter().map(|m| &m.0)).args(others.iter().map(PathBuf::from));
    run(check.env("NODE_PATH", place.join("node_modules")).env("KILN_CHROMIUM", browser))
}

/// Fifty runs with the settings of one that is there: number 1 is the oldest, and every tenth records a number that no other has.
fn many(like: &Path, folder: &Path) -> std::io::Result<()> {
    let _ = std::fs::remove_dir_all(folder);
    for i in 1..=50 {
        let run = folder.join(format!("run-{i}"));
        std::fs::create_dir_all(&run)?;
        std::fs::copy(like.join("config.toml"), run.join("config.toml"))?;
        std::fs::write(
            run.join("run.json"),
            format!("{{\"status\":\"finished\",\"work\":\"tok\",\"started\":{}}}", 1_700_000_000 + 1000 * i),
        )?;
        let own = if i % 10 == 0 { ",\"skipped\":1" } else { ",\"skipped\":0" };
        let loss = |step: i32| 2.0 + f64::from(i) / 50.0 + 3.0 / f64::from(step);
        let line = |step: i32| format!("{{\"step\":{step},\"loss\":{},\"val_loss\":{}{own}}}\n", loss(step), loss(step) + 0.1);
        std::fs::write(run.join("metrics.jsonl"), (1..=20).map(line).collect::<String>())?;
    }
    Ok(())
}

fn which(program: &str) -> Option<String> {
    let folders = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&folders).map(|p| p.join(program)).find(|p| p.is_file())?;
    Some(found.to_str()?.into())
}

/// `kiln watch` on a free port, and its address.
fn served(kiln: &Path, runs: &Path) -> Result<(Served, String), String> {
    let mut watch = Command::new(kiln);
    let child = watch.arg("watch").arg(runs).args(["--port", "0"]).stdout(Stdio::piped()).spawn();
    let mut served = Served(child.map_err(|e| format!("kiln watch does not start: {e}"))?);
    let mut line = String::new();
    let out = served.0.stdout.take().ok_or("kiln watch says nothing")?;
    BufReader::new(out).read_line(&mut line).map_err(|e| e.to_string())?;
    let address = line.split_whitespace().next().ok_or("kiln watch names no address")?.to_string();
    Ok((served, address))
}
