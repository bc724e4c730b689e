//! A head and a loss that run over chunks of a micro-batch's tokens.
//!
//! torchtitan 0.3 divides the hidden states that the last norm returns into eight chunks. For each chunk in turn it computes logits, loss
//! and gradients, so that memory holds the logits of one chunk, not those of all tokens (`components/loss.py`, `ChunkedLossWrapper`). The
//! products then have an eighth of the rows. FSDP adds up the gradients of the head's weight in 32 bits: the first chunk's are cast, each
//! later chunk's are added (PyTorch 2.15, `_fsdp_param_group.py`, `_set_unsharded_grad_dtypes`).
//!
//! Not modelled: torchtitan runs the backward pass of head and loss within the forward pass of the last pipeline stage. Here its time
//! counts as backward.

use catalog::Bytes;
use catalog::runtime::Rewrite;
use dtensor::{Pass, TensorId, TensorInfo, Trace};

use super::kernel::{Chain, Kernel, KernelKind, Lowered, WIDE};
use super::lowering::{Lowering, has_loss};

/// Number of chunks (`ChunkedLossWrapper.Config.num_chunks`).
const CHUNKS: u64 = 8;

/// The product of a model's head: the first operator that runs in chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head<'t> {
    trace: &'t Trace,
    /// Index of the product among the operators of forward.
    product: usize,
    /// The hidden states that it reads.
    hidden: TensorId,
    /// Its weight.
    weight: TensorId,
}

impl<'t> Head<'t> {
    /// The head of a traced block, if the runtime runs it in chunks.
    pub(super) fn divided(lowering: &Lowering<'_>, trace: &'t Trace) -> Option<Self> {
        if !lowering.has(Rewrite::ChunkLoss) || !has_loss(trace) {
            return None;
        }
        let mut ops = trace.forward.iter();
        let product = ops.rposition(|op| matches!(op.operator, dtensor::Operator::Product(_)))?;
        let &[hidden, weight, ..] = trace.forward[product].inputs.as_slice() else {
            return None;
        };
        Some(Self {
            trace,
            product,
            hidden,
            weight,
        })
    }

    /// Replaces the kernels of head and loss by those of eight chunks, and adds the kernels that join the chunks' gradients.
    pub(super) fn divide(&self, lowering: &Lowering<'_>, lowered: &mut Lowered) {
        let Lowered { forward, backward } = lowered;
        let first = forward.iter().position(|of| of.op >= self.product);
        let of_loss = forward.split_off(first.unwrap_or(forward.len()));
        forward.extend(in_chunks(&of_loss));

        let is_product = |of: &Kernel| matches!(of.kind, KernelKind::Gemm { .. });
        let last = backward.iter().rposition(is_product);
        let after = backward.split_off(last.map_or(0, |last| last + 1));
        let of_loss = std::mem::take(backward);
        let of_pass = |pass| of_loss.iter().find(move |of| of.pass == pass);
        let summed = self.holds_gradients(lowering);
        let sums = of_pass(Pass::BackwardWeight).filter(|_| summed);
        let sums = sums.map(|of| of.beside(self.weight_sums()));
        let copies = of_pass(Pass::BackwardInput).map(|of| of.beside(self.hidden_copies()));
        backward.extend(in_chunks(&of_loss));
        backward.extend(sums.into_iter().chain(copies).chain(after));
    }

    /// The kernels that add up the gradients of the weight: one casts the first chunk's to 32 bits, and one adds each later chunk's.
    fn weight_sums(&self) -> Chain {
        let weight = self.trace.tensor(self.weight);
        let narrow = weight.dtype.size();
        let cast = if narrow < WIDE { narrow + WIDE } else { 0 };
        let sum = WIDE + narrow + WIDE;
        Chain {
            bytes: Bytes(weight.elements() * (cast + (CHUNKS - 1) * sum)),
            launches: CHUNKS as u32,
        }
    }

    /// The copies of the hidden states and of their gradients. The hidden states of a chunk are copied if it has several sequences. A
    /// buffer of 32-bit numbers is cleared first. Then every chunk's gradients are cast to 32 bits and copied into the buffer. At the end
    /// the whole buffer is cast back to the type of the hidden states.
    fn hidden_copies(&self) -> Chain {
        let hidden = self.trace.tensor(self.hidden);
        let narrow = hidden.dtype.size();
        let (cast, casts) = match narrow < WIDE {
            true => (narrow + WIDE, CHUNKS + 1),
            false => (0, 0),
        };
        let (chunk, chunks) = match self.copies_chunks() {
            true => (2 * narrow, CHUNKS),
            false => (0, 0),
        };
        let into_buffer = WIDE + WIDE;
        Chain {
            bytes: Bytes(hidden.elements() * (chunk + WIDE + cast + into_buffer + cast)),
            launches: (chunks + 1 + casts + CHUNKS) as u32,
        }
    }

    /// Whether chunks are copied. A chunk of a single sequence is a part of the hidden states that needs no copy.
    fn copies_chunks(&self) -> bool {
        self.trace.tensor(self.hidden).shape.first() > Some(&1)
    }

    /// The hidden states that the product reads.
    pub(super) fn hidden(&self) -> &'t TensorInfo {
        self.trace.tensor(self.hidden)
    }

    /// Peak bytes of head and loss in addition to what is kept. `of_all` is what they would need for all tokens at once, without the
    /// weight's gradients. The peak is an eighth of that, the weight's gradients, which are as large for one chunk as for all tokens, the
    /// 32-bit buffer of the hidden states' gradients, and copies of chunks.
    ///
    /// The sums of the weight's gradients are not counted: `of_rank.rs` counts gradients of a block until they are reduced. It counts their
    /// copy for the reduction in 16 bits, though these have 32; the 16-bit gradients here, which are gone by then, make up for that.
    pub(super) fn transient(&self, lowering: &Lowering<'_>, of_all: Bytes) -> Bytes {
        let hidden = self.hidden();
        let copies = match self.copies_chunks() {
            true => hidden.bytes(),
            false => Bytes(0),
        };
        let gradients = match self.holds_gradients(lowering) {
            true => self.trace.tensor(self.weight).bytes(),
            false => Bytes(0),
        };
        let buffer = Bytes(hidden.elements() * WIDE);
        Bytes(of_all.0.div_ceil(CHUNKS)) + gradients + buffer + copies
    }

    /// Whether each chunk makes a tensor of weight gradients: it is trained, and GEMMs sum none.
    fn holds_gradients(&self, lowering: &Lowering<'_>) -> bool {
        let mut ops = self.trace.backward.iter();
        !lowering.has(Rewrite::FuseGradientAccumulation)
            && ops.any(|op| op.pass == Pass::BackwardWeight && op.inputs.contains(&self.hidden))
    }

    /// Whether a tensor exists before the product runs.
    pub(super) fn is_before(&self, id: TensorId) -> bool {
        let mut after = self.trace.forward[self.product..].iter();
        let of = |&output: &TensorId| self.trace.tensor(output).storage;
        !after.any(|op| op.outputs.iter().any(|output| of(output) == id))
    }
}

/// These kernels as they run for one chunk after another.
fn in_chunks(kernels: &[Kernel]) -> Vec<Kernel> {
    let of_chunk: Vec<Kernel> = kernels.iter().map(of_chunk).collect();
    (0..CHUNKS).flat_map(|_| of_chunk.clone()).collect()
}

/// A kernel with the sizes that it has for the tokens of one chunk.
fn of_chunk(kernel: &Kernel) -> Kernel {
    let mut kernel = kernel.clone();
    let size = match &mut kernel.kind {
        // The product of the weight's gradient sums over tokens.
        KernelKind::Gemm {
            sizes: [m, _, k], ..
        } => match kernel.pass {
            Pass::Forward | Pass::BackwardInput => m,
            Pass::BackwardWeight => k,
        },
        KernelKind::Memory { bytes, .. } => &mut bytes.0,
        KernelKind::Comm(message) => &mut message.bytes,
        _ => return kernel,
    };
    *size = size.div_ceil(CHUNKS);
    kernel
}

#[cfg(test)]
mod tests {
    use catalog::DType;
    use models::{BlockClass, BlockLayout};
    use plans::Recompute;

    use super::*;
    use crate::lower::BlockMemory;

    /// The head of Llama 3 8B for `batch` sequences of 8,192 tokens under torchtitan of 2025: its kernels and its memory, with and
    /// without chunks.
    fn head(chunks: bool, batch: u64, tp: u64) -> (Lowered, BlockMemory) {
        let model = catalog::load::model("llama3-8b").expect("a preset");
        let mut runtime = catalog::load::runtime("torchtitan-compile-2025").expect("a preset");
        if chunks {
            runtime.rewrites.insert(Rewrite::ChunkLoss);
        }
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let layout = BlockLayout {
            tp,
            sequence_parallel: tp > 1,
            ..BlockLayout::alone(batch, 8192, DType::Bf16)
        };
        let trace = models::trace_block(&model, BlockClass::Head, &layout).expect("a block");
        let lowered = lowering.lower(&trace);
        let memory = lowering.memory(&trace, &lowered, &[Recompute::None], tp)[0];
        let saved = lowering.saved(&trace, Recompute::None);
        let listed: Bytes = saved.iter().map(|(_, bytes)| *bytes).sum();
        assert_eq!(listed, memory.saved_bytes);
        (lowered, memory)
    }

    /// Floating-point operations of products, their number, and the bytes of messages.
    fn work(lowered: &Lowered) -> (u64, usize, u64) {
        let all = lowered.forward.iter().chain(&lowered.backward);
        all.fold((0, 0, 0), |(flops, products, sent), kernel| {
            match kernel.kind {
                KernelKind::Gemm { sizes, .. } => (
                    flops + 2 * sizes.iter().product::<u64>(),
                    products + 1,
                    sent,
                ),
                KernelKind::Comm(message) => (flops, products, sent + message.bytes),
                _ => (flops, products, sent),
            }
        })
    }

    #[test]
    fn chunks_do_the_same_work_in_more_kernels() {
        for tp in [1, 2] {
            let [whole, chunks] = [false, true].map(|chunks| work(&head(chunks, 1, tp).0));
            assert_eq!(whole.1, 3);
            assert_eq!(chunks, (whole.0, 3 * CHUNKS as usize, whole.2), "tp={tp}");
        }
    }

    #[test]
    fn gradients_of_chunks_are_joined_once() {
        let bytes = |batch| {
            let [whole, chunks] = [false, true].map(|chunks| {
                let (lowered, _) = head(chunks, batch, 1);
                let all = lowered.forward.iter().chain(&lowered.backward);
                let of = |kernel: &Kernel| match kernel.kind {
                    KernelKind::Memory { bytes, .. } => bytes.0,
                    _ => 0,
                };
                all.map(of).sum::<u64>()
            });
            chunks - whole
        };
        let weight = 128_256 * 4096;
        let hidden = 8192 * 4096;
        let sums = weight * ((2 + 4) + 7 * (4 + 2 + 4));
        let joined = 4 + (2 + 4) + (4 + 4) + (4 + 2);
        assert_eq!(bytes(1), sums + hidden * joined);
        // Chunks of two sequences are copied.
        assert_eq!(bytes(2), sums + 2 * hidden * (joined + 2 + 2));
    }

    #[test]
    fn logits_of_one_chunk_exist_at_a_time() {
        let [(_, whole), (_, chunks)] = [false, true].map(|chunks| head(chunks, 1, 1));
        let logits = Bytes(8192 * 128_256 * 2);
        let [hidden, weight] = [Bytes(8192 * 4096 * 2), Bytes(128_256 * 4096 * 2)];
        assert_eq!(whole.saved_bytes, hidden + logits);
        // The input of the last norm; what it returns, and the gradients of that.
        assert_eq!(chunks.saved_bytes, hidden * 3);
        let beside = chunks.transient_forward.saturating_sub(weight + hidden * 2);
        // A chunk's logits and their gradient.
        let both = logits * 2;
        assert!(
            both.0 / 8 <= beside.0 && beside.0 < both.0 / 7,
            "{beside:?}"
        );
    }
}
