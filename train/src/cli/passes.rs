//! `kiln passes`: every pass and executor setting, with its default, its settings and what it changes in the numbers.

use super::{PresetArgs, Recipes, write_json};
use crate::report::table;
use anyhow::{Result, bail};
use clap::Args;
use engine::executor::EXECUTOR;
use engine::passes::{Numerics, Preset, Stage, Switch, Target, all};
use engine::program::imagined;
use engine::{DType, Switches};
use std::process::ExitCode;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln passes
  kiln passes --optimize fast --for-sm 80
  kiln train {recipe} --pass recompute=auto,what=memory-bound --pass flash-attention=require
  kiln passes --markdown")]
pub struct PassesArgs {
    /// Prints Markdown: docs/passes.md
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// Prints JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    preset: PresetArgs,
    /// With --optimize: the GPU of the table, 90 for compute capability 9.0
    #[arg(long, value_name = "SM", value_parser = clap::value_parser!(u32).range(80..=130), default_value_t = 90, requires = "optimize")]
    for_sm: u32,
}

pub fn run(a: PassesArgs, _: Recipes) -> Result<ExitCode> {
    if let Some(preset) = a.preset.optimize {
        if a.markdown || a.json {
            bail!("--optimize prints a table: leave out --markdown and --json");
        }
        return show(preset, a.for_sm);
    }
    if a.markdown {
        out_part!("{}", page());
    } else if a.json {
        write_json(None, &all().map(json).collect())?;
    } else {
        out!("Passes, in running order. Switch one with --pass NAME=off|auto|require[,setting=value].\n");
        for p in all() {
            out!("{} (default: {})\n    {}\n    f32 on the CPU: {}", p.name(), p.default_mode().name(), p.about(), on_cpu(p));
            for s in p.settings() {
                out!("    {}={}: {}", s.name, s.default, s.about);
            }
            out!();
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What a preset does with every switch: on the CPU, on a GPU, and there for a run that asks for bf16.
fn show(preset: Preset, sm: u32) -> Result<ExitCode> {
    let gpu = imagined(sm);
    let plain = Switches::of(preset);
    let bf16 = plain.clone().with("bf16", "auto")?;
    let mut rows = vec![];
    for p in all().filter(|p| !p.required()) {
        let mode = |switches: &Switches, target| switches.mode(p, target).name().to_string();
        let note = plain.mode_and_note(p, gpu).1.unwrap_or_default();
        rows.push(vec![p.name().into(), mode(&plain, Target::Cpu), mode(&plain, gpu), mode(&bf16, gpu), numbers(p), note]);
    }
    let on_gpu = format!("GPU {}.{}", sm / 10, sm % 10);
    out!("--optimize {}: the mode of every pass of which neither --pass nor [passes] says anything\n", preset.name());
    out_part!("{}", table(&["pass", "CPU", &on_gpu, "with bf16=auto", "numbers", "notes"], &rows));
    Ok(ExitCode::SUCCESS)
}

fn described(numerics: Numerics) -> &'static str {
    match numerics {
        Numerics::Exact => "bit for bit the same",
        Numerics::Reordered => "the same sums in another order",
        Numerics::LowPrecision => "rounded to a narrower type",
        Numerics::Changed => "those of another model",
    }
}

fn on_cpu(p: &dyn Switch) -> &'static str {
    described(p.numerics(Target::Cpu, DType::F32))
}

fn json(p: &'static dyn Switch) -> serde_json::Value {
    let setting = |s: &engine::passes::Setting| serde_json::json!({ "name": s.name, "default": s.default, "about": s.about });
    let settings: Vec<serde_json::Value> = p.settings().iter().map(setting).collect();
    serde_json::json!({
        "name": p.name(), "about": p.about(), "default": p.default_mode().name(), "numerics": on_cpu(p), "settings": settings
    })
}

/// What switching it changes in the numbers, on the CPU and on a GPU.
fn numbers(p: &dyn Switch) -> String {
    let gpu = |dtype| described(p.numerics(imagined(90), dtype));
    let (cpu, f32, bf16) = (on_cpu(p), gpu(DType::F32), gpu(DType::BF16));
    match () {
        _ if p.needs_gpu() && f32 == bf16 => f32.into(),
        _ if p.needs_gpu() => format!("{f32} in f32, {bf16} in bf16"),
        _ if cpu == f32 && f32 == bf16 => cpu.into(),
        _ if cpu == f32 => format!("{cpu} in f32, {bf16} in bf16"),
        _ if f32 == bf16 => format!("{cpu} in f32 on the CPU, {f32} on a GPU"),
        _ => format!("{cpu} in f32 on the CPU; on a GPU {f32} in f32, {bf16} in bf16"),
    }
}

/// The name of a stage, and the state in which its passes leave the graph.
fn stage(stage: Stage) -> (&'static str, &'static str) {
    match stage {
        Stage::Recorded => ("Recorded", "The graph as the model's code recorded it: composite ops, f32, gradients only asked for."),
        Stage::Fused => ("Fused", "Composite ops (attention, the loss head) become fused ops, or are written out in plain ones."),
        Stage::Typed => ("Typed", "Every value gets the data type in which it is computed."),
        Stage::Differentiated => {
            ("Differentiated", "Gradients become ops like all others, and ops whose results nothing reads are removed.")
        }
        Stage::Scheduled => ("Scheduled", "Ops move to where they run; what is recomputed in the backward pass is there twice."),
        Stage::Lowered => {
            ("Lowered", "Ops become those that the executor launches, and read their inputs with the strides that these have.")
        }
    }
}

/// Words in lines of at most 120 characters; lines after the first begin with `indent`.
fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is always a line");
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > 120 {
            lines.push(format!("{indent}{word}"));
        } else {
            *line += if line.is_empty() { "" } else { " " };
            *line += word;
        }
    }
    lines.join("\n")
}

fn entry(p: &dyn Switch) -> String {
    let mode = if p.required() { "always on".into() } else { format!("`{}`", p.default_mode().name()) };
    let device = if p.needs_gpu() { ", on a GPU only" } else { "" };
    let mut text = format!("### {}\n\n{}\n\n", p.name(), wrapped(p.about(), ""));
    text += &format!("- Default: {mode}{device}.\n- Numbers: {}.\n", numbers(p));
    for s in p.settings() {
        text += &format!("{}\n", wrapped(&format!("- `{}={}`: {}.", s.name, s.default, s.about.trim_end_matches('.')), "  "));
    }
    text + "\n"
}

/// docs/passes.md
fn page() -> String {
    let passes = engine::extension::passes();
    let example = passes.iter().find_map(|p| p.settings().first().map(|s| format!("{}=auto,{}={}", p.name(), s.name, s.default)));
    let mut text = format!(
        "# Passes and executor settings

<!-- Made by `kiln passes --markdown > docs/passes.md`. -->

Every optimisation is a pass over the recorded graph. Passes run in the order of this page, stage by stage.

Switch one with `--pass NAME=off|auto|require`; settings follow after commas, as in `--pass {}`. With `auto`, a pass applies
where it can and says where and why it declined. With `require`, a site that it declines is an error. In a config file, passes are keys of the
section `[passes]`.

Presets switch all passes of which nothing else is said, by what they change in the numbers: `--optimize none`, `exact` (those that are bit for bit
the same), `reordered` (also sums in another order; f32, on a GPU with TF32), `mixed` (the default: on a GPU also bf16 with f32 parameters) and `fast`
(also FP8 where the GPU has it). With `none` and `exact` a run computes in f32 without TF32, whatever its recipe's preset says. In a config
file, that is the key `optimize`. `kiln passes --optimize fast` shows what a preset switches.

\"Numbers\" says what switching the pass changes in the results. `kiln bench RECIPE --ledger` measures that, and what each pass gains.
\n",
        example.unwrap_or("NAME=auto,setting=value".into())
    );
    let mut last = None;
    for pass in passes {
        if last.replace(pass.stage()) != Some(pass.stage()) {
            let (name, about) = stage(pass.stage());
            text += &format!("## {name}\n\n{about}\n\n");
        }
        text += &entry(pass);
    }
    text += "## Executor settings\n\nThese change how a program runs on a GPU, and rewrite nothing.\n\n";
    let settings: String = EXECUTOR.iter().map(|s| entry(s)).collect();
    text + settings.trim_end() + "\n"
}
