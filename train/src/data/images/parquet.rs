//! Pictures in parquet files, as Hugging Face's data sets have them: a column of structs {bytes, path}, each with a picture file's bytes, and one of labels.
//! The names of files say of which split they are: train-00000-of-00001.parquet, validation-.., test-...

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use super::{CHANNELS, ImageSet, Read, checked_size, picture};
use crate::data::DataError;
use crate::data::chats::{Columns, Head, each_picture};

/// Where files are in a folder as it is downloaded.
const PLACES: [&str; 3] = ["", "data", "plain_text"];
/// Columns that are labels, the first that is there.
const LABELS: [&str; 3] = ["label", "labels", "fine_label"];
/// Labels are numbers below it.
const CLASSES: i64 = 1 << 16;
/// Pictures that are decoded at once, and bytes of them that wait for it.
const TOGETHER: (usize, usize) = (1024, 64 << 20);
/// The first pictures, by which a set's size is found.
const LOOKED_AT: usize = 64;

/// The files of each split.
#[derive(Default)]
struct Files {
    train: Vec<PathBuf>,
    val: Vec<PathBuf>,
    test: Vec<PathBuf>,
}

impl Files {
    fn of(folder: &Path) -> Result<Files, DataError> {
        let all = PLACES.iter().map(|place| list(&folder.join(place))).find(|files| !files.is_empty()).unwrap_or_default();
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let any_train = all.iter().any(|path| name(path).starts_with("train"));
        let mut files = Files::default();
        for path in all {
            match name(&path) {
                n if n.starts_with("test") => files.test.push(path),
                n if n.starts_with("val") || n.starts_with("dev") => files.val.push(path),
                n if n.starts_with("train") || !any_train => files.train.push(path),
                n => {
                    let reason = format!("the name {n:?} does not say of which split it is (train-.., validation-.. or test-..)");
                    return Err(DataError::Images { path, reason });
                }
            }
        }
        if files.train.is_empty() {
            return Err(problem(folder, "holds no parquet file to learn from (train-00000-of-00001.parquet)"));
        }
        Ok(files)
    }
}

fn problem(path: &Path, reason: impl Into<String>) -> DataError {
    DataError::Images { path: path.into(), reason: reason.into() }
}

/// Files that are called parquet, sorted by name.
fn list(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut all: Vec<PathBuf> = entries.filter(|path| path.extension().is_some_and(|e| e == "parquet") && path.is_file()).collect();
    all.sort();
    all
}

/// Where pictures and labels are in a file, and what its classes are called, if it says so.
#[derive(Clone, Debug, PartialEq)]
struct Layout {
    picture: String,
    label: String,
    names: Option<Vec<String>>,
}

impl Layout {
    fn of(head: &Head) -> Result<Layout, String> {
        let names: Vec<&str> = head.columns.iter().map(|(name, _)| &name[..]).collect();
        let picture = head.columns.iter().find(|(_, is_picture)| *is_picture).map(|(name, _)| name.clone());
        let picture = picture.ok_or_else(|| format!("no column of pictures (structs of bytes and path) among {names:?}"))?;
        let label = LABELS.iter().find(|label| names.contains(label));
        let label = label.ok_or_else(|| format!("no column of labels ({}) among {names:?}", LABELS.join(", ")))?.to_string();
        let noted: serde_json::Value = serde_json::from_str(&head.noted).unwrap_or_default();
        let named = noted["info"]["features"][&label]["names"].as_array();
        let named = named.and_then(|all| all.iter().map(|name| name.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>());
        Ok(Layout { picture, label, names: named.filter(|names| (1..=CLASSES as usize).contains(&names.len())) })
    }

    fn of_file(path: &Path) -> Result<Layout, DataError> {
        let mut found = Err("it says nothing of itself".into());
        each_picture(
            path,
            None,
            &mut |head| {
                found = Layout::of(&head);
                ControlFlow::Break(())
            },
            &mut |_| Ok(ControlFlow::Break(())),
        )?;
        found.map_err(|reason| problem(path, reason))
    }

    /// Rows of these columns: a picture's bytes, where they are asked for, and its label.
    fn each(
        &self,
        path: &Path,
        pictures: bool,
        visit: &mut dyn FnMut(u64, Vec<u8>, i64) -> Result<ControlFlow<()>, DataError>,
    ) -> Result<(), DataError> {
        let names = if pictures { vec![&self.picture[..], &self.label] } else { vec![&self.label[..]] };
        let columns = Columns { required: names.clone(), all: names, what: "pictures and labels".into() };
        let mut failed = None;
        each_picture(path, Some(&columns), &mut |_| ControlFlow::Continue(()), &mut |row| {
            let label = row.value.get_attr(&self.label).ok().and_then(|v| i64::try_from(v).ok()).filter(|l| (0..CLASSES).contains(l));
            let label = label.ok_or_else(|| row.error(format!("its {:?} is no number from 0 to {}", self.label, CLASSES - 1)))?;
            let bytes = match pictures {
                true => row.value.get_attr(&self.picture).and_then(|v| v.get_attr("bytes")).ok(),
                false => None,
            };
            let bytes = bytes.as_ref().and_then(|v| v.as_bytes()).map(<[u8]>::to_vec);
            if pictures && bytes.is_none() {
                let reason = "has no bytes of a picture (embed the files: datasets' push_to_hub and to_parquet do)";
                return Err(row.error(format!("its {:?} {reason}", self.picture)));
            }
            Ok(visit(row.number, bytes.unwrap_or_default(), label).unwrap_or_else(|e| {
                failed = Some(e);
                ControlFlow::Break(())
            }))
        })?;
        failed.map_or(Ok(()), Err)
    }
}

/// Chats may be in parquet files as well: the first one is asked. Of one that cannot be read, `open` says why.
pub fn is_begun(folder: &Path) -> bool {
    let first = PLACES.iter().find_map(|place| list(&folder.join(place)).into_iter().next());
    first.is_some_and(|path| {
        let mut pictures = true;
        let found = each_picture(
            &path,
            None,
            &mut |head| {
                pictures = head.columns.iter().any(|(_, is_picture)| *is_picture);
                ControlFlow::Break(())
            },
            &mut |_| Ok(ControlFlow::Break(())),
        );
        found.is_err() || pictures
    })
}

/// The layout of a set, with the names of its classes, or their numbers.
fn layout(files: &Files) -> Result<(Layout, Vec<String>), DataError> {
    let layout = Layout::of_file(&files.train[0])?;
    if let Some(names) = &layout.names {
        return Ok((layout.clone(), names.clone()));
    }
    let mut most = 0;
    for path in files.train.iter().chain(&files.val).chain(&files.test) {
        layout.each(path, false, &mut |_, _, label| {
            most = most.max(label);
            Ok(ControlFlow::Continue(()))
        })?;
    }
    Ok((layout, (0..=most).map(|label| label.to_string()).collect()))
}

pub fn classes(folder: &Path) -> Result<usize, DataError> {
    Ok(layout(&Files::of(folder)?)?.1.len())
}

/// The side of the first pictures, where they are squares of one size.
pub fn side(folder: &Path) -> Result<Option<usize>, DataError> {
    let files = Files::of(folder)?;
    let (layout, mut side, mut seen) = (Layout::of_file(&files.train[0])?, None, 0);
    layout.each(&files.train[0], true, &mut |_, bytes, _| {
        seen += 1;
        let same = picture::dimensions_of(&bytes).is_some_and(|(w, h)| w == h && checked_size(w).is_ok() && *side.get_or_insert(w) == w);
        if !same {
            side = None;
        }
        Ok(if same && seen < LOOKED_AT { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
    })?;
    Ok(side)
}

pub fn open(folder: &Path, size: usize) -> Result<Read, DataError> {
    checked_size(size)?;
    let files = Files::of(folder)?;
    let (layout, classes) = layout(&files)?;
    let read = |paths: &[PathBuf]| (!paths.is_empty()).then(|| read(paths, &layout, &classes, size)).transpose();
    let train = read(&files.train)?.ok_or_else(|| problem(folder, "holds nothing to learn from"))?;
    Ok(Read { train, val: read(&files.val)?, test: read(&files.test)? })
}

fn read(paths: &[PathBuf], layout: &Layout, classes: &[String], size: usize) -> Result<ImageSet, DataError> {
    let mut set = ImageSet { size, pixels: vec![], labels: vec![], classes: classes.to_vec() };
    for path in paths {
        let (mut waiting, mut bytes) = (vec![], 0);
        layout.each(path, true, &mut |row, picture, label| {
            if label >= classes.len() as i64 {
                let reason = format!("row {row} has the label {label}, which must be below {} (the classes that it names)", classes.len());
                return Err(problem(path, reason));
            }
            set.labels.push(label as u16);
            bytes += picture.len();
            waiting.push((row, picture));
            if waiting.len() >= TOGETHER.0 || bytes >= TOGETHER.1 {
                decode(path, &mut set, std::mem::take(&mut waiting))?;
                bytes = 0;
            }
            Ok(ControlFlow::Continue(()))
        })?;
        decode(path, &mut set, waiting)?;
    }
    if set.is_empty() {
        return Err(problem(&paths[0], "holds no rows"));
    }
    Ok(set)
}

/// Adds these pictures to a set, in their order.
fn decode(path: &Path, set: &mut ImageSet, pictures: Vec<(u64, Vec<u8>)>) -> Result<(), DataError> {
    let (each, from) = (CHANNELS * set.size * set.size, set.pixels.len());
    if set.pixels.try_reserve(pictures.len() * each).is_err() {
        return Err(problem(path, "its pictures do not fit in memory (use a smaller size)"));
    }
    set.pixels.resize(from + pictures.len() * each, 0);
    set.pixels[from..].par_chunks_mut(each).zip(&pictures).try_for_each(|(out, (row, bytes))| {
        picture::decode(bytes, set.size, out).map_err(|reason| problem(path, format!("row {row} is not a readable picture: {reason}")))
    })
}
