//! The ways in which a runtime can be told to issue the kernels and messages of a block, and which of them take least.
//!
//! A block is traced and lowered once for all of them. Bounds of a search hold for several at once: messages to experts then
//! take as long as the cheapest dispatcher makes them, and run beside other micro-batches if any of the ways lets them.
//!
//! Overlap slows nothing as long as communication slows kernels to no less than half their speed: a
//! kernel that starts earlier then ends no later, whatever runs beside it, and a message is ready
//! no later than the kernel that is issued next.

use catalog::runtime::Rewrite;
use catalog::{CudaGraphs, Dispatcher, Fp8Recipe, Runtime, Zero};
use plans::Decisions;

use crate::streams::Slowdown;
use crate::{Scenario, known};

/// Largest time of kernels beside communication, relative to their time alone, up to which overlap
/// never makes a step slower.
pub(crate) const MONOTONE_SLOWDOWN: f64 = 2.0;

/// What a strategy decides about how a block's kernels and messages are issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Execution {
    /// Whether products are split to overlap with tensor-parallel collectives.
    pub overlap_tp: bool,
    /// Whether messages to experts run beside the passes of another micro-batch.
    pub beside_others: bool,
    /// What carries tokens to experts; `None`: the cheapest of those that the runtime offers, which
    /// only lower bounds ask for.
    pub dispatcher: Option<Dispatcher>,
    /// What CUDA graphs capture. Blocks are priced without graphs, which change only the host's
    /// time; a block's cost has that time for both.
    pub graphs: CudaGraphs,
    /// How the operands of 8-bit products are scaled.
    pub fp8_recipe: Fp8Recipe,
    /// Whether modules that run under `torch.autocast` get parameters of 16 bits. FSDP with mixed
    /// precision gathers them in 16 bits, and frozen weights of layers with adapters are held in 16
    /// bits; otherwise they have the 32 bits in which they are held.
    pub narrow_parameters: bool,
    /// Whether adapters under `torch.autocast` have 32 bits when they are computed. They are held in 32 bits, and so have them unless FSDP
    /// gathers them in 16.
    pub wide_adapters: bool,
}

impl Execution {
    /// The runtime's own way to issue blocks.
    pub(crate) fn own(runtime: &Runtime) -> Self {
        Self {
            overlap_tp: runtime.overlap.tensor_parallel,
            beside_others: runtime.overlap.expert_parallel,
            dispatcher: Some(runtime.dispatcher),
            graphs: runtime.graphs,
            fp8_recipe: runtime.fp8_recipe,
            narrow_parameters: false,
            wide_adapters: false,
        }
    }

    /// A strategy's way to issue blocks; the runtime's own values where the strategy has none.
    #[must_use]
    pub fn of(scenario: &Scenario, d: &Decisions) -> Self {
        let runtime = &scenario.runtime;
        let (gathers, adapts) = (d.zero == Zero::Z3, scenario.model.adapters.is_some());
        Self {
            overlap_tp: d.overlap.tensor_parallel,
            beside_others: d.overlap.expert_parallel,
            dispatcher: Some(d.dispatcher.unwrap_or(runtime.dispatcher)),
            graphs: d.graphs.unwrap_or(runtime.graphs),
            fp8_recipe: d.fp8_recipe.unwrap_or(runtime.fp8_recipe),
            // Frozen weights are held in 16 bits.
            narrow_parameters: narrows_parameters(runtime) && (gathers || adapts),
            wide_adapters: adapts && !(narrows_parameters(runtime) && gathers),
        }
    }

    /// The factors by which kernels take longer while messages are sent. NCCL's kernels send all messages except one kind: copy
    /// engines or a few multiprocessors send the tensor-parallel messages that matrix products are split to overlap with.
    pub(crate) fn slowdown(self, scenario: &Scenario) -> Slowdown {
        let by_nccl = scenario.slowdown_beside_nccl();
        Slowdown {
            tensor: match self.overlap_tp {
                true => by_nccl.min(known::SPLIT_SLOWDOWN.factor()),
                false => by_nccl,
            },
            others: by_nccl,
        }
    }

    /// Some ways to run blocks, for a lower bound: under any of these decisions, and with states sharded in any way, a block takes at
    /// least as long as in the fastest of these ways.
    pub(crate) fn least_of(scenario: &Scenario, among: &[Decisions]) -> Vec<Self> {
        let runtime = &scenario.runtime;
        let mut least: Vec<Self> = Vec::with_capacity(2);
        let monotone = scenario.slowdown_beside_nccl() <= MONOTONE_SLOWDOWN;
        // The more is captured, the less time the host takes.
        let graphs = among.iter().map(|d| Self::of(scenario, d).graphs).max();
        let graphs = graphs.unwrap_or(runtime.graphs);
        let of = |d: &Decisions| {
            // Adapters of 16 bits keep less and take less time.
            let execution = Self {
                graphs,
                wide_adapters: false,
                ..Self::of(scenario, d)
            };
            if !monotone {
                return execution;
            }
            let alike = among.iter().map(|d| Self::of(scenario, d));
            let mut alike = alike.filter(|other| {
                (other.overlap_tp, other.fp8_recipe) == (execution.overlap_tp, execution.fp8_recipe)
            });
            let one = alike
                .clone()
                .all(|other| other.dispatcher == execution.dispatcher);
            Self {
                beside_others: alike.any(|other| other.beside_others),
                dispatcher: execution.dispatcher.filter(|_| one),
                ..execution
            }
        };
        let parameters: &[bool] = match narrows_parameters(runtime) {
            true => &[false, true],
            false => &[false],
        };
        for execution in among.iter().map(of) {
            for &narrow_parameters in parameters {
                let execution = Self {
                    narrow_parameters,
                    ..execution
                };
                if !least.contains(&execution) {
                    least.push(execution);
                }
            }
        }
        least
    }
}

/// Whether a runtime uses `torch.autocast` and, where FSDP shards parameters, gathers them in 16 bits
/// (`MixedPrecision(param_dtype=torch.bfloat16)`).
fn narrows_parameters(runtime: &Runtime) -> bool {
    let has = |rewrite| runtime.rewrites.contains(&rewrite);
    has(Rewrite::Autocast) && !has(Rewrite::GatherHeldType)
}
