use super::disk::{Disk, Keep};
use super::shim::{self, Record};
use super::{Asked, Call, Kind, Place, jobs, seal};
use fastrand::Rng;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

fn call(kind: char, inode: u64, path: &Path) -> Record {
    Record { kind, number: 0, inode, offset: 0, flags: 1, path: path.into(), other: path.into(), data: vec![] }
}

/// What is on a disk after these calls and a power cut.
fn after(calls: &[Record], root: &Path, keep: Keep) -> Vec<(String, String)> {
    let mut disk = Disk::new(root).unwrap();
    calls.iter().for_each(|c| disk.happened(c).unwrap());
    let to = tempfile::tempdir().unwrap();
    disk.cut(keep, &mut Rng::with_seed(1), to.path()).unwrap();
    jobs::tree(to.path()).into_iter().map(|(name, bytes)| (name, String::from_utf8(bytes).unwrap())).collect()
}

#[test]
fn a_power_cut_leaves_what_was_synced() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("old"), "old").unwrap();
    let folder = fs::metadata(dir.path()).map(|m| std::os::unix::fs::MetadataExt::ino(&m)).unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let wrote = || Record { data: b"new".into(), ..call('w', u64::MAX, &a) };
    let made = || [call('c', u64::MAX, &a), wrote()];
    let left = |calls: Vec<Record>| after(&calls, dir.path(), Keep::Nothing);
    let old = ("old".to_string(), "old".to_string());
    let own = |name: &str, text: &str| (name.to_string(), text.to_string());

    assert_eq!(left(made().into()), std::slice::from_ref(&old), "nothing was synced");
    assert_eq!(left(made().into_iter().chain([call('s', u64::MAX, &a)]).collect()), std::slice::from_ref(&old), "its name was not");
    assert_eq!(
        left(made().into_iter().chain([call('s', folder, dir.path())]).collect()),
        [own("a", ""), old.clone()],
        "its bytes were not"
    );
    let both = || made().into_iter().chain([call('s', u64::MAX, &a), call('s', folder, dir.path())]);
    assert_eq!(left(both().collect()), [own("a", "new"), old.clone()]);
    let renamed = || both().chain([Record { other: b.clone(), ..call('n', 0, &a) }]);
    assert_eq!(left(renamed().collect()), [own("a", "new"), old.clone()], "a rename is a change of names");
    assert_eq!(left(renamed().chain([call('s', folder, dir.path())]).collect()), [own("b", "new"), old.clone()]);
    let c = dir.path().join("c");
    let linked = [Record { other: "a".into(), ..call('y', u64::MAX - 1, &b) }, Record { other: c, ..call('n', 0, &b) }];
    let linked = || both().chain(linked.clone());
    assert_eq!(left(linked().collect()), [own("a", "new"), old.clone()], "a link is a name");
    assert_eq!(left(linked().chain([call('s', folder, dir.path())]).collect()), [own("a", "new"), own("c", "new"), old.clone()]);
    let gone: Vec<Record> = both().chain([call('u', 0, &a), call('u', 0, &dir.path().join("old"))]).collect();
    assert_eq!(after(&gone, dir.path(), Keep::Nothing), [own("a", "new"), old]);
    assert_eq!(after(&gone[..0], dir.path(), Keep::Anything).len(), 1);
}

/// A save has ended when its name was synced, and at the latest when the process goes on to change something else: that it did not wait is no excuse.
#[test]
fn a_checkpoint_counts_as_saved_once_the_process_goes_on() {
    let (folder, old) = (Path::new("/run/checkpoints"), Path::new("/run/checkpoints/step-00000001"));
    let named = |step: u64| Record { other: folder.join(format!("step-{step:08}")), ..call('n', 0, &folder.join(".step.tmp-1")) };
    let saved = |rest: &[Record]| super::power::saved(&[&[named(1), call('s', 0, folder), named(2)][..], rest].concat());
    assert_eq!(saved(&[]), Some(1));
    assert_eq!(saved(&[call('o', 0, folder), call('r', 0, folder)]), Some(1), "it may be about to sync");
    assert_eq!(saved(&[call('s', 0, old)]), Some(1), "another folder");
    assert_eq!(saved(&[call('o', 0, folder), call('s', 0, folder)]), Some(2));
    for kind in "cwtmnludy".chars() {
        assert_eq!(saved(&[call(kind, 0, old)]), Some(2), "{kind}");
    }
}

/// The shim under two programs that every system has.
#[test]
fn calls_are_written_down_made_to_fail_and_made_the_last() {
    let place = Place::new(Path::new("."), 0).unwrap();
    let Some(library) = shim::build(&place).unwrap() else {
        return crate::mpich::without::without("cc", "calls to the file system, which a library stands between");
    };
    let (folder, log) = (place.path("folder"), place.path("log"));
    jobs::create(&folder).unwrap();
    let (a, b) = (folder.join("a"), folder.join("b"));
    fs::write(&a, "text").unwrap();
    let run = |program: &str, env: &[(&str, &str)]| {
        let mut c = Command::new(program);
        c.args([&a, &b])
            .env("LD_PRELOAD", &library)
            .env("TORTURE_ROOT", &folder)
            .envs(env.iter().copied())
            .stderr(std::process::Stdio::null());
        c.status().unwrap()
    };
    assert!(run("cp", &[("TORTURE_LOG", log.to_str().unwrap())]).success());
    let calls = shim::read(&log).unwrap();
    let write = calls.iter().find(|c| c.kind == 'w').unwrap();
    assert_eq!((write.data.as_slice(), write.offset), (b"text".as_slice(), 0));
    assert!(calls.iter().any(|c| c.kind == 'c' && c.path == b && c.flags & 1 == 1 && c.inode == write.inode));
    fs::remove_file(&b).unwrap();

    let number = write.number.to_string();
    let at = |what: &'static str| [("TORTURE_AT", number.as_str()), ("TORTURE_DO", what), ("TORTURE_ERRNO", "28")];
    assert_eq!(run("cp", &at("fail")).code(), Some(1));
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&run("cp", &at("kill"))), Some(9));
    assert_eq!(fs::read_to_string(&b).unwrap(), "");
    run("cp", &at("tear"));
    assert_eq!(fs::read_to_string(&b).unwrap(), "te");
    assert!(run("cp", &at("short")).success());
    assert_eq!(fs::read_to_string(&b).unwrap(), "text");
}

#[test]
fn how_a_process_ended_is_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let run = |script: &str| Call::new(Path::new("sh"), dir.path(), ["-c", script]).run();
    let kind = |script: &str| run(script).good_or_said().map_err(|f| f.kind);
    assert_eq!(kind("true"), Ok(true));
    assert_eq!(kind("echo 'error: no' >&2; exit 1"), Ok(false));
    assert_eq!(kind("exit 1"), Err(Kind::Wrong), "without a message");
    assert_eq!(kind("echo error >&2; exit 3"), Err(Kind::Wrong));
    assert_eq!(kind("echo \"thread 'main' panicked at x.rs:1\" >&2; exit 1"), Err(Kind::Panic));
    assert_eq!(kind("exit 101"), Err(Kind::Panic));
    assert_eq!(kind("kill -ABRT $$"), Err(Kind::Abort));
    let signalled = |script: &str, after: u64| {
        Call::new(Path::new("sh"), dir.path(), ["-c", script]).signalled("TERM", Duration::from_millis(after)).run().stopped().is_ok()
    };
    assert!(signalled("sleep 60", 200));
    assert!(signalled("trap 'exit 143' TERM; while true; do sleep 0.01; done", 200));
    // Later where a busy shell has not yet read its trap when the signal comes.
    assert!([200, 4_000, 30_000].into_iter().any(|after| !signalled("trap 'exit 7' TERM; while true; do sleep 0.01; done", after)));
}

#[test]
fn what_is_asked_for_is_understood_or_refused() {
    let asked = |text: &str| Asked::new(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    let a = asked("--minutes 0.5 --seed 7 --only power,fuzz").unwrap();
    assert_eq!((a.minutes, a.seed, a.parts().map(|p| p.0).collect::<Vec<_>>()), (0.5, 7, vec!["power", "fuzz"]));
    assert_eq!(asked("").unwrap().parts().count(), super::PARTS.len());
    for (text, part) in
        [("--minutes", "needs a value"), ("--minutes -1", "above 0"), ("--only x", "kills,calls"), ("--case 3", "--only"), ("--x 1", "--x")]
    {
        assert!(asked(text).err().is_some_and(|e| e.contains(part)), "{text}");
    }
}

#[test]
fn a_checkpoint_is_sealed_again() {
    let dir = tempfile::tempdir().unwrap();
    let (model, manifest) = (dir.path().join("model.safetensors"), dir.path().join("checkpoint.json"));
    fs::write(&model, "abc").unwrap();
    let text = "{\n  \"files\": {\n    \"model.safetensors\": {\n      \"bytes\": 9,\n      \"xxh3\": \"0\"\n    }\n  },\n  \"checksum\": \"0\"\n}\n";
    fs::write(&manifest, text).unwrap();
    assert!(seal::reseal(&model));
    // The checksum of "abc" as xxhsum prints it.
    let sealed = fs::read_to_string(&manifest).unwrap();
    assert!(sealed.contains("\"bytes\": 3,\n      \"xxh3\": \"78af5f94892f3950\""), "{sealed}");
    assert!(!sealed.ends_with("\"checksum\": \"0\"\n}\n"));
    fs::write(&manifest, "{").unwrap();
    assert!(!seal::reseal(&model) && !seal::reseal(&dir.path().join("a.tokens")));
}
