//! Runs every kernel of the engine's ops in the emulator; and kernels with planted errors, which must be found.

use super::run::{ARCH, Job, check, compiled, jobs, missing, outcomes};
use crate::kernel::Arch;
use crate::meta::DType;
use crate::ops::OPS;
use std::path::PathBuf;

#[allow(clippy::duplicate_mod)] // tests/mpich.rs has it, too
#[path = "../../../tests/without.rs"]
mod without;

/// False where the machine has no compiler and tests may do without.
pub(crate) fn can_emulate() -> bool {
    missing().inspect(|why| without::without("g++", why)).is_none()
}

/// target/emulator.
fn folder() -> PathBuf {
    let own = std::env::current_exe().expect("a test has a file");
    own.ancestors().nth(3).expect("tests lie in target/debug/deps").join("emulator")
}

#[test]
fn kernels_give_the_cpus_numbers() {
    if can_emulate() {
        let checked = check(&OPS.iter().collect::<Vec<_>>(), &folder(), false, &mut |line| eprintln!("{line}"));
        checked.unwrap_or_else(|e| panic!("{e}"));
    }
}

/// A planted error: in the kernels of one case, the text `is` is replaced by `becomes`.
struct Mistake {
    what: &'static str,
    op: &'static str,
    case: &'static str,
    dtype: DType,
    is: &'static str,
    becomes: &'static str,
}

const fn mistake(
    what: &'static str,
    op: &'static str,
    case: &'static str,
    dtype: DType,
    is: &'static str,
    becomes: &'static str,
) -> Mistake {
    Mistake { what, op, case, dtype, is, becomes }
}

const MISTAKES: &[Mistake] = &[
    mistake(
        "block_sum without the barrier before parts are read",
        "norm",
        "rms long rows",
        DType::F32,
        "if (lane == 0) parts[warp] = v;\n    __syncthreads();\n    return warp_sum(",
        "if (lane == 0) parts[warp] = v;\n    return warp_sum(",
    ),
    mistake(
        "block_sum without the barrier before parts are written again",
        "norm",
        "layer, all columns of long rows",
        DType::F32,
        "v = warp_sum(v);\n    __syncthreads();\n",
        "v = warp_sum(v);\n",
    ),
    mistake("a tile read before all of it is there", "norm", "rms", DType::F32, "tile[y][x] = v;\n    __syncthreads();", "tile[y][x] = v;"),
    mistake(
        "a tree of sums without barriers",
        "reduce",
        "columns",
        DType::F32,
        "__syncthreads();\n            if (ty < half)",
        "if (ty < half)",
    ),
    mistake("one row too many", "rope", "halves", DType::F32, "if (i >= (AT)THREADS) return;", "if (i > (AT)THREADS) return;"),
    mistake("a stride of another tensor", "rope", "heads among others", DType::BF16, "(u64)place * STRIDE", "(u64)place * HEADS * D"),
    mistake(
        "the tail left out",
        "cross_entropy",
        "some ignored",
        DType::F32,
        "if (j >= 0) {\n        float v[1]",
        "if (false) {\n        float v[1]",
    ),
    mistake(
        "a sum kept in bf16",
        "reduce",
        "rows",
        DType::F32,
        "acc[i] = join(acc[i], to_float(v.at[i]));",
        "{ bf16 sum; from_float(join(acc[i], to_float(v.at[i])), sum); acc[i] = to_float(sum); }",
    ),
    mistake(
        "8-bit states: a lane's maximum in the place of its block's",
        "adamw8",
        "a step",
        DType::F32,
        "largest_m = warp_max(largest_m), ",
        "",
    ),
    mistake(
        "8-bit states: maps that are read before they are there",
        "adamw8",
        "momentum",
        DType::F32,
        "__syncthreads();\n    const bool counts",
        "const bool counts",
    ),
    mistake(
        "one lane too many counts",
        "top_k",
        "gathered by",
        DType::F32,
        "u32 lower = (1u << lane) - 1;",
        "u32 lower = (2u << lane) - 1;",
    ),
    mistake(
        "tiles written while others still read them",
        "experts",
        "to experts, tiles",
        DType::F32,
        "sum[s][i][j] += m[i] * n[j];\n            }\n        }\n        __syncthreads();",
        "sum[s][i][j] += m[i] * n[j];\n            }\n        }",
    ),
    mistake(
        "tensor cores: a copy read before it was waited for",
        "attention",
        "flash heads of 64",
        DType::BF16,
        "copies_wait<0>();\n        __syncthreads(); // this stage",
        "__syncthreads(); // this stage",
    ),
    mistake(
        "tensor cores: a copy into what others still read",
        "attention",
        "flash heads of 64",
        DType::BF16,
        "copies_wait<0>();\n        __syncthreads(); // this stage",
        "copies_wait<0>(); // this stage",
    ),
    mistake(
        "tensor cores: a matrix not transposed",
        "attention",
        "flash heads of 64",
        DType::BF16,
        "matrices_t(b, tile + (16 * n",
        "matrices(b, tile + (16 * n",
    ),
    mistake("a key behind the last", "attention", "flash full", DType::F32, "tx + 16 * c < live", "tx + 16 * c <= live"),
    mistake("the sum of half a row", "attention", "flash full", DType::F32, "i = 8; i > 0; i >>= 1) sum", "i = 4; i > 0; i >>= 1) sum"),
    mistake(
        "tensor cores: rows behind the end written",
        "conv",
        "groups of 16",
        DType::BF16,
        "if (t >= TIME) break;",
        "if (t > TIME) break;",
    ),
    mistake(
        "a scan's decays: the rows of the last warp left out",
        "ssd",
        "strong decays",
        DType::BF16,
        "w <= i / 16; w++) v += rows",
        "w < i / 16; w++) v += rows",
    ),
    mistake(
        "a scan's heads in one block: the sum of earlier heads not taken off",
        "ssd",
        "shared chunks, six heads",
        DType::BF16,
        "= dot - before[r / 2][r % 2];",
        "= dot;",
    ),
    mistake(
        "a scan's heads in one block: the next head's states fetched over those in use",
        "ssd",
        "shared chunks, six heads",
        DType::BF16,
        "__syncthreads();\n        if (held + 1 < HELD) fetch_states(held + 1);",
        "if (held + 1 < HELD) fetch_states(held + 1);",
    ),
    mistake(
        "a scan's decays: half of the columns left out",
        "ssd",
        "shared chunks, rates",
        DType::BF16,
        "column_sum[half] += s[n][2 * half] * low_of(score[2 * n + half]);",
        "",
    ),
    mistake("16 bytes at any address", "cross_entropy", "some ignored", DType::F32, "(16 - ((u64)x & 15)) & 15", "(u64)0"),
];

#[test]
fn mistakes_that_are_planted_are_found() {
    if !can_emulate() {
        return;
    }
    let mut missed = vec![];
    for m in MISTAKES {
        let op: Vec<_> = OPS.iter().filter(|op| op.name == m.op).collect();
        // Some kernels are only for GPUs with more shared memory.
        let archs = [ARCH, Arch { sm: 90, ..ARCH }];
        let mut found = archs.into_iter().map(|arch| jobs(&op, |case| case.name == m.case, &[m.dtype], arch));
        let planted = |jobs: &Vec<Job>| jobs.iter().flat_map(|j| j.program.launches()).any(|l| l.text().contains(m.is));
        let jobs = found.find(planted).unwrap_or_else(|| panic!("{}: no kernel of {}, {} has the text {:?}", m.what, m.op, m.case, m.is));
        let kernels = compiled(&jobs, &folder(), &|text| text.replace(m.is, m.becomes)).expect("the emulator is built");
        for (job, outcome, _) in outcomes(&jobs, &kernels) {
            match outcome {
                Ok(error) => missed.push(format!("{}: {} was {error:.3} of what is allowed", m.what, job.name)),
                Err(e) if e.contains("not emulated") => missed.push(format!("{}: {e}", m.what)),
                Err(e) => eprintln!("found  {:<60} {e}", m.what),
            }
        }
    }
    assert!(missed.is_empty(), "{} of {}:\n{}", missed.len(), MISTAKES.len(), missed.join("\n"));
}
