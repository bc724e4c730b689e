//! The operations that a device must provide to hold a rank's states and run its passes.

use std::fmt::Debug;
use std::ops::Range;

use catalog::DType;

use super::slot::Slot;
use crate::block::{Block, Forward, Half, Parameters};
use crate::tensor::TensorId;

/// A device that a rank computes on: it holds tensors, runs blocks and carries messages.
///
/// Every fallible method fails when the device does, when its memory is full, or when communication stops.
pub trait Device: Sized {
    /// A local tensor.
    type Tensor: Clone + Debug;
    /// A flat fp32 buffer for optimizer states and gradients.
    type Flat: Debug;
    /// A tensor, or a piece of a flat buffer, in the form in which it travels to another rank.
    type Parcel;
    /// A point-to-point send under way.
    type Sending;
    /// A collective under way.
    type Moving: Debug;
    /// The result of an all-gather.
    type Whole;
    /// What a block keeps of a micro-batch between its passes.
    type Saved;
    /// A micro-batch in the memory that kernels read.
    type Batch<'b>;
    /// A group of ranks that communicate.
    type Group;
    /// Exact mode: the terms of one parameter's gradient, summed by a tree whose order is the same under every layout.
    type Trees: Default;
    /// Why an operation failed.
    type Error;

    /// Number of ranks of a group.
    fn size(group: &Self::Group) -> usize;
    /// This rank's index in the group.
    fn index(group: &Self::Group) -> usize;

    /// Forward of a micro-batch through a block.
    ///
    /// # Errors
    /// See [`Device`]; also when an operator has no kernel.
    fn forward(
        &self,
        block: &Block,
        batch: &Self::Batch<'_>,
        parameters: &dyn Parameters<Self::Tensor>,
        input: Option<Self::Tensor>,
    ) -> Result<Forward<Self::Tensor, Self::Saved>, Self::Error>;
    /// Backward of a micro-batch through a block, or half of it. Returns the gradient of its input.
    fn backward(
        &self,
        block: &Block,
        batch: &Self::Batch<'_>,
        parameters: &dyn Parameters<Self::Tensor>,
        passing: Passing<'_, Self>,
        gradients: &mut dyn Gradients<Self>,
    ) -> Result<Option<Self::Tensor>, Self::Error>;
    /// Bytes that a block keeps for backward.
    fn saved_bytes(saved: &Self::Saved) -> u64;
    /// Number of elements of a tensor.
    fn elements(tensor: &Self::Tensor) -> usize;

    /// A flat buffer of `len` numbers; `draw` makes their values, and a device without data does not call it.
    fn flat(&self, len: usize, draw: &dyn Fn() -> Vec<f32>) -> Result<Self::Flat, Self::Error>;
    /// A flat buffer of `len` zeros.
    fn zeros(&self, len: usize) -> Result<Self::Flat, Self::Error>;
    /// Number of elements of a flat buffer.
    fn len(flat: &Self::Flat) -> usize;
    /// Sets all elements to zero.
    fn clear(&self, flat: &mut Self::Flat) -> Result<(), Self::Error>;
    /// Copies another flat buffer over the elements from `at` on.
    fn put(&self, flat: &mut Self::Flat, at: usize, from: &Self::Flat) -> Result<(), Self::Error>;
    /// Adds part of another flat buffer to the elements from `at` on.
    fn add(
        &self,
        flat: &mut Self::Flat,
        at: usize,
        terms: (&Self::Flat, Range<usize>),
    ) -> Result<(), Self::Error>;
    /// Part of a flat buffer as a tensor, rounded to its type.
    fn rounded(
        &self,
        flat: &Self::Flat,
        range: Range<usize>,
        shape: Vec<usize>,
        dtype: DType,
    ) -> Result<Self::Tensor, Self::Error>;
    /// Copies an fp32 tensor over the elements from `at` on.
    fn put_tensor(
        &self,
        flat: &mut Self::Flat,
        at: usize,
        tensor: &Self::Tensor,
    ) -> Result<(), Self::Error>;
    /// One AdamW step over contiguous runs of this rank's partition. Updated weights are written, in the type that
    /// kernels read, to the shard and to the tensors of `values` that the runs name.
    fn adamw(
        &self,
        states: FlatStates<'_, Self>,
        runs: &[Run],
        values: &mut [Option<Self::Tensor>],
    ) -> Result<(), Self::Error>;

    /// Prepares a tensor to be sent.
    fn parcel(&self, tensor: &Self::Tensor) -> Result<Self::Parcel, Self::Error>;
    /// Prepares part of a flat buffer to be sent.
    fn parcel_of(
        &self,
        flat: &Self::Flat,
        range: Range<usize>,
    ) -> Result<Self::Parcel, Self::Error>;
    /// Starts to send to rank `to`; messages of one channel arrive in order. The parcel is in use until
    /// [`Device::sent`].
    fn send(
        &self,
        to: usize,
        channel: u64,
        what: &str,
        parcel: &Self::Parcel,
    ) -> Result<Self::Sending, Self::Error>;
    /// Completes [`Device::send`]: work queued from now on runs after the peer has received the data.
    fn sent(&self, sending: Self::Sending) -> Result<(), Self::Error>;
    /// Receives a tensor that another rank sent.
    fn receive(
        &self,
        from: usize,
        channel: u64,
        what: &str,
        of: (Vec<usize>, DType),
    ) -> Result<Self::Tensor, Self::Error>;
    /// Starts an all-gather of this rank's `own` part; `lengths` are those of all members' parts.
    fn all_gather(
        &self,
        group: &Self::Group,
        what: &str,
        own: Self::Parcel,
        lengths: &[usize],
    ) -> Result<Self::Moving, Self::Error>;
    /// Completes [`Device::all_gather`].
    fn gathered(&self, moving: Self::Moving) -> Result<Self::Whole, Self::Error>;
    /// A tensor of some of the elements that [`Device::gathered`] returned.
    fn taken(
        &self,
        whole: &Self::Whole,
        range: Range<usize>,
        shape: Vec<usize>,
        dtype: DType,
    ) -> Result<Self::Tensor, Self::Error>;
    /// Copies all gathered elements over those of `flat` from `at` on.
    fn put_whole(
        &self,
        flat: &mut Self::Flat,
        at: usize,
        whole: &Self::Whole,
    ) -> Result<(), Self::Error>;
    /// Starts a reduce-scatter: `parts` holds this rank's terms for each member.
    fn reduce_scatter(
        &self,
        group: &Self::Group,
        what: &str,
        parts: Vec<Self::Parcel>,
    ) -> Result<Self::Moving, Self::Error>;
    /// Completes [`Device::reduce_scatter`]; returns this rank's sum.
    fn reduced(
        &self,
        group: &Self::Group,
        what: &str,
        moving: Self::Moving,
    ) -> Result<Self::Flat, Self::Error>;
    /// All-reduces ranges of a flat buffer over the group.
    fn all_reduce(
        &self,
        group: &Self::Group,
        what: &str,
        flat: &mut Self::Flat,
        runs: &[Range<usize>],
    ) -> Result<(), Self::Error>;
    /// Sums the terms of a parameter's gradient, one set per use of the parameter, over all members, and writes the
    /// elements `own` of the sum to those from `at` on. Does nothing on a device without exact sums.
    fn sum_trees(
        &self,
        _group: &Self::Group,
        _uses: Vec<Self::Trees>,
        _own: Range<usize>,
        (_flat, _at): (&mut Self::Flat, usize),
    ) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// The inputs of a backward pass of a block.
pub struct Passing<'p, D: Device> {
    /// What forward, or the input half of backward, kept.
    pub saved: &'p mut D::Saved,
    /// Gradient of the block's output; `None` for the loss and for the weight half.
    pub gradient: Option<D::Tensor>,
    /// Which half of backward to run.
    pub half: Half,
}

/// The destination of one block's gradients.
pub trait Gradients<D: Device> {
    /// The buffer that a parameter's gradient is added to, and the slot that says where in it.
    fn sum(&mut self, id: TensorId) -> (&mut D::Flat, &Slot);
    /// The destination of a parameter's gradient terms in exact mode.
    fn trees(&mut self, id: TensorId) -> &mut D::Trees;
}

/// The flat states of one partition.
pub struct FlatStates<'s, D: Device> {
    /// Master weights in fp32.
    pub master: &'s mut D::Flat,
    /// First moments.
    pub momentum: &'s mut D::Flat,
    /// Second moments.
    pub variance: &'s mut D::Flat,
    /// Gradients.
    pub gradient: &'s D::Flat,
    /// Receives the updated weights in the type that kernels read, if the shard is stored contiguously.
    pub shard: Option<&'s mut D::Tensor>,
}

/// A contiguous run of weights of one parameter.
#[derive(Clone, Debug)]
pub struct Run {
    /// Its elements in the flat weights and moments.
    pub range: Range<usize>,
    /// Its first element in the flat gradient.
    pub gradient_at: usize,
    /// Whether weight decay applies.
    pub decays: bool,
    /// Index of the parameter tensor that receives the run, if the run is the whole parameter.
    pub value: Option<usize>,
}
