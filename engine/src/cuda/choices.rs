//! Which algorithm each product uses, chosen by timing: remembered on disk, and by whoever wants the same bits again.

use super::gemm::Algorithm;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub struct Choices {
    known: BTreeMap<String, Algorithm>,
    /// What this process asked for.
    used: BTreeMap<String, Algorithm>,
    file: PathBuf,
    /// What they are good for.
    home: String,
}

impl Choices {
    /// The file's name says what the choices depend on: card and library. A file that is not there or damaged is an empty one.
    pub fn open(folder: &Path, card: &str, library: usize) -> Choices {
        let card: String = card.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let file = folder.join(format!("products-{card}-{library}.txt"));
        let known = std::fs::read_to_string(&file).map_or_else(|_| BTreeMap::new(), |text| text.lines().filter_map(parse).collect());
        Choices { known, used: BTreeMap::new(), file, home: format!("{card} {library}") }
    }

    pub fn get(&mut self, key: &str) -> Option<Algorithm> {
        let found = *self.known.get(key)?;
        self.used.insert(key.into(), found);
        Some(found)
    }

    /// Takes new choices in and writes the file anew, with what others have written in the meantime.
    pub fn add(&mut self, new: impl IntoIterator<Item = (String, Algorithm)>) {
        for (key, algorithm) in new {
            self.used.insert(key.clone(), algorithm);
            self.known.insert(key, algorithm);
        }
        let others = std::fs::read_to_string(&self.file).unwrap_or_default();
        let mut all: BTreeMap<String, Algorithm> = others.lines().filter_map(parse).collect();
        all.extend(self.known.clone());
        let text: String = all.iter().map(|(key, a)| line(key, a) + "\n").collect();
        super::nvrtc::replace(&self.file, text.as_bytes());
    }

    /// For which card and library, then one line a choice.
    pub fn used(&self) -> Vec<String> {
        std::iter::once(self.home.clone()).chain(self.used.iter().map(|(key, a)| line(key, a))).collect()
    }

    /// From now on these, whatever the disk says. False where they are for another card or library, and mean nothing here.
    pub fn prefer(&mut self, lines: &[String]) -> bool {
        let ours = lines.first() == Some(&self.home);
        if ours {
            self.known.extend(lines.iter().filter_map(|l| parse(l)));
        }
        ours
    }
}

fn line(key: &str, a: &Algorithm) -> String {
    let words: Vec<String> = a.iter().map(|w| format!("{w:016x}")).collect();
    let text = format!("{key} = {}", words.join(" "));
    format!("{text} # {:016x}", super::nvrtc::hash(&text))
}

/// None where the line was cut or changed.
fn parse(line: &str) -> Option<(String, Algorithm)> {
    let (text, sum) = line.split_once(" # ")?;
    if sum != format!("{:016x}", super::nvrtc::hash(text)) {
        return None;
    }
    let (key, words) = text.split_once(" = ")?;
    let word = |w: &str| (w.len() == 16).then(|| u64::from_str_radix(w, 16).ok()).flatten();
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
}
