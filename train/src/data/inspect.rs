//! A look at a data set or a shard.

use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{DataError, Dataset, Shard, ShardSet, Split, Tokenizer};
use crate::files::folder_of;

#[derive(Debug, Clone, Serialize)]
pub struct ShardInfo {
    pub path: PathBuf,
    pub bytes_per_token: usize,
    pub vocab: usize,
    pub tokens: u64,
    pub fingerprint: u64,
    pub checksum_ok: bool,
}

#[derive(Debug, Clone, Serialize)]
pub struct Inspection {
    /// None for a shard without a dataset.json beside it.
    pub dataset: Option<Dataset>,
    pub shards: Vec<ShardInfo>,
    pub first_tokens: Vec<u32>,
    /// The first tokens as text, where the tokenizer is at hand.
    pub first_text: Option<String>,
    /// For people: which token ends a document, where the tokenizer is at hand and the data set says so.
    pub end: Option<String>,
    /// The same of the token that begins one.
    pub begin: Option<String>,
    /// And of the one that pads.
    pub pad: Option<String>,
}

/// A data set's folder, or one shard.
pub fn inspect(path: &Path) -> Result<Inspection, DataError> {
    let (dir, dataset, files) = if path.is_dir() {
        let dataset = Dataset::open(path)?;
        let names = Split::ALL.iter().flat_map(|split| &dataset.split(*split).shards);
        let files = names.map(|name| path.join(name)).collect();
        (path, Some(dataset), files)
    } else {
        let dir = folder_of(path);
        (dir, Dataset::open(dir).ok(), vec![path.to_owned()])
    };
    if path.is_dir() {
        // What training would refuse is refused here.
        for split in Split::ALL {
            match ShardSet::open(path, split) {
                Err(e) if !matches!(e, DataError::Checksum { .. }) => return Err(e),
                _ => {}
            }
        }
    }
    let (mut shards, mut first_tokens) = (Vec::new(), Vec::new());
    let mut fingerprint = None;
    for path in files {
        let shard = Shard::open(&path)?;
        if shards.is_empty() {
            first_tokens = shard.get(0..64)?;
            fingerprint = Some(shard.fingerprint());
        }
        shards.push(ShardInfo {
            path,
            bytes_per_token: shard.bytes_per_token(),
            vocab: shard.vocab(),
            tokens: shard.tokens(),
            fingerprint: shard.fingerprint(),
            checksum_ok: shard.verify().is_ok(),
        });
    }
    let recorded = dataset.as_ref().and_then(|dataset| dataset.load_tokenizer(dir).ok());
    let tokenizer = recorded.into_iter().chain([Tokenizer::Byte]).find(|tokenizer| Some(tokenizer.fingerprint()) == fingerprint);
    let eos = dataset.as_ref().and_then(|dataset| dataset.eos.as_ref());
    let begin = dataset.as_ref().and_then(|dataset| dataset.bos.as_ref());
    Ok(Inspection {
        begin: tokenizer.as_ref().zip(begin).map(|(tokenizer, bos)| tokenizer.describe_begin(bos)),
        pad: tokenizer.as_ref().zip(dataset.as_ref()).and_then(|(t, d)| d.pad.as_ref().map(|pad| t.describe_pad(Some(pad)))),
        first_text: tokenizer.as_ref().map(|tokenizer| tokenizer.decode(&first_tokens)),
        end: tokenizer.as_ref().zip(eos).map(|(tokenizer, eos)| tokenizer.describe_end(eos)),
        dataset,
        shards,
        first_tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::super::prepare::{prepare, tests::files};
    use super::*;

    #[test]
    fn a_json_tokenizer_travels_with_the_data_and_inspect_decodes() {
        let dir = tempfile::tempdir().unwrap();
        let spec = dir.path().join("my.json");
        super::super::tokenizer::tests::write_json(&spec);
        let mut options = files(dir.path(), &[("a.txt", "héllo wörld, again".as_bytes())]);
        options.tokenizer = spec.to_str().unwrap().into();
        options.val_share = 0.3;
        prepare(&options).unwrap();
        std::fs::remove_file(spec).unwrap();
        let seen = inspect(&options.out).unwrap();
        let first = seen.first_text.unwrap();
        assert!(first.starts_with("héllo") && first.ends_with("<|endoftext|>"), "{first}");
        assert_eq!(seen.end.unwrap(), "end of document: <|endoftext|> (300), by its name");
        assert!(seen.shards.iter().all(|shard| shard.checksum_ok) && seen.shards.len() == 2);

        let shard = options.out.join("train-00000.tokens");
        let mut bytes = std::fs::read(&shard).unwrap();
        bytes[64] ^= 1;
        std::fs::write(&shard, bytes).unwrap();
        let seen = inspect(&shard).unwrap();
        assert!(!seen.shards[0].checksum_ok && seen.first_text.is_some());
        assert!(inspect(&dir.path().join("a.txt")).is_err());
        assert!(serde_json::to_string(&seen).unwrap().contains("\"checksum_ok\":false"));
    }
}
