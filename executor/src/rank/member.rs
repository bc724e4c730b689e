//! A rank: its stages, its groups of peers, and saving and loading.

use comm::{Communicator, Group};
use cpu_device::{Machine, Watch};
use dtensor::BlockPosition;
use dtensor::train::{self, Stages};
use plans::Action;
use plans::place::Place;

use crate::checkpoint::{self, Piece, Source};
use crate::device::{Device, Devices};
use crate::error::ExecutorError;
use crate::job::Job;
use crate::mesh::Mesh;
use crate::report::RankReport;
use crate::settings::Execution;
use crate::stage;

/// Channel of reductions over all ranks.
const WORLD: u64 = 30;
/// Channels of a tied weight's gradients (from and to the first stage), and of the ranges of elements sent.
pub(super) const TIED: [u64; 2] = [40, 41];
pub(super) const BOUNDS: [u64; 2] = [42, 43];

/// The captured parts of a step: passes and norm; and the weight update, if the host must first combine the norms of
/// other ranks.
pub(super) type Captured<D> = [Option<<D as Device>::Captured>; 2];

/// One rank of a training job.
pub(crate) struct Rank<'j, D: Device> {
    pub(super) job: &'j Job,
    pub(super) mesh: &'j Mesh,
    pub(super) place: Place,
    pub(super) comm: &'j dyn Communicator,
    pub(super) device: D,
    pub(super) position: BlockPosition,
    pub(super) stages: Stages<'j, D>,
    pub(super) actions: &'j [Action],
    pub(super) world: Group,
    pub(super) report: RankReport,
    /// Whether a step has run: kernels are compiled and all permanent buffers exist.
    pub(super) has_run: bool,
    pub(super) captured: Captured<D>,
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
        let device = devices.open(machine(job, mesh, comm, watch))?;
        check_captured(job, &device, watch.is_some())?;
        let owned = (0u32..)
            .zip(&job.schedule.rank_of_stage)
            .filter(|&(_, &owner)| u64::from(owner) == place.pp);
        let stages = owned
            .map(|(stage, _)| {
                let sharing = stage::sharing(mesh, rank, job.strategy.zero);
                let made = job.stage(&device, sharing, &position, u64::from(stage))?;
                Ok((stage, made))
            })
            .collect::<Result<Vec<_>, ExecutorError>>()?;
        let mut arrived = job.program.arrived(&job.schedule.rank_of_stage);
        let actions = &job.program.ranks[place.pp as usize];
        let owners = job.schedule.rank_of_stage.iter();
        let hidden = models::stage::hidden(&job.model, &job.layout(), &position)?;
        let step = train::Plan {
            actions,
            peers: owners.map(|&pp| mesh.peer(rank, u64::from(pp))).collect(),
            arrived: arrived.swap_remove(place.pp as usize),
            hidden: (hidden, job.dtype()),
            zero: job.strategy.zero,
            reduces_beside: job.strategy.overlap.grad_reduce,
            keeps_losses: place.tp == 0,
            micro_batches: job.strategy.num_micro_batches as usize,
        };
        let made = Self {
            job,
            mesh,
            place,
            comm,
            device,
            position,
            stages: Stages::new(step, stages),
            actions,
            world: mesh.group(rank, WORLD, |_| ()),
            report: RankReport {
                rank,
                pp: place.pp,
                tp: place.tp,
                ..RankReport::default()
            },
            has_run: false,
            captured: Captured::<D>::default(),
        };
        made.device.meet(&made.peers())?;
        Ok(made)
    }

    /// Peer and channel of all point-to-point transfers of tensors.
    fn peers(&self) -> Vec<(usize, u64)> {
        let mut peers = self.stages.transfers();
        if self.tied_name().is_some() {
            let ends = [0, self.stages.last()];
            for (end, stage) in ends.into_iter().enumerate() {
                if self.stages.get(stage).is_some() {
                    let sharers = self.sharers(ends[1 - end]);
                    peers.extend(sharers.iter().flat_map(|&peer| TIED.map(|c| (peer, c))));
                }
            }
        }
        peers
    }

    /// The states that this rank must save.
    pub(crate) fn pieces(&self) -> Result<Vec<Piece>, ExecutorError> {
        let tied = self.tied_name();
        let mut pieces = Vec::new();
        for (stage, made) in &self.stages.all {
            let skip = tied.as_deref().filter(|_| *stage > 0);
            let tp = self.place.tp;
            pieces.extend(checkpoint::pieces(&self.device, &made.states, tp, skip)?);
        }
        Ok(pieces)
    }

    /// Loads all states from a source.
    pub(crate) fn load(&mut self, source: &dyn Source) -> Result<(), ExecutorError> {
        for (_, stage) in &mut self.stages.all {
            checkpoint::load(&self.device, &mut stage.states, source)?;
        }
        Ok(())
    }

    /// Name of the weight that the first and last stages share, if embeddings are tied across stages.
    pub(super) fn tied_name(&self) -> Option<String> {
        let names = models::names::names(&self.job.model);
        let tied = self.job.model.tied_embeddings && self.stages.last() > 0;
        tied.then(|| format!("{}.weight", names.embedding))
    }

    pub(crate) fn report(mut self) -> RankReport {
        self.report.states = self.stages.state_bytes();
        self.report.attention_library = self.device.attention_library();
        self.report
    }

    /// The ranks that hold the dense states of another stage and exchange tied gradients with this rank.
    pub(super) fn sharers(&self, stage: u32) -> Vec<usize> {
        let sharded = self.job.strategy.zero != catalog::Zero::Z0;
        let owner = u64::from(self.job.schedule.rank_of_stage[stage as usize]);
        let peer = self.mesh.peer(self.place.rank, owner);
        if sharded {
            self.mesh
                .group(peer, 0, |p| (p.pp, p.tp, p.dp_replicate))
                .ranks
        } else {
            vec![peer]
        }
    }
}

/// The rank's CPU side.
fn machine<'j>(
    job: &Job,
    mesh: &Mesh,
    comm: &'j dyn Communicator,
    watch: Option<&'j (dyn Watch + Sync)>,
) -> Machine<'j> {
    let rank = comm.rank();
    Machine {
        comm,
        groups: mesh.block_groups(rank),
        position: mesh.block_position(rank),
        numerics: job.settings.numerics,
        threads: 1,
        seed: if job.settings.dropout_by_rank {
            job.settings.seed + rank as u64
        } else {
            job.settings.seed
        },
        watch: watch.map(|watch| watch as &dyn Watch),
    }
}

/// Rejects captured execution where the host takes part in every pass.
fn check_captured<D: Device>(job: &Job, device: &D, watched: bool) -> Result<(), ExecutorError> {
    let strategy = &job.strategy;
    let experts = strategy.ep * strategy.etp;
    let captures = match job.settings.execution {
        Execution::Replayed | Execution::Eager => Ok(()),
        Execution::Graph if watched => Err("--break-at reads every operator"),
        Execution::Graph if experts > 1 => {
            Err("the host counts the rows that go to other ranks' experts")
        }
        Execution::Graph => device.captures(),
    };
    captures.map_err(|reason| ExecutorError::Capture { reason })
}
