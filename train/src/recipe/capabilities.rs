//! What a trained model can be asked to do, one small trait each.

use super::{Session, TrainError};
use crate::data::Tokenizer;
use crate::data::puzzles::{self, PuzzleSet};
use std::sync::Arc;

/// Continues text token by token.
pub trait Generator {
    fn tokenizer(&self) -> Result<Arc<Tokenizer>, TrainError>;
    /// Loads what it needs for at most `capacity` tokens.
    fn begin(&mut self, s: &mut Session, capacity: usize) -> Result<(), TrainError>;
    /// Takes in tokens; logits after the last.
    fn feed(&mut self, s: &mut Session, tokens: &[u32]) -> Result<Vec<f32>, TrainError>;
}

/// Tells which class a picture is of.
pub trait Classifier {
    fn classes(&self) -> &[String];
    /// Pixels of a picture's side.
    fn size(&self) -> usize;
    /// Loads what it needs for `batch` pictures at a time.
    fn begin(&mut self, s: &mut Session, batch: usize) -> Result<(), TrainError>;
    /// Pictures [n, 3, size, size] -> logits [n, classes].
    fn logits(&mut self, s: &mut Session, pictures: &[u8]) -> Result<Vec<f32>, TrainError>;
}

/// Solves puzzles, one segment of thinking after another.
pub trait Solver {
    fn task(&self) -> puzzles::Task;
    /// The first puzzles of those that the model never learned from.
    fn unseen(&self, count: usize) -> Result<PuzzleSet, TrainError>;
    /// Loads what it needs for `batch` puzzles at a time.
    fn begin(&mut self, s: &mut Session, batch: usize) -> Result<(), TrainError>;
    /// Of each of these puzzles [n, cells] the answer after every segment, until the model halts (see `Attempt::halts`); or until the limit.
    fn solve(&mut self, s: &mut Session, puzzles: &[u8], to_limit: bool) -> Result<Vec<Vec<Attempt>>, TrainError>;
}

/// A model's answer after a segment.
#[derive(Clone)]
pub struct Attempt {
    pub answer: Vec<u8>,
    /// Above 0 the model thinks that it is right.
    pub halt: f32,
}

impl Attempt {
    /// Whether the model is sure of the same answer for the second time in a row. Once is too early: what tells it learns from puzzles that
    /// the model comes to know by heart, and takes its first answer to others for as good.
    pub fn halts(&self, before: Option<&Attempt>) -> bool {
        self.halt > 0.0 && before.is_some_and(|b| b.halt > 0.0 && b.answer == self.answer)
    }
}
