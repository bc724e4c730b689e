//! What of a traced block runs when, what is kept from forward to backward, and what dies when.

use std::collections::{BTreeMap, BTreeSet};

use crate::attention::CausalAttention;
use crate::epilogues::Epilogues;
use crate::operator::{AttentionPiece, Exchange, Factor, Gradient, Moves, Operator, Token};
use crate::tensor::{TensorId, TensorRole, View};
use crate::trace::{Pass, Trace};

/// What is kept from forward to backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Keep {
    /// All that backward reads.
    All,
    /// All but what core attention makes inside; that runs again.
    NotAttention,
    /// The block's input; everything runs again.
    Input,
}

/// Which half of backward to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Both.
    Both,
    /// Gradients of inputs.
    Input,
    /// Gradients of weights, after the other half.
    Weight,
}

/// How a device runs core attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// Scores, softmax, dropout and context one after the other, each a tensor.
    Pieces,
    /// All at once. Inside, only the log-sum-exps of the scores exist, in the scores' place; the
    /// output is read by backward.
    Fused,
}

/// An entry of a block's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Operator of the pass's list.
    Op(usize),
    /// View of the pass's list.
    View(usize),
}

/// A block ready to run.
#[derive(Clone, Debug)]
pub struct Block {
    /// What one rank executes.
    pub trace: Trace,
    /// Put before scopes to name random streams, such as `model.layers.3.`.
    pub prefix: String,
    /// Number of its layer, if it is one.
    pub layer: Option<u64>,
    /// What is kept.
    pub keep: Keep,
    /// How core attention runs.
    pub attention: Attention,
    /// What runs within products, on devices that can.
    pub epilogues: Epilogues,
    /// What a library may run of each core attention of the trace.
    pub causal_attentions: Vec<Option<CausalAttention>>,
    /// Steps of forward, in order.
    pub forward: Vec<Step>,
    /// Steps of backward, in order.
    pub backward: Vec<Step>,
    /// Storages kept after forward.
    pub kept: BTreeSet<u32>,
    /// Forward steps that run again before backward.
    pub again: Vec<usize>,
    /// Storages that die after each forward step when it runs for the first time.
    pub forward_dies: Vec<Vec<u32>>,
    /// Storages that die after each backward step, when the whole of backward runs.
    pub backward_dies: Vec<Vec<u32>>,
    /// Storages that the weight half reads.
    pub weight_reads: BTreeSet<u32>,
}

impl Block {
    /// Makes a traced block ready, core attention in pieces.
    #[must_use]
    pub fn new(trace: Trace, prefix: &str, layer: Option<u64>, keep: Keep) -> Self {
        Self::with_attention(trace, prefix, layer, keep, Attention::Pieces)
    }

    /// Makes a traced block ready.
    #[must_use]
    pub fn with_attention(
        trace: Trace,
        prefix: &str,
        layer: Option<u64>,
        keep: Keep,
        attention: Attention,
    ) -> Self {
        let views = |views: &[View], ops: usize| {
            let mut steps = Vec::with_capacity(ops + views.len());
            for op in 0..=ops {
                let here = views.iter().enumerate().filter(|(_, v)| v.before == op);
                steps.extend(here.map(|(i, _)| Step::View(i)));
                if op < ops {
                    steps.push(Step::Op(op));
                }
            }
            steps
        };
        let forward = views(&trace.forward_views, trace.forward.len());
        let backward = views(&trace.backward_views, trace.backward.len());
        let mut block = Self {
            prefix: prefix.to_owned(),
            layer,
            keep,
            attention,
            epilogues: Epilogues::of(&trace),
            causal_attentions: (0..trace.attentions.len())
                .map(|of| trace.causal_attention(of))
                .collect(),
            kept: BTreeSet::new(),
            again: Vec::new(),
            forward_dies: Vec::new(),
            backward_dies: Vec::new(),
            weight_reads: BTreeSet::new(),
            trace,
            forward,
            backward,
        };
        block.kept = block.kept_storages();
        block.again = block.steps_again();
        block.forward_dies = block.dying(&block.forward, true);
        block.backward_dies = block.dying(&block.backward, false);
        block.weight_reads = block.weight_half_reads();
        block
    }

    /// The tensor whose memory a tensor lies in: itself, unless it is a view.
    #[must_use]
    pub fn storage(&self, id: TensorId) -> u32 {
        self.trace.tensor(id).storage.0
    }

    fn is_kept_role(&self, storage: u32) -> bool {
        matches!(
            self.trace.tensors[storage as usize].role,
            TensorRole::Activation | TensorRole::Input
        )
    }

    fn is_attention(&self, op: usize) -> bool {
        self.trace.forward[op].attention().is_some()
    }

    fn is_ring(&self, op: usize) -> bool {
        let operator = self.trace.forward[op].operator;
        matches!(operator, Operator::Exchange(Exchange { moves, .. }) if moves == Moves::Ring)
    }

    /// Whether keys and values of its attention go round the ring.
    pub fn has_ring(&self) -> bool {
        (0..self.trace.forward.len()).any(|op| self.is_ring(op))
    }

    fn kept_storages(&self) -> BTreeSet<u32> {
        if self.keep == Keep::Input {
            return self
                .trace
                .tensors
                .iter()
                .filter(|t| t.role == TensorRole::Input)
                .map(|t| t.storage.0)
                .collect();
        }
        let ops = self.trace.forward.iter();
        let mut kept: BTreeSet<u32> = ops
            .flat_map(|op| op.saved.iter().map(|&id| self.storage(id)))
            .filter(|&storage| self.is_kept_role(storage))
            .collect();
        if self.keep == Keep::NotAttention || self.attention == Attention::Fused {
            for op in (0..self.trace.forward.len()).filter(|&op| self.is_attention(op)) {
                for &id in &self.trace.forward[op].outputs {
                    if !self.is_read_outside_attention(id) {
                        kept.remove(&self.storage(id));
                    }
                }
            }
        }
        if self.keep == Keep::All && self.attention == Attention::Fused {
            for pieces in &self.trace.attentions {
                kept.extend(self.storages(pieces.scores));
                kept.extend(self.storages(pieces.context));
            }
        }
        kept
    }

    /// Where an operator of forward writes.
    fn storages(&self, op: usize) -> impl Iterator<Item = u32> + '_ {
        let outputs = self.trace.forward[op].outputs.iter();
        outputs.map(|&id| self.storage(id))
    }

    /// Whether backward reads a tensor that forward makes: it is kept, or forward runs again for it, in backward.
    pub fn stays(&self, id: TensorId, half: Option<Half>) -> bool {
        half.is_some() || self.kept.contains(&self.storage(id))
    }

    /// Where a product of forward leaves what it makes, after its bias.
    pub fn made_by(&self, product: usize) -> TensorId {
        let last = self.epilogues.bias(product).unwrap_or(product);
        self.trace.forward[last].outputs[0]
    }

    /// Whether all that reads a tensor is the loss, which takes logits of any type.
    pub fn is_only_for_the_loss(&self, id: TensorId) -> bool {
        let storage = self.storage(id);
        self.trace.forward.iter().all(|op| match op.operator {
            Operator::Token(Token::CrossEntropy(_)) => true,
            _ => op.inputs.iter().all(|&id| self.storage(id) != storage),
        })
    }

    /// The tensor that receives the gradient of a factor of a piece of core attention.
    pub fn gradient_of(&self, forward: usize, wanted: Factor) -> Option<TensorId> {
        let mut ops = self.trace.backward.iter();
        let op = ops.find(|op| {
            matches!(op.operator, Gradient::Attention(of, _, factor) if (of, factor) == (forward, wanted))
        })?;
        op.outputs.first().copied()
    }

    fn is_read_outside_attention(&self, id: TensorId) -> bool {
        let storage = self.storage(id);
        let reads = |op: usize| {
            let saved = &self.trace.forward[op].saved;
            saved.iter().any(|&s| self.storage(s) == storage)
        };
        (0..self.trace.forward.len()).any(|op| !self.is_attention(op) && reads(op))
    }

    fn steps_again(&self) -> Vec<usize> {
        let again = |step: &Step| match (self.keep, step) {
            (Keep::All, _) => false,
            (Keep::Input, _) => true,
            (Keep::NotAttention, Step::Op(op)) => self.is_attention(*op) || self.is_ring(*op),
            (Keep::NotAttention, Step::View(_)) => false,
        };
        (0..self.forward.len())
            .filter(|&i| again(&self.forward[i]))
            .collect()
    }

    /// Storages a step reads.
    fn reads(&self, step: Step, forward: bool) -> Vec<u32> {
        let ids: Vec<TensorId> = match (step, forward) {
            (Step::Op(op), true) => {
                let op = &self.trace.forward[op];
                let sums = match op.operator {
                    Operator::Token(Token::CrossEntropy(sums)) => sums,
                    _ => None,
                };
                op.inputs.iter().copied().chain(sums).collect()
            }
            (Step::Op(op), false) => {
                let op = &self.trace.backward[op];
                let mut ids = op.inputs.clone();
                if let Gradient::Attention(_, attention, _) = op.operator
                    && attention.piece == AttentionPiece::Context
                    && self.attention == Attention::Fused
                {
                    // Fused backward reads the output and the log-sum-exps.
                    let pieces = self.trace.attentions[attention.of];
                    let forward = &self.trace.forward[pieces.scores..=pieces.context];
                    ids.extend(forward.iter().flat_map(|op| &op.outputs));
                }
                ids
            }
            (Step::View(view), true) => vec![self.trace.forward_views[view].from],
            (Step::View(view), false) => {
                let view = &self.trace.backward_views[view];
                vec![view.from, view.to]
            }
        };
        ids.into_iter().map(|id| self.storage(id)).collect()
    }

    fn dying(&self, steps: &[Step], forward: bool) -> Vec<Vec<u32>> {
        let mut last: BTreeMap<u32, usize> = BTreeMap::new();
        for (index, &step) in steps.iter().enumerate() {
            let writes: Vec<u32> = match (step, forward) {
                (Step::Op(op), true) => self.storages(op).collect(),
                _ => Vec::new(),
            };
            for storage in self.reads(step, forward).into_iter().chain(writes) {
                last.insert(storage, index);
            }
        }
        let output = self.trace.output.map(|id| self.storage(id));
        let result = self.trace.input_gradient.map(|id| self.storage(id));
        let mut dies = vec![Vec::new(); steps.len()];
        for (storage, index) in last {
            let stays = if forward {
                self.kept.contains(&storage) || Some(storage) == output
            } else {
                Some(storage) == result
            };
            if !stays {
                dies[index].push(storage);
            }
        }
        dies
    }

    fn weight_half_reads(&self) -> BTreeSet<u32> {
        self.trace
            .backward
            .iter()
            .filter(|op| op.pass == Pass::BackwardWeight)
            .flat_map(|op| op.inputs.iter().map(|&id| self.storage(id)))
            .collect()
    }
}
