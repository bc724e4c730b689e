//! Which rewrites Megatron-Core performs: the fields that switch each, or why it differs from the prediction.

use catalog::model::{Activation, AttentionKind, ModelConfig, Position};
use catalog::runtime::{AttentionKernel, Rewrite};
use catalog::{RopeScaling, Zero};

use super::core_model::{Field, Reach};
use super::core_precision;
use super::job::Job;
use super::refusal::Limits;
use super::stance::Stance::{self, Always, Never, Nothing, Written};
use super::stance::{
    experts, fp8, gathers_keys, of_xla, recomputes, reduces_every_time, sends_whole, unmet,
    unpadded, waits_for_messages,
};

/// The fields that make Megatron-Core do what the prediction assumed; records the assumptions that it cannot meet.
pub(crate) fn fields(job: &Job<'_>, reach: Reach, limits: &mut Limits) -> Vec<Field> {
    limits.differs(unmet(|rewrite| stance(rewrite, job, reach), job));
    let assumes = |rewrite| job.assumes(rewrite);
    let switches = [
        ("bias_dropout_fusion", Rewrite::FuseBiasDropoutAdd),
        ("masked_softmax_fusion", Rewrite::FuseScaledMaskedSoftmax),
        (
            "gradient_accumulation_fusion",
            Rewrite::FuseGradientAccumulation,
        ),
    ];
    let mut fields = switches
        .map(|(field, rewrite)| (field, assumes(rewrite).into()))
        .to_vec();
    let fused_loss = fuses_loss(job, reach);
    fields.push(("cross_entropy_loss_fusion", fused_loss.into()));
    if fused_loss {
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
        AttentionKernel::Flash1
        | AttentionKernel::FlashTriton
        | AttentionKernel::Flash2
        | AttentionKernel::Flash2TwoPass => "flash",
        AttentionKernel::CudnnOrFlash3
        | AttentionKernel::CudnnFp8
        | AttentionKernel::CudnnElseTwoPass
        | AttentionKernel::Sdpa => "auto",
    };
    fields.push(("attention_backend", backend.into()));
    if job.runtime.attention == AttentionKernel::CudnnFp8 && reach == Reach::Provider {
        fields.push(("fp8_dot_product_attention", true.into()));
    }
    fields
}

/// Whether the loss is one kernel over 16-bit logits, as the prediction assumed. Megatron-LM refuses to start with that kernel,
/// which is Transformer Engine's (arguments.py:1697); Megatron-Core under a provider runs it with a warning. The fused loss that
/// Megatron-Core has beside it (`native`) copies logits to 32 bits, as its unfused one does.
fn fuses_loss(job: &Job<'_>, reach: Reach) -> bool {
    reach == Reach::Provider && job.assumes(Rewrite::FuseCrossEntropy)
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

/// Whether the model multiplies what it rotates.
fn scales(model: &ModelConfig) -> bool {
    model.constants.rope_scaling.magnitude() != 1.0
}

fn gelu(job: &Job<'_>) -> bool {
    job.model.mlp.activation == Activation::Gelu
}

/// What Megatron-Core does with a rewrite.
fn stance(rewrite: Rewrite, job: &Job<'_>, reach: Reach) -> Stance {
    match rewrite {
        Rewrite::FuseCrossEntropy if reach == Reach::Options => {
            Never("it refuses to start with Transformer Engine's fused loss")
        }
        Rewrite::FuseBiasDropoutAdd
        | Rewrite::FuseScaledMaskedSoftmax
        | Rewrite::FuseGradientAccumulation
        | Rewrite::FuseCrossEntropy
        | Rewrite::FusePermute
        | Rewrite::FuseSwiglu => Written,
        Rewrite::FuseRope if fusible_rotation(job.model) => Written,
        // The prediction knows that nothing fuses this rotation.
        Rewrite::FuseRope if job.assumes(Rewrite::UnscaledRope) && scales(job.model) => Written,
        Rewrite::FuseRope if matches!(job.model.position, Position::Rope { .. }) => {
            Never("it has no kernel that rotates queries and keys as this model does")
        }
        Rewrite::FuseBiasGelu
            if gelu(job) && job.model.mlp.bias && job.model.constants.gelu_tanh =>
        {
            Always("GELU by tanh is the fused one")
        }
        Rewrite::FuseBiasGelu if gelu(job) => Never("exact GELU is not fused"),
        Rewrite::FuseProjections => Always("linear_qkv and linear_fc1 are one product each"),
        // Covered by the rows of `FuseProjections` and `WideLossGradient`.
        Rewrite::FuseQkv | Rewrite::SeparateLossGradient => Nothing,
        Rewrite::ChunkLoss => Never("the loss runs over all tokens at once"),
        Rewrite::FuseNorm => Always("norms are Transformer Engine's"),
        Rewrite::InPlaceCrossEntropy if !fuses_loss(job, reach) => {
            Always("its vocabulary-parallel loss works in place")
        }
        Rewrite::WideLossGradient if fuses_loss(job, reach) => {
            Always("Transformer Engine 2.18 keeps the gradient of the logits in 32 bits")
        }
        Rewrite::CopyShiftedLogits => Never("the maximum is subtracted in place"),
        Rewrite::VocabularyByOperators if !fuses_loss(job, reach) => {
            Always("its vocabulary-parallel loss is a chain of operators")
        }
        Rewrite::LaunchExpertsApart if experts(job) => {
            Always("Transformer Engine calls cuBLAS for every expert")
        }
        Rewrite::ReadTokenCounts if experts(job) => {
            Always("the host waits for the numbers of tokens that experts get")
        }
        Rewrite::WaitAfterPasses => Never("Megatron-LM times passes only at timing-log-level 2"),
        Rewrite::WaitAfterMicroBatches if job.decisions.pp == 1 => {
            Never("the host reads nothing between micro-batches")
        }
        Rewrite::WaitAfterTransfers if waits_for_messages(job) => {
            Always("batch_p2p_sync waits for the GPU after messages between stages")
        }
        Rewrite::WaitForReductions if reduces_every_time(job) => {
            Never("gradients are reduced beside the next micro-batch")
        }
        Rewrite::WeightActivations if experts(job) => Always("experts' activations are weighted"),
        Rewrite::WeighRowsInF32 if experts(job) => Never("experts' activations are weighted"),
        Rewrite::GateInF32 if experts(job) => Never("the router computes in its tokens' type"),
        Rewrite::PortableExperts if experts(job) => Never("experts' products are cuBLAS's"),
        Rewrite::WideExperts if fp8(job) && experts(job) => Never("experts run in 8 bits too"),
        Rewrite::FusePointwise => Never("it does not compile layers"),
        Rewrite::FuseBiasEpilogue if job.model.mlp.bias => {
            Never("biases have kernels of their own")
        }
        Rewrite::FuseGeluEpilogue if job.model.mlp.bias => Never("GELU has a kernel of its own"),
        Rewrite::GeluByOperators => Never("GELU has a kernel of its own"),
        Rewrite::NormOnCopy => Never("norms read their 16-bit inputs"),
        Rewrite::RopeByPairs => Never("rotary embedding multiplies all pairs at once"),
        Rewrite::NormInF32 => Never("norms keep their 16-bit inputs"),
        Rewrite::Autocast => Never("modules compute in the type of their parameters"),
        Rewrite::KeepRowIndices if experts(job) => Never("the router keeps one map of rows"),
        Rewrite::WholeVocabulary => {
            Never("it divides embedding and head among tensor-parallel ranks")
        }
        Rewrite::PadVocabulary if unpadded(job) => {
            Always("the vocabulary is padded to a multiple of 128 on every tensor-parallel rank")
        }
        _ => states(rewrite, job),
    }
}

/// Whether the result depends on stages after the first having one bucket each. With several
/// buckets, messages would overlap with passes.
fn whole_stages(job: &Job<'_>) -> bool {
    let d = job.decisions;
    let overlaps = d.overlap.grad_reduce || d.overlap.param_gather;
    d.pp > 1 && d.stages.0.len() as u64 == d.pp && d.dp() > 1 && overlaps
}

/// What Megatron-Core does with a rewrite of what ranks keep, send or update.
fn states(rewrite: Rewrite, job: &Job<'_>) -> Stance {
    let d = job.decisions;
    match rewrite {
        Rewrite::FusedOptimizer => Always("its Adam is one kernel over all tensors"),
        Rewrite::OptimizerByTensor => Never("its Adam is one kernel over all tensors"),
        Rewrite::ReleaseGradients => Never("gradients have buffers that stay"),
        Rewrite::AccumulateGradients if !job.assumes(Rewrite::FuseGradientAccumulation) => {
            Always("its hook adds gradients to the buffer")
        }
        Rewrite::ScaleGradients if d.dp() * d.cp > 1 => Written,
        Rewrite::RegatherSequenceParallelInput if d.sequence_parallel => {
            Always("column-parallel layers gather their input again")
        }
        Rewrite::AsyncTensorParallelBackward if d.tp > 1 => {
            Always("gradients of inputs are reduced beside those of weights")
        }
        Rewrite::SaveQuantisedInputs if fp8(job) => Always("Transformer Engine saves 8-bit inputs"),
        Rewrite::KeepQuantisedWeights if fp8(job) && !core_precision::can_hold_eight_bits(job) => {
            Always(
                "weights are held in 16 bits without a distributed optimizer, or with one in host memory unless scales are delayed",
            )
        }
        Rewrite::KeepQuantisedWeights if fp8(job) => Written,
        Rewrite::SplitRecurrence if job.model.hybrid.is_some() => {
            Always("norms and gate around a recurrence have kernels of their own")
        }
        Rewrite::KeepStageOutput if d.pp > 1 => Never("it frees the stage's output"),
        Rewrite::BufferMicroBatches | Rewrite::KeepPassedOn if d.pp > 1 => {
            Never("pipeline stages hold only the tensors of micro-batches in flight")
        }
        Rewrite::ScatterGatherTransfer if sends_whole(job) => Never("whole activations are sent"),
        Rewrite::EarlyStopRecompute if recomputes(job) => {
            Never("its checkpoints run the whole forward pass again")
        }
        Rewrite::GatherQuantised if fp8(job) && d.tp > 1 => {
            Never("8-bit gathers need user buffers that the file does not configure")
        }
        Rewrite::GatherTensorByTensor | Rewrite::VisitModules if d.zero == Zero::Z3 => {
            Never("parameters are gathered in buckets")
        }
        Rewrite::ReducePerLinear => Never("each input's gradient is reduced once"),
        Rewrite::GatherHeldType if d.zero == Zero::Z3 => {
            Never("parameters are gathered in 16 bits")
        }
        Rewrite::FlattenGradients => Never("gradients lie in one buffer from backward on"),
        Rewrite::CopyShards => Never("gathered parameters are used where they lie"),
        Rewrite::CopyGradientsForStep => Never("the step reads the buffer of gradients"),
        // The choice of saved operators is fixed: plans that need another are refused. Units of parameters are FSDP's.
        Rewrite::KeepAttentionProjections
        | Rewrite::KeepOutputProjection
        | Rewrite::KeepSelected
        | Rewrite::FreeEmbedding
        | Rewrite::RepeatKeys => Nothing,
        Rewrite::RingInPytorch if gathers_keys(job) => Never("queries are split, not keys"),
        Rewrite::RearrangeSequences if d.sequence_parallel => {
            Never("the sequence is the first dimension of activations")
        }
        _ => data_parallel(rewrite, job),
    }
}

/// What Megatron-Core does with a rewrite of data-parallel messages.
fn data_parallel(rewrite: Rewrite, job: &Job<'_>) -> Stance {
    let d = job.decisions;
    match rewrite {
        Rewrite::GatherNarrowWeights | Rewrite::WideForwardProducts | Rewrite::EmbedByProduct => {
            of_xla(rewrite, job)
        }
        Rewrite::AllReduceGradients if d.zero == Zero::Z1 => {
            Never("the distributed optimizer reduces by reduce-scatter")
        }
        Rewrite::GatherInStep if d.zero == Zero::Z1 => {
            Never("updated parameters are gathered beside forward passes")
        }
        Rewrite::WholeStageBuckets if whole_stages(job) => {
            Always("pipeline stages after the first gather and reduce in one bucket")
        }
        Rewrite::BroadcastParameters => Never("ranks gather parameters at once"),
        _ => Nothing,
    }
}
