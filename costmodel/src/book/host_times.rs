//! Time that the host takes to issue the kernels and messages of a block.

use catalog::runtime::Rewrite;
use catalog::Seconds;
use dtensor::Pass;

use super::block_times::{Timed, is_weight_gradient};
use super::uncaptured::Uncaptured;
use crate::known;
use crate::lower::{Kernel, KernelKind, casts};

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
        match kernel.kind {
            KernelKind::Comm(_) => self.host(kernel),
            _ if uncaptured.has(kernel) => self.host(kernel),
            KernelKind::Memory { .. } if self.orders_rows(kernel) => {
                let padded = self.of.lowering.pads_experts(self.of.trace);
                let outside = u64::from(self.sorts_again()) + u64::from(padded);
                self.launch() * outside as f64
            }
            _ => Seconds(0.0),
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

    /// Time that the host takes for each expert in a grouped product, beside the launch from Python that all experts share: C++ launches
    /// the product and the casts of the expert's rows to 8 bits, and Python hands the gradient of the weight to data parallelism.
    fn by_experts(&self, kernel: &Kernel, eight_bits: bool) -> Seconds {
        let of_cpp = known::KERNEL_OF_EXPERT.seconds();
        if is_weight_gradient(kernel) {
            return of_cpp + self.launch() * known::CALLS_PER_EXPERT_GRADIENT.factor();
        }
        let casts = match eight_bits {
            true => casts::kernels_per_expert(self.of.lowering.fp8_recipe),
            false => 0,
        };
        of_cpp * f64::from(1 + casts)
    }
}
