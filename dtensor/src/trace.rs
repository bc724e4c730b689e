//! What one rank would execute: the operators recorded while model code runs on the meta device.
//!
//! The trace is an *unfused* operator graph over local shapes. Costs are not here: `costmodel`
//! lowers the graph for a runtime (fusion, kept tensors, overlapped collectives) and prices it.

use crate::operator::{Attention, Factor, Gradient, Operator, SoftmaxRule};
use crate::tensor::{TensorId, TensorInfo, View};

/// Which pass an operator belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Forward.
    Forward,
    /// Backward towards the inputs (the previous layer needs it at once).
    BackwardInput,
    /// Backward towards the weights (zero-bubble schedules may defer it).
    BackwardWeight,
}

/// One operator of one rank: `Op` in forward, `Op<Gradient>` in backward.
#[derive(Clone, Debug, PartialEq)]
pub struct Op<O = Operator> {
    /// Dotted path of the module that issued it, relative to the layer: `self_attn.q_proj`,
    /// `self_attn.core_attention`, `mlp.down_proj`, `input_layernorm`. For people and profiles alone.
    pub scope: String,
    /// Which pass it belongs to.
    pub pass: Pass,
    /// Tensors read, in argument order.
    pub inputs: Vec<TensorId>,
    /// Tensors written.
    pub outputs: Vec<TensorId>,
    /// Forward only: tensors this operator keeps for its backward.
    pub saved: Vec<TensorId>,
    /// The operator itself, with its sizes.
    pub operator: O,
}

/// An operator of either pass in one form, for pricing and timing.
#[derive(Clone, Copy, Debug)]
pub struct AnyOp<'t> {
    /// Index among the operators of its pass.
    pub index: usize,
    /// Dotted path of the module that issued it.
    pub scope: &'t str,
    /// Which pass it belongs to.
    pub pass: Pass,
    /// Tensors read.
    pub inputs: &'t [TensorId],
    /// Tensors written.
    pub outputs: &'t [TensorId],
    /// Forward only: tensors it keeps for its backward.
    pub saved: &'t [TensorId],
    /// The forward operator; in backward, the one whose gradient it computes.
    pub operator: Operator,
    /// The factor whose gradient it computes, if it computes one factor's only.
    pub factor: Option<Factor>,
}

/// A parameter as one rank holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterInfo {
    /// Fully qualified name, with `{layer}` and `{expert}` for repeated ones.
    pub name: String,
    /// Global shape (of one expert, for experts).
    pub global_shape: Vec<u64>,
    /// Elements over all ranks of the layer: global elements × experts.
    pub global_elements: u64,
    /// Elements this rank holds before any ZeRO sharding.
    pub local_elements: u64,
    /// Whether it belongs to a routed expert (and so to the expert mesh).
    pub expert: bool,
    /// Routed experts that share the name; 1 for dense parameters.
    pub experts: u64,
    /// Whether it is trained: has a gradient and optimizer states.
    pub trained: bool,
    /// Its tensor in the trace.
    pub tensor: TensorId,
}

/// A core attention: the indices of its operators in [`Trace::forward`], where they are consecutive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionPieces {
    /// Index of the product of queries and keys.
    pub scores: usize,
    /// Index of the dropout of probabilities, if there is one.
    pub dropout: Option<usize>,
    /// Index of the product of probabilities and values.
    pub context: usize,
    /// How scores become probabilities.
    pub rule: SoftmaxRule,
    /// Dropout probability; 0 without dropout.
    pub probability: f64,
}

/// A layer's forward and backward on one rank.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Trace {
    /// All local tensors, indexed by [`TensorId`].
    pub tensors: Vec<TensorInfo>,
    /// All parameters that this rank holds.
    pub parameters: Vec<ParameterInfo>,
    /// Forward operators in order.
    pub forward: Vec<Op>,
    /// Backward operators in order.
    pub backward: Vec<Op<Gradient>>,
    /// The core attentions of forward.
    pub attentions: Vec<AttentionPieces>,
    /// Views made in forward.
    pub forward_views: Vec<View>,
    /// Views of backward: gradients of parts that are written into gradients of wholes.
    pub backward_views: Vec<View>,
    /// Gradient of the block's input, if it has one.
    pub input_gradient: Option<TensorId>,
    /// Gradient of the block's output, from which backward starts.
    pub output_gradient: Option<TensorId>,
    /// The layer's output: what the next layer or stage reads.
    pub output: Option<TensorId>,
    /// Whether linear layers multiply in FP8.
    pub eight_bits: bool,
}

/// Room for the operators of a pass of a decoder layer, so that lists of them seldom grow.
pub(crate) const OPERATORS: usize = 96;

impl Trace {
    /// An empty trace with room for a decoder layer.
    pub(crate) fn for_a_layer() -> Self {
        Self {
            tensors: Vec::with_capacity(3 * OPERATORS),
            forward: Vec::with_capacity(OPERATORS),
            backward: Vec::with_capacity(OPERATORS),
            ..Self::default()
        }
    }
}

impl<O> Op<O> {
    fn any(&self, index: usize, (operator, factor): (Operator, Option<Factor>)) -> AnyOp<'_> {
        AnyOp {
            index,
            scope: &self.scope,
            pass: self.pass,
            inputs: &self.inputs,
            outputs: &self.outputs,
            saved: &self.saved,
            operator,
            factor,
        }
    }
}

impl Op {
    /// The core attention operator that this is, if it is one.
    #[must_use]
    pub fn attention(&self) -> Option<Attention> {
        match self.operator {
            Operator::Attention(attention) => Some(attention),
            _ => None,
        }
    }
}

impl Trace {
    /// The tensor behind an id.
    #[must_use]
    pub fn tensor(&self, id: TensorId) -> &TensorInfo {
        &self.tensors[id.0 as usize]
    }

    /// The operator of a pass at an index; both halves of backward share one list.
    #[must_use]
    pub fn op(&self, pass: Pass, index: usize) -> AnyOp<'_> {
        match pass {
            Pass::Forward => {
                let op = &self.forward[index];
                op.any(index, (op.operator, None))
            }
            Pass::BackwardInput | Pass::BackwardWeight => {
                let op = &self.backward[index];
                op.any(index, op.operator.operator())
            }
        }
    }

    /// The operators of forward.
    pub fn forward_ops(&self) -> impl Iterator<Item = AnyOp<'_>> {
        (0..self.forward.len()).map(|index| self.op(Pass::Forward, index))
    }

    /// The operators of backward.
    pub fn backward_ops(&self) -> impl Iterator<Item = AnyOp<'_>> {
        (0..self.backward.len()).map(|index| self.op(Pass::BackwardInput, index))
    }

    /// The operators of both passes.
    pub fn ops(&self) -> impl Iterator<Item = AnyOp<'_>> {
        self.forward_ops().chain(self.backward_ops())
    }

    /// The operator that writes a tensor. `None` for a tensor that the block is given.
    #[must_use]
    pub fn producer(&self, id: TensorId) -> Option<AnyOp<'_>> {
        self.ops().find(|op| op.outputs.contains(&id))
    }
}
