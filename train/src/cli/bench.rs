//! `kiln bench`: the time of a step, of every op, or of writing replies.

use super::budget::{BudgetArgs, Where};
use super::{ConfigArgs, DeviceArgs, Recipes, write_json};
use crate::config::Config;
use crate::memory::Measured;
use crate::recipe::{Recipe, Session, Task, find_in};
use crate::report::{human_bytes, human_count, table};
use crate::run;
use anyhow::{Result, bail};
use clap::Args;
use engine::DType;
use engine::check::time_case;
use engine::op::{Case, Fill, In};
use engine::passes::known;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[derive(Args)]
#[command(after_help = "Examples:
  kiln bench {recipe} --preset {preset}
  kiln bench {recipe} --preset {preset} --set batch=4 --repeat 20 --json small.json
  kiln bench {recipe} --preset {preset} --ledger --also fp8,tf32
  kiln bench ops --device cuda
  kiln bench ops --only attention --device cuda
  kiln bench generate --device cuda")]
pub struct BenchArgs {
    /// A recipe; or `ops` for the table of operations, `generate` for replies to prompts
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    budget: BudgetArgs,
    /// Steps that are timed; the median counts
    #[arg(long, default_value_t = 10)]
    repeat: usize,
    /// Steps before the clock starts
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Times one more step node by node and prints where it goes (on a GPU)
    #[arg(long)]
    profile: bool,
    /// Times the step again with each pass switched off: what it gains, what memory it saves, what it changes in the loss and the gradient's norm
    #[arg(long)]
    ledger: bool,
    /// With --ledger: times these passes too, switched on; those that are off here are not in the ledger otherwise
    #[arg(long, value_name = "PASS,..", value_delimiter = ',', requires = "ledger")]
    also: Vec<String>,
    /// With `ops`: only those whose name has this in it
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Writes the figures to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub fn run(a: BenchArgs, recipes: Recipes) -> Result<ExitCode> {
    if !(1..=1_000_000).contains(&a.repeat) || a.warmup > 1_000_000 {
        bail!("--repeat {} --warmup {}: from 1, or 0, to a million", a.repeat, a.warmup);
    }
    let started = Instant::now();
    let device = a.device.open()?;
    let opened = started.elapsed();
    if a.budget.is_given() && ["ops", "generate"].map(Some).contains(&a.config.recipe.as_deref()) {
        bail!("--memory-budget is for a recipe's step");
    }
    if a.config.recipe.as_deref() == Some("ops") {
        if a.ledger || a.profile {
            bail!("bench ops has neither --ledger nor --profile: they are about a recipe's step");
        }
        return ops(&a, &device);
    }
    for name in &a.also {
        let names = || engine::passes::all().filter(|p| !p.required()).map(|p| p.name());
        if !names().any(|known| known == name) {
            bail!("--also {name}: there is no such pass{}", known(name, names()));
        }
    }
    if a.only.is_some() {
        bail!("--only is for bench ops");
    }
    if a.config.recipe.as_deref() == Some("generate") {
        return generate(&a, &device, recipes);
    }
    step(&a, &device, (started, opened), recipes)
}

/// A recipe's step. The clock began at the first of these times, and the device was open after the second.
fn step(a: &BenchArgs, device: &engine::Device, (started, opened): (Instant, Duration), recipes: Recipes) -> Result<ExitCode> {
    let mut config = a.config.resolve(recipes, None)?;
    a.budget.set(&mut config)?;
    let recipe = find_in(recipes, config.text("recipe"))?;
    let (config, fitted) = a.budget.fit(recipe, config, &Where::here(device), true)?;
    let mut task = recipe.task(&config)?;
    let mut s = run::load_within_budget(&*task, &config, device)?;
    let loaded = started.elapsed();
    let (times, first) = timed(a, &mut *task, &mut s, device)?;
    let setup = loaded + first;
    let (ms, planned, measured) = (times[times.len() / 2], run::peak(&s).total() as u64, Measured::of(device));
    let (unit, work) = task.work();
    let (name, last) = (task.step_name(), times[times.len() - 1]);
    out!("{} {} on {}", config.text("recipe"), config.text("preset"), device.describe());
    if let Some(fitted) = &fitted {
        out!("{}", fitted.line());
    }
    out!("{ms:.1} ms a {name} (from {:.1} to {last:.1}), {} {unit}/s", times[0], human_count(work / ms * 1e3));
    out!(
        "planned peak {}, measured {}; {:.2} s from the start to the end of the first step: device {:.2}, programs {:.2}, step {:.2}",
        human_bytes(planned),
        measured.line(),
        setup.as_secs_f64(),
        opened.as_secs_f64(),
        (loaded - opened).as_secs_f64(),
        (setup - loaded).as_secs_f64()
    );
    let mut lines = vec![];
    if a.ledger {
        let base = Line { ms, peak: planned, report: task.report(&s)?.finish()?.values, applied: applied(&s) };
        drop(s);
        lines = ledger(a, recipe, &config, device, &base)?;
        s = run::load_within_budget(&*task, &config, device)?;
    }
    let mut nodes = vec![];
    if a.profile {
        s.profile = Some(vec![]);
        task.bench_step(&mut s, 0)?;
        nodes = s.profile.take().unwrap_or_default();
        profile(&nodes)?;
    }
    if let Some(path) = &a.json {
        let mut value = serde_json::json!({
            "ledger": lines, "nodes": nodes.iter().map(node).collect::<Vec<_>>(),
            "recipe": config.text("recipe"), "preset": config.text("preset"), "device": device.describe(), "ms": ms, "unit": unit,
            "per_s": work / ms * 1e3, "peak_bytes": planned, "setup_s": setup.as_secs_f64(), "repeat": a.repeat,
            "memory_budget": fitted.as_ref().map(|f| f.budget), "chosen": fitted.as_ref().map(|f| &f.changes),
            "estimated_more_time": fitted.as_ref().map(|f| f.seconds[1] / f.seconds[0] - 1.0),
        });
        join(&mut value, measured.json());
        write_json(Some(path), &value)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Adds the fields of one JSON object to another.
fn join(to: &mut serde_json::Value, from: serde_json::Value) {
    if let (Some(to), serde_json::Value::Object(from)) = (to.as_object_mut(), from) {
        to.extend(from);
    }
}

/// How often each pass that can be switched off was applied, over all programs.
fn applied(s: &Session) -> Vec<(&'static str, usize)> {
    let count = |pass: &str| s.programs.values().flat_map(|q| &q.receipts).filter(|r| r.pass == pass).map(|r| r.applied).sum();
    engine::passes::all().filter(|p| !p.required()).map(|p| (p.name(), count(p.name()))).collect()
}

/// All replies to all prompts of the first recipe that writes them, by the base alone and with adapters on it.
fn generate(a: &BenchArgs, device: &engine::Device, recipes: Recipes) -> Result<ExitCode> {
    if a.ledger {
        bail!("bench generate has no --ledger: switch passes off by hand, --pass fuse-decode=off");
    }
    let Some((name, surveys)) = recipes.iter().find_map(|r| Some((r.name(), r.surveys()?))) else {
        bail!("bench generate: none of the recipes here replies to prompts");
    };
    let config = ConfigArgs { recipe: Some(name.into()), ..a.config.clone() }.resolve(recipes, None)?;
    let (mut figures, mut nodes) = (vec![], vec![]);
    for writing in surveys.writings(&config)? {
        let adapters = writing.adapters;
        let mut s = Session::new(device, &config.switches()?, config.seed());
        writing.load(&mut s)?;
        let mut times = vec![];
        for i in 0..a.warmup + a.repeat {
            let start = Instant::now();
            writing.write(&mut s, i as u64)?;
            times.extend((i >= a.warmup).then(|| start.elapsed().as_secs_f64() * 1e3));
        }
        times.sort_by(f64::total_cmp);
        let (ms, w) = (times[times.len() / 2], &writing.writer);
        let (tokens, peak) = ((w.rows() * w.new_tokens) as f64, run::peak(&s).total() as u64);
        out!(
            "{} {} on {}, {}: {ms:.2} ms for {} x {} replies of {} tokens to prompts of {} (from {:.2} to {:.2}), {} tok/s, {:.3} ms a token of each; planned peak {}",
            config.text("recipe"),
            config.text("preset"),
            device.describe(),
            if adapters { "with adapters" } else { "the base alone" },
            w.prompts,
            w.replies,
            w.new_tokens,
            w.time,
            times[0],
            times[times.len() - 1],
            human_count(tokens / ms * 1e3),
            ms / w.new_tokens as f64,
            human_bytes(peak),
        );
        let mut figure =
            serde_json::json!({ "adapters": adapters, "ms": ms, "per_s": tokens / ms * 1e3, "unit": "tok", "peak_bytes": peak });
        join(&mut figure, Measured::of(device).json());
        figures.push(figure);
        if a.profile {
            // At the beginning: nodes are run several times, and caches have an end.
            writing.begin(&mut s)?;
            s.profile = Some(vec![]);
            writing.writer.next(&mut s)?;
            let timed = s.profile.take().unwrap_or_default();
            profile(&timed)?;
            nodes.extend(timed.iter().map(node));
        }
    }
    if let Some(path) = &a.json {
        write_json(Some(path), &serde_json::json!({ "generate": figures, "nodes": nodes, "device": device.describe() }))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn node(t: &engine::cuda::Timed) -> serde_json::Value {
    serde_json::json!({
        "op": t.op, "scope": t.scope, "backward": t.backward, "outputs": t.outputs.iter().map(|m| format!("{m:?}")).collect::<Vec<_>>(),
        "inputs": t.inputs.iter().map(|m| format!("{m:?}")).collect::<Vec<_>>(), "ms": t.ms, "bytes": t.cost.bytes, "flops": t.cost.flops,
    })
}

/// A step as it was measured.
struct Line {
    ms: f64,
    peak: u64,
    /// Loss, gradient norm and what else the last step reports.
    report: Vec<(String, f64)>,
    /// How often each pass that can be switched off was applied.
    applied: Vec<(&'static str, usize)>,
}

/// Milliseconds of the steps that count, sorted; and how long the very first took.
fn timed(a: &BenchArgs, task: &mut dyn Task, s: &mut Session, device: &engine::Device) -> Result<(Vec<f64>, Duration)> {
    let (mut times, mut first) = (vec![], Duration::ZERO);
    // Steps that a pass runs without itself at first are not timed either.
    let before = a.warmup + s.programs.values().map(|p| p.warm_up() as usize).max().unwrap_or(0);
    for i in 0..before + a.repeat {
        let start = Instant::now();
        task.bench_step(s, i as u64)?;
        device.synchronize()?;
        if i == 0 {
            first = start.elapsed();
        }
        if i >= before {
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok((times, first))
}

fn measure(a: &BenchArgs, recipe: &dyn Recipe, config: &Config, device: &engine::Device) -> Result<Line> {
    let mut task = recipe.task(config)?;
    let mut s = run::load(&*task, config, device)?;
    let (times, _) = timed(a, &mut *task, &mut s, device)?;
    let report = task.report(&s)?.finish()?.values;
    Ok(Line { ms: times[times.len() / 2], peak: run::peak(&s).total() as u64, report, applied: applied(&s) })
}

/// One line a pass: the same steps without it, or where it is off and `--also` names it, with it.
fn ledger(a: &BenchArgs, recipe: &dyn Recipe, config: &Config, device: &engine::Device, base: &Line) -> Result<Vec<serde_json::Value>> {
    let (mut rows, mut json) = (vec![], vec![]);
    for (at, &(pass, sites)) in base.applied.iter().enumerate() {
        let also = sites == 0 && a.also.iter().any(|name| name == pass);
        if sites == 0 && !also {
            rows.push(vec![pass.into(), "0".into(), "-".into(), "-".into(), "-".into()]);
            continue;
        }
        let mut switched = config.clone();
        switched.set_pass_argument(&format!("{pass}={}", if also { "auto" } else { "off" }))?;
        let other = measure(a, recipe, &switched, device)?;
        let (on, off) = if also { (&other, base) } else { (base, &other) };
        let sites = on.applied[at].1;
        let differ = |((_, x), (_, y)): (&(String, f64), &(String, f64))| (x - y).abs() / y.abs().max(1e-30);
        // What is no number differs most of all.
        let worst = off.report.iter().zip(&on.report).map(differ).fold(0.0, |worst, d| if d <= worst { worst } else { d });
        rows.push(vec![
            if also { format!("{pass}, switched on") } else { pass.into() },
            sites.to_string(),
            format!("{:+.1}%", 100.0 * (off.ms / on.ms - 1.0)),
            format!("{}{}", if off.peak < on.peak { "-" } else { "+" }, human_bytes(off.peak.abs_diff(on.peak))),
            format!("{worst:.1e}"),
        ]);
        json.push(serde_json::json!({ "pass": pass, "sites": sites, "ms": on.ms, "ms_off": off.ms, "peak": on.peak, "peak_off": off.peak, "numbers_differ_by": worst, "switched_on": also }));
    }
    out!("each pass switched off, after {} steps:", a.warmup + a.repeat);
    out_part!("{}", table(&["pass", "sites", "slower by", "memory", "numbers differ by"], &rows));
    Ok(json)
}

/// By op and direction, the longest first; then by what each node does: a layer's are one line with those of all other layers.
fn profile(all: &[engine::cuda::Timed]) -> Result<()> {
    let total: f64 = all.iter().map(|t| t.ms as f64).sum();
    let by = |name: &dyn Fn(&engine::cuda::Timed) -> String| {
        let mut groups: std::collections::BTreeMap<String, (usize, f64, u64, u64)> = Default::default();
        for t in all {
            let g = groups.entry(name(t)).or_default();
            *g = (g.0 + 1, g.1 + t.ms as f64, g.2 + t.cost.bytes, g.3 + t.cost.flops);
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
        let row = |(name, (count, ms, bytes, flops)): (String, (usize, f64, u64, u64))| {
            vec![
                name,
                count.to_string(),
                format!("{ms:.3}"),
                format!("{:.1}", 1e3 * ms / count as f64),
                format!("{:.1}%", 100.0 * ms / total),
                format!("{:.0}", bytes as f64 / ms / 1e6),
                format!("{:.1}", flops as f64 / ms / 1e9),
            ]
        };
        groups.into_iter().map(row).collect::<Vec<_>>()
    };
    let columns = |first| [first, "nodes", "ms", "us each", "share", "GB/s", "TFLOP/s"];
    let op = |t: &engine::cuda::Timed| format!("{}{}", t.op, if t.backward { " (backward)" } else { "" });
    // With the same output, nodes differ in how much they do.
    let kind =
        |t: &engine::cuda::Timed| format!("{} {:?}, {} MFLOP, {} KB", op(t), t.outputs[0], t.cost.flops / 1_000_000, t.cost.bytes / 1000);
    out!("{total:.2} ms in {} nodes, launched one by one", all.len());
    out_part!("{}", table(&columns("op"), &by(&op)));
    let kinds = by(&kind);
    out_part!("{}", table(&columns("node"), &kinds[..kinds.len().min(40)]));
    Ok(())
}

/// Every op at the recipes' shapes. On a GPU in bf16, forward and backward, compared with what the card reaches in a copy and in a large GEMM.
fn ops(a: &BenchArgs, device: &engine::Device) -> Result<ExitCode> {
    let wanted = |name: &str| a.only.as_deref().is_none_or(|part| name.contains(part));
    let timed = || {
        engine::extension::ops()
            .into_iter()
            .filter(|o| wanted(o.name))
            .flat_map(|o| o.cases.iter().filter(|c| c.bench).map(move |c| (o, c)))
    };
    if timed().next().is_none() {
        let name = a.only.as_deref().unwrap_or_default();
        bail!("no op that is timed has '{name}' in its name{}", known(name, engine::extension::ops().into_iter().map(|o| o.name)));
    }
    let (mut rows, mut json) = (vec![], vec![]);
    let gpu = match device {
        engine::Device::Cuda(cuda, _) => Some(cuda),
        engine::Device::Cpu(..) => None,
    };
    let dtype = if gpu.is_some() { DType::BF16 } else { DType::F32 };
    let ceilings = match gpu {
        Some(cuda) => {
            let product =
                Case::new("ceiling", &[In(&[8192, 8192], Fill::Normal), In(&[8192, 8192], Fill::Normal)], |x| vec![x[0].matmul(x[1])]);
            let t = time_case(&product, dtype, device, 5).map_err(anyhow::Error::msg)?;
            let (copy, flops) = (cuda.copy_speed()?, t[0].flops as f64 / t[0].ms * 1e3);
            out!(
                "{}, {dtype}: a copy reads and writes {:.2} TB/s, a product of 8192^3 makes {:.0} TFLOP/s",
                device.describe(),
                copy / 1e12,
                flops / 1e12
            );
            Some((copy, flops))
        }
        None => None,
    };
    for (op, case) in timed() {
        for t in time_case(case, dtype, device, a.repeat).map_err(anyhow::Error::msg)? {
            let (bytes, flops) = (t.bytes as f64 / t.ms * 1e3, t.flops as f64 / t.ms * 1e3);
            // Of the two limits, the one that it is closer to is its bottleneck.
            let share =
                ceilings.map(
                    |(copy, product)| {
                        if bytes / copy > flops / product { (bytes / copy, "memory") } else { (flops / product, "arithmetic") }
                    },
                );
            let direction = if t.backward { "backward" } else { "forward" };
            rows.push(vec![
                op.name.into(),
                case.name.into(),
                direction.into(),
                format!("{:.3}", t.ms),
                format!("{:.1}", bytes / 1e9),
                format!("{:.2}", flops / 1e12),
                share.map_or("-".into(), |(s, what)| format!("{:.0}% {what}", 100.0 * s)),
            ]);
            json.push(serde_json::json!({
                "op": op.name, "case": case.name, "direction": direction, "ms": t.ms, "gb_s": bytes / 1e9, "tflop_s": flops / 1e12,
                "share": share.map(|s| s.0), "bound": share.map(|s| s.1),
            }));
        }
    }
    out_part!("{}", table(&["op", "case", "", "ms", "GB/s", "TFLOP/s", "of the ceiling"], &rows));
    if let Some(path) = &a.json {
        write_json(Some(path), &serde_json::Value::Array(json))?;
    }
    Ok(ExitCode::SUCCESS)
}
