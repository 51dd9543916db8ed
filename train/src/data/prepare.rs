//! Text files, JSONL or generated text -> a folder of token shards.

mod read;
mod sink;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::Serialize;

use super::{DataError, Dataset, Grammar, Noted, Token, Tokenizer};
use crate::files::{self, Staged};
pub(super) use sink::is_val;
use sink::{Ends, Sink};

#[derive(Debug, Clone)]
pub enum Input {
    /// `*.jsonl`, `*.jsonl.gz` and parquet: each row has a document in its `field`. Anything else: the file is a document of UTF-8 text.
    Files { paths: Vec<PathBuf>, field: String },
    /// Sentences of the grammar, for the byte tokenizer. No end-of-document token, so that the entropy stays known.
    Generated { seed: u64, sentences: u64 },
}

#[derive(Debug, Clone)]
pub struct PrepareOptions {
    pub input: Input,
    /// "byte", or the path of a tokenizer.json or of its folder; it is copied into the data set.
    pub tokenizer: String,
    pub out: PathBuf,
    /// Share of the documents; of few text files, the last part of each.
    pub val_share: f64,
    pub shard_tokens: u64,
    /// Replace an existing data set.
    pub force: bool,
    /// The token that ends a document, by name or id, or "none". Not given: what the tokenizer's folder says.
    pub eos: Option<String>,
    /// The token that begins a document, in the same way. Not given: what the tokenizer itself puts before a text.
    pub bos: Option<String>,
    /// Set when it is to end early, leaving nothing.
    pub stop: Arc<AtomicBool>,
}

impl PrepareOptions {
    pub fn new(input: Input, tokenizer: &str, out: &Path) -> Self {
        PrepareOptions {
            input,
            tokenizer: tokenizer.into(),
            out: out.to_owned(),
            val_share: 0.05,
            shard_tokens: 100_000_000,
            force: false,
            eos: None,
            bos: None,
            stop: Arc::default(),
        }
    }
}

#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    pub out: PathBuf,
    /// Bytes of text, without the markup of JSONL.
    pub text_bytes: u64,
    pub dataset: Dataset,
    /// For people: which token ends a document, and what else they should know.
    pub notes: Vec<String>,
}

pub fn prepare(options: &PrepareOptions) -> Result<Summary, DataError> {
    // What is named need not be asked for.
    let tokenizer = match options.eos {
        Some(_) => Tokenizer::from_spec_alone(&options.tokenizer)?,
        None => Tokenizer::from_spec(&options.tokenizer)?,
    };
    let mut eos = options.eos.as_ref().map_or_else(|| Ok(tokenizer.end()), |end| tokenizer.chosen("--eos", end))?;
    let bos = options.bos.as_ref().map_or_else(|| Ok(tokenizer.begin()), |begin| tokenizer.chosen("--bos", begin))?;
    check(options, &tokenizer)?;
    let folder = Folder::create(&options.out, options.force)?;

    let generated = matches!(options.input, Input::Generated { .. });
    if generated && options.eos.is_none() {
        eos = Noted { id: None, from: "generated text has none, so that its entropy stays known".into() };
    }
    let ends = Ends { begin: bos.id, end: eos.id };
    let mut sink = Sink::new(&tokenizer, ends, folder.staged.dir(), options.shard_tokens, options.val_share, &options.stop);
    match &options.input {
        Input::Files { paths, field } => read::read_files(paths, field, &mut sink)?,
        Input::Generated { seed, sentences } => read::generate(*seed, *sentences, &mut sink)?,
    }

    let (documents, text_bytes) = (sink.documents, sink.text_bytes);
    let ([train, val], mut notes) = sink.finish()?;
    let empty = |split, way: String| DataError::Setting {
        what: "val_share",
        value: options.val_share.to_string(),
        need: format!("the {split} split of {documents} documents would be empty ({way})"),
    };
    if train.tokens == 0 {
        return Err(empty("train", "use a smaller share, or more text".into()));
    }
    if val.tokens == 0 && options.val_share > 0.0 {
        let least = (1000.0 / documents.max(2) as f64).ceil() / 1000.0;
        return Err(empty("val", format!("use {least} or more, more documents, or 0 for none")));
    }
    let mut spec = "byte".to_string();
    if let Some(json) = tokenizer.json() {
        spec = "tokenizer.json".into();
        let copy = folder.staged.dir().join(&spec);
        files::write_new(&copy, json).map_err(DataError::io("write", &copy))?;
    }
    let dataset = Dataset {
        tokenizer: spec,
        fingerprint: tokenizer.fingerprint(),
        vocab: tokenizer.vocab(),
        entropy_floor: generated.then(|| Grammar::new().entropy_per_byte()),
        train,
        val,
        eos: Some(eos.clone()),
        bos: Some(bos.clone()).filter(|bos| bos.id.is_some()),
        pad: tokenizer.special().and_then(|special| special.pad.as_ref()).map(Token::noted),
    };
    folder.finish(&dataset)?;
    let hint = if eos.id.is_none() && options.eos.is_none() && !generated { ": name one with --eos" } else { "" };
    let others = tokenizer.special().map(|special| {
        let around = [tokenizer.describe_begin(&bos), tokenizer.describe_pad(dataset.pad.as_ref())];
        special.end_lines().into_iter().chain(around)
    });
    let named = [(&options.eos, &eos), (&options.bos, &bos)].into_iter().filter(|(asked, _)| asked.is_some());
    let ordinary = named.filter_map(|(_, token)| tokenizer.warn_of_ordinary(token));
    let first = std::iter::once(format!("{}{hint}", tokenizer.describe_end(&eos)));
    notes.splice(0..0, first.chain(others.into_iter().flatten()).chain(ordinary));
    Ok(Summary { out: options.out.clone(), text_bytes, dataset, notes })
}

fn check(options: &PrepareOptions, tokenizer: &Tokenizer) -> Result<(), DataError> {
    let wrong = |what, value: String, need: &str| Err(DataError::Setting { what, value, need: need.into() });
    if !(0.0..1.0).contains(&options.val_share) {
        return wrong("val_share", options.val_share.to_string(), "a share is at least 0 and below 1");
    }
    if options.shard_tokens == 0 {
        return wrong("shard_tokens", "0".into(), "a shard holds at least one token");
    }
    match &options.input {
        Input::Files { paths, .. } if paths.is_empty() => wrong("input", "no file".into(), "name at least one text or JSONL file"),
        Input::Generated { .. } if !matches!(tokenizer, Tokenizer::Byte) => {
            wrong("tokenizer", tokenizer.name(), "generated text needs \"byte\": its entropy is known per byte")
        }
        _ => Ok(()),
    }
}

/// The folder to make, written beside.
struct Folder {
    out: PathBuf,
    force: bool,
    staged: Staged,
}

/// Whether a data set may take this folder's place.
fn may_be_replaced(out: &Path, force: bool) -> Result<(), DataError> {
    let refuse = |reason: &str| Err(DataError::OutDir { path: out.to_owned(), reason: reason.into() });
    if !out.exists() {
        return Ok(());
    }
    if !out.is_dir() {
        return refuse("it is a file (name a new folder)");
    }
    if std::fs::read_dir(out).map_err(DataError::io("list", out))?.next().is_none() {
        return Ok(());
    }
    if !out.join(Dataset::FILE).is_file() {
        return refuse("it holds other files and no dataset.json (name a new folder)");
    }
    if !force {
        return refuse("it holds a data set already (name a new folder, or replace it with --force)");
    }
    // Even by force nothing is removed but what its dataset.json lists.
    match Dataset::other_than_listed(out)? {
        Some(other) => refuse(&format!("--force replaces a data set alone, and {other} (move it away, or name a new folder)")),
        None => Ok(()),
    }
}

impl Folder {
    fn create(out: &Path, force: bool) -> Result<Self, DataError> {
        if out.file_name().is_none() {
            return Err(DataError::OutDir { path: out.to_owned(), reason: "it has no name of its own (name a new folder)".into() });
        }
        may_be_replaced(out, force)?;
        let staged = Staged::new(out).map_err(DataError::io("create", out))?;
        Ok(Folder { out: out.to_owned(), force, staged })
    }

    fn finish(self, dataset: &Dataset) -> Result<(), DataError> {
        let path = self.staged.dir().join(Dataset::FILE);
        let text = serde_json::to_string_pretty(dataset).map_err(|e| DataError::Dataset { path: path.clone(), reason: e.to_string() })?;
        files::write_new(&path, text.as_bytes()).map_err(DataError::io("write", &path))?;
        // Somebody may have put something there meanwhile.
        engine::mutant!("what-came-while-data-was-prepared-is-removed", may_be_replaced(&self.out, self.force)?, ());
        self.staged.replace().map_err(DataError::io("rename a folder to", &self.out))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::{ShardSet, Split};
    use super::*;

    pub fn files(dir: &Path, files: &[(&str, &[u8])]) -> PrepareOptions {
        let mut paths = Vec::new();
        for (name, bytes) in files {
            paths.push(dir.join(name));
            std::fs::write(dir.join(name), bytes).unwrap();
        }
        let field = "text".into();
        PrepareOptions::new(Input::Files { paths, field }, "byte", &dir.join("out"))
    }

    fn text(out: &Path, split: Split) -> String {
        let set = ShardSet::open(out, split).unwrap();
        Tokenizer::Byte.decode(&set.get(0..set.tokens()).unwrap())
    }

    fn failure(options: &PrepareOptions) -> String {
        prepare(options).unwrap_err().to_string()
    }

    fn entries(dir: &Path) -> usize {
        std::fs::read_dir(dir).unwrap().count()
    }

    #[test]
    fn a_text_file_is_split_at_an_empty_line_and_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let paragraph = |i| format!("Absatz {i}: größer.\nzweite Zeile\n\n");
        let body: String = (0..50).map(paragraph).collect();
        let mut options = files(dir.path(), &[("a.txt", body.as_bytes())]);
        options.val_share = 0.1;
        options.shard_tokens = 100;
        let summary = prepare(&options).unwrap();
        let (train, val) = (text(&options.out, Split::Train), text(&options.out, Split::Val));
        let (first, last) = body.split_at(train.len() - 1);
        assert_eq!((train, val.clone()), (format!("{first}\0"), format!("{last}\0")));
        assert!(val.starts_with("Absatz "), "{val}");
        assert!((0.1..0.2).contains(&(val.len() as f64 / body.len() as f64)));
        assert_eq!(summary.dataset.train.shards.len(), (first.len() + 1).div_ceil(100));
        assert_eq!(summary.text_bytes, body.len() as u64);
        assert_eq!(summary.dataset, Dataset::open(&options.out).unwrap());
        assert_eq!(entries(dir.path()), 2, "nothing is left beside");
    }

    #[test]
    fn documents_of_jsonl_are_split_by_number() {
        let dir = tempfile::tempdir().unwrap();
        let line = |i| format!("{{\"id\":{i},\"text\":\"d{i}\\n\"}}\n\n");
        let lines: String = (0..200).map(line).collect();
        let options = files(dir.path(), &[("a.jsonl", lines.as_bytes())]);
        prepare(&options).unwrap();
        let [train, val] = Split::ALL.map(|split| format!("\0{}", text(&options.out, split)));
        assert_eq!((train.matches('\0').count(), val.matches('\0').count()), (191, 11));
        for i in 0..200 {
            let document = format!("\0d{i}\n\0");
            let held = (train.contains(&document), val.contains(&document));
            assert_eq!(held, (!is_val(i, 0.05), is_val(i, 0.05)));
        }
    }

    #[test]
    fn the_validation_share_is_kept() {
        for share in [0.01, 0.05, 0.3, 0.9] {
            let (n, wanted) = ((0..10_000).filter(|&i| is_val(i, share)).count() as f64, share * 1e4);
            assert!(n <= wanted + 1.0 && n > 0.6 * wanted, "{share} {n}");
        }
        assert!((0..20).any(|i| is_val(i, 0.05)));
        assert!(!(0..1000).any(|i| is_val(i, 0.0)));
    }

    #[test]
    fn bad_input_is_named_and_leaves_nothing() {
        let cases: [(&str, &[u8], &str); 13] = [
            ("a.txt.gz", b"\x1f\x8b\x08\x00", "a.txt.gz: it is compressed with gzip, and its name does not end in .jsonl.gz (unpack it"),
            ("a.txt", b"\x28\xb5\x2f\xfd\x00", "a.txt: it is compressed with zstd (unpack it"),
            ("a.parquet", b"PAR1", "a.parquet: not a readable parquet file"),
            ("a.parquet", b"words", "a.parquet: it is not a parquet file, although it is called so"),
            ("a.jsonl.gz", b"words", "a.jsonl.gz: it is not a gzip file, although it is called so"),
            ("a.jsonl", b"{\"text\":\"x\"}\n{\"text\":", "a.jsonl, line 2: not a JSON object"),
            ("a.jsonl", b"{\"text\":\"x\"}\n\n[1]", "a.jsonl, line 3: not a JSON object"),
            ("a.jsonl", b"\n{\"body\":1}", "line 2: no field \"text\", only [\"body\"]"),
            ("a.jsonl", b"{\"text\":7}", "line 1: the field \"text\" is not a string but 7"),
            ("a.jsonl", b"{\"text\":\"x\"}\n{\"text\":\"\xff\"}", "a.jsonl: invalid UTF-8 at byte 22"),
            ("a.txt", b"abc\xffdef", "a.txt: invalid UTF-8 at byte 3"),
            ("a.txt", b"", "the train split of 0 documents"),
            ("a.jsonl", b"{\"text\":\"x\"}", "the val split of 1 documents"),
        ];
        for (name, bytes, part) in cases {
            let dir = tempfile::tempdir().unwrap();
            let mut options = files(dir.path(), &[(name, bytes)]);
            // Document 0 is for training at this share.
            options.val_share = 0.01;
            let error = failure(&options);
            assert!(error.contains(part), "{error} / {part}");
            assert_eq!(entries(dir.path()), 1, "{part}");
        }
        let dir = tempfile::tempdir().unwrap();
        let mut options = files(dir.path(), &[]);
        assert!(failure(&options).contains("at least one"));
        let (paths, field) = (vec!["/nowhere/x.txt".into()], "text".into());
        options.input = Input::Files { paths, field };
        assert!(failure(&options).contains("/nowhere/x.txt"));
        for share in [-0.1, 1.0, f64::NAN] {
            options.val_share = share;
            assert!(failure(&options).contains("val_share"));
        }
    }

    /// The same documents, from JSON lines, gzip of them and parquet.
    #[test]
    fn compressed_rows_are_documents_like_lines() {
        use parquet::data_type::{ByteArray, ByteArrayType};
        let dir = tempfile::tempdir().unwrap();
        let documents: Vec<String> = (0..40).map(|i| format!("document {i} of é")).collect();
        let lines: String = documents.iter().map(|text| format!("{{\"n\": 1, \"body\": \"{text}\"}}\n")).collect();
        let mut gzip = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
        std::io::Write::write_all(&mut gzip, lines.as_bytes()).unwrap();
        let schema =
            parquet::schema::parser::parse_message_type("message m { required binary body (UTF8); required binary rest (UTF8); }").unwrap();
        let mut writer = parquet::file::writer::SerializedFileWriter::new(vec![], schema.into(), Default::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let texts: Vec<ByteArray> = documents.iter().map(|text| ByteArray::from(text.as_str())).collect();
        while let Some(mut column) = group.next_column().unwrap() {
            column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
        let contents =
            [("a.jsonl", lines.clone().into_bytes()), ("a.jsonl.gz", gzip.finish().unwrap()), ("a.parquet", writer.into_inner().unwrap())];
        let made = contents.map(|(name, bytes)| {
            let mut options = files(dir.path(), &[(name, &bytes)]);
            options.out = dir.path().join(format!("{name}-out"));
            assert!(failure(&options).contains("\"text\""), "{name}: {}", failure(&options));
            let Input::Files { field, .. } = &mut options.input else { unreachable!() };
            *field = "body".into();
            prepare(&options).unwrap();
            [Split::Train, Split::Val].map(|split| text(&options.out, split))
        });
        assert!(made[0] == made[1] && made[0] == made[2] && made[0][0].starts_with("document 0 of é"), "{made:?}");
    }

    #[test]
    fn an_ordinary_word_as_the_end_is_warned_of() {
        let dir = tempfile::tempdir().unwrap();
        let warned = |eos: &str| {
            let mut options = files(dir.path(), &[("a.txt", b"one two three")]);
            (options.val_share, options.force, options.eos) = (0.2, true, Some(eos.into()));
            prepare(&options).unwrap().notes.iter().any(|note| note.starts_with(&format!("warning: token {eos} ")))
        };
        assert!(warned("101"), "the letter e");
        assert!(!warned("0") && !warned("none"));
    }

    #[test]
    fn an_existing_folder_is_replaced_by_force_only_and_only_a_data_set() {
        let dir = tempfile::tempdir().unwrap();
        let input = dir.path().join("a.txt");
        let mut options = files(dir.path(), &[("a.txt", b"one two three")]);
        options.val_share = 0.2;
        std::fs::create_dir(&options.out).unwrap();
        prepare(&options).unwrap();
        assert!(failure(&options).contains("force"));

        std::fs::write(&input, "four five six").unwrap();
        options.force = true;
        prepare(&options).unwrap();
        assert!(text(&options.out, Split::Train).starts_with("four"));
        assert_eq!(entries(dir.path()), 2);

        std::fs::write(&input, b"\xff").unwrap();
        failure(&options);
        assert!(text(&options.out, Split::Train).starts_with("four"), "the old one stays");
        std::fs::write(&input, "seven eight nine").unwrap();
        // A damaged one is replaced, too.
        std::fs::remove_file(options.out.join("train-00000.tokens")).unwrap();
        prepare(&options).unwrap();

        std::fs::remove_file(options.out.join(Dataset::FILE)).unwrap();
        assert!(failure(&options).contains("other files"));
        options.out = input;
        assert!(failure(&options).contains("it is a file"));
    }

    #[test]
    fn force_removes_nothing_that_is_no_data_sets() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = files(dir.path(), &[("a.txt", b"one two three")]);
        (options.val_share, options.force) = (0.2, true);
        prepare(&options).unwrap();
        let kept = |what: &str, path: &Path, options: &PrepareOptions| {
            let said = failure(options);
            assert!(said.contains("--force") && said.contains(what) && path.exists(), "{said}");
        };
        let other = |name: &str| options.out.join(name);
        for name in ["chapter-1.txt", ".hidden", "train-00001.tokens", "sub"] {
            match name {
                "sub" => std::fs::create_dir(other(name)).unwrap(),
                _ => std::fs::write(other(name), "mine").unwrap(),
            }
            kept(name, &other(name), &options);
            crate::files::remove(&other(name)).unwrap();
        }
        // A file that is called so is none; one that was cut, by a power cut say, is replaced.
        let shard = std::fs::read(other("train-00000.tokens")).unwrap();
        std::fs::write(other("train-00000.tokens"), "mine").unwrap();
        kept("train-00000.tokens is called as a shard is", &other("train-00000.tokens"), &options);
        for cut in [0, 5, 20] {
            std::fs::write(other("train-00000.tokens"), &shard[..cut]).unwrap();
            prepare(&options).unwrap();
        }
        // A folder in place of a shard is none.
        std::fs::remove_file(other("train-00000.tokens")).unwrap();
        std::fs::create_dir(other("train-00000.tokens")).unwrap();
        kept("train-00000.tokens", &other("train-00000.tokens"), &options);
        // Other programs have files of this name.
        let thesis = dir.path().join("thesis");
        std::fs::create_dir(&thesis).unwrap();
        std::fs::write(thesis.join("chapter-1.txt"), "mine").unwrap();
        options.out = thesis.clone();
        for text in ["{}", "{\"name\": \"Liver\", \"numTraining\": 131}", "no JSON"] {
            std::fs::write(thesis.join(Dataset::FILE), text).unwrap();
            kept("dataset.json is none of kiln's", &thesis.join("chapter-1.txt"), &options);
        }
        std::fs::remove_file(thesis.join("chapter-1.txt")).unwrap();
        kept("dataset.json is none of kiln's", &thesis.join(Dataset::FILE), &options);
    }

    /// Preparing takes its time, and others may write there meanwhile.
    #[test]
    fn what_comes_while_data_is_prepared_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = files(dir.path(), &[("a.txt", b"one two three")]);
        options.val_share = 0.2;
        let dataset = prepare(&options).unwrap().dataset;
        let said = |out: &Path, force: bool, name: &str| {
            let folder = Folder::create(out, force).unwrap();
            std::fs::create_dir_all(out).unwrap();
            std::fs::write(out.join(name), "mine").unwrap();
            let said = folder.finish(&dataset).unwrap_err().to_string();
            assert_eq!(std::fs::read_to_string(out.join(name)).unwrap(), "mine", "{said}");
            std::fs::remove_file(out.join(name)).unwrap();
            said
        };
        assert!(said(&options.out, true, "notes.txt").contains("notes.txt is not a file of one"));
        // A data set of bytes has no tokenizer's file.
        assert!(said(&options.out, true, "tokenizer.json").contains("tokenizer.json is not a file of one"));
        // A folder that was not there, or was empty.
        assert!(said(&dir.path().join("new"), false, "notes.txt").contains("no dataset.json"));
        assert!(said(&dir.path().join("new"), true, "notes.txt").contains("no dataset.json"));
        let mut again = prepare(&PrepareOptions { force: true, ..options.clone() }).unwrap().dataset;
        assert_eq!(again, dataset);
        // Of another tokenizer it is one of the files.
        again.tokenizer = "tokenizer.json".into();
        std::fs::write(options.out.join(Dataset::FILE), serde_json::to_string(&again).unwrap()).unwrap();
        std::fs::write(options.out.join("tokenizer.json"), "{}").unwrap();
        prepare(&PrepareOptions { force: true, ..options }).unwrap();
    }

    #[test]
    fn generated_text_keeps_its_floor() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = files(dir.path(), &[]);
        let (seed, sentences) = (1, 300);
        options.input = Input::Generated { seed, sentences };
        let dataset = prepare(&options).unwrap().dataset;
        assert_eq!(dataset.entropy_floor, Some(Grammar::new().entropy_per_byte()));
        assert_eq!(dataset.val.documents, 15);
        let train = text(&options.out, Split::Train);
        assert_eq!(train.matches(".\n").count(), 285);
        assert!(!train.contains('\0'));
    }
}
