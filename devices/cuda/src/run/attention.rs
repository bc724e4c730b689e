//! Core attention of a pass.

use super::machine::GradientSink;
use super::state::{Run, unsupported};
use crate::error::CudaError;
use crate::launcher::{AttentionArgument, StreamArgument, threshold};
use crate::memory::Buffer;
use crate::ops::AttentionCall;
use crate::tensor::Tensor;
use dtensor::CausalAttention;
use dtensor::philox::Stream;
use dtensor::trace::{AttentionShape, Detail, Op, TensorId};
use std::ops::Range;
use std::rc::Rc;

/// The pieces that a fused attention stands for.
struct Pieces<'p> {
    scores: &'p Op,
    context: &'p Op,
    dropout: Option<&'p Op>,
    /// Indices in the forward trace of scores and context.
    at: [usize; 2],
}

/// Sizes of an attention with what they point to.
struct Sizes {
    argument: AttentionArgument,
    positions: Rc<Buffer>,
    /// A score of every head whose weight goes nowhere, and which of them are of heads here.
    sinks: Option<(TensorId, Range<usize>)>,
    library: Option<CausalAttention>,
}

fn of_heads(list: &Tensor, held: &Range<usize>) -> Tensor {
    list.part(held.start, vec![held.len()])
}

impl<'r> Run<'r> {
    fn attention_pieces(&self, op: usize) -> Result<Pieces<'r>, CudaError> {
        let forward = &self.block.trace.forward;
        let Some(pieces) = self.block.trace.attention_pieces(&forward[op].scope) else {
            return Err(unsupported(&forward[op], "attention without its pieces"));
        };
        Ok(Pieces {
            scores: &forward[pieces.scores],
            context: &forward[pieces.context],
            dropout: pieces.dropout.map(|i| &forward[i]),
            at: [pieces.scores, pieces.context],
        })
    }

    /// Sizes and positions of an attention as its operands have them now.
    fn attention_sizes(
        &self,
        pieces: &Pieces<'_>,
        shape: &AttentionShape,
    ) -> Result<Sizes, CudaError> {
        let (q, k) = (pieces.scores.inputs[0], pieces.scores.inputs[1]);
        let (positions, queries) = self.machine.positions(self.info(q), 1)?;
        let (q, k) = (self.tensor(q)?, self.keys(k)?);
        let heads = q.columns() as u64 / shape.qk_dim;
        let keys = k.len() as u64 / (q.shape[0] * k.columns()) as u64;
        if keys != shape.kv_len {
            return Err(unsupported(pieces.scores, "keys that are on other ranks"));
        }
        let Some(rule) = self.block.trace.softmax_rule(pieces.at[0]) else {
            let reason = "scores that no softmax follows";
            return Err(unsupported(pieces.scores, reason));
        };
        let info = self.info(pieces.scores.outputs[0]);
        let slopes = self.machine.slopes(info, rule)?;
        let position = &self.machine.host.position;
        let sinks = rule.sinks.map(|sinks| {
            let held = position.numbers_of_heads(self.info(sinks), info);
            (sinks, held)
        });
        let first_head = self.machine.position_list(info, 1);
        let (probability, stream) = match pieces.dropout.map(|op| (op.detail, op)) {
            Some((Detail::Dropout { probability }, op)) => (probability, self.stream(op)),
            _ => (0.0, StreamArgument::new(Stream::new(0, 0, ""), 0)),
        };
        let argument = AttentionArgument {
            lengths: [queries as i64, keys as i64],
            heads: [heads as i64, (heads * shape.kv_heads / shape.heads) as i64],
            dims: [shape.qk_dim as i64, shape.v_dim as i64],
            // Without a window, one that is longer than any sequence.
            window: shape.window.map_or(i64::MAX / 4, |w| w as i64),
            scale: rule.scale as f32,
            threshold: threshold(probability),
            keep: (1.0 / (1.0 - probability)) as f32,
            cap: rule.cap.unwrap_or(0.0) as f32,
            stream,
            first_sequence: self.batch.host.first_sequence as i64,
            first_head: first_head.first().copied().unwrap_or(0) as i64,
            global_heads: info.global[1] as i64,
            global_queries: info.global[2] as i64,
            // The machine keeps the list.
            slopes: slopes.map_or(0, |list| list.address),
            sinks: 0,
        };
        // A rank's tokens may be whole sequences in another order.
        let in_order = self.machine.span(self.info(pieces.scores.inputs[0]), 1);
        let library = self.block.causal_attentions.get(&pieces.at[0]).copied();
        Ok(Sizes {
            argument,
            library: library.filter(|_| in_order.is_some()),
            positions,
            sinks,
        })
    }

    fn attention_call<'c>(
        &'c self,
        pieces: &Pieces<'_>,
        sizes: &'c Sizes,
    ) -> Result<AttentionCall<'c>, CudaError> {
        Ok(AttentionCall {
            q: self.tensor(pieces.scores.inputs[0])?,
            k: self.keys(pieces.scores.inputs[1])?,
            v: self.keys(pieces.context.inputs[1])?,
            positions: &sizes.positions,
            sinks: match &sizes.sinks {
                Some((sinks, held)) => Some(of_heads(self.tensor(*sinks)?, held)),
                None => None,
            },
            sizes: sizes.argument,
            library: sizes.library,
        })
    }

    /// All pieces at once, at the first of them.
    pub(super) fn attention(&mut self, op: usize, shape: &AttentionShape) -> Result<(), CudaError> {
        let pieces = self.attention_pieces(op)?;
        let sizes = self.attention_sizes(&pieces, shape)?;
        let call = self.attention_call(&pieces, &sizes)?;
        let (out, sums) = self.device().attention(&call)?;
        let to = [pieces.context.outputs[0], pieces.scores.outputs[0]];
        self.set(to[0], out);
        self.set(to[1], sums);
        Ok(())
    }

    /// Gradients of queries, keys, values and sinks, at the first of their operators.
    pub(super) fn attention_backward(
        &mut self,
        op: &Op,
        of: usize,
        shape: &AttentionShape,
        sink: &mut dyn GradientSink,
    ) -> Result<(), CudaError> {
        let pieces = self.attention_pieces(of)?;
        let block = self.block;
        let scope = &block.trace.forward[of];
        let [k, v] = [pieces.scores.inputs[1], pieces.context.inputs[1]];
        self.ring_again(scope, [k, v])?;
        let sizes = self.attention_sizes(&pieces, shape)?;
        let call = self.attention_call(&pieces, &sizes)?;
        let d_out = self.tensor(op.inputs[0])?;
        let out = self.tensor(pieces.context.outputs[0])?;
        let sums = self.tensor(pieces.scores.outputs[0])?;
        let d_sinks = sizes.sinks.as_ref();
        let d_sinks = d_sinks.map(|(sinks, held)| of_heads(&sink.gradient(*sinks), held));
        let [dq, dk, dv] =
            self.device()
                .attention_backward(&call, d_out, out, sums, d_sinks.as_ref())?;
        let gradients = [
            dq,
            self.return_ring(scope, k, dk)?,
            self.return_ring(scope, v, dv)?,
        ];
        let [scores, context] = pieces.at;
        let to = [
            self.block.gradient_of(scores, 0),
            self.block.gradient_of(scores, 1),
            self.block.gradient_of(context, 1),
        ];
        for (id, gradient) in to.into_iter().zip(gradients) {
            if let Some(id) = id {
                self.set(id, gradient);
            }
        }
        Ok(())
    }
}
