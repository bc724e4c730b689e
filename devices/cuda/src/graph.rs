//! CUDA graphs: work of a device, captured once and replayed by one call. A graph owns its memory.

use super::error::CudaError;
use super::launcher::GraphId;
use super::memory::Reserved;
use super::tensor::Device;

/// A captured CUDA graph. It replays with the addresses and numbers of its capture: values that
/// change between replays must be in memory that the host writes before a replay.
pub struct Graph {
    device: Device,
    id: GraphId,
    /// Memory that the graph uses; no other tensor gets it while the graph lives.
    _pieces: Reserved,
}

impl Device {
    /// Begins capture: work is recorded, not run. Run it once before, so that kernels are compiled.
    ///
    /// # Errors
    /// When the device fails.
    pub fn begin_capture(&self) -> Result<(), CudaError> {
        self.launcher.begin_capture()?;
        self.memory.begin_recording();
        Ok(())
    }

    /// Ends capture and returns the graph. Call it after a failure too.
    ///
    /// # Errors
    /// When something that was asked for cannot be captured.
    pub fn end_capture(&self) -> Result<Graph, CudaError> {
        let pieces = self.memory.end_recording();
        Ok(Graph {
            id: self.launcher.end_capture()?,
            device: self.clone(),
            _pieces: pieces,
        })
    }
}

impl Graph {
    /// Queues the captured work once more.
    ///
    /// # Errors
    /// When the device fails.
    pub fn replay(&self) -> Result<(), CudaError> {
        self.device.launcher.replay(self.id)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.device.launcher.forget(self.id);
    }
}
