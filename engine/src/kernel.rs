//! What an op runs on a GPU: kernel launches and GEMMs, with shapes as compile-time constants.

use crate::meta::{DType, Meta, contiguous};
use crate::ops::collective::Collective;

/// The inputs and outputs of one node, as its kernels get them.
#[derive(Clone, Debug)]
pub struct Io {
    /// Shapes and types of the inputs.
    pub x: Vec<Meta>,
    /// Strides of each input, in elements. Contiguous unless [`Op::layout`](crate::op::Op::layout) accepts others.
    pub strides: Vec<Vec<usize>>,
    /// Offset of each input in its buffer, in elements. Buffers are aligned to 256 bytes.
    pub offsets: Vec<usize>,
    /// Shapes and types of the outputs, which are contiguous.
    pub y: Vec<Meta>,
    /// For each input, whether nothing in the program writes it before this node, so that a kernel may prefetch it while its predecessor is
    /// still running (before `wait_for_turn`, see prelude.cuh).
    pub settled: Vec<bool>,
    /// The GPU to generate code for.
    pub arch: Arch,
}

impl Io {
    /// Contiguous inputs, each at the start of its buffer.
    pub fn plain(x: &[Meta], y: &[Meta], arch: Arch) -> Io {
        let strides = x.iter().map(|m| contiguous(&m.shape)).collect();
        Io { x: x.to_vec(), strides, offsets: vec![0; x.len()], y: y.to_vec(), settled: vec![false; x.len()], arch }
    }
}

/// A GPU's compute capability and size, which launches depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arch {
    /// 90 for compute capability 9.0.
    pub sm: u32,
    /// The number of streaming multiprocessors (SMs).
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

    /// Shared memory to request for a kernel with one block per multiprocessor: if it needs much, then just over half of the limit, so that no two of
    /// its blocks share a multiprocessor, while a smaller block of the next kernel still fits.
    pub fn alone(&self, shared: usize) -> usize {
        let half = self.shared_limit() / 2;
        if shared > half / 4 * 3 { shared.max(half + 1) } else { shared }
    }

    /// Older GPUs whose kernels run on this one too, the newest first. The last, 0, stands for kernels without tensor cores.
    pub fn older(self) -> impl Iterator<Item = Arch> {
        let older = [80, 0].map(|sm| Arch { sm, ..self }).into_iter();
        older.filter(move |o| o.sm < self.sm && o.shared_limit() <= self.shared_limit())
    }

    /// The name for NVRTC, such as `sm_90a` where architecture-specific features are used.
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
    /// Launches and GEMMs.
    pub steps: Vec<Step>,
    /// Bytes of scratch memory.
    pub workspace: usize,
}

impl Code {
    /// The kernels that it launches.
    pub fn launches(&self) -> impl Iterator<Item = &Launch> {
        self.steps.iter().filter_map(Step::kernel)
    }
}

/// One launch.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a program has some thousand of them")]
pub enum Step {
    /// A kernel of the op's own.
    Launch(Launch),
    /// A GEMM by cuBLASLt.
    Gemm(Gemm),
    /// An exchange with other ranks.
    Collective(Collective),
    /// A step that is skipped if a feed shows, before the program runs, that it has nothing to do.
    When(Live, Box<Step>),
}

impl Step {
    /// Runs this step only if input `input` has at least `live[0]` and at most `live[1]` entries that are not negative.
    pub fn when(self, input: usize, live: [usize; 2]) -> Step {
        Step::When(Live { input, least: live[0], most: live[1] }, Box::new(self))
    }

    /// The kernel, if it is one.
    pub fn kernel(&self) -> Option<&Launch> {
        match self {
            Step::Launch(l) => Some(l),
            Step::Gemm(_) | Step::Collective(_) => None,
            Step::When(_, step) => step.kernel(),
        }
    }

    /// The GEMM, if it is one.
    pub fn product(&self) -> Option<&Gemm> {
        match self {
            Step::Launch(_) | Step::Collective(_) => None,
            Step::Gemm(g) => Some(g),
            Step::When(_, step) => step.product(),
        }
    }
}

/// A condition on how many entries of an i32 input are not negative, such as rows with a target. It is evaluated on the host before a run, which is
/// possible only if the input is a feed; for any other input, all entries count as not negative.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Live {
    /// Which input.
    pub input: usize,
    /// The fewest such entries for which the step runs.
    pub least: usize,
    /// The most such entries for which the step runs.
    pub most: usize,
}

impl Live {
    /// Whether the step runs with `live` entries that are not negative.
    pub fn holds(&self, live: usize) -> bool {
        (self.least..=self.most).contains(&live)
    }
}

/// An address that a step reads or writes: a byte offset in an input, an output or the workspace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// In which of them.
    pub at: At,
    /// The offset.
    pub bytes: usize,
}

impl Place {
    /// The address `bytes` further on.
    pub fn plus(self, bytes: usize) -> Place {
        Place { bytes: self.bytes + bytes, ..self }
    }
}

/// A tensor or the workspace of a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum At {
    /// An input.
    X(usize),
    /// An output.
    Y(usize),
    /// The node's scratch memory.
    Work,
}

impl At {
    /// The address `bytes` after its start.
    pub fn plus(self, bytes: usize) -> Place {
        Place { at: self, bytes }
    }
}

impl From<At> for Place {
    fn from(at: At) -> Place {
        at.plus(0)
    }
}

/// One kernel launch. The kernel's arguments are pointers, in the order of `args`.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// CUDA source. The prelude and then `defines` are put before it.
    pub source: String,
    /// The kernel's name in the source.
    pub entry: &'static str,
    /// Macros: shapes, types and options.
    pub defines: Vec<(&'static str, String)>,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// The pointers that it is called with.
    pub args: Vec<Place>,
}

impl Launch {
    /// One block of 256 threads, without macros or arguments.
    pub fn new(source: &str, entry: &'static str) -> Launch {
        Launch { source: source.into(), entry, defines: vec![], grid: [1, 1, 1], block: 256, shared: 0, args: vec![] }
    }

    /// `#define NAME value`; a number, a type or anything that prints.
    pub fn define(mut self, name: &'static str, value: impl std::fmt::Display) -> Launch {
        self.defines.push((name, value.to_string()));
        self
    }

    /// A float constant, bit for bit.
    pub fn define_f32(self, name: &'static str, value: f32) -> Launch {
        let text = format!("__int_as_float(0x{:08x})", value.to_bits());
        self.define(name, text)
    }

    /// `#define NAME` with the C type of a tensor's elements.
    pub fn define_type(self, name: &'static str, dtype: DType) -> Launch {
        self.define(name, c_type(dtype))
    }

    /// Sets the number of blocks.
    pub fn grid(mut self, x: usize, y: usize, z: usize) -> Launch {
        let fit = |n: usize| u32::try_from(n).expect("a grid fits into 32 bits");
        self.grid = [fit(x), fit(y), fit(z)];
        self
    }

    /// Sets the threads of a block.
    pub fn block(mut self, threads: usize) -> Launch {
        self.block = threads as u32;
        self
    }

    /// Sets the bytes of dynamic shared memory.
    pub fn shared(mut self, bytes: usize) -> Launch {
        self.shared = bytes as u32;
        self
    }

    /// Sets the kernel's arguments.
    pub fn args(mut self, args: &[Place]) -> Launch {
        self.args = args.to_vec();
        self
    }

    /// Passes all inputs, then all outputs.
    pub fn all(mut self, io: &Io) -> Launch {
        self.args = (0..io.x.len()).map(|i| At::X(i).into()).chain((0..io.y.len()).map(|i| At::Y(i).into())).collect();
        self
    }

    /// The complete source that NVRTC compiles.
    pub fn text(&self) -> String {
        let mut text = String::from(PRELUDE);
        for (name, value) in &self.defines {
            text += &format!("#define {name} {value}\n");
        }
        // Every kernel starts with `in_turn()` (see the prelude), except those that call `wait_for_turn()` themselves, after some prefetching.
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

    /// An op's code that is this launch alone.
    pub fn code(self) -> Code {
        Code { steps: vec![Step::Launch(self)], workspace: 0 }
    }
}

/// The C type of a tensor's elements, as the prelude defines it.
pub fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::E4M3 => "e4m3",
        DType::E5M2 => "e5m2",
        DType::I32 => "int",
        DType::U8 => "unsigned char",
    }
}

/// A GEMM with its epilogue: c [m, n] = act(alpha a [m, k] b [k, n] + beta plus + bias), batched.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemm {
    /// Rows of a and c.
    pub m: usize,
    /// Columns of b and c.
    pub n: usize,
    /// Columns of a, rows of b.
    pub k: usize,
    /// How many independent GEMMs.
    pub batch: usize,
    /// The left operand.
    pub a: Matrix,
    /// The right operand.
    pub b: Matrix,
    /// The result.
    pub c: Matrix,
    /// Factor of a b.
    pub alpha: f32,
    /// Factor of `plus`.
    pub beta: f32,
    /// The matrix that is added, times `beta`; c itself if None.
    pub plus: Option<Matrix>,
    /// A vector `[n]` of c's type that is added to every row.
    pub bias: Option<Place>,
    /// The activation function that is applied last.
    pub act: Option<Act>,
    /// For FP8 operands.
    pub scaled: Option<Scaled>,
}

/// What a GEMM of FP8 operands needs beside them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaled {
    /// One f32 each that a and b are multiplied by, at an address that is a multiple of 16.
    pub by: [Place; 2],
    /// Whether the tensor cores may add with fewer bits than f32 has, which is faster.
    pub fast: bool,
}

impl Gemm {
    /// c = a b.
    pub fn new(m: usize, n: usize, k: usize, a: Matrix, b: Matrix, c: Matrix) -> Gemm {
        Gemm { m, n, k, batch: 1, a, b, c, alpha: 1.0, beta: 0.0, plus: None, bias: None, act: None, scaled: None }
    }
}

/// An activation function of a GEMM's epilogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// max(x, 0).
    Relu,
    /// GELU in its tanh approximation.
    Gelu,
}

/// A matrix operand and its strides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrix {
    /// The address of its first element.
    pub place: Place,
    /// Type of the elements.
    pub dtype: DType,
    /// Distance between rows, in elements.
    pub row: usize,
    /// Distance between columns, in elements.
    pub column: usize,
    /// Distance between the matrices of a batch, in elements.
    pub batch: usize,
}

impl Matrix {
    /// A contiguous row-major matrix of so many columns.
    pub fn rows(place: impl Into<Place>, dtype: DType, columns: usize) -> Matrix {
        Matrix { place: place.into(), dtype, row: columns, column: 1, batch: 0 }
    }

    /// Its transpose.
    pub fn t(self) -> Matrix {
        Matrix { row: self.column, column: self.row, ..self }
    }

    /// The matrix that starts `elements` further on.
    pub fn at(self, elements: usize) -> Matrix {
        Matrix { place: Place { bytes: self.place.bytes + elements * self.dtype.size(), ..self.place }, ..self }
    }
}

/// CUDA source that is put before every kernel: types, conversions, reductions, random numbers.
pub const PRELUDE: &str = include_str!("cuda/prelude.cuh");
