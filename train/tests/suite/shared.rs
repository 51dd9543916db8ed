//! Machines that are shared, and folders that come from others: no link leads a key of the user's into what is written, nothing is written where a link
//! leads, a damaged cache is not used, and nothing of a stranger's is run.

use crate::common::*;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::tempdir;

const KEY: &str = "THE-KEY-OF-SOMEBODY";

/// Every file below a folder that holds the key. Links are looked at as what they are.
fn leaks(folder: &Path) -> Vec<PathBuf> {
    let (mut folders, mut found) = (vec![folder.to_path_buf()], vec![]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().map(|e| e.unwrap()) {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() && fs::read(entry.path()).unwrap().windows(KEY.len()).any(|w| w == KEY.as_bytes()) {
                found.push(entry.path());
            }
        }
    }
    found
}

/// A small decoder as a model's folder, adapters that were trained on it, and a key beside them.
struct Model {
    dir: tempfile::TempDir,
}

impl Model {
    fn new() -> Model {
        let model = Model { dir: tempdir().unwrap() };
        let small = "--set dim=32 --set layers=2 --set heads=4 --set kv_heads=2 --set head_dim=8 --set hidden=48 --set seq=32 --set batch=2 --threads 1";
        model.run(format!("train decoder --out {} {small} --steps 1", model.of("first"))).ok();
        model.run(format!("export {} --out {}", model.of("first"), model.of("base"))).ok();
        let lora = format!(
            "train decoder --base {} --lora --out {} --set seq=32 --set batch=2 --steps 1 --threads 1",
            model.of("base"),
            model.of("tuned")
        );
        model.run(lora).ok();
        fs::create_dir(model.at("home")).unwrap();
        fs::write(model.at("home/id_rsa"), KEY).unwrap();
        model
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn of(&self, name: &str) -> String {
        text(&self.at(name))
    }

    fn run(&self, line: String) -> Ran {
        kiln(line.split_whitespace())
    }

    /// A copy of the model, whose files may be exchanged.
    fn copied(&self, to: &str) -> PathBuf {
        copy(&self.at("base"), &self.at(to));
        self.at(to)
    }

    /// Everything that hands a model's folder on: its command line, without the new folder's name.
    fn handed_on(&self, folder: &Path) -> Vec<(&'static str, String)> {
        let adapter = self.at("adapters");
        if !adapter.exists() {
            self.run(format!("export {} --out {}", self.of("tuned"), text(&adapter))).ok();
        }
        vec![
            ("prune", format!("prune {} --out", folder.display())),
            ("gguf", format!("export {} --format gguf --out", folder.display())),
            ("merge", format!("export {} --merge --out", self.of("tuned"))),
        ]
    }
}

/// What the folder of a model is called in which a file is a link that leads out, and what becomes of it.
#[test]
fn no_command_that_hands_a_model_on_copies_what_a_link_leads_to() {
    let model = Model::new();
    let base = model.at("base");
    let whole = model.copied("whole");
    // As archives and git carry them: absolute and relative ones, and one through a folder that is a link itself.
    let ways = [text(&model.at("home/id_rsa")), "../home/id_rsa".into(), "away/id_rsa".into()];
    let mut count = 0;
    for name in ["chat_template.jinja", "LICENSE", "added_tokens.json", "generation_config.json"] {
        for to in &ways {
            for path in ["away", name] {
                let _ = fs::remove_file(base.join(path));
            }
            symlink("../home", base.join("away")).unwrap();
            symlink(to, base.join(name)).unwrap();
            for (what, line) in model.handed_on(&base) {
                count += 1;
                let out = model.at(&format!("out-{count}"));
                let ran = model.run(format!("{line} {}", out.display()));
                assert!(!ran.panicked() && ran.code != Some(0), "{what}, {name} -> {to}: {ran:#?}");
                assert!(ran.err.contains(name) && !ran.err.contains(KEY), "{what}, {name} -> {to}: {}", ran.err);
                assert!(leaks(&out).is_empty() && !out.is_file(), "{what}, {name} -> {to}");
            }
            fs::remove_file(base.join(name)).unwrap();
            let _ = fs::copy(whole.join(name), base.join(name));
        }
    }
    // Weights, where nothing is made of them but a copy.
    fs::rename(base.join("model.safetensors"), model.at("home/model.safetensors")).unwrap();
    symlink("../home/model.safetensors", base.join("model.safetensors")).unwrap();
    for (what, line) in model.handed_on(&base).into_iter().filter(|(what, _)| *what != "merge") {
        let out = model.at(&format!("linked-{what}"));
        model.run(format!("{line} {}", out.display())).fails(&["model.safetensors", "leads out"]);
        assert!(!out.exists(), "{what}");
    }
    fs::remove_file(base.join("model.safetensors")).unwrap();
    fs::rename(model.at("home/model.safetensors"), base.join("model.safetensors")).unwrap();
    // A file of another name is left behind; a link that stays in the folder is followed.
    symlink(model.at("home/id_rsa"), base.join("notes.txt")).unwrap();
    fs::write(base.join("template"), "{{ messages }} of its own").unwrap();
    symlink("template", base.join("chat_template.jinja")).unwrap();
    for (what, line) in model.handed_on(&base) {
        let out = model.at(&format!("good-{what}"));
        model.run(format!("{line} {}", out.display())).ok();
        assert!(leaks(&out).is_empty() && !out.join("notes.txt").exists(), "{what}");
        let written = if out.is_dir() { fs::read(out.join("chat_template.jinja")).unwrap() } else { fs::read(&out).unwrap() };
        assert!(written.windows(10).any(|w| w == b"of its own"), "{what}");
    }
}

/// A hub's cache holds links to `blobs` alone, and they are followed; nothing else that looks like one is.
#[test]
fn links_to_a_hubs_blobs_are_followed_and_no_others() {
    let model = Model::new();
    let base = model.at("base");
    // (the model's folder, whether it is a hub's)
    for (name, hub) in [("models--own--small", true), ("downloads", false)] {
        let root = model.at(name);
        let (snapshot, blobs) = (root.join("snapshots/0a1b"), root.join("blobs"));
        [&snapshot, &blobs].iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
        for (i, file) in names(&base).into_iter().enumerate() {
            fs::copy(base.join(&file), blobs.join(format!("{i:x}"))).unwrap();
            symlink(format!("../../blobs/{i:x}"), snapshot.join(&file)).unwrap();
        }
        let prune = |out: &str| model.run(format!("prune {} --out {}", snapshot.display(), model.of(&format!("{name}-{out}"))));
        let gguf =
            |out: &str| model.run(format!("export {} --format gguf --out {}", snapshot.display(), model.of(&format!("{name}-{out}"))));
        if !hub {
            prune("a").fails(&["leads out of the folder"]);
            gguf("b").fails(&["leads out of the folder"]);
            continue;
        }
        prune("a").ok();
        gguf("b").ok();
        let config = |folder: &Path| fs::read(folder.join("config.json")).unwrap();
        assert_eq!(config(&model.at(&format!("{name}-a"))), config(&base));
        // Beside `blobs`, below it, above it, and where `blobs` or what is in it is a link itself.
        symlink(model.at("home"), root.join("refs")).unwrap();
        symlink(model.at("home/id_rsa"), blobs.join("link")).unwrap();
        fs::create_dir(blobs.join("folder")).unwrap();
        symlink(model.at("home/id_rsa"), blobs.join("folder/key")).unwrap();
        let key = text(&model.at("home/id_rsa"));
        for to in [
            "../../refs/id_rsa",
            "../../blobs/link",
            "../../blobs/folder/key",
            "../../blobs/../refs/id_rsa",
            "../../../home/id_rsa",
            "../../blobs/../../home/id_rsa",
            &key,
        ] {
            let _ = fs::remove_file(snapshot.join("LICENSE"));
            symlink(to, snapshot.join("LICENSE")).unwrap();
            prune("c").fails(&["LICENSE"]);
            gguf("d").fails(&["LICENSE"]);
        }
        let _ = fs::remove_file(snapshot.join("LICENSE"));
        fs::rename(&blobs, model.at("elsewhere")).unwrap();
        symlink("../elsewhere", &blobs).unwrap();
        prune("e").fails(&["leads out of the folder"]);
        assert!(leaks(&model.at("models--own--small-a")).is_empty());
    }
}

#[test]
fn a_file_beside_the_weights_that_has_no_end_is_not_copied() {
    let model = Model::new();
    let base = model.at("base");
    // A hole: it takes no room on the disk.
    fs::File::create(base.join("LICENSE")).unwrap().set_len(300 << 20).unwrap();
    let out = model.at("out");
    model.run(format!("prune {} --out {}", base.display(), out.display())).fails(&["LICENSE", "256", "no model has such a file"]);
    assert!(!out.exists());
}

/// A run that trains a base of its own first.
const OWN_BASE: &str = "--set dim=24 --set layers=1 --set heads=2 --set kv_heads=1 --set head_dim=12 --set hidden=40 --set seq=32 --set pretrain=5 \
                        --set eval_batches=1 --set batch=2 --set replies=2";

/// How a base is tuned on questions that lie in this folder.
fn tuning(dir: &Path) -> String {
    let data = dir.join("chats.jsonl");
    fs::write(&data, "{\"prompt\": \"add 3 and 4\", \"reply\": \"7\"}\n".repeat(8)).unwrap();
    format!("--data {} --steps 1 --set data.val_share=0 --set batch=1 --set seq=32 --threads 1", data.display())
}

/// A base in kiln's cache, an adapter that names it, and everybody who opens it.
#[test]
fn a_base_of_the_cache_that_is_damaged_is_refused_whoever_names_it() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    let run = |line: String| {
        let mut c = command(line.split_whitespace());
        c.env("XDG_CACHE_HOME", dir.path().join("cache")).current_dir(dir.path());
        finish(c)
    };
    let train = |out: &str| run(format!("train polychromic --threads 1 --steps 1 {OWN_BASE} --out {}", at(out)));
    train("first").ok();
    run(format!("export {} --out {}", at("first"), at("adapters"))).ok();
    let bases = dir.path().join("cache/kiln/bases");
    let base = bases.join(names(&bases).remove(0));
    let named: serde_json::Value = serde_json::from_slice(&fs::read(dir.path().join("adapters/adapter_config.json")).unwrap()).unwrap();
    assert!(named["base_model_name_or_path"].as_str().unwrap().starts_with("kiln-base-"), "{named}");
    symlink(&base, dir.path().join("mine")).unwrap();
    let relative = format!("cache/kiln/../kiln/bases/{}", base.file_name().unwrap().to_str().unwrap());
    let opened = |count: usize| {
        let generate = "--prompt add --max-tokens 2 --threads 1";
        vec![
            train(&format!("again-{count}")),
            run(format!("generate {} {generate}", at("adapters"))),
            run(format!("generate {} {generate} --base {}", at("adapters"), base.display())),
            run(format!("generate {} {generate} --base mine", at("adapters"))),
            run(format!("check model {relative} --ids 1 --threads 1")),
            run(format!("train decoder --base mine {} --out {}", tuning(dir.path()), at(&format!("tuned-{count}")))),
        ]
    };
    opened(0).into_iter().for_each(|ran| drop(ran.ok()));
    let flipped = |name: &str, at: usize| {
        let path = base.join(name);
        let mut bytes = fs::read(&path).unwrap();
        let at = bytes.len() - 1 - at;
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    for (i, name) in ["model.safetensors", "tokenizer.json", "config.json", "checksums.json"].into_iter().enumerate() {
        let place = if name == "model.safetensors" { 2 } else { 20 };
        flipped(name, place);
        for ran in opened(1 + i) {
            ran.fails(&["is damaged: delete its folder, and it is trained again (rm -r ", base.to_str().unwrap()]);
        }
        flipped(name, place);
    }
    opened(9).into_iter().for_each(|ran| drop(ran.ok()));
}

/// The name of a cache says who its user is, whatever way leads there.
#[test]
fn an_adapter_does_not_name_the_cache_of_whoever_made_it() {
    let dir = tempdir().unwrap();
    let at = |name: &str| text(&dir.path().join(name));
    let run = |line: String| {
        let mut c = command(line.split_whitespace());
        // Through a link.
        c.env("XDG_CACHE_HOME", dir.path().join("linked"));
        finish(c)
    };
    fs::create_dir(dir.path().join("cache")).unwrap();
    symlink("cache", dir.path().join("linked")).unwrap();
    run(format!("train polychromic --threads 1 --steps 1 {OWN_BASE} --out {}", at("first"))).ok();
    let bases = dir.path().join("cache/kiln/bases");
    let base = bases.join(names(&bases).remove(0));
    // As a setting, by its place behind the link.
    run(format!("train decoder --base {} --lora {} --out {}", base.display(), tuning(dir.path()), at("second"))).ok();
    for name in ["first", "second"] {
        let out = at(&format!("{name}-adapter"));
        run(format!("export {} --out {out}", at(name))).ok();
        let config = fs::read_to_string(Path::new(&out).join("adapter_config.json")).unwrap();
        assert!(config.contains("\"kiln-base-") && !config.contains(&at("")), "{config}");
    }
}

/// Before the first write, and where the link leads further down.
#[test]
fn a_run_folder_with_a_link_that_leads_out_is_refused_when_it_is_written_to() {
    let dir = tempdir().unwrap();
    let (whole, away) = (dir.path().join("whole"), dir.path().join("away"));
    train(&whole, "--steps 1").ok();
    fs::create_dir(&away).unwrap();
    let all =
        ["config.toml", "metrics.jsonl", "run.json", "receipts.json", "loss.svg", "best", "checkpoints", "deep/er/file", "deep/er/folder"];
    for (i, name) in all.into_iter().enumerate() {
        let run = dir.path().join(format!("run-{i}"));
        copy(&whole, &run);
        let (mine, path) = (away.join(format!("mine-{i}")), run.join(name));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // What lies there is well read, and must not be written.
        match path.exists() {
            true => fs::rename(&path, &mine).unwrap(),
            false if name.ends_with("folder") => fs::create_dir(&mine).unwrap(),
            false => fs::write(&mine, "precious").unwrap(),
        }
        let before = dir.path().join(format!("before-{i}"));
        let same = |a: &Path, b: &Path| match a.is_dir() {
            true => assert_eq!(names(a), names(b), "{name}"),
            false => assert!(fs::read(a).unwrap() == fs::read(b).unwrap(), "{name}"),
        };
        if mine.is_dir() {
            copy(&mine, &before)
        } else {
            fs::copy(&mine, &before).unwrap();
        }
        symlink(&mine, &path).unwrap();
        for ran in [resume(&run, "--steps 2"), train(&run, "--steps 2 --start-over")] {
            ran.fails(&[name, "is a link that leads out of the run's folder"]);
        }
        // Nor is it read first, and quoted: logs are read by others.
        fs::write(away.join("key"), format!("----- {KEY} -----\n")).unwrap();
        for to in [away.join("key"), "/proc/self/environ".into()].iter().filter(|_| !mine.is_dir()) {
            fs::remove_file(&path).unwrap();
            symlink(to, &path).unwrap();
            for more in ["--resume --steps 2", "--start-over --steps 2", "--resume --elastic --ranks 2"] {
                let mut c = command(train_args(&run, more));
                c.env("SECRET_TOKEN", KEY);
                let said = finish(c);
                assert!(
                    said.code != Some(0) && !format!("{}{}", said.out, said.err).contains(KEY),
                    "{name} -> {}: {said:#?}",
                    to.display()
                );
            }
        }
        fs::remove_file(away.join("key")).unwrap();
        same(&mine, &before);
        assert!(path.is_symlink(), "{name}");
    }
    assert_eq!(names(&away).len(), all.len());
}

/// What is put in a file's place while the run goes on is replaced, and not written through.
#[test]
fn links_that_come_while_a_run_goes_on_lead_no_write_away() {
    let dir = tempdir().unwrap();
    let (run, mine) = (dir.path().join("run"), dir.path().join("mine"));
    fs::write(&mine, "precious").unwrap();
    let mut child = start(train_args(&run, "--steps 1000000 --set save_every=1000000"));
    wait_until(&mut child, || !records(&run, "train").is_empty());
    let late = ["run.json", "loss.svg", "samples.jsonl", ".saved"];
    for name in late {
        let _ = fs::remove_file(run.join(name));
        symlink(&mine, run.join(name)).unwrap();
    }
    signal(&child, "INT");
    let ran = end(child);
    assert_eq!(fs::read_to_string(&mine).unwrap(), "precious", "{ran:#?}");
    assert!(ran.err.contains("leads out of the folder") || ran.out.contains("leads out"), "{ran:#?}");
}

/// `kiln bench --against pytorch` runs the comparison of the checkout that it was built from, or of one that is named.
/// Wherever Python looks for modules: one of the working directory is somebody's file.
#[test]
fn no_module_of_the_working_directory_is_run_for_a_comparison() {
    let dir = tempdir().unwrap();
    let ran = dir.path().join("ran");
    let planted = format!("open({:?}, 'a').write('x')\n", text(&ran));
    ["torch.py", "json.py", "sitecustomize.py"].iter().for_each(|name| fs::write(dir.path().join(name), &planted).unwrap());
    for path in [None, Some(""), Some(":/nowhere"), Some(".")] {
        let mut c = command(["bench", "hydra"].iter().chain(SMALL).chain(&["--device", "cpu", "--against", "pytorch"]));
        c.current_dir(dir.path()).env_remove("VIRTUAL_ENV").env_remove("PYTHONPATH");
        c.envs(path.map(|path| ("PYTHONPATH", path)));
        finish(c).fails(&["--against pytorch"]);
        assert!(!ran.exists(), "PYTHONPATH={path:?}");
    }
}

#[test]
fn the_comparison_with_pytorch_is_nobody_elses() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (bin, work) = (at("bin"), at("work/deep"));
    [&bin, &work, &at("work/peers"), &at("named/peers"), &at("work/deep/peers")]
        .iter()
        .for_each(|folder| fs::create_dir_all(folder).unwrap());
    for folder in ["work", "work/deep", "named"] {
        fs::write(at(folder).join("peers/compare.py"), "planted").unwrap();
    }
    // A Python that says it has a GPU, and notes what it is asked to run.
    let python = format!("#!/bin/sh\nif [ \"$1\" = -c ]; then echo cuda; else echo \"$1\" >> {}; echo '[]'; fi\n", at("ran").display());
    fs::write(bin.join("python3"), python).unwrap();
    fs::set_permissions(bin.join("python3"), fs::Permissions::from_mode(0o755)).unwrap();
    let ran = |more: &[&str]| {
        let _ = fs::remove_file(at("ran"));
        let mut c = command(["bench", "hydra"].iter().chain(SMALL).chain(&["--device", "cpu", "--against", "pytorch"]).chain(more));
        c.current_dir(&work).env("PATH", &bin).env_remove("VIRTUAL_ENV");
        let said = finish(c);
        (fs::read_to_string(at("ran")).unwrap_or_default(), said)
    };
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("peers/compare.py");
    let (script, said) = ran(&[]);
    match engine::cuda::trusted(&own, &[]) {
        Ok(()) => {
            assert_eq!(script.trim(), text(&own));
            said.fails(&["no peer has this step"]);
        }
        // Where others can write to the checkout.
        Err(_) => {
            assert_eq!(script, "");
            said.fails(&["--against pytorch", "--peers FOLDER"]);
        }
    }
    let named = at("named");
    assert_eq!(ran(&["--peers", named.to_str().unwrap()]).0.trim(), text(&named.join("peers/compare.py")));
    let (script, said) = ran(&["--peers", dir.path().to_str().unwrap()]);
    assert_eq!(script, "");
    said.fails(&["there is no", "name a checkout of kiln with --peers FOLDER"]);
}

/// A library in a folder of LD_LIBRARY_PATH that others can write to is never opened, also where one that may be is found first.
#[test]
fn a_planted_library_is_not_run() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    [at("own"), at("open")].iter().for_each(|folder| fs::create_dir(folder).unwrap());
    // Its initializer leaves a note. Without a compiler the engine's own test of the loader has to do.
    fs::write(
        at("planted.c"),
        format!(
            "#include <stdio.h>\n__attribute__((constructor)) static void f(void) {{ fclose(fopen(\"{}\", \"a\")); }}\n",
            at("ran").display()
        ),
    )
    .unwrap();
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(at("planted.so")).arg(at("planted.c")).status();
    if !compiled.is_ok_and(|s| s.success()) {
        return crate::without::without("cc", "a planted library");
    }
    let place = |folder: &str| {
        for name in
            ["libcuda.so", "libcuda.so.1", "libnvrtc.so", "libnvrtc.so.13", "libcublasLt.so", "libnvidia-ml.so.1", "libmpi_abi.so.1"]
        {
            fs::copy(at("planted.so"), at(folder).join(name)).unwrap();
        }
    };
    place("own");
    place("open");
    let ran = |path: String, cwd: &str| {
        let _ = fs::remove_file(at("ran"));
        let mut c = command(["doctor"]);
        c.env("LD_LIBRARY_PATH", path).current_dir(at(cwd));
        let said = finish(c);
        assert!(!said.panicked(), "{said:#?}");
        (at("ran").exists(), said)
    };
    let [own, open] = ["own", "open"].map(|name| text(&at(name)));
    assert!(ran(own.clone(), "own").0, "one that may be loaded is: the note works");
    fs::set_permissions(at("open"), fs::Permissions::from_mode(0o777)).unwrap();
    for path in [open.clone(), format!("/no/such:{open}"), format!("{open}:/no/such"), format!("/no/such;{open}")] {
        let (is_run, said) = ran(path.clone(), "own");
        assert!(!is_run, "{path}: {said:#?}");
        assert!(format!("{}{}", said.out, said.err).contains("everybody may write to it"), "{path}: {said:#?}");
    }
    for path in [":", "/no/such:", ".", "../open", "/no/such:../open"] {
        assert!(!ran(path.into(), "open").0, "{path}");
    }
}
