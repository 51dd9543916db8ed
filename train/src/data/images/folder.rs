//! Pictures sorted into folders: FOLDER/train/CLASS/*.png and FOLDER/val/CLASS/*.png, perhaps FOLDER/test/CLASS/*.png; or FOLDER/CLASS/*.png.

use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::{CHANNELS, ImageSet, MOST_SIDE, Read, Split, TEST, checked_size, picture};
use crate::data::DataError;

pub fn is_begun(folder: &Path) -> bool {
    list(folder).is_ok_and(|paths| paths.iter().any(|path| path.is_dir()))
}

pub fn open(folder: &Path, size: usize) -> Result<Read, DataError> {
    checked_size(size)?;
    let [train, val] = Split::ALL.map(|split| folder.join(split.name()));
    let test = folder.join(TEST);
    if !train.is_dir() {
        return match [&val, &test].into_iter().find(|path| path.is_dir()) {
            None => Ok(Read { train: read(folder, size)?, val: None, test: None }),
            Some(other) => {
                let name = other.file_name().unwrap_or_default().to_string_lossy();
                Err(problem(
                    &train,
                    format!("missing, but there is a {name} folder (add the training pictures as train/CLASS/, or rename {name})"),
                ))
            }
        };
    }
    let train_set = read(&train, size)?;
    let beside = |path: &Path| -> Result<Option<ImageSet>, DataError> {
        if !path.is_dir() {
            return Ok(None);
        }
        let set = read(path, size)?;
        for (here, classes, there, others) in
            [(&*train, &train_set.classes, path, &set.classes), (path, &set.classes, &*train, &train_set.classes)]
        {
            if let Some(class) = classes.iter().find(|class| !others.contains(class)) {
                let reason = format!("missing, but {} is there (all splits need the same classes)", here.join(class).display());
                return Err(problem(&there.join(class), reason));
            }
        }
        Ok(Some(set))
    };
    let (val, test) = (beside(&val)?, beside(&test)?);
    Ok(Read { train: train_set, val, test })
}

fn problem(path: &Path, reason: impl Into<String>) -> DataError {
    DataError::Images { path: path.into(), reason: reason.into() }
}

/// What a folder holds, without hidden files, sorted by name: the order of the system's own listing is another on every machine.
fn list(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(DataError::io("list", folder))? {
        let entry = entry.map_err(DataError::io("list", folder))?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// The class folders of the training split.
fn to_learn(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let train = folder.join(Split::Train.name());
    class_folders(if train.is_dir() { &train } else { folder })
}

/// How many classes there are to learn.
pub fn classes(folder: &Path) -> Result<usize, DataError> {
    Ok(to_learn(folder)?.len())
}

/// The side of the pictures to learn from, where all are squares of one size that pictures may have. What cannot be read is for `open` to report.
pub fn side(folder: &Path) -> Result<Option<usize>, DataError> {
    let mut side = None;
    for path in to_learn(folder)?.iter().map(|class| list(class)).collect::<Result<Vec<_>, _>>()?.concat() {
        match picture::dimensions(&path) {
            Some((width, height)) if width == height && width <= MOST_SIDE && *side.get_or_insert(width) == width => {}
            _ => return Ok(None),
        }
    }
    Ok(side)
}

fn class_folders(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut folders = list(folder)?;
    folders.retain(|path| path.is_dir());
    if !(2..=1 << 16).contains(&folders.len()) {
        let reason = format!("holds {} folders; pictures are sorted into one for each class, at least two", folders.len());
        return Err(problem(folder, reason));
    }
    Ok(folders)
}

/// A folder of classes.
fn read(folder: &Path, size: usize) -> Result<ImageSet, DataError> {
    let folders = class_folders(folder)?;
    let (mut classes, mut files, mut labels) = (Vec::new(), Vec::new(), Vec::new());
    for path in folders {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| problem(&path, "the class name is not UTF-8 (rename the folder)"))?;
        let pictures = list(&path)?;
        if pictures.is_empty() {
            return Err(problem(&path, "this class has no pictures (add .png or .jpg files, or remove the folder)"));
        }
        // At most 2^16 classes.
        labels.resize(labels.len() + pictures.len(), classes.len() as u16);
        classes.push(name.to_owned());
        files.extend(pictures);
    }
    let bytes = CHANNELS * size * size;
    let mut pixels = Vec::new();
    // A size that is too large for the number of pictures is an error, not the end of the process.
    if pixels.try_reserve_exact(files.len() * bytes).is_err() {
        return Err(problem(folder, format!("{} pictures of {size} pixels a side do not fit in memory (use a smaller size)", files.len())));
    }
    pixels.resize(files.len() * bytes, 0);
    pixels.par_chunks_mut(bytes).zip(&files).try_for_each(|(out, path)| {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
        if !["png", "jpg", "jpeg"].contains(&extension.as_str()) {
            return Err(problem(path, "neither .png nor .jpg (convert it, or remove it)"));
        }
        picture::read(path, size, out)
    })?;
    Ok(ImageSet { size, pixels, labels, classes })
}
