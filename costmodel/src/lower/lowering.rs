//! Which kernels and precisions a training system uses for the operators of a traced block.

use catalog::runtime::{AttentionKernel, Rewrite};
use catalog::{DType, Runtime};
use dtensor::{Op, OpKind, Trace};

/// Lowers traced blocks to the kernels of one training system.
#[derive(Clone, Copy, Debug)]
pub struct Lowering<'a> {
    /// The training system.
    pub runtime: &'a Runtime,
}

impl Lowering<'_> {
    /// Whether the training system changes the operators in this way, such as by fusing bias and GELU.
    #[must_use]
    pub fn has(&self, rewrite: Rewrite) -> bool {
        self.runtime.rewrites.contains(&rewrite)
    }

    /// Whether attention runs in one kernel. cuDNN and FlashAttention 3, which runtimes with
    /// `cudnn_or_flash3` call by name, take 16-bit tensors only: in 32 bits these run two products and
    /// a softmax (Transformer Engine's unfused attention). The others' calls find a kernel for 32 bits:
    /// PyTorch's `scaled_dot_product_attention` its memory-efficient one.
    #[must_use]
    pub fn fuses_attention(&self, trace: &Trace) -> bool {
        match self.runtime.attention {
            AttentionKernel::Unfused => false,
            AttentionKernel::CudnnOrFlash3 => !attends_in_32_bits(trace),
            AttentionKernel::Flash1
            | AttentionKernel::Flash2
            | AttentionKernel::Flash2TwoPass
            | AttentionKernel::CudnnElseTwoPass => true,
        }
    }

    /// The kernel that runs the attention of the module named `scope`.
    #[must_use]
    pub fn attention_kernel(&self, trace: &Trace, scope: &str) -> AttentionKernel {
        match self.runtime.attention {
            AttentionKernel::CudnnElseTwoPass => match trace.causal_attention(scope) {
                Some(_) => AttentionKernel::CudnnOrFlash3,
                None => AttentionKernel::Flash2TwoPass,
            },
            kernel => kernel,
        }
    }

    /// Whether a product keeps the 8-bit copy of its input for backward, and not the input itself.
    #[must_use]
    pub fn keeps_quantised(&self, trace: &Trace, op: &Op) -> bool {
        let grouped = matches!(op.kind, OpKind::GroupedMatmul { .. });
        self.has(Rewrite::SaveQuantisedInputs)
            && (trace.is_eight_bit(op) || grouped && self.narrows_experts(trace))
    }

    /// Whether the experts' matrix products run in 8 bits.
    #[must_use]
    pub fn narrows_experts(&self, trace: &Trace) -> bool {
        trace.eight_bits && !self.has(Rewrite::WideExperts)
    }
}

/// Whether the block's attention computes in 32 bits.
fn attends_in_32_bits(trace: &Trace) -> bool {
    let scores = |op: &&Op| matches!(op.kind, OpKind::AttentionScores(_));
    let query = trace.forward.iter().find(scores).map(|op| op.inputs[0]);
    query.is_some_and(|id| trace.tensor(id).dtype == DType::F32)
}
