//! Tensors as the CPU code of ops gets them.

use crate::error::Error;
use crate::meta::{DType, Meta};
use crate::ranks::{Parts, whole};

/// The numbers of a tensor, such as a feed's.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// Floats.
    F32(&'a [f32]),
    /// Integers.
    I32(&'a [i32]),
    /// Bytes.
    U8(&'a [u8]),
}

impl<'a> Data<'a> {
    /// The bytes given for the feed of this name, of which a rank takes its part; an error if type or length is wrong.
    pub fn checked(name: &str, want: &Meta, parts: &Parts, feeds: &[(&str, Data<'a>)]) -> Result<&'a [u8], Error> {
        let parts = parts.feeds.get(name).map_or(&[][..], |p| p);
        let wrong = |got: String| Error::Feed { name: name.into(), want: whole(parts, want), got };
        let (_, data) = feeds.iter().find(|f| f.0 == name).ok_or_else(|| wrong("nothing".into()))?;
        let (bytes, count, dtype): (&[u8], usize, DType) = match data {
            Data::F32(d) => (bytemuck::cast_slice(d), d.len(), DType::F32),
            Data::I32(d) => (bytemuck::cast_slice(d), d.len(), DType::I32),
            Data::U8(d) => (d, d.len(), DType::U8),
        };
        if (count, dtype) != (whole(parts, want).elements(), want.dtype) {
            return Err(wrong(format!("{count} elements of {dtype}")));
        }
        let own = parts.iter().fold(bytes, |bytes, part| part.rows(bytes));
        match own.len() == want.bytes() {
            true => Ok(own),
            false => Err(wrong(format!("{} bytes of them for this rank", own.len()))),
        }
    }
}

/// An input. Contiguous, unless `Op::layout` accepts other strides.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Sizes of the dimensions.
    pub shape: &'a [usize],
    /// In elements.
    pub strides: &'a [usize],
    /// The elements, from the first one on.
    pub data: Data<'a>,
}

impl<'a> View<'a> {
    /// The floats. Panics if it has another type.
    #[track_caller]
    pub fn f32(&self) -> &'a [f32] {
        match self.data {
            Data::F32(d) => d,
            _ => panic!("an op read {:?} as f32", self.data),
        }
    }

    /// The integers. Panics if it has another type.
    #[track_caller]
    pub fn i32(&self) -> &'a [i32] {
        match self.data {
            Data::I32(d) => d,
            _ => panic!("an op read {:?} as i32", self.data),
        }
    }

    /// The bytes. Panics if it has another type.
    #[track_caller]
    pub fn u8(&self) -> &'a [u8] {
        match self.data {
            Data::U8(d) => d,
            _ => panic!("an op read {:?} as u8", self.data),
        }
    }

    /// The size of the dimension `back` places from the last.
    pub fn dim(&self, back: usize) -> usize {
        self.shape[self.shape.len() - 1 - back]
    }
}

/// The numbers of an output.
#[derive(Debug)]
pub enum DataMut<'a> {
    /// Floats.
    F32(&'a mut [f32]),
    /// Integers.
    I32(&'a mut [i32]),
    /// Bytes.
    U8(&'a mut [u8]),
}

/// An output, always contiguous.
#[derive(Debug)]
pub struct ViewMut<'a> {
    /// Sizes of the dimensions.
    pub shape: &'a [usize],
    /// The elements, contiguous.
    pub data: DataMut<'a>,
}

impl ViewMut<'_> {
    /// The floats. Panics if it has another type.
    #[track_caller]
    pub fn f32(&mut self) -> &mut [f32] {
        match &mut self.data {
            DataMut::F32(d) => d,
            d => panic!("an op wrote {d:?} as f32"),
        }
    }

    /// The integers. Panics if it has another type.
    #[track_caller]
    pub fn i32(&mut self) -> &mut [i32] {
        match &mut self.data {
            DataMut::I32(d) => d,
            d => panic!("an op wrote {d:?} as i32"),
        }
    }

    /// The bytes. Panics if it has another type.
    #[track_caller]
    pub fn u8(&mut self) -> &mut [u8] {
        match &mut self.data {
            DataMut::U8(d) => d,
            d => panic!("an op wrote {d:?} as u8"),
        }
    }

    /// The size of the dimension `back` places from the last.
    pub fn dim(&self, back: usize) -> usize {
        self.shape[self.shape.len() - 1 - back]
    }
}
