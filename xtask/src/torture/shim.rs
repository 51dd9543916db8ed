//! The library that stands between kiln and the file system (shim.c): building it, reading what it wrote down.

use super::Place;
use super::process::Call;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles the shim. None, and a line that says so, where there is nothing to compile it with.
pub fn build(place: &Place) -> Result<Option<PathBuf>, String> {
    let (source, library) = (place.path("shim.c"), place.path("shim.so"));
    if library.exists() {
        return Ok(Some(library));
    }
    fs::write(&source, include_str!("shim.c")).map_err(|e| format!("{}: {e}", source.display()))?;
    let compiled = Command::new("cc").args(["-O1", "-fPIC", "-shared", "-pthread", "-o"]).arg(&library).arg(&source).output();
    match compiled {
        Ok(o) if o.status.success() => Ok(Some(library)),
        Ok(o) => Err(format!("shim.c does not compile: {}", String::from_utf8_lossy(&o.stderr))),
        Err(_) => {
            println!("NOT CHECKED: there is no cc to compile what counts the calls to the file system");
            Ok(None)
        }
    }
}

/// `call` with the shim before it, for what lies below `folder`.
pub fn under(call: Call, library: &Path, folder: &Path) -> Call {
    call.env("LD_PRELOAD", library).env("TORTURE_ROOT", folder)
}

/// Letters of calls that change names or bytes.
pub const CHANGES: &str = "cwtmnludy";

/// A call to the file system that was made and did not fail. The letters are those of record() in shim.c.
#[derive(Clone)]
pub struct Record {
    pub kind: char,
    pub number: u64,
    pub inode: u64,
    pub offset: u64,
    pub flags: u32,
    pub path: PathBuf,
    pub other: PathBuf,
    pub data: Vec<u8>,
}

pub fn read(log: &Path) -> Result<Vec<Record>, String> {
    let bytes = fs::read(log).map_err(|e| format!("{}: {e}", log.display()))?;
    let mut rest = &bytes[..];
    let mut all = vec![];
    while !rest.is_empty() {
        all.push(one(&mut rest).ok_or("what the shim wrote down is cut")?);
    }
    Ok(all)
}

fn one(rest: &mut &[u8]) -> Option<Record> {
    let mut take = |n: usize| {
        let (own, more) = rest.split_at_checked(n)?;
        *rest = more;
        Some(own)
    };
    let kind = char::from(take(1)?[0]);
    let mut wide = || Some(u64::from_ne_bytes(take(8)?.try_into().ok()?));
    let [inode, offset] = [wide()?, wide()?];
    let mut narrow = || Some(u32::from_ne_bytes(take(4)?.try_into().ok()?));
    let [number, flags, path, other, data] = [narrow()?, narrow()?, narrow()?, narrow()?, narrow()?];
    let mut text = |n: u32| Some(PathBuf::from(String::from_utf8_lossy(take(n as usize)?).into_owned()));
    let [path, other] = [text(path)?, text(other)?];
    Some(Record { kind, number: number.into(), inode, offset, flags, path, other, data: take(data as usize)?.to_vec() })
}
