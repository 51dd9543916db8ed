//! CIFAR-10 and CIFAR-100, binary version: records of one or two label bytes and 3072 bytes of picture, [3, 32, 32]; and CIFAR-10 as Python reads it,
//! and torchvision leaves it: pickles.

use std::path::{Path, PathBuf};

use super::pickle::Dict;
use super::{CHANNELS, ImageSet, Read, SIZE};
use crate::data::DataError;
use crate::input;

const PICTURE: usize = CHANNELS * SIZE * SIZE;

pub struct Cifar {
    set: &'static str,
    train: &'static [&'static str],
    test: &'static str,
    /// How many values each label byte of a record has; the last one is the class.
    labels: &'static [u8],
    /// The class names, a line each; and what they are where the file is missing.
    names: &'static str,
    known: &'static [&'static str],
}

pub const CIFAR_10: Cifar = Cifar {
    set: "CIFAR-10",
    train: &["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"],
    test: "test_batch.bin",
    labels: &[10],
    names: "batches.meta.txt",
    known: &["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
};

pub const CIFAR_100: Cifar =
    Cifar { set: "CIFAR-100", train: &["train.bin"], test: "test.bin", labels: &[20, 100], names: "fine_label_names.txt", known: &[] };

impl Cifar {
    /// Whether the folder holds a part of the set. The Python version of CIFAR-100 has the same names without ".bin".
    pub fn is_begun(&self, folder: &Path) -> bool {
        let data = self.train.iter().chain([&self.test]);
        let python = |name: &'static str| if self.known.is_empty() { name.trim_end_matches(".bin") } else { name };
        let mut all = data.flat_map(|name| [name, python(name)]).chain([self.names]);
        all.any(|name| folder.join(name).is_file())
    }

    pub fn open(&self, folder: &Path, size: usize) -> Result<Read, DataError> {
        self.is_of(size)?;
        let classes = self.classes(folder)?;
        let test = self.read(folder, &[self.test], &classes)?;
        Ok(Read { train: self.read(folder, self.train, &classes)?, val: None, test: Some(test) })
    }

    fn is_of(&self, size: usize) -> Result<(), DataError> {
        if size == SIZE {
            return Ok(());
        }
        let need = format!("{} has pictures of {SIZE} pixels a side", self.set);
        Err(DataError::Setting { what: "size", value: size.to_string(), need })
    }

    pub fn class_count(&self) -> usize {
        usize::from(self.labels[self.labels.len() - 1])
    }

    fn missing(&self, path: &Path) -> DataError {
        let files = self.train.iter().chain([&self.test]).chain(self.known.is_empty().then_some(&self.names));
        let files = files.copied().collect::<Vec<_>>().join(", ");
        DataError::Images {
            path: path.into(),
            reason: format!("missing; the binary version of {} is {files} (download and unpack it again)", self.set),
        }
    }

    fn classes(&self, folder: &Path) -> Result<Vec<String>, DataError> {
        let path = folder.join(self.names);
        if !path.exists() {
            return match self.known {
                [] => Err(self.missing(&path)),
                known => Ok(known.iter().map(|name| name.to_string()).collect()),
            };
        }
        let text = input::read_to_string(&path).map_err(DataError::io("read", &path))?;
        let names: Vec<String> = text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect();
        let expected = self.class_count();
        if names.len() != expected {
            let reason = format!("{} class names, {} has {expected} (download and unpack it again)", names.len(), self.set);
            return Err(DataError::Images { path, reason });
        }
        Ok(names)
    }

    /// A file that is cut short between two records is still shorter than the others: pictures of each.
    fn are_alike<'a>(&self, counts: impl Iterator<Item = (&'a PathBuf, usize)> + Clone) -> Result<(), DataError> {
        let most = counts.clone().map(|(_, n)| n).max().unwrap_or(0);
        match counts.into_iter().find(|(_, n)| *n < most) {
            None => Ok(()),
            Some((path, has)) => {
                let reason = format!("{has} pictures, where another file of {} has {most}: it is cut short (download it again)", self.set);
                Err(DataError::Images { path: path.clone(), reason })
            }
        }
    }

    fn read(&self, folder: &Path, files: &[&str], classes: &[String]) -> Result<ImageSet, DataError> {
        let record = self.labels.len() + PICTURE;
        let mut set = ImageSet { size: SIZE, pixels: vec![], labels: vec![], classes: classes.to_vec() };
        let mut all = vec![];
        for name in files {
            let path = folder.join(name);
            if !path.exists() {
                return Err(self.missing(&path));
            }
            let bytes = input::read(&path).map_err(DataError::io("read", &path))?;
            if bytes.is_empty() || bytes.len() % record != 0 {
                return Err(DataError::Records { path, bytes: bytes.len(), record });
            }
            all.push((path, bytes));
        }
        self.are_alike(all.iter().map(|(path, bytes)| (path, bytes.len() / record)))?;
        for (path, bytes) in all {
            for (number, item) in bytes.chunks_exact(record).enumerate() {
                let (labels, picture) = item.split_at(self.labels.len());
                if let Some((&label, &values)) = labels.iter().zip(self.labels).find(|(label, values)| label >= values) {
                    return Err(DataError::Label { path, record: number, label, values });
                }
                set.labels.push(labels[labels.len() - 1].into());
                set.pixels.extend(picture);
            }
        }
        Ok(set)
    }
}

/// CIFAR-10 in pickles: `cifar-10-batches-py`.
const PICKLES: [&str; 5] = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"];
const TEST: &str = "test_batch";
const META: &str = "batches.meta";
/// The folder in which torchvision unpacks it, below the one that it is told.
const BELOW: &str = "cifar-10-batches-py";
/// A batch has 31 MB.
const LARGEST: u64 = 64 << 20;

fn holds_pickles(folder: &Path) -> bool {
    PICKLES.iter().chain([&TEST, &META]).any(|name| folder.join(name).is_file())
}

/// Whether the folder, or torchvision's folder in it, holds a part of the set.
pub fn is_pickled(folder: &Path) -> bool {
    holds_pickles(folder) || holds_pickles(&folder.join(BELOW))
}

pub fn open_pickled(folder: &Path, size: usize) -> Result<Read, DataError> {
    CIFAR_10.is_of(size)?;
    let below = folder.join(BELOW);
    let folder = if holds_pickles(folder) { folder } else { &below };
    let classes = pickled_classes(&folder.join(META))?;
    let read = |names: &[&str]| {
        let mut set = ImageSet { size: SIZE, pixels: vec![], labels: vec![], classes: classes.clone() };
        let mut counts = vec![];
        for name in names {
            let path = folder.join(name);
            let count = add_batch(&path, &pickle(&path)?, &mut set)?;
            counts.push((path, count));
        }
        CIFAR_10.are_alike(counts.iter().map(|(path, count)| (path, *count)))?;
        Ok::<_, DataError>(set)
    };
    Ok(Read { train: read(&PICKLES)?, val: None, test: Some(read(&[TEST])?) })
}

fn pickle(path: &Path) -> Result<Vec<u8>, DataError> {
    if !path.exists() {
        let files = PICKLES.iter().chain([&TEST]).copied().collect::<Vec<_>>().join(", ");
        let reason = format!("missing; the Python version of CIFAR-10 is {files} (download and unpack it again)");
        return Err(DataError::Images { path: path.into(), reason });
    }
    let length = input::open(path).and_then(|file| file.metadata()).map_err(DataError::io("read", path))?.len();
    if length > LARGEST {
        return Err(unlike(path, format!("it has {length} bytes, and such a file at most {LARGEST}")));
    }
    input::read(path).map_err(DataError::io("read", path))
}

fn unlike(path: &Path, problem: String) -> DataError {
    let reason = format!(
        "not a file of CIFAR-10's Python version: {problem} (download it again, or convert it to parquet or a folder for each class)"
    );
    DataError::Images { path: path.into(), reason }
}

fn pickled_classes(path: &Path) -> Result<Vec<String>, DataError> {
    if !path.exists() {
        return Ok(CIFAR_10.known.iter().map(|name| name.to_string()).collect());
    }
    let bytes = pickle(path)?;
    let names = Dict::read(&bytes).and_then(|dict| dict.texts("label_names")).map_err(|problem| unlike(path, problem))?;
    if names.len() != CIFAR_10.class_count() {
        return Err(unlike(path, format!("{} class names, not {}", names.len(), CIFAR_10.class_count())));
    }
    Ok(names.into_iter().map(str::to_owned).collect())
}

/// Adds a file's pictures to a set; how many there are.
fn add_batch(path: &Path, bytes: &[u8], set: &mut ImageSet) -> Result<usize, DataError> {
    let unlike = |problem: String| unlike(path, problem);
    let dict = Dict::read(bytes).map_err(unlike)?;
    let (labels, (shape, pixels)) = (dict.numbers("labels").map_err(unlike)?, dict.array("data").map_err(unlike)?);
    if shape != [labels.len(), PICTURE] || labels.is_empty() {
        let [rows, columns] = shape;
        return Err(unlike(format!("{} labels, and pictures of [{rows}, {columns}] bytes, not [{0}, {PICTURE}]", labels.len())));
    }
    let classes = CIFAR_10.class_count();
    for (number, label) in labels.into_iter().enumerate() {
        let known = u16::try_from(label).ok().filter(|label| usize::from(*label) < classes);
        set.labels.push(known.ok_or_else(|| unlike(format!("picture {number} has the label {label}, which must be below {classes}")))?);
    }
    set.pixels.extend(pixels);
    Ok(shape[0])
}
