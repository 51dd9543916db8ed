//! Files of conversations, of prompts and replies among them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rayon::prelude::*;
use xxhash_rust::xxh3::Xxh3;

use super::super::chats::{self, Conversation, Layout, Message};
use super::super::prepare::is_val;
use super::super::{DataError, Order, Split, Tokenizer, listed};
use super::rows::{Fit, fit};
use super::{Example, Learned, Rows, TooLong, Wording};
use crate::memory;
use crate::report::human_bytes;

/// How files are read.
#[derive(Debug, Clone)]
pub struct Read<'a> {
    /// Names of the fields of a prompt and a reply. Where both are `FIELDS`, a first row says of which layout the files are.
    pub prompt: &'a str,
    pub reply: &'a str,
    /// Tokens of a row, and of the model.
    pub seq: usize,
    pub vocab: usize,
    pub too_long: TooLong,
    /// Of the prompts, where no file is for validation.
    pub val_share: f64,
}

/// The fields of a prompt and a reply, where nothing else is said.
pub const FIELDS: [&str; 2] = ["prompt", "reply"];

/// Conversations that are encoded at once, by all cores.
const BATCH: usize = 1024;
/// The same in bytes of their texts, for long ones.
const BATCH_BYTES: usize = 16 << 20;
/// No more rows are encoded where less memory is left than this, and what each byte of their texts takes while it is.
const LEAST_FREE: u64 = 64 << 20;
const FREE_A_BYTE: u64 = 32;
/// Between two lines that say how far it is.
const EVERY: Duration = Duration::from_secs(10);

/// How many conversations there are, how many examples were cut and skipped, and more that people are told.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Counts {
    pub chats: usize,
    pub cut: usize,
    pub skipped: usize,
    /// Conversations without a turn that is learned.
    pub nothing: usize,
    /// Conversations whose turns are examples of their own.
    pub split: usize,
}

/// All examples of some files.
#[derive(Debug)]
pub struct Files {
    pub counts: Counts,
    pub layout: Layout,
    examples: Arc<Vec<Example>>,
    prompts: Vec<Asking>,
    /// Which examples, and which prompts, are to learn from and which to validate with.
    splits: [[Vec<usize>; 2]; 2],
    val_share: f64,
    fingerprint: u64,
}

/// What a model is asked first in some conversations.
#[derive(Debug)]
struct Asking {
    text: String,
    messages: Vec<Message>,
}

/// A conversation, where it stands, and the number of its prompt.
struct Told {
    file: usize,
    unit: &'static str,
    number: u64,
    prompt: usize,
    conversation: Conversation,
}

impl Files {
    /// Files, and every file of folders, as one set; where several are read, those called val.jsonl, val-*.parquet and the like are to validate with. All
    /// replies to a prompt are on the same side.
    pub fn read(paths: &[PathBuf], how: &Read, wording: &dyn Wording, tokenizer: &Tokenizer) -> Result<Files, DataError> {
        let files = Files::gather(paths, how, wording, tokenizer)?;
        match files.lacks() {
            Some(reason) => Err(DataError::Examples { path: called(paths), reason }),
            None => Ok(files),
        }
    }

    /// The same, though there may be nothing to learn from.
    pub fn gather(paths: &[PathBuf], how: &Read, wording: &dyn Wording, tokenizer: &Tokenizer) -> Result<Files, DataError> {
        check_share(how.val_share)?;
        let mut all = Gathered::new(how, wording, tokenizer, chats::list(paths)?);
        let files = all.paths.clone();
        let layout = chats::each_conversation(&files, layout(how.prompt, how.reply), &mut |row, conversation| all.add(row, conversation))?;
        all.encode()?;
        if all.counts.chats == 0 {
            return Err(DataError::Examples { path: called(paths), reason: "holds no examples".into() });
        }
        Ok(all.finish(layout))
    }

    /// Why nothing can be trained on these.
    pub fn lacks(&self) -> Option<String> {
        let Counts { chats, skipped, nothing, .. } = self.counts;
        let skipped = if skipped > 0 { format!(", {skipped} of them skipped as too long") } else { String::new() };
        let nothing = if nothing > 0 { format!(", {nothing} without a turn to learn") } else { String::new() };
        self.splits[0][0].is_empty().then(|| format!("of {chats} lines{skipped}{nothing}, none is left to learn from"))
    }

    /// Why there is nothing to validate with, where that is so, and what would change it.
    pub fn without_validation(&self) -> Option<String> {
        self.splits[1][0].is_empty().then(|| match self.val_share {
            0.0 => "data.val_share = 0".into(),
            share => format!(
                "data.val_share = {share} of {} prompts is none (--set data.val_share=0.5 takes half of them; or use more prompts, or a folder with a file val.jsonl)",
                self.prompts.len()
            ),
        })
    }

    /// Refuses what `read` cannot read, without a tokenizer.
    pub fn check(paths: &[PathBuf], prompt: &str, reply: &str) -> Result<(), DataError> {
        Ok(chats::each_conversation(paths, layout(prompt, reply), &mut |_, _| Ok(())).map(drop)?)
    }

    /// Examples of a split.
    pub fn count(&self, split: Split) -> usize {
        self.splits[split as usize][0].len()
    }

    /// Every example, to learn from or to validate with.
    pub fn examples(&self) -> &[Example] {
        &self.examples
    }

    /// The same, to keep.
    pub fn shared(&self) -> &Arc<Vec<Example>> {
        &self.examples
    }

    /// Which of them are in a split.
    pub fn chosen(&self, split: Split) -> &[usize] {
        &self.splits[split as usize][0]
    }

    /// What the rows of some files are: as the names of the fields say, or their first row.
    pub fn layout(files: &[PathBuf], prompt: &str, reply: &str) -> Result<Layout, DataError> {
        Ok(layout(prompt, reply).map_or_else(|| chats::layout_of(files), Ok)?)
    }

    /// A split in rows of `seq`, which is at least what the files were read with. Rows to validate with do not depend on the seed.
    pub fn rows(&self, split: Split, seq: usize, pack: bool, seed: u64, ignore: Vec<u32>) -> Result<Rows, DataError> {
        let seed = if engine::mutant!("validation-rows-by-the-seed", split == Split::Train, true) { seed } else { 0 };
        Rows::new(self.examples.clone(), &self.splits[split as usize][0], seq, pack, seed, ignore)
    }

    /// Prompts of a split.
    pub fn prompts(&self, split: Split) -> usize {
        self.splits[split as usize][1].len()
    }

    /// The text of prompt number `place`, counted on through the epochs; those to learn from are shuffled, another way in each epoch.
    pub fn prompt(&self, split: Split, seed: u64, place: u64) -> &str {
        &self.asking(split, seed, place).text
    }

    /// The same as turns.
    pub fn turns(&self, split: Split, seed: u64, place: u64) -> &[Message] {
        &self.asking(split, seed, place).messages
    }

    fn asking(&self, split: Split, seed: u64, place: u64) -> &Asking {
        let own = &self.splits[split as usize][1];
        let len = own.len() as u64;
        let i = if split == Split::Train { Order { seed, len }.at(place) } else { place % len };
        &self.prompts[own[i as usize]]
    }

    /// Changes with every token, and with what is learned and what validates.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Tokens of the longest prompt, with what is put around it.
    pub fn longest_prompt(&self, wording: &dyn Wording, tokenizer: &Tokenizer) -> Result<usize, DataError> {
        let own: Vec<usize> = self.splits.iter().flat_map(|split| split[1].iter().copied()).collect();
        let tokens = |i: &usize| wording.prompt(tokenizer, &self.prompts[*i].messages).map(|tokens| tokens.len());
        own.par_iter().map(tokens).try_reduce(|| 0, |a, b| Ok(a.max(b)))
    }
}

/// Some paths in a message.
fn called(paths: &[PathBuf]) -> PathBuf {
    listed(&paths.iter().map(|path| path.display()).collect::<Vec<_>>()).into()
}

/// Refuses what is no share of prompts.
pub(in crate::data) fn check_share(share: f64) -> Result<(), DataError> {
    let wrong =
        || DataError::Setting { what: "data.val_share", value: share.to_string(), need: "a share is at least 0 and below 1".into() };
    if (0.0..1.0).contains(&share) { Ok(()) } else { Err(wrong()) }
}

/// The layout that the names of the fields ask for; None: what a first row says.
fn layout(prompt: &str, reply: &str) -> Option<Layout> {
    ([prompt, reply] != FIELDS).then(|| Layout::pair(prompt, reply))
}

/// Files as they are being read.
struct Gathered<'a> {
    how: &'a Read<'a>,
    wording: &'a dyn Wording,
    tokenizer: &'a Tokenizer,
    paths: Vec<PathBuf>,
    /// The file that the last conversation was of.
    at: usize,
    counts: Counts,
    prompts: Prompts,
    /// Conversations that wait to be encoded.
    queue: Vec<Told>,
    /// Bytes of text in the queue.
    bytes: usize,
    examples: Vec<Example>,
    /// Of each example, its file and its prompt.
    from: Vec<(usize, usize)>,
    /// Whether some file to validate with, and some other one, holds a conversation.
    has: [bool; 2],
    far: Far,
}

/// How far encoding is, said now and then where it takes long: a template may take seconds for each conversation.
struct Far {
    done: AtomicU64,
    begun: Instant,
    said: Mutex<Instant>,
}

impl Far {
    fn new() -> Far {
        Far { done: AtomicU64::new(0), begun: Instant::now(), said: Mutex::new(Instant::now()) }
    }

    fn one_more(&self) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        // Another thread says it.
        let Ok(mut said) = self.said.try_lock() else { return };
        if said.elapsed() >= EVERY {
            *said = Instant::now();
            crate::warn!("{done} conversations are encoded, in {} s", self.begun.elapsed().as_secs());
        }
    }
}

impl<'a> Gathered<'a> {
    fn new(how: &'a Read<'a>, wording: &'a dyn Wording, tokenizer: &'a Tokenizer, paths: Vec<PathBuf>) -> Self {
        let (counts, prompts) = (Counts::default(), Prompts::default());
        Gathered {
            how,
            wording,
            tokenizer,
            paths,
            at: 0,
            counts,
            prompts,
            queue: vec![],
            bytes: 0,
            examples: vec![],
            from: vec![],
            has: [false; 2],
            far: Far::new(),
        }
    }

    fn add(&mut self, row: &chats::Row, conversation: Conversation) -> Result<(), chats::ChatError> {
        // Files are read one after another.
        if self.paths.get(self.at).is_none_or(|path| path != row.path) {
            self.at = self.paths.iter().position(|path| path == row.path).unwrap_or_default();
        }
        let file = self.at;
        self.has[usize::from(validates(row.path))] = true;
        self.counts.chats += 1;
        let prompt = self.prompts.number(&conversation);
        self.bytes += conversation.messages.iter().map(|m| m.content.as_str().map_or(0, str::len)).sum::<usize>();
        self.queue.push(Told { file, unit: row.unit, number: row.number, prompt, conversation });
        if self.queue.len() < BATCH && self.bytes < BATCH_BYTES { Ok(()) } else { self.encode() }
    }

    /// Encodes what waits, by all cores, and keeps the order.
    fn encode(&mut self) -> Result<(), chats::ChatError> {
        let queue = std::mem::take(&mut self.queue);
        let least = LEAST_FREE + FREE_A_BYTE * std::mem::take(&mut self.bytes) as u64;
        if let (Some(last), Some(free)) = (queue.last(), memory::host().filter(|free| *free < least)) {
            let problem = format!("memory has no room for more rows: {} are free (use fewer)", human_bytes(free));
            return Err(chats::ChatError::Row { path: self.paths[last.file].clone(), unit: last.unit, number: last.number, problem });
        }
        let encoded: Vec<_> = queue.par_iter().map(|told| self.fitted(told)).collect();
        for (told, fits) in queue.iter().zip(encoded) {
            let (fits, split) = fits.map_err(|problem| {
                let path = self.paths[told.file].clone();
                chats::ChatError::Row { path, unit: told.unit, number: told.number, problem }
            })?;
            self.counts.split += usize::from(split);
            self.counts.nothing += usize::from(fits.is_empty());
            for fit in fits {
                let example = match fit {
                    Fit::Whole(e) => e,
                    Fit::Cut(e) => {
                        self.counts.cut += 1;
                        e
                    }
                    Fit::Skip => {
                        self.counts.skipped += 1;
                        continue;
                    }
                };
                self.examples.push(example);
                self.from.push((told.file, told.prompt));
            }
        }
        Ok(())
    }

    fn fitted(&self, told: &Told) -> Result<(Vec<Fit>, bool), String> {
        let Learned { examples, split } = self.wording.examples(self.tokenizer, &told.conversation)?;
        self.far.one_more();
        let outside = |token: &&u32| **token as usize >= self.how.vocab;
        if let Some(token) = examples.iter().flat_map(|e| &e.tokens).find(outside) {
            let text = self.tokenizer.decode(&[*token]);
            return Err(format!("token {token} ({text:?}) is outside the model's vocabulary of {}", self.how.vocab));
        }
        let fits = examples.into_iter().map(|e| fit(e, self.how.seq, self.how.too_long));
        Ok((fits.collect::<Result<_, _>>()?, split))
    }

    fn finish(self, layout: Layout) -> Files {
        let own_files = engine::mutant!("files-to-validate-with-alone", self.has == [true, true], self.has[1]);
        let mut splits = [[vec![], vec![]], [vec![], vec![]]];
        let mut asked = [vec![false; self.prompts.all.len()], vec![false; self.prompts.all.len()]];
        for (i, &(file, prompt)) in self.from.iter().enumerate() {
            let val = if own_files { validates(&self.paths[file]) } else { is_val(prompt as u64, self.how.val_share) };
            let side = usize::from(val);
            splits[side][0].push(i);
            let first = !std::mem::replace(&mut asked[side][prompt], true);
            // A conversation that begins with the model's turn asks nothing.
            if first && !self.prompts.all[prompt].messages.is_empty() {
                splits[side][1].push(prompt);
            }
        }
        let fingerprint = fingerprint(&self.examples, &splits);
        let Gathered { how, counts, prompts, examples, .. } = self;
        Files { counts, layout, examples: Arc::new(examples), prompts: prompts.all, splits, val_share: how.val_share, fingerprint }
    }
}

/// Whether a file is to validate with, by its name.
pub(in crate::data) fn validates(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let stem = name.split('.').next().unwrap_or_default();
    ["val", engine::mutant!("files-called-validation-are-learned", "validation", "val")]
        .iter()
        .any(|own| stem.strip_prefix(own).is_some_and(|rest| rest.is_empty() || rest.starts_with('-')))
}

fn fingerprint(examples: &[Example], splits: &[[Vec<usize>; 2]; 2]) -> u64 {
    let mut hash = Xxh3::new();
    for e in examples {
        hash.update(
            &[e.tokens.len() as u64, engine::mutant!("data-known-without-what-is-learned", e.head() as u64, 0)]
                .map(u64::to_le_bytes)
                .concat(),
        );
        e.tokens.iter().for_each(|t| hash.update(&t.to_le_bytes()));
        // A prompt and its reply are told by their lengths.
        if e.learned.len() != 1 || e.learned[0].end != e.tokens.len() {
            e.learned.iter().for_each(|range| hash.update(&[range.start as u64, range.end as u64].map(u64::to_le_bytes).concat()));
        }
    }
    splits[1][0].iter().for_each(|i| hash.update(&(*i as u64).to_le_bytes()));
    hash.digest()
}

/// Prompts by number, in the order in which they were first seen.
#[derive(Default)]
struct Prompts {
    all: Vec<Asking>,
    numbers: HashMap<String, usize>,
}

impl Prompts {
    /// Of what stands before the model's first turn.
    fn number(&mut self, conversation: &Conversation) -> usize {
        let messages = &conversation.messages;
        let before = messages.iter().position(Message::is_assistant).unwrap_or(messages.len());
        let asked = &messages[..before];
        let texts: Vec<String> = asked.iter().map(|m| m.text().unwrap_or_else(|_| m.content.to_string())).collect();
        let next = self.all.len();
        *self
            .numbers
            .entry(engine::mutant!("prompts-known-by-their-last-turn", texts.join("\0"), texts.last().cloned().unwrap_or_default()))
            .or_insert_with(|| {
                self.all.push(Asking { text: texts.last().cloned().unwrap_or_default(), messages: asked.to_vec() });
                next
            })
    }
}
