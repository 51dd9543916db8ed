use super::{ConfigArgs, DeviceArgs};
use ::train::config::{Config, named_in, read_file};
use ::train::recipe;
use ::train::run::{Options, train};
use anyhow::{Result, bail};
use clap::Args;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[derive(Args)]
#[command(after_help = "Examples:
  kiln train
  kiln train hydra --preset small --data data/books --out runs/books --set train.batch=4
  kiln train --out runs/books --resume --steps 4000
  kiln train hydra --pass recompute=auto,what=blocks --pass linear-ce=auto,chunk=128
  kiln train hydra --init-from runs/books --out runs/tuned

Ctrl-C (or SIGTERM) finishes the step, saves and exits; a second one exits at once, and so does one before the first step.")]
pub struct TrainArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// The run's folder; a new one under runs/ if not given
    #[arg(long)]
    out: Option<PathBuf>,
    /// Goes on from the run's newest whole checkpoint
    #[arg(long)]
    resume: bool,
    /// Starts from the weights of a checkpoint, a run's folder or a .safetensors file; polychromic also from an adapter's folder of PEFT's
    #[arg(long, conflicts_with = "resume")]
    init_from: Option<PathBuf>,
}

pub fn run(a: TrainArgs) -> Result<ExitCode> {
    let device = a.device.open()?;
    let (out, config) = if a.resume {
        let out = a.out.clone().map_or_else(|| newest_run(&a.config), Ok)?;
        let base = own_config(&out)?;
        (out, a.config.resolve(base)?)
    } else {
        let mut config = a.config.resolve(None)?;
        if let Some(from) = &a.init_from {
            config.set_init_from(&std::path::absolute(from)?);
        }
        let out = match a.out {
            Some(out) => {
                if out.join("config.toml").exists() {
                    bail!("{} holds a run already: go on with --resume, or choose another --out", out.display());
                }
                out
            }
            None => new_run(&format!("{}-{}", config.text("recipe"), config.text("preset"))),
        };
        (out, config)
    };
    let options = Options { out, resume: a.resume, ..Options::default() };
    stop_on_signals(&options)?;
    let recipe = recipe::find(config.text("recipe"))?;
    recipe.make_ready(&config, &device, &options.stop)?;
    // What is made ready cleans up after itself; what follows leaves nothing until the first step. A signal that came too late for the one
    // is seen here, or sees the flag.
    options.preparing.store(true, Ordering::SeqCst);
    if options.stop.load(Ordering::SeqCst) {
        end_before_the_first_step();
    }
    let mut task = recipe.task(&config)?;
    train(&mut *task, &config, &device, &options)?;
    Ok(ExitCode::SUCCESS)
}

/// The first signal sets `stop`, and ends the process where there is nothing to save yet; another one ends it at once. Those that come
/// together are one: some programs signal a process and then its group.
fn stop_on_signals(options: &Options) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let (stop, preparing) = (options.stop.clone(), options.preparing.clone());
    std::thread::spawn(move || {
        let mut first: Option<Instant> = None;
        for _ in signals.forever() {
            stop.store(true, Ordering::SeqCst);
            if preparing.load(Ordering::SeqCst) {
                end_before_the_first_step();
            }
            if first.get_or_insert_with(Instant::now).elapsed() > Duration::from_secs(1) {
                std::process::exit(130);
            }
        }
    });
    Ok(())
}

fn end_before_the_first_step() -> ! {
    // Below the bar of what is being made, where there is one.
    let bar = if std::io::stderr().is_terminal() { "\n" } else { "" };
    let _ = writeln!(std::io::stderr(), "{bar}stopped before the first step: nothing is lost");
    std::process::exit(130);
}

/// A run's own settings: its config file over the preset that it names, or the newest checkpoint's. None where it has neither, because it
/// was killed before it wrote them.
fn own_config(out: &Path) -> Result<Option<Config>> {
    let path = out.join("config.toml");
    if path.exists() {
        let [Some(recipe), Some(preset)] = named_in(&read_file(&path)?, &path)? else {
            bail!(
                "{} names no recipe and preset: it is not a run's config any more; restore it, or remove it to take the newest checkpoint's",
                path.display()
            );
        };
        let mut config = recipe::preset(recipe::find(&recipe)?, Some(&preset))?;
        config.overlay_run(&path)?;
        return Ok(Some(config));
    }
    let (found, _) = ::train::checkpoint::newest(&out.join("checkpoints"))?;
    found.map(|f| Ok(Config::from_json(&f.meta["config"])?)).transpose()
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
    let newest = named.filter_map(|p| Some((p.join("config.toml").metadata().ok()?.modified().ok()?, p))).max();
    match newest {
        Some((_, path)) => Ok(path),
        None => bail!("there is no run under runs/ to resume: name its folder with --out"),
    }
}
