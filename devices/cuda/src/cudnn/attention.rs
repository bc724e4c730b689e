//! Core attention as a cuDNN graph: the pattern that cuDNN's documentation calls scaled dot product attention, forward
//! and backward, causal, with or without a sliding window.

use crate::error::CudaError;
use crate::sys::cudnn::{
    cudnnDataType_t::{self, *},
    cudnnPointwiseMode_t::*,
    cudnnReduceTensorOp_t::*,
};
use dtensor::CausalAttention;

use super::graph::{Graph, Id, Place, Shape};

/// The tensors and numbers of the forward graph that each call supplies.
#[derive(Clone, Copy)]
pub(super) struct Forward {
    /// Queries, keys, values, output, log-sum-exps.
    pub(super) tensors: [Id; 5],
    pub(super) numbers: Numbers,
}

/// The tensors and numbers of the backward graph that each call supplies.
#[derive(Clone, Copy)]
pub(super) struct Backward {
    /// Queries, keys, values, output, log-sum-exps.
    pub(super) tensors: [Id; 5],
    /// Gradients of the output, queries, keys and values.
    pub(super) gradients: [Id; 4],
    /// 32-bit sums in the workspace: the gradients of queries, and for every query the sum of output times its
    /// gradient.
    pub(super) sums: [Id; 2],
    pub(super) numbers: Numbers,
}

/// Scalars that each call supplies.
#[derive(Clone, Copy)]
pub(super) struct Numbers {
    /// Factor that scores are multiplied by.
    pub(super) scale: Id,
    /// Value that replaces the score of a masked key.
    pub(super) lowest: Id,
    /// Sliding window: the most keys that a query attends to, as a 32-bit integer.
    pub(super) window: Option<Id>,
    /// The constant 1, a factor of the backward pass.
    pub(super) one: Option<Id>,
}

/// Shapes of one attention.
struct Shapes {
    q: Shape,
    k: Shape,
    v: Shape,
    out: Shape,
    /// `[batch, heads, length, 1]`.
    rows: [i64; 4],
    /// `[batch, heads, length, length]`.
    scores: [i64; 4],
}

impl Shapes {
    fn of(attention: &CausalAttention) -> Self {
        let &CausalAttention { batch, length, .. } = attention;
        let ([heads, kv_heads], [key, value]) = (attention.heads, attention.dims);
        let lies = |heads, columns| Shape::by_rows([batch, heads, length, columns]);
        Self {
            q: lies(heads, key),
            k: lies(kv_heads, key),
            v: lies(kv_heads, value),
            out: lies(heads, value),
            rows: [batch, heads, length, 1],
            scores: [batch, heads, length, length],
        }
    }
}

fn memory(graph: &mut Graph, element: cudnnDataType_t, shape: Shape) -> Result<Id, CudaError> {
    graph.tensor(element, shape, Place::Memory)
}

fn numbers(graph: &mut Graph, of: &CausalAttention) -> Result<Numbers, CudaError> {
    Ok(Numbers {
        scale: graph.number(CUDNN_DATA_FLOAT)?,
        lowest: graph.number(CUDNN_DATA_FLOAT)?,
        window: match of.window {
            Some(_) => Some(graph.number(CUDNN_DATA_INT32)?),
            None => None,
        },
        one: None,
    })
}

/// The scaled scores, with those of masked keys replaced by the lowest value.
fn masked(
    graph: &mut Graph,
    scores: Id,
    sizes: [i64; 4],
    numbers: &Numbers,
) -> Result<Id, CudaError> {
    let places = |graph: &mut Graph, of: Id, axis| -> Result<Id, CudaError> {
        let at = graph.tensor(CUDNN_DATA_INT32, Shape::packed(sizes), Place::Within)?;
        graph.index(of, axis, at)?;
        Ok(at)
    };
    let kept = |graph: &mut Graph, of: Id, mode, a, b| -> Result<Id, CudaError> {
        let sees = graph.tensor(CUDNN_DATA_BOOLEAN, Shape::packed(sizes), Place::Within)?;
        graph.pointwise(mode, a, Some(b), sees)?;
        let [kept] = graph.within(sizes)?;
        graph.select(of, numbers.lowest, sees, kept)?;
        Ok(kept)
    };
    let (column, row) = (places(graph, scores, 3)?, places(graph, scores, 2)?);
    let causal = kept(graph, scores, CUDNN_POINTWISE_CMP_GE, row, column)?;
    let Some(window) = numbers.window else {
        return Ok(causal);
    };
    let column = places(graph, causal, 3)?;
    let end = graph.tensor(CUDNN_DATA_INT32, Shape::packed(sizes), Place::Within)?;
    graph.pointwise(CUDNN_POINTWISE_ADD, column, Some(window), end)?;
    let row = places(graph, causal, 2)?;
    kept(graph, causal, CUDNN_POINTWISE_CMP_GT, end, row)
}

/// Builds forward: output and log-sum-exps from queries, keys and values.
pub(super) fn forward(graph: &mut Graph, of: &CausalAttention) -> Result<Forward, CudaError> {
    let shapes = Shapes::of(of);
    let q = memory(graph, CUDNN_DATA_BFLOAT16, shapes.q)?;
    let k = memory(graph, CUDNN_DATA_BFLOAT16, shapes.k.transposed())?;
    let v = memory(graph, CUDNN_DATA_BFLOAT16, shapes.v)?;
    let out = memory(graph, CUDNN_DATA_BFLOAT16, shapes.out)?;
    let sums = memory(graph, CUDNN_DATA_FLOAT, Shape::packed(shapes.rows))?;
    let numbers = numbers(graph, of)?;
    let [plain, scaled] = graph.within(shapes.scores)?;
    graph.product(q, k, plain)?;
    graph.pointwise(CUDNN_POINTWISE_MUL, plain, Some(numbers.scale), scaled)?;
    let scores = masked(graph, scaled, shapes.scores, &numbers)?;
    let [largest, total, logarithm] = graph.within(shapes.rows)?;
    let [below, powers] = graph.within(shapes.scores)?;
    graph.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, largest)?;
    graph.pointwise(CUDNN_POINTWISE_SUB, scores, Some(largest), below)?;
    graph.pointwise(CUDNN_POINTWISE_EXP, below, None, powers)?;
    graph.reduce(CUDNN_REDUCE_TENSOR_ADD, powers, total)?;
    graph.pointwise(CUDNN_POINTWISE_LOG, total, None, logarithm)?;
    graph.pointwise(CUDNN_POINTWISE_ADD, largest, Some(logarithm), sums)?;
    let weights = Shape::packed(shapes.scores);
    let weights = graph.tensor(CUDNN_DATA_BFLOAT16, weights, Place::Within)?;
    graph.pointwise(CUDNN_POINTWISE_DIV, powers, Some(total), weights)?;
    graph.product(weights, v, out)?;
    Ok(Forward {
        tensors: [q, k, v, out, sums],
        numbers,
    })
}

/// Builds backward: gradients of queries, keys and values by five products; queries' gradients are summed by atomic
/// adds.
pub(super) fn backward(graph: &mut Graph, of: &CausalAttention) -> Result<Backward, CudaError> {
    let shapes = Shapes::of(of);
    let q = memory(graph, CUDNN_DATA_BFLOAT16, shapes.q)?;
    let k = memory(graph, CUDNN_DATA_BFLOAT16, shapes.k.transposed())?;
    let v = memory(graph, CUDNN_DATA_BFLOAT16, shapes.v.transposed())?;
    let out = memory(graph, CUDNN_DATA_BFLOAT16, shapes.out)?;
    let d_out = memory(graph, CUDNN_DATA_BFLOAT16, shapes.out)?;
    let lse = memory(graph, CUDNN_DATA_FLOAT, Shape::packed(shapes.rows))?;
    let dq = memory(graph, CUDNN_DATA_BFLOAT16, shapes.q)?;
    let dk = memory(graph, CUDNN_DATA_BFLOAT16, shapes.k)?;
    let dv = memory(graph, CUDNN_DATA_BFLOAT16, shapes.v)?;
    let one = graph.number(CUDNN_DATA_FLOAT)?;
    let numbers = Numbers {
        one: Some(one),
        ..numbers(graph, of)?
    };
    // Subtracted from the gradients of a query's scores: the sum of its output times the output's gradient.
    let ([both], [bare]) = (graph.within(shapes.out.sizes)?, graph.within(shapes.rows)?);
    let delta = memory(graph, CUDNN_DATA_FLOAT, Shape::packed(shapes.rows))?;
    graph.pointwise(CUDNN_POINTWISE_MUL, d_out, Some(out), both)?;
    graph.reduce(CUDNN_REDUCE_TENSOR_ADD, both, bare)?;
    graph.pointwise(CUDNN_POINTWISE_MUL, bare, Some(one), delta)?;
    // Recomputes the weights of forward.
    let [plain, scaled, below, powers] = graph.within(shapes.scores)?;
    graph.product(q, k, plain)?;
    graph.pointwise(CUDNN_POINTWISE_MUL, plain, Some(numbers.scale), scaled)?;
    graph.pointwise(CUDNN_POINTWISE_SUB, scaled, Some(lse), below)?;
    let scores = masked(graph, below, shapes.scores, &numbers)?;
    graph.pointwise(CUDNN_POINTWISE_EXP, scores, None, powers)?;
    // The transpose, so that queries run along columns.
    let turned = Shape::packed(shapes.scores).transposed();
    let weights = graph.tensor(CUDNN_DATA_BFLOAT16, turned, Place::Within)?;
    graph.reshape(powers, weights)?;
    over_heads(graph, of, weights, d_out, (dv, of.dims[1]))?;
    // Gradients of the scores.
    let [d_weights, less, times, d_scores] = graph.within(shapes.scores)?;
    graph.product(d_out, v, d_weights)?;
    graph.pointwise(CUDNN_POINTWISE_SUB, d_weights, Some(delta), less)?;
    graph.pointwise(CUDNN_POINTWISE_MUL, less, Some(powers), times)?;
    graph.pointwise(CUDNN_POINTWISE_MUL, times, Some(numbers.scale), d_scores)?;
    let keys = graph.tensor(CUDNN_DATA_FLOAT, shapes.k, Place::Within)?;
    graph.reshape(k, keys)?;
    let sum = memory(graph, CUDNN_DATA_FLOAT, Shape::packed(shapes.q.sizes))?;
    graph.product(d_scores, keys, sum)?;
    graph.pointwise(CUDNN_POINTWISE_IDENTITY, sum, None, dq)?;
    let turned = graph.tensor(CUDNN_DATA_BFLOAT16, turned, Place::Within)?;
    graph.reshape(d_scores, turned)?;
    over_heads(graph, of, turned, q, (dk, of.dims[0]))?;
    Ok(Backward {
        tensors: [q, k, v, out, lse],
        gradients: [d_out, dq, dk, dv],
        sums: [sum, delta],
        numbers,
    })
}

/// `to = a · b`, summed over the heads that share keys.
fn over_heads(
    graph: &mut Graph,
    of: &CausalAttention,
    a: Id,
    b: Id,
    (to, columns): (Id, i64),
) -> Result<(), CudaError> {
    let [heads, kv_heads] = of.heads;
    if heads == kv_heads {
        return graph.product(a, b, to);
    }
    let each = Shape::packed([of.batch, heads, of.length, columns]);
    let each = graph.tensor(CUDNN_DATA_BFLOAT16, each, Place::Within)?;
    graph.product(a, b, each)?;
    graph.reduce(CUDNN_REDUCE_TENSOR_ADD, each, to)
}
