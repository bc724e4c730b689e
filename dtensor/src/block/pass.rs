//! Forward and backward of a block on any device: which steps run, in which order, and what is kept between them.

use std::collections::BTreeMap;

use super::program::{Block, Half, Keep, Step};
use crate::layout::BlockPosition;
use crate::philox::Stream;
use crate::plan::RoutedRows;
use crate::tensor::{TensorId, TensorRole};
use crate::trace::{self, AnyOp, Op};

/// The current values of a block's parameters on a rank.
pub trait Parameters<T> {
    /// The local shard of a parameter; for expert parameters, the shards of all local experts concatenated.
    fn parameter(&self, id: TensorId) -> &T;
}

/// What a block keeps of a micro-batch from forward to backward: tensors by storage, and the expert routing.
#[derive(Clone, Debug)]
pub struct Saved<V, R> {
    /// The kept value of each storage, by storage number.
    pub values: BTreeMap<u32, V>,
    /// Which rows were sent to which experts, for blocks with routed experts.
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
    /// The block's output: the next block's input, or the loss of every token.
    pub output: T,
    /// What is kept for backward.
    pub saved: S,
    /// Number of rows that reached this rank's experts, if the block has experts.
    pub routed: Option<RoutedRows>,
}

/// One pass of one micro-batch through a block: the device's kernels and the tensors they work on.
pub trait Pass {
    /// A local tensor.
    type Tensor: Clone;
    /// The device's representation of a traced tensor.
    type Value;
    /// The device's record of which rows were sent to which experts.
    type Route;
    /// The device's destination for gradients of weights.
    type Sink: ?Sized;
    /// Why a pass failed.
    type Error;

    /// Wraps a local tensor as the value of a traced one.
    fn value(tensor: Self::Tensor) -> Self::Value;
    /// All values that are live now.
    fn held(&mut self) -> &mut Kept<Self>;
    /// A live tensor, by id.
    ///
    /// # Errors
    /// When the tensor is not live.
    fn tensor(&self, id: TensorId) -> Result<&Self::Tensor, Self::Error>;
    /// Runs the forward operator at index `op` of the trace.
    ///
    /// # Errors
    /// When a kernel or a message fails.
    fn forward_op(&mut self, op: usize) -> Result<(), Self::Error>;
    /// Makes the forward view at index `view` of the trace.
    ///
    /// # Errors
    /// When the tensor that it views is not live.
    fn forward_view(&mut self, view: usize) -> Result<(), Self::Error>;
    /// Runs the backward operator at index `op` of the trace; `sink` takes gradients of weights.
    ///
    /// # Errors
    /// When a kernel or a message fails.
    fn backward_op(&mut self, op: usize, sink: &mut Self::Sink) -> Result<(), Self::Error>;
    /// Makes the backward view at index `view` of the trace.
    ///
    /// # Errors
    /// When the tensor that it views is not live.
    fn backward_view(&mut self, view: usize) -> Result<(), Self::Error>;
    /// Called after each operator has run.
    ///
    /// # Errors
    /// When a watch, which sees every operator, stops the rank.
    fn ran(&self, _op: AnyOp<'_>) -> Result<(), Self::Error> {
        Ok(())
    }
    /// Number of rows that reached this rank's experts, where the device knows it.
    fn routed(&self) -> Option<RoutedRows> {
        None
    }
}

/// What a pass of type `P` keeps for backward.
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

/// Runs the forward pass of one micro-batch through `block`: returns its output, and what its backward pass will need.
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

/// Runs backward of a micro-batch through `block`, or one half of it. `gradient` is the gradient of
/// the output, `None` for the loss block and the weight half. Returns the input's gradient, if any.
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

    /// The random number stream of an operator in a step.
    pub fn stream(&self, op: &Op, seed: u64, step: u32) -> Stream {
        Stream::of(seed, step, [&self.prefix, &op.scope])
    }

    /// The first global index along `dim` that a rank holds (such as the first row of a table or entry of a
    /// vocabulary), or the size of the dim if the rank holds none.
    pub fn first_index(&self, id: TensorId, dim: usize, position: &BlockPosition) -> u64 {
        let info = self.trace.tensor(id);
        let held = position.indices(&info.global, &info.placements, dim);
        held.first().copied().unwrap_or(info.global[dim])
    }
}
