//! What a disk, a machine or another process can do to a run: what cannot be read, what was cut, what is gone, what is in the way.

use crate::common::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::tempdir;

/// A file that cannot be opened, also by root: a link to itself.
fn make_unreadable(path: &Path) {
    fs::remove_file(path).unwrap();
    symlink(path, path).unwrap();
}

/// The end of a process that should end soon.
#[track_caller]
fn ends(mut child: Child) -> Ran {
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("it goes on: {:#?}", end(child));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    end(child)
}

const ENDLESS: &str = "--steps 1000000 --set horizon=1000000 --set eval_every=1000000 --set save_every=1000000";

#[test]
fn a_checkpoint_that_cannot_be_read_is_an_error_and_not_a_broken_one() {
    let dir = tempdir().unwrap();
    let whole = dir.path().join("whole");
    train(&whole, "--steps 6 --set save_every=2").ok();
    let saved = names(&whole.join("checkpoints"));
    type Change = Box<dyn Fn(&Path)>;
    let changes: [(&str, Change, &str); 3] = [
        ("list", Box::new(|d| make_unreadable(&d.join("checkpoint.json"))), "checkpoint.json"),
        ("weights", Box::new(|d| make_unreadable(&d.join("model.safetensors"))), "model.safetensors"),
        (
            "folder",
            Box::new(|d| {
                fs::remove_file(d.join("checkpoint.json")).unwrap();
                fs::create_dir(d.join("checkpoint.json")).unwrap();
            }),
            "Is a directory",
        ),
    ];
    for (name, change, reason) in changes {
        let run = dir.path().join(name);
        copy(&whole, &run);
        change(&checkpoint(&run, 6));
        let ran = resume(&run, "--steps 8");
        ran.fails(&["step-00000006", reason, "--resume-from", "--start-over"]);
        assert_eq!(names(&run.join("checkpoints")), saved, "{name}: nothing is touched");
        same_bytes(&checkpoint(&whole, 4), &checkpoint(&run, 4));
        kiln(["eval", &text(&run)]).fails(&["step-00000006"]);
    }
}

/// Whatever a process that may open few files can still do, it is never to go back in silence.
#[test]
fn too_few_open_files_never_take_a_run_back() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 4 --set save_every=2").ok();
    let saved = names(&run.join("checkpoints"));
    let path = text(&run);
    let mut refused = 0;
    for files in 4..16 {
        let mut c = Command::new("sh");
        c.args(["-c", &format!("ulimit -n {files}; exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_kiln")]);
        c.args(["train", "--threads", "1", "--out", &path, "--resume"]).env("CUDA_VISIBLE_DEVICES", "").env("RUST_BACKTRACE", "0");
        let ran = finish(c);
        refused += usize::from(ran.err.contains("step-00000004") && ran.err.contains("Too many open files"));
        assert!(!ran.out.contains("(step 2)") && !ran.out.contains("starting over"), "{files} files: {ran:#?}");
        assert_eq!(names(&run.join("checkpoints")), saved, "{files} files");
    }
    assert!(refused > 0, "the limit was never felt while a checkpoint was opened");
}

/// Nor do they make the run's data another's.
#[test]
fn too_few_open_files_are_not_other_data() {
    let dir = tempdir().unwrap();
    let (run, data) = (dir.path().join("run"), byte_data(&dir.path().join("data")));
    train(&run, &format!("--steps 2 --data {}", data.display())).ok();
    let mut felt = 0;
    for files in 4..16 {
        let mut c = Command::new("sh");
        c.args(["-c", &format!("ulimit -n {files}; exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_kiln")]);
        c.args(["train", "--threads", "1", "--out", &text(&run), "--resume"]).env("CUDA_VISIBLE_DEVICES", "").env("RUST_BACKTRACE", "0");
        let ran = finish(c);
        felt += usize::from(ran.err.contains(&text(&data)) && ran.err.contains("Too many open files"));
        assert!(!ran.err.contains("checksum") && !ran.err.contains("null"), "{files} files: {ran:#?}");
    }
    assert!(felt > 0, "the limit was never felt while the data was read");
}

#[test]
fn resume_from_goes_back_to_a_checkpoint_and_keeps_the_later_ones() {
    let dir = tempdir().unwrap();
    let (whole, run) = (dir.path().join("whole"), dir.path().join("run"));
    train(&whole, "--steps 6 --set save_every=2").ok();
    copy(&whole, &run);
    make_unreadable(&checkpoint(&run, 6).join("checkpoint.json"));
    let ran = kiln(["train", "--threads", "1", "--resume-from", &text(&checkpoint(&run, 2)), "--steps", "5"]).ok();
    assert!(ran.out.contains("(step 2)"), "{ran:#?}");
    assert!(ran.out.contains("aside-step-00000004") && ran.out.contains("aside-step-00000006"), "{ran:#?}");
    let kept = ["aside-step-00000004", "aside-step-00000006", "step-00000002", "step-00000004", "step-00000005"];
    assert_eq!(names(&run.join("checkpoints")), kept);
    same_bytes(&checkpoint(&whole, 4), &run.join("checkpoints/aside-step-00000004"));
    // What was left behind is not what a later resume takes for the newest.
    let ran = resume(&run, "--steps 6").ok();
    assert!(ran.out.contains("(step 5)"), "{ran:#?}");
    same_bytes(&checkpoint(&whole, 6), &checkpoint(&run, 6));

    // From a copy elsewhere, with the run's folder named.
    let elsewhere = dir.path().join("elsewhere");
    copy(&checkpoint(&whole, 4), &elsewhere);
    kiln(["train", "--resume-from", &text(&elsewhere)]).fails(&["elsewhere", "--out"]);
    let again = dir.path().join("again");
    copy(&whole, &again);
    kiln(["train", "--threads", "1", "--resume-from", &text(&elsewhere), "--out", &text(&again)]).ok();
    same_bytes(&checkpoint(&whole, 6), &checkpoint(&again, 6));
    kiln(["train", "--resume-from", &text(&dir.path().join("nowhere")), "--out", &text(&again)]).fails(&["nowhere"]);
}

#[test]
fn start_over_begins_again_and_keeps_what_was_there() {
    let dir = tempdir().unwrap();
    let (whole, run) = (dir.path().join("whole"), dir.path().join("run"));
    train(&whole, "--steps 3").ok();
    copy(&whole, &run);
    damage(&checkpoint(&run, 3).join("model.safetensors"), |b| b[100] ^= 1);
    let out = text(&run);
    let ran = kiln(["train", "--threads", "1", "--out", &out, "--start-over"]).ok();
    assert!(ran.out.contains("aside-step-00000003"), "{ran:#?}");
    assert_eq!(names(&run.join("checkpoints")), ["aside-step-00000003", "step-00000003"]);
    same_bytes(&checkpoint(&whole, 3), &checkpoint(&run, 3));
    kiln(["train", "--threads", "1", "--out", &out, "--start-over"]).ok();
    assert_eq!(names(&run.join("checkpoints")), ["aside-step-00000003", "aside-step-00000003-2", "step-00000003"]);
    for how in ["--start-over", "--resume"] {
        kiln(["train", "--out", &text(&dir.path().join("nothing")), how]).fails(&["nothing", "no run"]);
    }
    assert!(!dir.path().join("nothing").exists(), "a slip of the pen is no new run");
}

#[test]
fn checkpoints_of_which_none_is_whole_are_an_error() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 4 --set save_every=2").ok();
    for step in [2, 4] {
        damage(&checkpoint(&run, step).join("state.safetensors"), |b| b[50] ^= 1);
    }
    for file in ["config.toml", "metrics.jsonl"] {
        resume(&run, "--steps 6").fails(&["step-00000004", "step-00000002", "checksum", "--resume-from", "--start-over"]);
        assert_eq!(names(&run.join("checkpoints")), ["step-00000002", "step-00000004"]);
        // Nor where other files of the run are gone.
        fs::remove_file(run.join(file)).unwrap();
    }
    // What was saved is a run, whatever else is lost: it is not trained over.
    train(&run, "--steps 6").fails(&["holds a run already", "--resume"]);
}

/// Moved away, emptied, only half written, or on a disk that is not mounted: the run is not begun again in silence.
#[test]
fn checkpoints_that_are_gone_are_an_error() {
    let dir = tempdir().unwrap();
    let whole = dir.path().join("whole");
    train(&whole, "--steps 4").ok();
    type Change = fn(&Path);
    let changes: [(&str, Change); 4] = [
        ("moved", |d| fs::rename(d, d.with_file_name("away")).unwrap()),
        ("emptied", |d| fs::remove_dir_all(d.join("step-00000004")).unwrap()),
        ("half", |d| fs::rename(d.join("step-00000004"), d.join(".step-00000004.tmp-999999")).unwrap()),
        ("unmounted", |d| {
            fs::remove_dir_all(d).unwrap();
            symlink("/nowhere/scratch", d).unwrap();
        }),
    ];
    for (name, change) in changes {
        let run = dir.path().join(name);
        copy(&whole, &run);
        change(&run.join("checkpoints"));
        let metrics = fs::read(run.join("metrics.jsonl")).unwrap();
        for noted in [true, false] {
            let ran = resume(&run, "--steps 8");
            ran.fails(&[&text(&run.join("checkpoints")), "was saved", "--resume-from", "--start-over"]);
            assert!(fs::read(run.join("metrics.jsonl")).unwrap() == metrics, "{name}, {noted}");
            // Earlier versions noted nothing.
            drop(fs::remove_file(run.join(".saved")));
        }
        let ran = kiln(["train", "--threads", "1", "--out", &text(&run), "--start-over"]);
        match name {
            "unmounted" => ran.fails(&[&text(&run.join("checkpoints")), "a link"]),
            _ => {
                ran.ok();
                same_bytes(&checkpoint(&whole, 4), &checkpoint(&run, 4));
            }
        }
    }
}

/// Steps that were never saved are made again, whatever the metrics of an earlier attempt say.
#[test]
fn a_run_that_was_killed_before_its_first_save_begins_again() {
    let dir = tempdir().unwrap();
    let (whole, run) = (dir.path().join("whole"), dir.path().join("run"));
    train(&whole, "--steps 4").ok();
    copy(&whole, &run);
    let mut args = train_args(&run, ENDLESS);
    args.push("--start-over".into());
    let mut child = start(args);
    wait_until(&mut child, || fs::read(run.join(".saved")).is_ok_and(|note| note == b"no\n"));
    child.kill().unwrap();
    end(child);
    assert_eq!(names(&run.join("checkpoints")), ["aside-step-00000004"]);
    let ran = resume(&run, "--steps 4 --set horizon=4 --set eval_every=2 --set save_every=2").ok();
    assert!(ran.out.contains("starting over"), "{ran:#?}");
}

/// A pipe would wait for somebody at its other end.
#[test]
fn a_pipe_in_the_place_of_a_file_of_the_run_is_refused_by_name() {
    let dir = tempdir().unwrap();
    let whole = dir.path().join("whole");
    train(&whole, "--steps 2").ok();
    for name in [".lock", ".saved", "config.toml", "receipts.json", "metrics.jsonl", "loss.svg"] {
        let run = dir.path().join(name.trim_matches('.'));
        copy(&whole, &run);
        fs::remove_file(run.join(name)).unwrap();
        let made = Command::new("mkfifo").arg(run.join(name)).status().unwrap();
        assert!(made.success(), "mkfifo");
        let args = ["train", "--threads", "1", "--out", &text(&run), "--resume", "--steps", "3"];
        ends(start(args.map(String::from).to_vec())).fails(&[name, "it is a pipe, not a file"]);
    }
}

/// Links inside of a run stay, and what they lead to is written as any other file: whole or not at all.
#[test]
fn a_config_behind_a_link_is_written_where_the_link_leads() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    let kept = run.join("kept");
    train(&run, "--steps 2").ok();
    fs::create_dir(&kept).unwrap();
    fs::rename(run.join("config.toml"), kept.join("mine.toml")).unwrap();
    symlink("kept/mine.toml", run.join("config.toml")).unwrap();
    let before = fs::metadata(kept.join("mine.toml")).unwrap().ino();
    resume(&run, "--steps 3").ok();
    assert!(run.join("config.toml").is_symlink() && names(&kept) == ["mine.toml"]);
    assert!(fs::read_to_string(kept.join("mine.toml")).unwrap().contains("steps = 3"));
    assert_ne!(fs::metadata(kept.join("mine.toml")).unwrap().ino(), before, "it was written in place");
}

#[test]
fn a_config_that_cannot_be_read_is_an_error_and_not_a_cut_one() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 2").ok();
    make_unreadable(&run.join("config.toml"));
    for _ in 0..2 {
        resume(&run, "--steps 3").fails(&["cannot read", "config.toml"]);
        kiln(["train", "--out", &text(&run), "--start-over"]).fails(&["cannot read", "config.toml"]);
        assert_eq!(names(&run.join("checkpoints")), ["step-00000002"]);
        drop(fs::remove_file(run.join("config.toml")));
        fs::create_dir_all(run.join("config.toml")).unwrap();
    }
}

/// Text in the place of what a recipe reads: it says at once what it wants.
#[test]
fn every_recipe_says_what_data_it_wants() {
    let dir = tempdir().unwrap();
    let book = dir.path().join("book.txt");
    fs::write(&book, "It was a dark and stormy night,\nand the rain fell in torrents.\n").unwrap();
    let wants: [(&str, &[&str]); 5] = [
        ("hydra", &["kiln data prepare"]),
        ("lior", &["kiln data prepare"]),
        ("polychromic", &["kiln data prepare"]),
        ("vision_bdh", &["is a file", "for each class", "CIFAR"]),
        ("hrm", &["Sudokus", "CSV", "puzzle,solution"]),
    ];
    for (recipe, parts) in wants {
        let mut c = command(["train", recipe, "--data", &text(&book), "--out", &text(&dir.path().join("run"))]);
        c.env("XDG_CACHE_HOME", dir.path().join("cache"));
        finish(c).fails(&[&[&text(&book)[..]], parts].concat());
    }
    fs::write(dir.path().join("chat.jsonl"), "{\"prompt\": \"a\"}\n").unwrap();
    let mut c = command(["train", "polychromic", "--data", &text(&dir.path().join("chat.jsonl")), "--out", &text(&dir.path().join("run"))]);
    c.env("XDG_CACHE_HOME", dir.path().join("cache"));
    finish(c).fails(&["chat.jsonl", "line 1", "no field \"reply\""]);
    assert!(names(&dir.path().join("cache/kiln/bases")).is_empty(), "a base was trained first");
    assert!(!dir.path().join("run").exists());
}

/// A number is an id, and never the word that is written like it.
#[test]
fn an_end_that_is_no_id_of_the_vocabulary_is_refused() {
    let dir = tempdir().unwrap();
    word_data(dir.path(), &["a", "999999"], at_spaces());
    let [input, spec, out] = ["words.txt", "words.json", "new"].map(|name| text(&dir.path().join(name)));
    let prepare = |eos: &str| kiln(["data", "prepare", &input, "--tokenizer", &spec, "--out", &out, "--eos", eos]);
    for eos in ["999999", "3", "99999999999999999999"] {
        prepare(eos).fails(&[&format!("--eos = {eos}"), "a vocabulary of 3"]);
    }
    let ran = prepare("1").ok();
    assert!(ran.out.contains("end of document: 999999 (1), --eos"), "{ran:#?}");
}

#[test]
fn a_broken_checkpoint_is_kept_aside_when_the_run_goes_on_from_the_one_before() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 4 --set save_every=2").ok();
    damage(&checkpoint(&run, 4).join("model.safetensors"), |b| b[100] ^= 1);
    let before = fs::read(checkpoint(&run, 4).join("model.safetensors")).unwrap();
    let ran = resume(&run, "--steps 5 --set keep=1").ok();
    assert!(ran.out.contains("skipped ") && ran.out.contains("(step 2)"), "{ran:#?}");
    assert_eq!(names(&run.join("checkpoints")), ["aside-step-00000004", "step-00000005"]);
    assert!(fs::read(run.join("checkpoints/aside-step-00000004/model.safetensors")).unwrap() == before);
}

#[test]
fn an_interrupted_run_saves_and_exits_with_128_and_its_signal() {
    for (name, status) in [("INT", 130), ("TERM", 143), ("HUP", 129), ("USR1", 138)] {
        let dir = tempdir().unwrap();
        let run = dir.path().join("run");
        let mut child = start_in_foreground(train_args(&run, ENDLESS));
        wait_until(&mut child, || losses(&run).len() >= 3);
        signal(&child, name);
        let ran = ends(child);
        assert_eq!(ran.code, Some(status), "SIG{name}: {ran:#?}");
        let done = losses(&run).len() as u64;
        assert!(ran.out.contains(&format!("stopped after step {done}, saved")), "SIG{name}: {ran:#?}");
        assert_eq!(names(&run.join("checkpoints")), [format!("step-{done:08}")], "SIG{name}");
    }
}

/// `nohup kiln train &` goes on when the terminal is closed.
#[test]
fn a_hangup_that_is_ignored_stays_ignored() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    let mut c = Command::new("sh");
    c.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kiln")]).args(train_args(&run, ENDLESS));
    let mut child = c.env("CUDA_VISIBLE_DEVICES", "").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until(&mut child, || losses(&run).len() >= 3);
    signal(&child, "HUP");
    let before = losses(&run).len();
    wait_until(&mut child, || losses(&run).len() >= before + 20);
    signal(&child, "TERM");
    assert_eq!(ends(child).code, Some(143));
}

/// Commands that keep nothing are ended by the signal itself: a shell sees 128 and its number there too.
#[test]
fn a_signal_ends_commands_that_keep_nothing() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 1").ok();
    for (name, number) in [("INT", 2), ("TERM", 15)] {
        let mut child = start_in_foreground(vec!["generate".into(), text(&run), "--max-tokens".into(), "100000".into()]);
        let mut first = [0; 8];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
        signal(&child, name);
        assert_eq!(child.wait().unwrap().signal(), Some(number));
    }
}

/// What a power cut leaves: nothing, a half, zeros. An unattended `--resume` goes on.
#[test]
fn a_power_cut_in_the_first_seconds_is_resumed_unattended() {
    let dir = tempdir().unwrap();
    let whole = dir.path().join("whole");
    train(&whole, "--steps 4 --set save_every=2").ok();
    let config = fs::read(whole.join("config.toml")).unwrap();
    let lines: Vec<&[u8]> = config.split_inclusive(|b| *b == b'\n').collect();
    let half = lines[..lines.len() / 2].concat();
    let cuts = [("empty", vec![]), ("cut", config[..config.len() / 2].to_vec()), ("half", half), ("zeros", vec![0; config.len()])];
    for (name, left) in cuts {
        // Before the first save: all that is known is on the command line.
        let early = dir.path().join(format!("{name}-early"));
        fs::create_dir(&early).unwrap();
        fs::write(early.join("config.toml"), &left).unwrap();
        fs::write(early.join("metrics.jsonl"), "").unwrap();
        resume(&early, "").fails(&["config.toml", "not whole"]);
        train(&early, "--steps 4 --set save_every=2 --resume").ok();
        same_bytes(&checkpoint(&whole, 4), &checkpoint(&early, 4));
        // After it: the checkpoint has the settings.
        let late = dir.path().join(format!("{name}-late"));
        copy(&whole, &late);
        fs::remove_dir_all(checkpoint(&late, 4)).unwrap();
        fs::write(late.join("config.toml"), &left).unwrap();
        fs::write(late.join("metrics.jsonl"), [0; 100]).unwrap();
        let ran = resume(&late, "").ok();
        assert!(ran.err.contains("config.toml") && ran.err.contains("step-00000002"), "{name}: {ran:#?}");
        same_bytes(&checkpoint(&whole, 4), &checkpoint(&late, 4));
        assert_eq!(fs::read(late.join("config.toml")).unwrap(), config, "{name}: it is whole again");
    }
}

/// Training a base first takes memory too, and is refused before any is taken.
#[test]
fn a_base_that_does_not_fit_is_refused_before_it_is_trained() {
    let dir = tempdir().unwrap();
    let sizes = ["dim=65536", "heads=64", "kv_heads=64", "head_dim=1024", "hidden=262144", "layers=8"];
    // A process that fills the memory would end more than this test.
    let mut c = Command::new("sh");
    c.args(["-c", "ulimit -v 8000000; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kiln"), "train", "polychromic"]);
    c.args(sizes.iter().flat_map(|s| ["--set", s])).args(["--out", &text(&dir.path().join("run"))]);
    c.env("XDG_CACHE_HOME", dir.path()).env("CUDA_VISIBLE_DEVICES", "").env("RUST_BACKTRACE", "0");
    finish(c).fails(&["training a base first", "of memory", "are free", "model.base"]);
    assert!(names(&dir.path().join("kiln/bases")).is_empty());
}

#[test]
fn a_run_folder_that_vanishes_stops_the_run() {
    let dir = tempdir().unwrap();
    for replaced in [false, true] {
        let (run, moved) = (dir.path().join("run"), dir.path().join("moved"));
        let mut child = start(train_args(&run, ENDLESS));
        wait_until(&mut child, || losses(&run).len() >= 3);
        fs::rename(&run, &moved).unwrap();
        if replaced {
            fs::create_dir(&run).unwrap();
        }
        let ran = ends(child);
        ran.fails(&[&text(&run), "is gone", "stops at step"]);
        assert_eq!((run.exists(), names(&run).is_empty()), (replaced, true), "half a run was made");
        fs::remove_dir_all(&moved).unwrap();
    }
}

#[test]
fn an_old_checkpoint_that_cannot_be_removed_is_a_warning() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 2 --set save_every=1 --set keep=2").ok();
    let stuck = checkpoint(&run, 1);
    fs::set_permissions(&stuck, fs::Permissions::from_mode(0o555)).unwrap();
    let kiln = dir.path().join("kiln");
    fs::copy(env!("CARGO_BIN_EXE_kiln"), &kiln).unwrap();
    // Root may remove anything: then it is somebody else who trains, and may write everything but that.
    let mut c = match rustix::process::geteuid().is_root() {
        true => {
            fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
            let owned = Command::new("chown").args(["-R", "65534:65534", &text(&run)]).status().unwrap();
            let stuck = Command::new("chown").args(["0:0", &text(&stuck)]).status().unwrap();
            assert!(owned.success() && stuck.success());
            let mut c = Command::new("setpriv");
            c.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&kiln);
            c
        }
        false => Command::new(&kiln),
    };
    c.args(["train", "--threads", "1", "--out", &text(&run), "--resume", "--steps", "4"]);
    c.env("CUDA_VISIBLE_DEVICES", "").env("XDG_CACHE_HOME", "/nowhere").env("RUST_BACKTRACE", "0");
    let ran = finish(c).ok();
    assert_eq!(ran.err.matches("warning: cannot remove").count(), 1, "{ran:#?}");
    let left = names(&run.join("checkpoints"));
    assert!(left.contains(&"step-00000003".into()) && left.contains(&"step-00000004".into()), "{left:?}");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn damaged_lines_of_metrics_are_skipped_and_counted() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 3").ok();
    damage(&run.join("metrics.jsonl"), |b| {
        b[3] = 0;
        b.extend_from_slice(b"half a line\n{\"step\":");
    });
    let ran = resume(&run, "--steps 5").ok();
    assert!(ran.err.contains("metrics.jsonl: 2 damaged lines skipped, the first is line 1"), "{ran:#?}");
    assert!(run.join("loss.svg").exists());
}

#[test]
fn what_killed_processes_left_is_removed() {
    let dir = tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run, "--steps 2").ok();
    let dead = 1u32 << 22; // no process has this number
    let alive = std::process::id();
    for name in [format!(".config.toml.tmp-{dead}"), format!(".receipts.json.tmp-{dead}"), format!(".loss.svg.tmp-{dead}")] {
        fs::write(run.join(name), "half").unwrap();
    }
    fs::create_dir(run.join("checkpoints").join(format!(".step-00000003.tmp-{dead}"))).unwrap();
    fs::write(run.join(format!(".confusion.png.tmp-{alive}")), "being written").unwrap();
    resume(&run, "--steps 3").ok();
    assert_eq!(half_written(&run), [format!(".confusion.png.tmp-{alive}")]);

    // Data sets too; what another machine may be writing has an hour.
    let data = dir.path().join("data");
    let beside = |pid: u32| dir.path().join(format!(".data.tmp-{pid}"));
    for (pid, age) in [(dead, 7200), (dead - 1, 60)] {
        fs::create_dir(beside(pid)).unwrap();
        let then = std::time::SystemTime::now() - Duration::from_secs(age);
        fs::File::open(beside(pid)).unwrap().set_modified(then).unwrap();
    }
    byte_data(&data);
    assert_eq!((beside(dead).exists(), beside(dead - 1).exists()), (false, true));
}

#[test]
fn a_link_in_the_place_of_the_lock_is_not_followed() {
    let dir = tempdir().unwrap();
    let (run, mine) = (dir.path().join("run"), dir.path().join("mine"));
    fs::write(&mine, "precious").unwrap();
    fs::create_dir(&run).unwrap();
    symlink(&mine, run.join(".lock")).unwrap();
    train(&run, "--steps 1").fails(&[".lock"]);
    assert_eq!(fs::read_to_string(&mine).unwrap(), "precious");
    fs::remove_file(run.join(".lock")).unwrap();
    fs::write(run.join(".lock"), "a note").unwrap();
    train(&run, "--steps 1").ok();
    assert_eq!(fs::read_to_string(run.join(".lock")).unwrap(), "a note", "a lock needs no emptying");
}

/// (the folder that the cache is said to be in, stderr) of `kiln doctor` with nothing in the environment but this.
fn cache_of(environment: &[(&str, &Path)]) -> (PathBuf, String) {
    let mut c = Command::new(env!("CARGO_BIN_EXE_kiln"));
    c.arg("doctor").env_clear().envs(environment.iter().copied());
    let ran = finish(c).ok();
    let line = ran.out.lines().find_map(|l| l.strip_prefix("kernels  cached in "));
    (line.unwrap_or_else(|| panic!("{ran:#?}")).into(), ran.err)
}

#[test]
fn a_cache_is_never_in_a_folder_that_others_write_to() {
    let dir = tempdir().unwrap();
    let (home, tmp) = (dir.path().join("home"), dir.path().join("tmp"));
    [&home, &tmp].iter().for_each(|d| fs::create_dir(d).unwrap());
    let is_private = |what: &str, (cache, said): (PathBuf, String), why: &str| {
        assert!(said.contains(why) && said.lines().count() == 1, "{what}: {said}");
        let name = cache.file_name().unwrap().to_str().unwrap();
        assert!(cache.parent() == Some(&tmp) && name.starts_with(".kiln-cache.tmp-"), "{what}: {}", cache.display());
        assert!(names(&tmp).is_empty(), "{what}: it went with the process");
    };
    is_private("no home", cache_of(&[("TMPDIR", &tmp)]), "neither XDG_CACHE_HOME nor HOME");
    is_private("a relative home", cache_of(&[("TMPDIR", &tmp), ("HOME", Path::new("home"))]), "neither XDG_CACHE_HOME nor HOME");
    assert_eq!(cache_of(&[("TMPDIR", &tmp), ("HOME", &home)]), (home.join(".cache/kiln"), String::new()));
    assert_eq!(cache_of(&[("XDG_CACHE_HOME", &home)]), (home.join("kiln"), String::new()));
    fs::set_permissions(home.join("kiln"), fs::Permissions::from_mode(0o777)).unwrap();
    is_private("open to all", cache_of(&[("TMPDIR", &tmp), ("XDG_CACHE_HOME", &home)]), "everybody may write to it");
}

/// Files are written by `files.rs`. The exceptions lie in folders that are renamed as a whole, or are logs that grow.
#[test]
fn small_files_are_written_by_one_helper() {
    let exceptions = ["files.rs", "checkpoint/manifest.rs", "metrics.rs", "models/folder.rs", "data/shards.rs"];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut folders, mut found) = (vec![root.clone()], vec![]);
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            if path.extension().is_none_or(|e| e != "rs") {
                continue;
            }
            let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_string();
            let source = fs::read_to_string(&path).unwrap();
            // Up to its tests, which are a module at its end; single items for tests may stand anywhere.
            let tests = source
                .match_indices("#[cfg(test)]\n")
                .find(|(at, own)| source[at + own.len()..].lines().next().unwrap().ends_with("mod tests {"));
            let code = &source[..tests.map_or(source.len(), |t| t.0)];
            let writes = ["fs::write(", "File::create", "OpenOptions", "fs::copy("].iter().any(|call| code.contains(call));
            found.extend((writes && !name.ends_with("tests.rs")).then_some(name));
        }
    }
    found.sort();
    // `run/folder.rs` opens the lock, which is empty, and `input.rs` only reads.
    let mut known: Vec<&str> = exceptions.into_iter().chain(["run/folder.rs", "input.rs"]).collect();
    known.sort();
    assert_eq!(found, known);
}
