//! Work of a device captured once and run again and again by one call: a CUDA graph with its memory.

use super::error::CudaError;
use super::launcher::GraphId;
use super::memory::Reserved;
use super::tensor::Device;

/// Captured work. It runs at the addresses it was recorded with, with the numbers it was recorded with: what
/// changes from run to run lies in memory that the host writes before.
pub struct Graph {
    device: Device,
    id: GraphId,
    /// Memory that no one else is given.
    _pieces: Reserved,
}

impl Device {
    /// From here on work is recorded instead of run. Kernels have been compiled by running the same before.
    ///
    /// # Errors
    /// When the device fails.
    pub fn begin_capture(&self) -> Result<(), CudaError> {
        self.launcher.begin_capture()?;
        self.memory.begin_recording();
        Ok(())
    }

    /// Ends recording, also where it failed; returns what was recorded.
    ///
    /// # Errors
    /// When something of it cannot be recorded.
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
    /// Runs it once more.
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
