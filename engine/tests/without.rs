//! Tools that some tests need and that a machine may lack. A test that can check nothing does not pass, unless it is told to do without. Shared by the
//! tests of all crates.

/// Names the tools to do without, with commas between: `g++,mpich,cc,python`. `cargo xtask test` sets it, and says what is not checked.
pub const VARIABLE: &str = "KILN_WITHOUT";

/// For a test that lacks a tool: fails, and says of `what` nothing is checked and why; or, where that is allowed, says so and returns.
#[track_caller]
pub fn without(tool: &str, what: &str) {
    let named = std::env::var(VARIABLE).unwrap_or_default();
    match allowed(tool, &named, std::env::var_os("CI").is_some()) {
        true => eprintln!("NOT CHECKED: {what}"),
        false => {
            panic!("{what}: this test checks nothing without {tool} (in the environment, {VARIABLE}={tool} lets it pass, except under CI)")
        }
    }
}

/// Whether a test may pass without a tool. Never under CI, which must have them all.
pub fn allowed(tool: &str, named: &str, is_ci: bool) -> bool {
    !is_ci && named.split(',').any(|name| name.trim() == tool)
}
