//! What a device must do: compute, and reach other ranks.

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

/// What a rank trains on: a device that runs a step, and what only numbers need. Every fallible method fails as those
/// of [`train::Device`] do.
pub trait Device: train::Device<Error = ExecutorError, Group = Group> {
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
    /// Part of a flat run on the host.
    fn read<'f>(
        &self,
        flat: &'f Self::Flat,
        range: Range<usize>,
    ) -> Result<Cow<'f, [f32]>, ExecutorError>;
    /// Overwrites what lies from `at` on.
    fn write(&self, flat: &mut Self::Flat, at: usize, values: &[f32]) -> Result<(), ExecutorError>;
    /// Says what the next steps of AdamW compute with.
    fn set_numbers(&self, step: &AdamWStep) -> Result<(), ExecutorError>;
    /// Measures the squares of gradients, and sets the factor by which the optimizer clips them. Where a
    /// gradient or one of `losses` is not finite, the steps of AdamW that follow change nothing. Does not
    /// wait for the device.
    fn measure(
        &self,
        gradients: &[(&Self::Flat, Range<usize>)],
        losses: Option<&Self::Flat>,
        optimizer: &AdamW,
    ) -> Result<(), ExecutorError>;
    /// The squares measured last.
    fn squares(&self) -> Result<ExactSum, ExecutorError>;
    /// Sets the factor of the gradients where other ranks' squares count too.
    fn set_scale(&self, scale: f32) -> Result<(), ExecutorError>;
    /// Meets the ranks that anything will be sent to or received from, by `(rank, channel)`.
    ///
    /// # Errors
    /// When communication stops; so of all that follows.
    fn meet(&self, peers: &[(usize, u64)]) -> Result<(), ExecutorError>;
    /// Receives a flat run that another rank sent.
    fn receive_flat(
        &self,
        from: usize,
        channel: u64,
        what: &str,
        len: usize,
    ) -> Result<Self::Flat, ExecutorError>;
    /// Waits until all that was sent and asked for is done, and no longer than ranks wait for each other.
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
    fn replay(&self, captured: &Self::Captured) -> Result<(), ExecutorError>;
    /// Bytes in use at most since the last call, and bytes taken from the device; nothing where they are not
    /// counted.
    fn take_peak(&self) -> Option<MemoryUse>;
    /// The library that has run core attention, with its release, or why none did; nothing where none was asked.
    fn attention_library(&self) -> Option<Result<String, String>>;
    /// Marks the end of all work so far.
    fn mark(&self) -> Result<(), ExecutorError>;
    /// Seconds between the marks so far, which are forgotten. Waits for the device.
    fn laps(&self) -> Result<Vec<f64>, ExecutorError>;
}
