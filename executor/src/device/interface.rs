//! What a device must do: compute, and reach other ranks.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;

use catalog::{DType, Precision};
use comm::Group;
use cpu_device::Watch;
use cpu_device::{AdamWStep, ExactSum, Machine, MicroBatch, TreeSum};
use dtensor::TensorId;
use dtensor::block::{Attention, Block, Forward, Half, Parameters};

use crate::error::ExecutorError;
use crate::report::MemoryUse;
use crate::settings::AdamW;
use crate::slots::Slot;

/// Where ranks get their devices from.
pub trait Devices: Sync {
    /// A rank's device.
    type Device<'c>: Device;
    /// The device of a rank; opened by the thread that the rank runs on. `host` is the rank as the host
    /// sees it, its place and its line to the others, with one thread.
    ///
    /// # Errors
    /// When it is not there or cannot run the plan.
    fn open<'c>(&self, host: Machine<'c>) -> Result<Self::Device<'c>, ExecutorError>;
}

/// What a rank computes on: where its tensors lie and who runs its blocks.
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
    /// A step that runs by one call.
    type Captured;
    /// Its name.
    const NAME: &'static str;
    /// The precisions it trains in.
    const PRECISIONS: &'static [Precision];
    /// How core attention runs.
    const ATTENTION: Attention;

    /// Shows every operator to a watch from now on.
    fn set_watch(&mut self, watch: &'static dyn Watch);

    /// Brings a micro-batch here. It lies at the same place in every step.
    ///
    /// # Errors
    /// When the device fails or its memory is full; so of everything below.
    fn batch<'b>(
        &self,
        micro_batch: u32,
        batch: MicroBatch<'b>,
    ) -> Result<Self::Batch<'b>, ExecutorError>;
    /// Forward of a micro-batch through a block.
    ///
    /// # Errors
    /// Also when an operator has no kernel or communication stops.
    fn forward(
        &self,
        block: &Block,
        batch: &Self::Batch<'_>,
        parameters: &dyn Parameters<Self::Tensor>,
        input: Option<Self::Tensor>,
    ) -> Result<Forward<Self::Tensor, Self::Saved>, ExecutorError>;
    /// Backward of a micro-batch through a block, or half of it. Returns the gradient of its input.
    ///
    /// # Errors
    /// As [`Device::forward`].
    fn backward(
        &self,
        block: &Block,
        batch: &Self::Batch<'_>,
        parameters: &dyn Parameters<Self::Tensor>,
        passing: Passing<'_, Self>,
        gradients: &mut dyn Gradients<Self>,
    ) -> Result<Option<Self::Tensor>, ExecutorError>;
    /// Bytes kept.
    fn saved_bytes(saved: &Self::Saved) -> u64;

    /// Local shape.
    fn shape(tensor: &Self::Tensor) -> &[usize];

    /// A flat run of these numbers.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn flat(&self, values: Vec<f32>) -> Result<Self::Flat, ExecutorError>;
    /// A flat run of zeros.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn zeros(&self, len: usize) -> Result<Self::Flat, ExecutorError>;
    /// Numbers of a flat run.
    fn len(flat: &Self::Flat) -> usize;
    /// Sets all to zero.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn clear(&self, flat: &mut Self::Flat) -> Result<(), ExecutorError>;
    /// Part of a flat run on the host.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn read<'f>(
        &self,
        flat: &'f Self::Flat,
        range: Range<usize>,
    ) -> Result<Cow<'f, [f32]>, ExecutorError>;
    /// Overwrites what lies from `at` on.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn write(&self, flat: &mut Self::Flat, at: usize, values: &[f32]) -> Result<(), ExecutorError>;
    /// Overwrites what lies from `at` on by another flat run.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn put(&self, flat: &mut Self::Flat, at: usize, from: &Self::Flat)
    -> Result<(), ExecutorError>;
    /// Adds part of another flat run to what lies from `at` on.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn add(
        &self,
        flat: &mut Self::Flat,
        at: usize,
        terms: (&Self::Flat, Range<usize>),
    ) -> Result<(), ExecutorError>;
    /// Part of a flat run as a tensor, rounded to its type.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn rounded(
        &self,
        flat: &Self::Flat,
        range: Range<usize>,
        shape: Vec<usize>,
        dtype: DType,
    ) -> Result<Self::Tensor, ExecutorError>;
    /// Writes a tensor in 32 bits over what lies from `at` on.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn put_tensor(
        &self,
        flat: &mut Self::Flat,
        at: usize,
        tensor: &Self::Tensor,
    ) -> Result<(), ExecutorError>;

    /// Says what the next steps of AdamW compute with.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn set_numbers(&self, step: &AdamWStep) -> Result<(), ExecutorError>;
    /// Measures the squares of gradients, and sets the factor by which the optimizer clips them. Where a
    /// gradient or one of `losses` is not finite, the steps of AdamW that follow change nothing. Does not
    /// wait for the device.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn measure(
        &self,
        gradients: &[(&Self::Flat, Range<usize>)],
        losses: Option<&Self::Flat>,
        optimizer: &AdamW,
    ) -> Result<(), ExecutorError>;
    /// The squares measured last.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn squares(&self) -> Result<ExactSum, ExecutorError>;
    /// Sets the factor of the gradients where other ranks' squares count too.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn set_scale(&self, scale: f32) -> Result<(), ExecutorError>;
    /// One step of AdamW over contiguous runs of this rank's partition of the parameters. Updated weights are written,
    /// in the type that kernels read, to the shard, and to the tensors of `values` that the runs name.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn adamw(
        &self,
        states: FlatStates<'_, Self>,
        runs: &[Run],
        values: &mut [Option<Self::Tensor>],
    ) -> Result<(), ExecutorError>;

    /// A tensor for another rank.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn parcel(&self, tensor: &Self::Tensor) -> Result<Self::Parcel, ExecutorError>;
    /// Part of a flat run for another rank.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn parcel_of(
        &self,
        flat: &Self::Flat,
        range: Range<usize>,
    ) -> Result<Self::Parcel, ExecutorError>;
    /// Meets the ranks that anything will be sent to or received from, by `(rank, channel)`.
    ///
    /// # Errors
    /// When communication stops; so of all that follows.
    fn meet(&self, peers: &[(usize, u64)]) -> Result<(), ExecutorError>;
    /// Sends to a rank; what goes through a channel arrives in order. Until [`Device::sent`] it stays as it is.
    ///
    /// # Errors
    /// See [`Device::meet`].
    fn send(
        &self,
        to: usize,
        channel: u64,
        what: &str,
        parcel: &Self::Parcel,
    ) -> Result<Self::Sending, ExecutorError>;
    /// The end of [`Device::send`]: what is queued from now on comes after the peer has taken it.
    ///
    /// # Errors
    /// See [`Device::meet`].
    fn sent(&self, sending: Self::Sending) -> Result<(), ExecutorError>;
    /// Receives a tensor that another rank sent.
    ///
    /// # Errors
    /// See [`Device::meet`].
    fn receive(
        &self,
        from: usize,
        channel: u64,
        what: &str,
        of: (Vec<usize>, DType),
    ) -> Result<Self::Tensor, ExecutorError>;
    /// Receives a flat run that another rank sent.
    ///
    /// # Errors
    /// See [`Device::meet`].
    fn receive_flat(
        &self,
        from: usize,
        channel: u64,
        what: &str,
        len: usize,
    ) -> Result<Self::Flat, ExecutorError>;
    /// Starts to send this rank's part to all members, and to receive theirs, of these lengths.
    ///
    /// # Errors
    /// See [`Device::meet`].
    fn all_gather(
        &self,
        group: &Group,
        what: &str,
        own: Self::Parcel,
        lengths: &[usize],
    ) -> Result<Self::Moving, ExecutorError>;
    /// The end of [`Device::all_gather`].
    ///
    /// # Errors
    /// See [`Device::meet`].
    fn gathered(&self, moving: Self::Moving) -> Result<Self::Whole, ExecutorError>;
    /// Elements of what was gathered, as a tensor.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn taken(
        &self,
        whole: &Self::Whole,
        range: Range<usize>,
        shape: Vec<usize>,
        dtype: DType,
    ) -> Result<Self::Tensor, ExecutorError>;
    /// Overwrites what lies from `at` on by all that was gathered.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn put_whole(
        &self,
        flat: &mut Self::Flat,
        at: usize,
        whole: &Self::Whole,
    ) -> Result<(), ExecutorError>;
    /// Starts to sum, for each member, all members' parts for it.
    ///
    /// # Errors
    /// See [`Device::meet`].
    fn reduce_scatter(
        &self,
        group: &Group,
        what: &str,
        parts: Vec<Self::Parcel>,
    ) -> Result<Self::Moving, ExecutorError>;
    /// The end of [`Device::reduce_scatter`]: this rank's sum.
    ///
    /// # Errors
    /// See [`Device::meet`].
    fn reduced(
        &self,
        group: &Group,
        what: &str,
        moving: Self::Moving,
    ) -> Result<Self::Flat, ExecutorError>;
    /// Sums runs of a flat run over all members.
    ///
    /// # Errors
    /// See [`Device::meet`].
    fn all_reduce(
        &self,
        group: &Group,
        what: &str,
        flat: &mut Self::Flat,
        runs: &[Range<usize>],
    ) -> Result<(), ExecutorError>;
    /// Waits until all that was sent and asked for is done, and no longer than ranks wait for each other.
    ///
    /// # Errors
    /// See [`Device::meet`].
    fn settle(&self, what: &str) -> Result<(), ExecutorError>;
    /// Whether steps can be captured.
    ///
    /// # Errors
    /// Why they cannot.
    fn captures(&self) -> Result<(), &'static str>;
    /// From here on records work instead of running it.
    ///
    /// # Errors
    /// Also where the device cannot.
    fn begin_capture(&self) -> Result<(), ExecutorError>;
    /// Ends that; returns what was recorded.
    ///
    /// # Errors
    /// Also where something of it cannot be recorded.
    fn end_capture(&self) -> Result<Self::Captured, ExecutorError>;
    /// Runs what was recorded.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn replay(&self, captured: &Self::Captured) -> Result<(), ExecutorError>;

    /// Bytes in use at most since the last call, and bytes taken from the device; nothing where they are not
    /// counted.
    fn take_peak(&self) -> Option<MemoryUse>;

    /// The library that has run core attention, with its release, or why none did; nothing where none was asked.
    fn attention_library(&self) -> Option<Result<String, String>>;

    /// Marks the end of all work so far.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn mark(&self) -> Result<(), ExecutorError>;
    /// Seconds between the marks so far, which are forgotten. Waits for the device.
    ///
    /// # Errors
    /// See [`Device::batch`].
    fn laps(&self) -> Result<Vec<f64>, ExecutorError>;
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
    /// Exact mode: takes nodes of a parameter's gradient in; `start` is the first element they are of.
    fn add_tree(&mut self, id: TensorId, start: usize, sum: TreeSum);
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
