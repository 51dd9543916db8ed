//! Compiles kernels to shared libraries with the system's C++ compiler, cached on disk by a hash of their source.

use super::text;
use crate::kernel::Launch;
use libloading::Library;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

const MACHINE_H: &str = include_str!("machine.h");
const MACHINE: &str = include_str!("machine.cpp");
const CUDA_H: &str = include_str!("cuda.h");

/// No excess precision, as on a GPU; and pointers of different types may alias, as kernels assume.
const FLAGS: &[&str] =
    &["-std=c++17", "-w", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing"];
const MACHINE_FLAGS: &[&str] = &["-O2", "-fvisibility=default", "-Wl,-Bsymbolic", "-ftls-model=initial-exec", "-U_FORTIFY_SOURCE"];
const KERNEL_FLAGS: &[&str] =
    &["-O1", "-ffp-contract=off", "-fno-gnu-unique", "-fno-threadsafe-statics", "-fno-ipa-reference", "-nostartfiles"];

/// Kernels per file: starting the compiler takes as long as compiling three small kernels.
const BATCH: usize = 12;

#[repr(C)]
#[derive(Clone, Copy)]
struct Module {
    now: *mut *mut c_void,
    shared: *mut c_char,
    shared_end: *mut c_char,
}

type Entry = unsafe extern "C" fn(*mut *mut c_void);
type LaunchOn =
    unsafe extern "C" fn(Entry, *mut *mut c_void, *const Module, *const c_uint, c_uint, c_uint, c_int, u8, *mut c_char, c_uint) -> c_int;

/// A loaded library with some kernels. Their shared memory belongs to the library, so only one thread at a time runs in it.
struct Loaded {
    library: Library,
    module: Module,
}

// SAFETY: the addresses are of the library's memory, which lives as long as it does; who uses them holds the lock.
unsafe impl Send for Loaded {}

/// In which order blocks, warps and lanes run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    Forwards,
    Backwards,
}

impl Order {
    /// What uninitialized memory holds: bits that are NaN in every float type and -1 as an integer; or 3e38 and two billion.
    pub fn poison(self) -> u8 {
        match self {
            Order::Forwards => 0xff,
            Order::Backwards => 0x7f,
        }
    }
}

/// A CUDA source, and the kernels of it that are launched, with their numbers of arguments.
struct Text {
    text: String,
    entries: BTreeSet<(&'static str, usize)>,
}

/// The same in C++.
struct Source {
    name: String,
    cpp: String,
}

pub struct Kernels {
    machine: Library,
    /// By the name of a kernel's source: the library that has it, or why it could not be compiled.
    known: HashMap<String, Result<usize, String>>,
    libraries: Vec<Mutex<Loaded>>,
    /// How many sources were compiled now, because they were not cached.
    pub compiled: usize,
}

/// GCC: clang does not have all of the options and attributes that are used.
pub const COMPILER: &str = "g++";

pub fn has_compiler() -> bool {
    Command::new(COMPILER).arg("--version").output().is_ok_and(|o| o.status.success())
}

/// Removes files that were not used for a week.
fn tidy(folder: &Path) {
    let Ok(files) = std::fs::read_dir(folder) else { return };
    for file in files.flatten() {
        let age = file.metadata().and_then(|m| m.modified()).ok().and_then(|m| m.elapsed().ok());
        if age.is_some_and(|a| a.as_secs() > 7 * 24 * 3600) {
            let _ = std::fs::remove_file(file.path());
        }
    }
}

fn built(folder: &Path, name: &str, source: &str, flags: &[&str]) -> Result<(PathBuf, bool), String> {
    let text = |e: std::io::Error| format!("{}: {e}", folder.display());
    let key = xxhash_rust::xxh3::xxh3_128(format!("{FLAGS:?} {flags:?}\n{source}").as_bytes());
    let done = folder.join(format!("{name}-{key:032x}.so"));
    if let Ok(known) = std::fs::OpenOptions::new().append(true).open(&done) {
        let _ = known.set_modified(SystemTime::now());
        return Ok((done, false));
    }
    std::fs::create_dir_all(folder).map_err(text)?;
    // Under a temporary name until it is complete.
    // Two threads may compile the same kernels at once.
    static PARTS: AtomicUsize = AtomicUsize::new(0);
    let part = folder.join(format!("{key:032x}-{}-{}", std::process::id(), PARTS.fetch_add(1, Ordering::Relaxed)));
    let (source_file, object) = (part.with_extension("cpp"), part.with_extension("part"));
    std::fs::write(&source_file, source).map_err(text)?;
    let run = Command::new(COMPILER).args(FLAGS).args(flags).arg("-o").args([&object, &source_file]).arg("-lm").output();
    let run = run.map_err(|e| format!("{COMPILER}: {e}"))?;
    let _ = std::fs::remove_file(&source_file);
    if !run.status.success() {
        let all = String::from_utf8_lossy(&run.stderr).into_owned();
        let first = all.lines().find(|l| l.contains("error")).unwrap_or(&all);
        return Err(first.to_string());
    }
    std::fs::rename(&object, &done).map_err(text)?;
    Ok((done, true))
}

impl Kernels {
    /// Compiles all kernels of these launches. `change` is applied to every source, to plant errors.
    pub fn new(folder: &Path, launches: &[&Launch], change: &dyn Fn(String) -> String) -> Result<Kernels, String> {
        use libloading::os::unix;
        tidy(folder);
        let (machine, _) = built(folder, "machine", &format!("{MACHINE_H}{MACHINE}"), MACHINE_FLAGS)?;
        // SAFETY: our own library, whose loading runs nothing. Its names are global, so that kernels find them.
        let machine: Library =
            unsafe { unix::Library::open(Some(&machine), unix::RTLD_NOW | unix::RTLD_GLOBAL) }.map_err(|e| e.to_string())?.into();
        let mut texts: BTreeMap<String, Text> = BTreeMap::new();
        for l in launches {
            let new = || Text { text: change(l.text()), entries: BTreeSet::new() };
            texts.entry(text::name(l)).or_insert_with(new).entries.insert((l.entry, l.args.len()));
        }
        let sources = texts.into_iter().map(|(name, t)| Source { cpp: text::translated(&t.text, &t.entries, &name), name });
        let sources: Vec<Source> = sources.collect();
        let batches: Vec<&[Source]> = sources.chunks(BATCH).collect();
        let (next, found, compiled) = (AtomicUsize::new(0), Mutex::new(vec![]), AtomicUsize::new(0));
        let file = |batch: &[Source]| {
            let source: String = [MACHINE_H, CUDA_H].into_iter().chain(batch.iter().map(|b| b.cpp.as_str())).collect();
            let (file, new) = built(folder, "kernels", &source, KERNEL_FLAGS)?;
            compiled.fetch_add(if new { batch.len() } else { 0 }, Ordering::Relaxed);
            Ok::<PathBuf, String>(file)
        };
        let work = || {
            while let Some(&batch) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
                let done: Vec<_> = match file(batch) {
                    Ok(f) => vec![(batch, Ok(f))],
                    // One by one, to keep those that compile.
                    Err(_) => batch.chunks(1).map(|one| (one, file(one))).collect(),
                };
                found.lock().expect("no panic under the lock").extend(done);
            }
        };
        std::thread::scope(|s| {
            let threads: usize = std::thread::available_parallelism().map_or(1, usize::from);
            (0..threads).for_each(|_| drop(s.spawn(work)));
        });
        let mut kernels = Kernels { machine, known: HashMap::new(), libraries: vec![], compiled: compiled.load(Ordering::Relaxed) };
        for (batch, file) in found.into_inner().expect("no panic under the lock") {
            let library = file.and_then(|f| Loaded::open(&f));
            let at = library.map(|l| {
                kernels.libraries.push(Mutex::new(l));
                kernels.libraries.len() - 1
            });
            kernels.known.extend(batch.iter().map(|s| (s.name.clone(), at.clone())));
        }
        Ok(kernels)
    }

    /// Why a launch cannot be emulated, if it cannot.
    pub fn problem(&self, launch: &Launch) -> Option<&str> {
        self.known[&text::name(launch)].as_ref().err().map(String::as_str)
    }

    /// Runs a kernel to its end.
    ///
    /// # Safety
    /// The arguments point to memory that the kernel, where it is right, stays within; a wrong one may write anywhere.
    pub unsafe fn run(&self, launch: &Launch, args: &[*mut u8], order: Order) -> Result<(), String> {
        let name = text::name(launch);
        let at = self.known[&name].clone()?;
        let loaded = self.libraries[at].lock().expect("no panic under the lock");
        let mut args: Vec<*mut c_void> = args.iter().map(|a| a.cast()).collect();
        let mut why = [0 as c_char; 512];
        // SAFETY: both functions have these types in machine.cpp and in what `translated` writes; `why` has as many bytes as is said. The lock makes
        // this the only thread that runs in this library; the machine keeps its own state for each thread.
        let failed = unsafe {
            let entry = loaded.library.get::<Entry>(text::symbol(&name, launch.entry)).map_err(|e| e.to_string())?;
            let on = self.machine.get::<LaunchOn>("emu_launch").map_err(|e| e.to_string())?;
            let (grid, backwards) = (launch.grid, (order == Order::Backwards) as c_int);
            let module = loaded.module;
            on(
                *entry,
                args.as_mut_ptr(),
                &module,
                grid.as_ptr(),
                launch.block,
                launch.shared,
                backwards,
                order.poison(),
                why.as_mut_ptr(),
                512,
            )
        };
        if failed == 0 {
            return Ok(());
        }
        // SAFETY: the machine wrote a text that ends with a zero.
        let why = unsafe { CStr::from_ptr(why.as_ptr()) }.to_string_lossy();
        Err(format!("{}: {why}", launch.entry))
    }
}

impl Loaded {
    fn open(file: &Path) -> Result<Loaded, String> {
        let mut module = Module { now: std::ptr::null_mut(), shared: std::ptr::null_mut(), shared_end: std::ptr::null_mut() };
        // SAFETY: our own library, whose loading runs nothing; the function has this type in cuda.h.
        unsafe {
            let library = Library::new(file).map_err(|e| e.to_string())?;
            library.get::<unsafe extern "C" fn(*mut Module)>("emu_module_of").map_err(|e| e.to_string())?(&mut module);
            Ok(Loaded { library, module })
        }
    }
}
