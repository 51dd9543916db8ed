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
    let mpi = Mpi::connect(&folders())?;
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
        Some(path) => format!("`{} -n {} {} train ..`", path.display(), world.size, crate::program()),
        None => "the mpiexec of that library".into(),
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
    let env = |name: &str| std::env::var_os(name);
    let split = |name: &str| env(name).map(|v| std::env::split_paths(&v).collect::<Vec<_>>()).unwrap_or_default();
    let own = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.parent()?.to_path_buf()));
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env).map(PathBuf::from);
    let pythons = split("PATH").into_iter().filter(|p| p.join("python3").exists()).filter_map(|p| p.parent().map(Path::to_path_buf));
    let prefixes = own.into_iter().chain(active).chain(pythons).map(|prefix| prefix.join("lib"));
    let libraries = split("LD_LIBRARY_PATH").into_iter().chain(prefixes).filter(|p| p.is_dir()).collect();
    Folders { libraries, ..Folders::default() }
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

/// The program of this library that starts ranks: beside it, or on PATH.
pub fn mpiexec(library: &Path) -> Option<PathBuf> {
    let beside = library.parent().and_then(Path::parent).map(|prefix| prefix.join("bin"));
    let path = std::env::var_os("PATH").map(|v| std::env::split_paths(&v).collect::<Vec<_>>()).unwrap_or_default();
    let folders = || beside.iter().chain(&path);
    folders().map(|f| f.join("mpiexec")).find(|p| p.is_file())
}
