//! A communicator for ranks that are processes started by an MPI launcher (`mpirun`, `srun`), on any number of hosts.
//!
//! MPI only carries bytes: reductions are our own code. A single thread makes all MPI calls, so any implementation
//! will do. It sends without blocking, and puts arriving messages into the rank's inbox, where timeouts and failures
//! work as for thread ranks.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mpi::Rank;
use mpi::point_to_point::Status;
use mpi::request::{Request, StaticScope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, Destination, MatchedReceiveVec, Source};

use super::communicator::{CommError, Communicator, Message};
use super::frames::{DONE, FAILED};
use super::inbox::Inbox;

/// Pause of the thread when nothing moves, which bounds the added latency.
const IDLE: Duration = Duration::from_micros(20);
/// How long failing ranks have to report why before all are aborted.
const GRACE: Duration = Duration::from_secs(1);
/// MPI tag of all messages: MPI orders them per sender; channels are in the message.
const TAG: i32 = 1;

/// Requests to the MPI thread.
enum Ask {
    Send {
        to: usize,
        bytes: Vec<u8>,
    },
    /// Finish what was requested and stop.
    Leave,
}

/// One rank of a job whose ranks are MPI processes.
pub struct MpiCommunicator {
    inbox: Arc<Inbox>,
    world: usize,
    asks: Mutex<Sender<Ask>>,
    thread: Option<JoinHandle<()>>,
}

impl MpiCommunicator {
    /// Joins the job that the launcher started; ranks wait at most `timeout` for each other.
    ///
    /// # Errors
    /// When MPI cannot start.
    pub fn join(timeout: Duration) -> Result<Self, CommError> {
        let (asks, asked) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let Some(universe) = mpi::initialize() else {
                return;
            };
            let world = universe.world();
            let rank = world.rank() as usize;
            let inbox = Arc::new(Inbox::new(rank, timeout, Arc::default()));
            // The constructor waits for this.
            let _ = tell.send((Arc::clone(&inbox), world.size() as usize));
            Carrier {
                world,
                inbox,
                under_way: Vec::new(),
                done: 0,
            }
            .run(&asked);
        });
        let (inbox, world) = told.recv().map_err(|_| CommError::Start {
            reason: "MPI was already initialised, or cannot start".to_owned(),
        })?;
        Ok(Self {
            inbox,
            world,
            asks: Mutex::new(asks),
            thread: Some(thread),
        })
    }

    fn post(&self, to: usize, channel: u64, data: &[u8]) {
        let mut bytes = Vec::with_capacity(8 + data.len());
        bytes.extend(channel.to_le_bytes());
        bytes.extend_from_slice(data);
        let asks = self.asks.lock().unwrap_or_else(PoisonError::into_inner);
        // The thread runs until the communicator is dropped, so this does not fail.
        let _ = asks.send(Ask::Send { to, bytes });
    }
}

impl Communicator for MpiCommunicator {
    fn rank(&self) -> usize {
        self.inbox.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn send(&self, to: usize, channel: u64, what: &str, data: Message) -> Result<(), CommError> {
        self.check(what)?;
        if to == self.inbox.rank {
            self.inbox.put(to, channel, data);
        } else {
            self.post(to, channel, &data);
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
        let rank = self.inbox.rank;
        if self.inbox.fail(rank, reason.to_owned()) {
            for to in (0..self.world).filter(|&to| to != rank) {
                self.post(to, FAILED, reason.as_bytes());
            }
        }
    }
}

impl Drop for MpiCommunicator {
    fn drop(&mut self) {
        for to in (0..self.world).filter(|&to| to != self.inbox.rank) {
            self.post(to, DONE, &[]);
        }
        let asks = self.asks.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = asks.send(Ask::Leave);
        drop(asks);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

type Sending = Request<'static, [u8], StaticScope>;

/// The state of the thread that makes MPI calls.
struct Carrier {
    world: SimpleCommunicator,
    inbox: Arc<Inbox>,
    under_way: Vec<(Sending, *mut [u8])>,
    /// Number of peers that will send no more.
    done: usize,
}

impl Carrier {
    fn run(mut self, asked: &Receiver<Ask>) {
        let mut leaving: Option<Instant> = None;
        loop {
            let moved = self.receive_one() | self.finish_sends();
            let wait = if moved { Duration::ZERO } else { IDLE };
            match asked.recv_timeout(wait) {
                Ok(Ask::Send { to, bytes }) => self.send(to, bytes),
                Ok(Ask::Leave) | Err(RecvTimeoutError::Disconnected) => {
                    leaving.get_or_insert_with(Instant::now);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            let Some(since) = leaving else { continue };
            let alone = self.done + 1 >= self.world.size() as usize;
            if alone && self.under_way.is_empty() {
                return;
            }
            // A rank that died or hangs would keep this one from stopping.
            if self.inbox.failed.get().is_some() && since.elapsed() > GRACE {
                self.world.abort(1);
            }
        }
    }

    #[allow(
        unsafe_code,
        reason = "the buffer outlives its request, and is freed once"
    )]
    fn finish_sends(&mut self) -> bool {
        let before = self.under_way.len();
        let mut left = Vec::with_capacity(before);
        for (request, buffer) in std::mem::take(&mut self.under_way) {
            match request.test() {
                // SAFETY: `buffer` is the box that `send` leaked, and its request is complete.
                Ok(_) => drop(unsafe { Box::from_raw(buffer) }),
                Err(request) => left.push((request, buffer)),
            }
        }
        self.under_way = left;
        self.under_way.len() < before
    }

    #[allow(unsafe_code, reason = "a shared view of a buffer that nobody writes")]
    fn send(&mut self, to: usize, bytes: Vec<u8>) {
        let buffer = Box::into_raw(bytes.into_boxed_slice());
        // SAFETY: `buffer` was just leaked; `finish_sends` frees it when the request is complete.
        let view: &'static [u8] = unsafe { &*buffer };
        let peer = self.world.process_at_rank(to as Rank);
        let request = peer.immediate_send_with_tag(StaticScope, view, TAG);
        self.under_way.push((request, buffer));
    }

    fn receive_one(&mut self) -> bool {
        let probe = self.world.any_process();
        let Some(found) = probe.immediate_matched_probe_with_tag(TAG) else {
            return false;
        };
        let (bytes, status): (Vec<u8>, Status) = found.matched_receive_vec();
        let from = status.source_rank() as usize;
        let (channel, data) = bytes.split_at(8);
        let channel = u64::from_le_bytes(channel.try_into().expect("eight bytes"));
        match channel {
            FAILED => {
                let reason = String::from_utf8_lossy(data).into_owned();
                self.inbox.fail(from, reason);
            }
            DONE => self.done += 1,
            _ => self.inbox.put(from, channel, Arc::new(data.to_vec())),
        }
        true
    }
}
