//! The page as it is served. It only reads, and only runs: a request names a run and a picture as the listing names them, never a path.
//!
//! Two things keep others out. A request must have the token that the terminal shows: other users of this machine can reach 127.0.0.1, too, and
//! pages of other sites can ask it through the browser. And it must name this very address, so that no site reads the page under a name of its own that
//! leads here (DNS rebinding). A page on all addresses of a machine cannot know its names: there the token does both.
//!
//! Whoever asks slowly is in nobody's way: a request has a time to arrive in, and of too many connections the one that has been waited for longest is closed.

use super::{Figures, Found, MOST_RUNS, declared, details, find, live, picture, settings_of, summary};
use crate::Recipes;
use crate::metrics::host_name;
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What is served, and what was read of each run so far.
struct Site<'a> {
    root: PathBuf,
    recipes: Recipes<'a>,
    /// What a request's Host may be; none where it may be anything.
    hosts: Option<Vec<String>>,
    /// What a request must have in its query; none where nothing is asked for.
    token: Option<String>,
    title: String,
    figures: Mutex<HashMap<PathBuf, Arc<Mutex<Figures>>>>,
    open: Mutex<Vec<Connection>>,
}

/// One that is open.
struct Connection {
    stream: Arc<TcpStream>,
    state: State,
    since: Instant,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// Its request has not arrived.
    Asking,
    /// Its answer is being made.
    Waiting,
    /// Its answer is on its way.
    Reading,
}

/// What goes back.
struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

/// Connections at a time, each a thread: browsers open several, some only in case they need them.
const CONNECTIONS: usize = 64;
/// A request is so long at most, and arrives as a whole within this time; so does each part of an answer.
const HEAD: usize = 16 << 10;
const PATIENCE: Duration = Duration::from_secs(10);
/// Every connection has this time, however many there are: whoever opens them faster waits for it, and closes nobody's.
const GRACE: Duration = Duration::from_millis(250);

/// 128 random bits, in hexadecimal.
pub fn token() -> io::Result<String> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits).map_err(|e| io::Error::other(format!("this machine gives no random numbers: {e}")))?;
    Ok(bits.iter().map(|b| format!("{b:02x}")).collect())
}

/// Whether two tokens are the same, in a time that does not say how much of them is.
fn same(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

/// What a request's Host may be where the page is served on this address, which was asked for as `host`.
fn hosts(host: &str, at: SocketAddr) -> Option<Vec<String>> {
    let (ip, port) = (at.ip(), at.port());
    if ip.is_unspecified() {
        return None;
    }
    // As it was asked for comes first: that is what is printed.
    let mut names: Vec<String> = host.parse::<IpAddr>().is_err().then(|| host.to_string()).into_iter().collect();
    names.push(shown(ip));
    names.extend(ip.is_loopback().then(|| "localhost".to_string()));
    // A browser leaves out the usual port.
    Some(names.iter().flat_map(|name| [Some(format!("{name}:{port}")), (port == 80).then(|| name.clone())]).flatten().collect())
}

/// As a URL has it.
fn shown(ip: IpAddr) -> String {
    if ip.is_ipv6() { format!("[{ip}]") } else { ip.to_string() }
}

/// Serves the runs in `root` until the process ends, on the first of the addresses that is free; `host` is what they were asked for as. `ready` is told the
/// URL, with the token where there is one.
pub fn serve(
    root: &Path,
    (host, addresses): (&str, &[SocketAddr]),
    token: Option<String>,
    recipes: Recipes,
    ready: impl FnOnce(&str) -> io::Result<()>,
) -> io::Result<()> {
    let listener = TcpListener::bind(addresses)?;
    let at = listener.local_addr()?;
    let name = root.canonicalize().ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned())).unwrap_or_default();
    // The usual folder is called runs.
    let title = if name == "runs" || name.is_empty() { "Runs".to_string() } else { format!("Runs in {name}") };
    let site = Site { root: root.into(), recipes, hosts: hosts(host, at), token, title, figures: Mutex::default(), open: Mutex::default() };
    ready(&site.url(at.port()))?;
    std::thread::scope(|scope| {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // Out of file descriptors, perhaps: not again at once.
                std::thread::sleep(Duration::from_millis(100));
                continue;
            };
            let Some(stream) = site.admitted(stream) else { continue };
            let (site, own) = (&site, stream.clone());
            let talk = move || {
                // Whoever asked may have gone away.
                let _ = site.talk(&own);
                site.left(&own);
            };
            if std::thread::Builder::new().spawn_scoped(scope, talk).is_err() {
                site.left(&stream);
            }
        }
    });
    Ok(())
}

impl Site<'_> {
    /// What to open in a browser.
    fn url(&self, port: u16) -> String {
        // On all addresses, this machine's name is the likeliest to lead here from another.
        let host = self.hosts.as_ref().map_or_else(|| format!("{}:{port}", host_name()), |hosts| hosts[0].clone());
        let query = self.token.as_ref().map_or(String::new(), |token| format!("?token={token}"));
        format!("http://{host}/{query}")
    }

    fn connections(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for a connection: where there are too many, by closing the oldest that has not asked yet, or else the oldest that has not read its answer.
    /// None where the answers to all of them are being made.
    fn admitted(&self, stream: TcpStream) -> Option<Arc<TcpStream>> {
        loop {
            let mut open = self.connections();
            if open.len() < CONNECTIONS {
                let stream = Arc::new(stream);
                open.push(Connection { stream: stream.clone(), state: State::Asking, since: Instant::now() });
                return Some(stream);
            }
            let oldest = |state| open.iter().position(|c| c.state == state);
            let slowest = oldest(State::Asking).or_else(|| oldest(State::Reading))?;
            match GRACE.checked_sub(open[slowest].since.elapsed()) {
                Some(left) => {
                    drop(open);
                    std::thread::sleep(left);
                }
                // Its thread is woken by this, and ends.
                None => drop(open.remove(slowest).stream.shutdown(Shutdown::Both)),
            }
        }
    }

    fn now(&self, stream: &Arc<TcpStream>, state: State) {
        self.connections().iter_mut().filter(|c| Arc::ptr_eq(&c.stream, stream)).for_each(|c| c.state = state);
    }

    fn left(&self, stream: &Arc<TcpStream>) {
        self.connections().retain(|c| !Arc::ptr_eq(&c.stream, stream));
    }

    /// One request, one answer.
    fn talk(&self, connection: &Arc<TcpStream>) -> io::Result<()> {
        let mut stream = &**connection;
        stream.set_write_timeout(Some(PATIENCE))?;
        let Some(head) = head(stream, Instant::now() + PATIENCE)? else { return Ok(()) };
        self.now(connection, State::Waiting);
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
        self.now(connection, State::Reading);
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
        if let Some(hosts) = &self.hosts
            && !host.is_some_and(|host| hosts.iter().any(|own| own.eq_ignore_ascii_case(host)))
        {
            return plain(403, &format!("this page is only served as http://{}/\n", hosts[0]));
        }
        if method != "GET" {
            return plain(405, "only GET\n").with("Allow", "GET");
        }
        let (path, query) = url.split_once('?').unwrap_or((url, ""));
        let Some(query) = parsed(query) else { return plain(400, "the request's query cannot be read\n") };
        let asked = |key: &str| query.iter().find(|q| q.0 == key).map_or("", |q| q.1.as_str());
        if self.token.as_ref().is_some_and(|token| !same(token, asked("token"))) {
            return plain(
                403,
                "this page wants its token: open the address that kiln watch printed in its terminal, which ends in ?token=..\n",
            );
        }
        let found = match path {
            "/" => Ok(body(200, "text/html; charset=utf-8", live(&self.title).into_bytes())),
            "/api/runs" => self.runs(),
            "/api/details" => self.run(asked("run")).map(|found| json_answer(&self.details(&found))),
            "/api/metrics" => self.run(asked("run")).and_then(|found| self.metrics(&found, asked("from"))),
            "/picture" => {
                let found = self.run(asked("run")).and_then(|found| picture(&found.folder()?, asked("name")));
                found.map(|(kind, bytes)| body(200, kind, bytes))
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
        let (mut all, more) = self.shown()?;
        // What is gone needs no memory.
        let paths: HashSet<&PathBuf> = all.iter().map(|found| &found.path).collect();
        self.figures.lock().unwrap_or_else(PoisonError::into_inner).retain(|path, _| paths.contains(path));
        let all: Vec<_> = all.drain(..).map(|found| self.with(&found, |figures| summary(&found, figures, self.recipes))).collect();
        Ok(json_answer(&json!({ "runs": all, "now": super::now(), "more": more })))
    }

    /// The runs that a page shows, and how many more there are.
    fn shown(&self) -> io::Result<(Vec<Found>, usize)> {
        let mut all = find(&self.root)?;
        let more = all.len().saturating_sub(engine::mutant!("any-number-of-runs-is-shown", MOST_RUNS, usize::MAX));
        all.truncate(all.len() - more);
        Ok((all, more))
    }

    /// The run of this name; names are compared, never made into paths.
    fn run(&self, name: &str) -> io::Result<Found> {
        self.shown()?.0.into_iter().find(|found| found.name == name).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn details(&self, found: &Found) -> Value {
        self.with(found, |figures| details(found, figures, self.recipes))
    }

    /// The numbers of metrics.jsonl from a byte on.
    fn metrics(&self, found: &Found, from: &str) -> io::Result<Answer> {
        let from: u64 = from.parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "from wants a number of bytes"))?;
        let run = found.folder()?;
        let table = settings_of(&run).unwrap_or_default();
        let metrics = declared(self.recipes, table.get("recipe").and_then(|v| v.as_str()).unwrap_or_default());
        self.with(found, |figures| {
            let mut file = figures.read_on(&run)?;
            let (points, next) = figures.points(&mut file, from, &figures.shown(metrics))?;
            let points: serde_json::Map<String, Value> = points
                .into_iter()
                .map(|(key, points)| (key, points.into_iter().map(|(step, value)| json!([step, value])).collect()))
                .collect();
            Ok(json_answer(&json!({ "next": next, "points": points })))
        })
    }

    /// A run at a time: a long file of one is in nobody's way.
    fn with<T>(&self, found: &Found, ask: impl FnOnce(&mut Figures) -> T) -> T {
        let new = || Arc::new(Mutex::new(Figures::little_by_little()));
        let own = self.figures.lock().unwrap_or_else(PoisonError::into_inner).entry(found.path.clone()).or_insert_with(new).clone();
        ask(&mut own.lock().unwrap_or_else(PoisonError::into_inner))
    }
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

/// A request up to its empty line, which has to be there in time, however it comes; None where it is too long, or nobody asks.
fn head(mut stream: &TcpStream, until: Instant) -> io::Result<Option<Vec<u8>>> {
    let (mut all, mut some) = (vec![], [0; 2048]);
    loop {
        let left = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        stream.set_read_timeout(Some(left.ok_or(io::ErrorKind::TimedOut)?))?;
        let n = stream.read(&mut some)?;
        // The end may have begun before what is new.
        let new = all.len().saturating_sub(3);
        all.extend(&some[..n]);
        match () {
            _ if all[new..].windows(4).any(|w| w == b"\r\n\r\n") => return Ok(Some(all)),
            _ if n == 0 || all.len() > HEAD => return Ok(None),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_random_and_compared_whole() {
        let (a, b) = (token().unwrap(), token().unwrap());
        assert!(a != b && a.len() == 32 && a.bytes().all(|b| b.is_ascii_hexdigit()), "{a} {b}");
        assert!(same(&a, &a.clone()));
        for other in ["", &a[..31], &format!("{a}0"), &a.to_uppercase().replace(|c: char| c.is_ascii_digit(), "A"), &b] {
            assert!(!same(&a, other), "{other}");
        }
    }

    /// A byte now and then would keep a connection open for as long as each is waited for by itself.
    #[test]
    fn a_request_has_a_time_to_arrive_in_and_not_each_of_its_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let dripping = std::thread::spawn(move || {
            // Until the other side is closed.
            while slow.write_all(b"G").is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let began = Instant::now();
        let error = head(&stream, began + Duration::from_millis(200)).unwrap_err();
        assert!([io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock].contains(&error.kind()), "{error}");
        assert!(began.elapsed() >= Duration::from_millis(190));
        drop(stream);
        dripping.join().unwrap();
        // One that comes in pieces, also of its end, is whole.
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let pieces = ["GET / HTTP/1.1\r", "\nHost: a\r\n", "\r", "\n"];
        let sending = std::thread::spawn(move || {
            for piece in pieces {
                client.write_all(piece.as_bytes()).unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
            client
        });
        assert_eq!(head(&stream, Instant::now() + PATIENCE).unwrap().unwrap(), pieces.concat().into_bytes());
        drop(sending.join().unwrap());
    }

    #[test]
    fn a_page_is_known_by_the_names_of_its_address() {
        let of = |host: &str, at: &str| hosts(host, at.parse().unwrap()).map(|names| names.join(" "));
        assert_eq!(of("127.0.0.1", "127.0.0.1:6160").as_deref(), Some("127.0.0.1:6160 localhost:6160"));
        assert_eq!(of("::1", "[::1]:80").as_deref(), Some("[::1]:80 [::1] localhost:80 localhost"));
        assert_eq!(of("gpu1", "10.0.0.5:6160").as_deref(), Some("gpu1:6160 10.0.0.5:6160"));
        assert_eq!((of("0.0.0.0", "0.0.0.0:6160"), of("::", "[::]:6160")), (None, None), "such a machine has names that nobody knows here");
    }

    #[test]
    fn queries_are_decoded_or_refused() {
        assert_eq!(parsed("run=a%20b%2Fc&from=0"), Some(vec![("run".into(), "a b/c".into()), ("from".into(), "0".into())]));
        assert_eq!(parsed(""), Some(vec![]));
        for bad in ["run", "run=%", "run=%2", "run=%zz", "run=%+1", "run=%ff"] {
            assert_eq!(parsed(bad), None, "{bad}");
        }
    }
}
