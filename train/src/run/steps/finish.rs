//! How a run ends: what is drawn and said, and whether that was a success.

use super::Run;
use crate::memory::Measured;
use crate::recipe::{Evaluation, TrainError};
use crate::report::{human_bytes, human_time};
use crate::run::show::{draw, indent};
use crate::run::{Finished, draw_confusion, evaluation_line, note_sample, peak, write_own};
use crate::say;
use std::time::Instant;

const CONFUSION: &str = "confusion.png";

impl Run<'_> {
    /// Draws and says what has become of it.
    pub fn finish(mut self, started: Instant) -> Result<Finished, TrainError> {
        self.bar.finish_and_clear();
        let (out, done) = (&self.options.out, self.done);
        let drawn = draw(self.task, out, &self.name, self.task.floor())?;
        if self.interrupted && done < self.c.steps {
            return Ok(self.stopped(&format!("after step {done}")));
        }
        if self.interrupted && self.validates && self.evaluated.is_none() {
            return Ok(self.stopped("in the last validation, which is made up for"));
        }
        if let Some(problem) = self.problem()? {
            return Err(problem);
        }
        match self.s.averaged(|s| self.task.show(s)) {
            Ok(Some(text)) => {
                say!("\na sample of what the model writes:\n{}\n", indent(&text));
                note_sample(out, done, &text)?;
            }
            Ok(None) => {}
            Err(TrainError::Stopped) => return Ok(self.stopped("in the sample at its end, which is made up for")),
            // The other ranks would wait for this one.
            Err(e) if self.config.ranks.size() > 1 => return Err(e),
            Err(e) => say!("no sample: {e}"),
        }
        if let Some(Evaluation { values, confusion, .. }) = &self.evaluated {
            say!("validation {}", evaluation_line(values, self.task.metrics(), self.task.floor()));
            if let Some(confusion) = confusion {
                let path = out.join(CONFUSION);
                match draw_confusion(confusion, &self.name, done, &path)? {
                    Some(png) => {
                        write_own(out, CONFUSION, png)?;
                        say!("confusion matrix {}", path.display());
                    }
                    None => say!("no confusion matrix: too many classes to draw"),
                }
            }
        }
        for p in drawn {
            say!("{} {}", p.what, out.join(p.file).display());
        }
        if done < self.c.steps {
            let (best, since) = (self.best.line(self.task.metrics()), self.best.since);
            say!("stopped early after step {done}, saved: {since} evaluations in a row were not better than {best} (train.patience)");
        }
        say!("checkpoint {}", self.checkpoints.join(format!("step-{done:08}")).display());
        if self.c.keep_best && self.best.at.as_ref().is_some_and(|at| at.0 < done) {
            say!("best checkpoint {} ({})", out.join("best").display(), self.best.line(self.task.metrics()));
        }
        if self.task.has_test() {
            say!("the data has a test split, which nothing was chosen by: {} eval {} --best --split test", crate::program(), out.display());
        }
        if let Some((scale, overflowed)) = engine::passes::loss_scale(&self.s.store)? {
            let what = if overflowed == 1.0 {
                "micro-batch overflowed, and its step was"
            } else {
                "micro-batches overflowed, and their steps were"
            };
            say!("fp16: the loss scale is {scale}; {overflowed} {what} skipped");
        }
        self.clock.up_to(done)?;
        if let Some(line) = self.clock.slow_line() {
            say!("{line}");
        }
        say!("planned peak {}, measured {}", human_bytes(peak(&self.s).total() as u64), Measured::of(&self.s.device).line());
        say!("done in {}", human_time(started.elapsed()));
        Ok(Finished { step: done, interrupted: false })
    }

    /// By a signal: saved, and how to go on.
    fn stopped(&self, when: &str) -> Finished {
        let (program, ranks) = (crate::program(), &self.config.ranks);
        // Under another launcher the same command of the launcher goes on.
        let flags = match (ranks.size(), ranks.tensor.size) {
            _ if !crate::launch::is_started_by_ranks() => String::new(),
            (n, 1) => format!(" --ranks {n}"),
            (n, t) => format!(" --ranks {n} --tensor {t}"),
        };
        say!("stopped {when}, saved; go on with: {program} train --out {} --resume{flags}", self.options.out.display());
        Finished { step: self.done, interrupted: true }
    }
}
