//! Time that the host takes to issue the kernels and messages of a block.

use catalog::runtime::Rewrite;
use catalog::{Axis, Dispatcher, Seconds};
use dtensor::{Exchange, Moves, Operator, Pass};

use super::block_times::{Timed, is_weight_gradient};
use super::uncaptured::Uncaptured;
use crate::known;
use crate::lower::{Kernel, KernelKind, casts};

/// Launches with which ranks tell each other how many rows each expert gets, and with which the host reads these numbers.
#[derive(Clone, Copy, Default)]
struct CountLaunches {
    /// Kernels, with the message between ranks.
    kernels: u64,
    /// Copies to the host, which no CUDA graph of a layer captures.
    copies: u64,
}

/// A message, and the sums of rows that each rank sends and receives (torchtitan@b5bcd76, `models/common/token_dispatcher.py`,
/// `_sync_token_count_exchange`).
const COUNTS: CountLaunches = CountLaunches {
    kernels: 3,
    copies: 2,
};

/// The same where products of experts are launched apart, so that the host needs the sizes of each expert's product too: all ranks
/// gather the numbers for all experts (NVIDIA/Megatron-LM@d98e8a6, `core/transformer/moe/token_dispatcher.py`, `preprocess` and
/// `_maybe_dtoh_and_synchronize` of `MoEAlltoAllTokenDispatcher`).
const COUNTS_OF_EXPERTS: CountLaunches = CountLaunches {
    kernels: 7,
    copies: 4,
};

impl Timed<'_> {
    /// Time that the host takes to issue a kernel.
    pub(super) fn host(&self, kernel: &Kernel) -> Seconds {
        let launches = match kernel.kind {
            KernelKind::GroupedGemm {
                groups,
                low_precision,
                ..
            } if self.of.lowering.has(Rewrite::LaunchExpertsApart) => {
                return self.launch() + self.by_experts(kernel, low_precision) * groups as f64;
            }
            KernelKind::GroupedGemm { .. } => 1,
            KernelKind::Comm(_) => {
                let CountLaunches { kernels, copies } = self.counts(kernel);
                1 + u64::from(self.sends_weights(kernel)) + kernels + copies
            }
            KernelKind::Memory { launches, .. } => {
                let sorts = self.orders_rows(kernel) && self.sorts_again();
                u64::from(launches) + u64::from(sorts)
            }
            KernelKind::Scan(sizes) => {
                let backward = kernel.pass != Pass::Forward;
                u64::from(sizes.work(self.precision().activation(), backward).kernels)
            }
            _ => 1,
        };
        self.launch() * launches as f64 + self.by_dtensor(kernel)
    }

    /// The same if CUDA graphs capture layers: only messages, and kernels that no graph captures, are issued one by one.
    pub(super) fn graphed(&self, kernel: &Kernel, uncaptured: &Uncaptured) -> Seconds {
        let captured = match kernel.kind {
            KernelKind::Comm(_) => self.counts(kernel).kernels,
            _ if uncaptured.has(kernel) => 0,
            KernelKind::Memory { .. } if self.orders_rows(kernel) => {
                let padded = self.of.lowering.pads_experts(self.of.trace);
                let outside = u64::from(self.sorts_again()) + u64::from(padded);
                return self.launch() * outside as f64;
            }
            _ => return Seconds(0.0),
        };
        self.host(kernel) - self.launch() * captured as f64
    }

    /// Time that the host takes to issue a message to experts once it knows how many rows each of them gets.
    pub(super) fn after_counts(&self, kernel: &Kernel) -> Seconds {
        let CountLaunches { kernels, copies } = self.counts(kernel);
        self.host(kernel) - self.launch() * (kernels + copies) as f64
    }

    /// Launches for the numbers of rows, all of them beside the message that sends tokens to experts.
    fn counts(&self, kernel: &Kernel) -> CountLaunches {
        let lowering = &self.of.lowering;
        let all_to_all = self.of.key.execution.dispatcher == Some(Dispatcher::AllToAll);
        if !all_to_all || !self.tells_counts(kernel) {
            return CountLaunches::default();
        }
        match lowering.has(Rewrite::LaunchExpertsApart) {
            true => COUNTS_OF_EXPERTS,
            false => COUNTS,
        }
    }

    /// Whether a message sends tokens to experts after ranks have told each other how many.
    pub(super) fn tells_counts(&self, kernel: &Kernel) -> bool {
        kernel.pass == Pass::Forward
            && self.moves(kernel) == Some(Moves::Dispatch)
            && self.of.lowering.has(Rewrite::ReadTokenCounts)
    }

    /// Whether a second all-to-all sends the router's weights in addition to the rows, or their
    /// gradients back.
    pub(super) fn sends_weights(&self, kernel: &Kernel) -> bool {
        self.of.key.execution.dispatcher == Some(Dispatcher::AllToAll)
            && self.brings_tokens(kernel)
            && self.of.lowering.has(Rewrite::WeightActivations)
    }

    /// Whether a message brings tokens to their experts, or in backward the gradients of these tokens back.
    pub(super) fn brings_tokens(&self, kernel: &Kernel) -> bool {
        let direction = match kernel.pass {
            Pass::Forward => Moves::Dispatch,
            Pass::BackwardInput | Pass::BackwardWeight => Moves::Combine,
        };
        self.moves(kernel) == Some(direction)
    }

    /// What a message between expert-parallel ranks moves; `None` for other kernels and messages.
    fn moves(&self, kernel: &Kernel) -> Option<Moves> {
        match self.of.trace.op(kernel.pass, kernel.op).operator {
            Operator::Exchange(Exchange { moves, collective }) if collective.axis == Axis::Ep => {
                Some(moves)
            }
            _ => None,
        }
    }

    /// Host time of DTensor for a product under tensor parallelism. Backward is charged once, with the product for the input's
    /// gradient.
    fn by_dtensor(&self, kernel: &Kernel) -> Seconds {
        let product = matches!(kernel.kind, KernelKind::Gemm { .. });
        let split = self.of.key.layout.tp > 1 && kernel.pass != Pass::BackwardWeight;
        if !(product && split) {
            return Seconds(0.0);
        }
        let scenario = &self.of.scenario;
        scenario.by_host(&scenario.runtime.overheads.parallel_linear)
    }

    /// Time that the host takes to launch one kernel.
    fn launch(&self) -> Seconds {
        let scenario = &self.of.scenario;
        scenario.by_host(&scenario.runtime.overheads.launch)
    }

    /// Time that the host takes for each expert in a grouped product, in addition to the launch
    /// from Python that all experts share: Python handles the expert's tensors, C++ launches the
    /// product and the casts of the expert's rows to 8 bits, and Python hands the gradient of the
    /// weight to data parallelism.
    fn by_experts(&self, kernel: &Kernel, eight_bits: bool) -> Seconds {
        let product = known::PRODUCT_OF_EXPERT.seconds()
            + self.launch() * known::CALLS_PER_EXPERT_PRODUCT.factor();
        if is_weight_gradient(kernel) {
            return product + self.launch() * known::CALLS_PER_EXPERT_GRADIENT.factor();
        }
        let casts = match eight_bits {
            true => casts::kernels_per_expert(self.of.lowering.fp8_recipe),
            false => 0,
        };
        product + known::CAST_OF_EXPERT.seconds() * f64::from(casts)
    }
}
