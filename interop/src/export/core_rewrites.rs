//! How Megatron-Core stands to each rewrite that a prediction may assume: the fields that switch it, or why it differs.

use catalog::model::{Activation, AttentionKind, ModelConfig, Position};
use catalog::runtime::{AttentionKernel, Rewrite};
use catalog::{Precision, RopeScaling, Zero};

use super::assumptions::{Stance, unmet};
use super::core_model::Field;
use super::job::Job;
use super::refusal::Limits;
use plans::decisions::Recompute;

/// The fields that make Megatron-Core do what the prediction assumed; where none does, the assumption is collected.
pub(crate) fn fields(job: &Job<'_>, limits: &mut Limits) -> Vec<Field> {
    let assumed = &job.runtime.rewrites;
    limits.unmet = unmet(assumed, |rewrite| stance(rewrite, job));
    let assumes = |rewrite| assumed.contains(&rewrite);
    let mut fields: Vec<Field> = vec![
        (
            "bias_dropout_fusion",
            assumes(Rewrite::FuseBiasDropoutAdd).into(),
        ),
        (
            "masked_softmax_fusion",
            assumes(Rewrite::FuseScaledMaskedSoftmax).into(),
        ),
        (
            "gradient_accumulation_fusion",
            assumes(Rewrite::FuseGradientAccumulation).into(),
        ),
        (
            "cross_entropy_loss_fusion",
            assumes(Rewrite::FuseCrossEntropy).into(),
        ),
    ];
    if assumes(Rewrite::FuseCrossEntropy) {
        fields.push(("cross_entropy_fusion_impl", "te".into()));
    }
    if job.model.moe.is_some() {
        fields.push(("moe_permute_fusion", assumes(Rewrite::FusePermute).into()));
    }
    if gated_silu(job.model) {
        fields.push((
            "bias_activation_fusion",
            assumes(Rewrite::FuseSwiglu).into(),
        ));
    }
    if fusible_rotation(job.model) {
        fields.push(("apply_rope_fusion", assumes(Rewrite::FuseRope).into()));
    }
    let backend = match job.runtime.attention {
        AttentionKernel::Unfused => "unfused",
        AttentionKernel::Flash1 | AttentionKernel::Flash2 | AttentionKernel::Flash2TwoPass => {
            "flash"
        }
        AttentionKernel::CudnnOrFlash3 | AttentionKernel::CudnnElseTwoPass => "auto",
    };
    fields.push(("attention_backend", backend.into()));
    fields
}

/// Whether its feed-forward blocks are SwiGLU.
fn gated_silu(model: &ModelConfig) -> bool {
    let plain = model.constants.bounded_glu.is_none();
    model.mlp.activation == Activation::Silu && model.mlp.gated && plain
}

/// Whether a kernel of Megatron-Core rotates queries and keys as this model does.
fn fusible_rotation(model: &ModelConfig) -> bool {
    let yarn = matches!(model.constants.rope_scaling, RopeScaling::Yarn { .. });
    let latent = matches!(model.attention.kind, AttentionKind::Latent { .. });
    matches!(model.position, Position::Rope { .. }) && yarn == latent
}

fn stance(rewrite: Rewrite, job: &Job<'_>) -> Stance {
    let (d, model) = (job.decisions, job.model);
    let fp8 = job.workload.precision == Precision::Fp8;
    let only = |here: bool, stance: Stance| if here { stance } else { Stance::Absent };
    let gelu = model.mlp.activation == Activation::Gelu;
    let recomputes = !matches!(d.recompute, Recompute::None | Recompute::Layers(0));
    match rewrite {
        Rewrite::FuseBiasDropoutAdd
        | Rewrite::FuseScaledMaskedSoftmax
        | Rewrite::FuseGradientAccumulation
        | Rewrite::FuseCrossEntropy
        | Rewrite::FusePermute
        | Rewrite::FuseSwiglu => Stance::Written,
        Rewrite::FuseRope if fusible_rotation(model) => Stance::Written,
        Rewrite::FuseRope => only(
            matches!(model.position, Position::Rope { .. }),
            Stance::Never("it has no kernel that rotates queries and keys as this model does"),
        ),
        // The file sets the recipe of 8-bit scales by it.
        Rewrite::ScaleDynamically => Stance::Written,
        Rewrite::FuseBiasGelu if model.constants.gelu_tanh => only(
            gelu && model.mlp.bias,
            Stance::Always("GELU by tanh is the fused one"),
        ),
        Rewrite::FuseBiasGelu => only(gelu, Stance::Never("exact GELU is not fused")),
        Rewrite::FuseProjections => {
            Stance::Always("linear_qkv and linear_fc1 are one product each")
        }
        Rewrite::FuseNorm => Stance::Always("norms are Transformer Engine's"),
        Rewrite::FusedOptimizer => Stance::Always("its Adam is one kernel over all tensors"),
        Rewrite::InPlaceCrossEntropy => only(
            !job.runtime.rewrites.contains(&Rewrite::FuseCrossEntropy),
            Stance::Always("its vocabulary-parallel loss works in place"),
        ),
        Rewrite::AccumulateGradients => only(
            !job.runtime
                .rewrites
                .contains(&Rewrite::FuseGradientAccumulation),
            Stance::Always("its hook adds gradients to the buffer"),
        ),
        Rewrite::RegatherSequenceParallelInput => only(
            d.sequence_parallel,
            Stance::Always("column-parallel layers gather their input again"),
        ),
        Rewrite::AsyncTensorParallelBackward => only(
            d.tp > 1,
            Stance::Always("gradients of inputs are reduced beside those of weights"),
        ),
        Rewrite::SaveQuantisedInputs => {
            only(fp8, Stance::Always("Transformer Engine saves 8-bit inputs"))
        }
        Rewrite::KeepStageOutput => only(d.pp > 1, Stance::Never("it frees the stage's output")),
        Rewrite::ScatterGatherTransfer => only(
            d.pp > 1 && d.tp > 1 && !d.sequence_parallel,
            Stance::Never("whole activations are sent between stages"),
        ),
        Rewrite::EarlyStopRecompute => only(
            recomputes,
            Stance::Never("its checkpoints run the whole forward pass again"),
        ),
        Rewrite::GatherQuantised => only(
            fp8 && d.tp > 1,
            Stance::Never("8-bit gathers need user buffers that the file does not configure"),
        ),
        Rewrite::WideExperts => only(
            fp8 && model.moe.is_some(),
            Stance::Never("experts run in 8 bits too"),
        ),
        Rewrite::RowwiseScaling => only(fp8, Stance::Never("its scales are per tensor")),
        Rewrite::AllReduceGradients => only(
            d.zero == Zero::Z1,
            Stance::Never("the distributed optimizer reduces by reduce-scatter"),
        ),
        Rewrite::FusePointwise => Stance::Never("it does not compile layers"),
        Rewrite::CudaGraph => Stance::Never("the file captures no CUDA graphs"),
        Rewrite::FuseBiasEpilogue | Rewrite::FuseGeluEpilogue => only(
            model.mlp.bias,
            Stance::Never("biases are added by kernels of their own"),
        ),
        Rewrite::NormInF32 => Stance::Never("norms keep their 16-bit inputs"),
        Rewrite::KeepRowIndices => only(
            model.moe.is_some(),
            Stance::Never("the router keeps one map of rows"),
        ),
        Rewrite::FlattenGradients | Rewrite::CopyShards | Rewrite::CopyGradientsForStep => {
            Stance::Never("gradients lie in one buffer from backward on")
        }
        Rewrite::GatherTensorByTensor => only(
            d.zero == Zero::Z3,
            Stance::Never("parameters are gathered in buckets"),
        ),
        Rewrite::KeepAttentionProjections
        | Rewrite::KeepOutputProjection
        | Rewrite::KeepSelected => only(
            d.recompute == Recompute::SelectiveOps,
            Stance::Never("it does not choose operators to keep"),
        ),
    }
}
