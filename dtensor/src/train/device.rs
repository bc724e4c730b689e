//! What a device must do to hold a rank's states and run its passes.

use std::fmt::Debug;
use std::ops::Range;

use catalog::DType;

use super::slot::Slot;
use crate::block::{Block, Forward, Half, Parameters};
use crate::tensor::TensorId;

/// What a rank computes on: where its tensors lie, who runs its blocks, and what carries its messages.
///
/// Every fallible method fails when the device does, when its memory is full, or when communication stops.
pub trait Device: Sized {
    /// A local tensor.
    type Tensor: Clone + Debug;
    /// A run of numbers in 32 bits: states and gradients.
    type Flat: Debug;
    /// Numbers as they go to another rank.
    type Parcel;
    /// A message under way.
    type Sending;
    /// A collective under way.
    type Moving: Debug;
    /// What a group's members gathered.
    type Whole;
    /// What a block keeps of a micro-batch between its passes.
    type Saved;
    /// A micro-batch where kernels read it.
    type Batch<'b>;
    /// Ranks that communicate.
    type Group;
    /// The terms of one parameter's gradient, where they are summed by a tree whose order no layout changes.
    type Trees: Default;
    /// Why it cannot go on.
    type Error;

    /// Number of ranks of a group.
    fn size(group: &Self::Group) -> usize;
    /// This rank's index among them.
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
    /// Bytes that a block keeps.
    fn saved_bytes(saved: &Self::Saved) -> u64;
    /// Elements of a tensor.
    fn elements(tensor: &Self::Tensor) -> usize;

    /// A flat run of `len` numbers, which a device that holds numbers has drawn.
    fn flat(&self, len: usize, draw: &dyn Fn() -> Vec<f32>) -> Result<Self::Flat, Self::Error>;
    /// A flat run of zeros.
    fn zeros(&self, len: usize) -> Result<Self::Flat, Self::Error>;
    /// Numbers of a flat run.
    fn len(flat: &Self::Flat) -> usize;
    /// Sets all to zero.
    fn clear(&self, flat: &mut Self::Flat) -> Result<(), Self::Error>;
    /// Overwrites what lies from `at` on by another flat run.
    fn put(&self, flat: &mut Self::Flat, at: usize, from: &Self::Flat) -> Result<(), Self::Error>;
    /// Adds part of another flat run to what lies from `at` on.
    fn add(
        &self,
        flat: &mut Self::Flat,
        at: usize,
        terms: (&Self::Flat, Range<usize>),
    ) -> Result<(), Self::Error>;
    /// Part of a flat run as a tensor, rounded to its type.
    fn rounded(
        &self,
        flat: &Self::Flat,
        range: Range<usize>,
        shape: Vec<usize>,
        dtype: DType,
    ) -> Result<Self::Tensor, Self::Error>;
    /// Writes a tensor in 32 bits over what lies from `at` on.
    fn put_tensor(
        &self,
        flat: &mut Self::Flat,
        at: usize,
        tensor: &Self::Tensor,
    ) -> Result<(), Self::Error>;
    /// One step of AdamW over contiguous runs of this rank's partition of the parameters. Updated weights are written,
    /// in the type that kernels read, to the shard, and to the tensors of `values` that the runs name.
    fn adamw(
        &self,
        states: FlatStates<'_, Self>,
        runs: &[Run],
        values: &mut [Option<Self::Tensor>],
    ) -> Result<(), Self::Error>;

    /// A tensor for another rank.
    fn parcel(&self, tensor: &Self::Tensor) -> Result<Self::Parcel, Self::Error>;
    /// Part of a flat run for another rank.
    fn parcel_of(
        &self,
        flat: &Self::Flat,
        range: Range<usize>,
    ) -> Result<Self::Parcel, Self::Error>;
    /// Sends to a rank; what goes through a channel arrives in order. Until [`Device::sent`] it stays as it is.
    fn send(
        &self,
        to: usize,
        channel: u64,
        what: &str,
        parcel: &Self::Parcel,
    ) -> Result<Self::Sending, Self::Error>;
    /// The end of [`Device::send`]: what is queued from now on comes after the peer has taken it.
    fn sent(&self, sending: Self::Sending) -> Result<(), Self::Error>;
    /// Receives a tensor that another rank sent.
    fn receive(
        &self,
        from: usize,
        channel: u64,
        what: &str,
        of: (Vec<usize>, DType),
    ) -> Result<Self::Tensor, Self::Error>;
    /// Starts to send this rank's part to all members, and to receive theirs, of these lengths.
    fn all_gather(
        &self,
        group: &Self::Group,
        what: &str,
        own: Self::Parcel,
        lengths: &[usize],
    ) -> Result<Self::Moving, Self::Error>;
    /// The end of [`Device::all_gather`].
    fn gathered(&self, moving: Self::Moving) -> Result<Self::Whole, Self::Error>;
    /// Elements of what was gathered, as a tensor.
    fn taken(
        &self,
        whole: &Self::Whole,
        range: Range<usize>,
        shape: Vec<usize>,
        dtype: DType,
    ) -> Result<Self::Tensor, Self::Error>;
    /// Overwrites what lies from `at` on by all that was gathered.
    fn put_whole(
        &self,
        flat: &mut Self::Flat,
        at: usize,
        whole: &Self::Whole,
    ) -> Result<(), Self::Error>;
    /// Starts to sum, for each member, all members' parts for it.
    fn reduce_scatter(
        &self,
        group: &Self::Group,
        what: &str,
        parts: Vec<Self::Parcel>,
    ) -> Result<Self::Moving, Self::Error>;
    /// The end of [`Device::reduce_scatter`]: this rank's sum.
    fn reduced(
        &self,
        group: &Self::Group,
        what: &str,
        moving: Self::Moving,
    ) -> Result<Self::Flat, Self::Error>;
    /// Sums runs of a flat run over all members.
    fn all_reduce(
        &self,
        group: &Self::Group,
        what: &str,
        flat: &mut Self::Flat,
        runs: &[Range<usize>],
    ) -> Result<(), Self::Error>;
    /// Sums the terms of a parameter's gradient, by use, over all members, and writes the elements `own` of the sum
    /// over what lies from `at` on. A device without exact sums has no terms.
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

/// What backward goes on from.
pub struct Passing<'p, D: Device> {
    /// What forward, or the half before, kept.
    pub saved: &'p mut D::Saved,
    /// Gradient of the output; the loss needs none, nor does the weight half.
    pub gradient: Option<D::Tensor>,
    /// Which half.
    pub half: Half,
}

/// Where one block's gradients go.
pub trait Gradients<D: Device> {
    /// The sums that a parameter's gradient is added to, and where in them it lies.
    fn sum(&mut self, id: TensorId) -> (&mut D::Flat, &Slot);
    /// Where the terms of a parameter's gradient go that are summed by a tree.
    fn trees(&mut self, id: TensorId) -> &mut D::Trees;
}

/// A partition's flat states.
pub struct FlatStates<'s, D: Device> {
    /// Weights in 32 bits.
    pub master: &'s mut D::Flat,
    /// First moments.
    pub momentum: &'s mut D::Flat,
    /// Second moments.
    pub variance: &'s mut D::Flat,
    /// Gradients.
    pub gradient: &'s D::Flat,
    /// Receives the weights as kernels read them, where they are next to each other.
    pub shard: Option<&'s mut D::Tensor>,
}

/// A run of weights of one parameter.
#[derive(Clone, Debug)]
pub struct Run {
    /// Where it lies in weights and moments.
    pub range: Range<usize>,
    /// Where it begins in gradients.
    pub gradient_at: usize,
    /// Whether its weights decay.
    pub decays: bool,
    /// The value that receives them, whole.
    pub value: Option<usize>,
}
