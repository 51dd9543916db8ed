//! `wgmma` instructions (compute capability 9.0) as generated CUDA source, for kernels of various shapes and types.

use crate::meta::DType;

/// CUDA source for Hopper kernels: asynchronous copies, barriers, wgmma fences.
pub(crate) const TEXT: &str = concat!(include_str!("mma.cuh"), include_str!("barriers.cuh"), include_str!("wgmma.cuh"));

/// Where the left operand of a wgmma comes from.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Left {
    /// Shared memory, row-major (M by K).
    Rows,
    /// Shared memory, transposed: its rows are along K.
    Transposed,
    /// Registers, in the fragment layout of mma.
    Registers,
}

/// Functions `name(c, a, b)`: c [64, columns] += a [64, 16] b [16, columns], and `name_first`, which overwrites c. b lies in shared memory;
/// `transposed` if its rows are along K.
pub(crate) fn product(name: &str, columns: usize, dtype: DType, left: Left, transposed: bool) -> String {
    let dtype = if dtype == DType::BF16 { "bf16" } else { "f16" };
    let list = |n: usize, f: &dyn Fn(usize) -> String| (0..n).map(f).collect::<Vec<_>>().join(", ");
    let (sums, transposed) = (columns / 2, transposed as u8);
    let (c, registers) = (list(sums, &|i| format!("\"+f\"(c[{i}])")), list(sums, &|i| format!("%{i}")));
    let (parameter, given, a, b, flags) = match left {
        Left::Registers => {
            let a = list(4, &|i| format!("%{}", sums + i));
            ("const u32 *a", list(4, &|i| format!("\"r\"(a[{i}])")), format!("{{{a}}}"), sums + 4, format!("{transposed}"))
        }
        _ => ("u64 a", "\"l\"(a)".into(), format!("%{sums}"), sums + 1, format!("{}, {transposed}", (left == Left::Transposed) as u8)),
    };
    let function = |name: &str, add: u8| {
        format!(
            "__device__ __forceinline__ void {name}(float *c, {parameter}, u64 b) {{\n    \
             asm volatile(\"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{dtype}.{dtype} {{{registers}}}, {a}, %{b}, {add}, 1, 1, {flags};\"\n        \
             : {c} : {given}, \"l\"(b));\n}}\n"
        )
    };
    function(name, 1) + &function(&format!("{name}_first"), 0)
}
