//! Ranks as processes that MPI connects: what several ranks on CPUs use, on one machine or many.
//!
//! MPI 5 fixes a binary interface: a library called `libmpi_abi` whose handles, constants and functions are the same whoever made it. So it is opened at
//! run time, and nothing of it is needed to build kiln. The numbers below are those of that interface (chapter "Application Binary Interface" of the MPI
//! 5.0 standard); `mpi_abi.h`, which MPICH installs beside the library, has the same.
#![allow(unsafe_code)]

use super::{Exchange, Group, Ranks};
use crate::cuda::{Folders, Found, Wanted, found, functions};
use crate::error::Error;
use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// MPI_SUCCESS is 0.
type Status = c_int;
/// MPI_Count is 64 bits wide, so that functions which end in `_c` have no limit of 2 GiB.
type Count = i64;

/// A communicator, a type or an error handler: a pointer, of which small numbers are constants.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Handle(*mut c_void);

// SAFETY: the library alone looks at what a handle points to, and every call is behind `turn`.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

const COMM_WORLD: Handle = Handle(0x101 as *mut c_void);
const ERRORS_RETURN: Handle = Handle(0x143 as *mut c_void);
const BYTE: Handle = Handle(0x247 as *mut c_void);
/// Any thread may call, one at a time.
const THREAD_SERIALIZED: c_int = 2048;
const MAX_ERROR_STRING: usize = 512;
const MAX_LIBRARY_VERSION_STRING: usize = 8192;

functions! {
    abi_version = "MPI_Abi_get_version": fn(*mut c_int, *mut c_int);
    library_version = "MPI_Get_library_version": fn(*mut c_char, *mut c_int);
    init = "MPI_Init_thread": fn(*mut c_int, *mut c_void, c_int, *mut c_int);
    set_errhandler = "MPI_Comm_set_errhandler": fn(Handle, Handle);
    error_string = "MPI_Error_string": fn(c_int, *mut c_char, *mut c_int);
    rank = "MPI_Comm_rank": fn(Handle, *mut c_int);
    size = "MPI_Comm_size": fn(Handle, *mut c_int);
    split = "MPI_Comm_split": fn(Handle, c_int, c_int, *mut Handle);
    all_gather = "MPI_Allgather_c": fn(*const u8, Count, Handle, *mut u8, Count, Handle, Handle);
    all_to_all = "MPI_Alltoall_c": fn(*const u8, Count, Handle, *mut u8, Count, Handle, Handle);
    abort = "MPI_Abort": fn(Handle, c_int);
    finalize = "MPI_Finalize": fn();
}

const MPI: Wanted = Wanted {
    name: "libmpi_abi",
    files: &["libmpi_abi.so.1", "libmpi_abi.so"],
    has: SYMBOLS,
    help: "`pip install mpich` (version 5 or later) into a Python environment that is active, or name the folder of the library in LD_LIBRARY_PATH",
};

/// Finds the library of MPI's standard interface, once.
pub fn find(folders: &Folders) -> Found {
    static FOUND: OnceLock<Found> = OnceLock::new();
    FOUND.get_or_init(|| found(&MPI, folders)).clone()
}

/// What the library says it is, such as `MPICH 5.0.2`.
pub fn version(folders: &Folders) -> Result<String, Error> {
    open(folders).map(|(functions, _)| functions.version())
}

/// The library's functions and where it lies.
fn open(folders: &Folders) -> Result<(&'static Functions, PathBuf), Error> {
    static LOADED: OnceLock<Result<Functions, String>> = OnceLock::new();
    let found = find(folders);
    let Some(path) = &found.path else { return Err(Error::Ranks(found.problem().unwrap_or_default())) };
    let load = || {
        let functions = Functions::open(path)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: pointers to live integers; this function may be called before the library is initialised.
        unsafe { (functions.abi_version)(&mut major, &mut minor) };
        match major {
            1 => Ok(functions),
            _ => Err(format!("its binary interface has version {major}.{minor}, and 1.x is needed")),
        }
    };
    match LOADED.get_or_init(load) {
        Ok(functions) => Ok((functions, path.clone())),
        Err(why) => Err(Error::Ranks(format!("{} cannot be used: {why}; {}", path.display(), MPI.help))),
    }
}

/// Held during every call.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Functions {
    /// Calls a function, alone, and turns its status into an error.
    fn call(&self, what: &str, function: impl FnOnce() -> Status) -> Result<(), Error> {
        let _turn = turn();
        match function() {
            0 => Ok(()),
            status => Err(Error::Ranks(format!("{what} failed: {}", self.text_of(status)))),
        }
    }

    fn text_of(&self, status: Status) -> String {
        let mut text = [0u8; MAX_ERROR_STRING];
        let mut length = 0;
        // SAFETY: the text has room for the longest that the interface allows.
        let known = unsafe { (self.error_string)(status, text.as_mut_ptr().cast(), &mut length) } == 0;
        if known { String::from_utf8_lossy(&text[..(length.max(0) as usize).min(text.len())]).into() } else { format!("status {status}") }
    }

    fn version(&self) -> String {
        let mut text = vec![0u8; MAX_LIBRARY_VERSION_STRING];
        let mut length = 0;
        // SAFETY: the text has room for the longest that the interface allows; may be called before the library is initialised.
        unsafe { (self.library_version)(text.as_mut_ptr().cast(), &mut length) };
        text.truncate(length.max(0) as usize);
        let text = String::from_utf8_lossy(&text);
        // MPICH's first line is "MPICH Version:      5.0.2", and more follow.
        text.lines().next().unwrap_or_default().replace("Version:", " ").split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// This process as a rank of an MPI job. There is one in a process.
#[derive(Clone)]
pub struct Mpi {
    functions: &'static Functions,
    library: PathBuf,
    /// Which rank this is.
    pub rank: usize,
    /// How many ranks there are.
    pub size: usize,
}

impl Mpi {
    /// Loads the library and connects to the other ranks. A process that no `mpiexec` started is a job of one rank.
    pub fn connect(folders: &Folders) -> Result<Mpi, Error> {
        static CONNECTED: OnceLock<Result<Mpi, String>> = OnceLock::new();
        let connected = CONNECTED.get_or_init(|| Mpi::start(folders).map_err(|e| e.to_string()));
        connected.clone().map_err(|why| Error::Ranks(why.trim_start_matches("several ranks: ").into()))
    }

    fn start(folders: &Folders) -> Result<Mpi, Error> {
        let (functions, library) = open(folders)?;
        let (mut provided, mut rank, mut size) = (0, 0, 0);
        // SAFETY: pointers to live integers, and no arguments of the command line; called once in a process.
        functions.call("MPI_Init_thread", || unsafe { (functions.init)(null_mut(), null_mut(), THREAD_SERIALIZED, &mut provided) })?;
        // SAFETY: constants of the interface, and pointers to live integers.
        functions.call("MPI_Comm_set_errhandler", || unsafe { (functions.set_errhandler)(COMM_WORLD, ERRORS_RETURN) })?;
        // SAFETY: as above.
        functions.call("MPI_Comm_rank", || unsafe { (functions.rank)(COMM_WORLD, &mut rank) })?;
        // SAFETY: as above.
        functions.call("MPI_Comm_size", || unsafe { (functions.size)(COMM_WORLD, &mut size) })?;
        if provided < THREAD_SERIALIZED {
            return Err(Error::Ranks(format!("{} may be called from the main thread only: take another MPI library", library.display())));
        }
        Ok(Mpi { functions, library, rank: rank as usize, size: size as usize })
    }

    /// The library that was loaded.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// What the library says it is, such as `MPICH 5.0.2`.
    pub fn version(&self) -> String {
        self.functions.version()
    }

    /// The ranks as groups: `tensor` ranks next to each other share a model's weights. All ranks call it.
    pub fn ranks(&self, tensor: usize) -> Result<Ranks, Error> {
        if tensor == 0 || !self.size.is_multiple_of(tensor) {
            return Err(Error::Ranks(format!("{} ranks cannot be divided into groups of {tensor}", self.size)));
        }
        let (data_rank, tensor_rank) = (self.rank / tensor, self.rank % tensor);
        let data = self.group("data", tensor_rank, data_rank, self.size / tensor)?;
        Ok(Ranks::new(data, self.group("tensor", data_rank, tensor_rank, tensor)?))
    }

    /// The ranks that have the same `color`.
    fn group(&self, name: &'static str, color: usize, rank: usize, size: usize) -> Result<Group, Error> {
        let mut comm = COMM_WORLD;
        let split = || {
            // SAFETY: a pointer to a live handle. The error handler is inherited.
            unsafe { (self.functions.split)(COMM_WORLD, color as c_int, rank as c_int, &mut comm) }
        };
        self.functions.call("MPI_Comm_split", split)?;
        Ok(Group::new(name, rank, size, Arc::new(Communicator { functions: self.functions, comm, size })))
    }

    /// Ends all ranks at once: whoever started them gives `status` as the job's.
    pub fn abort(&self, status: i32) -> ! {
        // SAFETY: no memory is handed over. It may be called while another thread waits inside a collective.
        unsafe { (self.functions.abort)(COMM_WORLD, status) };
        std::process::exit(status)
    }

    /// Tells the other ranks that this one has come to its end; the last call of a process that did not fail.
    pub fn finish(&self) -> Result<(), Error> {
        // SAFETY: no memory is handed over.
        self.functions.call("MPI_Finalize", || unsafe { (self.functions.finalize)() })
    }
}

/// The ranks of one group.
struct Communicator {
    functions: &'static Functions,
    comm: Handle,
    size: usize,
}

impl Communicator {
    /// Ranks that exchange values of different sizes would wait for ever or overwrite memory.
    fn same_size(&self, bytes: usize) -> Result<(), Error> {
        let mut all = vec![0u64; self.size];
        self.gather(bytemuck::bytes_of(&(bytes as u64)), bytemuck::cast_slice_mut(&mut all))?;
        match all.iter().find(|&&n| n != bytes as u64) {
            None => Ok(()),
            Some(n) => Err(Error::Ranks(format!(
                "the ranks exchange values of different sizes ({bytes} and {n} bytes): they run different programs"
            ))),
        }
    }

    fn gather(&self, send: &[u8], receive: &mut [u8]) -> Result<(), Error> {
        assert_eq!(send.len() * self.size, receive.len());
        let count = send.len() as Count;
        self.functions.call("MPI_Allgather_c", || {
            // SAFETY: `receive` has room for as many bytes of every rank.
            unsafe { (self.functions.all_gather)(send.as_ptr(), count, BYTE, receive.as_mut_ptr(), count, BYTE, self.comm) }
        })
    }
}

impl Exchange for Communicator {
    fn all_gather(&self, send: &[u8], receive: &mut [u8]) -> Result<(), Error> {
        self.same_size(send.len())?;
        self.gather(send, receive)
    }

    fn all_to_all(&self, send: &[u8], receive: &mut [u8]) -> Result<(), Error> {
        assert_eq!((send.len(), send.len() % self.size), (receive.len(), 0));
        self.same_size(send.len())?;
        let count = (send.len() / self.size) as Count;
        self.functions.call("MPI_Alltoall_c", || {
            // SAFETY: both have a part of this size for every rank.
            unsafe { (self.functions.all_to_all)(send.as_ptr(), count, BYTE, receive.as_mut_ptr(), count, BYTE, self.comm) }
        })
    }
}

#[cfg(test)]
mod tests;
