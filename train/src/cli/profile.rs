//! `kiln profile`: where a step's time goes, by op and layer; a trace and a digest.

use super::budget::{Where, fit_device};
use super::{ConfigArgs, DeviceArgs, Opened, Recipes, Which};
use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::launch::{self, World};
use crate::optim::schedule::rate;
use crate::profile::nsight::Tool;
use crate::profile::{Digest, Plan, Roof, markdown, measure, page, short, trace};
use crate::recipe::{Recipe, Session, Task, TrainError, begin, find_in};
use crate::{files, report, run};
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use engine::Device;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
#[command(
    mut_arg("recipe", |a| a.value_name("RECIPE|RUN").help("A recipe (the first if none is named), or a run's folder: its own config and newest checkpoint")),
    mut_arg("steps", |a| a.help("Steps that are profiled, and as many before and after them that are only timed [default: 5]")),
    after_help = "Examples:
  kiln profile {recipe}
  kiln profile {recipe} --preset {preset} --pass bf16=auto --device cuda
  kiln profile runs/a --steps 10 --out profiles/a
  kiln profile {recipe} --device cuda --events
  kiln profile {recipe} --preset {preset} --device cuda --nsys

Writes a folder: trace.json for Perfetto (ui.perfetto.dev) or chrome://tracing, digest.md and digest.html with the times by op and layer, profile.json
with the same numbers, config.toml."
)]
pub struct ProfileArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    device: DeviceArgs,
    /// Steps before anything is timed
    #[arg(long, default_value_t = 2)]
    warmup: u64,
    /// The folder to write; if not given, profile-DATE in the run's folder, or profile-RECIPE-DATE here
    #[arg(long)]
    out: Option<PathBuf>,
    /// Prints the numbers as JSON
    #[arg(long)]
    json: bool,
    /// On a GPU: CUDA events around each node, launched one by one, instead of CUPTI
    #[arg(long, conflicts_with_all = ["nsys", "ncu"])]
    events: bool,
    /// Runs the steps under Nsight Systems and keeps its report
    #[arg(long, conflicts_with = "ncu")]
    nsys: bool,
    /// Runs one step under Nsight Compute (or as many as --steps says) and keeps its report: slow, each kernel is run several times
    #[arg(long)]
    ncu: bool,
    /// Of ranks that a launcher started, how many share the weights of one model; the first writes the folder
    #[arg(long, value_name = "T", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    tensor: u32,
    /// With 1: one rank that a launcher started is connected as several would be
    #[arg(long, hide = true)]
    ranks: Option<u32>,
    /// What --nsys and --ncu run: the steps alone, with the window marked
    #[arg(long, hide = true)]
    window: bool,
}

/// What is profiled.
struct Subject<'a> {
    config: Config,
    recipe: &'a dyn Recipe,
    /// A run's folder, and its checkpoint.
    run: Option<(PathBuf, Checkpoint)>,
}

pub fn run(a: ProfileArgs, recipes: Recipes) -> Result<ExitCode> {
    let most = 10_000;
    let steps = a.config.steps.unwrap_or(if a.ncu { 1 } else { 5 });
    if !(1..=most).contains(&steps) {
        bail!("--steps {steps}: from 1 to {most}");
    }
    if a.warmup > most {
        bail!("--warmup {}: from 0 to {most}", a.warmup);
    }
    let world = World::of_process(a.ranks == Some(1)).map_err(anyhow::Error::msg)?;
    report::set_rank(world.as_ref().map_or(0, |w| w.rank));
    let mut subject = Subject::new(&a, recipes)?;
    if let Some(tool) = [(a.nsys, Tool::Systems), (a.ncu, Tool::Compute)].into_iter().find_map(|(is, tool)| is.then_some(tool)) {
        return under(tool, &a, &subject, steps);
    }
    let out = match a.window {
        true => None,
        false => Some(place(&a, &subject)?),
    };
    let device = a.device.open_for(world.as_ref())?;
    if let Some(world) = &world {
        subject.config.ranks = launch::connect(world, a.tensor as usize, &device)?;
    }
    let mut task = subject.recipe.task(&subject.config)?;
    subject.config = fit_device(&*task, subject.config, &Where::here(&device))?.0;
    // Of steps that differ, whole periods.
    let steps = steps.next_multiple_of(task.period() as u64);
    let mut s = subject.load(&*task, &device)?;
    let mut step = subject.steps(&mut *task)?;
    if a.window {
        return window(&mut s, &mut step, a.warmup, steps);
    }
    let measured = measure(&mut s, &Plan { steps, warmup: a.warmup, cupti: !a.events }, step)?;
    let digest = Digest::new(&subject.title(), &device.describe(), &measured, Roof::of(&device));
    let out = out.expect("where nothing else is wanted");
    if report::rank() > 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let json = subject.described(&digest, &device)?;
    let name = format!("kiln {} on {}", digest.title, digest.device);
    write(
        &out,
        &subject,
        &[
            ("trace.json", serde_json::to_string(&trace(&measured.profile, &name))?),
            ("digest.md", markdown(&digest)),
            ("digest.html", page(&digest)),
            ("profile.json", serde_json::to_string_pretty(&json)?),
        ],
    )?;
    match a.json {
        true => out_json!(serde_json::to_string_pretty(&json)?),
        false => {
            out_part!("{}", short(&digest));
            out!("\nwritten to {}: digest.html, digest.md, profile.json, and trace.json for Perfetto (ui.perfetto.dev)", out.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl<'a> Subject<'a> {
    fn new(a: &ProfileArgs, recipes: Recipes<'a>) -> Result<Subject<'a>> {
        let named = a.config.recipe.as_deref();
        let is_recipe = named.is_none_or(|name| recipes.iter().any(|r| r.name() == name));
        let args = ConfigArgs { steps: None, ..a.config.clone() };
        if is_recipe {
            if a.which.best || a.which.raw_weights {
                bail!("--best and --raw-weights are for a run's folder");
            }
            let config = args.resolve(recipes, None)?;
            let recipe = find_in(recipes, config.text("recipe"))?;
            return Ok(Subject { config: begin(recipe, &config)?.0, recipe, run: None });
        }
        let name = named.unwrap_or_default();
        let path = Path::new(name);
        if !path.exists() {
            let unknown = find_in(recipes, name).err().map_or(String::new(), |e| e.to_string());
            bail!("{unknown}; and there is no run's folder of that name");
        }
        let opened = Opened::new(path, &a.which, recipes).with_context(|| format!("{name} is no run that can be profiled"))?;
        let config = ConfigArgs { recipe: None, ..args }.resolve(recipes, Some(opened.config.clone()))?;
        Ok(Subject { config, recipe: opened.recipe, run: Some((run_folder(path, &opened.found), opened.found)) })
    }

    fn title(&self) -> String {
        let at = self.run.as_ref().map_or(String::new(), |(_, found)| format!(", {} (step {})", found.path.display(), found.step));
        format!("{} {}{at}", self.config.text("recipe"), self.config.text("preset"))
    }

    /// The programs; a run's with its checkpoint.
    fn load(&self, task: &dyn Task, device: &Device) -> Result<Session> {
        let mut s = run::load_within_budget(task, &self.config, device)?;
        if let Some((_, found)) = &self.run {
            run::same_tokenizer(found, task)?;
            run::same_classes(found, task)?;
            run::same_base(found, task)?;
            run::restore(&mut s, found, true)?;
        }
        Ok(s)
    }

    /// A step: a run's own, with its data; else one with made-up numbers.
    fn steps<'t>(&self, task: &'t mut dyn Task) -> Result<impl FnMut(&mut Session, u64) -> Result<(), TrainError> + use<'t>> {
        let done = self.run.as_ref().map(|(_, found)| found.step);
        if let Some(done) = done {
            task.begin(done)?;
        }
        Ok(move |s: &mut Session, i: u64| match done {
            Some(done) => {
                let rate = rate(task.train_config(), done + i);
                task.step(s, done + i, rate)
            }
            None => task.bench_step(s, i),
        })
    }

    fn described(&self, digest: &Digest, device: &Device) -> Result<serde_json::Value> {
        let mut json = serde_json::to_value(digest)?;
        let versions = match device {
            Device::Cpu(..) => None,
            Device::Cuda(cuda, _) => Some(cuda.versions()),
        };
        let about = serde_json::json!({ "about": self.about(), "libraries": versions });
        if let (Some(to), serde_json::Value::Object(from)) = (json.as_object_mut(), about) {
            to.extend(from);
        }
        Ok(json)
    }

    /// What is kept with every report.
    fn about(&self) -> serde_json::Value {
        serde_json::json!({
            "recipe": self.config.text("recipe"), "preset": self.config.text("preset"),
            "checkpoint": self.run.as_ref().map(|(_, found)| found.path.display().to_string()),
            "version": env!("CARGO_PKG_VERSION"), "commit": option_env!("KILN_COMMIT"),
            "date": chrono::Local::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, false),
        })
    }
}

/// The folder of the run that a checkpoint is of; what was named where it stands alone.
fn run_folder(named: &Path, found: &Checkpoint) -> PathBuf {
    let path = std::path::absolute(&found.path).unwrap_or_else(|_| found.path.clone());
    let run = path.parent().filter(|p| p.ends_with("checkpoints")).and_then(Path::parent);
    run.map_or_else(|| named.to_path_buf(), Path::to_path_buf)
}

/// The folder to write, which must not be there yet.
fn place(a: &ProfileArgs, subject: &Subject) -> Result<PathBuf> {
    if let Some(out) = &a.out {
        if std::fs::read_dir(out).is_ok_and(|mut d| d.next().is_some()) || out.is_file() {
            bail!("--out {}: there is something already", out.display());
        }
        return Ok(out.clone());
    }
    let date = chrono::Local::now().format("%Y%m%d-%H%M%S");
    let (within, name) = match &subject.run {
        Some((run, _)) => (run.clone(), format!("profile-{date}")),
        None => (PathBuf::new(), format!("profile-{}-{date}", subject.config.text("recipe"))),
    };
    let taken = |i: &u32| within.join(if *i == 1 { name.clone() } else { format!("{name}-{i}") });
    Ok((1..).map(|i| taken(&i)).find(|p| !p.exists()).expect("numbers do not end"))
}

/// A folder that is there whole or not at all.
fn write(out: &Path, subject: &Subject, parts: &[(&str, String)]) -> Result<()> {
    let failed = |e: std::io::Error| anyhow!("cannot write {}: {e}", out.display());
    files::create_folder(files::folder_of(out)).map_err(failed)?;
    let staged = files::Staged::new(out).map_err(failed)?;
    let config = ("config.toml", subject.config.to_toml());
    for (name, text) in parts.iter().chain([&config]) {
        files::write_new(&staged.dir().join(name), text.as_bytes()).map_err(failed)?;
    }
    staged.finish().map_err(failed)
}

/// Only steps: those of the window are marked for Nsight, which records nothing else.
fn window(
    s: &mut Session,
    step: &mut impl FnMut(&mut Session, u64) -> Result<(), TrainError>,
    warmup: u64,
    steps: u64,
) -> Result<ExitCode> {
    let before = warmup + s.programs.values().map(|p| p.warm_up()).max().unwrap_or(0);
    for i in 0..before + steps {
        if i == before {
            s.device.synchronize()?;
            s.device.window(true)?;
        }
        s.span("step", |s| step(s, i))?;
    }
    s.device.synchronize()?;
    s.device.window(false)?;
    Ok(ExitCode::SUCCESS)
}

/// The steps under one of NVIDIA's profilers.
fn under(tool: Tool, a: &ProfileArgs, subject: &Subject, steps: u64) -> Result<ExitCode> {
    if a.device.device == "cpu" {
        bail!("--{}: Nsight looks at a GPU, and --device is cpu", tool.name());
    }
    let out = place(a, subject)?;
    // The same command, with the window marked.
    let typed = std::env::args().skip(1).filter(|arg| !["--nsys", "--ncu", "--json"].contains(&arg.as_str()));
    let counted = a.config.steps.is_none().then(|| ["--steps".into(), steps.to_string()]);
    let arguments: Vec<String> = typed.chain(["--window".into()]).chain(counted.into_iter().flatten()).collect();
    let by_hand: Vec<String> = tool.options(tool.name()).into_iter().chain([crate::program()]).chain(arguments.iter().cloned()).collect();
    let Some(program) = tool.find() else { bail!("--{}: {}", tool.name(), tool.missing(&by_hand)) };
    files::create_folder(files::folder_of(&out))?;
    let about = serde_json::json!({ "about": subject.about(), "tool": program, "command": by_hand, "steps": steps });
    let temporary = files::Staged::new(&out)?;
    let report = temporary.dir().join(tool.name());
    tool.run(&program, &report, &arguments).map_err(|e| anyhow!("--{}: {e}", tool.name()))?;
    if !temporary.dir().join(tool.file()).exists() {
        bail!("--{}: {} has left no report", tool.name(), program.display());
    }
    files::write_new(&temporary.dir().join("config.toml"), subject.config.to_toml().as_bytes())?;
    files::write_new(&temporary.dir().join("profile.json"), serde_json::to_string_pretty(&about)?.as_bytes())?;
    temporary.finish()?;
    out!("written to {}: {}, with config.toml and profile.json", out.display(), tool.file());
    Ok(ExitCode::SUCCESS)
}
