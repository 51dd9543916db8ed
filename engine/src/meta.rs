//! Data types, shapes, strides and memory layouts of tensors.

use std::fmt;

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// bfloat16: 8 bits of exponent, 7 of mantissa.
    BF16,
    /// IEEE half precision: 5 bits of exponent, 10 of mantissa.
    F16,
    /// FP8 with 4 bits of exponent and 3 of mantissa, up to 448: operands of a GEMM.
    E4M3,
    /// FP8 with 5 bits of exponent and 2 of mantissa, up to 57,344: gradients as operands of a GEMM.
    E5M2,
    /// 32-bit integer: indices, counters, rng seeds.
    I32,
    /// Byte: masks and pixels.
    U8,
}

impl DType {
    /// Every type.
    pub const ALL: [DType; 7] = [DType::F32, DType::BF16, DType::F16, DType::E4M3, DType::E5M2, DType::I32, DType::U8];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::U8 | DType::E4M3 | DType::E5M2 => 1,
        }
    }

    /// Whether values of it can have gradients.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::BF16 | DType::F16)
    }

    /// Whether it is one of the 8-bit floats, which only GEMMs compute with.
    pub fn is_fp8(self) -> bool {
        matches!(self, DType::E4M3 | DType::E5M2)
    }

    /// Half a unit in the last place of 1.0: the relative error of one rounding.
    pub fn rounding(self) -> f32 {
        match self {
            DType::BF16 => 1.0 / 256.0,
            DType::F16 => 1.0 / 2048.0,
            DType::E4M3 => 1.0 / 16.0,
            DType::E5M2 => 1.0 / 8.0,
            _ => 1.0 / 16_777_216.0,
        }
    }

    /// The name that safetensors uses.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::BF16 => "BF16",
            DType::F16 => "F16",
            DType::E4M3 => "F8_E4M3",
            DType::E5M2 => "F8_E5M2",
            DType::I32 => "I32",
            DType::U8 => "U8",
        }
    }

    /// The type with this safetensors name.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.name().to_lowercase())
    }
}

/// Shape and data type of a tensor. All dimensions are known when a graph is recorded.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Meta {
    /// Sizes of the dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub dtype: DType,
}

/// The most bytes that a tensor may have; more is a mistake in a config. Below it, no multiplication of sizes for costs, strides or offsets
/// overflows 64 bits.
pub const MOST_BYTES: usize = 1 << 40;

impl Meta {
    /// This shape and type.
    pub fn new(shape: &[usize], dtype: DType) -> Meta {
        Meta { shape: shape.to_vec(), dtype }
    }

    /// The same for f32.
    pub fn f32(shape: &[usize]) -> Meta {
        Meta::new(shape, DType::F32)
    }

    /// The number of elements, saturating: `passes::run` refuses a graph with such a tensor, by name.
    pub fn elements(&self) -> usize {
        product(&self.shape)
    }

    /// The number of bytes, saturating like `elements`.
    pub fn bytes(&self) -> usize {
        self.elements().saturating_mul(self.dtype.size())
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The size of the dimension `back` places from the last: `dim(0)` is the innermost.
    #[track_caller]
    pub fn dim(&self, back: usize) -> usize {
        self.shape[self.shape.len() - 1 - back]
    }

    /// The number of rows: the product of all dimensions but the innermost.
    pub fn rows(&self) -> usize {
        product(&self.shape[..self.shape.len().saturating_sub(1)])
    }

    /// The same type with another shape.
    pub fn with(&self, shape: &[usize]) -> Meta {
        Meta::new(shape, self.dtype)
    }
}

impl fmt::Debug for Meta {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

fn product(sizes: &[usize]) -> usize {
    // A later 0 makes even a saturated product 0.
    sizes.iter().fold(1, |n, &size| n.saturating_mul(size))
}

/// Strides, in elements, of a contiguous row-major tensor.
pub fn contiguous(shape: &[usize]) -> Vec<usize> {
    let mut strides: Vec<usize> = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(shape[i]);
    }
    strides
}

/// Whether these are the strides of a contiguous tensor. Dimensions of size 1 may have any stride.
pub fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    for (&n, &s) in shape.iter().zip(strides).rev() {
        if n != 1 && s != expected {
            return false;
        }
        expected = n.saturating_mul(expected);
    }
    true
}

/// Which strides an op accepts for an input; inputs with others are copied first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row-major without gaps.
    Contiguous,
    /// One of the last two dimensions has stride 1, the others any stride: what a GEMM reads without a copy.
    Matrix,
    /// The dimensions from this one on are contiguous, and the blocks that they form are evenly spaced: slices of a wider tensor.
    Blocks(usize),
    /// Any strides.
    Any,
}

impl Layout {
    /// Whether a tensor of this shape and these strides fits.
    pub fn accepts(self, shape: &[usize], strides: &[usize]) -> bool {
        let r = shape.len();
        match self {
            Layout::Any => true,
            Layout::Contiguous => is_contiguous(shape, strides),
            Layout::Blocks(axis) => block_stride(shape, strides, axis).is_some(),
            Layout::Matrix => {
                let unit = |i: usize| strides[i] == 1 || shape[i] == 1;
                // Stride 0 inside the matrix would be a broadcast row or column, which GEMMs do not take.
                let real = |i: usize| strides[i] != 0 || shape[i] == 1;
                r >= 2 && (unit(r - 1) || unit(r - 2)) && real(r - 1) && real(r - 2)
            }
        }
    }
}

/// The distance, in elements, between blocks of the dimensions `axis..`; None unless they lie as [`Layout::Blocks`] describes.
pub fn block_stride(shape: &[usize], strides: &[usize], axis: usize) -> Option<usize> {
    let outer: Vec<usize> = (0..axis).filter(|&d| shape[d] != 1).collect();
    let even = outer.windows(2).all(|w| strides[w[0]] == strides[w[1]] * shape[w[1]]);
    let one = product(&shape[axis..]);
    (even && is_contiguous(&shape[axis..], &strides[axis..])).then(|| outer.last().map_or(one, |&d| strides[d]))
}

/// The shape that all of `shapes` broadcast to, by numpy's rules; None if they do not fit.
pub fn broadcast(shapes: &[&[usize]]) -> Option<Vec<usize>> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut out = vec![1; rank];
    for shape in shapes {
        for (i, &n) in shape.iter().rev().enumerate() {
            let o = &mut out[rank - 1 - i];
            if *o == 1 {
                *o = n;
            } else if n != 1 && n != *o {
                return None;
            }
        }
    }
    Some(out)
}

/// Strides of an input that is broadcast to the shape `to`: 0 in broadcast dimensions.
pub fn broadcast_strides(shape: &[usize], strides: &[usize], to: &[usize]) -> Vec<usize> {
    let pad = to.len() - shape.len();
    (0..to.len()).map(|i| if i < pad || (shape[i - pad] == 1 && to[i] != 1) { 0 } else { strides[i - pad] }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_without_room_neither_wrap_nor_panic() {
        let huge = Meta::f32(&[1 << 40, 1 << 40]);
        assert_eq!((huge.elements(), huge.bytes(), huge.rows()), (usize::MAX, usize::MAX, 1 << 40));
        assert_eq!(Meta::f32(&[1 << 62]).bytes(), usize::MAX);
        assert_eq!(Meta::f32(&[1 << 40, 1 << 40, 0]).elements(), 0);
        assert_eq!(Meta::new(&[3, 5], DType::BF16).bytes(), 30);
        assert_eq!(contiguous(&[2, 1 << 40, 1 << 40]), [usize::MAX, 1 << 40, 1]);
        assert!(huge.bytes() > MOST_BYTES);
    }

    #[test]
    fn strides_and_broadcasting() {
        assert_eq!(contiguous(&[2, 3, 4]), [12, 4, 1]);
        assert!(is_contiguous(&[2, 1, 4], &[4, 99, 1]));
        assert!(!is_contiguous(&[2, 3], &[1, 2]));
        assert_eq!(broadcast(&[&[2, 1, 4], &[3, 1]]), Some(vec![2, 3, 4]));
        assert_eq!(broadcast(&[&[2], &[3]]), None);
        assert_eq!(broadcast_strides(&[3, 1], &[1, 1], &[2, 3, 4]), [0, 1, 0]);
        assert!(Layout::Matrix.accepts(&[2, 3, 4], &[0, 1, 3]));
        assert!(!Layout::Matrix.accepts(&[3, 4], &[8, 2]));
        assert_eq!(block_stride(&[2, 3, 4], &[30, 10, 1], 2), Some(10));
        assert_eq!(block_stride(&[2, 1, 3, 4], &[30, 99, 4, 1], 2), Some(30));
        assert_eq!(block_stride(&[3, 4], &[9, 9], 0), None);
        assert!(!Layout::Blocks(2).accepts(&[2, 3, 4], &[40, 10, 1]));
        assert!(!Layout::Blocks(1).accepts(&[2, 3, 4], &[30, 10, 1]));
    }
}
