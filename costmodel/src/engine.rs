//! When things run: a list scheduler over pipeline ranks and their streams.
//!
//! Every stream executes its actions in the static order of the program, and one pass along a [`Sequence`], in which each
//! action comes after those that it waits for, yields the schedule. Ranks are representatives: their tensor-, context- and
//! data-parallel peers do the same at the same time.
//!
//! The middle of a long step repeats itself: each group of micro-batches takes the same time as the group before. So
//! [`simulate_short`] simulates a few groups and adds the time of the others. It checks that the state of every rank after
//! a group equals the state after the group before, but for the time that passed. Times are whole picoseconds, so the
//! result equals that of [`simulate`] exactly.

use std::ops::Range;

use catalog::{Bytes, Seconds};
use plans::{Action, ActionKind, Breakdown, Stream};

use crate::assemble::Assembled;
use crate::offload::HostStep;
use crate::picoseconds::Picoseconds;
use crate::repeats::Skipped;
use crate::sequence::{LastGroups, Message, PASSES, Passes, Sequence, Step};
use crate::stage::StageWork;
use crate::streams::{self, Streams};

/// The engine's inputs: action lists, and the costs of what they run.
#[derive(Clone, Debug)]
pub struct Inputs<'a> {
    /// The actions of all pipeline ranks, in an order in which they can run.
    pub(crate) sequence: &'a Sequence,
    /// The stages, in model order, with the memory and optimizer time of every pipeline rank.
    pub of: &'a Assembled,
    /// Whether pipeline transfers overlap with compute.
    pub transfer_overlaps: bool,
    /// Factor, at least 1, by which kernels slow down while communication runs beside them.
    pub overlap_slowdown: f64,
    /// Host time that a step takes in addition to its kernels.
    pub step_overhead: Seconds,
}

/// The result of a simulated step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// End of the last action of the last rank, and the time that the step waits for longer sequences and slow ranks.
    pub step_time: Seconds,
    /// Time that the step waits for replicas and micro-batches whose sequences take longer than the mean.
    pub imbalance: Seconds,
    /// Time that the step waits for ranks that happen to be slow.
    pub stragglers: Seconds,
    /// Time that the step waits because several ranks send over one link between pools.
    pub link: Seconds,
    /// The outcome of every pipeline rank.
    pub ranks: Vec<RankOutcome>,
}

impl Outcome {
    /// Adds time that the step waits.
    pub(crate) fn wait(&mut self, waits: Waits) {
        self.step_time += waits.total();
        self.imbalance += waits.imbalance;
        self.stragglers += waits.stragglers;
    }
}

/// Time that a step waits for what differs between micro-batches and ranks that are simulated as equal.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Waits {
    /// For replicas and micro-batches whose sequences take longer than the mean.
    pub imbalance: Seconds,
    /// For ranks that happen to be slow.
    pub stragglers: Seconds,
}

impl Waits {
    /// Both together.
    #[must_use]
    pub fn total(self) -> Seconds {
        self.imbalance + self.stragglers
    }
}

/// Time and memory of one pipeline rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankOutcome {
    /// Where the rank's time goes; the bubble is not filled in.
    pub parts: Breakdown,
    /// Time from the start of the step to the end of the rank's last action.
    pub end: Seconds,
    /// Largest memory in use at any moment.
    pub peak: Bytes,
    /// The action that ran when memory was at its peak.
    pub peak_action: Option<Action>,
}

/// Receives the events of a simulation; `()` ignores them.
pub trait Record {
    /// Called for every interval on a stream of a rank.
    fn event(
        &mut self,
        _rank: u32,
        _stream: Stream,
        _action: Action,
        _start: Seconds,
        _end: Seconds,
    ) {
    }
    /// Called when a rank's memory in use changes to `_bytes`.
    fn memory(&mut self, _rank: u32, _at: Seconds, _bytes: Bytes) {}
}

impl Record for () {}

/// Simulates the step.
#[must_use]
pub fn simulate(inputs: &Inputs<'_>, record: &mut impl Record) -> Outcome {
    let mut engine = Engine::new(inputs);
    engine.run(&inputs.sequence.steps, record);
    engine.finish()
}

/// Simulates a step from action lists that leave out groups of micro-batches, and adds the time of those groups. `None` if
/// the two groups before them take different times: then nothing is known about the groups left out.
#[must_use]
pub fn simulate_short(inputs: &Inputs<'_>, skipped: Skipped) -> Option<Outcome> {
    let Skipped { group, groups } = skipped;
    let Sequence { steps, last, .. } = inputs.sequence;
    let LastGroups {
        before, messages, ..
    } = last.as_ref()?;
    let messages = messages.as_ref()?;
    let mut engine = Engine::new(inputs);
    engine.run(&steps[..before[0]], &mut ());
    let earlier = engine.moment();
    engine.run(&steps[before[0]..before[1]], &mut ());
    engine.skip(&earlier, groups, messages)?;
    engine.skipped = group * groups;
    engine.groups = u64::from(groups);
    engine.run(&steps[before[1]..], &mut ());
    Some(engine.finish())
}

struct Engine<'a> {
    inputs: &'a Inputs<'a>,
    /// Time and memory of every pass of every class of stages, in the order of [`PASSES`].
    passes: Vec<[Pass; PASSES.len()]>,
    /// Time of a transfer from every virtual stage but the last to the next, and back.
    transfers: Vec<Picoseconds>,
    states: Vec<RankState>,
    /// For every place of a message, when it arrives.
    arrivals: Vec<Picoseconds>,
    /// Number of micro-batches skipped so far.
    skipped: u32,
    /// Number of groups of micro-batches skipped so far.
    groups: u64,
}

/// Where all ranks are at a moment.
struct Moment {
    states: Vec<RankState>,
    arrivals: Vec<Picoseconds>,
}

/// Index in [`PASSES`] of an action that is a pass.
fn pass(kind: ActionKind) -> Option<usize> {
    match kind {
        ActionKind::F => Some(0),
        ActionKind::B => Some(1),
        ActionKind::I => Some(2),
        ActionKind::W => Some(3),
        _ => None,
    }
}

/// Time and memory of a pass of a stage.
struct Pass {
    duration: Picoseconds,
    /// Peak bytes during the pass beyond what is held.
    transient: Bytes,
    /// Bytes held from its end on.
    allocates: Bytes,
    /// Bytes released at its end.
    frees: Bytes,
    /// Micro-batches for which nothing but compute runs in it.
    alone: Range<u32>,
}

#[derive(Clone, Copy)]
struct RankState {
    streams: Streams,
    /// When the rank's last pipeline transfer ends.
    pipeline: Picoseconds,
    /// Time of transfers that the rank waited for.
    exposed_transfers: Picoseconds,
    memory: Bytes,
    peak: Bytes,
    peak_action: Option<Action>,
}

impl Pass {
    fn new(stage: &StageWork, kind: ActionKind) -> Self {
        let phase = stage.phase(kind);
        Self {
            duration: (phase.work + phase.recompute).duration().into(),
            transient: phase.transient,
            allocates: phase.allocates,
            frees: phase.frees,
            alone: stage.alone(kind),
        }
    }
}

impl RankState {
    /// When the compute stream has finished everything issued so far.
    fn compute(&self) -> Picoseconds {
        self.streams.free(streams::Stream::Compute)
    }

    /// Runs all of a stage's data-parallel traffic at once, with compute waiting for it.
    fn exchange(&mut self, rank: usize, action: Action, time: Seconds, record: &mut impl Record) {
        let asked = self.streams.end(streams::Stream::Compute);
        let span = self
            .streams
            .issue(streams::Stream::Data, time.into(), Some(asked));
        self.streams.join(streams::Stream::Data);
        record.event(
            rank as u32,
            Stream::DataParallel,
            action,
            span.start.into(),
            span.end.into(),
        );
    }

    /// Has the host update weights: gradients that are still to come are copied to it first, parameters back after.
    fn update_on_host(&mut self, host: HostStep) {
        use streams::Stream::{Compute, FromHost, Host, ToHost};
        let steps = [
            (Compute, ToHost, host.to_host),
            (ToHost, Host, host.update),
            (Host, FromHost, host.from_host),
        ];
        for (before, stream, time) in steps {
            let ready = self.streams.end(before);
            self.streams.issue(stream, time.into(), Some(ready));
        }
    }

    /// Notes a moment at which this much memory is in use.
    fn holds(&mut self, held: Bytes, action: Action) {
        if held > self.peak {
            self.peak = held;
            self.peak_action = Some(action);
        }
    }

    /// How much later than at an `earlier` moment the rank is, if it would go on in the same way from both.
    fn later_than(&self, earlier: &Self) -> Option<Picoseconds> {
        let by = self.streams.later_than(&earlier.streams)?;
        // A transfer that has ended delays nothing.
        let transfer = |state: &Self| state.pipeline.since(state.compute());
        (transfer(self) == transfer(earlier) && self.memory == earlier.memory).then_some(by)
    }
}

impl<'a> Engine<'a> {
    fn new(inputs: &'a Inputs<'a>) -> Self {
        let state = |&memory: &Bytes| RankState {
            streams: Streams::new(inputs.overlap_slowdown),
            pipeline: Picoseconds::ZERO,
            exposed_transfers: Picoseconds::ZERO,
            memory,
            peak: memory,
            peak_action: None,
        };
        let classes = &inputs.of.classes;
        let passes = classes
            .iter()
            .map(|class| PASSES.map(|kind| Pass::new(&class.work, kind)));
        Self {
            inputs,
            passes: passes.collect(),
            transfers: inputs.of.transfers.iter().map(|&t| t.into()).collect(),
            states: inputs.of.resident.iter().map(state).collect(),
            arrivals: vec![Picoseconds::ZERO; inputs.sequence.places],
            skipped: 0,
            groups: 0,
        }
    }

    fn run(&mut self, steps: &[Step], record: &mut impl Record) {
        for &step in steps {
            self.step(step, record);
        }
    }

    fn moment(&self) -> Moment {
        Moment {
            states: self.states.clone(),
            arrivals: self.arrivals.clone(),
        }
    }

    /// Adds groups of micro-batches that run like those since an `earlier` moment; `None` if they do not. `messages` are
    /// the places of what was under way then, each with that of the same message now.
    fn skip(&mut self, earlier: &Moment, groups: u32, messages: &[[usize; 2]]) -> Option<()> {
        let by = self.states[0].later_than(&earlier.states[0])?;
        let same = |(now, then): (&RankState, &RankState)| now.later_than(then) == Some(by);
        let ranks = self.states.iter().zip(&earlier.states).all(same);
        let arrives = |&[then, now]: &[usize; 2]| self.arrivals[now] == earlier.arrivals[then] + by;
        if !ranks || !messages.iter().all(arrives) {
            return None;
        }
        let times = u64::from(groups);
        for (now, then) in self.states.iter_mut().zip(&earlier.states) {
            now.streams.skip(&then.streams, by, times);
            now.pipeline += by * times;
            now.exposed_transfers += now.exposed_transfers.since(then.exposed_transfers) * times;
        }
        for &[_, now] in messages {
            self.arrivals[now] += by * times;
        }
        Some(())
    }

    fn step(&mut self, step: Step, record: &mut impl Record) {
        let Step {
            action,
            rank,
            receives,
            sends,
        } = step;
        let rank = rank as usize;
        let action = Action {
            micro_batch: action.micro_batch + self.skipped,
            ..action
        };
        if let Some(message) = receives {
            self.receive(rank, message);
        }
        match pass(action.kind) {
            Some(kind) => self.compute(rank, action, kind, record),
            None => self.beside_passes(rank, action, record),
        }
        if let Some(message) = sends {
            self.send(rank, action, message, record);
        }
    }

    /// Runs an action that is no pass.
    #[inline(never)]
    fn beside_passes(&mut self, rank: usize, action: Action, record: &mut impl Record) {
        match action.kind {
            ActionKind::Unshard => self.gather(rank, action, record),
            ActionKind::ReduceGrad => self.reduce(rank, action, record),
            ActionKind::Optim => {
                let micro_batch = action.micro_batch - self.skipped;
                let action = Action {
                    micro_batch,
                    ..action
                };
                self.optimizer(rank, action, record);
            }
            // Passes run by themselves, with the transfers around them.
            ActionKind::F
            | ActionKind::B
            | ActionKind::I
            | ActionKind::W
            | ActionKind::Reshard
            | ActionKind::SendF
            | ActionKind::SendB
            | ActionKind::RecvF
            | ActionKind::RecvB => {}
        }
    }

    /// Runs a pass of a kind given by its index in [`PASSES`] too.
    #[inline(always)]
    fn compute(&mut self, rank: usize, action: Action, kind: usize, record: &mut impl Record) {
        let class = self.inputs.of.class_of_stage[action.stage as usize] as usize;
        let pass = &self.passes[class][kind];
        let state = &mut self.states[rank];
        let start = state.compute();
        let streams = &mut state.streams;
        if pass.alone.contains(&action.micro_batch) {
            streams.issue(streams::Stream::Compute, pass.duration, None);
        } else {
            let work = &self.inputs.of.classes[class].work;
            work.run(streams, action, pass.duration);
        }
        let end = state.compute();
        let held = state.memory + pass.transient;
        state.holds(held, action);
        state.memory = (state.memory + pass.allocates).saturating_sub(pass.frees);
        let (start, end) = (start.into(), end.into());
        record.event(rank as u32, Stream::Compute, action, start, end);
        record.memory(rank as u32, start, held);
        record.memory(rank as u32, end, state.memory);
    }

    /// Sends the result of a pass.
    #[inline(always)]
    fn send(&mut self, rank: usize, pass: Action, message: Message, record: &mut impl Record) {
        let transfer = self.transfers[message.before as usize];
        let state = &mut self.states[rank];
        let start = if self.inputs.transfer_overlaps {
            state.pipeline.max(state.compute())
        } else {
            state.compute()
        };
        let end = start + transfer;
        state.pipeline = end;
        if !self.inputs.transfer_overlaps {
            state.streams.idle_until(end);
            state.exposed_transfers += transfer;
        }
        let kind = match pass.kind {
            ActionKind::F => ActionKind::SendF,
            _ => ActionKind::SendB,
        };
        let action = Action { kind, ..pass };
        record.event(
            rank as u32,
            Stream::Pipeline,
            action,
            start.into(),
            end.into(),
        );
        // With overlap, data arrives when the transfer ends. Without, the receiver takes part in the transfer, which
        // starts once both sides are ready.
        self.arrivals[message.place as usize] = match self.inputs.transfer_overlaps {
            true => end,
            false => start,
        };
    }

    /// Waits for a message.
    #[inline(always)]
    fn receive(&mut self, rank: usize, message: Message) {
        let transfer = self.transfers[message.before as usize];
        let arrival = self.arrivals[message.place as usize];
        let state = &mut self.states[rank];
        let arrival = if self.inputs.transfer_overlaps {
            arrival
        } else {
            state.compute().max(arrival) + transfer
        };
        // Waiting up to the length of a transfer counts as exposed transfer; beyond that the data was not yet computed.
        state.exposed_transfers += arrival.since(state.compute()).min(transfer);
        state.streams.idle_until(arrival);
    }

    /// Gathers all parameters of a stage at once (ZeRO-1/2 at the start of the step). Under ZeRO-3 the gathers run
    /// layer by layer inside the compute action.
    fn gather(&mut self, rank: usize, action: Action, record: &mut impl Record) {
        let stage = self.inputs.of.stage(action.stage as usize);
        let Some(time) = stage.exposed_gather else {
            return;
        };
        self.states[rank].exchange(rank, action, time, record);
    }

    /// Reduces all gradients of a stage at once, if nothing overlaps their reduction.
    fn reduce(&mut self, rank: usize, action: Action, record: &mut impl Record) {
        let stage = self.inputs.of.stage(action.stage as usize);
        let Some(time) = stage.exposed_reduce else {
            return;
        };
        let copied = stage.copied_after_reduce;
        let state = &mut self.states[rank];
        state.exchange(rank, action, time, record);
        if copied.0 > 0.0 {
            let reduced = state.streams.end(streams::Stream::Compute);
            (state.streams).issue(streams::Stream::ToHost, copied.into(), Some(reduced));
        }
    }

    fn optimizer(&mut self, rank: usize, action: Action, record: &mut impl Record) {
        let state = &mut self.states[rank];
        state.streams.join(streams::Stream::Data);
        let time = self.inputs.of.optimizer[rank].into();
        let host = self.inputs.of.host[rank];
        if host != HostStep::default() {
            state.update_on_host(host);
        }
        let span = state.streams.issue(streams::Stream::Compute, time, None);
        if host != HostStep::default() {
            state.streams.join(streams::Stream::FromHost);
        }
        let (start, end) = (span.start.into(), span.end.into());
        let held = state.memory + self.inputs.of.optimizer_transient[rank];
        state.holds(held, action);
        record.memory(rank as u32, start, held);
        record.memory(rank as u32, end, state.memory);
        record.event(rank as u32, Stream::Compute, action, start, end);
    }

    fn finish(self) -> Outcome {
        let ends = self.states.iter().map(RankState::compute);
        let last = Seconds::from(ends.max().unwrap_or_default());
        // Ranks send as if each had the link between pools for itself.
        let of = self.inputs.of;
        let shared = (of.on_link.0 > 0.0).then(|| of.on_link + of.least_update());
        let link = shared.map_or(Seconds(0.0), |end| (end - last).max(Seconds(0.0)));
        let passes = self.passes_run();
        let of_rank = passes.chunks(self.inputs.of.classes.len());
        let outcome = |(rank, passes): (usize, &[Passes])| RankOutcome {
            parts: self.parts(rank, passes),
            end: self.states[rank].compute().into(),
            peak: self.states[rank].peak,
            peak_action: self.states[rank].peak_action,
        };
        Outcome {
            step_time: last + link + self.inputs.step_overhead,
            imbalance: Seconds(0.0),
            stragglers: Seconds(0.0),
            link,
            ranks: of_rank.enumerate().map(outcome).collect(),
        }
    }

    /// Where a rank's time goes, given its passes of every class of stages; the bubble is not filled in.
    fn parts(&self, rank: usize, passes: &[Passes]) -> Breakdown {
        let state = &self.states[rank];
        let seconds = |time: Picoseconds| Seconds::from(time).0;
        let mut parts = Breakdown {
            pp_exposed_s: seconds(state.exposed_transfers),
            dp_exposed_s: seconds(state.streams.exposed(streams::Stream::Data)),
            optimizer_s: self.inputs.of.optimizer[rank].0,
            offload_exposed_s: (streams::OFFLOAD.into_iter())
                .map(|stream| seconds(state.streams.exposed(stream)))
                .sum(),
            ..Breakdown::default()
        };
        for (class, counts) in self.inputs.of.classes.iter().zip(passes) {
            for (kind, &count) in PASSES.into_iter().zip(counts).filter(|(_, n)| **n > 0) {
                let phase = class.work.phase(kind);
                let work = phase.work * count as f64;
                parts.compute_s += work.compute.0;
                parts.tp_exposed_s += work.tp.0;
                parts.cp_exposed_s += work.cp.0;
                parts.ep_exposed_s += work.ep.0;
                parts.dp_exposed_s += work.dp.0;
                parts.recompute_s += phase.recompute.device().0 * count as f64;
                let both = phase.work + phase.recompute;
                parts.host_s += both.host_wait().0 * count as f64;
            }
        }
        parts
    }

    /// For every rank and class of stages, the number of passes of each kind in the step.
    fn passes_run(&self) -> Vec<Passes> {
        let Inputs { sequence, of, .. } = self.inputs;
        let mut all = vec![Passes::default(); self.states.len() * of.classes.len()];
        let mut add = |of_stages: &[Passes], times: u64| {
            let owners = of.rank_of_stage.iter().zip(&of.class_of_stage);
            for ((&rank, &class), passes) in owners.zip(of_stages) {
                let sums = &mut all[rank as usize * of.classes.len() + class as usize];
                for (sum, count) in sums.iter_mut().zip(passes) {
                    *sum += count * times;
                }
            }
        };
        add(&sequence.passes, 1);
        if let Some(last) = &sequence.last {
            add(&last.passes, self.groups);
        }
        all
    }
}
