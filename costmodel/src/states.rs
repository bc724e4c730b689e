//! Memory and traffic of parameters, gradients and optimizer states under ZeRO.
//!
//! With `N` the elements a rank holds before sharding and `d` the ranks that share them
//! (Rajbhandari et al. 2020, §5; Megatron-LM `dist_optimizer` documentation):
//!
//! | | parameters | gradients | master, moments |
//! |---|---|---|---|
//! | ZeRO-0 | N | N | N |
//! | ZeRO-1 | N | N | N/d |
//! | ZeRO-2 | N | N/d | N/d |
//! | ZeRO-3 | N/d | N/d | N/d |

use catalog::runtime::{BUCKET_ELEMENTS, Rewrite};
use catalog::state_types::StateTypes;
use catalog::{Bytes, DType, GradientTypes, Precision, Runtime};
use derive_more::{AddAssign, Mul};
use plans::{Decisions, Recompute, Zero};

use crate::{CostError, Scenario};

/// Numbers of elements of a stage on one rank, before ZeRO shards them. Dense and expert parameters are sharded over
/// different groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elements {
    /// Parameters outside routed experts.
    pub dense: u64,
    /// Parameters of routed experts.
    pub expert: u64,
}

impl std::ops::AddAssign for Elements {
    fn add_assign(&mut self, other: Self) {
        self.dense = self.dense.saturating_add(other.dense);
        self.expert = self.expert.saturating_add(other.expert);
    }
}

impl std::ops::Mul<u64> for Elements {
    type Output = Self;
    fn mul(self, count: u64) -> Self {
        Self {
            dense: self.dense.saturating_mul(count),
            expert: self.expert.saturating_mul(count),
        }
    }
}

impl Elements {
    /// Elements of both kinds.
    #[must_use]
    pub fn total(self) -> u64 {
        self.dense + self.expert
    }
}

/// Elements of the weights of a stage on one rank: of those that are trained, and of those that are frozen because
/// adapters are trained in their place. Frozen ones have neither gradients nor optimizer states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, AddAssign, Mul)]
pub struct Weights {
    /// Weights that are trained.
    pub trained: Elements,
    /// Weights that are frozen.
    pub frozen: Elements,
    /// Bytes of the 8-bit copies of all these weights that are kept from one micro-batch to the next.
    pub copies: Bytes,
}

impl Weights {
    /// Elements of all weights, trained or not.
    #[must_use]
    pub fn all(self) -> Elements {
        let mut all = self.trained;
        all += self.frozen;
        all
    }

    /// Elements that ranks gather from each other: all under ZeRO-3, else those that the optimizer updated.
    pub(crate) fn gathered(self, zero: Zero) -> Elements {
        match zero {
            Zero::Z3 => self.all(),
            Zero::Z0 | Zero::Z1 | Zero::Z2 => self.trained,
        }
    }

    /// Subtracts a table of dense elements that was counted twice: a frozen one, with adapters.
    pub(crate) fn share(&mut self, table: u64) {
        let holder = match self.frozen.dense {
            0 => &mut self.trained,
            _ => &mut self.frozen,
        };
        holder.dense = holder.dense.saturating_sub(table);
    }
}

/// Number of ranks over which ZeRO shards the states of each kind of parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// ZeRO level.
    pub zero: Zero,
    /// Number of ranks that share dense states.
    pub dense: u64,
    /// Number of ranks that share expert states.
    pub expert: u64,
}

/// Bytes of the states that live for the whole step on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, AddAssign)]
pub struct StateBytes {
    /// Bytes of the parameters that kernels read (under ZeRO-3, of their shards).
    pub parameters: Bytes,
    /// Bytes of the gradient accumulation buffers.
    pub gradients: Bytes,
    /// Bytes of the master parameters.
    pub master: Bytes,
    /// Bytes of the optimizer's moments.
    pub moments: Bytes,
    /// Bytes of copies of parameters in 8 bits.
    pub copies: Bytes,
}

impl StateBytes {
    /// Sum of all states.
    #[must_use]
    pub fn total(&self) -> Bytes {
        self.named().into_iter().map(|(_, bytes)| bytes).sum()
    }

    /// The bytes of each kind of state, with the name that reports show for it.
    pub(crate) fn named(&self) -> [(&'static str, Bytes); 5] {
        [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer: master parameters", self.master),
            ("optimizer: moments", self.moments),
            ("copies of parameters in 8 bits", self.copies),
        ]
    }
}

impl Sharding {
    /// Elements in the largest shard of `elements`.
    #[must_use]
    pub fn shard(&self, elements: Elements) -> u64 {
        elements.dense.div_ceil(self.dense) + elements.expert.div_ceil(self.expert)
    }

    /// Number of elements that a rank's optimizer updates.
    #[must_use]
    pub fn updated(&self, elements: Elements) -> u64 {
        if self.zero >= Zero::Z1 {
            self.shard(elements)
        } else {
            elements.dense + elements.expert
        }
    }

    /// Bytes of each kind of state on a rank. Frozen weights are held in the type that kernels read.
    #[must_use]
    pub fn states(&self, weights: Weights, types: &StateTypes, precision: Precision) -> StateBytes {
        let whole = weights.trained.total();
        let shard = self.shard(weights.trained);
        let frozen = match self.zero {
            Zero::Z3 => self.shard(weights.frozen),
            Zero::Z0 | Zero::Z1 | Zero::Z2 => weights.frozen.total(),
        };
        let at = |level: Zero| if self.zero >= level { shard } else { whole };
        let parameter = parameter_type(types, precision);
        let gradient = gradient_type(types, precision);
        let extra = types.extra_gradient.map_or(0, DType::size);
        let master = types.master.map_or(0, DType::size);
        StateBytes {
            parameters: Bytes(
                at(Zero::Z3) * parameter.size() + frozen * precision.activation().size(),
            ),
            gradients: Bytes(at(Zero::Z2) * (gradient.size() + extra)),
            master: Bytes(at(Zero::Z1) * master),
            moments: Bytes(types.moments(at(Zero::Z1))),
            copies: weights.copies,
        }
    }

    /// Bytes that the optimizer step moves: it reads gradient, master (or parameter) and both moments, and writes
    /// master, moments and the parameter that kernels read.
    #[must_use]
    pub fn optimizer_traffic(
        &self,
        elements: Elements,
        types: &StateTypes,
        precision: Precision,
    ) -> Bytes {
        let updated = self.updated(elements);
        let parameter = parameter_type(types, precision).size();
        let weights = types
            .master
            .map_or(2 * parameter, |m| 2 * m.size() + parameter);
        let moments = 2 * types.moments(updated);
        let gradient = gradient_type(types, precision).size();
        Bytes(updated * (weights + gradient) + moments)
    }
}

/// Bytes of a checkpoint that a job under this strategy writes. It holds the states of the `trained` parameters, whose number
/// [`models::trained_and_frozen`] gives: prediction modules count, and a job that trains adapters saves these alone.
#[must_use]
pub fn checkpoint(scenario: &Scenario, d: &Decisions, trained: u64) -> Bytes {
    Bytes((trained as f64 * checkpoint_bytes(scenario, d)).round() as u64)
}

/// Bytes of a checkpoint per parameter: the master parameter (the one that kernels read, if there
/// is no master) and both moments. A split master parameter consists of the one that kernels read
/// and the bits that it lacks.
pub(crate) fn checkpoint_bytes(scenario: &Scenario, d: &Decisions) -> f64 {
    let types = d.state_types(&scenario.runtime, scenario.workload.precision);
    let parameter = parameter_type(&types, scenario.workload.precision).size();
    let weight = match types.master {
        None => parameter,
        Some(DType::Bf16) => parameter + DType::Bf16.size(),
        Some(whole) => whole.size(),
    };
    // For enough weights that the scales of 8-bit moments count in full.
    let many = 1 << 20;
    weight as f64 + types.moments(many) as f64 / many as f64
}

/// Elements of all weights of a model, unsharded.
///
/// # Errors
/// When the model cannot be traced.
pub(crate) fn weights(scenario: &Scenario) -> Result<Weights, CostError> {
    let [trained, frozen] =
        models::trained_and_frozen(&scenario.model).map_err(|e| CostError::Trace(e.to_string()))?;
    let dense = |dense| Elements { dense, expert: 0 };
    Ok(Weights {
        trained: dense(trained),
        frozen: dense(frozen),
        copies: Bytes(0),
    })
}

/// The smallest types of states that a job may have, with every type of gradients.
pub(crate) fn smallest_types(runtime: &Runtime, precision: Precision) -> Vec<StateTypes> {
    let others = runtime.other_optimizers(precision);
    let own = runtime.states_in(precision);
    let own = others
        .last()
        .map_or(own, |states| states.of(own, precision));
    let with_gradients = |types: GradientTypes| StateTypes {
        gradient: Some(types.held),
        ..own
    };
    let others = runtime.other_gradients(precision).map(with_gradients);
    [own].into_iter().chain(others).collect()
}

/// Whether every pass casts all parameters from the type that they are held in, because nothing gathers them in the type
/// that they are computed in: below ZeRO-3 every rank holds all of them.
#[must_use]
pub(crate) fn casts_whole(scenario: &Scenario, zero: Zero) -> bool {
    let precision = scenario.workload.precision;
    let held = parameter_type(&scenario.runtime.states, precision);
    zero != Zero::Z3 && held.size() > precision.activation().size()
}

/// Whether every forward and backward pass casts parameters to the type in which kernels read them. Under ZeRO-3 that is so where
/// ranks gather a wider type, such as 32 bits for kernels that read 16.
#[must_use]
pub(crate) fn casts_in_passes(scenario: &Scenario, zero: Zero) -> bool {
    let precision = scenario.workload.precision;
    let gathered = gathered_type(&scenario.runtime, precision);
    let after_gather = zero == Zero::Z3 && gathered.size() > precision.activation().size();
    casts_whole(scenario, zero) || after_gather
}

/// Whether the 16-bit casts that a forward pass makes of parameters gathered in 32 bits stay in memory until backward. They do under
/// ZeRO-3, because autograd saves them to compute the gradients of layers' inputs, unless recomputation runs whole layers again.
#[must_use]
pub(crate) fn keeps_casts(scenario: &Scenario, d: &Decisions) -> bool {
    d.zero == Zero::Z3 && casts_in_passes(scenario, d.zero) && d.recompute != Recompute::Full
}

/// Whether parameters are sharded by PyTorch's FSDP, first or second generation. DeepSpeed flattens and frees gradients too, but is
/// not FSDP.
pub(crate) fn is_fsdp(runtime: &Runtime) -> bool {
    let has = |rewrite| runtime.rewrites.contains(&rewrite);
    let copies = has(Rewrite::FlattenGradients) || has(Rewrite::CopyShards);
    copies && has(Rewrite::ReleaseGradients) && !is_deepspeed(runtime)
}

/// Whether gradients are added up in buffers that stay from step to step, as Megatron-LM's do. A runtime that copies gradients into
/// the buckets of a reduction frees them afterwards.
pub(crate) fn keeps_gradient_buffers(runtime: &Runtime) -> bool {
    let has = |rewrite| runtime.rewrites.contains(&rewrite);
    let adds = has(Rewrite::AccumulateGradients) && !has(Rewrite::FlattenGradients);
    adds || has(Rewrite::FuseGradientAccumulation)
}

/// Whether DeepSpeed's engine reduces gradients and updates parameters. No other system gathers updated parameters in the step.
pub(crate) fn is_deepspeed(runtime: &Runtime) -> bool {
    runtime.rewrites.contains(&Rewrite::GatherInStep)
}

/// Elements of the buffers that DeepSpeed's engine allocates for gradients that are to be reduced, however many weights are trained:
/// one buffer of `reduce_bucket_size`, and at levels 1 and 2 a second one if reductions run beside backward (`zero/stage_1_and_2.py`,
/// `setup_buckets`; `zero/stage3.py`, `ipg_buckets`). The size is the one that exports write.
#[must_use]
pub(crate) fn bucket_elements(runtime: &Runtime, d: &Decisions) -> u64 {
    let buckets = match d.zero {
        _ if !is_deepspeed(runtime) => 0,
        Zero::Z0 => 0,
        Zero::Z1 | Zero::Z2 => 1 + u64::from(d.overlap.grad_reduce),
        Zero::Z3 => 1,
    };
    buckets * BUCKET_ELEMENTS
}

/// Whether DeepSpeed's ZeRO-1 reduces gradients while a step's only backward pass makes them (`overlap_comm`). Then a rank frees those that
/// other ranks update, and holds no more gradients than under ZeRO-2.
#[must_use]
pub(crate) fn frees_in_backward(runtime: &Runtime, d: &Decisions) -> bool {
    let one_pass = d.num_micro_batches == 1 && d.vpp == 1;
    is_deepspeed(runtime) && d.zero == Zero::Z1 && one_pass && d.overlap.grad_reduce
}

/// Whether the optimizer step frees the gradients that other ranks update before it copies the rest to 32 bits. Without
/// ZeRO there are none of these, and the shards of DeepSpeed's ZeRO-3 are views of a buffer that stays.
#[must_use]
pub(crate) fn frees_in_step(runtime: &Runtime, d: &Decisions) -> bool {
    is_deepspeed(runtime) && matches!(d.zero, Zero::Z1 | Zero::Z2)
}

/// Whether gradients are all-reduced to every rank although it updates only a share. ZeRO-3 reduces to shards everywhere.
#[must_use]
pub(crate) fn all_reduces_for_shards(runtime: &Runtime, zero: Zero) -> bool {
    let shards = matches!(zero, Zero::Z1 | Zero::Z2);
    shards && runtime.rewrites.contains(&Rewrite::AllReduceGradients)
}

/// Whether FSDP reduces gradients once in a step, not once for each micro-batch.
#[must_use]
pub(crate) fn reduces_once(runtime: &Runtime, d: &Decisions) -> bool {
    runtime.works_by_block(d.zero) && runtime.zero3_once.reduce.contains(d.pp)
}

/// Whether backward passes neither reduce gradients nor free parameters, because a pipeline of PyTorch does so itself: it switches both off
/// for every pass, also the last, and reduces when a stage has run its last backward pass, while the device waits (pytorch/pytorch@00722e6,
/// `distributed/pipelining/stage.py`, `backward_maybe_with_nosync` and `perform_reduce_grad`).
#[must_use]
pub(crate) fn leaves_backward_alone(runtime: &Runtime, d: &Decisions) -> bool {
    d.pp > 1 && reduces_once(runtime, d)
}

/// Bytes that a rank reads and writes to add a micro-batch's gradients to those of earlier ones. It trains `trained` weights, of which
/// `shard` are its own. Autograd adds whole gradients in the type of the parameters; FSDP and ZeRO from level 2 on
/// add only what a rank keeps of the sum over ranks (DeepSpeed `zero/stage_1_and_2.py`, `independent_gradient_partition_epilogue`,
/// and `zero/stage3.py`, `partition_grads`; PyTorch `_fsdp_collectives.py`, `foreach_reduce`), unless they reduce once in a step.
#[must_use]
pub(crate) fn added_gradients(
    scenario: &Scenario,
    d: &Decisions,
    [trained, shard]: [u64; 2],
) -> Bytes {
    let (runtime, precision) = (&scenario.runtime, scenario.workload.precision);
    let types = d.state_types(runtime, precision);
    let held = gradient_type(&types, precision).size();
    match d.zero >= Zero::Z2 && !reduces_once(runtime, d) {
        true => Bytes(shard * 3 * held),
        false => Bytes(trained * (parameter_type(&types, precision).size() + 2 * held)),
    }
}

/// Whether FSDP frees the embedding between its forward and its backward pass. One whose table the head shares stays gathered.
pub(crate) fn frees_embedding(scenario: &Scenario) -> bool {
    let apart = (scenario.runtime.rewrites).contains(&Rewrite::FreeEmbedding);
    apart && !scenario.model.tied_embeddings
}

/// Whether the host copies gradients into buckets one after the other when backward has ended, while the GPU waits. DeepSpeed does so
/// under ZeRO-1 unless `overlap_comm` is set (`zero/stage_1_and_2.py`, `reduce_gradients`).
#[must_use]
pub(crate) fn buckets_after_backward(scenario: &Scenario, d: &Decisions) -> bool {
    let its_engine = is_deepspeed(&scenario.runtime);
    its_engine && d.zero == Zero::Z1 && !d.overlap.grad_reduce && d.dp() * d.cp > 1
}

/// Element type in which ZeRO-3 gathers parameters.
pub(crate) fn gathered_type(runtime: &Runtime, precision: Precision) -> DType {
    match runtime.rewrites.contains(&Rewrite::GatherHeldType) {
        true => parameter_type(&runtime.states, precision),
        false => precision.activation(),
    }
}

/// Element type in which ZeRO-3 gathers the weights of a layer.
pub(crate) fn gathered_layer_type(runtime: &Runtime, precision: Precision) -> DType {
    match runtime.rewrites.contains(&Rewrite::GatherNarrowWeights) {
        true => precision.matmul(),
        false => gathered_type(runtime, precision),
    }
}

/// Gradients of a rank that do not exist before its backward pass begins, by what becomes of their memory until then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LateGradients {
    /// Bytes that activations can use.
    pub(crate) free: Bytes,
    /// Bytes that stay reserved for gradients. FSDP allocates reduced gradients on a separate CUDA stream
    /// (`_fsdp_collectives.py`, `foreach_reduce`; FSDP1: `_runtime_utils.py`, `_post_backward_hook`), and PyTorch's allocator
    /// reuses freed memory only for allocations on the same stream (`CUDACachingAllocator.cpp`).
    pub(crate) kept: Bytes,
}

/// Gradients that a rank does not hold yet when its backward pass begins: all, if the runtime frees
/// them after every step and the rank runs one backward pass in a step; in later passes those of
/// the first exist.
#[must_use]
pub(crate) fn late_gradients(
    runtime: &Runtime,
    d: &Decisions,
    states: &StateBytes,
) -> LateGradients {
    let once = d.num_micro_batches == 1 && d.vpp == 1;
    let late = match once && releases_all(runtime, d) {
        true => states.gradients,
        false => Bytes(0),
    };
    let kept = match d.zero >= Zero::Z2 && d.dp() * d.cp > 1 && is_fsdp(runtime) {
        true => late,
        false => Bytes(0),
    };
    LateGradients {
        free: late - kept,
        kept,
    }
}

/// Whether the step frees all gradients that a rank holds. The shards of DeepSpeed's ZeRO-2 are allocated whole when backward reduces the
/// first bucket (`zero/stage_1_and_2.py`, `copy_grads_in_partition`), and those of its ZeRO-3 are never freed (`zero/stage3.py`,
/// `grad_partitions_flat_buffer`). ZeRO-1 of other systems is taken to hold gradients in buckets, which are not freed.
fn releases_all(runtime: &Runtime, d: &Decisions) -> bool {
    let keeps = match (is_deepspeed(runtime), d.zero) {
        (_, Zero::Z0) => false,
        (true, Zero::Z1) => frees_in_backward(runtime, d),
        (true, Zero::Z2 | Zero::Z3) => true,
        (false, zero) => zero == Zero::Z1,
    };
    runtime.rewrites.contains(&Rewrite::ReleaseGradients) && !keeps
}

/// Bytes of buckets for each trained parameter. PyTorch's DistributedDataParallel copies gradients into buckets, reduces these, and
/// copies the results back. Buckets are made once and never freed. (With `gradient_as_bucket_view=True` there would be no copies,
/// as gradients would lie in the buckets themselves; no runtime here sets it.) ZeRO-1 is its ZeroRedundancyOptimizer, which leaves them.
#[must_use]
pub(crate) fn of_bucket(runtime: &Runtime, d: &Decisions, precision: Precision) -> u64 {
    let reduces = d.zero <= Zero::Z1 && d.dp() * d.cp > 1 && !runtime.works_by_block(d.zero);
    match reduces && runtime.copies_into_buckets {
        true => parameter_type(&runtime.states, precision).size(),
        false => 0,
    }
}

/// Element type in which gradients are reduced. Data parallelism that casts parameters of 32 bits reduces the gradients
/// of these (PyTorch's DistributedDataParallel); only FSDP reduces them in a type of its own.
#[must_use]
pub(crate) fn reduced_type(runtime: &Runtime, types: &StateTypes, zero: Zero) -> DType {
    match (types.parameter, zero) {
        (Some(held), Zero::Z0) if !runtime.works_by_block(zero) => held,
        _ => types.reduce,
    }
}

/// Element type of the parameter copy that lives for the whole step.
#[must_use]
pub fn parameter_type(types: &StateTypes, precision: Precision) -> DType {
    types.parameter.unwrap_or(precision.activation())
}

/// Element type of the gradient accumulation buffer of a strategy.
#[must_use]
pub(crate) fn accumulation_type(runtime: &Runtime, d: &Decisions, precision: Precision) -> DType {
    gradient_type(&d.state_types(runtime, precision), precision)
}

/// Whether the types of gradients that a strategy chose make the optimizer step copy them to 32 bits. An optimizer that
/// holds its states in 16 bits reads such gradients as they are.
#[must_use]
pub(crate) fn copies_for_step(runtime: &Runtime, d: &Decisions, precision: Precision) -> bool {
    let types = d.gradients.unwrap_or(runtime.own_gradients(precision));
    d.optimizer_states.is_none() && runtime.copies_gradients(precision, types)
}

/// Element type of the gradient accumulation buffer.
#[must_use]
pub fn gradient_type(types: &StateTypes, precision: Precision) -> DType {
    types.gradient.unwrap_or(precision.activation())
}
