//! The GPU executor: libraries loaded at run time, kernels compiled by NVRTC, GEMMs by cuBLASLt, programs captured as CUDA graphs.
#![allow(unsafe_code)]

mod cache;
mod choices;
pub(crate) mod cupti;
pub mod emulator;
pub(crate) mod fallback;
mod gemm;
mod libraries;
mod memory;
mod moment;
pub mod nccl;
pub mod nvrtc;
pub mod nvtx;
mod options;
mod products;
mod program;
mod transfer;
mod trust;

pub use fallback::Fallback;
pub use libraries::{Folders, Found, find, nvml};
pub(crate) use libraries::{Wanted, found, functions};
use memory::Held;
pub use memory::{Memory, Usage};
pub use moment::Moment;
pub use options::Options;
pub(crate) use program::codes;
pub use program::{CudaProgram, Timed};
pub use transfer::Incoming;
pub use trust::trusted;

use crate::error::Error;
use crate::kernel::Arch;
use cudarc::driver::{result, sys};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Workspace that cuBLASLt may use for one GEMM.
const GEMM_WORKSPACE: usize = 32 << 20;

/// One GPU: its context, the stream that everything runs on, and the kernels loaded so far.
#[derive(Clone)]
pub struct Cuda(Arc<Inner>);

struct Inner {
    name: String,
    arch: Arch,
    memory: usize,
    /// Bytes that were free when the context had been made.
    free: usize,
    /// The most bytes less than that which were seen free.
    reserved_peak: AtomicUsize,
    held: Arc<Held>,
    context: sys::CUcontext,
    stream: sys::CUstream,
    /// Feeds are copied on this stream, concurrently with kernels.
    copies: sys::CUstream,
    /// Values are exchanged with other ranks on this stream, concurrently with kernels.
    aside: sys::CUstream,
    products: gemm::Handle,
    workspace: Memory,
    compiler: nvrtc::Compiler,
    kernels: Mutex<HashMap<(u64, &'static str), Kernel>>,
    choices: Mutex<choices::Choices>,
    landings: Mutex<Vec<transfer::Landing>>,
}

// SAFETY: the handles may be used from any thread that makes the context current, which every entry point does; the map is
// behind a lock.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

#[derive(Clone, Copy)]
pub(crate) struct Kernel(sys::CUfunction);

pub(crate) fn failed(what: &str) -> impl Fn(result::DriverError) -> Error + '_ {
    move |e| Error::Cuda(format!("{what}: {e}"))
}

/// How many GPUs the driver reports; none where it or a library is missing. Opens none of them.
pub fn count(folders: &Folders) -> usize {
    let counted = || result::init().and_then(|()| result::device::get_count());
    let usable = find(folders).iter().all(|f| f.path.is_some());
    if usable { counted().map_or(0, |n| n.max(0) as usize) } else { 0 }
}

impl Cuda {
    /// Opens GPU number `ordinal`. A missing driver or library is an error that says how to get it.
    pub fn open(ordinal: usize, folders: &Folders) -> Result<Cuda, Error> {
        let found = find(folders);
        if let Some(problem) = found.iter().find_map(|f| f.problem()) {
            return Err(Error::Cuda(problem));
        }
        result::init().map_err(failed("initializing the driver"))?;
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        let _ = unsafe { sys::cuDriverGetVersion(&mut version) };
        if version < 13000 {
            return Err(Error::Cuda(format!(
                "the driver supports CUDA {}.{}, but 13.0 or later is needed: install driver 580 or later",
                version / 1000,
                version % 1000 / 10
            )));
        }
        if gemm::Handle::version() < 130000 {
            return Err(Error::Cuda(format!("cuBLASLt {} was found, but version 13 is needed", gemm::Handle::version())));
        }
        let count = result::device::get_count().map_err(failed("counting GPUs"))?;
        if ordinal >= count as usize {
            return Err(Error::Cuda(format!("there is no GPU number {ordinal}: the driver reports {count}")));
        }
        let device = result::device::get(ordinal as i32).map_err(failed("opening the GPU"))?;
        // SAFETY: `device` was just given out by the driver; the primary context stays for the life of the process.
        let (context, memory, sm, multiprocessors) = unsafe {
            let attribute = |a| result::device::get_attribute(device, a).map_err(failed("querying the GPU"));
            use sys::CUdevice_attribute_enum as A;
            let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
            let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
            let count = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
            let context = result::primary_ctx::retain(device).map_err(failed("creating a context"))?;
            result::ctx::set_current(context).map_err(failed("creating a context"))?;
            let memory = result::device::total_mem(device).map_err(failed("querying the GPU"))?;
            (context, memory, (10 * major + minor) as u32, count as u32)
        };
        if sm < 80 {
            return Err(Error::Cuda(format!("compute capability {}.{} is too old: the kernels need 8.0 or later", sm / 10, sm % 10)));
        }
        let arch = Arch { sm, multiprocessors };
        let free = result::mem_get_info().map_or(0, |m| m.0);
        let held = Arc::<Held>::default();
        let stream = || result::stream::create(result::stream::StreamKind::NonBlocking).map_err(failed("creating a stream"));
        let (stream, copies, aside) = (stream()?, stream()?, stream()?);
        let name = result::device::get_name(device).map_err(failed("querying the GPU"))?;
        let choices = choices::Choices::open(&folders.cache, &name, gemm::Handle::version());
        let inner = Inner {
            name,
            arch,
            memory,
            context,
            stream,
            copies,
            aside,
            products: gemm::Handle::new()?,
            workspace: Memory::on_device(context, &held, GEMM_WORKSPACE)?,
            free,
            reserved_peak: AtomicUsize::new(0),
            held,
            compiler: nvrtc::Compiler::new(arch, &folders.cache)?,
            kernels: Mutex::default(),
            choices: Mutex::new(choices),
            landings: Mutex::default(),
        };
        Ok(Cuda(Arc::new(inner)))
    }

    /// The GPU's name, as the driver reports it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its compute capability and size.
    pub fn arch(&self) -> Arch {
        self.0.arch
    }

    /// `driver for CUDA 13.0, NVRTC 13.0, cuBLASLt 13.1.0`
    pub fn versions(&self) -> String {
        let mut driver = 0;
        // SAFETY: the pointer is to a live integer.
        let _ = unsafe { sys::cuDriverGetVersion(&mut driver) };
        let (major, minor) = self.0.compiler.version();
        let lt = gemm::Handle::version();
        format!(
            "driver for CUDA {}.{}, NVRTC {major}.{minor}, cuBLASLt {}.{}.{}",
            driver / 1000,
            driver % 1000 / 10,
            lt / 10000,
            lt / 100 % 100,
            lt % 100
        )
    }

    /// The GPU's memory in bytes: all of it, and what is free now.
    pub fn memory(&self) -> (usize, usize) {
        self.current();
        (self.0.memory, result::mem_get_info().map_or(0, |m| m.0))
    }

    /// Bytes that are used besides programs and states: cuBLASLt's workspace.
    pub const OWN_MEMORY: usize = GEMM_WORKSPACE;

    fn current(&self) {
        // SAFETY: the context lives as long as the process. An error here shows at the next call.
        let _ = unsafe { result::ctx::set_current(self.0.context) };
    }

    /// Where the GPU is on the machine's PCI bus, such as `0000:3b:00.0`.
    pub fn pci_bus_id(&self) -> Option<String> {
        self.current();
        let (mut device, mut text) = (0, [0; 32]);
        // SAFETY: the context is current on this thread; the driver writes an integer, and a text with its end into the 32 bytes.
        unsafe {
            sys::cuCtxGetDevice(&mut device).result().ok()?;
            sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as i32, device).result().ok()?;
            Some(std::ffi::CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned())
        }
    }

    /// Allocates memory that is not initialized; an error if the GPU has too little.
    pub fn allocate(&self, bytes: usize) -> Result<Memory, Error> {
        self.current();
        Memory::on_device(self.0.context, &self.0.held, bytes)
    }

    /// What is in use now, and was at most.
    pub fn usage(&self) -> Usage {
        let reserved = self.0.free.saturating_sub(self.memory().1);
        let reserved_peak = self.0.reserved_peak.fetch_max(reserved, Ordering::Relaxed).max(reserved);
        let (allocated, allocated_peak) = self.0.held.bytes();
        Usage { allocated, allocated_peak, reserved, reserved_peak }
    }

    /// Allocates pinned host memory that kernels read and write across the bus.
    pub fn allocate_on_host(&self, bytes: usize) -> Result<Memory, Error> {
        self.current();
        Memory::on_host(self.0.context, &self.0.held, bytes)
    }

    /// Waits until everything launched so far has finished.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.current();
        // SAFETY: the stream is ours and alive.
        unsafe { result::stream::synchronize(self.0.stream) }.map_err(failed("running on the GPU"))
    }

    /// Copies from the host to the start of `to`, and waits for it.
    pub fn upload(&self, to: &Memory, bytes: &[u8]) -> Result<(), Error> {
        assert!(bytes.len() <= to.bytes(), "an upload past the end of its buffer");
        self.current();
        if let Some(host) = to.host() {
            self.synchronize()?;
            // SAFETY: as large as asserted, and nothing runs that uses it.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), host, bytes.len()) };
            return Ok(());
        }
        // SAFETY: the destination is as large as asserted; waiting for the stream keeps `bytes` alive until they are read.
        unsafe { result::memcpy_htod_async(to.start(), bytes, self.0.stream) }.map_err(failed("copying to the GPU"))?;
        self.synchronize()
    }

    /// Sets every byte.
    pub fn fill(&self, d: &Memory, byte: u8) -> Result<(), Error> {
        self.current();
        if let Some(host) = d.host() {
            self.synchronize()?;
            // SAFETY: the memory is that large, and nothing runs that uses it.
            unsafe { std::ptr::write_bytes(host, byte, d.bytes()) };
            return Ok(());
        }
        // SAFETY: the memory is that large.
        unsafe { result::memset_d8_async(d.start(), byte, d.bytes(), self.0.stream) }.map_err(failed("filling memory"))
    }

    /// Memory bandwidth, in bytes read and written per second, measured with a device-to-device copy; the reference for memory-bound kernels.
    pub fn copy_speed(&self) -> Result<f64, Error> {
        const BYTES: usize = 1 << 30;
        let (a, b) = (self.allocate(BYTES)?, self.allocate(BYTES)?);
        let copy = || {
            // SAFETY: both buffers have that many bytes.
            unsafe { result::memcpy_dtod_async(b.start(), a.start(), BYTES, self.0.stream) }.map_err(failed("copying"))
        };
        copy()?;
        self.synchronize()?;
        let start = std::time::Instant::now();
        for _ in 0..20 {
            copy()?;
        }
        self.synchronize()?;
        Ok(20.0 * 2.0 * BYTES as f64 / start.elapsed().as_secs_f64())
    }

    /// Copies part of `from` to the host, and waits for it.
    pub fn download(&self, from: &Memory, offset: usize, bytes: usize) -> Result<Vec<u8>, Error> {
        assert!(offset + bytes <= from.bytes(), "a download past the end of its buffer");
        self.current();
        let mut to = vec![0u8; bytes];
        if let Some(host) = from.host() {
            self.synchronize()?;
            // SAFETY: as large as asserted, and nothing runs that writes it.
            unsafe { std::ptr::copy_nonoverlapping(host.add(offset), to.as_mut_ptr(), bytes) };
            return Ok(to);
        }
        // SAFETY: the source is as large as asserted; waiting for the stream keeps `to` alive until it is written.
        unsafe { result::memcpy_dtoh_async(&mut to, from.start() + offset as u64, self.0.stream) }
            .map_err(failed("copying from the GPU"))?;
        self.synchronize()?;
        Ok(to)
    }

    /// The GEMM algorithms that this process has used, as text. A later process that passes them to `prefer` gets the same bits.
    pub fn choices(&self) -> Vec<String> {
        self.0.choices.lock().unwrap_or_else(PoisonError::into_inner).used()
    }

    /// How many preferred or remembered algorithms cuBLASLt does not offer for their GEMMs; others were used instead.
    pub fn choices_refused(&self) -> usize {
        self.0.choices.lock().unwrap_or_else(PoisonError::into_inner).refused
    }

    /// Uses these algorithms instead of those timed on this machine. False if they are for another GPU or library version.
    pub fn prefer(&self, choices: &[String]) -> bool {
        self.0.choices.lock().unwrap_or_else(PoisonError::into_inner).prefer(choices)
    }

    /// Kernels, or why there are none, compiling in parallel what is not cached. One source may have several kernels.
    pub(crate) fn kernels(&self, wanted: &[fallback::Wanted]) -> Vec<Result<Kernel, String>> {
        self.current();
        let mut loaded = self.0.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let keys: Vec<(u64, &'static str)> = wanted.iter().map(|(text, entry, _)| (nvrtc::hash(text), *entry)).collect();
        let mut texts: Vec<(u64, usize)> = (0..wanted.len()).filter(|&i| !loaded.contains_key(&keys[i])).map(|i| (keys[i].0, i)).collect();
        texts.sort();
        texts.dedup_by_key(|t| t.0);
        let cubins = self.0.compiler.compile_all(&texts.iter().map(|t| wanted[t.1].0.as_str()).collect::<Vec<_>>());
        let mut problems: HashMap<u64, String> = HashMap::new();
        for (&(hash, _), cubin) in texts.iter().zip(cubins) {
            let own = (0..wanted.len()).filter(|&i| keys[i].0 == hash);
            let functions = cubin.and_then(|cubin| load(&cubin, &own.clone().map(|i| (wanted[i].1, wanted[i].2)).collect::<Vec<_>>()));
            match functions {
                Ok(functions) => loaded.extend(own.map(|i| keys[i]).zip(functions)),
                Err(e) => drop(problems.insert(hash, e.to_string())),
            }
        }
        let one = |key: &(u64, &'static str)| loaded.get(key).copied().ok_or_else(|| problems.get(&key.0).cloned().unwrap_or_default());
        keys.iter().map(one).collect()
    }
}

/// Functions of a cubin, each with the dynamic shared memory that it is launched with.
fn load(cubin: &[u8], functions: &[(&'static str, u32)]) -> Result<Vec<Kernel>, Error> {
    // SAFETY: the image is a whole cubin for this GPU, as NVRTC made it; modules are never unloaded, so functions stay valid.
    let module = unsafe { result::module::load_data(cubin.as_ptr().cast()) }.map_err(failed("loading a kernel"))?;
    let one = |&(entry, shared): &(&'static str, u32)| {
        let name = std::ffi::CString::new(entry).expect("a C name");
        // SAFETY: the module was just loaded.
        let function = unsafe { result::module::get_function(module, name) }.map_err(failed(entry))?;
        use sys::CUfunction_attribute_enum as Attribute;
        let set = |attribute, value| {
            // SAFETY: the function was just loaded.
            unsafe { result::function::set_function_attribute(function, attribute, value) }.map_err(failed(entry))
        };
        if shared > 48 << 10 {
            set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared as i32)?;
        }
        // Kernels run on a multiprocessor together only if they have the same shared memory carveout: here the maximum.
        if shared > 16 << 10 {
            set(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)?;
        }
        Ok(Kernel(function))
    };
    functions.iter().map(one).collect()
}
