//! Which rewrites nanotron performs.

use catalog::runtime::Rewrite;

use crate::export::job::Job;
use crate::export::stance::Stance::{self, Always, Never, Nothing};
use crate::export::stance::{
    experts, gathers_keys, of_xla, reduces_every_time, sends_whole, unpadded,
};
use plans::decisions::Recompute;

/// What nanotron does with a rewrite.
pub(super) fn stance(rewrite: Rewrite, job: &Job<'_>) -> Stance {
    match rewrite {
        Rewrite::FuseProjections => Always("qkv_proj and gate_up_proj are one product each"),
        // Covered by the rows of `FuseProjections` and `FuseCrossEntropy`.
        Rewrite::FuseQkv
        | Rewrite::UnscaledRope
        | Rewrite::WideLossGradient
        | Rewrite::SeparateLossGradient => Nothing,
        Rewrite::ChunkLoss => Never("the loss runs over all tokens at once"),
        Rewrite::FuseNorm => Always("its norms are Triton kernels"),
        Rewrite::FuseRope => Always("flash-attention's kernel rotates queries and keys"),
        Rewrite::FuseSwiglu if job.model.mlp.gated => Never("gate and product are operators"),
        Rewrite::CopyShiftedLogits => {
            Always("its sharded cross-entropy subtracts the maximum into a second tensor")
        }
        Rewrite::InPlaceCrossEntropy => Always("its sharded cross-entropy works in place"),
        Rewrite::VocabularyByOperators => {
            Always("its sharded cross-entropy is a chain of operators")
        }
        Rewrite::FuseCrossEntropy => Never("its loss reads a 32-bit copy of the logits"),
        Rewrite::FusePermute if experts(job) => Always("grouped_gemm's kernel orders the tokens"),
        Rewrite::LaunchExpertsApart if experts(job) => {
            Never("grouped_gemm is one call for all experts")
        }
        Rewrite::WeightActivations if experts(job) => {
            Never("probabilities weigh what experts return")
        }
        Rewrite::WeighRowsInF32 if experts(job) => {
            Never("probabilities weigh rows in their own type")
        }
        Rewrite::GateInF32 if experts(job) => Never("the router computes in its tokens' type"),
        Rewrite::PortableExperts if experts(job) => Never("experts' products are grouped_gemm's"),
        Rewrite::KeepRowIndices if experts(job) => Never("the router keeps one order of rows"),
        Rewrite::FusePointwise => Never("it runs eager PyTorch"),
        Rewrite::NormOnCopy => Never("norms read their 16-bit inputs"),
        Rewrite::RopeByPairs => Never("rotary embedding multiplies all pairs at once"),
        Rewrite::NormInF32 => Never("norms keep their 16-bit inputs"),
        Rewrite::Autocast => Never("modules compute in the type of their parameters"),
        Rewrite::WaitAfterTransfers if job.decisions.pp > 1 => {
            Always("the host reads the shape of every message from another stage")
        }
        Rewrite::WaitAfterPasses | Rewrite::WaitAfterMicroBatches => {
            Never("its host reads nothing before a step ends")
        }
        Rewrite::WaitForReductions if reduces_every_time(job) => {
            Never("gradients are reduced beside the next micro-batch")
        }
        // Its models have no biases to fuse, its attention no scores; it does not train in 8 bits or choose operators. All ranks hold
        // all experts, so none tells another how many rows it sends.
        Rewrite::FuseBiasGelu
        | Rewrite::ReadTokenCounts
        | Rewrite::GeluByOperators
        | Rewrite::FuseBiasDropoutAdd
        | Rewrite::FuseScaledMaskedSoftmax
        | Rewrite::FuseBiasEpilogue
        | Rewrite::FuseGeluEpilogue
        | Rewrite::WideExperts => Nothing,
        _ => states(rewrite, job),
    }
}

/// What nanotron does with a rewrite of what ranks keep, send or update.
fn states(rewrite: Rewrite, job: &Job<'_>) -> Stance {
    let d = job.decisions;
    let waits = d.tp > 1 && !d.overlap.tensor_parallel;
    match rewrite {
        Rewrite::FusedOptimizer => Always("the file asks for a fused Adam"),
        Rewrite::OptimizerByTensor => Never("the file asks for a fused Adam"),
        Rewrite::ReleaseGradients => Never("gradients have buffers that stay"),
        Rewrite::AccumulateGradients => Always("gradients are added to 32-bit buffers"),
        Rewrite::ScaleGradients => Never("gradients are averaged as they are reduced"),
        Rewrite::WholeVocabulary => {
            Never("it divides embedding and head among tensor-parallel ranks")
        }
        Rewrite::FuseGradientAccumulation => Never("gradients are added by a hook"),
        Rewrite::PadVocabulary if unpadded(job) => {
            Never("the vocabulary is padded to a multiple of the tensor-parallel ranks alone")
        }
        Rewrite::AsyncTensorParallelBackward if waits => {
            Never("tensor parallelism waits for its collectives")
        }
        Rewrite::RegatherSequenceParallelInput if waits => {
            Never("gathered inputs are kept for backward")
        }
        Rewrite::EarlyStopRecompute if d.recompute == Recompute::Full => {
            Never("its checkpoints run the whole layer again")
        }
        Rewrite::GatherNarrowWeights | Rewrite::WideForwardProducts | Rewrite::EmbedByProduct => {
            of_xla(rewrite, job)
        }
        Rewrite::VisitModules => Never("it has no ZeRO-3"),
        Rewrite::KeepStageOutput if d.pp > 1 => Never("outputs of stages are freed"),
        Rewrite::BufferMicroBatches | Rewrite::KeepPassedOn if d.pp > 1 => {
            Never("pipeline stages hold only the tensors of micro-batches in flight")
        }
        Rewrite::ScatterGatherTransfer if sends_whole(job) => Never("whole activations are sent"),
        Rewrite::FlattenGradients => Never("gradients lie in one buffer from the start"),
        Rewrite::CopyShards => Never("parameters are used where they lie"),
        Rewrite::GatherTensorByTensor => Never("it has no ZeRO-3"),
        Rewrite::FreeEmbedding | Rewrite::RepeatKeys => Nothing,
        Rewrite::ReducePerLinear => Never("each input's gradient is reduced once"),
        // The strategy decides what its gathers overlap with.
        Rewrite::GatherInStep | Rewrite::WholeStageBuckets => Nothing,
        // It has no ZeRO-3.
        Rewrite::GatherHeldType => Nothing,
        // Every rank updates all weights: ZeRO-1 is refused.
        Rewrite::AllReduceGradients | Rewrite::CopyGradientsForStep => Nothing,
        Rewrite::BroadcastParameters => Never("ranks gather parameters at once"),
        Rewrite::SaveQuantisedInputs
        | Rewrite::KeepQuantisedWeights
        | Rewrite::GatherQuantised
        | Rewrite::KeepAttentionProjections
        | Rewrite::KeepOutputProjection
        | Rewrite::KeepSelected => Nothing,
        Rewrite::RingInPytorch if gathers_keys(job) => {
            Never("one kernel attends to the gathered keys")
        }
        // The export refuses hybrid models.
        Rewrite::SplitRecurrence => Nothing,
        Rewrite::RearrangeSequences if d.sequence_parallel => {
            Never("the sequence is the first dimension of activations")
        }
        _ => Nothing,
    }
}
