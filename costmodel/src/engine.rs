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

use catalog::{Bytes, Seconds};
use plans::{Action, ActionKind, Event, Stream, Timeline};

use crate::assemble::Assembled;
use crate::of_rank::OfRank;
use crate::offload::HostStep;
use crate::picoseconds::Picoseconds;
use crate::repeats::Skipped;
use crate::sequence::{ArrivalSlot, LastGroups, PASSES, Sequence, Step};
use crate::stage::StageWork;
use crate::stage_pass::StagePass;
use crate::streams::{self, Slowdown, Streams};

/// The engine's inputs: action lists, and the costs of what they run.
#[derive(Clone, Debug)]
pub struct Inputs<'a> {
    /// The actions of all pipeline ranks, in an order in which they can run.
    pub(crate) sequence: &'a Sequence,
    /// The stages, in model order, with the memory and optimizer time of every pipeline rank.
    pub of: &'a Assembled,
    /// Whether pipeline transfers overlap with compute.
    pub transfer_overlaps: bool,
    /// Whether a rank that waits for transfers sends and receives at once.
    pub both_directions: bool,
    /// Host time that a step takes in addition to its kernels.
    pub step_overhead: Seconds,
}

/// The result of a simulated step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Duration of the step: last action of the last rank, host overhead, and all waits.
    pub step_time: Seconds,
    /// Time that the step waits for longer sequences and slow ranks.
    pub waits: Waits,
    /// Time that the step waits because several ranks send over one link between pools.
    pub link: Seconds,
    /// The outcome of every pipeline rank.
    pub ranks: Vec<RankOutcome>,
}

impl Outcome {
    /// Adds waiting time to the step.
    pub(crate) fn wait(&mut self, waits: Waits) {
        self.step_time += waits.total();
        self.waits = waits;
    }
}

/// Time that a step waits for what differs between micro-batches and ranks that are simulated as equal.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Waits {
    /// Time that a step waits for replicas and micro-batches with longer sequences than the mean.
    pub imbalance: Seconds,
    /// Time that a step waits for ranks that happen to be slow.
    pub stragglers: Seconds,
}

impl Waits {
    /// Sum of both waits.
    #[must_use]
    pub fn total(self) -> Seconds {
        self.imbalance + self.stragglers
    }
}

/// Time and memory of one pipeline rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankOutcome {
    /// Time that the rank waited for pipeline transfers.
    pub transfers: Seconds,
    /// Time that the rank's kernels lost to data-parallel messages, by waiting for them or by running slower beside them.
    pub data: Seconds,
    /// Time that the rank's kernels waited for copies to and from host memory and for the optimizer on the host.
    pub offload: Seconds,
    /// Factor by which everything takes longer because ranks share the cores of one machine; 1 if each has a device.
    pub stretch: f64,
    /// Time from the start of the step to the end of the rank's last action.
    pub end: Seconds,
    /// Largest memory in use at any moment.
    pub peak: Bytes,
    /// The action at the peak of memory; `None` if no action needs more than is held all step.
    pub peak_action: Option<Action>,
}

/// Receives the events of a simulation; `()` ignores them.
pub trait Record {
    /// Called for every interval on a stream of a rank.
    fn event(&mut self, _event: Event) {}
    /// Called when a rank's memory in use changes to `_bytes`.
    fn memory(&mut self, _rank: u32, _at: Seconds, _bytes: Bytes) {}
}

impl Record for () {}

impl Record for Timeline {
    fn event(&mut self, event: Event) {
        self.events.push(event);
    }

    fn memory(&mut self, rank: u32, at: Seconds, bytes: Bytes) {
        self.memory.push((rank, at, bytes));
    }
}

/// Simulates the step.
#[must_use]
pub fn simulate(inputs: &Inputs<'_>, record: &mut impl Record) -> Outcome {
    let passes = passes(inputs);
    let mut engine = Engine::new(inputs, &passes);
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
    let passes = passes(inputs);
    let mut engine = Engine::new(inputs, &passes);
    engine.run(&steps[..before[0]], &mut ());
    let earlier = engine.moment();
    engine.run(&steps[before[0]..before[1]], &mut ());
    engine.skip(&earlier, groups, messages)?;
    engine.skipped = group * groups;
    engine.run(&steps[before[1]..], &mut ());
    Some(engine.finish())
}

/// Time and memory of the passes of a stage, in the order of [`PASSES`].
type StagePasses = [StagePass; PASSES.len()];

/// Time and memory of the passes of every class of stages.
fn passes(inputs: &Inputs<'_>) -> Vec<StagePasses> {
    let kinds = inputs.sequence.kinds;
    let pass = |work: &StageWork, kind: usize| match kinds[kind] {
        true => StagePass::new(work, PASSES[kind]),
        false => StagePass::default(),
    };
    let classes = inputs.of.classes.iter();
    let passes = classes.map(|class| std::array::from_fn(|kind| pass(&class.work, kind)));
    passes.collect()
}

struct Engine<'a> {
    inputs: &'a Inputs<'a>,
    /// The passes of all virtual stages: those of a stage, in the order of [`PASSES`], follow those of the stage before.
    passes: Vec<Placed<'a>>,
    states: Vec<RankState>,
    /// When messages between stages arrive. A message's [`ArrivalSlot`] is its index in this list.
    arrivals: Vec<Picoseconds>,
    /// Number of micro-batches skipped so far.
    skipped: u32,
}

/// A pass of a virtual stage, with its links to the stages before and after it.
struct Placed<'a> {
    pass: &'a StagePass,
    /// Times of the message between stages that the pass waits for, and of the one that it sends; 0 where there is none.
    transfers: [Picoseconds; 2],
}

/// The states of all ranks, and the arrivals of messages, at one moment.
struct Moment {
    states: Vec<RankState>,
    arrivals: Vec<Picoseconds>,
}

// The kinds of passes are the first kinds of actions.
const _: () = assert!(
    PASSES[0] as usize == 0
        && PASSES[1] as usize == 1
        && PASSES[2] as usize == 2
        && PASSES[3] as usize == 3
);

/// Index in [`PASSES`] of an action that is a pass.
fn pass(kind: ActionKind) -> Option<usize> {
    let kind = kind as usize;
    (kind < PASSES.len()).then_some(kind)
}

fn event(rank: usize, stream: Stream, action: Action, (start, end): (Seconds, Seconds)) -> Event {
    Event {
        rank: rank as u32,
        stream,
        action,
        start,
        end,
    }
}

#[derive(Clone, Copy)]
struct RankState {
    streams: Streams,
    /// When the rank's last pipeline transfer ends.
    pipeline: Picoseconds,
    /// Duration of the message sent after the last pass; 0 if none, or if it excludes a receive.
    sending: Picoseconds,
    /// Time of transfers that the rank waited for.
    exposed_transfers: Picoseconds,
    memory: Bytes,
    peak: Bytes,
    peak_action: Option<Action>,
}

impl RankState {
    /// When the compute stream has finished everything issued so far.
    fn compute(&self) -> Picoseconds {
        self.streams.free(streams::Stream::Compute)
    }

    /// Runs a forward or backward pass: its kernels on the rank's streams, and its effect on the memory in use.
    #[inline(always)]
    fn compute_pass(
        &mut self,
        rank: usize,
        action: Action,
        pass: &StagePass,
        record: &mut impl Record,
    ) {
        let start = self.compute();
        if pass.alone.contains(&action.micro_batch) {
            (self.streams).issue(streams::Stream::Compute, pass.duration, None);
        } else {
            pass.run(&mut self.streams, action.micro_batch);
        }
        let end = self.compute();
        let held = self.memory + pass.transient;
        self.holds(held, action);
        self.memory = (self.memory + pass.allocates).saturating_sub(pass.frees);
        let span = (start.into(), end.into());
        record.event(event(rank, Stream::Compute, action, span));
        record.memory(rank as u32, span.0, held);
        record.memory(rank as u32, span.1, self.memory);
    }

    /// Sends the result of a pass to another pipeline rank, and returns the `arrival` that the receiver's [`Self::receive`] takes:
    /// when the message is there if transfers overlap with compute, or else when the sender is ready.
    #[inline(always)]
    fn send<const OVERLAPS: bool>(
        &mut self,
        rank: usize,
        pass: Action,
        transfer: Picoseconds,
        record: &mut impl Record,
    ) -> Picoseconds {
        let start = match OVERLAPS {
            true => self.pipeline.max(self.compute()),
            false => self.compute(),
        };
        let end = start + transfer;
        self.pipeline = end;
        if !OVERLAPS {
            self.streams.idle_until(end);
            self.exposed_transfers += transfer;
        }
        let kind = match pass.kind {
            ActionKind::F => ActionKind::SendF,
            _ => ActionKind::SendB,
        };
        let action = Action { kind, ..pass };
        let span = (start.into(), end.into());
        record.event(event(rank, Stream::Pipeline, action, span));
        if OVERLAPS { end } else { start }
    }

    /// Makes the rank wait for a message from another pipeline rank. If transfers overlap with compute, the message is there at
    /// `arrival`. If they do not, the sender is ready at `arrival`, and the transfer starts once this rank is ready too. A message that
    /// this rank sends at that moment does not delay it, if it sends and receives at once.
    #[inline(always)]
    fn receive<const OVERLAPS: bool>(&mut self, arrival: Picoseconds, transfer: Picoseconds) {
        let arrival = match OVERLAPS {
            true => arrival,
            false => arrival.max(self.compute().since(self.sending)) + transfer,
        };
        // Waiting up to the length of a transfer counts as exposed transfer; beyond that the data was not yet computed.
        self.exposed_transfers += arrival.since(self.compute()).min(transfer);
        self.streams.idle_until(arrival);
    }

    /// Runs all of a stage's data-parallel traffic at once, with compute waiting for it.
    fn exchange(&mut self, rank: usize, action: Action, time: Seconds, record: &mut impl Record) {
        let asked = self.streams.end(streams::Stream::Compute);
        let span = self
            .streams
            .issue(streams::Stream::Data, time.into(), Some(asked));
        self.streams.join(streams::Stream::Data);
        let span = (span.start.into(), span.end.into());
        record.event(event(rank, Stream::DataParallel, action, span));
    }

    /// Updates weights on the host: copies missing gradients there before, parameters back after.
    fn update_on_host(&mut self, host: HostStep) {
        use streams::Stream::{Compute, FromHost, Host, ToHost};
        self.streams.issue(Compute, host.copies.into(), None);
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

    /// Raises the peak if `held` exceeds it.
    fn holds(&mut self, held: Bytes, action: Action) {
        if held > self.peak {
            self.peak = held;
            self.peak_action = Some(action);
        }
    }

    fn outcome(&self) -> RankOutcome {
        let exposed = |stream| Seconds::from(self.streams.exposed(stream));
        RankOutcome {
            transfers: self.exposed_transfers.into(),
            data: exposed(streams::Stream::Data),
            offload: streams::OFFLOAD.into_iter().map(exposed).sum(),
            stretch: 1.0,
            end: self.compute().into(),
            peak: self.peak,
            peak_action: self.peak_action,
        }
    }

    /// How much later the rank is than `earlier`; `None` if it would go on in another way. It may hold more memory, of which a group of
    /// micro-batches adds the same every time.
    fn later_than(&self, earlier: &Self) -> Option<Picoseconds> {
        let by = self.streams.later_than(&earlier.streams)?;
        // A transfer that has ended delays nothing.
        let transfer = |state: &Self| state.pipeline.since(state.compute());
        let alike = |state: &Self| (transfer(state), state.sending);
        (alike(self) == alike(earlier) && self.memory >= earlier.memory).then_some(by)
    }
}

impl<'a> Engine<'a> {
    fn new(inputs: &'a Inputs<'a>, passes: &'a [StagePasses]) -> Self {
        let state = |&OfRank {
                         resident, slowdown, ..
                     }: &OfRank| RankState {
            streams: Streams::new(Slowdown::all(slowdown)),
            pipeline: Picoseconds::ZERO,
            sending: Picoseconds::ZERO,
            exposed_transfers: Picoseconds::ZERO,
            memory: resident,
            peak: resident,
            peak_action: None,
        };
        let transfer = |before: Option<usize>| {
            let time = before.and_then(|before| inputs.of.transfers.get(before));
            time.copied().unwrap_or_default().into()
        };
        let mut placed = Vec::with_capacity(inputs.of.class_of_stage.len() * PASSES.len());
        for (stage, &class) in inputs.of.class_of_stage.iter().enumerate() {
            let [before, after] = [stage.checked_sub(1), Some(stage)].map(transfer);
            let passes = passes[class as usize].iter().zip(PASSES);
            placed.extend(passes.map(|(pass, kind)| Placed {
                pass,
                transfers: match kind {
                    ActionKind::F => [before, after],
                    _ => [after, before],
                },
            }));
        }
        Self {
            inputs,
            passes: placed,
            states: inputs.of.ranks.iter().map(state).collect(),
            arrivals: vec![Picoseconds::ZERO; inputs.sequence.slots + 1],
            skipped: 0,
        }
    }

    fn run(&mut self, steps: &[Step], record: &mut impl Record) {
        match self.inputs.transfer_overlaps {
            true => self.run_steps::<true>(steps, record),
            false => self.run_steps::<false>(steps, record),
        }
    }

    /// Runs these steps in order. `OVERLAPS` is [`Inputs::transfer_overlaps`] as a constant, so that the loop need not ask for it
    /// at every step.
    fn run_steps<const OVERLAPS: bool>(&mut self, steps: &[Step], record: &mut impl Record) {
        for step in steps {
            let rank = step.rank as usize;
            let action = Action {
                micro_batch: step.action.micro_batch + self.skipped,
                ..step.action
            };
            let Some(kind) = pass(action.kind) else {
                self.beside_passes(rank, action, record);
                continue;
            };
            let Placed { pass, transfers } =
                &self.passes[action.stage as usize * PASSES.len() + kind];
            let [from, to] = *transfers;
            let state = &mut self.states[rank];
            if let Some(slot) = step.receives {
                state.receive::<OVERLAPS>(self.arrivals[slot.index()], from);
            }
            if !OVERLAPS {
                state.sending = Picoseconds::ZERO;
            }
            state.compute_pass(rank, action, pass, record);
            if let Some(slot) = step.sends {
                self.arrivals[slot.index()] = state.send::<OVERLAPS>(rank, action, to, record);
                if !OVERLAPS && self.inputs.both_directions {
                    state.sending = to;
                }
            }
        }
    }

    fn moment(&self) -> Moment {
        Moment {
            states: self.states.clone(),
            arrivals: self.arrivals.clone(),
        }
    }

    /// Adds groups of micro-batches that run like those since an `earlier` moment; `None` if they do not. `messages` are
    /// the slots of the messages that were under way then, each with the slot of the same message now.
    fn skip(&mut self, earlier: &Moment, groups: u32, messages: &[[ArrivalSlot; 2]]) -> Option<()> {
        let by = self.states[0].later_than(&earlier.states[0])?;
        let same = |(now, then): (&RankState, &RankState)| now.later_than(then) == Some(by);
        let ranks = self.states.iter().zip(&earlier.states).all(same);
        let arrives = |[then, now]: &[ArrivalSlot; 2]| {
            self.arrivals[now.index()] == earlier.arrivals[then.index()] + by
        };
        if !ranks || !messages.iter().all(arrives) {
            return None;
        }
        let times = u64::from(groups);
        for (now, then) in self.states.iter_mut().zip(&earlier.states) {
            now.streams.skip(&then.streams, by, times);
            now.pipeline += by * times;
            now.exposed_transfers += now.exposed_transfers.since(then.exposed_transfers) * times;
            // The fullest moment of the groups is in the last, which is simulated.
            now.memory += now.memory.saturating_sub(then.memory) * times;
        }
        for [_, now] in messages {
            self.arrivals[now.index()] += by * times;
        }
        Some(())
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
            // Passes run in `run_steps`, with their transfers; resharding takes no time.
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
        let plan = stage.traffic;
        if !plan.applies(plan.exposed_reductions, action.micro_batch) {
            return;
        }
        let copied = plan.copied(stage.copied_after_reduce, action.micro_batch);
        let waits = plan.waits_for_copies(action.micro_batch);
        let state = &mut self.states[rank];
        state.exchange(rank, action, time, record);
        if copied.0 > 0.0 {
            let reduced = state.streams.end(streams::Stream::Compute);
            (state.streams).issue(streams::Stream::ToHost, copied.into(), Some(reduced));
            if waits {
                state.streams.join(streams::Stream::ToHost);
            }
        }
    }

    fn optimizer(&mut self, rank: usize, action: Action, record: &mut impl Record) {
        let state = &mut self.states[rank];
        state.streams.join(streams::Stream::Data);
        let OfRank {
            shared_table,
            optimizer,
            optimizer_transient,
            host,
            ..
        } = self.inputs.of.ranks[rank];
        if shared_table.0 > 0.0 {
            let sum = Action {
                kind: ActionKind::ReduceGrad,
                ..action
            };
            state.exchange(rank, sum, shared_table, record);
        }
        if host != HostStep::default() {
            state.update_on_host(host);
        }
        let span = state
            .streams
            .issue(streams::Stream::Compute, optimizer.into(), None);
        if host != HostStep::default() {
            state.streams.join(streams::Stream::FromHost);
        }
        let span = (span.start.into(), span.end.into());
        let held = state.memory + optimizer_transient;
        state.holds(held, action);
        record.memory(rank as u32, span.0, held);
        record.memory(rank as u32, span.1, state.memory);
        record.event(event(rank, Stream::Compute, action, span));
    }

    fn finish(self) -> Outcome {
        let ends = self.states.iter().map(RankState::compute);
        let last = Seconds::from(ends.max().unwrap_or_default());
        // So far each rank had the link between pools to itself.
        let of = self.inputs.of;
        let shared = (of.on_link.0 > 0.0).then(|| of.on_link + of.least_update());
        let link = shared.map_or(Seconds(0.0), |end| (end - last).max(Seconds(0.0)));
        Outcome {
            step_time: last + link + self.inputs.step_overhead,
            waits: Waits::default(),
            link,
            ranks: self.states.iter().map(RankState::outcome).collect(),
        }
    }
}
