//! When things run: a list scheduler over pipeline ranks and their streams.
//!
//! Every stream executes its actions in the static order of the program, so one pass that always
//! advances a rank whose next action is ready yields the schedule. Ranks are representatives: their
//! tensor-, context- and data-parallel peers do the same at the same time.

use catalog::{Bytes, Seconds};
use plans::{Action, ActionKind, Breakdown, Stream};

use crate::assemble::Assembled;
use crate::streams::{self, Streams};

/// The engine's inputs: action lists, and the costs of what they run.
#[derive(Clone, Debug)]
pub struct Inputs<'a> {
    /// Action lists of all pipeline ranks.
    pub ranks: &'a [Vec<Action>],
    /// The stages, in model order, with the memory and optimizer time of every pipeline rank.
    pub of: &'a Assembled,
    /// Whether pipeline transfers overlap with compute.
    pub transfer_overlaps: bool,
    /// Number of micro-batches in a step.
    pub micro_batches: u32,
    /// Factor, at least 1, by which kernels slow down while communication runs beside them.
    pub overlap_slowdown: f64,
    /// Host time that a step takes in addition to its kernels.
    pub step_overhead: Seconds,
}

/// The result of a simulated step.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// End of the last action of the last rank.
    pub step_time: Seconds,
    /// The outcome of every pipeline rank.
    pub ranks: Vec<RankOutcome>,
}

/// Time and memory of one pipeline rank.
#[derive(Clone, Copy, Debug, Default)]
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
///
/// # Panics
/// If the program deadlocks; programs are validated where they are built.
#[must_use]
pub fn simulate(inputs: &Inputs<'_>, record: &mut impl Record) -> Outcome {
    let mut engine = Engine::new(inputs);
    let mut next = vec![0usize; inputs.ranks.len()];
    let mut remaining: usize = inputs.ranks.iter().map(Vec::len).sum();
    while remaining > 0 {
        let before = remaining;
        for rank in 0..inputs.ranks.len() {
            let actions = &inputs.ranks[rank];
            while next[rank] < actions.len() && engine.step(rank, actions[next[rank]], record) {
                next[rank] += 1;
                remaining -= 1;
            }
        }
        assert!(remaining < before, "validated programs do not deadlock");
    }
    engine.finish()
}

struct Engine<'a> {
    inputs: &'a Inputs<'a>,
    states: Vec<RankState>,
    /// When a stage's forward input, or its output gradient, arrives; index = `stage · m + micro_batch`, `None` until
    /// it is sent.
    forward_arrival: Vec<Option<Seconds>>,
    backward_arrival: Vec<Option<Seconds>>,
}

#[derive(Clone, Copy)]
struct RankState {
    streams: Streams,
    /// When the rank's last pipeline transfer ends.
    pipeline: Seconds,
    memory: Bytes,
    outcome: RankOutcome,
}

impl RankState {
    /// When the compute stream has finished everything issued so far.
    fn compute(&self) -> Seconds {
        self.streams.free(streams::Stream::Compute)
    }

    /// Runs all of a stage's data-parallel traffic at once, with compute waiting for it.
    fn exchange(&mut self, rank: usize, action: Action, time: Seconds, record: &mut impl Record) {
        let asked = self.streams.end(streams::Stream::Compute);
        let span = self.streams.issue(streams::Stream::Data, time, Some(asked));
        self.streams.join(streams::Stream::Data);
        record.event(
            rank as u32,
            Stream::DataParallel,
            action,
            span.start,
            span.end,
        );
    }

    fn outcome(self) -> RankOutcome {
        let mut outcome = self.outcome;
        outcome.parts.dp_exposed_s += self.streams.exposed(streams::Stream::Data).0;
        outcome.end = self.compute();
        outcome
    }
}

impl<'a> Engine<'a> {
    fn new(inputs: &'a Inputs<'a>) -> Self {
        let slots = inputs.of.class_of_stage.len() * inputs.micro_batches as usize;
        let states = inputs
            .of
            .resident
            .iter()
            .map(|&memory| RankState {
                streams: Streams::new(inputs.overlap_slowdown),
                pipeline: Seconds(0.0),
                memory,
                outcome: RankOutcome {
                    peak: memory,
                    ..RankOutcome::default()
                },
            })
            .collect();
        Self {
            inputs,
            states,
            forward_arrival: vec![None; slots],
            backward_arrival: vec![None; slots],
        }
    }

    fn slot(&self, stage: u32, micro_batch: u32) -> usize {
        stage as usize * self.inputs.micro_batches as usize + micro_batch as usize
    }

    /// Runs an action if its inputs have arrived; returns whether it ran.
    fn step(&mut self, rank: usize, action: Action, record: &mut impl Record) -> bool {
        match action.kind {
            ActionKind::F | ActionKind::B | ActionKind::I | ActionKind::W => {
                self.compute(rank, action, record);
            }
            ActionKind::SendF | ActionKind::SendB => self.send(rank, action, record),
            ActionKind::RecvF => {
                let slot = self.slot(action.stage, action.micro_batch);
                return self.receive(rank, self.forward_arrival[slot]);
            }
            ActionKind::RecvB => {
                let slot = self.slot(action.stage, action.micro_batch);
                return self.receive(rank, self.backward_arrival[slot]);
            }
            ActionKind::Unshard => self.gather(rank, action, record),
            ActionKind::Reshard => {}
            ActionKind::ReduceGrad => self.reduce(rank, action, record),
            ActionKind::Optim => self.optimizer(rank, action, record),
        }
        true
    }

    fn compute(&mut self, rank: usize, action: Action, record: &mut impl Record) {
        let stage = self.inputs.of.stage(action.stage as usize);
        let state = &mut self.states[rank];
        let start = state.compute();
        let phase = stage.phase(action.kind);
        let parts = &mut state.outcome.parts;
        let work = phase.work;
        parts.compute_s += work.compute.0;
        parts.tp_exposed_s += work.tp.0;
        parts.cp_exposed_s += work.cp.0;
        parts.ep_exposed_s += work.ep.0;
        parts.dp_exposed_s += work.dp.0;
        parts.recompute_s += phase.recompute.device().0;
        let both = work + phase.recompute;
        parts.host_s += both.host_wait().0;
        stage.run(&mut state.streams, action, both.duration());
        let end = state.compute();
        record.event(rank as u32, Stream::Compute, action, start, end);
        let held = state.memory + phase.transient;
        if held > state.outcome.peak {
            state.outcome.peak = held;
            state.outcome.peak_action = Some(action);
        }
        record.memory(rank as u32, start, held);
        state.memory = (state.memory + phase.allocates).saturating_sub(phase.frees);
        record.memory(rank as u32, end, state.memory);
    }

    fn send(&mut self, rank: usize, action: Action, record: &mut impl Record) {
        let forward = action.kind == ActionKind::SendF;
        let transfer = self.inputs.of.transfer;
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
            state.outcome.parts.pp_exposed_s += transfer.0;
        }
        record.event(rank as u32, Stream::Pipeline, action, start, end);
        // With overlap, data arrives when the transfer ends. Without, the receiver takes part in the transfer, which
        // starts once both sides are ready.
        let end = if self.inputs.transfer_overlaps {
            end
        } else {
            start
        };
        if forward {
            let slot = self.slot(action.stage + 1, action.micro_batch);
            self.forward_arrival[slot] = Some(end);
        } else {
            let slot = self.slot(action.stage - 1, action.micro_batch);
            self.backward_arrival[slot] = Some(end);
        }
    }

    fn receive(&mut self, rank: usize, arrival: Option<Seconds>) -> bool {
        let Some(arrival) = arrival else {
            return false;
        };
        let state = &mut self.states[rank];
        let arrival = if self.inputs.transfer_overlaps {
            arrival
        } else {
            state.compute().max(arrival) + self.inputs.of.transfer
        };
        let wait = Seconds((arrival - state.compute()).0.max(0.0));
        // Waiting up to the length of a transfer counts as exposed transfer; beyond that the data was not yet computed.
        state.outcome.parts.pp_exposed_s += wait.min(self.inputs.of.transfer).0;
        state.streams.idle_until(arrival);
        true
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
        self.states[rank].exchange(rank, action, time, record);
    }

    fn optimizer(&mut self, rank: usize, action: Action, record: &mut impl Record) {
        let state = &mut self.states[rank];
        state.streams.join(streams::Stream::Data);
        let time = self.inputs.of.optimizer[rank];
        let span = state.streams.issue(streams::Stream::Compute, time, None);
        let (start, end) = (span.start, span.end);
        state.outcome.parts.optimizer_s += time.0;
        let held = state.memory + self.inputs.of.optimizer_transient[rank];
        if held > state.outcome.peak {
            state.outcome.peak = held;
            state.outcome.peak_action = Some(action);
        }
        record.memory(rank as u32, start, held);
        record.memory(rank as u32, end, state.memory);
        record.event(rank as u32, Stream::Compute, action, start, end);
    }

    fn finish(self) -> Outcome {
        let last = self
            .states
            .iter()
            .fold(Seconds(0.0), |t, s| t.max(s.compute()));
        let step_time = last + self.inputs.step_overhead;
        let ranks = self.states.into_iter().map(RankState::outcome).collect();
        Outcome { step_time, ranks }
    }
}
