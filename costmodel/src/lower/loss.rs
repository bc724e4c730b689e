//! Memory of a cross-entropy that PyTorch computes by operators: the logits are cast to 32 bits, a
//! log-softmax writes log-probabilities to a tensor of their own, and the loss selects from these.
//! Backward reads the log-probabilities alone.

use catalog::Bytes;
use catalog::runtime::Rewrite;
use dtensor::{Op, Operator, Token, Trace};

use super::lowering::Lowering;
use super::vocabulary;

/// Bytes of the log-probabilities that a loss keeps for backward instead of the logits. `None` if the operator is no loss, or if a
/// runtime's own kernel computes it.
pub(super) fn kept(lowering: &Lowering<'_>, trace: &Trace, op: &Op) -> Option<Bytes> {
    let [fused, in_place] = [Rewrite::FuseCrossEntropy, Rewrite::InPlaceCrossEntropy];
    let by_operators = !lowering.has(fused) && !lowering.has(in_place);
    (by_operators && is_loss(op)).then(|| trace.tensor(op.inputs[0]).bytes())
}

fn is_loss(op: &Op) -> bool {
    matches!(op.operator, Operator::Token(Token::CrossEntropy(_)))
}

/// Bytes of temporaries of the loss in forward. If the vocabulary is split over `tp` ranks, two tensors of the size of the
/// logits exist at once: the logits less their maximum, and their exponential (PyTorch `tensor/parallel/loss.py`, `_log_softmax`).
/// A runtime that copies shifted logits has one such tensor: the logits less their maximum. Otherwise nothing of that size is needed.
pub(super) fn forward(lowering: &Lowering<'_>, trace: &Trace, tp: u64) -> Bytes {
    if lowering.has(Rewrite::CopyShiftedLogits) && !lowering.has(Rewrite::FuseCrossEntropy) {
        let losses = trace.forward.iter().filter(|op| is_loss(op));
        return losses.map(|op| trace.tensor(op.inputs[0]).bytes()).sum();
    }
    if tp == 1 {
        return Bytes(0);
    }
    log_probabilities(lowering, trace) * 2
}

/// Bytes of temporaries while backward computes the gradient of the logits: that gradient, and the gradient of the
/// log-probabilities. If the vocabulary is split over `tp` ranks, also the probabilities (PyTorch
/// `tensor/parallel/loss.py`, `_nll_loss_and_log_softmax_backward`). A compiled loss needs the gradient of the logits alone, in their
/// type.
pub(super) fn backward(lowering: &Lowering<'_>, trace: &Trace, tp: u64) -> Bytes {
    let compiled = [Rewrite::FuseCrossEntropy, Rewrite::SeparateLossGradient];
    if compiled.iter().all(|&of| lowering.has(of)) {
        let [written, _] = vocabulary::logits(trace);
        return written;
    }
    log_probabilities(lowering, trace) * if tp == 1 { 2 } else { 3 }
}

fn log_probabilities(lowering: &Lowering<'_>, trace: &Trace) -> Bytes {
    let losses = trace.forward.iter();
    losses.filter_map(|op| kept(lowering, trace, op)).sum()
}

#[cfg(test)]
mod tests {
    use catalog::DType;
    use models::{BlockClass, BlockLayout};

    use super::*;

    /// Bytes for each logit: kept for backward, and needed in addition to these in forward and in
    /// backward.
    fn per_logit(runtime: &str, more: &[Rewrite], tp: u64) -> [u64; 3] {
        let model = catalog::load::model("llama3-8b").expect("a preset");
        let mut runtime = catalog::load::runtime(runtime).expect("a preset");
        runtime.rewrites.extend(more.iter().copied());
        let layout = BlockLayout {
            tp,
            ..BlockLayout::alone(1, 32, DType::Bf16)
        };
        let trace = models::trace_block(&model, BlockClass::Head, &layout).expect("a block");
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let loss = trace.forward.iter().find(|op| is_loss(op)).expect("a loss");
        let logits = trace.tensor(loss.inputs[0]).elements();
        [
            kept(&lowering, &trace, loss).unwrap_or_default(),
            forward(&lowering, &trace, tp),
            backward(&lowering, &trace, tp),
        ]
        .map(|bytes| bytes.0 / logits)
    }

    #[test]
    fn only_log_probabilities_are_kept() {
        let copies = [Rewrite::CopyShiftedLogits];
        for (runtime, more, tp, expected) in [
            ("hf-trainer", &[][..], 1, [4, 0, 8]),
            ("torchtitan", &[], 4, [4, 8, 12]),
            ("llm-foundry", &[], 1, [0, 0, 0]),
            ("torchtitan-compile", &[], 1, [4, 0, 8]),
            ("torchtitan-compile-2025", &[], 1, [0, 0, 2]),
            ("torchtitan-compile-2025", &[], 4, [0, 0, 2]),
            ("maxtext", &[], 1, [0, 0, 0]),
            ("megatron-core", &[], 4, [0, 0, 0]),
            ("megatron-core", &copies, 4, [0, 4, 0]),
        ] {
            let found = per_logit(runtime, more, tp);
            assert_eq!(found, expected, "{runtime} {more:?}, tp={tp}");
        }
    }
}
