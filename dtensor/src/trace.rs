//! What one rank would execute: the record a model leaves when it runs on the meta device.
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
    /// Backward, towards the inputs (needed by the previous layer at once).
    BackwardInput,
    /// Backward, towards the weights (may be deferred by zero-bubble schedules).
    BackwardWeight,
}

/// One operator of one rank: of forward, or `Op<Gradient>` of backward.
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
    /// What it computes.
    pub operator: O,
}

/// An operator of either pass, as prices and clocks see it.
#[derive(Clone, Copy, Debug)]
pub struct AnyOp<'t> {
    /// Its place in its pass's list.
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
    /// What it computes, or whose gradient.
    pub operator: Operator,
    /// The factor whose gradient it is, if it is one's.
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
    /// Its tensor.
    pub tensor: TensorId,
}

/// A core attention: its pieces, by their places in [`Trace::forward`], where they follow each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionPieces {
    /// The products of queries and keys.
    pub scores: usize,
    /// The dropout of weights, if there is one.
    pub dropout: Option<usize>,
    /// The products of weights and values.
    pub context: usize,
    /// How scores become weights.
    pub rule: SoftmaxRule,
    /// Probability that dropout makes a weight zero.
    pub probability: f64,
}

/// A layer's forward and backward on one rank.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Trace {
    /// Every tensor.
    pub tensors: Vec<TensorInfo>,
    /// Every parameter.
    pub parameters: Vec<ParameterInfo>,
    /// Forward operators in order.
    pub forward: Vec<Op>,
    /// Backward operators in order.
    pub backward: Vec<Op<Gradient>>,
    /// Core attentions of forward.
    pub attentions: Vec<AttentionPieces>,
    /// Views made in forward.
    pub forward_views: Vec<View>,
    /// Gradients of parts written into gradients of wholes in backward.
    pub backward_views: Vec<View>,
    /// Gradient of the block's input, if it has one.
    pub input_gradient: Option<TensorId>,
    /// Gradient of the block's output: where backward starts.
    pub output_gradient: Option<TensorId>,
    /// The layer's output: what the next layer or stage reads.
    pub output: Option<TensorId>,
    /// Whether linear layers multiply in 8 bits.
    pub eight_bits: bool,
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
    /// The piece of core attention that it is, if it is one.
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

    /// An operator of forward, or of either part of backward, by its place.
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
}
