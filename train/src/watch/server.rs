//! The page on 127.0.0.1. It only reads, and only runs: a request names a run and a picture as the listing names them, never a path. A page of
//! another site cannot read it, also not under a name of its own that leads to 127.0.0.1: requests must name this very address.

use super::{Figures, Found, details, figures, find, live, picture, summary};
use crate::Recipes;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// What is served, and what was read of each run so far.
struct Site<'a> {
    root: PathBuf,
    recipes: Recipes<'a>,
    /// What a request's Host may be.
    hosts: Vec<String>,
    title: String,
    figures: Mutex<HashMap<PathBuf, Figures>>,
}

/// What goes back.
struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

/// Connections at a time, each a thread: browsers open several, some only in case they need them. More are closed at once.
const CONNECTIONS: usize = 64;
/// A request is so long at most, and arrives within this time.
const HEAD: usize = 16 << 10;
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves the runs in `root` until the process ends; `ready` is told the address.
pub fn serve(root: &Path, port: u16, recipes: Recipes, ready: impl FnOnce(&str) -> io::Result<()>) -> io::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    let port = listener.local_addr()?.port();
    let hosts = ["127.0.0.1", "localhost"].iter().flat_map(|h| [Some(format!("{h}:{port}")), (port == 80).then(|| h.to_string())]);
    let name = root.canonicalize().ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned())).unwrap_or_default();
    let site =
        Site { root: root.into(), recipes, hosts: hosts.flatten().collect(), title: format!("Runs in {name}"), figures: Mutex::default() };
    ready(&format!("http://127.0.0.1:{port}/"))?;
    let open = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // Out of file descriptors, perhaps: not again at once.
                std::thread::sleep(Duration::from_millis(100));
                continue;
            };
            if open.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
                open.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            let (site, open) = (&site, &open);
            let talk = move || {
                // Whoever asked may have gone away.
                let _ = site.talk(stream);
                open.fetch_sub(1, Ordering::Relaxed);
            };
            if std::thread::Builder::new().spawn_scoped(scope, talk).is_err() {
                open.fetch_sub(1, Ordering::Relaxed);
            }
        }
    });
    Ok(())
}

impl Site<'_> {
    /// One request, one answer.
    fn talk(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let Some(head) = head(&mut stream)? else { return Ok(()) };
        let mut headers = [httparse::EMPTY_HEADER; 100];
        let mut request = httparse::Request::new(&mut headers);
        let answer = match (request.parse(&head).is_ok(), request.method, request.path) {
            (true, Some(method), Some(path)) => {
                let mut hosts = request.headers.iter().filter(|h| h.name.eq_ignore_ascii_case("host"));
                let host = hosts.next().filter(|_| hosts.next().is_none()).and_then(|h| std::str::from_utf8(h.value).ok());
                self.answer(method, host, path)
            }
            _ => plain(400, "that is no request\n"),
        };
        let headers: String = answer.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let length = answer.body.len();
        stream.write_all(
            format!(
                "HTTP/1.1 {} {}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n",
                answer.status,
                words(answer.status)
            )
            .as_bytes(),
        )?;
        stream.write_all(&answer.body)
    }

    fn answer(&self, method: &str, host: Option<&str>, url: &str) -> Answer {
        if !host.is_some_and(|host| self.hosts.iter().any(|own| own.eq_ignore_ascii_case(host))) {
            return plain(403, &format!("this page is only served as http://{}/\n", self.hosts[0]));
        }
        if method != "GET" {
            return plain(405, "only GET\n").with("Allow", "GET");
        }
        let (path, query) = url.split_once('?').unwrap_or((url, ""));
        let Some(query) = parsed(query) else { return plain(400, "the request's query cannot be read\n") };
        let asked = |key: &str| query.iter().find(|q| q.0 == key).map_or("", |q| q.1.as_str());
        let found = match path {
            "/" => Ok(body(200, "text/html; charset=utf-8", live(&self.title).into_bytes())),
            "/api/runs" => self.runs(),
            "/api/details" => self.run(asked("run")).map(|found| json_answer(&self.details(&found))),
            "/api/metrics" => self.run(asked("run")).and_then(|found| metrics(&found, asked("from"))),
            "/picture" => {
                self.run(asked("run")).and_then(|found| picture(&found.path, asked("name"))).map(|(kind, bytes)| body(200, kind, bytes))
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        };
        match found {
            Ok(answer) => answer,
            Err(e) if e.kind() == io::ErrorKind::NotFound => plain(404, "there is no such thing here\n"),
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => plain(400, &format!("{e}\n")),
            Err(e) => plain(500, &format!("{e}\n")),
        }
    }

    fn runs(&self) -> io::Result<Answer> {
        let all: Vec<_> = find(&self.root)?.iter().map(|found| self.with(found, |figures| summary(found, figures, self.recipes))).collect();
        Ok(json_answer(&json!({ "runs": all, "now": super::now() })))
    }

    /// The run of this name; names are compared, never made into paths.
    fn run(&self, name: &str) -> io::Result<Found> {
        find(&self.root)?.into_iter().find(|found| found.name == name).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn details(&self, found: &Found) -> Value {
        self.with(found, |figures| details(found, figures, self.recipes))
    }

    fn with<T>(&self, found: &Found, ask: impl FnOnce(&mut Figures) -> T) -> T {
        let mut all = self.figures.lock().unwrap_or_else(PoisonError::into_inner);
        ask(all.entry(found.path.clone()).or_default())
    }
}

/// Lines of metrics.jsonl from a byte on, as they are.
fn metrics(found: &Found, from: &str) -> io::Result<Answer> {
    let from: u64 = from.parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "from wants a number of bytes"))?;
    let part = figures::part(&found.path.join("metrics.jsonl"), from)?;
    Ok(json_answer(&json!({ "next": part.next, "text": part.text })))
}

/// `run=a%20b&from=0` as pairs; None where it is no such thing.
fn parsed(query: &str) -> Option<Vec<(String, String)>> {
    let pairs = query.split('&').filter(|p| !p.is_empty());
    pairs.map(|pair| pair.split_once('=').and_then(|(key, value)| Some((decoded(key)?, decoded(value)?)))).collect()
}

/// Percent-decoded.
fn decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2).filter(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()))?, 16).ok()?);
        bytes.extend(part.get(2..)?.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

fn json_answer(value: &Value) -> Answer {
    body(200, "application/json", value.to_string().into_bytes())
}

fn plain(status: u16, text: &str) -> Answer {
    body(status, "text/plain; charset=utf-8", text.as_bytes().to_vec())
}

/// Nothing is kept by the browser, embedded elsewhere, or taken for what it is not; a picture opened by itself runs no script.
fn body(status: u16, kind: &str, body: Vec<u8>) -> Answer {
    let answer = Answer { status, headers: vec![], body }
        .with("Content-Type", kind)
        .with("Cache-Control", "no-store")
        .with("X-Content-Type-Options", "nosniff")
        .with("X-Frame-Options", "DENY")
        .with("Referrer-Policy", "no-referrer")
        .with("Cross-Origin-Resource-Policy", "same-origin");
    match kind.starts_with("image/") {
        true => answer.with("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; sandbox"),
        false => answer,
    }
}

impl Answer {
    fn with(mut self, name: &'static str, value: &str) -> Answer {
        self.headers.push((name, value.into()));
        self
    }
}

fn words(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        _ => "Internal Server Error",
    }
}

/// A request up to its empty line; None where it is too long, or nobody asks.
fn head(stream: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let (mut all, mut some) = (vec![], [0; 2048]);
    loop {
        let n = stream.read(&mut some)?;
        all.extend(&some[..n]);
        match () {
            _ if all.windows(4).any(|w| w == b"\r\n\r\n") => return Ok(Some(all)),
            _ if n == 0 || all.len() > HEAD => return Ok(None),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded_or_refused() {
        assert_eq!(parsed("run=a%20b%2Fc&from=0"), Some(vec![("run".into(), "a b/c".into()), ("from".into(), "0".into())]));
        assert_eq!(parsed(""), Some(vec![]));
        for bad in ["run", "run=%", "run=%2", "run=%zz", "run=%+1", "run=%ff"] {
            assert_eq!(parsed(bad), None, "{bad}");
        }
    }
}
