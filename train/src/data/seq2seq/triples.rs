//! Rows of tokens: what an encoder reads, what a decoder reads, and what it writes, as files of other trainers have them.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::ValueKind;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::super::chats::{self, Columns};
use super::super::prepare::is_val;
use super::super::replies::{check_share, validates};
use super::super::source::check_range;
use super::super::{DataError, Item, Source, Split};
use super::Frame;
use crate::memory;
use crate::report::human_bytes;

/// The fields of a row.
const FIELDS: [&str; 3] = ["encoder_ids", "decoder_input_ids", "labels"];
/// A label that is not learned.
const IGNORED: i64 = -100;
/// No more rows are kept where so little memory is left, which is looked at every so many rows.
const LEAST_FREE: u64 = 64 << 20;
const LOOK: usize = 1024;

/// How many rows there are, and how many are longer than an item.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TripleCounts {
    pub rows: usize,
    /// Rows without a label that is learned, which are left out.
    pub nothing: usize,
    pub cut: usize,
}

/// All rows of some files, as long as an item has room for them.
pub struct Triples {
    pub counts: TripleCounts,
    rows: Arc<Vec<Triple>>,
    splits: [Vec<usize>; 2],
    prompts: usize,
    val_share: f64,
    frame: Frame,
}

#[derive(Debug)]
struct Triple {
    source: Box<[u32]>,
    read: Box<[i32]>,
    /// -1 where nothing is learned.
    labels: Box<[i32]>,
}

impl Triples {
    /// Whether files hold such rows, by the first.
    pub fn are(files: &[PathBuf]) -> Result<bool, DataError> {
        Ok(chats::first_row(files, &mut |row| {
            let has = FIELDS.map(|name| field(&row.value, name).is_some());
            match has.iter().filter(|has| **has).count() {
                0 => Ok(false),
                3 => Ok(true),
                // Other rows may have labels.
                1 if has[2] => Ok(false),
                _ => {
                    let lacking: Vec<&str> = FIELDS.into_iter().zip(has).filter(|f| !f.1).map(|f| f.0).collect();
                    Err(row.error(format!("it has no {}: rows of tokens have {}", lacking.join(" and no "), FIELDS.join(", "))))
                }
            }
        })?)
    }

    /// Rows in files called val.jsonl, val-*.parquet and the like validate; without such files a share of the sources does. A source that stands in
    /// several rows is on one side.
    pub fn read(files: &[PathBuf], frame: Frame, vocab: usize, val_share: f64) -> Result<Triples, DataError> {
        frame.check()?;
        check_share(val_share)?;
        let mut counts = TripleCounts::default();
        let mut rows: Vec<Triple> = vec![];
        // Of each row, whether its file is to validate with, and the number of its source.
        let mut from: Vec<(bool, usize)> = vec![];
        let mut sources: HashMap<u128, usize> = HashMap::new();
        let mut has = [false; 2];
        let columns = Columns { required: FIELDS.to_vec(), all: FIELDS.to_vec(), what: "rows of tokens".into() };
        for file in files {
            let val = validates(file);
            chats::each_row(file, Some(&columns), &mut |row| {
                if counts.rows % LOOK == 0
                    && let Some(free) = memory::host().filter(|free| *free < LEAST_FREE)
                {
                    return Err(row.error(format!("memory has no room for more rows: {} are free (use fewer)", human_bytes(free))));
                }
                counts.rows += 1;
                has[usize::from(val)] = true;
                let (whole, triple) = triple(&row.value, &frame, vocab).map_err(|problem| row.error(problem))?;
                let next = sources.len();
                let prompt = *sources.entry(whole.source).or_insert(next);
                if triple.labels.iter().all(|label| *label < 0) {
                    counts.nothing += 1;
                    return Ok(ControlFlow::Continue(()));
                }
                counts.cut += usize::from(whole.cut);
                rows.push(triple);
                from.push((val, prompt));
                Ok(ControlFlow::Continue(()))
            })?;
        }
        let own_files = has == [true, true];
        let mut splits = [vec![], vec![]];
        for (i, &(val, prompt)) in from.iter().enumerate() {
            let val = if own_files { val } else { is_val(prompt as u64, val_share) };
            splits[usize::from(val)].push(i);
        }
        Ok(Triples { counts, rows: Arc::new(rows), splits, prompts: sources.len(), val_share, frame })
    }

    /// Rows of a split.
    pub fn count(&self, split: Split) -> usize {
        self.splits[split as usize].len()
    }

    /// Why nothing can be trained on these.
    pub fn lacks(&self) -> Option<String> {
        let TripleCounts { rows, nothing, .. } = self.counts;
        self.splits[0].is_empty().then(|| format!("of {rows} rows, {nothing} without a label to learn, none is left to learn from"))
    }

    /// Why there is nothing to validate with, where that is so, and what would change it.
    pub fn without_validation(&self) -> Option<String> {
        self.splits[1].is_empty().then(|| match self.val_share {
            0.0 => "data.val_share = 0".into(),
            share => format!(
                "data.val_share = {share} of {} sources is none (--set data.val_share=0.5 takes half of them; or use more rows, or a folder with a file \
                 val.jsonl)",
                self.prompts
            ),
        })
    }

    /// The token that the decoder reads first, where that is the same in all rows.
    pub fn begin(&self) -> Option<u32> {
        let first = self.rows.first()?.read[0];
        self.rows.iter().all(|row| row.read[0] == first).then_some(first as u32)
    }

    /// Changes with every token that is read or learned, and with what validates.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Xxh3::new();
        for row in self.rows.iter() {
            hash.update(&[row.source.len() as u64, row.read.len() as u64].map(u64::to_le_bytes).concat());
            row.source.iter().for_each(|token| hash.update(&token.to_le_bytes()));
            row.read
                .iter()
                .chain(engine::mutant!("rows-of-tokens-known-without-labels", &row.labels, &row.read))
                .for_each(|token| hash.update(&token.to_le_bytes()));
        }
        let validates: &[usize] = engine::mutant!("rows-of-tokens-known-without-what-validates", &self.splits[1], &[]);
        validates.iter().for_each(|i| hash.update(&(*i as u64).to_le_bytes()));
        hash.digest()
    }

    pub fn source(&self, split: Split) -> Arc<dyn Source> {
        Arc::new(Chosen { rows: self.rows.clone(), own: self.splits[split as usize].clone(), frame: self.frame.clone() })
    }
}

/// The rows of a split.
struct Chosen {
    rows: Arc<Vec<Triple>>,
    own: Vec<usize>,
    frame: Frame,
}

impl Source for Chosen {
    fn len(&self) -> u64 {
        self.own.len() as u64
    }

    fn item(&self, i: u64) -> Result<Item, DataError> {
        check_range(i, self.len())?;
        let row = &self.rows[self.own[i as usize]];
        Ok(self.frame.item(&row.source, row.read.iter().copied(), row.labels.iter().copied()))
    }

    fn entropy_floor(&self) -> Option<f64> {
        None
    }
}

/// What is known of a row before it is cut.
struct Whole {
    /// A hash of its source.
    source: u128,
    cut: bool,
}

/// A row as an item has room for it, or what is wrong with it.
fn triple(row: &Value, frame: &Frame, vocab: usize) -> Result<(Whole, Triple), String> {
    if row.kind() != ValueKind::Map {
        return Err("it is not a JSON object".into());
    }
    let [source, read, labels] = FIELDS.map(|name| numbers(row, name));
    let (source, read, labels) = (source?, read?, labels?);
    let [encoder, decoder, label] = FIELDS;
    if source.is_empty() {
        return Err(format!("its {encoder:?} is empty: a source has at least one token (remove the row)"));
    }
    if read.len() != labels.len() {
        return Err(format!(
            "its {decoder:?} has {} tokens and its {label:?} {}: each token has a label, {IGNORED} where nothing is learned",
            read.len(),
            labels.len()
        ));
    }
    let token = |name: &str, id: i64| match u32::try_from(id) {
        Ok(token) if (token as usize) < vocab => Ok(token),
        _ => Err(format!(
            "its {name:?} has the token {id}, which is outside the model's vocabulary of {vocab} (correct the row, or model.vocab)"
        )),
    };
    let source: Vec<u32> = source.into_iter().map(|id| token(encoder, id)).collect::<Result<_, _>>()?;
    let mut read: Vec<i32> = read.into_iter().map(|id| Ok(token(decoder, id)? as i32)).collect::<Result<_, String>>()?;
    let learned = |id: i64| match id {
        IGNORED => Ok(-1),
        id => token(label, id).map(|token| if frame.ignore.contains(&token) { -1 } else { token as i32 }),
    };
    let mut labels: Vec<i32> = labels.into_iter().map(learned).collect::<Result<_, _>>()?;
    let bytes: Vec<u8> = source.iter().flat_map(|token| token.to_le_bytes()).collect();
    let whole = Whole { source: xxh3_128(&bytes), cut: source.len() > frame.source || read.len() > frame.seq };
    read.truncate(frame.seq);
    labels.truncate(frame.seq);
    Ok((whole, Triple { source: frame.source_of(&source).into(), read: read.into(), labels: labels.into() }))
}

fn field(row: &Value, name: &str) -> Option<Value> {
    row.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none())
}

fn numbers(row: &Value, name: &str) -> Result<Vec<i64>, String> {
    let list = field(row, name).ok_or_else(|| format!("it has no {name:?}"))?;
    if list.kind() != ValueKind::Seq {
        return Err(format!("its {name:?} is no list of tokens"));
    }
    let number = |value: Value| match value.kind() {
        ValueKind::Number => i64::try_from(value.clone()).map_err(|_| format!("its {name:?} has {value}, which is no token")),
        other => Err(format!("its {name:?} holds a {other}, and is a list of tokens' numbers")),
    };
    list.try_iter().map_err(|e| format!("its {name:?}: {e}"))?.map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame() -> Frame {
        Frame { source: 3, seq: 4, begin: None, ignore: vec![8] }
    }

    fn row(source: &str, read: &str, labels: &str) -> String {
        format!("{{\"encoder_ids\": {source}, \"decoder_input_ids\": {read}, \"labels\": {labels}}}\n")
    }

    fn read(text: &str, val_share: f64) -> Result<Triples, DataError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.jsonl");
        std::fs::write(&path, text).unwrap();
        assert!(Triples::are(std::slice::from_ref(&path))?, "{text}");
        Triples::read(&[path], frame(), 10, val_share)
    }

    /// Worked out by hand.
    #[test]
    fn rows_are_padded_and_cut_and_those_without_a_label_left_out() {
        let text = [
            row("[1, 2]", "[0, 3, 4]", "[3, 4, -100]"),
            row("[1, 2, 3, 4, 5]", "[0, 5, 6, 7, 8, 9]", "[5, 6, -100, 8, 9, 1]"),
            row("[1]", "[0, 3]", "[-100, -100]"),
            // What is learned of it lies behind the end, or is not trained on.
            row("[1]", "[0, 3, 4, 5, 6]", "[-100, 8, -100, -100, 6]"),
            row("[1]", "[]", "[]"),
            row("[9]", "[7]", "[0]"),
        ];
        let triples = read(&text.concat(), 0.0).unwrap();
        assert_eq!(triples.counts, TripleCounts { rows: 6, nothing: 3, cut: 1 });
        let source = triples.source(Split::Train);
        let items: Vec<Item> = (0..source.len()).map(|i| source.item(i).unwrap()).collect();
        let wanted = [
            (vec![1, 2, -1, 0, 3, 4, 0], vec![-1, -1, -1, 3, 4, -1, -1]),
            (vec![3, 4, 5, 0, 5, 6, 7], vec![-1, -1, -1, 5, 6, -1, -1]),
            (vec![9, -1, -1, 7, 0, 0, 0], vec![-1, -1, -1, 0, -1, -1, -1]),
        ];
        assert_eq!(items, wanted.map(|(ids, targets)| Item { ids, targets, until: vec![] }));
        assert!(source.item(3).is_err() && source.counted().is_none());
        assert_eq!(triples.begin(), None, "they begin with 0 and 7");
        assert_eq!(read(&text[..2].concat(), 0.0).unwrap().begin(), Some(0));
        assert_eq!(triples.without_validation().unwrap(), "data.val_share = 0");
        assert!(triples.lacks().is_none() && read(&text[2], 0.0).unwrap().lacks().unwrap().contains("1 without a label"));
    }

    #[test]
    fn rows_that_do_not_fit_are_refused_by_their_line() {
        let good = row("[1]", "[2]", "[3]");
        for (bad, part) in [
            (row("[]", "[2]", "[3]"), "its \"encoder_ids\" is empty"),
            (row("[1]", "[2, 3]", "[3]"), "has 2 tokens and its \"labels\" 1"),
            (row("[10]", "[2]", "[3]"), "its \"encoder_ids\" has the token 10, which is outside the model's vocabulary of 10"),
            (row("[-1]", "[2]", "[3]"), "has the token -1"),
            (row("[1]", "[4294967298]", "[3]"), "its \"decoder_input_ids\" has the token 4294967298"),
            (row("[1]", "[2]", "[-1]"), "its \"labels\" has the token -1"),
            (row("[1]", "[2]", "[2.5]"), "its \"labels\" has 2.5, which is no token"),
            (row("[1]", "[true]", "[2]"), "is a list of tokens' numbers"),
            (row("\"1 2\"", "[1]", "[2]"), "its \"encoder_ids\" is no list"),
            ("{\"encoder_ids\": [1], \"labels\": [2]}\n".into(), "it has no \"decoder_input_ids\""),
            ("[1, 2]\n".into(), "it is not a JSON object"),
        ] {
            let error = read(&(good.clone() + &bad), 0.0).err().unwrap().to_string();
            assert!(error.contains("rows.jsonl, line 2") && error.contains(part), "{error}");
        }
        let lacking = read("{\"encoder_ids\": [1], \"labels\": [2]}\n", 0.0).err().unwrap().to_string();
        assert!(lacking.contains("line 1: it has no decoder_input_ids"), "{lacking}");
    }

    #[test]
    fn a_source_is_on_one_side_and_files_called_val_validate() {
        let rows =
            |from: usize, n: usize| (from..from + n).map(|i| row(&format!("[{}, {}]", i / 3 % 10, i / 30), "[0]", &format!("[{}]", i % 8)));
        let triples = read(&rows(0, 90).collect::<String>(), 0.2).unwrap();
        assert_eq!((triples.count(Split::Train), triples.count(Split::Val)), (72, 18));
        let sources = |split: Split| {
            let source = triples.source(split);
            (0..source.len()).map(|i| source.item(i).unwrap().ids[..2].to_vec()).collect::<std::collections::HashSet<_>>()
        };
        assert!(sources(Split::Train).is_disjoint(&sources(Split::Val)));
        assert!(triples.without_validation().is_none());
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: String| {
            std::fs::write(dir.path().join(name), text).unwrap();
            dir.path().join(name)
        };
        let files =
            [file("a.jsonl", rows(0, 6).collect()), file("val-1.jsonl", rows(0, 4).collect()), file("b.jsonl", rows(6, 5).collect())];
        let triples = Triples::read(&files, frame(), 10, 0.5).unwrap();
        assert_eq!((triples.count(Split::Train), triples.count(Split::Val)), (11, 4));
        assert_ne!(triples.fingerprint(), Triples::read(&files[..2], frame(), 10, 0.5).unwrap().fingerprint());
        let chat = file("chat.jsonl", "{\"prompt\": \"a\", \"reply\": \"b\", \"labels\": 1}\n".into());
        assert!(!Triples::are(&[chat]).unwrap());
    }

    #[test]
    fn rows_are_known_by_all_that_is_in_them_and_by_what_validates() {
        let known = |text: &str, val_share| read(text, val_share).unwrap().fingerprint();
        let usual = known(&row("[1, 2]", "[0, 3, 4]", "[3, 4, 5]"), 0.0);
        for other in [
            row("[1, 3]", "[0, 3, 4]", "[3, 4, 5]"),
            row("[1, 2]", "[0, 3, 5]", "[3, 4, 5]"),
            row("[1, 2]", "[0, 3, 4]", "[3, 4, 6]"),
            row("[1, 2]", "[0, 3, 4]", "[-100, 4, 5]"),
        ] {
            assert_ne!(known(&other, 0.0), usual, "{other}");
        }
        let many: String = (0..10).map(|i| row(&format!("[{i}]"), "[0]", "[1]")).collect();
        assert_ne!(known(&many, 0.2), known(&many, 0.4));
    }
}
