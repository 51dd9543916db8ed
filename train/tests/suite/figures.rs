//! The figures against PyTorch: README's table is made of bench/results.csv, and says which of its rows are of code that has changed since.

use crate::common::{Ran, kiln};
use crate::docs::{is_current, read};
use crate::without::without;
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// The fields of a line of CSV; quotes hold commas.
fn fields(line: &str) -> Vec<String> {
    let (mut all, mut quoted) = (vec![String::new()], false);
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => all.push(String::new()),
            c => all.last_mut().unwrap().push(c),
        }
    }
    all
}

/// A line of bench/results.csv, by column.
type Line = HashMap<String, String>;

fn results(text: &str) -> Vec<Line> {
    let mut lines = text.lines();
    let header = fields(lines.next().unwrap());
    let line = |(i, line): (usize, &str)| {
        let f = fields(line);
        assert_eq!(f.len(), header.len(), "line {} of bench/results.csv: {line}", i + 2);
        header.iter().cloned().zip(f).collect()
    };
    lines.enumerate().map(line).collect()
}

/// A row of bench/rows.toml.
#[derive(serde::Deserialize)]
struct Row {
    name: String,
    kiln: String,
    is: String,
    unit: String,
}

fn rows() -> Vec<Row> {
    #[derive(serde::Deserialize)]
    struct File {
        row: Vec<Row>,
    }
    toml::from_str::<File>(&read("bench/rows.toml")).unwrap().row
}

/// What kiln runs for a row, planned here for a GPU that is not here.
fn fingerprint(row: &Row) -> String {
    let args = ["bench".to_string()].into_iter().chain(words(&row.kiln)).chain(["--pass", "bf16=auto", "--fingerprint"].map(String::from));
    kiln(args).ok().out.trim().to_string()
}

/// A command line's words; quotes hold spaces.
fn words(line: &str) -> Vec<String> {
    let parts = line.split('\'').enumerate();
    let all = parts.flat_map(|(i, part)| if i % 2 == 1 { vec![part] } else { part.split_whitespace().collect() });
    all.map(String::from).collect()
}

/// `709,994` and `7.92`, as bench/results.csv has it.
fn grouped(number: &str) -> String {
    let (whole, rest) = number.split_once('.').map_or((number, String::new()), |(w, r)| (w, format!(".{r}")));
    let digits = whole.len();
    let with_commas: String = whole
        .chars()
        .enumerate()
        .flat_map(|(i, c)| [(i > 0 && (digits - i).is_multiple_of(3)).then_some(','), Some(c)])
        .flatten()
        .collect();
    with_commas + &rest
}

/// What stands behind a figure of code that has changed since.
const EARLIER: &str = " \\*";

/// A row's newest figures against one opponent, and kiln's plan of the row today.
#[derive(Clone, Copy)]
struct Against<'a> {
    at: usize,
    line: &'a Line,
    now: &'a str,
}

impl<'a> Against<'a> {
    fn newest(results: &'a [Line], row: &Row, who: &str, now: &'a str) -> Option<Against<'a>> {
        let what = format!("{}: {}, {}", row.name, row.is, row.unit);
        let at = results.iter().rposition(|f| f["what"] == what && f["opponent"] == who)?;
        Some(Against { at, line: &results[at], now })
    }

    fn mark(&self) -> &'static str {
        if self.line["fingerprint"] == self.now { "" } else { EARLIER }
    }

    /// `537,048 (1.32x; 1.30 to 1.34)`
    fn shown(&self) -> String {
        let f = self.line;
        let range = if f["low"].is_empty() { String::new() } else { format!("; {} to {}", f["low"], f["high"]) };
        format!("{} ({}x{range}){}", grouped(&f["peer"]), f["ratio"], self.mark())
    }

    fn gib(&self, key: &str) -> Option<String> {
        Some(self.line[key].clone()).filter(|v| !v.is_empty())
    }

    /// `2026-11-16 1f112b9`
    fn measured(&self) -> String {
        [&self.line["date"], &self.line["commit"]].into_iter().filter(|t| !t.is_empty()).cloned().collect::<Vec<_>>().join(" ")
    }
}

/// README's table. `now`: what kiln runs for each row today. Both opponents' figures are of calls of their own, so each has its own mark and date.
fn table(rows: &[Row], results: &[Line], now: &[String]) -> String {
    let mut lines = vec![
        "| row | a step is | kiln | usual PyTorch | expert's PyTorch | GiB: kiln, usual, expert | measured |".to_string(),
        "|---|---|---|---|---|---|---|".to_string(),
    ];
    let mut earlier = 0;
    for (row, now) in rows.iter().zip(now) {
        let both @ [usual, expert] = ["usual", "expert"].map(|who| Against::newest(results, row, who, now));
        let there: Vec<Against> = both.into_iter().flatten().collect();
        let Some(last) = there.iter().max_by_key(|a| a.at) else {
            lines.push(format!("| {} | {} | not measured yet | - | - | - | - |", row.name, row.is));
            continue;
        };
        earlier += usize::from(there.iter().any(|a| !a.mark().is_empty()));
        let shown = |a: Option<Against>| a.map_or("-".into(), |a| a.shown());
        let memory = [last.gib("kiln_gib"), usual.and_then(|a| a.gib("peer_gib")), expert.and_then(|a| a.gib("peer_gib"))];
        let memory = memory.map(|v| v.unwrap_or("-".into())).join(", ");
        let mut measured: Vec<String> = there.iter().map(Against::measured).collect();
        measured.dedup();
        let kiln = format!("{} {}{}", grouped(&last.line["kiln"]), row.unit, last.mark());
        let cells = [row.name.clone(), row.is.clone(), kiln, shown(usual), shown(expert), memory, measured.join(", ")];
        lines.push(format!("| {} |", cells.join(" | ")));
    }
    if earlier > 0 {
        lines.push(format!(
            "\n\\* Measured at an earlier commit: kiln's plan of the step has changed since ({earlier} of {} rows). `bench/all.sh` measures them again.",
            rows.len()
        ));
    }
    lines.join("\n")
}

const BEGIN: &str = "<!-- begin: bench/results.csv (rewritten by `cargo xtask docs`) -->\n";

/// Every row is also parsed and planned here, without a GPU.
#[test]
fn the_table_against_pytorch_is_that_of_the_results() {
    let rows = rows();
    let now: Vec<String> = std::thread::scope(|s| {
        let (a, b) = rows.split_at(rows.len() / 2);
        let other = s.spawn(|| b.iter().map(fingerprint).collect::<Vec<_>>());
        a.iter().map(fingerprint).chain(other.join().unwrap()).collect()
    });
    assert!(now.iter().all(|f| f.len() == 16 && f.chars().all(|c| c.is_ascii_hexdigit())), "{now:?}");
    let page = read("README.md");
    is_current("README.md", &with_table(&page, &table(&rows, &results(&read("bench/results.csv")), &now)));
}

/// A page with this table in its block.
fn with_table(page: &str, table: &str) -> String {
    let (before, rest) = page.split_once(BEGIN).expect("the README has a block for its table");
    let (_, after) = rest.split_once("<!-- end -->").expect("the block ends");
    format!("{before}{BEGIN}{table}\n<!-- end -->{after}")
}

#[test]
fn every_ratio_of_the_results_is_that_of_its_figures() {
    let mut seen = 0;
    for (i, f) in results(&read("bench/results.csv")).iter().enumerate().filter(|(_, f)| ["usual", "expert"].contains(&&*f["opponent"])) {
        let number = |key: &str| f[key].parse::<f64>().unwrap_or_else(|_| panic!("line {}: {key} is '{}'", i + 2, f[key]));
        let (kiln, peer, ratio) = (number("kiln"), number("peer"), number("ratio"));
        let own = if f["what"].ends_with(", ms") { peer / kiln } else { kiln / peer };
        // The median of ratios is not quite the ratio of medians.
        assert!((own - ratio).abs() <= 0.02 * ratio, "line {} of bench/results.csv: {kiln} and {peer} are not {ratio}", i + 2);
        if !f["low"].is_empty() {
            assert!(
                number("low") <= ratio && ratio <= number("high"),
                "line {} of bench/results.csv: {ratio} is outside of its rounds",
                i + 2
            );
        }
        seen += 1;
    }
    assert!(seen > 20, "{seen}");
}

/// Sentences of the pages with figures that stand in results.csv. `{what|column}` is that column of the newest line whose `what` begins so; `|1` behind it: with so
/// many decimals; `|%`: what it is above 1, in percent.
const SENTENCES: &[(&str, &str)] = &[
    (
        "README.md",
        "With FP8 (`--pass fp8=auto,sums=fast`) Qwen2.5-1.5B trains at {qwen2.5-1.5b in FP8 against bf16|kiln} tok/s, {qwen2.5-1.5b in FP8 against bf16|ratio}x of the expert's bf16",
    ),
    (
        "README.md",
        "Mamba-2's scan takes {Mamba-2's scan against mamba-ssm, bf16, 1 x 65536 tokens, forward|kiln|2} ms forward and {Mamba-2's scan against mamba-ssm, bf16, 1 x 65536 tokens, backward|kiln|2} ms backward",
    ),
    (
        "README.md",
        "take {Mamba-2's scan against mamba-ssm, bf16, 1 x 65536 tokens, forward|peer|2} and {Mamba-2's scan against mamba-ssm, bf16, 1 x 65536 tokens, backward|peer|2}",
    ),
    (
        "docs/precision.md",
        "over kiln's own bf16: {qwen2.5-1.5b: fp8 against kiln's|ratio}x for Qwen2.5-1.5B, {qwen2.5-0.5b: fp8 against kiln's|ratio}x for 0.5B, {gpt2-124m: fp8 against kiln's|ratio}x for GPT-2 124M",
    ),
    ("docs/gpu.md", "| hydra 100m | 716K tok/s | {hydra 100m as typed|kiln} ms | {hydra 100m as typed|peer} (`recompute=off`)"),
    (
        "docs/gpu.md",
        "| {polychromic qwen3-0.6b as typed|kiln} ms | {polychromic qwen3-0.6b as typed|peer} (`recompute=off`, in another call)",
    ),
    ("docs/gpu.md", "the speed of the eager reference and takes {hydra small fp32, peak resident MiB|ratio} of its memory"),
    ("docs/gpu.md", "runs at {hydra small fp32, tok/s|ratio} times the speed"),
    (
        "docs/measuring.md",
        "of the loss's memory 78% less ({loss MiB, against linear-ce=off|peer} -> {loss MiB, against linear-ce=off|kiln} MiB, vocabulary 50,304, on a CPU)",
    ),
    ("docs/measuring.md", "{qwen2.5-1.5b: fp8 against kiln's|ratio} to {qwen2.5-1.5b: fp8 sums=fast|ratio}x (1.5B parameters)"),
    (
        "docs/measuring.md",
        "1.16x and {hydra 100m, 4 x 1024 tokens, times as fast with cuda-graph as without, second call|ratio}x in two calls at a small batch",
    ),
    (
        "docs/measuring.md",
        "({qwen2.5-1.5b, recompute=blocks, planned peak in GiB|peer} -> {qwen2.5-1.5b, recompute=blocks, planned peak in GiB|kiln} GiB) for {qwen2.5-1.5b, recompute=blocks, ms a step|ratio|%}% more time",
    ),
    ("docs/measuring.md", "a quarter of its memory ({qwen2.5-1.5b, adam8bit, GB|peer} -> {qwen2.5-1.5b, adam8bit, GB|kiln} GB)"),
    (
        "docs/measuring.md",
        "hrm 13%, four other recipes {polychromic qwen3-0.6b, tf32|ratio|%} to {hydra 100m, 1 x 1024 tokens, tf32|ratio|%}%",
    ),
];

/// A sentence with the figures of the results.
fn filled(sentence: &str, results: &[Line]) -> String {
    let (first, places) = sentence.split_once('{').map_or((sentence, None), |(first, rest)| (first, Some(rest)));
    let place = |place: &str| {
        let (inside, after) = place.split_once('}').expect("a place ends");
        let parts: Vec<&str> = inside.split('|').collect();
        let found = results.iter().rev().find(|f| f["what"].starts_with(parts[0]));
        let text = &found.unwrap_or_else(|| panic!("results.csv has no '{}'", parts[0]))[parts[1]];
        let number = || text.parse::<f64>().unwrap_or_else(|_| panic!("'{}': {} is '{text}'", parts[0], parts[1]));
        let shown = match parts.get(2) {
            None => grouped(text),
            Some(&"%") => format!("{:.0}", 100.0 * (number() - 1.0)),
            Some(decimals) => format!("{:.*}", decimals.parse().unwrap(), number()),
        };
        shown + after
    };
    first.to_string() + &places.into_iter().flat_map(|rest| rest.split('{')).map(place).collect::<String>()
}

/// What a page lacks of its sentences. Lines may end anywhere.
fn not_said(name: &str, page: &str, results: &[Line]) -> Vec<String> {
    let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
    let own = SENTENCES.iter().filter(|(of, _)| *of == name).map(|(_, sentence)| filled(sentence, results));
    own.filter(|sentence| !page.contains(sentence)).map(|sentence| format!("{name} does not say '{sentence}'")).collect()
}

/// Figures of speed in a page's prose, which is what no block generates: numbers before `tok/s`, `ms` and `x`.
fn figures(prose: &str) -> Vec<&str> {
    let words: Vec<&str> = prose.split_whitespace().collect();
    let is_number = |w: &str| w.starts_with(|c: char| c.is_ascii_digit()) && w.chars().all(|c| c.is_ascii_digit() || ",.".contains(c));
    let unit = |i: usize| words.get(i + 1).is_some_and(|w| ["tok/s", "ms", "img/s"].contains(&w.trim_end_matches([',', '.', ';'])));
    let times = |w: &str| w.strip_suffix('x').is_some_and(is_number);
    let figure = |&i: &usize| is_number(words[i]) && unit(i) || times(words[i].trim_matches(['(', ')', ',', '.', ';']));
    (0..words.len()).filter(figure).map(|i| words[i]).collect()
}

#[test]
fn the_figures_in_the_pages_sentences_are_in_the_results() {
    let results = results(&read("bench/results.csv"));
    let names: std::collections::BTreeSet<&str> = SENTENCES.iter().map(|(page, _)| *page).collect();
    let wrong: Vec<String> = names.iter().flat_map(|name| not_said(name, &read(name), &results)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // README's prose has no other figure.
    let page = read("README.md");
    let prose: String = page
        .split("<!-- begin: ")
        .enumerate()
        .map(|(i, part)| if i == 0 { part } else { part.split_once("<!-- end -->").unwrap().1 })
        .collect();
    let known: String = SENTENCES.iter().filter(|(of, _)| *of == "README.md").map(|(_, s)| filled(s, &results) + " ").collect();
    let unknown: Vec<&str> = figures(&prose).into_iter().filter(|f| !known.contains(f)).collect();
    assert!(unknown.is_empty(), "of the README's figures, no sentence of SENTENCES has {unknown:?}");
    assert_eq!(figures("at 1,000 tok/s (1.45x of it), a step of 7.5 ms. In 4 rows, 2x"), ["1,000", "(1.45x", "7.5", "2x"]);
}

/// Any digit of a copy that is written by hand is found.
#[test]
fn a_figure_that_is_written_by_hand_is_found() {
    let (page, results) = (read("README.md"), results(&read("bench/results.csv")));
    assert_eq!(not_said("README.md", &page, &results), [""; 0]);
    for (figure, other) in
        [("81,437 tok/s", "82,437 tok/s"), ("1.45x", "1.54x"), ("0.64 ms", "0.46 ms"), ("1.26 and 3.55", "1.26 and 3.65")]
    {
        assert!(page.contains(figure), "the README has {figure} no more");
        assert_eq!(not_said("README.md", &page.replace(figure, other), &results).len(), 1, "{figure} -> {other}");
    }
    // A figure of the table: of a copy, with the table of the rows as they were measured.
    let rows = rows();
    let now: Vec<String> = rows
        .iter()
        .map(|row| Against::newest(&results, row, "expert", "").map_or(String::new(), |a| a.line["fingerprint"].clone()))
        .collect();
    let right = with_table(&page, &table(&rows, &results, &now));
    assert!(right.contains("| 709,994 tok/s |") && with_table(&right, &table(&rows, &results, &now)) == right);
    let edited = right.replace("709,994", "719,994");
    assert_ne!(with_table(&edited, &table(&rows, &results, &now)), edited);
}

#[test]
fn a_figure_of_other_code_is_marked_and_opponents_are_not_mixed() {
    let row = |name: &str| Row { name: name.into(), kiln: String::new(), is: "8 tokens".into(), unit: "tok/s".into() };
    let text = "date,commit,what,kiln,peer,ratio,opponent,low,high,kiln_gib,peer_gib,fingerprint\n\
        2026-01-01,abc,\"a: 8 tokens, tok/s\",1000,800,1.25,expert,1.20,1.30,1.5,2,11\n\
        2026-01-01,abc,\"a: 8 tokens, tok/s\",1000,500,2.00,usual,1.90,2.10,1.5,3,11\n\
        2026-01-02,def,\"b: 8 tokens, tok/s\",7,3.5,2.00,expert,,,,,11\n\
        2026-01-03,fed,\"a: 8 tokens, tok/s\",1200,600,2.00,usual,1.90,2.10,1.4,3,12\n";
    let made = |lines: usize, now: [&str; 3]| {
        let text: Vec<&str> = text.lines().take(lines).collect();
        table(&[row("a"), row("b"), row("c")], &results(&text.join("\n")), &now.map(String::from))
    };
    let current = made(4, ["11", "11", "11"]);
    let a = "| a | 8 tokens | 1,000 tok/s | 500 (2.00x; 1.90 to 2.10) | 800 (1.25x; 1.20 to 1.30) | 1.5, 3, 2 | 2026-01-01 abc |";
    assert!(current.contains(a), "{current}");
    assert!(
        current.ends_with(
            "| b | 8 tokens | 7 tok/s | - | 3.5 (2.00x) | -, -, - | 2026-01-02 def |\n| c | 8 tokens | not measured yet | - | - | - | - |"
        ),
        "{current}"
    );
    // The usual opponent was measured again with a plan that is today's, the expert was not.
    let mixed = made(5, ["12", "11", "11"]);
    let a = "| a | 8 tokens | 1,200 tok/s | 600 (2.00x; 1.90 to 2.10) | 800 (1.25x; 1.20 to 1.30) \\* | 1.4, 3, 2 | 2026-01-03 fed, 2026-01-01 abc |";
    assert!(mixed.contains(a) && mixed.contains("\\* Measured at an earlier commit"), "{mixed}");
    assert!(mixed.contains("(1 of 3 rows)"), "{mixed}");
    let both = made(4, ["12", "11", "11"]);
    assert!(both.contains("| 1,000 tok/s \\* | 500 (2.00x; 1.90 to 2.10) \\* |"), "{both}");
}

/// compare.py and table.py, with sides that only say times.
#[test]
fn rounds_are_fair_resume_and_find_a_slower_build() {
    let Some(python) = python() else { return without("python", "peers/compare.py, which needs Python 3.11 or later") };
    let mut c = Command::new(python);
    c.args(["-m", "unittest", "compare_test"]).current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../peers"));
    c.env("PYTHONDONTWRITEBYTECODE", "1");
    let ran = Ran::new("compare_test".into(), c.output().unwrap()).ok();
    assert!(ran.err.contains("Ran ") && ran.err.trim_end().ends_with("OK"), "{ran:#?}");
}

/// The README marks what bench/results.csv has of earlier code, and so is no pass of the strict check where there is any.
#[test]
fn what_is_of_earlier_code_passes_marked_and_fails_strictly() {
    let Some(python) = python() else { return without("python", "peers/table.py, which needs Python 3.11 or later") };
    let mut c = Command::new(python);
    c.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../peers/table.py")).args([
        "--check",
        "--strict",
        "--kiln",
        env!("CARGO_BIN_EXE_kiln"),
    ]);
    let strict = Ran::new("table.py".into(), c.env("CUDA_VISIBLE_DEVICES", "").output().unwrap());
    assert!(!strict.out.contains("README.md") && strict.err.is_empty(), "{strict:#?}");
    let marked = read("README.md").contains(EARLIER) || read("README.md").contains("not measured yet");
    let earlier = strict.out.contains("measured at an earlier commit") || strict.out.contains("not measured");
    assert_eq!((strict.code == Some(1), earlier), (marked || !strict.out.is_empty(), marked), "{strict:#?}");
}

/// CI must have it.
fn python() -> Option<&'static str> {
    let known = Command::new("python3").args(["-c", "import tomllib"]).output().is_ok_and(|o| o.status.success());
    known.then_some("python3")
}

/// `--serve` with two builds in turn, one of which computes eight layers instead of one.
#[test]
fn the_guard_finds_a_build_that_is_slower() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("slower");
    fs::write(&script, format!("#!/bin/sh\nexec {} \"$@\" --set layers=8\n", env!("CARGO_BIN_EXE_kiln"))).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let table = dir.path().join("rows.toml");
    let row = "[[row]]\nname = \"small\"\nkiln = \"decoder --set layers=1 --set batch=1 --set seq=32 --threads 1\"\nis = \"a step\"\nunit = \"ms\"\nusual = []\nexpert = []\nfile = \"\"\n";
    fs::write(&table, row).unwrap();
    let compare = Path::new(env!("CARGO_MANIFEST_DIR")).join("../peers/compare.py");
    let guard = |kiln: &Path, older: &Path| {
        let mut c = Command::new("python3");
        c.arg(&compare).arg("--table").arg(&table).args(["--device", "cpu", "--seconds", "0.2", "--warm-up", "0.2", "--rounds", "3"]);
        c.arg("--kiln").arg(kiln).arg("--against").arg(older).arg("--file").arg(dir.path().join("measured.jsonl"));
        Ran::new("compare.py".into(), c.output().unwrap())
    };
    if python().is_none() {
        return without("python", "the guard of speeds, which needs Python 3.11 or later");
    }
    let kiln = Path::new(env!("CARGO_BIN_EXE_kiln"));
    let slow = guard(&script, kiln);
    assert!(slow.code == Some(1) && slow.out.contains("FAILED, small: ") && slow.out.contains("% slower"), "{slow:#?}");
    // What was measured is not measured again, and is as slow as it was.
    let again = guard(&script, kiln);
    assert!(again.code == Some(1) && again.out.starts_with("small: measured already"), "{again:#?}");
    assert_eq!(guard(kiln, &script).code, Some(0));
}
