//! Ranks as processes that talk over TCP.
//!
//! Rank 0 listens where everybody knows. The others tell it where they listen, learn all addresses from
//! it, and connect to every lower rank. A thread per peer puts what arrives into the inbox, so that a
//! sender never waits for a receiver.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::bootstrap::Place;
use super::inbox::{Failure, Inbox, Waiter};
use super::{CommError, Communicator, Message};

/// Channel of a rank's last words.
const FAILED: u64 = u64::MAX;
/// Channel on which a rank says that it is done.
const DONE: u64 = u64::MAX - 1;
/// First bytes between ranks: a stranger on the port is turned away.
const GREETING: u64 = u64::from_le_bytes(*b"vescale1");
/// Between two tries to reach a rank that does not listen yet.
const RETRY: Duration = Duration::from_millis(20);

struct Shared {
    rank: usize,
    inbox: Inbox,
    failed: Failure,
    timeout: Duration,
}

/// One rank of a job whose ranks are processes.
pub struct TcpCommunicator {
    shared: Arc<Shared>,
    /// One per rank; none to itself.
    peers: Vec<Option<Mutex<TcpStream>>>,
}

fn start(what: &str, error: &io::Error) -> CommError {
    CommError::Start {
        reason: format!("{what}: {error}"),
    }
}

fn write_words<const N: usize>(stream: &mut TcpStream, words: [u64; N]) -> io::Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    stream.write_all(&bytes)
}

fn read_words<const N: usize>(stream: &mut TcpStream) -> io::Result<[u64; N]> {
    let mut words = [0; N];
    for word in &mut words {
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes)?;
        *word = u64::from_le_bytes(bytes);
    }
    Ok(words)
}

fn write_frame(stream: &mut TcpStream, channel: u64, data: &[u8]) -> io::Result<()> {
    write_words(stream, [channel, data.len() as u64])?;
    stream.write_all(data)
}

fn read_frame(stream: &mut TcpStream) -> io::Result<(u64, Vec<u8>)> {
    let [channel, length] = read_words(stream)?;
    let mut data = Vec::new();
    // Grows with what arrives: a wrong length takes no memory.
    let read = stream.take(length).read_to_end(&mut data)?;
    if (read as u64) < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((channel, data))
}

/// Ranks while they meet.
struct Meeting<'p> {
    place: &'p Place,
    deadline: Instant,
    streams: Vec<Option<TcpStream>>,
}

impl Meeting<'_> {
    fn late(&self, what: String) -> CommError {
        CommError::Start {
            reason: format!("{}: {what} in time", self.place),
        }
    }

    /// Reaches a rank, as soon as it listens.
    fn reach(&self, to: usize, addresses: &[SocketAddr]) -> Result<TcpStream, CommError> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.late(format!("rank {to} did not answer at {addresses:?}")));
            }
            for address in addresses {
                let Ok(mut stream) = TcpStream::connect_timeout(address, left) else {
                    continue;
                };
                self.settle(&stream)?;
                let words = [GREETING, self.place.rank as u64, self.place.world as u64];
                write_words(&mut stream, words).map_err(|e| start("greeting a rank", &e))?;
                return Ok(stream);
            }
            std::thread::sleep(RETRY);
        }
    }

    fn settle(&self, stream: &TcpStream) -> Result<(), CommError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let left = left.max(RETRY);
        let set = stream
            .set_nodelay(true)
            .and_then(|()| stream.set_read_timeout(Some(left)));
        set.map_err(|e| start("setting a connection up", &e))
    }

    /// Waits for `count` other ranks to come.
    fn welcome(&mut self, listener: &TcpListener, count: usize) -> Result<(), CommError> {
        let nonblocking = listener.set_nonblocking(true);
        nonblocking.map_err(|e| start("listening", &e))?;
        let mut come = 0;
        while come < count {
            match listener.accept() {
                Ok((stream, _)) => come += usize::from(self.admit(stream)?),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() >= self.deadline {
                        return Err(self.late(format!("{come} of {count} ranks came")));
                    }
                    std::thread::sleep(RETRY);
                }
                Err(e) => return Err(start("listening", &e)),
            }
        }
        Ok(())
    }

    /// Takes a connection in, if a rank of this job is at its other end.
    fn admit(&mut self, mut stream: TcpStream) -> Result<bool, CommError> {
        let blocking = stream.set_nonblocking(false);
        blocking.map_err(|e| start("setting a connection up", &e))?;
        self.settle(&stream)?;
        let Ok([greeting, rank, world]) = read_words(&mut stream) else {
            return Ok(false);
        };
        if greeting != GREETING {
            return Ok(false);
        }
        let rank = rank as usize;
        let new = self.streams.get(rank).is_some_and(Option::is_none);
        if world as usize != self.place.world || !new || rank == self.place.rank {
            return Err(CommError::Start {
                reason: format!(
                    "{}: a process calls itself rank {rank} of {world}",
                    self.place
                ),
            });
        }
        self.streams[rank] = Some(stream);
        Ok(true)
    }

    /// Rank 0: everybody comes, then everybody learns where the others listen.
    fn lead(&mut self) -> Result<(), CommError> {
        let listener = TcpListener::bind(("0.0.0.0", self.place.port));
        let port = self.place.port;
        let listener = listener.map_err(|e| start(&format!("listening on port {port}"), &e))?;
        self.welcome(&listener, self.place.world - 1)?;
        let mut addresses = Vec::new();
        for stream in self.streams.iter_mut().flatten() {
            let from = stream.peer_addr();
            let from = from.map_err(|e| start("meeting a rank", &e))?;
            let [port] = read_words(stream).map_err(|e| start("meeting a rank", &e))?;
            addresses.push(SocketAddr::new(from.ip(), port as u16).to_string());
        }
        let list = addresses.join("\n");
        for stream in self.streams.iter_mut().flatten() {
            let told = write_frame(stream, 0, list.as_bytes());
            told.map_err(|e| start("telling a rank the others' addresses", &e))?;
        }
        Ok(())
    }

    /// Another rank: reaches the lower ones, and is reached by the higher.
    fn follow(&mut self) -> Result<(), CommError> {
        let wrong = |e: io::Error| start("meeting rank 0", &e);
        let Place {
            host, port, rank, ..
        } = self.place;
        let listener = TcpListener::bind("0.0.0.0:0").map_err(|e| start("listening", &e))?;
        let own = listener.local_addr().map_err(|e| start("listening", &e))?;
        let known = (host.as_str(), *port).to_socket_addrs();
        let known: Vec<SocketAddr> = known
            .map_err(|e| start(&format!("looking {host} up"), &e))?
            .collect();
        let mut first = self.reach(0, &known)?;
        write_words(&mut first, [u64::from(own.port())]).map_err(wrong)?;
        let (_, list) = read_frame(&mut first).map_err(wrong)?;
        let list = String::from_utf8_lossy(&list).into_owned();
        self.streams[0] = Some(first);
        for (to, line) in (1..*rank).zip(list.lines()) {
            let address = line.parse().map_err(|_| CommError::Start {
                reason: format!("rank 0 says that rank {to} is at {line}"),
            })?;
            self.streams[to] = Some(self.reach(to, &[address])?);
        }
        self.welcome(&listener, self.place.world - 1 - rank)
    }
}

impl TcpCommunicator {
    /// Meets the other ranks. Nobody waits longer than `timeout`, here or later.
    ///
    /// # Errors
    /// When they do not all come in time.
    pub fn join(place: &Place, timeout: Duration) -> Result<Self, CommError> {
        let mut meeting = Meeting {
            place,
            deadline: Instant::now() + timeout,
            streams: (0..place.world).map(|_| None).collect(),
        };
        if place.rank == 0 {
            meeting.lead()?;
        } else {
            meeting.follow()?;
        }
        let shared = Arc::new(Shared {
            rank: place.rank,
            inbox: Inbox::default(),
            failed: Failure::new(),
            timeout,
        });
        let mut peers = Vec::new();
        for (peer, stream) in meeting.streams.into_iter().enumerate() {
            let Some(stream) = stream else {
                peers.push(None);
                continue;
            };
            let reader = stream
                .set_read_timeout(None)
                .and_then(|()| stream.try_clone());
            let reader = reader.map_err(|e| start("setting a connection up", &e))?;
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || shared.listen(peer, reader));
            peers.push(Some(Mutex::new(stream)));
        }
        Ok(Self { shared, peers })
    }

    fn write(&self, to: usize, channel: u64, data: &[u8]) -> io::Result<()> {
        let Some(peer) = &self.peers[to] else {
            return Ok(());
        };
        // A writer that panicked left half a message: the peer will notice.
        let mut stream = peer.lock().unwrap_or_else(PoisonError::into_inner);
        write_frame(&mut stream, channel, data)
    }
}

impl Shared {
    /// Takes in what a peer sends until it is done.
    fn listen(&self, peer: usize, mut stream: TcpStream) {
        loop {
            match read_frame(&mut stream) {
                Ok((DONE, _)) => return,
                Ok((FAILED, reason)) => {
                    let reason = String::from_utf8_lossy(&reason).into_owned();
                    return self.lost(peer, reason);
                }
                Ok((channel, data)) => self.inbox.put(peer, channel, Arc::new(data)),
                Err(error) => return self.lost(peer, format!("its connection broke: {error}")),
            }
        }
    }

    fn lost(&self, peer: usize, reason: String) {
        let _ = self.failed.set((peer, reason));
        self.inbox.wake();
    }

    fn waiter(&self) -> Waiter<'_> {
        Waiter {
            rank: self.rank,
            failed: &self.failed,
            timeout: self.timeout,
        }
    }
}

impl Communicator for TcpCommunicator {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn world(&self) -> usize {
        self.peers.len()
    }

    fn send(&self, to: usize, channel: u64, what: &str, data: Message) -> Result<(), CommError> {
        self.shared.waiter().check(what)?;
        if to == self.shared.rank {
            self.shared.inbox.put(to, channel, data);
            return Ok(());
        }
        if let Err(error) = self.write(to, channel, &data) {
            self.shared
                .lost(to, format!("its connection broke: {error}"));
            return self.shared.waiter().check(what);
        }
        Ok(())
    }

    fn receive(&self, from: usize, channel: u64, what: &str) -> Result<Message, CommError> {
        self.shared
            .inbox
            .take(&self.shared.waiter(), (from, channel), what)
    }

    fn check(&self, what: &str) -> Result<(), CommError> {
        self.shared.waiter().check(what)
    }

    fn fail(&self, reason: &str) {
        let _ = self
            .shared
            .failed
            .set((self.shared.rank, reason.to_owned()));
        for peer in 0..self.peers.len() {
            // Who cannot be told sees the connection break.
            let _ = self.write(peer, FAILED, reason.as_bytes());
        }
        self.shared.inbox.wake();
    }
}

impl Drop for TcpCommunicator {
    fn drop(&mut self) {
        for peer in 0..self.peers.len() {
            let _ = self.write(peer, DONE, &[]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Group;

    /// A port that is free now.
    fn port() -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.local_addr().expect("its address").port()
    }

    fn place(rank: usize, world: usize, port: u16) -> Place {
        Place {
            rank,
            world,
            local_rank: rank,
            host: "127.0.0.1".to_owned(),
            port,
        }
    }

    /// Runs `work` as every rank of a world, the last started first.
    fn world<T: Send>(size: usize, work: impl Fn(&TcpCommunicator) -> T + Sync) -> Vec<T> {
        let port = port();
        let (work, timeout) = (&work, Duration::from_secs(20));
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..size)
                .rev()
                .map(|rank| {
                    scope.spawn(move || {
                        let comm = TcpCommunicator::join(&place(rank, size, port), timeout);
                        work(&comm.expect("all ranks come"))
                    })
                })
                .collect();
            let join = |handle: std::thread::ScopedJoinHandle<'_, T>| handle.join().expect("runs");
            ranks.into_iter().rev().map(join).collect()
        })
    }

    #[test]
    fn collectives_reach_everyone() {
        for size in [1, 2, 5] {
            let sums = world(size, |comm| {
                let group = Group {
                    ranks: (0..comm.world()).collect(),
                    index: comm.rank(),
                    channel: 7,
                };
                let mut data: Vec<f32> = (0..1000).map(|i| (i * comm.rank()) as f32).collect();
                group.all_reduce(comm, "test", &mut data).expect("sums");
                let own = Arc::new(vec![comm.rank() as u8; 3]);
                comm.send(comm.rank(), 9, "test", Arc::clone(&own))
                    .expect("sends");
                assert_eq!(comm.receive(comm.rank(), 9, "test"), Ok(own));
                group.barrier(comm).expect("meets");
                data
            });
            let ranks = size * (size - 1) / 2;
            for data in sums {
                assert!((0..1000).all(|i| data[i] == (i * ranks) as f32));
            }
        }
    }

    #[test]
    fn a_failed_rank_stops_the_others() {
        let errors = world(3, |comm| {
            if comm.rank() == 1 {
                comm.fail("no memory");
                return None;
            }
            Some(comm.receive(1, 3, "waiting"))
        });
        for (rank, error) in errors.into_iter().enumerate() {
            let Some(error) = error else { continue };
            let expected = CommError::PeerFailed {
                rank,
                collective: "waiting".to_owned(),
                failed: 1,
                reason: "no memory".to_owned(),
            };
            assert_eq!(error, Err(expected));
        }
    }

    #[test]
    fn ranks_that_do_not_come_are_not_waited_for() {
        let port = port();
        let wait = Duration::from_millis(200);
        for (rank, said) in [
            (0, "0 of 1 ranks came in time"),
            (1, "rank 0 did not answer"),
        ] {
            let result = TcpCommunicator::join(&place(rank, 2, port), wait);
            let error = result.err().expect("nobody comes").to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn a_stranger_is_turned_away() {
        let port = port();
        let timeout = Duration::from_secs(20);
        std::thread::scope(|scope| {
            let first = scope.spawn(move || TcpCommunicator::join(&place(0, 2, port), timeout));
            let stranger = loop {
                if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
                    break stream;
                }
                std::thread::sleep(RETRY);
            };
            (&stranger).write_all(&[1; 24]).expect("writes");
            let second = TcpCommunicator::join(&place(1, 2, port), timeout).expect("meets");
            let first = first.join().expect("runs").expect("meets");
            let message = Arc::new(vec![4, 5]);
            first
                .send(1, 0, "test", Arc::clone(&message))
                .expect("sends");
            assert_eq!(second.receive(0, 0, "test"), Ok(message));
        });
    }
}
