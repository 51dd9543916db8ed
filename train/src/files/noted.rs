//! For tests: which files and folders were synced, renamed and removed, in which order, by this thread. What was not synced before something else goes may
//! be lost in a power cut, which no other test can make.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    Synced(PathBuf),
    /// And every file and folder that was renamed with it, by its old name.
    Renamed(PathBuf, PathBuf, Vec<PathBuf>),
    Removed(PathBuf),
}

thread_local! {
    static CALLS: RefCell<Vec<Call>> = const { RefCell::new(vec![]) };
}

fn add(call: Call) {
    CALLS.with_borrow_mut(|calls| calls.push(call));
}

pub fn synced(path: &Path) {
    add(Call::Synced(path.into()));
}

/// Before it happens.
pub fn renamed(from: &Path, to: &Path) {
    add(Call::Renamed(from.into(), to.into(), below(from)));
}

pub fn removed(path: &Path) {
    add(Call::Removed(path.into()));
}

/// What is called so, and what lies in it: whatever has bytes or names of its own, so no links.
fn below(path: &Path) -> Vec<PathBuf> {
    match path.symlink_metadata() {
        Ok(m) if m.is_dir() => {
            let inside = fs::read_dir(path).into_iter().flatten().flatten().flat_map(|e| below(&e.path()));
            inside.chain([path.to_path_buf()]).collect()
        }
        Ok(m) if m.is_file() => vec![path.into()],
        _ => vec![],
    }
}

/// What `f` gives, and the calls that it made.
pub fn during<R>(f: impl FnOnce() -> R) -> (R, Vec<Call>) {
    CALLS.take();
    let result = f();
    (result, CALLS.take())
}

/// A name that readers do not look for: what it holds appears when it is renamed.
fn is_beside(path: &Path) -> bool {
    path.file_name().is_some_and(|n| n.to_string_lossy().contains(".tmp-"))
}

/// Panics unless what appears under its name had been synced, with everything in it, and its name is synced before anything else beside it goes away, and
/// before the end. Returns the names under which something appeared.
#[track_caller]
pub fn lasts(calls: &[Call]) -> Vec<PathBuf> {
    let (mut synced, mut named, mut open) = (BTreeSet::new(), vec![], BTreeSet::<PathBuf>::new());
    let folder = |path: &Path| super::folder_of(path).to_path_buf();
    for call in calls {
        if let Call::Renamed(from, ..) | Call::Removed(from) = call {
            let parent = folder(from);
            assert!(!open.contains(&parent), "{call:?}, and {} was not synced after what was renamed in it: {calls:#?}", parent.display());
        }
        match call {
            Call::Synced(path) => {
                open.remove(path);
                synced.insert(path.clone());
            }
            Call::Removed(path) => synced.retain(|s| !s.starts_with(path)),
            Call::Renamed(from, to, held) => {
                let moved: Vec<PathBuf> = synced.iter().filter(|s| s.starts_with(from)).cloned().collect();
                if is_beside(from) && !is_beside(to) {
                    let missing: Vec<&PathBuf> = held.iter().filter(|h| !synced.contains(*h)).collect();
                    assert!(missing.is_empty(), "{} appears, and these were not synced: {missing:?} in {calls:#?}", to.display());
                    open.insert(folder(to));
                    named.push(to.clone());
                }
                for old in moved {
                    synced.remove(&old);
                    let rest = old.strip_prefix(from).expect("it starts so");
                    synced.insert(if rest.as_os_str().is_empty() { to.clone() } else { to.join(rest) });
                }
            }
        }
    }
    assert!(open.is_empty(), "not synced at the end: {open:?} in {calls:#?}");
    named
}

#[test]
fn what_is_not_synced_is_found() {
    let path = PathBuf::from;
    let renamed = || Call::Renamed(path("d/.a.tmp-1"), path("d/a"), vec![path("d/.a.tmp-1/f"), path("d/.a.tmp-1")]);
    let good = [
        Call::Synced(path("d/.a.tmp-1/f")),
        Call::Synced(path("d/.a.tmp-1")),
        renamed(),
        Call::Synced(path("d")),
        Call::Renamed(path("d/b"), path("d/.b.tmp-1"), vec![]),
        Call::Removed(path("d/.b.tmp-1")),
    ];
    assert_eq!(lasts(&good), [path("d/a")]);
    for missing in [0, 1, 3] {
        let calls = [&good[..missing], &good[missing + 1..]].concat();
        assert!(std::panic::catch_unwind(|| lasts(&calls)).is_err(), "{:?}", good[missing]);
    }
    assert!(std::panic::catch_unwind(|| lasts(&good[..3])).is_err());
}
