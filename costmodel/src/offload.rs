//! What a strategy keeps in host memory: how many bytes leave the device, what the copies take, and how long the host's
//! processors update weights.
//!
//! The host holds for every weight that it updates its master parameter, gradient and both moments, in 32 bits. Its
//! optimizer reads all four and writes all but the gradient. Gradients that reach the host during backward are clipped there before the
//! update, and a parameter that returns in fewer bits than its master weight is cast there after it, each by a pass of its own over
//! memory. Gradients travel in 32 bits, as the host's optimizer reads them. Where the device adds up the gradients of several micro-batches, the host holds their sum in their own type too, and
//! the sum travels in this type between micro-batches. Copies run on streams of their own, one for each direction; the devices
//! of a node share the bandwidth of its memory.

use catalog::runtime::Rewrite;
use catalog::state_types::StateTypes;
use catalog::{Bytes, DType, Offload, OffloadKind, OffloadOption, Precision, Seconds, Zero};
use derive_more::{Add, AddAssign, Mul};
use plans::{Decisions, HostMemory};

use crate::clipping;
use crate::known;
use crate::states::{self, Sharding, StateBytes, Weights};
use crate::{CostError, Scenario};

/// More than rounding to whole picoseconds adds to the times of an update.
pub(crate) const ROUNDING: Seconds = Seconds(1e-11);

/// Which of a rank's states are in host memory, and how the runtime keeps them there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offloaded {
    offload: Offload,
    option: OffloadOption,
    zero: Zero,
    /// Whether the rank holds a shard of the gradients rather than all.
    shards_gradients: bool,
    /// Number of micro-batches whose gradients are added up.
    micro_batches: u64,
    types: StateTypes,
    precision: Precision,
}

/// Times of the host's work for a rank in the optimizer step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostStep {
    /// Time for which the device still copies gradients to the buffers in which they are reduced, before the host's part begins.
    pub copies: Seconds,
    /// Time to copy to the host the gradients that were not copied during backward.
    pub to_host: Seconds,
    /// Time in which the host updates weights.
    pub update: Seconds,
    /// Time to copy updated parameters to the device.
    pub from_host: Seconds,
}

impl HostStep {
    /// Time of all parts, which run one after the other.
    pub(crate) fn total(&self) -> Seconds {
        self.copies + self.to_host + self.update + self.from_host
    }
}

/// Times of a block's copies between device and host, each time that its parameters are gathered and its gradients reduced.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Copies {
    /// Time to copy its gradients to the host and, where the host adds them up, to do so; where the device adds them up, time to copy
    /// the sum of earlier micro-batches to the device and the new sum to the host.
    pub to_host: GradientCopies,
    /// Time to copy its parameters from the host.
    pub from_host: Seconds,
}

/// Times of the copies of gradients, by the micro-batches in which they are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Add, AddAssign, Mul)]
pub struct GradientCopies {
    /// Time in every micro-batch.
    pub always: Seconds,
    /// Additional time in every micro-batch but the first.
    pub again: Seconds,
    /// Additional time in the last micro-batch.
    pub at_last: Seconds,
}

impl Offloaded {
    /// What a strategy keeps in host memory; `None` if that is nothing.
    pub(crate) fn of(scenario: &Scenario, d: &Decisions) -> Option<Self> {
        Self::new(scenario, d, d.offload?)
    }

    fn new(scenario: &Scenario, d: &Decisions, offload: Offload) -> Option<Self> {
        let precision = scenario.workload.precision;
        Some(Self {
            offload,
            option: *scenario.runtime.offload_option(offload, d.zero)?,
            zero: d.zero,
            shards_gradients: d.zero >= Zero::Z2 || states::frees_in_backward(&scenario.runtime, d),
            micro_batches: d.num_micro_batches,
            types: d.state_types(&scenario.runtime, precision),
            precision,
        })
    }

    /// Element type of parameters.
    fn parameter(self) -> DType {
        states::parameter_type(&self.types, self.precision)
    }

    /// Bytes of `elements` frozen elements.
    fn frozen(self, elements: u64) -> u64 {
        elements * self.precision.activation().size()
    }

    /// The part of a rank's states that stays on its device.
    pub(crate) fn on_device(self, states: StateBytes) -> StateBytes {
        let gone = self.option.gradients_in_backward && self.shards_gradients;
        StateBytes {
            parameters: match self.offload {
                Offload::Parameters => Bytes(0),
                Offload::Optimizer(_) => states.parameters,
            },
            gradients: if gone {
                self.left(states.gradients)
            } else {
                states.gradients
            },
            master: self.left(states.master),
            moments: self.left(states.moments),
            copies: states.copies,
        }
    }

    /// Bytes that a rank's states take in host memory.
    pub(crate) fn on_host(self, weights: Weights, sharding: &Sharding) -> Bytes {
        let updated = self.moved(sharding.updated(weights.trained));
        let states = updated * (4 * host_number() + self.sum_of_gradients());
        let frozen = match self.offload {
            Offload::Parameters => self.frozen(sharding.shard(weights.frozen)),
            Offload::Optimizer(_) => 0,
        };
        Bytes(states + updated * self.copy_of_parameter() + frozen)
    }

    /// Bytes of a parameter that the host holds beside its master weight, to compute from or to return: all parameters where they are
    /// offloaded, and casts of the updated ones under ZeRO-1 and 2 (DeepSpeed 0.19, `zero/stage_1_and_2.py`,
    /// `param_buffer_of_bit16_for_cpu_offload_groups`). ZeRO-3 frees such casts at once.
    fn copy_of_parameter(self) -> u64 {
        let held = match self.offload {
            Offload::Parameters => self.types.master.is_some(),
            Offload::Optimizer(_) => self.zero < Zero::Z3 && self.casts(),
        };
        u64::from(held) * self.parameter().size()
    }

    /// Element type in which updated parameters come back to the device.
    fn returned(self) -> DType {
        self.option.returned.unwrap_or(self.parameter())
    }

    /// Whether the host casts updated master weights to the parameters that the device computes from.
    fn casts(self) -> bool {
        (self.types.master).is_some_and(|master| master != self.returned())
    }

    /// The part of the bytes of gradients that the device reads or writes to clip them.
    pub(crate) fn clipped_by_device(self, gradients: Bytes) -> Bytes {
        match self.option.gradients_in_backward {
            true => self.left(gradients),
            false => gradients,
        }
    }

    /// Bytes of host memory that a step reads and writes for an element beside the optimizer. Gradients are read to find their norm, then
    /// read and written to multiply them (PyTorch's `clip_grad_norm_`); DeepSpeed finds the norm on the device, during backward. Then
    /// updated weights are read and their casts written. (DeepSpeed 0.19: `unscale_and_clip_grads` in `zero/stage_1_and_2.py` and
    /// `zero/stage3.py`; `bit16_partition_buffer` and `_reassign_or_swap_out_partitioned_parameters`.)
    fn beside_optimizer(self, scenario: &Scenario) -> u64 {
        let on_device = u64::from(states::is_deepspeed(&scenario.runtime));
        let passes = match self.option.gradients_in_backward {
            true => clipping::passes(scenario) - on_device,
            false => 0,
        };
        let cast = match self.casts() {
            true => host_number() + self.returned().size(),
            false => 0,
        };
        passes * host_number() + cast
    }

    /// The part of `bytes` that belongs to weights which the device updates.
    pub(crate) fn left(self, bytes: Bytes) -> Bytes {
        bytes - Bytes(self.moved(bytes.0))
    }

    /// Whether the device waits for the host to add gradients of several micro-batches.
    pub(crate) fn accumulation_waits(self) -> bool {
        self.option.accumulation_waits
    }

    /// Whether gradients are copied on the stream that reduces them.
    pub(crate) fn copies_on_reducing_stream(self) -> bool {
        self.option.device_adds_gradients
    }

    /// Bytes of an element of the sum of gradients that the device makes and the host holds from one micro-batch to the next; 0 if there
    /// is none. ZeRO-3 holds it even for a single micro-batch.
    fn sum_of_gradients(self) -> u64 {
        match self.zero {
            _ if !self.option.device_adds_gradients => 0,
            Zero::Z3 => states::gradient_type(&self.types, self.precision).size(),
            _ if self.micro_batches == 1 => 0,
            Zero::Z0 | Zero::Z1 | Zero::Z2 => self.parameter().size(),
        }
    }

    /// Times to copy `updated` gradients to the host, and their sums back. ZeRO-3 reads sums back
    /// even in the first micro-batch (DeepSpeed `zero/stage3.py`, `partition_grads`). At other
    /// levels a sum is copied to the device when the next micro-batch adds to it
    /// (`zero/stage_1_and_2.py`, `async_accumulate_grad_in_cpu_via_gpu`).
    fn gradient_copies(self, rates: &Rates, updated: u64) -> GradientCopies {
        let none = Seconds(0.0);
        let wide = rates.copy(updated * host_number());
        if !self.option.device_adds_gradients {
            let added = match self.option.accumulation_waits {
                true => rates.sum(updated),
                false => none,
            };
            return GradientCopies {
                always: wide + added,
                ..GradientCopies::default()
            };
        }
        let sum = rates.copy(updated * self.sum_of_gradients());
        let [always, again] = match self.zero {
            Zero::Z3 => [sum + sum, none],
            Zero::Z0 | Zero::Z1 | Zero::Z2 => [sum, sum],
        };
        GradientCopies {
            always,
            again,
            at_last: wide,
        }
    }

    /// Times of a block's copies to and from the host, which run beside its gathers and reductions.
    ///
    /// # Errors
    /// When the cluster's file does not describe the host.
    pub(crate) fn copies(
        self,
        scenario: &Scenario,
        sharding: &Sharding,
        block: Weights,
    ) -> Result<Copies, CostError> {
        let rates = Rates::of(scenario)?;
        let mut copies = Copies::default();
        if self.option.gradients_in_backward {
            let updated = self.moved(sharding.shard(block.trained));
            copies.to_host = self.gradient_copies(&rates, updated);
        }
        if self.offload == Offload::Parameters {
            let trained = sharding.shard(block.trained) * self.parameter().size();
            let frozen = self.frozen(sharding.shard(block.frozen));
            copies.from_host = rates.copy(trained + frozen);
        }
        Ok(copies)
    }

    /// What the host does in the optimizer step of a rank that holds `weights`.
    ///
    /// # Errors
    /// When the cluster's host is not known.
    pub(crate) fn step(
        self,
        scenario: &Scenario,
        sharding: &Sharding,
        weights: Weights,
    ) -> Result<HostStep, CostError> {
        let rates = Rates::of(scenario)?;
        let updated = self.moved(sharding.updated(weights.trained));
        let beside = Bytes(updated * self.beside_optimizer(scenario));
        let none = Seconds(0.0);
        Ok(HostStep {
            copies: none,
            to_host: match self.option.gradients_in_backward {
                true => none,
                false => rates.copy(updated * host_number()),
            },
            update: rates.update(updated) + rates.pass(beside),
            from_host: match self.offload {
                // They are copied for every pass instead.
                Offload::Parameters => none,
                Offload::Optimizer(_) => rates.copy(updated * self.returned().size()),
            },
        })
    }

    fn moved(self, whole: u64) -> u64 {
        let percent = self.offload.percent();
        whole / 100 * percent + whole % 100 * percent / 100
    }
}

/// Bytes of each kind of state that a rank holds on its device under a strategy.
#[must_use]
pub(crate) fn states_on_device(
    scenario: &Scenario,
    d: &Decisions,
    sharding: &Sharding,
    weights: Weights,
) -> StateBytes {
    let types = d.state_types(&scenario.runtime, scenario.workload.precision);
    let mut states = sharding.states(weights, &types, scenario.workload.precision);
    if states::frees_in_backward(&scenario.runtime, d) {
        let gradient = states::gradient_type(&types, scenario.workload.precision);
        states.gradients = Bytes(sharding.shard(weights.trained) * gradient.size());
    }
    Offloaded::of(scenario, d).map_or(states, |host| host.on_device(states))
}

/// Least bytes that a model's states take on devices, unsharded, whatever part is in host memory.
/// Under every strategy the fullest device holds at least an equal share.
///
/// # Errors
/// When the model cannot be traced.
pub fn least_states(scenario: &Scenario) -> Result<Bytes, CostError> {
    let weights = states::weights(scenario)?;
    let alone = Sharding {
        zero: Zero::Z3,
        dense: 1,
        expert: 1,
    };
    let (runtime, precision) = (&scenario.runtime, scenario.workload.precision);
    let options = (runtime.space.offload.iter()).filter(|_| scenario.cluster.has_hosts());
    let of_types = |types: StateTypes| {
        let states = alone.states(weights, &types, precision);
        let offloads = options.clone().map(|&option| Offloaded {
            offload: match option.states {
                OffloadKind::Optimizer => Offload::Optimizer(100),
                OffloadKind::Parameters => Offload::Parameters,
            },
            option,
            zero: alone.zero,
            shards_gradients: true,
            micro_batches: 1,
            types,
            precision,
        });
        let on_device = offloads.map(|host| host.on_device(states).total());
        on_device.fold(states.total(), Bytes::min)
    };
    let types = states::smallest_types(runtime, precision).into_iter();
    Ok(types.map(of_types).min().unwrap_or_default())
}

/// The host's part in the optimizer step of a rank that holds `weights`, with these states in host
/// memory; zero without any.
///
/// # Errors
/// When the cluster's host is not known.
pub(crate) fn step(
    scenario: &Scenario,
    d: &Decisions,
    offload: Option<Offload>,
    sharding: &Sharding,
    weights: Weights,
) -> Result<HostStep, CostError> {
    let offloaded = offload.and_then(|of| Offloaded::new(scenario, d, of));
    offloaded.map_or(Ok(HostStep::default()), |host| {
        host.step(scenario, sharding, weights)
    })
}

/// Whether a strategy keeps more in host memory than a node has, if `ranks` ranks together hold at
/// least these weights.
pub(crate) fn overfills_host(
    scenario: &Scenario,
    d: &Decisions,
    sharding: &Sharding,
    weights: Weights,
    ranks: u64,
) -> bool {
    Offloaded::of(scenario, d).is_some_and(|host| {
        let together = host.on_host(weights, sharding);
        !host_memory(scenario, &[Bytes(together.0 / ranks)]).fits()
    })
}

/// Host memory that pipeline ranks, with `on_host` bytes each, take of a node: in the pool whose
/// hosts they fill most. `pools` are the pools' scenarios, `pool_of_rank` is the pool of each rank.
pub(crate) fn on_fullest_host<'s>(
    pools: impl Iterator<Item = &'s Scenario>,
    pool_of_rank: &[usize],
    on_host: &[Bytes],
) -> HostMemory {
    let of_pool = |(pool, scenario)| {
        let ranks = pool_of_rank.iter().zip(on_host);
        let own: Vec<Bytes> = ranks
            .filter(|(of, _)| **of == pool)
            .map(|(_, b)| *b)
            .collect();
        host_memory(scenario, &own)
    };
    let share = |memory: &HostMemory| {
        let there = memory.there.map_or(f64::INFINITY, Bytes::as_f64);
        memory.used.as_f64() / there
    };
    let all = pools.enumerate().map(of_pool);
    all.reduce(|a, b| if share(&b) > share(&a) { b } else { a })
        .unwrap_or_default()
}

/// Host memory of a node that ranks with these bytes take, if all its GPUs are like the fullest.
fn host_memory(scenario: &Scenario, on_host: &[Bytes]) -> HostMemory {
    let cluster = &scenario.cluster;
    let fullest = on_host.iter().copied().max().unwrap_or_default();
    let host = cluster.host.as_ref();
    HostMemory {
        used: fullest * cluster.gpus_per_node.min(scenario.workload.gpus),
        there: host.and_then(|host| host.memory.as_ref().map(|memory| memory.value)),
    }
}

/// Bytes of a number that the host computes with.
fn host_number() -> u64 {
    DType::F32.size()
}

/// Time to copy these bytes of activations between device and host.
///
/// # Errors
/// When the cluster's host is not known.
pub(crate) fn copy(scenario: &Scenario, bytes: Bytes) -> Result<Seconds, CostError> {
    Ok(Rates::of(scenario)?.copy(bytes.0))
}

/// Rates at which one rank can use its host.
#[derive(Clone, Copy, Debug)]
struct Rates {
    /// Bytes per second of a copy in one direction.
    link: f64,
    /// Bytes per second of host memory.
    memory: f64,
    /// Bytes of host memory per second that the CPU optimizer achieves.
    optimizer: f64,
}

impl Rates {
    fn of(scenario: &Scenario) -> Result<Self, CostError> {
        let cluster = &scenario.cluster;
        let host = cluster.host.as_ref().ok_or_else(|| CostError::NoHost {
            cluster: cluster.name.clone(),
        })?;
        let sharers = cluster.gpus_per_node.min(scenario.workload.gpus) as f64;
        let memory = host.memory_bandwidth.value.0 / sharers;
        let fused = scenario.runtime.rewrites.contains(&Rewrite::FusedOptimizer);
        let reached = if fused {
            known::HOST_OPTIMIZER
        } else {
            known::UNFUSED_HOST_OPTIMIZER
        };
        Ok(Self {
            link: (host.link.value.0 * known::HOST_COPY.factor()).min(memory),
            memory,
            optimizer: memory * reached.factor(),
        })
    }

    fn copy(self, bytes: u64) -> Seconds {
        Seconds(bytes as f64 / self.link)
    }

    /// Adds gradients to those that the host holds: reads both terms, and writes the sum.
    fn sum(self, elements: u64) -> Seconds {
        self.pass(Bytes(elements * 3 * host_number()))
    }

    /// Reads and writes so many bytes of host memory.
    fn pass(self, bytes: Bytes) -> Seconds {
        Seconds(bytes.as_f64() / self.memory)
    }

    /// Updates weights: reads gradient, parameter and moments, and writes all but the gradient.
    fn update(self, elements: u64) -> Seconds {
        Seconds((elements * 7 * host_number()) as f64 / self.optimizer)
    }
}

#[cfg(test)]
mod tests {
    use catalog::WorkloadSizes;

    use super::*;
    use crate::testing;

    /// Bytes that the host reads and writes for a weight in the step, beside the 28 of its optimizer.
    #[test]
    fn a_host_clips_gradients_and_casts_parameters() {
        let on_zero2 = "dp8 zero2 offload=optimizer";
        let on_zero3 = "dp8 zero3 offload=parameters";
        for (runtime, text, precision, bytes) in [
            // DeepSpeed multiplies a gradient, which is read and written, and casts a parameter from 4 bytes to 2.
            ("deepspeed", on_zero2, Precision::Bf16, 2 * 4 + 4 + 2),
            ("deepspeed", on_zero2, Precision::Fp16, 2 * 4 + 4 + 2),
            ("deepspeed", on_zero3, Precision::Bf16, 2 * 4 + 4 + 2),
            // The norm is found on the host too, which has no other copy of parameters.
            ("fsdp2", on_zero3, Precision::Bf16, 3 * 4),
            ("fsdp2", on_zero3, Precision::Fp16, 5 * 4),
            // Gradients are clipped before they leave, and parameters return in 32 bits.
            (
                "megatron-core",
                "dp8 zero1 offload=optimizer",
                Precision::Bf16,
                0,
            ),
        ] {
            let sizes = WorkloadSizes {
                gpus: 8,
                seq_len: 1024,
                global_batch: 8,
                precision,
            };
            let scenario = testing::scenario(["gpt2", "dgx-a100", runtime], sizes);
            let strategy = testing::strategy(&scenario, text);
            let offloaded = Offloaded::of(&scenario, &strategy).expect("states on the host");
            let found = offloaded.beside_optimizer(&scenario);
            assert_eq!(found, bytes, "{runtime}, {text}, {precision:?}");
        }
    }
}
