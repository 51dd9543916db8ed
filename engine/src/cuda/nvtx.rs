//! NVTX: named ranges for a profiler that is attached to the process, such as Nsight Systems. NVTX is a handshake and no library: the profiler names its
//! own library in NVTX_INJECTION64_PATH, which is loaded and handed a table of places that it writes its functions to. Without one, a range costs a load.

use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Functions of a module, by their numbers in nvtxTypes.h; none is number 0.
const MOST: usize = 16;
const CORE: u32 = 1;
const PUSH: usize = 9; // nvtxRangePushA
const POP: usize = 11; // nvtxRangePop
/// The functions of each module: core, CUDA, OpenCL, CUDA's runtime, core 2 (domains), synchronization.
const SIZES: [usize; 6] = [16, 9, 15, 7, 16, 7];

type Slot = AtomicPtr<c_void>;
type Table = [*const Slot; MOST + 1];
type Push = unsafe extern "C" fn(*const c_char) -> i32;
type Pop = unsafe extern "C" fn() -> i32;

static CORE_SLOTS: [Slot; MOST] = [const { Slot::new(std::ptr::null_mut()) }; MOST];
/// What is never called by us: the profiler may write there all the same.
static OTHER_SLOTS: [Slot; MOST] = [const { Slot::new(std::ptr::null_mut()) }; MOST];

/// NvtxExportTableCallbacks
#[repr(C)]
struct Callbacks {
    size: usize,
    table: extern "C" fn(u32, *mut *const *const Slot, *mut u32) -> i32,
}

/// NvtxExportTableVersionInfo
#[repr(C)]
struct Version {
    size: usize,
    version: u32,
    reserved: u32,
    set: extern "C" fn(u32),
}

struct Tables([Table; 6]);

// SAFETY: addresses of statics, never changed.
unsafe impl Send for Tables {}
// SAFETY: as above.
unsafe impl Sync for Tables {}

static TABLES: OnceLock<Tables> = OnceLock::new();
static CALLBACKS: Callbacks = Callbacks { size: size_of::<Callbacks>(), table: module };
static VERSION: Version = Version { size: size_of::<Version>(), version: 3, reserved: 0, set: version };

extern "C" fn version(_: u32) {}

/// GetModuleFunctionTable: where a module's functions are to be written.
extern "C" fn module(module: u32, table: *mut *const *const Slot, size: *mut u32) -> i32 {
    let Some(&functions) = (module as usize).checked_sub(1).and_then(|i| SIZES.get(i)) else { return 0 };
    let tables = TABLES.get_or_init(|| {
        let of = |module: usize| {
            let slots = if module + 1 == CORE as usize { &CORE_SLOTS } else { &OTHER_SLOTS };
            let slot = |i: usize| if (1..SIZES[module]).contains(&i) { &slots[i] as *const Slot } else { std::ptr::null() };
            std::array::from_fn(slot)
        };
        Tables(std::array::from_fn(of))
    });
    // SAFETY: the profiler passes places to write to, or null.
    unsafe {
        if !size.is_null() {
            *size = functions as u32;
        }
        if !table.is_null() {
            *table = tables.0[module as usize - 1].as_ptr();
        }
    }
    1
}

/// nvtxGetExportTable
extern "C" fn export(id: u32) -> *const c_void {
    match id {
        1 => (&raw const CALLBACKS).cast(),
        3 => (&raw const VERSION).cast(),
        _ => std::ptr::null(),
    }
}

/// Whether a profiler listens.
static ATTACHED: OnceLock<bool> = OnceLock::new();

/// Loads a profiler's library and lets it attach itself; the first call counts.
pub fn attach(library: &Path) -> Result<(), String> {
    let mut said = Ok(());
    ATTACHED.get_or_init(|| {
        said = load(library).map_err(|why| format!("{}: {why}", library.display()));
        said.is_ok()
    });
    said
}

fn load(library: &Path) -> Result<(), String> {
    type Initialize = unsafe extern "C" fn(extern "C" fn(u32) -> *const c_void) -> i32;
    // SAFETY: the library is a profiler's, named by whoever started the process; its function has this type by NVTX's definition. It is never closed.
    unsafe {
        let library = libloading::os::unix::Library::new(library).map_err(|e| e.to_string())?;
        let initialize: Initialize =
            *library.get(b"InitializeInjectionNvtx2\0").map_err(|_| "it has no function InitializeInjectionNvtx2")?;
        std::mem::forget(library);
        match initialize(export) {
            0 => Err("it did not attach itself".into()),
            _ => Ok(()),
        }
    }
}

/// Whether ranges are seen by anyone.
pub fn is_attached() -> bool {
    ATTACHED.get() == Some(&true)
}

/// Ranges that end when this is dropped.
#[must_use = "the ranges end when this is dropped"]
pub struct Ranges(usize);

/// Opens ranges inside each other, if a profiler listens.
pub fn ranges<const N: usize>(names: [&str; N]) -> Ranges {
    let push = CORE_SLOTS[PUSH].load(Ordering::Acquire);
    if push.is_null() {
        return Ranges(0);
    }
    for name in names {
        let text = CString::new(name.replace('\0', "")).expect("without zeros");
        // SAFETY: the profiler wrote the address of a function of this type; it copies the text.
        unsafe { std::mem::transmute::<*mut c_void, Push>(push)(text.as_ptr()) };
    }
    Ranges(N)
}

/// Opens a range.
pub fn range(name: &str) -> Ranges {
    ranges([name])
}

impl Drop for Ranges {
    fn drop(&mut self) {
        let pop = CORE_SLOTS[POP].load(Ordering::Acquire);
        for _ in 0..if pop.is_null() { 0 } else { self.0 } {
            // SAFETY: the profiler wrote the address of a function of this type.
            unsafe { std::mem::transmute::<*mut c_void, Pop>(pop)() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;
    use std::sync::Mutex;

    static SEEN: Mutex<Vec<String>> = Mutex::new(vec![]);

    unsafe extern "C" fn push(text: *const c_char) -> i32 {
        // SAFETY: a C string, by the caller.
        SEEN.lock().unwrap().push(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        0
    }

    unsafe extern "C" fn pop() -> i32 {
        SEEN.lock().unwrap().push("end".into());
        0
    }

    /// Attaches as a profiler does: by the exported table, a module's size, and a place for each function.
    #[test]
    fn a_profiler_that_attaches_itself_sees_the_ranges() {
        assert!(export(2).is_null() && module(0, std::ptr::null_mut(), std::ptr::null_mut()) == 0);
        // SAFETY: what `export` gives out is a static of that type.
        let (callbacks, version) = unsafe { (&*export(1).cast::<Callbacks>(), &*export(3).cast::<Version>()) };
        assert_eq!((callbacks.size, version.size, version.version), (16, 24, 3));
        drop(range("before anyone listens"));
        for m in 1..=6 {
            let (mut table, mut size) = (std::ptr::null(), 0);
            assert_eq!((callbacks.table)(m, &mut table, &mut size), 1);
            assert_eq!(size as usize, SIZES[m as usize - 1]);
            for i in 0..=size as usize {
                // SAFETY: the table has `size` + 1 entries.
                let slot = unsafe { *table.add(i) };
                assert_eq!(slot.is_null(), i == 0 || i == size as usize, "module {m}, function {i}");
                if m == CORE && (i == PUSH || i == POP) {
                    let function = if i == PUSH { push as *mut c_void } else { pop as *mut c_void };
                    // SAFETY: not null, and a static.
                    unsafe { &*slot }.store(function, Ordering::Release);
                }
            }
        }
        {
            let _train = range("train");
            drop(ranges(["blocks.3.attn", "flash_attention_grad"]));
        }
        assert_eq!(*SEEN.lock().unwrap(), ["train", "blocks.3.attn", "flash_attention_grad", "end", "end", "end"]);
    }

    #[test]
    fn a_library_that_is_none_is_an_error() {
        assert!(load(Path::new("/no/such/library.so")).is_err());
    }
}
