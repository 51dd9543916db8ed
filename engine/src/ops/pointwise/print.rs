//! Pointwise expressions as generated CUDA source.

use super::Pointwise;
use super::expr::{Bin, Expr, Ins, Un};
use super::run::Walk;
use crate::kernel::{At, Code, Io, Launch, c_type};
use crate::meta::DType;

const THREADS: usize = 256;

pub fn code(op: &Pointwise, io: &Io) -> Code {
    let shape = &io.y[0].shape;
    let total = io.y[0].elements();
    let views: Vec<Option<(&[usize], &[usize])>> =
        (0..io.x.len()).map(|i| (!op.expr.uses_rng(i)).then_some((&io.x[i].shape[..], &io.strides[i][..]))).collect();
    let walk = Walk::new(shape, &views);
    // 32-bit indices if they suffice: a 64-bit division costs more than the rest.
    let index = if total < 1 << 31 { "u32" } else { "u64" };
    let width = width(op, io, &walk);
    let mut load = String::new();
    for i in (0..io.x.len()).filter(|&i| !op.expr.uses_rng(i)) {
        let (at, c) = (place(&walk, i), c_type(io.x[i].dtype));
        load += &match read(&walk, i) {
            Read::Packed if width > 1 => format!("    const Pack<{c}> p{i} = *(const Pack<{c}> *)(x{i} + {at});\n"),
            Read::Same => format!("    const {c} s{i} = x{i}[{at}];\n"),
            _ => String::new(),
        };
    }
    let types: Vec<DType> = io.y.iter().map(|m| m.dtype).collect();
    let elements = elements(&op.expr, &types, width, "", |n| match read(&walk, n) {
        Read::Packed if width > 1 => format!("p{n}.at[j]"),
        Read::Same => format!("s{n}"),
        // Element j of the thread's pack, along the innermost dimension.
        _ => format!("x{n}[{} + j * {}]", place(&walk, n), walk.strides[n].last().unwrap()),
    });
    let inputs = io.x.iter().enumerate().map(|(i, m)| format!("const {} *x{i}", c_type(m.dtype)));
    let outputs = io.y.iter().enumerate().map(|(k, m)| format!("{} *y{k}", c_type(m.dtype)));
    let parameters: Vec<String> = inputs.chain(outputs).collect();
    let source = format!(
        "{}extern \"C\" __global__ void pointwise({}) {{\n\
         \x20   {index} i = (({index})blockIdx.x * {THREADS} + threadIdx.x) * {width};\n\
         \x20   if (i >= {total}) return;\n{load}{elements}}}\n",
        packs(width),
        parameters.join(", ")
    );
    let args: Vec<_> = (0..io.x.len()).map(|i| At::X(i).into()).chain((0..io.y.len()).map(|k| At::Y(k).into())).collect();
    Launch::new(&source, "pointwise").grid((total / width).div_ceil(THREADS), 1, 1).block(THREADS).args(&args).code()
}

/// A struct for packed loads and stores of adjacent elements.
pub(crate) fn packs(width: usize) -> String {
    format!("template <class E> struct __align__(sizeof(E) * {width} < 16 ? sizeof(E) * {width} : 16) Pack {{ E at[{width}]; }};\n")
}

/// Source that computes and writes elements i .. i + width of the outputs; `input` prints how element i + j of an input is read. The rng counters are
/// called x{input} and the outputs y{output}, with `at` before their names.
pub(crate) fn elements(expr: &Expr, types: &[DType], width: usize, at: &str, input: impl Fn(usize) -> String) -> String {
    let (mut before, mut body) = instructions(expr, width, at, input);
    let mut store = String::new();
    for (k, (o, &dtype)) in expr.outs.iter().zip(types).enumerate() {
        let c = c_type(dtype);
        before += &format!("    Pack<{c}> q{k};\n");
        // bf16 and f16 are rounded two at a time.
        if width > 1 && matches!(dtype, DType::BF16 | DType::F16) {
            before += &format!("    float f{k}[{width}];\n");
            body += &format!("        f{k}[j] = v{o};\n");
            store +=
                &format!("    #pragma unroll\n    for (int j = 0; j < {width}; j += 2) from_floats(f{k}[j], f{k}[j + 1], q{k}.at + j);\n");
        } else {
            body += &format!("        from_float(v{o}, q{k}.at[j]);\n");
        }
        store += &format!("    *(Pack<{c}> *)({at}y{k} + i) = q{k};\n");
    }
    format!("{before}    #pragma unroll\n    for (int j = 0; j < {width}; j++) {{\n{body}    }}\n{store}")
}

/// Source that draws an expression's random numbers for elements i .. i + width, and source that computes element i + j, register r in v{r}.
pub(crate) fn instructions(expr: &Expr, width: usize, at: &str, input: impl Fn(usize) -> String) -> (String, String) {
    let (mut before, mut body) = (String::new(), String::new());
    for (r, ins) in expr.ins.iter().enumerate() {
        let value = match *ins {
            Ins::In(n) => format!("to_float({})", input(n)),
            Ins::Const(c) => format!("__int_as_float(0x{:08x})", c.to_bits()),
            Ins::Un(u, a) => unary(u, a),
            Ins::Bin(Bin::Lt, a, b) => match (expr.ins[a], expr.ins[b]) {
                // The 16 random bits themselves are compared.
                (Ins::Random { .. }, Ins::Const(c)) if c < 1.0 => {
                    format!("w{a}[j] < {}u ? 1.0f : 0.0f", (c as f64 * 65_536.0).ceil() as u32)
                }
                _ => binary(Bin::Lt, a, b),
            },
            Ins::Bin(b, x, y) => binary(b, x, y),
            Ins::Select(c, a, b) => format!("v{c} != 0.0f ? v{a} : v{b}"),
            Ins::Random { site, rng, first } => {
                let i = if first > 0 { format!("i + {first}ull") } else { "i".into() };
                before += &format!("    u32 w{r}[{width}];\n    random_halves<{width}>({at}x{rng}, {site}u, {i}, w{r});\n");
                format!("(float)w{r}[j] * (1.0f / 65536.0f)")
            }
        };
        body += &format!("        float v{r} = {value};\n");
    }
    (before, body)
}

/// How a thread reads its adjacent elements of an input.
enum Read {
    /// As one pack: they are contiguous.
    Packed,
    /// Once: the input is broadcast along them.
    Same,
    Apart,
}

fn read(walk: &Walk, input: usize) -> Read {
    match walk.strides[input].last() {
        Some(1) => Read::Packed,
        Some(0) => Read::Same,
        _ => Read::Apart,
    }
}

/// Elements per thread: 16 bytes of the narrowest type, halved until it divides the rows and every packed read is aligned.
fn width(op: &Pointwise, io: &Io, walk: &Walk) -> usize {
    let inner = *walk.shape.last().unwrap();
    let narrowest = io.y.iter().chain(&io.x).map(|m| m.dtype.size()).min().unwrap_or(4).max(2);
    // For small tensors, more threads matter more than wide loads.
    let enough = io.y[0].elements() / (32 * 2048 * io.arch.multiprocessors as usize / 132).max(1);
    let mut width = (16 / narrowest).min(enough.max(1).next_power_of_two());
    let aligned = |w: usize| {
        inner.is_multiple_of(w)
            && (0..io.x.len()).filter(|&i| !op.expr.uses_rng(i) && matches!(read(walk, i), Read::Packed)).all(|i| {
                let outer = &walk.strides[i][..walk.strides[i].len() - 1];
                io.offsets[i].is_multiple_of(w) && outer.iter().all(|s| s.is_multiple_of(w))
            })
    };
    while width > 1 && !aligned(width) {
        width /= 2;
    }
    width
}

/// Source for the index in an input of element `i` of the output.
fn place(walk: &Walk, input: usize) -> String {
    let strides = &walk.strides[input];
    let mut inner = 1;
    let mut terms = vec![];
    for d in (0..walk.shape.len()).rev() {
        if strides[d] != 0 {
            let quotient = if inner == 1 { "i".to_string() } else { format!("i / {inner}") };
            let digit = if d == 0 { quotient } else { format!("{quotient} % {}", walk.shape[d]) };
            terms.push(if strides[d] == 1 { format!("({digit})") } else { format!("({digit}) * {}", strides[d]) });
        }
        inner *= walk.shape[d];
    }
    if terms.is_empty() { "0".into() } else { terms.join(" + ") }
}

fn unary(u: Un, a: usize) -> String {
    match u {
        Un::Neg => format!("-v{a}"),
        Un::Abs => format!("fabsf(v{a})"),
        Un::Exp => format!("expf(v{a})"),
        Un::Ln => format!("logf(v{a})"),
        Un::Ln1p => format!("log1pf(v{a})"),
        Un::Sqrt => format!("sqrtf(v{a})"),
        Un::Rsqrt => format!("1.0f / sqrtf(v{a})"),
        Un::Inverse => format!("inverse(v{a})"),
        Un::Sigmoid => format!("1.0f / (1.0f + expf(-v{a}))"),
        Un::Tanh => format!("tanhf(v{a})"),
        Un::Erf => format!("erff(v{a})"),
        Un::Sin => format!("sinf(v{a})"),
        Un::Cos => format!("cosf(v{a})"),
        Un::Floor => format!("floorf(v{a})"),
        Un::Step => format!("v{a} > 0.0f ? 1.0f : 0.0f"),
    }
}

fn binary(b: Bin, x: usize, y: usize) -> String {
    match b {
        Bin::Add => format!("v{x} + v{y}"),
        Bin::Sub => format!("v{x} - v{y}"),
        Bin::Mul => format!("v{x} * v{y}"),
        Bin::Div => format!("v{x} / v{y}"),
        Bin::Max => format!("(v{x} > v{y} || v{x} != v{x}) ? v{x} : v{y}"),
        Bin::Min => format!("(v{x} < v{y} || v{x} != v{x}) ? v{x} : v{y}"),
        Bin::Lt => format!("v{x} < v{y} ? 1.0f : 0.0f"),
        Bin::Eq => format!("v{x} == v{y} ? 1.0f : 0.0f"),
        Bin::Atan2 => format!("atan2f(v{x}, v{y})"),
    }
}
