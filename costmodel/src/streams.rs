//! The streams of a GPU: computes when kernels and communication run, given the order in which they are issued.
//!
//! A stream runs what it is given one after the other, as a CUDA stream does. A task begins when its stream is free and
//! every task that it waits for has ended. Tasks are issued in the order in which the host issues them, so each waits
//! only for earlier ones and its start is known at once. Every second of communication beside a kernel makes the kernel
//! take `slowdown − 1` seconds longer; communication itself is not slowed by kernels. What the compute stream
//! loses to a communication stream, by waiting for it or by running slower beside it, is that stream's exposed time.

use catalog::Axis;
use strum::VariantArray;

use crate::picoseconds::Picoseconds;

/// A stream of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
pub(crate) enum Stream {
    /// Kernels of forward, backward and optimizer.
    Compute,
    /// Messages of tensor parallelism.
    Tensor,
    /// Messages of context parallelism.
    Context,
    /// Messages of expert parallelism.
    Expert,
    /// Parameter gathers and gradient reductions of data parallelism.
    Data,
    /// Copies to host memory.
    ToHost,
    /// What the host's processors compute.
    Host,
    /// Copies from host memory.
    FromHost,
}

/// Number of streams.
pub(crate) const STREAMS: usize = Stream::VARIANTS.len();

/// The communication streams, beside which kernels run slower.
pub(crate) const COMMUNICATION: [Stream; 4] = [
    Stream::Tensor,
    Stream::Context,
    Stream::Expert,
    Stream::Data,
];

/// Streams of copies to and from host memory, and of work on the host. They do not slow the kernels beside them.
pub(crate) const OFFLOAD: [Stream; 3] = [Stream::ToHost, Stream::Host, Stream::FromHost];

impl Stream {
    /// The stream that a block's messages over an axis use.
    pub(crate) fn of(axis: Axis) -> Self {
        match axis {
            Axis::Tp | Axis::Etp => Self::Tensor,
            Axis::Cp => Self::Context,
            Axis::Ep => Self::Expert,
            Axis::Edp | Axis::DpShard | Axis::DpReplicate | Axis::Pp => Self::Data,
        }
    }
}

/// The end time of a task, which others may wait for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) at: Picoseconds,
    pub(crate) stream: Stream,
}

/// Start and end time of an issued task.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) start: Picoseconds,
    pub(crate) end: Picoseconds,
    /// The extra time because communication runs beside it, and the stream of that communication.
    pub(crate) slowed: Option<(Stream, Picoseconds)>,
}

/// When a stream is busy with the tasks issued to it so far.
#[derive(Clone, Copy, Debug, Default)]
struct Queue {
    /// Start of its last busy period, which has no pause.
    since: Picoseconds,
    /// Time at which it has finished everything issued to it.
    free: Picoseconds,
}

/// The streams of one GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Streams {
    queues: [Queue; STREAMS],
    exposed: [Picoseconds; STREAMS],
    /// Time at which all communication has finished.
    quiet: Picoseconds,
    slowdown: Slowdown,
}

/// Factors, at least 1, by which kernels take longer while communication runs beside them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Slowdown {
    /// Factor beside messages of tensor parallelism.
    pub(crate) tensor: f64,
    /// Factor beside all other messages.
    pub(crate) others: f64,
}

impl Slowdown {
    /// The same slow-down beside all messages.
    pub(crate) fn all(of_any: f64) -> Self {
        Self {
            tensor: of_any,
            others: of_any,
        }
    }

    /// Seconds by which a kernel takes longer for each second in which messages of this stream run beside it.
    fn longer(self, stream: Stream) -> f64 {
        let slowdown = match stream {
            Stream::Tensor => self.tensor,
            _ => self.others,
        };
        slowdown - 1.0
    }
}

impl Streams {
    /// Idle streams; `slowdown` is by how much communication slows their kernels.
    pub(crate) fn new(slowdown: Slowdown) -> Self {
        Self {
            queues: [Queue::default(); STREAMS],
            exposed: [Picoseconds::ZERO; STREAMS],
            quiet: Picoseconds::ZERO,
            slowdown,
        }
    }

    /// The time at which a stream has finished everything issued to it.
    pub(crate) fn free(&self, stream: Stream) -> Picoseconds {
        self.queues[stream as usize].free
    }

    /// The end of the last task issued to a stream.
    pub(crate) fn end(&self, stream: Stream) -> End {
        End {
            at: self.free(stream),
            stream,
        }
    }

    /// Time that the compute stream has lost to a communication stream.
    pub(crate) fn exposed(&self, stream: Stream) -> Picoseconds {
        self.exposed[stream as usize]
    }

    /// Counts a part of what the compute stream has lost to one stream as lost to another.
    pub(crate) fn owe(&mut self, part: Picoseconds, from: Stream, to: Stream) {
        let owed = &mut self.exposed[from as usize];
        *owed = owed.since(part);
        self.exposed[to as usize] += part;
    }

    /// Issues a task to a stream; it waits for `after`, the end of the latest task it needs.
    #[inline(always)]
    pub(crate) fn issue(
        &mut self,
        stream: Stream,
        duration: Picoseconds,
        after: Option<End>,
    ) -> Span {
        let free = self.free(stream);
        let start = after.map_or(free, |end| free.max(end.at));
        let slowed = match stream {
            Stream::Compute => self.slowed(start, duration),
            _ => None,
        };
        let span = Span {
            start,
            end: start + duration + slowed.map_or(Picoseconds::ZERO, |(_, longer)| longer),
            slowed,
        };
        if stream == Stream::Compute {
            if let Some(end) = after {
                self.exposed[end.stream as usize] += start.since(free);
            }
            if let Some((beside, longer)) = slowed {
                self.exposed[beside as usize] += longer;
            }
        } else if !OFFLOAD.contains(&stream) {
            self.quiet = self.quiet.max(span.end);
        }
        let queue = &mut self.queues[stream as usize];
        if start > queue.free {
            queue.since = start;
        }
        queue.free = span.end;
        span
    }

    /// Makes the compute stream wait until a stream has finished everything issued to it.
    pub(crate) fn join(&mut self, stream: Stream) -> Span {
        let end = self.end(stream);
        self.issue(Stream::Compute, Picoseconds::ZERO, Some(end))
    }

    /// Makes the compute stream idle until a time that does not come from a stream.
    pub(crate) fn idle_until(&mut self, at: Picoseconds) {
        let queue = &mut self.queues[Stream::Compute as usize];
        queue.free = queue.free.max(at);
    }

    /// How much later the compute stream is than at an `earlier` moment; `None` if the same tasks
    /// would not run alike from both moments on. Streams that end before compute do not count.
    pub(crate) fn later_than(&self, earlier: &Self) -> Option<Picoseconds> {
        let by = self
            .free(Stream::Compute)
            .since(earlier.free(Stream::Compute));
        let same = |stream: Stream| {
            let [then, now] = [earlier, self].map(|streams| streams.under_way(stream));
            now == then.map(|[since, free]| [since + by, free + by])
        };
        let mut beside = COMMUNICATION.into_iter().chain(OFFLOAD);
        beside.all(same).then_some(by)
    }

    /// `[start, end]` of a stream's work after compute has ended; `None` if there is none.
    fn under_way(&self, stream: Stream) -> Option<[Picoseconds; 2]> {
        let compute = self.free(Stream::Compute);
        let Queue { since, free } = self.queues[stream as usize];
        (free > compute).then(|| [since.max(compute), free])
    }

    /// Adds `times` repetitions, each `by` long, of what happened since an `earlier` moment.
    pub(crate) fn skip(&mut self, earlier: &Self, by: Picoseconds, times: u64) {
        for (queue, then) in self.queues.iter_mut().zip(&earlier.queues) {
            // Nothing was issued to this stream since.
            if queue.free != then.free {
                queue.since += by * times;
                queue.free += by * times;
            }
        }
        self.quiet += by * times;
        for (now, then) in self.exposed.iter_mut().zip(&earlier.exposed) {
            *now += now.since(*then) * times;
        }
    }

    /// Extra time of a kernel because of the communication that slows it most, and the stream of that communication.
    #[inline(always)]
    fn slowed(&self, start: Picoseconds, duration: Picoseconds) -> Option<(Stream, Picoseconds)> {
        match self.quiet <= start {
            true => None,
            false => self.slowed_most(start, duration),
        }
    }

    fn slowed_most(
        &self,
        start: Picoseconds,
        duration: Picoseconds,
    ) -> Option<(Stream, Picoseconds)> {
        let mut most = None;
        let mut longest = Picoseconds::ZERO;
        for stream in COMMUNICATION {
            let Queue { since, free } = self.queues[stream as usize];
            if free > start {
                let begins = since.max(start);
                let beside = free.since(begins).min(duration.since(begins.since(start)));
                let longer = beside.share(self.slowdown.longer(stream));
                if longer > Picoseconds::ZERO && longer >= longest {
                    longest = longer;
                    most = Some((stream, longer));
                }
            }
        }
        most
    }
}

/// The tasks that a task waits for: for every stream the last one, by index in a list. Earlier ones on the same stream
/// have ended by then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Waits {
    last: [u32; STREAMS],
    /// The streams with a task that is waited for, one bit each.
    of: u8,
}

impl Waits {
    /// Adds a task of a stream to those waited for.
    pub(crate) fn add(&mut self, stream: Stream, task: usize) {
        let last = &mut self.last[stream as usize];
        *last = (*last).max(task as u32);
        self.of |= 1 << stream as u8;
    }

    /// Which of the tasks waited for ends last, and when; `None` if there are none. `ends` holds the end of every task, by index.
    #[inline(always)]
    pub(crate) fn last(&self, ends: &[Picoseconds]) -> Option<(usize, End)> {
        let mut last: Option<(usize, End)> = None;
        for (stream, task) in self.tasks() {
            let at = ends[task];
            if last.is_none_or(|(_, end)| at >= end.at) {
                last = Some((task, End { at, stream }));
            }
        }
        last
    }

    /// The tasks that must end first. Each is given by its stream and its index in the list of tasks.
    #[inline(always)]
    pub(crate) fn tasks(&self) -> impl Iterator<Item = (Stream, usize)> {
        let mut of = self.of;
        std::iter::from_fn(move || {
            let stream = of.trailing_zeros() as usize;
            let last = self.last.get(stream)?;
            of &= of - 1;
            Some((Stream::VARIANTS[stream], *last as usize))
        })
    }
}

/// A repetition in a list of tasks. The task that carries it ends a round of `tasks` tasks, which
/// is issued `times` more times. Tasks may wait for tasks of the round before; for the listed
/// round, these are the `tasks` tasks listed right before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Again {
    pub(crate) tasks: usize,
    pub(crate) times: usize,
}

#[cfg(test)]
mod tests {
    use catalog::Seconds;

    use super::*;

    fn near(a: impl Into<Seconds>, b: f64) -> bool {
        (a.into().0 - b).abs() < 1e-11
    }

    fn seconds(time: f64) -> Picoseconds {
        Picoseconds::from(Seconds(time))
    }

    #[test]
    fn kernels_are_slower_only_beside_communication() {
        let mut streams = Streams::new(Slowdown::all(1.25));
        streams.issue(Stream::Data, seconds(5.0), None);
        let span = streams.issue(Stream::Compute, seconds(10.0), None);
        assert!(near(span.end, 11.25) && near(streams.exposed(Stream::Data), 1.25));
        let span = streams.issue(Stream::Compute, seconds(10.0), None);
        assert!(near(span.end, 21.25));
        // A message that begins in the middle of a kernel.
        streams.issue(
            Stream::Data,
            seconds(5.0),
            Some(End {
                at: seconds(26.25),
                stream: Stream::Compute,
            }),
        );
        let span = streams.issue(Stream::Compute, seconds(10.0), None);
        assert!(near(span.end, 32.5));
    }

    #[test]
    fn kernels_lose_to_the_communication_that_slows_them_most() {
        for (tensor, lost_to, longer) in [(1.1, Stream::Data, 2.0), (1.9, Stream::Tensor, 2.7)] {
            let mut streams = Streams::new(Slowdown {
                tensor,
                others: 1.5,
            });
            streams.issue(Stream::Tensor, seconds(3.0), None);
            streams.issue(Stream::Data, seconds(4.0), None);
            streams.issue(Stream::Compute, seconds(10.0), None);
            assert!(near(streams.exposed(lost_to), longer), "{tensor}");
            assert!(near(streams.free(Stream::Compute), 10.0 + longer));
        }
    }
}
