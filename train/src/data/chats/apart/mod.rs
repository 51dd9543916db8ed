//! A chat template in processes of its own. It comes with a model and is a program, too.

mod wire;

use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, OnceLock};

use super::jinja::{Ask, End, Jinja, Written};
use super::{ChatError, Conversation, Rendered};
use crate::apart::wire::{In, Out, receive, send};
use crate::apart::{Ended, Limits, Process, RENDER, STACK};

/// Of a renderer's own processor time, for one conversation of a usual size.
const SECONDS: u64 = 5;
/// Of memory, for one conversation of a usual size, and for each byte of a long one.
const MEMORY: u64 = 512 << 20;
const MEMORY_A_BYTE: u64 = 64;

/// How a message of a renderer begins.
const DONE: u8 = 0;
const REFUSED: u8 = 1;
/// It went over a limit: it is not asked again.
const OVER: u8 = 2;

/// One template and the processes that render it, one for each thread that asked at the same time.
pub struct Apart {
    from: String,
    template: Vec<u8>,
    idle: Mutex<Vec<Process>>,
    /// What it did that it is not asked again for.
    over: OnceLock<String>,
}

impl Apart {
    /// The template, and what follows an assistant's text in it.
    pub fn new(written: &Written) -> Result<(Apart, Option<End>), ChatError> {
        let mut template = Out::default();
        template.template(written);
        let apart = Apart { from: written.from.clone(), template: template.0, idle: Mutex::default(), over: OnceLock::new() };
        let (process, end) = apart.start()?;
        apart.idle().push(process);
        Ok((apart, end))
    }

    pub fn answer(&self, conversation: &Conversation, ask: Ask) -> Result<Vec<Rendered>, ChatError> {
        if let Some(reason) = self.over.get() {
            return Err(self.error(reason));
        }
        let mut request = Out::default();
        request.ask(ask);
        request.conversation(conversation);
        loop {
            let waiting = self.idle().pop();
            let mut process = waiting.map_or_else(|| self.start().map(|started| started.0), Ok)?;
            // It may have ended because there was nothing to do, and this came too late.
            let Some(reply) = self.asked(&mut process, &request.0)? else { continue };
            self.idle().push(process);
            return In(&reply).examples().ok_or_else(|| self.error("its renderer says what is not understood"));
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Process>> {
        self.idle.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn start(&self) -> Result<(Process, Option<End>), ChatError> {
        let mut process = Process::start(RENDER).map_err(|e| self.error(&format!("no process could be started to render it: {e}")))?;
        let reply = self.asked(&mut process, &self.template)?;
        let end = reply.and_then(|reply| In(&reply).end()).ok_or_else(|| self.error("its renderer does not start"))?;
        Ok((process, end))
    }

    /// What it replies; None where it had ended before.
    fn asked(&self, process: &mut Process, request: &[u8]) -> Result<Option<Vec<u8>>, ChatError> {
        let over = |reason: String| self.error(self.over.get_or_init(|| reason));
        let mut reply = match send(&process.socket, request).and_then(|()| process.receive()) {
            Ok(reply) => reply,
            Err(e) => return reason(process.ended(&e)).map_or(Ok(None), |reason| Err(over(reason))),
        };
        let text = |reply: &[u8]| String::from_utf8_lossy(&reply[1..]).into_owned();
        match reply.first() {
            Some(&DONE) => Ok(Some(reply.split_off(1))),
            Some(&REFUSED) => Err(self.error(&text(&reply))),
            Some(&OVER) => Err(over(text(&reply))),
            _ => Err(over("its renderer says what is not understood".into())),
        }
    }

    fn error(&self, reason: &str) -> ChatError {
        ChatError::Template { from: self.from.clone(), reason: reason.into() }
    }
}

/// Why a renderer ended; None: it had nothing to do.
fn reason(ended: Ended) -> Option<String> {
    Some(match ended {
        Ended::Idle => return None,
        Ended::Time => format!("it takes more than {SECONDS} s of processor time for a short conversation (has it a loop without an end?)"),
        Ended::Memory => format!("it takes more than {} MiB of memory for a short conversation", MEMORY >> 20),
        Ended::Depth => format!("it, or a value that it makes, is nested deeper than {} MiB of stack reach", STACK >> 20),
        Ended::Panicked => "it makes the engine of templates fail (it asks for something huge)".into(),
        Ended::Other(how) => format!("the process that renders it {how}"),
    })
}

/// About how many bytes a conversation has.
pub fn size(conversation: &Conversation) -> usize {
    let mut out = Out::default();
    out.conversation(conversation);
    out.0.len()
}

/// Renders: a template comes first, then what it is asked for.
pub fn serve(socket: &UnixStream, limits: &mut Limits) {
    limits.allow(SECONDS, MEMORY);
    let reply = |out: Out| send(socket, &out.0).is_ok();
    let Ok(message) = receive(socket) else { return };
    let jinja = match In(&message).template().map(|written| Jinja::new(&written)) {
        Some(Ok(jinja)) => jinja,
        bad => {
            reply(refusal(REFUSED, bad.and_then(Result::err)));
            return;
        }
    };
    let mut began = Out(vec![DONE]);
    began.end(jinja.end.as_ref());
    if !reply(began) {
        return;
    }
    while let Ok(message) = receive(socket) {
        let mut from = In(&message);
        let Some((ask, conversation)) = from.ask().and_then(|ask| Some((ask, from.conversation()?))) else { return };
        let (bytes, messages) = (message.len() as u64, conversation.messages.len() as u64);
        // Each turn is rendered behind all earlier ones, so time grows with the square of their number.
        limits.allow(SECONDS + messages * (messages + bytes / 1000) / 10_000, MEMORY + MEMORY_A_BYTE * (bytes >> 20 << 20));
        let said = match jinja.answer(&conversation, message.len(), ask) {
            Ok(examples) => {
                let mut out = Out(vec![DONE]);
                out.examples(&examples);
                out
            }
            Err(error) => refusal(if jinja.over().is_some() { OVER } else { REFUSED }, Some(error)),
        };
        if !reply(said) {
            return;
        }
    }
}

fn refusal(kind: u8, error: Option<ChatError>) -> Out {
    let text = match error {
        // Where the template is from is said there.
        Some(ChatError::Template { reason, .. }) => reason,
        Some(other) => other.to_string(),
        None => "its renderer does not understand what it is asked".into(),
    };
    Out([&[kind], text.as_bytes()].concat())
}
