//! Processes of this test binary as ranks, started by `mpiexec`. The tests that are ignored are what such a process does; run alone, each is a job of one.

use super::*;
use crate::ranks::threads;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

#[path = "../../../tests/mpich.rs"]
mod mpich;

/// Runs the ignored test `name` of this binary on so many ranks.
fn on_ranks(mpich: &mpich::Mpich, ranks: usize, name: &str) -> Output {
    let module = module_path!().split_once("::").unwrap().1;
    let mut mpiexec = Command::new(&mpich.mpiexec);
    mpiexec.args(["-launcher", "fork", "-rmk", "user", "-n", &ranks.to_string()]).arg(std::env::current_exe().unwrap());
    mpiexec.args(["--ignored", "--exact", &format!("{module}::{name}"), "--nocapture"]);
    // The engine is handed no folder here, and the system looks in this one.
    mpiexec.env("LD_LIBRARY_PATH", &mpich.lib).env("MPIR_CVAR_POLLS_BEFORE_YIELD", "1").stdin(Stdio::null()).output().unwrap()
}

fn connected() -> Mpi {
    Mpi::connect(&Folders::default()).unwrap()
}

/// What every collective gives a rank, of parts that divide among the ranks and of others.
fn exchanged(ranks: &Ranks) -> Vec<u32> {
    let mut all = vec![];
    for (n, group) in [1, 7, 1000, 70_001].into_iter().flat_map(|n| [(n, &ranks.data), (n, &ranks.tensor)]) {
        let own = |i: usize| ((1 + ranks.rank() * 31 + i * 7) as f32 / 3.0).sin();
        let mut sums: Vec<f32> = (0..n).map(own).collect();
        group.all_reduce(&mut sums);
        let send: Vec<f32> = (0..n * group.size).map(own).collect();
        let (mut parts, mut whole) = (vec![0.0; n * group.size], vec![0.0; n * group.size]);
        group.all_to_all(&send, &mut parts);
        group.all_gather(&send[..n], &mut whole);
        all.extend([sums, parts, whole].into_iter().flatten().map(f32::to_bits));
    }
    let bytes = ranks.data.gather_bytes(&vec![ranks.rank() as u8; ranks.rank() * 3]).unwrap();
    all.extend(bytes.into_iter().flatten().map(u32::from));
    all
}

fn digest(numbers: &[u32]) -> String {
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(bytemuck::cast_slice(numbers)))
}

#[test]
#[ignore = "what a rank of another test does"]
fn exchanges() {
    let mpi = connected();
    for tensor in [1, 2].into_iter().filter(|t| mpi.size.is_multiple_of(*t)) {
        let ranks = mpi.ranks(tensor).unwrap();
        assert_eq!((ranks.rank(), ranks.size()), (mpi.rank, mpi.size));
        println!("\nfound {tensor} {} {}", mpi.rank, digest(&exchanged(&ranks)));
    }
    mpi.finish().unwrap();
}

#[test]
fn processes_exchange_what_threads_do_bit_for_bit() {
    let Some(mpich) = mpich::mpich() else { return };
    for size in [2, 4] {
        let mut wanted = vec![];
        for tensor in [1, 2] {
            let digests: Vec<String> = std::thread::scope(|s| {
                let all: Vec<_> =
                    threads::ranks(size / tensor, tensor).into_iter().map(|r| s.spawn(move || digest(&exchanged(&r)))).collect();
                all.into_iter().map(|t| t.join().unwrap()).collect()
            });
            wanted.extend(digests.iter().enumerate().map(|(rank, d)| format!("found {tensor} {rank} {d}")));
        }
        let ran = on_ranks(mpich, size, "exchanges");
        let text = String::from_utf8_lossy(&ran.stdout).into_owned();
        assert!(ran.status.success(), "{ran:?}");
        let mut found: Vec<&str> = text.lines().filter(|l| l.starts_with("found")).collect();
        found.sort_unstable();
        assert_eq!(found, wanted, "{size} ranks");
        assert!(wanted.iter().enumerate().all(|(i, w)| !wanted[..i].iter().any(|o| o.ends_with(&w[w.len() - 16..]))), "{wanted:?}");
    }
}

#[test]
#[ignore = "what a rank of another test does"]
fn loses_a_rank() {
    let mpi = connected();
    let ranks = mpi.ranks(1).unwrap();
    ranks.data.wait().unwrap();
    if mpi.rank == 1 {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
    }
    ranks.data.wait().unwrap();
}

#[test]
#[ignore = "what a rank of another test does"]
fn gives_up() {
    let mpi = connected();
    let ranks = mpi.ranks(1).unwrap();
    ranks.data.wait().unwrap();
    if mpi.rank == 1 {
        mpi.abort(7);
    }
    ranks.data.wait().unwrap();
}

#[test]
fn a_rank_that_is_killed_or_gives_up_ends_the_others() {
    let Some(mpich) = mpich::mpich() else { return };
    for (name, status) in [("loses_a_rank", 9), ("gives_up", 7)] {
        let started = Instant::now();
        let ran = on_ranks(mpich, 3, name);
        assert_eq!(ran.status.code(), Some(status), "{name}: {ran:?}");
        assert!(started.elapsed() < Duration::from_secs(60), "{name}: {:?}", started.elapsed());
    }
}

#[test]
#[ignore = "what a rank of another test does"]
fn sends_another_size() {
    let mpi = connected();
    let group = mpi.ranks(1).unwrap().data;
    let n = 1000 + group.rank;
    let sent = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| group.all_gather(&vec![1f32; n], &mut vec![0f32; n * group.size])));
    println!("\nfound {}", sent.unwrap_err().downcast::<Error>().unwrap());
    mpi.finish().unwrap();
}

#[test]
fn ranks_with_different_programs_are_told_so() {
    let Some(mpich) = mpich::mpich() else { return };
    let ran = on_ranks(mpich, 2, "sends_another_size");
    let text = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "{ran:?}");
    assert_eq!(text.matches("different sizes").count(), 2, "{text}");
    assert!(text.contains("(4000 and 4004 bytes)") && text.contains("(4004 and 4000 bytes)"), "{text}");
}

#[test]
fn a_missing_library_is_an_error_that_says_how_to_get_it() {
    let dir = std::env::temp_dir().join(format!("kiln-no-mpi-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("libmpi_abi.so.1"), "INPUT(elsewhere)").unwrap();
    let problem = found(&MPI, &Folders { libraries: vec![dir.clone()], ..Folders::default() }).problem();
    std::fs::remove_dir_all(&dir).unwrap();
    // Where the system has one, that is taken.
    if let Some(problem) = problem {
        assert!(problem.contains("libmpi_abi.so.1") && problem.contains("pip install mpich"), "{problem}");
    }
}
