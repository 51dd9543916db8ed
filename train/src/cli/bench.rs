//! `kiln bench`: the time of a step, of every op, or of writing replies.
//!
//! | file | is |
//! |---|---|
//! | `step.rs` | a recipe's step: times, numbers, memory |
//! | `ledger.rs` | the step with each pass switched, in turn with the step as it is |
//! | `rounds.rs`, `groups.rs`, `side.rs` | turns; what is held in memory together; one side of a comparison |
//! | `stats.rs` | medians, intervals, and what is within noise |
//! | `file.rs` | what `--json` writes |
//! | `defaults.rs` | `kiln check defaults`: what every pass that is on costs |
//! | `baseline.rs` | `--baseline`: against a former file |
//! | `peers.rs` | `--against pytorch` |
//! | `serve.rs`, `fingerprint.rs` | `--serve`: timed whenever it is asked for; `--fingerprint`: what is timed, as a number |
//! | `web.rs`, `picture.rs` | `--html`; `--picture`: several ledgers at once |
//! | `ops.rs`, `generate.rs`, `nodes.rs` | every op; replies; a step node by node |

mod baseline;
mod defaults;
mod file;
mod fingerprint;
mod generate;
mod groups;
mod ledger;
mod nodes;
mod ops;
mod peers;
mod picture;
mod rounds;
mod serve;
mod side;
mod stats;
mod step;
mod web;

pub use defaults::{DefaultsArgs, defaults};

use super::budget::BudgetArgs;
use super::{ConfigArgs, DeviceArgs, Recipes, outputs};
use anyhow::{Result, bail};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

#[derive(Args)]
#[command(
    mut_arg("recipe", |a| a.value_name("RECIPE|ops|generate").help("A recipe (the first if none is named), whose step is timed; `ops` for every op, `generate` for replies to prompts")),
    after_help = "Examples:
  kiln bench {recipe} --preset {preset}
  kiln bench {recipe} --preset {preset} --set batch=4 --repeat 20 --json small.json
  kiln bench {recipe} --preset {preset} --ledger --also fp8,tf32
  kiln bench {recipe} --ledger --only flash-attention,recompute --minutes 2
  kiln bench {recipe} --ledger --json ledger.json --html ledger.html
  kiln bench {recipe} --baseline before.json --fail-slower 5% --fail-above 1e-4
  kiln bench --picture ledgers.svg --ledgers bench/ledger
  kiln bench ops --device cuda
  kiln bench ops --only attention --device cuda
  kiln bench ops --only norm --unfused --device cuda
  kiln bench generate --device cuda
  kiln bench {recipe} --preset {preset} --fingerprint"
)]
pub struct BenchArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// With `generate`: the recipe that replies; the first that can if none is named
    #[arg(value_name = "WRITES", index = 2)]
    of: Option<String>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    budget: BudgetArgs,
    /// Steps that are timed, of which the median counts: as many as take a second, and at least 10. With --ledger, the steps that are timed together:
    /// as many as take a tenth of a second. Of steps that differ, whole periods are timed together
    #[arg(long)]
    repeat: Option<usize>,
    /// Steps before the clock starts
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// With `generate`: times the programs that write replies node by node (on a GPU)
    #[arg(long)]
    profile: bool,
    /// Times the step with each pass switched off, in turn with the step as it is: what the pass gains, what memory it saves, what it changes in loss
    /// and gradients
    #[arg(long)]
    ledger: bool,
    /// With --ledger: times these passes too, switched on; those that are off here are not in the ledger otherwise
    #[arg(long, value_name = "PASS,..", value_delimiter = ',', requires = "ledger")]
    also: Vec<String>,
    /// With --ledger: only these passes. With `ops`: only those whose name, as op/case/forward, has this in it
    #[arg(long, value_name = "NAME,..")]
    only: Option<String>,
    /// With `ops`: fused ops beside the plain ops that define them, each a kernel of its own, in turn
    #[arg(long, conflicts_with_all = ["serve", "fingerprint", "ledger", "profile"])]
    unfused: bool,
    /// With --ledger: how often every variant has its turn, at least 3; 12 if neither this nor --minutes is given
    #[arg(long, requires = "ledger")]
    rounds: Option<usize>,
    /// With --ledger: as many rounds as fit into this time, at least 3
    #[arg(long, requires = "ledger")]
    minutes: Option<f64>,
    /// Steps after which the loss is compared, with --ledger and --baseline; the gradients are compared after one. What the
    /// baseline has; else 20 with --ledger, and 5 where --json is to have it
    #[arg(long, value_name = "N")]
    steps_for_error: Option<usize>,
    /// Compares with what a former --json wrote of the same step on the same machine
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// With --baseline: fails if a step takes longer than there by more than this, and by more than noise
    #[arg(long, value_name = "PERCENT", value_parser = baseline::percent, requires = "baseline")]
    fail_slower: Option<f64>,
    /// With --baseline: fails if the loss after 1 or --steps-for-error steps from the same seed differs relatively by more than this
    #[arg(long, value_name = "DIFFERENCE", value_parser = baseline::error, requires = "baseline")]
    fail_above: Option<f64>,
    /// Times the same step in PyTorch, in turn with this one: peers/compare.py of a checkout, with a Python that has torch
    #[arg(long, value_name = "PEER", value_parser = ["pytorch"])]
    against: Option<String>,
    /// With --against: the checkout of kiln whose peers/compare.py is run; without it, the one that this program was built from
    #[arg(long, value_name = "FOLDER", requires = "against")]
    peers: Option<PathBuf>,
    /// Stays loaded, and answers every line `time SECONDS` on stdin with a line of JSON: the median over so long
    #[arg(long, conflicts_with_all = ["ledger", "json", "profile", "baseline", "against", "repeat", "steps_for_error"])]
    serve: bool,
    /// Measures nothing: prints what the timed programs run on a GPU of compute capability 9.0, as one number. It stays the same as long as passes, kernels
    /// and shapes do
    #[arg(long, conflicts_with_all = ["serve", "ledger", "json", "profile", "baseline", "against", "repeat", "steps_for_error"])]
    fingerprint: bool,
    /// Writes the figures to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// With --ledger: writes a page with charts, which opens in a browser without a network
    #[arg(long, value_name = "FILE", requires = "ledger")]
    html: Option<PathBuf>,
    /// Measures nothing: draws the ledgers of a folder (--ledgers) as one SVG, beside what guides for such trainers promise
    #[arg(long, value_name = "FILE", requires = "ledgers", conflicts_with_all = ["recipe", "ledger", "json", "profile", "baseline", "against"])]
    picture: Option<PathBuf>,
    /// With --picture: a folder of files that --ledger --json wrote
    #[arg(long, value_name = "DIR", requires = "picture")]
    ledgers: Option<PathBuf>,
}

impl BenchArgs {
    /// Of ops and replies.
    fn repeat(&self) -> usize {
        self.repeat.unwrap_or(10)
    }
}

pub fn run(a: BenchArgs, recipes: Recipes) -> Result<ExitCode> {
    if !(1..=1_000_000).contains(&a.repeat()) || a.warmup > 1_000_000 {
        bail!("--repeat {} --warmup {}: from 1, or 0, to a million", a.repeat(), a.warmup);
    }
    if a.steps_for_error.is_some_and(|n| !(1..=1_000_000).contains(&n)) {
        bail!("--steps-for-error {}: from 1 to a million", a.steps_for_error.unwrap_or(0));
    }
    if let (Some(path), Some(dir)) = (&a.picture, &a.ledgers) {
        if path.extension().is_none_or(|e| e != "svg") {
            bail!("--picture {}: the picture's name ends in .svg", path.display());
        }
        picture::picture(dir, path)?;
        out!("picture: {}", path.display());
        return Ok(ExitCode::SUCCESS);
    }
    let started = Instant::now();
    let kind = a.config.recipe.as_deref().filter(|r| ["ops", "generate"].contains(r));
    let of_recipes = [
        (a.budget.is_given(), "--memory-budget"),
        (a.ledger, "--ledger"),
        (a.steps_for_error.is_some(), "--steps-for-error"),
        (a.baseline.is_some(), "--baseline"),
        (a.against.is_some(), "--against"),
    ];
    if let (Some(kind), Some((_, flag))) = (kind, of_recipes.iter().find(|f| f.0)) {
        bail!("{flag} is for a recipe's step, not for bench {kind}");
    }
    if a.profile && kind != Some("generate") {
        bail!("--profile is for bench generate: kiln profile shows where a recipe's step spends its time");
    }
    if a.steps_for_error.is_some() && !a.ledger && a.json.is_none() && a.baseline.is_none() {
        bail!("--steps-for-error is for --ledger, --baseline or --json: nothing else has the loss");
    }
    if a.only.is_some() && !a.ledger && kind != Some("ops") {
        bail!("--only is for bench ops, or for --ledger");
    }
    if a.unfused && kind != Some("ops") {
        bail!("--unfused is for bench ops: a step without a pass is in its --ledger");
    }
    if let Some(name) = a.of.as_deref().filter(|_| kind != Some("generate")) {
        bail!("'{name}': a second name is for bench generate, whose recipe it is");
    }
    if a.fingerprint {
        let it = match kind {
            Some("ops") => ops::fingerprint(&a),
            Some(_) => generate::fingerprint(&a, recipes),
            None => step::fingerprint(&a, recipes),
        };
        out!("{:016x}", it?);
        return Ok(ExitCode::SUCCESS);
    }
    outputs::checked(&[("--json", a.json.as_deref())], &[])?;
    match (kind, a.serve) {
        (Some("ops"), false) => ops::ops(&a),
        (Some("ops"), true) => ops::serve(&a),
        (Some(_), false) => generate::generate(&a, recipes),
        (Some(_), true) => generate::serve(&a, recipes),
        (None, _) => step::step(&a, started, recipes),
    }
}

/// Adds the fields of one JSON object to another.
fn join(to: &mut serde_json::Value, from: serde_json::Value) {
    if let (Some(to), serde_json::Value::Object(from)) = (to.as_object_mut(), from) {
        to.extend(from);
    }
}
