//! The only training loop.
//!
//! | file | is |
//! |---|---|
//! | `mod.rs` | what a run is told, and how it ended |
//! | `start.rs` | everything before the first step: programs, checkpoint, what is said of them |
//! | `steps.rs` | `Run`: steps, logs, evaluates, saves; `steps/finish.rs`: how it ends |
//! | `load.rs` | a task's programs, and whether they fit in memory |
//! | `budget.rs` | settings with which a run fits into a memory budget, or into the device's memory |
//! | `resume.rs` | checkpoints and weights to go on from |
//! | `skips.rs` | steps whose loss or gradient is not finite |
//! | `folder.rs` | the run's folder |
//! | `best.rs` | the best checkpoint so far, and how long ago it was |
//! | `receipts.rs` | what the passes did |
//! | `show.rs` | lines, progress bar, pictures |
//! | `note.rs` | run.json: what kind of run it is, and how it ended |

mod best;
mod budget;
mod folder;
mod load;
mod note;
mod receipts;
mod resume;
mod show;
mod skips;
mod start;
mod steps;
#[cfg(test)]
mod tests;

pub use best::find as find_best;
pub use budget::{Fitted, Limits, SAVING, fit, fit_device, node_seconds};
pub use folder::{END, is_held, stays, write_bytes, write_own, write_whole};
pub use load::{
    Peak, Programs, compile_for, load, load_compiled, load_to_evaluate, load_with, load_within_budget, peak, planned, runs,
    settings_that_fit, within,
};
pub use note::{FILE as NOTE, SAMPLES, note_sample};
pub use receipts::{ranks_json, receipts_json, receipts_table, undivided};
pub use resume::{find_checkpoint, init_from, restore, resumable, same_base, same_classes, same_tokenizer};
pub use show::{draw_confusion, evaluation_line};

use crate::config::Config;
use crate::recipe::{Task, TrainError};
use crate::say;
use engine::Device;
use folder::Place;
use note::Note;
use start::Ready;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use steps::Run;

#[derive(Clone, Default)]
pub struct Options {
    /// The run's folder. Ranks but the first keep their records in one of their own inside of it.
    pub out: PathBuf,
    /// For these ranks: the run's folder, with its checkpoints.
    pub lead: Option<PathBuf>,
    pub start: Start,
    /// Shows every pass, also those with nothing to do.
    pub verbose: bool,
    /// Converts states that the checkpoint keeps in another form (f32, bf16, 8 bits) than the run's passes do.
    pub convert_states: bool,
    /// What was typed to start it; checkpoints note it.
    pub command: String,
    /// Set by a signal: finish the step, save, stop.
    pub stop: Arc<AtomicBool>,
    /// Set by who calls, cleared before anything is written: until then the process may be ended at any moment, and nothing is lost.
    pub preparing: Arc<AtomicBool>,
}

impl Options {
    /// The folder with the run's checkpoints.
    pub fn home(&self) -> &Path {
        self.lead.as_deref().unwrap_or(&self.out)
    }

    /// What one of several ranks is told.
    fn of_rank(&self, rank: usize) -> Options {
        match rank {
            0 => self.clone(),
            _ => Options { out: self.out.join("ranks").join(rank.to_string()), lead: Some(self.out.clone()), ..self.clone() },
        }
    }
}

/// Where a run begins.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Start {
    /// At the first step, in a folder without a run.
    #[default]
    New,
    /// At the run's newest whole checkpoint; at the first step where it has saved none yet.
    Newest,
    /// At this checkpoint. Later ones are set aside.
    From(PathBuf),
    /// At the first step. All checkpoints are set aside.
    Over,
}

/// How a run ended.
pub struct Finished {
    pub step: u64,
    pub interrupted: bool,
}

/// Trains a task to the end of its steps, or until it is told to stop.
pub fn train(task: &mut dyn Task, config: &Config, device: &Device, options: &Options) -> Result<Finished, TrainError> {
    let (started, options) = (Instant::now(), &options.of_rank(config.ranks.rank()));
    let ready = Ready::new(task, config, device, options)?;
    let steps = task.train_config().steps;
    let (has_all, is_over) = (ready.done() >= steps, ready.best.is_over(task.train_config()));
    if let Some(problem) = ready.problem.as_ref().filter(|_| has_all || is_over) {
        return Err(TrainError::Other(format!("the run ended at step {} and has nothing more to do: {problem}", ready.done())));
    }
    // What a signal or a kill left undone at the end of a run is done first.
    let ends = ready.done() == steps || is_over;
    let is_left = ready.owes || ends && !note::is_finished(options.home())?;
    if is_left && ends && !ready.owes {
        say!("the run has all its {} steps: nothing to do but what belongs to its end", ready.done());
    }
    if has_all && !is_left {
        say!("the run has {} steps already: nothing to do (raise --steps)", ready.done());
        return Ok(Finished { step: ready.done(), interrupted: false });
    }
    if is_over && !is_left {
        let (best, since) = (ready.best.line(task.metrics()), ready.best.since);
        say!(
            "the run stopped early at step {}, {since} evaluations after its best ({best}): nothing to do (raise train.patience, or 0)",
            ready.done()
        );
        return Ok(Finished { step: ready.done(), interrupted: false });
    }
    agree(task, config, &ready)?;
    let note = Note::of(task, config, device, options);
    let run = Run::begin(task, config, options, ready)?;
    note.begin(&options.out)?;
    let place = Place::of(&options.out)?;
    let ended = to_the_end(run, steps, started);
    note.end(&place, &options.out, &ended);
    if ended.as_ref().is_ok_and(|e| !e.interrupted) {
        say!("\n{}", show::figures(task, &options.out)?.trim_end());
    }
    ended
}

/// Every rank has as many examples of a batch as the others.
pub fn divides(batch: usize, data: usize) -> Result<(), TrainError> {
    match batch.is_multiple_of(data) {
        true => Ok(()),
        false => Err(TrainError::Other(format!(
            "train.batch = {batch} cannot be divided among {data} ranks: make it a multiple of {data}, or start fewer ranks"
        ))),
    }
}

/// Ranks that would train different things are an error, before the first step.
fn agree(task: &dyn Task, config: &Config, ready: &Ready) -> Result<(), TrainError> {
    let ranks = &config.ranks;
    if ranks.size() == 1 {
        return Ok(());
    }
    divides(task.train_config().batch, ranks.data.size)?;
    let own = [format!("{:?}", ready.from), task.identity()?.to_string(), config.to_toml()];
    let what = ["the checkpoint that they go on from", "their data, tokenizer or base model", "their settings"];
    for (own, what) in own.iter().zip(what) {
        let told = ranks.gather(own.as_bytes())?;
        if let Some(rank) = told.iter().position(|t| engine::mutant!("ranks-that-differ-begin", *t != told[0], false)) {
            return Err(TrainError::Other(format!(
                "rank {rank} and rank 0 differ in {what}: all ranks need the same files, on a file system that they share"
            )));
        }
    }
    Ok(())
}

fn to_the_end(mut run: Run, steps: u64, started: Instant) -> Result<Finished, TrainError> {
    run.make_up()?;
    while run.done < steps && !run.ends() {
        run.step()?;
    }
    run.finish(started)
}
