//! Rotary embedding of neighbouring pairs of entries that PyTorch runs in 32 bits as a chain of elementary operators, each a kernel
//! of its own: both entries of a pair times cosine and sine, a difference, a sum, and the copy that puts the pairs side by side again
//! (LosVolterrosHermanos/danastar, `src/models/enoki.py`, after Meta's first Llama).

use catalog::runtime::Rewrite;
use catalog::{Bytes, DType};
use dtensor::{AnyOp, CostClass, Pass, Trace};

use super::autocast_operators;
use super::kernel::Chain;
use super::lowering::Lowering;

/// The elementary operators of a rotary embedding, or of its gradient: how many kernels they are and what all of them move. `None` if
/// the operator is no rotary embedding, or the runtime computes it in another way.
pub(super) fn chain(lowering: &Lowering<'_>, trace: &Trace, op: &AnyOp<'_>) -> Option<Chain> {
    if op.cost() != CostClass::Rope || !lowering.has(Rewrite::RopeByPairs) {
        return None;
    }
    let of = trace.tensor(op.outputs[0]);
    let wide = DType::F32.size();
    // Casts to 32 bits before the chain, unless a norm under autocast did, and back after it.
    let stays = lowering.widens_stream(of.dtype) && autocast_operators::reads_wide(trace, op);
    let casts = if stays { 1 } else { 2 };
    let cast = u64::from(casts) * (of.dtype.size() + wide);
    let (bytes, launches) = match op.pass {
        // Four products and two sums of halves of the entries, and the copy side by side.
        Pass::Forward => (cast + 4 * wide + 3 * wide + 2 * wide, 7 + casts),
        // The negative of a half and four products of halves; each is written into zeros, and these are added up.
        Pass::BackwardInput | Pass::BackwardWeight => {
            (cast + 5 * wide + 4 * 2 * wide + 3 * 3 * wide, 16 + casts)
        }
    };
    Some(Chain {
        bytes: Bytes(of.elements() * bytes),
        launches,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lower::testing::layer_of;

    #[test]
    fn rotary_embedding_by_pairs_moves_32_bits() {
        let trace = layer_of("llama3-8b");
        let mut runtime = catalog::load::runtime("fsdp2").expect("a preset");
        let chains = |runtime: &catalog::Runtime| -> Vec<_> {
            let lowering = Lowering::new(runtime, runtime.fp8_recipe);
            let per_element = |op: AnyOp<'_>| {
                let Chain { bytes, launches } = chain(&lowering, &trace, &op)?;
                Some((bytes.0 / trace.tensor(op.outputs[0]).elements(), launches))
            };
            trace.ops().filter_map(per_element).collect()
        };
        assert_eq!(chains(&runtime), []);
        runtime.rewrites.insert(Rewrite::RopeByPairs);
        // Queries and keys, forward and then backward.
        assert_eq!(chains(&runtime), [(48, 9), (48, 9), (100, 18), (100, 18)]);
    }
}
