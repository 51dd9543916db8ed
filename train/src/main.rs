//! kiln's command line with the recipes that are built in.

fn main() -> std::process::ExitCode {
    kiln::main(kiln::recipes::RECIPES)
}
