//! Which rewrites Megatron-Core performs: the fields that switch each, or why it differs from the prediction.

use catalog::model::{Activation, AttentionKind, ModelConfig, Position};
use catalog::runtime::{AttentionKernel, Rewrite};
use catalog::{RopeScaling, Zero};

use super::core_model::Field;
use super::core_precision;
use super::job::Job;
use super::refusal::Limits;
use super::stance::Stance::{Always, Never, Written};
use super::stance::{Table, fp8, recomputes, rings, sends_whole, unmet, unpadded};

/// The fields that make Megatron-Core do what the prediction assumed; records the assumptions that it cannot meet.
pub(crate) fn fields(job: &Job<'_>, limits: &mut Limits) -> Vec<Field> {
    limits.unmet = unmet(TABLE, job);
    let assumes = |rewrite| job.assumes(rewrite);
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
    if matches!(job.model.position, Position::Rope { .. }) {
        let fused = assumes(Rewrite::FuseRope) && fusible_rotation(job.model);
        fields.push(("apply_rope_fusion", fused.into()));
    }
    let backend = match job.runtime.attention {
        AttentionKernel::Unfused => "unfused",
        AttentionKernel::Flash1 | AttentionKernel::Flash2 | AttentionKernel::Flash2TwoPass => {
            "flash"
        }
        AttentionKernel::CudnnOrFlash3
        | AttentionKernel::CudnnElseTwoPass
        | AttentionKernel::Sdpa => "auto",
    };
    fields.push(("attention_backend", backend.into()));
    fields
}

/// Whether the model's feed-forward blocks are SwiGLU.
fn gated_silu(model: &ModelConfig) -> bool {
    let plain = model.constants.bounded_glu.is_none();
    model.mlp.activation == Activation::Silu && model.mlp.gated && plain
}

/// Whether Megatron-Core has a fused kernel for this model's rotary embedding.
fn fusible_rotation(model: &ModelConfig) -> bool {
    let yarn = matches!(model.constants.rope_scaling, RopeScaling::Yarn { .. });
    let latent = matches!(model.attention.kind, AttentionKind::Latent { .. });
    matches!(model.position, Position::Rope { .. }) && yarn == latent
}

fn experts(job: &Job<'_>) -> bool {
    job.model.moe.is_some()
}

fn gelu(job: &Job<'_>) -> bool {
    job.model.mlp.activation == Activation::Gelu
}

/// What Megatron-Core does with each rewrite.
pub(crate) const TABLE: &Table = &[
    (Rewrite::FuseBiasDropoutAdd, |_| true, Written),
    (Rewrite::FuseScaledMaskedSoftmax, |_| true, Written),
    (Rewrite::FuseGradientAccumulation, |_| true, Written),
    (Rewrite::FuseCrossEntropy, |_| true, Written),
    (Rewrite::FusePermute, |_| true, Written),
    (Rewrite::FuseSwiglu, |_| true, Written),
    (Rewrite::FuseRope, |j| fusible_rotation(j.model), Written),
    (
        Rewrite::FuseRope,
        |j| matches!(j.model.position, Position::Rope { .. }),
        Never("it has no kernel that rotates queries and keys as this model does"),
    ),
    (
        Rewrite::FuseBiasGelu,
        |j| gelu(j) && j.model.mlp.bias && j.model.constants.gelu_tanh,
        Always("GELU by tanh is the fused one"),
    ),
    (
        Rewrite::FuseBiasGelu,
        gelu,
        Never("exact GELU is not fused"),
    ),
    (
        Rewrite::FuseProjections,
        |_| true,
        Always("linear_qkv and linear_fc1 are one product each"),
    ),
    // Covered by the row of `FuseProjections`.
    (Rewrite::FuseQkv, |_| false, Written),
    (
        Rewrite::ChunkLoss,
        |_| true,
        Never("the loss runs over all tokens at once"),
    ),
    (
        Rewrite::FuseNorm,
        |_| true,
        Always("norms are Transformer Engine's"),
    ),
    (
        Rewrite::FusedOptimizer,
        |_| true,
        Always("its Adam is one kernel over all tensors"),
    ),
    (
        Rewrite::OptimizerByTensor,
        |_| true,
        Never("its Adam is one kernel over all tensors"),
    ),
    (
        Rewrite::ReleaseGradients,
        |_| true,
        Never("gradients have buffers that stay"),
    ),
    (
        Rewrite::InPlaceCrossEntropy,
        |j| !j.assumes(Rewrite::FuseCrossEntropy),
        Always("its vocabulary-parallel loss works in place"),
    ),
    (
        Rewrite::WholeVocabulary,
        |_| true,
        Never("it divides embedding and head among tensor-parallel ranks"),
    ),
    (
        Rewrite::VocabularyByOperators,
        |j| !j.assumes(Rewrite::FuseCrossEntropy),
        Always("its vocabulary-parallel loss is a chain of operators"),
    ),
    (
        Rewrite::AccumulateGradients,
        |j| !j.assumes(Rewrite::FuseGradientAccumulation),
        Always("its hook adds gradients to the buffer"),
    ),
    (
        Rewrite::RegatherSequenceParallelInput,
        |j| j.decisions.sequence_parallel,
        Always("column-parallel layers gather their input again"),
    ),
    (
        Rewrite::AsyncTensorParallelBackward,
        |j| j.decisions.tp > 1,
        Always("gradients of inputs are reduced beside those of weights"),
    ),
    (
        Rewrite::SaveQuantisedInputs,
        fp8,
        Always("Transformer Engine saves 8-bit inputs"),
    ),
    (
        Rewrite::KeepQuantisedWeights,
        |j| fp8(j) && !core_precision::can_hold_eight_bits(j),
        Always(
            "weights are held in 16 bits without a distributed optimizer, or with one in host memory unless scales are delayed",
        ),
    ),
    (Rewrite::KeepQuantisedWeights, fp8, Written),
    (
        Rewrite::KeepStageOutput,
        |j| j.decisions.pp > 1,
        Never("it frees the stage's output"),
    ),
    (
        Rewrite::LaunchExpertsApart,
        experts,
        Always("Transformer Engine calls cuBLAS for every expert"),
    ),
    (
        Rewrite::WeightActivations,
        experts,
        Always("experts' activations are weighted"),
    ),
    (
        Rewrite::PadVocabulary,
        unpadded,
        Always("the vocabulary is padded to a multiple of 128 on every tensor-parallel rank"),
    ),
    (
        Rewrite::PortableExperts,
        experts,
        Never("experts' products are cuBLAS's"),
    ),
    (
        Rewrite::ScatterGatherTransfer,
        sends_whole,
        Never("whole activations are sent"),
    ),
    (
        Rewrite::EarlyStopRecompute,
        recomputes,
        Never("its checkpoints run the whole forward pass again"),
    ),
    (
        Rewrite::GatherQuantised,
        |j| fp8(j) && j.decisions.tp > 1,
        Never("8-bit gathers need user buffers that the file does not configure"),
    ),
    (
        Rewrite::WideExperts,
        |j| fp8(j) && j.model.moe.is_some(),
        Never("experts run in 8 bits too"),
    ),
    (
        Rewrite::AllReduceGradients,
        |j| j.decisions.zero == Zero::Z1,
        Never("the distributed optimizer reduces by reduce-scatter"),
    ),
    (
        Rewrite::GatherTensorByTensor,
        |j| j.decisions.zero == Zero::Z3,
        Never("parameters are gathered in buckets"),
    ),
    (
        Rewrite::VisitModules,
        |j| j.decisions.zero == Zero::Z3,
        Never("parameters are gathered in buckets"),
    ),
    (
        Rewrite::FusePointwise,
        |_| true,
        Never("it does not compile layers"),
    ),
    (
        Rewrite::FuseBiasEpilogue,
        |j| j.model.mlp.bias,
        Never("biases have kernels of their own"),
    ),
    (
        Rewrite::FuseGeluEpilogue,
        |j| j.model.mlp.bias,
        Never("GELU has a kernel of its own"),
    ),
    (
        Rewrite::GatherInStep,
        |j| j.decisions.zero == Zero::Z1,
        Never("updated parameters are gathered beside forward passes"),
    ),
    (
        Rewrite::BroadcastParameters,
        |_| true,
        Never("ranks gather parameters at once"),
    ),
    (
        Rewrite::GeluByOperators,
        |_| true,
        Never("GELU has a kernel of its own"),
    ),
    (
        Rewrite::NormOnCopy,
        |_| true,
        Never("norms read their 16-bit inputs"),
    ),
    (
        Rewrite::ReducePerLinear,
        |_| true,
        Never("each input's gradient is reduced once"),
    ),
    (
        Rewrite::RopeByPairs,
        |_| true,
        Never("rotary embedding multiplies all pairs at once"),
    ),
    (
        Rewrite::NormInF32,
        |_| true,
        Never("norms keep their 16-bit inputs"),
    ),
    (
        Rewrite::Autocast,
        |_| true,
        Never("modules compute in the type of their parameters"),
    ),
    (
        Rewrite::GatherHeldType,
        |job| job.decisions.zero == Zero::Z3,
        Never("parameters are gathered in 16 bits"),
    ),
    (
        Rewrite::KeepRowIndices,
        |j| j.model.moe.is_some(),
        Never("the router keeps one map of rows"),
    ),
    (
        Rewrite::FlattenGradients,
        |_| true,
        Never("gradients lie in one buffer from backward on"),
    ),
    (
        Rewrite::CopyShards,
        |_| true,
        Never("gathered parameters are used where they lie"),
    ),
    (
        Rewrite::CopyGradientsForStep,
        |_| true,
        Never("the step reads the buffer of gradients"),
    ),
    // The choice of saved operators is fixed: plans that need another are refused.
    (Rewrite::KeepAttentionProjections, |_| false, Written),
    (Rewrite::KeepOutputProjection, |_| false, Written),
    (Rewrite::KeepSelected, |_| false, Written),
    (
        Rewrite::RingInPytorch,
        rings,
        Never("Transformer Engine adds up partial results in 16 bits"),
    ),
    (
        Rewrite::RearrangeSequences,
        |j| j.decisions.sequence_parallel,
        Never("the sequence is the first dimension of activations"),
    ),
];
