//! The command line: one file a subcommand. It knows recipes by the table that it is given, and asks them for what they can do.

/// Prints a line, or gives the error to the caller: a closed pipe ends the command quietly, a full disk does not.
macro_rules! out {
    () => { out_part!("\n") };
    ($($text:tt)*) => { out_part!("{}\n", format_args!($($text)*)) };
}

/// As `out!`, without the end of the line.
macro_rules! out_part {
    ($($text:tt)*) => {{
        use std::io::Write;
        std::io::stdout().write_all($crate::report::shown(&format!($($text)*)).as_bytes())?
    }};
}

/// Prints a line of JSON. It reads as what it was made of, to the last control character.
macro_rules! out_json {
    ($json:expr) => {
        out!("{}", $crate::report::shown_in_json(&$json))
    };
}

mod bench;
mod budget;
mod chats;
mod check;
mod completions;
mod config;
mod data;
mod doctor;
mod encoder;
mod eval;
mod export;
mod generate;
mod man;
mod model;
mod outputs;
mod passes;
mod plan;
mod predict;
mod profile;
mod progress;
mod prompts;
mod prune;
mod recipes;
mod report;
mod runs;
mod signals;
mod solve;
mod train;
mod watch;

use crate::checkpoint::{AVERAGED, Checkpoint, Loaded};
use crate::config::{Config, Setting, Value, flag_meant, named_in, read_file};
use crate::data::Paths;
use crate::launch::World;
use crate::recipe::{self, Recipe};
use crate::run::{find_best, find_checkpoint};
use anyhow::{Context, Result, bail};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use engine::passes::Preset;
use engine::{Device, Switches};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What the command line trains and uses; the first is trained where none is named.
pub type Recipes<'a> = &'a [&'a dyn Recipe];

#[derive(Parser)]
#[command(
    name = "kiln",
    version,
    about = "A training engine whose every optimisation is a switch with a receipt.",
    after_help = "Examples:
  kiln train                                  train {recipe}'s first preset
  kiln train {recipe} --preset {preset} --out runs/a --set batch=4
  kiln train --out runs/a --resume            go on where runs/a stopped
  kiln watch                                  curves of all runs under runs/ in a browser
  kiln eval runs/a                            what its newest checkpoint is worth
  kiln generate runs/a --prompt 'the '        let it write
  kiln train {classifies} --out runs/v          an image classifier, on drawn pictures
  kiln predict runs/v picture.png             what it sees in a picture
  kiln train {solves} --out runs/s                 a model that thinks about puzzles until it is sure
  kiln solve runs/s                           its answers, segment by segment
  kiln plan {recipe} --preset {preset}               memory and arithmetic, without running
  kiln check golden reference/golden/{golden}.safetensors"
)]
struct Kiln {
    #[command(subcommand)]
    command: Command,
}

/// Makes the enum of subcommands from a line each: help, name, and the arguments in the module that runs it.
macro_rules! commands {
    ($(#[$about:meta] $name:ident: $module:ident::$args:ident,)*) => {
        #[derive(Subcommand)]
        enum Command {
            $(#[$about] $name($module::$args),)*
        }

        impl Command {
            fn run(self, recipes: Recipes) -> Result<ExitCode> {
                match self {
                    $(Command::$name(a) => $module::run(a, recipes),)*
                }
            }
        }
    };
}

commands! {
    /// Trains a recipe
    Train: train::TrainArgs,
    /// Lists runs: how each is doing, its best validation, its speed
    Runs: runs::RunsArgs,
    /// Serves a page on this machine with live curves of all runs in a folder
    Watch: watch::WatchArgs,
    /// Writes the page of some runs as one HTML file, which opens from disk
    Report: report::ReportArgs,
    /// Validation losses of a checkpoint; of a classifier also accuracy by class and a confusion matrix
    Eval: eval::EvalArgs,
    /// Continues a prompt, replies to it or chats: with a checkpoint, a model's folder or an adapter's
    Generate: generate::GenerateArgs,
    /// Classifies pictures with a checkpoint
    Predict: predict::PredictArgs,
    /// Solves puzzles with a checkpoint, and shows the answers after each segment
    Solve: solve::SolveArgs,
    /// Writes a checkpoint for other programs: a model for transformers, adapters for PEFT, a GGUF file for llama.cpp
    Export: export::ExportArgs,
    /// Prunes a model's folder to 2:4 sparsity, or says whether it is pruned
    Prune: prune::PruneArgs,
    /// Memory, arithmetic and what every pass would do, without running
    Plan: plan::PlanArgs,
    /// Checks ops, passes, golden files, or the folder of a model or an encoder
    Check: check::CheckArgs,
    /// Lists the recipes, their presets and what their metrics mean
    Recipes: recipes::RecipesArgs,
    /// Lists a recipe's config keys: type, default, range and meaning
    Config: config::ConfigKeysArgs,
    /// Lists the passes: what they do, their modes and settings
    Passes: passes::PassesArgs,
    /// What this machine has, and what kiln can use of it
    Doctor: doctor::DoctorArgs,
    /// Prepares and inspects data sets, and shows what training sees of them
    Data: data::DataArgs,
    /// Times the step of a preset, every op, or replies to prompts
    Bench: bench::BenchArgs,
    /// Where a step's time goes, by op and layer: a trace, and a digest with the roofline
    Profile: profile::ProfileArgs,
    /// Prints a script that completes kiln's commands in a shell
    Completions: completions::CompletionsArgs,
    /// Writes a man page for every command
    Man: man::ManArgs,
}

/// Runs the command line with these recipes: the whole of a program's `main`.
///
/// ```no_run
/// # use kiln::recipes::RECIPES;
/// kiln::main(RECIPES);
/// ```
pub fn main(recipes: Recipes) -> ExitCode {
    crate::guarded::hide_panics();
    if let Some(code) = crate::apart::serve() {
        return code;
    }
    let _guard = crate::launch::EndsOthers;
    let ended = run(recipes);
    crate::gpu::remove_own_cache();
    match ended {
        Ok(code) => {
            crate::launch::finish();
            code
        }
        // Whoever read our output has seen enough.
        Err(e) if e.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe) => {
            crate::launch::abort(0);
            ExitCode::SUCCESS
        }
        Err(e) => {
            crate::warn!("error: {e:#}");
            crate::launch::abort(1);
            ExitCode::FAILURE
        }
    }
}

fn run(recipes: Recipes) -> Result<ExitCode> {
    recipes.iter().filter_map(|r| r.extension()).try_for_each(engine::register)?;
    let matches = command(recipes).try_get_matches().unwrap_or_else(|e| refuse(e, recipes));
    Kiln::from_arg_matches(&matches).unwrap_or_else(|e| refuse(e, recipes)).command.run(recipes)
}

/// Ends with what clap has to say, in its colors. It quotes the command line, whose words may be names of files (`kiln runs *`): where a terminal would obey
/// one, they are read again as they are shown.
fn refuse(e: clap::Error, recipes: Recipes) -> ! {
    let e = with_settings(e, recipes);
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let shown: Vec<_> = words.iter().map(|word| crate::report::shown(word)).collect();
    if words.iter().eq(&shown) {
        e.exit();
    }
    match command(recipes).try_get_matches_from(shown.iter().map(|word| &**word)) {
        Err(e) => with_settings(e, recipes).exit(),
        // Only as it was it is wrong.
        Ok(_) => {
            crate::warn!("{}", e.render());
            std::process::exit(e.exit_code())
        }
    }
}

/// Other trainers have a flag for every setting: whoever types one is told the key. What is written like it means something else.
fn with_settings(mut e: clap::Error, recipes: Recipes) -> clap::Error {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let typed = match e.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(typed)) if e.kind() == ErrorKind::UnknownArgument => typed.clone(),
        _ => return e,
    };
    let sets = |c: &clap::Command| c.get_arguments().any(|a| a.get_long() == Some("set"));
    let named = std::env::args().nth(1).unwrap_or_default();
    let keys: Vec<String> =
        recipes.iter().flat_map(|r| r.sections()).flat_map(|s| s.keys.iter().map(|k| k.name.to_string()).collect::<Vec<_>>()).collect();
    if let Some(meant) = flag_meant(&typed, &keys).filter(|_| command(recipes).find_subcommand(&named).is_some_and(sets)) {
        e.remove(ContextKind::SuggestedArg);
        e.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![format!("here it is '{meant}'").into()]));
    }
    e
}

/// The command line, with the names of these recipes in its examples. Help leaves out what no recipe offers.
fn command(recipes: Recipes) -> clap::Command {
    fn fill(command: clap::Command, names: &[(&str, Option<&str>)], program: &str) -> clap::Command {
        let text = command.get_after_help().map(|t| t.to_string()).unwrap_or_default();
        let named = |line: &str| {
            let whole = names.iter().try_fold(line.to_string(), |line, (key, name)| match line.contains(key) {
                true => name.map(|name| line.replace(key, name)),
                false => Some(line),
            });
            whole.map(|line| line.strip_prefix("  kiln ").map_or(line.clone(), |rest| format!("  {program} {rest}")))
        };
        let lines: Vec<String> = text.lines().filter_map(named).collect();
        let command = if text.is_empty() { command } else { command.after_help(lines.join("\n")) };
        command.mut_subcommands(|c| fill(c, names, program))
    }
    let first = |has: fn(&dyn Recipe) -> bool| recipes.iter().find(|r| has(**r)).map(|r| r.name());
    let names = [
        ("{recipe}", recipes.first().map(|r| r.name())),
        ("{preset}", recipes.first().and_then(|r| Some(r.presets().last()?.0))),
        ("{classifies}", first(|r| r.classifies().is_some())),
        ("{solves}", first(|r| r.solves().is_some())),
        ("{tunes}", first(|r| r.sections().iter().any(|s| s.name == "model" && s.get("base").is_some()))),
        ("{golden}", recipes.iter().find_map(|r| Some(r.reference()?.file_name(r.name())))),
    ];
    let needs = [
        ("predict", first(|r| r.classifies().is_some())),
        ("solve", first(|r| r.solves().is_some())),
        ("export", first(|r| r.exports().is_some())),
    ];
    let missing = needs.iter().filter(|n| n.1.is_none()).map(|n| n.0);
    let whole = missing.clone().fold(Kiln::command(), |command, name| command.mut_subcommand(name, |c| c.hide(true)));
    let unused: Vec<String> = missing.map(|name| format!("kiln {name} ")).collect();
    let names: Vec<(&str, Option<&str>)> = names.into_iter().chain(unused.iter().map(|command| (command.as_str(), None))).collect();
    fill(whole, &names, &crate::program())
}

/// Which of a run's checkpoints, and which of its weights.
#[derive(Args, Clone, Default)]
pub struct Which {
    /// Of a run's folder: its best checkpoint by the validation metric, and not its newest (RUN/best is the same)
    #[arg(long)]
    best: bool,
    /// Of a run that averages its weights over steps (train.ema): those of the last step
    #[arg(long)]
    raw_weights: bool,
}

impl Which {
    /// Refuses both for a folder that holds one model and no run.
    fn only_of_runs(&self, path: &Path) -> Result<()> {
        let named = [(self.best, "--best"), (self.raw_weights, "--raw-weights")].into_iter().find(|(is, _)| *is);
        named.map_or(Ok(()), |(_, name)| bail!("{name} is for a run: {} is a model's folder, with one set of weights", path.display()))
    }
}

/// A checkpoint, its config and its recipe.
struct Opened<'a> {
    found: Checkpoint,
    /// Whether its weights are to be those of the last step, although it has averaged ones.
    raw: bool,
    config: Config,
    recipe: &'a dyn Recipe,
    recipes: Recipes<'a>,
}

impl<'a> Opened<'a> {
    /// By the checkpoint's own folder, or the newest of a run.
    fn new(path: &Path, which: &Which, recipes: Recipes<'a>) -> Result<Opened<'a>> {
        if which.best && path.join("checkpoint.json").exists() {
            bail!("--best is for a run's folder: {} is a checkpoint", path.display());
        }
        let found = if which.best { find_best(path)? } else { find_checkpoint(path)? };
        let raw = which.raw_weights;
        if raw && !found.has(AVERAGED) {
            let path = found.path.display();
            bail!("--raw-weights: {path} has no others, its run averages none over steps (train.ema); leave out --raw-weights");
        }
        let config = Config::from_json(&found.meta["config"])?;
        let recipe = recipe::find_in(recipes, config.text("recipe"))?;
        Ok(Opened { found, raw, config, recipe, recipes })
    }

    /// The model's weights; says which they are, where there are two kinds.
    fn weights(&self) -> Result<Loaded> {
        self.which().into_iter().for_each(|which| crate::warn!("weights {which}"));
        Ok(self.found.weights(self.raw)?)
    }

    /// Which weights those are, where there are two kinds.
    fn which(&self) -> Option<&'static str> {
        self.found.has(AVERAGED).then_some(match self.raw {
            true => "of the last step, not averaged (--raw-weights)",
            false => "averaged over steps (train.ema; --raw-weights takes those of the last step)",
        })
    }

    fn offered<T: ?Sized>(&self, what: &str, ask: impl Fn(&'a dyn Recipe) -> Option<&'a T>) -> Result<&'a T> {
        offered(self.recipes, self.recipe, what, ask).with_context(|| self.found.path.display().to_string())
    }
}

/// What a recipe offers; or an error that says which recipes do, and what there is for this one.
fn offered<'a, T: ?Sized>(
    recipes: Recipes<'a>,
    recipe: &'a dyn Recipe,
    what: &str,
    ask: impl Fn(&'a dyn Recipe) -> Option<&'a T>,
) -> Result<&'a T> {
    if let Some(offer) = ask(recipe) {
        return Ok(offer);
    }
    let others: Vec<&str> = recipes.iter().filter(|r| ask(**r).is_some()).map(|r| r.name()).collect();
    let others = if others.is_empty() { "no recipe here does".into() } else { format!("recipes that do: {}", others.join(", ")) };
    let own = [
        ("generate", recipe.writes().is_some()),
        ("predict", recipe.classifies().is_some()),
        ("solve", recipe.solves().is_some()),
        ("export", recipe.exports().is_some()),
    ];
    let own: Vec<String> = own.iter().filter(|o| o.1).map(|o| format!("kiln {}", o.0)).collect();
    let own = if own.is_empty() { String::new() } else { format!("; its models have {}", own.join(", ")) };
    bail!("{} does not {what} ({others}{own})", recipe.name())
}

/// For clap: a text in which `\n` and the like stand for what they mean.
fn unescaped(text: &str) -> Result<String, String> {
    crate::data::unescape(text)
}

/// Where to run.
#[derive(Args, Clone)]
pub struct DeviceArgs {
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Threads on the CPU; all cores if not given
    #[arg(long)]
    threads: Option<usize>,
    /// Says so where no profiler listens to NVTX ranges; they are made whenever one does (nsys and ncu set NVTX_INJECTION64_PATH)
    #[arg(long)]
    nvtx: bool,
}

impl DeviceArgs {
    /// What was typed, for a process that is started again.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, String)> {
        [("--device", Some(self.device.clone())), ("--threads", self.threads.map(|n| n.to_string()))]
            .into_iter()
            .filter_map(|(flag, v)| Some((flag, v?)))
    }

    pub fn open(&self) -> Result<Device> {
        self.open_for(None)
    }

    /// As one of several ranks, with a share of the cores or a GPU of its own.
    pub fn open_for(&self, world: Option<&World>) -> Result<Device> {
        if let Some(n) = self.threads.filter(|n| !(1..=1024).contains(n)) {
            bail!("--threads {n}: from 1 to 1024");
        }
        if let Some(world) = world {
            crate::launch::prepare(world);
        }
        crate::gpu::attach_profiler(self.nvtx);
        let threads = self.threads.or(world.map(World::threads));
        let name = match (world, self.device.as_str()) {
            (Some(w), "auto" | "cuda") if self.is_gpu() => format!("cuda:{}", crate::launch::gpu_of(w).map_err(anyhow::Error::msg)?),
            // Ranks on different devices would wait for each other for ever.
            (Some(_), "auto") => "cpu".into(),
            (_, name) => name.into(),
        };
        crate::gpu::open(&name, threads).map_err(anyhow::Error::msg)
    }

    /// Whether this names a GPU, or means one on this machine.
    pub fn is_gpu(&self) -> bool {
        self.device.starts_with("cuda") || self.device == "auto" && crate::gpu::count() > 0
    }
}

/// What to train: a preset and what is laid over it.
#[derive(Args, Clone)]
pub struct ConfigArgs {
    /// The recipe; the first if none is named
    recipe: Option<String>,
    /// One of the recipe's presets
    #[arg(long)]
    preset: Option<String>,
    /// A TOML file laid over the preset
    #[arg(long)]
    config: Option<PathBuf>,
    /// Sets one key; the section may be left out where it is clear (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
    /// A folder made by `kiln data prepare`, or of pictures; a CSV file of Sudokus; conversations (JSON lines, gzip of them, parquet). Of text there
    /// may be several: files, folders and patterns ('more/*.jsonl', **) are one set, and with weights (wiki:0.9 math:0.1, all or none) items are mixed
    /// in these shares. A weight is the number behind the last colon, unless there is a file of the whole name
    #[arg(long, value_name = "PATH[:WEIGHT]", num_args = 1..)]
    data: Vec<String>,
    /// Steps to train in all; the learning-rate schedule of a new run is as long, unless train.horizon is set
    #[arg(long, value_parser = clap::value_parser!(u64).range(..=1 << 53))]
    steps: Option<u64>,
    /// How often to go through the data; steps follow from it
    #[arg(long, value_name = "N", conflicts_with = "steps")]
    epochs: Option<f64>,
    /// Fine-tunes the model in this folder (Hugging Face's layout), with defaults of its own for what is not set: learning rate, rows, epochs
    #[arg(long, value_name = "FOLDER")]
    base: Option<PathBuf>,
    /// Trains low-rank adapters (LoRA) on frozen weights, and not all weights
    #[arg(long)]
    lora: bool,
    /// Keeps the frozen weights below adapters in so many bits: 16 or 4 (NF4)
    #[arg(long, value_name = "16|4", value_parser = clap::value_parser!(u32))]
    bits: Option<u32>,
    /// Decides initial values, the order of the data and every random draw
    #[arg(long)]
    seed: Option<u64>,
    #[command(flatten)]
    switches: SwitchArgs,
}

/// Which passes are on.
#[derive(Args, Clone, Default)]
pub struct SwitchArgs {
    #[command(flatten)]
    preset: PresetArgs,
    /// Switches a pass; settings follow after commas (repeatable)
    #[arg(long = "pass", value_name = "NAME=off|auto|require")]
    passes: Vec<String>,
}

/// A preset of passes.
#[derive(Args, Clone, Default)]
pub struct PresetArgs {
    /// Which passes are on, by what they change in the numbers. none; exact: those that are bit for bit the same; reordered: also sums in another
    /// order, in f32, on a GPU with TF32; mixed (the default of runs): on a GPU bf16; fast: also FP8. --pass is above it
    #[arg(long, alias = "optimise", value_name = "none|exact|reordered|mixed|fast", value_parser = Preset::named)]
    optimize: Option<Preset>,
}

impl SwitchArgs {
    /// These switches with what was typed laid over them.
    pub fn over(&self, mut switches: Switches) -> Result<Switches> {
        switches.preset = self.preset.optimize.unwrap_or(switches.preset);
        for p in &self.passes {
            let (name, value) = p.split_once('=').with_context(|| format!("--pass wants NAME=off|auto|require, not '{p}'"))?;
            switches.set(name, value)?;
            Switches::formerly(name).into_iter().for_each(|(_, note)| crate::warn!("note: {note}"));
        }
        Ok(switches)
    }
}

impl PresetArgs {
    /// Sets it in a run's config, where it was typed.
    pub fn set(&self, config: &mut Config) {
        self.optimize.into_iter().for_each(|preset| config.set_preset(preset));
    }
}

impl ConfigArgs {
    /// Whether the command line itself says what to train.
    pub fn is_named(&self) -> bool {
        self.recipe.is_some() || self.config.is_some()
    }

    /// Flags that stand for keys which not every recipe has.
    fn set_flags(&self, config: &mut Config) -> Result<()> {
        let base = self.base.as_ref().map(|path| path.display().to_string().into());
        // Where there is nothing but adapters to train, --lora is how it is.
        let lora = (self.lora && (config.has("model", "train") || !config.has("model", "rank"))).then(|| "lora".into());
        let flags: [(&str, &str, &str, Option<Value>); 4] = [
            ("--base", "model", "base", base),
            ("--lora", "model", "train", lora),
            ("--bits", "model", "bits", self.bits.map(|n| i64::from(n).into())),
            ("--epochs", "train", "epochs", self.epochs.map(Value::from)),
        ];
        for (flag, section, key, value) in flags {
            let Some(value) = value else { continue };
            if !config.has(section, key) {
                bail!("{flag}: {} has no {section}.{key} (`kiln config {}` lists its keys)", config.text("recipe"), config.text("recipe"));
            }
            config.set_value(&format!("{section}.{key}"), value)?;
        }
        // Of steps and epochs the one that was typed counts, whatever a file or the run itself says.
        let set =
            |key: &str| self.sets.iter().filter_map(|s| s.split_once('=')).any(|(k, _)| [key, &key["train.".len()..]].contains(&k.trim()));
        match (self.steps.is_some() || set("train.steps"), self.epochs.is_some() || set("train.epochs")) {
            (true, true) => bail!("train.steps and train.epochs: name one of the two, the other follows from it"),
            (true, false) if config.has("train", "epochs") => Ok(config.set_value("train.epochs", 0.0.into())?),
            _ => Ok(()),
        }
    }

    /// The preset with everything laid over it; `base`, where given, stands in for the preset.
    pub fn resolve(&self, recipes: Recipes, base: Option<Config>) -> Result<Config> {
        let mut named = (self.recipe.clone(), self.preset.clone());
        if let Some(path) = &self.config {
            // The file may name recipe and preset; the command line wins.
            let [recipe, preset] = named_in(&read_file(path)?, path)?;
            named = (named.0.or(recipe), named.1.or(preset));
        }
        if let (None, Some(last)) =
            (&named.0, self.data.last().filter(|last| recipe::find_in(recipes, last).is_ok() && !Path::new(last).exists()))
        {
            bail!(
                "--data takes every word behind it, so {last} is taken for a file: name the recipe first, as in kiln train {last} --data PATH"
            );
        }
        let mut config = match base {
            Some(base) => {
                for (given, key) in [(&named.0, "recipe"), (&named.1, "preset")] {
                    if let Some(g) = given.as_deref().filter(|g| *g != base.text(key)) {
                        bail!("this run's {key} is '{}', not '{g}': start another run with --out", base.text(key));
                    }
                }
                base
            }
            None => {
                let Some(first) = recipes.first() else { bail!("there are no recipes to train") };
                recipe::preset(recipe::find_in(recipes, named.0.as_deref().unwrap_or(first.name()))?, named.1.as_deref())?
            }
        };
        if let Some(path) = &self.config {
            config.overlay_file(path)?;
        }
        for s in &self.sets {
            config.set(s)?;
        }
        set_data(&mut config, &self.data)?;
        if let Some(steps) = self.steps {
            config.set_value("train.steps", (steps as i64).into())?;
        }
        self.set_flags(&mut config)?;
        if let Some(seed) = self.seed {
            config.set_seed(seed);
        }
        self.switches.preset.set(&mut config);
        for p in &self.switches.passes {
            config.set_pass_argument(p)?;
        }
        config.absolute_paths()?;
        Ok(config)
    }
}

/// What `--data` names, where it names something.
pub fn set_data(config: &mut Config, data: &[String]) -> Result<()> {
    if data.is_empty() {
        return Ok(());
    }
    let many = config.keys().any(|(section, key)| section == "data" && key.name == "path" && key.many);
    if data.len() > 1 && config.has("data", "path") && !many {
        bail!("--data {}: {} reads one file or folder", data.join(" "), config.text("recipe"));
    }
    Ok(config.set_value("data.path", Paths::from(data.to_vec()).to_value())?)
}

/// Prints JSON, or writes it to a file where one is named.
pub fn write_json(path: Option<&PathBuf>, value: &serde_json::Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    match path {
        Some(path) if path != Path::new("/dev/stdout") => Ok(crate::run::write_whole(path, &text)?),
        _ => {
            out_json!(text);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests;
