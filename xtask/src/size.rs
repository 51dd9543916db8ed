//! `cargo xtask size`: lines of code by part. The core is what one reads to understand how a step is recorded, rewritten, planned and run: with what passes are made
//! of, the passes without which no program runs, and how states are divided among ranks. It stays small enough to read in one go.

use crate::root;
use std::fs;
use std::path::Path;

/// Lines that the core may have.
const CORE: usize = 4_000;

/// Parts, and the files and folders of the repository that belong to them.
const PARTS: &[(&str, &[&str])] = &[
    (
        "core",
        &[
            "engine/src/lib.rs",
            "engine/src/case.rs",
            "engine/src/error.rs",
            "engine/src/executor.rs",
            "engine/src/extension.rs",
            "engine/src/graph.rs",
            "engine/src/kernel.rs",
            "engine/src/meta.rs",
            "engine/src/op.rs",
            "engine/src/philox.rs",
            "engine/src/plan.rs",
            "engine/src/plan",
            "engine/src/program.rs",
            "engine/src/record.rs",
            "engine/src/store.rs",
            "engine/src/warm_up.rs",
            "engine/src/passes/mod.rs",
            "engine/src/passes/autodiff.rs",
            "engine/src/passes/dead_code.rs",
            "engine/src/passes/decompose.rs",
            "engine/src/passes/in_place.rs",
            "engine/src/passes/layout.rs",
            "engine/src/passes/pattern.rs",
            "engine/src/passes/presets.rs",
            "engine/src/passes/switches.rs",
            "engine/src/ranks/parts.rs",
        ],
    ),
    ("ops", &["engine/src/ops"]),
    ("passes", &["engine/src/passes"]),
    ("executors", &["engine/src/cpu", "engine/src/cuda", "engine/src/profile.rs", "engine/src/fingerprint.rs"]),
    ("ranks", &["engine/src/ranks"]),
    ("checks", &["engine/src/check.rs", "engine/src/check", "engine/src/mutants.rs"]),
    ("train", &["train/src"]),
    ("recipes", &["train/src/recipes"]),
    ("xtask", &["xtask/src"]),
];

pub fn run() -> Result<(), String> {
    let mut core = 0;
    for (name, paths) in PARTS {
        let lines = paths.iter().map(|path| count(&root().join(path))).sum::<Result<usize, String>>()?;
        println!("{name:<10} {lines:>6}");
        core += if *name == "core" { lines } else { 0 };
    }
    println!(
        "(code of .rs files, without blank lines, comments and tests; recipes are counted in train, too; what of passes and ranks is core is counted twice)"
    );
    match core <= CORE {
        true => Ok(()),
        false => Err(format!("the core has {core} lines; it is to have {CORE} at most")),
    }
}

fn count(path: &Path) -> Result<usize, String> {
    let problem = |e: std::io::Error| format!("cannot read {}: {e}", path.display());
    if path.is_dir() {
        let entries = fs::read_dir(path).map_err(problem)?.collect::<Result<Vec<_>, _>>().map_err(problem)?;
        return entries.iter().map(|e| count(&e.path())).sum();
    }
    match path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs") {
        true => Ok(code(&fs::read_to_string(path).map_err(problem)?)),
        false => Ok(0),
    }
}

/// Lines of code. Tests stand at a file's end.
fn code(text: &str) -> usize {
    let own = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    own.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with("//")).count()
}

#[cfg(test)]
mod tests {
    #[test]
    fn comments_blank_lines_and_tests_do_not_count() {
        let text = "//! What.\n\nuse a;\n/// Says.\nfn f() {\n    // why\n    g()\n}\n\n#[cfg(test)]\nmod tests {\n    fn t() {}\n}\n";
        assert_eq!(super::code(text), 4);
    }

    #[test]
    fn the_core_is_small() {
        super::run().unwrap();
    }
}
