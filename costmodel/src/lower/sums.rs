//! Finds sums whose result a compiler keeps for backward, as nothing else needs their terms.

use dtensor::{Op, TensorId, TensorRole, Trace};
use rustc_hash::FxHashSet;

/// Outputs of pointwise operators that are kept for backward. The alternative is to keep the inputs and compute the output again; where
/// there are several inputs and nothing else needs them, they take more bytes than the one output. An example is the sum of what a linear
/// layer and its LoRA adapter return.
pub(super) fn kept_instead_of_terms(
    trace: &Trace,
    producers: &[Option<usize>],
) -> FxHashSet<TensorId> {
    let terms = Terms::of(trace, producers);
    let sums = trace.forward.iter().filter(|op| is_pointwise(op));
    let sums = sums.filter(|op| terms.of_operator(op).count() > 1 && terms.are_private(op));
    sums.map(|op| op.outputs[0]).collect()
}

fn is_pointwise(op: &Op) -> bool {
    op.operator.cost().is_pointwise()
}

/// Which tensors are read by a single operator of forward, and by none of backward.
struct Terms<'t> {
    trace: &'t Trace,
    producers: &'t [Option<usize>],
    private: Vec<bool>,
}

impl<'t> Terms<'t> {
    fn of(trace: &'t Trace, producers: &'t [Option<usize>]) -> Self {
        let mut readers = vec![0u32; producers.len()];
        let views = trace.forward_views.iter().map(|view| view.from);
        let saved = trace.forward.iter().flat_map(|op| &op.saved).copied();
        // Operators that read a view of a tensor are not searched for: a tensor with views counts as read by several.
        for id in views.chain(saved) {
            readers[id.0 as usize] += 2;
        }
        for &id in trace.forward.iter().flat_map(|op| &op.inputs) {
            readers[id.0 as usize] += 1;
        }
        Self {
            trace,
            producers,
            private: readers.into_iter().map(|readers| readers == 1).collect(),
        }
    }

    /// The tensors that an operator reads, without weights.
    fn of_operator<'o>(&'o self, op: &'o Op) -> impl Iterator<Item = TensorId> + 'o {
        let is_term = |id: &TensorId| {
            let role = self.trace.tensor(*id).role;
            matches!(role, TensorRole::Activation | TensorRole::Input)
        };
        op.inputs.iter().copied().filter(is_term)
    }

    /// Whether nothing else reads this operator's inputs, or inputs of pointwise ones before it.
    fn are_private(&self, op: &Op) -> bool {
        op.saved.is_empty()
            && self.of_operator(op).all(|id| {
                let made_by = self.producers[id.0 as usize].map(|at| &self.trace.forward[at]);
                self.private[id.0 as usize]
                    && made_by.is_some_and(|op| !is_pointwise(op) || self.are_private(op))
            })
    }
}
