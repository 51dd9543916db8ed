//! Work in a process of its own: the same program, started for it. Files of others may make a reader go on for ever, take all memory in one step, or nest
//! until there is no stack left, which ends the process that does it; libraries that read them cannot be told otherwise. Such a process has limits of time and
//! memory that the system keeps (`limits.rs`); whatever becomes of it, here it is an error with a reason.

mod limits;
pub mod wire;

use std::io::{Error, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use rustix::process::Signal;

use crate::data::chats;
use crate::guarded::in_time;
pub use limits::Limits;

type Serve = fn(&UnixStream, &mut Limits);

/// What a process can be started for: how that is said, and what it does. It talks through the socket until that ends.
const TASKS: [(&str, Serve); 2] = [(RENDER, chats::serve_templates), (ROWS, chats::serve_rows)];
pub const RENDER: &str = "--render-chat-templates";
pub const ROWS: &str = "--read-parquet";

/// Whether this program does that when it is started so: its `main` is the command line's.
static SERVES: AtomicBool = AtomicBool::new(false);

/// Of what nests, a level takes some hundred bytes of it. What is not used is no memory.
pub const STACK: u64 = 256 << 20;

/// One that is asked nothing for so long ends: another one starts in a few milliseconds.
const IDLE: Duration = Duration::from_secs(10);
/// It has a limit of its own time. If somebody stopped it, it does not come to that.
const SILENT: Duration = Duration::from_secs(3600);

/// How often what has come and is not read is looked at again.
const LOOK: Duration = Duration::from_millis(50);

/// Its exit codes: it has nothing to do; it was started by hand; a library panicked.
const IDLED: u8 = 0;
const BY_HAND: u8 = 2;
const PANICKED: u8 = 101;

/// Whether processes can be started for work.
pub fn possible() -> bool {
    SERVES.load(Ordering::Relaxed)
}

/// Does the work, if that is what the program was started for. From here on it can be started so.
pub fn serve() -> Option<ExitCode> {
    SERVES.store(true, Ordering::Relaxed);
    let mut words = std::env::args_os().skip(1);
    let task = words.next().and_then(|word| TASKS.iter().find(|task| word == task.0)).filter(|_| words.next().is_none())?.1;
    limits::leave_nothing();
    engine::mutant!("work-goes-on-for-nobody", end_with_asker(), ());
    let work = move || {
        let socket = std::io::stdin().as_fd().try_clone_to_owned().map(UnixStream::from);
        let Some(socket) = socket.ok().filter(|socket| socket.set_read_timeout(Some(IDLE)).is_ok()) else { return BY_HAND };
        task(&socket, &mut Limits::new());
        IDLED
    };
    let worker = std::thread::Builder::new().stack_size(STACK as usize).spawn(work);
    Some(worker.map_or(BY_HAND, |worker| worker.join().unwrap_or(PANICKED)).into())
}

/// Whoever asks may be killed, and take nothing back: then nobody waits for the work, however much of it there is. The other end of the socket is closed
/// with them.
fn end_with_asker() {
    let Ok(socket) = std::io::stdin().as_fd().try_clone_to_owned() else { return };
    let watch = move || loop {
        match recv(&socket, &mut [0u8][..], RecvFlags::PEEK) {
            // Something to read is for the other thread.
            Ok((1.., _)) => std::thread::sleep(LOOK),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Ok(_) | Err(_) => std::process::exit(IDLED.into()),
        }
    };
    // Without it the limits are left.
    let _ = std::thread::Builder::new().stack_size(64 << 10).spawn(watch);
}

/// How a process ended.
#[derive(Debug, PartialEq)]
pub enum Ended {
    /// It had nothing to do.
    Idle,
    Time,
    Memory,
    Depth,
    /// A library failed.
    Panicked,
    Other(String),
}

/// A process that works for this one.
pub struct Process {
    child: Child,
    pub socket: UnixStream,
}

impl Process {
    pub fn start(task: &str) -> std::io::Result<Process> {
        let (socket, theirs) = UnixStream::pair()?;
        socket.set_read_timeout(Some(SILENT))?;
        socket.set_write_timeout(Some(SILENT))?;
        // The program that runs, also where another one has its name by now.
        let mut command = Command::new("/proc/self/exe");
        command.arg0(crate::program()).arg(task).stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
        // One arena: memory that is reserved counts, too. A terminal's signals are not for it.
        command.env("MALLOC_ARENA_MAX", "1").env("RUST_BACKTRACE", "0").process_group(0);
        Ok(Process { child: command.spawn()?, socket })
    }

    /// What it says. After a signal nobody waits for it any longer.
    pub fn receive(&self) -> std::io::Result<Vec<u8>> {
        let late = || format!("a process that reads a file has said nothing for {} minutes", SILENT.as_secs() / 60);
        in_time(2 * SILENT, late, || wire::receive(&self.socket))
    }

    /// After an error of its socket.
    pub fn ended(&mut self, error: &Error) -> Ended {
        if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) {
            return Ended::Other(format!("said nothing for {} minutes", SILENT.as_secs() / 60));
        }
        if error.kind() == ErrorKind::InvalidData {
            return Ended::Other("says what is not understood".into());
        }
        let Ok(status) = self.child.wait() else { return Ended::Other("is gone".into()) };
        let mut said = String::new();
        let _ = self.child.stderr.take().map(|from| from.take(1 << 16).read_to_string(&mut said));
        how(status.code(), status.signal(), &said)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It keeps nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn how(code: Option<i32>, signal: Option<i32>, said: &str) -> Ended {
    let by = |name: Signal| signal == Some(name.as_raw());
    match code.map(u8::try_from) {
        Some(Ok(IDLED)) => Ended::Idle,
        Some(Ok(PANICKED)) => Ended::Panicked,
        Some(_) => Ended::Other(format!("ended with {}", code.unwrap_or_default())),
        None if by(Signal::XCPU) => Ended::Time,
        None if said.contains("memory allocation") => Ended::Memory,
        None if said.contains("overflowed its stack") || by(Signal::SEGV) => Ended::Depth,
        None if by(Signal::KILL) => Ended::Other("was killed (did the machine run out of memory?)".into()),
        None => Ended::Other(format!("was ended by signal {}", signal.unwrap_or_default())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_a_process_ended_is_told_by_what_the_system_says() {
        for (code, signal, said, ended) in [
            (Some(0), None, "", Ended::Idle),
            (Some(101), None, "thread panicked", Ended::Panicked),
            (None, Some(24), "", Ended::Time),
            (None, Some(6), "memory allocation of 99 bytes failed", Ended::Memory),
            (None, Some(6), "thread '<unnamed>' has overflowed its stack", Ended::Depth),
            (None, Some(11), "", Ended::Depth),
            (Some(3), None, "", Ended::Other("ended with 3".into())),
            (None, Some(15), "", Ended::Other("was ended by signal 15".into())),
        ] {
            assert_eq!(how(code, signal, said), ended);
        }
    }
}
