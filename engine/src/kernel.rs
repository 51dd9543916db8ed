//! What an op says about running on a GPU: kernels to launch and matrix products to make, with shapes as constants.

use crate::meta::{DType, Meta, contiguous};

/// The tensors of one node as a kernel sees them.
#[derive(Clone, Debug)]
pub struct Io {
    pub x: Vec<Meta>,
    /// Of each input, in elements. Contiguous unless the op's `layout` takes more.
    pub strides: Vec<Vec<usize>>,
    /// Of each input, in elements from the start of its buffer, which lies on a multiple of 256 bytes.
    pub offsets: Vec<usize>,
    pub y: Vec<Meta>,
    /// Of each input: there before the program runs, and written by nothing in it. A kernel may read it before its turn.
    pub settled: Vec<bool>,
    pub arch: Arch,
}

impl Io {
    /// Contiguous inputs.
    pub fn plain(x: &[Meta], y: &[Meta], arch: Arch) -> Io {
        let strides = x.iter().map(|m| contiguous(&m.shape)).collect();
        Io { x: x.to_vec(), strides, offsets: vec![0; x.len()], y: y.to_vec(), settled: vec![false; x.len()], arch }
    }
}

/// Compute capability, and what launches are sized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arch {
    /// 90 for compute capability 9.0.
    pub sm: u32,
    pub multiprocessors: u32,
}

impl Arch {
    /// Bytes of dynamic shared memory that every GPU since compute capability 8.0 gives to one block.
    pub const LEAST_SHARED: usize = 99 * 1024;

    /// Bytes of dynamic shared memory that this GPU gives to one block.
    pub fn shared_limit(&self) -> usize {
        match self.sm {
            80 | 87 => 163 * 1024,
            90..120 => 227 * 1024,
            _ => Arch::LEAST_SHARED,
        }
    }

    /// Shared memory for a kernel of as many blocks as multiprocessors: where it wants much, so much that no two of its blocks are on one, and the next
    /// kernel's smaller one fits beside it.
    pub fn alone(&self, shared: usize) -> usize {
        let half = self.shared_limit() / 2;
        if shared > half / 4 * 3 { shared.max(half + 1) } else { shared }
    }

    /// What NVRTC is told: `sm_90a` where features of that one architecture are used.
    pub fn name(&self) -> String {
        match self.sm {
            90 | 100 => format!("sm_{}a", self.sm),
            sm => format!("sm_{sm}"),
        }
    }
}

/// Everything a node does on the GPU, in order.
#[derive(Clone, Debug, Default)]
pub struct Code {
    pub steps: Vec<Step>,
    /// Bytes of scratch memory.
    pub workspace: usize,
}

#[derive(Clone, Debug)]
pub enum Step {
    Launch(Launch),
    Gemm(Gemm),
    /// Left out where it has nothing to do, as a feed tells before the program runs.
    When(Live, Box<Step>),
}

impl Step {
    /// This one where, of input `input`, so many numbers are not negative: from the first to the second of `live`.
    pub fn when(self, input: usize, live: [usize; 2]) -> Step {
        Step::When(Live { input, least: live[0], most: live[1] }, Box::new(self))
    }

    /// The kernel, where it is one.
    pub fn kernel(&self) -> Option<&Launch> {
        match self {
            Step::Launch(l) => Some(l),
            Step::Gemm(_) => None,
            Step::When(_, step) => step.kernel(),
        }
    }

    /// The product, where it is one.
    pub fn product(&self) -> Option<&Gemm> {
        match self {
            Step::Launch(_) => None,
            Step::Gemm(g) => Some(g),
            Step::When(_, step) => step.product(),
        }
    }
}

/// How many numbers of an input, i32, are not negative. Where it is no feed, they count as all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Live {
    pub input: usize,
    pub least: usize,
    pub most: usize,
}

impl Live {
    pub fn holds(&self, live: usize) -> bool {
        (self.least..=self.most).contains(&live)
    }
}

/// Memory that a step works on: the start of an input, an output or the workspace, and bytes from there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    pub at: At,
    pub bytes: usize,
}

impl Place {
    pub fn plus(self, bytes: usize) -> Place {
        Place { bytes: self.bytes + bytes, ..self }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum At {
    X(usize),
    Y(usize),
    Work,
}

impl At {
    pub fn plus(self, bytes: usize) -> Place {
        Place { at: self, bytes }
    }
}

impl From<At> for Place {
    fn from(at: At) -> Place {
        at.plus(0)
    }
}

/// One kernel. Its arguments are pointers, in the order of `args`.
#[derive(Clone, Debug)]
pub struct Launch {
    /// CUDA source behind the prelude; `defines` stand before it.
    pub source: String,
    pub entry: &'static str,
    pub defines: Vec<(&'static str, String)>,
    pub grid: [u32; 3],
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    pub args: Vec<Place>,
}

impl Launch {
    pub fn new(source: &str, entry: &'static str) -> Launch {
        Launch { source: source.into(), entry, defines: vec![], grid: [1, 1, 1], block: 256, shared: 0, args: vec![] }
    }

    /// `#define NAME value`; a number, a type or anything that prints.
    pub fn define(mut self, name: &'static str, value: impl std::fmt::Display) -> Launch {
        self.defines.push((name, value.to_string()));
        self
    }

    /// A float as a constant that loses no bit.
    pub fn define_f32(self, name: &'static str, value: f32) -> Launch {
        let text = format!("__int_as_float(0x{:08x})", value.to_bits());
        self.define(name, text)
    }

    /// The C type of a tensor's elements.
    pub fn define_type(self, name: &'static str, dtype: DType) -> Launch {
        self.define(name, c_type(dtype))
    }

    pub fn grid(mut self, x: usize, y: usize, z: usize) -> Launch {
        let fit = |n: usize| u32::try_from(n).expect("a grid fits into 32 bits");
        self.grid = [fit(x), fit(y), fit(z)];
        self
    }

    pub fn block(mut self, threads: usize) -> Launch {
        self.block = threads as u32;
        self
    }

    pub fn shared(mut self, bytes: usize) -> Launch {
        self.shared = bytes as u32;
        self
    }

    pub fn args(mut self, args: &[Place]) -> Launch {
        self.args = args.to_vec();
        self
    }

    /// The arguments are all inputs, then all outputs.
    pub fn all(mut self, io: &Io) -> Launch {
        self.args = (0..io.x.len()).map(|i| At::X(i).into()).chain((0..io.y.len()).map(|i| At::Y(i).into())).collect();
        self
    }

    /// The text that NVRTC compiles.
    pub fn text(&self) -> String {
        let mut text = String::from(PRELUDE);
        for (name, value) in &self.defines {
            text += &format!("#define {name} {value}\n");
        }
        // Kernels take their turn first (see `in_turn` in the prelude), but for those that have something to do before it.
        let source = crate::mutants::kernel(&self.source);
        let mut rest = &*source;
        if rest.contains("wait_for_turn();") {
            return text + rest;
        }
        while let Some(at) = rest.find("__global__").and_then(|g| rest[g..].find('{').map(|b| g + b + 1)) {
            text += &rest[..at];
            text += " in_turn();";
            rest = &rest[at..];
        }
        text + rest
    }

    pub fn code(self) -> Code {
        Code { steps: vec![Step::Launch(self)], workspace: 0 }
    }
}

pub fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::I32 => "int",
        DType::U8 => "unsigned char",
    }
}

/// c [m, n] = act(alpha a [m, k] x b [k, n] + beta plus + bias), `batch` times. Strides in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemm {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub batch: usize,
    pub a: Matrix,
    pub b: Matrix,
    pub c: Matrix,
    pub alpha: f32,
    pub beta: f32,
    /// What `beta` counts; c itself if there is none.
    pub plus: Option<Matrix>,
    /// [n], of c's type.
    pub bias: Option<Place>,
    pub act: Option<Act>,
}

impl Gemm {
    /// c = a b.
    pub fn new(m: usize, n: usize, k: usize, a: Matrix, b: Matrix, c: Matrix) -> Gemm {
        Gemm { m, n, k, batch: 1, a, b, c, alpha: 1.0, beta: 0.0, plus: None, bias: None, act: None }
    }
}

/// What a product may do with its result before it writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Relu,
    /// The approximation with tanh.
    Gelu,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrix {
    pub place: Place,
    pub dtype: DType,
    pub row: usize,
    pub column: usize,
    pub batch: usize,
}

impl Matrix {
    /// Rows without gaps.
    pub fn rows(place: impl Into<Place>, dtype: DType, columns: usize) -> Matrix {
        Matrix { place: place.into(), dtype, row: columns, column: 1, batch: 0 }
    }

    pub fn t(self) -> Matrix {
        Matrix { row: self.column, column: self.row, ..self }
    }

    /// `elements` further on.
    pub fn at(self, elements: usize) -> Matrix {
        Matrix { place: Place { bytes: self.place.bytes + elements * self.dtype.size(), ..self.place }, ..self }
    }
}

/// What every kernel may use.
pub const PRELUDE: &str = include_str!("cuda/prelude.cuh");
