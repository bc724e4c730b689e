//! Which operators belong to the modules that selective recomputation runs again.

use catalog::{RecomputeModule, Selection};
use dtensor::{
    CollectiveKind, Exchange, Norm, Op, Operator, Pointwise, Product, Site, TensorId, TensorRole,
    Trace,
};
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
    /// Outputs of the operators of a feed-forward part without experts.
    feed_forward: FxHashSet<TensorId>,
}

impl<'t> Block<'t> {
    fn of(trace: &'t Trace) -> Self {
        let outputs = |op: &'t Op| op.outputs.iter().map(move |&output| (output, op));
        let mut block = Self {
            trace,
            producers: trace.forward.iter().flat_map(outputs).collect(),
            from_latents: FxHashSet::default(),
            feed_forward: FxHashSet::default(),
        };
        block.from_latents = block.after_latents();
        block.feed_forward = block.of_feed_forward();
        block
    }

    fn selects(&self, op: &Op, modules: Selection) -> bool {
        let has = |module| modules.contains(module);
        let parts = [
            (RecomputeModule::LatentProjections, &self.from_latents),
            (RecomputeModule::Mlp, &self.feed_forward),
        ];
        let among = |part: &FxHashSet<TensorId>| op.outputs.iter().any(|id| part.contains(id));
        parts.iter().any(|&(part, of)| has(part) && among(of))
            || match op.operator {
                Operator::Norm(_) => has(RecomputeModule::Norms) && self.is_module(op),
                Operator::Pointwise(of) if is_activation(of) => {
                    has(RecomputeModule::ExpertActivation) && self.follows_experts(op)
                }
                _ => false,
            }
    }

    fn has_experts(&self) -> bool {
        self.trace.forward.iter().any(multiplies_experts)
    }

    /// Whether a norm is a module that Megatron-Core can run again: the norm before latent attention, and the one before experts.
    /// Other norms of the residual stream are in the linear layer that follows (`TELayerNormColumnParallelLinear`), which keeps their
    /// result (NVIDIA/Megatron-LM@d98e8a6, `core/models/gpt/gpt_layer_specs.py`, `core/transformer/transformer_layer.py:475`).
    fn is_module(&self, norm: &Op) -> bool {
        let after = || (self.trace.forward.iter()).skip_while(|op| !std::ptr::eq(*op, norm));
        let mixes =
            |op: &Op| op.attention().is_some() || matches!(op.operator, Operator::Recurrent(_));
        self.is_of_residual_stream(norm)
            && match after().any(mixes) {
                true => !self.from_latents.is_empty(),
                false => after().any(multiplies_experts),
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

    /// The operator that makes a tensor, or the part of it that a gather completes.
    fn before_gather(&self, id: TensorId) -> Option<&'t Op> {
        let op = *self.producers.get(&self.whole(id))?;
        match gathers(op) {
            true => self.before_gather(op.inputs[0]),
            false => Some(op),
        }
    }

    /// The tensor that this one is a view of, or itself.
    fn whole(&self, id: TensorId) -> TensorId {
        let views = self.trace.forward_views.iter();
        let mut from = views.filter(|view| view.to == id).map(|view| view.from);
        from.next().unwrap_or(id)
    }

    /// Outputs of the operators of a feed-forward part without experts, which a checkpoint runs again as a whole (NVIDIA/Megatron-LM@d98e8a6,
    /// `core/transformer/transformer_layer.py:992`): from the norm that is in its first linear layer to the message that adds up the
    /// result of the last. A layer with experts has no such part.
    fn of_feed_forward(&self) -> FxHashSet<TensorId> {
        let mut found = FxHashSet::default();
        if self.has_experts() {
            return found;
        }
        let at = |site: Site| {
            let is = move |op: &&Op| matches!(op.operator, Operator::Product(Product::Matmul(_, of)) if of == site);
            self.trace.forward.iter().filter(is)
        };
        let entries: Vec<TensorId> = at(Site::FeedForwardInput)
            .map(|op| self.whole(op.inputs[0]))
            .collect();
        let results: Vec<TensorId> = at(Site::FeedForwardOutput)
            .map(|op| op.outputs[0])
            .collect();
        let mut pending = results.clone();
        while let Some(id) = pending.pop() {
            let Some(op) = self.producers.get(&id).filter(|_| !entries.contains(&id)) else {
                continue;
            };
            if found.insert(id) {
                pending.extend(op.inputs.iter().map(|&input| self.whole(input)));
            }
        }
        for op in &self.trace.forward {
            let reads_result = op.inputs.iter().any(|input| results.contains(input));
            if reads_result && matches!(op.operator, Operator::Exchange(_)) {
                found.extend(op.outputs.iter().copied());
            }
        }
        self.add_gather_and_norm(entries, &mut found);
        found
    }

    /// Adds what makes the inputs of a feed-forward part's first products, if nothing else reads it: a norm and a gather after it.
    fn add_gather_and_norm(&self, entries: Vec<TensorId>, found: &mut FxHashSet<TensorId>) {
        let mut pending = entries;
        while let Some(id) = pending.pop() {
            let Some(op) = self.producers.get(&id) else {
                continue;
            };
            let gathers = gathers(op);
            let norms = matches!(op.operator, Operator::Norm(_)) && self.is_of_residual_stream(op);
            let reads = |by: &&Op| by.inputs.iter().any(|&input| self.whole(input) == id);
            let mut readers = self.trace.forward.iter().filter(reads);
            let own = readers.all(|by| by.outputs.iter().any(|output| found.contains(output)));
            if (gathers || norms) && own {
                found.extend(op.outputs.iter().copied());
                if gathers {
                    pending.push(self.whole(op.inputs[0]));
                }
            }
        }
    }

    /// Outputs of the operators from latents to the queries, keys and values of core attention: projections of a tensor
    /// that a norm narrower than the block made, and what follows them.
    fn after_latents(&self) -> FxHashSet<TensorId> {
        let mut found = FxHashSet::default();
        for op in &self.trace.forward {
            let mut inputs = op.inputs.iter().map(|&input| self.whole(input));
            let continues = match op.operator {
                Operator::Product(Product::Matmul(_, Site::AttentionInput)) => {
                    let latent = self.before_gather(op.inputs[0]);
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

fn gathers(op: &Op) -> bool {
    matches!(op.operator, Operator::Exchange(Exchange { collective: of, .. })
        if of.kind == CollectiveKind::AllGather)
}

fn multiplies_experts(op: &Op) -> bool {
    matches!(op.operator, Operator::Product(Product::GroupedMatmul(..)))
}

pub(super) fn is_activation(pointwise: Pointwise) -> bool {
    matches!(
        pointwise,
        Pointwise::Activation(_) | Pointwise::Gated(_) | Pointwise::FusedGated(_)
    )
}

#[cfg(test)]
mod tests {
    use catalog::DType;
    use models::{BlockClass, BlockLayout};

    use super::*;
    use crate::lower::{Kernel, KernelKind, recomputed};

    /// The kernels of a layer of a preset, on one of two tensor-parallel ranks under Megatron-Core, that run again because
    /// `module` is selected. `!` marks a norm whose result is kept all the same.
    fn again(preset: &str, layer: u64, module: RecomputeModule) -> String {
        let model = catalog::load::model(preset).expect("a preset");
        let runtime = catalog::load::runtime("megatron-core").expect("a preset");
        let lowering = Lowering::new(&runtime, runtime.fp8_recipe);
        let layout = BlockLayout {
            tp: 2,
            sequence_parallel: true,
            ..BlockLayout::alone(1, 32, DType::Bf16)
        };
        let class = BlockClass::Layer(model.layer_class(layer));
        let trace = models::trace_block(&model, class, &layout).expect("a block");
        let recompute = Recompute::Modules([module].into_iter().collect());
        let saved = lowering.saved(&trace, recompute);
        let lowered = lowering.lower(&trace);
        let name = |kernel: &Kernel| {
            let op = &trace.forward[kernel.op];
            let result = &trace.tensor(op.outputs[0]).name;
            match (kernel.kind, op.operator) {
                (KernelKind::Comm(of), _) => format!("{:?}", of.kind),
                (_, Operator::Product(_)) => "product".to_owned(),
                (_, Operator::Norm(_)) if saved.iter().any(|(name, _)| name == result) => {
                    "norm!".to_owned()
                }
                (_, Operator::Norm(_)) => "norm".to_owned(),
                _ => "other".to_owned(),
            }
        };
        let again = recomputed(&lowering, &trace, &lowered, recompute).into_iter();
        let names = again.map(|index| name(&lowered.forward[index]));
        names.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn modules_of_megatron_run_again_as_its_code_says() {
        use RecomputeModule::{Mlp, Norms};
        let plain = "norm AllGather product other product ReduceScatter";
        let gated = "norm AllGather product product other product ReduceScatter";
        for (preset, layer, module, expected) in [
            ("llama3-8b", 0, Mlp, gated),
            ("gpt3-175b", 0, Mlp, plain),
            ("llama3-8b", 0, Norms, ""),
            // A layer with experts has no `mlp`, not even that of shared experts.
            ("mixtral-8x7b", 0, Mlp, ""),
            ("mixtral-8x7b", 0, Norms, "norm"),
            ("deepseek-v3", 0, Mlp, gated),
            ("deepseek-v3", 0, Norms, "norm"),
            ("deepseek-v3", 3, Mlp, ""),
            ("deepseek-v3", 3, Norms, "norm norm"),
        ] {
            assert_eq!(
                again(preset, layer, module),
                expected,
                "{preset} {module:?}"
            );
        }
    }
}
