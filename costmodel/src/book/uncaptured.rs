//! The operators of a layer that no CUDA graph of the layer captures.
//!
//! Megatron-Core's graph ends when tokens are ready to be sent to experts: everything that reads their rows is issued kernel by
//! kernel, up to the sum with the residual stream (NVIDIA/Megatron-LM@d98e8a6, `core/transformer/transformer_layer.py`,
//! `_te_cuda_graph_replay_impl`). Shared experts, which read the tokens themselves, are in the graph.

use dtensor::{Exchange, Expert, Gradient, Moves, Operator, Pass, TensorId, Trace};

use crate::lower::Kernel;

/// Which operators of a traced layer are issued one by one although graphs capture the layer.
#[derive(Debug)]
pub(super) struct Uncaptured {
    forward: Vec<bool>,
    backward: Vec<bool>,
}

impl Uncaptured {
    /// The operators of a trace that are issued one by one. Tokens are ordered by expert in the
    /// graph, or only after their arrival (`orders_arrived`).
    pub(super) fn of(trace: &Trace, orders_arrived: bool) -> Self {
        let mut read = Tensors::new(trace);
        let mut forward = Vec::with_capacity(trace.forward.len());
        for op in &trace.forward {
            let orders = matches!(
                op.operator,
                Operator::Expert(Expert::Permute | Expert::WeightedPermute)
            );
            let after = read.any(&op.inputs);
            if after || orders {
                read.add(&op.outputs);
            }
            forward.push(after || (orders && orders_arrived));
        }
        let mut made = Tensors::new(trace);
        let mut backward = Vec::with_capacity(trace.backward.len());
        for op in &trace.backward {
            let outside = match of_forward(op.operator) {
                Some(index) => forward[index],
                None if exchanges_rows(op.operator) => true,
                // A sum of gradients is outside the graph if all that it adds up is.
                None => made.all(&op.inputs),
            };
            if outside {
                made.add(&op.outputs);
            }
            backward.push(outside);
        }
        Self { forward, backward }
    }

    /// Whether a kernel is issued by itself.
    pub(super) fn has(&self, kernel: &Kernel) -> bool {
        match kernel.pass {
            Pass::Forward => self.forward[kernel.op],
            Pass::BackwardInput | Pass::BackwardWeight => self.backward[kernel.op],
        }
    }
}

/// The forward operator whose gradient this is; `None` for sums and messages.
fn of_forward(gradient: Gradient) -> Option<usize> {
    match gradient {
        Gradient::Product(index, ..)
        | Gradient::Attention(index, ..)
        | Gradient::Norm(index, _)
        | Gradient::Pointwise(index, _)
        | Gradient::Token(index, _)
        | Gradient::Expert(index, _)
        | Gradient::Recurrent(index, _) => Some(index),
        Gradient::Sum | Gradient::Exchange(_) | Gradient::Ring(_) => None,
    }
}

fn exchanges_rows(gradient: Gradient) -> bool {
    matches!(
        gradient,
        Gradient::Exchange(Exchange {
            moves: Moves::Dispatch | Moves::Combine | Moves::ExpertGather | Moves::ExpertReduce,
            ..
        })
    )
}

/// A set of tensors of a trace, by the memory that they are stored in.
struct Tensors<'t> {
    trace: &'t Trace,
    stored: Vec<bool>,
}

impl<'t> Tensors<'t> {
    fn new(trace: &'t Trace) -> Self {
        let stored = vec![false; trace.tensors.len()];
        Self { trace, stored }
    }

    fn storage(&self, id: TensorId) -> usize {
        self.trace.tensor(id).storage.0 as usize
    }

    fn add(&mut self, ids: &[TensorId]) {
        for &id in ids {
            let storage = self.storage(id);
            self.stored[storage] = true;
        }
    }

    fn any(&self, ids: &[TensorId]) -> bool {
        ids.iter().any(|&id| self.stored[self.storage(id)])
    }

    fn all(&self, ids: &[TensorId]) -> bool {
        ids.iter().all(|&id| self.stored[self.storage(id)])
    }
}
