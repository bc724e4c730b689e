//! Lowering: from the unfused trace to the kernels that a runtime launches.
//!
//! Lowering is a fold over the traced operators. The runtime's closed set of [`Rewrite`]s decides which operators share
//! a kernel, which tensors are kept for backward and which collectives overlap; nothing here knows a model.

mod autocast;
mod autocast_operators;
pub(crate) mod casts;
mod checkpoint;
mod chunked_loss;
mod compiled_casts;
mod context;
mod elementary_gelu;
mod elementary_norm;
mod elementary_rope;
mod expert_operators;
mod fuse;
mod gated;
mod input_copies;
mod kernel;
mod loss;
mod lowering;
mod masked;
mod memory;
mod modules;
mod narrow_attention;
mod norm_copies;
pub(crate) mod rearranged;
mod recomputed;
mod row_indices;
mod saved;
mod saved_tensor;
mod softmax;
mod split_recurrence;
mod sums;
mod tensor_set;
#[cfg(test)]
pub(crate) mod testing;
mod vocabulary;
mod wide_routing;

use catalog::runtime::Rewrite;
use dtensor::Trace;

use self::chunked_loss::Head;
pub use kernel::{FusedAttention, Kernel, KernelKind, Lowered};
pub use lowering::Lowering;
pub use memory::BlockMemory;
pub use recomputed::recomputed;

impl Lowering<'_> {
    /// The kernels of both passes.
    #[must_use]
    pub fn lower(&self, trace: &Trace) -> Lowered {
        let mut lowered = self.lower_whole(trace);
        if let Some(head) = Head::divided(self, trace) {
            head.divide(self, &mut lowered);
        }
        lowered
    }

    /// The kernels of both passes if the loss runs over all tokens at once.
    fn lower_whole(&self, trace: &Trace) -> Lowered {
        let mut lowered = Lowered {
            forward: fuse::kernels(self, trace, &trace.forward_ops().collect::<Vec<_>>()),
            backward: fuse::kernels(self, trace, &trace.backward_ops().collect::<Vec<_>>()),
        };
        if self.has(Rewrite::FuseGeluEpilogue) {
            fuse::gelus(trace, &mut lowered);
        }
        lowered
    }
}

#[cfg(test)]
mod tests {
    use catalog::DType;
    use catalog::runtime::AttentionKernel;
    use models::BlockLayout;

    use super::testing::{layer, lowered, runtime};
    use super::*;

    /// What runs core attention in a layer of 32 tokens, forward and backward.
    fn kernels(model: &str, of_runtime: &str, activation: DType) -> Vec<AttentionKernel> {
        let model = catalog::load::model(model).expect("a preset");
        let trace = layer(&model, &BlockLayout::alone(1, 32, activation));
        let lowered = lowered(&runtime(of_runtime), &trace);
        let all = lowered.forward.iter().chain(&lowered.backward);
        all.filter_map(|kernel| match kernel.kind {
            KernelKind::Attention(of) => Some(of.kernel),
            _ => None,
        })
        .collect()
    }

    #[test]
    fn a_library_runs_the_attention_that_it_takes() {
        use AttentionKernel::{CudnnOrFlash3, Flash2, Flash2TwoPass};
        for (model, runtime, activation, kernel) in [
            ("llama3-8b", "vescale-cuda", DType::Bf16, CudnnOrFlash3),
            ("llama3-8b", "vescale-cuda", DType::F32, Flash2TwoPass),
            // Dropout; slopes; bounded scores.
            ("gpt2", "vescale-cuda", DType::Bf16, Flash2TwoPass),
            ("bloom-7b1", "vescale-cuda", DType::Bf16, Flash2TwoPass),
            ("gemma2-9b", "vescale-cuda", DType::Bf16, Flash2TwoPass),
            ("gpt2", "megatron-core", DType::Bf16, CudnnOrFlash3),
            ("gpt2", "hf-trainer", DType::Bf16, CudnnOrFlash3),
            ("llama3-8b", "hf-deepspeed", DType::Bf16, CudnnOrFlash3),
            ("llama3-8b", "fsdp2", DType::Bf16, CudnnOrFlash3),
            ("llama3-8b", "generic-eager", DType::Bf16, CudnnOrFlash3),
            ("llama3-8b", "torchtitan", DType::Bf16, CudnnOrFlash3),
            // FlexAttention, taken to be as fast.
            ("llama3-8b", "torchtitan-2026", DType::Bf16, Flash2),
            ("llama3-8b", "torchtitan-compile-2026", DType::Bf16, Flash2),
        ] {
            let got = kernels(model, runtime, activation);
            assert_eq!(got, [kernel; 2], "{model} {runtime} {activation:?}");
        }
    }

    /// The outputs of products that a layer of Llama keeps if operators are selected. Attention reads two of them, and the activation the
    /// third; backward does not read the last product's.
    #[test]
    fn a_compiler_keeps_of_selected_products_what_backward_reads() {
        let trace = testing::layer_of("llama3-8b");
        let kept = |name: &str| {
            let runtime = runtime(name);
            let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
            let saved = lowering
                .saved(&trace, plans::Recompute::SelectiveOps)
                .into_iter();
            let of_product = |name: &String| name.ends_with("_proj.output");
            saved
                .map(|(name, _)| name)
                .filter(of_product)
                .collect::<Vec<_>>()
        };
        let all = [
            "self_attn.q_proj.output",
            "self_attn.v_proj.output",
            "mlp.gate_proj.output",
            "mlp.down_proj.output",
        ];
        for (runtime, expected) in [
            ("torchtitan", &all[..]),
            ("torchtitan-compile", &all[..3]),
            ("torchtitan-compile-2025", &all[..3]),
        ] {
            let mut kept = kept(runtime);
            kept.sort_by_key(|name| all.iter().position(|of| of == name));
            assert_eq!(kept, expected, "{runtime}");
        }
    }

    #[test]
    fn pytorch_fuses_no_attention_with_sinks_caps_or_slopes() {
        for (model, runtime, fused) in [
            ("gpt-oss-20b", "hf-trainer", false),
            ("gpt-oss-20b", "hf-deepspeed", false),
            ("gpt-oss-20b", "megatron-core", true),
            ("gpt-oss-20b", "torchtitan-2026", true),
            ("gemma2-9b", "hf-trainer", false),
            ("gemma2-9b", "generic-fused", true),
            ("bloom-7b1", "hf-deepspeed", false),
        ] {
            let found = !kernels(model, runtime, DType::Bf16).is_empty();
            assert_eq!(found, fused, "{model} {runtime}");
        }
    }

    #[test]
    fn attention_in_32_bits_runs_where_a_kernel_takes_it() {
        use AttentionKernel::Flash2;
        for (runtime, in_32_bits) in [
            ("megatron-core", vec![]),
            ("nemo", vec![]),
            ("fsdp2", vec![Flash2; 2]),
            ("hf-trainer", vec![Flash2; 2]),
            ("hf-deepspeed", vec![Flash2; 2]),
            ("torchtitan", vec![]),
            ("fsdp1", vec![Flash2; 2]),
        ] {
            let [wide, narrow] =
                [DType::F32, DType::Bf16].map(|d| kernels("llama3-8b", runtime, d));
            assert_eq!((wide, narrow.len()), (in_32_bits, 2), "{runtime}");
        }
    }
}
