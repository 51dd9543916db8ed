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

/// One library: where it was found, or how to get it.
#[derive(Clone, Debug)]
pub struct Found {
    pub name: &'static str,
    pub path: Option<PathBuf>,
    pub help: &'static str,
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
        .get_or_init(|| LIBRARIES.iter().map(|(name, files, help)| Found { name, path: load(files, &folders.libraries), help }).collect())
        .clone()
}

fn load(files: &[&str], folders: &[PathBuf]) -> Option<PathBuf> {
    let absolute = folders.iter().flat_map(|f| files.iter().map(move |name| f.join(name))).filter(|p| p.exists());
    let by_name = files.iter().map(PathBuf::from);
    absolute.chain(by_name).find(|path| keep(path))
}

/// Loads a library for the life of the process.
fn keep(path: &Path) -> bool {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: these are NVIDIA's libraries, whose initialisers have no conditions; the handle is never closed.
    match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(library) => {
            std::mem::forget(library);
            true
        }
        Err(_) => false,
    }
}
