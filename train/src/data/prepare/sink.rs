//! Documents into shards: cut into pieces, encoded by all cores, written in order.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;

use super::super::pieces::{PIECE, Places};
use super::super::{DataError, ShardWriter, Split, SplitInfo, Tokenizer, uniform};

/// Bytes that are handed to the cutting of pieces at once.
const PART: usize = 1 << 20;

/// Tokens around every document.
#[derive(Clone, Copy)]
pub struct Ends {
    pub begin: Option<u32>,
    pub end: Option<u32>,
}

pub struct Sink<'a> {
    tokenizer: &'a Tokenizer,
    places: Places<'a>,
    ends: Ends,
    splits: [SplitWriter; 2],
    val_share: f64,
    stop: &'a AtomicBool,
    /// Of the document that is being read.
    split: Split,
    rest: String,
    begun: bool,
    /// Pieces that wait to be encoded.
    queue: Vec<Job>,
    queued: usize,
    pub documents: u64,
    pub text_bytes: u64,
    /// Documents that were cut, and the places where that may have changed a token.
    cut: u64,
    forced: u64,
}

struct Job {
    text: String,
    split: Split,
    /// Whether the document begins, and whether it ends with it.
    begins: bool,
    ends: bool,
}

impl<'a> Sink<'a> {
    pub fn new(tokenizer: &'a Tokenizer, ends: Ends, dir: &Path, shard_tokens: u64, val_share: f64, stop: &'a AtomicBool) -> Self {
        Sink {
            tokenizer,
            places: Places::new(tokenizer),
            ends,
            splits: Split::ALL.map(|split| SplitWriter::new(dir, split, shard_tokens)),
            val_share,
            stop,
            split: Split::Train,
            rest: String::new(),
            begun: false,
            queue: vec![],
            queued: 0,
            documents: 0,
            text_bytes: 0,
            cut: 0,
            forced: 0,
        }
    }

    pub fn val_share(&self) -> f64 {
        self.val_share
    }

    /// The next document as a whole, in the split that its number says.
    pub fn document(&mut self, text: &str) -> Result<(), DataError> {
        self.begin(self.split_of_next());
        let mut rest = text;
        while !rest.is_empty() {
            let at = (0..=rest.len().min(PART)).rev().find(|&i| rest.is_char_boundary(i)).unwrap_or(rest.len());
            self.text(&rest[..at])?;
            rest = &rest[at..];
        }
        self.end()
    }

    pub fn split_of_next(&self) -> Split {
        if is_val(self.documents, self.val_share) { Split::Val } else { Split::Train }
    }

    /// A document part by part: `begin`, `text` as often as needed, `end`. One without any text is none.
    pub fn begin(&mut self, split: Split) {
        (self.split, self.begun) = (split, false);
    }

    pub fn text(&mut self, text: &str) -> Result<(), DataError> {
        self.rest.push_str(text);
        self.text_bytes += text.len() as u64;
        let mut from = 0;
        while let Some(cut) = self.places.first(&self.rest[from..], PIECE) {
            self.cut += u64::from(!self.begun);
            self.forced += u64::from(cut.forced);
            self.add(from..from + cut.end, false)?;
            self.begun = true;
            from += cut.begin;
        }
        self.rest.drain(..from);
        Ok(())
    }

    pub fn end(&mut self) -> Result<(), DataError> {
        if self.rest.is_empty() && !self.begun {
            return Ok(());
        }
        self.documents += 1;
        self.add(0..self.rest.len(), true)?;
        self.rest.clear();
        Ok(())
    }

    fn add(&mut self, piece: std::ops::Range<usize>, ends: bool) -> Result<(), DataError> {
        self.queued += piece.len();
        self.queue.push(Job { text: self.rest[piece].to_owned(), split: self.split, begins: !self.begun, ends });
        // Enough that no core waits long for another.
        if self.queued >= 4 * PIECE * rayon::current_num_threads() { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), DataError> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(DataError::Interrupted);
        }
        let encoded: Vec<_> = self.queue.par_iter().map(|job| self.tokenizer.encode(&job.text)).collect();
        for (job, ids) in self.queue.drain(..).zip(encoded) {
            let mut ids = ids?;
            ids.splice(0..0, self.ends.begin.filter(|_| job.begins));
            ids.extend(engine::mutant!("documents-without-an-end", self.ends.end.filter(|_| job.ends), None));
            let writer = &mut self.splits[job.split as usize];
            writer.info.documents += u64::from(job.ends);
            writer.push(&ids, self.tokenizer)?;
        }
        self.queued = 0;
        Ok(())
    }

    /// What was written, and what people are told about it.
    pub fn finish(mut self) -> Result<([SplitInfo; 2], Vec<String>), DataError> {
        self.flush()?;
        let mut notes = vec![];
        if let Some(doubt) = self.places.doubt().filter(|_| self.cut > 0) {
            notes.push(format!(
                "{} long documents were encoded in pieces of {} KiB; where two meet, a token may be another than in the whole: {doubt}",
                self.cut,
                PIECE >> 10
            ));
        }
        if self.forced > 0 {
            notes.push(format!(
                "{} places of long documents had neither a space nor a line break that ends a word within 1 MiB: there a token may be another than in the whole",
                self.forced
            ));
        }
        let [train, val] = self.splits.map(SplitWriter::finish);
        Ok(([train?, val?], notes))
    }
}

/// One document of every 1 / share, at a random place among them: even for few documents, blind to periods in many.
pub fn is_val(document: u64, share: f64) -> bool {
    if share <= 0.0 {
        return false;
    }
    let stratum = |document: u64| (document as f64 * share) as u64;
    // A document may lie across the border of two strata.
    (stratum(document)..=stratum(document + 1)).any(|k| ((k as f64 + uniform(&[0x76a1, k])) / share) as u64 == document)
}

/// The shards of one split.
struct SplitWriter {
    dir: PathBuf,
    split: Split,
    shard_tokens: u64,
    shard: Option<ShardWriter>,
    info: SplitInfo,
}

impl SplitWriter {
    fn new(dir: &Path, split: Split, shard_tokens: u64) -> Self {
        SplitWriter { dir: dir.to_owned(), split, shard_tokens, shard: None, info: SplitInfo::default() }
    }

    fn push(&mut self, mut ids: &[u32], tokenizer: &Tokenizer) -> Result<(), DataError> {
        self.info.tokens += ids.len() as u64;
        while !ids.is_empty() {
            let shard = match &mut self.shard {
                Some(shard) => shard,
                none => {
                    let name = self.split.shard_name(self.info.shards.len());
                    let path = self.dir.join(&name);
                    self.info.shards.push(name);
                    none.insert(ShardWriter::create(&path, tokenizer.vocab(), tokenizer.fingerprint())?)
                }
            };
            let room = (self.shard_tokens - shard.tokens()).min(ids.len() as u64) as usize;
            shard.push(&ids[..room])?;
            ids = &ids[room..];
            if shard.tokens() == self.shard_tokens {
                self.close()?;
            }
        }
        Ok(())
    }

    fn close(&mut self) -> Result<(), DataError> {
        self.shard.take().map_or(Ok(()), ShardWriter::finish)
    }

    fn finish(mut self) -> Result<SplitInfo, DataError> {
        self.close()?;
        Ok(self.info)
    }
}
