//! A rank with its device, and the ranks it exchanges with.

use comm::{Communicator, Group};
use cuda_device::{Device, Tensor};

use super::collective::Collective;
use crate::ProfilerError;

/// One rank with its device.
pub trait Rank {
    /// Its device.
    fn device(&self) -> &Device;
    /// Connects with the other ranks of a group.
    ///
    /// # Errors
    /// When they cannot be connected.
    fn join(&self, comm: &dyn Communicator, group: &Group)
    -> Result<Box<dyn Peers>, ProfilerError>;
}

/// The ranks of a group, each with its device.
pub trait Peers {
    /// Queues an exchange.
    ///
    /// # Errors
    /// When the device or a peer failed.
    fn exchange(
        &self,
        comm: &dyn Communicator,
        collective: Collective,
        from: &Tensor,
        to: &Tensor,
    ) -> Result<(), ProfilerError>;
    /// Waits for all queued exchanges.
    ///
    /// # Errors
    /// When the device or a peer failed, or does not answer.
    fn finish(&self, comm: &dyn Communicator) -> Result<(), ProfilerError>;
}
