//! What one pipeline rank holds in memory for the whole step, and how long its part of the optimizer step takes.

use catalog::prefetch::Ahead;
use catalog::runtime::Rewrite;
use catalog::{Bytes, DType, Seconds};
use plans::{Decisions, Zero};

use crate::blocks::BlockCosts;
use crate::book::Update;
use crate::offload::{self, HostStep, Offloaded};
use crate::states::{self, StateBytes, Weights};
use crate::traffic::DataParallel;
use crate::{CostError, Scenario};

/// DeepSpeed's optimizer under ZeRO-3 updates a rank's parameters in groups of this many (the default of `sub_group_size`,
/// `zero/config.py`).
const SUB_GROUP: u64 = 1_000_000_000;

/// Numbers of elements of the largest block. ZeRO gathers and reduces one block at a time, so the largest decides how much memory
/// that takes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Largest {
    /// Most trained weights of any block. Only these have gradients to reduce.
    reduced: u64,
    /// Weights of embedding and head together.
    ends: u64,
    /// Weights of the larger of the two.
    larger_end: u64,
    /// Most weights of any layer.
    layer: u64,
    /// Elements of the largest trained tensor.
    tensor: u64,
}

impl Largest {
    /// The numbers of one block, which is the embedding or the head if it `is_end`.
    pub(crate) fn of(block: Weights, is_end: bool) -> Self {
        let all = block.all().total();
        let [ends, layer] = if is_end { [all, 0] } else { [0, all] };
        Self {
            reduced: block.trained.total(),
            ends,
            larger_end: ends,
            layer,
            tensor: 0,
        }
    }

    /// The same numbers if the largest trained tensor has `tensor` elements.
    pub(crate) fn with_tensor(self, tensor: u64) -> Self {
        Self { tensor, ..self }
    }

    /// These numbers for the blocks of both sides together.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            reduced: self.reduced.max(other.reduced),
            ends: self.ends + other.ends,
            larger_end: self.larger_end.max(other.larger_end),
            layer: self.layer.max(other.layer),
            tensor: self.tensor.max(other.tensor),
        }
    }

    /// Takes away a table that was counted twice because embedding and head share it.
    pub(crate) fn share(&mut self, table: u64) {
        self.ends = self.ends.saturating_sub(table);
    }
}

/// The weights and states that a pipeline rank holds, summed over its virtual stages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeldByRank {
    pub(crate) weights: Weights,
    pub(crate) states: StateBytes,
    pub(crate) largest: Largest,
    /// Number of trained parameter tensors.
    pub(crate) tensors: u64,
    /// Number of trained parameters on the rank in blocks that tensor parallelism splits.
    pub(crate) divided: u64,
    /// Bytes of the buffers into which pipeline stages receive.
    pub(crate) buffers: Bytes,
}

/// The memory of one pipeline rank apart from activations, the time of its optimizer step, and how much messages slow its kernels.
#[derive(Clone, Copy, Debug)]
pub struct OfRank {
    /// Bytes of parameters, gradients and optimizer states on the device.
    pub states: StateBytes,
    /// The largest sum, over the step, of two amounts in bytes: parameters gathered from other ranks, and gradients not reduced yet.
    pub in_flight: Bytes,
    /// Time to sum the gradients of a vocabulary table with those of the pipeline's other end, which holds it too.
    pub shared_table: Seconds,
    /// Time of the optimizer step on the device.
    pub optimizer: Seconds,
    /// Bytes that the optimizer step needs in addition to [`Self::resident`].
    pub optimizer_transient: Bytes,
    /// Bytes of device memory that are counted as taken during the whole step: parameters, gradients and optimizer states
    /// ([`Self::states`]), [`Self::in_flight`], the receive buffers of pipeline stages, the CUDA context, and workspaces of libraries.
    pub resident: Bytes,
    /// Times of the host's part of the optimizer step, where optimizer states lie in host memory.
    pub host: HostStep,
    /// Bytes that the rank keeps in host memory.
    pub on_host: Bytes,
    /// Factor, at least 1, by which kernels take longer while data-parallel messages are sent.
    pub slowdown: f64,
}

impl OfRank {
    /// Time from the last gradient until device and host, which work at the same time, have both updated their weights.
    pub(crate) fn update(&self) -> Seconds {
        self.optimizer.max(self.host.total())
    }

    /// Computes memory and optimizer step from what a rank holds. `on_host` then lacks activations saved in host memory.
    ///
    /// # Errors
    /// When the optimizer was not measured, or the cluster's host is not known.
    pub(crate) fn new(
        costs: &BlockCosts,
        strategy: &Decisions,
        parallel: &DataParallel,
        held: HeldByRank,
    ) -> Result<Self, CostError> {
        let HeldByRank {
            weights,
            states,
            largest,
            tensors,
            divided,
            buffers,
        } = held;
        let scenario = costs.scenario();
        let (runtime, sharding) = (&scenario.runtime, &parallel.sharding);
        let updated = sharding.updated(weights.trained);
        let copy = copied_for_step(scenario, strategy, updated);
        let offloaded = Offloaded::of(scenario, strategy);
        let on_host = offloaded.map(|host| host.on_host(weights, sharding));
        let update = Update {
            scenario,
            strategy,
            parallel,
            elements: weights.trained,
            gradients: states.gradients,
            tensors,
            divided,
        };
        let in_flight = in_flight(strategy, costs, largest, weights);
        let outside = scenario.outside();
        let mut host = offload::step(scenario, strategy, strategy.offload, sharding, weights)?;
        if host != HostStep::default() {
            host.copies = costs.book.gradient_copies(&update);
        }
        let late = states::late_gradients(runtime, strategy, &states).free;
        let in_step = Step {
            gradients: states.gradients,
            late,
            copy: offloaded.map_or(copy, |host| host.left(copy)),
        };
        let frees = states::frees_in_step(runtime, strategy) && offloaded.is_none();
        let held = states::accumulation_type(runtime, strategy, scenario.workload.precision);
        Ok(Self {
            states,
            in_flight,
            shared_table: Seconds(0.0),
            optimizer: costs.book.optimizer(&update)?,
            optimizer_transient: match frees {
                true => in_step.that_frees(updated, held.size(), largest.tensor),
                false => late + in_step.copy,
            },
            resident: states.total() - late + in_flight + buffers + outside,
            host,
            on_host: on_host.unwrap_or_default(),
            slowdown: parallel.slowdown(scenario),
        })
    }
}

/// Memory of gradients in the optimizer step.
struct Step {
    /// Bytes of all gradients that the rank holds when the step begins.
    gradients: Bytes,
    /// Bytes of those that are not held for the whole step of training.
    late: Bytes,
    /// Bytes of copies of the gradients that the rank updates.
    copy: Bytes,
}

impl Step {
    /// Bytes that the step of DeepSpeed's ZeRO-1 and 2 needs beyond those held for the whole step
    /// of training, if the rank updates `updated` parameters, and elements of their gradients have
    /// `size` bytes (@edaa722, `zero/stage_1_and_2.py`). First, while all gradients are there, the
    /// norm is computed of one tensor after the other in 64 bits (`get_grad_norm_direct`). Then
    /// gradients that others update are freed (`free_grad_in_param_list`), and those that are left
    /// are copied.
    fn that_frees(&self, updated: u64, size: u64, largest_tensor: u64) -> Bytes {
        let norm = self.late + Bytes(largest_tensor.min(updated) * NORM);
        let held = self.gradients - self.late;
        let left = Bytes(updated * size).min(self.gradients);
        norm.max((left + self.copy).saturating_sub(held))
    }
}

/// Bytes of an element of the type in which DeepSpeed computes norms of gradients.
const NORM: u64 = 8;

/// Memory that copies of gradients take during the optimizer step of a rank that updates this many parameters.
fn copied_for_step(scenario: &Scenario, strategy: &Decisions, updated: u64) -> Bytes {
    let (runtime, precision) = (&scenario.runtime, scenario.workload.precision);
    let held = states::accumulation_type(runtime, strategy, precision).size();
    let copies = runtime.rewrites.contains(&Rewrite::CopyGradientsForStep)
        || states::copies_for_step(runtime, strategy, precision);
    let wide = DType::F32.size();
    Bytes(match strategy.zero {
        _ if !copies => 0,
        Zero::Z3 => updated.min(SUB_GROUP) * (wide + precision.activation().size()),
        // They are joined in their own type first; that tensor has 32 bits already if they have.
        Zero::Z1 | Zero::Z2 if states::is_deepspeed(runtime) && held < wide => {
            updated * (wide + held)
        }
        Zero::Z0 | Zero::Z1 | Zero::Z2 => updated * wide,
    })
}

/// Bytes of copies of parameters and gradients that a rank holds at one time, in addition to its states:
/// - ZeRO-3: gathered parameters, and gradients that are not reduced yet ([`gathered_and_unreduced`]);
/// - where only shards of gradients stay, as under ZeRO-2: gradients of one block before they are reduced;
/// - under ZeRO of DeepSpeed: buckets for gradients ([`states::bucket_elements`]);
/// - without ZeRO: the same if FSDP runs such jobs, else PyTorch's buckets, in which gradients are reduced.
pub(crate) fn in_flight(
    strategy: &Decisions,
    costs: &BlockCosts,
    largest: Largest,
    held: Weights,
) -> Bytes {
    let scenario = costs.scenario();
    let precision = scenario.workload.precision;
    let reduce = (strategy.state_types(&scenario.runtime, precision))
        .reduce
        .size();
    let runtime = &scenario.runtime;
    let buckets = states::bucket_elements(runtime, strategy) * precision.activation().size();
    let copies = match strategy.zero {
        zero if runtime.works_by_block(zero) => {
            gathered_and_unreduced(scenario, strategy, largest, held, reduce)
        }
        Zero::Z0 | Zero::Z1 if !states::frees_in_backward(runtime, strategy) => {
            Bytes(held.trained.total() * states::of_bucket(runtime, strategy, precision))
        }
        Zero::Z0 | Zero::Z1 | Zero::Z2 => Bytes(unreduced(scenario, largest, held) * reduce),
        Zero::Z3 => Bytes(0),
    };
    copies + Bytes(buckets)
}

/// Number of gradients that a rank holds whole until they are reduced: those of one block, unless the runtime lets more wait.
fn unreduced(scenario: &Scenario, largest: Largest, held: Weights) -> u64 {
    let waiting = scenario.runtime.held_whole.map(|of| {
        of.waiting(largest.layer.min(largest.reduced))
            .min(held.trained.total())
    });
    waiting.unwrap_or(0).max(largest.reduced)
}

/// Bytes that a rank needs under ZeRO-3, or FSDP over one rank, in addition to its shards, at the moment when it needs most:
/// - gathered parameters: of the block that runs and of those prefetched, or of all blocks if none is resharded after a pass. Under
///   FSDP embedding and head belong to the root module, which stays gathered from forward to backward (PyTorch `_fsdp_state.py`,
///   `_lazy_init`; FSDP1: `_runtime_utils.py`, `_post_forward_reshard`), or the embedding is freed while the head is gathered
///   ([`states::frees_embedding`]). A runtime may also gather a number of elements ahead ([`catalog::prefetch::HeldWhole`]);
/// - gradients that are not reduced yet, with `reduce` bytes for each element: of one block, or of all blocks if those of several
///   micro-batches are reduced once;
/// - 16-bit casts of parameters that are gathered in 32 bits ([`states::keeps_casts`]);
/// - under FSDP2, the gradients of a block while they are copied into the buffer that is reduced (PyTorch `_fsdp_collectives.py`,
///   `foreach_reduce`).
fn gathered_and_unreduced(
    scenario: &Scenario,
    strategy: &Decisions,
    largest: Largest,
    held: Weights,
    reduce: u64,
) -> Bytes {
    let runtime = &scenario.runtime;
    let precision = scenario.workload.precision;
    let gathered_type = states::gathered_type(runtime, precision).size();
    let layer_type = states::gathered_layer_type(runtime, precision).size();
    let reshards = match strategy.zero {
        _ if states::leaves_backward_alone(runtime, strategy) => false,
        Zero::Z3 => strategy.reshard_after_forward,
        _ => runtime.zero3_once.reshards_by_default(strategy.pp),
    };
    let accumulates = states::reduces_once(runtime, strategy) && strategy.num_micro_batches > 1;
    let (unreduced, before_copy) = match accumulates {
        true => (held.trained.total(), reduce),
        false => (self::unreduced(scenario, largest, held), gathered_type),
    };
    let gathered = if !reshards {
        let all = held.all().total();
        largest.ends * gathered_type + all.saturating_sub(largest.ends) * layer_type
    } else {
        let ahead = runtime.ahead(strategy.prefetch);
        let blocks = ahead.unwrap_or(Ahead::USUAL).blocks();
        let ends = match states::frees_embedding(scenario) {
            true => largest.larger_end,
            false => largest.ends,
        };
        let whole = held.all().total().saturating_sub(largest.ends);
        match (states::is_fsdp(runtime), runtime.held_whole) {
            (_, Some(of)) => {
                let layers = of.gathered(largest.layer).min(whole);
                largest.ends * gathered_type + layers * layer_type
            }
            (true, None) => ends * gathered_type + largest.layer * blocks * layer_type,
            (false, None) => {
                (largest.larger_end * gathered_type).max(largest.layer * layer_type) * blocks
            }
        }
    };
    let copied = match runtime.rewrites.contains(&Rewrite::CopyShards) {
        true => largest.reduced * before_copy,
        false => 0,
    };
    let casts = match states::keeps_casts(scenario, strategy) {
        true => held.trained.total() * precision.activation().size(),
        false => 0,
    };
    Bytes(gathered + unreduced * reduce + copied + casts)
}
