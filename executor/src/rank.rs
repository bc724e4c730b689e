//! One rank of a training job: runs its action list step after step.

mod captured;
mod times;
mod update;

use std::collections::HashMap;
use std::time::Instant;

use comm::{Communicator, Group};
use cpu_device::{FirstNonFinite, Watch};
use cpu_device::{Machine, MicroBatch};
use dtensor::BlockPosition;
use dtensor::block::Half;
use plans::program::Arrived;
use plans::{Action, ActionKind};

use crate::checkpoint::{self, Piece, Source};
use crate::device::{Device, Devices};
use crate::error::ExecutorError;
use crate::job::Job;
use crate::mesh::{Mesh, Place};
use crate::report::{RankReport, Routed};
use crate::settings::Execution;
use crate::stage::{self, Backward, Plan, Stage};
use crate::train::StepReport;

/// First channel of pipeline transfers; a boundary between stages has two.
const PIPELINE: u64 = 1000;
/// Channel of sums over all ranks.
const WORLD: u64 = 30;

/// One rank.
pub(crate) struct Rank<'j, D: Device> {
    job: &'j Job,
    mesh: &'j Mesh,
    place: Place,
    comm: &'j dyn Communicator,
    device: D,
    position: BlockPosition,
    stages: Vec<(u32, Stage<D>)>,
    actions: &'j [Action],
    world: Group,
    /// Shape of what goes from a stage to the next.
    hidden: Vec<usize>,
    /// Activations and gradients waiting at a stage, by `(backward, stage, micro-batch)`.
    waiting: HashMap<(bool, u32, u32), D::Tensor>,
    /// What is being sent, by what began it.
    sending: HashMap<Action, D::Sending>,
    /// Sends that have arrived, by what tells of them.
    arrived: Arrived,
    /// Losses of every token of the step by micro-batch, where this rank has any.
    losses: Option<D::Flat>,
    report: RankReport,
    /// Whether a step has run: kernels are compiled, and everything that stays is there.
    has_run: bool,
    captured: captured::Captured<D>,
}

impl<'j, D: Device> Rank<'j, D> {
    pub(crate) fn new(
        job: &'j Job,
        mesh: &'j Mesh,
        comm: &'j dyn Communicator,
        devices: &impl Devices<Device<'j> = D>,
        watch: Option<&'j (dyn Watch + Sync)>,
    ) -> Result<Self, ExecutorError> {
        let rank = comm.rank();
        let place = mesh.place(rank);
        let position = mesh.block_position(rank);
        let device = devices.open(Machine {
            comm,
            groups: mesh.block_groups(rank),
            position,
            numerics: job.settings.numerics,
            threads: 1,
            seed: if job.settings.dropout_by_rank {
                job.settings.seed + rank as u64
            } else {
                job.settings.seed
            },
            watch: watch.map(|watch| watch as &dyn Watch),
        })?;
        captured::check(job, &device, watch.is_some())?;
        let plan = Plan {
            model: &job.model,
            strategy: &job.strategy,
            seq_len: job.seq_len,
            precision: job.precision,
            seed: job.settings.seed,
            gradient_bucket: job.settings.gradient_bucket,
            execution: job.settings.execution,
            numerics: job.settings.numerics,
        };
        let owned = (0u32..)
            .zip(&job.schedule.rank_of_stage)
            .filter(|&(_, &owner)| u64::from(owner) == place.pp);
        let stages = owned
            .map(|(stage, _)| {
                let sharing = stage::sharing(mesh, rank, job.strategy.zero);
                let made = Stage::new(&plan, &device, sharing, &position, u64::from(stage))?;
                Ok((stage, made))
            })
            .collect::<Result<Vec<_>, ExecutorError>>()?;
        let mut arrived = job.program.arrived(&job.schedule.rank_of_stage);
        let made = Self {
            job,
            mesh,
            place,
            comm,
            device,
            position,
            stages,
            actions: &job.program.ranks[place.pp as usize],
            world: mesh.group(rank, WORLD, |_| ()),
            hidden: stage::hidden(&plan, &position)?,
            waiting: HashMap::new(),
            sending: HashMap::new(),
            arrived: arrived.swap_remove(place.pp as usize),
            losses: None,
            report: RankReport {
                rank,
                pp: place.pp,
                tp: place.tp,
                ..RankReport::default()
            },
            has_run: false,
            captured: captured::Captured::<D>::default(),
        };
        made.device.meet(&made.peers())?;
        Ok(made)
    }

    /// Ranks and channels that tensors go through one by one.
    fn peers(&self) -> Vec<(usize, u64)> {
        let neighbours = self.actions.iter().filter_map(|&a| match a.kind {
            ActionKind::SendF | ActionKind::RecvB => Some((a, a.stage + 1)),
            ActionKind::RecvF | ActionKind::SendB => Some((a, a.stage - 1)),
            _ => None,
        });
        let mut peers: Vec<_> = neighbours
            .map(|(a, stage)| (self.neighbour(stage), Self::channel(a)))
            .collect();
        if self.tied_name().is_some() {
            let ends = [0, self.last_stage()];
            for (end, stage) in ends.into_iter().enumerate() {
                if self.stages.iter().any(|(s, _)| *s == stage) {
                    let sharers = self.sharers(ends[1 - end]);
                    peers.extend(
                        sharers
                            .iter()
                            .flat_map(|&peer| update::TIED.map(|c| (peer, c))),
                    );
                }
            }
        }
        peers
    }

    /// What this rank owns and speaks for.
    pub(crate) fn pieces(&self) -> Result<Vec<Piece>, ExecutorError> {
        let tied = self.tied_name();
        let mut pieces = Vec::new();
        for (stage, made) in &self.stages {
            let skip = tied.as_deref().filter(|_| *stage > 0);
            let tp = self.place.tp;
            pieces.extend(checkpoint::pieces(&self.device, &made.states, tp, skip)?);
        }
        Ok(pieces)
    }

    /// Sets all states from a source.
    pub(crate) fn load(&mut self, source: &dyn Source) -> Result<(), ExecutorError> {
        for (_, stage) in &mut self.stages {
            checkpoint::load(&self.device, &mut stage.states, source)?;
        }
        Ok(())
    }

    /// Name of a weight that the first and the last stage both hold.
    fn tied_name(&self) -> Option<String> {
        let names = models::names::names(&self.job.model);
        let tied = self.job.model.tied_embeddings && self.last_stage() > 0;
        tied.then(|| format!("{}.weight", names.embedding))
    }

    pub(crate) fn report(mut self) -> RankReport {
        for (_, stage) in &self.stages {
            let bytes = stage.states.bytes();
            let sum = &mut self.report.states;
            sum.parameters += bytes.parameters;
            sum.gradients += bytes.gradients;
            sum.master += bytes.master;
            sum.moments += bytes.moments;
        }
        self.report.attention_library = self.device.attention_library();
        self.report
    }

    /// Runs one step.
    pub(crate) fn step(&mut self, step: u64) -> Result<StepReport, ExecutorError> {
        self.world.barrier(self.comm)?;
        let start = Instant::now();
        let settings = &self.job.settings;
        let numbers = settings.optimizer.numbers(step, settings.steps);
        self.device.set_numbers(&numbers)?;
        let _ = self.device.take_peak();
        if settings.execution == Execution::Graph && self.has_run {
            self.step_captured(step)?;
        } else {
            self.step_by_action(step)?;
        }
        self.has_run = true;
        self.count_memory();
        let seconds = start.elapsed().as_secs_f64();
        self.report.step_times.push(seconds);
        let last = |values: &[f64]| values.last().copied().unwrap_or(f64::NAN);
        Ok(StepReport {
            step,
            loss: last(&self.report.losses),
            gradient_norm: last(&self.report.gradient_norms),
            seconds,
            peak_memory: self.report.memory.map(|memory| memory.peak),
        })
    }

    fn step_by_action(&mut self, step: u64) -> Result<(), ExecutorError> {
        let last_backward = self.last_backward();
        let actions = self.actions;
        let mut peak_saved = 0;
        self.device.mark()?;
        for (index, &action) in actions.iter().enumerate() {
            self.prefetch(action, &actions[index + 1..])?;
            self.device.mark()?;
            self.act(action, step, &last_backward)?;
            self.device.mark()?;
            let saved = self.stages.iter().map(|(_, s)| s.saved_bytes()).sum();
            peak_saved = peak_saved.max(saved);
        }
        let routed = self.take_routed();
        if peak_saved > self.report.peak_saved {
            self.report.peak_saved = peak_saved;
            self.report.routed = routed;
        }
        if self.world.size() == 1 {
            self.conclude(step)?;
        }
        self.report.events = self.events(&self.device.laps()?);
        Ok(())
    }

    fn take_routed(&mut self) -> Vec<Routed> {
        let routed = self.stages.iter_mut().flat_map(|(_, s)| s.take_routed());
        routed.collect()
    }

    /// Before a pass, sends the parameters that will be gathered next: they arrive while it runs.
    fn prefetch(&mut self, action: Action, later: &[Action]) -> Result<(), ExecutorError> {
        let pass = matches!(
            action.kind,
            ActionKind::F | ActionKind::B | ActionKind::I | ActionKind::W
        );
        let next = later.iter().find(|a| a.kind == ActionKind::Unshard);
        match next.filter(|_| pass) {
            Some(next) => {
                let (stage, device) = self.stage(next.stage);
                stage.states.prefetch(device)
            }
            None => Ok(()),
        }
    }

    /// Micro-batch of every stage's last backward.
    fn last_backward(&self) -> HashMap<u32, u32> {
        let backward = |a: &&Action| matches!(a.kind, ActionKind::B | ActionKind::W);
        let done = self.actions.iter().filter(backward);
        done.map(|a| (a.stage, a.micro_batch)).collect()
    }

    /// Runs the passes of a step again, to name the operator that made the first number that is not
    /// finite. Weights are still what they were; gradients are of no use any more.
    fn name_non_finite(&mut self, step: u64) -> Result<(), ExecutorError> {
        self.captured = captured::Captured::<D>::default();
        self.device.set_watch(&FirstNonFinite);
        let last_backward = self.last_backward();
        for &action in self.actions.iter().filter(|a| a.kind != ActionKind::Optim) {
            self.act(action, step, &last_backward)?;
        }
        self.world.barrier(self.comm)?;
        Ok(())
    }

    fn act(
        &mut self,
        a: Action,
        step: u64,
        last_backward: &HashMap<u32, u32>,
    ) -> Result<(), ExecutorError> {
        match a.kind {
            ActionKind::F => self.forward(a, step),
            ActionKind::B | ActionKind::I | ActionKind::W => {
                let last = last_backward.get(&a.stage) == Some(&a.micro_batch);
                self.backward(a, step, last)
            }
            ActionKind::RecvF | ActionKind::RecvB => self.receive(a),
            ActionKind::SendF | ActionKind::SendB => self.send(a),
            ActionKind::Unshard => {
                let (stage, device) = self.stage(a.stage);
                stage.states.unshard(device)
            }
            ActionKind::Reshard => {
                self.stage(a.stage).0.states.reshard();
                Ok(())
            }
            ActionKind::ReduceGrad => {
                let last = last_backward.get(&a.stage) == Some(&a.micro_batch);
                let comm = self.comm;
                let (stage, device) = self.stage(a.stage);
                stage.states.reduce(device, comm, last)
            }
            ActionKind::Optim => self.optimize(step),
        }
    }

    fn stage(&mut self, stage: u32) -> (&mut Stage<D>, &D) {
        let at = self.stages.iter().position(|(s, _)| *s == stage);
        let at = at.expect("a rank's actions are of its own stages");
        (&mut self.stages[at].1, &self.device)
    }

    fn last_stage(&self) -> u32 {
        self.job.schedule.rank_of_stage.len() as u32 - 1
    }

    fn channel(a: Action) -> u64 {
        // Between stages s and s + 1: forward 2s, backward 2s + 1.
        let s = u64::from(a.stage);
        PIPELINE
            + match a.kind {
                ActionKind::SendF => 2 * s,
                ActionKind::RecvF => 2 * (s - 1),
                ActionKind::SendB => 2 * (s - 1) + 1,
                _ => 2 * s + 1,
            }
    }

    fn neighbour(&self, stage: u32) -> usize {
        let owner = self.job.schedule.rank_of_stage[stage as usize];
        self.mesh.peer(self.place.rank, u64::from(owner))
    }

    fn send(&mut self, a: Action) -> Result<(), ExecutorError> {
        let (backward, to) = match a.kind {
            ActionKind::SendF => (false, a.stage + 1),
            _ => (true, a.stage - 1),
        };
        if let Some(x) = self.waiting.remove(&(backward, to, a.micro_batch)) {
            let peer = self.neighbour(to);
            let parcel = self.device.parcel(&x)?;
            let channel = Self::channel(a);
            let sending = self.device.send(peer, channel, "pipeline", &parcel)?;
            self.sending.insert(a, sending);
        }
        Ok(())
    }

    fn receive(&mut self, a: Action) -> Result<(), ExecutorError> {
        let (backward, from) = match a.kind {
            ActionKind::RecvF => (false, a.stage - 1),
            _ => (true, a.stage + 1),
        };
        let peer = self.neighbour(from);
        let of = (self.hidden.clone(), self.job.dtype());
        let x = self
            .device
            .receive(peer, Self::channel(a), "pipeline", of)?;
        self.waiting.insert((backward, a.stage, a.micro_batch), x);
        for arrived in self.arrived.get(&a).into_iter().flatten() {
            if let Some(sending) = self.sending.remove(arrived) {
                self.device.sent(sending)?;
            }
        }
        Ok(())
    }

    fn forward(&mut self, a: Action, step: u64) -> Result<(), ExecutorError> {
        let input = self.waiting.remove(&(false, a.stage, a.micro_batch));
        let (ids, labels) = self.tokens(a.micro_batch, step);
        let batch = self.micro_batch(a.micro_batch, step, &ids, &labels);
        let batch = self.device.batch(a.micro_batch, batch)?;
        let last = self.last_stage();
        let (stage, device) = self.stage(a.stage);
        let output = stage.forward(device, &batch, a.micro_batch, input)?;
        if a.stage < last {
            self.waiting
                .insert((false, a.stage + 1, a.micro_batch), output);
        } else if self.place.tp == 0 {
            self.keep_losses(a.micro_batch, &output)?;
        }
        Ok(())
    }

    /// Puts the losses of a micro-batch's tokens where those of the step lie.
    fn keep_losses(&mut self, micro_batch: u32, losses: &D::Tensor) -> Result<(), ExecutorError> {
        let tokens: usize = D::shape(losses).iter().product();
        let all = tokens * self.job.strategy.num_micro_batches as usize;
        let kept = match self.losses.take() {
            Some(kept) => kept,
            None => self.device.zeros(all)?,
        };
        let kept = self.losses.insert(kept);
        self.device
            .put_tensor(kept, micro_batch as usize * tokens, losses)
    }

    /// `last`: no backward of this stage comes after it in this step.
    fn backward(&mut self, a: Action, step: u64, last: bool) -> Result<(), ExecutorError> {
        let half = match a.kind {
            ActionKind::I => Half::Input,
            ActionKind::W => Half::Weight,
            _ => Half::Both,
        };
        let strategy = &self.job.strategy;
        let pass = Backward {
            half,
            reduces: strategy.overlap.grad_reduce
                && half != Half::Input
                && (last || strategy.zero >= catalog::Zero::Z2),
        };
        let last = self.last_stage();
        let gradient = match half {
            Half::Weight => None,
            _ if a.stage == last => None,
            _ => self.waiting.remove(&(true, a.stage, a.micro_batch)),
        };
        let (ids, labels) = self.tokens(a.micro_batch, step);
        let batch = self.micro_batch(a.micro_batch, step, &ids, &labels);
        let batch = self.device.batch(a.micro_batch, batch)?;
        let (stage, device) = self.stage(a.stage);
        let gradient = stage.backward(device, &batch, a.micro_batch, gradient, pass)?;
        if let Some(gradient) = gradient.filter(|_| a.stage > 0) {
            self.waiting
                .insert((true, a.stage - 1, a.micro_batch), gradient);
        }
        Ok(())
    }

    fn first_sequence(&self, micro_batch: u32) -> u64 {
        let s = &self.job.strategy;
        let replica = self.place.dp_replicate * s.dp_shard + self.place.dp_shard;
        (replica * s.num_micro_batches + u64::from(micro_batch)) * s.micro_batch
    }

    fn micro_batch<'d>(
        &self,
        micro_batch: u32,
        step: u64,
        ids: &'d [u32],
        labels: &'d [u32],
    ) -> MicroBatch<'d> {
        let tokens = self.job.global_batch * self.job.seq_len;
        MicroBatch {
            ids,
            labels,
            first_sequence: self.first_sequence(micro_batch),
            seq_len: self.job.seq_len,
            step: step as u32,
            loss_scale: 1.0 / tokens as f32,
        }
    }

    /// Tokens and labels of this rank's part of a micro-batch.
    fn tokens(&self, micro_batch: u32, step: u64) -> (Vec<u32>, Vec<u32>) {
        let (job, data) = (self.job, &self.job.data);
        let placements =
            dtensor::Placements::REPLICATE.with(catalog::Axis::Cp, dtensor::Placement::Shard(1));
        let global = [job.strategy.micro_batch, job.seq_len];
        let positions = self.position.indices(&global, &placements, 1);
        let first = step * job.global_batch + self.first_sequence(micro_batch);
        let places = (first..first + job.strategy.micro_batch).flat_map(|sequence| {
            let start = data.start(job.settings.seed, sequence, job.seq_len);
            positions.iter().map(move |&p| start + p as usize)
        });
        places
            .map(|at| (data.token(at), data.token(at + 1)))
            .unzip()
    }
}
