//! The cuBLASLt algorithm of each GEMM shape, chosen by timing; remembered on disk, and by runs that want the same bits again.

use super::gemm::Algorithm;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub struct Choices {
    known: BTreeMap<String, Algorithm>,
    /// Those that this process used.
    used: BTreeMap<String, Algorithm>,
    file: PathBuf,
    /// The GPU and library version that they are for.
    home: String,
    /// How many were known but could not be used.
    pub refused: usize,
}

impl Choices {
    /// The file's name has what the choices depend on: GPU and library version. A missing or damaged file counts as empty.
    pub fn open(folder: &Path, card: &str, library: usize) -> Choices {
        let card: String = card.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let file = folder.join(format!("products-{card}-{library}.txt"));
        Choices { known: stored(&file), used: BTreeMap::new(), file, home: format!("{card} {library}"), refused: 0 }
    }

    pub fn get(&mut self, key: &str) -> Option<Algorithm> {
        let found = *self.known.get(key)?;
        self.used.insert(key.into(), found);
        Some(found)
    }

    /// Adds new choices and rewrites the file, keeping what other processes have written in the meantime.
    pub fn add(&mut self, new: impl IntoIterator<Item = (String, Algorithm)>) {
        for (key, algorithm) in new {
            self.used.insert(key.clone(), algorithm);
            self.known.insert(key, algorithm);
        }
        let mut all = stored(&self.file);
        all.extend(self.known.clone());
        let text: String = all.iter().map(|(key, a)| line(key, a) + "\n").collect();
        super::cache::replace(&self.file, text.as_bytes());
    }

    /// The GPU and library version, then one line for each choice.
    pub fn used(&self) -> Vec<String> {
        std::iter::once(self.home.clone()).chain(self.used.iter().map(|(key, a)| line(key, a))).collect()
    }

    /// Uses these from now on, whatever the file says. False if they are for another GPU or library version. They may come from an untrusted file: an
    /// algorithm is used only if cuBLASLt itself proposes it (`among`).
    pub fn prefer(&mut self, lines: &[String]) -> bool {
        let ours = lines.first() == Some(&self.home);
        if ours {
            let lines = &lines[1..];
            let sound: Vec<_> = lines.iter().take(MOST).filter_map(|l| parse(l)).collect();
            self.refused += lines.len() - sound.len();
            self.known.extend(sound);
        }
        ours
    }
}

/// More GEMMs than any program has.
const MOST: usize = 1 << 16;

/// A remembered algorithm, if it is among those that cuBLASLt has just proposed for this GEMM: it is never given bytes from elsewhere.
pub fn among(known: Algorithm, candidates: &[Algorithm]) -> Option<Algorithm> {
    candidates.iter().find(|c| **c == known).copied()
}

fn stored(file: &Path) -> BTreeMap<String, Algorithm> {
    let text = super::cache::read(file).and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default();
    text.lines().filter_map(parse).collect()
}

fn line(key: &str, a: &Algorithm) -> String {
    let words: Vec<String> = a.iter().map(|w| format!("{w:016x}")).collect();
    let text = format!("{key} = {}", words.join(" "));
    format!("{text} # {:016x}", super::nvrtc::hash(&text))
}

/// None if the line was truncated or changed.
fn parse(line: &str) -> Option<(String, Algorithm)> {
    let (text, sum) = line.split_once(" # ")?;
    if sum != format!("{:016x}", super::nvrtc::hash(text)) {
        return None;
    }
    let (key, words) = text.split_once(" = ")?;
    let word = |w: &str| (w.len() == 16 && w.bytes().all(|b| b.is_ascii_hexdigit())).then(|| u64::from_str_radix(w, 16).ok()).flatten();
    let words: Vec<u64> = words.split(' ').map(word).collect::<Option<_>>()?;
    Some((key.into(), words.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_come_back_and_a_runs_own_win() {
        let folder = std::env::temp_dir().join(format!("kiln-choices-{}", std::process::id()));
        let mut a = Choices::open(&folder, "Card 1", 7);
        assert_eq!(a.get("x"), None);
        a.add([("x".to_string(), [1; 8])]);
        let kept = a.used();
        let mut b = Choices::open(&folder, "Card 1", 7);
        assert_eq!(b.get("x"), Some([1; 8]));
        b.add([("x".to_string(), [2; 8]), ("y".to_string(), [3; 8])]);
        assert!(b.prefer(&kept));
        assert_eq!((b.get("x"), b.get("y")), (Some([1; 8]), Some([3; 8])));
        // Cut short, as by a full disk: what is whole still counts.
        let file = folder.join("products-Card-1-7.txt");
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, &text[..text.len() - 5]).unwrap();
        let mut c = Choices::open(&folder, "Card 1", 7);
        assert_eq!((c.get("x"), c.get("y")), (Some([2; 8]), None));
        let mut other = Choices::open(&folder, "Card 1", 8);
        assert!(!other.prefer(&kept), "chosen with another version of the library");
        assert_eq!(other.get("x"), None);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn choices_made_by_hand_are_refused_by_form_and_by_what_the_library_has() {
        let folder = std::env::temp_dir().join(format!("kiln-choices-made-{}", std::process::id()));
        let mut a = Choices::open(&folder, "Card 1", 7);
        let whole = line("x", &[1; 8]);
        let (text, sum) = whole.split_once(" # ").unwrap();
        let sealed = |text: &str| format!("{text} # {:016x}", super::super::nvrtc::hash(text));
        let bad = [
            "".to_string(),
            "x".into(),
            format!("{text} # {}", sum.to_uppercase()),
            format!("{} # {sum}", text.replace("1 0", "2 0")),
            sealed("x = 0000000000000001"),
            sealed("x = 1 1 1 1 1 1 1 1"),
            sealed(&format!("x = {}", ["+00000000000000f"; 8].join(" "))),
            sealed(&format!("x = {}", ["zzzzzzzzzzzzzzzz"; 8].join(" "))),
            sealed(&format!("x = {}", ["0000000000000001"; 9].join(" "))),
        ];
        let lines: Vec<String> = std::iter::once("Card-1 7".to_string()).chain(bad.clone()).collect();
        assert!(a.prefer(&lines));
        assert_eq!((a.get("x"), a.refused), (None, bad.len()));
        assert!(!a.prefer(&[]) && !a.prefer(std::slice::from_ref(&whole)), "nobody says what they are for");
        // Of the right form, and yet none of the library's.
        assert!(a.prefer(&["Card-1 7".into(), whole]));
        let known = a.get("x").unwrap();
        assert_eq!((among(known, &[[2; 8], [3; 8]]), among(known, &[[2; 8], [1; 8]]), among(known, &[])), (None, Some([1; 8]), None));
    }
}
