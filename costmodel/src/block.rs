//! The cost of one block under one layout: trace, lower, price.

use catalog::Bytes;
use catalog::runtime::Rewrite;
use dtensor::{TensorId, Trace};
use plans::Recompute;
use rustc_hash::FxHashSet;

use crate::block_cost::{BlockCost, BlockKey, Tensors};
use crate::book::{BlockToPrice, PriceBook};
use crate::lower::{Lowered, Lowering, casts, kept, kept_bytes, peak_transient, split_softmax};
use crate::states::Elements;
use crate::{CostError, Scenario};

/// The cost of a block.
///
/// # Errors
/// When the model cannot be traced under the layout, or an operator has no price.
pub(crate) fn price(
    scenario: &Scenario,
    book: &dyn PriceBook,
    key: &BlockKey,
) -> Result<BlockCost, CostError> {
    let trace = models::trace_block(&scenario.model, key.class, &key.layout)
        .map_err(|e| CostError::Trace(e.to_string()))?;
    let lowering = Lowering {
        runtime: &scenario.runtime,
    };
    let lowered = lowering.lower(&trace);
    let mut cost = BlockCost {
        elements: elements(&trace),
        tensors: Tensors::of(&trace),
        ..BlockCost::default()
    };
    let of = BlockToPrice {
        scenario,
        key,
        trace: &trace,
        lowering,
        lowered: &lowered,
    };
    book.block(&of, &mut cost)?;
    memory(lowering, key, &trace, &lowered, &mut cost);
    Ok(cost)
}

fn elements(trace: &Trace) -> Elements {
    let mut elements = Elements::default();
    for parameter in &trace.parameters {
        if parameter.expert {
            elements.expert += parameter.local_elements;
        } else {
            elements.dense += parameter.local_elements;
        }
    }
    elements
}

/// What a block keeps and needs beside it.
fn memory(
    lowering: Lowering<'_>,
    key: &BlockKey,
    trace: &Trace,
    lowered: &Lowered,
    cost: &mut BlockCost,
) {
    let mode = key.recompute;
    let fused = lowering.has(Rewrite::FuseGradientAccumulation);
    cost.saved = kept(&lowering, trace, mode);
    [cost.saved_bytes, cost.saved_for_weight] = kept_bytes(&lowering, trace, mode);
    let kept_ids = kept_ids(&lowering, trace, mode);
    let casts = casts::held(&lowering, trace);
    cost.transient_forward = peak_transient(trace, &lowered.forward, &kept_ids, fused) + casts;
    if key.layout.tp > 1 {
        cost.transient_forward += split_softmax(&lowering, trace);
    }
    let backward = peak_transient(trace, &lowered.backward, &FxHashSet::default(), fused) + casts;
    // What is run again for the input half stays for the weight half.
    let all = kept(&lowering, trace, Recompute::None);
    let rebuilt: Bytes = all
        .iter()
        .map(|s| s.bytes)
        .sum::<Bytes>()
        .saturating_sub(cost.saved_bytes);
    cost.transient_backward = if mode == Recompute::None {
        backward
    } else {
        backward + rebuilt
    };
    cost.output = trace.output.map_or(Bytes(0), |id| trace.tensor(id).bytes());
}

/// Storages kept under a mode, for liveness.
fn kept_ids(lowering: &Lowering<'_>, trace: &Trace, mode: Recompute) -> FxHashSet<TensorId> {
    let names: FxHashSet<String> = kept(lowering, trace, mode)
        .into_iter()
        .map(|s| s.name)
        .collect();
    (0..trace.tensors.len() as u32)
        .map(TensorId)
        .filter(|&id| names.contains(&trace.tensor(id).name))
        .collect()
}
