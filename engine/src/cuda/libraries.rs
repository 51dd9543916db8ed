//! Finds and loads the driver, NVRTC and cuBLASLt, and MPI for `ranks`. They are loaded by absolute path before the bindings ask for them by name, so that the wheels of a
//! Python environment work as well as an installed toolkit.

use super::trust::trusted;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Folders that the program passes in: the engine reads no environment variables.
#[derive(Clone, Debug, Default)]
pub struct Folders {
    /// Those of LD_LIBRARY_PATH, searched first. The system's loader searches them, too.
    pub loader: Vec<PathBuf>,
    /// Searched in this order, before the system's own folders.
    pub libraries: Vec<PathBuf>,
    /// Users whose libraries are loaded beside root's and this user's own.
    pub owners: Vec<u32>,
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
            // Installing it would not help.
            (None, Some(broken)) if broken.starts_with(LOADER) => Some(format!("{} does not load ({broken})", self.name)),
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

/// The driver's management library: how busy a GPU is and what power it draws.
const NVML: Wanted =
    Wanted { name: "libnvidia-ml", files: &["libnvidia-ml.so.1"], has: &["nvmlInit_v2"], help: "it comes with NVIDIA's driver" };

/// Loads NVML, once.
pub fn nvml(folders: &Folders) -> Found {
    static FOUND: OnceLock<Found> = OnceLock::new();
    FOUND.get_or_init(|| found(&NVML, folders)).clone()
}

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
    let (path, broken) = load(w, folders);
    Found { name: w.name, path, broken, help: w.help }
}

/// The first file that loads, and what happened to those before it. Only files that nobody else could have written are opened.
///
/// The system's loader searches LD_LIBRARY_PATH by itself: for what a library needs, and for CUDA's libraries once more, which the bindings ask for by names that
/// are not those of the files loaded here. So nothing is loaded where others can write to a part of it.
fn load(w: &Wanted, folders: &Folders) -> (Option<PathBuf>, Vec<String>) {
    let open_to_others = folders.loader.iter().find_map(|f| others_in(f, &folders.owners).err());
    if let Some(why) = crate::mutant!("a-library-is-loaded-beside-open-folders", open_to_others, None) {
        return (
            None,
            vec![format!("{LOADER}: {why}; the system's loader searches that folder for every library: take it out of {LOADER}")],
        );
    }
    let mut broken = vec![];
    let all = folders.loader.iter().chain(&folders.libraries).flat_map(|f| w.files.iter().map(move |name| f.join(name)));
    let named = all.filter(|p| p.exists()).find(|path| {
        let loaded = trusted(path, &folders.owners).and_then(|()| keep(path, w.has));
        loaded.map_err(|why| broken.push(why)).is_ok()
    });
    // By name, from the loader's own folders. Failing there is not reported.
    let found = named.or_else(|| w.files.iter().map(PathBuf::from).find(|path| keep(path, w.has).is_ok()));
    (found, broken)
}

/// The variable whose folders the system's loader searches first.
const LOADER: &str = "LD_LIBRARY_PATH";

/// Whether others could have put a library into a folder of LD_LIBRARY_PATH, or could replace one that is there. An empty part is the working directory.
fn others_in(folder: &Path, owners: &[u32]) -> Result<(), String> {
    if folder.as_os_str().is_empty() {
        return Err("an empty part of it is the working directory, whatever that is".into());
    }
    if folder.to_string_lossy().contains('$') {
        return Err(format!("{} is not used: the loader puts other words in the place of those with a $", folder.display()));
    }
    if !folder.exists() {
        return Ok(());
    }
    searched(folder, owners, DEEPEST)
}

/// In each folder of its path the loader first searches those for the processor's kind, such as glibc-hwcaps/x86-64-v3.
const FOR_PROCESSORS: [&str; 8] = ["glibc-hwcaps", "tls", "x86_64", "haswell", "avx512_1", "xeon_phi", "aarch64", "atomics"];
/// Such folders lie in one another.
const DEEPEST: usize = 5;

/// A folder in which the loader looks for libraries, and those in it. Of the files every library counts: one that is trusted may need another.
fn searched(folder: &Path, owners: &[u32], depth: usize) -> Result<(), String> {
    trusted(folder, owners)?;
    let is_within = folder.components().any(|part| part.as_os_str() == FOR_PROCESSORS[0]);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        // A link that leads nowhere is no library.
        let Ok(found) = fs::metadata(&path) else { continue };
        if !found.is_dir() && name.contains(".so") {
            trusted(&path, owners)?;
        }
        let is_searched = is_within || FOR_PROCESSORS.contains(&&*name);
        if found.is_dir() && depth > 0 && crate::mutant!("folders-for-processors-are-not-looked-at", is_searched, false) {
            searched(&path, owners, depth - 1)?;
        }
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::geteuid;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    const WANTED: Wanted = Wanted { name: "libkilntest", files: &["libkilntest.so.1"], has: &["cos"], help: "" };

    /// A library of the system's: the file of C's mathematics, which this process has mapped or could.
    fn a_library() -> Option<PathBuf> {
        let folders = [
            "/usr/lib/x86_64-linux-gnu",
            "/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/lib64",
            "/usr/lib",
            "/lib",
        ];
        folders.iter().map(|f| Path::new(f).join("libm.so.6")).find(|p| p.exists())
    }

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// A trusted library that is found first does not make the folders beside it trusted: the loader searches them for the next name.
    #[test]
    fn nothing_is_loaded_where_others_can_write_to_a_part_of_the_loaders_path() {
        let Some(library) = a_library() else { return };
        let dir = tempfile::tempdir().unwrap();
        let [own, open] = ["own", "open"].map(|name| dir.path().join(name));
        for folder in [&own, &open] {
            fs::create_dir(folder).unwrap();
            mode(folder, 0o755);
        }
        let file = own.join("libkilntest.so.1");
        fs::copy(library, &file).unwrap();
        mode(&file, 0o755);
        let load = |loader: &[&Path]| {
            let folders =
                Folders { loader: loader.iter().map(|p| p.to_path_buf()).collect(), libraries: vec![own.clone()], ..Folders::default() };
            let found = found(&WANTED, &folders);
            (found.path.clone(), found.problem().unwrap_or_default())
        };
        let loads = |loader: &[&Path]| assert_eq!(load(loader), (Some(file.clone()), String::new()), "{loader:?}");
        let refused = |loader: &[&Path], words: &[&str]| {
            let (path, said) = load(loader);
            assert_eq!(path, None, "{loader:?}");
            assert!(words.iter().chain(&["LD_LIBRARY_PATH"]).all(|w| said.contains(w)), "{said}");
        };
        let name = open.to_str().unwrap();
        loads(&[]);
        loads(&[&own, &open, Path::new("/no/such/folder"), Path::new("no/such/folder")]);
        // In front of the one that has it, and behind it.
        mode(&open, 0o777);
        refused(&[&own, &open], &[name, "everybody may write to it (chmod o-w)", "take it out"]);
        refused(&[&open, &own], &[name]);
        mode(&open, 0o755);
        for (part, words) in [("", "working directory"), ("src", "relative"), (".", "relative"), ("$ORIGIN/lib", "$ORIGIN/lib")] {
            refused(&[&own, Path::new(part)], &[words]);
            refused(&[Path::new(part), &own], &[words]);
        }
        // A file of another version that anybody could have written, in a folder that is as it should be.
        let other = open.join("libkilntest.so");
        fs::write(&other, "").unwrap();
        mode(&other, 0o666);
        refused(&[&own, &open], &[other.to_str().unwrap(), "everybody"]);
        mode(&other, 0o644);
        loads(&[&own, &open]);
        fs::remove_file(&other).unwrap();
        symlink(dir.path().join("nothing"), &other).unwrap();
        loads(&[&own, &open]);
        // A library of another name, which a trusted one may need.
        let needed = open.join("libother.so.2");
        fs::write(&needed, "").unwrap();
        mode(&needed, 0o646);
        refused(&[&open], &[needed.to_str().unwrap(), "everybody"]);
        fs::remove_file(&needed).unwrap();
        // The loader's own folders within a folder: they are searched first.
        for within in ["glibc-hwcaps/x86-64-v2", "x86_64", "haswell/avx512_1", "tls/x86_64"] {
            let within = open.join(within);
            fs::create_dir_all(&within).unwrap();
            within.ancestors().take_while(|a| *a != open).for_each(|a| mode(a, 0o755));
            loads(&[&open]);
            mode(&within, 0o777);
            refused(&[&open, &own], &[within.to_str().unwrap(), "everybody"]);
            mode(&within, 0o755);
            let planted = within.join("libkilntest.so.1");
            fs::write(&planted, "").unwrap();
            mode(&planted, 0o666);
            refused(&[&open, &own], &[planted.to_str().unwrap()]);
            fs::remove_file(&planted).unwrap();
        }
        // Only root can give a folder away.
        if geteuid().is_root() {
            chown(&open, Some(65534), None).unwrap();
            refused(&[&own, &open], &[name, "belongs to user 65534", "KILN_TRUSTED_UIDS"]);
        }
    }
}
