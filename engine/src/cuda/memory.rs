//! Memory that the GPU reads and writes, and how much of it there is.

use super::failed;
use crate::error::Error;
use cudarc::driver::{result, sys};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Parts of an allocation start at multiples of so many bytes, as the driver's own allocations do.
const ALIGN: usize = 256;

/// Memory that the GPU reads and writes: its own, or pinned host memory that it reaches across the bus. A whole allocation or a part of one, which is freed
/// with its last part.
pub struct Memory {
    start: sys::CUdeviceptr,
    bytes: usize,
    whole: Arc<Allocation>,
}

/// What the driver gave.
struct Allocation {
    start: sys::CUdeviceptr,
    bytes: usize,
    context: sys::CUcontext,
    held: Arc<Held>,
    /// The host's address, if it is pinned host memory, which does not count as held.
    host: Option<*mut u8>,
}

// SAFETY: an address and the context it belongs to; freed once, by whoever drops it.
unsafe impl Send for Allocation {}
// SAFETY: as above; it is only an address.
unsafe impl Sync for Allocation {}

impl Memory {
    /// So many bytes of the GPU, not initialized. The context must be current on this thread.
    pub(super) fn on_device(context: sys::CUcontext, held: &Arc<Held>, bytes: usize) -> Result<Memory, Error> {
        let bytes = bytes.max(ALIGN);
        // SAFETY: the context is current on this thread; the address is kept and freed by `Allocation`.
        let start = unsafe { result::malloc_sync(bytes) }.map_err(|e| {
            let free = result::mem_get_info().map_or(0, |m| m.0);
            Error::Cuda(format!(
                "the GPU has too little memory: {:.2} GiB needed, {:.2} GiB free: {e}",
                bytes as f64 / 1e9 * 0.931,
                free as f64 / 1e9 * 0.931
            ))
        })?;
        held.take(bytes);
        Ok(Memory::whole(Allocation { start, bytes, context, held: held.clone(), host: None }))
    }

    /// So many bytes of pinned host memory that kernels read and write across the bus. The context must be current on this thread.
    pub(super) fn on_host(context: sys::CUcontext, held: &Arc<Held>, bytes: usize) -> Result<Memory, Error> {
        let bytes = bytes.max(ALIGN);
        // SAFETY: the context is current on this thread; the memory is freed by `Allocation`. The driver writes the address that kernels use.
        unsafe {
            let host = result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP).map_err(failed("pinning host memory"))?;
            let mut start = 0;
            let mapped = sys::cuMemHostGetDevicePointer_v2(&mut start, host, 0).result();
            let memory = Memory::whole(Allocation { start, bytes, context, held: held.clone(), host: Some(host.cast()) });
            mapped.map_err(failed("mapping host memory")).map(|()| memory)
        }
    }

    fn whole(a: Allocation) -> Memory {
        Memory { start: a.start, bytes: a.bytes, whole: Arc::new(a) }
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes that [`Memory::split_off`] takes for as many.
    pub fn padded(bytes: usize) -> usize {
        bytes.max(1).next_multiple_of(ALIGN)
    }

    /// Takes so many bytes from its start, padded; the rest stays.
    pub fn split_off(&mut self, bytes: usize) -> Memory {
        let taken = Memory::padded(bytes);
        assert!(taken <= self.bytes, "a part of {taken} bytes of {}", self.bytes);
        let part = Memory { start: self.start, bytes: taken, whole: self.whole.clone() };
        self.start += taken as u64;
        self.bytes -= taken;
        part
    }

    pub(crate) fn start(&self) -> sys::CUdeviceptr {
        self.start
    }

    /// The host's address of it, if it is pinned host memory.
    pub(super) fn host(&self) -> Option<*mut u8> {
        self.whole.host.map(|host| host.wrapping_add((self.start - self.whole.start) as usize))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: the address came from an allocation in this context and is freed once. Errors while a process ends are of no use.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            match self.host {
                Some(host) => drop(result::free_host(host.cast())),
                None => {
                    let _ = result::free_sync(self.start);
                    self.held.give_back(self.bytes);
                }
            }
        }
    }
}

/// Counts the bytes of every allocation on a GPU.
#[derive(Default)]
pub(super) struct Held {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Held {
    fn take(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    fn give_back(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes held now, and the most that were held at once.
    pub(super) fn bytes(&self) -> (usize, usize) {
        (self.now.load(Ordering::Relaxed), self.peak.load(Ordering::Relaxed))
    }
}

/// Bytes of a GPU's memory, as they were measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// What kiln has allocated now: states, arena, feeds, constants, workspace.
    pub allocated: usize,
    /// The most that it had allocated at once.
    pub allocated_peak: usize,
    /// How much less is free than when the GPU was opened, as the driver says: what is allocated, and what loaded kernels, captured graphs and libraries
    /// take. The CUDA context itself does not count; another process on the GPU does.
    pub reserved: usize,
    /// The most of that at any of the times it was asked for: after a program is loaded, and whenever someone measures.
    pub reserved_peak: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_that_is_held_at_once_is_kept() {
        let held = Held::default();
        held.take(100);
        held.take(50);
        held.give_back(100);
        held.take(20);
        assert_eq!(held.bytes(), (70, 150));
    }

    #[test]
    fn parts_follow_one_another_without_overlap() {
        // An allocation at a made-up address; forgotten, so that nothing is freed.
        let whole = Allocation { start: 0x1000, bytes: 1024, context: std::ptr::null_mut(), held: Arc::default(), host: None };
        let mut rest = Memory::whole(whole);
        let parts = [1, 256, 257].map(|bytes| rest.split_off(bytes));
        assert_eq!(parts.each_ref().map(|p| (p.start(), p.bytes())), [(0x1000, 256), (0x1100, 256), (0x1200, 512)]);
        assert_eq!(rest.bytes(), 0);
        std::mem::forget((parts, rest));
    }
}
