//! A virtual stage of a model: its blocks, what each keeps for backward, and the parameters that a rank holds.

use std::collections::HashMap;
use std::sync::Arc;

use catalog::Axis;
use catalog::model::{Family, ModelConfig};
use dtensor::block::{self, Block, Keep};
use dtensor::train::{Kind, Slot, Start};
use dtensor::{
    Attention, AttentionPiece, BlockPosition, Expert, Op, Operator, Placement, Pointwise, Product,
    Site, TensorId, TensorInfo, TensorRole, Token,
};
use plans::{Recompute, Strategy};

use crate::{BlockClass, BlockLayout, ModelError, names, trace_block};

/// What one block of a stage is, and how it is made.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The class of the block.
    pub class: BlockClass,
    /// Prefix of operator scopes in the names of random streams, such as `model.layers.3.`.
    pub prefix: String,
    /// Number of the decoder layer, or `None` for other blocks.
    pub layer: Option<u64>,
    /// What the block keeps from forward to backward.
    pub keep: Keep,
}

impl Recipe {
    /// The recipes of a virtual stage's blocks, in order.
    #[must_use]
    pub fn of_stage(model: &ModelConfig, strategy: &Strategy, stage: u64) -> Vec<Self> {
        let whole = |class| Self {
            class,
            prefix: String::new(),
            layer: None,
            keep: Keep::All,
        };
        let names = names::names(model);
        let stages = &strategy.stages.0;
        let mut recipes = Vec::new();
        if stage == 0 {
            recipes.push(whole(BlockClass::Embedding));
        }
        let first: u64 = stages[..stage as usize].iter().sum();
        let [as_first, as_others] = strategy.recompute.of_first_and_others();
        let until = strategy.layers_as_first(stage as usize);
        for offset in 0..stages[stage as usize] {
            let layer = first + offset;
            let keep = match if offset < until { as_first } else { as_others } {
                Recompute::None | Recompute::Layers(_) | Recompute::Falling(_) => Keep::All,
                Recompute::Selective | Recompute::Modules(_) | Recompute::SelectiveOps => {
                    Keep::NotAttention
                }
                Recompute::Full => Keep::Input,
            };
            recipes.push(Self {
                class: BlockClass::Layer(model.layer_class(layer)),
                prefix: names.layer.replace("{layer}", &layer.to_string()),
                layer: Some(layer),
                keep,
            });
        }
        if stage + 1 == stages.len() as u64 {
            recipes.push(whole(BlockClass::Head));
        }
        recipes
    }

    /// Traces the block and schedules it.
    ///
    /// # Errors
    /// When the block cannot be traced.
    pub fn block(
        &self,
        model: &ModelConfig,
        layout: &BlockLayout,
        attention: block::Attention,
    ) -> Result<Block, ModelError> {
        let trace = trace_block(model, self.class, layout)?;
        Ok(Block::with_attention(
            trace,
            &self.prefix,
            self.layer,
            self.keep,
            attention,
        ))
    }
}

/// Local shape of the hidden state that one stage sends to the next.
///
/// # Errors
/// When a layer cannot be traced.
pub fn hidden(
    model: &ModelConfig,
    layout: &BlockLayout,
    position: &BlockPosition,
) -> Result<Vec<usize>, ModelError> {
    let class = BlockClass::Layer(model.layer_class(0));
    let trace = trace_block(model, class, layout)?;
    let mut tensors = trace.tensors.iter();
    let input = tensors.find(|t| t.role == TensorRole::Input);
    let input = input.expect("a layer has an input");
    let indices = position.all_indices(&input.global, &input.placements);
    Ok(indices.iter().map(Vec::len).collect())
}

/// The parameters of a stage's blocks that a rank holds, each once, in order.
#[must_use]
pub fn slots(
    model: &ModelConfig,
    recipes: &[Recipe],
    blocks: &[Arc<Block>],
    position: &BlockPosition,
) -> Vec<Slot> {
    let mut slots: Vec<Slot> = Vec::new();
    let mut by_name: HashMap<String, usize> = HashMap::new();
    // Layers have parameters of equal shapes: indices are computed once.
    let mut known = HashMap::new();
    let mut ends = [0usize; 2];
    for (index, (recipe, block)) in recipes.iter().zip(blocks).enumerate() {
        let layer = recipe.layer.map(|l| l.to_string()).unwrap_or_default();
        for parameter in &block.trace.parameters {
            let name = parameter.name.replace("{layer}", &layer);
            if let Some(&slot) = by_name.get(&name) {
                slots[slot].uses.push((index, parameter.tensor));
                continue;
            }
            let info = block.trace.tensor(parameter.tensor);
            let kind = if parameter.expert {
                Kind::Expert
            } else {
                Kind::Dense
            };
            let experts = experts_here(parameter.expert, parameter.experts, position);
            let key = (info.global.clone(), info.placements);
            let indices = known
                .entry(key)
                .or_insert_with(|| Arc::new(position.all_indices(&info.global, &info.placements)));
            let indices = Arc::clone(indices);
            let each: usize = indices.iter().map(Vec::len).product();
            let len = each * experts.len();
            let end = &mut ends[kind as usize];
            by_name.insert(name.clone(), slots.len());
            slots.push(Slot {
                kind,
                experts,
                global: info.global.clone(),
                indices,
                offset: *end,
                len,
                partial_over_tp: partial_over_tp(block, parameter.tensor, position),
                replicated_over_tp: !shards_tp(info),
                decay: info.global.len() > 1,
                uses: vec![(index, parameter.tensor)],
                start: start(model, block, parameter.tensor),
                name,
            });
            *end += len;
        }
    }
    slots
}

fn experts_here(expert: bool, experts: u64, position: &BlockPosition) -> Vec<Option<u64>> {
    if !expert {
        return vec![None];
    }
    let count = experts.div_ceil(position.mesh.ep);
    let first = position.index(Axis::Ep) * count;
    (first..(first + count).min(experts)).map(Some).collect()
}

fn shards_tp(info: &TensorInfo) -> bool {
    matches!(
        info.placements.on(Axis::Tp),
        Placement::Shard(_) | Placement::Interleaved(..)
    )
}

/// Whether an operator that uses the parameter runs on tokens or heads that are sharded over tensor
/// parallelism, so that each rank computes only a partial sum of the gradient.
fn partial_over_tp(block: &Block, id: TensorId, position: &BlockPosition) -> bool {
    if position.mesh.tp == 1 || shards_tp(block.trace.tensor(id)) {
        return false;
    }
    block.trace.forward.iter().any(|op| {
        let beside = match op.operator {
            Operator::Norm(norm) => norm.bias == Some(id),
            Operator::Token(Token::Embedding(table) | Token::Positions { table, .. }) => {
                table == id
            }
            _ => false,
        };
        let sharded = |x: TensorId| {
            matches!(
                block.trace.tensor(x).placements.on(Axis::Tp),
                Placement::Shard(_)
            )
        };
        (beside || op.inputs.contains(&id)) && sharded(op.inputs[0])
    })
}

/// Initial value: norms 1 (0 if they add 1), biases and sinks 0, others normal. GPT-2 divides the
/// deviation of residual projections by the root of their number (Radford et al. 2019, §2.3).
fn start(model: &ModelConfig, block: &Block, id: TensorId) -> Start {
    let deviation = model.constants.initializer_range;
    let residual = match model.family {
        Family::Gpt2 => deviation / (2.0 * model.layers as f64).sqrt(),
        _ => deviation,
    };
    let starts = |op: &Op| {
        let second = op.inputs.get(1) == Some(&id);
        match op.operator {
            Operator::Norm(norm) if second && norm.from_one => Some(Start::Zeros),
            Operator::Norm(_) if second => Some(Start::Ones),
            Operator::Norm(norm) if norm.bias == Some(id) => Some(Start::Zeros),
            Operator::Pointwise(Pointwise::Bias) | Operator::Expert(Expert::Bias) if second => {
                Some(Start::Zeros)
            }
            Operator::Attention(Attention {
                piece: AttentionPiece::Softmax(rule),
                ..
            }) if rule.sinks == Some(id) => Some(Start::Zeros),
            Operator::Expert(Expert::Route(route)) if route.bias == Some(id) => Some(Start::Zeros),
            Operator::Product(Product::Matmul(
                _,
                Site::AttentionOutput | Site::FeedForwardOutput,
            )) if second => Some(Start::Normal(residual)),
            _ => None,
        }
    };
    let mut found = block.trace.forward.iter().filter_map(starts);
    found.next().unwrap_or(Start::Normal(deviation))
}
