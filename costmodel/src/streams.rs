//! The streams of a GPU: computes when kernels and communication run, given the order in which they are issued.
//!
//! A stream runs what it is given one after the other, as a CUDA stream does. A task begins when its stream is free and
//! every task that it waits for has ended. Tasks are issued in the order in which the host issues them, so each waits
//! only for earlier ones and its start is known at once. Every second of communication beside a kernel makes the kernel
//! take `slowdown − 1` seconds longer; communication itself is not slowed by kernels. What the compute stream
//! loses to a communication stream, by waiting for it or by running slower beside it, is that stream's exposed time.

use catalog::{Axis, Seconds};
use strum::VariantArray;

use crate::picoseconds::Picoseconds;
use crate::work::Work;

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
const STREAMS: usize = Stream::VARIANTS.len();

/// The communication streams, beside which kernels run slower.
const COMMUNICATION: [Stream; 4] = [
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
    slowed: Option<(Stream, Picoseconds)>,
}

/// The state of a stream after what it has been given so far.
#[derive(Clone, Copy, Debug, Default)]
struct Queue {
    /// Start of the period since which it has been busy without a pause.
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

    /// The end of the task that a stream was given last.
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
            // A stream that was given nothing is where it was.
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
    fn last(&self, ends: &[Picoseconds]) -> Option<(usize, End)> {
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

/// A kernel or message, or a part of one, in a list that is issued in order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    pub(crate) stream: Stream,
    /// Time that it takes when it runs alone.
    pub(crate) duration: Picoseconds,
    /// Time that the host takes to issue it.
    pub(crate) host: Seconds,
    pub(crate) waits: Waits,
    /// How many of the tasks up to this one are issued again after it, and how often.
    pub(crate) again: Again,
}

/// A repetition in a list of tasks. The task that carries it and those before it, `tasks` in all,
/// are a round, which is issued `times` more times after it. Tasks of a round may wait for those of
/// the round before; for the listed round these are the `tasks` like tasks right before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Again {
    pub(crate) tasks: usize,
    pub(crate) times: usize,
}

/// A function that is called with a task's index in the list, and with the time that the list takes because of that task.
pub(crate) type Spent<'a> = &'a mut dyn FnMut(usize, Seconds);

/// Runs tasks on idle streams until all have ended; returns the total time. Calls `spent` for each
/// task with the time due to it: a kernel's duration, or what a message leaves exposed.
pub(crate) fn run<'a>(tasks: &'a [Task], slowdown: Slowdown, spent: Option<Spent<'a>>) -> Work {
    let mut list = List {
        tasks,
        streams: Streams::new(slowdown),
        ends: Vec::with_capacity(tasks.len()),
        last: [None; STREAMS],
        compute: Picoseconds::ZERO,
        host: Seconds(0.0),
        spent,
    };
    for (index, task) in tasks.iter().enumerate() {
        list.ends.push(Picoseconds::ZERO);
        list.issue(index);
        list.issue_again(index, task.again);
    }
    list.finish()
}

/// A list of tasks that is being run, with the results so far.
struct List<'a> {
    tasks: &'a [Task],
    streams: Streams,
    /// End of each task that was issued, at its latest time.
    ends: Vec<Picoseconds>,
    /// For every stream, the task that was issued to it last.
    last: [Option<usize>; STREAMS],
    compute: Picoseconds,
    host: Seconds,
    spent: Option<Spent<'a>>,
}

impl List<'_> {
    #[inline(always)]
    fn issue(&mut self, index: usize) {
        let task = &self.tasks[index];
        let awaited = task.waits.last(&self.ends);
        let free = self.streams.free(task.stream);
        let after = awaited.map(|(_, end)| end);
        let span = self.streams.issue(task.stream, task.duration, after);
        if task.stream == Stream::Compute {
            self.compute += task.duration;
            if let Some(spent) = &mut self.spent {
                spent(index, task.duration.into());
                if let Some((task, _)) = awaited {
                    spent(task, span.start.since(free).into());
                }
                if let Some((stream, longer)) = span.slowed {
                    spent(self.last[stream as usize].unwrap_or(index), longer.into());
                }
            }
        }
        self.host += task.host;
        self.last[task.stream as usize] = Some(index);
        self.ends[index] = span.end;
    }

    /// Issues the round that ends with `last` again, `times` times. Once a round goes like the one
    /// before, the rest does too: only its time is added, unless `spent` asks for each task.
    fn issue_again(&mut self, last: usize, Again { tasks, times }: Again) {
        let first = last + 1 - tasks;
        for time in 1..=times {
            let (earlier, compute) = (self.streams, self.compute);
            self.ends.copy_within(first..=last, first - tasks);
            (first..=last).for_each(|task| self.issue(task));
            let ends = (self.ends[first - tasks..first].iter()).zip(&self.ends[first..=last]);
            if let Some(by) = self.streams.later_than(&earlier)
                && ends.clone().all(|(&before, &now)| now == before + by)
                && self.spent.is_none()
            {
                let others = (times - time) as u64;
                self.streams.skip(&earlier, by, others);
                self.compute += self.compute.since(compute) * others;
                for end in &mut self.ends[first..=last] {
                    *end += by * others;
                }
                for _ in 0..others {
                    let hosts = self.tasks[first..=last].iter().map(|task| task.host);
                    hosts.for_each(|host| self.host += host);
                }
                return;
            }
        }
    }

    /// Waits for all messages.
    fn finish(mut self) -> Work {
        for stream in COMMUNICATION {
            let free = self.streams.free(Stream::Compute);
            let waited = self.streams.join(stream).end.since(free);
            if let (Some(task), Some(spent)) = (self.last[stream as usize], &mut self.spent) {
                spent(task, waited.into());
            }
        }
        let exposed = |stream| self.streams.exposed(stream).into();
        Work {
            compute: self.compute.into(),
            tp: exposed(Stream::Tensor),
            cp: exposed(Stream::Context),
            ep: exposed(Stream::Expert),
            dp: exposed(Stream::Data),
            host: self.host,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(stream: Stream, duration: f64, waits: &[(Stream, usize)]) -> Task {
        let mut all = Waits::default();
        for &(stream, task) in waits {
            all.add(stream, task);
        }
        Task {
            stream,
            duration: Seconds(duration).into(),
            host: Seconds(0.0),
            waits: all,
            again: Again::default(),
        }
    }

    fn near(a: impl Into<Seconds>, b: f64) -> bool {
        (a.into().0 - b).abs() < 1e-11
    }

    fn seconds(time: f64) -> Picoseconds {
        Picoseconds::from(Seconds(time))
    }

    #[test]
    fn parts_add_up_to_when_the_last_stream_ends() {
        use Stream::{Compute, Tensor};
        // A product, a reduction of 4 s beside another product of 3 s.
        let tasks = [
            task(Compute, 1.0, &[]),
            task(Tensor, 4.0, &[(Compute, 0)]),
            task(Compute, 3.0, &[]),
        ];
        let mut by_task = [Seconds(0.0); 3];
        let mut add = |task: usize, time| by_task[task] += time;
        let work = run(&tasks, Slowdown::all(1.0), Some(&mut add));
        assert!(near(work.device(), 5.0) && near(work.compute, 4.0) && near(work.tp, 1.0));
        assert_eq!(by_task.map(|time| time.0), [1.0, 1.0, 3.0]);
        // The product takes a quarter longer, still less than the reduction.
        let work = run(&tasks, Slowdown::all(1.25), None);
        assert!(near(work.device(), 5.0));
        assert!(near(work.tp, 1.0));
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

    #[test]
    fn an_exchange_of_experts_runs_beside_shared_experts_or_another_micro_batch() {
        use Stream::{Compute, Expert};
        // Router, dispatch, shared expert beside it, experts, combination, the next layer's norm.
        let layer = [
            task(Compute, 1.0, &[]),
            task(Expert, 4.0, &[(Compute, 0)]),
            task(Compute, 3.0, &[]),
            task(Compute, 6.0, &[(Expert, 1)]),
            task(Expert, 4.0, &[(Compute, 3)]),
            task(Compute, 1.0, &[(Expert, 4)]),
        ];
        let work = run(&layer, Slowdown::all(1.0), None);
        assert!(near(work.compute, 11.0) && near(work.ep, 5.0));
        // The attention of another micro-batch is issued beside the combination.
        let mut both = layer.to_vec();
        both.insert(5, task(Compute, 5.0, &[]));
        let work = run(&both, Slowdown::all(1.0), None);
        assert!(near(work.compute, 16.0) && near(work.ep, 1.0));
    }

    /// Keys and values that go around a ring, while products of a block that are sent before still arrive.
    #[test]
    fn what_is_issued_again_takes_as_long_as_when_it_is_listed() {
        use Stream::{Compute, Context, Tensor};
        for message in [0.0, 0.5, 1.0, 3.0] {
            for blocks in 1..40 {
                let mut listed = vec![
                    task(Compute, 1.0, &[]),
                    task(Tensor, 5.0, &[(Compute, 0)]),
                    task(Context, message, &[(Compute, 0)]),
                    task(Compute, 0.7, &[]),
                    task(Compute, 0.3, &[]),
                ];
                let ring = |last: usize| {
                    let waits = [(Context, last - 2), (Compute, last)];
                    [
                        task(Context, message, &waits),
                        task(Compute, 0.7, &[(Context, last - 2)]),
                        task(Compute, 0.3, &[]),
                    ]
                };
                let mut short = listed.clone();
                short.extend(ring(4));
                short[7].again = Again {
                    tasks: 3,
                    times: blocks - 1,
                };
                short.push(task(Compute, 1.0, &[(Context, 5)]));
                (0..blocks).for_each(|_| listed.extend(ring(listed.len() - 1)));
                listed.push(task(Compute, 1.0, &[(Context, listed.len() - 3)]));
                let all = run(&listed, Slowdown::all(1.25), None);
                assert_eq!(
                    run(&short, Slowdown::all(1.25), None),
                    all,
                    "{blocks} of {message}"
                );
                assert_eq!(run(&short, Slowdown::all(1.25), Some(&mut |_, _| {})), all);
            }
        }
    }
}
