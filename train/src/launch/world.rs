//! Which rank this process is, from the environment variables that launchers set.

/// What a launcher told this process.
#[derive(Clone, Debug, PartialEq)]
pub struct World {
    /// Who started it, for messages.
    pub launcher: &'static str,
    /// Which rank this is.
    pub rank: usize,
    /// How many there are, on all machines.
    pub size: usize,
    /// Which of the ranks on this machine this is.
    pub local_rank: usize,
    /// How many ranks this machine has, where the launcher says so.
    pub local_size: Option<usize>,
    /// Where ranks find each other without MPI: a host and a port of rank 0's machine.
    pub address: Option<String>,
    /// What tells this job from others that meet at the same address: of Slurm's tasks the numbers of job and step, else 0.
    pub job: u64,
    /// Cores that the launcher gave to this rank alone.
    pub cores: Option<usize>,
    /// Whether it is a task of Slurm's, which may show every task its own GPU alone.
    pub is_slurms: bool,
}

/// The variables of one launcher; of several names, the first that is set.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    size: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
    /// Sets its variables also where it has not started this process as one of several.
    is_ambient: bool,
}

/// In the order in which they are looked at. Hydra is the `mpiexec` of MPICH; Slurm has PMI_RANK too with `srun --mpi=pmi2`.
const LAUNCHERS: &[Launcher] = &[
    Launcher {
        name: "torchrun",
        rank: "RANK",
        size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
        is_ambient: false,
    },
    Launcher {
        name: "Open MPI's mpirun",
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        is_ambient: false,
    },
    Launcher {
        name: "mpiexec",
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"],
        local_size: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        is_ambient: false,
    },
    Launcher {
        name: "srun",
        rank: "SLURM_PROCID",
        size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        local_size: &[],
        is_ambient: true,
    },
];

/// Variables by which a process would take itself for a rank: what is started anew does without those of its parent.
pub fn variables() -> impl Iterator<Item = &'static str> {
    let own = LAUNCHERS.iter().filter(|l| !l.is_ambient);
    own.flat_map(|l| [l.rank].into_iter().chain(l.size.iter().chain(l.local_rank).chain(l.local_size).copied()))
        .filter(|v| *v != "SLURM_LOCALID")
}

/// Slurm numbers the steps that `srun` starts from 0; a batch script and an interactive shell have none, or one of the last numbers.
const SPECIAL_STEPS: u64 = 0xffff_fff0;

type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

impl World {
    /// What this process was told; none where it trains alone. `even_one`: one rank that a launcher started counts, too.
    pub fn of_process(even_one: bool) -> Result<Option<World>, String> {
        let world = World::read(&|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))?;
        Ok(world.filter(|w| w.size > 1 || even_one))
    }

    fn read(env: Env) -> Result<Option<World>, String> {
        let env: Env = &|name| env(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty());
        let step = number(env, "SLURM_STEP_ID")?.is_some_and(|id| id < SPECIAL_STEPS);
        let started = |l: &&Launcher| env(l.rank).is_some() && (!l.is_ambient || step);
        let Some(l) = LAUNCHERS.iter().find(started) else { return nobody(env) };
        let (rank, size) = (needed(env, l, &[l.rank])?, needed(env, l, l.size)?);
        let (rank_name, size_name) = (l.rank, named(env, l.size));
        if size == 0 {
            return Err(format!("{size_name} is 0: a job of {} has one rank at least", l.name));
        }
        if rank >= size {
            return Err(format!("{rank_name} is {rank} and {size_name} is {size}: ranks are numbered from 0 to {}", size - 1));
        }
        let local_rank = if size == 1 { 0 } else { needed(env, l, l.local_rank)? };
        let local_size = match first(env, l.local_size)? {
            Some(n) => Some(n),
            None => tasks_here(env)?.filter(|_| step),
        };
        let most = local_size.unwrap_or(size).min(size);
        if local_rank >= most {
            let name = named(env, l.local_rank);
            return Err(format!("{name} is {local_rank}, and this machine has {most} of the job's {size} ranks: they are numbered from 0"));
        }
        let cores = if step { number(env, "SLURM_CPUS_PER_TASK")?.map(|n| n.max(1) as usize) } else { None };
        // torchrun and mpirun may have been started by a step for each machine.
        let job = match step && ["srun", "mpiexec"].contains(&l.name) {
            true => number(env, "SLURM_JOB_ID")?.unwrap_or(0) << 32 | number(env, "SLURM_STEP_ID")?.unwrap_or(0),
            false => 0,
        };
        let address = address(env, job & 0xffff_ffff)?;
        Ok(Some(World { launcher: l.name, rank, size, local_rank, local_size, address, job, cores, is_slurms: step }))
    }

    /// Threads of a rank on the CPU: its share of this machine's cores.
    pub fn threads(&self) -> usize {
        let all = std::thread::available_parallelism().map_or(1, |n| n.get());
        self.cores.unwrap_or(all / self.local_size.unwrap_or(self.size).max(1)).clamp(1, all)
    }
}

/// No launcher has said which rank this is; one that said how many there are has been lost on the way.
fn nobody(env: Env) -> Result<Option<World>, String> {
    for l in LAUNCHERS.iter().filter(|l| !l.is_ambient) {
        if first(env, l.size)?.is_some_and(|n| n > 1) {
            let (size, rank) = (named(env, l.size), l.rank);
            return Err(format!("{size} is set and {rank} is not: {} sets both (unset {size} to train with one rank)", l.name));
        }
    }
    Ok(None)
}

/// The variable of these that is set; the first where none is.
fn named(env: Env, names: &[&'static str]) -> &'static str {
    names.iter().find(|n| env(n).is_some()).unwrap_or(&names[0])
}

fn number(env: Env, name: &str) -> Result<Option<u64>, String> {
    env(name).map(|v| v.parse().map_err(|_| format!("{name} is '{v}': it is to be a whole number, from 0"))).transpose()
}

fn first(env: Env, names: &[&'static str]) -> Result<Option<usize>, String> {
    match names {
        [] => Ok(None),
        names => Ok(number(env, named(env, names))?.map(|n| n as usize)),
    }
}

fn needed(env: Env, l: &Launcher, names: &[&'static str]) -> Result<usize, String> {
    let missing = || format!("{} is set and {} is not: {} sets both (unset {} to train with one rank)", l.rank, names[0], l.name, l.rank);
    first(env, names)?.ok_or_else(missing)
}

/// MASTER_ADDR and MASTER_PORT; in a job of Slurm, its first machine and a port that follows from the numbers of the job and its step.
fn address(env: Env, step: u64) -> Result<Option<String>, String> {
    let nodes = env("SLURM_STEP_NODELIST").or_else(|| env("SLURM_JOB_NODELIST"));
    let Some(host) = env("MASTER_ADDR").or_else(|| nodes.map(|n| first_host(&n))) else { return Ok(None) };
    // torchrun's agent listens there itself, and says so.
    let agent = env("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v == "True") as u64;
    let port = match (number(env, "MASTER_PORT")?, number(env, "SLURM_JOB_ID")?) {
        (Some(port @ 1..=65535), _) => (port + agent).min(65535),
        (Some(port), _) => return Err(format!("MASTER_PORT is {port}: ports are from 1 to 65535")),
        // Below the ports that the system hands out itself; steps of one job are further apart than the ports that are tried.
        (None, Some(job)) => 10_000 + (job % 20_000 + step % 20_000 * 97) % 20_000,
        (None, None) => return Err("MASTER_ADDR is set and MASTER_PORT is not: torchrun sets both".into()),
    };
    Ok(Some(format!("{host}:{port}")))
}

/// The first machine of Slurm's short form: `gpu[003-010,12],login1` begins with gpu003.
fn first_host(nodes: &str) -> String {
    let (mut host, mut rest) = (String::new(), nodes);
    while let Some(at) = rest.find(['[', ',']) {
        host += &rest[..at];
        if rest[at..].starts_with(',') {
            return host;
        }
        let end = rest[at..].find(']').map_or(rest.len(), |n| at + n);
        host += rest[at + 1..end].split([',', '-']).next().unwrap_or_default();
        rest = rest.get(end + 1..).unwrap_or_default();
    }
    host + rest
}

/// How many tasks of Slurm's step this machine has: `2(x3),1` is three machines with two and one with one.
fn tasks_here(env: Env) -> Result<Option<usize>, String> {
    let Some(text) = env("SLURM_STEP_TASKS_PER_NODE").or_else(|| env("SLURM_TASKS_PER_NODE")) else { return Ok(None) };
    let mut node = number(env, "SLURM_NODEID")?.unwrap_or(0) as usize;
    for part in text.split(',') {
        let (tasks, times) = part.split_once("(x").unwrap_or((part, "1"));
        let (Ok(tasks), Ok(times)) = (tasks.parse(), times.trim_end_matches(')').parse::<usize>()) else { return Ok(None) };
        match node < times {
            true => return Ok(Some(tasks)),
            false => node -= times,
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `A=1 B=x` as an environment.
    fn read(text: &str) -> Result<Option<World>, String> {
        World::read(&|name| {
            text.split_whitespace().find_map(|pair| Some(pair.split_once('=')?).filter(|p| p.0 == name)?.1.to_string().into())
        })
    }

    fn world(launcher: &'static str, [rank, size, local_rank]: [usize; 3], local_size: Option<usize>, address: Option<&str>) -> World {
        let is_slurms = launcher == "srun";
        let job = if is_slurms { 77 << 32 } else { 0 };
        World { launcher, rank, size, local_rank, local_size, address: address.map(Into::into), job, cores: None, is_slurms }
    }

    const TORCHRUN: &str = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=gpu1 MASTER_PORT=29500";
    const OPEN_MPI: &str =
        "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=3";
    const HYDRA: &str = "PMI_RANK=1 PMI_SIZE=2 PMI_FD=9 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
    /// What `sbatch --ntasks 4` sets for the script itself.
    const BATCH: &str =
        "SLURM_JOB_ID=77 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NODELIST=n[7-8]";
    /// What srun adds.
    const TASK: &str = "SLURM_JOB_ID=77 SLURM_NTASKS=4 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_JOB_NODELIST=n[07-08]";

    #[test]
    fn every_launcher_is_understood() {
        let found = |text: &str| read(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(found(TORCHRUN), Some(world("torchrun", [5, 8, 1], Some(4), Some("gpu1:29500"))));
        assert_eq!(found(OPEN_MPI), Some(world("Open MPI's mpirun", [3, 4, 1], Some(2), None)));
        assert_eq!(found(HYDRA), Some(world("mpiexec", [1, 2, 1], Some(2), None)));
        assert_eq!(found(TASK), Some(world("srun", [3, 4, 1], Some(2), Some("n07:10077"))));
        let pmi2 = format!("{TASK} PMI_RANK=3 PMI_SIZE=4 PMI_FD=9");
        let of_slurm = World { is_slurms: true, job: 77 << 32, ..world("mpiexec", [3, 4, 1], Some(2), Some("n07:10077")) };
        assert_eq!(found(&pmi2), Some(of_slurm));
        let agent = format!("{TORCHRUN} TORCHELASTIC_USE_AGENT_STORE=True");
        assert_eq!(found(&agent).unwrap().address.unwrap(), "gpu1:29501", "the agent has the other");
        let with_cores = World { cores: Some(6), ..found(TASK).unwrap() };
        assert_eq!(found(&format!("{TASK} SLURM_CPUS_PER_TASK=6")), Some(with_cores.clone()));
        let machine = std::thread::available_parallelism().unwrap().get();
        assert_eq!(with_cores.threads(), machine.min(6));
        assert_eq!(World { cores: Some(1 << 20), ..with_cores }.threads(), machine, "no more threads than cores");
        // Two steps of one job, and a step that starts torchrun.
        let second = found(&TASK.replace("SLURM_STEP_ID=0", "SLURM_STEP_ID=1")).unwrap();
        assert_eq!((second.address.as_deref(), second.job), (Some("n07:10174"), 77 << 32 | 1));
        let by_step = found(&format!("{TORCHRUN} {TASK}")).unwrap();
        assert_eq!((by_step.launcher, by_step.job), ("torchrun", 0));
        // torchrun inside of a job of Slurm, and a script that exports what it needs elsewhere.
        assert_eq!(found(&format!("{TORCHRUN} {BATCH}")).unwrap().launcher, "torchrun");
        assert_eq!(
            found(&format!("{TASK} WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=9")),
            Some(world("srun", [3, 4, 1], Some(2), Some("h:9")))
        );
    }

    #[test]
    fn one_rank_is_no_job() {
        for text in [
            "",
            "PATH=/bin RANK= WORLD_SIZE=",
            "RANK=0 WORLD_SIZE=1",
            "WORLD_SIZE=1",
            "PMI_RANK=0 PMI_SIZE=1",
            BATCH,
            // The step of a batch script, and that of a shell that salloc opened.
            &format!("{BATCH} SLURM_STEP_ID=4294967291"),
            &format!("{BATCH} SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1"),
            "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_ID=2 SLURM_STEP_NUM_TASKS=1",
        ] {
            assert_eq!(read(text).map(|w| w.filter(|w| w.size > 1)), Ok(None), "{text}");
        }
    }

    #[test]
    fn what_does_not_fit_together_is_an_error_that_names_the_variable() {
        let torchrun = |from: &str, to: &str| {
            assert!(TORCHRUN.contains(from));
            TORCHRUN.replace(from, to)
        };
        for (text, says) in [
            (torchrun("RANK=5 ", "RANK=8 "), "RANK is 8 and WORLD_SIZE is 8: ranks are numbered from 0 to 7"),
            (torchrun("RANK=5 ", "RANK=-1 "), "RANK is '-1'"),
            (torchrun("RANK=5 ", "RANK=five "), "RANK is 'five': it is to be a whole number"),
            (torchrun("WORLD_SIZE=8 ", " "), "RANK is set and WORLD_SIZE is not: torchrun sets both (unset RANK"),
            (torchrun("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1", "WORLD_SIZE=8"), "WORLD_SIZE is set and RANK is not"),
            (torchrun("LOCAL_RANK=1 ", ""), "RANK is set and LOCAL_RANK is not"),
            (torchrun("LOCAL_RANK=1 ", "LOCAL_RANK=4 "), "LOCAL_RANK is 4, and this machine has 4 of the job's 8 ranks"),
            (torchrun("29500", "70000"), "MASTER_PORT is 70000"),
            (torchrun("29500", "http"), "MASTER_PORT is 'http'"),
            (torchrun("MASTER_PORT=29500", ""), "MASTER_ADDR is set and MASTER_PORT is not"),
            ("RANK=0 WORLD_SIZE=0".into(), "WORLD_SIZE is 0"),
            (OPEN_MPI.replace("WORLD_SIZE=4", "WORLD_SIZE=3"), "OMPI_COMM_WORLD_RANK is 3 and OMPI_COMM_WORLD_SIZE is 3"),
            (OPEN_MPI.replace("OMPI_COMM_WORLD_LOCAL_RANK=1", ""), "OMPI_COMM_WORLD_LOCAL_RANK is not"),
            (HYDRA.replace("PMI_SIZE=2", ""), "PMI_RANK is set and PMI_SIZE is not"),
            (HYDRA.replace("PMI_RANK=1", ""), "PMI_SIZE is set and PMI_RANK is not"),
            (TASK.replace("SLURM_LOCALID=1", ""), "SLURM_PROCID is set and SLURM_LOCALID is not"),
            (TASK.replace("SLURM_PROCID=3", "SLURM_PROCID=9"), "SLURM_PROCID is 9 and SLURM_STEP_NUM_TASKS is 4"),
            (TASK.replace("SLURM_STEP_ID=0", "SLURM_STEP_ID=x"), "SLURM_STEP_ID is 'x'"),
        ] {
            let found = read(&text);
            assert!(found.as_ref().is_err_and(|e| e.contains(says)), "{text}: {found:?}, not {says}");
        }
    }

    #[test]
    fn slurms_short_forms() {
        let hosts = ["gpu[003-010,12],login1", "a-b1,c", "rack[1-2]node[30-40],x", "one", "n[7", ""];
        assert_eq!(hosts.map(first_host), ["gpu003", "a-b1", "rack1node30", "one", "n7", ""]);
        let tasks = |text: &str, node: &str| {
            let env = format!("SLURM_TASKS_PER_NODE={text} SLURM_NODEID={node}");
            tasks_here(&|name| env.split(' ').find_map(|p| Some(p.split_once('=')?).filter(|p| p.0 == name)?.1.to_string().into()))
        };
        assert_eq!(
            [tasks("2(x3),1", "0"), tasks("2(x3),1", "3"), tasks("2(x3),1", "4"), tasks("4,x", "1")],
            [Ok(Some(2)), Ok(Some(1)), Ok(None), Ok(None)]
        );
    }
}
