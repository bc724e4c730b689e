//! Which operators belong to the modules that selective recomputation runs again.

use catalog::{RecomputeModule, Selection};
use dtensor::{Norm, Op, Operator, Pointwise, Product, Site, TensorId, TensorRole, Trace};
use plans::Recompute;
use rustc_hash::{FxHashMap, FxHashSet};

use super::lowering::Lowering;

/// Outputs of the operators outside core attention that a recomputation runs again because their module is selected.
pub(super) fn selected(
    lowering: &Lowering<'_>,
    trace: &Trace,
    recompute: Recompute,
) -> FxHashSet<TensorId> {
    let modules = lowering.selected(recompute).unwrap_or_default();
    let attention = |module| module == RecomputeModule::CoreAttention;
    if modules.modules().all(attention) {
        return FxHashSet::default();
    }
    let block = Block::of(trace);
    let again = trace.forward.iter().filter(|op| block.selects(op, modules));
    again.flat_map(|op| op.outputs.iter().copied()).collect()
}

/// A traced block, with what tells its modules apart.
struct Block<'t> {
    trace: &'t Trace,
    producers: FxHashMap<TensorId, &'t Op>,
    /// Outputs of the operators between latents and core attention.
    from_latents: FxHashSet<TensorId>,
}

impl<'t> Block<'t> {
    fn of(trace: &'t Trace) -> Self {
        let outputs = |op: &'t Op| op.outputs.iter().map(move |&output| (output, op));
        let mut block = Self {
            trace,
            producers: trace.forward.iter().flat_map(outputs).collect(),
            from_latents: FxHashSet::default(),
        };
        block.from_latents = block.after_latents();
        block
    }

    fn selects(&self, op: &Op, modules: Selection) -> bool {
        let has = |module| modules.contains(module);
        let site = match op.operator {
            Operator::Product(Product::Matmul(_, site)) => Some(site),
            _ => None,
        };
        match op.operator {
            Operator::Norm(_) if self.is_of_residual_stream(op) => has(RecomputeModule::Norms),
            Operator::Pointwise(of) if is_activation(of) && self.follows_experts(op) => {
                has(RecomputeModule::ExpertActivation)
            }
            Operator::Pointwise(of) if is_activation(of) => has(RecomputeModule::Mlp),
            _ if site == Some(Site::FeedForwardInput) => has(RecomputeModule::Mlp),
            _ => {
                let from_latents = |output| self.from_latents.contains(output);
                has(RecomputeModule::LatentProjections) && op.outputs.iter().any(from_latents)
            }
        }
    }

    /// Whether a norm reads the residual stream: its input is as wide as the block's input.
    fn is_of_residual_stream(&self, norm: &Op) -> bool {
        let width = |id: TensorId| self.trace.tensor(id).shape.last().copied();
        let mut tensors = self.trace.tensors.iter();
        let input = tensors.find(|t| t.role == TensorRole::Input);
        input.and_then(|t| t.shape.last().copied()) == width(norm.inputs[0])
    }

    /// Whether the nearest product before an operator is one of experts.
    fn follows_experts(&self, op: &Op) -> bool {
        let before = self.producers.get(&self.whole(op.inputs[0]));
        before.is_some_and(|before| match before.operator {
            Operator::Product(product) => matches!(product, Product::GroupedMatmul(..)),
            _ => self.follows_experts(before),
        })
    }

    /// The tensor that this one is a view of, or itself.
    fn whole(&self, id: TensorId) -> TensorId {
        let views = self.trace.forward_views.iter();
        let mut from = views.filter(|view| view.to == id).map(|view| view.from);
        from.next().unwrap_or(id)
    }

    /// Outputs of the operators from latents to the queries, keys and values of core attention: projections of a tensor
    /// that a norm narrower than the block made, and what follows them.
    fn after_latents(&self) -> FxHashSet<TensorId> {
        let mut found = FxHashSet::default();
        for op in &self.trace.forward {
            let mut inputs = op.inputs.iter().map(|&input| self.whole(input));
            let continues = match op.operator {
                Operator::Product(Product::Matmul(_, Site::AttentionInput)) => {
                    let latent = self.producers.get(&self.whole(op.inputs[0]));
                    latent.is_some_and(|norm| {
                        matches!(norm.operator, Operator::Norm(Norm { .. }))
                            && !self.is_of_residual_stream(norm)
                    })
                }
                Operator::Pointwise(_) => inputs.any(|input| found.contains(&input)),
                _ => false,
            };
            if continues {
                found.extend(op.outputs.iter().copied());
            }
        }
        found
    }
}

pub(super) fn is_activation(pointwise: Pointwise) -> bool {
    matches!(
        pointwise,
        Pointwise::Activation(_) | Pointwise::Gated(_) | Pointwise::FusedGated(_)
    )
}
