//! A GEMM and the pointwise ops after it in one kernel: the GEMM's result never reaches memory.

use super::attention::wgmma::{self, Left};
use super::matmul::Matmul;
use super::pointwise::{Bin, Expr, Pointwise, Un, print, run};
use crate::cpu::{Data, DataMut, View, ViewMut};
use crate::kernel::{At, Code, Io, Launch, Place, Step, c_type};
use crate::meta::{DType, Layout, Meta, broadcast_strides, contiguous};
use crate::op::{self, Case, Cost, Fill, Grads, In, Narrow, Op, Port, no_gradient};
use crate::record::Var;

/// Inputs: a [.., m, k] and b [.., k, n], then the other inputs of the pointwise expression: tensors of its shape, and rng counters. The
/// expression's input 0 is a b, in f32 and unrounded; its input i is this op's input i + 1.
#[derive(Clone, Debug, PartialEq)]
pub struct MatmulPointwise {
    /// What is computed from the matmul's result (input 0) and the other inputs.
    pub expr: Expr,
    /// Type of each output.
    pub dtypes: Vec<DType>,
    /// Whether the expression reads the result [heads, m, n] as [m, heads, n], the heads of a row concatenated.
    pub heads_inside: bool,
    /// (input, output) pairs that share one buffer, set by the pass `in-place`.
    pub in_place: Vec<(usize, usize)>,
}

impl MatmulPointwise {
    /// The expression's shape, and the strides of the GEMM's result in it.
    pub fn shape(&self, product: &Meta) -> (Vec<usize>, Vec<usize>) {
        let (mut shape, mut strides) = (product.shape.clone(), contiguous(&product.shape));
        for of in [&mut shape, &mut strides] {
            of[..product.rank() - 1].rotate_right(self.heads_inside as usize);
        }
        (shape, strides)
    }

    /// The pointwise op alone, with the GEMM's result as input 0.
    fn arithmetic(&self) -> Pointwise {
        let in_place = self.in_place.iter().map(|p| (p.0 - 1, p.1)).collect();
        Pointwise { in_place, ..Pointwise::new(self.expr.clone(), self.dtypes.clone()) }
    }

    /// The fused kernel, or why it cannot be used.
    pub fn fused(&self, io: &Io) -> Result<Code, String> {
        let sides: Vec<usize> = (2..io.x.len()).filter(|&i| !self.expr.uses_rng(i - 1)).collect();
        let sizes: Vec<usize> = sides.iter().map(|&i| io.x[i].dtype.size()).collect();
        let tiles = Tiles::new(io, &sizes)?;
        if sides.iter().any(|&i| !(io.offsets[i] * io.x[i].dtype.size()).is_multiple_of(16)) {
            return Err("an input is not aligned to 16 bytes".into());
        }
        // Inputs that are loaded before the GEMM has finished wait in registers.
        let words: usize = sides.iter().map(|&i| 2 * io.x[i].dtype.size()).sum();
        let early = if tiles.wide { (64 / words.max(1)).min(8) } else { (32 / words.max(1)).min(4) };
        let index = if io.y[0].elements() < 1 << 31 { "u32" } else { "u64" };
        let source = [&tiles.instructions(io.x[0].dtype), &self.text(io, index, tiles.wide), tiles.source()].concat();
        let x = (2..io.x.len()).map(|i| (format!("x{}", i - 1), format!("const {} *", c_type(io.x[i].dtype)), self.expr.uses_rng(i - 1)));
        let y = (0..io.y.len()).map(|k| (format!("y{k}"), format!("{} *", c_type(io.y[k].dtype)), false));
        let pointers: Vec<(String, String, bool)> = x.chain(y).collect();
        let parameters: Vec<String> = pointers.iter().map(|(name, c, _)| format!("{c}{name}")).collect();
        let values = pointers.iter().map(|(name, _, rng)| match rng {
            true => format!("{{{name}[0], {name}[1], {name}[2], {name}[3]}}"),
            false => name.clone(),
        });
        let launch = Launch::new(&source, "matmul_pointwise")
            .define("PARAMETERS", parameters.join(", "))
            .define("POINTERS", values.collect::<Vec<_>>().join(", "))
            .define("INDEX", index)
            .define("HEADS_INSIDE", self.heads_inside as u8)
            .define("EARLY", early);
        Ok(tiles.launch(launch, io).code())
    }

    /// CUDA source that loads the inputs of 8 adjacent elements, evaluates the expression and stores the outputs.
    fn text(&self, io: &Io, index: &str, wide: bool) -> String {
        let [mut pointers, mut sides, mut fetch, mut ask, mut take] = [const { String::new() }; 5];
        let mut at = 0; // bytes per element of the inputs before this one
        for i in 2..io.x.len() {
            let (n, c) = (i - 1, c_type(io.x[i].dtype));
            if self.expr.uses_rng(n) {
                pointers += &format!("    int x{n}[4];\n");
                continue;
            }
            pointers += &format!("    const {c} *x{n};\n");
            sides += &format!("    Pack<{c}> p{n};\n");
            fetch += &format!("    s.p{n} = *(const Pack<{c}> *)(at.x{n} + i);\n");
            // Staged in shared memory, in tiles of 64 x 128 elements.
            let size = io.x[i].dtype.size();
            let near = format!("(char *)near + {} + pack * {}", 8192 * at, 8 * size);
            for k in (0..8).step_by(16 / size) {
                ask += &format!("    copy16({near} + {}, at.x{n} + i + {k}, live);\n", k * size);
            }
            take += &format!("    s.p{n} = *(const Pack<{c}> *)({near});\n");
            at += size;
        }
        for (k, m) in io.y.iter().enumerate() {
            pointers += &format!("    {} *y{k};\n", c_type(m.dtype));
        }
        let read = |n: usize| if n == 0 { "product[j]".into() } else { format!("s.p{n}.at[j]") };
        let elements = print::elements(&self.expr, &self.dtypes, 8, "at.", read);
        let function = "__device__ __forceinline__ void";
        let read = match wide {
            true => format!(
                "{function} ask(const Pointers &at, {index} i, void *near, u32 pack, bool live) {{\n{ask}}}\n\
                 {function} take(Sides &s, const void *near, u32 pack) {{\n{take}}}\n"
            ),
            false => format!("{function} fetch(const Pointers &at, {index} i, Sides &s) {{\n{fetch}}}\n"),
        };
        format!(
            "{}struct Pointers {{\n{pointers}}};\nstruct Sides {{\n{sides}}};\n{read}\
             {function} finish(const Pointers &at, {index} i, const Sides &s, const float product[8]) {{\n{elements}}}\n",
            print::packs(8)
        )
    }

    /// The unfused way: the GEMM into scratch memory, then the pointwise op.
    fn apart(&self, io: &Io) -> Code {
        let product = Matmul { dtype: Some(DType::F32), ..Matmul::default() };
        let meta = product.infer(&io.x[..2]).remove(0);
        let (shape, strides) = self.shape(&meta);
        let of = |range: std::ops::Range<usize>, y: &[Meta]| Io {
            x: io.x[range.clone()].to_vec(),
            strides: io.strides[range.clone()].to_vec(),
            offsets: io.offsets[range.clone()].to_vec(),
            y: y.to_vec(),
            settled: io.settled[range].to_vec(),
            arch: io.arch,
        };
        let first = product.cuda(&of(0..2, std::slice::from_ref(&meta)));
        let mut rest = of(2..io.x.len(), &io.y);
        rest.x.insert(0, Meta::f32(&shape));
        rest.strides.insert(0, strides);
        rest.offsets.insert(0, 0);
        rest.settled.insert(0, false);
        let second = self.arithmetic().cuda(&rest);
        // The GEMM's result is at the start of the workspace.
        let bytes = meta.bytes().next_multiple_of(256);
        let of_product = |p: Place| match p.at {
            At::Y(_) => At::Work.plus(p.bytes),
            At::Work => At::Work.plus(bytes + p.bytes),
            At::X(_) => p,
        };
        let of_arithmetic = |p: Place| match p.at {
            At::X(0) => At::Work.plus(p.bytes),
            At::X(i) => At::X(i + 1).plus(p.bytes),
            _ => p,
        };
        let workspace = bytes + first.workspace;
        let steps = first.steps.into_iter().map(|s| moved(s, of_product)).chain(second.steps.into_iter().map(|s| moved(s, of_arithmetic)));
        Code { steps: steps.collect(), workspace }
    }
}

/// The step with its addresses replaced.
fn moved(step: Step, to: impl Fn(Place) -> Place) -> Step {
    match step {
        Step::Launch(l) => Step::Launch(Launch { args: l.args.iter().map(|&p| to(p)).collect(), ..l }),
        Step::Gemm(mut g) => {
            for m in [&mut g.a, &mut g.b, &mut g.c] {
                m.place = to(m.place);
            }
            Step::Gemm(g)
        }
        Step::Collective(_) => unreachable!("a matmul exchanges nothing"),
        Step::When(live, step) => Step::When(live, Box::new(moved(*step, to))),
    }
}

/// The tiles of the GEMM.
#[derive(Clone, Copy)]
struct Tiles {
    heads: usize,
    m: usize,
    n: usize,
    k: usize,
    /// Strides: of a head and a row of a, and of a head, a row and a column of b.
    a: [usize; 2],
    b: [usize; 3],
    /// Columns of a tile; it has 8192 / columns rows.
    columns: usize,
    /// Tiles of a in shared memory, without `wide`.
    buffers: usize,
    /// How many blocks there are.
    blocks: usize,
    /// Whether it uses wgmma (compute capability 9.0), with tiles of 64 x 128.
    wide: bool,
    /// Bytes that the expression reads for each element, besides the GEMM's result.
    sides: usize,
}

impl Tiles {
    fn new(io: &Io, sides: &[usize]) -> Result<Tiles, String> {
        let (a, b) = (&io.x[0], &io.x[1]);
        let (m, k, n) = (a.dim(1), a.dim(0), b.dim(0));
        if !matches!(a.dtype, DType::BF16 | DType::F16) || io.arch.sm < 80 {
            return Err("the kernel needs bf16 or f16 and compute capability 8.0".into());
        }
        if !n.is_multiple_of(8) || !k.is_multiple_of(8) {
            return Err(format!("K = {k} and {n} columns are not both multiples of 8"));
        }
        let product = &Matmul::default().infer(&io.x[..2])[0];
        let lead = &product.shape[..product.rank() - 2];
        let stride = |i: usize| {
            let own = io.x[i].rank() - 2;
            let strides = broadcast_strides(&io.x[i].shape[..own], &io.strides[i][..own], lead);
            let outer: Vec<usize> = (0..lead.len()).filter(|&d| lead[d] != 1).collect();
            let even = outer.windows(2).all(|w| strides[w[0]] == strides[w[1]] * lead[w[1]]);
            even.then(|| outer.last().map_or(0, |&d| strides[d])).ok_or("the products of a batch do not lie evenly apart")
        };
        let inner = |i: usize| (io.strides[i][io.x[i].rank() - 2], io.strides[i][io.x[i].rank() - 1]);
        let ((a_row, a_column), (b_row, b_column)) = (inner(0), inner(1));
        if a_column != 1 {
            return Err("the left operand is not row-major".into());
        }
        let (a, b) = ([stride(0)?, a_row], [stride(1)?, b_row, b_column]);
        let across = if b_row == 1 { b_column } else { b_row };
        if [a[0], a[1], b[0], across, io.offsets[0], io.offsets[1]].iter().any(|s| !s.is_multiple_of(8)) {
            return Err("rows are not aligned to multiples of 16 bytes".into());
        }
        let columns = [32, 64, 128].into_iter().find(|&c| n <= c).unwrap_or(128);
        let wide = io.arch.sm == 90 && columns == 128 && sides.iter().all(|&size| size >= 2); // copies of whole 16 bytes
        let tiles = Tiles { heads: lead.iter().product(), m, n, k, a, b, columns, buffers: 0, blocks: 0, wide, sides: sides.iter().sum() };
        let narrow = Tiles { wide: false, ..tiles };
        tiles.sized(io).or_else(|| narrow.sized(io)).ok_or_else(|| format!("K = {k}: a tile does not fit into shared memory"))
    }

    fn rows(&self) -> usize {
        8192 / self.columns
    }

    fn source(&self) -> &'static str {
        if self.wide { include_str!("wide.cu") } else { include_str!("tile.cu") }
    }

    fn instructions(&self, dtype: DType) -> String {
        match self.wide {
            true => [wgmma::TEXT, &wgmma::product("multiply", 128, dtype, Left::Rows, false)].concat(),
            false => include_str!("../attention/mma.cuh").into(),
        }
    }

    fn threads(&self) -> usize {
        if self.wide { 512 } else { 256 }
    }

    /// Bytes of shared memory.
    fn shared(&self) -> usize {
        if self.wide {
            let k = 2 * self.k.next_multiple_of(64);
            return self.columns * k + 3 * (self.rows() * k + 8192 * self.sides);
        }
        2 * (self.columns + self.buffers * self.rows()) * (self.k.next_multiple_of(16) + 8)
    }

    fn sized(self, io: &Io) -> Option<Tiles> {
        let (limit, multiprocessors) = (io.arch.shared_limit(), io.arch.multiprocessors as usize);
        let (tiles, parts) = (self.m.div_ceil(self.rows()), self.parts());
        if self.wide {
            let fits = self.shared() + 1024 <= limit;
            return fits.then_some(Tiles { blocks: multiprocessors.min(tiles * parts), ..self });
        }
        let resident = |t: &Tiles| t.resident(limit);
        let best = [1, 2].into_iter().map(|buffers| Tiles { buffers, ..self }).max_by_key(resident)?;
        let slots = resident(&best) * multiprocessors;
        if slots == 0 {
            return None;
        }
        // Estimated time of all blocks in tiles, loading the columns of b counting as one.
        let time = |walkers: usize| (parts * walkers).div_ceil(slots) * (tiles.div_ceil(walkers) + 1);
        let walkers = (1..=tiles.min(8 * slots)).min_by_key(|&w| time(w))?;
        Some(Tiles { blocks: parts * walkers, ..best })
    }

    /// Blocks per multiprocessor: several, so that one computes while another waits; registers limit them.
    fn resident(&self, limit: usize) -> usize {
        ((limit + 1024) / (self.shared() + 1024)).min(2)
    }

    /// How many different column tiles and heads there are.
    fn parts(&self) -> usize {
        self.heads * self.n.div_ceil(self.columns)
    }

    fn launch(&self, launch: Launch, io: &Io) -> Launch {
        launch
            .define_type("T", io.x[0].dtype)
            .define("HEADS", self.heads)
            .define("M", self.m)
            .define("N", self.n)
            .define("K", self.k)
            .define("A_HEAD", self.a[0])
            .define("A_ROW", self.a[1])
            .define("B_HEAD", self.b[0])
            .define("B_ROW", self.b[1])
            .define("B_COLUMN", self.b[2])
            .define("COLUMNS", self.columns)
            .define("BUFFERS", self.buffers)
            .define("SIDES", self.sides)
            .define("WALKERS", self.blocks / self.parts())
            .define("RESIDENT", self.resident(io.arch.shared_limit()))
            .grid(self.blocks, 1, 1)
            .block(self.threads())
            .shared(self.shared())
            .all(io)
    }
}

impl Op for MatmulPointwise {
    fn name(&self) -> &'static str {
        "matmul_pointwise"
    }

    fn infer(&self, x: &[Meta]) -> Vec<Meta> {
        let (shape, _) = self.shape(&Matmul::default().infer(&x[..2])[0]);
        let fits = |i: usize| self.expr.uses_rng(i - 1) || x[i].shape == shape;
        assert!((2..x.len()).all(fits), "a pointwise expression of a GEMM's result {shape:?} and {:?}", &x[2..]);
        self.dtypes.iter().map(|&d| Meta::new(&shape, d)).collect()
    }

    fn cpu(&self, x: &[View], y: &mut [ViewMut], workspace: &mut [f32]) {
        let metas: Vec<Meta> = x[..2].iter().map(|v| Meta::f32(v.shape)).collect();
        let product = Matmul::default().infer(&metas).remove(0);
        let (shape, strides) = self.shape(&product);
        let out = &mut workspace[..product.elements()];
        Matmul::default().cpu(&x[..2], &mut [ViewMut { shape: &product.shape, data: DataMut::F32(out) }], &mut []);
        let view = View { shape: &shape, strides: &strides, data: Data::F32(out) };
        let arithmetic = self.arithmetic();
        run::run(&arithmetic.expr, &arithmetic.in_place, &[&[view], &x[2..]].concat(), y);
    }

    fn workspace(&self, x: &[Meta]) -> usize {
        Matmul::default().infer(&x[..2])[0].elements()
    }

    fn precision(&self, at: Port, _: &[Meta]) -> Narrow {
        op::rounded(at)
    }

    fn cuda(&self, io: &Io) -> Code {
        self.fused(io).unwrap_or_else(|_| self.apart(io))
    }

    fn vjp<'g>(&self, x: &[Var<'g>], _: &[Var<'g>], _: &[Option<Var<'g>>]) -> Grads<'g> {
        no_gradient(x.len())
    }

    /// The pass `gemm-pointwise` records it after autodiff.
    fn differentiable(&self) -> bool {
        false
    }

    fn cost(&self, x: &[Meta]) -> Cost {
        let y = self.infer(x);
        let flops = (2 * x[0].dim(0) + self.expr.flops()) * y[0].elements();
        Cost::compute(flops, x.iter().chain(&y).map(|m| m.bytes()).sum())
    }

    fn layout(&self, input: usize) -> Layout {
        if input < 2 { Layout::Matrix } else { Layout::Contiguous }
    }

    fn reuse(&self) -> Vec<(usize, usize)> {
        self.in_place.clone()
    }

    fn unfused<'g>(&self, x: &[Var<'g>]) -> Option<Vec<Var<'g>>> {
        let r = x[0].recorder();
        let product = r.op1(Matmul { dtype: Some(DType::F32), ..Matmul::default() }, &x[..2]);
        let rank = product.meta().rank();
        let mut order: Vec<usize> = (0..rank).collect();
        order[..rank - 1].rotate_right(self.heads_inside as usize);
        Some(r.op(self.arithmetic(), &[&[product.permute(&order)], &x[2..]].concat()))
    }
}

fn record<'g>(expr: Expr, x: &[Var<'g>], heads_inside: bool) -> Vec<Var<'g>> {
    let dtypes = vec![x[0].dtype(); expr.outs.len()];
    x[0].recorder().op(MatmulPointwise { expr, dtypes, heads_inside, in_place: vec![] }, x)
}

/// A gate as in Vision-BDH: dropout(relu(a b)) times another tensor. Inputs a, b, the other tensor, rng counters.
fn gate<'g>(x: &[Var<'g>], heads_inside: bool) -> Vec<Var<'g>> {
    let mut e = Expr::default();
    let (product, other, zero) = (e.input(0), e.input(1), e.c(0.0));
    let open = e.bin(Bin::Max, product, zero);
    let kept = e.dropout(open, 0.1, 3, 2);
    e.outs = vec![e.mul(other, kept)];
    record(e, x, heads_inside)
}

/// Gradients through a gate with respect to two tensors, where the gradient of its result is a matmul. Inputs a, b, the two tensors.
fn gate_gradient<'g>(x: &[Var<'g>]) -> Vec<Var<'g>> {
    let mut e = Expr::default();
    let (product, other, result, zero, little) = (e.input(0), e.input(1), e.input(2), e.c(0.0), e.c(0.1));
    let (open, some) = (e.bin(Bin::Lt, zero, result), e.bin(Bin::Lt, little, other));
    let (along, inverse, by_gate) = (e.mul(product, result), e.un(Un::Inverse, other), e.mul(product, other));
    let by_other = e.mul(along, inverse);
    e.outs = vec![e.select(open, by_gate, zero), e.select(some, by_other, zero)];
    record(e, x, false)
}

const N: Fill = Fill::Frozen;

/// Cases that check and time the ops of this module.
pub const CASES: &[Case] = &[
    Case::new("gate, heads inside", &[In(&[3, 70, 40], N), In(&[3, 40, 136], N), In(&[70, 3, 136], N), In(&[4], Fill::Rng)], |x| {
        gate(x, true)
    }),
    Case::new("gate of strided matrices", &[In(&[65, 2, 48], N), In(&[2, 72, 24], N), In(&[2, 65, 72], N), In(&[4], Fill::Rng)], |x| {
        gate(&[x[0].permute(&[1, 0, 2]).slice(2, 8, 32), x[1].t(), x[2], x[3]], false)
    }),
    Case::new("gradient of a gate", &[In(&[131, 192], N), In(&[264, 192], N), In(&[131, 264], N), In(&[131, 264], N)], |x| {
        gate_gradient(&[x[0], x[1].t(), x[2], x[3]])
    }),
    Case::new("one row", &[In(&[1, 8], N), In(&[8, 8], N)], |x| record(Expr::of(1, |e, x| e.un(Un::Tanh, x[0])), x, false)),
    Case::new("of odd sizes", &[In(&[2, 5, 7], N), In(&[7, 9], N), In(&[5, 2, 9], N)], |x| {
        record(Expr::of(2, |e, x| e.mul(x[0], x[1])), x, true)
    }),
    Case::new("vision_bdh's gate", &[In(&[6, 8320, 192], N), In(&[6, 192, 1024], N), In(&[8320, 6, 1024], N), In(&[4], Fill::Rng)], |x| {
        gate(x, true)
    })
    .bench(),
    Case::new("its gradient", &[In(&[8320, 192], N), In(&[6144, 192], N), In(&[8320, 6144], N), In(&[8320, 6144], N)], |x| {
        gate_gradient(&[x[0], x[1].t(), x[2], x[3]])
    })
    .bench(),
];
