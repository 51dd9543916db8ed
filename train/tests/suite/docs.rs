//! The pages: what is generated is current, links lead somewhere, and the commands in them run.
//!
//! With KILN_WRITE_DOCS in the environment, generated parts are written instead of compared: `cargo xtask docs`.

use crate::common::{Ran, command, kiln};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;
use tempfile::tempdir;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().into()
}

pub fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// README.md and docs/*.md, whose commands are run, by their paths in the repository.
pub fn pages() -> Vec<String> {
    let names = crate::common::names(&root().join("docs"));
    let pages: Vec<String> = names.iter().filter(|n| n.ends_with(".md")).map(|n| format!("docs/{n}")).collect();
    assert!(pages.len() > 10, "{pages:?}");
    ["README.md".to_string()].into_iter().chain(pages).collect()
}

#[track_caller]
pub fn is_current(page: &str, expected: &str) {
    if std::env::var_os("KILN_WRITE_DOCS").is_some() {
        fs::write(root().join(page), expected).unwrap();
    }
    assert!(expected == read(page), "{page} is not what kiln prints now: cargo xtask docs");
}

#[test]
fn generated_pages_are_current() {
    is_current("docs/config.md", &kiln(["config", "--markdown"]).ok().out);
    is_current("docs/passes.md", &kiln(["passes", "--markdown"]).ok().out);
}

/// The table that a run prints at its start, up to its peak memory.
#[test]
fn the_receipts_in_the_readme_are_current() {
    let page = read("README.md");
    let (before, rest) = page.split_once("<!-- begin: kiln ").expect("the README has a block to fill");
    let (line, rest) = rest.split_once(" (rewritten by `cargo xtask docs`) -->\n").expect("the block says its command");
    let (_, after) = rest.split_once("<!-- end -->").expect("the block ends");
    let dir = tempdir().unwrap();
    let ran = command(line.split(' ')).current_dir(dir.path()).output().unwrap();
    let out = String::from_utf8(ran.stdout).unwrap();
    assert!(ran.status.success(), "{out}{}", String::from_utf8_lossy(&ran.stderr));
    let end = out.find("\npeak ").map(|at| at + 1 + out[at + 1..].find('\n').unwrap() + 1).expect("a run says its peak");
    let block = format!("<!-- begin: kiln {line} (rewritten by `cargo xtask docs`) -->\n```\n{}```\n<!-- end -->", &out[..end]);
    is_current("README.md", &format!("{before}{block}{after}"));
}

/// Every table is what the command in front of it prints.
#[test]
fn the_tables_of_scaling_are_current() {
    let page = read("docs/scaling.md");
    let (first, blocks) = page.split_once("<!-- begin: kiln ").expect("the page has blocks to fill");
    let mut expected = first.to_string();
    for block in blocks.split("<!-- begin: kiln ") {
        let (line, rest) = block.split_once(" (rewritten by `cargo xtask docs`) -->\n").expect("the block says its command");
        let (_, after) = rest.split_once("<!-- end -->").expect("the block ends");
        let out = kiln(line.split(' ')).ok().out;
        expected +=
            &format!("<!-- begin: kiln {line} (rewritten by `cargo xtask docs`) -->\n```\n{}\n```\n<!-- end -->{after}", out.trim_end());
    }
    is_current("docs/scaling.md", &expected);
}

/// The fenced blocks of a page: (what follows the fence, the text).
pub fn blocks(page: &str) -> Vec<(&str, &str)> {
    let inside = page.split("```").skip(1).step_by(2);
    inside.map(|b| b.split_once('\n').unwrap_or((b, ""))).collect()
}

/// Runs the `sh` blocks of a page as one script, each in the place that the one before left.
fn run_page(path: &str, page: &str) -> Option<String> {
    let script: String = blocks(page).iter().filter(|(tag, _)| ["sh", "console"].contains(tag)).map(|(_, text)| *text).collect();
    if script.is_empty() {
        return None;
    }
    let dir = tempdir().unwrap();
    let bin = dir.path().join("bin");
    fs::create_dir(&bin).unwrap();
    symlink(env!("CARGO_BIN_EXE_kiln"), bin.join("kiln")).unwrap();
    let here = dir.path().join("here");
    fs::create_dir(&here).unwrap();
    let mut sh = Command::new("sh");
    sh.args(["-euxc", &script]).current_dir(&here).env("CUDA_VISIBLE_DEVICES", "").env("XDG_CACHE_HOME", dir.path().join("cache"));
    sh.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()));
    let started = Instant::now();
    let ran = Ran::new(path.into(), sh.output().unwrap());
    println!("{path}: {:.1} s", started.elapsed().as_secs_f64());
    // With -x, stderr has the commands: the last is the one that failed.
    (ran.code != Some(0) || ran.panicked()).then(|| format!("{path}: exit {:?}\n{}", ran.code, ran.err))
}

/// Blocks marked `sh no-run` need minutes, a GPU or files of one's own. See `stand_ins.rs`.
#[test]
fn the_commands_of_every_page_run() {
    let left = Mutex::new(pages().into_iter());
    let next = || left.lock().unwrap().next();
    let run = || std::iter::from_fn(next).filter_map(|path| run_page(&path, &read(&path))).collect::<Vec<_>>();
    let failed = std::thread::scope(|s| {
        let other = s.spawn(run);
        [run(), other.join().unwrap()].concat()
    });
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn a_command_that_fails_is_found() {
    let failed = run_page("a page", "```sh\nkiln recipes\nkiln plan --no-such-flag\nkiln recipes\n```\n").unwrap();
    assert!(failed.contains("a page: exit Some(2)") && failed.contains("--no-such-flag"), "{failed}");
    assert_eq!(run_page("a page", "```sh\nkiln recipes\n```\n```sh no-run\nkiln plan --no-such-flag\n```\n"), None);
}

/// What a link to a heading says: lower case, without punctuation, spaces as dashes.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    kept.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn anchors(page: &str) -> Vec<String> {
    page.lines().filter(|l| l.starts_with('#')).map(|l| anchor(l.trim_start_matches('#'))).collect()
}

/// `[text](target)` and `src="target"`, outside of fenced blocks.
fn links(page: &str) -> Vec<&str> {
    let outside = page.split("```").step_by(2);
    let ends = [("](", ')'), ("src=\"", '"')];
    outside
        .flat_map(|part| ends.into_iter().flat_map(move |(from, to)| part.split(from).skip(1).filter_map(move |l| l.split(to).next())))
        .collect()
}

#[test]
fn links_lead_to_files_and_headings_that_are_there() {
    let others = ["ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "STYLE.md", "CUDA.md"].map(String::from);
    let mut seen = 0;
    for path in pages().into_iter().chain(others) {
        let page = read(&path);
        for link in links(&page).into_iter().filter(|l| !l.contains("://")) {
            seen += 1;
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { root().join(&path) } else { root().join(&path).parent().unwrap().join(file) };
            assert!(target.exists(), "{path}: there is no {link}");
            if !heading.is_empty() {
                let headings = anchors(&fs::read_to_string(&target).unwrap());
                assert!(headings.iter().any(|h| h == heading), "{path}: {link}: no such heading; there are {headings:?}");
            }
        }
    }
    assert!(seen > 60, "{seen} links");
    assert_eq!(anchor(" How it's made, and why"), "how-its-made-and-why");
}

#[test]
fn lines_are_short_enough_to_read() {
    for path in pages() {
        for (i, line) in read(&path).lines().enumerate() {
            let length = line.chars().count();
            assert!(length <= 240, "{path}:{}: {length} characters", i + 1);
        }
    }
}
