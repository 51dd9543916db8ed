//! `kiln train` as several processes, which MPI connects.

use crate::common::*;
use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tempfile::tempdir;

#[path = "../../../engine/tests/mpich.rs"]
mod mpich;
use mpich::{Mpich, mpich};

const ENDLESS: &str = "--steps 1000000 --set batch=4 --set log_every=1 --set eval_every=1000000 --set save_every=1000000";

/// With MPICH's library to be found, and nothing of a launcher that this test may run under.
fn found(mut c: Command, mpich: &Mpich) -> Command {
    for name in
        ["RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID"]
    {
        c.env_remove(name);
    }
    c.env("LD_LIBRARY_PATH", &mpich.lib);
    c
}

fn on_ranks(mpich: &Mpich, args: Vec<String>) -> Ran {
    finish(found(command(args), mpich))
}

#[track_caller]
fn same_losses(one: &Path, several: &Path, what: &str) {
    let (one, several) = (losses(one), losses(several));
    assert!(one.len() >= 5 && one.len() == several.len(), "{what}: {one:?} {several:?}");
    for (a, b) in one.iter().zip(&several) {
        assert!(a.0 == b.0 && (a.1.unwrap() - b.1.unwrap()).abs() < 1e-5, "{what}: {a:?}, {b:?}");
    }
}

/// Two recipes, with the batch divided and with the weights divided.
#[test]
fn ranks_over_mpi_train_what_one_rank_trains() {
    let Some(mpich) = mpich() else { return };
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    const STEPS: &str = "--steps 20 --set batch=4 --set log_every=1 --set eval_every=20";
    train(&at("one"), STEPS).ok();
    let ran = on_ranks(mpich, train_args(&at("two"), &format!("{STEPS} --ranks 2"))).ok();
    same_losses(&at("one"), &at("two"), "hydra, 2 ranks");
    assert!(ran.out.starts_with("2 ranks (data 2, tensor 1) over MPICH 5."), "{ran:#?}");
    // What the first line says is kept with the run, in the words of a checkpoint; a process alone says nothing of it.
    let read =
        |run: &str, file: &str| -> serde_json::Value { serde_json::from_str(&fs::read_to_string(at(run).join(file)).unwrap()).unwrap() };
    for file in ["receipts.json", "run.json"] {
        let ranks = &read("two", file)["ranks"];
        assert!(ranks["data"] == 2 && ranks["tensor"] == 1, "{file}: {ranks}");
        assert!(ranks["over"].as_str().is_some_and(|over| over.starts_with("MPICH 5.")), "{file}: {ranks}");
        assert!(read("one", file).get("ranks").is_none(), "{file}");
    }
    kiln(["report", &text(&at("two"))]).ok();
    for (line, times) in [("run folder", 1), ("step 20/20", 1), ("checkpoint ", 1), ("BAD TERMINATION", 0), ("Exit codes", 0)] {
        assert_eq!(ran.out.lines().filter(|l| l.contains(line)).count(), times, "{line}: {ran:#?}");
    }
    let decoder = |out: &Path, more: &str| {
        let sets = "train decoder --set dim=32 --set layers=2 --set seq=32 --set heads=2 --set kv_heads=2 --set eval_batches=1 --threads 1";
        let args = format!("{sets} {STEPS} --out {} {more}", out.display());
        on_ranks(mpich, args.split_whitespace().map(str::to_owned).collect()).ok()
    };
    on_ranks(mpich, train_args(&at("four"), &format!("{STEPS} --ranks 4 --pass zero=auto"))).ok();
    same_losses(&at("one"), &at("four"), "hydra, 4 ranks, zero");
    decoder(&at("decoder"), "");
    for (i, how) in ["--ranks 2", "--ranks 4 --tensor 2", "--ranks 4 --tensor 2 --pass zero=auto"].into_iter().enumerate() {
        let out = at(&format!("decoder-{i}"));
        decoder(&out, how);
        same_losses(&at("decoder"), &out, how);
    }
}

/// The processes that are ranks of a run in this folder.
fn process_of_rank(out: &Path, rank: usize) -> Option<u32> {
    let (named, variable) = (text(out), format!("PMI_RANK={rank}"));
    let has = |file: &Path, text: &str| fs::read(file).is_ok_and(|b| b.split(|c| *c == 0).any(|word| word == text.as_bytes()));
    fs::read_dir("/proc").unwrap().flatten().find_map(|e| {
        let is = has(&e.path().join("cmdline"), &named) && has(&e.path().join("environ"), &variable);
        e.file_name().to_str()?.parse().ok().filter(|_| is)
    })
}

fn started(mpich: &Mpich, out: &Path) -> Child {
    let plain = found(command(train_args(out, &format!("{ENDLESS} --ranks 2"))), mpich);
    let mut child = in_foreground(plain).spawn().unwrap();
    wait_until(&mut child, || losses(out).len() > 2);
    child
}

#[test]
fn a_rank_that_is_killed_ends_the_run() {
    let Some(mpich) = mpich() else { return };
    let dir = tempdir().unwrap();
    let out = dir.path().join("run");
    let child = started(mpich, &out);
    let rank = process_of_rank(&out, 1).expect("it runs");
    let killed = Instant::now();
    assert!(Command::new("kill").args(["-KILL", &rank.to_string()]).status().unwrap().success());
    let ran = end(child);
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    assert_eq!(ran.code, Some(137), "{ran:#?}");
    // mpiexec kills the other, too, and then it is not known which was the first.
    let named = ["error: rank 1 was ended by signal 9 (SIGKILL)", "error: a rank was ended by signal 9 (SIGKILL)"];
    assert!(named.iter().any(|n| ran.err.contains(n)) && !ran.out.contains("BAD TERMINATION"), "{ran:#?}");
    assert!(process_of_rank(&out, 0).is_none());
}

/// Nobody passes signals on to ranks whose parent was killed.
#[test]
fn ranks_end_with_the_process_that_started_them() {
    let Some(mpich) = mpich() else { return };
    let dir = tempdir().unwrap();
    let out = dir.path().join("run");
    let child = started(mpich, &out);
    signal(&child, "KILL");
    drop(end(child));
    let killed = Instant::now();
    while [0, 1].iter().any(|rank| process_of_rank(&out, *rank).is_some()) {
        assert!(killed.elapsed() < Duration::from_secs(10), "ranks train on");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// With --elastic the others go on from the last checkpoint, to the end.
#[test]
fn where_a_rank_is_lost_the_others_go_on() {
    let Some(mpich) = mpich() else { return };
    let dir = tempdir().unwrap();
    let out = dir.path().join("run");
    const STEPS: &str = "--steps 60 --set batch=4 --set log_every=1 --set eval_every=60 --set save_every=5 --ranks 2 --elastic";
    let mut child = in_foreground(found(command(train_args(&out, STEPS)), mpich)).spawn().unwrap();
    wait_until(&mut child, || losses(&out).len() > 7);
    let lost = process_of_rank(&out, 1).expect("rank 1 runs");
    assert!(Command::new("kill").args(["-9", &lost.to_string()]).status().unwrap().success());
    let ran = end(child).ok();
    assert!(ran.err.contains("going on with 1 rank instead of 2") && ran.err.contains("was ended by signal 9"), "{ran:#?}");
    assert!(ran.out.contains("resumed from") && final_losses(&out).last().is_some_and(|l| l.0 == 60), "{ran:#?}");
    let alone = dir.path().join("alone");
    train(&alone, "--steps 60 --set batch=4 --set log_every=1 --set eval_every=60 --set save_every=5").ok();
    for (a, b) in final_losses(&out).iter().zip(&final_losses(&alone)) {
        assert!(a.0 == b.0 && (a.1.unwrap() - b.1.unwrap()).abs() < 1e-4, "{a:?}, {b:?}");
    }
}

/// A signal reaches every rank, and once.
#[test]
fn a_signal_saves_once() {
    let Some(mpich) = mpich() else { return };
    for (name, code) in [("INT", 130), ("HUP", 129)] {
        let dir = tempdir().unwrap();
        let out = dir.path().join("run");
        let child = started(mpich, &out);
        signal(&child, name);
        let ran = end(child);
        assert_eq!(ran.code, Some(code), "{ran:#?}");
        assert_eq!(ran.out.matches("stopped after step").count(), 1, "{ran:#?}");
        assert!(ran.out.contains("--resume --ranks 2"), "{ran:#?}");
        assert_eq!(names(&out.join("checkpoints")).len(), 1, "{ran:#?}");
        assert!(process_of_rank(&out, 0).is_none() && process_of_rank(&out, 1).is_none());
    }
}

/// Also where a rank hangs, so that no step ends. The status is the signal's, as that of one rank, and nothing of mpiexec's inside is shown.
#[test]
fn a_second_signal_ends_all_ranks_at_once() {
    let Some(mpich) = mpich() else { return };
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let dir = tempdir().unwrap();
        let out = dir.path().join("run");
        let child = started(mpich, &out);
        let hangs = process_of_rank(&out, 1).expect("rank 1 runs").to_string();
        assert!(Command::new("kill").args(["-STOP", &hangs]).status().unwrap().success());
        signal(&child, name);
        std::thread::sleep(Duration::from_millis(1500));
        let again = Instant::now();
        signal(&child, name);
        let ran = end(child);
        assert_eq!(ran.code, Some(code), "{ran:#?}");
        assert!(again.elapsed() < Duration::from_secs(5), "{:?}", again.elapsed());
        assert!(["mpiexec", "proxy", "Ctrl-C", "error"].iter().all(|word| !ran.err.contains(word) && !ran.out.contains(word)), "{ran:#?}");
        assert!(process_of_rank(&out, 0).is_none() && process_of_rank(&out, 1).is_none());
    }
}

/// The batch is not divided by passes that are off, which is said once; the numbers are those of one rank.
#[test]
fn ranks_that_divide_nothing_are_warned_of() {
    let Some(mpich) = mpich() else { return };
    let dir = tempdir().unwrap();
    for (i, (passes, why)) in
        [("--optimise exact", "--optimise exact"), ("--pass data-parallel=off", "--pass data-parallel=off")].iter().enumerate()
    {
        let warning = format!(
            "warning: data-parallel is off ({why}), so every rank computes the whole batch; to divide it: --pass data-parallel=auto"
        );
        let steps = |more: &str| format!("--steps 2 --set batch=4 --ranks 2 {passes} {more}");
        let ran = on_ranks(mpich, train_args(&dir.path().join(format!("off{i}")), &steps(""))).ok();
        assert_eq!(ran.err.matches(&warning).count(), 1, "{ran:#?}");
        let plan = format!("plan hydra {passes} --ranks 2");
        assert!(kiln(plan.split(' ')).ok().err.contains(&warning));
        assert!(!kiln(plan.replace("--ranks 2", "--ranks 1").split(' ')).ok().err.contains("warning"));
        let auto = steps("--pass data-parallel=auto");
        let ran = on_ranks(mpich, train_args(&dir.path().join(format!("on{i}")), &auto)).ok();
        assert!(!ran.err.contains("warning"), "{ran:#?}");
    }
}

/// Adam's moments are in 8 bits, but those that --tensor divides: the passes are as they were, and the ranks are not.
#[test]
fn states_that_ranks_keep_in_another_form_are_said_to_be_theirs() {
    let Some(mpich) = mpich() else { return };
    let dir = tempdir().unwrap();
    let out = dir.path().join("run");
    let run = |args: &str| {
        let args = format!("train {args} --threads 1 --out {}", out.display());
        on_ranks(mpich, args.split_whitespace().map(str::to_owned).collect())
    };
    run("decoder --set dim=64 --set layers=1 --set seq=32 --set batch=4 --set eval_batches=1 --pass adam8bit=auto,least=256 --steps 2")
        .ok();
    let refused = run("--resume --steps 4 --ranks 2 --tensor 2");
    refused.fails(&[
        "in 8 bits",
        "whose ranks have a part of it each, keeps it in f32",
        "--convert-states",
        "as many ranks as before",
        "--tensor",
    ]);
    run("--resume --steps 4 --ranks 2 --tensor 2 --convert-states").ok();
}

/// The other ranks would wait for it.
#[test]
fn a_rank_that_fails_says_why_and_ends_the_others() {
    let Some(mpich) = mpich() else { return };
    let dir = tempdir().unwrap();
    let kiln = env!("CARGO_BIN_EXE_kiln").to_string();
    let good = [vec![kiln], train_args(&dir.path().join("run"), ENDLESS)].concat();
    let bad = [good.clone(), vec!["--data".into(), "nowhere".into()]].concat();
    let mut c = Command::new(&mpich.mpiexec);
    c.args(["-launcher", "fork", "-rmk", "user", "-n", "1"]).args(good).args([":", "-n", "1"]).args(bad).env("CUDA_VISIBLE_DEVICES", "");
    let started = Instant::now();
    let ran = finish(found(c, mpich));
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(ran.code, Some(1), "{ran:#?}");
    assert!(ran.err.contains("rank 1: error: there is no data set") && ran.err.contains("nowhere"), "{ran:#?}");
}

#[test]
fn what_cannot_be_started_is_refused() {
    let dir = tempdir().unwrap();
    let run = |args: &str, environment: &[(&str, &str)]| {
        let mut c = command(train_args(&dir.path().join("run"), args));
        // Without Python on PATH no environment of it is found.
        c.env_clear().env("PATH", "/nowhere").env("CUDA_VISIBLE_DEVICES", "").env("HOME", dir.path()).envs(environment.iter().copied());
        finish(c)
    };
    let torchrun = [("RANK", "4"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")];
    run("", &torchrun).fails(&["RANK is 4 and WORLD_SIZE is 4"]);
    run("", &torchrun[..1]).fails(&["RANK is set and WORLD_SIZE is not"]);
    run("--ranks 2", &[("PMI_RANK", "0"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "0")])
        .fails(&["--ranks 2", "mpiexec has started 4 ranks"]);
    run("--ranks 4 --tensor 3", &[]).fails(&["--tensor 3: it must divide the number of ranks, which is 4"]);
    run("--tensor 2", &[]).fails(&["--tensor 2", "--ranks N"]);
    run("--ranks 2 --set no_such_key=1", &[]).fails(&["no_such_key"]);
    run("--ranks 7", &[]).fails(&["train.batch", "cannot be divided among 7 ranks"]);
    run("--ranks 0", &[]).fails(&["--ranks"]);
    // What a batch script of Slurm has is no reason to wait for others.
    run("--steps 1", &[("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_JOB_ID", "7")]).ok();
    let Some(mpich) = mpich() else { return };
    let lib = ("LD_LIBRARY_PATH", mpich.lib.to_str().unwrap());
    let strangers = run("", &[("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), lib]);
    strangers.fails(&["rank 1: error: torchrun says that this is rank 1 of 4", "libmpi_abi.so.1", "--ranks 4"]);
}

#[test]
fn doctor_names_the_mpi_library_or_how_to_get_one() {
    let doctor = |libraries: &Path| {
        let mut c = command(["doctor"]);
        c.env_clear().env("PATH", "/nowhere").env("HOME", libraries).env("LD_LIBRARY_PATH", libraries);
        let out = finish(c).ok().out;
        out.lines().find(|l| l.starts_with("libmpi_abi ")).unwrap_or_else(|| panic!("{out}")).to_string()
    };
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("libmpi_abi.so.1"), "no library").unwrap();
    let broken = doctor(dir.path());
    assert!(broken.contains("does not load") && broken.contains("pip install mpich"), "{broken}");
    let Some(mpich) = mpich() else { return };
    let named = doctor(&mpich.lib);
    assert!(named.contains(&*mpich.lib.to_string_lossy()) && named.contains("(MPICH 5."), "{named}");
}
