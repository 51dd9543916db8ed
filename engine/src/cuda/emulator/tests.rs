//! Every kernel that the cases of OPS launch, against the CPU's numbers; and kernels with mistakes planted in them, which must be found.

use super::compile::{COMPILER, Kernels, Order, has_compiler};
use super::program::Emulated;
use crate::check::{agree, checked, outputs_on};
use crate::cpu::{Cpu, Data};
use crate::kernel::{Arch, Launch};
use crate::meta::DType;
use crate::op::{Case, Entry};
use crate::ops::OPS;
use crate::passes::Switches;
use crate::program::Device;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Few multiprocessors: kernels that divide their work among them have several turns to make.
const ARCH: Arch = Arch { sm: 80, multiprocessors: 4 };

/// Cases with more arithmetic and bytes than this are left out, unless their op is named.
const MOST_WORK: u64 = 20_000_000;

/// Which ops to run, or `all`, with the cases that are left out otherwise: `cargo xtask emulate` gives the test's binary one such argument each.
const ONLY: &str = "op=";

/// Where there is no compiler nothing is checked; `cargo xtask test` says so, too.
fn can_emulate() -> bool {
    if !has_compiler() {
        eprintln!("NOT CHECKED: kernels were not emulated, because there is no {COMPILER}");
    }
    has_compiler()
}

/// target/emulator.
fn folder() -> PathBuf {
    let own = std::env::current_exe().expect("a test has a file");
    own.ancestors().nth(3).expect("tests lie in target/debug/deps").join("emulator")
}

/// One case in one type.
struct Job {
    name: String,
    op: &'static str,
    case: &'static Case,
    dtype: DType,
    program: Emulated,
}

fn jobs(wanted: impl Fn(&Entry, &Case) -> bool, dtypes: &[DType], arch: Arch) -> Vec<Job> {
    let mut all = vec![];
    for op in OPS {
        for case in op.cases.iter().filter(|c| wanted(op, c)) {
            for &dtype in dtypes {
                let name = format!("{}: {} ({dtype})", op.name, case.name);
                let program =
                    Emulated::new(checked(case, dtype, false).graph, &Switches::default(), arch).unwrap_or_else(|e| panic!("{name}: {e}"));
                all.push(Job { name, op: op.name, case, dtype, program });
            }
        }
    }
    all
}

impl Job {
    fn run(&self, kernels: &Kernels) -> Result<f64, String> {
        let r = checked(self.case, self.dtype, true);
        let names: Vec<String> = r.graph.outputs.iter().map(|o| o.0.clone()).collect();
        let feeds: Vec<(&str, Data)> = r.feeds.iter().map(|(n, d)| (n.as_str(), d.data())).collect();
        let ours = [Order::Forwards, Order::Backwards].map(|order| self.program.run(kernels, order, &feeds, &names));
        let ours = ours.into_iter().collect::<Result<Vec<_>, String>>()?;
        for (name, (a, b)) in names.iter().zip(ours[0].iter().zip(&ours[1])) {
            if let Some(i) = (0..a.len()).find(|&i| a[i].to_bits() != b[i].to_bits()) {
                return Err(format!("{name}[{i}] is {:e} in one order of threads and {:e} in the other", a[i], b[i]));
            }
        }
        agree(self.case, self.dtype, &ours, &outputs_on(self.case, self.dtype, &Device::cpu(Cpu::new(1)), 1)?[0])
    }
}

fn compiled(jobs: &[Job], change: &dyn Fn(String) -> String) -> Kernels {
    let launches: Vec<_> = jobs.iter().flat_map(|j| j.program.launches()).collect();
    Kernels::new(&folder(), &launches, change).expect("the emulator is built")
}

/// What each job came to, and its seconds.
fn outcomes<'a>(jobs: &'a [Job], kernels: &Kernels) -> Vec<(&'a Job, Result<f64, String>, f64)> {
    let (next, found) = (AtomicUsize::new(0), Mutex::new(vec![]));
    std::thread::scope(|s| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            s.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let begun = Instant::now();
                    let missing =
                        job.program.launches().find_map(|l| Some(format!("{} is not emulated: {}", l.entry, kernels.problem(l)?)));
                    let outcome = missing.map_or_else(|| job.run(kernels), Err);
                    found.lock().expect("no panic under the lock").push((job, outcome, begun.elapsed().as_secs_f64()));
                }
            });
        }
    });
    found.into_inner().expect("no panic under the lock")
}

#[test]
fn kernels_give_the_cpus_numbers() {
    if !can_emulate() {
        return;
    }
    let given: Vec<String> = std::env::args().filter_map(|a| Some(a.strip_prefix(ONLY)?.to_string())).collect();
    let (small, every) = (given.is_empty(), given.is_empty() || given == ["all"]);
    let only: Vec<&str> = given.iter().map(String::as_str).filter(|_| !every).collect();
    for name in &only {
        assert!(
            OPS.iter().any(|o| o.name == *name),
            "there is no op {name}; there are {:?}",
            OPS.iter().map(|o| o.name).collect::<Vec<_>>()
        );
    }
    let begun = Instant::now();
    let wanted = |op: &Entry| every || only.contains(&op.name);
    let mut jobs = jobs(|op, case| !case.bench && wanted(op), &[DType::F32, DType::BF16], ARCH);
    let all = jobs.len();
    jobs.retain(|j| !small || j.program.work() <= MOST_WORK);
    let kernels = compiled(&jobs, &|text| text);
    eprintln!("{} of {all} cases, {} new kernels compiled, {:.1} s", jobs.len(), kernels.compiled, begun.elapsed().as_secs_f64());
    let found = outcomes(&jobs, &kernels);
    for op in OPS {
        let own: Vec<_> = found.iter().filter(|f| f.0.op == op.name).collect();
        let texts: BTreeSet<String> = own.iter().flat_map(|f| f.0.program.launches()).map(|l| l.text()).collect();
        let (worst, seconds) = own.iter().fold((0.0f64, 0.0), |(w, s), f| (w.max(*f.1.as_ref().unwrap_or(&f64::INFINITY)), s + f.2));
        if !own.is_empty() {
            eprintln!("{:<18} {:>3} cases {:>4} kernels {seconds:>6.1} s  {worst:.3} of what is allowed", op.name, own.len(), texts.len());
        }
    }
    let texts: BTreeSet<String> = jobs.iter().flat_map(|j| j.program.launches()).map(|l| l.text()).collect();
    let entries: BTreeSet<&str> = jobs.iter().flat_map(|j| j.program.launches()).map(|l| l.entry).collect();
    eprintln!("{} kernels of {} functions, {:.1} s", texts.len(), entries.len(), begun.elapsed().as_secs_f64());
    if !small {
        eprintln!("not emulated, as they need what only compute capability 9.0 has: {}", not_emulated(wanted).join(", "));
    }
    let failed: Vec<String> = found.iter().filter_map(|f| Some(format!("{}: {}", f.0.name, f.1.as_ref().err()?))).collect();
    assert!(failed.is_empty(), "{} of {} cases:\n{}", failed.len(), found.len(), failed.join("\n"));
}

/// Kernels for compute capability 9.0 that cannot be run here, by op and function.
fn not_emulated(wanted: impl Fn(&Entry) -> bool) -> Vec<String> {
    let jobs = jobs(|op, _| wanted(op), &[DType::F32, DType::BF16], Arch { sm: 90, multiprocessors: 132 });
    // One text of each function and each set of sources is enough to know.
    let mut one: BTreeMap<(&str, &str, &str), &Launch> = BTreeMap::new();
    for job in &jobs {
        one.extend(job.program.launches().map(|l| ((job.op, l.entry, l.source.as_str()), l)));
    }
    let launches: Vec<&Launch> = one.values().copied().collect();
    let kernels = Kernels::new(&folder(), &launches, &|text| text).expect("the emulator is built");
    let missing = one.iter().filter(|(_, l)| kernels.problem(l).is_some_and(|p| p.contains("ptx_")));
    missing.map(|((op, entry, _), _)| format!("{op}: {entry}")).collect::<BTreeSet<_>>().into_iter().collect()
}

/// A mistake: in the kernels of one case, this text becomes that.
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
    mistake("16 bytes at any address", "cross_entropy", "some ignored", DType::F32, "(16 - ((u64)x & 15)) & 15", "(u64)0"),
];

#[test]
fn mistakes_that_are_planted_are_found() {
    if !can_emulate() {
        return;
    }
    let mut missed = vec![];
    for m in MISTAKES {
        let jobs = jobs(|op, case| op.name == m.op && case.name == m.case, &[m.dtype], ARCH);
        let planted = jobs.iter().flat_map(|j| j.program.launches()).filter(|l| l.text().contains(m.is)).count();
        assert!(planted > 0, "{}: no kernel of {}, {} has the text {:?}", m.what, m.op, m.case, m.is);
        let kernels = compiled(&jobs, &|text| text.replace(m.is, m.becomes));
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
