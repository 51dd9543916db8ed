//! The life of a run: interrupted, killed, resumed, started from other weights, out of disk, out of numbers.

use crate::common::*;
use kiln::checkpoint::newest;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::tempdir;

#[test]
fn a_resumed_run_is_bit_for_bit_the_run_that_never_stopped() {
    let dir = tempdir().unwrap();
    let data = byte_data(&dir.path().join("bytes"));
    let variants = [
        ("plain", "".to_string()),
        ("accumulated", "--set accumulate=2".to_string()),
        ("shards", format!("--data {} --seed 5", data.display())),
        ("eval", "--set eval_every=1 --set schedule=wsd --set horizon=7".to_string()),
    ];
    for (name, args) in variants {
        let (whole, parts) = (dir.path().join(format!("{name}-whole")), dir.path().join(format!("{name}-parts")));
        train(&whole, &format!("--steps 7 {args}")).ok();
        train(&parts, &format!("--steps 3 {args}")).ok();
        let said = resume(&parts, "--steps 5").ok().out;
        assert!(said.contains(&format!("resumed from {} (step 3)", checkpoint(&parts, 3).display())), "{said}");
        resume(&parts, "--steps 7").ok();
        same_bytes(&checkpoint(&whole, 7), &checkpoint(&parts, 7));
        assert_eq!(losses(&whole).len(), 7, "{name}");
        assert_eq!(losses(&whole), losses(&parts), "{name}");
        assert_eq!(records(&whole, "eval").last().unwrap()["val_loss"], records(&parts, "eval").last().unwrap()["val_loss"], "{name}");
    }
}

/// (step, learning rate) of every training record.
fn rates(out: &Path) -> Vec<(u64, f64)> {
    records(out, "train").iter().map(|r| (r["step"].as_u64().unwrap(), r["learning_rate"].as_f64().unwrap())).collect()
}

/// Half a cosine from 3e-3 to a tenth of it; the rate stays there.
fn cosine(steps: u64, of: u64) -> Vec<(u64, f64)> {
    let share = |step: u64| (step.min(of) as f64) / of as f64;
    (0..steps).map(|step| (step + 1, 3e-3 * (0.1 + 0.9 * 0.5 * (1.0 + (std::f64::consts::PI * share(step)).cos())))).collect()
}

#[track_caller]
fn near(a: &[(u64, f64)], b: &[(u64, f64)]) {
    assert!(a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() < 1e-9), "{a:?} {b:?}");
}

/// Without a folder, the run under runs/ that was begun last, of the recipe that is named.
#[test]
fn the_newest_run_goes_on_where_none_is_named() {
    let dir = tempdir().unwrap();
    let run = |args: &[&str]| {
        let mut c = command(args);
        c.current_dir(dir.path());
        finish(c).ok();
    };
    let begin = |steps: &'static str| run(&[&["train", "hydra"][..], SMALL, &["--steps", steps]].concat());
    begin("1");
    // Times of files are told apart by milliseconds.
    std::thread::sleep(Duration::from_millis(50));
    begin("2");
    let [first, second] = ["runs/hydra-tiny", "runs/hydra-tiny-2"].map(|name| dir.path().join(name));
    assert!(checkpoint(&first, 1).exists() && checkpoint(&second, 2).exists());
    run(&["train", "--resume", "--steps", "4", "--threads", "1"]);
    assert!(checkpoint(&second, 4).exists() && !checkpoint(&first, 4).exists());
    std::thread::sleep(Duration::from_millis(50));
    let other = "--set dim=16 --set layers=1 --set heads=2 --set kv_heads=1 --set head_dim=8 --set hidden=24 --set seq=32 --set batch=2";
    run(&["train decoder --threads 1 --steps 1", other].join(" ").split(' ').collect::<Vec<_>>());
    run(&["train", "hydra", "--resume", "--steps", "5", "--threads", "1"]);
    assert!(checkpoint(&second, 5).exists());
}

#[test]
fn a_schedule_is_as_long_as_the_run_that_began_it() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let alone = "--set horizon=0 --set warmup=0";
    // The number of steps alone says how long the schedule is; a horizon says it instead.
    train(&at("parts"), &format!("--steps 6 {alone} --set save_every=3")).ok();
    near(&rates(&at("parts")), &cosine(6, 6));
    train(&at("longer"), &format!("--steps 6 {alone} --set horizon=9")).ok();
    near(&rates(&at("longer")), &cosine(6, 9));

    // Stopped half-way and resumed, it is the same to the bit.
    copy(&at("parts"), &at("stopped"));
    fs::remove_dir_all(checkpoint(&at("stopped"), 6)).unwrap();
    let said = resume(&at("stopped"), "").ok().out;
    assert!(said.contains("steps 3 to 6 of a cosine schedule over 6") && !said.contains("the schedule ends"), "{said}");
    same_bytes(&checkpoint(&at("stopped"), 6), &checkpoint(&at("parts"), 6));

    // Resumed for more steps it keeps its schedule, and says what comes after it; twice.
    let said = resume(&at("parts"), "--steps 8").ok().out;
    assert!(said.contains("steps 6 to 8 of a cosine schedule over 6"), "{said}");
    assert!(said.contains("the schedule ends at step 6: from step 6 on the learning rate is 3.000e-4"), "{said}");
    let said = resume(&at("parts"), "--steps 9").ok().out;
    assert!(said.contains("the schedule ends at step 6: from step 8 on the learning rate is 3.000e-4"), "{said}");
    near(&rates(&at("parts")), &cosine(9, 6));
    let said = train(&at("whole"), &format!("--steps 9 {alone} --set horizon=6")).ok().out;
    assert!(said.contains("the schedule ends at step 6: from step 6 on"), "{said}");
    same_bytes(&checkpoint(&at("whole"), 9), &checkpoint(&at("parts"), 9));
    resume(&at("parts"), "--steps 10 --set horizon=10").fails(&["another config", "train.horizon was 0, now it is 10"]);
}

/// Before a step of that size is made ready, for which there may be no memory.
#[test]
fn another_config_is_said_first() {
    let dir = tempdir().unwrap();
    train(dir.path(), "--steps 1").ok();
    resume(dir.path(), "--steps 2 --set batch=500000").fails(&["another config", "train.batch was 2, now it is 500000"]);
}

#[test]
fn a_run_that_has_its_steps_has_nothing_to_do() {
    let dir = tempdir().unwrap();
    train(dir.path(), "--steps 2").ok();
    let before = fs::read(checkpoint(dir.path(), 2).join("checkpoint.json")).unwrap();
    for steps in ["", "--steps 2", "--steps 1"] {
        let said = resume(dir.path(), steps).ok().out;
        assert!(said.contains("nothing to do"), "{said}");
    }
    assert_eq!(before, fs::read(checkpoint(dir.path(), 2).join("checkpoint.json")).unwrap());
    assert_eq!(losses(dir.path()).len(), 2);
}

#[test]
fn a_signal_finishes_the_step_and_saves() {
    for (name, status) in [("INT", 130), ("TERM", 143)] {
        let dir = tempdir().unwrap();
        let (stopped, whole) = (dir.path().join("stopped"), dir.path().join("whole"));
        let mut child =
            start(train_args(&stopped, "--steps 1000000 --set horizon=1000000 --set eval_every=1000000 --set save_every=1000000"));
        wait_until(&mut child, || losses(&stopped).len() >= 3);
        // Twice, as `timeout` does: together they are one.
        (0..2).for_each(|_| signal(&child, name));
        let ran = end(child);
        assert_eq!(ran.code, Some(status), "{ran:#?}");
        let done = losses(&stopped).len() as u64;
        assert!(ran.out.contains(&format!("stopped after step {done}, saved")), "SIG{name}: {}", ran.out);
        assert!(ran.out.contains("--resume"), "SIG{name}: {}", ran.out);
        assert_eq!(names(&stopped.join("checkpoints")), [format!("step-{done:08}")]);

        let more = done + 2;
        resume(&stopped, &format!("--steps {more}")).ok();
        train(&whole, &format!("--steps {more} --set horizon=1000000")).ok();
        assert_eq!(final_losses(&stopped).len() as u64, more);
        // The horizon was above both numbers of steps, so the rates were the same.
        assert_eq!(final_losses(&whole), final_losses(&stopped), "SIG{name}");
        same_bytes(&checkpoint(&whole, more), &checkpoint(&stopped, more));
    }
}

/// Puzzles that take hours are made before the first step.
#[test]
fn a_signal_before_the_first_step_ends_at_once() {
    for (name, status) in [("INT", 130), ("TERM", 143)] {
        let dir = tempdir().unwrap();
        let run = dir.path().join("run");
        let args = ["train", "hrm", "--threads", "1", "--steps", "1", "--set", "train_puzzles=60000000", "--out", &text(&run)];
        let mut child = start(args.map(String::from).into());
        // The last that is said before.
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(said.any(|line| line.starts_with("peak ")), "{:#?}", end(child));
        (0..2).for_each(|_| signal(&child, name));
        let sent = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if sent.elapsed() > Duration::from_secs(60) {
                child.kill().unwrap();
                panic!("SIG{name}: it goes on");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let ran = end(child);
        assert_eq!(ran.code, Some(status), "SIG{name}: {ran:#?}");
        assert!(ran.err.contains("nothing is lost"), "SIG{name}: {ran:#?}");
        assert!(!run.exists(), "SIG{name}");
    }
}

#[test]
fn a_second_signal_ends_at_once() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    // Steps of seconds.
    let mut child = start(train_args(&run, "--steps 1000 --set batch=1024 --set seq=256"));
    wait_until(&mut child, || run.join("metrics.jsonl").exists());
    signal(&child, "INT");
    std::thread::sleep(Duration::from_millis(1100));
    assert!(child.try_wait().unwrap().is_none(), "the step was too short for this test");
    signal(&child, "INT");
    assert_eq!(end(child).code, Some(130));
    assert!(losses(&run).is_empty() && names(&run.join("checkpoints")).is_empty(), "it finished the step");
}

#[test]
fn a_kill_while_saving_never_loses_the_checkpoint_before() {
    let dir = tempdir().unwrap();
    let (killed, whole) = (dir.path().join("killed"), dir.path().join("whole"));
    let checkpoints = killed.join("checkpoints");
    let args = "--steps 1000000 --set horizon=1000000 --set save_every=1 --set keep=2 --set eval_every=1000000";
    let mut last = 0;
    for round in 0..10 {
        let mut child = if round == 0 { start(train_args(&killed, args)) } else { start(train_args(&killed, &format!("{args} --resume"))) };
        let named = |n: &String| n.starts_with("step-");
        let reached = |n: &str| n.strip_prefix("step-").and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        wait_until(&mut child, || names(&checkpoints).iter().any(|n| reached(n) >= last + 2));
        // Some kills as soon as a save has begun, some after the first of its files, some while an old one goes.
        wait_until(&mut child, || match round % 3 {
            0 => names(&checkpoints).iter().any(|n| n.contains(".tmp-")),
            1 => names(&checkpoints).iter().any(|n| n.contains(".tmp-") && !names(&checkpoints.join(n)).is_empty()),
            _ => names(&checkpoints).iter().filter(|n| named(n)).count() > 2,
        });
        signal(&child, "KILL");
        let ran = end(child);
        assert_eq!(ran.code, None, "{ran:#?}");
        assert!(!ran.panicked(), "{ran:#?}");
        let (found, skipped) = newest(&checkpoints).unwrap();
        let found = found.unwrap_or_else(|| panic!("round {round}: no whole checkpoint: {skipped:?}"));
        assert!(skipped.is_empty(), "round {round}: {skipped:?}");
        assert!(found.step >= last + 2, "round {round}: step {} after step {last}", found.step);
        last = found.step;
    }
    let more = last + 2;
    resume(&killed, &format!("--steps {more}")).ok();
    assert_eq!(names(&checkpoints), [format!("step-{:08}", more - 1), format!("step-{more:08}")], "what kills left is gone");
    train(&whole, &format!("--steps {more} --set horizon=1000000")).ok();
    same_bytes(&checkpoint(&whole, more), &checkpoint(&killed, more));
    assert_eq!(final_losses(&whole), final_losses(&killed));
}

#[test]
fn the_last_checkpoints_are_kept() {
    for (keep, left) in [(1, vec![5]), (2, vec![4, 5]), (0, vec![1, 2, 3, 4, 5])] {
        let dir = tempdir().unwrap();
        train(dir.path(), &format!("--steps 5 --set save_every=1 --set keep={keep}")).ok();
        let expected: Vec<String> = left.iter().map(|s| format!("step-{s:08}")).collect();
        assert_eq!(names(&dir.path().join("checkpoints")), expected, "keep={keep}");
    }
}

#[test]
fn resume_takes_the_newest_whole_checkpoint_and_says_what_it_skipped() {
    let dir = tempdir().unwrap();
    let whole = dir.path().join("whole");
    train(&whole, "--steps 6 --set save_every=2").ok();
    let edit = |from: &'static str, to: &'static str| {
        move |d: &Path| damage(&d.join("checkpoint.json"), |b| *b = String::from_utf8_lossy(b).replace(from, to).into_bytes())
    };
    type Change = Box<dyn Fn(&Path)>;
    let changes: Vec<(&str, Change, &str)> = vec![
        ("byte", Box::new(|d| damage(&d.join("model.safetensors"), |b| *b.last_mut().unwrap() ^= 1)), "model.safetensors: checksum"),
        ("cut", Box::new(|d| damage(&d.join("state.safetensors"), |b| b.truncate(1000))), "state.safetensors: has 1000 bytes"),
        ("empty", Box::new(|d| damage(&d.join("state.safetensors"), |b| b.clear())), "state.safetensors: has 0 bytes"),
        ("gone", Box::new(|d| fs::remove_file(d.join("model.safetensors")).unwrap()), "model.safetensors: missing"),
        ("unsealed", Box::new(|d| fs::remove_file(d.join("checkpoint.json")).unwrap()), "checkpoint.json: missing"),
        ("no json", Box::new(|d| fs::write(d.join("checkpoint.json"), "{").unwrap()), "checkpoint.json: not whole JSON"),
        ("no text", Box::new(|d| fs::write(d.join("checkpoint.json"), [0xff, 0xfe]).unwrap()), "checkpoint.json"),
        ("other step", Box::new(edit("\"step\": 6", "\"step\": 600")), "checkpoint.json"),
        ("other config", Box::new(edit("\"dim\": 32", "\"dim\": 64")), "checkpoint.json"),
        ("other format", Box::new(edit("\"format\": 1", "\"format\": 2")), "format 2"),
        (
            "a file",
            Box::new(|d| {
                fs::remove_dir_all(d).unwrap();
                fs::write(d, "").unwrap();
            }),
            "step-00000006",
        ),
    ];
    let mut problems = vec![];
    for (name, change, reason) in changes {
        let run = dir.path().join(name);
        copy(&whole, &run);
        change(&checkpoint(&run, 6));
        let ran = resume(&run, "");
        let skipped = format!("skipped {}: ", checkpoint(&run, 6).display());
        let line = ran.out.lines().find(|l| l.starts_with(&skipped)).unwrap_or_default();
        let resumed = format!("resumed from {} (step 4)", checkpoint(&run, 4).display());
        if ran.code != Some(0) || ran.panicked() || !line.contains(reason) || !ran.out.contains(&resumed) {
            problems.push(format!("{name}: {ran:#?}"));
            continue;
        }
        same_bytes(&checkpoint(&whole, 6), &checkpoint(&run, 6));
        assert_eq!(final_losses(&whole), final_losses(&run));
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn resume_before_the_first_save_starts_over_and_says_so() {
    let dir = tempdir().unwrap();
    let fresh = dir.path().join("fresh");
    train(&fresh, "--steps 3").ok();
    let starts_over = |run: &Path, ran: Ran| {
        assert!(ran.out.contains("starting over"), "{ran:#?}");
        same_bytes(&checkpoint(&fresh, 3), &checkpoint(run, 3));
        assert_eq!(final_losses(&fresh), final_losses(run));
    };
    let nowhere = dir.path().join("nowhere");
    starts_over(&nowhere, train(&nowhere, "--steps 3 --resume").ok());

    // Killed before its first save, in the middle of a line.
    let early = dir.path().join("early");
    fs::create_dir_all(&early).unwrap();
    fs::copy(fresh.join("config.toml"), early.join("config.toml")).unwrap();
    fs::write(early.join("metrics.jsonl"), "{\"step\":1,\"kind\":\"train\",\"loss\":9.0}\n{\"step\":2,\"ki").unwrap();
    starts_over(&early, resume(&early, "").ok());
}

#[test]
fn a_new_run_starts_from_the_weights_of_another() {
    let dir = tempdir().unwrap();
    let first = dir.path().join("first");
    train(&first, "--steps 4").ok();
    let still = "--steps 1 --seed 9 --set learning_rate=1e-38 --set weight_decay=0";
    let model = |run: &Path, step: u64| fs::read(checkpoint(run, step).join("model.safetensors")).unwrap();
    for (name, from) in
        [("run", first.clone()), ("checkpoint", checkpoint(&first, 4)), ("file", checkpoint(&first, 4).join("model.safetensors"))]
    {
        let second = dir.path().join(name);
        train(&second, &format!("{still} --init-from {}", from.display())).ok();
        assert!(model(&second, 1) == model(&first, 4), "{name}");
    }
    let other = dir.path().join("other");
    train(&other, still).ok();
    assert!(model(&other, 1) != model(&first, 4), "a rate of nothing keeps the weights of --init-from only");
}

#[test]
fn starting_over_starts_from_the_same_weights() {
    let dir = tempdir().unwrap();
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    train(&first, "--steps 20").ok();
    let args = "--steps 1000000 --set horizon=1000000 --set save_every=1000000 --set eval_every=1000000";
    let mut child = start(train_args(&second, &format!("{args} --init-from {}", first.display())));
    wait_until(&mut child, || losses(&second).len() >= 2);
    signal(&child, "KILL");
    end(child);
    let before = losses(&second);
    let ran = resume(&second, "--steps 2").ok();
    assert!(ran.out.contains("starting over"), "{ran:#?}");
    assert_eq!(final_losses(&second)[..2], before[..2], "the run was one of --init-from: {}", ran.out);
}

/// The weights of a run with one of them infinite.
fn infinite_weights(run: &Path, step: u64, to: &Path) {
    let bytes = fs::read(checkpoint(run, step).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let all: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .iter()
        .map(|(name, view)| {
            assert_eq!(view.dtype(), Dtype::F32);
            let mut data = view.data().to_vec();
            if name == "norm" {
                data[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
            }
            (name.to_string(), view.shape().to_vec(), data)
        })
        .collect();
    let views = all.iter().map(|(n, shape, data)| (n, TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, to).unwrap();
}

#[test]
fn ten_steps_in_a_row_that_are_not_finite_stop_the_run() {
    let dir = tempdir().unwrap();
    let huge = dir.path().join("huge");
    let ran = train(&huge, "--steps 60 --set learning_rate=1e6 --set save_every=1");
    ran.fails(&["10 steps in a row", "not finite", "learning_rate"]);
    let skipped: Vec<f64> = records(&huge, "train").iter().map(|r| r["skipped"].as_f64().unwrap()).collect();
    assert_eq!(skipped[skipped.len() - 10..], [1., 2., 3., 4., 5., 6., 7., 8., 9., 10.]);
    assert!(half_written(&huge).is_empty());
    // A skipped step leaves nothing new to keep: it must not push a good checkpoint out.
    let (all, saved) = (records(&huge, "train"), names(&huge.join("checkpoints")));
    let last_good = all.len() as u64 - 10;
    assert_eq!(saved.last(), Some(&format!("step-{last_good:08}")), "{saved:?}");
    resume(&huge, "").fails(&["10 steps in a row", &format!("at step {}", last_good + 10)]);
}

#[test]
fn weights_to_start_from_that_are_not_finite_are_refused_by_name() {
    let dir = tempdir().unwrap();
    let (first, out, weights) = (dir.path().join("first"), dir.path().join("out"), dir.path().join("infinite.safetensors"));
    train(&first, "--steps 1").ok();
    infinite_weights(&first, 1, &weights);
    train(&out, &format!("--steps 60 --init-from {}", weights.display())).fails(&["infinite.safetensors", "'norm' holds inf"]);
    assert!(!out.exists());
}

#[test]
fn a_full_disk_is_an_error_and_the_checkpoint_before_stays() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 2").ok();
    let before = newest(&run.join("checkpoints")).unwrap().0.unwrap();
    // A limit on the size of files makes writes fail half-way; units of 512 bytes.
    let limited = |blocks: u32, args: &[&str]| {
        let mut c = Command::new("sh");
        c.args(["-c", &format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_kiln")]);
        c.args(args).env("RUST_BACKTRACE", "0");
        finish(c)
    };
    let path = text(&run);
    limited(64, &["train", "--out", &path, "--resume", "--steps", "4"]).fails(&["model.safetensors", "File too large"]);
    assert_eq!(names(&run.join("checkpoints")), ["step-00000002"]);
    same_bytes(&before.path, &checkpoint(&run, 2));
    assert_eq!(newest(&run.join("checkpoints")).unwrap().0.unwrap().step, 2);
    resume(&run, "--steps 4").ok();

    let fresh = text(&dir.path().join("fresh"));
    let mut args = vec!["train", "hydra"];
    args.extend(SMALL);
    args.extend(["--steps", "4", "--out", &fresh]);
    limited(0, &args).fails(&["config.toml", "File too large"]);
    assert!(half_written(&dir.path().join("fresh")).is_empty());

    let made = dir.path().join("made");
    limited(8, &["data", "prepare", "--generated", "2000", "--out", &text(&made)]).fails(&["File too large"]);
    assert!(!made.exists());

    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../reference/golden/hydra.safetensors");
    let ours = dir.path().join("ours.safetensors");
    limited(8, &["check", "golden", golden, "--write", &text(&ours)]).fails(&["ours.safetensors", "File too large"]);
    assert!(!ours.exists(), "{} is half written", ours.display());
    assert!(half_written(dir.path()).is_empty(), "{:?}", half_written(dir.path()));
}

#[test]
fn a_command_that_failed_on_its_input_can_be_repeated() {
    let dir = tempdir().unwrap();
    let data = byte_data(&dir.path().join("data"));
    let shard = data.join("train-00000.tokens");
    let whole = fs::read(&shard).unwrap();
    damage(&shard, |b| b[100] ^= 1);
    let run = dir.path().join("run");
    let args = format!("--steps 2 --data {}", data.display());
    train(&run, &args).fails(&["train-00000.tokens", "corrupted"]);
    fs::write(&shard, whole).unwrap();
    train(&run, &args).ok();
}

/// The weights that it began from are for its first step.
#[test]
fn a_run_that_began_from_weights_goes_on_from_its_own() {
    let dir = tempdir().unwrap();
    let [first, whole, parts] = ["first", "whole", "parts"].map(|name| dir.path().join(name));
    train(&first, "--steps 2").ok();
    let began = format!("--set horizon=4 --init-from {}", text(&first));
    train(&whole, &format!("--steps 4 {began}")).ok();
    train(&parts, &format!("--steps 2 {began}")).ok();
    resume(&parts, "--steps 4").ok();
    same_bytes(&checkpoint(&whole, 4), &checkpoint(&parts, 4));
}
