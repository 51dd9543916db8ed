//! Ranks on GPUs: which GPU a rank has, what NCCL is told, and what happens when a rank is gone.

use super::World;
use super::meet::{self, Lines, Place};
use crate::recipe::TrainError;
use crate::{gpu, warn};
use engine::cuda::nccl::{self, ID_BYTES, Id, Nccl};
use engine::ranks::mpi::Mpi;
use engine::{Cuda, Ranks};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What NCCL is told where the user has not said anything: always the same way to add up, so that a run repeats bit for bit, which NVLS does not; and not to
/// exchange addresses of buffers while a program is captured, since a rank may capture one that the others have captured before.
const PINNED: [(&str, &str); 3] = [("NCCL_ALGO", "Ring"), ("NCCL_NVLS_ENABLE", "0"), ("NCCL_GRAPH_REGISTER", "0")];
/// Whether ranks may share a GPU.
const SHARING: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// After another rank is gone: whoever started this one has so long to end it, and the other to say why.
const GRACE: Duration = Duration::from_secs(2);
/// How often NCCL is asked whether it has noticed something.
const LOOK: Duration = Duration::from_secs(1);

/// This process as a rank on a GPU.
pub struct Gpus {
    nccl: Nccl,
    /// Connections that show whether the others are still there; none where `mpi` looks after that.
    lines: Option<Lines>,
    mpi: Option<Mpi>,
    settings: String,
}

fn own_variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Tells NCCL what the user has left open; before the GPU is opened, while there are no threads that could look at the environment.
pub fn prepare(world: &World) {
    let mut all = settings(own_variable).0;
    all.extend(loopback(world, own_variable));
    nccl::set_variables(&all);
}

/// Of ranks that are all on this machine, NCCL's own sockets are on loopback, too: it listens on the machine's address otherwise, for everybody in the network.
fn loopback(world: &World, env: impl Fn(&str) -> Option<String>) -> Option<(&'static str, &'static str)> {
    const INTERFACE: &str = "NCCL_SOCKET_IFNAME";
    let is_open = env(INTERFACE).is_none_or(|v| v.is_empty());
    (is_open && engine::mutant!("nccl-listens-for-the-network", world.local_size == Some(world.size), false)).then_some((INTERFACE, "lo"))
}

/// Set once this rank is about to end as it should: others may do so first.
static ENDS: AtomicBool = AtomicBool::new(false);

impl Gpus {
    /// Connects this rank to the others; `tensor` of them share the weights of one model.
    pub fn connect(world: &World, tensor: usize, cuda: &Cuda) -> Result<Gpus, TrainError> {
        super::local::end_with_parent().map_err(|e| TrainError::Other(e.to_string()))?;
        let (folders, (_, settings)) = (gpu::folders(), settings(own_variable));
        // An error of every rank, and not only of the first, for which the others would wait.
        nccl::version(&folders)?;
        let draw = || Ok(nccl::ids(&folders, world.size, tensor)?.iter().flat_map(|id| id.0).collect::<Vec<u8>>());
        let (bytes, lines, mpi) = match &world.address {
            Some(address) => {
                let secret = own_variable(meet::SECRET).unwrap_or_default();
                if let Some(words) = unguarded(world, address, &secret) {
                    warn!("{words}");
                }
                let place = Place::new(address, world.rank, world.size)?.of_job(world.job).with_secret(secret);
                let place = if world.local_size == Some(world.size) { place.on_this_machine() } else { place };
                let (bytes, lines) = place.meet(draw)?;
                (bytes, Some(lines), None)
            }
            None if world.size == 1 => (draw()?, None, None),
            None => {
                let (bytes, mpi) = by_mpi(world, draw)?;
                (bytes, None, Some(mpi))
            }
        };
        // From here on ranks wait for each other.
        if let Some(lines) = &lines {
            let watched = lines.watch(|rank| lost(&format!("rank {rank} has ended")));
            watched.map_err(|e| TrainError::Other(format!("the other ranks cannot be watched: {e}")))?;
        }
        let ids: Vec<Id> = bytes.chunks_exact(ID_BYTES).map(|id| Id(id.try_into().expect("as many bytes"))).collect();
        let nccl = Nccl::connect(cuda, &folders, &ids, [world.rank, world.size, tensor])?;
        let asked = nccl.clone();
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(LOOK);
                if let Some(problem) = asked.problem() {
                    lost(&problem);
                }
            }
        });
        Ok(Gpus { nccl, lines, mpi, settings })
    }

    pub fn ranks(&self) -> Ranks {
        self.nccl.ranks()
    }

    /// `NCCL 2.30.7 (NCCL_ALGO=Ring, NCCL_NVLS_ENABLE=0, NCCL_GRAPH_REGISTER=0)`
    pub fn describe(&self) -> String {
        format!("{} ({})", self.nccl.version(), self.settings)
    }

    /// Waits for the others, and says that this rank has come to a good end.
    pub fn finish(&self) -> Result<(), engine::Error> {
        self.nccl.finish()?;
        ENDS.store(true, Ordering::SeqCst);
        self.lines.iter().for_each(Lines::goodbye);
        self.mpi.as_ref().map_or(Ok(()), Mpi::finish)
    }

    /// Ends this process; the others notice.
    pub fn abort(&self, status: u8) -> ! {
        let _ = std::io::stdout().flush();
        match &self.mpi {
            Some(mpi) => mpi.abort(status.into()),
            None => nccl::leave(status.into()),
        }
    }
}

/// What the first rank says of a job without a secret.
fn unguarded(world: &World, address: &str, secret: &str) -> Option<String> {
    let is_open = secret.is_empty() && world.rank == 0 && world.size > 1;
    engine::mutant!("a-job-without-a-secret-says-nothing", is_open, false).then(|| format!(
        "the ranks meet at {address} without a secret: until all have come, any process that reaches that port can take the place of a rank or end the job \
         ({}=TEXT, the same random text for all ranks, keeps others out)",
        meet::SECRET
    ))
}

/// What NCCL must still be told, and all that it is told then, for people.
fn settings(env: impl Fn(&str) -> Option<String>) -> (Vec<(&'static str, &'static str)>, String) {
    let own = |name: &str| env(name).filter(|v| !v.is_empty());
    let unset = PINNED.into_iter().filter(|(name, _)| own(name).is_none()).collect();
    let all: Vec<String> = PINNED.iter().map(|(name, value)| format!("{name}={}", own(name).unwrap_or(value.to_string()))).collect();
    (unset, all.join(", "))
}

/// Another rank is gone, for which this one would wait for ever.
fn lost(why: &str) {
    std::thread::sleep(GRACE);
    if ENDS.load(Ordering::SeqCst) {
        return;
    }
    warn!("error: {why}, and this rank cannot go on without it");
    gpu::remove_own_cache();
    nccl::leave(1);
}

/// The first rank's bytes by MPI, for ranks that `mpiexec` started without an address.
fn by_mpi(world: &World, draw: impl FnOnce() -> Result<Vec<u8>, TrainError>) -> Result<(Vec<u8>, Mpi), TrainError> {
    let address = "MASTER_ADDR and MASTER_PORT are not set (a host of the job and a free port there; torchrun and --ranks set both)";
    let mpi =
        Mpi::connect(&super::folders()).map_err(|e| TrainError::Other(format!("the ranks cannot find each other: {address}, and {e}")))?;
    if (mpi.rank, mpi.size) != (world.rank, world.size) {
        return Err(TrainError::Other(format!("the ranks cannot find each other: {address}, and {}", super::strangers(world, &mpi))));
    }
    let own = if world.rank == 0 { draw()? } else { vec![] };
    let bytes = mpi.ranks(1)?.gather(&own)?.swap_remove(0);
    Ok((bytes, mpi))
}

/// What decides which GPU a rank has, beside its number.
struct Machine {
    gpus: usize,
    /// CUDA_VISIBLE_DEVICES.
    visible: Option<String>,
    /// NCCL_MULTI_RANK_GPU_ENABLE=1.
    sharing: bool,
    /// NCCL's.
    version: Option<i32>,
}

/// The number of this rank's GPU.
pub fn which(world: &World) -> Result<usize, String> {
    let gpus = gpu::count();
    if gpus == 0 {
        // Says what is missing.
        return gpu::open("cuda", None).map(|_| 0);
    }
    let sharing = std::env::var(SHARING).is_ok_and(|v| v == "1");
    let version = sharing.then(|| nccl::version(&gpu::folders()).ok()).flatten();
    Machine { gpus, visible: std::env::var("CUDA_VISIBLE_DEVICES").ok(), sharing, version }.gpu_of(world)
}

impl Machine {
    fn gpu_of(&self, world: &World) -> Result<usize, String> {
        let (rank, gpus, here) = (world.local_rank, self.gpus.max(1), world.local_size.unwrap_or(world.local_rank + 1));
        if here <= gpus {
            return Ok(rank);
        }
        let some = format!("{gpus} GPU{}", if gpus == 1 { "" } else { "s" });
        let least = nccl::version_text(nccl::SHARES_GPUS);
        if self.sharing {
            return match self.version {
                Some(version) if version < nccl::SHARES_GPUS => Err(format!(
                    "this machine has {here} ranks and {some}: {SHARING}=1 is set, but NCCL {} lets no ranks share a GPU; {least} does",
                    nccl::version_text(version)
                )),
                _ => Ok(rank % gpus),
            };
        }
        // A launcher that gives every rank a GPU shows it that one alone.
        let is_one = |devices: &String| !devices.is_empty() && !devices.contains(',');
        if gpus == 1 && (self.visible.as_ref().is_some_and(is_one) || world.is_slurms) {
            return Ok(0);
        }
        Err(format!(
            "this machine has {here} ranks and {some}: start one rank for each GPU (ranks share a GPU only with NCCL {least} or later and {SHARING}=1)"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(local_rank: usize, local_size: Option<usize>) -> World {
        World { launcher: "torchrun", rank: 5, size: 8, local_rank, local_size, address: None, job: 0, cores: None, is_slurms: false }
    }

    fn machine(gpus: usize) -> Machine {
        Machine { gpus, visible: None, sharing: false, version: Some(23007) }
    }

    #[test]
    fn every_rank_has_a_gpu_of_its_own() {
        assert_eq!(machine(4).gpu_of(&world(3, Some(4))), Ok(3));
        assert_eq!(machine(4).gpu_of(&world(3, None)), Ok(3));
        let few = machine(2).gpu_of(&world(1, Some(4))).unwrap_err();
        assert!(few.contains("4 ranks and 2 GPUs") && few.contains("NCCL 2.30.3") && few.contains("NCCL_MULTI_RANK_GPU_ENABLE=1"), "{few}");
        assert!(machine(2).gpu_of(&world(2, None)).is_err());
    }

    #[test]
    fn ranks_share_a_gpu_where_that_is_asked_for_and_nccl_can() {
        let sharing = |version| Machine { sharing: true, version, ..machine(2) };
        assert_eq!((0..4).map(|r| sharing(Some(23003)).gpu_of(&world(r, Some(4))).unwrap()).collect::<Vec<_>>(), [0, 1, 0, 1]);
        let old = sharing(Some(22809)).gpu_of(&world(1, Some(4))).unwrap_err();
        assert!(old.contains("NCCL 2.28.9 lets no ranks share a GPU; 2.30.3 does"), "{old}");
    }

    #[test]
    fn a_launcher_may_show_each_rank_its_own_gpu_alone() {
        assert_eq!(Machine { visible: Some("3".into()), ..machine(1) }.gpu_of(&world(3, Some(4))), Ok(0));
        assert_eq!(machine(1).gpu_of(&World { is_slurms: true, ..world(3, Some(4)) }), Ok(0));
        assert!(Machine { visible: Some("".into()), ..machine(1) }.gpu_of(&world(3, Some(4))).is_err());
    }

    #[test]
    fn a_job_without_a_secret_is_warned_of_once() {
        let of = |rank, size, secret: &str| unguarded(&World { rank, size, ..world(0, Some(1)) }, "node0:29500", secret);
        let said = of(0, 2, "").unwrap();
        assert!(said.contains("node0:29500") && said.contains("without a secret") && said.contains("KILN_JOB_SECRET="), "{said}");
        assert_eq!(
            (of(1, 2, ""), of(0, 2, "words"), of(0, 1, "")),
            (None, None, None),
            "by the first rank, of a job that has none, of several ranks"
        );
    }

    #[test]
    fn ranks_of_one_machine_talk_on_loopback() {
        let here = World { size: 4, ..world(0, Some(4)) };
        assert_eq!(loopback(&here, |_| None), Some(("NCCL_SOCKET_IFNAME", "lo")));
        assert_eq!(loopback(&here, |_| Some(String::new())), Some(("NCCL_SOCKET_IFNAME", "lo")));
        assert_eq!(loopback(&here, |name| (name == "NCCL_SOCKET_IFNAME").then(|| "eth0".into())), None, "the user's own word stays");
        for elsewhere in [world(0, Some(4)), world(0, None), World { size: 1, ..world(0, None) }] {
            assert_eq!(loopback(&elsewhere, |_| None), None, "{elsewhere:?}");
        }
    }

    #[test]
    fn what_the_user_has_set_stays() {
        let (unset, all) = settings(|name| (name == "NCCL_ALGO").then(|| "Tree".into()));
        assert_eq!((unset, all.as_str()), (PINNED[1..].to_vec(), "NCCL_ALGO=Tree, NCCL_NVLS_ENABLE=0, NCCL_GRAPH_REGISTER=0"));
        assert_eq!(settings(|_| None).0, PINNED);
    }
}
