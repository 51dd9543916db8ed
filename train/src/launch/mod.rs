//! Several ranks: which of them this process is, how it reaches the others, and how they are started on this machine.
//!
//! | file | is |
//! |---|---|
//! | `world.rs` | rank and size from the variables of torchrun, Open MPI, Hydra (MPICH's `mpiexec`) and Slurm |
//! | `local.rs` | `kiln train --ranks N`: starts them, passes signals on, waits |

mod local;
mod world;

pub use local::start;
pub use world::World;

use crate::recipe::TrainError;
use crate::{gpu, warn};
use engine::cuda::{Folders, Found};
use engine::ranks::mpi::{self, Mpi};
use engine::{Device, Ranks};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// The connection, for the end of the process.
static CONNECTED: OnceLock<Mpi> = OnceLock::new();

/// Connects this process to the other ranks of its job; `tensor` of them share the weights of one model.
pub fn connect(world: &World, tensor: usize, device: &Device) -> Result<Ranks, TrainError> {
    if device.gpu().is_some() {
        let size = world.size;
        return Err(TrainError::Other(format!(
            "{size} ranks on GPUs need NCCL, which this version cannot use yet: --device cpu, or one rank"
        )));
    }
    let mpi = Mpi::connect(&folders())?;
    if (mpi.rank, mpi.size) != (world.rank, world.size) {
        return Err(TrainError::Other(strangers(world, &mpi)));
    }
    let mpi = CONNECTED.get_or_init(|| mpi);
    Ok(mpi.ranks(tensor)?)
}

/// What connects the ranks, for people: `MPICH 5.0.2`.
pub fn connection() -> Option<String> {
    CONNECTED.get().map(Mpi::version)
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
    if let Some(e) = CONNECTED.get().and_then(|mpi| mpi.finish().err()) {
        warn!("{e}");
    }
}

/// `mpiexec` ends everything at once when a rank gives up, and shows what the rank has said only if it has read it by then.
const HEARD: Duration = Duration::from_millis(500);

/// Ends the other ranks, which would wait for this one for ever, and then this process. Does nothing where it is alone.
pub fn abort(status: u8) {
    if let Some(mpi) = CONNECTED.get() {
        gpu::remove_own_cache();
        std::thread::sleep(HEARD);
        mpi.abort(status.into());
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

/// The program of this library that starts ranks: beside it, or on PATH.
pub fn mpiexec(library: &Path) -> Option<PathBuf> {
    let beside = library.parent().and_then(Path::parent).map(|prefix| prefix.join("bin"));
    let path = std::env::var_os("PATH").map(|v| std::env::split_paths(&v).collect::<Vec<_>>()).unwrap_or_default();
    let folders = || beside.iter().chain(&path);
    folders().map(|f| f.join("mpiexec")).find(|p| p.is_file())
}
