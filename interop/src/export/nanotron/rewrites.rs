//! Which rewrites nanotron performs.

use catalog::Zero;
use catalog::runtime::Rewrite;

use crate::export::job::Job;
use crate::export::stance::Stance::{Always, Never, Written};
use crate::export::stance::{Table, sends_whole, unpadded};
use plans::decisions::Recompute;

fn tensor(job: &Job<'_>) -> bool {
    job.decisions.tp > 1 && !job.decisions.overlap.tensor_parallel
}

fn experts(job: &Job<'_>) -> bool {
    job.model.moe.is_some()
}

fn shared_states(job: &Job<'_>) -> bool {
    job.decisions.zero == Zero::Z1
}

/// What nanotron does with each rewrite.
pub(crate) const REWRITES: &Table = &[
    (
        Rewrite::FuseProjections,
        |_| true,
        Always("qkv_proj and gate_up_proj are one product each"),
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
        Always("its norms are Triton kernels"),
    ),
    (
        Rewrite::FusedOptimizer,
        |_| true,
        Always("the file asks for a fused Adam"),
    ),
    (
        Rewrite::OptimizerByTensor,
        |_| true,
        Never("the file asks for a fused Adam"),
    ),
    (
        Rewrite::ReleaseGradients,
        |_| true,
        Never("gradients have buffers that stay"),
    ),
    (
        Rewrite::AccumulateGradients,
        |_| true,
        Always("gradients are added to 32-bit buffers"),
    ),
    (
        Rewrite::FuseRope,
        |_| true,
        Always("flash-attention's kernel rotates queries and keys"),
    ),
    (
        Rewrite::FuseSwiglu,
        |j| j.model.mlp.gated,
        Never("gate and product are operators"),
    ),
    (
        Rewrite::InPlaceCrossEntropy,
        |_| true,
        Always("its sharded cross-entropy works in place"),
    ),
    (
        Rewrite::WholeVocabulary,
        |_| true,
        Never("it divides embedding and head among tensor-parallel ranks"),
    ),
    (
        Rewrite::VocabularyByOperators,
        |_| true,
        Always("its sharded cross-entropy is a chain of operators"),
    ),
    (
        Rewrite::FuseCrossEntropy,
        |_| true,
        Never("its loss reads a 32-bit copy of the logits"),
    ),
    (
        Rewrite::FuseGradientAccumulation,
        |_| true,
        Never("gradients are added by a hook"),
    ),
    (
        Rewrite::FusePermute,
        experts,
        Always("grouped_gemm's kernel orders the tokens"),
    ),
    (
        Rewrite::LaunchExpertsApart,
        experts,
        Never("grouped_gemm is one call for all experts"),
    ),
    (
        Rewrite::WeightActivations,
        experts,
        Never("probabilities weigh what experts return"),
    ),
    (
        Rewrite::PadVocabulary,
        unpadded,
        Never("the vocabulary is padded to a multiple of the tensor-parallel ranks alone"),
    ),
    (
        Rewrite::PortableExperts,
        experts,
        Never("experts' products are grouped_gemm's"),
    ),
    (
        Rewrite::KeepRowIndices,
        experts,
        Never("the router keeps one order of rows"),
    ),
    (
        Rewrite::AsyncTensorParallelBackward,
        tensor,
        Never("tensor parallelism waits for its collectives"),
    ),
    (
        Rewrite::RegatherSequenceParallelInput,
        tensor,
        Never("gathered inputs are kept for backward"),
    ),
    (
        Rewrite::EarlyStopRecompute,
        |j| j.decisions.recompute == Recompute::Full,
        Never("its checkpoints run the whole layer again"),
    ),
    (Rewrite::VisitModules, |_| true, Never("it has no ZeRO-3")),
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
        Rewrite::AllReduceGradients,
        shared_states,
        Never("gradients are reduced to the rank that updates them"),
    ),
    (
        Rewrite::CopyGradientsForStep,
        shared_states,
        Never("the step reads the 32-bit buffers"),
    ),
    (
        Rewrite::FusePointwise,
        |_| true,
        Never("it runs eager PyTorch"),
    ),
    (
        Rewrite::FlattenGradients,
        |_| true,
        Never("gradients lie in one buffer from the start"),
    ),
    (
        Rewrite::CopyShards,
        |_| true,
        Never("parameters are used where they lie"),
    ),
    (
        Rewrite::GatherTensorByTensor,
        |_| true,
        Never("it has no ZeRO-3"),
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
    // Its models have no biases to fuse, its attention no scores; it does not train in 8 bits or choose operators.
    (Rewrite::FuseBiasGelu, |_| false, Written),
    (Rewrite::GeluByOperators, |_| false, Written),
    // What its gathers overlap with is the strategy's.
    (Rewrite::GatherInStep, |_| false, Written),
    // It has no ZeRO-3.
    (Rewrite::GatherHeldType, |_| false, Written),
    (
        Rewrite::BroadcastParameters,
        |_| true,
        Never("ranks gather parameters at once"),
    ),
    (Rewrite::FuseBiasDropoutAdd, |_| false, Written),
    (Rewrite::FuseScaledMaskedSoftmax, |_| false, Written),
    (Rewrite::FuseBiasEpilogue, |_| false, Written),
    (Rewrite::FuseGeluEpilogue, |_| false, Written),
    (Rewrite::SaveQuantisedInputs, |_| false, Written),
    (Rewrite::KeepQuantisedWeights, |_| false, Written),
    (Rewrite::GatherQuantised, |_| false, Written),
    (Rewrite::WideExperts, |_| false, Written),
    (Rewrite::KeepAttentionProjections, |_| false, Written),
    (Rewrite::KeepOutputProjection, |_| false, Written),
    (Rewrite::KeepSelected, |_| false, Written),
    // The export refuses plans whose `cp_kind` is not `all_gather`, so none has a ring.
    (Rewrite::RingInPytorch, |_| false, Written),
    (
        Rewrite::RearrangeSequences,
        |j| j.decisions.sequence_parallel,
        Never("the sequence is the first dimension of activations"),
    ),
];
