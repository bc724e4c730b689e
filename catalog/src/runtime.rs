//! Training systems, as data: what a runtime can do, what it fuses and keeps, what it overlaps,
//! what it costs beside the model. A runtime never describes the model again: it selects from the
//! closed set of rewrites that `costmodel` applies to the traced operators.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::VariantArray;

use crate::cuda_graphs::CudaGraphs;
use crate::device::Architecture;
use crate::dispatcher::{Dispatcher, RoutedTokens, SecondSort};
use crate::fp8_recipe::Fp8Recipe;
use crate::parallelism::Overlap;
use crate::prefetch::HeldWhole;
use crate::provenance::Sourced;
use crate::selection::Selection;
use crate::sharding::{OncePerStep, Unsharded};
use crate::state_types::{GradientOption, StateTypes};
use crate::units::{Bytes, Seconds};

pub use crate::runtime_space::{RecomputeMode, RuntimeSpace, SequenceParallelUse};

/// Parameters per bucket of data-parallel messages that predictions assume where blocks share buckets: Megatron-LM's least, which
/// exports write for DeepSpeed, whose default is another.
pub const BUCKET_ELEMENTS: u64 = 40_000_000;

/// A resolved runtime.
#[derive(Clone, Debug, PartialEq)]
pub struct Runtime {
    /// Preset name, such as `megatron-core`.
    pub name: String,
    /// What it is, in a sentence, with the versions it stands for.
    pub description: String,
    /// The strategies it can express.
    pub space: RuntimeSpace,
    /// Which rewrites of the operator graph it performs.
    pub rewrites: Rewrites,
    /// The parts that selective recomputation runs again.
    pub selective: Selection,
    /// Which attention kernel it calls.
    pub attention: AttentionKernel,
    /// Types of parameters, gradients and optimizer states.
    pub states: StateTypes,
    /// Gradients of jobs that train in fp16, if these are not as `states` says. Megatron-LM holds and reduces gradients in 32
    /// bits when it trains in bf16, but not in fp16 (`megatron/arguments.py`, `accumulate_allreduce_grads_in_fp32`).
    pub fp16_gradients: Option<GradientOption>,
    /// What it overlaps by default.
    pub overlap: Overlap,
    /// What it does once per step, not for every micro-batch, where ZeRO-3 or FSDP holds parameters.
    pub zero3_once: OncePerStep,
    /// How it runs jobs that shard no states.
    pub unsharded: Unsharded,
    /// Whether jobs in 32 bits keep master weights that equal the parameters.
    pub master_in_f32_jobs: bool,
    /// Whether jobs that shard no parameters run PyTorch's DistributedDataParallel, which copies gradients into buckets.
    pub copies_into_buckets: bool,
    /// How much of a rank's weights it holds whole at one time, if elements decide it, not blocks.
    pub held_whole: Option<HeldWhole>,
    /// How it sends tokens to their experts by default.
    pub dispatcher: Dispatcher,
    /// When it orders rows a second time around an all-to-all.
    pub second_sort: SecondSort,
    /// Which tokens each tensor-parallel rank routes in a layer with experts.
    pub routed_tokens: RoutedTokens,
    /// What it captures in CUDA graphs by default.
    pub graphs: CudaGraphs,
    /// How it scales the operands of 8-bit products by default.
    pub fp8_recipe: Fp8Recipe,
    /// Costs that do not follow from the model, such as host time.
    pub overheads: Overheads,
}

/// A way in which a training system differs from the traced operators: in its kernels, in what they keep, or in what its host waits for.
/// Exports list, in this order, those that they do not perform.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    VariantArray,
)]
#[serde(rename_all = "snake_case")]
pub enum Rewrite {
    /// Bias and GELU in one pass; keeps the matrix product's output only.
    FuseBiasGelu,
    /// Queries, keys and values are one product, gate and up another (Megatron-LM `linear_qkv` and
    /// `linear_fc1`).
    FuseProjections,
    /// One product computes queries, keys and values; gate and up remain two products. The copies that split the result into queries, keys
    /// and values are not counted (`FusedQKVLinear` in torchtitan 0.3, `models/common/attention.py`).
    FuseQkv,
    /// Gate, nonlinearity and product in one pass; keeps gate and up only.
    FuseSwiglu,
    /// Bias, dropout and residual addition in one pass.
    FuseBiasDropoutAdd,
    /// Scale, mask and softmax of scores in one pass.
    FuseScaledMaskedSoftmax,
    /// One kernel per norm and pass (apex, Transformer Engine).
    FuseNorm,
    /// One kernel for rotary embedding of queries and keys.
    FuseRope,
    /// The kernel of [`Self::FuseRope`] takes no factor. Where YaRN multiplies what it rotates, PyTorch's operators rotate instead
    /// (NVIDIA/Megatron-LM@d98e8a6, `core/models/common/embeddings/rope_utils.py`, `apply_rotary_pos_emb`).
    UnscaledRope,
    /// Cross-entropy in one pass over the 16-bit logits, gradient in place (flash-attention, Liger, XLA):
    /// no 32-bit copy exists.
    FuseCrossEntropy,
    /// Making a micro-batch, embedding its tokens and computing the loss are chains of many small PyTorch operators. They hardly
    /// occupy the GPU, but the host has to launch them (Megatron-LM `mpu/cross_entropy.py`, `mpu/layers.py` at v2.6).
    VocabularyByOperators,
    /// Tensor parallelism divides layers only: every rank holds the whole embedding and head, and computes all logits. (Code that
    /// passes only layers to PyTorch's `parallelize_module` does so.) With sequence parallelism they are divided all the same.
    WholeVocabulary,
    /// Softmax overwrites the 32-bit copy of the logits (Megatron's vocabulary-parallel loss). Together with
    /// [`Self::FuseCrossEntropy`], forward already writes the gradient over the 16-bit logits (our own executor on GPUs).
    InPlaceCrossEntropy,
    /// The kernel of a fused loss leaves the 16-bit logits as they are and writes their gradient in 32 bits, which is kept for
    /// backward and cast there (NVIDIA/TransformerEngine@01bbe3e, `pytorch/triton/cross_entropy.py`; 2.18 and later).
    WideLossGradient,
    /// With [`Self::FuseCrossEntropy`], backward writes the gradient of the logits to a new tensor of their type, beside the logits that
    /// it reads (a loss that `torch.compile` compiles: a compiled backward returns tensors of its own).
    SeparateLossGradient,
    /// The loss subtracts the maximum of the logits into a second 32-bit tensor, so that forward has two (Megatron-Core before
    /// NVIDIA/Megatron-LM@9634c0e of June 2024).
    CopyShiftedLogits,
    /// Head and loss process the tokens of a micro-batch in eight chunks. Each chunk runs forward and backward before the next one, so that
    /// only the logits of one chunk are in memory (torchtitan 0.3, `components/loss.py`, `ChunkedLossWrapper`).
    ChunkLoss,
    /// Chains of pointwise operators and norms become one kernel each (`torch.compile`).
    FusePointwise,
    /// Weight gradients accumulate into the main gradient inside the matrix product.
    FuseGradientAccumulation,
    /// Every micro-batch's weight gradients are added by a pass of their own to a buffer that stays from step to step (Megatron-LM's
    /// gradient hook without the fused kernel; PyTorch's autograd, where gradients are set to zero rather than freed).
    AccumulateGradients,
    /// Gradients are divided by the number of ranks in a pass of their own before they are reduced (Megatron-LM without
    /// `--ddp-average-in-collective`: `bucket.grad_data *= gradient_scaling_factor`, @d98e8a6, `param_and_grad_buffer.py`).
    ScaleGradients,
    /// Linears keep the 8-bit copy of their input instead of the input (Transformer Engine
    /// `linear.py`: `save_for_backward` of the quantised input; attention and activations still keep
    /// their own tensors).
    SaveQuantisedInputs,
    /// Linears keep the 8-bit copies of their weights from one micro-batch to the next (Transformer Engine at d0067d0,
    /// `module/linear.py`: `_fp8_workspaces`, which are not kept where weights themselves are held in 8 bits).
    KeepQuantisedWeights,
    /// Operator-level selection keeps the projections of queries, keys and values only and runs the
    /// rest again, attention included (MaxText's `save_qkv_proj`).
    KeepAttentionProjections,
    /// With [`Self::KeepAttentionProjections`], the output projection is kept too (Paxml's
    /// `save_qkv_out_proj`, MaxText's `save_dot_except_mlp`).
    KeepOutputProjection,
    /// Recomputation stops once the last tensor that backward reads is rebuilt (non-reentrant
    /// `torch.utils.checkpoint`, `early_stop`; XLA drops what nothing reads).
    EarlyStopRecompute,
    /// Tensor-parallel gathers around 8-bit linears move 8-bit values (Transformer Engine user buffers,
    /// torchao `Float8ColwiseParallel`).
    GatherQuantised,
    /// Products of experts stay in 16 bits where linear layers run in 8.
    WideExperts,
    /// Under ZeRO-3 the weights of a layer are cast before they are gathered, and gathered in 8 bits (XLA's `CollectiveQuantizer`,
    /// which its pipeline runs before collectives are pipelined since openxla/xla pull request 17453 of September 2024).
    GatherNarrowWeights,
    /// Forward products of gathered weights run in 16 bits. XLA makes an 8-bit product of a cast, its inverse and a product in 16
    /// bits. Before `CollectiveQuantizer` its pipelining of gathers took casts of weights out of the loop over layers, without which
    /// it does not find the pattern (openxla/xla pull request 12866 of May 2024). It leaves casts in the backward loop, where the
    /// weight's largest magnitude is read as well: gathers are pipelined only if nothing else reads what they depend on
    /// (`collective_pipeliner.cc`, `CollectIndependentOperandChain`).
    WideForwardProducts,
    /// The embedding of tokens is a product of one-hot rows with the table, and so is the table's gradient (MaxText's
    /// `use_iota_embed`).
    EmbedByProduct,
    /// Activations are `[batch, sequence, hidden]`, and collectives work on the first dimension: a kernel copies the result of every
    /// tensor-parallel gather of sequences, and the input of every scatter (torchtitan before 73aed7f of August 2026).
    RearrangeSequences,
    /// Context parallelism by a gather as PyTorch's `context_parallel` runs it: one gather brings the keys and values of all ranks, an
    /// attention kernel runs for each rank's keys, and gradients go round the ranks (`_AllGatherRotater` and
    /// `_templated_ring_attention_backward`). Partial results and gradients are added up in 32 bits. Keys and values are repeated for
    /// every query head before they are sent, as in torchtitan until ff0829c of January 2026. A compiled block waits for every message
    /// as soon as it is sent (`_maybe_wrap_tensor` in PyTorch's `_functional_collectives.py`).
    RingInPytorch,
    /// Operator-level selection keeps its products' outputs whether backward reads them or not (eager PyTorch,
    /// `create_selective_checkpoint_contexts`). Under `torch.compile` its `MUST_SAVE` only forbids to compute a tensor again: what
    /// backward does not need is not kept (PyTorch 2.8, `_functorch/partitioners.py`, `solve_min_cut`, `should_ban_recomputation`).
    KeepSelected,
    /// The stage's output is held until its backward, though only its gradient is needed (DeepSpeed
    /// `pipe_buffers['outputs']`; Megatron-LM before `deallocate_pipeline_outputs`).
    KeepStageOutput,
    /// From the first step on a pipeline stage has a buffer for the input of every micro-batch and one for the gradient of every output.
    /// Where a rank has several stages, the host waits for all messages when the step ends, and what they carry is held until then.
    /// (PyTorch 2.15, `torch/distributed/pipelining`: `stage.py`, `_prepare_forward_infra` and `_create_grad_recv_info`; `schedules.py`,
    /// `send_ops` of `_PipelineScheduleRuntime`.)
    BufferMicroBatches,
    /// Keys and values are copied for every query head before attention reads them, and the copies are kept for backward. (Megatron-LM's own
    /// layers: NVIDIA/Megatron-LM@core_v0.6.0, `megatron/legacy/model/transformer.py:775`.)
    RepeatKeys,
    /// A pipeline stage holds outputs, logits among them, and gradients of inputs until the step ends (PyTorch of 2024, `stage.py`,
    /// `output_chunks`, and `_backward.py`, `stage_backward`). Outputs of all stages but the last are freed since pull request 153383 of
    /// May 2025, the rest since 164329 and 165822 of October 2025.
    KeepPassedOn,
    /// Between pipeline stages every tensor-parallel rank sends its share of the activation, which is
    /// gathered on arrival (Narayanan et al. 2021, §4.1).
    ScatterGatherTransfer,
    /// Gradients are concatenated into a flat buffer, divided, and cast to the type of the reduction,
    /// each in a pass of its own (FSDP1 `_runtime_utils.py`, backward of the flat parameter's views). Sums that every rank gets are
    /// copied back.
    FlattenGradients,
    /// Gradients are summed by all-reduce even where each rank updates only its share under ZeRO-1 and 2 (DeepSpeed's pipeline
    /// engine, `buffered_allreduce_fallback`, and its `zero/stage_1_and_2.py`, `allreduce_and_scatter`).
    AllReduceGradients,
    /// Whole parameters belong to ranks, so that after the step each rank broadcasts its own, one rank after the other,
    /// rather than all gather at once (InternEvo `solver/optimizer/hybrid_zero_optim.py` at c628a8c).
    BroadcastParameters,
    /// Under ZeRO-1 and 2 ranks gather the updated parameters at the end of the optimizer's step, while no computation runs that
    /// could hide these messages (DeepSpeed `zero/stage_1_and_2.py`, `all_gather_dp_groups`).
    GatherInStep,
    /// Where every pipeline rank has one stage, stages after the first have one bucket each: their first forward waits until all their
    /// parameters are gathered, and their gradients are reduced when their last backward is over (Megatron-Core
    /// `distributed_data_parallel.py`, `bucket_size`, and `pipeline_parallel/schedules.py`, `grad_sync_func`).
    WholeStageBuckets,
    /// Gathered parameters are copied out of the collective's buffer and gradients copied, in the type
    /// of the reduction, into it (FSDP2 `_fsdp_collectives.py`).
    CopyShards,
    /// FSDP treats an embedding like a layer: it frees the table after forward and gathers it again for backward. It does so only if
    /// the head has a table of its own. Without this rewrite embedding and head stay gathered from forward to backward. (torchtitan
    /// 0.2, `models/llama3/infra/parallelize.py`, `apply_fsdp`; accelerate 1.14, `utils/fsdp_utils.py`, `fsdp2_prepare_model`.)
    FreeEmbedding,
    /// ZeRO-3 gathers parameters in the type in which they are stored, not in the type of activations. FSDP does so without a
    /// mixed-precision policy, or with `MixedPrecisionPolicy(param_dtype=torch.float32)`.
    GatherHeldType,
    /// Under ZeRO-3 parameters are gathered and gradients reduced tensor by tensor, each rank's piece with a
    /// copy of its own, while the device waits (DeepSpeed 0.3, `zero/partition_parameters.py` at c83e49f:
    /// `_allgather_param`, `_reduce_scatter_gradient`; lists of pieces in c10d's `ProcessGroupNCCL`).
    GatherTensorByTensor,
    /// Under ZeRO-3 the engine visits every module of the model from Python in every pass, to gather and free its parameters
    /// (DeepSpeed 0.10.3 and later, `zero/parameter_offload.py`).
    VisitModules,
    /// Biases inside the matrix product's epilogue.
    FuseBiasEpilogue,
    /// With [`Self::FuseBiasEpilogue`], tanh GELUs in bf16 and their gradients run in the epilogues
    /// of the products before them, in forward and backward (`dtensor/src/epilogues.rs`).
    FuseGeluEpilogue,
    /// Under sequence parallelism the sharded input of a product is kept and gathered again in backward; so are sharded keys and values
    /// under context parallelism that gathers them (Transformer Engine `context_parallel.py`, `AttnFuncWithCPAndKVAllGather`).
    RegatherSequenceParallelInput,
    /// Backward tensor-parallel collectives of column-parallel linears run beside the weight-gradient
    /// product (Megatron-LM `LinearWithGradAccumulationAndAsyncCommunication`).
    AsyncTensorParallelBackward,
    /// Norms of Llama's kind compute in 32 bits operator by operator, and keep their input so: cast, square, mean, root,
    /// two products, cast back (transformers `LlamaRMSNorm`).
    NormInF32,
    /// Every column-parallel linear runs an all-reduce of its own for the gradient of its input, even where several linears share
    /// that input. For queries, keys and values these are three, where other systems add the gradients up and run one
    /// (PaddlePaddle 2.5 `mp_ops.py`, `_c_identity`).
    ReducePerLinear,
    /// A kernel casts each norm's input to 32 bits, and the norm, itself one fused kernel, reads that copy. The copy is not kept:
    /// backward casts again and repeats the norm's forward. Recomputation of a whole layer does so already, so nothing is repeated
    /// twice (InternLM `modeling_internlm.py` at fa7337b).
    NormOnCopy,
    /// Modules run under `torch.autocast`. Parameters, norms and the residual stream are in 32 bits; linear layers and attention
    /// cast their inputs to 16 bits.
    Autocast,
    /// A GELU by tanh is a chain of PyTorch's elementary operators: forward launches eight kernels and keeps four tensors
    /// for backward (transformers `NewGELUActivation`).
    GeluByOperators,
    /// Rotary embedding rotates pairs of neighbouring entries by separate PyTorch operators in 32 bits. Its forward launches nine
    /// kernels for the queries and nine for the keys (the models of LosVolterrosHermanos/danastar).
    RopeByPairs,
    /// One kernel orders tokens by expert, casts them and multiplies by the router's probabilities. Without
    /// [`Self::KeepRowIndices`] it is Transformer Engine's, which keeps a map of every token and expert for backward.
    FusePermute,
    /// A router keeps for backward, as 32-bit integers, the row to which every choice of an expert was sent, the row it
    /// came from, and the first row of each expert, beside the chosen experts' numbers (our own executor).
    KeepRowIndices,
    /// Before rows are sent to experts, ranks tell each other how many each of them gets, and the host waits for these numbers: only
    /// then does it know the sizes of messages and products. In forward, and where forward runs again, the GPU has by then done
    /// all that was issued (Megatron-Core and torchtitan, `token_dispatcher.py`).
    ReadTokenCounts,
    /// The host waits for the GPU before and after every forward and backward pass of a micro-batch, to time it (Megatron-LM@v2.6,
    /// `schedules.py`; `global_vars.py`, `_Timer`; until 77efcccb93 of August 2022).
    WaitAfterPasses,
    /// Before each micro-batch the host waits until the GPU has done all its work. Assumed only without pipeline parallelism (DeepSpeed
    /// `utils/timer.py`, `ThroughputTimer.start`; transformers `Trainer`, which reads every loss under `logging_nan_inf_filter`).
    WaitAfterMicroBatches,
    /// The host waits for the GPU after messages between pipeline stages that are not sent beside passes (Megatron-Core
    /// `p2p_communication.py`, `batch_p2p_sync`; nanotron `pipeline_parallel/p2p.py`, whose receiver reads the shape of every message).
    WaitAfterTransfers,
    /// The system first reduces all gradients of a micro-batch, and only then issues the kernels of the next one (DeepSpeed `zero/stage_1_and_2.py`,
    /// `independent_gradient_partition_epilogue`).
    WaitForReductions,
    /// Each expert's products are launched one after another rather than as one kernel of all experts (Transformer
    /// Engine's `GroupedLinear` calls cuBLAS for every expert, in C++). Together with [`Self::WeightActivations`] it describes
    /// Megatron-Core's `TEGroupedMLP`, in which PyTorch, not the kernels of products, clamps activations and adds the last bias.
    LaunchExpertsApart,
    /// The router's probabilities multiply outputs of experts' activations, not of experts, so that
    /// combining keeps no rows for their gradients (Megatron-Core `moe/experts.py` at 5be9626,
    /// `weighted_bias_swiglu_impl`).
    WeightActivations,
    /// Norms and gate around a recurrence are not part of its kernels: gate and norm of its output are two kernels, and queries and
    /// keys of the gated delta rule are normed before they are copied for every value head. Each of the two keeps a tensor more
    /// (Megatron-Core `ssm/mamba_mixer.py`, `ssm/gated_delta_net/common.py`).
    SplitRecurrence,
    /// Rows that experts return are cast to 32 bits to be multiplied by the router's weights, which keeps the rows in 32 bits for the
    /// gradient of these weights (torchtitan, `models/common/token_dispatcher.py`, `combine`).
    WeighRowsInF32,
    /// The router's product and softmax run in 32 bits: casts of the tokens and of the weight are made and kept (torchtitan since
    /// ab5ed59 of March 2026, `models/common/moe.py`).
    GateInF32,
    /// Unused entries are added to the vocabulary until each tensor-parallel rank has a multiple of 128. Then every row of the
    /// logits starts where matrix units can read it (Megatron-LM `core/tokenizers/utils/build_tokenizer.py` at 5be9626, `vocab_size_with_padding`).
    PadVocabulary,
    /// One kernel computes all experts' matrix products with instructions that Ampere already has, not with Hopper's faster
    /// ones (our own executor, `grouped.cu`).
    PortableExperts,
    /// The optimizer is one kernel over all tensors.
    FusedOptimizer,
    /// The optimizer step launches separate kernels for every parameter tensor: to clip its gradient, to update it, and to clear
    /// its gradient (Hugging Face's Trainer before Transformers 4.30).
    OptimizerByTensor,
    /// Gradients are freed after the optimizer step (PyTorch's `Optimizer.zero_grad` sets them to none), so that none exists until
    /// the next step runs backward. Then autograd adds up those of its later micro-batches.
    ReleaseGradients,
    /// The optimizer step reads 32-bit copies of the gradients that the rank updates. Under ZeRO-1 and 2 it copies them all at once
    /// (`fused_optimizer.py`, `grads_groups_flat`); DeepSpeed's engine first joins them to one tensor of their own type, then casts that
    /// tensor to 32 bits (@edaa722, `zero/stage_1_and_2.py:2356`). Under ZeRO-3 it does so with a billion gradients at a time
    /// (`stage3.py`, `_prepare_fp32_grad_for_sub_group`).
    CopyGradientsForStep,
}

/// A set of rewrites, as bits, because costs look rewrites up for every block and operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rewrites(u128);

const _: () = assert!(Rewrite::VARIANTS.len() <= u128::BITS as usize);

impl Rewrites {
    /// Whether a rewrite is in the set.
    #[must_use]
    pub fn contains(self, rewrite: &Rewrite) -> bool {
        self.0 & Self::bit(*rewrite) != 0
    }

    /// Adds a rewrite.
    pub fn insert(&mut self, rewrite: Rewrite) {
        self.0 |= Self::bit(rewrite);
    }

    /// Takes a rewrite out; returns whether it was in the set.
    pub fn remove(&mut self, rewrite: &Rewrite) -> bool {
        let had = self.contains(rewrite);
        self.0 &= !Self::bit(*rewrite);
        had
    }

    /// All members.
    pub fn iter(self) -> impl Iterator<Item = Rewrite> {
        let all = Rewrite::VARIANTS.iter().copied();
        all.filter(move |rewrite| self.contains(rewrite))
    }

    fn bit(rewrite: Rewrite) -> u128 {
        1 << rewrite as u32
    }
}

impl Extend<Rewrite> for Rewrites {
    fn extend<T: IntoIterator<Item = Rewrite>>(&mut self, others: T) {
        others.into_iter().for_each(|rewrite| self.insert(rewrite));
    }
}

impl Rewrite {
    /// Its name in a runtime's file.
    #[must_use]
    pub fn name(self) -> String {
        let name = serde_json::to_value(self).ok();
        name.and_then(|n| n.as_str().map(str::to_owned))
            .unwrap_or_default()
    }
}

/// Family of attention kernel.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum AttentionKernel {
    /// Two batched products and a softmax; scores are written.
    Unfused,
    /// FlashAttention 1.
    Flash1,
    /// FlashAttention 1 written in Triton instead of CUDA, of which llm-foundry has a copy.
    FlashTriton,
    /// FlashAttention 2.
    Flash2,
    /// This project's own kernels, whose backward computes the scores twice, so that every sum has
    /// one order: seven products instead of FlashAttention's five.
    Flash2TwoPass,
    /// FlashAttention 3 on Hopper, cuDNN SDPA on Hopper and Blackwell; FlashAttention 2 elsewhere.
    CudnnOrFlash3,
    /// The same, but in 8-bit jobs cuDNN's kernels for 8 bits (Transformer Engine's `fp8_dpa`). Only Blackwell's are priced apart.
    CudnnFp8,
    /// Our own executor's kernels on GPUs: `cudnn_or_flash3` where cuDNN supports it (bf16, causal
    /// over whole sequences, no dropout, caps, sinks or ALiBi slopes); otherwise `flash2_two_pass`.
    CudnnElseTwoPass,
    /// The kernel that PyTorch 2.10 and later choose in `scaled_dot_product_attention`. In 16 bits it is cuDNN's kernel on Hopper and
    /// Blackwell, and FlashAttention 2 on other GPUs (`check_prefer_cudnn_attention` in `sdp_utils.cpp`). In 32 bits it is PyTorch's
    /// memory-efficient kernel, which is assumed to be as fast as FlashAttention 2. That kernel takes fewer key heads than query heads
    /// since PyTorch 2.14 (pull request 191085). Before, such a call ran operator by operator and kept all scores, which is not counted.
    Sdpa,
}

impl AttentionKernel {
    /// The kernel that runs on GPUs of an architecture if a training system asks for this one. FlashAttention and cuDNN's attention
    /// need Ampere or later; on Volta such systems run two products and a softmax instead (NVIDIA/TransformerEngine@d0067d0,
    /// `dot_product_attention/utils.py`). PyTorch's `scaled_dot_product_attention` has a memory-efficient kernel for Volta.
    #[must_use]
    pub fn on(self, architecture: Architecture) -> Self {
        let of_libraries = matches!(
            self,
            Self::Flash1 | Self::FlashTriton | Self::Flash2 | Self::CudnnOrFlash3 | Self::CudnnFp8
        );
        match of_libraries && architecture == Architecture::Volta {
            true => Self::Unfused,
            false => self,
        }
    }
}

/// Costs of a runtime that do not follow from the model: host time, memory outside tensors,
/// factors.
#[derive(Clone, Debug, PartialEq)]
pub struct Overheads {
    /// Host time to issue one kernel.
    pub launch: Sourced<Seconds>,
    /// Host time of one optimizer step beside kernels: data loading, logging, Python.
    pub step: Sourced<Seconds>,
    /// Time per byte of a rank's gradients, once per step, beside collectives and the optimizer's own
    /// traffic.
    pub gradient_byte: Sourced<Seconds>,
    /// Bytes of device memory that the optimizer reads and writes to update one element, if it is not Adam. 0 for Adam: how many
    /// bytes it moves is computed from the types of its states.
    pub optimizer_bytes: Sourced<f64>,
    /// Host time to update one parameter tensor, if the optimizer updates tensors one after another and the host waits for the device
    /// before each of them. 0 if the host does not wait.
    pub optimizer_tensor: Sourced<Seconds>,
    /// Host time to gather one gradient and find its norm, if clipping gathers every gradient that tensor parallelism shards. 0 if
    /// clipping adds up the norms of shards instead.
    pub whole_gradient: Sourced<Seconds>,
    /// Host time that PyTorch's DTensor takes for one linear layer in one pass under tensor parallelism, beside the launch of its
    /// kernels. 0 without DTensor, or if layers are compiled.
    pub parallel_linear: Sourced<Seconds>,
    /// Time of one transfer between pipeline stages beside its bytes: synchronisation with the host.
    pub transfer: Sourced<Seconds>,
    /// Device memory outside the allocator: context, library handles.
    pub context: Sourced<Bytes>,
    /// Workspaces of libraries.
    pub workspace: Sourced<Bytes>,
    /// Buffers of communicators, in jobs of several GPUs.
    pub communicators: Sourced<Bytes>,
    /// Reserved over allocated memory, at least 1: fragmentation and rounding.
    pub fragmentation: Sourced<f64>,
    /// Factor, at least 1, by which kernels take longer while NCCL's collectives run beside them, on GPUs whose power does not limit
    /// matrix products.
    pub overlap_slowdown: Sourced<f64>,
}
