//! `kiln train --ranks N`: N processes on this machine, and a parent that passes signals on, waits, and ends with the status of the rank that failed.

use super::{World, gpu_of, meet, mpi, mpiexec, world};
use crate::warn;
use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use signal_hook::consts::{SIGHUP, SIGTERM};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// After a rank has failed, the others have this long to end by themselves.
const GRACE: Duration = Duration::from_secs(3);
/// How often the parent looks.
const LOOK: Duration = Duration::from_millis(30);
/// How often MPICH asks whether a message has come before it lets other processes run. Its default makes ranks wait for those that have no core:
/// 4 ranks on 2 busy cores took 11.8 s for 40 steps, and 2.3 s with 1.
const POLLS: (&str, &str) = ("MPIR_CVAR_POLLS_BEFORE_YIELD", "1");
/// MPICH's ranks listen on the machine's addresses too, though they talk by shared memory: of those that are all here, on loopback alone. By its two
/// ways to reach a network, UCX and libfabric.
const LOOPBACK: [(&str, &str); 2] = [("UCX_NET_DEVICES", "lo"), ("FI_TCP_IFACE", "lo")];
/// The process that started a rank, which the rank does not outlive.
const PARENT: &str = "KILN_STARTED_BY";
/// How often a rank under `mpiexec` looks whether that process is there.
const STARTER: Duration = Duration::from_secs(1);
/// Signals that come together are one.
const ONE: Duration = Duration::from_secs(1);

/// Whether `--ranks` of another process of this program started this one.
pub fn is_started_by_ranks() -> bool {
    std::env::var_os(PARENT).is_some()
}

/// What to go on with after a rank was lost: of so many ranks, how many are left that can divide the work, and their command line; or why that cannot be.
pub type GoOn<'a> = &'a dyn Fn(usize) -> Result<(usize, Vec<OsString>)>;

/// Starts this command line as so many ranks: on GPUs as processes that find each other by address, on the CPU under MPI's `mpiexec`.
pub fn start(mut ranks: usize, on_gpus: bool, caught: Vec<i32>, elastic: Option<GoOn>) -> Result<ExitCode> {
    let mut args: Vec<OsString> = std::env::args_os().skip(1).collect();
    if on_gpus {
        // What would be wrong on every rank is said once.
        gpu_of(&local(ranks - 1, ranks)).map_err(anyhow::Error::msg)?;
    }
    // Looking for MPI loads its library, whose UCX takes SIGHUP for itself: signals are caught after that, and before the first process is there.
    let mut mpiexec = if on_gpus { None } else { Some(mpiexec_command(ranks, &args)?) };
    let mut signals = Signals::new(caught)?;
    loop {
        let job = mpiexec.take().map_or_else(|| by_address(ranks, &args), by_mpi)?;
        let ended = job.wait(&mut signals)?;
        let Some(go_on) = elastic.filter(|_| ended.why != Why::Done) else { return Ok(ended.code) };
        let (left, again) = match ended.why {
            Why::Lost => match go_on(ranks) {
                Ok(found) => found,
                Err(e) => {
                    warn!("not going on after a rank was lost (--elastic): {e:#}");
                    return Ok(ended.code);
                }
            },
            _ => {
                warn!("not going on (--elastic): no rank was lost, one ended with an error of its own");
                return Ok(ended.code);
            }
        };
        let noun = if left == 1 { "rank" } else { "ranks" };
        warn!("going on with {left} {noun} instead of {ranks}, from the newest whole checkpoint if one has been saved (--elastic)");
        (ranks, args) = (left, again);
        mpiexec = if on_gpus { None } else { Some(mpiexec_command(ranks, &args)?) };
    }
}

/// How a job has ended.
struct Ended {
    code: ExitCode,
    why: Why,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Why {
    /// It came to its end, or was told to stop.
    Done,
    /// A rank was ended from outside, as by a machine that fails: the others could go on.
    Lost,
    /// A rank failed.
    Failed,
}

/// This command line again, for a child in a process group of its own: a terminal's Ctrl-C reaches the parent alone, which passes it on once.
fn own(program: &mut Command) -> &mut Command {
    world::variables().for_each(|v| {
        program.env_remove(v);
    });
    program.stdin(Stdio::null()).process_group(0)
}

struct Job {
    children: Vec<Child>,
    /// Closed when all that the children wrote has been shown.
    shown: Receiver<()>,
    /// Where one child, `mpiexec`, stands for all ranks: how each ended, once it has said so.
    by_mpi: Option<Arc<Mutex<Vec<i32>>>>,
}

/// `mpiexec` with this command line.
fn mpiexec_command(ranks: usize, args: &[OsString]) -> Result<Command> {
    let (found, _) = mpi();
    let Some(library) = &found.path else {
        bail!("several ranks on the CPU need MPI: {}", found.problem().unwrap_or_default());
    };
    let program = mpiexec(library).map_err(anyhow::Error::msg)?;
    let mut command = Command::new(&program);
    // On this machine alone, also inside of a job of Slurm.
    command.args(["-launcher", "fork", "-rmk", "user", "-iface", "lo", "-print-all-exitcodes", "-n", &ranks.to_string()]);
    command.arg(std::env::current_exe()?).args(args);
    let loopback = engine::mutant!("mpis-ranks-listen-for-the-network", &LOOPBACK[..], &[][..]);
    command.envs(loopback.iter().chain([&POLLS]).copied().filter(|(name, _)| std::env::var_os(name).is_none()));
    own(&mut command).env(PARENT, std::process::id().to_string()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(command)
}

fn by_mpi(mut command: Command) -> Result<Job> {
    let mut child = command.spawn().with_context(|| format!("{} does not start", command.get_program().display()))?;
    let (ends, (open, shown)) = (Arc::<Mutex<Vec<i32>>>::default(), channel());
    let pipes = (child.stdout.take().expect("it is piped"), child.stderr.take().expect("it is piped"));
    for (from, to) in [(Box::new(pipes.0) as Box<dyn Read + Send>, Stream::Out), (Box::new(pipes.1), Stream::Err)] {
        let (ends, open) = (ends.clone(), open.clone());
        std::thread::spawn(move || {
            relay(from, to, |line| is_of_a_rank(line, &ends));
            drop(open);
        });
    }
    Ok(Job { children: vec![child], shown, by_mpi: Some(ends) })
}

/// Ends this process with the one that started it as a rank: a parent that is killed passes nothing on, and ranks without it would wait on a GPU that they hold.
pub fn end_with_parent() -> std::io::Result<()> {
    let Some(parent) = std::env::var(PARENT).ok().and_then(|id| id.parse::<i32>().ok()) else { return Ok(()) };
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have been over before that.
    match rustix::process::getppid().is_some_and(|p| p.as_raw_nonzero().get() == parent) {
        true => Ok(()),
        false => Err(std::io::Error::other("the process that started this rank is gone")),
    }
}

/// The same for a rank under `mpiexec`, whose parent is a process of that: looks now and then whether the one that started `mpiexec` is still there.
pub fn end_with_starter() -> std::io::Result<()> {
    let Some(starter) = std::env::var(PARENT).ok().and_then(|id| Pid::from_raw(id.parse().ok()?)) else { return Ok(()) };
    let watch = move || {
        while !matches!(test_kill_process(starter), Err(Errno::SRCH)) {
            std::thread::sleep(STARTER);
        }
        let _ = kill_process(rustix::process::getpid(), Signal::KILL);
    };
    std::thread::Builder::new().name("starter".into()).spawn(watch).map(drop)
}

/// One of so many ranks on this machine.
fn local(rank: usize, ranks: usize) -> World {
    let (launcher, local_size, is_slurms) = ("--ranks", Some(ranks), false);
    World { launcher, rank, size: ranks, local_rank: rank, local_size, address: None, job: 0, cores: None, is_slurms }
}

fn by_address(ranks: usize, args: &[OsString]) -> Result<Job> {
    // Free now; rank 0 takes it in a moment.
    let port = std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let secret = meet::secret()?;
    let (open, shown) = channel();
    let mut children: Vec<Child> = vec![];
    for rank in 0..ranks {
        let mut command = child(rank, ranks, port, &secret, args)?;
        // The first has the terminal, if there is one, for its progress bar.
        let command = if rank > 0 { command.stdout(Stdio::null()).stderr(Stdio::piped()) } else { &mut command };
        match command.spawn() {
            Ok(child) => children.push(child),
            Err(e) => {
                children.iter_mut().for_each(|c| drop(c.kill().and_then(|()| c.wait())));
                return Err(e).with_context(|| format!("rank {rank} does not start"));
            }
        }
        if let Some(from) = children[rank].stderr.take() {
            let open = open.clone();
            std::thread::spawn(move || {
                relay(from, Stream::Err, |_| true);
                drop(open);
            });
        }
    }
    Ok(Job { children, shown, by_mpi: None })
}

/// A rank as a process that finds the others by address.
fn child(rank: usize, ranks: usize, port: u16, secret: &str, args: &[OsString]) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    own(command.args(args));
    for (name, value) in
        [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks), ("MASTER_PORT", port as usize)]
    {
        command.env(name, value.to_string());
    }
    // Not on the command line, which every user of the machine can read.
    command
        .env("MASTER_ADDR", "127.0.0.1")
        .env(meet::SECRET, engine::mutant!("ranks-of-one-machine-have-no-secret", secret, ""))
        .env(PARENT, std::process::id().to_string());
    Ok(command)
}

#[derive(Clone, Copy)]
enum Stream {
    Out,
    Err,
}

/// Shows what a child writes, line by line, but for lines that are not to be kept.
fn relay(from: impl Read, to: Stream, keep: impl Fn(&str) -> bool) {
    let mut from = BufReader::new(from);
    let mut line = vec![];
    while from.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
        if keep(String::from_utf8_lossy(&line).trim_end()) {
            // A reader that has gone away is no reason to stop training.
            let _ = match to {
                Stream::Out => std::io::stdout().write_all(&line),
                Stream::Err => std::io::stderr().write_all(&line),
            };
        }
        line.clear();
    }
}

/// What `mpiexec` itself prints when a rank ends early or is interrupted; kiln says it in its own words.
const BANNER: &[&str] = &[
    "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
    "=   PID ",
    "=   EXIT CODE: ",
    "=   CLEANING UP REMAINING PROCESSES",
    "=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES",
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING",
    "This typically refers to a problem with your application.",
    "Please see the FAQ page for debugging suggestions",
];

/// Whether a rank wrote this line, and not `mpiexec` or MPI's library about a rank. How the ranks ended is taken from `[mpiexec@host] Exit codes: [host] 0,9`.
fn is_of_a_rank(line: &str, ends: &Mutex<Vec<i32>>) -> bool {
    if let Some((_, codes)) = line.split_once("] Exit codes: ").filter(|_| line.starts_with("[mpiexec@")) {
        let codes = codes.split_once(']').map_or("", |c| c.1).split(',').map_while(|c| c.trim().parse().ok());
        *ends.lock().unwrap_or_else(PoisonError::into_inner) = codes.collect();
        return false;
    }
    let interrupted = line.starts_with("[mpiexec@") && line.contains("Ctrl-C");
    let ruler = line.len() > 60 && line.bytes().all(|b| b == b'=');
    !interrupted && !ruler && !line.contains("application called MPI_Abort(") && !BANNER.iter().any(|b| line.starts_with(b))
}

impl Job {
    fn wait(mut self, signals: &mut Signals) -> Result<Ended> {
        // The first signal, and one that came later.
        let mut passed: Option<(i32, Instant)> = None;
        let mut again: Option<(i32, Instant)> = None;
        let mut failed: Option<(usize, ExitStatus, Instant)> = None;
        let mut interrupted = None;
        let mut running: Vec<usize> = (0..self.children.len()).collect();
        while !running.is_empty() {
            for number in signals.pending() {
                if passed.is_some_and(|(_, at)| at.elapsed() > ONE) && again.is_none() {
                    again = Some((number, Instant::now()));
                    running.iter().for_each(|&i| self.end_at_once(i, number));
                }
                if passed.is_none() {
                    passed = Some((number, Instant::now()));
                    running.iter().for_each(|&i| send(&self.children[i], self.as_sent(number)));
                }
            }
            for i in running.clone() {
                let Some(status) = self.children[i].try_wait()? else { continue };
                running.retain(|r| *r != i);
                match passed.filter(|(n, _)| is_by(status, self.as_sent(*n))) {
                    Some((n, _)) => interrupted = Some(128 + n as u8),
                    None if status.success() => {}
                    None => {
                        failed.get_or_insert((i, status, Instant::now()));
                    }
                }
            }
            if failed.map(|f| f.2).into_iter().chain(again.map(|a| a.1)).any(|at| at.elapsed() > GRACE) {
                running.iter().for_each(|&i| send(&self.children[i], Signal::KILL.as_raw()));
            }
            std::thread::sleep(LOOK);
        }
        // What is still in the pipes; a process that outlives its rank may hold one open.
        let _ = self.shown.recv_timeout(GRACE);
        // mpiexec that says nothing of its ranks was not there for their end.
        let unsaid = passed.filter(|_| self.by_mpi.is_some() && self.ends().is_empty());
        if let Some((number, _)) = again.filter(|_| failed.is_some() || interrupted.is_some()).or(unsaid) {
            return Ok(Ended { code: ExitCode::from(128 + number as u8), why: Why::Done });
        }
        // What `mpiexec` makes of several ends is none of them: a rank may have caught the signal, and another not yet.
        let told = passed.filter(|(n, _)| self.ends().iter().any(|&end| is_by(ExitStatus::from_raw(end), self.as_sent(*n))));
        Ok(match failed.filter(|_| told.is_none()) {
            // A run that was told to stop does not go on.
            Some((i, status, _)) => {
                let ended = self.status(i, status);
                Ended { why: if passed.is_none() { ended.why } else { Why::Done }, ..ended }
            }
            None => {
                let status = told.map(|(n, _)| 128 + n as u8).or(interrupted);
                Ended { code: status.map_or(ExitCode::SUCCESS, ExitCode::from), why: Why::Done }
            }
        })
    }

    /// `mpiexec` passes every signal on but this one, which would end it.
    fn as_sent(&self, number: i32) -> i32 {
        if self.by_mpi.is_some() && number == SIGHUP { SIGTERM } else { number }
    }

    /// For a second signal. A rank ends by itself then, unless it was stopped. `mpiexec` would not pass the signal on, but print pages of its own: it and its ranks
    /// are killed.
    fn end_at_once(&self, child: usize, number: i32) {
        let child = &self.children[child];
        if self.by_mpi.is_none() {
            return send(child, number);
        }
        let all = with_descendants(Pid::from_child(child));
        for &pid in &all {
            // It may be over already.
            let _ = kill_process(pid, Signal::KILL);
        }
        // What is dead and not waited for has no program.
        let is_there = |pid: &Pid| std::fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero())).is_ok();
        let killed = Instant::now();
        while all.iter().any(is_there) && killed.elapsed() < GRACE {
            std::thread::sleep(LOOK);
        }
    }

    /// How each rank ended, of what `mpiexec` has said.
    fn ends(&self) -> Vec<i32> {
        self.by_mpi.as_ref().map(|ends| ends.lock().unwrap_or_else(PoisonError::into_inner).clone()).unwrap_or_default()
    }

    /// The exit status of the rank that failed first, with a word on one that could not say itself why it ended.
    fn status(&self, child: usize, status: ExitStatus) -> Ended {
        let (rank, status) = first_end(&self.ends()).unwrap_or((Some(child), status));
        if let Some(signal) = status.signal() {
            let name = signal_hook::low_level::signal_name(signal).map_or(String::new(), |n| format!(" ({n})"));
            let why = if signal == Signal::KILL.as_raw() { "; the system does that to a process when memory runs out" } else { "" };
            let who = rank.map_or("a rank".into(), |rank| format!("rank {rank}"));
            warn!("error: {who} was ended by signal {signal}{name}, and with it the other ranks{why}");
            return Ended { code: ExitCode::from(128 + signal as u8), why: Why::Lost };
        }
        let mut why = Why::Failed;
        // A status of its own, which no rank ends with.
        if self.by_mpi.is_some() && self.ends().is_empty() && status.code() == Some(255) {
            warn!("error: mpiexec failed and said nothing of its ranks, as when one is lost before all are connected");
            why = engine::mutant!("elastic-gives-up-before-ranks-are-connected", Why::Lost, Why::Failed);
        }
        Ended { code: ExitCode::from(status.code().filter(|c| (1..256).contains(c)).unwrap_or(1) as u8), why }
    }
}

/// Whether a process ended by this signal: it caught it and ended with its status, or had not come so far.
fn is_by(status: ExitStatus, signal: i32) -> bool {
    status.code() == Some(128 + signal) || engine::mutant!("a-hangup-is-a-failure", status.signal() == Some(signal), false)
}

/// How the first rank that did not end well ended, of what `mpiexec` says. It ends the others by the same signal that has ended one, and then nobody knows which was
/// first.
fn first_end(ends: &[i32]) -> Option<(Option<usize>, ExitStatus)> {
    let first = ends.iter().position(|&e| e != 0)?;
    let status = ExitStatus::from_raw(ends[first]);
    let is_one_of_several = status.signal().is_some() && ends.iter().filter(|e| **e == ends[first]).count() > 1;
    Some(((!is_one_of_several).then_some(first), status))
}

/// A process, its children, theirs, and so on: parents before their children.
fn with_descendants(first: Pid) -> Vec<Pid> {
    // "PID (name) state parent ..", where a name may hold anything.
    let parent_of = |stat: String| Pid::from_raw(stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?);
    let numbers = std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    let pairs: Vec<(Pid, Pid)> =
        numbers.filter_map(|n| Some((Pid::from_raw(n)?, parent_of(std::fs::read_to_string(format!("/proc/{n}/stat")).ok()?)?))).collect();
    let mut all = vec![first];
    let mut next = 0;
    while let Some(&parent) = all.get(next) {
        all.extend(pairs.iter().filter(|p| p.1 == parent).map(|p| p.0));
        next += 1;
    }
    all
}

/// To a child that has not been waited for.
fn send(child: &Child, number: i32) {
    if let Some(signal) = Signal::from_named_raw(number) {
        let _ = kill_process(Pid::from_child(child), signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each rank is told the same secret, in its environment and not on its command line, which every user of the machine can read.
    #[test]
    fn ranks_of_one_machine_are_given_the_jobs_secret_and_meet_on_loopback() {
        let (secret, other) = (meet::secret().unwrap(), meet::secret().unwrap());
        assert!(secret != other && secret.len() == 64, "{secret}");
        for rank in 0..2 {
            let command = child(rank, 2, 4321, &secret, &["train".into()]).unwrap();
            let of = |name: &str| command.get_envs().find(|e| e.0 == name).and_then(|e| e.1.map(|v| v.to_string_lossy().into_owned()));
            assert_eq!(of("KILN_JOB_SECRET"), Some(secret.clone()), "rank {rank}");
            assert_eq!((of("MASTER_ADDR").as_deref(), of("MASTER_PORT").as_deref()), (Some("127.0.0.1"), Some("4321")));
            assert_eq!(
                (of("RANK"), of("WORLD_SIZE"), of("LOCAL_WORLD_SIZE")),
                (Some(rank.to_string()), Some("2".into()), Some("2".into()))
            );
            assert!(command.get_args().all(|a| !a.to_string_lossy().contains(&secret)));
        }
    }

    /// A job of two ranks under MPI's `mpiexec`, which `script` stands for.
    fn under_mpi(script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        by_mpi(command).unwrap()
    }

    /// SIGHUP reaches ranks as SIGTERM, which one of them may have caught while the other was still about to.
    #[test]
    fn how_ranks_ended_is_told_from_what_mpiexec_says_and_does_not_say() {
        let dir = tempfile::tempdir().unwrap();
        // 36608 is an exit with 143, 15 a death by SIGTERM; 256 an exit with 1, after which `mpiexec` kills the others: an error is no answer to a signal.
        let all = [("36608,36608", 143, 129), ("15,36608", 143, 129), ("36608,15", 159, 129), ("15,15", 15, 129), ("256,9", 9, 1)];
        for (i, (said, status, ours)) in all.into_iter().enumerate() {
            let (mut signals, ready) = (Signals::new([SIGHUP]).unwrap(), dir.path().join(i.to_string()));
            let waits = format!("trap : TERM; sleep 60 & echo > {}; wait $!; kill $!", ready.display());
            let job = under_mpi(&format!("{waits}; echo '[mpiexec@vm] Exit codes: [vm] {said}' >&2; exit {status}"));
            while !ready.exists() {
                std::thread::sleep(Duration::from_millis(5));
            }
            signal_hook::low_level::raise(SIGHUP).unwrap();
            let ended = job.wait(&mut signals).unwrap();
            assert_eq!((ended.code, ended.why), (ExitCode::from(ours), Why::Done), "{said}");
        }
        // Without a signal of ours it is what it was.
        let ended =
            under_mpi("echo '[mpiexec@vm] Exit codes: [vm] 36608,0' >&2; exit 143").wait(&mut Signals::new([SIGHUP]).unwrap()).unwrap();
        assert_eq!((ended.code, ended.why), (ExitCode::from(143), Why::Failed));
        let ended = under_mpi("echo '[mpiexec@vm] Exit codes: [vm] 9,9' >&2; exit 9").wait(&mut Signals::new([SIGHUP]).unwrap()).unwrap();
        assert_eq!((ended.code, ended.why), (ExitCode::from(137), Why::Lost));
        // Where a rank is lost while they connect, `mpiexec` fails itself; it says nothing either of ranks that have ended with a status.
        let ended = under_mpi("exit 1").wait(&mut Signals::new([SIGHUP]).unwrap()).unwrap();
        assert_eq!((ended.code, ended.why), (ExitCode::from(1), Why::Failed));
        let ended = under_mpi("exit 255").wait(&mut Signals::new([SIGHUP]).unwrap()).unwrap();
        assert_eq!((ended.code, ended.why), (ExitCode::from(255), Why::Lost));
    }

    #[test]
    fn of_what_mpiexec_says_the_ends_of_ranks_are_kept() {
        let ends = Mutex::default();
        let said = [
            "===================================================================================",
            "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
            "=   PID 21379 RUNNING AT vm",
            "[mpiexec@vm] Sending Ctrl-C to processes as requested",
            "[mpiexec@vm] Exit codes: [vm] 0,9,768",
            "Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1",
        ];
        assert!(said.iter().all(|line| !is_of_a_rank(line, &ends)));
        assert_eq!(*ends.lock().unwrap(), [0, 9, 768]);
        let first = |ends: &[i32]| first_end(ends).map(|(rank, status)| (rank, status.signal().or(status.code())));
        assert_eq!(first(&[0, 9, 0]), Some((Some(1), Some(9))));
        assert_eq!(first(&[9, 9, 9]), Some((None, Some(9))), "mpiexec has killed the others");
        assert_eq!(first(&[0, 768, 768]), Some((Some(1), Some(3))), "each said itself why it ended");
        assert_eq!(first(&[0, 0]), None);
        let shown = ["rank 1: error: x", "=====", "", "[mpiexec@vm] HYDU_create_process: execvp error on file kiln", "step 1/2  loss 3"];
        assert!(shown.iter().all(|line| is_of_a_rank(line, &ends)));
    }
}
