//! GEMM on strided memory.
#![allow(unsafe_code)]

use gemm_common::Parallelism;

/// A matrix inside a slice: element (i, j) is at `offset + i * row + j * column`.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a> {
    /// The memory that it lies in.
    pub data: &'a [f32],
    /// Index of its first element.
    pub offset: usize,
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub column: usize,
}

impl<'a> Mat<'a> {
    /// A contiguous matrix of so many columns.
    pub fn rows(data: &'a [f32], columns: usize) -> Mat<'a> {
        Mat { data, offset: 0, row: columns, column: 1 }
    }

    /// Its transpose.
    pub fn t(self) -> Mat<'a> {
        Mat { row: self.column, column: self.row, ..self }
    }

    /// The matrix that starts `offset` elements further on.
    pub fn at(self, offset: usize) -> Mat<'a> {
        Mat { offset: self.offset + offset, ..self }
    }

    fn fits(&self, rows: usize, columns: usize) -> bool {
        rows == 0 || columns == 0 || self.offset + (rows - 1) * self.row + (columns - 1) * self.column < self.data.len()
    }
}

/// What a GEMM does with the numbers already in `c`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Into {
    /// The result overwrites what was there.
    Replace,
    /// The result is added to what was there.
    Add,
}

/// c [m, n] = scale * a [m, k] b [k, n], or adds that to c, whose rows are `row` elements apart. `parallel` uses the threads of the current
/// pool.
#[allow(clippy::too_many_arguments)]
pub fn gemm(c: &mut [f32], row: usize, into: Into, m: usize, k: usize, n: usize, a: Mat, b: Mat, scale: f32, parallel: bool) {
    assert!(a.fits(m, k) && b.fits(k, n), "a GEMM past the end of its inputs");
    assert!(m <= 1 || row >= n, "overlapping rows of a GEMM's output");
    assert!(m == 0 || n == 0 || (m - 1) * row + n <= c.len(), "a GEMM past the end of its output");
    let threads = if parallel { Parallelism::Rayon(0) } else { Parallelism::None };
    let alpha = if into == Into::Add { 1.0 } else { 0.0 };
    // The kernels prefer an output whose columns are contiguous: c^T = b^T a^T, unless c is one column.
    let (m, n, strides, a, b) = if row > 1 { (n, m, [row, 1], b.t(), a.t()) } else { (m, n, [1, row], a, b) };
    // SAFETY: both inputs and the output were just checked to hold every element that the product touches; the output is
    // borrowed mutably, so it overlaps neither input.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            m,
            n,
            k,
            c.as_mut_ptr(),
            strides[0] as isize,
            strides[1] as isize,
            into == Into::Add,
            a.data.as_ptr().add(a.offset),
            a.column as isize,
            a.row as isize,
            b.data.as_ptr().add(b.offset),
            b.column as isize,
            b.row as isize,
            alpha,
            scale,
            false,
            false,
            false,
            threads,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_and_added() {
        let a: Vec<f32> = (0..6).map(|i| i as f32).collect(); // [2, 3]
        let b: Vec<f32> = (0..12).map(|i| i as f32).collect(); // [4, 3]
        let mut c = vec![1.0; 10]; // [2, 4], rows 5 apart
        gemm(&mut c, 5, Into::Add, 2, 3, 4, Mat::rows(&a, 3), Mat::rows(&b, 3).t(), 2.0, false);
        assert_eq!(c, [11.0, 29.0, 47.0, 65.0, 1.0, 29.0, 101.0, 173.0, 245.0, 1.0]);
    }

    #[test]
    #[should_panic(expected = "past the end")]
    fn bounds_are_checked() {
        gemm(&mut [0.0; 4], 2, Into::Replace, 2, 2, 2, Mat::rows(&[0.0; 3], 2), Mat::rows(&[0.0; 4], 2), 1.0, false);
    }
}
