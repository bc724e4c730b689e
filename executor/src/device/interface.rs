//! The interface of a device that trains: compute, and communication with other ranks.

use std::borrow::Cow;
use std::ops::Range;

use catalog::Precision;
use comm::Group;
use cpu_device::Watch;
use cpu_device::{AdamWStep, ExactSum, Machine, MicroBatch};
use dtensor::block::Attention;
use dtensor::train;

use crate::error::ExecutorError;
use crate::report::MemoryUse;
use crate::settings::AdamW;

/// Opens the devices of ranks.
pub trait Devices: Sync {
    /// The device type of a rank.
    type Device<'c>: Device;
    /// Opens the device of a rank, on the thread that the rank runs on. `host` is the rank's CPU side: its place in
    /// the mesh and its communicator, with one thread.
    ///
    /// # Errors
    /// When the device is missing or cannot run the plan.
    fn open<'c>(&self, host: Machine<'c>) -> Result<Self::Device<'c>, ExecutorError>;
}

/// A device that trains on real numbers: [`train::Device`] runs the step; this adds data, optimizer constants, norms
/// and capture. Every fallible method fails as those of [`train::Device`] do.
pub trait Device: train::Device<Error = ExecutorError, Group = Group> {
    /// A captured part of a step, replayed by one call (a CUDA graph).
    type Captured;
    /// Name of the device, such as `cpu`.
    const NAME: &'static str;
    /// The precisions it can train in.
    const PRECISIONS: &'static [Precision];
    /// How core attention runs.
    const ATTENTION: Attention;
    /// From now on calls `watch` after every operator.
    fn set_watch(&mut self, watch: &'static dyn Watch);
    /// Copies a micro-batch to the device, to the same address in every step.
    ///
    /// # Errors
    /// When the device fails or its memory is full; the same for all methods below.
    fn batch<'b>(
        &self,
        micro_batch: u32,
        batch: MicroBatch<'b>,
    ) -> Result<Self::Batch<'b>, ExecutorError>;
    /// Part of a flat buffer in host memory; copied if the device has memory of its own.
    fn read<'f>(
        &self,
        flat: &'f Self::Flat,
        range: Range<usize>,
    ) -> Result<Cow<'f, [f32]>, ExecutorError>;
    /// Overwrites the elements from `at` on.
    fn write(&self, flat: &mut Self::Flat, at: usize, values: &[f32]) -> Result<(), ExecutorError>;
    /// Sets the AdamW constants of the next steps.
    fn set_numbers(&self, step: &AdamWStep) -> Result<(), ExecutorError>;
    /// Computes the squares of gradients and sets the factor by which the optimizer clips them. If a gradient or one
    /// of `losses` is not finite, the following AdamW steps change nothing. Does not wait for the device.
    fn measure_and_clip(
        &self,
        gradients: &[(&Self::Flat, Range<usize>)],
        losses: Option<&Self::Flat>,
        optimizer: &AdamW,
    ) -> Result<(), ExecutorError>;
    /// The sum of squares measured last.
    fn squares(&self) -> Result<ExactSum, ExecutorError>;
    /// Sets the clipping factor, where it also depends on other ranks' squares.
    fn set_scale(&self, scale: f32) -> Result<(), ExecutorError>;
    /// Connects to all ranks that this one will exchange tensors with, given by `(rank, channel)`.
    ///
    /// # Errors
    /// When communication stops; the same for all methods below.
    fn meet(&self, _peers: &[(usize, u64)]) -> Result<(), ExecutorError> {
        Ok(())
    }
    /// Receives a flat buffer that another rank sent.
    fn receive_flat(
        &self,
        from: usize,
        channel: u64,
        what: &str,
        len: usize,
    ) -> Result<Self::Flat, ExecutorError>;
    /// Waits until all sends and queued work are done, but no longer than ranks wait for each other.
    fn settle(&self, _what: &str) -> Result<(), ExecutorError> {
        Ok(())
    }
    /// Checks whether steps can be captured.
    ///
    /// # Errors
    /// Why they cannot.
    fn captures(&self) -> Result<(), &'static str>;
    /// From here on records work instead of running it (starts a capture).
    ///
    /// # Errors
    /// Also where the device cannot.
    fn begin_capture(&self) -> Result<(), ExecutorError>;
    /// Ends the capture; returns what was recorded.
    ///
    /// # Errors
    /// Also when some of the work cannot be captured.
    fn end_capture(&self) -> Result<Self::Captured, ExecutorError>;
    /// Runs captured work.
    fn replay(&self, captured: &Self::Captured) -> Result<(), ExecutorError>;
    /// Peak of bytes in use since the last call, and bytes reserved from the device; `None` if it does not count them.
    fn take_peak(&self) -> Option<MemoryUse> {
        None
    }
    /// The library that ran core attention, with its version, or why none did; `None` if none was requested.
    fn attention_library(&self) -> Option<Result<String, String>> {
        None
    }
    /// Records a time mark after all work queued so far.
    fn mark(&self) -> Result<(), ExecutorError>;
    /// Seconds between the marks so far, which are then cleared. Waits for the device.
    fn laps(&self) -> Result<Vec<f64>, ExecutorError>;
}
