//! Finds the GPU's libraries and the cache for the engine, which reads no environment itself.

use crate::files;
use crate::warn;
use engine::cuda::Folders;
use engine::{Cpu, Cuda, Device};
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Where CUDA's libraries may be, and where kernels are cached.
pub fn folders() -> Folders {
    let exe = std::env::current_exe().ok();
    libraries(|name| std::env::var_os(name), exe.as_deref(), cache())
}

/// LD_LIBRARY_PATH, the wheels of the Python environment that kiln itself is installed in, a toolkit, the wheels of other environments.
fn libraries(env: impl Fn(&str) -> Option<OsString>, exe: Option<&Path>, cache: PathBuf) -> Folders {
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(|name| absolute(env(name)?)).chain(["/usr/local/cuda".into()]);
    let mut all: Vec<PathBuf> = own_prefix(exe).iter().flat_map(|own| wheels(own)).collect();
    all.extend(toolkits.flat_map(|toolkit| ["lib64", "extras/CUPTI/lib64"].map(|folder| toolkit.join(folder))));
    all.extend(env("VIRTUAL_ENV").and_then(absolute).into_iter().chain(pythons(&env)).flat_map(|prefix| wheels(&prefix)));
    all.retain(|p| p.is_dir());
    Folders { loader: loader(&env), libraries: all, owners: owners(&env), cache }
}

/// What a variable names, if that is the same in every working directory. One that is set but empty names nothing.
pub fn absolute(value: OsString) -> Option<PathBuf> {
    Some(PathBuf::from(value)).filter(|p| engine::mutant!("relative-prefixes-name-environments", p.is_absolute(), true))
}

/// PREFIX of PREFIX/bin/kiln: the environment that kiln is installed in. Unpacked or built anywhere else, it is in none.
pub fn own_prefix(exe: Option<&Path>) -> Option<PathBuf> {
    let folder = exe?.parent().filter(|p| p.is_absolute() && p.ends_with("bin"))?;
    Some(folder.parent()?.to_path_buf())
}

/// Environments whose Python is on PATH.
pub fn pythons(env: &impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let folders = env("PATH").map(|v| std::env::split_paths(&v).collect::<Vec<_>>()).unwrap_or_default();
    let with_python = folders.into_iter().filter(|p| p.is_absolute() && p.join("python3").exists());
    with_python.filter_map(|p| p.parent().map(Path::to_path_buf)).collect()
}

/// LD_LIBRARY_PATH as the system's loader reads it: split at `:` and at `;`, relative and empty parts too. The loader searches them, so the engine must know.
pub fn loader(env: &impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let value = env("LD_LIBRARY_PATH").filter(|v| !v.is_empty());
    let parts = |v: OsString| v.as_bytes().split(|b| b":;".contains(b)).map(|part| PathBuf::from(OsStr::from_bytes(part))).collect();
    value.map(parts).unwrap_or_default()
}

/// KILN_TRUSTED_UIDS: users, by number, whose libraries are loaded beside root's and the user's own. Anything else in it means nobody.
pub fn owners(env: &impl Fn(&str) -> Option<OsString>) -> Vec<u32> {
    let value = env("KILN_TRUSTED_UIDS").unwrap_or_default();
    let numbers = value.to_string_lossy().split(',').map(|n| n.trim().parse()).collect::<Result<_, _>>();
    numbers.unwrap_or_else(|_| {
        if !value.is_empty() {
            warn!("KILN_TRUSTED_UIDS={} is not taken: it is a list of user numbers, such as 5000,5001", value.to_string_lossy());
        }
        vec![]
    })
}

/// Lets a profiler that is attached to the process see NVTX ranges; absent without complaint, unless they were `asked` for.
pub fn attach_profiler(asked: bool) {
    let named = std::env::var_os("NVTX_INJECTION64_PATH").filter(|v| !v.is_empty());
    let attached = match &named {
        Some(library) => {
            let library = Path::new(library);
            let trusted = engine::cuda::trusted(library, &owners(&|name| std::env::var_os(name)));
            trusted.and_then(|()| engine::cuda::nvtx::attach(library))
        }
        None => Err("no profiler is attached (nsys and ncu set NVTX_INJECTION64_PATH)".into()),
    };
    if let Some(why) = attached.err().filter(|_| asked) {
        warn!("--nvtx: nobody sees the ranges: {why}");
    }
}

/// A folder and, where it is there for this process alone, that.
struct Cache {
    folder: PathBuf,
    is_own: bool,
}

static CACHE: OnceLock<Cache> = OnceLock::new();

/// The cache of what can be made again: compiled kernels, trained base models. So it is a folder that nobody else can write to:
/// this user's, or a fresh one that goes with the process.
pub fn cache() -> PathBuf {
    let chosen = CACHE.get_or_init(|| {
        let problem = match home_cache() {
            Some(folder) => match trusted(&folder) {
                Ok(()) => {
                    files::sweep(&folder, None, files::LEFT);
                    return Cache { folder, is_own: false };
                }
                Err(problem) => format!("the cache {} is not used: {problem}", folder.display()),
            },
            None => "there is no cache: neither XDG_CACHE_HOME nor HOME names a folder".into(),
        };
        let folder = private(&std::env::temp_dir());
        warn!("{problem}; what would be kept there is in {} until this process ends", folder.display());
        Cache { folder, is_own: true }
    });
    chosen.folder.clone()
}

/// The same where that is known without making one.
pub fn known_cache() -> Option<PathBuf> {
    CACHE.get().map(|cache| cache.folder.clone()).or_else(home_cache)
}

fn home_cache() -> Option<PathBuf> {
    let env = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    env("XDG_CACHE_HOME").or_else(|| env("HOME").map(|h| h.join(".cache"))).map(|h| h.join("kiln"))
}

/// Removes the cache of a process that has one of its own; called when it ends.
pub fn remove_own_cache() {
    if let Some(Cache { folder, is_own: true }) = CACHE.get() {
        // Best effort: the next process that makes one sweeps.
        let _ = fs::remove_dir_all(folder);
    }
}

/// Whether nobody but this user can write to a folder; it is made where it is not there.
fn trusted(folder: &Path) -> Result<(), String> {
    // One that cannot be made cannot be written to by others either.
    let _ = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    let (m, me) = match fs::metadata(folder) {
        Ok(m) => (m, rustix::process::geteuid().as_raw()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e.to_string()),
    };
    // A group of this user alone has the user's number, by convention.
    let own_group = m.gid() == me && m.gid() == rustix::process::getegid().as_raw();
    match m.mode() & 0o022 {
        _ if m.uid() != me => Err(format!("it belongs to user {}, not to user {me} who runs this", m.uid())),
        mode if mode & 0o002 != 0 => Err("everybody may write to it (chmod o-w)".into()),
        mode if engine::mutant!("a-groups-cache-is-used", mode != 0 && !own_group, false) => {
            Err(format!("group {} may write to it (chmod g-w)", m.gid()))
        }
        _ => Ok(()),
    }
}

/// A fresh folder that only this user can enter.
fn private(within: &Path) -> PathBuf {
    const NAME: &str = "kiln-cache";
    files::sweep(within, Some(NAME), files::LEFT);
    let name = |i: usize| within.join(format!(".{NAME}.tmp-{}-{i}", std::process::id()));
    for i in 0..1000 {
        match DirBuilder::new().mode(0o700).create(name(i)) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            // What cannot be written to is not written to.
            _ => return name(i),
        }
    }
    name(1000)
}

/// PREFIX/lib/python3.*/site-packages/nvidia/*/lib; Debian's own Python calls it dist-packages.
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    let children = |p: PathBuf| std::fs::read_dir(p).into_iter().flatten().flatten().map(|e| e.path()).collect::<Vec<_>>();
    let pythons =
        children(prefix.join("lib")).into_iter().filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")));
    let packages = pythons.flat_map(|p| ["site-packages", "dist-packages"].map(|name| p.join(name).join("nvidia")));
    packages.flat_map(children).map(|p| p.join("lib")).collect()
}

/// How many GPUs there are to use; none where a library is missing. Opens none of them.
pub fn count() -> usize {
    engine::cuda::count(&folders())
}

/// `auto`, `cpu`, `cuda` or `cuda:N`.
pub fn open(name: &str, threads: Option<usize>) -> Result<Device, String> {
    let cpu = || Device::cpu(threads.map_or_else(Cpu::all_cores, Cpu::new));
    let gpu = |ordinal: usize| Cuda::open(ordinal, &folders()).and_then(Device::cuda).map_err(|e| e.to_string());
    match name {
        "cpu" => Ok(cpu()),
        "auto" => Ok(gpu(0).unwrap_or_else(|why| {
            // Without a driver there is no GPU to speak of; with one, something is missing.
            let driver = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|device| Path::new(device).exists());
            if driver || !(why.contains("libcuda was not found") || why.contains("libcuda does not load (LD_LIBRARY_PATH: ")) {
                crate::warn!("on the CPU, because the GPU cannot be used: {why}");
            }
            cpu()
        })),
        "cuda" => gpu(0).map_err(|e| format!("--device cuda: {e} (`kiln doctor` says what was found; --device cpu always works)")),
        other => match other.strip_prefix("cuda:").map(str::parse) {
            Some(Ok(ordinal)) => {
                gpu(ordinal).map_err(|e| format!("--device {other}: {e} (`kiln doctor` says what was found; --device cpu always works)"))
            }
            _ => Err(format!("--device {other}: there are auto, cpu, cuda and cuda:N")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    #[test]
    fn a_cache_that_others_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("home/.cache/kiln");
        let mode = |p: &Path| fs::metadata(p).unwrap().mode() & 0o777;
        assert_eq!((trusted(&folder), mode(&folder)), (Ok(()), 0o700), "it is made for this user alone");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(trusted(&folder).unwrap_err().contains("everybody may write"));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(trusted(&folder), Ok(()));
        let link = dir.path().join("link");
        symlink("/tmp", &link).unwrap();
        assert!(trusted(&link).is_err(), "what a link leads to counts");
        // Only root can give a folder away.
        if rustix::process::geteuid().is_root() {
            chown(&folder, Some(65534), None).unwrap();
            assert!(trusted(&folder).unwrap_err().contains("belongs to user 65534"));
        }
    }

    #[test]
    fn libraries_of_the_environment_that_kiln_is_installed_in_come_before_a_toolkits() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| {
            fs::create_dir_all(dir.path().join(path)).unwrap();
            dir.path().join(path)
        };
        let own = at("venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        let debian = at("local/lib/python3.11/dist-packages/nvidia/cu13/lib");
        let (toolkit, named, bin) = (at("cuda/lib64"), at("named"), at("local/bin"));
        fs::write(bin.join("python3"), "").unwrap();
        at("venv/bin");
        let env = |name: &str| match name {
            "LD_LIBRARY_PATH" => Some(named.clone().into_os_string()),
            "CUDA_HOME" => Some(dir.path().join("cuda").into_os_string()),
            "PATH" => Some(bin.clone().into_os_string()),
            "KILN_TRUSTED_UIDS" => Some("7, 5000".into()),
            _ => None,
        };
        let system = Path::new("/usr/local/cuda/lib64");
        let found = |exe: Option<&Path>| {
            let all = libraries(env, exe, PathBuf::new());
            (all.loader.into_iter().chain(all.libraries).filter(|p| p != system).collect::<Vec<_>>(), all.owners)
        };
        let all = vec![named.clone(), own, toolkit.clone(), debian.clone()];
        assert_eq!(found(Some(&dir.path().join("venv/bin/kiln"))), (all, vec![7, 5000]));
        assert_eq!(found(Some(Path::new("kiln"))).0, [named.clone(), toolkit.clone(), debian.clone()], "nothing of it is guessed");
        assert_eq!(
            found(Some(&dir.path().join("venv/kiln-0.1.0/kiln"))).0,
            [named, toolkit, debian],
            "an unpacked archive is no environment"
        );
    }

    #[test]
    fn variables_that_are_set_but_empty_or_relative_name_no_folder() {
        // Folders of the working directory, which somebody else may have filled.
        for value in ["", ".", "src", "..:.", ":"] {
            let env = |name: &str| ["CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PATH"].contains(&name).then(|| value.into());
            let all = libraries(env, None, PathBuf::new());
            assert!(all.libraries.iter().all(|p| p.starts_with("/usr/local/cuda")) && all.loader.is_empty(), "{value:?}: {all:?}");
        }
        let loader = |value: &str| loader(&|_| Some(value.into()));
        assert_eq!(loader(""), Vec::<PathBuf>::new());
        // By glibc's rule an empty part is the working directory.
        assert_eq!(loader("/a:"), [PathBuf::from("/a"), PathBuf::new()]);
        assert_eq!(loader("/a;/b:c;"), ["/a", "/b", "c", ""].map(PathBuf::from));
        assert_eq!(owners(&|_| Some("root".into())), Vec::<u32>::new());
    }

    /// Compiled kernels lie there.
    #[test]
    fn a_cache_that_a_group_may_write_to_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let mode = |mode: u32| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        mode(0o770);
        // Only root can give a folder to another group.
        if rustix::process::geteuid().is_root() {
            assert_eq!(trusted(dir.path()), Ok(()), "root's own group");
            std::os::unix::fs::chown(dir.path(), None, Some(65534)).unwrap();
            assert!(trusted(dir.path()).unwrap_err().contains("group 65534 may write to it (chmod g-w)"));
            mode(0o750);
            assert_eq!(trusted(dir.path()), Ok(()));
        }
    }

    #[test]
    fn a_private_cache_is_fresh_and_closed() {
        let dir = tempfile::tempdir().unwrap();
        let first = private(dir.path());
        assert_eq!(fs::metadata(&first).unwrap().mode() & 0o777, 0o700);
        // What somebody put there before is not taken for it.
        let squatted = dir.path().join(format!(".kiln-cache.tmp-{}-1", std::process::id()));
        fs::create_dir(&squatted).unwrap();
        let second = private(dir.path());
        assert!(second != first && second != squatted && fs::read_dir(&second).unwrap().next().is_none());
    }
}
