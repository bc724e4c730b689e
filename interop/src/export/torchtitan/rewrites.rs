//! Which rewrites torchtitan performs.

use catalog::model::AttentionKind;
use catalog::runtime::Rewrite;
use catalog::{Fp8Recipe, Zero};

use crate::export::job::Job;
use crate::export::stance::Stance::{Always, Never, Written};
use crate::export::stance::{Table, fp8, recomputes, sends_whole, unpadded};
use plans::decisions::Recompute;

fn eager(job: &Job<'_>) -> bool {
    !job.assumes(Rewrite::FusePointwise)
}

fn chosen(job: &Job<'_>) -> bool {
    job.decisions.recompute == Recompute::SelectiveOps
}

/// Whether queries, keys and values can be one product, which they cannot in latent attention.
fn stacks(job: &Job<'_>) -> bool {
    matches!(job.model.attention.kind, AttentionKind::Grouped { .. })
}

fn experts(job: &Job<'_>) -> bool {
    job.model.moe.is_some()
}

fn biases(job: &Job<'_>) -> bool {
    job.model.mlp.bias
}

/// Rows for versions before 0.3. They are looked up before those of [`REWRITES`].
pub(super) const UNTIL_0_2: &Table = &[
    (
        Rewrite::FuseProjections,
        |_| true,
        Never("each projection is a product of its own"),
    ),
    (
        Rewrite::FuseQkv,
        stacks,
        Never("queries, keys and values are three products"),
    ),
    (
        Rewrite::ChunkLoss,
        |_| true,
        Never("the loss runs over all tokens at once"),
    ),
];

/// Rows for versions after 0.3. They are looked up before those of [`REWRITES`].
pub(super) const AFTER_0_3: &Table = &[(
    Rewrite::RearrangeSequences,
    |j| j.decisions.sequence_parallel,
    Never("activations have one dimension of tokens"),
)];

/// For each rewrite that a prediction may assume, whether torchtitan 0.3 performs it.
pub(crate) const REWRITES: &Table = &[
    // Written in the `compile` section.
    (Rewrite::FusePointwise, |_| true, Written),
    (Rewrite::FuseCrossEntropy, |_| true, Written),
    (
        Rewrite::FusedOptimizer,
        |_| true,
        Always("its AdamW is fused"),
    ),
    (
        Rewrite::OptimizerByTensor,
        |_| true,
        Never("its AdamW is fused"),
    ),
    (
        Rewrite::ReleaseGradients,
        |_| true,
        Always("gradients are set to none before every step"),
    ),
    (
        Rewrite::FuseProjections,
        |_| true,
        Never("gate and up are two products"),
    ),
    (
        Rewrite::FuseQkv,
        |j| stacks(j) && !j.assumes(Rewrite::FuseProjections),
        Always("queries, keys and values are one product"),
    ),
    (
        Rewrite::ChunkLoss,
        |j| j.model.mtp_layers == 0,
        Always("head and loss run over an eighth of the tokens at a time"),
    ),
    (
        Rewrite::ChunkLoss,
        |_| true,
        Never("the loss of prediction layers runs over all tokens at once"),
    ),
    (
        Rewrite::CopyShards,
        |j| j.decisions.zero == Zero::Z3,
        Always("fully_shard copies into and out of its buffers"),
    ),
    (
        Rewrite::EarlyStopRecompute,
        |j| recomputes(j) && eager(j),
        Never("activation checkpointing recomputes whole blocks"),
    ),
    (
        Rewrite::EarlyStopRecompute,
        recomputes,
        Always("the compiler drops what backward does not read"),
    ),
    // The export refuses plans whose `cp_kind` is not `all_gather`, so none has a ring.
    (Rewrite::RingInPytorch, |_| false, Written),
    (
        Rewrite::RearrangeSequences,
        |j| j.decisions.sequence_parallel,
        Always("the batch is the first dimension of activations"),
    ),
    (
        Rewrite::KeepSelected,
        chosen,
        Always("selective checkpointing keeps the outputs of its products"),
    ),
    (
        Rewrite::FuseBiasEpilogue,
        |j| j.model.attention.qkv_bias,
        Always("biases are added inside the product"),
    ),
    (
        Rewrite::GatherQuantised,
        |j| fp8(j) && j.decisions.tp > 1 && j.fp8_recipe() == Fp8Recipe::Tensorwise,
        Always("Float8 tensor parallelism gathers 8-bit values"),
    ),
    (
        Rewrite::WideExperts,
        |j| fp8(j) && experts(j),
        Always("only linear layers are converted to 8 bits"),
    ),
    (
        Rewrite::SaveQuantisedInputs,
        fp8,
        Never("8-bit linears keep their 16-bit inputs"),
    ),
    (
        Rewrite::KeepQuantisedWeights,
        fp8,
        Never("every pass casts weights to 8 bits again"),
    ),
    (
        Rewrite::FuseSwiglu,
        |j| eager(j) && j.model.mlp.gated,
        Never("eager PyTorch has no kernel for it"),
    ),
    (Rewrite::FuseNorm, eager, Always("nn.RMSNorm is one kernel")),
    (
        Rewrite::FuseRope,
        eager,
        Never("rotation is made of pointwise operators"),
    ),
    (
        Rewrite::FusePermute,
        |j| eager(j) && experts(j),
        Never("ordering of tokens is made of operators"),
    ),
    (
        Rewrite::FuseBiasGelu,
        biases,
        Never("no GELU is in its models"),
    ),
    (
        Rewrite::FuseGeluEpilogue,
        biases,
        Never("no GELU is in its models"),
    ),
    (
        Rewrite::FuseBiasDropoutAdd,
        biases,
        Never("no dropout is in its models"),
    ),
    (
        Rewrite::InPlaceCrossEntropy,
        |j| !j.assumes(Rewrite::FuseCrossEntropy),
        Never("its loss makes a 32-bit copy of the logits"),
    ),
    (
        Rewrite::WholeVocabulary,
        |_| true,
        Never("its plans divide embedding and head among tensor-parallel ranks"),
    ),
    (
        Rewrite::VocabularyByOperators,
        |_| true,
        Never("its loss is one operator of PyTorch"),
    ),
    (
        Rewrite::FuseGradientAccumulation,
        |_| true,
        Never("gradients are sharded as soon as they are made"),
    ),
    (
        Rewrite::AccumulateGradients,
        |_| true,
        Never("gradients are sharded as soon as they are made"),
    ),
    (
        Rewrite::VisitModules,
        |_| true,
        Never("parameters are gathered for a whole block"),
    ),
    (
        Rewrite::KeepStageOutput,
        |j| j.decisions.pp > 1,
        Never("outputs of stages are freed"),
    ),
    (
        Rewrite::ScatterGatherTransfer,
        sends_whole,
        Never("whole activations are sent"),
    ),
    (
        Rewrite::FlattenGradients,
        |_| true,
        Never("fully_shard has no flat parameters"),
    ),
    (
        Rewrite::AllReduceGradients,
        |j| j.decisions.zero == Zero::Z1,
        Never("gradients are reduced by reduce-scatter"),
    ),
    (
        Rewrite::GatherTensorByTensor,
        |j| j.decisions.zero == Zero::Z3,
        Never("parameters are gathered layer by layer"),
    ),
    (
        Rewrite::CopyGradientsForStep,
        |_| true,
        Never("gradients are in 32 bits already"),
    ),
    (
        Rewrite::RegatherSequenceParallelInput,
        |j| j.decisions.sequence_parallel,
        Never("gathered inputs are kept for backward"),
    ),
    (
        Rewrite::AsyncTensorParallelBackward,
        |j| j.decisions.tp > 1,
        Never("gradients of inputs wait for their collective"),
    ),
    (
        Rewrite::NormOnCopy,
        |_| true,
        Never("norms read the inputs that they were given"),
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
        Never("norms keep the inputs that they were given"),
    ),
    (
        Rewrite::Autocast,
        |_| true,
        Never("FSDP casts parameters before modules run"),
    ),
    (
        Rewrite::GatherHeldType,
        |job| job.decisions.zero == Zero::Z3,
        Never("parameters are gathered in 16 bits"),
    ),
    (
        Rewrite::LaunchExpertsApart,
        experts,
        Never("torch._grouped_mm is one kernel of all experts"),
    ),
    (
        Rewrite::WeightActivations,
        experts,
        Never("probabilities weigh the rows that experts are given"),
    ),
    (
        Rewrite::PadVocabulary,
        unpadded,
        Never("the vocabulary is as the model states it"),
    ),
    (
        Rewrite::PortableExperts,
        experts,
        Never("experts' products are torch._grouped_mm's"),
    ),
    (
        Rewrite::KeepRowIndices,
        experts,
        Never("the router keeps one order of rows"),
    ),
    (
        Rewrite::KeepAttentionProjections,
        chosen,
        Never("selective checkpointing keeps what its list of operators says"),
    ),
    (
        Rewrite::KeepOutputProjection,
        chosen,
        Never("selective checkpointing keeps what its list of operators says"),
    ),
    (
        Rewrite::GatherInStep,
        |j| matches!(j.decisions.zero, Zero::Z1 | Zero::Z2),
        Never("parameters are gathered beside forward passes"),
    ),
    (
        Rewrite::BroadcastParameters,
        |_| true,
        Never("ranks gather parameters at once"),
    ),
    (
        Rewrite::GeluByOperators,
        |_| true,
        Never("an activation is one kernel"),
    ),
    // No kernel of its attention writes scores to memory.
    (Rewrite::FuseScaledMaskedSoftmax, |_| false, Written),
];
