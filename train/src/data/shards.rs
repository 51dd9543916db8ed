//! Token shards: a 64-byte little-endian header, then the tokens, as u16 where the vocabulary allows it, else u32.
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | magic `KILNTOK\0` |
//! | 8..12, 12..16 | version, bytes per token (2 or 4) |
//! | 16..24, 24..32 | vocabulary, number of tokens |
//! | 32..40 | fingerprint of the tokenizer |
//! | 40..48 | xxh3 of the tokens |
//! | 48..56 | zero |
//! | 56..64 | xxh3 of bytes 0..56 |

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Seek, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::DataError;
use crate::{files, input};

const MAGIC: &[u8; 8] = b"KILNTOK\0";
const VERSION: u32 = 1;
const HEADER: usize = 64;
/// Ids travel as i32.
const LARGEST_VOCAB: u64 = 1 << 31;

fn bytes_per_token(vocab: usize) -> usize {
    if vocab <= 1 << 16 { 2 } else { 4 }
}

/// Writes `NAME.tmp` and renames it when it is complete and on the disk.
pub struct ShardWriter {
    path: PathBuf,
    temporary: PathBuf,
    /// None once finished.
    file: Option<BufWriter<File>>,
    vocab: usize,
    fingerprint: u64,
    tokens: u64,
    checksum: Xxh3,
}

impl ShardWriter {
    pub fn create(path: &Path, vocab: usize, fingerprint: u64) -> Result<Self, DataError> {
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(".tmp");
        let temporary = PathBuf::from(temporary);
        let file = File::create(&temporary).map_err(DataError::io("create", &temporary))?;
        let mut writer = ShardWriter {
            path: path.to_owned(),
            temporary,
            file: Some(BufWriter::new(file)),
            vocab,
            fingerprint,
            tokens: 0,
            checksum: Xxh3::new(),
        };
        writer.write(&[0; HEADER])?;
        Ok(writer)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        let file = self.file.as_mut().ok_or(DataError::Stopped)?;
        file.write_all(bytes).map_err(DataError::io("write", &self.temporary))
    }

    pub fn push(&mut self, ids: &[u32]) -> Result<(), DataError> {
        let width = bytes_per_token(self.vocab);
        let mut bytes = Vec::with_capacity(ids.len() * width);
        for (i, &token) in ids.iter().enumerate() {
            if token as usize >= self.vocab {
                return Err(DataError::Vocabulary { path: self.path.clone(), token, at: self.tokens + i as u64, vocab: self.vocab });
            }
            bytes.extend_from_slice(&token.to_le_bytes()[..width]);
        }
        self.checksum.update(&bytes);
        self.tokens += ids.len() as u64;
        self.write(&bytes)
    }

    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    pub fn finish(mut self) -> Result<(), DataError> {
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&(bytes_per_token(self.vocab) as u32).to_le_bytes());
        let fields = [self.vocab as u64, self.tokens, self.fingerprint, self.checksum.digest()];
        for (place, field) in header[16..48].chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        let sum = xxh3_64(&header[..56]);
        header[56..].copy_from_slice(&sum.to_le_bytes());

        let mut file = self.file.take().ok_or(DataError::Stopped)?;
        file.rewind()
            .and_then(|()| file.write_all(&header))
            .and_then(|()| file.flush())
            .and_then(|()| engine::mutant!("shards-are-not-synced", files::sync(file.get_ref(), &self.temporary), Ok(())))
            .and_then(|()| files::rename(&self.temporary, &self.path))
            .map_err(|error| {
                let _ = std::fs::remove_file(&self.temporary);
                DataError::io("write", &self.path)(error)
            })
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// One shard. It is read where it lies, a window at a time: that a file was cut short meanwhile is then an error, and not the end of the process, as
/// it would be for a file that is mapped into memory.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    /// None: it is opened for every read, as it was found.
    file: Option<File>,
    /// Device and inode.
    is: (u64, u64),
    width: usize,
    vocab: usize,
    tokens: u64,
    fingerprint: u64,
    checksum: u64,
}

/// Bytes that are read at once when all are.
const PART: usize = 1 << 20;

impl Shard {
    /// Whether a file may have been a shard before it was damaged: it begins as one, as far as it goes.
    pub fn may_be_one(path: &Path) -> Result<bool, DataError> {
        let mut begins = vec![];
        let file = input::open(path).map_err(DataError::io("open", path))?;
        std::io::Read::read_to_end(&mut std::io::Read::take(file, MAGIC.len() as u64), &mut begins).map_err(DataError::io("read", path))?;
        Ok(MAGIC.starts_with(&begins))
    }

    /// Checks the header and the length of the file; `verify` checks the tokens.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let file = input::open(path).map_err(DataError::io("open", path))?;
        let metadata = file.metadata().map_err(DataError::io("read", path))?;
        let found = metadata.len();
        let wrong_length = |expected: u64| DataError::Length { path: path.to_owned(), expected, found };
        if found < HEADER as u64 {
            return Err(wrong_length(HEADER as u64));
        }
        let mut header = [0; HEADER];
        file.read_exact_at(&mut header, 0).map_err(DataError::io("read", path))?;

        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        if header[..8] != MAGIC[..] {
            return Err(DataError::Magic { path: path.to_owned(), found: String::from_utf8_lossy(&header[..8]).into_owned() });
        }
        if u32_at(8) != VERSION {
            return Err(DataError::Version { path: path.to_owned(), found: u32_at(8), known: VERSION });
        }
        let broken = |problem: String| DataError::Header { path: path.to_owned(), problem };
        if u64_at(56) != xxh3_64(&header[..56]) {
            return Err(broken("its checksum does not match".into()));
        }
        let (width, vocab, tokens) = (u32_at(12) as usize, u64_at(16), u64_at(24));
        if vocab == 0 || vocab > LARGEST_VOCAB || width != bytes_per_token(vocab as usize) {
            return Err(broken(format!("{width} bytes per token with a vocabulary of {vocab}")));
        }
        let expected = tokens
            .checked_mul(width as u64)
            .and_then(|bytes| bytes.checked_add(HEADER as u64))
            .ok_or_else(|| broken(format!("{tokens} tokens")))?;
        if found != expected {
            return Err(wrong_length(expected));
        }
        Ok(Shard {
            path: path.to_owned(),
            is: (metadata.dev(), metadata.ino()),
            width,
            vocab: vocab as usize,
            tokens,
            fingerprint: u64_at(32),
            checksum: u64_at(40),
            file: Some(file),
        })
    }

    /// Lets go of the file: a process may have only so many.
    pub(super) fn close(&mut self) {
        self.file = None;
    }

    #[cfg(test)]
    pub(super) fn is_open(&self) -> bool {
        self.file.is_some()
    }

    /// Reads all tokens: their checksum, and that they lie inside the vocabulary.
    pub fn verify(&self) -> Result<(), DataError> {
        let (mut hash, mut outside) = (Xxh3::new(), None);
        let mut at = 0;
        while at < self.tokens {
            let end = self.tokens.min(at + (PART / self.width) as u64);
            let bytes = self.bytes(at..end)?;
            hash.update(&bytes);
            outside = outside.or_else(|| self.outside(&self.ids(&bytes), at));
            at = end;
        }
        let found = hash.digest();
        if found != self.checksum {
            return Err(DataError::Checksum { path: self.path.clone(), expected: self.checksum, found });
        }
        outside.map_or(Ok(()), Err)
    }

    /// The first of these tokens, which begin at `at`, that the vocabulary does not have.
    fn outside(&self, ids: &[u32], at: u64) -> Option<DataError> {
        let i = ids.iter().position(|&token| token as usize >= self.vocab)?;
        Some(DataError::Vocabulary { path: self.path.clone(), token: ids[i], at: at + i as u64, vocab: self.vocab })
    }

    fn ids(&self, bytes: &[u8]) -> Vec<u32> {
        match self.width {
            2 => bytes.as_chunks().0.iter().map(|&b| u16::from_le_bytes(b).into()).collect(),
            _ => bytes.as_chunks().0.iter().map(|&b| u32::from_le_bytes(b)).collect(),
        }
    }

    /// The tokens of `range`, all of which exist, as they lie in the file.
    fn bytes(&self, range: Range<u64>) -> Result<Vec<u8>, DataError> {
        let mut bytes = vec![0; (range.end - range.start) as usize * self.width];
        let at = HEADER as u64 + range.start * self.width as u64;
        let opened;
        let file = match &self.file {
            Some(file) => file,
            None => {
                opened = input::open(&self.path).map_err(DataError::io("open", &self.path))?;
                let m = opened.metadata().map_err(DataError::io("read", &self.path))?;
                if (m.dev(), m.ino()) != self.is {
                    return Err(DataError::Replaced { path: self.path.clone() });
                }
                &opened
            }
        };
        file.read_exact_at(&mut bytes, at).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => DataError::Length {
                path: self.path.clone(),
                expected: HEADER as u64 + self.tokens * self.width as u64,
                found: file.metadata().map_or(0, |m| m.len()),
            },
            _ => DataError::io("read", &self.path)(error),
        })?;
        Ok(bytes)
    }

    /// Adds the tokens of `range`, as far as they exist.
    pub(super) fn read(&self, range: Range<u64>, out: &mut Vec<u32>) -> Result<(), DataError> {
        let range = range.start..range.end.min(self.tokens);
        if range.is_empty() {
            return Ok(());
        }
        let ids = self.ids(&self.bytes(range.clone())?);
        // The file may have changed since it was verified.
        if let Some(error) = self.outside(&ids, range.start) {
            return Err(error);
        }
        out.extend(ids);
        Ok(())
    }

    /// The tokens of `range`, as far as they exist.
    pub fn get(&self, range: Range<u64>) -> Result<Vec<u32>, DataError> {
        let mut out = Vec::new();
        self.read(range, &mut out)?;
        Ok(out)
    }

    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    pub fn vocab(&self) -> usize {
        self.vocab
    }

    pub fn bytes_per_token(&self) -> usize {
        self.width
    }

    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn write_shard(path: &Path, vocab: usize, ids: &[u32]) {
        let mut writer = ShardWriter::create(path, vocab, 9).unwrap();
        for part in ids.chunks(3) {
            writer.push(part).unwrap();
        }
        writer.finish().unwrap();
    }

    pub fn damage(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = std::fs::read(path).unwrap();
        change(&mut bytes);
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn a_shard_is_on_the_disk_before_it_has_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let [path, temporary] = ["a.tokens", "a.tokens.tmp"].map(|name| dir.path().join(name));
        let (_, calls) = files::noted::during(|| write_shard(&path, 100, &[1, 2, 3]));
        use files::noted::Call::{Renamed, Synced};
        assert_eq!(calls, [Synced(temporary.clone()), Renamed(temporary.clone(), path, vec![temporary])]);
    }

    #[test]
    fn tokens_round_trip_in_two_and_four_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tokens");
        for (vocab, width) in [(65_536, 2), (65_537, 4)] {
            let ids = [0, 1, 255, 256, vocab as u32 - 1];
            write_shard(&path, vocab, &ids);
            let shard = Shard::open(&path).unwrap();
            shard.verify().unwrap();
            assert_eq!(shard.bytes_per_token(), width);
            assert_eq!(shard.get(0..5).unwrap(), ids);
            assert_eq!(shard.get(3..99).unwrap(), ids[3..]);
            assert!(shard.get(5..9).unwrap().is_empty());
            assert_eq!(std::fs::metadata(&path).unwrap().len(), (64 + 5 * width) as u64);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no .tmp is left");
    }

    #[test]
    fn an_unfinished_or_refused_shard_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = ShardWriter::create(&dir.path().join("a.tokens"), 10, 0).unwrap();
        let error = writer.push(&[3, 10]).unwrap_err().to_string();
        assert!(error.contains("token 10 at position 1"), "{error}");
        drop(writer);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    /// As a memory map this would end the process with SIGBUS.
    #[test]
    fn a_shard_that_is_cut_short_or_changed_while_it_is_open_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tokens");
        let ids: Vec<u32> = (0..1000).collect();
        write_shard(&path, 1000, &ids);
        let mut shard = Shard::open(&path).unwrap();
        for keeps_open in [true, false] {
            let file = File::options().write(true).open(&path).unwrap();
            file.set_len(1000).unwrap();
            assert_eq!(shard.get(0..100).unwrap(), ids[..100], "what is left can be read");
            for error in [shard.get(500..600).unwrap_err(), shard.verify().unwrap_err()] {
                assert!(matches!(error, DataError::Length { expected: 2064, found: 1000, .. }), "{error}");
            }
            file.write_all_at(&1000u16.to_le_bytes(), 64 + 2 * 7).unwrap();
            let error = shard.get(5..9).unwrap_err();
            assert!(matches!(error, DataError::Vocabulary { token: 1000, at: 7, .. }), "{error}");
            if keeps_open {
                std::fs::remove_file(&path).unwrap();
                write_shard(&path, 1000, &ids);
                assert!(shard.get(5..9).is_err(), "the file that was opened");
                shard = Shard::open(&path).unwrap();
                shard.close();
                assert_eq!(shard.get(5..9).unwrap(), [5, 6, 7, 8]);
            }
        }
        std::fs::rename(&path, dir.path().join("old")).unwrap();
        write_shard(&path, 1000, &ids);
        assert!(matches!(shard.get(5..9), Err(DataError::Replaced { .. })));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(shard.get(5..9), Err(DataError::Io { .. })));
    }

    #[test]
    pub fn damage_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tokens");
        let open_error = |change: &dyn Fn(&mut Vec<u8>)| {
            write_shard(&path, 1000, &[1, 2, 3, 4]);
            damage(&path, change);
            Shard::open(&path).unwrap_err().to_string()
        };
        let rehash = |b: &mut Vec<u8>| {
            let sum = xxh3_64(&b[..56]).to_le_bytes();
            b[56..64].copy_from_slice(&sum);
        };
        for (error, part) in [
            (open_error(&|b| b.truncate(70)), "expected 72 bytes, has 70"),
            (open_error(&|b| b.push(0)), "expected 72 bytes, has 73"),
            (open_error(&|b| b.truncate(10)), "expected 64 bytes, has 10"),
            (open_error(&|b| b.clear()), "expected 64 bytes, has 0"),
            (open_error(&|b| b[0] = b'X'), "begins with \"XILNTOK"),
            (open_error(&|b| b[8] = 7), "version 7"),
            (open_error(&|b| b[24] ^= 1), "corrupted header: its checksum"),
            (
                open_error(&|b| {
                    b[12] = 3;
                    rehash(b)
                }),
                "3 bytes per token",
            ),
            (
                open_error(&|b| {
                    b[31] = 255;
                    rehash(b)
                }),
                "corrupted header",
            ),
        ] {
            assert!(error.contains(part) && error.contains("a.tokens"), "{error} / {part}");
        }
        write_shard(&path, 1000, &[1, 2, 3, 4]);
        damage(&path, |b| b[66] ^= 4);
        let error = Shard::open(&path).unwrap().verify().unwrap_err().to_string();
        assert!(error.contains("corrupted tokens"), "{error}");
        // Another program's file: checksums right, a token outside the vocabulary.
        damage(&path, |b| {
            b[66..68].copy_from_slice(&1000u16.to_le_bytes());
            let sum = xxh3_64(&b[64..]).to_le_bytes();
            b[40..48].copy_from_slice(&sum);
            rehash(b);
        });
        let error = Shard::open(&path).unwrap().verify().unwrap_err().to_string();
        assert!(error.contains("token 1000 at position 1"), "{error}");
    }
}
