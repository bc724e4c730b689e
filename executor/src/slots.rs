//! The parameters of a virtual stage on one rank: what they are, where their elements lie in the
//! model, and how they begin.

use std::collections::HashMap;
use std::sync::Arc;

use catalog::Axis;
use catalog::model::{Family, ModelConfig};
use dtensor::block::Block;
use dtensor::layout::consecutive;
use dtensor::philox::Stream;
use dtensor::{
    Attention, AttentionPiece, BlockPosition, Expert, Op, Operator, Placement, Pointwise, Product,
    Site, TensorId, TensorInfo, Token,
};
use rayon::prelude::*;

/// Which mesh shares a parameter's states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The dense mesh.
    Dense,
    /// The expert mesh.
    Expert,
}

/// How a parameter begins.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Start {
    Ones,
    Zeros,
    Normal(f64),
}

/// A parameter of a virtual stage.
#[derive(Clone, Debug)]
pub struct Slot {
    /// Name in the model's `state_dict`; `{expert}` stands for the expert's number.
    pub name: String,
    /// Mesh.
    pub kind: Kind,
    /// Global experts held here; one `None` for dense parameters.
    pub experts: Vec<Option<u64>>,
    /// Global shape (of one expert).
    pub global: Vec<u64>,
    /// Global indices held here, per dim.
    pub indices: Vec<Vec<u64>>,
    /// First element in the stage's flat partition of its kind.
    pub offset: usize,
    /// Elements held here.
    pub len: usize,
    /// Whether every tensor-parallel rank has the gradient of its own tokens only.
    pub partial_over_tp: bool,
    /// Whether all tensor-parallel ranks hold the same elements.
    pub replicated_over_tp: bool,
    /// Whether weight decay applies: to matrices, not to vectors.
    pub decay: bool,
    /// Blocks that use it; tied weights have two.
    pub uses: Vec<(usize, TensorId)>,
    start: Start,
}

impl Slot {
    /// Local shape: experts first.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        let experts = (self.kind == Kind::Expert).then_some(self.experts.len());
        experts
            .into_iter()
            .chain(self.indices.iter().map(Vec::len))
            .collect()
    }

    /// Name of one expert's parameter.
    #[must_use]
    pub fn name_of(&self, expert: Option<u64>) -> String {
        match expert {
            Some(e) => self.name.replace("{expert}", &e.to_string()),
            None => self.name.clone(),
        }
    }

    /// Calls `run(expert, first global index, local range)` for every run of elements that are
    /// consecutive in the model and lie in `range` of the slot.
    pub fn runs(
        &self,
        range: &std::ops::Range<usize>,
        mut run: impl FnMut(Option<u64>, u64, std::ops::Range<usize>),
    ) {
        let Some((columns, leading)) = self.indices.split_last() else {
            return;
        };
        let pieces = consecutive(columns);
        let rows: usize = leading.iter().map(Vec::len).product();
        for (e, &expert) in self.experts.iter().enumerate() {
            for row in 0..rows {
                let base = (e * rows + row) * columns.len();
                if base >= range.end || base + columns.len() <= range.start {
                    continue;
                }
                let first = self.first_of_row(row, leading);
                for piece in &pieces {
                    let start = (base + piece.start).max(range.start);
                    let end = (base + piece.end).min(range.end);
                    if start < end {
                        let column = columns[piece.start] + (start - base - piece.start) as u64;
                        run(expert, first + column, start..end);
                    }
                }
            }
        }
    }

    /// Global linear index of the first column of a local row.
    fn first_of_row(&self, mut row: usize, leading: &[Vec<u64>]) -> u64 {
        let mut stride = self.global[leading.len()];
        let mut first = 0;
        for (dim, list) in leading.iter().enumerate().rev() {
            first += list[row % list.len()] * stride;
            row /= list.len();
            stride *= self.global[dim];
        }
        first
    }

    /// Initial values of `range` of the slot: drawn by global index, so a rank makes only its own.
    #[must_use]
    pub fn initial(&self, seed: u64, range: std::ops::Range<usize>) -> Vec<f32> {
        let fill = match self.start {
            Start::Ones => 1.0,
            _ => 0.0,
        };
        let mut values = vec![fill; range.len()];
        if let Start::Normal(deviation) = self.start {
            // Some parts for every core: numbers are drawn by index, so parts change none.
            let part = values
                .len()
                .div_ceil(4 * rayon::current_num_threads())
                .max(1 << 14);
            let parts = values.par_chunks_mut(part).enumerate();
            parts.for_each(|(index, part_values)| {
                let from = range.start + index * part;
                self.runs(&(from..from + part_values.len()), |expert, first, at| {
                    let stream = Stream::new(seed, 0, &self.name_of(expert));
                    let out = &mut part_values[at.start - from..at.end - from];
                    stream.normals(first, out);
                    for x in out {
                        *x *= deviation as f32;
                    }
                });
            });
        }
        values
    }
}

/// Parameters of a stage's blocks, in order.
#[must_use]
pub fn slots(model: &ModelConfig, blocks: &[Arc<Block>], position: &BlockPosition) -> Vec<Slot> {
    let mut slots: Vec<Slot> = Vec::new();
    let mut by_name: HashMap<String, usize> = HashMap::new();
    let mut ends = [0usize; 2];
    for (index, block) in blocks.iter().enumerate() {
        let layer = block.layer.map(|l| l.to_string()).unwrap_or_default();
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
            let indices = position.all_indices(&info.global, &info.placements);
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

/// Whether an operator that uses the parameter works on tokens, or heads, that are sharded over tensor
/// parallelism.
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

/// Norms begin at 1, biases at 0, everything else is drawn. GPT-2 draws the projections into the
/// residual stream smaller, by the root of their number (Radford et al. 2019, §2.3).
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
