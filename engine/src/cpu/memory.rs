//! Aligned memory, and the only place where slices of it are made.
#![allow(unsafe_code)]

use super::{Data, DataMut};
use crate::meta::DType;
use std::alloc::{Layout, alloc_zeroed};

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [u8; 64]);

/// A block of memory that starts on a cache line.
#[derive(Clone)]
pub struct Buffer {
    lines: Vec<Line>,
    bytes: usize,
}

impl Buffer {
    /// For small sizes, or sizes that were allocated before: aborts if memory runs out.
    pub fn zeroed(bytes: usize) -> Buffer {
        Buffer { lines: vec![Line([0; 64]); bytes.div_ceil(64)], bytes }
    }

    /// For sizes that a config decides: None if memory runs out.
    pub fn try_zeroed(bytes: usize) -> Option<Buffer> {
        let count = bytes.div_ceil(64);
        if count == 0 {
            return Some(Buffer::zeroed(0));
        }
        let layout = Layout::array::<Line>(count).ok()?;
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) }.cast::<Line>();
        // SAFETY: allocated just now by the global allocator, with the layout of `count` lines; zeros are lines.
        (!start.is_null()).then(|| Buffer { lines: unsafe { Vec::from_raw_parts(start, count, count) }, bytes })
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `lines` is that many initialised plain bytes, without padding, and is borrowed for as long.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.bytes) }
    }

    /// All of it, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.bytes) }
    }

    /// As f32 numbers.
    pub fn f32(&self) -> &[f32] {
        bytemuck::cast_slice(self.bytes())
    }

    /// As i32 numbers.
    pub fn i32(&self) -> &[i32] {
        bytemuck::cast_slice(self.bytes())
    }
}

#[test]
fn memory_that_is_not_there_is_none() {
    assert!(Buffer::try_zeroed(1 << 62).is_none() && Buffer::try_zeroed(usize::MAX).is_none());
    let some = Buffer::try_zeroed(100).unwrap();
    assert_eq!((some.bytes().len(), some.bytes().iter().all(|&b| b == 0)), (100, true));
    assert!(Buffer::try_zeroed(0).unwrap().bytes().is_empty());
}

/// Where the plan put a value, while one op runs.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub start: *mut u8,
    pub elements: usize,
}

impl Place {
    /// # Safety
    /// `start` points to `elements` initialised elements of `dtype`, aligned for it, alive for `'a`, and nothing writes
    /// to them meanwhile. The plan makes this so for a running op (`Plan::verify`).
    pub unsafe fn read<'a>(self, dtype: DType) -> Data<'a> {
        unsafe {
            match dtype {
                DType::F32 => Data::F32(std::slice::from_raw_parts(self.start.cast(), self.elements)),
                DType::I32 => Data::I32(std::slice::from_raw_parts(self.start.cast(), self.elements)),
                DType::U8 => Data::U8(std::slice::from_raw_parts(self.start, self.elements)),
                _ => unreachable!("widened before the op sees it"),
            }
        }
    }

    /// # Safety
    /// As `read`, and nothing else reads or writes these elements meanwhile.
    pub unsafe fn write<'a>(self, dtype: DType) -> DataMut<'a> {
        unsafe {
            match dtype {
                DType::F32 => DataMut::F32(std::slice::from_raw_parts_mut(self.start.cast(), self.elements)),
                DType::I32 => DataMut::I32(std::slice::from_raw_parts_mut(self.start.cast(), self.elements)),
                DType::U8 => DataMut::U8(std::slice::from_raw_parts_mut(self.start, self.elements)),
                _ => unreachable!("widened before the op sees it"),
            }
        }
    }

    /// # Safety
    /// As `read`; the bytes of `elements` elements of `dtype`.
    pub unsafe fn bytes<'a>(self, dtype: DType) -> &'a [u8] {
        unsafe { std::slice::from_raw_parts(self.start, self.elements * dtype.size()) }
    }

    /// # Safety
    /// As `write`.
    pub unsafe fn bytes_mut<'a>(self, dtype: DType) -> &'a mut [u8] {
        unsafe { std::slice::from_raw_parts_mut(self.start, self.elements * dtype.size()) }
    }
}
