//! Asynchronous copies between host and GPU: feeds go through two pinned buffers on a stream of their own, and results are copied to pinned memory
//! while the next run is under way.

use super::{Cuda, Memory, failed};
use crate::error::Error;
use cudarc::driver::{result, sys};
use std::sync::PoisonError;

/// Pinned host memory, for asynchronous copies.
pub struct Pinned {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: an address and a size; used by whoever owns it.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(bytes: usize) -> Result<Pinned, Error> {
        let bytes = bytes.max(64);
        // SAFETY: the context is current; the memory is freed once, by Drop.
        let start = unsafe { result::malloc_host(bytes, 0) }.map_err(failed("pinning memory"))?;
        Ok(Pinned { start: start.cast(), bytes })
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory is that large and ours alone; callers wait for the GPU before they touch it.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: from `malloc_host`, freed once.
        let _ = unsafe { result::free_host(self.start.cast()) };
    }
}

/// A CUDA event.
pub struct Event(sys::CUevent);

// SAFETY: a handle of the driver's.
unsafe impl Send for Event {}

impl Event {
    pub fn new() -> Result<Event, Error> {
        result::event::create(sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING).map(Event).map_err(failed("creating an event"))
    }

    /// One that notes when it passes.
    pub fn timed() -> Result<Event, Error> {
        result::event::create(sys::CUevent_flags_enum::CU_EVENT_DEFAULT).map(Event).map_err(failed("creating an event"))
    }

    /// Between two that note when they pass, and have passed.
    pub fn milliseconds_since(&self, earlier: &Event) -> Result<f32, result::DriverError> {
        // SAFETY: both are alive.
        unsafe { result::event::elapsed(earlier.0, self.0) }
    }

    pub fn record(&self, stream: sys::CUstream) -> Result<(), Error> {
        // SAFETY: both are alive.
        unsafe { result::event::record(self.0, stream) }.map_err(failed("recording an event"))
    }

    /// Lets the host wait for it.
    pub fn wait(&self) -> Result<(), Error> {
        // SAFETY: the event is alive. One that was never recorded has passed.
        unsafe { result::event::synchronize(self.0) }.map_err(failed("running on the GPU"))
    }

    pub fn has_passed(&self) -> bool {
        // SAFETY: the event is alive. An error here shows when it is waited for.
        unsafe { result::event::query(self.0) }.is_ok()
    }

    /// Lets a stream wait for it.
    pub fn hold(&self, stream: sys::CUstream) -> Result<(), Error> {
        let flags = sys::CUevent_wait_flags_enum::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive.
        unsafe { result::stream::wait_event(stream, self.0, flags) }.map_err(failed("waiting for an event"))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// A program's feeds, in one buffer.
pub struct Feeds {
    /// (node, first byte).
    places: Vec<(usize, usize)>,
    device: Memory,
    stages: [Stage; 2],
    next: usize,
}

/// One of two staging buffers.
struct Stage {
    host: Pinned,
    device: Memory,
    /// Recorded when the host buffer has been copied.
    read: Event,
    /// Recorded when the device buffer has been copied to the program's.
    taken: Event,
}

impl Feeds {
    /// `sizes`: (node, bytes) of each feed.
    pub fn new(cuda: &Cuda, sizes: &[(usize, usize)]) -> Result<Feeds, Error> {
        cuda.current();
        let (mut places, mut total) = (vec![], 0);
        for &(node, bytes) in sizes {
            places.push((node, total));
            total += bytes.next_multiple_of(256);
        }
        let stage = || -> Result<Stage, Error> {
            Ok(Stage { host: Pinned::new(total)?, device: cuda.allocate(total)?, read: Event::new()?, taken: Event::new()? })
        };
        Ok(Feeds { places, device: cuda.allocate(total)?, stages: [stage()?, stage()?], next: 0 })
    }

    pub fn address(&self, node: usize) -> Option<u64> {
        let place = self.places.iter().find(|p| p.0 == node)?;
        Some(self.device.start() + place.1 as u64)
    }

    pub fn device(&self) -> &Memory {
        &self.device
    }

    pub fn offset(&self, node: usize) -> usize {
        self.places.iter().find(|p| p.0 == node).map_or(0, |p| p.1)
    }

    /// Starts to copy the feeds of a run. The host waits only if it is two runs ahead of the copies.
    pub fn send<'a>(&mut self, cuda: &Cuda, mut numbers: impl FnMut(usize) -> Result<&'a [u8], Error>) -> Result<(), Error> {
        if self.places.is_empty() {
            return Ok(());
        }
        let stage = &mut self.stages[self.next];
        self.next ^= 1;
        stage.read.wait()?;
        let mut end = 0;
        for &(node, at) in &self.places {
            let bytes = numbers(node)?;
            stage.host.bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
            end = at + bytes.len();
        }
        let (copies, main) = (cuda.0.copies, cuda.0.stream);
        stage.taken.hold(copies)?;
        // SAFETY: both ends have `end` bytes; the host's are not touched again before `read` has passed.
        unsafe { result::memcpy_htod_async(stage.device.start(), &stage.host.bytes_mut()[..end], copies) }
            .map_err(failed("copying feeds"))?;
        stage.read.record(copies)?;
        stage.read.hold(main)?;
        // SAFETY: both ends have `end` bytes and do not overlap.
        unsafe { result::memcpy_dtod_async(self.device.start(), stage.device.start(), end, main) }.map_err(failed("copying feeds"))?;
        stage.taken.record(main)
    }
}

/// A copy from the GPU that is under way.
pub struct Incoming {
    cuda: Cuda,
    /// None only while dropping.
    to: Option<Landing>,
    bytes: usize,
}

/// Pinned memory that such copies go to; it is reused.
pub struct Landing {
    host: Pinned,
    there: Event,
}

impl Incoming {
    /// Starts a copy after everything launched so far.
    pub fn start(cuda: &Cuda, from: &Memory, offset: usize, bytes: usize) -> Result<Incoming, Error> {
        assert!(offset + bytes <= from.bytes(), "a download past the end of its buffer");
        cuda.current();
        let spare = cuda.0.landings.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut to = match spare.filter(|l| l.host.bytes >= bytes) {
            Some(landing) => landing,
            None => Landing { host: Pinned::new(bytes.next_power_of_two().max(4096))?, there: Event::new()? },
        };
        // SAFETY: both ends have that many bytes; the host's are read after `there` has passed.
        unsafe { result::memcpy_dtoh_async(&mut to.host.bytes_mut()[..bytes], from.start() + offset as u64, cuda.0.stream) }
            .map_err(failed("copying from the GPU"))?;
        to.there.record(cuda.0.stream)?;
        Ok(Incoming { cuda: cuda.clone(), to: Some(to), bytes })
    }

    /// Whether `finish` would return at once.
    pub fn is_there(&self) -> bool {
        self.cuda.current();
        self.to.as_ref().is_some_and(|to| to.there.has_passed())
    }

    /// Waits for the copy and returns the bytes.
    pub fn finish(mut self) -> Result<Vec<u8>, Error> {
        let to = self.to.as_mut().expect("there until dropped");
        to.there.wait()?;
        Ok(to.host.bytes_mut()[..self.bytes].to_vec())
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.cuda.current();
        if let Some(to) = self.to.take() {
            // The GPU may still be writing there.
            let _ = to.there.wait();
            self.cuda.0.landings.lock().unwrap_or_else(PoisonError::into_inner).push(to);
        }
    }
}
