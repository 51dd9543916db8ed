//! How far a command is that takes minutes: a line that changes on a terminal, and elsewhere a line now and then.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

pub struct Progress {
    line: ProgressBar,
    terminal: bool,
    said: Instant,
}

/// Between lines where there is no terminal.
const EVERY: Duration = Duration::from_secs(10);

impl Progress {
    pub fn new() -> Progress {
        let (line, terminal) = (ProgressBar::new_spinner(), std::io::stderr().is_terminal());
        if !terminal {
            line.set_draw_target(ProgressDrawTarget::hidden());
        }
        line.set_style(ProgressStyle::with_template("{elapsed} {wide_msg}").expect("a template that parses"));
        Progress { line, terminal, said: Instant::now() }
    }

    pub fn say(&mut self, text: String) {
        if !self.terminal && self.said.elapsed() >= EVERY {
            self.said = Instant::now();
            crate::warn!("{text}");
        }
        self.line.set_message(crate::report::shown_in_line(&text).into_owned());
        self.line.tick();
    }

    /// Takes the line away.
    pub fn end(self) {
        self.line.finish_and_clear();
    }
}
