//! Compares every kernel that the cases of some ops launch with the CPU's results.

use super::compile::{COMPILER, Kernels, Order, has_compiler};
use super::program::Emulated;
use crate::check::{agree, checked, outputs_on};
use crate::cpu::{Cpu, Data};
use crate::kernel::{Arch, Launch};
use crate::meta::DType;
use crate::op::{Case, Entry};
use crate::passes::Switches;
use crate::program::Device;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Few multiprocessors, so that kernels with persistent blocks make several rounds.
pub const ARCH: Arch = Arch { sm: 80, multiprocessors: 4 };

/// Cases with more FLOPs and bytes than this are skipped, unless all are asked for.
const MOST_WORK: u64 = 20_000_000;

/// Why kernels cannot be emulated here.
pub fn missing() -> Option<String> {
    (!has_compiler()).then(|| format!("kernels are emulated with {COMPILER}, which is not installed"))
}

/// Runs the kernels of every case of these ops, in f32 and bf16, and compares with the CPU's results. Kernels are compiled once and cached in
/// `folder`. Without `every`, large cases are skipped. `say` gets a line for each op; errors name the cases that differ.
pub fn check(ops: &[&'static Entry], folder: &Path, every: bool, say: &mut dyn FnMut(String)) -> Result<(), String> {
    if let Some(missing) = missing() {
        return Err(missing);
    }
    let begun = Instant::now();
    let mut jobs = of_both(ops, &|case| !case.bench, &[DType::F32, DType::BF16]);
    let all = jobs.len();
    jobs.retain(|j| every || j.program.work() <= MOST_WORK);
    let kernels = compiled(&jobs, folder, &|text| text)?;
    say(format!("{} of {all} cases, {} new kernels compiled, {:.1} s", jobs.len(), kernels.compiled, begun.elapsed().as_secs_f64()));
    let found = outcomes(&jobs, &kernels);
    for op in ops {
        let own: Vec<_> = found.iter().filter(|f| f.0.op == op.name).collect();
        let texts: BTreeSet<String> = own.iter().flat_map(|f| f.0.program.launches()).map(|l| l.text()).collect();
        let (worst, seconds) = own.iter().fold((0.0f64, 0.0), |(w, s), f| (w.max(*f.1.as_ref().unwrap_or(&f64::INFINITY)), s + f.2));
        if !own.is_empty() {
            say(format!(
                "{:<18} {:>3} cases {:>4} kernels {seconds:>6.1} s  {worst:.3} of what is allowed",
                op.name,
                own.len(),
                texts.len()
            ));
        }
    }
    let texts: BTreeSet<String> = jobs.iter().flat_map(|j| j.program.launches()).map(|l| l.text()).collect();
    let entries: BTreeSet<&str> = jobs.iter().flat_map(|j| j.program.launches()).map(|l| l.entry).collect();
    say(format!("{} kernels of {} functions, {:.1} s", texts.len(), entries.len(), begun.elapsed().as_secs_f64()));
    if every {
        let missing = not_emulated(ops, folder)?;
        if !missing.is_empty() {
            say(format!("not emulated, as they need what only compute capability 9.0 has: {}", missing.join(", ")));
        }
    }
    let failed: Vec<String> = found.iter().filter_map(|f| Some(format!("{}: {}", f.0.name, f.1.as_ref().err()?))).collect();
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("{} of {} cases:\n{}", failed.len(), found.len(), failed.join("\n"))),
    }
}

/// One case in one type.
pub struct Job {
    pub name: String,
    op: &'static str,
    case: &'static Case,
    dtype: DType,
    pub program: Emulated,
}

pub fn jobs(ops: &[&'static Entry], wanted: impl Fn(&Case) -> bool, dtypes: &[DType], arch: Arch) -> Vec<Job> {
    let mut all = vec![];
    for op in ops {
        for case in op.cases.iter().filter(|c| wanted(c)) {
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

/// The same for compute capability 8.0 and, where kernels for 9.0 are others and have no instructions of their own, for that.
pub fn of_both(ops: &[&'static Entry], wanted: &dyn Fn(&Case) -> bool, dtypes: &[DType]) -> Vec<Job> {
    let mut all = jobs(ops, wanted, dtypes, ARCH);
    let texts = |job: &Job| job.program.launches().map(|l| l.text()).collect::<Vec<_>>();
    let newer = jobs(ops, wanted, dtypes, Arch { sm: 90, ..ARCH }).into_iter().zip(all.iter().map(texts).collect::<Vec<_>>());
    let other = newer.filter(|(job, older)| texts(job) != *older).map(|(job, _)| Job { name: format!("{}, 9.0", job.name), ..job });
    all.extend(other.filter(|job| texts(job).iter().all(|t| !t.contains("wgmma") && !t.contains("mbarrier"))));
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

pub fn compiled(jobs: &[Job], folder: &Path, change: &dyn Fn(String) -> String) -> Result<Kernels, String> {
    let launches: Vec<_> = jobs.iter().flat_map(|j| j.program.launches()).collect();
    Kernels::new(folder, &launches, change)
}

/// The result of each job, and its seconds.
pub fn outcomes<'a>(jobs: &'a [Job], kernels: &Kernels) -> Vec<(&'a Job, Result<f64, String>, f64)> {
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

/// Kernels for compute capability 9.0 that cannot be run here, by op and function.
fn not_emulated(ops: &[&'static Entry], folder: &Path) -> Result<Vec<String>, String> {
    let jobs = jobs(ops, |_| true, &[DType::F32, DType::BF16], Arch { sm: 90, multiprocessors: 132 });
    // One source of each function and each set of files is enough.
    let mut one: BTreeMap<(&str, &str, &str), &Launch> = BTreeMap::new();
    for job in &jobs {
        one.extend(job.program.launches().map(|l| ((job.op, l.entry, l.source.as_str()), l)));
    }
    let launches: Vec<&Launch> = one.values().copied().collect();
    let kernels = Kernels::new(folder, &launches, &|text| text)?;
    let missing = one.iter().filter(|(_, l)| kernels.problem(l).is_some_and(|p| p.contains("ptx_")));
    Ok(missing.map(|((op, entry, _), _)| format!("{op}: {entry}")).collect::<BTreeSet<_>>().into_iter().collect())
}
