//! `kiln plan`: memory, arithmetic and passes of every program, before anything runs.

mod dump;
mod names;
mod ranks;
mod timeline;
mod web;

use super::budget::{BudgetArgs, Where, fit_device};
use super::{ConfigArgs, DeviceArgs, Recipes, outputs, write_json};
use crate::config::{Config, shown};
use crate::recipe::{Recipe, begin, find_in};
use crate::report::{human_bytes, human_count, table};
use crate::run::{Fitted, compile_for, divides, planned, receipts_table, undivided, within, write_whole};
use anyhow::{Result, bail};
use clap::Args;
use engine::passes::{Target, known};
use engine::{Compiled, Graph, Ranks};
use ranks::Exchanged;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln plan {recipe} --preset {preset}
  kiln plan {recipe} --preset {preset} --pass recompute=auto,what=blocks --json
  kiln plan {recipe} --preset {preset} --for-sm 90 --pass bf16=auto --nodes train
  kiln plan {recipe} --preset {preset} --for-sm 90 --memory-budget 16GiB
  kiln plan {recipe} --preset {preset} --for-sm 90 --pass bf16=auto --ranks 8 --tensor 2 --pass zero=auto
  kiln plan {recipe} --dump fuse-norm
  kiln plan {recipe} --preset {preset} --for-sm 90 --html memory.html")]
pub struct PlanArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    budget: BudgetArgs,
    /// Plans for a GPU that is not here: 90 for compute capability 9.0
    #[arg(long, value_name = "SM", value_parser = clap::value_parser!(u32).range(80..=130))]
    for_sm: Option<u32>,
    #[command(flatten)]
    ranks: ranks::RankArgs,
    /// Shows every pass, also those that are off or find nothing to do
    #[arg(long, short)]
    verbose: bool,
    /// Prints JSON
    #[arg(long)]
    json: bool,
    /// Lists every node of this program as it will run, with the buffers of its outputs
    #[arg(long, value_name = "PROGRAM", conflicts_with = "json")]
    nodes: Option<String>,
    /// Prints what a pass changes in a program's graph, a line a node: `-` before it, `+` after it
    #[arg(long, value_name = "PASS", conflicts_with_all = ["json", "nodes", "html"])]
    dump: Option<String>,
    /// With --dump: the program; the first if none is named
    #[arg(long, requires = "dump")]
    program: Option<String>,
    /// With --dump: the whole graph, before and after
    #[arg(long, requires = "dump")]
    whole: bool,
    /// Writes a page that shows what lies in memory during a step, tensor by tensor; it opens in a browser without a network
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

pub fn run(a: PlanArgs, recipes: Recipes) -> Result<ExitCode> {
    outputs::page("--html", a.html.as_deref())?;
    let mut config = a.config.resolve(recipes, None)?;
    a.budget.set(&mut config)?;
    let recipe = find_in(recipes, config.text("recipe"))?;
    config.ranks = a.ranks.planned()?;
    let (config, _) = begin(recipe, &config)?;
    if let Some(sizes) = &a.ranks.scaling {
        return scaling(&a, recipe, &config, sizes);
    }
    let on = match a.for_sm {
        Some(sm) => Where { target: engine::program::imagined(sm), free: None },
        None => Where::here(&a.device.open()?),
    };
    let (config, fitted) = a.budget.fit(recipe, config, &on, true)?;
    let task = recipe.task(&config)?;
    let (config, by_device) = fit_device(&*task, config, &on)?;
    let fitted = fitted.or(by_device);
    divides(task.train_config().batch, config.ranks.data.size)?;
    undivided(&config.switches()?, &config.ranks, on.target).iter().for_each(|said| crate::warn!("{said}"));
    if let Some(pass) = &a.dump {
        task.settle(within(on.free, config.memory_budget()?));
        let dumped = dump::dump(chosen(task.graphs(), a.program.as_deref())?, &config.switches()?, on.target, pass)?;
        return shown_changes(&dumped, pass, a.whole);
    }
    let compiled = compile_for(&*task, &config.switches()?, on.target, within(on.free, config.memory_budget()?))?;
    engine::passes::all_applied(compiled.iter().map(|(_, c)| &c.receipts[..]))?;
    if let Some(wanted) = &a.nodes {
        let names: Vec<&str> = compiled.iter().map(|c| c.0).collect();
        let Some((_, c)) = compiled.iter().find(|c| c.0 == wanted) else {
            bail!("--nodes {wanted}: there is no such program{}", known(wanted, names))
        };
        return nodes(c);
    }
    let run = planned(&compiled, on.target).line();
    if let Some(path) = &a.html {
        write_whole(path, &web::page(&config.title(), &run, &compiled))?;
        crate::warn!("page: {}", path.display());
    }
    let mut exchanged = Exchanged::of(&*task, &compiled, on.target, &a.ranks);
    if config.ranks.size() > 1 {
        exchanged = exchanged.beside(&alone(&a, recipe, &config, on.target)?, &a.ranks);
    }
    if a.json {
        fitted.iter().for_each(|fitted| crate::warn!("{}", fitted.line()));
        let all = compiled.iter().map(|c| with_choice(ranks::with(described(c), &exchanged, &config.ranks, c.0), fitted.as_ref()));
        write_json(None, &serde_json::Value::Array(all.collect()))?;
        return Ok(ExitCode::SUCCESS);
    }
    out!("{}: each program before it runs, as planned (programs share state and arena; train and bench measure, too)", config.title());
    let value = |key: &str| config.value("model", key).map_or(String::new(), shown);
    let sizes: Vec<String> = config.of_base().iter().map(|key| format!("{} = {}", key.name, value(key.name))).collect();
    if !sizes.is_empty() {
        out!("by its folder: {}", sizes.join(", "));
    }
    show(&compiled)?;
    out!("the run: {run}");
    if let Some(fitted) = &fitted {
        out!("{}", fitted.line());
    }
    exchanged.show(&config.ranks)?;
    let named: Vec<(&str, &[engine::passes::Receipt])> = compiled.iter().map(|(n, c)| (*n, &c.receipts[..])).collect();
    out_part!("{}", receipts_table(&named, a.verbose));
    Ok(ExitCode::SUCCESS)
}

/// A step of one rank of these, each with the examples that the config has for one, as estimated; and what it works through.
fn estimated(a: &PlanArgs, recipe: &dyn Recipe, config: &Config, ranks: Ranks, target: Target) -> Result<(Exchanged, (&'static str, f64))> {
    let mut config = config.clone();
    let batch = config.value("train", "batch").and_then(|b| b.as_integer()).unwrap_or(1);
    config.set(&format!("train.batch={}", batch as usize * ranks.data.size))?;
    config.ranks = ranks;
    let task = recipe.task(&config)?;
    let compiled = compile_for(&*task, &config.switches()?, target, None)?;
    Ok((Exchanged::of(&*task, &compiled, target, &a.ranks), task.work()))
}

/// The same of a rank alone, with its part of the batch.
fn alone(a: &PlanArgs, recipe: &dyn Recipe, config: &Config, target: Target) -> Result<Exchanged> {
    let mut config = config.clone();
    let batch = config.value("train", "batch").and_then(|b| b.as_integer()).unwrap_or(1) as usize;
    config.set(&format!("train.batch={}", (batch / config.ranks.data.size).max(1)))?;
    Ok(estimated(a, recipe, &config, Ranks::default(), target)?.0)
}

/// How long a step takes on so many GPUs, each with `train.batch` examples.
fn scaling(a: &PlanArgs, recipe: &dyn Recipe, config: &Config, sizes: &[usize]) -> Result<ExitCode> {
    let target = match a.for_sm {
        Some(sm) => engine::program::imagined(sm),
        None => Where::here(&a.device.open()?).target,
    };
    let sizes = sizes.iter().map(|&n| a.ranks.sizes("--scaling", n)).collect::<Result<Vec<_>>>()?;
    let (one, work) = estimated(a, recipe, config, Ranks::default(), target)?;
    // What two ranks exchange is taken for what any number does, because the graph of each number is not compiled. Their bytes are the same but for weights that
    // two ranks can divide (`zero`) and more cannot, which are all-reduced.
    let tensor = sizes.first().map_or(1, |s| s.tensor);
    undivided(&config.switches()?, &Ranks::planned(2, tensor), target).iter().for_each(|said| crate::warn!("{said}"));
    let many = estimated(a, recipe, config, Ranks::planned(2, tensor), target)?.0.beside(&one, &a.ranks);
    let count = |key: &str| config.value("train", key).and_then(|v| v.as_integer()).unwrap_or(1) as usize;
    many.scale(&sizes, work, count("batch") * count("accumulate"))?;
    Ok(ExitCode::SUCCESS)
}

/// The graph of a program; of the first if none is named.
fn chosen(mut graphs: Vec<(&'static str, Graph)>, name: Option<&str>) -> Result<Graph> {
    let place = name.map_or(Some(0), |name| graphs.iter().position(|g| g.0 == name));
    match place.filter(|i| *i < graphs.len()) {
        Some(i) => Ok(graphs.swap_remove(i).1),
        None => {
            let name = name.unwrap_or_default();
            bail!("--program {name}: there is no such program{}", known(name, graphs.iter().map(|g| g.0)))
        }
    }
}

fn shown_changes(dumped: &dump::Dumped, pass: &str, whole: bool) -> Result<ExitCode> {
    let lines = |text: &str| text.lines().count();
    if whole {
        out!("# before {pass}");
        out_part!("{}", dumped.before);
        out!("# after {pass}");
        out_part!("{}", dumped.after);
        return Ok(ExitCode::SUCCESS);
    }
    let changes = dumped.changes();
    out!("# {pass}: {} lines before, {} after; --whole prints all of them", lines(&dumped.before), lines(&dumped.after));
    out_part!("{changes}");
    if changes.is_empty() {
        out!("# it changes nothing here");
    }
    Ok(ExitCode::SUCCESS)
}

fn described((name, c): &(&str, Compiled)) -> serde_json::Value {
    let m = &c.plan.memory;
    let pass = |r: &engine::passes::Receipt| {
        serde_json::json!({
            "pass": r.pass, "mode": r.mode.name(), "sites": r.sites(), "applied": r.applied, "declined": r.declined, "notes": r.notes
        })
    };
    serde_json::json!({
        "program": name, "ops": c.graph.nodes.len(), "peak": m.peak(), "state": m.state, "activations": m.activations,
        "workspace": m.workspace, "tables": m.constants, "feeds": m.feeds, "flops": c.plan.cost.flops, "bytes": c.plan.cost.bytes,
        "parts": c.by_part(), "passes": c.receipts.iter().map(pass).collect::<Vec<_>>(),
    })
}

/// A program's description with what a memory budget chose, in the words of `bench --json`; the same for all programs of a run.
fn with_choice(mut described: serde_json::Value, fitted: Option<&Fitted>) -> serde_json::Value {
    if let Some(f) = fitted {
        described["memory_budget"] = f.asked.then_some(f.budget).into();
        described["chosen"] = f.changes.clone().into();
        described["estimated_more_time"] = (f.seconds[1] / f.seconds[0] - 1.0).into();
    }
    described
}

/// Memory and arithmetic of each program.
fn show(compiled: &[(&str, Compiled)]) -> Result<()> {
    let rows: Vec<Vec<String>> = compiled
        .iter()
        .map(|(name, c)| {
            let m = &c.plan.memory;
            let h = |b: usize| human_bytes(b as u64);
            let cost = &c.plan.cost;
            vec![
                name.to_string(),
                h(m.peak()),
                h(m.state),
                h(m.activations),
                h(m.workspace),
                h(m.constants + m.feeds),
                c.graph.nodes.len().to_string(),
                human_count(cost.flops as f64),
                human_bytes(cost.bytes),
            ]
        })
        .collect();
    out!("{}", table(&["program", "peak", "state", "activations", "workspace", "tables", "ops", "flops", "bytes moved"], &rows));
    for (name, c) in compiled {
        out!("{name}, the most that each part holds at a time: {}", by_part(c.by_part().into_iter().collect()));
    }
    out!();
    Ok(())
}

/// `head 1.00 MiB, layers.0 2.00 MiB, layers.1 to layers.27 1.50 MiB each`: by name and number, neighbors that hold the same together.
fn by_part(mut parts: Vec<(String, usize)>) -> String {
    let numbered = |name: &str| name.rsplit_once('.').and_then(|(layer, number)| Some((layer.to_string(), number.parse::<usize>().ok()?)));
    parts.sort_by_cached_key(|(name, _)| numbered(name).unwrap_or((name.clone(), 0)));
    let layer = |name: &str| numbered(name).map(|(layer, _)| layer);
    let alike = |a: &(String, usize), b: &(String, usize)| a.1 == b.1 && layer(&a.0).is_some() && layer(&a.0) == layer(&b.0);
    let one = |same: &[(String, usize)]| match same {
        [(name, bytes)] => format!("{name} {}", human_bytes(*bytes as u64)),
        [(first, bytes), .., (last, _)] => format!("{first} to {last} {} each", human_bytes(*bytes as u64)),
        [] => String::new(),
    };
    parts.chunk_by(alike).map(one).collect::<Vec<_>>().join(", ")
}

/// One line a node: number, what it is, its inputs, its outputs with their buffers and lifetimes, and where it was recorded.
fn nodes(c: &Compiled) -> Result<ExitCode> {
    for (i, node) in c.graph.nodes.iter().enumerate() {
        let inputs: Vec<String> = node.inputs.iter().map(|v| format!("%{}.{} {:?}", v.node, v.out, c.graph.meta(*v))).collect();
        let outputs: Vec<String> = node
            .outputs
            .iter()
            .zip(&c.plan.spots[i])
            .map(|(meta, spot)| {
                let b = &c.plan.buffers[spot.buffer];
                format!("{meta:?} in {} ({}..{})", spot.buffer, b.first, b.last)
            })
            .collect();
        for copy in c.plan.copies.iter().filter(|c| c.node == i) {
            out!("{i} copies input {} to element {} of output {}", copy.input, copy.at, copy.out);
        }
        let direction = if node.backward { "'" } else { "" };
        let what = match &node.kind {
            engine::graph::Kind::State(s) => format!("state {}", s.name),
            engine::graph::Kind::Feed(name) => format!("feed {name}"),
            _ => format!("{}{direction}", node.name()),
        };
        out!("{i} {what} <- {} -> {} @ {}", inputs.join(", "), outputs.join(", "), node.scope);
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_in_the_order_of_their_numbers_and_equal_ones_together() {
        let layers = (0..28).map(|i| (format!("layers.{i}"), if i == 0 { 2 << 20 } else { 3 << 20 }));
        let parts =
            layers.chain([("loss", 1 << 10), ("head", 1 << 20), ("embed.0", 3 << 20)].map(|(name, bytes)| (name.to_string(), bytes)));
        let sorted: std::collections::BTreeMap<String, usize> = parts.collect();
        assert_eq!(
            by_part(sorted.into_iter().collect()),
            "embed.0 3.00 MiB, head 1.00 MiB, layers.0 2.00 MiB, layers.1 to layers.27 3.00 MiB each, loss 1.00 KiB"
        );
    }
}
