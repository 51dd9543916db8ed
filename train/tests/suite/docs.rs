//! The pages: what is generated is current, links lead somewhere, and the commands in them run.

use crate::common::kiln;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().into()
}

#[track_caller]
fn is_current(page: &str, command: &[&str]) {
    let printed = kiln(command).ok().out;
    let written = fs::read_to_string(root().join(page)).unwrap_or_default();
    assert!(printed == written, "{page} is not what kiln prints: kiln {} > {page}", command.join(" "));
}

#[test]
fn generated_pages_are_current() {
    is_current("docs/config.md", &["config", "--markdown"]);
    is_current("docs/passes.md", &["passes", "--markdown"]);
}
