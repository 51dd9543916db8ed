//! `kiln train` as several processes, which MPI connects.

use crate::common::*;
use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
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
    assert!(killed.elapsed() < Duration::from_secs(60), "{:?}", killed.elapsed());
    assert_eq!(ran.code, Some(137), "{ran:#?}");
    // mpiexec kills the other, too, and then it is not known which was the first.
    let named = ["error: rank 1 was ended by signal 9 (SIGKILL)", "error: a rank was ended by signal 9 (SIGKILL)"];
    assert!(named.iter().any(|n| ran.err.contains(n)) && !ran.out.contains("BAD TERMINATION"), "{ran:#?}");
    assert!(process_of_rank(&out, 0).is_none());
}

/// The sockets that a process has open, by inode.
fn sockets(process: u32) -> HashSet<String> {
    let open = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let named = open.filter_map(|e| fs::read_link(e.path()).ok()?.to_str()?.strip_prefix("socket:[")?.strip_suffix(']').map(String::from));
    named.collect()
}

/// The address of every socket on which somebody waits for connections, as /proc/net has it, and its inode.
fn listening() -> Vec<(String, String)> {
    let tables = ["tcp", "tcp6"].into_iter().filter_map(|t| fs::read_to_string(format!("/proc/net/{t}")).ok());
    let lines: Vec<String> = tables.flat_map(|t| t.lines().skip(1).map(String::from).collect::<Vec<_>>()).collect();
    // Number, own address, the other end's, state (0A: listens), .., inode.
    let words = lines.iter().map(|l| l.split_whitespace().collect::<Vec<_>>());
    words.filter(|w| w.len() > 9 && w[3] == "0A").map(|w| (w[1].split(':').next().unwrap().into(), w[9].into())).collect()
}

/// Other machines cannot connect to ranks that are all on this one. mpiexec's own socket, which ranks have from it, is on all interfaces: it has no setting.
#[test]
fn ranks_of_one_machine_listen_on_loopback() {
    let Some(mpich) = mpich() else { return };
    let dir = tempdir().unwrap();
    let out = dir.path().join("run");
    let child = started(mpich, &out);
    let ranks: Vec<HashSet<String>> = [0, 1].iter().map(|rank| sockets(process_of_rank(&out, *rank).expect("it runs"))).collect();
    let inherited: HashSet<&String> = ranks[0].intersection(&ranks[1]).collect();
    let own: Vec<String> = listening()
        .into_iter()
        .filter(|(_, inode)| ranks.iter().any(|r| r.contains(inode)) && !inherited.contains(inode))
        .map(|l| l.0)
        .collect();
    signal(&child, "TERM");
    drop(end(child));
    // 127.0.0.1 and ::1, in the order of bytes of a small-endian machine.
    let is_loopback = |address: &String| address == "0100007F" || address == "00000000000000000000000001000000";
    assert!(!own.is_empty() && own.iter().all(is_loopback), "{own:?}");
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
        assert!(killed.elapsed() < Duration::from_secs(60), "ranks train on");
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

/// A rank that is lost as soon as it is there, before the run's folder is: the others begin without it.
#[test]
fn where_a_rank_is_lost_before_the_run_has_a_folder_the_others_begin() {
    let Some(mpich) = mpich() else { return };
    let dir = tempdir().unwrap();
    // On a busy machine the run may have begun before this process is asked again.
    for attempt in 0..10 {
        let out = dir.path().join(attempt.to_string());
        let args = train_args(&out, "--steps 6 --set batch=4 --set log_every=1 --ranks 2 --elastic");
        let mut child = in_foreground(found(command(args), mpich)).spawn().unwrap();
        let mut lost = None;
        wait_until(&mut child, || {
            lost = process_of_rank(&out, 1);
            lost.is_some()
        });
        let killed = Command::new("kill").args(["-9", &lost.unwrap().to_string()]).stderr(Stdio::null()).status().unwrap().success();
        let begun = !killed || out.exists();
        let ran = end(child);
        if begun {
            continue;
        }
        let ran = ran.ok();
        assert!(ran.err.contains("going on with 1 rank instead of 2") && final_losses(&out).last().is_some_and(|l| l.0 == 6), "{ran:#?}");
        return;
    }
    panic!("no rank was killed before the run had its folder");
}

/// Fewer ranks than share the weights of one model cannot have them; and an error of a rank's own would come again.
#[test]
fn where_ranks_cannot_go_on_they_say_why() {
    let Some(mpich) = mpich() else { return };
    let dir = tempdir().unwrap();
    let out = dir.path().join("run");
    let mut child =
        in_foreground(found(command(train_args(&out, &format!("{ENDLESS} --ranks 2 --tensor 2 --elastic"))), mpich)).spawn().unwrap();
    wait_until(&mut child, || losses(&out).len() > 2);
    let lost = process_of_rank(&out, 1).expect("rank 1 runs");
    assert!(Command::new("kill").args(["-9", &lost.to_string()]).status().unwrap().success());
    let ran = end(child);
    assert_eq!(ran.code, Some(137), "{ran:#?}");
    assert!(
        ran.err.contains("not going on") && ran.err.contains("--tensor 2 divides the weights of one model among all 2 ranks"),
        "{ran:#?}"
    );
    let nowhere = format!("{ENDLESS} --data {} --ranks 2 --elastic", dir.path().join("nowhere").display());
    let ran = on_ranks(mpich, train_args(&dir.path().join("other"), &nowhere));
    ran.fails(&["there is no data set", "not going on (--elastic)"]);
}

/// Whether the ranks have caught the signal by then or not.
#[test]
fn a_hangup_before_the_first_step_has_its_status_whenever_it_comes() {
    let Some(mpich) = mpich() else { return };
    for i in 0..6 {
        let dir = tempdir().unwrap();
        let out = dir.path().join("run");
        let mut child = in_foreground(found(command(train_args(&out, &format!("{ENDLESS} --ranks 2"))), mpich)).spawn().unwrap();
        wait_until(&mut child, || process_of_rank(&out, i % 2).is_some());
        std::thread::sleep(Duration::from_millis(60 * i as u64));
        signal(&child, "HUP");
        let ran = end(child);
        assert_eq!(ran.code, Some(129), "after {} ms: {ran:#?}", 60 * i);
        assert!(!ran.err.lines().any(|line| line.starts_with("error")), "{ran:#?}");
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
        assert!(again.elapsed() < Duration::from_secs(60), "{:?}", again.elapsed());
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
        [("--optimize exact", "--optimize exact"), ("--pass data-parallel=off", "--pass data-parallel=off")].iter().enumerate()
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
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
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
