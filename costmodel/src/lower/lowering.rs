//! Which kernels and precisions a training system uses for the operators of a traced block.

use catalog::device::Architecture;
use catalog::runtime::{AttentionKernel, Rewrite};
use catalog::{Axis, DType, Dispatcher, Fp8Recipe, RecomputeModule, Runtime, Selection};
use dtensor::{
    AnyOp, AttentionShape, CollectiveKind, CostClass, Expert, Operator, Pass, Pointwise, Product,
    Site, TensorId, Token, Trace,
};
use plans::Recompute;

use crate::execution::Execution;

/// Lowers traced blocks to the kernels of one training system.
#[derive(Clone, Copy, Debug)]
pub struct Lowering<'a> {
    /// The training framework whose kernels and messages are predicted.
    runtime: &'a Runtime,
    /// How the operands of 8-bit products are scaled.
    pub(crate) fp8_recipe: Fp8Recipe,
    /// Whether kernels read parameters of 16 bits, because FSDP gathers them in 16 bits. They are held in 32.
    narrow_parameters: bool,
    /// Whether adapters have 32 bits when they are computed.
    wide_adapters: bool,
    /// What carries tokens to experts; `None` stands for whichever dispatcher has the kernels of least time.
    dispatcher: Option<Dispatcher>,
    /// Whether sequences end in padding, which no token may attend to.
    padded: bool,
    /// Whether matrix units read one 8-bit copy of an operand by rows and by columns. Others read a transposed copy by columns.
    reads_both_ways: bool,
}

impl<'a> Lowering<'a> {
    /// The lowering of a training system with its own defaults, except that it scales the operands of 8-bit products in this way.
    #[cfg(test)]
    pub(crate) fn new(runtime: &'a Runtime, fp8_recipe: Fp8Recipe) -> Self {
        let own = Execution::own(runtime);
        Self::of(runtime, &Execution { fp8_recipe, ..own })
    }

    /// The lowering of a training system that runs its kernels in the way that a strategy decided.
    #[must_use]
    pub(crate) fn of(runtime: &'a Runtime, execution: &Execution) -> Self {
        Self {
            runtime,
            fp8_recipe: execution.fp8_recipe,
            narrow_parameters: execution.narrow_parameters,
            wide_adapters: execution.wide_adapters,
            dispatcher: execution.dispatcher,
            padded: false,
            reads_both_ways: false,
        }
    }

    /// The same for sequences that end in padding if `padded` says so, and for whole ones if not.
    #[must_use]
    pub(crate) fn with_padding(self, padded: bool) -> Self {
        Self { padded, ..self }
    }

    /// The same on GPUs of this architecture.
    #[must_use]
    pub(crate) fn on(self, architecture: Architecture) -> Self {
        Self {
            reads_both_ways: are_read_both_ways(self.fp8_recipe, architecture),
            ..self
        }
    }

    /// Whether matrix units read one 8-bit copy of an operand by rows and by columns, so that no transpose is written.
    #[must_use]
    pub(super) fn reads_casts_both_ways(&self) -> bool {
        self.reads_both_ways
    }

    /// Whether another way to run blocks on the same training system has the same kernels. Only experts that run apart have other
    /// kernels under another dispatcher.
    #[must_use]
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        let alike = |lowering: &Self| {
            let of_experts = lowering.runs_experts_apart();
            let dispatcher = of_experts.then(|| lowering.dispatcher.map(Dispatcher::deduplicates));
            (lowering.fp8_recipe, lowering.narrow_parameters, dispatcher)
        };
        alike(self) == alike(other)
    }

    /// Whether the training system changes the operators in this way, such as by fusing bias and GELU.
    #[must_use]
    pub fn has(&self, rewrite: Rewrite) -> bool {
        self.runtime.rewrites.contains(&rewrite)
    }

    /// Whether one kernel rotates queries and keys as this operator does; it may be another operator, which no such kernel runs.
    #[must_use]
    pub fn fuses_rope(&self, operator: Operator) -> bool {
        let Operator::Pointwise(Pointwise::Rope(rotary)) = operator else {
            return false;
        };
        let scales = rotary.scaling.magnitude() != 1.0;
        self.has(Rewrite::FuseRope) && !(scales && self.has(Rewrite::UnscaledRope))
    }

    /// Whether attention runs in one kernel. cuDNN and FlashAttention 3, which runtimes with
    /// `cudnn_or_flash3` call by name, take 16-bit tensors only: in 32 bits these run two products and
    /// a softmax (Transformer Engine's unfused attention). The others' calls find a kernel for 32 bits:
    /// PyTorch's `scaled_dot_product_attention` its memory-efficient one. That function takes no sinks and
    /// no soft cap, so models with either run PyTorch's operators, as do models with ALiBi (Transformers 5.24:
    /// `_supports_sdpa` is false in `modeling_gpt_oss.py` and `modeling_gemma2.py`, and not set for BLOOM and MPT).
    #[must_use]
    pub fn fuses_attention(&self, trace: &Trace) -> bool {
        match self.runtime.attention {
            AttentionKernel::Unfused => false,
            AttentionKernel::CudnnOrFlash3 | AttentionKernel::CudnnFp8 => {
                !attends_in_32_bits(trace)
            }
            AttentionKernel::Flash1
            | AttentionKernel::FlashTriton
            | AttentionKernel::Flash2
            | AttentionKernel::Flash2TwoPass
            | AttentionKernel::CudnnElseTwoPass => true,
            AttentionKernel::Sdpa => trace.attentions.iter().all(|of| of.rule.is_plain()),
        }
    }

    /// Whether Transformers computes attention by separate operators (`eager_attention_forward` in the files of its models), because
    /// PyTorch's `scaled_dot_product_attention` cannot.
    #[must_use]
    pub(super) fn attends_by_operators(&self, trace: &Trace) -> bool {
        self.runtime.attention == AttentionKernel::Sdpa && !self.fuses_attention(trace)
    }

    /// Whether a kernel of attention gets a window, or the padding of sequences, as a mask of all queries and keys, from which it cannot
    /// tell what to leave out.
    #[must_use]
    pub(super) fn masks_keys(&self, trace: &Trace, shape: AttentionShape) -> bool {
        let windowed = shape.window.is_some_and(|w| w.tokens() <= shape.kv_len);
        self.runtime.attention == AttentionKernel::Sdpa
            && self.fuses_attention(trace)
            && (windowed || self.padded)
    }

    /// Whether keys and values are copied for every query head before attention even if it gets no mask.
    #[must_use]
    pub(super) fn copies_keys(&self, trace: &Trace) -> bool {
        self.has(Rewrite::RepeatKeys) || self.attends_by_operators(trace)
    }

    /// Whether keys and values are copied for every query head before attention, and the copies kept.
    #[must_use]
    pub(super) fn repeats_keys(&self, trace: &Trace, shape: AttentionShape) -> bool {
        shape.heads > shape.kv_heads && (self.copies_keys(trace) || self.masks_keys(trace, shape))
    }

    /// The kernel that runs the core attention with index `of` among those of the trace.
    #[must_use]
    pub fn attention_kernel(&self, trace: &Trace, of: usize) -> AttentionKernel {
        match self.runtime.attention {
            AttentionKernel::CudnnElseTwoPass => match trace.causal_attention(of) {
                Some(_) => AttentionKernel::CudnnOrFlash3,
                None => AttentionKernel::Flash2TwoPass,
            },
            AttentionKernel::Sdpa => match attends_in_32_bits(trace) {
                true => AttentionKernel::Flash2,
                false => AttentionKernel::CudnnOrFlash3,
            },
            AttentionKernel::CudnnFp8 if !trace.eight_bits => AttentionKernel::CudnnOrFlash3,
            kernel => kernel,
        }
    }

    /// Whether an operator keeps the 8-bit copy of its input for backward, and not the input itself.
    #[must_use]
    pub fn keeps_quantised(&self, trace: &Trace, operator: Operator) -> bool {
        self.has(Rewrite::SaveQuantisedInputs)
            && matches!(operator, Operator::Product(p)
                if self.is_eight_bit(trace, p) && !self.keeps_original(trace, p))
    }

    /// Whether a product of 8 bits keeps its input as it is, because another operator keeps it anyway: attention its own output, and
    /// the router the tokens that shared experts read too. Backward casts it again, which gives the same numbers unless scales come
    /// from earlier steps (NVIDIA/Megatron-LM@d98e8a6, `set_save_original_input` in `attention.py`, `multi_latent_attention.py` and
    /// `moe/shared_experts.py`; Transformer Engine 2.6 and later).
    #[must_use]
    pub fn keeps_original(&self, trace: &Trace, product: Product) -> bool {
        let Product::Matmul(_, site) = product else {
            return false;
        };
        let kept_by_another = match site {
            Site::AttentionOutput => !trace.attentions.is_empty(),
            Site::FeedForwardInput => has_router(trace),
            Site::AttentionInput
            | Site::FeedForwardOutput
            | Site::Router
            | Site::Adapter
            | Site::Vocabulary
            | Site::Other => false,
        };
        kept_by_another
            && self.has(Rewrite::SaveQuantisedInputs)
            && self.fp8_recipe != Fp8Recipe::Delayed
            && self.is_eight_bit(trace, product)
    }

    /// Whether tensor-parallel gathers around 8-bit linears move 8-bit values, which they cannot if every row has a scale.
    #[must_use]
    pub fn gathers_quantised(&self) -> bool {
        self.has(Rewrite::GatherQuantised) && self.fp8_recipe != Fp8Recipe::Rowwise
    }

    /// The tensor-parallel gather that makes a tensor in 8 bits; `None` if no such gather makes it.
    #[must_use]
    pub fn quantised_gather<'t>(&self, trace: &'t Trace, id: TensorId) -> Option<AnyOp<'t>> {
        let gathers = |op: &AnyOp<'_>| {
            matches!(op.cost(), CostClass::Collective(of)
                if of.axis == Axis::Tp && of.kind == CollectiveKind::AllGather)
                && !is_routed(trace, op)
        };
        let producer = self.gathers_quantised().then(|| trace.producer(id));
        producer.flatten().filter(gathers)
    }

    /// Whether backward repeats gathers over this axis, whose results are not kept.
    #[must_use]
    pub fn gathers_again(&self, axis: Axis) -> bool {
        self.has(Rewrite::RegatherSequenceParallelInput) && matches!(axis, Axis::Tp | Axis::Cp)
    }

    /// Whether a recomputation runs core attention again because it is selected.
    #[must_use]
    pub fn selects_attention(&self, recompute: Recompute) -> bool {
        let selected = self.selected(recompute);
        selected.is_some_and(|modules| modules.contains(RecomputeModule::CoreAttention))
    }

    /// Whether a compiled pointwise kernel makes this tensor.
    #[must_use]
    pub fn made_by_compiled_pointwise(&self, trace: &Trace, id: TensorId) -> bool {
        let pointwise = || {
            trace
                .producer(id)
                .is_some_and(|op| op.cost().is_pointwise())
        };
        self.has(Rewrite::FusePointwise) && pointwise()
    }

    /// Whether gathers and scatters of sequences can be split as PyTorch's asynchronous tensor parallelism does.
    #[must_use]
    pub fn splits_messages(&self) -> bool {
        self.runtime.space.tensor_parallel_overlap
            && !self.has(Rewrite::AsyncTensorParallelBackward)
    }

    /// Whether nothing runs beside the messages of ring attention. `torch.compile` traces a collective together with the wait for it,
    /// and by default leaves the wait right after the collective (`reorder_for_compute_comm_overlap` in PyTorch's `_inductor/config.py`).
    #[must_use]
    pub fn waits_for_ring(&self) -> bool {
        self.has(Rewrite::RingInPytorch) && self.has(Rewrite::FusePointwise)
    }

    /// The parts of a layer that a recomputation runs again, if it selects parts.
    #[must_use]
    pub fn selected(&self, recompute: Recompute) -> Option<Selection> {
        match recompute {
            Recompute::Selective => Some(self.runtime.selective),
            Recompute::Modules(selection) => Some(selection),
            Recompute::None
            | Recompute::Full
            | Recompute::Layers(_)
            | Recompute::Falling(_)
            | Recompute::SelectiveOps => None,
        }
    }

    /// Whether a product runs in 8 bits.
    #[must_use]
    pub fn is_eight_bit(&self, trace: &Trace, product: Product) -> bool {
        match product {
            Product::Matmul(..) => trace.is_eight_bit(product),
            Product::GroupedMatmul(..) => self.narrows_experts(trace),
        }
    }

    /// Whether products of 8 bits run in 16 in this pass, although their operands are cast.
    #[must_use]
    pub fn widens(&self, pass: Pass) -> bool {
        pass == Pass::Forward && self.has(Rewrite::WideForwardProducts)
    }

    /// Whether modules run under `torch.autocast`, which computes some operators in 32 bits although activations have fewer.
    /// That is so if parameters are held in 32 bits and `activations` is a smaller type.
    #[must_use]
    pub fn autocasts(&self, activations: DType) -> bool {
        self.has(Rewrite::Autocast)
            && self.runtime.states.parameter == Some(DType::F32)
            && activations.size() < DType::F32.size()
    }

    /// Whether `torch.autocast` leaves the residual stream in 32 bits, and with it what norms of Llama's kind return. That is so if
    /// kernels read parameters in 32 bits: the embedding returns its table's type, and a product of a norm's weight with 16 bits has 32.
    #[must_use]
    pub fn widens_stream(&self, activations: DType) -> bool {
        self.autocasts(activations) && !self.narrow_parameters
    }

    /// Whether Transformer Engine orders rows of experts, from a map of its own.
    #[must_use]
    pub fn maps_rows(&self) -> bool {
        self.has(Rewrite::FusePermute) && !self.has(Rewrite::KeepRowIndices)
    }

    /// Whether each adapter casts its input to 32 bits, the type of its weights, and `torch.autocast` casts that back to 16.
    #[must_use]
    pub fn casts_for_adapters(&self, activations: DType) -> bool {
        self.autocasts(activations) && self.wide_adapters
    }

    /// Whether experts run as in Megatron-Core's `TEGroupedMLP`: each expert's products are launched by themselves, and between
    /// them PyTorch adds biases and clamps activations.
    #[must_use]
    pub fn runs_experts_apart(&self) -> bool {
        self.has(Rewrite::LaunchExpertsApart) && self.has(Rewrite::WeightActivations)
    }

    /// The element type in which the router's weights multiply what experts return. DeepEP and HybridEP send them in 32
    /// bits (Megatron-Core `token_dispatcher.py`); other dispatchers leave them in the type of the layer's activations, as long
    /// as `moe_router_dtype` is not set.
    #[must_use]
    pub fn router_weights(&self, layer: DType) -> DType {
        match self.dispatcher.is_some_and(Dispatcher::deduplicates) {
            true => DType::F32,
            false => layer,
        }
    }

    /// Whether the rows of each expert are copied to add padding. A matrix product in 8 bits needs a multiple of 16 rows. So
    /// Megatron-Core copies an expert's rows into a longer tensor before the products, and copies the results back without the
    /// padding (NVIDIA/Megatron-LM@d98e8a6, `moe/experts.py`, `quantization_padding`). DeepEP and HybridEP deliver rows that
    /// are padded already, and need no copies (`moe/moe_utils.py`, `skip_routed_expert_padding`).
    #[must_use]
    pub fn pads_experts(&self, trace: &Trace) -> bool {
        let copied = self.dispatcher.is_some_and(|of| !of.deduplicates());
        self.runs_experts_apart() && self.narrows_experts(trace) && copied
    }

    /// Whether the experts' matrix products run in 8 bits.
    fn narrows_experts(&self, trace: &Trace) -> bool {
        trace.eight_bits && !self.has(Rewrite::WideExperts)
    }
}

/// Whether matrix units read one 8-bit copy of an operand by rows and by columns. Blackwell's do so if the whole tensor has one scale;
/// in all other cases a product that reads by columns reads a second, transposed copy (Transformer Engine at d0067d0,
/// `csrc/quantizer.cpp`, `nvte_is_non_tn_fp8_gemm_supported`).
pub(super) fn are_read_both_ways(recipe: Fp8Recipe, architecture: Architecture) -> bool {
    let one_scale = matches!(recipe, Fp8Recipe::Delayed | Fp8Recipe::Tensorwise);
    one_scale && architecture == Architecture::Blackwell
}

/// Whether experts' rows are copied from what an operator writes, or its result is the gradient of what they are added up to.
pub(super) fn is_routed(trace: &Trace, op: &AnyOp<'_>) -> bool {
    let routes = |of: AnyOp<'_>| {
        matches!(of.cost(), CostClass::Permute | CostClass::Unpermute)
            && of.inputs.contains(&op.outputs[0])
    };
    match op.pass {
        Pass::Forward => trace.forward_ops().any(routes),
        Pass::BackwardInput | Pass::BackwardWeight => trace.backward_ops().any(routes),
    }
}

/// Whether a block is the model's head, the only block that computes the loss.
pub(super) fn has_loss(trace: &Trace) -> bool {
    let mut last = trace.forward.iter().rev();
    last.any(|op| matches!(op.operator, Operator::Token(Token::CrossEntropy(_))))
}

/// Whether a block has experts that a router chooses.
fn has_router(trace: &Trace) -> bool {
    let mut ops = trace.forward.iter();
    ops.any(|op| matches!(op.operator, Operator::Expert(Expert::Route(_))))
}

/// Whether the block's attention computes in 32 bits.
fn attends_in_32_bits(trace: &Trace) -> bool {
    let first = trace.attentions.first();
    first.is_some_and(|attention| {
        let query = trace.forward[attention.scores].inputs[0];
        trace.tensor(query).dtype == DType::F32
    })
}
