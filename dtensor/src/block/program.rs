//! The schedule of a traced block: when each operator runs, what is kept for backward, and when each storage is freed.

use std::collections::{BTreeMap, BTreeSet};

use crate::attention::CausalAttention;
use crate::epilogues::Epilogues;
use crate::operator::{AttentionPiece, Exchange, Factor, Gradient, Moves, Operator, Token};
use crate::tensor::{TensorId, TensorRole, View};
use crate::trace::{Pass, Trace};

/// What is kept from forward to backward (activation recomputation).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Keep {
    /// Everything that backward reads.
    All,
    /// Everything but the intermediates of core attention, which is recomputed (selective recompute).
    NotAttention,
    /// Only the block's input; the whole forward is recomputed (full recompute).
    Input,
}

/// Which half of backward to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Both halves: gradients of inputs and of weights.
    Both,
    /// Only gradients of inputs.
    Input,
    /// Only gradients of weights; runs after the input half.
    Weight,
}

/// How a device runs core attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// As separate operators: scores, softmax, dropout and context, each writing a tensor.
    Pieces,
    /// As one fused kernel. It leaves no intermediates but the log-sum-exps of the scores, in the
    /// storage of the scores; backward reads them and the output.
    Fused,
}

/// One step of a block's schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Run the operator at this index of the pass's operators.
    Op(usize),
    /// Make the view at this index of the pass's views.
    View(usize),
}

/// A traced block with its schedule.
#[derive(Clone, Debug)]
pub struct Block {
    /// The traced operators and tensors of one rank.
    pub trace: Trace,
    /// Prefix of operator scopes in the names of random streams, such as `model.layers.3.`.
    pub prefix: String,
    /// Number of the decoder layer, or `None` for other blocks.
    pub layer: Option<u64>,
    /// What is kept from forward to backward.
    pub keep: Keep,
    /// How core attention runs.
    pub attention: Attention,
    /// Operators fused into products as epilogues, on devices that can.
    pub epilogues: Epilogues,
    /// For each core attention of the trace, its form for a fused library kernel, or `None` if unsupported.
    pub causal_attentions: Vec<Option<CausalAttention>>,
    /// Forward steps, in order.
    pub forward: Vec<Step>,
    /// Backward steps, in order.
    pub backward: Vec<Step>,
    /// Storages kept from forward to backward.
    pub kept: BTreeSet<u32>,
    /// Indices into `forward` of the steps that are recomputed before backward.
    pub again: Vec<usize>,
    /// For each forward step, the storages freed after it in the first run.
    pub forward_dies: Vec<Vec<u32>>,
    /// For each backward step, the storages freed after it when both halves run together.
    pub backward_dies: Vec<Vec<u32>>,
    /// Storages that the weight half of backward reads.
    pub weight_reads: BTreeSet<u32>,
}

impl Block {
    /// Schedules a traced block with core attention as separate operators.
    #[must_use]
    pub fn new(trace: Trace, prefix: &str, layer: Option<u64>, keep: Keep) -> Self {
        Self::with_attention(trace, prefix, layer, keep, Attention::Pieces)
    }

    /// Schedules a traced block.
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

    /// Storage number of a tensor: its own, or of the tensor that it is an alias of.
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

    /// Whether keys and values of the block's attention are exchanged around the context-parallel ring.
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

    /// The storages that a forward operator writes.
    fn storages(&self, op: usize) -> impl Iterator<Item = u32> + '_ {
        let outputs = self.trace.forward[op].outputs.iter();
        outputs.map(|&id| self.storage(id))
    }

    /// Whether backward reads a tensor made in forward: kept ones, or all while backward recomputes
    /// forward (`half` is set).
    pub fn stays(&self, id: TensorId, half: Option<Half>) -> bool {
        half.is_some() || self.kept.contains(&self.storage(id))
    }

    /// The output of a forward product, after its fused bias.
    pub fn made_by(&self, product: usize) -> TensorId {
        let last = self.epilogues.bias(product).unwrap_or(product);
        self.trace.forward[last].outputs[0]
    }

    /// Whether only the loss reads a tensor; the loss takes logits of any type.
    pub fn is_only_for_the_loss(&self, id: TensorId) -> bool {
        let storage = self.storage(id);
        self.trace.forward.iter().all(|op| match op.operator {
            Operator::Token(Token::CrossEntropy(_)) => true,
            _ => op.inputs.iter().all(|&id| self.storage(id) != storage),
        })
    }

    /// The tensor that receives the gradient of one factor of the attention operator at index `forward`.
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

    /// The storages that a step reads.
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
