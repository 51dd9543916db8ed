//! Ranks as processes with a GPU each, which NCCL connects. Its library is opened at run time; nothing of it is needed to build kiln.
//!
//! A communicator is made of an id that the first rank draws and the others must be told ([`ids`]): how is for the caller. Values that ops exchange never leave
//! the GPUs. The few bytes that ranks agree upon on the host (an [`Exchange`]) go the same way, through a buffer on the GPU.

use super::{Cuda, Folders, Found, Memory, Wanted, found, functions};
use crate::error::Error;
use crate::meta::DType;
use crate::ops::collective::What;
use crate::ranks::{Exchange, Group, Ranks};
use cudarc::driver::sys::CUstream;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// ncclResult_t; 0 is success.
type Status = c_int;
/// ncclComm_t.
type Handle = *mut c_void;
/// What NCCL calls a unique id: an address of the process that drew it, and a secret.
pub const ID_BYTES: usize = 128;

/// ncclUniqueId, which is handed over by value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Id(pub [u8; ID_BYTES]);

// All are as they were in NCCL 2.13.
functions! {
    version = "ncclGetVersion": fn(*mut c_int);
    error_string = "ncclGetErrorString": fn(Status) -> *const c_char;
    last_error = "ncclGetLastError": fn(Handle) -> *const c_char;
    unique_id = "ncclGetUniqueId": fn(*mut Id);
    init_rank = "ncclCommInitRank": fn(*mut Handle, c_int, Id, c_int);
    destroy = "ncclCommDestroy": fn(Handle);
    async_error = "ncclCommGetAsyncError": fn(Handle, *mut Status);
    group_start = "ncclGroupStart": fn();
    group_end = "ncclGroupEnd": fn();
    all_reduce = "ncclAllReduce": fn(u64, u64, usize, c_int, c_int, Handle, CUstream);
    all_gather = "ncclAllGather": fn(u64, u64, usize, c_int, Handle, CUstream);
    reduce_scatter = "ncclReduceScatter": fn(u64, u64, usize, c_int, c_int, Handle, CUstream);
    send = "ncclSend": fn(u64, usize, c_int, c_int, Handle, CUstream);
    receive = "ncclRecv": fn(u64, usize, c_int, c_int, Handle, CUstream);
}

/// ncclSum.
const SUM: c_int = 0;
/// ncclUint8.
const BYTES: c_int = 1;
/// The oldest version that is used: earlier ones know nothing of GPUs since compute capability 9.0.
const LEAST: i32 = 21800;
/// Several ranks may share a GPU since this version, where the environment allows it.
pub const SHARES_GPUS: i32 = 23003;

const NCCL: Wanted = Wanted {
    name: "libnccl",
    files: &["libnccl.so.2"],
    has: SYMBOLS,
    help: "`pip install nvidia-nccl-cu13` into a Python environment that is active, or name the folder of the library in LD_LIBRARY_PATH",
};

/// Finds NCCL's library, once.
pub fn find(folders: &Folders) -> Found {
    static FOUND: OnceLock<Found> = OnceLock::new();
    FOUND.get_or_init(|| found(&NCCL, folders)).clone()
}

/// The library's version as a number: 23007 is 2.30.7.
pub fn version(folders: &Folders) -> Result<i32, Error> {
    Ok(open(folders)?.number)
}

/// `2.30.7`
pub fn version_text(number: i32) -> String {
    // Up to 2.8 a hundred meant a minor version.
    match number {
        ..10000 => format!("{}.{}.{}", number / 1000, number / 100 % 10, number % 100),
        _ => format!("{}.{}.{}", number / 10000, number / 100 % 100, number % 100),
    }
}

/// The library, loaded.
#[derive(Clone)]
struct Library {
    functions: &'static Functions,
    path: PathBuf,
    number: i32,
}

fn open(folders: &Folders) -> Result<Library, Error> {
    static LOADED: OnceLock<Result<(Functions, i32), String>> = OnceLock::new();
    let found = find(folders);
    let Some(path) = &found.path else {
        return Err(Error::Ranks(format!("ranks on GPUs need NCCL: {}", found.problem().unwrap_or_default())));
    };
    let load = || {
        let functions = Functions::open(path)?;
        let mut number = 0;
        // SAFETY: a pointer to a live integer.
        unsafe { (functions.version)(&mut number) };
        match number >= LEAST {
            true => Ok((functions, number)),
            false => Err(format!("its version is {}, and {} or later is needed", version_text(number), version_text(LEAST))),
        }
    };
    match LOADED.get_or_init(load) {
        Ok((functions, number)) => Ok(Library { functions, path: path.clone(), number: *number }),
        Err(why) => Err(Error::Ranks(format!("{} cannot be used: {why}; {}", path.display(), NCCL.help))),
    }
}

/// Held during every call that launches something.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Functions {
    /// Turns a status into an error with what NCCL says about it.
    fn check(&self, what: &str, status: Status) -> Result<(), Error> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: both give a text that ends with 0 and is never freed, or null.
        let texts = unsafe { [(self.error_string)(status), (self.last_error)(std::ptr::null_mut())].map(|t| text(t)) };
        let said: Vec<&str> = texts.iter().map(|t| t.trim()).filter(|t| !t.is_empty()).collect();
        Err(Error::Ranks(format!("{what} failed: {} (NCCL_DEBUG=WARN makes NCCL say more)", said.join(": "))))
    }
}

/// # Safety
/// `at` is null, or a text that ends with 0.
unsafe fn text(at: *const c_char) -> String {
    // SAFETY: see above.
    if at.is_null() { String::new() } else { unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned() }
}

/// The ranks of every communicator of a job, in the order in which all ranks make them. Ranks that share a model's weights are next to each other. Of those that
/// have different examples there are two: one for what runs beside other work.
fn members(size: usize, tensor: usize) -> Vec<Vec<usize>> {
    let data = size / tensor;
    let by_data = (0..tensor).map(|t| (0..data).map(|d| d * tensor + t).collect::<Vec<_>>()).filter(|_| data > 1 || size == 1);
    let by_tensor = (0..data).map(|d| (0..tensor).map(|t| d * tensor + t).collect::<Vec<_>>()).filter(|_| tensor > 1);
    by_data.flat_map(|m| [m.clone(), m]).chain(by_tensor).collect()
}

/// Draws an id for every communicator of a job: the first rank does, and tells the others.
pub fn ids(folders: &Folders, size: usize, tensor: usize) -> Result<Vec<Id>, Error> {
    let f = open(folders)?.functions;
    let one = || {
        let mut id = Id([0; ID_BYTES]);
        // SAFETY: a pointer to a live id.
        f.check("ncclGetUniqueId", unsafe { (f.unique_id)(&mut id) }).map(|()| id)
    };
    members(size, tensor).iter().map(|_| one()).collect()
}

/// Gives the process variables that NCCL reads when it is first used.
pub fn set_variables(variables: &[(&str, &str)]) {
    for (name, value) in variables {
        // SAFETY: called while the program starts, before the GPU is opened and anything else has threads.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Ends the process at once, without what runs at a normal exit: that would wait for kernels which wait for ranks that are gone.
pub fn leave(status: i32) -> ! {
    unsafe extern "C" {
        safe fn _exit(status: c_int) -> !;
    }
    _exit(status)
}

/// This process as a rank that NCCL connects to the others.
#[derive(Clone)]
pub struct Nccl {
    library: Library,
    ranks: Ranks,
    links: Vec<Arc<Link>>,
}

impl Nccl {
    /// Connects to the other ranks, which all call this with the same ids. `tensor` ranks next to each other share a model's weights.
    pub fn connect(cuda: &Cuda, folders: &Folders, ids: &[Id], [rank, size, tensor]: [usize; 3]) -> Result<Nccl, Error> {
        let members = members(size, tensor);
        if tensor == 0 || !size.is_multiple_of(tensor) || ids.len() != members.len() {
            return Err(Error::Ranks(format!("{size} ranks cannot be divided into groups of {tensor} with {} ids", ids.len())));
        }
        let library = open(folders)?;
        cuda.current();
        let mut own = vec![];
        for (ranks, id) in members.iter().zip(ids) {
            if let Some(place) = ranks.iter().position(|r| *r == rank) {
                own.push(Communicator::new(library.functions, *id, place, ranks.len())?);
            }
        }
        let mut own = own.into_iter();
        let mut links = vec![];
        let mut group = |name, [place, of]: [usize; 2], twice: bool| -> Result<Group, Error> {
            if of == 1 && (size > 1 || !twice) {
                return Ok(Group::alone(name));
            }
            let communicators: Vec<Communicator> = own.by_ref().take(1 + twice as usize).collect();
            let link = Arc::new(Link { cuda: cuda.clone(), communicators, stage: Mutex::default() });
            link.check()?;
            links.push(link.clone());
            Ok(Group::new(name, place, of, link))
        };
        let data = group("data", [rank / tensor, size / tensor], true)?;
        let tensor = group("tensor", [rank % tensor, tensor], false)?;
        Ok(Nccl { library, ranks: Ranks::new(data, tensor), links })
    }

    /// The groups that this rank belongs to.
    pub fn ranks(&self) -> Ranks {
        self.ranks.clone()
    }

    /// The library that was loaded.
    pub fn library(&self) -> &Path {
        &self.library.path
    }

    /// Such as `NCCL 2.30.7`.
    pub fn version(&self) -> String {
        format!("NCCL {}", version_text(self.library.number))
    }

    /// What has gone wrong since, where a connection has broken. Any thread may ask.
    pub fn problem(&self) -> Option<String> {
        self.links.iter().flat_map(|l| &l.communicators).find_map(|c| c.problem())
    }

    /// Waits until all ranks are here.
    pub fn finish(&self) -> Result<(), Error> {
        self.ranks.gather(&[]).map(drop)
    }
}

/// One communicator: ranks with a GPU each, in order.
struct Communicator {
    functions: &'static Functions,
    handle: Handle,
    rank: usize,
    size: usize,
}

// SAFETY: the library alone looks at what the handle points to. Launches are behind `turn`; asking for errors is allowed beside them.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Waits until all its ranks are here. The GPU's context is current.
    fn new(functions: &'static Functions, id: Id, rank: usize, size: usize) -> Result<Communicator, Error> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a pointer to a live handle; the id is a copy.
        let status = unsafe { (functions.init_rank)(&mut handle, size as c_int, id, rank as c_int) };
        functions.check("connecting the GPUs (ncclCommInitRank)", status)?;
        Ok(Communicator { functions, handle, rank, size })
    }

    fn problem(&self) -> Option<String> {
        let mut status = 0;
        // SAFETY: the communicator is alive, the pointer is to a live integer.
        let asked = unsafe { (self.functions.async_error)(self.handle, &mut status) };
        const IN_PROGRESS: Status = 7;
        let found = [asked, status].into_iter().find(|s| ![0, IN_PROGRESS].contains(s))?;
        self.functions.check("an exchange with another rank", found).err().map(|e| e.to_string())
    }

    fn one(&self, what: What, v: &Sent, stream: CUstream) -> Status {
        let (f, c) = (self.functions, self.handle);
        let part = v.elements / self.size;
        // SAFETY: what is read and written lies in buffers that the plan made as large as the op says, or in `Link::stage`.
        unsafe {
            match what {
                What::AllReduce => (f.all_reduce)(v.from, v.to, v.elements, v.kind, SUM, c, stream),
                What::AllGather => (f.all_gather)(v.from, v.to, v.elements, v.kind, c, stream),
                What::ReduceScatter => (f.reduce_scatter)(v.from, v.to, part, v.kind, SUM, c, stream),
                What::AllToAll => {
                    let bytes = (part * v.size) as u64;
                    let sent = |peer: usize| {
                        let at = peer as u64 * bytes;
                        match (f.send)(v.from + at, part, v.kind, peer as c_int, c, stream) {
                            0 => (f.receive)(v.to + at, part, v.kind, peer as c_int, c, stream),
                            status => status,
                        }
                    };
                    (0..self.size).map(sent).find(|status| *status != 0).unwrap_or(0)
                }
            }
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Of a process that trains this never runs, because the thread that asks for problems holds a clone until the process ends. Tests come here.
        // SAFETY: destroyed once. Programs hold their groups, and so this, until their captured graphs are gone.
        let _ = unsafe { (self.functions.destroy)(self.handle) };
    }
}

/// A value that is exchanged, where it lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sent {
    pub from: u64,
    pub to: u64,
    /// How many elements this rank gives.
    pub elements: usize,
    /// ncclDataType_t, and its bytes.
    kind: c_int,
    size: usize,
}

impl Sent {
    pub fn new(from: u64, to: u64, elements: usize, dtype: DType) -> Sent {
        let (kind, size) = kind_of(dtype);
        Sent { from, to, elements, kind, size }
    }
}

/// ncclDataType_t, and its bytes. What NCCL has no type for is bytes to it, which can be moved, but not added.
fn kind_of(dtype: DType) -> (c_int, usize) {
    match dtype {
        DType::I32 => (2, 4),
        DType::F16 => (6, 2),
        DType::F32 => (7, 4),
        DType::BF16 => (9, 2),
        _ => (BYTES, 1),
    }
}

/// Refuses what NCCL cannot exchange.
pub(super) fn can(what: What, dtype: DType) -> Result<(), Error> {
    match kind_of(dtype).0 == BYTES && [What::AllReduce, What::ReduceScatter].contains(&what) {
        true => Err(Error::Ranks(format!("NCCL has no sums of {dtype:?}"))),
        false => Ok(()),
    }
}

/// What connects the ranks of a group on GPUs.
pub struct Link {
    cuda: Cuda,
    /// The first is for the stream of programs; a second, where there is one, for what runs beside it.
    communicators: Vec<Communicator>,
    /// Where bytes of the host are exchanged.
    stage: Mutex<Option<Memory>>,
}

impl Link {
    /// Exchanges values, all in one launch, on a stream of the GPU. `aside`: by the communicator that is for that.
    pub(super) fn launch(&self, what: What, values: &[Sent], aside: bool, stream: CUstream) -> Result<(), Error> {
        let c = &self.communicators[aside as usize % self.communicators.len()];
        let f = c.functions;
        let _turn = turn();
        // SAFETY: no arguments.
        f.check("ncclGroupStart", unsafe { (f.group_start)() })?;
        let one = values.iter().filter(|v| v.elements > 0).map(|v| c.one(what, v, stream)).find(|status| *status != 0).unwrap_or(0);
        let one = f.check(name(what), one);
        // SAFETY: no arguments; the group is closed also where something in it has failed.
        let all = f.check(name(what), unsafe { (f.group_end)() });
        one.and(all)
    }

    /// Adds up a number of every rank, through every communicator: connections are made here, and not while a program is captured.
    fn check(&self) -> Result<(), Error> {
        for (aside, c) in self.communicators.iter().enumerate() {
            let memory = self.cuda.allocate(4)?;
            self.cuda.upload(&memory, &(c.rank as i32 + 1).to_le_bytes())?;
            let at = memory.start();
            self.launch(What::AllReduce, &[Sent::new(at, at, 1, DType::I32)], aside > 0, self.cuda.0.stream)?;
            let sum = self.cuda.download(&memory, 0, 4)?;
            let expected = (c.size * (c.size + 1) / 2) as i32;
            if sum != expected.to_le_bytes() {
                return Err(Error::Ranks(format!("a first sum over {} GPUs is {sum:?} instead of {expected}", c.size)));
            }
        }
        Ok(())
    }

    /// Exchanges bytes of the host.
    fn by_stage(&self, what: What, send: &[u8], receive: &mut [u8]) -> Result<(), Error> {
        if send.is_empty() {
            return Ok(());
        }
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let at = Memory::padded(send.len());
        let needed = at + receive.len();
        if stage.as_ref().is_none_or(|m| m.bytes() < needed) {
            *stage = Some(self.cuda.allocate(needed.next_power_of_two().max(1 << 16))?);
        }
        let memory = stage.as_ref().expect("just made");
        self.cuda.upload(memory, send)?;
        let start = memory.start();
        let value = Sent { from: start, to: start + at as u64, elements: send.len(), kind: BYTES, size: 1 };
        self.launch(what, &[value], false, self.cuda.0.stream)?;
        receive.copy_from_slice(&self.cuda.download(memory, at, receive.len())?);
        Ok(())
    }
}

fn name(what: What) -> &'static str {
    match what {
        What::AllReduce => "ncclAllReduce",
        What::AllGather => "ncclAllGather",
        What::ReduceScatter => "ncclReduceScatter",
        What::AllToAll => "ncclSend and ncclRecv",
    }
}

impl Exchange for Link {
    fn all_gather(&self, send: &[u8], receive: &mut [u8]) -> Result<(), Error> {
        assert_eq!(send.len() * self.communicators[0].size, receive.len());
        self.by_stage(What::AllGather, send, receive)
    }

    fn all_to_all(&self, send: &[u8], receive: &mut [u8]) -> Result<(), Error> {
        assert_eq!((send.len(), send.len() % self.communicators[0].size), (receive.len(), 0));
        self.by_stage(What::AllToAll, send, receive)
    }

    fn on_gpus(&self) -> Option<&Link> {
        Some(self)
    }
}

#[cfg(test)]
mod tests;
