//! Folders that `kiln data prepare` made, read together: their windows are one set, or a mixture by weight.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::dataset::MOST_OPEN;
use super::paths::{Chosen, Paths, fingerprint};
use super::{DataError, Dataset, ShardSet, Source, Split, Tokenizer, joined};

/// At least one folder; all were made with the same tokenizer.
pub struct Prepared {
    chosen: Chosen,
    datasets: Vec<(PathBuf, Dataset)>,
}

impl Prepared {
    pub fn open(paths: &Paths) -> Result<Prepared, DataError> {
        Prepared::of(paths.find()?)
    }

    pub fn of(chosen: Chosen) -> Result<Prepared, DataError> {
        let open = |path: &PathBuf| Ok((path.clone(), Dataset::open(path)?));
        let datasets: Vec<(PathBuf, Dataset)> = chosen.paths().map(open).collect::<Result<_, DataError>>()?;
        let Some((first, own)) = datasets.first() else {
            return Err(DataError::Setting { what: "data.path", value: chosen.to_string(), need: "name at least one folder".into() });
        };
        for (path, other) in &datasets[1..] {
            let ids = |d: &Dataset| {
                [&d.eos, engine::mutant!("other-beginnings-of-documents", &d.bos, &d.eos)].map(|noted| noted.as_ref().map(|noted| noted.id))
            };
            let what = match () {
                () if own.fingerprint != other.fingerprint => "another tokenizer",
                // Those of earlier versions do not say.
                () if ids(own).iter().zip(ids(other)).any(|(a, b)| a.is_some() && b.is_some() && *a != b) => {
                    "other tokens that end or begin documents (--eos, --bos)"
                }
                () => continue,
            };
            return Err(DataError::Together { path: path.clone(), what, first: first.clone() });
        }
        Ok(Prepared { chosen, datasets })
    }

    pub fn tokenizer(&self) -> Result<Tokenizer, DataError> {
        // Where some do not say how documents begin and end, another does.
        let says = |d: &Dataset| d.eos.is_some();
        let (path, dataset) = engine::mutant!("tokenizer-of-the-first-folder", self.datasets.iter().find(|(_, d)| says(d)), None)
            .unwrap_or(&self.datasets[0]);
        dataset.load_tokenizer(path)
    }

    /// A number that changes with the tokens, with their order and with the weights of a mixture. Of one folder it is the folder's own.
    pub fn checksum(&self) -> Result<u64, DataError> {
        let parts = self.parts().map(|own| {
            let checksums: Vec<u64> = own.iter().map(|(path, dataset)| dataset.checksum(path)).collect::<Result<_, _>>()?;
            Ok(fingerprint(&checksums))
        });
        self.chosen.fingerprint(&parts.collect::<Result<Vec<_>, DataError>>()?)
    }

    /// The folders of each part.
    fn parts(&self) -> impl Iterator<Item = &[(PathBuf, Dataset)]> {
        let mut rest = &self.datasets[..];
        self.chosen.parts.iter().map(move |part| {
            let (own, others) = rest.split_at(part.paths.len());
            rest = others;
            own
        })
    }

    /// What there is of a split, in tokens.
    pub fn tokens(&self, split: Split) -> u64 {
        self.datasets.iter().map(|(_, dataset)| dataset.split(split).tokens).sum()
    }

    /// The fewest tokens that a folder has in a split, where it has any.
    pub fn fewest(&self, split: Split) -> Option<u64> {
        self.datasets.iter().map(|(_, dataset)| dataset.split(split).tokens).filter(|n| *n > 0).min()
    }

    /// Whether parts are mixed by weight, so that there are no epochs.
    pub fn is_mixture(&self) -> bool {
        self.chosen.is_mixture()
    }

    /// For people: the folders, and the share of each part.
    pub fn describe(&self) -> String {
        self.chosen.to_string()
    }

    /// Why there is nothing to validate with, where that is so.
    pub fn without_validation(&self) -> Option<String> {
        let makes = "prepared without a validation split (kiln data prepare --val-share 0.05 makes one)";
        let were = if self.datasets.len() == 1 { "was" } else { "were" };
        (self.tokens(Split::Val) == 0)
            .then(|| format!("{} {were} {makes}", self.chosen.parts.iter().map(|p| p.name.as_str()).collect::<Vec<_>>().join(", ")))
    }

    /// A split of all folders, each in windows of its own. Folders without one are left out, where others have one.
    pub fn source(
        &self,
        split: Split,
        seed: u64,
        windows: &dyn Fn(ShardSet) -> Result<Arc<dyn Source>, DataError>,
    ) -> Result<Arc<dyn Source>, DataError> {
        let most = (MOST_OPEN / self.datasets.len()).max(1);
        let open = |(path, _): &(PathBuf, Dataset)| windows(ShardSet::open_some(path, split, most)?);
        let none = |dataset: &Dataset| split == Split::Val && dataset.val.tokens == 0;
        let mut parts = vec![];
        for own in self.parts() {
            let sources: Vec<_> = own.iter().filter(|(_, d)| !none(d)).map(open).collect::<Result<_, _>>()?;
            parts.extend((!sources.is_empty()).then(|| joined(sources)));
        }
        if parts.is_empty() {
            // Says that it is empty.
            return open(&self.datasets[0]);
        }
        self.chosen.source(split, seed, parts)
    }

    /// The folder, where it is one.
    pub fn first(&self) -> &Path {
        &self.datasets[0].0
    }
}

#[cfg(test)]
mod tests {
    use super::super::dataset::tests::write_set;
    use super::super::{Noted, TokenWindows};
    use super::*;
    use std::fs;

    fn open(dir: &Path, entries: &[&str]) -> Result<Prepared, DataError> {
        let all: Vec<String> = entries.iter().map(|entry| dir.join(entry).display().to_string()).collect();
        Prepared::open(&Paths::from(all))
    }

    fn ids(prepared: &Prepared, split: Split, items: std::ops::Range<u64>) -> Vec<Vec<i32>> {
        let source = prepared.source(split, 5, &|set| Ok(Arc::new(TokenWindows::new(set, 4, vec![])?))).unwrap();
        items.map(|i| source.item(i).unwrap().ids).collect()
    }

    fn change(dir: &Path, of: impl Fn(&mut Dataset)) {
        let mut dataset = Dataset::open(dir).unwrap();
        of(&mut dataset);
        fs::write(dir.join(Dataset::FILE), serde_json::to_string(&dataset).unwrap()).unwrap();
    }

    #[test]
    fn windows_of_several_folders_are_one_set_or_a_mixture() {
        let dir = tempfile::tempdir().unwrap();
        for (name, tokens) in [("a", 9), ("b", 14)] {
            fs::create_dir(dir.path().join(name)).unwrap();
            write_set(&dir.path().join(name), tokens, 5);
        }
        let both = open(dir.path(), &["a", "b"]).unwrap();
        let first = |starts: &[i32]| starts.iter().map(|s| (*s..s + 4).collect()).collect::<Vec<Vec<i32>>>();
        // 9 tokens are two windows and the target of the last; no window goes on in the next folder.
        assert_eq!(ids(&both, Split::Train, 0..5), first(&[0, 4, 0, 4, 8]));
        assert_eq!((both.tokens(Split::Train), both.fewest(Split::Train), both.is_mixture()), (23, Some(9), false));
        assert!(both.without_validation().unwrap().contains("/b were prepared without"), "{:?}", both.without_validation());
        assert_eq!(ids(&open(dir.path(), &["?"]).unwrap(), Split::Train, 0..5), first(&[0, 4, 0, 4, 8]), "by a pattern");

        let mixed = open(dir.path(), &["a:3", "b:1"]).unwrap();
        assert!(mixed.is_mixture() && mixed.describe().starts_with("75% "), "{}", mixed.describe());
        let all = ids(&mixed, Split::Train, 0..400);
        assert_eq!(all.iter().filter(|ids| ids[0] == 8).count().abs_diff(33), 0, "a third of b's quarter");
        let checksums = [both.checksum(), mixed.checksum(), open(dir.path(), &["a"]).unwrap().checksum()].map(Result::unwrap);
        assert_eq!(
            checksums[2],
            Dataset::open(&dir.path().join("a")).unwrap().checksum(&dir.path().join("a")).unwrap(),
            "as it was noted before"
        );
        assert!(checksums[0] != checksums[1] && checksums[0] != checksums[2]);
    }

    #[test]
    fn folders_of_other_tokenizers_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["a", "b"] {
            fs::create_dir(at(name)).unwrap();
            write_set(&at(name), 9, 5);
        }
        let noted = |id| Some(Noted { id, from: "x".into() });
        let error = || open(dir.path(), &["a", "b"]).err().map_or(String::new(), |e| e.to_string());
        change(&at("b"), |d| d.eos = noted(Some(3)));
        assert_eq!(error(), "", "an earlier version's does not say");
        change(&at("a"), |d| d.eos = noted(None));
        assert!(error().contains("b was prepared with other tokens that end or begin documents"), "{}", error());
        change(&at("b"), |d| d.fingerprint = 8);
        let said = error();
        assert!(said.contains("b was prepared with another tokenizer than") && said.contains("prepare one of them again"), "{said}");
        fs::write(at("c.jsonl"), "{}").unwrap();
        let chosen = |names: &[&str]| Paths::from(names.iter().map(|n| at(n).display().to_string()).collect::<Vec<_>>()).find().unwrap();
        for names in [&["a", "c.jsonl"], &["a:1", "c.jsonl:1"]] {
            let said = chosen(names).prepared().unwrap_err().to_string();
            assert!(said.contains("c.jsonl: is no folder that kiln data prepare made"), "{said}");
        }
    }

    #[test]
    fn where_documents_begin_and_end_is_said_by_any_folder_that_knows() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["a", "b"] {
            fs::create_dir(at(name)).unwrap();
            write_set(&at(name), 9, 5);
            let json = at(name).join("tokenizer.json");
            super::super::tokenizer::tests::write_json(&json);
            let fingerprint = Tokenizer::from_spec(&json.display().to_string()).unwrap().fingerprint();
            change(&at(name), |d| (d.tokenizer, d.fingerprint) = ("tokenizer.json".into(), fingerprint));
        }
        let noted = |id| Some(Noted { id: Some(id), from: "x".into() });
        let end = |id| {
            // One of an earlier version does not say.
            change(&at("a"), |d| d.eos = None);
            change(&at("b"), |d| d.eos = noted(id));
            open(dir.path(), &["a", "b"]).unwrap().tokenizer().unwrap().eos()
        };
        assert_eq!([1, 2].map(end), [Some(1), Some(2)]);
        change(&at("a"), |d| (d.eos, d.bos) = (noted(2), noted(4)));
        change(&at("b"), |d| d.bos = noted(5));
        let said = open(dir.path(), &["a", "b"]).err().unwrap().to_string();
        assert!(said.contains("b was prepared with other tokens that end or begin documents"), "{said}");
    }
}
