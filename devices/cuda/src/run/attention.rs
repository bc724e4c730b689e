//! Core attention of a pass.

use super::machine::GradientSink;
use super::state::{Run, no_kernel};
use crate::error::{CudaError, Result};
use crate::launcher::{AttentionArgument, StreamArgument, threshold};
use crate::memory::Buffer;
use crate::ops::AttentionCall;
use crate::tensor::Tensor;
use catalog::Window;
use dtensor::CausalAttention;
use dtensor::philox::Stream;
use dtensor::{Attention, AttentionPieces, Factor, Gradient, Op, TensorId};
use std::ops::Range;
use std::rc::Rc;

/// The traced operators of one core attention: scores, softmax and context.
struct Pieces<'p> {
    scores: &'p Op,
    context: &'p Op,
    dropout: Option<&'p Op>,
    of: AttentionPieces,
}

/// Sizes of an attention, with the buffers that they point to.
struct Sizes {
    argument: AttentionArgument,
    positions: Rc<Buffer>,
    /// The sink logits, and the range of them that belongs to this rank's heads.
    sinks: Option<(TensorId, Range<usize>)>,
    library: Option<CausalAttention>,
}

fn of_heads(list: &Tensor, held: &Range<usize>) -> Tensor {
    list.part(held.start, vec![held.len()])
}

impl<'r> Run<'r> {
    fn attention_pieces(&self, attention: &Attention) -> Pieces<'r> {
        let trace = &self.block.trace;
        let of = trace.attentions[attention.of];
        Pieces {
            scores: &trace.forward[of.scores],
            context: &trace.forward[of.context],
            dropout: of.dropout.map(|i| &trace.forward[i]),
            of,
        }
    }

    /// Sizes and query positions of an attention, from its operands on this rank.
    fn attention_sizes(&self, pieces: &Pieces<'_>, attention: &Attention) -> Result<Sizes> {
        let (shape, rule) = (attention.shape, pieces.of.rule);
        let (q, k) = (pieces.scores.inputs[0], pieces.scores.inputs[1]);
        let (positions, queries) = self.machine.positions(self.info(q), 1)?;
        let (q, k) = (self.tensor(q)?, self.keys(k)?);
        let heads = q.columns() as u64 / shape.qk_dim;
        let keys = k.len() as u64 / (q.shape[0] * k.columns()) as u64;
        if keys != shape.kv_len {
            let scope = &pieces.scores.scope;
            return Err(CudaError::unsupported(
                "attention",
                scope,
                "keys that are on other ranks",
            ));
        }
        let info = self.info(pieces.scores.outputs[0]);
        let slopes = self.machine.slopes(info, rule)?;
        let position = &self.machine.host.position;
        let sinks = rule.sinks.map(|sinks| {
            let held = position.numbers_of_heads(self.info(sinks), info);
            (sinks, held)
        });
        let first_head = self.machine.position_list(info, 1);
        let probability = pieces.of.probability;
        let stream = match pieces.dropout {
            Some(op) => self.stream(op),
            None => StreamArgument::new(Stream::new(0, 0, ""), 0),
        };
        let argument = AttentionArgument {
            lengths: [queries as i64, keys as i64],
            heads: [heads as i64, (heads * shape.kv_heads / shape.heads) as i64],
            dims: [shape.qk_dim as i64, shape.v_dim as i64],
            window: sliding(shape.window, shape.kv_len, &pieces.scores.scope)?,
            scale: rule.scale as f32,
            threshold: threshold(probability),
            keep: (1.0 / (1.0 - probability)) as f32,
            cap: rule.cap.unwrap_or(0.0) as f32,
            stream,
            first_sequence: self.batch.host.first_sequence as i64,
            first_head: first_head.first().copied().unwrap_or(0) as i64,
            global_heads: info.global[1] as i64,
            global_queries: info.global[2] as i64,
            // The machine keeps the list of slopes alive.
            slopes: slopes.map_or(0, |list| list.address),
            sinks: 0,
        };
        // This rank may hold whole sequences whose tokens are in another order.
        let in_order = self.machine.span(self.info(pieces.scores.inputs[0]), 1);
        let library = self.block.causal_attentions[attention.of];
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
    ) -> Result<AttentionCall<'c>> {
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

    /// Runs the whole fused attention at its first operator.
    pub(super) fn attention(&mut self, attention: &Attention) -> Result<()> {
        let pieces = self.attention_pieces(attention);
        let sizes = self.attention_sizes(&pieces, attention)?;
        let call = self.attention_call(&pieces, &sizes)?;
        let (out, sums) = self.device().attention(&call)?;
        let to = [pieces.context.outputs[0], pieces.scores.outputs[0]];
        self.set(to[0], out);
        self.set(to[1], sums);
        Ok(())
    }

    /// Computes the gradients of queries, keys, values and sinks at the first of their operators.
    pub(super) fn attention_backward(
        &mut self,
        op: &Op<Gradient>,
        attention: &Attention,
        sink: &mut dyn GradientSink,
    ) -> Result<()> {
        let pieces = self.attention_pieces(attention);
        let scope = &pieces.context.scope;
        let [k, v] = [pieces.scores.inputs[1], pieces.context.inputs[1]];
        self.ring_again(scope, [k, v])?;
        let sizes = self.attention_sizes(&pieces, attention)?;
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
        let AttentionPieces {
            scores, context, ..
        } = pieces.of;
        let to = [
            self.block.gradient_of(scores, Factor::First),
            self.block.gradient_of(scores, Factor::Second),
            self.block.gradient_of(context, Factor::Second),
        ];
        for (id, gradient) in to.into_iter().zip(gradients) {
            if let Some(id) = id {
                self.set(id, gradient);
            }
        }
        Ok(())
    }
}

/// The most keys that a query attends to; without a window, a number above any sequence length.
fn sliding(window: Option<Window>, keys: u64, scope: &str) -> Result<i64> {
    match window {
        Some(Window::Sliding(tokens)) => Ok(tokens as i64),
        Some(Window::Chunk(tokens)) if tokens < keys => Err(no_kernel("chunked attention", scope)),
        Some(Window::Chunk(_)) | None => Ok(i64::MAX / 4),
    }
}
