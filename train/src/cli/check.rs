//! `kiln check`: ops, passes, kernels and golden files against what they should be, and whether passes that are on cost time.

use super::{DeviceArgs, Recipes, SwitchArgs, offered};
use crate::golden::{Compared, Golden, Rule, compare, rule};
use crate::recipe::{Computed, find_in};
use crate::report::table;
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use engine::check::{Outcome, PLANTED, Verdict, check_case, check_pass, check_planted, kernel_texts};
use engine::cuda::nvrtc::Compiler;
use engine::extension::ops;
use engine::kernel::Arch;
use engine::op::Case;
use engine::passes::all;
use engine::passes::known;
use engine::{DType, Device, Switches};
use rayon::prelude::*;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln check ops
  kiln check passes
  kiln check defaults
  kiln check golden reference/golden/{golden}.safetensors
  kiln check all --device cuda")]
pub struct CheckArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Every case of every op: gradient, repeatability, fused against unfused, narrow types
    #[command(after_help = "Examples:
  kiln check ops
  kiln check ops attention
  kiln check ops ssd --case 16k --device cuda    # a shape that is timed")]
    Ops {
        /// Only ops whose name has this in it
        filter: Option<String>,
        /// Only cases whose name has this in it; on a GPU, also the large shapes that `kiln bench ops` times: kernels may divide their work otherwise there
        #[arg(long, value_name = "NAME")]
        case: Option<String>,
        #[command(flatten)]
        device: DeviceArgs,
    },
    /// Every pass against itself switched off
    #[command(after_help = "Examples:
  kiln check passes")]
    Passes(DeviceArgs),
    /// Times every recipe's step with and without each pass that is on by default; fails where one costs more than 10% on a CPU, 2% on a GPU
    #[command(after_help = "Examples:
  kiln check defaults
  kiln check defaults {recipe} --preset {preset} --device cuda")]
    Defaults(super::bench::DefaultsArgs),
    /// Whether the checks of ops find kernels that are wrong on purpose
    #[command(hide = true)]
    Planted(DeviceArgs),
    /// Runs the kernels of every op on the CPU (their CUDA text compiled with g++) and compares with the CPU's numbers, without a GPU
    #[command(after_help = "Examples:
  kiln check emulate
  kiln check emulate softmax
  kiln check emulate --every        # large cases too: many minutes")]
    Emulate {
        /// Only ops whose name holds this, with all of their cases
        filter: Option<String>,
        /// Large cases too
        #[arg(long)]
        every: bool,
    },
    /// Compiles the kernels of every op for every architecture, without a GPU
    #[command(after_help = "Examples:
  kiln check kernels
  kiln check kernels --every-shape --sm 90
  kiln check kernels attention --sm 90")]
    Kernels {
        /// Only ops whose name has this in it
        filter: Option<String>,
        /// Compute capabilities, as in 90 for 9.0
        #[arg(long, default_values_t = [80, 89, 90, 100, 120], value_parser = clap::value_parser!(u32).range(80..=130))]
        sm: Vec<u32>,
        /// Also kernels that differ from another one only in numbers, such as the length of a row
        #[arg(long)]
        every_shape: bool,
    },
    /// Everything: ops, passes, the golden files that kiln carries (in f32, and in bf16 by direction); one table at the end
    #[command(after_help = "Examples:
  kiln check all --device cuda")]
    All(DeviceArgs),
    /// Compares with golden files that reference/golden.py made
    #[command(after_help = "Examples:
  kiln check golden reference/golden/{golden}.safetensors
  kiln check golden mine.safetensors --tolerance 1e-5 --write ours.safetensors
  kiln check golden reference/golden/{golden}.safetensors --pass bf16=auto")]
    Golden(GoldenArgs),
    /// Opens a model's folder: what it holds, and what the model answers
    #[command(after_help = "Examples:
  kiln check model models/qwen3-0.6b --prompt 'The capital of France is'
  kiln check model models/llama --adapter adapters/mine --ids '1 2 3' --ids '7 8' --write logits.safetensors")]
    Model(super::model::ModelArgs),
    /// Opens an encoder's folder, as sentence-transformers writes it, and embeds texts
    #[command(after_help = "Examples:
  kiln check encoder models/all-MiniLM-L6-v2 --text 'a cat' --text 'a dog' --write embeddings.safetensors")]
    Encoder(super::encoder::EncoderArgs),
}

#[derive(Args)]
struct GoldenArgs {
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Largest norm(ours - theirs) / norm(theirs) of a tensor
    #[arg(long, default_value_t = 1e-4)]
    tolerance: f64,
    /// Where a pass that rounds to narrower types is on: tensors may be as far from the golden ones as vectors with this cosine are. By
    /// default 5%, how parameters moved 10%; more only where rounding the parameters alone changes as much
    #[arg(long)]
    cosine: Option<f64>,
    /// Saves what kiln computed, under the golden file's names
    #[arg(long, value_name = "OUT.safetensors")]
    write: Option<PathBuf>,
    #[command(flatten)]
    switches: SwitchArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn run(a: CheckArgs, recipes: Recipes) -> Result<ExitCode> {
    match a.what {
        What::Ops { filter, case, device } => {
            let (ops, device) = (ops_called(filter)?, device.open()?);
            let large = case.is_some() && matches!(device, Device::Cuda(..));
            let wanted = |c: &Case| case.as_ref().is_none_or(|n| c.name.contains(n.as_str())) && (large || !c.bench);
            if let Some(name) = &case
                && !ops.iter().flat_map(|o| o.cases).any(wanted)
            {
                bail!(
                    "no case of {} is called '{name}'{}",
                    ops.iter().map(|o| o.name).collect::<Vec<_>>().join(", "),
                    if large { "" } else { " among those for the CPU; with --device cuda, large shapes are cases too" }
                );
            }
            report(ops.into_iter().flat_map(|o| op_outcomes(o, wanted, &device)))
        }
        What::Passes(d) => {
            let device = d.open()?;
            report(all().map(|p| check_pass(p, &device)))
        }
        What::Defaults(a) => super::bench::defaults(a, recipes),
        What::Planted(d) => report(check_planted(&d.open()?).into_iter()),
        What::All(d) => everything(&d.open()?, recipes),
        What::Emulate { filter, every } => {
            let every = every || filter.is_some();
            let ops = ops_called(filter)?;
            let folder = crate::gpu::cache().join("emulator");
            match engine::cuda::emulator::check(&ops, &folder, every, &mut |line| crate::say!("{line}")) {
                Ok(()) => Ok(ExitCode::SUCCESS),
                Err(e) => bail!("{e}"),
            }
        }
        What::Kernels { filter, sm, every_shape } => kernels(&ops_called(filter)?, &sm, every_shape),
        What::Golden(g) => golden(g, recipes),
        What::Model(m) => super::model::run(m),
        What::Encoder(e) => super::encoder::run(e),
    }
}

/// The ops whose name holds a word; all without one.
fn ops_called(filter: Option<String>) -> Result<Vec<&'static engine::op::Entry>> {
    let name = filter.unwrap_or_default();
    let called: Vec<_> = ops().into_iter().filter(|o| o.name.contains(&name)).collect();
    if called.is_empty() {
        bail!("no op is called '{name}'{}", known(&name, ops().into_iter().map(|o| o.name)));
    }
    Ok(called)
}

fn op_outcomes<'a>(
    op: &'a engine::op::Entry,
    wanted: impl Fn(&Case) -> bool + 'a,
    device: &'a Device,
) -> impl Iterator<Item = Outcome> + 'a {
    op.cases.iter().filter(move |c| wanted(c)).flat_map(|c| check_case(op.name, c, device))
}

fn everything(device: &Device, recipes: Recipes) -> Result<ExitCode> {
    let mut rows = vec![];
    let (mut failures, mut missing) = (0, 0);
    let mut add = |what: String, outcomes: &mut dyn Iterator<Item = Outcome>| -> Result<()> {
        let (mut passed, mut failed, mut unchecked, mut worst) = (0, 0, 0, 0.0f64);
        for o in outcomes {
            match o.verdict {
                Verdict::Passed(error) => {
                    passed += 1;
                    worst = worst.max(error);
                }
                Verdict::Failed(problem) => {
                    failed += 1;
                    out!("FAIL  {}: {problem}", o.name);
                }
                Verdict::NotChecked(_) => unchecked += 1,
            }
        }
        failures += failed;
        missing += unchecked;
        let worst = if passed > 0 { format!("{worst:.3}") } else { "-".into() };
        rows.push([what].into_iter().chain([passed, failed, unchecked].map(|n| n.to_string())).chain([worst]).collect());
        Ok(())
    };
    for op in ops() {
        add(format!("op {}", op.name), &mut op_outcomes(op, |c| !c.bench, device))?;
    }
    add("planted mistakes".into(), &mut check_planted(device).into_iter())?;
    for pass in all() {
        add(format!("pass {}", pass.name()), &mut std::iter::once(check_pass(pass, device)))?;
    }
    for (name, reference) in recipes.iter().filter_map(|r| Some((r.name(), r.reference()?))) {
        for (what, switches) in [("f32", Switches::default()), ("bf16", Switches::default().with("bf16", "auto")?)] {
            let file = Golden::read(name, reference.file().to_vec())?;
            let rule = rule(reference, &file, &switches, device, 1e-4, None)?;
            let computed = reference.compute(&file, &switches, device)?;
            let outcome = |c: Compared| {
                let problem = || format!("off by {:.2e}, cosine {:.5}", c.error, c.cosine);
                let verdict = if c.ok { Verdict::Passed((c.error / c.allowed).min(1.0)) } else { Verdict::Failed(problem()) };
                Outcome { name: format!("{name} {what}: {}", c.name), verdict }
            };
            add(format!("golden {name}, {what}"), &mut compare(&file, &computed, &rule).into_iter().map(outcome))?;
        }
    }
    out!("on {}", device.describe());
    out_part!("{}", table(&["what", "passed", "failed", "not checked here", "worst, of what is allowed"], &rows));
    let rest = if missing > 0 { format!("; {missing} not checked here: they need a GPU") } else { String::new() };
    out!("{}{rest}", if failures == 0 { "nothing failed".to_string() } else { format!("{failures} failed") });
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn report(outcomes: impl Iterator<Item = Outcome>) -> Result<ExitCode> {
    let (mut passed, mut failed, mut unchecked) = (0, 0, 0);
    for o in outcomes {
        match o.verdict {
            Verdict::Passed(error) => {
                passed += 1;
                out!("ok    {:<60} {error:.3} of what is allowed", o.name);
            }
            Verdict::Failed(problem) => {
                failed += 1;
                out!("FAIL  {:<60} {problem}", o.name);
            }
            Verdict::NotChecked(why) => {
                unchecked += 1;
                out!("-     {:<60} not checked here: {why}", o.name);
            }
        }
    }
    let rest = if unchecked > 0 { format!(", {unchecked} not checked here") } else { String::new() };
    out!("{passed} passed, {failed} failed{rest}");
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A kernel's source without its numbers.
fn without_numbers(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_ascii_digit() {
            true if out.ends_with('0') => {}
            true => out.push('0'),
            false => out.push(c),
        }
    }
    out
}

fn kernels(ops: &[&engine::op::Entry], sm: &[u32], every_shape: bool) -> Result<ExitCode> {
    let folders = crate::gpu::folders();
    let mut failed = 0;
    // What the oldest and the newest architecture compile, those between them do too, as long as the source is the same.
    let mut sms = sm.to_vec();
    sms.sort();
    sms.dedup();
    let mut same_as_oldest: HashSet<String> = HashSet::new();
    for &sm in &sms {
        let arch = Arch { sm, multiprocessors: 132 };
        let compiler = Compiler::without_gpu(arch, &folders)?;
        let cases = ops.iter().flat_map(|op| op.cases.iter().map(|c| (op.name, c))).chain(PLANTED.iter().map(|c| ("planted", c)));
        let cases: Vec<_> = cases.flat_map(|(op, case)| [DType::F32, DType::BF16, DType::F16].map(|dtype| (op, case, dtype))).collect();
        let texts_of = |&(op, case, dtype): &(&str, &Case, DType)| {
            let own = kernel_texts(case, dtype, arch).map_err(|e| anyhow::anyhow!("{op}: {}: {e}", case.name))?;
            Ok(own.into_iter().map(|t| (t, format!("{op}: {} ({dtype})", case.name))).collect::<Vec<_>>())
        };
        let texts = cases.par_iter().map(texts_of).collect::<Result<Vec<_>>>()?;
        let mut texts: Vec<(String, String)> = texts.into_iter().flatten().collect();
        // Of those that differ only in numbers the shortest, which has the smallest.
        texts.sort_by(|a, b| (a.0.len(), a).cmp(&(b.0.len(), b)));
        let mut seen = HashSet::new();
        texts.retain(|(text, _)| seen.insert(if every_shape { text.clone() } else { without_numbers(text) }));
        let count = texts.len();
        match (sms.first(), sms.last()) {
            (Some(&oldest), _) if sm == oldest => same_as_oldest = texts.iter().map(|t| t.0.clone()).collect(),
            (_, Some(&newest)) if sm == newest => {}
            _ => texts.retain(|(text, _)| !same_as_oldest.contains(text)),
        }
        for chunk in texts.chunks(64) {
            let sources: Vec<&str> = chunk.iter().map(|t| t.0.as_str()).collect();
            for ((_, name), made) in chunk.iter().zip(compiler.compile_all(&sources)) {
                if let Err(e) = made {
                    failed += 1;
                    out!("FAIL  {name}: {e}");
                }
            }
        }
        let same = match count - texts.len() {
            0 => String::new(),
            same => format!(", {same} of them the same as for sm_{}", sms[0]),
        };
        out!("{}: {count} kernels{same}", arch.name());
    }
    out!("{} passed, {failed} failed", if failed == 0 { sms.len() } else { 0 });
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn golden(a: GoldenArgs, recipes: Recipes) -> Result<ExitCode> {
    if a.write.is_some() && a.files.len() > 1 {
        bail!("--write takes one golden file at a time");
    }
    if let Some(out) = a.write.as_ref().filter(|out| a.files.iter().any(|f| f.canonicalize().ok() == out.canonicalize().ok() && f.exists()))
    {
        bail!("--write {} is the golden file itself", out.display());
    }
    if !(a.tolerance.is_finite() && a.tolerance >= 0.0) {
        bail!("--tolerance {} is not a number from 0 on", a.tolerance);
    }
    if let Some(cosine) = a.cosine.filter(|c| !(0.0..=1.0).contains(c)) {
        bail!("--cosine {cosine} is not between 0 and 1");
    }
    let device = a.device.open()?;
    let switches = a.switches.over(Switches::default())?;
    let mut failed = false;
    for path in &a.files {
        let file = Golden::open(path)?;
        let reference = offered(recipes, find_in(recipes, &file.recipe)?, "compute golden files", |r| r.reference())?;
        let computed = reference.compute(&file, &switches, &device).with_context(|| path.display().to_string())?;
        if let Some(out) = &a.write {
            write(out, &file, &computed)?;
        }
        let rule = rule(reference, &file, &switches, &device, a.tolerance, a.cosine.map(|c| (2.0 - 2.0 * c).sqrt()))?;
        let all = compare(&file, &computed, &rule);
        out!("{} ({})", path.display(), file.recipe);
        if let Rule::Narrow(_) = rule {
            out!(
                "in narrower types: losses and metrics to 1%, tensors to 5%, how parameters moved to 10%, or three times what rounding the parameters changes in f32; routers and guesses choose as in f32"
            );
        }
        summary(&all)?;
        for c in all.iter().filter(|c| !c.ok) {
            failed = true;
            match (file.shape(&c.name), computed.contains_key(&c.name)) {
                (None, _) => out!("FAIL  {}: the file has no such tensor", c.name),
                (_, false) => out!("FAIL  {}: kiln does not compute it", c.name),
                _ => out!("FAIL  {}: error {:.3e}, {:.1e} is allowed (cosine {:.6})", c.name, c.error, c.allowed, c.cosine),
            }
        }
        out!("{} passed, {} failed", all.iter().filter(|c| c.ok).count(), all.iter().filter(|c| !c.ok).count());
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Saves what kiln computed, under the golden file's names.
fn write(out: &Path, file: &Golden, computed: &Computed) -> Result<()> {
    let bytes: HashMap<&String, (Vec<usize>, Vec<u8>)> =
        computed.iter().map(|(n, v)| (n, (file.shape(n).unwrap_or_else(|| vec![v.len()]), bytemuck::cast_slice(v).to_vec()))).collect();
    let views = bytes.iter().map(|(n, (shape, b))| Ok((n.as_str(), TensorView::new(Dtype::F32, shape.clone(), b)?)));
    let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
    Ok(crate::run::write_bytes(out, &safetensors::serialize(views, None)?)?)
}

/// The worst of each kind, and every gradient.
fn summary(all: &[Compared]) -> Result<()> {
    let mut rows = vec![];
    for (what, prefix) in
        [("loss", "loss"), ("metrics", "metric/"), ("outputs", "output/"), ("gradients", "grad/"), ("after the last step", "after/")]
    {
        let own: Vec<&Compared> = all.iter().filter(|c| c.name.starts_with(prefix)).collect();
        if let Some(worst) = own.iter().max_by(|x, y| x.error.total_cmp(&y.error)) {
            // What is no number is the least of all.
            let least = own.iter().map(|c| c.cosine).fold(1.0, |least, c| if c >= least { least } else { c });
            rows.push(vec![what.into(), own.len().to_string(), format!("{:.2e}", worst.error), worst.name.clone(), format!("{least:.6}")]);
        }
    }
    out_part!("{}", table(&["what", "tensors", "worst error", "in", "least cosine"], &rows));
    let gradients: Vec<Vec<String>> = all
        .iter()
        .filter(|c| c.name.starts_with("grad/"))
        .map(|c| vec![c.name.clone(), format!("{:.2e}", c.error), format!("{:.6}", c.cosine)])
        .collect();
    if !gradients.is_empty() {
        out_part!("{}", table(&["gradient by parameter", "error", "cosine"], &gradients));
    }
    Ok(())
}
