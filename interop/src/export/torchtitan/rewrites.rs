//! Which rewrites torchtitan performs.

use catalog::model::AttentionKind;
use catalog::runtime::Rewrite;
use catalog::{Fp8Recipe, Zero};

use super::edition::Edition;
use crate::export::job::Job;
use crate::export::stance::Stance::{self, Always, Never, Nothing, Written};
use crate::export::stance::{
    can_free_embedding, experts, fp8, gathers_keys, of_xla, recomputes, reduces_every_time,
    sends_whole, unpadded, waits_for_messages,
};
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

fn biases(job: &Job<'_>) -> bool {
    job.model.mlp.bias
}

/// What an edition of torchtitan does with a rewrite.
pub(super) fn stance(edition: Edition, rewrite: Rewrite, job: &Job<'_>) -> Stance {
    match (edition, rewrite) {
        (Edition::Toml02, Rewrite::FuseProjections) => {
            Never("each projection is a product of its own")
        }
        (Edition::Toml02, Rewrite::FuseQkv) if stacks(job) => {
            Never("queries, keys and values are three products")
        }
        (Edition::Toml02, Rewrite::ChunkLoss) => Never("the loss runs over all tokens at once"),
        (Edition::PythonMain, Rewrite::RearrangeSequences) if job.decisions.sequence_parallel => {
            Never("activations have one dimension of tokens")
        }
        (Edition::Toml02, Rewrite::GateInF32) if experts(job) => {
            Never("the router's product runs in 16 bits")
        }
        (Edition::Toml02, Rewrite::RingInPytorch) if gathers_keys(job) => {
            Always("a kernel attends to the keys of one rank after another")
        }
        _ => of_0_3(rewrite, job),
    }
}

/// Whether torchtitan 0.3 always does a rewrite, never does it, or has a setting for it.
fn of_0_3(rewrite: Rewrite, job: &Job<'_>) -> Stance {
    match rewrite {
        // Written in the `compile` section.
        Rewrite::FusePointwise | Rewrite::FuseCrossEntropy => Written,
        Rewrite::FuseProjections => Never("gate and up are two products"),
        Rewrite::FuseQkv if stacks(job) && !job.assumes(Rewrite::FuseProjections) => {
            Always("queries, keys and values are one product")
        }
        Rewrite::ChunkLoss if job.model.mtp_layers == 0 => {
            Always("head and loss run over an eighth of the tokens at a time")
        }
        Rewrite::ChunkLoss => Never("the loss of prediction layers runs over all tokens at once"),
        Rewrite::FuseBiasEpilogue if job.model.attention.qkv_bias => {
            Always("biases are added inside the product")
        }
        Rewrite::WideExperts if fp8(job) && experts(job) => {
            Always("only linear layers are converted to 8 bits")
        }
        Rewrite::FuseSwiglu if eager(job) && job.model.mlp.gated => {
            Never("eager PyTorch has no kernel for it")
        }
        Rewrite::FuseNorm if eager(job) => Always("nn.RMSNorm is one kernel"),
        Rewrite::FuseRope if eager(job) => Never("rotation is made of pointwise operators"),
        Rewrite::FusePermute if eager(job) && experts(job) => {
            Never("ordering of tokens is made of operators")
        }
        Rewrite::FuseBiasGelu if biases(job) => Never("no GELU is in its models"),
        Rewrite::FuseGeluEpilogue if biases(job) => Never("no GELU is in its models"),
        Rewrite::FuseBiasDropoutAdd if biases(job) => Never("no dropout is in its models"),
        Rewrite::InPlaceCrossEntropy if !job.assumes(Rewrite::FuseCrossEntropy) => {
            Never("its loss makes a 32-bit copy of the logits")
        }
        Rewrite::VocabularyByOperators => Never("its loss is one operator of PyTorch"),
        Rewrite::NormOnCopy => Never("norms read the inputs that they were given"),
        Rewrite::RopeByPairs => Never("rotary embedding multiplies all pairs at once"),
        Rewrite::NormInF32 => Never("norms keep the inputs that they were given"),
        Rewrite::Autocast => Never("FSDP casts parameters before modules run"),
        Rewrite::LaunchExpertsApart if experts(job) => {
            Never("torch._grouped_mm is one kernel of all experts")
        }
        Rewrite::WeightActivations if experts(job) => {
            Never("probabilities weigh the rows that experts are given")
        }
        Rewrite::PortableExperts if experts(job) => Never("experts use torch._grouped_mm"),
        Rewrite::WeighRowsInF32 if eager(job) && experts(job) => {
            Always("rows of experts are weighed in 32 bits")
        }
        Rewrite::GateInF32 if eager(job) && experts(job) => Always("the router runs in 32 bits"),
        Rewrite::KeepRowIndices if experts(job) => Never("the router keeps one order of rows"),
        Rewrite::ReadTokenCounts if job.decisions.ep > 1 => {
            Always("the host waits for the numbers of tokens that experts get")
        }
        Rewrite::WaitForReductions if reduces_every_time(job) => {
            Never("gradients are reduced beside the next micro-batch")
        }
        Rewrite::WaitAfterPasses => Never("torchtitan times whole steps only"),
        Rewrite::WaitAfterMicroBatches if job.decisions.pp == 1 => {
            Never("its host reads nothing between micro-batches")
        }
        Rewrite::WaitAfterTransfers if waits_for_messages(job) => {
            Never("its host waits for no message")
        }
        Rewrite::GeluByOperators => Never("an activation is one kernel"),
        // No kernel of its attention writes scores to memory, and its loss is neither Transformer Engine's nor Megatron's.
        Rewrite::FuseScaledMaskedSoftmax
        | Rewrite::UnscaledRope
        | Rewrite::WideLossGradient
        | Rewrite::CopyShiftedLogits => Nothing,
        _ => states(rewrite, job),
    }
}

/// What torchtitan does with a rewrite of what ranks keep, send and update.
fn states(rewrite: Rewrite, job: &Job<'_>) -> Stance {
    let d = job.decisions;
    match rewrite {
        Rewrite::FusedOptimizer => Always("its AdamW is fused"),
        Rewrite::OptimizerByTensor => Never("its AdamW is fused"),
        Rewrite::ReleaseGradients => Always("gradients are set to none before every step"),
        Rewrite::CopyShards if d.zero == Zero::Z3 => {
            Always("fully_shard copies into and out of its buffers")
        }
        Rewrite::FreeEmbedding if can_free_embedding(job) => {
            Always("the embedding is freed after its forward pass")
        }
        Rewrite::RingInPytorch if gathers_keys(job) => {
            Never("one kernel attends to the gathered keys")
        }
        // The export refuses hybrid models.
        Rewrite::SplitRecurrence | Rewrite::RepeatKeys => Nothing,
        Rewrite::RearrangeSequences if d.sequence_parallel => {
            Always("the batch is the first dimension of activations")
        }
        Rewrite::GatherQuantised
            if fp8(job) && d.tp > 1 && job.fp8_recipe() == Fp8Recipe::Tensorwise =>
        {
            Always("Float8 tensor parallelism gathers 8-bit values")
        }
        Rewrite::WholeVocabulary => {
            Never("its plans divide embedding and head among tensor-parallel ranks")
        }
        Rewrite::FuseGradientAccumulation | Rewrite::AccumulateGradients => {
            Never("gradients are sharded as soon as they are made")
        }
        Rewrite::ScaleGradients => Never("gradients are averaged as they are reduced"),
        Rewrite::VisitModules => Never("parameters are gathered for a whole block"),
        Rewrite::KeepStageOutput if d.pp > 1 => Always("stages hold their outputs until backward"),
        Rewrite::BufferMicroBatches if d.pp > 1 => {
            Always("pipeline stages have a buffer for each micro-batch")
        }
        Rewrite::KeepPassedOn if d.pp > 1 => Never("pipelines free what they have used"),
        Rewrite::ScatterGatherTransfer if sends_whole(job) => Never("whole activations are sent"),
        Rewrite::FlattenGradients => Never("fully_shard has no flat parameters"),
        Rewrite::AllReduceGradients if d.zero == Zero::Z1 => {
            Never("gradients are reduced by reduce-scatter")
        }
        Rewrite::GatherTensorByTensor if d.zero == Zero::Z3 => {
            Never("parameters are gathered layer by layer")
        }
        Rewrite::CopyGradientsForStep => Never("gradients are in 32 bits already"),
        Rewrite::RegatherSequenceParallelInput if d.sequence_parallel => {
            Never("gathered inputs are kept for backward")
        }
        Rewrite::AsyncTensorParallelBackward if d.tp > 1 => {
            Never("gradients of inputs wait for their collective")
        }
        Rewrite::ReducePerLinear => Never("each input's gradient is reduced once"),
        Rewrite::GatherHeldType if d.zero == Zero::Z3 => {
            Never("parameters are gathered in 16 bits")
        }
        Rewrite::PadVocabulary if unpadded(job) => {
            Never("the vocabulary is as the model states it")
        }
        Rewrite::GatherInStep if matches!(d.zero, Zero::Z1 | Zero::Z2) => {
            Never("parameters are gathered beside forward passes")
        }
        Rewrite::WholeStageBuckets if d.pp > 1 => {
            Never("every pipeline stage gathers and reduces block by block")
        }
        Rewrite::BroadcastParameters => Never("ranks gather parameters at once"),
        _ => saved(rewrite, job),
    }
}

/// What torchtitan does with a rewrite of what is kept for backward.
fn saved(rewrite: Rewrite, job: &Job<'_>) -> Stance {
    match rewrite {
        Rewrite::GatherNarrowWeights | Rewrite::WideForwardProducts | Rewrite::EmbedByProduct => {
            of_xla(rewrite, job)
        }
        Rewrite::EarlyStopRecompute if recomputes(job) && eager(job) => {
            Never("activation checkpointing recomputes whole blocks")
        }
        Rewrite::EarlyStopRecompute if recomputes(job) => {
            Always("the compiler drops what backward does not read")
        }
        Rewrite::KeepSelected if chosen(job) && eager(job) => {
            Always("selective checkpointing keeps the outputs of its products")
        }
        Rewrite::KeepSelected if chosen(job) => {
            Never("the compiler keeps only what backward needs")
        }
        Rewrite::SeparateLossGradient if job.assumes(Rewrite::FuseCrossEntropy) => {
            Always("the compiled loss returns the gradient of the logits as a tensor of its own")
        }
        Rewrite::SaveQuantisedInputs if fp8(job) => Never("8-bit linears keep their 16-bit inputs"),
        Rewrite::KeepQuantisedWeights if fp8(job) => {
            Never("every pass casts weights to 8 bits again")
        }
        Rewrite::KeepAttentionProjections | Rewrite::KeepOutputProjection if chosen(job) => {
            Never("selective checkpointing keeps what its list of operators says")
        }
        _ => Nothing,
    }
}
