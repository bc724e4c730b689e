//! The memory of a block: what it keeps for backward, and what its passes need in addition.

use catalog::runtime::Rewrite;
use catalog::{Axis, Bytes};
use dtensor::{CollectiveKind, Exchange, Op, Operator, TensorRole, Trace};
use plans::Recompute;

use super::casts;
use super::chunked_loss::Head;
use super::context;
use super::kernel::{Kernel, Lowered};
use super::loss;
use super::lowering::Lowering;
use super::saved::{kept, kept_by_loss, weight_half_bytes};
use super::saved_tensor::SavedTensor;
use super::tensor_set::TensorSet;

/// Memory of a block for one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockMemory {
    /// Bytes kept from forward to backward.
    pub saved_bytes: Bytes,
    /// Bytes that the weight half of a split backward needs: kept activations, and the output gradients it reads.
    pub saved_for_weight: Bytes,
    /// Peak bytes of forward, in addition to what is kept.
    pub transient_forward: Bytes,
    /// Peak bytes of backward, in addition to what is kept; includes recomputed activations.
    pub transient_backward: Bytes,
}

impl BlockMemory {
    /// This memory with `more` bytes in the peaks of both passes.
    #[must_use]
    pub(crate) fn with_transient(self, more: Bytes) -> Self {
        Self {
            transient_forward: self.transient_forward + more,
            transient_backward: self.transient_backward + more,
            ..self
        }
    }
}

impl Lowering<'_> {
    /// Name and bytes of every tensor kept for backward.
    #[must_use]
    pub fn saved(&self, trace: &Trace, recompute: Recompute) -> Vec<(String, Bytes)> {
        let saved = kept(self, trace, recompute).into_iter();
        saved.map(|s| (s.name.to_string(), s.bytes)).collect()
    }

    /// The memory of a block whose weights are sharded over `tp` ranks, for each of several ways to recompute.
    #[must_use]
    pub fn memory(
        &self,
        trace: &Trace,
        lowered: &Lowered,
        modes: &[Recompute],
        tp: u64,
    ) -> Vec<BlockMemory> {
        if let Some(head) = Head::divided(self, trace) {
            return vec![self.memory_of_chunks(trace, &head, tp); modes.len()];
        }
        let fused = self.has(Rewrite::FuseGradientAccumulation);
        let casts = casts::held(self, trace);
        let none = TensorSet::new(trace);
        let of_loss = loss::backward(self, trace, tp);
        let backward = peak_transient(trace, &lowered.backward, &none, fused).max(of_loss);
        let beside = casts + context::gathered_by_ring(self, trace);
        let backward = backward + beside + keys_and_values_gathered_again(self, trace);
        let beside = beside + loss::forward(self, trace, tp);
        let sum = |saved: &[SavedTensor<'_>]| saved.iter().map(|s| s.bytes).sum::<Bytes>();
        // Activations that are recomputed for the input half stay until the weight half.
        let all = kept(self, trace, Recompute::None);
        let saved_for_weight = weight_half_bytes(trace, &all);
        let of_mode = |&mode: &Recompute| {
            let recomputed = match mode {
                Recompute::None => None,
                _ => Some(kept(self, trace, mode)),
            };
            let saved = recomputed.as_ref().unwrap_or(&all);
            let held = TensorSet::of(trace, saved.iter().filter_map(|s| s.storage));
            let saved_bytes = sum(saved);
            let rebuilt = recomputed.map_or(Bytes(0), |_| sum(&all).saturating_sub(saved_bytes));
            let forward = peak_transient(trace, &lowered.forward, &held, fused);
            BlockMemory {
                saved_bytes,
                saved_for_weight,
                transient_forward: forward + beside,
                transient_backward: backward + rebuilt,
            }
        };
        modes.iter().map(of_mode).collect()
    }

    /// The memory of a head whose loss runs in chunks. A head recomputes nothing.
    fn memory_of_chunks(&self, trace: &Trace, head: &Head<'_>, tp: u64) -> BlockMemory {
        let Lowered { forward, backward } = self.lower_whole(trace);
        let saved = kept(self, trace, Recompute::None);
        let held = TensorSet::of(trace, saved.iter().filter_map(|s| s.storage));
        let casts = casts::held(self, trace);
        let forward = peak_transient(trace, &forward, &held, true) + loss::forward(self, trace, tp);
        let of_loss = loss::backward(self, trace, tp);
        let backward = peak_transient(trace, &backward, &TensorSet::new(trace), true).max(of_loss);
        let of_all = forward.max(kept_by_loss(self, trace, head) + backward) + casts;
        let hidden = head.hidden().bytes();
        BlockMemory {
            saved_bytes: saved.iter().map(|s| s.bytes).sum(),
            // Only the last norm remains for the backward pass. Its weight half needs the norm's input and the gradient of its output.
            saved_for_weight: hidden * 2,
            transient_forward: head.transient(self, of_all),
            // The gradient of the norm's input.
            transient_backward: hidden,
        }
    }
}

/// Bytes of the keys and values that backward gathers again before attention.
fn keys_and_values_gathered_again(lowering: &Lowering<'_>, trace: &Trace) -> Bytes {
    let again = |op: &&Op| match op.operator {
        Operator::Exchange(Exchange { collective: c, .. }) => {
            c.kind == CollectiveKind::AllGather
                && c.axis == Axis::Cp
                && lowering.gathers_again(c.axis)
        }
        _ => false,
    };
    let outputs = trace
        .forward
        .iter()
        .filter(again)
        .flat_map(|op| &op.outputs);
    outputs.map(|&id| trace.tensor(id).bytes()).sum()
}

/// Peak bytes of tensors that these kernels write and that are not in `kept`, each alive from its
/// write to its last read. `fused_weight_gradients` says that weight gradients go straight into
/// the accumulation buffer.
fn peak_transient(
    trace: &Trace,
    kernels: &[Kernel],
    kept: &TensorSet,
    fused_weight_gradients: bool,
) -> Bytes {
    let last = last_use(trace, kernels);
    let mut live = Bytes(0);
    let mut peak = Bytes(0);
    let mut alive = TensorSet::new(trace);
    for (index, kernel) in kernels.iter().enumerate() {
        let weight_gradient =
            kernel.pass == dtensor::Pass::BackwardWeight && fused_weight_gradients;
        for &id in &kernel.writes {
            let storage = trace.tensor(id).storage;
            let info = trace.tensor(storage);
            let counts = matches!(info.role, TensorRole::Activation | TensorRole::Gradient)
                && !kept.contains(storage)
                && !weight_gradient;
            if counts && alive.insert(storage) {
                live += info.bytes();
            }
        }
        peak = peak.max(live);
        for &id in kernel.reads.iter().chain(&kernel.writes) {
            let storage = trace.tensor(id).storage;
            let done = last[storage.0 as usize] <= index;
            let leaves = trace
                .output
                .is_some_and(|o| trace.tensor(o).storage == storage);
            if done && !leaves && alive.remove(storage) {
                live = live.saturating_sub(trace.tensor(storage).bytes());
            }
        }
    }
    peak
}

/// For every tensor, the index of the last kernel that reads its storage; 0 if none does.
fn last_use(trace: &Trace, kernels: &[Kernel]) -> Vec<usize> {
    let mut last = vec![0; trace.tensors.len()];
    for (index, kernel) in kernels.iter().enumerate() {
        for &id in &kernel.reads {
            last[trace.tensor(id).storage.0 as usize] = index;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use catalog::{DType, Fp8Recipe};
    use dtensor::{Product, Site, TensorId};
    use models::BlockLayout;

    use super::*;
    use crate::lower::testing::{TOKENS, layer, model, runtime};

    /// Bytes kept per element of a tensor, with scales from earlier steps and with the tensor's
    /// own.
    fn kept_of(trace: &Trace, of: TensorId) -> [u64; 2] {
        let runtime = runtime("megatron-core");
        let of = trace.tensor(of);
        [Fp8Recipe::Delayed, Fp8Recipe::Tensorwise].map(|recipe| {
            let saved = Lowering::new(&runtime, recipe).saved(trace, Recompute::None);
            let copies = saved.iter().filter(|(name, _)| name.starts_with(&of.name));
            copies.map(|(_, bytes)| bytes.0).sum::<u64>() / of.elements()
        })
    }

    /// Attention keeps its output, and the router its input, in 16 bits. 8-bit products then need
    /// no copy of their own, unless scales are delayed.
    #[test]
    fn products_in_8_bits_keep_no_copy_of_what_others_keep() {
        let layout = BlockLayout {
            eight_bits: true,
            ..BlockLayout::alone(1, TOKENS, DType::Bf16)
        };
        let shared = catalog::load::model("llama4-scout").expect("a preset");
        for model in [model("llama", ""), shared] {
            let trace = layer(&model, &layout);
            let attended = trace.forward[trace.attentions[0].context].outputs[0];
            assert_eq!(kept_of(&trace, attended), [3, 2], "{}", model.name);
            let router = trace.forward.iter().find(|op| {
                matches!(
                    op.operator,
                    Operator::Product(Product::Matmul(_, Site::Router))
                )
            });
            if let Some(router) = router {
                assert_eq!(kept_of(&trace, router.inputs[0]), [3, 2], "{}", model.name);
            }
        }
    }
}
