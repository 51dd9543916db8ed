//! The kernel's source: an expression, and what happens to each of its results.

use super::Quantize;
use crate::kernel::{Io, c_type};
use crate::ops::pointwise::print;

/// The kernel of quantize.cu.
pub fn kernel(op: &Quantize, io: &Io) -> String {
    let inputs = op.inputs(io.x.len());
    let mut parameters: Vec<String> = (0..inputs).map(|i| format!("const {} *x{i}", c_type(io.x[i].dtype))).collect();
    parameters.extend((0..op.results.len()).map(|k| format!("const float *scale{k}")));
    let [mut before, mut words, mut packs, mut load, mut values, mut store, mut turn, mut write, mut end] = [const { String::new() }; 9];
    let (_, mut body) = print::instructions(&op.expr, 8, "", |n| format!("p{n}[i].at[j]"));
    for i in 0..inputs {
        let c = c_type(io.x[i].dtype);
        packs += &format!("            Pack<{c}> p{i}[4];\n");
        load += &format!("                p{i}[i] = *(const Pack<{c}> *)(x{i} + (u64)(row + i) * N + column);\n");
    }
    for (k, (r, out)) in op.results.iter().zip(&op.expr.outs).enumerate() {
        let q = c_type(r.dtype);
        before += &format!("    float by{k} = 1.0f / *scale{k};\n    u32 most{k} = 0;\n");
        values += &format!("                float f{k}[8];\n");
        body += &format!("        f{k}[j] = v{out};\n");
        words += &format!("        u32 w{k}[4][2];\n");
        store += &format!("                rounded<{q}>(f{k}, by{k}, most{k}, w{k}[i]);\n");
        if r.rows {
            parameters.push(format!("{q} *rows{k}"));
            store += &format!("                *(u64 *)(rows{k} + at) = (u64)w{k}[i][1] << 32 | w{k}[i][0];\n");
        }
        if r.columns {
            parameters.push(format!("{q} *columns{k}"));
            before += &format!("    __shared__ u32 turned{k}[128 * WORDS];\n");
            turn += &format!("        if (inside) turn(w{k}, turned{k} + c * WORDS + g);\n");
            write += &format!("        write_turned(turned{k}, (unsigned char *)columns{k}, tile);\n");
        }
        if let Some(dtype) = r.kept {
            let c = c_type(dtype);
            parameters.push(format!("{c} *kept{k}"));
            store += &format!(
                "                Pack<{c}> own{k};\n                for (int j = 0; j < 8; j += 2) from_floats(f{k}[j], f{k}[j + 1], own{k}.at + j);\n\
                 \x20               *(Pack<{c}> *)(kept{k} + at) = own{k};\n"
            );
        }
        parameters.push(format!("float *largest{k}"));
        end += &format!(
            "    float largest_of{k} = block_max(__uint_as_float(most{k}));\n    if (threadIdx.x == 0) largest{k}[blockIdx.x] = largest_of{k};\n"
        );
    }
    let turn = if turn.is_empty() { turn } else { format!("{turn}        __syncthreads();\n{write}        __syncthreads();\n") };
    format!(
        "extern \"C\" __global__ void __launch_bounds__(512) quantize({}) {{\n{before}\
         \x20   int c = threadIdx.x % 16 * 8, g = threadIdx.x / 16; // the first column, and which four rows\n\
         \x20   for (int tile = blockIdx.x; tile < TILES; tile += gridDim.x) {{\n\
         \x20       int row = tile / ACROSS * 128 + 4 * g, column = tile % ACROSS * 128 + c;\n\
         \x20       bool inside = row < M && column < N; // both are multiples of 16\n{words}\
         \x20       if (inside) {{\n{packs}\
         #pragma unroll\n\
         \x20           for (int i = 0; i < 4; i++) {{\n{load}            }}\n\
         #pragma unroll\n\
         \x20           for (int i = 0; i < 4; i++) {{\n\
         \x20               u64 at = (u64)(row + i) * N + column;\n{values}\
         #pragma unroll\n\
         \x20               for (int j = 0; j < 8; j++) {{\n{body}                }}\n{store}\
         \x20           }}\n\
         \x20       }}\n{turn}\
         \x20   }}\n{end}}}\n",
        parameters.join(", ")
    )
}
