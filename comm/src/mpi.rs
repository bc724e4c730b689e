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
use super::inbox::{Failure, Inbox, Waiter};

/// Pause of the thread when nothing moves, which bounds the added latency.
const IDLE: Duration = Duration::from_micros(20);
/// How long failing ranks have to report why before all are aborted.
const GRACE: Duration = Duration::from_secs(1);
/// Channel of failure messages.
const FAILED: u64 = u64::MAX;
/// Channel of a rank's last message: it will send no more.
const DONE: u64 = u64::MAX - 1;
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

struct Shared {
    inbox: Inbox,
    failed: Failure,
    timeout: Duration,
}

/// One rank of a job whose ranks are MPI processes.
pub struct MpiCommunicator {
    rank: usize,
    world: usize,
    shared: Arc<Shared>,
    asks: Mutex<Sender<Ask>>,
    thread: Option<JoinHandle<()>>,
}

impl MpiCommunicator {
    /// Joins the job that the launcher started; ranks wait at most `timeout` for each other.
    ///
    /// # Errors
    /// When MPI cannot start.
    pub fn join(timeout: Duration) -> Result<Self, CommError> {
        let shared = Arc::new(Shared {
            inbox: Inbox::default(),
            failed: Failure::new(),
            timeout,
        });
        let (asks, asked) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let theirs = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            let Some(universe) = mpi::initialize() else {
                return;
            };
            let world = universe.world();
            // The constructor waits for this.
            let _ = tell.send((world.rank() as usize, world.size() as usize));
            Carrier {
                world,
                shared: theirs,
                under_way: Vec::new(),
                done: 0,
            }
            .run(&asked);
        });
        let (rank, world) = told.recv().map_err(|_| CommError::Start {
            reason: "MPI was initialised before, or cannot be".to_owned(),
        })?;
        Ok(Self {
            rank,
            world,
            shared,
            asks: Mutex::new(asks),
            thread: Some(thread),
        })
    }

    fn waiter(&self) -> Waiter<'_> {
        Waiter {
            rank: self.rank,
            failed: &self.shared.failed,
            timeout: self.shared.timeout,
        }
    }

    fn post(&self, to: usize, channel: u64, data: &[u8]) {
        let mut bytes = Vec::with_capacity(8 + data.len());
        bytes.extend(channel.to_le_bytes());
        bytes.extend_from_slice(data);
        let asks = self.asks.lock().unwrap_or_else(PoisonError::into_inner);
        // If the thread is gone, it has put the reason into the inbox.
        let _ = asks.send(Ask::Send { to, bytes });
    }
}

impl Communicator for MpiCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn send(&self, to: usize, channel: u64, what: &str, data: Message) -> Result<(), CommError> {
        self.waiter().check(what)?;
        if to == self.rank {
            self.shared.inbox.put(to, channel, data);
        } else {
            self.post(to, channel, &data);
        }
        Ok(())
    }

    fn receive(&self, from: usize, channel: u64, what: &str) -> Result<Message, CommError> {
        self.shared
            .inbox
            .take(&self.waiter(), (from, channel), what)
    }

    fn check(&self, what: &str) -> Result<(), CommError> {
        self.waiter().check(what)
    }

    fn fail(&self, reason: &str) {
        if self
            .shared
            .failed
            .set((self.rank, reason.to_owned()))
            .is_ok()
        {
            for to in (0..self.world).filter(|&to| to != self.rank) {
                self.post(to, FAILED, reason.as_bytes());
            }
        }
        self.shared.inbox.wake();
    }
}

impl Drop for MpiCommunicator {
    fn drop(&mut self) {
        for to in (0..self.world).filter(|&to| to != self.rank) {
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
    shared: Arc<Shared>,
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
            if self.shared.failed.get().is_some() && since.elapsed() > GRACE {
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
                let _ = self.shared.failed.set((from, reason));
                self.shared.inbox.wake();
            }
            DONE => self.done += 1,
            _ => self
                .shared
                .inbox
                .put(from, channel, Arc::new(data.to_vec())),
        }
        true
    }
}
