//! Several ranks: which of them this process is, how it reaches the others, and how they are started on this machine.
//!
//! | file | is |
//! |---|---|
//! | `world.rs` | rank and size from the variables of torchrun, Open MPI, Hydra (MPICH's `mpiexec`) and Slurm |
//! | `local.rs` | `kiln train --ranks N`: starts them, passes signals on, waits |
//! | `meet.rs` | how ranks on GPUs find each other, and notice that one is gone |
//! | `gpus.rs` | ranks on GPUs, which NCCL connects |

mod gpus;
mod local;
mod meet;
mod world;

pub use gpus::{prepare, which as gpu_of};
pub use local::{is_started_by_ranks, start};
pub use world::World;

use crate::recipe::TrainError;
use crate::{gpu, warn};
use engine::cuda::{Folders, Found, nccl};
use engine::ranks::mpi::{self, Mpi};
use engine::{Device, Ranks};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// The connection, for the end of the process.
static CONNECTED: OnceLock<Connection> = OnceLock::new();

enum Connection {
    Mpi(Mpi),
    Gpus(Box<gpus::Gpus>),
}

/// Connects this process to the other ranks of its job; `tensor` of them share the weights of one model.
pub fn connect(world: &World, tensor: usize, device: &Device) -> Result<Ranks, TrainError> {
    if tensor == 0 || !world.size.is_multiple_of(tensor) {
        return Err(TrainError::Other(format!("--tensor {tensor}: it must divide the number of ranks, which is {}", world.size)));
    }
    if let Some(cuda) = device.gpu() {
        let gpus = gpus::Gpus::connect(world, tensor, cuda)?;
        let ranks = gpus.ranks();
        CONNECTED.get_or_init(|| Connection::Gpus(Box::new(gpus)));
        return Ok(ranks);
    }
    local::end_with_starter().map_err(|e| TrainError::Other(e.to_string()))?;
    let mpi = Mpi::connect(&folders()).map_err(|e| match world.launcher {
        // It starts ranks of NCCL's.
        "torchrun" => TrainError::Other(format!(
            "torchrun says that this is rank {} of {}: on CPUs ranks are connected by MPI, so start them with --ranks {}, mpiexec or srun ({e})",
            world.rank, world.size, world.size
        )),
        _ => e.into(),
    })?;
    if (mpi.rank, mpi.size) != (world.rank, world.size) {
        return Err(TrainError::Other(strangers(world, &mpi)));
    }
    let ranks = mpi.ranks(tensor)?;
    CONNECTED.get_or_init(|| Connection::Mpi(mpi));
    Ok(ranks)
}

/// What connects the ranks, for people: `MPICH 5.0.2`.
pub fn connection() -> Option<String> {
    CONNECTED.get().map(|c| match c {
        Connection::Mpi(mpi) => mpi.version(),
        Connection::Gpus(gpus) => gpus.describe(),
    })
}

/// The launcher and the library do not know each other.
fn strangers(world: &World, mpi: &Mpi) -> String {
    let (said, found) = (format!("rank {} of {}", world.rank, world.size), format!("rank {} of {}", mpi.rank, mpi.size));
    let way = match mpiexec(mpi.library()) {
        Ok(path) => format!("`{} -n {} {} train ..`", path.display(), world.size, crate::program()),
        Err(_) => "the mpiexec of that library".into(),
    };
    format!(
        "{} says that this is {said}, and {} ({}) that it is {found}: on CPUs start the ranks with --ranks {}, {way}, or `srun --mpi=pmi2`",
        world.launcher,
        mpi.library().display(),
        mpi.version(),
        world.size,
    )
}

/// Says to the other ranks that this one has come to a good end.
pub fn finish() {
    let ended = match CONNECTED.get() {
        None => Ok(()),
        Some(Connection::Mpi(mpi)) => mpi.finish(),
        Some(Connection::Gpus(gpus)) => gpus.finish(),
    };
    if let Err(e) = ended {
        warn!("{e}");
    }
}

/// `mpiexec` ends everything at once when a rank gives up, and shows what the rank has said only if it has read it by then.
const HEARD: Duration = Duration::from_millis(500);

/// Ends the other ranks, which would wait for this one for ever, and then this process. Does nothing where it is alone.
pub fn abort(status: u8) {
    let Some(connection) = CONNECTED.get() else { return };
    gpu::remove_own_cache();
    match connection {
        Connection::Mpi(mpi) => {
            std::thread::sleep(HEARD);
            mpi.abort(status.into())
        }
        Connection::Gpus(gpus) => gpus.abort(status),
    }
}

/// A panic ends the other ranks, too.
pub struct EndsOthers;

impl Drop for EndsOthers {
    fn drop(&mut self) {
        if std::thread::panicking() {
            abort(101);
        }
    }
}

/// Where MPI's library may be: LD_LIBRARY_PATH, the environment that kiln is installed in, the active one, and those of Pythons on PATH.
fn folders() -> Folders {
    folders_of(|name| std::env::var_os(name), std::env::current_exe().ok().as_deref())
}

fn folders_of(env: impl Fn(&str) -> Option<OsString>, exe: Option<&Path>) -> Folders {
    let own = gpu::own_prefix(exe);
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(|name| gpu::absolute(env(name)?));
    let prefixes = own.into_iter().chain(active).chain(gpu::pythons(&env));
    let libraries = prefixes.map(|prefix| prefix.join("lib")).filter(|p| p.is_dir()).collect();
    Folders { loader: gpu::loader(&env), libraries, owners: gpu::owners(&env), ..Folders::default() }
}

/// The library of MPI, and what it says it is.
pub fn mpi() -> (Found, Option<String>) {
    let folders = folders();
    (mpi::find(&folders), mpi::version(&folders).ok())
}

/// The library of NCCL, and its version.
pub fn nccl() -> (Found, Result<String, engine::Error>) {
    let folders = gpu::folders();
    (nccl::find(&folders), nccl::version(&folders).map(nccl::version_text))
}

/// The program of this library that starts ranks: beside it, or on PATH. Nobody else may have put it there, as with libraries.
pub fn mpiexec(library: &Path) -> Result<PathBuf, String> {
    mpiexec_in(library, &std::env::var_os("PATH").unwrap_or_default(), &gpu::owners(&|name| std::env::var_os(name)))
}

fn mpiexec_in(library: &Path, path: &OsStr, owners: &[u32]) -> Result<PathBuf, String> {
    let beside = library.parent().and_then(Path::parent).map(|prefix| prefix.join("bin"));
    let mut why = format!("{} was found, and mpiexec neither beside it nor on PATH: `pip install mpich` has both", library.display());
    let absolute = beside.into_iter().chain(std::env::split_paths(path)).filter(|p| p.is_absolute());
    for program in absolute.map(|f| f.join("mpiexec")).filter(|p| p.is_file()) {
        match engine::mutant!("an-mpiexec-of-anybodys", engine::cuda::trusted(&program, owners), Ok(())) {
            Ok(()) => return Ok(program),
            Err(other) => why = other,
        }
    }
    Err(why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn variables_that_are_set_but_empty_or_relative_name_no_environment() {
        let dir = tempfile::tempdir().unwrap();
        let lib = dir.path().join("lib");
        fs::create_dir(&lib).unwrap();
        let of = |name: &'static str, value: &OsStr| {
            let value = value.to_os_string();
            folders_of(move |asked| (asked == name).then(|| value.clone()), None).libraries
        };
        for name in ["CONDA_PREFIX", "VIRTUAL_ENV"] {
            assert_eq!(of(name, dir.path().as_os_str()), std::slice::from_ref(&lib), "{name}");
            // `src/../lib`, `./lib`: the working directory's. The tests' has a folder `src`.
            for value in ["", ".", "..", "src/.."] {
                assert!(of(name, value.as_ref()).is_empty(), "{name}={value:?}");
            }
        }
        // A relative path that leads to a folder which is there.
        let here = std::env::current_dir().unwrap();
        let up: PathBuf = here.components().skip(1).map(|_| "..").collect();
        let relative = up.join(dir.path().strip_prefix("/").unwrap());
        assert!(relative.join("lib").is_dir() && of("CONDA_PREFIX", relative.as_os_str()).is_empty());
        assert_eq!(folders_of(|_| None, Some(&dir.path().join("bin/kiln"))).libraries, [lib]);
        assert!(
            folders_of(|_| None, Some(&dir.path().join("kiln-0.1.0/kiln"))).libraries.is_empty(),
            "an unpacked archive is no environment"
        );
    }

    #[test]
    fn an_mpiexec_that_others_could_have_written_is_not_started() {
        let dir = tempfile::tempdir().unwrap();
        let [own, other] = ["own", "other"].map(|name| {
            let bin = dir.path().join(name).join("bin");
            fs::create_dir_all(&bin).unwrap();
            fs::write(bin.join("mpiexec"), "").unwrap();
            for path in [bin.parent().unwrap(), &bin, &bin.join("mpiexec")] {
                fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
            }
            bin.join("mpiexec")
        });
        let library = dir.path().join("own/lib/libmpi_abi.so.1");
        let found = |path: &str| mpiexec_in(&library, path.as_ref(), &[]);
        let path = other.parent().unwrap().to_str().unwrap().to_string();
        assert_eq!(found(""), Ok(own.clone()));
        fs::set_permissions(&own, Permissions::from_mode(0o777)).unwrap();
        assert_eq!(found(&path), Ok(other.clone()), "the next one is taken");
        let why = found("").unwrap_err();
        assert!(why.contains(own.to_str().unwrap()) && why.contains("everybody may write to it (chmod o-w)"), "{why}");
        fs::remove_file(&own).unwrap();
        for relative in ["", ".", "bin", "::"] {
            assert!(found(relative).unwrap_err().contains("neither beside it nor on PATH"), "{relative}");
        }
    }
}
