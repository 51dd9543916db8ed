//! Checkpoints are whole, or not there, and broken ones are told apart.

use super::*;
use engine::ranks::Part;
use safetensors::tensor::Dtype;
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

const CHILD: &str = "KILN_CHECKPOINT_TEST_CHILD";

fn tensor<'a>(name: &'a str, dtype: &'a str, shape: &'a [usize], bytes: &'a [u8]) -> Tensor<'a> {
    Tensor { name, dtype, shape, bytes }
}

fn save_small(dir: &Path, step: u64, fill: u8, keep: usize) -> PathBuf {
    let bytes = [fill; 24];
    let model = vec![tensor("w", "F32", &[2, 3], &bytes)];
    save(dir, step, &[("model.safetensors", model)], &[], &json!({"fill": fill}), keep.into()).unwrap().path
}

fn listing(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn newest_step(dir: &Path) -> Option<u64> {
    newest(dir).unwrap().0.map(|c| c.step)
}

#[test]
fn reads_back_what_was_saved() {
    let dir = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..=255).collect();
    let model = vec![
        tensor("odd", "U8", &[3], &bytes[..3]),
        tensor("b", "BF16", &[5], &bytes[3..13]),
        tensor("a", "F16", &[1, 1], &bytes[13..15]),
        tensor("w", "F32", &[2, 4, 3], &bytes[15..111]),
        tensor("scalar", "I32", &[], &bytes[111..115]),
        tensor("nothing", "F32", &[0, 7], &[]),
        tensor("näme \"quoted\"", "F32", &[1], &bytes[115..119]),
    ];
    let files = [("model.safetensors", model.clone()), ("empty.safetensors", vec![])];
    // Most of these floats need a parser that rounds correctly to come back bit for bit.
    let floats: Vec<f64> = (1..200).map(|i| (i as f64).sqrt() * 1e-5).collect();
    let meta = json!({"seed": u64::MAX, "floats": floats, "text": "{,\n  \"checksum\"}"});
    let path = save(dir.path(), 100, &files, &[("notes.json", b"{}".to_vec())], &meta, 0.into()).unwrap().path;
    assert_eq!(path, dir.path().join("step-00000100"));

    let (found, skipped) = newest(dir.path()).unwrap();
    let found = found.unwrap();
    assert!(skipped.is_empty());
    assert_eq!((&found.path, found.step), (&path, 100));
    assert_eq!(found.meta, meta);
    let loaded = found.file("model.safetensors").unwrap();
    let start = loaded.data_start;
    assert_eq!(start % 8, 0);
    for t in &model {
        let expected = (t.dtype.to_string(), t.shape.to_vec(), t.bytes);
        assert_eq!(loaded.get(t.name), Some(expected));
        let offset = loaded.header.info(t.name).unwrap().data_offsets.0;
        let width = loaded.header.info(t.name).unwrap().dtype.bitsize() / 8;
        assert_eq!(offset % width, 0, "{} is not aligned", t.name);
    }
    assert_eq!(loaded.get("absent"), None);
    assert_eq!(loaded.names().len(), model.len());
    assert!(found.file("empty.safetensors").unwrap().names().is_empty());
    let message = found.file("other").unwrap_err().to_string();
    assert!(message.contains("empty.safetensors, model"), "{message}");
    assert_eq!(found.bytes("notes.json").unwrap(), b"{}");
    assert!(found.has("notes.json") && !found.has("other"));
}

/// Of a whole checkpoint everything is on the disk before it has its name, and its name before older ones go.
#[test]
fn a_checkpoint_is_on_the_disk_before_older_ones_go() {
    use files::noted::{Call, during, lasts};
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("checkpoints");
    for step in [1, 2, 3, 3] {
        let bytes = [step as u8; 24];
        let model = || vec![tensor("w", "F32", &[2, 3], &bytes)];
        let files = [("model.safetensors", model()), ("state.safetensors", model())];
        let whole = || {
            let parts = [engine::ranks::Part { shape: vec![2, 6], axis: Some(1), sections: 1, index: 0, of: 2, by: "" }];
            let held = [Held { file: "model.safetensors", tensor: tensor("v", "F32", &[2, 3], &bytes), parts: &parts }];
            let written = if step == 2 { vec![write_parts(&dir, step, 0, &held).unwrap()] } else { vec![] };
            let plain = [("tokenizer.json", b"{}".to_vec())];
            save_with_parts(&dir, step, &files, &plain, &written, &Value::Null, 1.into()).unwrap()
        };
        let (saved, calls) = during(whole);
        assert!(saved.left.is_empty());
        let path = dir.join(format!("step-{step:08}"));
        assert_eq!(lasts(&calls), std::slice::from_ref(&path));
        // What was looked at is all there is: files, their manifest and the folder.
        let held = calls.iter().find_map(|c| if let Call::Renamed(_, to, held) = c { (*to == path).then_some(held.len()) } else { None });
        assert_eq!(held, Some(listing(&path).len() + 1), "{calls:#?}");
        assert_eq!(step == 1, calls.contains(&Call::Synced(parent.path().into())), "the name of the folder of checkpoints: {calls:#?}");
        assert_eq!(listing(&dir), [format!("step-{step:08}")]);
    }
}

#[test]
fn refuses_what_cannot_be_saved() {
    let dir = tempfile::tempdir().unwrap();
    let refusal = |file: &str, tensors: Vec<Tensor>| {
        let files = [("first", vec![]), (file, tensors)];
        let e = save(dir.path(), 1, &files, &[], &Value::Null, 0.into()).unwrap_err();
        assert!(listing(dir.path()).is_empty());
        e.to_string()
    };
    let short = refusal("f", vec![tensor("w", "F32", &[2, 3], &[0; 23])]);
    assert_eq!(short, "tensor \"w\": 23 bytes for F32 [2, 3]");
    assert!(refusal("f", vec![tensor("w", "F31", &[], &[])]).contains("\"F31\" is unknown"));
    assert!(refusal("f", vec![tensor("w", "U8", &[0], &[]); 2]).contains("taken"));
    assert!(refusal("f", vec![tensor("w", "U8", &[usize::MAX, 3], &[])]).contains("0 bytes"));
    assert!(refusal("../f", vec![]).contains("plain"));
    assert!(refusal(MANIFEST, vec![]).contains("taken"));
    assert!(refusal("first", vec![]).contains("twice"));
}

#[test]
fn an_unusable_folder_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let e = save(&file, 1, &[], &[], &Value::Null, 0.into()).unwrap_err();
    assert!(e.to_string().contains(file.to_str().unwrap()), "{e}");
    let (found, skipped) = newest(&dir.path().join("absent")).unwrap();
    assert!(found.is_none() && skipped.is_empty());
}

#[test]
fn damage_is_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 1, 1, 0);
    let path = save_small(dir.path(), 2, 2, 0);
    let (model, manifest) = (path.join("model.safetensors"), path.join(MANIFEST));
    let (model_bytes, text) = (fs::read(&model).unwrap(), fs::read_to_string(&manifest).unwrap());
    let skips = |file: &str, reason: &str| {
        let (found, skipped) = newest(dir.path()).unwrap();
        assert_eq!(found.unwrap().step, 1);
        assert_eq!((skipped.len(), &skipped[0].path), (1, &path));
        let said = &skipped[0].reason;
        assert!(said.contains(file) && said.contains(reason), "{said}");
    };

    let mut flipped = model_bytes.clone();
    *flipped.last_mut().unwrap() ^= 1;
    fs::write(&model, &flipped).unwrap();
    skips("model.safetensors", "checksum is ");
    fs::write(&model, &model_bytes[..50]).unwrap();
    let lengths = format!("has 50 bytes, expected {}", model_bytes.len());
    skips("model.safetensors", &lengths);
    fs::remove_file(&model).unwrap();
    skips("model.safetensors", "missing");
    fs::write(&model, &model_bytes).unwrap();

    for (from, to, reason) in [
        ("\"fill\": 2", "\"fill\": 3", "checksum does not fit"),
        ("\"checksum\"", "\"checkers\"", "checksum does not fit"),
        ("\"format\": 1", "\"format\": 9", "format 9, but"),
        ("\"meta\"", "meta", "not whole JSON"),
    ] {
        assert!(text.contains(from), "{text}");
        fs::write(&manifest, text.replace(from, to)).unwrap();
        skips(MANIFEST, reason);
    }
    fs::write(&manifest, "").unwrap();
    skips(MANIFEST, "not whole JSON");
    fs::remove_file(&manifest).unwrap();
    skips(MANIFEST, "missing");
    fs::write(&manifest, text).unwrap();
    assert_eq!(newest_step(dir.path()), Some(2));

    fs::rename(&path, dir.path().join("step-3")).unwrap();
    let (_, skipped) = newest(dir.path()).unwrap();
    assert!(skipped[0].reason.contains("says step 2"));
}

#[test]
fn damage_after_opening_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_small(dir.path(), 1, 1, 0).join("model.safetensors");
    let checkpoint = newest(dir.path()).unwrap().0.unwrap();
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    assert!(checkpoint.file("model.safetensors").is_err());
}

#[test]
fn plain_safetensors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plain.safetensors");
    let bytes = [7; 8];
    let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![2], &bytes).unwrap();
    let file = safetensors::serialize([("x", view)], None).unwrap();
    fs::write(&path, &file).unwrap();
    let loaded = load_safetensors(&path).unwrap();
    assert_eq!(loaded.get("x"), Some(("F32".into(), vec![2], &bytes[..])));

    let huge = u64::MAX.to_le_bytes();
    for bad in [&file[..file.len() - 1], &file[..20], &huge, b"", b"{}"] {
        fs::write(&path, bad).unwrap();
        let message = load_safetensors(&path).unwrap_err().to_string();
        let named = message.contains("plain.safetensors: not a whole safetensors file");
        assert!(named, "{message}");
    }
}

#[test]
fn a_file_that_is_cut_while_tensors_are_read_from_it_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights.safetensors");
    let (small, large) = ([7; 4], vec![3; 1 << 16]);
    write_safetensors(&path, &[tensor("a", "F32", &[1], &small), tensor("b", "U8", &[1 << 16], &large)], None).unwrap();
    let file = TensorFile::open(&path).unwrap();
    assert_eq!((file.names(), file.info("a"), file.info("c")), (vec!["a".into(), "b".into()], Some(("F32".into(), vec![1])), None));
    assert!(file.read("a").unwrap() == small && file.read("b").unwrap() == large && file.read("c").is_err());
    let whole = fs::read(&path).unwrap();
    for left in [0, 7, 8, 40, whole.len() - 4096, whole.len() - 1, whole.len() + 1] {
        let mut bytes = whole.clone();
        bytes.resize(left, 0);
        fs::write(&path, bytes).unwrap();
        let said = TensorFile::open(&path).unwrap_err().to_string();
        assert!(said.contains("weights.safetensors: not a whole safetensors file"), "{left}: {said}");
        if left < whole.len() {
            let said = file.read("b").unwrap_err().to_string();
            assert!(said.contains("cannot read") && said.contains("weights.safetensors"), "{left}: {said}");
        }
    }
    let mut endless = whole;
    endless[7] = 0xff;
    fs::write(&path, endless).unwrap();
    assert!(TensorFile::open(&path).unwrap_err().to_string().contains("header"));
}

#[test]
fn keeps_the_last_ones() {
    let dir = tempfile::tempdir().unwrap();
    for step in [10, 20, 30, 99] {
        save_small(dir.path(), step, 1, 0);
    }
    fs::remove_file(dir.path().join("step-00000020").join(MANIFEST)).unwrap();
    fs::create_dir(dir.path().join("step-notes")).unwrap();
    // 99 is later, 20 is broken: neither is counted, neither is touched.
    save_small(dir.path(), 40, 1, 2);
    let left = listing(dir.path());
    let expected = ["20", "30", "40", "99"].map(|n| format!("step-000000{n}"));
    assert_eq!(left[..4], expected);
    assert_eq!(left[4..], ["step-notes"]);
    save_small(dir.path(), 40, 2, 1);
    assert_eq!(listing(dir.path()).len(), 4);
}

#[test]
fn replaces_the_same_step() {
    let dir = tempfile::tempdir().unwrap();
    for fill in 1..4 {
        let path = save_small(dir.path(), 5, fill, 1);
        assert_eq!(listing(dir.path()), ["step-00000005"]);
        assert_eq!(open(&path).unwrap().meta["fill"], fill);
    }
}

/// The states between the two renames of a replacement, and what the next save makes of them.
#[test]
fn finds_what_was_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    let dead = u32::MAX;
    let alive = std::os::unix::process::parent_id();
    let named = save_small(dir.path(), 5, 1, 0);
    let old = dir.path().join(format!(".step-00000005.old-{dead}"));
    fs::rename(&named, &old).unwrap();
    fs::create_dir(dir.path().join(format!(".step-00000006.tmp-{dead}"))).unwrap();
    let busy = format!(".step-00000007.tmp-{alive}");
    fs::create_dir(dir.path().join(&busy)).unwrap();
    let (found, skipped) = newest(dir.path()).unwrap();
    assert_eq!(found.unwrap().path, old);
    assert!(skipped.is_empty());

    save_small(dir.path(), 4, 1, 0);
    let left = listing(dir.path());
    assert_eq!(left, [&busy[..], "step-00000004", "step-00000005"]);

    fs::rename(&named, &old).unwrap();
    save_small(dir.path(), 5, 2, 0);
    assert!(!old.exists());
    assert_eq!(open(&named).unwrap().meta["fill"], 2);
}

/// Runs the test `child` of this binary in a process of its own, through a shell.
fn child_command(shell: &str, dir: &Path) -> Command {
    let module = module_path!().split_once("::").unwrap().1;
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("{shell} exec \"$0\" \"$@\"")])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("{module}::child"), "--nocapture"])
        .env(CHILD, dir)
        .stdout(Stdio::piped());
    command
}

/// Saves every step twice, the second time replacing the first, until it is killed or cannot.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(CHILD) else {
        return;
    };
    let dir = Path::new(&dir);
    println!("\nready");
    let found = newest(dir).unwrap().0;
    let mut save_number = found.map_or(0, |c| c.meta.as_u64().unwrap_or(0) + 1);
    loop {
        let bytes = vec![save_number as u8; 3 << 20];
        let shape = [3, 1 << 18];
        let tensors = || vec![tensor("w", "F32", &shape, &bytes)];
        let files = [("model.safetensors", tensors()), ("state.safetensors", tensors())];
        if let Err(e) = save(dir, save_number / 2, &files, &[], &json!(save_number), 2.into()) {
            return println!("\nrefused {e}");
        }
        println!("\ndone {save_number}");
        save_number += 1;
    }
}

#[test]
fn survives_being_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut reported, mut debris) = (0, 0);
    let mut rounds = 0;
    // On a busy machine nothing may be saved so soon: later kills come later.
    while rounds < 40 || reported == 0 && rounds < 200 {
        rounds += 1;
        let mut child = child_command("", dir.path()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map(|l| l.unwrap());
        assert!(lines.any(|l| l == "ready"));
        let random = xxh3_64(&u64::to_le_bytes(rounds));
        std::thread::sleep(Duration::from_micros(random % (80_000 << (rounds / 40))));
        child.kill().unwrap();
        child.wait().unwrap();
        let done = lines.filter_map(|l| l.strip_prefix("done ")?.parse::<u64>().ok());
        let last = done.last();
        debris += usize::from(listing(dir.path()).iter().any(|n| n.starts_with('.')));

        let (found, skipped) = newest(dir.path()).unwrap();
        assert!(skipped.is_empty(), "{skipped:?}");
        let Some(found) = found else {
            assert_eq!((reported, last), (0, None));
            continue;
        };
        let number = found.meta.as_u64().unwrap();
        reported = last.map_or(reported, |l| l.max(reported));
        assert!(number >= reported && number / 2 == found.step);
        let model = found.file("model.safetensors").unwrap();
        let (_, _, bytes) = model.get("w").unwrap();
        assert!(bytes.len() == 3 << 20 && bytes.iter().all(|b| *b == number as u8));
    }
    println!("{reported} saves, {debris} of {rounds} kills left something half-done");
    assert!(reported > 0);
}

/// A limit on the size of files makes a write fail half-way, as a full disk does.
#[test]
fn a_failed_write_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let saved = save_small(dir.path(), 0, 1, 0);
    let limit = "trap '' XFSZ; ulimit -f 2048;";
    let output = child_command(limit, dir.path()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("refused cannot write "), "{text}");
    assert!(text.contains("model.safetensors: File too large"), "{text}");
    assert_eq!(listing(dir.path()), ["step-00000000"]);
    assert_eq!(open(&saved).unwrap().meta["fill"], 1);
}

/// A reader beside a run that saves and removes gets the newest whole one, and all of it.
#[test]
fn a_checkpoint_that_is_removed_while_it_is_read_is_read_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let fill = |found: &Checkpoint| found.file("model.safetensors").unwrap().get("w").unwrap().2[0];
    save_small(dir.path(), 1, 1, 1);
    let found = newest(dir.path()).unwrap().0.unwrap();
    save_small(dir.path(), 2, 2, 1);
    assert_eq!((found.path.exists(), fill(&found)), (false, 1));

    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            (3..)
                .take_while(|_| !stop.load(std::sync::atomic::Ordering::Relaxed))
                .for_each(|step| drop(save_small(dir.path(), step, step as u8, 1)));
        });
        let (mut last, mut seen) = (0, 0);
        while seen < 20 {
            let (found, skipped) = newest(dir.path()).unwrap();
            assert!(skipped.is_empty(), "{skipped:?}");
            let found = found.unwrap();
            assert_eq!(fill(&found), found.step as u8);
            assert!(found.step >= last);
            seen += usize::from(found.step > last);
            last = found.step;
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn what_cannot_be_read_is_an_error_and_not_skipped() {
    let dir = tempfile::tempdir().unwrap();
    save_small(dir.path(), 1, 1, 0);
    for name in [MANIFEST, "model.safetensors"] {
        let path = save_small(dir.path(), 2, 2, 0).join(name);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&path, &path).unwrap(); // to itself: it cannot be opened
        let e = newest(dir.path()).unwrap_err();
        assert!(matches!(&e, CheckpointError::Io { path: named, .. } if *named == path), "{e}");
    }
    // What could not be read is not pruned either.
    save_small(dir.path(), 3, 3, 1);
    assert_eq!(listing(dir.path()), ["step-00000002", "step-00000003"]);
}

/// What ranks' files say of their parts is compared with what they hold before room is made for it: a checkpoint may come from anywhere.
/// Each cut within another is a level deeper.
#[test]
fn parts_that_are_cut_very_often_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let whole = Part { shape: vec![4], axis: None, sections: 1, index: 0, of: 1, by: "" };
    let joined = |cuts: usize, name: &str| {
        let dir = dir.path().join(format!("{cuts}{name}"));
        let (parts, bytes) = (vec![whole.clone(); cuts], [7u8; 16]);
        let held = Held { file: "model.safetensors", tensor: tensor("w", "F32", &[4], &bytes), parts: &parts };
        let written = write_parts(&dir, 1, 0, &[held]).unwrap();
        let model = vec![tensor(name, "F32", &[4], &bytes)];
        save_with_parts(&dir, 1, &[("model.safetensors", model)], &[], &[written], &json!({}), 1.into()).unwrap();
        newest(&dir).unwrap().0.unwrap().file("model.safetensors").map(|w| w.names().len()).map_err(|e| e.to_string())
    };
    assert_eq!(joined(2, "v"), Ok(2));
    for cuts in [200, 20_000] {
        assert!(joined(cuts, "v").unwrap_err().contains("'model.safetensors:w' does not say which part"));
    }
    let twice = joined(1, "w").unwrap_err();
    assert!(twice.contains("'w' is in model.safetensors, and ranks have parts of it"), "{twice}");
}

#[test]
fn moments_of_nan_are_refused_by_name() {
    let numbers = |v: f32| [1.0, f32::INFINITY, v].map(f32::to_le_bytes).concat();
    let read = |name: &str, v: f32| {
        let bytes = numbers(v);
        let (header, _) = tensors::layout(&[tensor(name, "F32", &[3], &bytes)], None).unwrap();
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat();
        let path = Path::new("state.safetensors");
        Loaded::parse(path, file).unwrap().moments_are_numbers(path).map(|_| ()).map_err(|e| e.to_string())
    };
    assert!(read("adam.m/w", 2.0).is_ok() && read("scratch/w", f32::NAN).is_ok());
    for name in ["adam.v/w", "muon.m/w"] {
        let said = read(name, f32::NAN).unwrap_err();
        assert!(said.contains("state.safetensors") && said.contains(&format!("'{name}' holds NaN (number 2")), "{said}");
    }
}

#[test]
fn parts_of_ranks_that_do_not_fit_are_refused() {
    let bytes = [7u8; 32];
    let part = |index: usize, of: usize| Part { shape: vec![2, 8], axis: Some(0), sections: 1, index, of, by: "" };
    let saved = |parts: [(&str, &[usize], Part); 2]| {
        let dir = tempfile::tempdir().unwrap();
        let all: Vec<_> = (0..2)
            .map(|rank| {
                let (dtype, shape, part) = &parts[rank];
                let tensor = tensor("w", dtype, shape, &bytes);
                let held = Held { file: "model.safetensors", tensor, parts: std::slice::from_ref(part) };
                write_parts(dir.path(), 1, rank, &[held]).unwrap()
            })
            .collect();
        save_with_parts(dir.path(), 1, &[("model.safetensors", vec![])], &[], &all, &json!({}), 1.into()).unwrap();
        let found = newest(dir.path()).unwrap().0.unwrap();
        found.file("model.safetensors").map(|w| w.get("w").unwrap().1).map_err(|e| e.to_string())
    };
    let row: &[usize] = &[1, 8];
    assert_eq!(saved([("F32", row, part(0, 2)), ("F32", row, part(1, 2))]).unwrap(), [2, 8]);
    // Two numbers share a byte.
    let half = |index: usize| Part { shape: vec![64, 2], axis: Some(1), ..part(index, 2) };
    let huge = |index: usize| Part { shape: vec![1 << 40, 8], ..part(index, 1 << 40) };
    for (parts, why) in [
        ([("F32", row, huge(0)), ("F32", row, huge(1))], "does not say which part"),
        ([("F32", row, Part { axis: Some(1), sections: 4, ..part(0, 2) }), ("F32", row, part(1, 2))], "another type, shape or cut"),
        ([("F32", row, part(0, 2)), ("I32", row, part(1, 2))], "another type, shape or cut"),
        ([("F32", row, part(0, 2)), ("BF16", &[2, 8], part(1, 2))], "does not say which part"),
        ([("F32", row, Part { shape: vec![1 << 32, 8], ..part(0, 2) }), ("F32", row, part(1, 2))], "does not say which part"),
        ([("F32", row, part(0, 2)), ("F32", row, part(0, 2))], "does not say which part"),
        ([("F4", &[64, 1], half(0)), ("F4", &[64, 1], half(1))], "does not say which part"),
    ] {
        let error = saved(parts).unwrap_err();
        assert!(error.contains(why), "{why}: {error}");
    }
}

/// What ranks had written of a step that was never saved goes with the next that is.
#[test]
fn parts_that_a_killed_save_left_are_removed_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = [7u8; 32];
    let write = |step: u64, rank: usize| {
        let part = Part { shape: vec![2, 8], axis: Some(0), sections: 1, index: rank, of: 2, by: "" };
        let held = Held { file: "model.safetensors", tensor: tensor("w", "F32", &[1, 8], &bytes), parts: &[part] };
        write_parts(dir.path(), step, rank, &[held]).unwrap()
    };
    write(1, 0);
    save_with_parts(dir.path(), 2, &[("model.safetensors", vec![])], &[], &[write(2, 0), write(2, 1)], &json!({}), 1.into()).unwrap();
    assert_eq!(listing(dir.path()), ["step-00000002"]);
}
