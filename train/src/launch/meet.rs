//! How ranks on GPUs find each other: the first rank listens, hands every other one the ids of NCCL's communicators, and keeps the connections. Nothing else is
//! sent. A connection that breaks before both sides have said goodbye means that a rank is gone.

use crate::recipe::TrainError;
use rustix::net::sockopt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// As long as ranks wait for the last of them: machines of a job do not start at the same moment.
const PATIENCE: Duration = Duration::from_secs(300);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(100);
/// What listens at the port, and is not kiln, has this long to say something else.
const REPLY: Duration = Duration::from_secs(5);
/// The port that was named may belong to somebody else: torchrun's own agent listens there. So the first rank takes the first free one of so many.
const PORTS: u16 = 8;

const HELLO: &[u8; 8] = b"kiln-id2";
/// The word above, port, size, rank and job.
const HELLO_BYTES: usize = 8 + 2 + 4 + 4 + 8;
const HEARD: u8 = 1;
const GOODBYE: u8 = 2;

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
    pub patience: Duration,
}

impl Place {
    /// `address`: a host and a port.
    pub fn new(address: &str, rank: usize, size: usize) -> Result<Place, TrainError> {
        let split = address.rsplit_once(':').and_then(|(host, port)| Some((host.trim_matches(['[', ']']), port.parse().ok()?)));
        let Some((host, port)) = split else { return Err(TrainError::Other(format!("'{address}' is not a host and a port"))) };
        Ok(Place { host: host.into(), port, rank, size, job: 0, patience: PATIENCE })
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
                for line in &mut lines.0 {
                    let length = (bytes.len() as u32).to_le_bytes();
                    line.1
                        .write_all(&length)
                        .and_then(|()| line.1.write_all(&bytes))
                        .map_err(|e| self.failed(format!("rank {}: {e}", line.0)))?;
                }
                Ok((bytes, lines))
            }
            _ => self.join(),
        }
    }

    fn listen(&self) -> Result<TcpListener, TrainError> {
        let mut last = None;
        for port in self.ports() {
            // Any of this machine's addresses, of either kind.
            match TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port))) {
                Ok(listener) => return Ok(listener),
                Err(e) => last = Some(e),
            }
        }
        Err(self.failed(last.map_or("there is no such port".into(), |e| e.to_string())))
    }

    /// Waits for all other ranks.
    fn gather(&self, listener: &TcpListener) -> Result<Lines, TrainError> {
        listener.set_nonblocking(true).map_err(|e| self.failed(e))?;
        let (until, mut lines) = (Instant::now() + self.patience, Vec::<(usize, TcpStream)>::new());
        while lines.len() + 1 < self.size {
            match listener.accept() {
                Ok((mut stream, from)) => match self.greeted(&mut stream) {
                    Ok(rank) if lines.iter().any(|l| l.0 == rank) => {
                        return Err(self.failed(format!("two processes, one of them on {}, say that they are rank {rank}", from.ip())));
                    }
                    Ok(rank) => lines.push((rank, stream)),
                    // Whoever it was, it was no rank of this job.
                    Err(_) => {}
                },
                Err(e) if e.kind() == ErrorKind::WouldBlock && Instant::now() < until => std::thread::sleep(PAUSE / 10),
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    let missing: Vec<String> = (1..self.size).filter(|r| lines.iter().all(|l| l.0 != *r)).map(|r| r.to_string()).collect();
                    return Err(self.failed(format!(
                        "after {} s these have not come: rank {}",
                        self.patience.as_secs(),
                        missing.join(", ")
                    )));
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.failed(e)),
            }
        }
        lines.sort_by_key(|l| l.0);
        Ok(Lines(lines))
    }

    /// The rank that somebody says it is, who is told that it was understood.
    fn greeted(&self, stream: &mut TcpStream) -> io::Result<usize> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        keep_alive(stream)?;
        stream.set_read_timeout(Some(REPLY))?;
        let mut said = [0; HELLO_BYTES];
        stream.read_exact(&mut said)?;
        let rank = u32::from_le_bytes([said[14], said[15], said[16], said[17]]) as usize;
        let own = Place { rank, ..self.clone() };
        if said != own.hello() || rank == 0 || rank >= self.size {
            return Err(ErrorKind::InvalidData.into());
        }
        stream.write_all(HELLO)?;
        // One that has given up waiting, and come again, does not answer here.
        let mut heard = [0];
        stream.read_exact(&mut heard)?;
        stream.set_read_timeout(None)?;
        Ok(rank)
    }

    /// Tries the ports until the first rank answers at one of them.
    fn join(&self) -> Result<(Vec<u8>, Lines), TrainError> {
        let until = Instant::now() + self.patience;
        let mut last = String::new();
        while Instant::now() < until {
            for port in self.ports() {
                match self.connected(port) {
                    Ok(stream) => return self.told(stream).map_err(|e| self.failed(format!("rank 0 has ended, or was lost ({e})"))),
                    Err(e) => last = e.to_string(),
                }
            }
            std::thread::sleep(PAUSE);
        }
        Err(self.failed(format!("after {} s rank 0 does not answer ({last})", self.patience.as_secs())))
    }

    fn connected(&self, port: u16) -> io::Result<TcpStream> {
        let mut last = io::Error::from(ErrorKind::NotFound);
        for address in (self.host.as_str(), port).to_socket_addrs()? {
            let tried = TcpStream::connect_timeout(&address, REPLY).and_then(|mut stream| {
                stream.set_nodelay(true)?;
                keep_alive(&stream)?;
                stream.set_read_timeout(Some(REPLY))?;
                stream.write_all(&self.hello())?;
                let mut reply = [0; HELLO.len()];
                stream.read_exact(&mut reply)?;
                if reply != *HELLO {
                    return Err(ErrorKind::InvalidData.into());
                }
                stream.write_all(&[HEARD])?;
                Ok(stream)
            });
            match tried {
                Ok(stream) => return Ok(stream),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// The bytes come when all ranks are there.
    fn told(&self, mut stream: TcpStream) -> io::Result<(Vec<u8>, Lines)> {
        stream.set_read_timeout(Some(self.patience + REPLY))?;
        let mut length = [0; 4];
        stream.read_exact(&mut length)?;
        let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut bytes)?;
        stream.set_read_timeout(None)?;
        Ok((bytes, Lines(vec![(0, stream)])))
    }
}

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
        Place { patience: Duration::from_secs(20), ..Place::new(&format!("127.0.0.1:{port}"), rank, size).unwrap() }
    }

    #[test]
    fn all_ranks_get_the_bytes_of_the_first() {
        let port = port();
        // Somebody else has the port already.
        let _taken = TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)));
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
            assert_eq!(heard.recv_timeout(Duration::from_secs(10)), Ok(2));
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

    #[test]
    fn who_does_not_come_is_named() {
        let short = |p: Place| Place { patience: Duration::from_millis(400), ..p };
        let port = port();
        let alone = std::thread::scope(|s| {
            let one = s.spawn(move || short(place(port, 1, 4)).meet(|| unreachable!()).map(drop));
            let first = short(place(port, 0, 4)).meet(|| Ok(vec![])).map(drop).unwrap_err().to_string();
            assert!(one.join().unwrap().is_err());
            first
        });
        assert!(alone.contains("MASTER_PORT") && alone.contains("rank 2, 3"), "{alone}");
        let nobody = short(place(port, 1, 2)).meet(|| unreachable!()).map(drop).unwrap_err().to_string();
        assert!(nobody.contains("rank 0 does not answer"), "{nobody}");
        assert!(Place::new("host", 0, 2).is_err() && Place::new("[::1]:80", 0, 2).unwrap().host == "::1");
    }
}
