//! Runs kiln, for no longer than it may take, and says how it ended.

use super::{Finding, Kind};
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What takes longer hangs: everything that is run here takes less than a second on an idle machine.
const LIMIT: Duration = Duration::from_secs(20);
/// A process that does nothing for so long will do nothing more.
const IDLE: Duration = Duration::from_secs(8);

pub struct Call {
    command: Command,
    shown: String,
    /// For what it writes to stdout and stderr.
    notes: [PathBuf; 2],
    /// A signal (KILL, TERM, INT) that it gets after some time.
    signal: Option<(&'static str, Duration)>,
    /// What its threads were at when its time was up.
    threads: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum End {
    ByItself,
    /// After the signal that it was meant to get.
    Signalled,
    /// It was still at work when its time was up.
    Busy,
    /// It did nothing any more.
    Idle,
}

pub struct Ran {
    pub shown: String,
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub end: End,
    pub took: Duration,
    pub out: String,
    pub err: String,
    pub threads: String,
}

impl Call {
    /// `dir` is where it runs, and where its output is kept until it is read.
    pub fn new<S: Into<String>>(kiln: &Path, dir: &Path, args: impl IntoIterator<Item = S>) -> Call {
        let args: Vec<String> = args.into_iter().map(Into::into).collect();
        let mut command = Command::new(kiln);
        command.args(&args).current_dir(dir).stdin(Stdio::null());
        command.env("CUDA_VISIBLE_DEVICES", "").env("RUST_BACKTRACE", "0").env("XDG_CACHE_HOME", dir.join("cache"));
        let shown = format!("kiln {}", args.iter().map(|a| quoted(a)).collect::<Vec<_>>().join(" "));
        Call { command, shown, notes: ["stdout", "stderr"].map(|n| dir.join(n)), signal: None, threads: String::new() }
    }

    pub fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Call {
        self.command.env(name, value);
        self
    }

    /// With at most so many KiB of address space, and 64 MiB a file.
    pub fn limited(mut self, kib: u64) -> Call {
        let mut limited = Command::new("sh");
        limited
            .args(["-c", &format!("trap '' XFSZ; ulimit -f 131072; ulimit -v {kib}; exec \"$0\" \"$@\"")])
            .arg(self.command.get_program())
            .args(self.command.get_args());
        self.command.get_envs().for_each(|(k, v)| {
            v.map(|v| limited.env(k, v));
        });
        if let Some(dir) = self.command.get_current_dir() {
            limited.current_dir(dir);
        }
        limited.stdin(Stdio::null());
        self.command = limited;
        self
    }

    pub fn signalled(mut self, name: &'static str, after: Duration) -> Call {
        self.signal = Some((name, after));
        self
    }

    pub fn run(mut self) -> Ran {
        for (i, note) in self.notes.iter().enumerate() {
            let file = File::create(note).unwrap_or_else(|e| panic!("{}: {e}", note.display()));
            if i == 0 {
                self.command.stdout(file)
            } else {
                self.command.stderr(file)
            };
        }
        let started = Instant::now();
        let mut child = self.command.spawn().unwrap_or_else(|e| panic!("{} does not start: {e}", self.shown));
        let (end, status) = self.wait(&mut child, started);
        let text = |p: &Path| String::from_utf8_lossy(&fs::read(p).unwrap_or_default()).into_owned();
        let [out, err] = [text(&self.notes[0]), text(&self.notes[1])];
        Ran {
            shown: self.shown,
            code: status.code(),
            signal: status.signal(),
            end,
            took: started.elapsed(),
            out,
            err,
            threads: self.threads,
        }
    }

    fn wait(&mut self, child: &mut Child, mut started: Instant) -> (End, std::process::ExitStatus) {
        let mut seen = (worked(child), Instant::now());
        let (mut signal, mut end) = (self.signal, End::ByItself);
        let end = loop {
            if let Some(status) = child.try_wait().expect("a child can be waited for") {
                return (end, status);
            }
            let now = started.elapsed();
            if let Some((name, _)) = signal.take_if(|s| now >= s.1) {
                let _ = Command::new("kill").args([format!("-{name}"), child.id().to_string()]).stderr(Stdio::null()).status();
                end = End::Signalled;
            }
            // On a busy machine a second of work takes longer: its own processor time counts, and whether it does anything at all.
            if now > LIMIT {
                let work = worked(child);
                if state(child) == 'T' {
                    seen = (work, Instant::now());
                    started = Instant::now() - LIMIT;
                }
                if work > LIMIT || now > 10 * LIMIT {
                    break End::Busy;
                }
                if work > seen.0 {
                    seen = (work, Instant::now());
                } else if seen.1.elapsed() > IDLE {
                    break End::Idle;
                }
            }
            std::thread::sleep(if now.as_millis() < 500 { Duration::from_micros(500) } else { Duration::from_millis(5) });
        };
        self.threads = threads(child);
        let _ = child.kill();
        (end, child.wait().expect("a child can be waited for"))
    }
}

/// The fields of a process's stat after its name, from the third on.
fn stat(child: &Child) -> Vec<String> {
    let all = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    all.rsplit(')').next().unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// T: stopped by a signal.
fn state(child: &Child) -> char {
    stat(child).first().and_then(|s| s.chars().next()).unwrap_or('?')
}

/// The processor time of a process: fields 14 and 15, in hundredths of a second.
fn worked(child: &Child) -> Duration {
    let ticks: u64 = stat(child).iter().skip(11).take(2).filter_map(|t| t.parse::<u64>().ok()).sum();
    Duration::from_millis(10 * ticks)
}

/// Of each thread its state, the number of the call to the system that it is in with its arguments, and where the kernel is in that.
fn threads(child: &Child) -> String {
    let folder = PathBuf::from(format!("/proc/{}/task", child.id()));
    let one = |thread: String| {
        let read = |name: &str| fs::read_to_string(folder.join(&thread).join(name)).unwrap_or_default().trim().to_string();
        let state = read("stat").rsplit(") ").next().and_then(|s| s.chars().next()).unwrap_or('?');
        let kernel: Vec<String> = read("stack").lines().take(3).map(|l| l.replace("[<0>] ", "")).collect();
        format!("\n    {} {state} {} {}", read("comm"), read("syscall"), kernel.join(" "))
    };
    super::jobs::names(&folder).into_iter().map(one).collect()
}

fn quoted(arg: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:@%+".contains(c);
    if !arg.is_empty() && arg.chars().all(plain) { arg.into() } else { format!("'{}'", arg.replace('\'', "'\\''")) }
}

impl Ran {
    /// The command, how it ended, and the end of what it wrote.
    pub fn described(&self) -> String {
        let tail = |text: &str| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(12)..]
                .iter()
                .map(|l| format!("\n    {}", l.chars().take(300).collect::<String>()))
                .collect::<String>()
        };
        let end = match (self.end, self.code, self.signal) {
            (End::Busy, ..) => "busy without end".to_string(),
            (End::Idle, ..) => "idle without end".into(),
            (_, Some(code), _) => format!("exit {code}"),
            (_, _, signal) => format!("signal {}", signal.unwrap_or_default()),
        };
        let threads = if self.threads.is_empty() { String::new() } else { format!("\n  threads:{}", self.threads) };
        format!(
            "{}\n  {end} after {:.1} s\n  stdout:{}\n  stderr:{}{threads}",
            self.shown,
            self.took.as_secs_f64(),
            tail(&self.out),
            tail(&self.err)
        )
    }

    pub fn finding(&self, kind: Kind, what: &str) -> Finding {
        Finding::new(kind, format!("{what}\n  {}", self.described()))
    }

    /// Neither a panic nor a signal that nobody sent, nor a hang.
    pub fn sound(&self) -> Result<(), Finding> {
        if self.err.contains("panicked at") || self.code == Some(101) {
            return Err(self.finding(Kind::Panic, "a panic"));
        }
        match self.end {
            End::Busy => Err(self.finding(Kind::Hang, "it does not end")),
            End::Idle => Err(self.finding(Kind::Hang, "it hangs")),
            End::ByItself if self.signal.is_some() => Err(self.finding(Kind::Abort, "a signal that nobody sent")),
            _ => Ok(()),
        }
    }

    /// It ended well.
    pub fn good(&self) -> Result<(), Finding> {
        self.sound()?;
        match self.code {
            Some(0) => Ok(()),
            _ => Err(self.finding(Kind::Wrong, "it failed")),
        }
    }

    /// It ended because of its signal, or well before it came: 128 and the signal's number is the status of what stops by itself.
    pub fn stopped(&self) -> Result<(), Finding> {
        self.sound()?;
        match (self.end, self.code, self.signal) {
            (End::ByItself, ..) => self.good(),
            (_, Some(0 | 130 | 143), _) | (_, None, Some(2 | 9 | 15)) => Ok(()),
            _ => Err(self.finding(Kind::Wrong, "a signal ended it in another way than it should")),
        }
    }

    /// It ended well, or with a message and a status that says so.
    pub fn good_or_said(&self) -> Result<bool, Finding> {
        self.sound()?;
        match self.code {
            Some(0) => Ok(true),
            Some(1 | 2) if !(self.err.trim().is_empty() && self.out.trim().is_empty()) => Ok(false),
            Some(1 | 2) => Err(self.finding(Kind::Wrong, "it failed without a message")),
            _ => Err(self.finding(Kind::Wrong, "it ended in a way of its own")),
        }
    }
}
