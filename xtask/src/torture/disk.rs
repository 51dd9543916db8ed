//! A disk as it may be after a power cut. POSIX promises little: a file's bytes are there once it was synced, a name once its folder was.
//! Of everything else any part may have reached the disk before, in any order.

use super::shim::Record;
use fastrand::Rng;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

type Id = usize;
const ROOT: Id = 0;

/// What of that which was not synced is on the disk after all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keep {
    Nothing,
    /// Names up to a moment, as a journal keeps them; of contents anything.
    Ordered,
    /// Any of it.
    Anything,
}

#[derive(Clone)]
pub struct Disk {
    root: PathBuf,
    nodes: Vec<Node>,
    by_inode: HashMap<u64, Id>,
    /// Changes of names that were not synced, in order.
    pending: Vec<Change>,
}

#[derive(Clone)]
enum Node {
    Folder {
        now: Names,
        synced: Names,
    },
    File {
        synced: Vec<u8>,
        since: Vec<Write>,
    },
    /// What it leads to is there as soon as its name is.
    Link(PathBuf),
}

type Names = BTreeMap<String, Id>;

#[derive(Clone)]
enum Write {
    At(usize, Vec<u8>),
    Length(usize),
}

#[derive(Clone)]
enum Change {
    Put(Id, String, Id),
    Take(Id, String),
    /// Both or neither.
    Move([(Id, String); 2], Id),
}

impl Change {
    fn concerns(&self, folder: Id) -> bool {
        match self {
            Change::Put(id, ..) | Change::Take(id, _) => *id == folder,
            Change::Move(both, _) => both.iter().any(|(id, _)| *id == folder),
        }
    }

    fn apply(&self, mut to: impl FnMut(Id, &str, Option<Id>)) {
        match self {
            Change::Put(folder, name, id) => to(*folder, name, Some(*id)),
            Change::Take(folder, name) => to(*folder, name, None),
            Change::Move([from, into], id) => {
                to(from.0, &from.1, None);
                to(into.0, &into.1, Some(*id));
            }
        }
    }
}

fn set(names: &mut Names, name: &str, id: Option<Id>) {
    match id {
        Some(id) => names.insert(name.to_string(), id),
        None => names.remove(name),
    };
}

impl Disk {
    /// All that lies in a folder, safe on the disk.
    pub fn new(root: &Path) -> Result<Disk, String> {
        let mut disk = Disk { root: root.into(), nodes: vec![], by_inode: HashMap::new(), pending: vec![] };
        disk.read(root).map_err(|e| format!("{}: {e}", root.display()))?;
        Ok(disk)
    }

    fn read(&mut self, path: &Path) -> std::io::Result<Id> {
        let id = self.nodes.len();
        self.by_inode.insert(fs::symlink_metadata(path)?.ino(), id);
        self.nodes.push(Node::File { synced: vec![], since: vec![] });
        self.nodes[id] = if path.is_symlink() {
            Node::Link(fs::read_link(path)?)
        } else if path.is_dir() {
            let mut now = Names::new();
            for name in super::jobs::names(path) {
                let inner = self.read(&path.join(&name))?;
                now.insert(name, inner);
            }
            Node::Folder { synced: now.clone(), now }
        } else {
            Node::File { synced: fs::read(path)?, since: vec![] }
        };
        Ok(id)
    }

    fn names(&mut self, folder: Id) -> Option<&mut Names> {
        match &mut self.nodes[folder] {
            Node::Folder { now, .. } => Some(now),
            Node::File { .. } | Node::Link(_) => None,
        }
    }

    /// A path's folder and its name there.
    fn find(&mut self, path: &Path) -> Option<(Id, String)> {
        let inside = path.strip_prefix(&self.root).ok()?.to_path_buf();
        let name = inside.file_name()?.to_str()?.to_string();
        let mut at = ROOT;
        for part in inside.parent()?.components() {
            let Component::Normal(part) = part else { return None };
            at = *self.names(at)?.get(part.to_str()?)?;
        }
        Some((at, name))
    }

    fn change(&mut self, change: Change) {
        let mut all = vec![];
        change.apply(|folder, name, id| all.push((folder, name.to_string(), id)));
        for (folder, name, id) in all {
            if let Some(names) = self.names(folder) {
                set(names, &name, id);
            }
        }
        self.pending.push(change);
    }

    fn create(&mut self, path: &Path, inode: u64, node: Node) -> Option<()> {
        let (folder, name) = self.find(path)?;
        let id = self.nodes.len();
        self.nodes.push(node);
        self.by_inode.insert(inode, id);
        self.change(Change::Put(folder, name, id));
        Some(())
    }

    fn write(&mut self, inode: u64, write: Write) -> Option<()> {
        match &mut self.nodes[*self.by_inode.get(&inode)?] {
            Node::File { since, .. } => since.push(write),
            Node::Folder { .. } | Node::Link(_) => return None,
        }
        Some(())
    }

    /// A call that was made. None where it is of something that was never made.
    pub fn happened(&mut self, r: &Record) -> Option<()> {
        match r.kind {
            'c' => {
                if r.flags & 1 == 1 {
                    return self.create(&r.path, r.inode, Node::File { synced: vec![], since: vec![] });
                }
                if r.flags & 2 == 2 { self.write(r.inode, Write::Length(0)) } else { Some(()) }
            }
            'm' => self.create(&r.path, r.inode, Node::Folder { now: Names::new(), synced: Names::new() }),
            'y' => self.create(&r.path, r.inode, Node::Link(r.other.clone())),
            'w' => self.write(r.inode, Write::At(r.offset as usize, r.data.clone())),
            't' => self.write(r.inode, Write::Length(r.offset as usize)),
            'u' | 'd' => {
                let (folder, name) = self.find(&r.path)?;
                self.change(Change::Take(folder, name));
                Some(())
            }
            'n' => {
                let both = [self.find(&r.path)?, self.find(&r.other)?];
                let id = *self.names(both[0].0)?.get(&both[0].1)?;
                self.change(Change::Move(both, id));
                Some(())
            }
            'l' => {
                let (from, (folder, name)) = (self.find(&r.path)?, self.find(&r.other)?);
                let id = *self.names(from.0)?.get(&from.1)?;
                self.change(Change::Put(folder, name, id));
                Some(())
            }
            's' => self.sync(*self.by_inode.get(&r.inode)?),
            _ => Some(()),
        }
    }

    fn sync(&mut self, id: Id) -> Option<()> {
        if let Node::File { synced, since } = &mut self.nodes[id] {
            since.drain(..).for_each(|w| apply(synced, &w));
            return Some(());
        }
        let (own, rest): (Vec<Change>, Vec<Change>) = std::mem::take(&mut self.pending).into_iter().partition(|c| c.concerns(id));
        self.pending = rest;
        own.iter().for_each(|c| self.keep(c));
        Some(())
    }

    /// A change of names reaches the disk.
    fn keep(&mut self, change: &Change) {
        change.apply(|folder, name, id| {
            if let Node::Folder { synced, .. } = &mut self.nodes[folder] {
                set(synced, name, id);
            }
        });
    }

    /// The power goes, and what is on the disk is written to a new folder.
    pub fn cut(mut self, keep: Keep, random: &mut Rng, to: &Path) -> Result<(), String> {
        let pending = std::mem::take(&mut self.pending);
        let until = random.usize(0..=pending.len());
        for (i, change) in pending.iter().enumerate() {
            let kept = match keep {
                Keep::Nothing => false,
                Keep::Ordered => i < until,
                Keep::Anything => random.bool(),
            };
            // A name that something else has taken meanwhile, or that is not there, changes nothing.
            if kept && self.possible(change) {
                self.keep(change);
            }
        }
        self.write_out(ROOT, keep, random, to).map_err(|e| format!("{}: {e}", to.display()))
    }

    fn possible(&self, change: &Change) -> bool {
        let has = |folder: Id, name: &str| match &self.nodes[folder] {
            Node::Folder { synced, .. } => synced.contains_key(name),
            Node::File { .. } | Node::Link(_) => false,
        };
        match change {
            Change::Put(..) => true,
            Change::Take(folder, name) => has(*folder, name),
            Change::Move([from, _], _) => has(from.0, &from.1),
        }
    }

    fn write_out(&self, id: Id, keep: Keep, random: &mut Rng, to: &Path) -> std::io::Result<()> {
        match &self.nodes[id] {
            Node::Folder { synced, .. } => {
                fs::create_dir_all(to)?;
                synced.iter().try_for_each(|(name, id)| self.write_out(*id, keep, random, &to.join(name)))
            }
            Node::File { synced, since } => fs::write(to, content(synced, since, keep, random)),
            Node::Link(target) => std::os::unix::fs::symlink(target, to),
        }
    }
}

fn apply(bytes: &mut Vec<u8>, write: &Write) {
    match write {
        Write::Length(n) => bytes.resize(*n, 0),
        Write::At(at, data) => {
            bytes.resize(bytes.len().max(at + data.len()), 0);
            bytes[*at..at + data.len()].copy_from_slice(data);
        }
    }
}

/// What was written since the last sync is there, or not, or up to some moment, or here and there, or as zeros.
fn content(synced: &[u8], since: &[Write], keep: Keep, random: &mut Rng) -> Vec<u8> {
    let mut bytes = synced.to_vec();
    if keep == Keep::Nothing {
        return bytes;
    }
    let mut whole = bytes.clone();
    since.iter().for_each(|w| apply(&mut whole, w));
    match random.u32(0..5) {
        0 => {}
        1 => return whole,
        2 => since.iter().take(random.usize(0..=since.len())).for_each(|w| apply(&mut bytes, w)),
        3 => since.iter().for_each(|w| {
            if random.bool() {
                apply(&mut bytes, w)
            }
        }),
        _ => bytes.resize(whole.len(), 0),
    }
    bytes
}
