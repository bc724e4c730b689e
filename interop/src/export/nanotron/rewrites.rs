//! How nanotron stands to each rewrite that a prediction may assume.

use catalog::Zero;
use catalog::runtime::Rewrite;

use crate::export::assumptions::Stance;
use crate::export::job::Job;
use plans::decisions::Recompute;

/// How nanotron stands to one rewrite.
pub(super) fn stance(rewrite: Rewrite, job: &Job<'_>) -> Stance {
    let (d, model) = (job.decisions, job.model);
    let only = |here: bool, stance: Stance| if here { stance } else { Stance::Absent };
    match rewrite {
        Rewrite::FuseProjections => {
            Stance::Always("qkv_proj and gate_up_proj are one product each")
        }
        Rewrite::FuseNorm => Stance::Always("its norms are Triton kernels"),
        Rewrite::FusedOptimizer => Stance::Always("the file asks for a fused Adam"),
        Rewrite::AccumulateGradients => Stance::Always("gradients are added to 32-bit buffers"),
        Rewrite::FuseRope => Stance::Always("flash-attention's kernel rotates queries and keys"),
        Rewrite::FuseSwiglu => only(
            model.mlp.gated,
            Stance::Never("gate and product are operators"),
        ),
        Rewrite::InPlaceCrossEntropy => Stance::Always("its sharded cross-entropy works in place"),
        Rewrite::FuseCrossEntropy => Stance::Never("its loss reads a 32-bit copy of the logits"),
        Rewrite::FuseGradientAccumulation => Stance::Never("gradients are added by a hook"),
        Rewrite::FusePermute => only(
            model.moe.is_some(),
            Stance::Always("grouped_gemm's kernel orders the tokens"),
        ),
        Rewrite::AsyncTensorParallelBackward | Rewrite::RegatherSequenceParallelInput => only(
            d.tp > 1 && !d.overlap.tensor_parallel,
            Stance::Never("tensor parallelism waits for its collectives"),
        ),
        Rewrite::EarlyStopRecompute => only(
            d.recompute == Recompute::Full,
            Stance::Never("its checkpoints run the whole layer again"),
        ),
        Rewrite::KeepStageOutput | Rewrite::ScatterGatherTransfer => only(
            d.pp > 1,
            Stance::Never("stages send whole activations and free their outputs"),
        ),
        Rewrite::AllReduceGradients | Rewrite::CopyGradientsForStep => only(
            d.zero == Zero::Z1,
            Stance::Never("gradients are reduced to the rank that updates them"),
        ),
        Rewrite::FusePointwise | Rewrite::CudaGraph => Stance::Never("it runs eager PyTorch"),
        Rewrite::FlattenGradients | Rewrite::CopyShards | Rewrite::GatherTensorByTensor => {
            Stance::Never("states lie in one buffer")
        }
        Rewrite::NormInF32 => Stance::Never("norms keep their 16-bit inputs"),
        Rewrite::KeepRowIndices => only(
            model.moe.is_some(),
            Stance::Never("the router keeps one order of rows"),
        ),
        // Its models have no biases to fuse, its attention no scores, and it does not train in 8 bits or choose operators.
        Rewrite::FuseBiasGelu
        | Rewrite::FuseBiasDropoutAdd
        | Rewrite::FuseScaledMaskedSoftmax
        | Rewrite::FuseBiasEpilogue
        | Rewrite::FuseGeluEpilogue
        | Rewrite::SaveQuantisedInputs
        | Rewrite::GatherQuantised
        | Rewrite::ScaleDynamically
        | Rewrite::WideExperts
        | Rewrite::RowwiseScaling
        | Rewrite::KeepAttentionProjections
        | Rewrite::KeepOutputProjection
        | Rewrite::KeepSelected => Stance::Absent,
    }
}
