//! Notes the commit that a release is built from, so that figures say what they are of. Other builds do not know it, unless KILN_COMMIT says it: they would be
//! compiled again after every commit.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=KILN_COMMIT");
    // Where a copy of the tree without its history is built, the variable says it.
    let given = std::env::var("KILN_COMMIT").ok().filter(|text| !text.is_empty());
    if given.is_none() && std::env::var("PROFILE").as_deref() != Ok("release") {
        return;
    }
    for path in ["../.git/HEAD", "../.git/logs/HEAD", "src", "../engine/src"] {
        if Path::new(path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    let git = |args: &[&str]| {
        let ran = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
        Some(String::from_utf8_lossy(&ran.stdout).trim().to_string()).filter(|text| !text.is_empty())
    };
    let of_tree = || {
        let changed = git(&["status", "--porcelain", "--untracked-files=no", "--", "src", "../engine"]).is_some();
        Some(format!("{}{}", git(&["rev-parse", "HEAD"])?, if changed { " with changes" } else { "" }))
    };
    if let Some(commit) = given.or_else(of_tree) {
        println!("cargo::rustc-env=KILN_COMMIT={commit}");
    }
}
