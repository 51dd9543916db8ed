//! A data set: a folder of shards `train-00000.tokens`, ..., `val-00000.tokens`, and dataset.json, which lists them.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{DataError, Noted, Shard, Tokenizer};
use crate::input;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    Train,
    Val,
}

impl Split {
    pub const ALL: [Split; 2] = [Split::Train, Split::Val];

    pub fn name(self) -> &'static str {
        match self {
            Split::Train => "train",
            Split::Val => "val",
        }
    }

    pub(super) fn shard_name(self, index: usize) -> String {
        format!("{}-{index:05}.tokens", self.name())
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SplitInfo {
    pub documents: u64,
    pub tokens: u64,
    pub shards: Vec<String>,
}

/// dataset.json
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dataset {
    /// "byte", or a tokenizer.json relative to the data set's folder.
    pub tokenizer: String,
    pub fingerprint: u64,
    pub vocab: usize,
    /// Nats per token below which no model can get, where the text was generated.
    pub entropy_floor: Option<f64>,
    pub train: SplitInfo,
    pub val: SplitInfo,
    /// What ends a document; data sets of earlier versions do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos: Option<Noted>,
    /// What begins a document, where something does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos: Option<Noted>,
    /// What the model pads with, for people: nothing here is padded with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad: Option<Noted>,
}

impl Dataset {
    pub const FILE: &str = "dataset.json";

    /// A number that changes with the tokens: the hash of all shards' headers, which hold the payloads' own.
    pub fn checksum(&self, dir: &Path) -> Result<u64, DataError> {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        let splits = engine::mutant!("data-known-by-its-training-split", &Split::ALL[..], &[Split::Train][..]);
        for name in splits.iter().flat_map(|split| &self.split(*split).shards) {
            let (path, mut header) = (inside(dir, name)?, [0; 64]);
            let mut file = input::open(&path).map_err(DataError::io("read", &path))?;
            std::io::Read::read_exact(&mut file, &mut header).map_err(DataError::io("read", &path))?;
            hash.update(&header);
        }
        Ok(hash.digest())
    }

    /// Reads dataset.json and checks that the folder holds exactly the shards that it lists.
    pub fn open(dir: &Path) -> Result<Self, DataError> {
        if dir.is_file() {
            return Err(DataError::not_prepared(dir, ""));
        }
        if !dir.exists() {
            return Err(DataError::NoData { path: dir.to_owned() });
        }
        let path = dir.join(Self::FILE);
        let text = input::read_to_string(&path).map_err(DataError::io("read", &path))?;
        let malformed = |reason: String| DataError::Dataset { path: path.clone(), reason };
        let dataset: Dataset = serde_json::from_str(&text).map_err(|e| malformed(e.to_string()))?;
        let special = [("eos", &dataset.eos), ("bos", &dataset.bos), ("pad", &dataset.pad)];
        for (name, id) in special.into_iter().filter_map(|(name, noted)| Some((name, noted.as_ref()?.id?))) {
            if id as usize >= dataset.vocab {
                return Err(malformed(format!("its {name} is token {id} of a vocabulary of {}", dataset.vocab)));
            }
        }
        for split in Split::ALL {
            for (i, name) in dataset.split(split).shards.iter().enumerate() {
                if *name != split.shard_name(i) {
                    let expected = split.shard_name(i);
                    return Err(malformed(format!("it lists the shard {name:?} instead of {expected:?}")));
                }
                if !dir.join(name).exists() {
                    return Err(DataError::MissingShard { path: dir.join(name) });
                }
                inside(dir, name)?;
            }
        }
        let listed: HashSet<&OsStr> = Split::ALL.iter().flat_map(|split| &dataset.split(*split).shards).map(|name| name.as_ref()).collect();
        for entry in std::fs::read_dir(dir).map_err(DataError::io("list", dir))? {
            let path = entry.map_err(DataError::io("list", dir))?.path();
            if path.extension().is_some_and(|e| e == "tokens") && !path.file_name().is_some_and(|name| listed.contains(name)) {
                return Err(DataError::ExtraShard { path });
            }
        }
        Ok(dataset)
    }

    /// Why a folder holds more than a data set that was prepared here; none where dataset.json lists every file. Shards may be missing or damaged.
    pub(super) fn other_than_listed(dir: &Path) -> Result<Option<String>, DataError> {
        let path = dir.join(Self::FILE);
        let text = input::read_to_string(&path).map_err(DataError::io("read", &path))?;
        let dataset: Dataset = match serde_json::from_str(&text) {
            Ok(dataset) => dataset,
            Err(e) => return Ok(Some(format!("{} is none of kiln's: {e}", path.display()))),
        };
        let shards = Split::ALL.into_iter().flat_map(|split| (0..dataset.split(split).shards.len()).map(move |i| split.shard_name(i)));
        let mut own: Vec<String> = shards.collect();
        own.push(Self::FILE.into());
        // One of bytes has no file for it.
        own.extend((dataset.tokenizer != "byte").then(|| "tokenizer.json".into()));
        for entry in std::fs::read_dir(dir).map_err(DataError::io("list", dir))? {
            let entry = entry.map_err(DataError::io("list", dir))?;
            let is_file = entry.file_type().map_err(DataError::io("read", &entry.path()))?.is_file();
            if !is_file || !own.iter().any(|name| entry.file_name() == name.as_str()) {
                return Ok(Some(format!("{} is not a file of one", entry.path().display())));
            }
            let path = entry.path();
            let is_own = path.extension().is_none_or(|e| e != "tokens") || Shard::may_be_one(&path)?;
            if !engine::mutant!("what-is-called-as-shards-is-removed", is_own, true) {
                return Ok(Some(format!("{} is called as a shard is, and is none", path.display())));
            }
        }
        Ok(None)
    }

    pub fn split(&self, split: Split) -> &SplitInfo {
        match split {
            Split::Train => &self.train,
            Split::Val => &self.val,
        }
    }

    /// The tokenizer that made the data set in `dir`.
    pub fn load_tokenizer(&self, dir: &Path) -> Result<Tokenizer, DataError> {
        let spec = match self.tokenizer.as_str() {
            "byte" => "byte".into(),
            file => inside(dir, file)?.to_string_lossy().into_owned(),
        };
        let mut tokenizer = Tokenizer::from_spec(&spec)?;
        let found = tokenizer.fingerprint();
        same(Path::new(&spec), "the tokenizer's fingerprint", found, self.fingerprint)?;
        engine::mutant!("end-of-documents-forgotten", self.eos.as_ref(), None).into_iter().for_each(|eos| tokenizer.set_end(eos));
        tokenizer.set_begin(&self.bos.clone().unwrap_or_else(|| Noted { id: None, from: Self::FILE.into() }));
        Ok(tokenizer)
    }
}

/// A file of a data set by the name that dataset.json has for it. Such a folder may come from anywhere: it names no file that is not in it.
fn inside(dir: &Path, name: &str) -> Result<PathBuf, DataError> {
    let path = dir.join(name);
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
        let reason = format!("it names {name:?}, which is not a plain file name");
        return Err(DataError::Dataset { path: dir.join(Dataset::FILE), reason });
    }
    let [folder, to] = [dir, &path].map(|p| p.canonicalize().map_err(DataError::io("read", p)));
    let (folder, to) = (folder?, to?);
    if to.starts_with(&folder) { Ok(path) } else { Err(DataError::Outside { path, to }) }
}

fn same(path: &Path, what: &'static str, found: u64, expected: u64) -> Result<(), DataError> {
    if found == expected {
        return Ok(());
    }
    Err(DataError::Disagree { path: path.to_owned(), what, found, expected })
}

/// One split of a data set as one sequence of tokens.
#[derive(Debug)]
pub struct ShardSet {
    dataset: Dataset,
    dir: PathBuf,
    split: Split,
    shards: Vec<Shard>,
}

/// Files that a split keeps open: half of what a process may have where nobody raised that.
pub(super) const MOST_OPEN: usize = 256;

impl ShardSet {
    /// Reads every token once, for the checksums.
    pub fn open(dir: &Path, split: Split) -> Result<Self, DataError> {
        ShardSet::open_some(dir, split, MOST_OPEN)
    }

    /// The same where other sets are open, too: keeps so many files open.
    pub(super) fn open_some(dir: &Path, split: Split, most: usize) -> Result<Self, DataError> {
        let dataset = Dataset::open(dir)?;
        let info = dataset.split(split);
        let mut shards = Vec::new();
        for name in &info.shards {
            let path = dir.join(name);
            let mut shard = Shard::open(&path)?;
            same(&path, "the tokenizer's fingerprint", shard.fingerprint(), dataset.fingerprint)?;
            same(&path, "the vocabulary", shard.vocab() as u64, dataset.vocab as u64)?;
            shard.verify()?;
            if shards.len() >= most {
                shard.close();
            }
            shards.push(shard);
        }
        let tokens = shards.iter().map(|shard| shard.tokens()).sum();
        same(dir, "the number of tokens in the shards", tokens, info.tokens)?;
        Ok(ShardSet { dataset, dir: dir.to_owned(), split, shards })
    }

    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn split(&self) -> Split {
        self.split
    }

    pub fn tokens(&self) -> u64 {
        self.dataset.split(self.split).tokens
    }

    /// The tokens of `range`, as far as they exist, across the borders of shards.
    pub fn get(&self, range: Range<u64>) -> Result<Vec<u32>, DataError> {
        let mut out = Vec::new();
        let mut start = 0;
        for shard in &self.shards {
            let local = range.start.saturating_sub(start)..range.end.saturating_sub(start);
            shard.read(local, &mut out)?;
            start += shard.tokens();
        }
        Ok(out)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::shards::tests::{damage, write_shard};
    use super::*;

    /// The tokens 0..n as a training split, in shards of `size`.
    pub fn write_set(dir: &Path, n: u32, size: usize) {
        let ids: Vec<u32> = (0..n).collect();
        let mut train = SplitInfo { documents: 1, tokens: n.into(), shards: Vec::new() };
        for (i, part) in ids.chunks(size).enumerate() {
            train.shards.push(Split::Train.shard_name(i));
            write_shard(&dir.join(&train.shards[i]), 1000, part);
        }
        let dataset = Dataset {
            tokenizer: "byte".into(),
            fingerprint: 9,
            vocab: 1000,
            entropy_floor: None,
            train,
            val: SplitInfo::default(),
            eos: None,
            bos: None,
            pad: None,
        };
        std::fs::write(dir.join(Dataset::FILE), serde_json::to_string(&dataset).unwrap()).unwrap();
    }

    #[test]
    fn a_set_reads_across_shards() {
        let dir = tempfile::tempdir().unwrap();
        write_set(dir.path(), 25, 7);
        let set = ShardSet::open(dir.path(), Split::Train).unwrap();
        assert_eq!(set.tokens(), 25);
        for start in 0..25 {
            for end in start..=25 {
                assert_eq!(set.get(start..end).unwrap(), (start as u32..end as u32).collect::<Vec<_>>());
            }
        }
        assert_eq!(ShardSet::open(dir.path(), Split::Val).unwrap().tokens(), 0);
    }

    /// What a checkpoint knows its data by.
    #[test]
    fn a_checksum_is_of_what_is_learned_and_of_what_validates() {
        let checksum = |train: &[u32], val: &[u32]| {
            let dir = tempfile::tempdir().unwrap();
            write_set(dir.path(), 5, 5);
            let mut dataset = Dataset::open(dir.path()).unwrap();
            for (split, ids) in Split::ALL.into_iter().zip([train, val]) {
                write_shard(&dir.path().join(split.shard_name(0)), 1000, ids);
            }
            dataset.val = SplitInfo { documents: 1, tokens: val.len() as u64, shards: vec![Split::Val.shard_name(0)] };
            dataset.checksum(dir.path()).unwrap()
        };
        let usual = checksum(&[1, 2, 3], &[4, 5]);
        assert_eq!(usual, checksum(&[1, 2, 3], &[4, 5]));
        assert!(usual != checksum(&[1, 2, 4], &[4, 5]) && usual != checksum(&[1, 2, 3], &[4, 6]));
    }

    #[test]
    fn more_shards_than_a_process_may_have_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        write_set(dir.path(), 2 * MOST_OPEN as u32 + 1, 1);
        let set = ShardSet::open(dir.path(), Split::Train).unwrap();
        assert_eq!(set.shards.iter().filter(|shard| shard.is_open()).count(), MOST_OPEN);
        assert_eq!(set.get(0..set.tokens()).unwrap(), (0..2 * MOST_OPEN as u32 + 1).collect::<Vec<_>>());
    }

    #[test]
    fn special_tokens_are_tokens_of_the_vocabulary() {
        let dir = tempfile::tempdir().unwrap();
        write_set(dir.path(), 9, 9);
        let path = dir.path().join(Dataset::FILE);
        let text = std::fs::read_to_string(&path).unwrap();
        for name in ["eos", "bos", "pad"] {
            let with = |id: u32| text.replacen('{', &format!("{{\"{name}\": {{\"id\": {id}, \"from\": \"x\"}}, "), 1);
            std::fs::write(&path, with(999)).unwrap();
            Dataset::open(dir.path()).unwrap();
            for id in [1000, 1 << 31] {
                std::fs::write(&path, with(id)).unwrap();
                let error = Dataset::open(dir.path()).unwrap_err().to_string();
                assert!(error.contains(&format!("its {name} is token {id} of a vocabulary of 1000")), "{error}");
            }
        }
    }

    /// A data set may come from anywhere.
    #[test]
    fn paths_in_dataset_json_stay_inside_the_folder() {
        let outside = tempfile::tempdir().unwrap();
        let secret = outside.path().join("tokenizer.json");
        super::super::tokenizer::tests::write_json(&secret);
        write_shard(&outside.path().join("a.tokens"), 1000, &[1]);
        let made = |tokenizer: &str| {
            let dir = tempfile::tempdir().unwrap();
            write_set(dir.path(), 25, 7);
            let path = dir.path().join(Dataset::FILE);
            let text = std::fs::read_to_string(&path).unwrap();
            std::fs::write(path, text.replace("\"byte\"", &format!("{tokenizer:?}"))).unwrap();
            dir
        };
        let error = |dir: &Path| Dataset::open(dir).and_then(|d| d.load_tokenizer(dir)).err().unwrap().to_string();
        for name in [secret.to_str().unwrap(), "../tokenizer.json", "below/../../x", "..", "", ".hidden"] {
            let dir = made(name);
            assert!(error(dir.path()).contains("not a plain file name"), "{name}");
        }
        let dir = made("tokenizer.json");
        std::os::unix::fs::symlink(&secret, dir.path().join("tokenizer.json")).unwrap();
        let said = error(dir.path());
        assert!(said.contains("leads out of the data set's folder") && said.contains(secret.to_str().unwrap()), "{said}");

        let dir = made("byte");
        let shard = dir.path().join("train-00001.tokens");
        std::fs::remove_file(&shard).unwrap();
        std::os::unix::fs::symlink(outside.path().join("a.tokens"), &shard).unwrap();
        assert!(error(dir.path()).contains("leads out"));
        // A link that stays inside is nobody's loss; a pipe in the place of a file is refused at once.
        std::fs::remove_file(&shard).unwrap();
        std::fs::rename(dir.path().join("train-00002.tokens"), dir.path().join("kept")).unwrap();
        std::os::unix::fs::symlink("kept", dir.path().join("train-00002.tokens")).unwrap();
        crate::input::tests::pipe(&shard);
        let said = ShardSet::open(dir.path(), Split::Train).unwrap_err().to_string();
        assert!(said.contains("train-00001.tokens") && said.contains("it is a pipe"), "{said}");
    }

    #[test]
    fn a_set_that_does_not_fit_together_is_refused() {
        let error = |change: &dyn Fn(&Path)| {
            let dir = tempfile::tempdir().unwrap();
            write_set(dir.path(), 25, 7);
            change(dir.path());
            ShardSet::open(dir.path(), Split::Train).unwrap_err().to_string()
        };
        let second = |dir: &Path| dir.join("train-00001.tokens");
        let json = |dir: &Path, from: &str, to: &str| {
            let path = dir.join(Dataset::FILE);
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.contains(from));
            std::fs::write(path, text.replace(from, to)).unwrap();
        };
        for (error, part) in [
            (error(&|d| std::fs::remove_file(second(d)).unwrap()), "train-00001.tokens is listed"),
            (error(&|d| write_shard(&d.join("train-00004.tokens"), 1000, &[1])), "train-00004.tokens is not listed"),
            (error(&|d| damage(&second(d), |b| b[70] ^= 1)), "train-00001.tokens: corrupted tokens"),
            (error(&|d| write_shard(&second(d), 999, &[1])), "train-00001.tokens: the vocabulary is 999"),
            (error(&|d| write_shard(&second(d), 1000, &[1])), "the number of tokens in the shards is 19"),
            (error(&|d| json(d, "\"fingerprint\":9", "\"fingerprint\":8")), "fingerprint is 9"),
            (error(&|d| json(d, "train-00002", "../train-00002")), "../train-00002"),
            (error(&|d| json(d, "\"vocab\"", "\"words\"")), "dataset.json: malformed"),
            (error(&|d| std::fs::remove_file(d.join(Dataset::FILE)).unwrap()), "dataset.json"),
        ] {
            assert!(error.contains(part), "{error} / {part}");
        }
    }
}
