//! Which rewrites are performed by systems that run the user's own model code: kernels are up to the model,
//! communication and states to the system.

use catalog::Zero;
use catalog::runtime::Rewrite;

use super::job::Job;
use super::refusal::Limits;
use super::stance::Stance::{self, Always, Never, Nothing, Yours};
use super::stance::{
    can_free_embedding, gathers_keys, reduces_every_time, sends_whole, unmet, unpadded,
    waits_for_messages, yours,
};
use plans::decisions::Recompute;

/// How one of the systems that run a user's own script treats those rewrites that not all of them treat alike.
pub(crate) struct System {
    /// Whether recomputation of a layer stops at the last tensor that backward reads.
    checkpoints: Stance,
    /// Whether FSDP copies gathered parameters out of the buffer of the all-gather.
    shards: Stance,
    /// Whether FSDP frees the embedding after forward and gathers it again for backward.
    embedding: Stance,
    /// Whether gradients are copied into the buckets in which they are reduced.
    flattened: Stance,
    /// Whether the optimizer step works on a copy of the gradients.
    copied: Stance,
    /// Whether gradients are added to a buffer that outlives the step.
    accumulated: Stance,
    /// Whether gradients are all-reduced, although each rank updates only a shard.
    reduced: Stance,
    /// Whether gradients are freed at the end of a step.
    released: Stance,
    /// Whether ZeRO-3 gathers the parameters of one module after the other.
    visited: Stance,
    /// Whether updated parameters are gathered within the optimizer step, before the next forward.
    updated: Stance,
    /// Whether the host waits, before each micro-batch, until the GPU has done all its work.
    waits: Stance,
    /// Whether the system first reduces all gradients of a micro-batch and then begins the next one.
    reduces_first: Stance,
}

/// Records the assumptions that the system does not meet, and notes what the user's code must do.
pub(crate) fn collect(job: &Job<'_>, system: &System, limits: &mut Limits) {
    let stance = |rewrite| stance(system, rewrite, job);
    limits.differs(unmet(stance, job));
    limits.notes.extend(yours(stance, job));
}

/// What a system does with a rewrite.
fn stance(system: &System, rewrite: Rewrite, job: &Job<'_>) -> Stance {
    let d = job.decisions;
    match rewrite {
        Rewrite::EarlyStopRecompute if d.recompute == Recompute::Full => system.checkpoints,
        Rewrite::CopyShards if matches!(d.zero, Zero::Z2 | Zero::Z3) => system.shards,
        Rewrite::FreeEmbedding if can_free_embedding(job) => system.embedding,
        Rewrite::FlattenGradients if d.dp() > 1 => system.flattened,
        Rewrite::CopyGradientsForStep if d.zero != Zero::Z0 => system.copied,
        Rewrite::AccumulateGradients if d.num_micro_batches > 1 => system.accumulated,
        Rewrite::ScaleGradients => Never("gradients are divided as they are copied into buckets"),
        Rewrite::FuseGradientAccumulation => {
            Never("gradients of weights are made by autograd and added afterwards")
        }
        Rewrite::AllReduceGradients if matches!(d.zero, Zero::Z1 | Zero::Z2) => system.reduced,
        Rewrite::ReleaseGradients => system.released,
        Rewrite::GatherTensorByTensor if d.zero == Zero::Z3 => {
            Never("parameters are gathered in groups")
        }
        Rewrite::VisitModules if d.zero == Zero::Z3 => system.visited,
        Rewrite::AsyncTensorParallelBackward if d.tp > 1 => {
            Never("tensor parallelism waits for its collectives")
        }
        Rewrite::RegatherSequenceParallelInput if d.sequence_parallel => {
            Never("gathered inputs are kept for backward")
        }
        Rewrite::KeepStageOutput if d.pp > 1 => Never("outputs of stages are freed"),
        Rewrite::BufferMicroBatches | Rewrite::KeepPassedOn if d.pp > 1 => {
            Never("pipeline stages hold only the tensors of micro-batches in flight")
        }
        Rewrite::ScatterGatherTransfer if sends_whole(job) => Never("whole activations are sent"),
        Rewrite::GatherInStep if matches!(d.zero, Zero::Z1 | Zero::Z2) => system.updated,
        Rewrite::WaitAfterMicroBatches if d.pp == 1 => system.waits,
        Rewrite::WaitForReductions if reduces_every_time(job) => system.reduces_first,
        Rewrite::WaitAfterPasses => Never("passes are not timed"),
        Rewrite::WaitAfterTransfers if waits_for_messages(job) => {
            Never("the host waits for no message")
        }
        Rewrite::WholeStageBuckets if d.pp > 1 => {
            Never("every pipeline stage gathers and reduces block by block")
        }
        Rewrite::PadVocabulary if unpadded(job) => Yours,
        Rewrite::SplitRecurrence if job.model.hybrid.is_some() => Yours,
        Rewrite::RingInPytorch if gathers_keys(job) => Yours,
        Rewrite::RearrangeSequences if d.sequence_parallel => Yours,
        // The choice of saved operators is fixed: plans that need another are refused.
        Rewrite::KeepAttentionProjections
        | Rewrite::KeepOutputProjection
        | Rewrite::KeepSelected
        | Rewrite::BroadcastParameters
        | Rewrite::RepeatKeys => Nothing,
        _ if of_model(rewrite) => Yours,
        _ => Nothing,
    }
}

/// Whether the model's own code decides about a rewrite.
fn of_model(rewrite: Rewrite) -> bool {
    matches!(
        rewrite,
        Rewrite::FuseBiasGelu
            | Rewrite::FuseProjections
            | Rewrite::FuseQkv
            | Rewrite::FuseSwiglu
            | Rewrite::FuseBiasDropoutAdd
            | Rewrite::FuseScaledMaskedSoftmax
            | Rewrite::FuseNorm
            | Rewrite::FuseRope
            | Rewrite::FuseCrossEntropy
            | Rewrite::InPlaceCrossEntropy
            | Rewrite::UnscaledRope
            | Rewrite::WideLossGradient
            | Rewrite::SeparateLossGradient
            | Rewrite::CopyShiftedLogits
            | Rewrite::ChunkLoss
            | Rewrite::VocabularyByOperators
            | Rewrite::WholeVocabulary
            | Rewrite::FusePointwise
            | Rewrite::FuseBiasEpilogue
            | Rewrite::FuseGeluEpilogue
            | Rewrite::NormInF32
            | Rewrite::NormOnCopy
            | Rewrite::ReducePerLinear
            | Rewrite::RopeByPairs
            | Rewrite::Autocast
            | Rewrite::GatherHeldType
            | Rewrite::GeluByOperators
            | Rewrite::FusePermute
            | Rewrite::KeepRowIndices
            | Rewrite::LaunchExpertsApart
            | Rewrite::WeightActivations
            | Rewrite::ReadTokenCounts
            | Rewrite::WeighRowsInF32
            | Rewrite::GateInF32
            | Rewrite::PortableExperts
            | Rewrite::SaveQuantisedInputs
            | Rewrite::KeepQuantisedWeights
            | Rewrite::GatherQuantised
            | Rewrite::WideExperts
            | Rewrite::GatherNarrowWeights
            | Rewrite::WideForwardProducts
            | Rewrite::EmbedByProduct
            | Rewrite::FusedOptimizer
            | Rewrite::OptimizerByTensor
    )
}

/// Rewrites of DeepSpeed's engine under Transformers 5, which checkpoints layers itself (`gradient_checkpointing_enable` in
/// modeling_utils.py).
pub(crate) const TRANSFORMERS_DEEPSPEED: System = System {
    checkpoints: Always("PyTorch's checkpoints stop early"),
    ..DEEPSPEED
};

/// The same under LLaMA-Factory, whose file says which of PyTorch's checkpoints runs.
pub(crate) const LLAMA_FACTORY: System = System {
    checkpoints: Stance::Written,
    ..DEEPSPEED
};

/// DeepSpeed's rewrites.
pub(crate) const DEEPSPEED: System = System {
    checkpoints: Never("its checkpoints run the whole layer again"),
    shards: Never("gathered parameters are used where they lie"),
    embedding: Nothing,
    flattened: Always("gradients are copied into buckets before they are reduced"),
    copied: Always("its step makes a 32-bit copy of its gradients"),
    accumulated: Never("gradients are added to those of earlier micro-batches alone"),
    reduced: Always("buckets of gradients are summed by all-reduce"),
    released: Always("its step frees gradients"),
    visited: Always("ZeRO-3 gathers and frees parameters module by module"),
    updated: Always("updated parameters are gathered within the step, beside nothing"),
    waits: Always("its timer of throughput waits for the GPU"),
    reduces_first: Always("the next micro-batch waits for gradients that are being reduced"),
};

/// Rewrites of PyTorch's `fully_shard` under accelerate, which shards the embedding by itself since 1.14 (utils/fsdp_utils.py,
/// `fsdp2_prepare_model`).
pub(crate) const ACCELERATE: System = System {
    checkpoints: Always("PyTorch's checkpoints stop early"),
    shards: Always("fully_shard copies into and out of its buffers"),
    embedding: Always("the embedding is freed after its forward pass"),
    waits: Always("batches are copied to the GPU by calls that wait"),
    ..VESCALE
};

/// The same under axolotl, whose own `fsdp2_prepare_model` leaves embedding and head to the root module
/// (monkeypatch/accelerate/fsdp2.py), and whose file says which of PyTorch's checkpoints runs.
pub(crate) const AXOLOTL: System = System {
    checkpoints: Stance::Written,
    embedding: Never("the embedding is gathered and freed with the head"),
    ..ACCELERATE
};

/// veScale's rewrites.
pub(crate) const VESCALE: System = System {
    checkpoints: Never("its checkpoints run the whole layer again"),
    shards: Never("gathered parameters are used where they lie"),
    embedding: Nothing,
    flattened: Never("gradients are reduced where they lie"),
    copied: Never("its step reads the gradients as they are"),
    accumulated: Never("gradients are added in place"),
    reduced: Never("gradients are reduced to the rank that updates them"),
    released: Yours,
    visited: Never("parameters are gathered for a whole block"),
    updated: Never("updated parameters are gathered beside forward passes"),
    waits: Never("its host reads nothing between micro-batches"),
    reduces_first: Never("gradients are reduced beside the next micro-batch"),
};
