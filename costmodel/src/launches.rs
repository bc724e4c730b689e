//! The list of kernels and messages that a host issues to streams, and what each of them waits for.

use catalog::Axis;

use crate::streams::{Again, Stream, Waits};

/// A kernel or message, or one of the equal parts of a split one, issued to a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    /// Index among all kernels of the block.
    pub(crate) kernel: usize,
    /// Number of equal parts that it is split into; 1 if it is not split.
    pub(crate) parts: u64,
    pub(crate) stream: Stream,
    pub(crate) waits: Waits,
    /// How many of the launches up to this one are issued again after it, and how often.
    pub(crate) again: Again,
}

impl Launch {
    /// A kernel issued after those of a pass, which waits for all of the pass's messages.
    pub(crate) fn last(kernel: usize, pass: &[Self]) -> Self {
        let mut waits = Waits::default();
        for (index, launch) in pass.iter().enumerate() {
            waits.add(launch.stream, index);
        }
        Self::new(kernel, 1, Stream::Compute, waits)
    }

    fn new(kernel: usize, parts: u64, stream: Stream, waits: Waits) -> Self {
        Self {
            kernel,
            parts,
            stream,
            waits,
            again: Again::default(),
        }
    }
}

/// The launches of a pass in the order of issue; one that is repeated appears once per repetition.
pub(crate) fn issued(pass: &[Launch]) -> impl Iterator<Item = &Launch> {
    pass.iter().enumerate().flat_map(|(index, launch)| {
        let Again { tasks, times } = launch.again;
        let again = &pass[index + 1 - tasks..=index];
        let again = std::iter::repeat_n(again, times).flatten();
        std::iter::once(launch).chain(again)
    })
}

/// Launches in the order in which the host issues them.
#[derive(Debug)]
pub(crate) struct Queue {
    launches: Vec<Launch>,
    /// Index of the last launch on the compute stream.
    kernel: Option<usize>,
    /// What the next launch on the compute stream waits for.
    pending: Waits,
}

impl Queue {
    /// An empty queue with room for this many launches.
    pub(crate) fn with_room(launches: usize) -> Self {
        Self {
            launches: Vec::with_capacity(launches),
            kernel: None,
            pending: Waits::default(),
        }
    }

    /// Issues a kernel, or a part of one, to the compute stream.
    pub(crate) fn compute(&mut self, kernel: usize, parts: u64) {
        self.kernel = Some(self.launches.len());
        let waits = std::mem::take(&mut self.pending);
        let launch = Launch::new(kernel, parts, Stream::Compute, waits);
        self.launches.push(launch);
    }

    /// Issues a message, or a part of one, after all kernels issued so far; returns its index.
    pub(crate) fn send(&mut self, kernel: usize, parts: u64, stream: Stream) -> usize {
        let mut waits = self.pending;
        if let Some(last) = self.kernel {
            waits.add(Stream::Compute, last);
        }
        self.launches
            .push(Launch::new(kernel, parts, stream, waits));
        self.launches.len() - 1
    }

    /// Makes the next kernel wait for a message.
    pub(crate) fn wait(&mut self, launch: usize) {
        self.pending.add(self.launches[launch].stream, launch);
    }

    /// Issues a message that the next kernel waits for.
    pub(crate) fn exchange(&mut self, kernel: usize, axis: Axis) {
        let launch = self.send(kernel, 1, Stream::of(axis));
        self.wait(launch);
    }

    /// Issues a message while the compute stream works on layers of another micro-batch: neither waits for the other.
    pub(crate) fn beside_others(&mut self, kernel: usize, axis: Axis) {
        let launch = Launch::new(kernel, 1, Stream::of(axis), Waits::default());
        self.launches.push(launch);
    }

    /// Number of launches so far.
    pub(crate) fn len(&self) -> usize {
        self.launches.len()
    }

    /// Marks the last `tasks` launches as a round that is issued `times` more times ([`Again`]).
    pub(crate) fn again(&mut self, tasks: usize, times: usize) {
        if let Some(last) = self.launches.last_mut() {
            last.again = Again { tasks, times };
        }
    }

    /// All launches issued so far.
    pub(crate) fn launches(self) -> Vec<Launch> {
        self.launches
    }
}
