//! CIFAR-10 and CIFAR-100, binary version: records of one or two label bytes and 3072 bytes of picture, [3, 32, 32].

use std::path::Path;

use super::{CHANNELS, ImageSet, SIZE};
use crate::data::DataError;
use crate::input;

const PICTURE: usize = CHANNELS * SIZE * SIZE;

pub struct Cifar {
    set: &'static str,
    train: &'static [&'static str],
    val: &'static str,
    /// How many values each label byte of a record has; the last one is the class.
    labels: &'static [u8],
    /// The class names, a line each; and what they are where the file is missing.
    names: &'static str,
    known: &'static [&'static str],
}

pub const CIFAR_10: Cifar = Cifar {
    set: "CIFAR-10",
    train: &["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"],
    val: "test_batch.bin",
    labels: &[10],
    names: "batches.meta.txt",
    known: &["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
};

pub const CIFAR_100: Cifar =
    Cifar { set: "CIFAR-100", train: &["train.bin"], val: "test.bin", labels: &[20, 100], names: "fine_label_names.txt", known: &[] };

impl Cifar {
    /// Whether the folder holds a part of the set. The Python version has the same names without ".bin".
    pub fn is_begun(&self, folder: &Path) -> bool {
        let data = self.train.iter().chain([&self.val]);
        let mut all = data.flat_map(|name| [name, name.trim_end_matches(".bin")]).chain([self.names]);
        all.any(|name| folder.join(name).is_file())
    }

    pub fn open(&self, folder: &Path, size: usize) -> Result<(ImageSet, ImageSet), DataError> {
        if size != SIZE {
            let need = format!("{} has pictures of {SIZE} pixels a side", self.set);
            return Err(DataError::Setting { what: "size", value: size.to_string(), need });
        }
        let classes = self.classes(folder)?;
        Ok((self.read(folder, self.train, &classes)?, self.read(folder, &[self.val], &classes)?))
    }

    pub fn class_count(&self) -> usize {
        usize::from(self.labels[self.labels.len() - 1])
    }

    fn missing(&self, path: &Path) -> DataError {
        let files = self.train.iter().chain([&self.val]).chain(self.known.is_empty().then_some(&self.names));
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
        // A file that is cut short between two records is still shorter than the others.
        let longest = all.iter().map(|(_, bytes)| bytes.len()).max().unwrap_or(0);
        if let Some((path, bytes)) = all.iter().find(|(_, bytes)| bytes.len() < longest) {
            let (has, others) = (bytes.len() / record, longest / record);
            let reason = format!("{has} pictures, where another file of {} has {others}: it is cut short (download it again)", self.set);
            return Err(DataError::Images { path: path.clone(), reason });
        }
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
