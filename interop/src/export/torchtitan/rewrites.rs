//! How torchtitan stands to each rewrite that a prediction may assume.

use catalog::runtime::Rewrite;
use catalog::{Precision, Zero};

use crate::export::assumptions::{Stance, unmet};
use crate::export::job::Job;
use crate::export::refusal::Limits;
use plans::decisions::Recompute;

/// Collects what torchtitan does otherwise than the prediction assumed.
pub(super) fn collect(job: &Job<'_>, limits: &mut Limits) {
    limits.unmet = unmet(&job.runtime.rewrites, |rewrite| stance(rewrite, job));
}

fn stance(rewrite: Rewrite, job: &Job<'_>) -> Stance {
    let (d, model) = (job.decisions, job.model);
    let fp8 = job.workload.precision == Precision::Fp8;
    let compiled = job.runtime.rewrites.contains(&Rewrite::FusePointwise);
    let only = |here: bool, stance: Stance| if here { stance } else { Stance::Absent };
    let eager = |here: bool, why| only(here && !compiled, Stance::Never(why));
    let recomputes = !matches!(d.recompute, Recompute::None | Recompute::Layers(0));
    let chosen = d.recompute == Recompute::SelectiveOps;
    match rewrite {
        // By the `compile` section.
        Rewrite::FusePointwise | Rewrite::FuseCrossEntropy => Stance::Written,
        // By `training.disable_cuda_graphs`, where they are possible.
        Rewrite::CudaGraph => only(
            d.pp > 1 || d.ep > 1,
            Stance::Never("CUDA graphs exclude pipelines and this dispatch of experts"),
        ),
        Rewrite::FusedOptimizer => Stance::Always("its AdamW is fused"),
        Rewrite::FuseProjections => Stance::Always("queries, keys and values are one product"),
        Rewrite::CopyShards => only(
            d.zero == Zero::Z3,
            Stance::Always("fully_shard copies into and out of its buffers"),
        ),
        Rewrite::EarlyStopRecompute => only(
            recomputes,
            Stance::Always("PyTorch's checkpoints stop early"),
        ),
        Rewrite::KeepSelected => only(
            chosen,
            Stance::Always("selective checkpointing keeps the outputs of its products"),
        ),
        Rewrite::FuseBiasEpilogue => only(
            model.attention.qkv_bias,
            Stance::Always("biases are added inside the product"),
        ),
        Rewrite::GatherQuantised => only(
            fp8 && d.tp > 1,
            Stance::Always("Float8 tensor parallelism gathers 8-bit values"),
        ),
        Rewrite::ScaleDynamically => {
            only(fp8, Stance::Always("tensorwise scales are of this moment"))
        }
        Rewrite::WideExperts => only(
            fp8 && model.moe.is_some(),
            Stance::Always("only linear layers are converted to 8 bits"),
        ),
        Rewrite::RowwiseScaling => only(fp8, Stance::Never("the file asks for tensorwise scales")),
        Rewrite::SaveQuantisedInputs => {
            only(fp8, Stance::Never("8-bit linears keep their 16-bit inputs"))
        }
        Rewrite::FuseSwiglu => eager(model.mlp.gated, "eager PyTorch has no kernel for it"),
        Rewrite::FuseNorm => eager(true, "eager PyTorch has one kernel per operator"),
        Rewrite::FuseRope => eager(true, "rotation is made of pointwise operators"),
        Rewrite::FusePermute => eager(
            model.moe.is_some(),
            "ordering of tokens is made of operators",
        ),
        Rewrite::FuseBiasGelu | Rewrite::FuseBiasDropoutAdd => only(
            model.mlp.bias,
            Stance::Never("it has no kernel for biases and what follows"),
        ),
        Rewrite::FuseGeluEpilogue => {
            only(model.mlp.bias, Stance::Never("no GELU is in its models"))
        }
        Rewrite::FuseScaledMaskedSoftmax => Stance::Absent,
        Rewrite::InPlaceCrossEntropy => only(
            !job.runtime.rewrites.contains(&Rewrite::FuseCrossEntropy),
            Stance::Never("its loss makes a 32-bit copy of the logits"),
        ),
        Rewrite::FuseGradientAccumulation | Rewrite::AccumulateGradients => {
            Stance::Never("gradients are sharded as soon as they are made")
        }
        Rewrite::KeepStageOutput => only(
            d.pp > 1,
            Stance::Never("outputs of stages are freed when sent"),
        ),
        Rewrite::ScatterGatherTransfer => only(
            d.pp > 1 && d.tp > 1 && !d.sequence_parallel,
            Stance::Never("whole activations are sent between stages"),
        ),
        Rewrite::FlattenGradients => Stance::Never("fully_shard has no flat parameters"),
        Rewrite::AllReduceGradients => only(
            d.zero == Zero::Z1,
            Stance::Never("gradients are reduced by reduce-scatter"),
        ),
        Rewrite::GatherTensorByTensor => only(
            d.zero == Zero::Z3,
            Stance::Never("parameters are gathered layer by layer"),
        ),
        Rewrite::CopyGradientsForStep => Stance::Never("gradients are in 32 bits already"),
        Rewrite::RegatherSequenceParallelInput => only(
            d.sequence_parallel,
            Stance::Never("gathered inputs are kept for backward"),
        ),
        Rewrite::AsyncTensorParallelBackward => only(
            d.tp > 1,
            Stance::Never("gradients of inputs wait for their collective"),
        ),
        Rewrite::NormInF32 => Stance::Never("norms keep the inputs that they were given"),
        Rewrite::KeepRowIndices => only(
            model.moe.is_some(),
            Stance::Never("the router keeps one order of rows"),
        ),
        Rewrite::KeepAttentionProjections | Rewrite::KeepOutputProjection => only(
            chosen,
            Stance::Never("selective checkpointing keeps what its list of operators says"),
        ),
    }
}
