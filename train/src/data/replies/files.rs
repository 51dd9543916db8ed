//! JSONL files of prompts and replies.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use xxhash_rust::xxh3::Xxh3;

use super::super::prepare::is_val;
use super::super::{DataError, Order, Split, Tokenizer, jsonl};
use super::rows::{Fit, fit};
use super::{Example, Rows, Template, TooLong};

/// How files are read.
#[derive(Debug, Clone)]
pub struct Read<'a> {
    /// Names of the fields.
    pub prompt: &'a str,
    pub reply: &'a str,
    /// Tokens of a row, and of the model.
    pub seq: usize,
    pub vocab: usize,
    pub too_long: TooLong,
    /// Of the prompts, where no file is for validation.
    pub val_share: f64,
}

/// How many lines were cut and skipped.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Counts {
    pub cut: usize,
    pub skipped: usize,
}

/// All examples of some files.
#[derive(Debug)]
pub struct Files {
    pub counts: Counts,
    examples: Arc<Vec<Example>>,
    prompts: Vec<String>,
    /// Which examples, and which prompts, are to learn from and which to validate with.
    splits: [[Vec<usize>; 2]; 2],
    fingerprint: u64,
}

/// A line of a file.
struct Pair {
    file: usize,
    line: u64,
    prompt: usize,
    reply: String,
}

impl Files {
    /// A file, or every .jsonl file of a folder; those called val.jsonl or val-*.jsonl are then to validate with. All replies to a prompt are on
    /// the same side.
    pub fn read(path: &Path, how: &Read, template: &Template, tokenizer: &Tokenizer) -> Result<Files, DataError> {
        if !(0.0..1.0).contains(&how.val_share) {
            let need = "a share is at least 0 and below 1".into();
            return Err(DataError::Setting { what: "data.val_share", value: how.val_share.to_string(), need });
        }
        let files = list(path)?;
        let (prompts, pairs) = lines(path, &files, how.prompt, how.reply)?;
        let encoded: Vec<Result<Fit, DataError>> = pairs
            .par_iter()
            .map(|pair| {
                let fail = |problem: String| DataError::Line { path: files[pair.file].clone(), line: pair.line, problem };
                let mut tokens = template.head(tokenizer, &prompts[pair.prompt])?;
                let head = tokens.len();
                tokens.extend(template.tail(tokenizer, &pair.reply)?);
                if let Some(token) = tokens.iter().find(|t| **t as usize >= how.vocab) {
                    return Err(fail(format!(
                        "token {token} ({:?}) is outside the model's vocabulary of {}",
                        tokenizer.decode(&[*token]),
                        how.vocab
                    )));
                }
                if tokens.len() == head {
                    return Err(fail("its reply has no tokens: the tokenizer knows none of it (remove the line)".into()));
                }
                fit(Example { tokens, head }, how.seq, how.too_long).map_err(fail)
            })
            .collect();

        let sides = Sides::new(&files, &pairs, how.val_share);
        let (mut counts, mut examples, mut splits) = (Counts::default(), vec![], [[vec![], vec![]], [vec![], vec![]]]);
        let mut asked = [vec![false; prompts.len()], vec![false; prompts.len()]];
        for (pair, fit) in pairs.iter().zip(encoded) {
            let example = match fit? {
                Fit::Whole(e) => e,
                Fit::Cut(e) => {
                    counts.cut += 1;
                    e
                }
                Fit::Skip => {
                    counts.skipped += 1;
                    continue;
                }
            };
            let side = sides.of(pair) as usize;
            splits[side][0].push(examples.len());
            if !std::mem::replace(&mut asked[side][pair.prompt], true) {
                splits[side][1].push(pair.prompt);
            }
            examples.push(example);
        }
        for split in Split::ALL {
            if splits[split as usize][0].is_empty() {
                let skipped = if counts.skipped > 0 { format!(", {} of them skipped as too long", counts.skipped) } else { String::new() };
                let reason = match split {
                    Split::Train => format!("of {} lines{skipped}, none is left to learn from", pairs.len()),
                    Split::Val => format!(
                        "of {} lines{skipped}, none is left to validate with (use data.val_share = 0.5 or so, more prompts, or a folder with a file val.jsonl)",
                        pairs.len()
                    ),
                };
                return Err(DataError::Examples { path: path.to_owned(), reason });
            }
        }
        let fingerprint = fingerprint(&examples, &splits);
        Ok(Files { counts, examples: Arc::new(examples), prompts, splits, fingerprint })
    }

    /// Refuses what `read` cannot read, without a tokenizer.
    pub fn check(path: &Path, prompt: &str, reply: &str) -> Result<(), DataError> {
        lines(path, &list(path)?, prompt, reply).map(drop)
    }

    /// Examples of a split.
    pub fn count(&self, split: Split) -> usize {
        self.splits[split as usize][0].len()
    }

    /// A split in rows of `seq`, which is at least what the files were read with. Rows to validate with do not depend on the seed.
    pub fn rows(&self, split: Split, seq: usize, pack: bool, seed: u64, ignore: Vec<u32>) -> Result<Rows, DataError> {
        let seed = if split == Split::Train { seed } else { 0 };
        Rows::new(self.examples.clone(), &self.splits[split as usize][0], seq, pack, seed, ignore)
    }

    /// Prompts of a split.
    pub fn prompts(&self, split: Split) -> usize {
        self.splits[split as usize][1].len()
    }

    /// The text of prompt number `place`, counted on through the epochs; those to learn from are shuffled, another way in each epoch.
    pub fn prompt(&self, split: Split, seed: u64, place: u64) -> &str {
        let own = &self.splits[split as usize][1];
        let len = own.len() as u64;
        let i = if split == Split::Train { Order { seed, len }.at(place) } else { place % len };
        &self.prompts[own[i as usize]]
    }

    /// Changes with every token, and with what is learned and what validates.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Tokens of the longest prompt, with what the template puts around it.
    pub fn longest_prompt(&self) -> usize {
        self.examples.iter().map(|e| e.head).max().unwrap_or(0)
    }
}

fn fingerprint(examples: &[Example], splits: &[[Vec<usize>; 2]; 2]) -> u64 {
    let mut hash = Xxh3::new();
    for e in examples {
        hash.update(&[e.tokens.len() as u64, e.head as u64].map(u64::to_le_bytes).concat());
        e.tokens.iter().for_each(|t| hash.update(&t.to_le_bytes()));
    }
    splits[1][0].iter().for_each(|i| hash.update(&(*i as u64).to_le_bytes()));
    hash.digest()
}

/// Prompts by number, in the order in which they were first seen.
#[derive(Default)]
struct Prompts {
    texts: Vec<String>,
    numbers: HashMap<String, usize>,
}

impl Prompts {
    fn number(&mut self, text: String) -> usize {
        let next = self.texts.len();
        *self.numbers.entry(text).or_insert_with_key(|text| {
            self.texts.push(text.clone());
            next
        })
    }
}

/// Prompts and lines of the files at `path`.
fn lines(path: &Path, files: &[PathBuf], prompt: &str, reply: &str) -> Result<(Vec<String>, Vec<Pair>), DataError> {
    let (mut prompts, mut pairs) = (Prompts::default(), vec![]);
    for (file, path) in files.iter().enumerate() {
        jsonl::each_line(path, &mut |line| {
            let object = line.object().map_err(|p| line.error(p))?;
            let field = |name: &str| jsonl::text(&object, name).map_err(|p| line.error(p));
            let (asked, replied) = (field(prompt)?, field(reply)?);
            if replied.trim().is_empty() {
                return Err(line.error(format!("the field {reply:?} is empty: there is nothing to learn (remove the line)")));
            }
            pairs.push(Pair { file, line: line.number, prompt: prompts.number(asked), reply: replied });
            Ok(())
        })?;
    }
    match pairs.is_empty() {
        true => Err(DataError::Examples { path: path.to_owned(), reason: "holds no examples".into() }),
        false => Ok((prompts.texts, pairs)),
    }
}

/// Which lines are to validate with.
enum Sides {
    /// Those of these files.
    Files(Vec<bool>),
    /// Those of a share of the prompts.
    Share(f64),
}

impl Sides {
    fn new(files: &[PathBuf], pairs: &[Pair], share: f64) -> Sides {
        let val = |path: &PathBuf| path.file_stem().is_some_and(|name| name == "val" || name.to_string_lossy().starts_with("val-"));
        let own: Vec<bool> = files.iter().map(val).collect();
        match pairs.iter().any(|pair| own[pair.file]) && pairs.iter().any(|pair| !own[pair.file]) {
            true => Sides::Files(own),
            false => Sides::Share(share),
        }
    }

    fn of(&self, pair: &Pair) -> Split {
        let val = match self {
            Sides::Files(own) => own[pair.file],
            Sides::Share(share) => is_val(pair.prompt as u64, *share),
        };
        if val { Split::Val } else { Split::Train }
    }
}

/// The files that a path names, sorted by name.
fn list(path: &Path) -> Result<Vec<PathBuf>, DataError> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = vec![];
    for entry in std::fs::read_dir(path).map_err(DataError::io("list", path))? {
        let file = entry.map_err(DataError::io("list", path))?.path();
        if file.is_file() && file.extension().is_some_and(|e| e.eq_ignore_ascii_case("jsonl")) {
            files.push(file);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(DataError::Examples { path: path.to_owned(), reason: "holds no .jsonl file (and no dataset.json)".into() });
    }
    Ok(files)
}
