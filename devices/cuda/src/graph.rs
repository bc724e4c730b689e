//! CUDA graphs: work of a device that is captured once, replayed by one call, and owns its memory.

use super::error::CudaError;
use super::launcher::GraphId;
use super::memory::Reserved;
use super::tensor::Device;

/// Captured work. It replays with the addresses and numbers that it was captured with: what changes between replays
/// must lie in memory that the host writes before.
pub struct Graph {
    device: Device,
    id: GraphId,
    /// The memory that the graph uses, given to no one else while the graph lives.
    _pieces: Reserved,
}

impl Device {
    /// Begins capture: work is recorded instead of run. Run it once before, so that its kernels are compiled.
    ///
    /// # Errors
    /// When the device fails.
    pub fn begin_capture(&self) -> Result<(), CudaError> {
        self.launcher.begin_capture()?;
        self.memory.begin_recording();
        Ok(())
    }

    /// Ends capture, also after a failure; returns the graph.
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
