//! Labelled square pictures for classifiers: one file a format, each of which reads the splits that a folder has.

mod cifar;
mod folder;
mod generated;
mod parquet;
mod pickle;
mod picture;
pub mod pictures;
mod sheet;

use std::path::Path;
use std::str::FromStr;

use serde::Serialize;

use super::{DataError, Split, hash};

pub use generated::{CLASSES as GENERATED_CLASSES, GENERATED, generate};
pub use picture::read as read_picture;
pub use sheet::{Block, by_class, sheet};

pub const CHANNELS: usize = 3;

/// What a folder of pictures is resized to where nothing else is asked for, and the size of all other sets.
pub const SIZE: usize = 32;

/// One split of a set. Its items keep their order: item i is the same everywhere.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageSet {
    /// Pictures are square, of this many pixels a side.
    pub size: usize,
    /// [n, 3, size, size]
    pub pixels: Vec<u8>,
    /// `[n]`, numbers of `classes`
    pub labels: Vec<u16>,
    pub classes: Vec<String>,
}

impl ImageSet {
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Picture [3, size, size] and label.
    pub fn item(&self, i: usize) -> (&[u8], u16) {
        let bytes = CHANNELS * self.size * self.size;
        (&self.pixels[i * bytes..(i + 1) * bytes], self.labels[i])
    }

    /// Pictures of each class.
    pub fn counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.classes.len()];
        for &label in &self.labels {
            counts[label as usize] += 1;
        }
        counts
    }

    /// A number that changes with anything in the set.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        for n in [self.size, self.len(), self.classes.len()] {
            hash.update(&(n as u64).to_le_bytes());
        }
        for class in &self.classes {
            hash.update(&(class.len() as u64).to_le_bytes());
            hash.update(class.as_bytes());
        }
        for label in engine::mutant!("pictures-known-without-labels", &self.labels[..], &[][..]) {
            hash.update(&label.to_le_bytes());
        }
        hash.update(&self.pixels);
        hash.digest()
    }

    /// For a set without a validation split: about this share, chosen by the items' numbers alone.
    fn split(self, folder: &Path, share: f64) -> Result<(ImageSet, ImageSet), DataError> {
        const SEED: u64 = 0x7661_6c69; // Another seed would be another split: never changed.
        // From 0 to 1, and below 0.1 where the last digit is 0.
        let place = |i: usize| {
            let drawn = hash(&[SEED, i as u64]);
            ((drawn % 10) as f64 + (drawn / 10) as f64 / (u64::MAX / 10 + 1) as f64) / 10.0
        };
        let (val, train): (Vec<usize>, Vec<usize>) = (0..self.len()).partition(|&i| place(i) < share);
        if val.is_empty() || train.is_empty() {
            let reason = format!(
                "a share of {share} of {} pictures is no validation set (add pictures, sort them into train/CLASS/ and val/CLASS/, or set \
                 data.val_share)",
                self.len()
            );
            return Err(DataError::Images { path: folder.into(), reason });
        }
        let pick = |items: &[usize]| ImageSet {
            size: self.size,
            pixels: items.iter().flat_map(|&i| self.item(i).0).copied().collect(),
            labels: items.iter().map(|&i| self.labels[i]).collect(),
            classes: self.classes.clone(),
        };
        Ok((pick(&train), pick(&val)))
    }
}

/// The share of the training pictures that is kept for validation, where nothing else is asked for.
pub const VAL_SHARE: f64 = 0.1;

/// What a folder holds.
pub struct Read {
    train: ImageSet,
    val: Option<ImageSet>,
    test: Option<ImageSet>,
}

/// What is learned from, what validates it on the way, and what nothing is chosen by.
#[derive(Debug, Clone, PartialEq)]
pub struct Sets {
    pub train: ImageSet,
    pub val: ImageSet,
    pub test: Option<ImageSet>,
}

impl Sets {
    /// (its name, the set) of each.
    pub fn named(&self) -> Vec<(&'static str, &ImageSet)> {
        let own = [(Split::Train.name(), &self.train), (Split::Val.name(), &self.val)];
        own.into_iter().chain(self.test.iter().map(|set| (TEST, set))).collect()
    }
}

/// What the third split is called.
pub const TEST: &str = "test";

/// Pixels a side of the largest pictures.
const MOST_SIDE: usize = 512;

/// Whether pictures can be read in this size.
fn checked_size(size: usize) -> Result<(), DataError> {
    match (1..=MOST_SIDE).contains(&size) {
        true => Ok(()),
        false => {
            Err(DataError::Setting { what: "size", value: size.to_string(), need: format!("pictures have 1 to {MOST_SIDE} pixels a side") })
        }
    }
}

/// How a set is recognised and read: one file, and one line of `FORMATS`.
#[derive(Debug, Clone, Copy)]
pub struct Format {
    pub name: &'static str,
    /// From the names in a folder. A part of a set is enough: `open` then says what is missing.
    is_begun: fn(&Path) -> bool,
    /// The splits that it has; only pictures in files of their own or in parquet can be resized.
    open: fn(&Path, usize) -> Result<Read, DataError>,
    /// How many classes it has, found without reading pixels.
    classes: fn(&Path) -> Result<usize, DataError>,
    /// The side of its pictures, where all are squares of one size; found without reading pixels.
    side: fn(&Path) -> Result<Option<usize>, DataError>,
}

macro_rules! cifar {
    ($name:literal, $set:ident) => {
        Format {
            name: $name,
            is_begun: |folder| cifar::$set.is_begun(folder),
            open: |folder, size| cifar::$set.open(folder, size),
            classes: |_| Ok(cifar::$set.class_count()),
            side: |_| Ok(Some(SIZE)),
        }
    };
}

pub const FORMATS: &[Format] = &[
    cifar!("cifar-10", CIFAR_10),
    Format {
        name: "cifar-10-python",
        is_begun: cifar::is_pickled,
        open: cifar::open_pickled,
        classes: |_| Ok(cifar::CIFAR_10.class_count()),
        side: |_| Ok(Some(SIZE)),
    },
    cifar!("cifar-100", CIFAR_100),
    Format { name: "parquet", is_begun: parquet::is_begun, open: parquet::open, classes: parquet::classes, side: parquet::side },
    Format { name: "folder", is_begun: folder::is_begun, open: folder::open, classes: folder::classes, side: folder::side },
];

impl Format {
    pub fn detect(folder: &Path) -> Option<Format> {
        FORMATS.iter().find(|format| (format.is_begun)(folder)).copied()
    }
}

impl FromStr for Format {
    type Err = DataError;

    fn from_str(name: &str) -> Result<Format, DataError> {
        FORMATS.iter().find(|format| format.name == name).copied().ok_or_else(|| DataError::Setting {
            what: "format",
            value: name.into(),
            need: format!("one of {}", FORMATS.iter().map(|f| f.name).collect::<Vec<_>>().join(", ")),
        })
    }
}

/// The splits of a folder, whose format is detected where none is named. `size` is what pictures are resized to; CIFAR is 32 pixels wide. Where there is no
/// validation split, it is this share of the training pictures; a share of 0: the test split.
pub fn open(folder: &Path, format: Option<Format>, size: usize, val_share: f64) -> Result<Sets, DataError> {
    let Read { train, val, test } = (format.map_or_else(|| detected(folder), Ok)?.open)(folder, size)?;
    match (val, test) {
        (Some(val), test) => Ok(Sets { train, val, test }),
        (None, Some(test)) if val_share == 0.0 => Ok(Sets { train, val: test, test: None }),
        (None, test) => {
            let (train, val) = train.split(folder, val_share)?;
            Ok(Sets { train, val, test })
        }
    }
}

/// How many classes the set in a folder has; its pictures are not read.
pub fn classes(folder: &Path) -> Result<usize, DataError> {
    (detected(folder)?.classes)(folder)
}

/// The side of a set's pictures, where all are squares of one size.
pub fn side(folder: &Path) -> Result<Option<usize>, DataError> {
    (detected(folder)?.side)(folder)
}

fn detected(folder: &Path) -> Result<Format, DataError> {
    if folder.is_file() {
        let reason = "is a file: pictures are read from a folder that has one for each class (photos/cat/..), from one of parquet files, or from CIFAR's";
        return Err(DataError::Images { path: folder.into(), reason: reason.into() });
    }
    std::fs::read_dir(folder).map_err(DataError::io("list", folder))?;
    Format::detect(folder).ok_or_else(|| DataError::Images {
        path: folder.into(),
        reason: "holds no pictures: neither CIFAR-10 or CIFAR-100 nor parquet files with pictures nor a folder for each class (name the folder that holds \
                 them itself)"
            .into(),
    })
}

/// What `kiln data inspect` tells of a folder of pictures.
#[derive(Debug, Clone, Serialize)]
pub struct ImageInspection {
    pub format: &'static str,
    pub size: usize,
    pub classes: Vec<ClassInfo>,
    pub train: ImageSplitInfo,
    pub val: ImageSplitInfo,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test: Option<ImageSplitInfo>,
}

#[derive(Debug, Clone, Serialize)]
pub struct ClassInfo {
    pub name: String,
    pub train: usize,
    pub val: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test: Option<usize>,
}

#[derive(Debug, Clone, Serialize)]
pub struct ImageSplitInfo {
    pub pictures: usize,
    pub fingerprint: u64,
}

/// The same with pictures that are read at this size.
pub fn inspect(folder: &Path, format: Format, size: usize) -> Result<ImageInspection, DataError> {
    let Sets { train, val, test } = open(folder, Some(format), size, VAL_SHARE)?;
    let (learned, validated, tested) = (train.counts(), val.counts(), test.as_ref().map(ImageSet::counts));
    let info = |set: &ImageSet| ImageSplitInfo { pictures: set.len(), fingerprint: set.fingerprint() };
    let class = |(i, name): (usize, &String)| ClassInfo {
        name: name.clone(),
        train: learned[i],
        val: validated[i],
        test: tested.as_ref().map(|counts| counts[i]),
    };
    Ok(ImageInspection {
        format: format.name,
        size: train.size,
        train: info(&train),
        val: info(&val),
        test: test.as_ref().map(info),
        classes: train.classes.iter().enumerate().map(class).collect(),
    })
}
