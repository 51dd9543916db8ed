//! The section `train`: optimizer, schedule, and when a run logs, evaluates, saves and stops.

use super::{ConfigError, Section};
use crate::section;
use serde::Serialize;

/// Steps are counted exactly up to here in f64, in which rates and metrics are.
const MOST_STEPS: u64 = 1 << 53;

/// Which optimizer trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    AdamW,
    Muon,
}

crate::choices!(Optimizer { AdamW: "adamw", Muon: "muon" });

section! {
    /// Optimizer, learning-rate schedule, and how often a run logs, evaluates and saves.
    #[derive(Serialize)]
    pub struct TrainConfig {
        /// Optimizer steps of the whole run.
        pub steps: u64 = 1000, in 0..=MOST_STEPS, [free];
        /// How often the training data is gone through: where this is not 0, `steps` follows from it when a run begins. 0: as many steps as `steps` says.
        pub epochs: f64 = 0.0, in 0.0..=1e6, [free];
        /// Length of the learning-rate schedule in steps. 0: as many as the run has when it begins.
        pub horizon: u64 = 0, in 0..=MOST_STEPS;
        /// Sequences, pictures or puzzles in one micro-batch.
        pub batch: usize = 16, in 1..=1 << 20;
        /// Micro-batches of one step: their gradients, or statistics, are added up before the weights change.
        pub accumulate: usize = 1, in 1..=1 << 15; // draws tell 2^15 micro-batches apart
        /// Highest learning rate.
        pub learning_rate: f64 = 1e-3, in 1e-38..=1e6;
        /// Shape of the schedule after the warm-up: half a cosine, wsd (stable, then a linear decay), or constant.
        pub schedule: String = "cosine".into(), in ["cosine", "wsd", "constant"];
        /// Steps of linear warm-up.
        pub warmup: u64 = 0, in 0..=MOST_STEPS;
        /// wsd: the share of the schedule over which the rate decays at its end.
        pub decay_share: f64 = 0.2, in 0.0..=1.0;
        /// Learning rate at the end of the schedule, as a share of the highest.
        pub final_rate: f64 = 0.1, in 0.0..=1.0;
        /// AdamW: decay of the mean of gradients.
        pub beta1: f32 = 0.9, in 0.0..1.0;
        /// AdamW: decay of the mean of squared gradients.
        pub beta2: f32 = 0.95, in 0.0..1.0;
        /// AdamW: added to the root of the mean squared gradient.
        pub eps: f32 = 1e-8, in 1e-38..=1.0;
        /// AdamW: decoupled weight decay of matrices.
        pub weight_decay: f32 = 0.1, in 0.0..=1e3;
        /// adamw, or muon: matrices inside the layers are updated by orthogonalised momentum, everything else by AdamW.
        pub optimizer: Optimizer = Optimizer::AdamW;
        /// Muon: decay of the mean of gradients.
        pub momentum: f32 = 0.95, in 0.0..1.0;
        /// Largest norm of all gradients together; beyond it they are scaled down.
        pub clip: f32 = 1.0, in 1e-38..=1e30;
        /// EMA: decay of the moving average of the weights over steps, for example 0.999; evaluation, samples and exports use the average.
        /// 0: no average.
        pub ema: f32 = 0.0, in 0.0..1.0;
        /// Steps from one line of metrics to the next.
        pub log_every: u64 = 10, in 1..=MOST_STEPS, [free];
        /// Steps from one evaluation to the next. 0: once an epoch, in recipes that count epochs.
        pub eval_every: u64 = 100, in 0..=MOST_STEPS, [free];
        /// Sequences, pictures or puzzles in one batch of an evaluation. 0: as many as in `batch`.
        pub eval_batch: usize = 0, in 0..=1 << 20, [free];
        /// Batches of one evaluation. 0: all of the validation data.
        pub eval_batches: u64 = 8, in 0..=MOST_STEPS, [free];
        /// Steps from one checkpoint to the next.
        pub save_every: u64 = 100, in 1..=MOST_STEPS, [free];
        /// Newest checkpoints that are kept. 0: all of them.
        pub keep: usize = 3, [free];
        /// Whether an evaluation that is better than all before it saves a checkpoint, which is kept beside the newest ones as the run's `best`.
        pub keep_best: bool = true, [free];
        /// Which validation metric says what is better. Empty: the first of an evaluation that has a direction.
        pub best_metric: String = String::new(), [free];
        /// Evaluations in a row that are not better than the best before the run stops early. 0: it does not.
        pub patience: u64 = 0, in 0..=MOST_STEPS, [free];
    }
}

impl TrainConfig {
    /// Steps of the learning-rate schedule.
    pub fn schedule_steps(&self) -> u64 {
        if self.horizon == 0 { self.steps } else { self.horizon }
    }

    /// Examples in one batch of an evaluation.
    pub fn evaluation_batch(&self) -> usize {
        if self.eval_batch == 0 { self.batch } else { self.eval_batch }
    }

    pub fn check(&self) -> Result<(), ConfigError> {
        self.in_range("train")
    }
}
