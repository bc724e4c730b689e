//! Every decision that a plan makes, legal or not.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use catalog::model::ModelConfig;
use catalog::state_types::StateTypes;
use catalog::{
    Axis, AxisOrder, Cluster, CpKind, CudaGraphs, Dispatcher, Fp8Recipe, GradientTypes, Offload,
    OptimizerStates, Overlap, Precision, Runtime, ScheduleKind, Selection, Zero,
};

use crate::falling;
use crate::mesh::Group;
use crate::partition::StagePartition;
use crate::schedule;

/// Every decision of a parallelism strategy, as plain fields that nobody has checked;
/// [`Strategy::new`](crate::Strategy::new) checks them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Decisions {
    /// Tensor-parallel size.
    pub tp: u64,
    /// Pipeline-parallel size.
    pub pp: u64,
    /// Virtual stages per pipeline rank (1 = none).
    pub vpp: u64,
    /// Context-parallel size.
    pub cp: u64,
    /// How attention communicates under context parallelism.
    pub cp_kind: CpKind,
    /// Expert-parallel size.
    pub ep: u64,
    /// Tensor-parallel size inside experts.
    pub etp: u64,
    /// Data-parallel ranks that shard states (1 under ZeRO-0).
    pub dp_shard: u64,
    /// Data-parallel ranks that replicate states.
    pub dp_replicate: u64,
    /// Which states data parallelism shards.
    pub zero: Zero,
    /// Under ZeRO-3, whether parameters are freed between forward and backward.
    pub reshard_after_forward: bool,
    /// Megatron sequence parallelism: activations between TP blocks are sharded on sequence.
    pub sequence_parallel: bool,
    /// Sequences per micro-batch and data-parallel rank.
    pub micro_batch: u64,
    /// Micro-batches per step and data-parallel rank.
    pub num_micro_batches: u64,
    /// What is recomputed in backward.
    pub recompute: Recompute,
    /// Pipeline schedule.
    pub schedule: ScheduleKind,
    /// Order of mesh axes, innermost first.
    pub axis_order: AxisOrder,
    /// Layers of each virtual stage.
    pub stages: StagePartition,
    /// Which communication the runtime is told to overlap.
    pub overlap: Overlap,
    /// Types in which gradients are held and reduced; `None`: the runtime's own.
    pub gradients: Option<GradientTypes>,
    /// How optimizer states are held; `None`: the runtime's default.
    pub optimizer_states: Option<OptimizerStates>,
    /// States that are in host memory; `None`: none.
    pub offload: Option<Offload>,
    /// How many blocks ahead ZeRO-3 gathers parameters; `None`: the runtime's default.
    pub prefetch: Option<u64>,
    /// The saved activations of this many first layers wait for backward in host memory.
    pub offload_layers: u64,
    /// How tokens are sent to their experts; `None`: the runtime's default.
    pub dispatcher: Option<Dispatcher>,
    /// What is captured in CUDA graphs; `None`: the runtime's default.
    pub graphs: Option<CudaGraphs>,
    /// How the operands of 8-bit products are scaled; `None`: the runtime's default.
    pub fp8_recipe: Option<Fp8Recipe>,
}

/// What backward recomputes of a stage's forward pass.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing.
    None,
    /// Core attention only (Korthikanti et al. 2022); nothing where the kernel is fused and saves no scores.
    Selective,
    /// These parts of every layer, which are not the runtime's own choice.
    Modules(Selection),
    /// Every layer, from its input.
    Full,
    /// The first `n` layers of every virtual stage fully, the rest as under `None`
    /// (Megatron `--recompute-method block --recompute-num-layers n`).
    Layers(u64),
    /// The first layers of every virtual stage fully, the rest as under `None`: this many on the
    /// first stage, fewer on later pipeline ranks, which have fewer micro-batches in flight
    /// ([`Decisions::layers_as_first`]).
    Falling(u64),
    /// Operator-level selection of torchtitan: matrix-product outputs kept alternately, attention and
    /// collectives kept, the rest recomputed.
    SelectiveOps,
}

impl Recompute {
    /// What is recomputed of the first layers of a stage, and of the others.
    /// [`Decisions::layers_as_first`] says how many are first.
    #[must_use]
    pub fn of_first_and_others(self) -> [Self; 2] {
        match self {
            Self::Layers(1..) | Self::Falling(_) => [Self::Full, Self::None],
            Self::Layers(0) => [Self::None; 2],
            alike => [alike; 2],
        }
    }
}

/// Whether every rank is alone with its states, so that a ZeRO level shards nothing. `dp` counts the data-parallel ranks of one replica.
/// With one of them the experts still have several owners if they are spread over fewer ranks (`ep·etp`) than tensor parallelism has:
/// Megatron-Core shards their states over `intra_expt_dp_group` (core/optimizer/__init__.py).
#[must_use]
pub fn alone([dp, cp, tp]: [u64; 3], [ep, etp]: [u64; 2], model: &ModelConfig) -> bool {
    dp.saturating_mul(cp) == 1 && (model.moe.is_none() || ep.saturating_mul(etp) >= tp)
}

impl Decisions {
    /// The decisions of a job with one micro-batch on one GPU that leaves all choices to the
    /// runtime, for a model of `layers` layers.
    #[must_use]
    pub fn on_one_gpu(layers: u64, overlap: Overlap) -> Self {
        Self {
            tp: 1,
            pp: 1,
            vpp: 1,
            cp: 1,
            cp_kind: CpKind::Ring,
            ep: 1,
            etp: 1,
            dp_shard: 1,
            dp_replicate: 1,
            zero: Zero::Z0,
            reshard_after_forward: false,
            sequence_parallel: false,
            micro_batch: 1,
            num_micro_batches: 1,
            recompute: Recompute::None,
            schedule: ScheduleKind::OneFOneB,
            axis_order: AxisOrder::TP_CP_DP_PP,
            stages: StagePartition(vec![layers]),
            overlap,
            gradients: None,
            optimizer_states: None,
            offload: None,
            prefetch: None,
            offload_layers: 0,
            dispatcher: None,
            graphs: None,
            fp8_recipe: None,
        }
    }

    /// Number of all data-parallel ranks.
    #[must_use]
    pub fn dp(&self) -> u64 {
        self.dp_shard * self.dp_replicate
    }

    /// Whether parameters are gathered for every pass: under ZeRO-3, unless they stay gathered after forward.
    #[must_use]
    pub fn gathers_in_every_pass(&self) -> bool {
        self.zero == Zero::Z3 && self.reshard_after_forward
    }

    /// Number of layers of a virtual stage that [`Recompute::of_first_and_others`] calls its first.
    #[must_use]
    pub fn layers_as_first(&self, stage: usize) -> u64 {
        let layers = self.stages.0[stage];
        match self.recompute {
            Recompute::Layers(n @ 1..) => n.min(layers),
            Recompute::Falling(of_first) => {
                falling::recomputed(of_first, &self.stages.0, stage, |stage| {
                    let rank = stage as u64 % self.pp;
                    self.passes_in_flight(rank).unwrap_or(1)
                })
            }
            _ => layers,
        }
    }

    /// How many micro-batches a pipeline rank has in flight at most: their forward pass has run, their backward pass not yet.
    /// `None` without a pipeline, and for schedules in which every rank has equally many.
    pub(crate) fn passes_in_flight(&self, rank: u64) -> Option<u64> {
        let several = self.pp > 1;
        let (kind, micro_batches) = (self.schedule, self.num_micro_batches);
        let passes = || schedule::in_flight(kind, self.pp, self.vpp, micro_batches, rank);
        several.then(passes).flatten()
    }

    /// Number of layers that each virtual stage recomputes as a whole.
    #[must_use]
    pub fn recomputed_layers(&self) -> Vec<u64> {
        let whole = self.recompute.of_first_and_others()[0] == Recompute::Full;
        let stages = 0..self.stages.0.len();
        let of_stage = |stage| {
            if whole {
                self.layers_as_first(stage)
            } else {
                0
            }
        };
        stages.map(of_stage).collect()
    }

    /// Number of ranks in the job.
    #[must_use]
    pub fn world(&self) -> u64 {
        self.pp * self.dp() * self.cp * self.tp
    }

    /// The same job, where every decision without effect has its usual value. Strategies read from
    /// configuration files, which omit decisions without effect, are compared in this form.
    #[must_use]
    pub fn canonical(&self, model: &ModelConfig) -> Self {
        let mut d = self.clone();
        // Offload needs a ZeRO level, even where one rank holds all states.
        let alone = alone([d.dp_shard, d.cp, d.tp], [d.ep, d.etp], model);
        if alone && d.offload.is_none() {
            d.zero = Zero::Z0;
            d.optimizer_states =
                (d.optimizer_states).filter(|states| !states.completes_parameters());
        }
        d.reshard_after_forward &= d.zero == Zero::Z3;
        if !d.gathers_in_every_pass() {
            d.prefetch = None;
        }
        if d.cp == 1 {
            d.cp_kind = CpKind::Ring;
        }
        if d.pp == 1 {
            d.schedule = ScheduleKind::OneFOneB;
        }
        d.axis_order = self.usual_order();
        d.recompute = match d.recompute {
            Recompute::Layers(0) => Recompute::None,
            Recompute::Layers(n) if n >= d.stages.largest() => Recompute::Full,
            other => other,
        };
        d.overlap = d.canonical_overlap();
        d.dispatcher = d.dispatcher.filter(|_| d.ep > 1);
        d
    }

    /// The overlap, where every kind of message that the strategy never sends has its usual value.
    #[must_use]
    pub fn canonical_overlap(&self) -> Overlap {
        let several = self.dp() * self.cp > 1;
        let Overlap {
            grad_reduce,
            param_gather,
            tensor_parallel,
            pipeline,
            expert_parallel,
        } = self.overlap;
        Overlap {
            grad_reduce: grad_reduce && several,
            param_gather: param_gather && several && self.zero != Zero::Z0,
            tensor_parallel: tensor_parallel && self.tp > 1,
            pipeline: pipeline || self.pp == 1,
            expert_parallel: expert_parallel && self.ep > 1,
        }
    }

    /// The first of `orders` that places ranks as this strategy's order does, that is, has the axes with more than one rank in the
    /// same sequence. `None` if there is none.
    #[must_use]
    pub fn order_among(&self, orders: &[AxisOrder]) -> Option<AxisOrder> {
        let of_several = |order: AxisOrder| {
            let axes = order.0.into_iter();
            axes.filter(|&axis| self.size(axis) > 1)
        };
        let alike = |order: &&AxisOrder| of_several(**order).eq(of_several(self.axis_order));
        orders.iter().find(alike).copied()
    }

    /// The usual one of the orders that place ranks as this strategy's does: Megatron's default or
    /// `--use-tp-pp-dp-mapping` if possible, else the axes with several ranks come first.
    #[must_use]
    pub fn usual_order(&self) -> AxisOrder {
        let usual = [AxisOrder::TP_CP_DP_PP, AxisOrder::TP_CP_PP_DP];
        self.order_among(&usual).unwrap_or_else(|| {
            let mut order = self.axis_order;
            order
                .0
                .sort_by_key(|&axis| (self.size(axis) == 1).then_some(axis));
            order
        })
    }

    /// These decisions, where every choice that equals the runtime's default is left to the
    /// runtime, and the axis order is as the runtime lists it.
    #[must_use]
    pub fn under(mut self, runtime: &Runtime, precision: Precision) -> Self {
        let listed = self.order_among(&runtime.space.axis_orders);
        self.axis_order = listed.unwrap_or(self.axis_order);
        if self.recompute == Recompute::Modules(runtime.selective) {
            self.recompute = Recompute::Selective;
        }
        let own = runtime.own_gradients(precision);
        self.gradients = self.gradients.filter(|types| *types != own);
        self.prefetch = self.prefetch.filter(|&ahead| ahead != 1);
        self.dispatcher = (self.dispatcher).filter(|dispatcher| *dispatcher != runtime.dispatcher);
        self.graphs = self.graphs.filter(|graphs| *graphs != runtime.graphs);
        self.fp8_recipe = (self.fp8_recipe).filter(|recipe| *recipe != runtime.fp8_recipe);
        self
    }

    /// Element types of parameters, gradients and optimizer states of a job under a runtime.
    #[must_use]
    pub fn state_types(&self, runtime: &Runtime, precision: Precision) -> StateTypes {
        let own = runtime.states_in(precision);
        let types = (self.optimizer_states).map_or(own, |states| states.of(own, precision));
        self.gradients
            .map_or(types, |gradients| types.with_gradients(gradients))
    }

    /// Number of ranks along an axis.
    #[must_use]
    pub fn size(&self, axis: Axis) -> u64 {
        match axis {
            Axis::Tp => self.tp,
            Axis::Cp => self.cp,
            Axis::Ep => self.ep,
            Axis::Etp => self.etp,
            Axis::Edp => self.edp(),
            Axis::DpShard => self.dp_shard,
            Axis::DpReplicate => self.dp_replicate,
            Axis::Pp => self.pp,
        }
    }

    /// Size and rank stride of the groups of an axis. The dense axes (tensor, context, data and pipeline parallelism)
    /// are nested in the axis order. The expert axes divide the same ranks of a pipeline stage in another way: `etp`
    /// varies fastest, then `ep`, then the replicas of the experts. Megatron calls this parallel folding, torchtitan
    /// has an expert mesh for it.
    #[must_use]
    pub fn group(&self, axis: Axis) -> Group {
        let size = self.size(axis);
        let stride = match axis {
            Axis::Etp => 1,
            Axis::Ep => self.etp,
            Axis::Edp => self.etp * self.ep,
            _ => self
                .axis_order
                .0
                .iter()
                .take_while(|&&inner| inner != axis)
                .map(|&inner| self.size(inner))
                .product(),
        };
        Group { size, stride }
    }

    /// Whether messages to experts cross scale-up domains: some ranks that hold one copy of all experts lie in different ones.
    #[must_use]
    pub fn experts_lie_across(&self, cluster: &Cluster) -> bool {
        let size = self.ep * self.etp;
        Group { size, stride: 1 }.lies_across(cluster.domain(self.world()))
    }

    /// Number of replicas of one expert shard.
    #[must_use]
    pub fn edp(&self) -> u64 {
        self.world() / (self.pp * self.ep * self.etp)
    }
}
