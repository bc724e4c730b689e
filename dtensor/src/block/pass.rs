//! The passes of a block on any device: which steps run, in which order, and what stays between them.

use std::collections::BTreeMap;

use super::program::{Block, Half, Keep, Step};
use crate::layout::BlockPosition;
use crate::philox::Stream;
use crate::plan::RoutedRows;
use crate::tensor::{TensorId, TensorRole};
use crate::trace::{self, AnyOp, Op};

/// Parameters of a block as a rank holds them now.
pub trait Parameters<T> {
    /// The local shard of a parameter; of experts, all local ones after each other.
    fn parameter(&self, id: TensorId) -> &T;
}

/// What a block keeps of a micro-batch between its passes: tensors by storage, and where its experts' rows
/// went.
#[derive(Clone, Debug)]
pub struct Saved<V, R> {
    /// What stands behind each storage.
    pub values: BTreeMap<u32, V>,
    /// Where the rows of its experts went.
    pub route: Option<R>,
}

impl<V, R> Default for Saved<V, R> {
    fn default() -> Self {
        Self {
            values: BTreeMap::new(),
            route: None,
        }
    }
}

/// What a block returns from forward.
#[derive(Debug)]
pub struct Forward<T, S> {
    /// Its output: what the next block reads, or the loss of every token.
    pub output: T,
    /// What it keeps.
    pub saved: S,
    /// Rows that reached this rank's experts, if it has experts.
    pub routed: Option<RoutedRows>,
}

/// A pass of one micro-batch through a block on a device: its kernels and what they work on.
pub trait Pass {
    /// A local tensor.
    type Tensor: Clone;
    /// What stands behind a traced tensor.
    type Value;
    /// Where tokens' rows went.
    type Route;
    /// Where gradients of weights go.
    type Sink: ?Sized;
    /// Why it cannot go on.
    type Error;

    /// A tensor as what stands behind a traced one.
    fn value(tensor: Self::Tensor) -> Self::Value;
    /// Everything that lives now.
    fn held(&mut self) -> &mut Kept<Self>;
    /// A tensor that lives now.
    ///
    /// # Errors
    /// When it does not.
    fn tensor(&self, id: TensorId) -> Result<&Self::Tensor, Self::Error>;
    /// Runs an operator of forward, by its place in the trace.
    ///
    /// # Errors
    /// When a kernel or a message fails.
    fn forward_op(&mut self, op: usize) -> Result<(), Self::Error>;
    /// Makes a view of forward.
    ///
    /// # Errors
    /// When what it is a view of does not live.
    fn forward_view(&mut self, view: usize) -> Result<(), Self::Error>;
    /// Runs an operator of backward; `sink` takes gradients of weights.
    ///
    /// # Errors
    /// When a kernel or a message fails.
    fn backward_op(&mut self, op: usize, sink: &mut Self::Sink) -> Result<(), Self::Error>;
    /// Makes a view of backward.
    ///
    /// # Errors
    /// When what it is a view of does not live.
    fn backward_view(&mut self, view: usize) -> Result<(), Self::Error>;
    /// An operator has run.
    ///
    /// # Errors
    /// When a watch stops the rank.
    fn ran(&self, _op: AnyOp<'_>) -> Result<(), Self::Error> {
        Ok(())
    }
    /// Rows that reached this rank's experts, where it is known.
    fn routed(&self) -> Option<RoutedRows> {
        None
    }
}

/// What a device's passes keep.
pub type Kept<P> = Saved<<P as Pass>::Value, <P as Pass>::Route>;

fn forward_step<P: Pass>(block: &Block, run: &mut P, step: Step) -> Result<(), P::Error> {
    match step {
        Step::Op(op) => {
            run.forward_op(op)?;
            run.ran(block.trace.op(trace::Pass::Forward, op))
        }
        Step::View(view) => run.forward_view(view),
    }
}

/// Forward of a micro-batch through the block of `run`.
pub fn forward<P: Pass>(
    block: &Block,
    mut run: P,
    input: Option<P::Tensor>,
) -> Result<Forward<P::Tensor, Kept<P>>, P::Error> {
    let mut tensors = block.trace.tensors.iter();
    if let (Some(input), Some(info)) = (input, tensors.find(|t| t.role == TensorRole::Input)) {
        run.held().values.insert(info.storage.0, P::value(input));
    }
    for (index, &step) in block.forward.iter().enumerate() {
        forward_step(block, &mut run, step)?;
        for storage in &block.forward_dies[index] {
            run.held().values.remove(storage);
        }
    }
    let output = block.trace.output.expect("a traced block has an output");
    let output = run.tensor(output)?.clone();
    let routed = run.routed();
    let mut saved = std::mem::take(run.held());
    saved
        .values
        .retain(|storage, _| block.kept.contains(storage));
    if block.keep == Keep::Input {
        saved.route = None;
    }
    Ok(Forward {
        output,
        saved,
        routed,
    })
}

/// Backward of a micro-batch through the block of `run`, or half of it. `gradient` is that of the output;
/// the loss block needs none, nor does the weight half. Returns the gradient of the input.
pub fn backward<P: Pass>(
    block: &Block,
    mut run: P,
    saved: &mut Kept<P>,
    gradient: Option<P::Tensor>,
    half: Half,
    sink: &mut P::Sink,
) -> Result<Option<P::Tensor>, P::Error> {
    *run.held() = std::mem::take(saved);
    if half != Half::Weight {
        for &index in &block.again {
            forward_step(block, &mut run, block.forward[index])?;
        }
        if let (Some(gradient), Some(id)) = (gradient, block.trace.output_gradient) {
            let storage = block.storage(id);
            run.held().values.insert(storage, P::value(gradient));
        }
    }
    for (index, &step) in block.backward.iter().enumerate() {
        let weight = block.is_weight_step(step);
        match half {
            Half::Input if weight => continue,
            Half::Weight if !weight => continue,
            _ => {}
        }
        match step {
            Step::Op(op) => {
                run.backward_op(op, sink)?;
                run.ran(block.trace.op(trace::Pass::BackwardInput, op))?;
            }
            Step::View(view) => run.backward_view(view)?,
        }
        for storage in &block.backward_dies[index] {
            if half == Half::Both || !block.weight_reads.contains(storage) {
                run.held().values.remove(storage);
            }
        }
    }
    let result = match block.trace.input_gradient.filter(|_| half != Half::Weight) {
        Some(id) => Some(run.tensor(id)?.clone()),
        None => None,
    };
    if half == Half::Input {
        *saved = std::mem::take(run.held());
        saved
            .values
            .retain(|storage, _| block.weight_reads.contains(storage));
    }
    Ok(result)
}

impl Block {
    fn is_weight_step(&self, step: Step) -> bool {
        matches!(step, Step::Op(op) if self.trace.backward[op].pass == trace::Pass::BackwardWeight)
    }

    /// Random numbers of an operator.
    pub fn stream(&self, op: &Op, seed: u64, step: u32) -> Stream {
        Stream::of(seed, step, [&self.prefix, &op.scope])
    }

    /// First global index that a rank holds of a dim, past the end if it holds none: the first row of a
    /// table, the first entry of a vocabulary.
    pub fn first_index(&self, id: TensorId, dim: usize, position: &BlockPosition) -> u64 {
        let info = self.trace.tensor(id);
        let held = position.indices(&info.global, &info.placements, dim);
        held.first().copied().unwrap_or(info.global[dim])
    }
}
