//! `--against pytorch`: the same step in PyTorch, timed in turn with kiln's by peers/compare.py.

use crate::cli::{ConfigArgs, Recipes};
use crate::config::Config;
use crate::recipe;
use anyhow::{Context, Result, bail};
use clap::Parser;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A Python with PyTorch, the script that compares, and which of its rows are this step.
pub struct Peers {
    python: PathBuf,
    script: PathBuf,
    rows: Vec<String>,
    /// Switched passes, as arguments.
    passes: Vec<String>,
}

/// What follows `kiln bench` in a row.
#[derive(Parser)]
struct Row {
    #[command(flatten)]
    config: ConfigArgs,
}

impl Peers {
    /// Looks for everything before anything is measured.
    pub fn find(config: &Config, recipes: Recipes, checkout: Option<&Path>) -> Result<Peers> {
        let script = script(checkout)?;
        let python = python()?;
        let said = output(command(&python).arg(&script).arg("--list"))?;
        let all: Vec<(String, Vec<String>)> = serde_json::from_str(&said).with_context(|| format!("{} --list", script.display()))?;
        let own = step_of(config);
        let same = |args: &Vec<String>| {
            let row = Row::try_parse_from(["kiln".to_string()].into_iter().chain(args.iter().cloned())).ok()?;
            let config = row.config.resolve(recipes, None).ok()?;
            // As the step that is timed was made: with the sizes of its data.
            let (config, _) = recipe::begin(recipe::find_in(recipes, config.text("recipe")).ok()?, &config).ok()?;
            (step_of(&config) == own).then_some(())
        };
        let rows: Vec<String> = all.iter().filter(|(_, args)| same(args).is_some()).map(|(name, _)| name.clone()).collect();
        if rows.is_empty() {
            let known: Vec<String> = all.iter().map(|(name, args)| format!("  {name}: kiln bench {}", args.join(" "))).collect();
            bail!("--against pytorch: no peer has this step. There are:\n{}", known.join("\n"));
        }
        let passes = config.to_json()["passes"]
            .as_object()
            .into_iter()
            .flatten()
            .filter_map(|(name, v)| Some(format!("{name}={}", v.as_str()?)))
            .collect();
        Ok(Peers { python, script, rows, passes })
    }

    /// Runs them, in turn with this program.
    pub fn run(&self, rounds: usize) -> Result<Value> {
        // A folder that nobody else writes to.
        let file = crate::gpu::cache().join(format!(".peers.tmp-{}", std::process::id()));
        let kiln = std::env::current_exe().context("the path of this program")?;
        let mut command = command(&self.python);
        command.arg(&self.script).args(&self.rows).arg("--kiln").arg(kiln).arg("--json").arg(&file).args(["--rounds", &rounds.to_string()]);
        command.args(self.passes.iter().flat_map(|pass| ["--pass", pass]));
        let ran = output(&mut command).and_then(|_| crate::input::read_to_string(&file).with_context(|| file.display().to_string()));
        // Best effort: what is left there is swept.
        let _ = crate::files::remove(&file);
        serde_json::from_str(&ran?).context("what peers/compare.py wrote")
    }
}

/// A config without what does not change the step.
fn step_of(config: &Config) -> Value {
    let mut all = config.to_json();
    if let Some(fields) = all.as_object_mut() {
        fields.retain(|key, _| !["passes", "optimize"].contains(&key.as_str()));
    }
    all
}

/// peers/compare.py of the checkout that is named, or of the one that this program was built from. Any other, above the working directory for instance, may be
/// somebody else's.
fn script(checkout: Option<&Path>) -> Result<PathBuf> {
    let built_from = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    script_of(checkout, built_from, &crate::gpu::owners(&|name| std::env::var_os(name)))
}

fn script_of(checkout: Option<&Path>, built_from: &Path, owners: &[u32]) -> Result<PathBuf> {
    let script = checkout.unwrap_or(built_from).join("peers/compare.py");
    if !script.is_file() {
        bail!("--against pytorch: there is no {}: name a checkout of kiln with --peers FOLDER", script.display());
    }
    if engine::mutant!("a-checkout-of-anybodys-is-run", checkout.is_none(), false) {
        engine::cuda::trusted(&script, owners)
            .map_err(|why| anyhow::anyhow!("--against pytorch: {why}; or name it with --peers FOLDER"))?;
    }
    Ok(script)
}

/// The Python of the active environment, or the first in PATH, if it has torch and a GPU.
fn python() -> Result<PathBuf> {
    let environment = std::env::var_os("VIRTUAL_ENV").and_then(crate::gpu::absolute).map(|v| v.join("bin/python3"));
    let mut problems = vec![];
    let path = std::env::var_os("PATH").map(|v| std::env::split_paths(&v).collect::<Vec<_>>()).unwrap_or_default();
    // Not a program of the working directory.
    let on_path = |name: &str| path.iter().filter(|p| p.is_absolute()).map(|p| p.join(name)).find(|p| p.is_file());
    for python in environment.into_iter().chain(["python3", "python"].into_iter().filter_map(on_path)) {
        // Before anything is imported: with -c, modules are looked for in the working directory first.
        let asked =
            "import sys; sys.path[:] = [p for p in sys.path if p]; import torch; print('cuda' if torch.cuda.is_available() else 'none')";
        match output(command(&python).args(["-c", asked])) {
            Ok(said) if said.trim() == "cuda" => return Ok(python),
            Ok(_) => problems.push(format!("{}: its torch finds no GPU", python.display())),
            Err(e) => problems.push(format!("{}: {}", python.display(), last_line(&format!("{e:#}")))),
        }
    }
    bail!(
        "--against pytorch: no Python here has PyTorch and a GPU ({}). Install it into an environment and activate that: python3 -m venv peer && . peer/bin/activate && pip install torch",
        problems.join("; ")
    )
}

/// A Python that takes no module from the working directory, whatever that is.
fn command(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.env("PYTHONSAFEPATH", "1");
    if let Some(path) = std::env::var_os("PYTHONPATH") {
        let own = std::env::split_paths(&path).filter(|p| p.is_absolute());
        command.env("PYTHONPATH", std::env::join_paths(own).unwrap_or_default());
    }
    command
}

fn last_line(text: &str) -> &str {
    text.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or(text).trim()
}

/// What a command prints, or an error with what it said at the end.
fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let ran = command.output().map_err(|e| anyhow::anyhow!("{name} does not start: {e}"))?;
    if !ran.status.success() {
        let said = String::from_utf8_lossy(&ran.stderr).into_owned();
        bail!("{name} failed: {}", said.trim().lines().rev().take(5).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n"));
    }
    Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
}

pub const HEADERS: [&str; 6] = ["step", "kiln", "usual PyTorch", "ratio", "expert's PyTorch", "ratio"];

/// Of every row: units of work in a second, and how many times PyTorch's that is.
pub fn rows(found: &Value) -> Vec<Vec<String>> {
    let speed = |side: &Value| side.get("per_s").and_then(Value::as_f64);
    let shown = |v: Option<f64>| v.map_or("-".into(), crate::report::human_count);
    let all = found.as_object().into_iter().flatten();
    let row = |(name, row): (&String, &Value)| {
        let side = |key: &str| speed(row.get(key).unwrap_or(&Value::Null));
        let (ours, usual, expert) = (side("kiln"), side("usual"), side("expert"));
        let unit = row["kiln"]["unit"].as_str().unwrap_or_default();
        let ratio = |other: Option<f64>| ours.zip(other).map_or("-".into(), |(a, b)| format!("{:.2}x", a / b));
        let what = format!("{name}: {}", row["conditions"].as_str().unwrap_or_default());
        vec![what, format!("{} {unit}/s", shown(ours)), shown(usual), ratio(usual), shown(expert), ratio(expert)]
    };
    all.map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_checkout_that_others_can_write_to_is_run_only_where_it_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let peers = dir.path().join("peers");
        fs::create_dir(&peers).unwrap();
        let script = peers.join("compare.py");
        let built_from = || script_of(None, dir.path(), &[]).map_err(|e| e.to_string());
        assert!(built_from().unwrap_err().contains("name a checkout of kiln with --peers FOLDER"));
        fs::write(&script, "").unwrap();
        let mode = |path: &Path, mode: u32| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        for (path, own) in [(dir.path(), 0o755), (&peers, 0o755), (&script, 0o644)] {
            mode(path, own);
        }
        for (path, own, open) in [(dir.path(), 0o755, 0o777), (&peers, 0o755, 0o757), (&script, 0o644, 0o646)] {
            assert_eq!(built_from(), Ok(script.clone()));
            mode(path, open);
            let said = built_from().unwrap_err();
            assert!(said.contains("everybody may write to it") && said.contains("--peers FOLDER"), "{said}");
            // Whoever names it means it.
            assert_eq!(script_of(Some(dir.path()), Path::new("/no/such/checkout"), &[]).unwrap(), script);
            mode(path, own);
        }
    }

    #[test]
    fn rows_say_speeds_and_ratios() {
        let found = serde_json::json!({ "row": {
            "conditions": "64 x 1024", "kiln": { "per_s": 700_000.0, "unit": "tok" }, "usual": { "per_s": 350_000.0 }, "expert": {} } });
        assert_eq!(rows(&found), [["row: 64 x 1024", "700K tok/s", "350K", "2.00x", "-", "-"]]);
        assert!(rows(&Value::Null).is_empty());
    }
}
