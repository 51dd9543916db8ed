//! Where the driver, NVRTC and cuBLASLt are. They are loaded by absolute path before the bindings ask for them by name, so that a
//! Python environment's wheels serve as well as an installed toolkit.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Folders handed in by the program: the engine reads no environment.
#[derive(Clone, Debug, Default)]
pub struct Folders {
    /// Searched in this order, then the system's own.
    pub libraries: Vec<PathBuf>,
    /// Where compiled kernels are kept.
    pub cache: PathBuf,
}

/// One library: where it was found, or why it cannot be used and how to get it.
#[derive(Clone, Debug)]
pub struct Found {
    pub name: &'static str,
    pub path: Option<PathBuf>,
    /// Files of that name that do not load, and why.
    pub broken: Vec<String>,
    pub help: &'static str,
}

impl Found {
    /// What is wrong, if something is.
    pub fn problem(&self) -> Option<String> {
        match (&self.path, self.broken.first()) {
            (Some(_), _) => None,
            (None, Some(broken)) => Some(format!("{} does not load ({broken}): {}", self.name, self.help)),
            (None, None) => Some(format!("{} was not found: {}", self.name, self.help)),
        }
    }
}

const WHEELS: &str = "install the CUDA 13 toolkit, or `pip install \"nvidia-cuda-nvrtc==13.0.*\" \"nvidia-cublas==13.0.*\"` and name the folder in LD_LIBRARY_PATH";

/// (name, file names in order of preference, what to do if missing). The builtins must come before NVRTC.
const LIBRARIES: &[(&str, &[&str], &str)] = &[
    ("libcuda", &["libcuda.so.1"], "install NVIDIA's driver (nvidia-smi must work)"),
    ("libnvrtc-builtins", &["libnvrtc-builtins.so.13.0", "libnvrtc-builtins.so"], WHEELS),
    ("libnvrtc", &["libnvrtc.so.13", "libnvrtc.so"], WHEELS),
    ("libcublasLt", &["libcublasLt.so.13", "libcublasLt.so"], WHEELS),
];

/// Loads the libraries once and says where each was found.
pub fn find(folders: &Folders) -> Vec<Found> {
    static FOUND: OnceLock<Vec<Found>> = OnceLock::new();
    FOUND
        .get_or_init(|| {
            let one = |(name, files, help): &(&'static str, &[&str], &'static str)| {
                let (path, broken) = load(files, &folders.libraries);
                Found { name, path, broken, help }
            };
            LIBRARIES.iter().map(one).collect()
        })
        .clone()
}

/// The first file that loads, and what happened to those before it.
fn load(files: &[&str], folders: &[PathBuf]) -> (Option<PathBuf>, Vec<String>) {
    let mut broken = vec![];
    for path in folders.iter().flat_map(|f| files.iter().map(move |name| f.join(name))).filter(|p| p.exists()) {
        match keep(&path) {
            Ok(()) => return (Some(path), broken),
            Err(why) => broken.push(why),
        }
    }
    // By name the system looks itself; not to be found there is no news.
    (files.iter().map(PathBuf::from).find(|path| keep(path).is_ok()), broken)
}

/// Loads a library for the life of the process.
fn keep(path: &Path) -> Result<(), String> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: these are NVIDIA's libraries, whose initialisers have no conditions; the handle is never closed.
    match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(library) => {
            std::mem::forget(library);
            Ok(())
        }
        Err(e) => {
            let why = std::error::Error::source(&e).map_or_else(|| e.to_string(), |s| s.to_string());
            Err(if why.contains(&*path.to_string_lossy()) { why } else { format!("{}: {why}", path.display()) })
        }
    }
}
