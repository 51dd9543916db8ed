//! What a recipe's trained models can be asked to do. A recipe offers each by a small trait; the command line asks for it, and where it is missing
//! says which recipes have it.

use super::{Computed, Session, TrainError};
use crate::checkpoint::Checkpoint;
use crate::config::{Config, ConfigError};
use crate::data::Tokenizer;
use crate::data::chats::Message;
use crate::data::puzzles::{self, PuzzleSet};
use crate::golden::Golden;
use crate::models::decoder::{Chat, Writing};
use engine::{Device, Switches};
use std::path::Path;
use std::sync::Arc;

/// What lies in the place that `--data` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// A folder that `kiln data prepare` made.
    Text,
    /// Prompts and replies, as JSONL.
    Replies,
    /// Folders of pictures, CIFAR.
    Pictures,
    /// CSV of puzzles.
    Puzzles,
}

/// Models that write text: `kiln generate`.
pub trait Writes {
    /// A model as a config describes it, with the tokenizer that the checkpoint holds; without a checkpoint, with the data's.
    fn text_model(&self, config: &Config, found: Option<&Checkpoint>) -> Result<TextModel, TrainError>;
}

pub enum TextModel {
    /// Continues a text.
    Continues(Box<dyn Generator>),
    /// Replies to a prompt.
    Replies(Box<Chat>),
    /// Reads a prompt, and writes a reply with a decoder of its own.
    Answers(Box<dyn Replier>),
}

/// Models that write many replies to many prompts at once: `kiln eval --prompts`, `kiln bench generate`.
pub trait Surveys {
    /// Has evaluation write replies to so many prompts, and say what they are like.
    fn ask(&self, config: &mut Config, survey: &Survey) -> Result<(), ConfigError>;
    /// Replies to made-up prompts, in every way that is to be timed.
    fn writings(&self, config: &Config) -> Result<Vec<Writing>, TrainError>;
}

/// Which replies evaluation is to have written.
pub struct Survey<'a> {
    pub prompts: u64,
    /// To each prompt; if none, as in training.
    pub replies: Option<u32>,
    /// Where they are written down.
    pub file: Option<&'a Path>,
}

/// Models that classify pictures: `kiln predict`.
pub trait Classifies {
    /// One as a checkpoint's config and identity describe it, without its data.
    fn classifier(&self, config: &Config, identity: &serde_json::Value) -> Result<Box<dyn Classifier>, TrainError>;
}

/// Models that solve puzzles: `kiln solve`.
pub trait Solves {
    fn solver(&self, config: &Config) -> Result<Box<dyn Solver>, TrainError>;
}

/// Models that other programs can read: `kiln export`.
pub trait Exports {
    /// Writes a folder: what was trained, or a whole model.
    fn export(&self, config: &Config, how: &Exporting) -> Result<(), TrainError>;
}

/// Which weights an exported folder holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// Adapters alone, or every weight where every weight was trained.
    Trained,
    /// Adapters added to their base; without adapters that is an error.
    Merged,
    /// A whole model, however it was trained.
    Whole,
}

/// What is exported, and how.
pub struct Exporting<'a> {
    pub found: &'a Checkpoint,
    /// The folder to write, and what its model is called.
    pub out: &'a Path,
    pub name: &'a str,
    pub parts: Parts,
    /// The weights are those of the last step, although the run averages them.
    pub raw: bool,
    /// Most bytes of a file of weights.
    pub shard: usize,
}

/// Numbers that are compared with those of a reference implementation: `kiln check golden`.
pub trait Reference {
    /// What that file is called in `reference/golden`, without its ending: the recipe's name, or one of several.
    fn file_name(&self, recipe: &'static str) -> &'static str {
        recipe
    }
    /// The golden file that kiln carries.
    fn file(&self) -> &'static [u8];
    /// Everything that a golden file holds, computed here, by the file's own names.
    fn compute(&self, file: &Golden, switches: &Switches, device: &Device) -> Result<Computed, TrainError>;
}

/// Continues text token by token.
pub trait Generator {
    fn tokenizer(&self) -> Result<Arc<Tokenizer>, TrainError>;
    /// Loads what it needs for at most `capacity` tokens.
    fn begin(&mut self, s: &mut Session, capacity: usize) -> Result<(), TrainError>;
    /// Takes in tokens; logits after the last.
    fn feed(&mut self, s: &mut Session, tokens: &[u32]) -> Result<Vec<f32>, TrainError>;
}

/// Writes replies, several at once: what is read is no part of what is written.
pub trait Replier {
    fn tokenizer(&self) -> Result<Arc<Tokenizer>, TrainError>;
    /// The tokens of a prompt, or of a conversation's turns, as training puts them.
    fn prompt(&self, turns: &[Message]) -> Result<Vec<u32>, TrainError>;
    /// The token that ends a reply.
    fn stop(&self) -> Result<Option<u32>, TrainError>;
    /// Loads what it needs for so many replies at once, of at most `capacity` tokens.
    fn begin(&mut self, s: &mut Session, rows: usize, capacity: usize) -> Result<(), TrainError>;
    /// Reads a prompt for each reply: at least one, and at most as many as `begin` was told.
    fn read(&mut self, s: &mut Session, prompts: &[Vec<u32>]) -> Result<(), TrainError>;
    /// Takes in the last token of each reply, none after `read`; logits after it, [prompts, vocab].
    fn next(&mut self, s: &mut Session, tokens: &[u32]) -> Result<Vec<f32>, TrainError>;
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
