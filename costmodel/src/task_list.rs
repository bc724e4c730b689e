//! Runs a list of tasks, the kernels and messages of a pass, on the streams of a GPU, and tells what each of them costs.

use catalog::Seconds;

use crate::picoseconds::Picoseconds;
use crate::streams::{Again, COMMUNICATION, STREAMS, Slowdown, Stream, Streams, Waits};
use crate::work::Work;

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

/// A function that is called with a task's index in the list, and with the time that the list takes because of that task.
pub(crate) type Spent<'a> = &'a mut dyn FnMut(usize, Seconds);

/// Runs tasks on idle streams until all have ended; returns the total time. Calls `spent` for each
/// task with the time due to it: a kernel's duration, or what a message leaves exposed.
pub(crate) fn run<'a>(tasks: &'a [Task], slowdown: Slowdown, spent: Option<Spent<'a>>) -> Work {
    let mut list = List {
        tasks,
        streams: Streams::new(slowdown),
        starts: Vec::with_capacity(tasks.len()),
        ends: Vec::with_capacity(tasks.len()),
        last: [None; STREAMS],
        compute: Picoseconds::ZERO,
        host: Seconds(0.0),
        spent,
    };
    for (index, task) in tasks.iter().enumerate() {
        list.starts.push(Picoseconds::ZERO);
        list.ends.push(Picoseconds::ZERO);
        list.issue(index);
        list.issue_again(index, task.again);
    }
    list.finish()
}

/// A list of tasks while it runs, with the start and end of every task issued so far.
struct List<'a> {
    tasks: &'a [Task],
    streams: Streams,
    /// Start of every issued task; its last start, if it was issued again.
    starts: Vec<Picoseconds>,
    /// End of every issued task; its last end, if it was issued again.
    ends: Vec<Picoseconds>,
    /// The latest task on every stream, as an index into `tasks`; `None` before a stream's first.
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
                if let Some((stream, longer)) = span.slowed {
                    spent(self.last[stream as usize].unwrap_or(index), longer.into());
                }
            }
            if let Some((message, _)) = awaited.filter(|_| span.start > free) {
                self.divide(message, free);
            }
        }
        self.host += task.host;
        self.last[task.stream as usize] = Some(index);
        self.starts[index] = span.start;
        self.ends[index] = span.end;
    }

    /// Divides what compute lost by waiting for a message, since its own stream was `free`, between the messages that ran then:
    /// this one and those that it waited for itself. `Streams` has counted all of it for the stream of this one.
    fn divide(&mut self, message: usize, free: Picoseconds) {
        let stream = self.tasks[message].stream;
        let mut ran = message;
        loop {
            let before = match self.starts[ran] > free {
                true => self.before(ran),
                false => None,
            };
            // The part of the wait before this message began belongs to the message that it waited for.
            let since = before.map_or(free, |_| self.starts[ran]);
            let time = self.ends[ran].since(since);
            self.streams.owe(time, stream, self.tasks[ran].stream);
            if let Some(spent) = &mut self.spent {
                spent(ran, time.into());
            }
            match before {
                Some(before) => ran = before,
                None => return,
            }
        }
    }

    /// The task at whose end a message began: one that it waits for, or the one before it on its stream.
    fn before(&self, message: usize) -> Option<usize> {
        let Task { stream, waits, .. } = &self.tasks[message];
        let earlier = &self.tasks[..message];
        let queued = || earlier.iter().rposition(|task| task.stream == *stream);
        let began = |&task: &usize| self.ends[task] == self.starts[message];
        let awaited = waits.last(&self.ends).map(|(task, _)| task);
        (awaited.filter(began)).or_else(|| queued().filter(began))
    }

    /// Issues the round that ends with `last` again, `times` times. Once a round goes like the one
    /// before, the rest does too: only its time is added, unless `spent` asks for each task.
    fn issue_again(&mut self, last: usize, Again { tasks, times }: Again) {
        let first = last + 1 - tasks;
        for time in 1..=times {
            let (earlier, compute) = (self.streams, self.compute);
            self.starts.copy_within(first..=last, first - tasks);
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
                for times in [&mut self.starts, &mut self.ends] {
                    times[first..=last]
                        .iter_mut()
                        .for_each(|time| *time += by * others);
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
            let joined = self.streams.join(stream).end;
            if let Some(message) = self.last[stream as usize].filter(|_| joined > free) {
                self.divide(message, free);
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
            ..Work::default()
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

    /// Messages that wait for each other, such as a gather within a node of what came from other nodes: the time for which compute waits
    /// is divided between them, during the pass and at its end.
    #[test]
    fn a_wait_is_divided_between_the_messages_that_fill_it() {
        use Stream::{Compute, Expert, Tensor};
        // Each message of a chain with its time, and what is counted for it. The first runs beside a product of 1 s.
        for chain in [
            vec![(Expert, 3.0, 2.0), (Tensor, 1.0, 1.0)],
            vec![(Expert, 0.5, 0.0), (Tensor, 2.0, 1.5)],
            vec![(Tensor, 2.0, 1.0), (Expert, 4.0, 4.0), (Tensor, 1.0, 1.0)],
            vec![(Tensor, 2.0, 1.0), (Tensor, 1.0, 1.0), (Expert, 3.0, 3.0)],
        ] {
            let mut tasks = vec![task(Compute, 1.0, &[])];
            for &(stream, time, _) in &chain {
                let waits = tasks.len() - 1;
                let waits = if waits == 0 {
                    vec![]
                } else {
                    vec![(tasks[waits].stream, waits)]
                };
                tasks.push(task(stream, time, &waits));
            }
            let last = (chain[chain.len() - 1].0, chain.len());
            let all: f64 = chain.iter().map(|(_, _, own)| own).sum();
            let of = |stream: Stream| {
                let own = chain.iter().filter(|message| message.0 == stream);
                own.map(|message| message.2).sum::<f64>()
            };
            for read in [true, false] {
                let mut tasks = tasks.clone();
                tasks.extend(read.then(|| task(Compute, 1.0, &[last])));
                let mut by_task = vec![Seconds(0.0); tasks.len()];
                let mut add = |task: usize, time| by_task[task] += time;
                let work = run(&tasks, Slowdown::all(1.0), Some(&mut add));
                assert!(
                    near(work.ep, of(Expert)) && near(work.tp, of(Tensor)),
                    "{work:?}"
                );
                assert!(near(work.device() - work.compute, all), "{work:?}");
                for (time, (_, _, own)) in by_task[1..].iter().zip(&chain) {
                    assert!(near(*time, *own), "{by_task:?}");
                }
                assert_eq!(run(&tasks, Slowdown::all(1.0), None), work);
            }
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
