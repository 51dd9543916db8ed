//! How ranks on GPUs find each other: the first rank listens, hands every other one the ids of NCCL's communicators, and keeps the connections. Nothing else is
//! sent. A connection that breaks before both sides have said goodbye means that a rank is gone.
//!
//! Other processes reach the port, too: other users of this machine on loopback, everybody in the network elsewhere. So both sides prove that they know the
//! job's secret, by a keyed hash of what both have said, with random numbers of both in it. The secret itself is never sent. The ids are encrypted with a key of
//! the same kind: somebody who took the port first and passes on what both sides say neither learns nor changes them.

use crate::recipe::TrainError;
use crate::warn;
use chacha20poly1305::aead::{Aead, KeyInit};
use chacha20poly1305::{ChaCha20Poly1305, Nonce};
use hmac::{Hmac, Mac};
use rustix::net::sockopt;
use sha2::Sha256;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Once;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// As long as ranks wait for the last of them: machines of a job do not start at the same moment.
const PATIENCE: Duration = Duration::from_secs(300);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(100);
/// The other end of a connection has this long for all that it must say, whatever it is.
const REPLY: Duration = Duration::from_secs(5);
/// Connections that have not proved yet that they are ranks. One more ends the oldest, whose other end comes again if it is a rank.
const STRANGERS: usize = 256;
/// The port that was named may belong to somebody else: torchrun's own agent listens there. So the first rank takes the first free one of so many.
const PORTS: u16 = 8;
/// More than the ids of any job take.
const MOST_BYTES: usize = 1 << 20;

const HELLO: &[u8; 8] = b"kiln-id4";
/// The word above, port, size, rank and job.
const HELLO_BYTES: usize = 8 + 2 + 4 + 4 + 8;
/// A random number that each side draws, so that what was said before proves nothing.
const DRAWN: usize = 32;
const PROOF: usize = 32;
const GOODBYE: u8 = 2;

/// The variable with a job's secret: the same text on all ranks.
pub const SECRET: &str = "KILN_JOB_SECRET";

/// A fresh secret for a job of this machine.
pub fn secret() -> io::Result<String> {
    Ok(drawn()?.iter().map(|b| format!("{b:02x}")).collect())
}

fn drawn() -> io::Result<[u8; DRAWN]> {
    let mut bits = [0; DRAWN];
    getrandom::fill(&mut bits).map_err(|e| io::Error::other(format!("this machine gives no random numbers: {e}")))?;
    Ok(bits)
}

/// A connection on which nothing has come for `IDLE` is asked whether its other end is there, `PROBES` times. Nothing else shows that a machine has lost its power or
/// its network, because a connection is quiet until the ranks part.
const IDLE: Duration = Duration::from_secs(10);
const BETWEEN_PROBES: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;

fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, IDLE)?;
    sockopt::set_tcp_keepintvl(stream, BETWEEN_PROBES)?;
    Ok(sockopt::set_tcp_keepcnt(stream, PROBES)?)
}

/// Where ranks meet, and which of them this is.
#[derive(Clone, Debug)]
pub struct Place {
    pub host: String,
    /// The first port that is tried; it also names the job.
    pub port: u16,
    pub rank: usize,
    pub size: usize,
    /// Tells jobs apart that meet at the same port.
    pub job: u64,
    /// What every rank of the job knows, and nobody else; empty where the job has none.
    pub secret: Vec<u8>,
    pub patience: Duration,
}

impl Place {
    /// `address`: a host and a port.
    pub fn new(address: &str, rank: usize, size: usize) -> Result<Place, TrainError> {
        let split = address.rsplit_once(':').and_then(|(host, port)| Some((host.trim_matches(['[', ']']), port.parse().ok()?)));
        let Some((host, port)) = split else { return Err(TrainError::Other(format!("'{address}' is not a host and a port"))) };
        Ok(Place { host: host.into(), port, rank, size, job: 0, secret: vec![], patience: PATIENCE })
    }

    pub fn with_secret(self, secret: impl Into<Vec<u8>>) -> Place {
        Place { secret: secret.into(), ..self }
    }

    /// Where all ranks are on this machine, nobody else needs to reach them.
    pub fn on_this_machine(self) -> Place {
        Place { host: "127.0.0.1".into(), ..self }
    }

    pub fn of_job(self, job: u64) -> Place {
        Place { job, ..self }
    }

    fn ports(&self) -> impl Iterator<Item = u16> {
        (self.port..=u16::MAX).take(PORTS.into())
    }

    /// What a rank says first: the job, its size, and which of its ranks it is.
    fn hello(&self) -> [u8; HELLO_BYTES] {
        let mut said = [0; HELLO_BYTES];
        said[..8].copy_from_slice(HELLO);
        said[8..10].copy_from_slice(&self.port.to_le_bytes());
        said[10..14].copy_from_slice(&(self.size as u32).to_le_bytes());
        said[14..18].copy_from_slice(&(self.rank as u32).to_le_bytes());
        said[18..].copy_from_slice(&self.job.to_le_bytes());
        said
    }

    fn failed(&self, why: impl std::fmt::Display) -> TrainError {
        TrainError::Other(format!("the ranks cannot find each other at {}:{} (MASTER_ADDR, MASTER_PORT): {why}", self.host, self.port))
    }

    /// The first rank's bytes, on every rank, and the connections that they came by: of the first rank one to every other, else one.
    pub fn meet(&self, bytes: impl FnOnce() -> Result<Vec<u8>, TrainError>) -> Result<(Vec<u8>, Lines), TrainError> {
        match self.rank {
            0 => {
                // Whoever is let in finds somebody who answers at once.
                let bytes = bytes()?;
                let listener = self.listen()?;
                let mut lines = self.gather(&listener)?;
                for (rank, stream, cipher) in &mut lines {
                    let sealed = cipher.encrypt(&Nonce::default(), &bytes[..]).expect("a message is not too long");
                    stream
                        .write_all(&(sealed.len() as u32).to_le_bytes())
                        .and_then(|()| stream.write_all(&sealed))
                        .map_err(|e| self.failed(format!("rank {rank}: {e}")))?;
                }
                Ok((bytes, Lines(lines.into_iter().map(|(rank, stream, _)| (rank, stream)).collect())))
            }
            _ => self.join(),
        }
    }

    /// A keyed hash of what both sides have said.
    fn proof(&self, whose: &[u8], said: &[u8], drawn: &[u8]) -> Hmac<Sha256> {
        let mut hash = <Hmac<Sha256> as Mac>::new_from_slice(&self.secret).expect("a key of any length");
        [whose, said, drawn].into_iter().for_each(|part| hash.update(part));
        hash
    }

    /// What the ids are encrypted with. The key belongs to one connection and one message, so the nonce may always be the same.
    fn cipher(&self, said: &[u8], drawn: &[u8]) -> ChaCha20Poly1305 {
        ChaCha20Poly1305::new(&self.proof(b"ids", said, drawn).finalize().into_bytes())
    }

    /// Only on loopback where that is what the others are told.
    fn listen(&self) -> Result<TcpListener, TrainError> {
        let named: Vec<IpAddr> = (self.host.as_str(), self.port).to_socket_addrs().into_iter().flatten().map(|a| a.ip()).collect();
        let own = match named.first() {
            Some(first) if named.iter().all(IpAddr::is_loopback) => [*first; 2],
            // Any of this machine's addresses, of either kind.
            _ => [IpAddr::from([0u16; 8]), IpAddr::from([0u8; 4])],
        };
        let mut last = None;
        for port in self.ports() {
            let bind = |ip: IpAddr| TcpListener::bind(SocketAddr::from((ip, port)));
            match bind(own[0]).or_else(|_| bind(own[1])) {
                Ok(listener) => return Ok(listener),
                Err(e) => last = Some(e),
            }
        }
        Err(self.failed(last.map_or("there is no such port".into(), |e| e.to_string())))
    }

    /// Waits for all other ranks. Each connection is greeted on a thread of its own: one that says nothing holds up nobody.
    fn gather(&self, listener: &TcpListener) -> Result<Vec<Greeted>, TrainError> {
        listener.set_nonblocking(true).map_err(|e| self.failed(e))?;
        let (until, mut lines) = (Instant::now() + self.patience, Vec::<Greeted>::new());
        let (report, reports) = channel();
        let mut strangers = VecDeque::<(usize, TcpStream)>::new();
        for number in 0.. {
            for (number, greeted) in reports.try_iter() {
                strangers.retain(|s: &(usize, TcpStream)| s.0 != number);
                match greeted {
                    Some((rank, stream, _)) if lines.iter().any(|l| l.0 == rank) => {
                        let from = TcpStream::peer_addr(&stream).map_or("?".into(), |a| a.ip().to_string());
                        return Err(self.failed(format!("two processes, one of them on {from}, say that they are rank {rank}")));
                    }
                    Some(line) => lines.push(line),
                    // Whoever it was, it was no rank of this job.
                    None => {}
                }
            }
            if lines.len() + 1 == self.size {
                break;
            }
            if Instant::now() > until {
                let missing: Vec<String> = (1..self.size).filter(|r| lines.iter().all(|l| l.0 != *r)).map(|r| r.to_string()).collect();
                return Err(self.failed(format!("after {} s these have not come: rank {}", self.patience.as_secs(), missing.join(", "))));
            }
            match listener.accept() {
                Ok((mut stream, _)) => {
                    if strangers.len() >= STRANGERS {
                        // Best effort: it may have ended by itself.
                        let _ = strangers.pop_front().map(|(_, oldest)| oldest.shutdown(Shutdown::Both));
                    }
                    strangers.extend(stream.try_clone().map(|s| (number, s)));
                    let (own, report) = (self.clone(), report.clone());
                    let greet = move || {
                        let rank = own.greeted(&mut stream).ok();
                        // Nobody asks any more once all ranks are there.
                        let _ = report.send((number, rank.map(|(rank, cipher)| (rank, stream, cipher))));
                    };
                    // Where there is no thread for it, it comes again.
                    let _ = std::thread::Builder::new().name("greeting".into()).spawn(greet);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::sleep(PAUSE / 10),
                Err(e) if [ErrorKind::Interrupted, ErrorKind::ConnectionAborted].contains(&e.kind()) => {}
                Err(e) => return Err(self.failed(e)),
            }
        }
        lines.sort_by_key(|l| l.0);
        Ok(lines)
    }

    /// The rank that somebody says it is, and proves to be.
    fn greeted(&self, stream: &mut TcpStream) -> io::Result<(usize, ChaCha20Poly1305)> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        keep_alive(stream)?;
        let until = Instant::now() + REPLY;
        let said: [u8; HELLO_BYTES] = read_until(stream, until)?;
        let rank = u32::from_le_bytes([said[14], said[15], said[16], said[17]]) as usize;
        let asked = Place { rank, ..self.clone() };
        if said != asked.hello() || rank == 0 || rank >= self.size {
            return Err(ErrorKind::InvalidData.into());
        }
        let mut both = [0; 2 * DRAWN];
        both[..DRAWN].copy_from_slice(&read_until::<DRAWN>(stream, until)?);
        both[DRAWN..].copy_from_slice(&drawn()?);
        stream.write_all(HELLO)?;
        stream.write_all(&both[DRAWN..])?;
        stream.write_all(&self.proof(b"first", &said, &both).finalize().into_bytes())?;
        // One that has given up waiting, and come again, does not answer here.
        let answer: [u8; PROOF] = read_until(stream, until)?;
        self.proof(b"other", &said, &both).verify_slice(&answer).map_err(|_| other_secret())?;
        stream.set_read_timeout(None)?;
        Ok((rank, self.cipher(&said, &both)))
    }

    /// Tries the ports until the first rank answers at one of them.
    fn join(&self) -> Result<(Vec<u8>, Lines), TrainError> {
        let until = Instant::now() + self.patience;
        let mut last = String::new();
        while Instant::now() < until {
            last.clear();
            for port in self.ports() {
                match self.connected(port) {
                    Ok((stream, cipher)) => {
                        return self.told(stream, &cipher).map_err(|e| self.failed(format!("rank 0 has ended, or was lost ({e})")));
                    }
                    // Nobody listens at most of them: what somebody answered says more.
                    Err(e) if last.is_empty() || e.kind() != ErrorKind::ConnectionRefused => last = e.to_string(),
                    Err(_) => {}
                }
            }
            std::thread::sleep(PAUSE);
        }
        Err(self.failed(format!("after {} s rank 0 does not answer ({last})", self.patience.as_secs())))
    }

    fn connected(&self, port: u16) -> io::Result<(TcpStream, ChaCha20Poly1305)> {
        let mut last = io::Error::from(ErrorKind::NotFound);
        for address in (self.host.as_str(), port).to_socket_addrs()? {
            let tried = TcpStream::connect_timeout(&address, REPLY).and_then(|mut stream| {
                stream.set_nodelay(true)?;
                keep_alive(&stream)?;
                let (until, said) = (Instant::now() + REPLY, self.hello());
                let mut both = [0; 2 * DRAWN];
                both[..DRAWN].copy_from_slice(&drawn()?);
                stream.write_all(&said)?;
                stream.write_all(&both[..DRAWN])?;
                if read_until::<{ HELLO.len() }>(&mut stream, until)? != *HELLO {
                    return Err(ErrorKind::InvalidData.into());
                }
                both[DRAWN..].copy_from_slice(&read_until::<DRAWN>(&mut stream, until)?);
                let proof: [u8; PROOF] = read_until(&mut stream, until)?;
                self.proof(b"first", &said, &both).verify_slice(&proof).map_err(|_| other_secret())?;
                stream.write_all(&self.proof(b"other", &said, &both).finalize().into_bytes())?;
                Ok((stream, self.cipher(&said, &both)))
            });
            match tried {
                Ok(connected) => return Ok(connected),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// The bytes come when all ranks are there.
    fn told(&self, mut stream: TcpStream, cipher: &ChaCha20Poly1305) -> io::Result<(Vec<u8>, Lines)> {
        stream.set_read_timeout(Some(self.patience + REPLY))?;
        let mut length = [0; 4];
        stream.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > MOST_BYTES {
            return Err(io::Error::new(ErrorKind::InvalidData, format!("it announces {length} bytes of ids")));
        }
        let mut sealed = vec![0; length];
        stream.read_exact(&mut sealed)?;
        stream.set_read_timeout(None)?;
        let changed = |_| io::Error::new(ErrorKind::InvalidData, "what it sent was changed on the way");
        let bytes = cipher.decrypt(&Nonce::default(), &sealed[..]).map_err(changed)?;
        Ok((bytes, Lines(vec![(0, stream)])))
    }
}

/// So many bytes, all of them before that moment.
fn read_until<const N: usize>(stream: &mut TcpStream, until: Instant) -> io::Result<[u8; N]> {
    let (mut bytes, mut at) = ([0; N], 0);
    while at < N {
        let left = until.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()).ok_or(ErrorKind::TimedOut)?;
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes[at..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => at += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(bytes)
}

/// Somebody knows the words and not the secret; said once, since it may be a mistake of the user's own.
fn other_secret() -> io::Error {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| warn!("a process that meets this one has another {SECRET}, and is not let in"));
    io::Error::new(ErrorKind::PermissionDenied, format!("the process there has another {SECRET}"))
}

/// A rank that has proved that it is one: its number, its connection, and what the ids are encrypted with for it.
type Greeted = (usize, TcpStream, ChaCha20Poly1305);

/// Connections to other ranks, with their numbers.
pub struct Lines(Vec<(usize, TcpStream)>);

impl Lines {
    /// Calls `lost` with a rank whose connection breaks before it has said goodbye, on a thread of its own.
    pub fn watch(&self, lost: impl Fn(usize) + Clone + Send + 'static) -> io::Result<()> {
        for (rank, stream) in &self.0 {
            let (rank, mut stream, lost) = (*rank, stream.try_clone()?, lost.clone());
            let watch = move || {
                let mut said = [0];
                if !matches!(stream.read_exact(&mut said), Ok(()) if said[0] == GOODBYE) {
                    lost(rank);
                }
            };
            std::thread::Builder::new().name(format!("rank {rank}")).spawn(watch)?;
        }
        Ok(())
    }

    /// Says to all that this rank ends as it should.
    pub fn goodbye(&self) {
        for (_, stream) in &self.0 {
            // One that is gone needs no word.
            let _ = (&*stream).write_all(&[GOODBYE]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    /// A port that is free now, with free ones behind it as far as that can be known.
    fn port() -> u16 {
        TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
    }

    fn place(port: u16, rank: usize, size: usize) -> Place {
        Place { patience: Duration::from_secs(60), ..Place::new(&format!("127.0.0.1:{port}"), rank, size).unwrap() }
    }

    #[test]
    fn all_ranks_get_the_bytes_of_the_first() {
        let port = port();
        // Somebody else has the port already.
        let _taken = TcpListener::bind(("127.0.0.1", port));
        let ids: Vec<u8> = (0..=255).cycle().take(6 * 128).collect();
        let meet = |rank: usize| place(port, rank, 3).meet(|| Ok(ids.clone())).map(|(bytes, lines)| (bytes, lines.0.len()));
        let (others, first) = std::thread::scope(|s| {
            let others: Vec<_> = [2, 1].map(|rank| s.spawn(move || meet(rank))).into();
            // Later than the others, who try again.
            std::thread::sleep(Duration::from_millis(300));
            let first = meet(0).unwrap();
            (others.into_iter().map(|t| t.join().unwrap().unwrap()).collect::<Vec<_>>(), first)
        });
        assert_eq!((first.0 == ids, first.1), (true, 2));
        assert!(others.iter().all(|o| *o == (ids.clone(), 1)));
    }

    #[test]
    fn a_rank_that_is_lost_is_told_from_one_that_ends() {
        let port = port();
        let meet = |rank: usize| place(port, rank, 3).meet(|| Ok(vec![7])).unwrap().1;
        let (told, heard) = channel();
        std::thread::scope(|s| {
            let others = [1, 2].map(|rank| s.spawn(move || meet(rank)));
            let first = meet(0);
            first.watch(move |rank| told.send(rank).unwrap()).unwrap();
            let [good, lost] = others.map(|t| t.join().unwrap());
            good.goodbye();
            drop(good);
            assert!(heard.recv_timeout(Duration::from_millis(300)).is_err());
            drop(lost);
            assert_eq!(heard.recv_timeout(Duration::from_secs(60)), Ok(2));
        });
    }

    /// A machine that vanishes sends nothing: the system asks.
    #[test]
    fn connections_are_kept_alive() {
        let port = port();
        let meet = |rank: usize| place(port, rank, 2).meet(|| Ok(vec![7])).unwrap().1;
        let lines = std::thread::scope(|s| {
            let other = s.spawn(move || meet(1));
            [meet(0), other.join().unwrap()]
        });
        for (_, stream) in lines.iter().flat_map(|l| &l.0) {
            let found = (
                sockopt::socket_keepalive(stream),
                sockopt::tcp_keepidle(stream),
                sockopt::tcp_keepintvl(stream),
                sockopt::tcp_keepcnt(stream),
            );
            assert_eq!(found, (Ok(true), Ok(IDLE), Ok(BETWEEN_PROBES), Ok(PROBES)));
        }
    }

    /// Two steps of a job of Slurm on one machine, with the same MASTER_PORT: each finds its own.
    #[test]
    fn jobs_at_one_port_are_told_apart() {
        let port = port();
        let meet = |rank: usize, job: u64| place(port, rank, 2).of_job(job).meet(|| Ok(vec![job as u8])).unwrap();
        std::thread::scope(|s| {
            let all = [(0, 1), (1, 2), (1, 1), (0, 2)].map(|(rank, job)| (job, s.spawn(move || meet(rank, job))));
            for (job, one) in all {
                assert_eq!(one.join().unwrap().0, [job as u8]);
            }
        });
    }

    /// Whoever knows the words, and not the secret, takes no rank's place, ends nothing and holds up nobody.
    #[test]
    fn strangers_are_not_let_in_and_hold_up_nobody() {
        let port = port();
        let place = |rank: usize| place(port, rank, 3).with_secret("a");
        let began = Instant::now();
        let all = std::thread::scope(|s| {
            let first = s.spawn(move || place(0).meet(|| Ok(vec![7])));
            let connect = || loop {
                match TcpStream::connect(("127.0.0.1", port)) {
                    Ok(stream) => return stream,
                    Err(_) => std::thread::sleep(PAUSE / 10),
                }
            };
            // Some say nothing; one says all words and a wrong proof; one says that it is rank 1, with another secret.
            let silent: Vec<TcpStream> = (0..40).map(|_| connect()).collect();
            let mut liar = connect();
            liar.write_all(&place(1).hello()).unwrap();
            liar.write_all(&[0; DRAWN]).unwrap();
            liar.write_all(&[0; PROOF]).unwrap();
            // Longer where a busy machine answers late.
            let mut refusals = [400, 4_000, 30_000].into_iter().map(|patience| {
                let false_one = Place { patience: Duration::from_millis(patience), ..place(1).with_secret("b") };
                false_one.meet(|| unreachable!()).map(drop).unwrap_err().to_string()
            });
            assert!(refusals.any(|e| e.contains("another KILN_JOB_SECRET")), "the wrong secret is named");
            let others = [1, 2].map(|rank| s.spawn(move || place(rank).meet(|| unreachable!())));
            let others = others.map(|t| t.join().unwrap().unwrap().0);
            drop(silent);
            (first.join().unwrap().unwrap().0, others)
        });
        assert_eq!(all, (vec![7], [vec![7], vec![7]]));
        // One after another, the silent ones alone would have taken 200 s.
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    }

    /// A false first rank proves nothing, and what it announces is not made room for.
    #[test]
    fn a_false_first_rank_is_not_believed() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let other = Place { patience: Duration::from_millis(500), ..place(port, 1, 2).with_secret("a") };
        let refused = std::thread::scope(|s| {
            s.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                for bytes in [&HELLO[..], &[0; DRAWN], &[0; PROOF], &u32::MAX.to_le_bytes()] {
                    stream.write_all(bytes).unwrap();
                }
                // Until the other one has gone.
                let _ = stream.read_to_end(&mut vec![]);
            });
            other.meet(|| unreachable!()).map(drop).unwrap_err().to_string()
        });
        assert!(refused.contains("another KILN_JOB_SECRET") || refused.contains("does not answer"), "{refused}");
    }

    /// Somebody took the port first, and passes on to the first rank, which has the next one, what the other says, and back: to read the ids, or to change one.
    #[test]
    fn who_stands_between_two_ranks_neither_reads_nor_changes_the_ids() {
        for changes in [false, true] {
            let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
            let port = taken.local_addr().unwrap().port();
            let place = |rank: usize| place(port, rank, 2).with_secret("a");
            let ids = vec![7; 128];
            let passed_on = std::sync::Mutex::new(Vec::<u8>::new());
            let (first, other) = std::thread::scope(|s| {
                let first = s.spawn(|| place(0).meet(|| Ok(ids.clone())).map(|(bytes, lines)| (bytes, lines.0.len())));
                s.spawn(|| {
                    let (mut rank, _) = taken.accept().unwrap();
                    let tried = || (port + 1..=port + PORTS).find_map(|port| TcpStream::connect(("127.0.0.1", port)).ok());
                    let mut to = std::iter::repeat_with(tried)
                        .find_map(|to| {
                            to.or_else(|| {
                                std::thread::sleep(PAUSE);
                                None
                            })
                        })
                        .unwrap();
                    let (mut from_rank, mut to_first) = (rank.try_clone().unwrap(), to.try_clone().unwrap());
                    s.spawn(move || io::copy(&mut from_rank, &mut to_first));
                    let mut bytes = [0; 1024];
                    while let Ok(count @ 1..) = to.read(&mut bytes) {
                        let mut all = passed_on.lock().unwrap();
                        // Behind the greeting and the length are the ids.
                        let ids_begin = HELLO.len() + DRAWN + PROOF + 4;
                        if changes && (all.len()..all.len() + count).contains(&ids_begin) {
                            bytes[ids_begin - all.len()] ^= 1;
                        }
                        all.extend(&bytes[..count]);
                        if rank.write_all(&bytes[..count]).is_err() {
                            break;
                        }
                    }
                    // Both ends learn that the other one is gone.
                    let _ = (rank.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                });
                let other = place(1).meet(|| unreachable!()).map(|(bytes, _)| bytes).map_err(|e| e.to_string());
                (first.join().unwrap().unwrap(), other)
            });
            assert_eq!(first, (ids.clone(), 1));
            match changes {
                true => assert!(other.unwrap_err().contains("changed on the way")),
                false => assert_eq!(other.unwrap(), ids),
            }
            let passed_on = passed_on.into_inner().unwrap();
            assert!(passed_on.len() > ids.len() && !passed_on.windows(8).any(|part| part == [7; 8]), "the ids can be read");
        }
    }

    #[test]
    fn ranks_of_one_machine_meet_on_loopback_alone() {
        let at = |host: &str| Place::new(&format!("{host}:{}", port()), 0, 2).unwrap().listen().unwrap().local_addr().unwrap().ip();
        assert!(at("127.0.0.1").is_loopback() && at("localhost").is_loopback());
        assert!(at("0.0.0.0").is_unspecified());
        assert!(
            Place::new(&format!("host:{}", port()), 0, 2)
                .unwrap()
                .on_this_machine()
                .listen()
                .unwrap()
                .local_addr()
                .unwrap()
                .ip()
                .is_loopback()
        );
        assert!(secret().unwrap() != secret().unwrap() && secret().unwrap().len() == 2 * DRAWN);
    }

    #[test]
    fn who_does_not_come_is_named() {
        let within = |p: Place, patience: u64| Place { patience: Duration::from_millis(patience), ..p };
        let port = port();
        // A busy machine may take long to bring rank 1 there: then rank 0 waits longer.
        let mut tries = [400, 4_000, 60_000].into_iter().map(|patience| {
            std::thread::scope(|s| {
                let one = s.spawn(move || within(place(port, 1, 4), patience).meet(|| unreachable!()).map(drop));
                let first = within(place(port, 0, 4), patience).meet(|| Ok(vec![])).map(drop).unwrap_err().to_string();
                assert!(one.join().unwrap().is_err());
                first
            })
        });
        let alone = tries.find(|e| e.contains("rank 2, 3")).expect("the ranks that did not come are named");
        assert!(alone.contains("MASTER_PORT"), "{alone}");
        let nobody = within(place(port, 1, 2), 400).meet(|| unreachable!()).map(drop).unwrap_err().to_string();
        assert!(nobody.contains("rank 0 does not answer"), "{nobody}");
        assert!(Place::new("host", 0, 2).is_err() && Place::new("[::1]:80", 0, 2).unwrap().host == "::1");
    }
}
