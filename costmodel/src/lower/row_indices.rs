//! Lists of rows that a runtime keeps for backward instead of the experts that a router chose.

use catalog::Bytes;
use catalog::runtime::Rewrite;
use dtensor::{Expert, Moves, Operator, Product, TensorId, Trace};
use rustc_hash::FxHashMap;

use super::lowering::Lowering;

/// Bytes of the 32-bit lists that replace the indices of each router: for every choice its expert and row,
/// for every row its choice, and offsets of experts' rows; after an exchange between ranks also
/// every row's places there and back, and offsets of local experts' rows.
pub(super) fn kept(lowering: &Lowering<'_>, trace: &Trace) -> FxHashMap<TensorId, Bytes> {
    let routers = trace.forward.iter();
    routers
        .filter(|op| matches!(op.operator, Operator::Expert(Expert::Route(_))))
        .filter(|_| lowering.has(Rewrite::KeepRowIndices))
        .filter_map(|op| {
            let indices = trace.tensor(*op.saved.last()?);
            let experts = trace.tensor(op.inputs[0]).shape.last()?;
            let words = 3 * indices.elements() + experts + 1 + exchanged_words(trace);
            Some((indices.storage, Bytes(4 * words)))
        })
        .collect()
}

fn exchanged_words(trace: &Trace) -> u64 {
    let groups = trace.forward.iter().find_map(|op| match op.operator {
        Operator::Product(Product::GroupedMatmul(_, groups)) => Some(groups),
        _ => None,
    });
    let sends = |moves| matches!(moves, Moves::Dispatch | Moves::ExpertGather);
    let exchanges = trace.forward.iter();
    let exchanges = exchanges
        .filter(|op| matches!(op.operator, Operator::Exchange(exchange) if sends(exchange.moves)));
    let rows = exchanges.map(|op| trace.tensor(op.outputs[0]).shape[0]);
    rows.map(|rows| 2 * rows + groups.unwrap_or(0) + 1).sum()
}
