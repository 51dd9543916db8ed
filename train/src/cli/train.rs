//! `kiln train`: which run to begin or go on with, and how its end becomes an exit status.

use super::budget::{BudgetArgs, Where, fit_device};
use super::signals::{self, Signal};
use super::{ConfigArgs, DeviceArgs, Recipes};
use crate::config::{Config, ConfigError, TrainConfig, named_in, read_file};
use crate::launch::{self, World};
use crate::recipe::TrainError;
use crate::run::{END, NOTE, Options, Start, divides, resumable, settings_that_fit, stays, train, undivided};
use crate::{checkpoint, memory, recipe, report, say, warn};
use anyhow::{Context, Result, bail};
use clap::Args;
use engine::Ranks;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

#[derive(Args)]
#[command(after_help = "Examples:
  kiln train
  kiln train {recipe} --preset {preset} --data data/books --out runs/books --set train.batch=4
  kiln train {tunes} --base models/qwen2.5-0.5b --data chats.jsonl --lora --epochs 2
  kiln train {tunes} --base models/qwen2.5-0.5b --data a.jsonl b.jsonl 'more/*.jsonl'
  kiln train {recipe} --preset {preset} --data data/wiki:0.9 --data data/math:0.1
  kiln train --out runs/books --resume --steps 4000
  kiln train --resume-from runs/books/checkpoints/step-00002000
  kiln train --out runs/books --resume --pass adam8bit=auto --convert-states
  kiln train {recipe} --pass recompute=auto,what=blocks --pass linear-cross-entropy=auto,chunk=128
  kiln train {recipe} --preset {preset} --memory-budget 8GiB --allow adam8bit
  kiln train {recipe} --init-from runs/books --out runs/tuned
  kiln train {recipe} --ranks 4 --elastic --out runs/books
  kiln train {recipe} --ranks 4                 four processes on this machine
  kiln train {recipe} --ranks 4 --tensor 2      pairs of them share the weights of a model

Ctrl-C finishes the step, saves and exits with status 130; so do SIGTERM (143), SIGHUP (129; not under nohup) and SIGUSR1 (138: Slurm's
--signal=USR1@60). A second signal, a second later or more, exits at once, and so does one before the first step. Status 0 is a run that has all
its steps or stopped early (train.patience), 1 an error, 2 a wrong command line.

A checkpoint that is broken is passed over for the one before; one that cannot be read is an error, as it may be whole. --resume-from and --start-over
keep the checkpoints that they do not go on from, as checkpoints/aside-step-N.

Started by mpiexec or srun, or for GPUs by torchrun, every process is one rank of the job without --ranks. A rank that fails ends the others; Ctrl-C saves once.")]
pub struct TrainArgs {
    #[command(flatten)]
    pub config: ConfigArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    budget: BudgetArgs,
    /// The run's folder; a new one under runs/ if not given
    #[arg(long)]
    out: Option<PathBuf>,
    /// Goes on from the run's newest whole checkpoint
    #[arg(long)]
    resume: bool,
    /// Goes on from this checkpoint, in its own run or in --out; later ones are set aside
    #[arg(long, value_name = "CHECKPOINT", conflicts_with = "resume")]
    resume_from: Option<PathBuf>,
    /// With --resume or --resume-from: converts optimizer states that the checkpoint keeps in another form (f32, bf16, 8 bits) than this run
    #[arg(long, conflicts_with = "start_over")]
    convert_states: bool,
    /// Begins the run in --out again at the first step, with its settings; its checkpoints are set aside
    #[arg(long, conflicts_with_all = ["resume", "resume_from"], requires = "out")]
    start_over: bool,
    /// Shows every pass in the table at the start, also those that are off or find nothing to do
    #[arg(long, short)]
    verbose: bool,
    /// Starts from the weights of a checkpoint, a run's folder or a .safetensors file; adapters also from a folder of PEFT's
    #[arg(long, conflicts_with_all = ["resume", "resume_from", "start_over"])]
    init_from: Option<PathBuf>,
    /// Trains with so many processes on this machine; of ranks that a launcher started, how many there must be
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    ranks: Option<u32>,
    /// Of several ranks, how many share the weights of one model (tensor parallelism); it divides the number of ranks
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=4096))]
    tensor: Option<u32>,
    /// With --ranks and --out: where a rank is lost, the others go on from the newest whole checkpoint
    #[arg(long, requires_all = ["ranks", "out"])]
    elastic: bool,
}

impl TrainArgs {
    /// With a run's own settings, and not a preset's.
    pub fn goes_on(&self) -> bool {
        self.resume || self.resume_from.is_some() || self.start_over
    }
}

pub fn run(a: TrainArgs, recipes: Recipes) -> Result<ExitCode> {
    // With --ranks 1, one rank that a launcher started is connected as several would be: to measure what that costs.
    let world = World::of_process(a.ranks == Some(1)).map_err(anyhow::Error::msg)?;
    report::set_rank(world.as_ref().map_or(0, |w| w.rank));
    let tensor = a.tensor_of(world.as_ref())?;
    if let (Some(ranks @ 2..), None) = (a.ranks, &world) {
        // What is wrong with the settings is said once, and not by every rank.
        if !a.goes_on() {
            let config = a.config.resolve(recipes, None)?;
            // A base brings a batch of its own, which the ranks divide.
            if config.base().is_none() || config.is_given("train.batch") {
                divides(config.section::<TrainConfig>("train")?.batch, ranks as usize / tensor)?;
            }
        }
        let before = a.out.as_deref().map(noted).transpose()?;
        let go_on = |ranks| a.with_fewer(ranks, tensor, before.as_ref().and_then(Option::as_deref), recipes);
        return launch::start(ranks as usize, a.device.is_gpu(), signals::caught(), a.elastic.then_some(&go_on));
    }
    let device = a.device.open_for(world.as_ref())?;
    let ranks = world.map_or(Ok(Ranks::default()), |w| launch::connect(&w, tensor, &device))?;
    if let Some(by) = launch::connection() {
        say!("{} ranks (data {}, tensor {}) over {by}", ranks.size(), ranks.data.size, ranks.tensor.size);
    }
    let start = match &a.resume_from {
        Some(path) => Start::From(path.clone()),
        None if a.resume => Start::Newest,
        None if a.start_over => Start::Over,
        None => Start::New,
    };
    if a.convert_states && start == Start::New {
        bail!("--convert-states is for a run that goes on: add --resume or --resume-from");
    }
    let (out, mut config) = which(&a, &start, &ranks, recipes)?;
    config.ranks = ranks.clone();
    config.settle_precision(device.target())?;
    a.budget.set(&mut config)?;
    let options = Options { out, start, verbose: a.verbose, convert_states: a.convert_states, command: typed(), ..Options::default() };
    let signal = Signal::catch(&options.stop, &options.preparing)?;
    let recipe = recipe::find_in(recipes, config.text("recipe"))?;
    // The first rank makes what the others then find.
    if ranks.rank() > 0 {
        ranks.gather(&[])?;
    }
    match recipe.make_ready(&config, &device, &options.stop) {
        Err(e) if options.stop.load(Ordering::SeqCst) => {
            warn!("{e}");
            launch::abort(signal.status() as u8);
            return Ok(signal.code());
        }
        made => made?,
    }
    if ranks.rank() == 0 {
        ranks.gather(&[])?;
    }
    // What is made ready cleans up after itself; what follows leaves nothing until the first step. A signal that came too late for the one
    // is seen here, or sees the flag.
    options.preparing.store(true, Ordering::SeqCst);
    if options.stop.load(Ordering::SeqCst) {
        signal.end_before_the_first_step();
    }
    let (config, tuned) = recipe::begin(recipe, &config)?;
    tuned.iter().for_each(|line| say!("{line}"));
    if ranks.rank() == 0 {
        undivided(&config.switches()?, &ranks, device.target()).iter().for_each(|said| warn!("{said}"));
    }
    let on = Where { free: memory::available_to_all(&device, &ranks)?, target: device.target() };
    // The batch of a run that goes on is what it was.
    let (config, fitted) = a.budget.fit(recipe, config, &on, options.start == Start::New)?;
    let mut task = recipe.task(&config)?;
    let (config, chosen) = fit_device(&*task, config, &on)?;
    fitted.iter().chain(&chosen).for_each(|fitted| say!("{}", fitted.line()));
    let ended = match train(&mut *task, &config, &device, &options) {
        Err(TrainError::Memory { needs, parts, free, passes, .. }) => {
            let settings = if passes.is_empty() { settings_that_fit(recipe, &config, &device, free)? } else { vec![] };
            return Err(TrainError::Memory { needs, parts, free, passes, settings }.into());
        }
        ended => ended?,
    };
    Ok(if ended.interrupted { signal.code() } else { ExitCode::SUCCESS })
}

impl TrainArgs {
    /// With --elastic: how many ranks go on after one of so many was lost, so that they divide the batch, and how they are started. `before`: what the
    /// run's note said before any rank began.
    fn with_fewer(&self, ranks: usize, tensor: usize, before: Option<&[u8]>, recipes: Recipes) -> Result<(usize, Vec<OsString>)> {
        let out = self.out.as_ref().expect("clap wants it beside --elastic");
        if ranks <= tensor {
            bail!("--tensor {tensor} divides the weights of one model among all {ranks} ranks, so fewer cannot have them");
        }
        // Until the ranks have begun, the folder is as it was, and so what to do is what was typed.
        let begun = noted(out)?.as_deref() != before || !self.goes_on() && out.join("config.toml").exists();
        let own = if begun || self.goes_on() { own_config(out, &Start::Newest, true, recipes)? } else { None };
        let config = match own {
            Some(own) => own,
            None => {
                let config = self.config.resolve(recipes, None)?;
                // A base brings a batch of its own.
                recipe::begin(recipe::find_in(recipes, config.text("recipe"))?, &config)?.0
            }
        };
        let batch = config.section::<TrainConfig>("train")?.batch;
        let fits = |n: &usize| n.is_multiple_of(tensor) && batch.is_multiple_of(n / tensor);
        let Some(left) = (1..ranks).rev().find(fits) else { bail!("no fewer ranks divide train.batch = {batch}") };
        if !begun {
            return Ok((left, with_ranks(std::env::args_os().skip(1), left)));
        }
        let mut args: Vec<OsString> = ["train", "--resume", "--elastic", "--out"].map(OsString::from).into();
        args.push(out.into());
        let numbers = [("--ranks", left.to_string()), ("--tensor", tensor.to_string())];
        args.extend(numbers.into_iter().chain(self.device.given()).flat_map(|(flag, value)| [flag.into(), value.into()]));
        Ok((left, args))
    }

    /// How many ranks share a model's weights; checks what was typed against how many ranks there are.
    fn tensor_of(&self, world: Option<&World>) -> Result<usize> {
        let typed = self.ranks.map(|n| n as usize);
        if let (Some(w), Some(n)) = (world, typed.filter(|n| world.is_some_and(|w| w.size != *n))) {
            bail!("--ranks {n}: {} has started {} ranks already; leave out --ranks", w.launcher, w.size);
        }
        let (ranks, tensor) = (world.map(|w| w.size).or(typed).unwrap_or(1), self.tensor.unwrap_or(1) as usize);
        if ranks % tensor != 0 {
            bail!("--tensor {tensor}: it must divide the number of ranks, which is {ranks} (--ranks N sets it)");
        }
        Ok(tensor)
    }
}

/// What a run's folder notes of how it is doing, if it notes anything.
fn noted(out: &Path) -> Result<Option<Vec<u8>>> {
    match crate::input::read(&out.join(NOTE)) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| format!("cannot read {}", out.join(NOTE).display())),
    }
}

/// A command line with another number of ranks.
fn with_ranks(typed: impl Iterator<Item = OsString>, ranks: usize) -> Vec<OsString> {
    let (mut args, mut is_number) = (vec![], false);
    for arg in typed {
        let (is_flag, has_number) = (arg == "--ranks", arg.to_str().is_some_and(|arg| arg.starts_with("--ranks=")));
        args.push(match () {
            () if is_number => ranks.to_string().into(),
            () if has_number => format!("--ranks={ranks}").into(),
            () => arg,
        });
        is_number = is_flag && !is_number;
    }
    args
}

/// What the first rank says; the others pass anything.
fn first_says(ranks: &Ranks, own: &[u8]) -> Result<Vec<u8>> {
    Ok(ranks.gather(own)?.swap_remove(0))
}

/// The run's folder and its settings. The first rank chooses the folder: another could find there already what this one has written.
fn which(a: &TrainArgs, start: &Start, ranks: &Ranks, recipes: Recipes) -> Result<(PathBuf, Config)> {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let new = match start {
        Start::New => {
            let mut config = a.config.resolve(recipes, None)?;
            if let Some(from) = &a.init_from {
                config.set_init_from(&std::path::absolute(from)?);
            }
            Some(config)
        }
        _ => None,
    };
    let chosen = if ranks.rank() == 0 { folder(a, start, new.as_ref())? } else { PathBuf::new() };
    let out = PathBuf::from(std::ffi::OsString::from_vec(first_says(ranks, chosen.as_os_str().as_bytes())?));
    if let Some(config) = new {
        return Ok((out, config));
    }
    let base = own_config(&out, start, a.config.is_named(), recipes)?;
    if base.is_none() && !a.config.is_named() {
        bail!("{} holds no run to go on with (name the folder of one with --out, or a recipe to begin one there)", out.display());
    }
    let config = a.config.resolve(recipes, base)?;
    Ok((out, config))
}

fn folder(a: &TrainArgs, start: &Start, new: Option<&Config>) -> Result<PathBuf> {
    match (&a.out, start, new) {
        (Some(out), _, Some(_)) => {
            let saved = std::fs::read_dir(out.join("checkpoints")).is_ok_and(|mut d| d.next().is_some());
            if saved || out.join("config.toml").exists() {
                bail!("{} holds a run already: go on with --resume, or choose another --out", out.display());
            }
            Ok(out.clone())
        }
        (None, _, Some(config)) => Ok(new_run(&format!("{}-{}", config.text("recipe"), config.text("preset")))),
        (Some(out), _, None) => Ok(out.clone()),
        (None, Start::From(path), None) => run_of(path),
        (None, _, None) => newest_run(&a.config),
    }
}

/// The command line, for whoever wants to run it again.
pub fn typed() -> String {
    let arguments = std::env::args_os().skip(1).map(|a| report::quoted(&a.to_string_lossy()));
    std::iter::once(crate::program()).chain(arguments).collect::<Vec<_>>().join(" ")
}

/// The folder of the run that a checkpoint lies in.
fn run_of(checkpoint: &Path) -> Result<PathBuf> {
    let path = std::path::absolute(checkpoint)?;
    match path.parent().filter(|p| p.ends_with("checkpoints")).and_then(Path::parent) {
        Some(run) => Ok(run.into()),
        None => bail!("{} does not lie in a run's folder of checkpoints: name the run's folder with --out", checkpoint.display()),
    }
}

/// A run's own settings, as its config file has them; where that is not there or was cut, those of the checkpoint that it goes
/// on from. None where it has neither, because it was killed before it wrote them.
fn own_config(out: &Path, start: &Start, named: bool, recipes: Recipes) -> Result<Option<Config>> {
    let path = out.join("config.toml");
    // Somebody else may have put it there: what it leads to would be quoted where it is no TOML.
    stays(out, &path)?;
    // What cannot be read may be whole.
    if let Some(cause) = crate::input::read(&path).err().filter(|e| e.kind() != std::io::ErrorKind::NotFound) {
        return Err(ConfigError::Read { path, cause }.into());
    }
    let cut = match run_file(&path, recipes) {
        Ok(Some(config)) => return Ok(Some(config)),
        Ok(None) => None,
        // What ends as kiln ends it was changed by hand.
        Err(e) if is_whole(&path) => return Err(e),
        Err(e) => Some(e),
    };
    let found = match start {
        Start::Newest => resumable(&out.join("checkpoints"))?.0,
        Start::From(path) => Some(checkpoint::open(path)?),
        Start::New | Start::Over => None,
    };
    match (&cut, &found) {
        (Some(e), Some(found)) => warn!("{e:#}: the file is not whole, so the settings are those of {}", found.path.display()),
        (Some(e), None) if named => warn!("{e:#}: the file is not whole, so the settings are those of the command line"),
        (Some(e), None) => {
            bail!(
                "{e:#}: the file is not whole, and there is no checkpoint to take the settings from (name the recipe and its settings again)"
            )
        }
        (None, _) => {}
    }
    let Some(found) = found else { return Ok(None) };
    let recipe = recipe::find_in(recipes, found.meta["recipe"].as_str().unwrap_or_default())?;
    let (config, filled) = recipe::preset(recipe, None)?.of_checkpoint(&found.meta["config"])?;
    say_filled(&found.path, &filled);
    Ok(Some(config))
}

/// The settings in a run's config.toml, where there is one.
fn run_file(path: &Path, recipes: Recipes) -> Result<Option<Config>> {
    if !path.exists() {
        return Ok(None);
    }
    let table = read_file(path)?;
    let [Some(recipe), Some(_)] = named_in(&table, path)? else {
        bail!(
            "{} names no recipe and preset: it is not a run's config any more; restore it, or remove it to take the newest checkpoint's",
            path.display()
        );
    };
    let (config, filled) = Config::of_run(recipe::find_in(recipes, &recipe)?.sections(), table).map_err(|e| e.in_file(path))?;
    if !filled.is_empty() && !is_whole(path) {
        bail!("config {}: has lost its keys ({})", path.display(), filled.join(", "));
    }
    say_filled(path, &filled);
    Ok(Some(config))
}

/// Whether a run's config.toml ends as kiln ends it.
fn is_whole(path: &Path) -> bool {
    crate::input::read_to_string(path).is_ok_and(|text| text.ends_with(END))
}

fn say_filled(path: &Path, filled: &[String]) {
    if !filled.is_empty() {
        say!("{} was written before these keys were there, which have their defaults: {}", path.display(), filled.join(", "));
    }
}

/// runs/NAME, or the first of runs/NAME-2, ... that is not there.
fn new_run(name: &str) -> PathBuf {
    let first = Path::new("runs").join(name);
    std::iter::once(first)
        .chain((2..).map(|i| Path::new("runs").join(format!("{name}-{i}"))))
        .find(|p| !p.exists())
        .expect("numbers do not end")
}

/// The run under runs/ whose metrics were written last.
fn newest_run(config: &ConfigArgs) -> Result<PathBuf> {
    let prefix = config.recipe.clone().unwrap_or_default();
    let runs = std::fs::read_dir("runs").into_iter().flatten().flatten().map(|e| e.path());
    let named = runs.filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&prefix)));
    let newest = named.filter_map(|p| Some((p.join("config.toml").metadata().ok()?.modified().ok()?, p)));
    match engine::mutant!("resume-of-the-oldest-run", newest.max(), newest.min()) {
        Some((_, path)) => Ok(path),
        None => bail!("there is no run under runs/ to resume: name its folder with --out"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_begins_again_with_other_ranks_and_else_as_it_was_typed() {
        let with = |typed: &str| {
            let args = with_ranks(typed.split(' ').map(OsString::from), 3);
            args.iter().map(|arg| arg.to_str().unwrap()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(with("train hydra --ranks 4 --out a --elastic"), "train hydra --ranks 3 --out a --elastic");
        assert_eq!(with("train --out ranks --ranks=16 --set steps=4"), "train --out ranks --ranks=3 --set steps=4");
    }
}
