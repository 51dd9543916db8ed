//! Blocks of the pages that are marked `sh no-run` name models, data and machines of the reader's own. Their commands run here with small stand-ins in
//! those places: a folder of a model with a real tokenizer, conversations, a book, pictures. A training takes one step; one of a large model, on GPUs or
//! by several ranks is planned. What cannot run at all is in a list, with the reason.

use super::chats::{CHATML, conversations, lines, model};
use super::common::Ran;
use super::docs::{blocks, pages, read};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use tempfile::tempdir;

/// What is not run: how such a line begins, and why. Each must be there.
const NOT_RUN: &[(&str, &str)] = &[
    ("cargo ", "builds kiln, or an example that a test of its own runs"),
    ("git clone ", "fetches this repository"),
    ("pip ", "installs packages"),
    ("maturin ", "builds a wheel"),
    ("ssh ", "needs another machine"),
    ("hf ", "downloads a model"),
];

/// Of which only the arguments are read: how such a line begins, and why. Each must be there.
const READ: &[(&str, &str)] = &[
    ("kiln watch", "serves until it is stopped: a test of its own asks it"),
    ("kiln check ", "takes minutes, a GPU, g++ or NVRTC: tests of their own run each; `kiln check model` is run here"),
    ("kiln bench ops ", "plans every op"),
    ("kiln profile runs/a", "goes on with a run"),
    ("kiln eval runs/sudoku ", "asks a run that is planned here"),
    ("kiln eval runs/cifar --best --split test", "asks a run that is planned here"),
    ("kiln train polychromic --out runs/p && ", "trains a base first, a minute long"),
    ("kiln train --out runs/a --resume --ranks 2", "goes on with a run of several ranks"),
    ("kiln train --out runs/book --resume --data data/moved", "goes on with the run of a block that is run"),
];

/// Of those, what is run after all.
const RUN: &str = "kiln check model ";

/// The commands of a page's blocks that are not run as they are, without their comments.
fn commands(page: &str) -> Vec<String> {
    let own = blocks(page).into_iter().filter(|(tag, _)| *tag == "sh no-run");
    let all = own.flat_map(|(_, text)| text.lines()).map(|line| line.split(" #").next().unwrap_or_default().trim());
    all.filter(|line| !line.is_empty()).map(String::from).collect()
}

/// A line without these options and the words that follow each.
fn without(line: &str, options: &[(&str, usize)]) -> String {
    let (mut words, mut kept) = (line.split(' '), vec![]);
    while let Some(word) = words.next() {
        match options.iter().find(|o| o.0 == word) {
            Some((_, more)) => {
                words.by_ref().take(*more).for_each(|_| {});
            }
            None => kept.push(word),
        }
    }
    kept.join(" ")
}

/// The line that runs here in its place.
fn here(line: &str) -> String {
    let is_launched = ["torchrun ", "mpiexec ", "srun "].iter().any(|launcher| line.starts_with(launcher));
    let line = if is_launched { &line[line.find("kiln ").unwrap_or(0)..] } else { line };
    if READ.iter().any(|(begin, _)| line.starts_with(begin)) && !line.starts_with(RUN) {
        return line.replace(" && ", " --help && ") + " --help";
    }
    if let Some(script) = line.strip_prefix("bench/") {
        let script = script.split(' ').next().unwrap_or_default();
        return format!("sh -n {}/../bench/{script}", env!("CARGO_MANIFEST_DIR"));
    }
    const ELSEWHERE: &[(&str, usize)] = &[("--out", 1), ("--device", 1), ("--ncu", 0), ("--ledger", 0)];
    if let Some(rest) = line.strip_prefix("kiln profile ") {
        return format!("kiln plan {} --for-sm 90", without(rest, &[ELSEWHERE, &[("--steps", 1)]].concat()));
    }
    if line.starts_with("kiln bench ") && !line.contains("--picture") {
        return format!("{} --fingerprint", without(line, ELSEWHERE));
    }
    let Some(rest) = line.strip_prefix("kiln train") else { return line.into() };
    let large = is_launched
        || line.contains("--preset ") && !line.contains("--base ")
        || line.contains("--device cuda")
        || line.contains("--ranks ");
    if large { format!("kiln plan{} --for-sm 90", without(rest, ELSEWHERE)) } else { format!("{line} --steps 1 --threads 1") }
}

/// Makes what a line names and is not there.
fn stand_in(dir: &Path, base: &Path, name: &str) {
    let path = dir.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let pairs =
        |n: usize| (0..n).map(|i| json!({ "prompt": format!("What is {i}?"), "reply": format!("A number, {i}.") })).collect::<Vec<_>>();
    let text = |n: usize| (0..n).map(|i| format!("Line {i} of a text that goes on.\n\n")).collect::<String>();
    let rows: Vec<Value> = (0..40).map(|i| json!({ "body": format!("Document {i}.") })).collect();
    match name {
        "models/qwen2.5-0.5b" | "models/qwen3-0.6b" | "models/mine" => super::common::copy(base, &path),
        "chats.jsonl" => fs::write(path, lines(&conversations())).unwrap(),
        "chat.jsonl" | "first.jsonl" | "second.jsonl" => fs::write(path, lines(&pairs(40))).unwrap(),
        "'more/*.jsonl'" => {
            fs::create_dir_all(dir.join("more")).unwrap();
            fs::write(dir.join("more/third.jsonl"), lines(&pairs(40))).unwrap();
        }
        "questions.jsonl" => {
            fs::write(path, lines(&[json!({ "prompt": "What is 3?" }), json!({ "messages": [{ "role": "user", "content": "And 4?" }] })]))
                .unwrap()
        }
        "chats.parquet" => parquet(&path, &["prompt", "reply"], &pairs(40)),
        "a.jsonl" => fs::write(path, lines(&rows)).unwrap(),
        "b.jsonl.gz" => {
            let mut gzip = flate2::write::GzEncoder::new(fs::File::create(path).unwrap(), flate2::Compression::fast());
            std::io::Write::write_all(&mut gzip, lines(&rows).as_bytes()).unwrap();
            gzip.finish().unwrap();
        }
        "c.parquet" => parquet(&path, &["body"], &rows),
        "tokenizer.json" => drop(fs::copy(base.join("tokenizer.json"), path).unwrap()),
        "book.txt" => fs::write(path, text(400)).unwrap(),
        "data/book" | "data/books" => {
            fs::write(dir.join("stand-in.txt"), text(2000)).unwrap();
            let (from, out) = (super::common::text(&dir.join("stand-in.txt")), super::common::text(&path));
            super::common::kiln(["data", "prepare", &from, "--out", &out]).ok();
        }
        "photos" => super::newcomer::pictures(&path, 32, 12),
        "data/cifar-10-batches-bin" => super::images::cifar_10(&path),
        "picture.png" | "photo.jpg" => image::RgbImage::from_fn(40, 30, |x, y| image::Rgb([x as u8, y as u8, 7])).save(path).unwrap(),
        "puzzles.csv" => fs::write(path, sudokus()).unwrap(),
        "bench/ledger" => super::common::copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/ledger"), &path),
        _ => {}
    }
}

/// Grids that lack some cells, which have one answer each.
fn sudokus() -> String {
    let row = |shift: usize| (0..81).map(move |i| ((i / 9 * 3 + i / 27 + i % 9 + shift) % 9 + 1).to_string()).collect::<String>();
    let puzzle = |shift: usize| {
        let (answer, hole) = (row(shift), shift * 7 % 81);
        format!("{}.{},{answer}\n", &answer[..hole], &answer[hole + 1..])
    };
    format!("question,answer\n{}", (0..9).map(puzzle).collect::<String>())
}

pub fn parquet(path: &Path, columns: &[&str], rows: &[Value]) {
    use parquet::data_type::{ByteArray, ByteArrayType};
    let fields: String = columns.iter().map(|name| format!("required binary {name} (UTF8); ")).collect();
    let schema = parquet::schema::parser::parse_message_type(&format!("message m {{ {fields} }}")).unwrap();
    let file = fs::File::create(path).unwrap();
    let mut writer = parquet::file::writer::SerializedFileWriter::new(file, schema.into(), Default::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for name in columns {
        let texts: Vec<ByteArray> = rows.iter().map(|row| ByteArray::from(row[*name].as_str().unwrap())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

/// Whether a line is not run. What is noted is which entries of the lists are there.
fn is_listed(line: &str, used: &mut [bool]) -> bool {
    let entries = NOT_RUN.iter().chain(READ);
    let found = entries.enumerate().find(|(_, (begin, _))| line.starts_with(begin)).filter(|_| !line.starts_with(RUN)).map(|(i, _)| i);
    found.into_iter().for_each(|i| used[i] = true);
    found.is_some_and(|i| i < NOT_RUN.len())
}

/// Runs a page's commands one after another in a folder; of those that fail, what they said.
fn run_page(page: &str, lines: &[String], base: &Path) -> Vec<String> {
    let dir = tempdir().unwrap();
    let (bin, work) = (dir.path().join("bin"), dir.path().join("here"));
    [&bin, &work].iter().for_each(|folder| fs::create_dir(folder).unwrap());
    symlink(env!("CARGO_BIN_EXE_kiln"), bin.join("kiln")).unwrap();
    let mut failed = vec![];
    for line in lines {
        let now = here(line);
        // What it writes is its own.
        let words: Vec<&str> = line.split([' ', '=']).collect();
        let named = (0..words.len()).filter(|&i| i == 0 || words[i - 1] != "--out").map(|i| words[i]);
        named.filter(|name| !work.join(name).exists()).for_each(|name| stand_in(&work, base, name));
        let mut sh = Command::new("sh");
        sh.args(["-euc", &now]).current_dir(&work).env("CUDA_VISIBLE_DEVICES", "").env("XDG_CACHE_HOME", dir.path().join("cache"));
        sh.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap())).stdin(std::process::Stdio::null());
        let ran = Ran::new(line.clone(), sh.output().unwrap());
        if ran.code != Some(0) || ran.panicked() {
            failed.push(format!("{page}: {line}\n  as: {now}\n  exit {:?}\n  {}", ran.code, ran.err.trim()));
        }
    }
    failed
}

#[test]
fn commands_that_name_files_of_ones_own_run_with_stand_ins() {
    let dir = tempdir().unwrap();
    let base = dir.path().join("base");
    model(&base, CHATML);
    // Rows of the pages are longer than those that this model was trained on.
    let config = base.join("config.json");
    let mut table: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    table["max_position_embeddings"] = 4096.into();
    fs::write(&config, table.to_string()).unwrap();
    let mut used = vec![false; NOT_RUN.len() + READ.len()];
    let all: Vec<(String, Vec<String>)> = pages()
        .into_iter()
        .map(|page| {
            let own = commands(&read(&page)).into_iter().filter(|line| !is_listed(line, &mut used)).collect();
            (page, own)
        })
        .collect();
    assert!(all.iter().map(|(_, own)| own.len()).sum::<usize>() > 30, "{all:#?}");
    let unused: Vec<&str> = NOT_RUN.iter().chain(READ).zip(&used).filter(|(_, used)| !**used).map(|(entry, _)| entry.0).collect();
    assert!(unused.is_empty(), "no page has these any more: {unused:?}");
    let left = Arc::new(Mutex::new(all.into_iter()));
    let run = || {
        let next = || left.lock().unwrap().next();
        std::iter::from_fn(next).flat_map(|(page, own)| run_page(&page, &own, &base)).collect::<Vec<_>>()
    };
    let failed = std::thread::scope(|s| {
        let other = s.spawn(run);
        [run(), other.join().unwrap()].concat()
    });
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn a_new_command_is_decided_about() {
    let page = "```sh no-run\nkiln train decoder --base models/x --no-such-flag   # a comment\npip install x\nkiln train hydra --preset 100m --device cuda --out runs/g\n```\n";
    let all = commands(page);
    assert_eq!(all.len(), 3);
    let mut used = vec![false; NOT_RUN.len() + READ.len()];
    assert_eq!(all.iter().map(|line| is_listed(line, &mut used)).collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(here(&all[2]), "kiln plan hydra --preset 100m --for-sm 90");
    assert_eq!(here("kiln generate runs/c --chat"), "kiln generate runs/c --chat");
    assert_eq!(here("torchrun --nproc-per-node 4 kiln train decoder --device cuda --out runs/a"), "kiln plan decoder --for-sm 90");
    assert_eq!(here("kiln bench hydra --preset 100m --device cuda --ledger"), "kiln bench hydra --preset 100m --fingerprint");
    assert_eq!(here("kiln profile decoder --steps 10 --device cuda --set batch=64"), "kiln plan decoder --set batch=64 --for-sm 90");
    assert_eq!(here("kiln watch --port 0"), "kiln watch --port 0 --help");
    let dir = tempdir().unwrap();
    let wrong = [all[0].clone(), "kiln bench hydra --no-such-flag --device cuda".into(), "kiln watch --no-such-flag".into()];
    let failed = run_page("a page", &wrong, dir.path());
    assert!(failed.len() == 3 && failed.iter().all(|f| f.contains("--no-such-flag")), "{failed:?}");
}
