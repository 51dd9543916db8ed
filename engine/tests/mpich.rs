//! MPICH for tests, from its Python wheel: the library of MPI's standard interface and `mpiexec`. Shared by the tests of both crates.

#[path = "without.rs"]
pub mod without;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Where it lies.
pub struct Mpich {
    /// The folder of libmpi_abi.so.1.
    pub lib: PathBuf,
    pub mpiexec: PathBuf,
}

/// Cargo's target folder, wherever it is set to lie: this program was built into it.
pub fn target_dir() -> PathBuf {
    target_of(&std::env::current_exe().expect("a program knows its own path"))
}

pub fn target_of(program: &Path) -> PathBuf {
    program.ancestors().find(|a| a.join("CACHEDIR.TAG").exists()).expect("cargo marks its target folder").into()
}

/// Fetched once into target/; or why that cannot be done.
pub fn found() -> &'static Result<Mpich, String> {
    static FOUND: OnceLock<Result<Mpich, String>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let prefix = target_dir().join("mpich");
        installed(&prefix).map_or_else(|| fetch(&prefix), Ok)
    })
}

/// For a test. Where there is none, it fails, unless it is told to do without.
pub fn mpich() -> Option<&'static Mpich> {
    found().as_ref().inspect_err(|why| without::without("mpich", &format!("several ranks over MPI: {why}"))).ok()
}

/// Debian's pip puts a folder `local` between.
fn installed(prefix: &Path) -> Option<Mpich> {
    let roots = [prefix.to_path_buf(), prefix.join("local")];
    let root = roots.iter().find(|r| r.join("lib/libmpi_abi.so.1").exists())?;
    Some(Mpich { lib: root.join("lib"), mpiexec: root.join("bin/mpiexec") })
}

/// Beside its place first: another process may do the same.
fn fetch(prefix: &Path) -> Result<Mpich, String> {
    let beside = prefix.with_extension(format!("{}", std::process::id()));
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", "--prefix"]).arg(&beside).arg("mpich==5.0.*");
    let output = pip.output().map_err(|e| format!("python3 with pip fetches it, and does not start: {e}"))?;
    if !output.status.success() {
        let _ = fs::remove_dir_all(&beside);
        return Err(format!("`pip install mpich` failed: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    if fs::rename(&beside, prefix).is_err() {
        let _ = fs::remove_dir_all(&beside);
    }
    installed(prefix).ok_or_else(|| format!("pip left no libmpi_abi.so.1 in {}", prefix.display()))
}
