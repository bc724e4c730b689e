//! A communicator for ranks that are processes connected by TCP.
//!
//! Per peer, one thread puts arriving messages into the inbox and another writes outgoing ones from the outbox, so
//! that a sender never waits for a receiver and a hanging peer delays no message to others. A peer that does not take
//! a message, or does not send one that is waited for, within the timeout ends the job, and the error names its rank.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};

use super::bootstrap::Place;
use super::communicator::{CommError, Communicator, Message};
use super::frames::{self, DONE, FAILED, Timed};
use super::inbox::Inbox;
use super::meeting::{meet, start};
use super::outbox::Outbox;

/// TCP keepalive: after this silence the other end is probed, and then again at intervals: a host that lost power
/// sends nothing.
const SILENT: Duration = Duration::from_secs(10);
const ASKED_AGAIN: Duration = Duration::from_secs(5);
const ASKED: u32 = 3;
/// How long a failed rank tries to report its failure before it leaves.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long a peer's own failure message may take to arrive after its connection broke.
const HINDSIGHT: Duration = Duration::from_millis(200);

/// Upper bound of any wait: a later deadline might overflow the clock.
const LONGEST_WAIT: Duration = Duration::from_secs(366 * 24 * 3600);

/// The connection to another rank.
struct Peer {
    stream: TcpStream,
    outbox: Arc<Outbox>,
}

/// One rank of a job whose ranks are processes connected by TCP.
pub struct TcpCommunicator {
    inbox: Arc<Inbox>,
    /// The connection to each rank; `None` for this one.
    peers: Vec<Option<Peer>>,
}

impl TcpCommunicator {
    /// Connects to all other ranks. Nobody waits longer than `timeout`, now or later.
    ///
    /// # Errors
    /// When not all of them connect in time.
    pub fn join(place: &Place, timeout: Duration) -> Result<Self, CommError> {
        let timeout = timeout.min(LONGEST_WAIT);
        let streams = meet(place, timeout)?;
        let inbox = Arc::new(Inbox::new(place.rank, timeout, Arc::default()));
        let peers = streams.into_iter().enumerate().map(|(peer, stream)| {
            let stream = stream.map(|stream| Peer::new((peer, place.world), stream, &inbox));
            stream.transpose()
        });
        let peers = peers.collect::<io::Result<_>>();
        Ok(Self {
            inbox,
            peers: peers.map_err(|e| start("setting a connection up", &e))?,
        })
    }

    fn outboxes(&self) -> impl Iterator<Item = &Outbox> {
        self.peers.iter().flatten().map(|peer| &*peer.outbox)
    }
}

impl Peer {
    /// Starts the threads that receive from a peer and send to it.
    fn new(
        (peer, world): (usize, usize),
        stream: TcpStream,
        inbox: &Arc<Inbox>,
    ) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        let alive = TcpKeepalive::new()
            .with_time(SILENT)
            .with_interval(ASKED_AGAIN)
            .with_retries(ASKED);
        SockRef::from(&stream).set_tcp_keepalive(&alive)?;
        let outbox = Arc::new(Outbox::default());
        let (reads, writes) = (stream.try_clone()?, stream.try_clone()?);
        let listens = Arc::clone(inbox);
        std::thread::spawn(move || listen(&listens, (peer, world), reads));
        let (carries, carried) = (Arc::clone(inbox), Arc::clone(&outbox));
        std::thread::spawn(move || carry(&carries, peer, &writes, &carried));
        Ok(Self { stream, outbox })
    }
}

/// Receives what a peer sends until the peer says that it has finished or failed.
fn listen(inbox: &Inbox, (peer, world): (usize, usize), mut stream: TcpStream) {
    let (failed, reason) = loop {
        match frames::read(&mut stream, frames::LONGEST) {
            Ok((DONE, _)) => return,
            Ok((FAILED, reason)) => break frames::failure(peer, world, &reason),
            Ok((channel, data)) => inbox.put(peer, channel, Arc::new(data)),
            Err(error) => break (peer, format!("its connection broke: {error}")),
        }
    };
    inbox.fail(failed, reason);
}

/// Writes the queued messages to a peer until there are no more. A message that is not completely written within the
/// timeout ends the job.
fn carry(inbox: &Inbox, peer: usize, stream: &TcpStream, outbox: &Outbox) {
    while let Some((channel, data)) = outbox.next() {
        let until = Instant::now() + inbox.timeout;
        let wrote = frames::write(&mut Timed { stream, until }, channel, &data);
        outbox.wrote(wrote.is_ok());
        let Err(error) = wrote else { continue };
        let reason = if error.kind() == io::ErrorKind::TimedOut {
            let seconds = inbox.timeout.as_secs_f64();
            let bytes = data.len();
            format!("it did not take a message of {bytes} bytes in {seconds} s")
        } else {
            std::thread::sleep(HINDSIGHT);
            format!("its connection broke: {error}")
        };
        inbox.fail(peer, reason);
        return;
    }
}

impl Communicator for TcpCommunicator {
    fn rank(&self) -> usize {
        self.inbox.rank
    }

    fn world(&self) -> usize {
        self.peers.len()
    }

    fn send(&self, to: usize, channel: u64, what: &str, data: Message) -> Result<(), CommError> {
        self.check(what)?;
        match &self.peers[to] {
            // If it cannot be sent, the failure that prevents it is reported elsewhere.
            Some(peer) => drop(peer.outbox.put(channel, data)),
            None => self.inbox.put(to, channel, data),
        }
        Ok(())
    }

    fn receive(&self, from: usize, channel: u64, what: &str) -> Result<Message, CommError> {
        self.inbox.take(from, channel, what)
    }

    fn check(&self, what: &str) -> Result<(), CommError> {
        self.inbox.check(what)
    }

    fn fail(&self, reason: &str) {
        self.inbox.fail(self.inbox.rank, reason.to_owned());
        self.outboxes()
            .for_each(|outbox| outbox.fail(self.inbox.rank, reason));
    }
}

impl Drop for TcpCommunicator {
    fn drop(&mut self) {
        let failure = self.inbox.failed.get();
        let patience = match failure {
            Some((rank, reason)) => {
                self.outboxes()
                    .for_each(|outbox| outbox.fail(*rank, reason));
                LAST_WORDS
            }
            None => {
                self.outboxes().for_each(Outbox::end);
                self.inbox.timeout
            }
        };
        let has_failed = failure.is_some();
        let until = Instant::now() + patience;
        self.outboxes().for_each(|outbox| outbox.drain(until));
        if has_failed {
            for peer in self.peers.iter().flatten() {
                // Ends the threads of a peer that does not read; any other has read everything by now.
                let _ = peer.stream.shutdown(Shutdown::Both);
            }
        }
    }
}

#[cfg(test)]
mod tests;
