//! Checksums that are made right again after damage: a file that another program wrote, or another version, may be whole and still wrong.

use super::jobs::names;
use std::fs;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// Makes the checksums fit a file that was damaged; false where it has none, or is no longer to be understood.
pub fn reseal(path: &Path) -> bool {
    let folder = path.parent().unwrap_or(Path::new("."));
    if path.extension().is_some_and(|e| e == "tokens") {
        return shard(path).is_some();
    }
    folder.join("checkpoint.json").is_file() && manifest(folder).is_some()
}

/// A shard's header: the checksum of its tokens, then that of itself.
fn shard(path: &Path) -> Option<()> {
    let mut bytes = fs::read(path).ok().filter(|b| b.len() >= 64)?;
    let tokens = xxh3_64(&bytes[64..]).to_le_bytes();
    bytes[40..48].copy_from_slice(&tokens);
    let header = xxh3_64(&bytes[..56]).to_le_bytes();
    bytes[56..64].copy_from_slice(&header);
    fs::write(path, bytes).ok()
}

/// A checkpoint's JSON: length and checksum of every file, then the checksum of all of its text before that.
fn manifest(folder: &Path) -> Option<()> {
    let path = folder.join("checkpoint.json");
    let mut text = fs::read_to_string(&path).ok()?;
    for name in names(folder).iter().filter(|n| *n != "checkpoint.json") {
        let bytes = fs::read(folder.join(name)).ok()?;
        let entry = text.find(&format!("\"{name}\": {{"))?;
        replace(&mut text, entry, "\"bytes\": ", &[',', '\n'], &bytes.len().to_string())?;
        replace(&mut text, entry, "\"xxh3\": \"", &['"'], &format!("{:016x}", xxh3_64(&bytes)))?;
    }
    text.truncate(text.rfind(",\n  \"checksum\"")?);
    let sum = xxh3_64(text.as_bytes());
    fs::write(path, format!("{text},\n  \"checksum\": \"{sum:016x}\"\n}}\n")).ok()
}

/// The text after `label`, from `at` on, until one of `ends`.
fn replace(text: &mut String, at: usize, label: &str, ends: &[char], with: &str) -> Option<()> {
    let from = at + text[at..].find(label)? + label.len();
    let to = from + text[from..].find(ends)?;
    text.replace_range(from..to, with);
    Some(())
}
