//! Which part of a block activation checkpoints cover.

use dtensor::{Operator, Product, Site, Trace};

/// Number of leading forward operators of a block that a checkpoint around it covers: all of them, but for a prediction module, whose
/// head and loss run after the checkpointed layer (Megatron-Core `multi_token_prediction.py`: `_checkpointed_forward` covers
/// `_proj_and_transformer_layer`, `process_mtp_loss` comes later). The gather of what the head reads belongs to the head.
pub(super) fn covered(trace: &Trace) -> usize {
    let of_head = |operator| {
        matches!(
            operator,
            Operator::Product(Product::Matmul(_, Site::Vocabulary))
        )
    };
    let head = trace.forward.iter().position(|op| of_head(op.operator));
    let Some(head) = head else {
        return trace.forward.len();
    };
    let before = trace.forward[..head].iter().rev();
    let gathers = before.take_while(|op| matches!(op.operator, Operator::Exchange(_)));
    head - gathers.count()
}

#[cfg(test)]
mod tests {
    use catalog::{Bytes, DType};
    use models::{BlockClass, BlockLayout};
    use plans::Recompute;

    use super::*;
    use crate::lower::testing::{TOKENS, runtime};
    use crate::lower::{Lowering, recomputed};

    /// DeepSeek-V3's prediction module on one of `tp` ranks.
    fn module(tp: u64) -> Trace {
        let model = catalog::load::model("deepseek-v3").expect("a preset");
        let layout = BlockLayout {
            tp,
            sequence_parallel: tp > 1,
            ..BlockLayout::alone(1, TOKENS, DType::Bf16)
        };
        models::trace_block(&model, BlockClass::Mtp, &layout).expect("a block")
    }

    /// The forward operators of a trace that run again.
    fn again(name: &str, trace: &Trace, recompute: Recompute) -> Vec<usize> {
        let runtime = runtime(name);
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let lowered = lowering.lower(trace);
        let kernels = recomputed(&lowering, trace, &lowered, recompute).into_iter();
        kernels.map(|index| lowered.forward[index].op).collect()
    }

    /// Bytes that are kept of what head and loss write.
    fn kept_of_head(name: &str, trace: &Trace, recompute: Recompute) -> Bytes {
        let runtime = runtime(name);
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let saved = lowering.saved(trace, recompute).into_iter();
        let of_head = saved.filter(|(of, _)| of.starts_with("lm_head") || of.starts_with("loss"));
        of_head.map(|(_, bytes)| bytes).sum()
    }

    #[test]
    fn checkpoints_leave_out_the_head_of_a_prediction_module() {
        use Recompute::{Full, None, SelectiveOps};
        for (name, recompute, tp) in [
            ("megatron-core", Full, 1),
            ("megatron-core", Full, 2),
            ("torchtitan-2026", Full, 2),
            ("torchtitan-2026", SelectiveOps, 2),
            ("torchtitan-compile", Full, 1),
            ("fsdp2", Full, 1),
        ] {
            let trace = module(tp);
            let (covered, again) = (covered(&trace), again(name, &trace, recompute));
            let case = format!("{name} {recompute:?}, tp={tp}");
            assert!(!again.is_empty(), "{case}");
            assert!(again.iter().all(|&op| op < covered), "{case}: {again:?}");
            let [kept, all] = [recompute, None].map(|mode| kept_of_head(name, &trace, mode));
            assert!(kept.0 > 0 && kept == all, "{case}: {kept:?}, {all:?}");
        }
    }
}
