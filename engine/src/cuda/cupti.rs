//! CUPTI, loaded at run time: records of when every kernel and copy ran on the GPU, also inside a replayed CUDA graph, where a node's record carries the
//! node's id.
//!
//! How a record finds its op: while a program is captured (or launched), [`at`] names the step that is being launched. CUPTI calls back for every graph
//! node that is created, and for every node that is cloned when the graph is instantiated; so each id is known to belong to a step. Steps that are not
//! captured are found by the correlation id of the driver's call.

use super::libraries::{self, Folders, functions};
use cudarc::driver::sys::CUgraphNode;
use std::alloc::Layout;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// CUptiResult; 0 is success.
type Status = u32;
type Requested = extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Completed = extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);
type Called = extern "C" fn(*mut c_void, u32, u32, *const u8);

// Unchanged from CUDA 12 to 13.
functions! {
    version = "cuptiGetVersion": fn(*mut u32);
    text = "cuptiGetResultString": fn(Status, *mut *const c_char);
    register = "cuptiActivityRegisterCallbacks": fn(Requested, Completed);
    enable = "cuptiActivityEnable": fn(u32);
    disable = "cuptiActivityDisable": fn(u32);
    flush = "cuptiActivityFlushAll": fn(u32);
    next = "cuptiActivityGetNextRecord": fn(*mut u8, usize, *mut *const u8);
    dropped = "cuptiActivityGetNumDroppedRecords": fn(*mut c_void, u32, *mut usize);
    timestamp = "cuptiGetTimestamp": fn(*mut u64);
    subscribe = "cuptiSubscribe": fn(*mut *mut c_void, Called, *mut c_void);
    unsubscribe = "cuptiUnsubscribe": fn(*mut c_void);
    callback = "cuptiEnableCallback": fn(u32, *mut c_void, u32, u32);
    domain = "cuptiEnableDomain": fn(u32, *mut c_void, u32);
    node_id = "cuptiGetGraphNodeId": fn(CUgraphNode, *mut u64);
}

const MEMCPY: u32 = 1;
const MEMSET: u32 = 2;
const KERNEL: u32 = 10; // concurrent kernels: measured without serializing them
const KINDS: [u32; 3] = [MEMCPY, MEMSET, KERNEL];

const DRIVER_API: u32 = 1;
const RUNTIME_API: u32 = 2; // cuBLASLt calls it
const RESOURCE: u32 = 3;
const NODE_CREATED: u32 = 13;
const NODE_CLONED: u32 = 20;

/// What a record is of.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// A kernel, by its name in the module.
    Kernel(String),
    /// A copy of so many bytes.
    Copy(Way, u64),
    /// So many bytes that were set.
    Set(u64),
}

/// Between which memories a copy is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the host to the GPU.
    ToDevice,
    /// From the GPU to the host.
    ToHost,
    /// Within the GPU.
    Within,
}

/// One record: when something ran on the GPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Nanoseconds of CUPTI's clock.
    pub start: u64,
    /// The same for its end.
    pub end: u64,
    /// The driver's number of the stream.
    pub stream: u32,
    /// The graph's node, 0 where it was launched alone.
    pub node: u64,
    /// The number of the driver's call that started it.
    pub call: u32,
    /// What ran.
    pub work: Work,
}

/// The bytes of a record that are read. A longer one of a later version has the same fields in these places (CUDA 12.0 to 13.4).
const KERNEL_BYTES: usize = 152;
const MEMORY_BYTES: usize = 72;

/// The bytes that a record of this kind must have; None for kinds that are not asked for.
fn bytes_of(kind: u32) -> Option<usize> {
    match kind {
        KERNEL => Some(KERNEL_BYTES),
        MEMCPY | MEMSET => Some(MEMORY_BYTES),
        _ => None,
    }
}

/// Reads a record: CUpti_ActivityKernel9 to 13, CUpti_ActivityMemcpy6 and 7, CUpti_ActivityMemset4 and 5. `name`: the text at an address.
fn parse(record: &[u8], name: impl Fn(u64) -> String) -> Option<Record> {
    let u32_at = |at: usize| Some(u32::from_le_bytes(record.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(record.get(at..at + 8)?.try_into().ok()?));
    let (start, end) = (u64_at(16)?, u64_at(24)?);
    let kind = u32_at(0)?;
    let (stream, call, node) = match kind {
        KERNEL => (u32_at(48)?, u32_at(92)?, u64_at(144)?),
        MEMCPY | MEMSET => (u32_at(40)?, u32_at(44)?, u64_at(64)?),
        _ => return None,
    };
    let work = match kind {
        KERNEL => Work::Kernel(name(u64_at(104)?)),
        MEMSET => Work::Set(u64_at(8)?),
        _ => {
            let way = match record.get(4)? {
                1 | 3 => Way::ToDevice,
                2 | 4 => Way::ToHost,
                _ => Way::Within,
            };
            Work::Copy(way, u64_at(8)?)
        }
    };
    Some(Record { start, end, stream, node, call, work })
}

/// What CUPTI's threads and callbacks have told so far.
#[derive(Default)]
struct Told {
    records: Vec<Record>,
    /// Graph node -> step.
    nodes: HashMap<u64, u64>,
    /// The driver's call -> step.
    calls: HashMap<u32, u64>,
    dropped: usize,
}

static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
static TOLD: Mutex<Option<Told>> = Mutex::new(None);

const NOTHING: u64 = u64::MAX;
/// The step that is being launched.
static HERE: AtomicU64 = AtomicU64::new(NOTHING);

/// Says which step is launched next, or none. A store and no more: it costs nothing where nobody listens.
pub fn at(step: Option<u64>) {
    HERE.store(step.unwrap_or(NOTHING), Ordering::Relaxed);
}

fn told() -> MutexGuard<'static, Option<Told>> {
    TOLD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn functions() -> &'static Functions {
    FUNCTIONS.get().and_then(|f| f.as_ref().ok()).expect("CUPTI calls back only where it was loaded")
}

const BUFFER: Layout = Layout::new::<[[u64; 1 << 10]; 1 << 9]>(); // 4 MiB, aligned to 8 bytes

extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, most: *mut usize) {
    // SAFETY: CUPTI passes three places to write to. It gives the buffer back to `completed`, which frees it.
    unsafe {
        *buffer = std::alloc::alloc(BUFFER);
        *size = if (*buffer).is_null() { 0 } else { BUFFER.size() };
        *most = 0;
    }
}

extern "C" fn completed(context: *mut c_void, stream: u32, buffer: *mut u8, _: usize, valid: usize) {
    let (f, mut records, mut dropped) = (functions(), vec![], 0);
    let mut at = std::ptr::null();
    // SAFETY: the buffer is one of ours with `valid` bytes of records. CUPTI's own function walks it, and a record has at least the bytes that its
    // kind says. A kernel's name lives as long as its module.
    unsafe {
        while (f.next)(buffer, valid, &mut at) == 0 {
            let Some(bytes) = bytes_of(at.cast::<u32>().read_unaligned()) else { continue };
            let name = |at: u64| match at {
                0 => String::new(),
                at => CStr::from_ptr(at as *const c_char).to_string_lossy().into_owned(),
            };
            records.extend(parse(std::slice::from_raw_parts(at, bytes), name));
        }
        let _ = (f.dropped)(context, stream, &mut dropped);
        std::alloc::dealloc(buffer, BUFFER);
    }
    // Only now, so that no lock is held while CUPTI is called.
    if let Some(told) = &mut *told() {
        told.records.append(&mut records);
        told.dropped += dropped;
    }
}

extern "C" fn called(_: *mut c_void, domain: u32, id: u32, data: *const u8) {
    let here = HERE.load(Ordering::Relaxed);
    // SAFETY: the layouts are those of CUpti_ResourceData with CUpti_GraphData, and of CUpti_CallbackData, which all versions since CUDA 11 share.
    unsafe {
        if domain != RESOURCE {
            if here != NOTHING
                && let Some(told) = &mut *told()
            {
                told.calls.insert(data.add(64).cast::<u32>().read(), here);
            }
            return;
        }
        let graph = data.add(16).cast::<*const u8>().read();
        let id_of = |at: usize| {
            let (node, mut id) = (graph.add(at).cast::<CUgraphNode>().read(), 0);
            (!node.is_null() && (functions().node_id)(node, &mut id) == 0).then_some(id)
        };
        let (node, original) = (id_of(16), if id == NODE_CLONED { id_of(24) } else { None });
        let (Some(node), Some(told)) = (node, &mut *told()) else { return };
        let step = match original {
            Some(original) => told.nodes.get(&original).copied(),
            // Nodes of an instantiated graph are created as well, while no step is launched, and cloned.
            None => Some(here).filter(|here| *here != NOTHING),
        };
        told.nodes.extend(step.map(|step| (node, step)));
    }
}

/// CUPTI at work: between `start` and `stop` everything that runs on the GPU is recorded.
pub struct Cupti {
    subscriber: *mut c_void,
    /// `libcupti.so.13, version 130001`
    pub what: String,
}

/// What was recorded.
pub struct Recorded {
    /// Each record, and the step that it belongs to, by the number that [`at`] was given.
    pub records: Vec<(Record, Option<u64>)>,
    /// Records that CUPTI had no room for.
    pub dropped: usize,
}

impl Cupti {
    /// Loads CUPTI, and begins to record. An error says why that cannot be.
    pub fn start(folders: &Folders) -> Result<Cupti, String> {
        let found = libraries::cupti(folders);
        let path = found.path.clone().ok_or_else(|| found.problem().unwrap_or_default())?;
        let loaded = FUNCTIONS.get_or_init(|| Functions::open(&path));
        let f = loaded.as_ref().map_err(|e| format!("{}: {e}", path.display()))?;
        let mut version = 0;
        let mut subscriber = std::ptr::null_mut();
        // SAFETY: the pointers are to live places; the callbacks live as long as the process.
        unsafe {
            ok("asking for its version", (f.version)(&mut version))?;
            // One profiler at a time: under Nsight this fails.
            ok("subscribing", (f.subscribe)(&mut subscriber, called, std::ptr::null_mut()))?;
            *told() = Some(Told::default());
            let cupti = Cupti { subscriber, what: format!("{}, version {version}", path.display()) };
            ok("registering buffers", (f.register)(requested, completed))?;
            for id in [NODE_CREATED, NODE_CLONED] {
                ok("asking for graph nodes", (f.callback)(1, subscriber, RESOURCE, id))?;
            }
            for domain in [DRIVER_API, RUNTIME_API] {
                ok("asking for calls", (f.domain)(1, subscriber, domain))?;
            }
            for kind in KINDS {
                ok("asking for records", (f.enable)(kind))?;
            }
            Ok(cupti)
        }
    }

    /// Nanoseconds of CUPTI's clock.
    pub fn now(&self) -> u64 {
        let mut now = 0;
        // SAFETY: the pointer is to a live integer.
        let _ = unsafe { (functions().timestamp)(&mut now) };
        now
    }

    /// Ends recording. The GPU must have finished.
    pub fn stop(self) -> Result<Recorded, String> {
        // SAFETY: no pointers.
        ok("collecting records", unsafe { (functions().flush)(1) })?;
        drop(self);
        let Told { mut records, nodes, calls, dropped } = told().take().unwrap_or_default();
        records.sort_by_key(|r| (r.start, r.end));
        let step = |r: &Record| if r.node == 0 { calls.get(&r.call).copied() } else { nodes.get(&r.node).copied() };
        Ok(Recorded { records: records.into_iter().map(|r| (step(&r), r)).map(|(step, r)| (r, step)).collect(), dropped })
    }
}

impl Drop for Cupti {
    fn drop(&mut self) {
        at(None);
        let f = functions();
        // SAFETY: the handle is ours. Errors while it ends are of no use.
        unsafe {
            for kind in KINDS {
                let _ = (f.disable)(kind);
            }
            let _ = (f.unsubscribe)(self.subscriber);
        }
    }
}

fn ok(what: &str, status: Status) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: CUPTI writes the address of a text that is never freed.
    let said = unsafe {
        match (functions().text)(status, &mut text) == 0 && !text.is_null() {
            true => CStr::from_ptr(text).to_string_lossy().into_owned(),
            false => format!("error {status}"),
        }
    };
    Err(format!("CUPTI, {what}: {said}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record of `size` bytes with these fields, little-endian; the rest is noise that must not matter.
    fn record(size: usize, u32s: &[(usize, u32)], u64s: &[(usize, u64)]) -> Vec<u8> {
        let mut bytes = vec![0xa5; size];
        u32s.iter().for_each(|(at, v)| bytes[*at..*at + 4].copy_from_slice(&v.to_le_bytes()));
        u64s.iter().for_each(|(at, v)| bytes[*at..*at + 8].copy_from_slice(&v.to_le_bytes()));
        bytes
    }

    /// Sizes of CUpti_ActivityKernel9 (CUDA 12), 10 (13.0), 11, 12 and 13 (13.4).
    #[test]
    fn kernels_of_every_version_are_read() {
        for size in [208, 216, 224, 232, 248] {
            let bytes = record(size, &[(0, 10), (40, 3), (48, 17), (92, 99)], &[(16, 1_000), (24, 1_250), (104, 5), (144, 7 << 32 | 4)]);
            let read = parse(&bytes[..bytes_of(10).unwrap()], |at| format!("name at {at}")).unwrap();
            let work = Work::Kernel("name at 5".into());
            assert_eq!(read, Record { start: 1_000, end: 1_250, stream: 17, node: 7 << 32 | 4, call: 99, work });
        }
    }

    /// Sizes of CUpti_ActivityMemcpy6 and 7, CUpti_ActivityMemset4 and 5.
    #[test]
    fn copies_and_fills_of_every_version_are_read() {
        let places = (&[(40, 2), (44, 98)], &[(8, 4096), (16, 10), (24, 30), (64, 0)]);
        for size in [96, 112] {
            for (kind, way) in [(1, Way::ToDevice), (2, Way::ToHost), (8, Way::Within)] {
                let mut bytes = record(size, places.0, places.1);
                bytes[..5].copy_from_slice(&[1, 0, 0, 0, kind]);
                let read = parse(&bytes[..bytes_of(1).unwrap()], |_| unreachable!()).unwrap();
                assert_eq!(read, Record { start: 10, end: 30, stream: 2, node: 0, call: 98, work: Work::Copy(way, 4096) });
            }
        }
        for size in [88, 104] {
            let bytes = record(size, &[(0, 2), (40, 2), (44, 98)], places.1);
            assert_eq!(parse(&bytes[..bytes_of(2).unwrap()], |_| unreachable!()).unwrap().work, Work::Set(4096));
        }
    }

    #[test]
    fn what_is_cut_or_of_another_kind_is_no_record() {
        let whole = record(208, &[(0, 10)], &[]);
        assert!(parse(&whole[..KERNEL_BYTES - 1], |_| String::new()).is_none());
        assert!(parse(&record(208, &[(0, 4)], &[]), |_| String::new()).is_none() && bytes_of(4).is_none());
    }

    #[test]
    fn a_library_that_is_not_there_says_how_to_get_it() {
        let said = libraries::cupti(&Folders::default()).problem();
        assert!(said.is_none_or(|said| said.contains("nvidia-cuda-cupti") && said.contains("libcupti")));
    }
}
