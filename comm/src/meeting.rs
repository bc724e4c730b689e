//! How ranks that are separate processes connect. Rank 0 listens at a known address. The others tell it where they
//! listen, learn all addresses from it, and connect to every lower rank.
//!
//! Both ends of a connection prove that they know the job's secret before anything else is said. Every caller is
//! handled on its own thread and for a short time only, so a stranger delays nobody; strangers are turned away and the
//! meeting continues.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::bootstrap::Place;
use super::communicator::CommError;
use super::frames::{self, Timed};
use super::secret::{self, End, PROOF, Secret};

/// First bytes of every connection between ranks.
const GREETING: [u8; 8] = *b"vescale2";
/// Pause between attempts to reach a rank that does not listen yet, and between checks for callers.
const RETRY: Duration = Duration::from_millis(20);
/// How long a caller may take to prove that it belongs to the job.
const HEARING: Duration = Duration::from_secs(3);
/// Most callers handled at a time; more are turned away, and call again.
const HEARD: usize = 128;
/// Most rejected callers that an error lists.
const NAMED: usize = 4;
/// Most bytes that an address takes in the list of all addresses.
const ADDRESS: u64 = 64;

/// Answers of a listener to a caller that has proved to belong to the job.
const WELCOME: u64 = 0;
const OTHER_WORLD: u64 = 1;
const TAKEN: u64 = 2;
const OTHER_RANK: u64 = 3;

/// The introduction of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hello {
    /// The caller's rank.
    rank: u64,
    /// The caller's number of ranks.
    world: u64,
    /// The rank that it means to reach.
    to: u64,
    /// The port that it listens on itself; 0 if that is known already.
    port: u64,
    nonce: [u8; 32],
}

impl Hello {
    const BYTES: usize = 8 + 4 * 8 + 32;

    fn bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&GREETING);
        let words = [self.rank, self.world, self.to, self.port];
        for (word, to) in words.iter().zip(bytes[8..40].chunks_exact_mut(8)) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes[40..].copy_from_slice(&self.nonce);
        bytes
    }

    /// Parses a caller's introduction; `None` if the greeting is wrong.
    fn read(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let word = |index: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 + 8 * index..][..8]);
            u64::from_le_bytes(word)
        };
        let mut nonce = [0; 32];
        nonce.copy_from_slice(&bytes[40..]);
        (bytes[..8] == GREETING).then(|| Self {
            rank: word(0),
            world: word(1),
            to: word(2),
            port: word(3),
            nonce,
        })
    }
}

/// Why an attempt to reach a rank failed.
enum Unreached {
    /// The attempt timed out. A later one may succeed.
    Silent,
    /// The attempt failed for this reason. A later one may succeed.
    Yet(String),
    /// The attempt failed for this reason. No later one can succeed.
    Refused(String),
}

/// A caller, after it was handled.
enum Caller {
    /// A rank that has proved to belong to this job.
    Proved(Hello, TcpStream),
    /// A caller that is not of this job or did not identify itself; with the reason.
    Stranger(String),
}

/// A rank's listening socket. Callers are handled as they come, until this is dropped.
struct Door {
    address: SocketAddr,
    callers: Receiver<Caller>,
    is_open: Arc<AtomicBool>,
}

impl Door {
    fn open(listener: TcpListener, secret: Secret, until: Instant) -> Result<Self, CommError> {
        let wrong = |e: io::Error| start("listening", &e);
        listener.set_nonblocking(true).map_err(wrong)?;
        let address = listener.local_addr().map_err(wrong)?;
        let (said, callers) = mpsc::channel();
        let is_open = Arc::new(AtomicBool::new(true));
        let open = Arc::clone(&is_open);
        std::thread::spawn(move || {
            let heard = Arc::new(AtomicUsize::new(0));
            while open.load(Ordering::Relaxed) && Instant::now() < until {
                // An error with one caller says nothing about the next.
                let Ok((stream, from)) = listener.accept() else {
                    std::thread::sleep(RETRY);
                    continue;
                };
                if heard.fetch_add(1, Ordering::Relaxed) >= HEARD {
                    heard.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                let (secret, said, heard) = (secret.clone(), said.clone(), Arc::clone(&heard));
                std::thread::spawn(move || {
                    hear(stream, from, &secret, &said);
                    heard.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
        Ok(Self {
            address,
            callers,
            is_open,
        })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.is_open.store(false, Ordering::Relaxed);
    }
}

/// Handles a caller: lets it prove that it belongs to the job.
fn hear(stream: TcpStream, from: SocketAddr, secret: &Secret, said: &Sender<Caller>) {
    let heard = stream
        .set_nonblocking(false)
        .map_err(|e| e.to_string())
        .and_then(|()| proved(&stream, secret));
    let caller = match heard {
        Ok(hello) => Caller::Proved(hello, stream),
        Err(reason) => Caller::Stranger(format!("{from} {reason}")),
    };
    // Fails once the meeting is over, when nobody listens any more.
    let _ = said.send(caller);
}

fn proved(stream: &TcpStream, secret: &Secret) -> Result<Hello, String> {
    use std::io::{Read, Write};
    let until = Instant::now() + HEARING;
    let mut timed = Timed { stream, until };
    let silent = |_| "did not say what a rank says".to_owned();
    let mut bytes = [0; Hello::BYTES];
    // A wrong greeting is rejected before the rest is read.
    timed.read_exact(&mut bytes[..8]).map_err(silent)?;
    if bytes[..8] != GREETING {
        return Err("did not greet as a rank of this version does".to_owned());
    }
    timed.read_exact(&mut bytes[8..]).map_err(silent)?;
    let hello = Hello::read(&bytes).ok_or("did not greet as a rank does")?;
    let nonce: [u8; 32] = secret::random()?;
    let own = secret::proof(secret, End::Listener, &[&bytes, &nonce]);
    timed
        .write_all(&[nonce, own].concat())
        .map_err(|_| "left before it was answered".to_owned())?;
    let mut theirs = [0; PROOF];
    timed.read_exact(&mut theirs).map_err(|_| {
        format!(
            "left as rank {} when asked for the job's secret",
            hello.rank
        )
    })?;
    if !secret::proves(secret, End::Caller, &[&bytes, &nonce], &theirs) {
        return Err(format!(
            "calls itself rank {} but does not know the job's secret",
            hello.rank
        ));
    }
    Ok(hello)
}

pub(super) fn start(what: &str, error: &io::Error) -> CommError {
    CommError::Start {
        reason: format!("{what}: {error}"),
    }
}

/// Whether the other end has not closed the connection (it may or may not have sent data).
fn is_open(stream: &TcpStream) -> bool {
    let mut byte = [0];
    let waits = stream.set_nonblocking(true).is_ok();
    let open = match stream.peek(&mut byte) {
        Ok(bytes) => bytes > 0,
        Err(e) => e.kind() == io::ErrorKind::WouldBlock,
    };
    stream.set_nonblocking(false).is_ok() && waits && open
}

/// The state of a rank while ranks meet.
pub(super) struct Meeting<'p> {
    place: &'p Place,
    deadline: Instant,
    streams: Vec<Option<TcpStream>>,
    /// For each rank that has called, the address on which it listens.
    listening: Vec<Option<SocketAddr>>,
    turned_away: Vec<String>,
}

/// Connects to all other ranks; returns a connection per rank, `None` for this one.
pub(super) fn meet(place: &Place, timeout: Duration) -> Result<Vec<Option<TcpStream>>, CommError> {
    let mut meeting = Meeting {
        place,
        deadline: Instant::now() + timeout,
        streams: (0..place.world).map(|_| None).collect(),
        listening: vec![None; place.world],
        turned_away: Vec::new(),
    };
    match place.rank {
        _ if place.world <= 1 => {}
        0 => meeting.lead()?,
        _ => meeting.follow()?,
    }
    Ok(meeting.streams)
}

impl Meeting<'_> {
    /// The address to listen on: loopback if all ranks are on this host, so that no other host can connect.
    fn here(&self) -> IpAddr {
        IpAddr::V4(if self.place.one_host {
            Ipv4Addr::LOCALHOST
        } else {
            Ipv4Addr::UNSPECIFIED
        })
    }

    fn late(&self, what: String) -> CommError {
        CommError::Start {
            reason: format!("{}: {what}", self.place),
        }
    }

    fn door(&self, port: u16) -> Result<Door, CommError> {
        let listener = TcpListener::bind((self.here(), port));
        let listener = listener.map_err(|e| start(&format!("listening on port {port}"), &e))?;
        Door::open(listener, self.place.secret.clone(), self.deadline)
    }

    /// Connects to a rank as soon as it listens.
    fn reach(
        &self,
        to: usize,
        addresses: &[SocketAddr],
        port: u16,
    ) -> Result<TcpStream, CommError> {
        let mut last = None;
        loop {
            for &address in addresses {
                match self.call(to, address, port) {
                    Ok(stream) => return Ok(stream),
                    Err(Unreached::Yet(reason)) => last = Some(reason),
                    // The last attempt before the deadline is short and often times out. The error then
                    // still gives the reason that an earlier attempt failed for.
                    Err(Unreached::Silent) => {}
                    Err(Unreached::Refused(reason)) => {
                        let reason = format!("{}: rank {to} {reason}", self.place);
                        return Err(CommError::Start { reason });
                    }
                }
            }
            if Instant::now() + RETRY >= self.deadline {
                let last = last.unwrap_or_else(|| "nobody answers there".to_owned());
                let what = format!("rank {to} did not answer at {addresses:?} in time: {last}");
                return Err(self.late(what));
            }
            std::thread::sleep(RETRY);
        }
    }

    fn call(&self, to: usize, address: SocketAddr, port: u16) -> Result<TcpStream, Unreached> {
        use std::io::{Read, Write};
        let yet = |e: io::Error| match e.kind() {
            io::ErrorKind::TimedOut => Unreached::Silent,
            _ => Unreached::Yet(e.to_string()),
        };
        let left = self.deadline.saturating_duration_since(Instant::now());
        let hearing = left.min(HEARING).max(RETRY);
        let stream = TcpStream::connect_timeout(&address, hearing).map_err(yet)?;
        let until = Instant::now() + hearing;
        let mut timed = Timed {
            stream: &stream,
            until,
        };
        let hello = Hello {
            rank: self.place.rank as u64,
            world: self.place.world as u64,
            to: to as u64,
            port: u64::from(port),
            nonce: secret::random().map_err(Unreached::Refused)?,
        };
        let said = hello.bytes();
        timed.write_all(&said).map_err(yet)?;
        let mut answer = [0; 32 + PROOF];
        timed.read_exact(&mut answer).map_err(yet)?;
        let (nonce, mut theirs) = (&answer[..32], [0; PROOF]);
        theirs.copy_from_slice(&answer[32..]);
        let secret = &self.place.secret;
        if !secret::proves(secret, End::Listener, &[&said, nonce], &theirs) {
            let reason = "what listens there does not know the job's secret";
            return Err(Unreached::Yet(reason.to_owned()));
        }
        let own = secret::proof(secret, End::Caller, &[&said, nonce]);
        timed.write_all(&own).map_err(yet)?;
        // It may still be busy with other callers.
        timed.until = self.deadline;
        let mut verdict = [0; 8];
        timed.read_exact(&mut verdict).map_err(yet)?;
        let refused = |reason: &str| Err(Unreached::Refused(reason.to_owned()));
        match u64::from_le_bytes(verdict) {
            WELCOME => Ok(stream),
            OTHER_WORLD => refused("is of a job with another number of ranks"),
            TAKEN => refused("has met another process of this rank"),
            _ => refused("says that it is another rank"),
        }
    }

    /// Waits until `count` other ranks have connected.
    fn welcome(&mut self, door: &Door, count: usize) -> Result<(), CommError> {
        let met = |streams: &[Option<TcpStream>]| streams.iter().flatten().count();
        let before = met(&self.streams);
        while met(&self.streams) < before + count {
            let left = self.deadline.saturating_duration_since(Instant::now());
            match door.callers.recv_timeout(left) {
                Ok(Caller::Proved(hello, stream)) => {
                    self.admit(hello, stream);
                    self.forget_who_left();
                }
                Ok(Caller::Stranger(said)) => self.turned_away.push(said),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    let come = met(&self.streams) - before;
                    let what = format!("{come} of {count} ranks came in time{}", self.strangers());
                    return Err(self.late(what));
                }
            }
        }
        Ok(())
    }

    /// Forgets ranks that hung up while others were waited for; they will call again.
    fn forget_who_left(&mut self) {
        for stream in self.streams.iter_mut().skip(self.place.rank + 1) {
            if stream.as_ref().is_some_and(|stream| !is_open(stream)) {
                *stream = None;
            }
        }
    }

    /// Lists rejected callers for an error message.
    fn strangers(&self) -> String {
        if self.turned_away.is_empty() {
            return String::new();
        }
        let named = &self.turned_away[..self.turned_away.len().min(NAMED)];
        let more = match self.turned_away.len() - named.len() {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        format!("; turned away: {}{more}", named.join("; "))
    }

    /// Accepts a rank of this job, once.
    fn admit(&mut self, hello: Hello, stream: TcpStream) {
        use std::io::Write;
        let rank = hello.rank as usize;
        let known = self.streams.get(rank);
        let verdict = if hello.world != self.place.world as u64 {
            OTHER_WORLD
        } else if hello.to != self.place.rank as u64 || hello.rank == hello.to {
            OTHER_RANK
        } else {
            match known {
                None => OTHER_WORLD,
                // A rank that hung up may call again.
                Some(Some(before)) if is_open(before) => TAKEN,
                Some(_) => WELCOME,
            }
        };
        let until = Instant::now() + HEARING;
        let mut timed = Timed {
            stream: &stream,
            until,
        };
        let told = timed.write_all(&verdict.to_le_bytes()).is_ok();
        if verdict != WELCOME || !told {
            let from = stream.peer_addr().map_or(String::new(), |a| a.to_string());
            self.turned_away.push(format!(
                "{from} calls itself rank {} of {}",
                hello.rank, hello.world
            ));
            return;
        }
        let from = stream.peer_addr().ok();
        self.listening[rank] = from.map(|from| SocketAddr::new(from.ip(), hello.port as u16));
        self.streams[rank] = Some(stream);
    }

    /// Rank 0's part: waits for all ranks, then sends everybody the addresses.
    fn lead(&mut self) -> Result<(), CommError> {
        let door = self.door(self.place.port)?;
        self.welcome(&door, self.place.world - 1)?;
        let known = self.listening.iter().flatten();
        let list: Vec<String> = known.map(SocketAddr::to_string).collect();
        let list = list.join("\n");
        let until = self.deadline.max(Instant::now() + HEARING);
        for stream in self.streams.iter().flatten() {
            let told = frames::write(&mut Timed { stream, until }, 0, list.as_bytes());
            told.map_err(|e| start("telling a rank the others' addresses", &e))?;
        }
        Ok(())
    }

    /// Other ranks' part: connects to the lower ranks, then waits for the higher ranks to connect.
    fn follow(&mut self) -> Result<(), CommError> {
        let Place {
            host, port, rank, ..
        } = self.place;
        let door = self.door(0)?;
        let known = (host.as_str(), *port).to_socket_addrs();
        let known: Vec<SocketAddr> = known
            .map_err(|e| start(&format!("looking {host} up"), &e))?
            .collect();
        let first = self.reach(0, &known, door.address.port())?;
        let mut timed = Timed {
            stream: &first,
            until: self.deadline,
        };
        let longest = ADDRESS * self.place.world as u64;
        let (_, list) = frames::read(&mut timed, longest).map_err(|e| match e.kind() {
            io::ErrorKind::TimedOut => self.late("the other ranks did not come in time".to_owned()),
            _ => start("rank 0 left while ranks met", &e),
        })?;
        let list = String::from_utf8_lossy(&list).into_owned();
        self.streams[0] = Some(first);
        for (to, line) in (1..*rank).zip(list.lines()) {
            let address = line.parse().map_err(|_| CommError::Start {
                reason: format!("rank 0 says that rank {to} is at {line}"),
            })?;
            self.streams[to] = Some(self.reach(to, &[address], 0)?);
        }
        self.welcome(&door, self.place.world - 1 - rank)
    }
}
