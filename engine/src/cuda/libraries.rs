//! Finds and loads the driver, NVRTC and cuBLASLt, and MPI for `ranks`. They are loaded by absolute path before the bindings ask for them by name, so that the wheels of a
//! Python environment work as well as an installed toolkit.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Folders that the program passes in: the engine reads no environment variables.
#[derive(Clone, Debug, Default)]
pub struct Folders {
    /// Searched in this order, before the system's own folders.
    pub libraries: Vec<PathBuf>,
    /// Where compiled kernels and GEMM choices are cached.
    pub cache: PathBuf,
}

/// One library: where it was found, or why it cannot be used and how to get it.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its name without suffix, such as `libnvrtc`.
    pub name: &'static str,
    /// The file that was loaded.
    pub path: Option<PathBuf>,
    /// Files of that name that could not be loaded, and why.
    pub broken: Vec<String>,
    /// How to install it.
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

pub(crate) struct Wanted {
    pub name: &'static str,
    /// In order of preference.
    pub files: &'static [&'static str],
    /// Functions that the library must have; a missing one means a wrong version, on which the bindings would panic.
    pub has: &'static [&'static str],
    pub help: &'static str,
}

/// In loading order: NVRTC needs its builtins first.
const LIBRARIES: &[Wanted] = &[
    Wanted {
        name: "libcuda",
        files: &["libcuda.so.1"],
        has: &[
            "cuInit",
            "cuGetErrorString",
            "cuGetErrorName",
            "cuDriverGetVersion",
            "cuLaunchKernelEx",
            "cuGraphInstantiateWithFlags",
            "cuMemHostAlloc",
        ],
        help: "install NVIDIA's driver, version 580 or later (nvidia-smi must work)",
    },
    Wanted {
        name: "libnvrtc-builtins",
        files: &[
            "libnvrtc-builtins.so.13.0",
            "libnvrtc-builtins.so.13.1",
            "libnvrtc-builtins.so.13.2",
            "libnvrtc-builtins.so.13.3",
            "libnvrtc-builtins.so",
        ],
        has: &[],
        help: WHEELS,
    },
    Wanted {
        name: "libnvrtc",
        files: &["libnvrtc.so.13", "libnvrtc.so"],
        has: &["nvrtcVersion", "nvrtcCompileProgram", "nvrtcGetCUBIN", "nvrtcGetProgramLog"],
        help: WHEELS,
    },
    Wanted {
        name: "libcublasLt",
        files: &["libcublasLt.so.13", "libcublasLt.so"],
        has: &["cublasLtCreate", "cublasLtGetVersion", "cublasLtMatmul", "cublasLtMatmulAlgoGetHeuristic"],
        help: WHEELS,
    },
];

/// What `kiln profile` measures with; everything else does without.
const CUPTI: Wanted = Wanted {
    name: "libcupti",
    files: &["libcupti.so.13", "libcupti.so.12", "libcupti.so"],
    has: super::cupti::SYMBOLS,
    help: "it comes with the CUDA toolkit (extras/CUPTI), and with `pip install \"nvidia-cuda-cupti==13.0.*\"`: name its folder in LD_LIBRARY_PATH",
};

/// Loads CUPTI, once.
pub fn cupti(folders: &Folders) -> Found {
    static FOUND: OnceLock<Found> = OnceLock::new();
    FOUND.get_or_init(|| found(&CUPTI, folders)).clone()
}

/// Loads the libraries once and says where each was found.
pub fn find(folders: &Folders) -> Vec<Found> {
    static FOUND: OnceLock<Vec<Found>> = OnceLock::new();
    FOUND.get_or_init(|| LIBRARIES.iter().map(|w| found(w, folders)).collect()).clone()
}

/// Loads one library.
pub(crate) fn found(w: &Wanted, folders: &Folders) -> Found {
    let (path, broken) = load(w, &folders.libraries);
    Found { name: w.name, path, broken, help: w.help }
}

/// The first file that loads, and what happened to those before it.
fn load(w: &Wanted, folders: &[PathBuf]) -> (Option<PathBuf>, Vec<String>) {
    let mut broken = vec![];
    for path in folders.iter().flat_map(|f| w.files.iter().map(move |name| f.join(name))).filter(|p| p.exists()) {
        match keep(&path, w.has) {
            Ok(()) => return (Some(path), broken),
            Err(why) => broken.push(why),
        }
    }
    // By name, the system searches its own folders; failing there is not reported.
    (w.files.iter().map(PathBuf::from).find(|path| keep(path, w.has).is_ok()), broken)
}

/// Loads a library for the life of the process.
fn keep(path: &Path, has: &[&str]) -> Result<(), String> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    // SAFETY: these are libraries of NVIDIA's and MPI's, whose initialisers have no conditions; the handle is never closed.
    match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(library) => {
            // SAFETY: only whether the name is there is asked.
            let lacks = has.iter().find(|name| unsafe { library.get::<*const ()>(name.as_bytes()) }.is_err());
            if let Some(name) = lacks {
                return Err(format!("{} has no function {name}: the library is too old, or another one", path.display()));
            }
            std::mem::forget(library);
            Ok(())
        }
        Err(e) => {
            let why = std::error::Error::source(&e).map_or_else(|| e.to_string(), |s| s.to_string());
            Err(if why.contains(&*path.to_string_lossy()) { why } else { format!("{}: {why}", path.display()) })
        }
    }
}

/// Declares `Functions`, the functions of a library that are used, and `SYMBOLS`, their names. A function without a result returns the caller's `Status`.
macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> $crate::cuda::functions!(@result $($result)?),)*
        }

        /// Names that the library must have.
        pub(crate) const SYMBOLS: &[&str] = &[$($symbol),*];

        impl Functions {
            /// From a library that has been found, and so been loaded once already.
            fn open(path: &std::path::Path) -> Result<Functions, String> {
                // SAFETY: no initialiser runs again; each type is the function's in the library's header; the library is never closed.
                unsafe {
                    let library = libloading::os::unix::Library::new(path).map_err(|e| e.to_string())?;
                    let functions =
                        Functions { $($name: *library.get($symbol.as_bytes()).map_err(|_| concat!("it has no function ", $symbol))?,)* };
                    std::mem::forget(library);
                    Ok(functions)
                }
            }
        }
    };
    (@result) => { Status };
    (@result $result:ty) => { $result };
}
pub(crate) use functions;
