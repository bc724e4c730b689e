//! Exchanges between devices through host memory: for machines without NCCL, and for tests.

use super::lines::{Collective, Links, Ticket, Way, copied};
use crate::error::CudaError;
use crate::tensor::{Device, Tensor};
use comm::{CommError, Communicator, Group, Message, Pending};
use cpu_device::CpuError;

/// Links through the host. Sums are accumulated in 32 bits in the order of ranks, and rounded once.
pub struct HostLinks<'c> {
    device: Device,
    comm: &'c dyn Communicator,
}

impl<'c> HostLinks<'c> {
    /// Links of a device over its host's communicator.
    #[must_use]
    pub fn new(device: Device, comm: &'c dyn Communicator) -> Self {
        Self { device, comm }
    }

    fn message(&self, x: &Tensor) -> Result<Message, CudaError> {
        Ok(self.device.download(x)?.pack())
    }

    fn overwrite(&self, to: &Tensor, bytes: &[u8], peer: usize) -> Result<(), CudaError> {
        let (ends, what) = ([self.comm.rank(), peer], "messages between devices");
        let sizes = CommError::check_size(ends, what, bytes.len(), to.bytes() as usize);
        sizes.map_err(CpuError::from)?;
        self.device.launcher.write(to.address(), bytes)
    }

    fn sum(&self, to: &Tensor, arrived: &[Message]) -> Result<(), CudaError> {
        let mut sum = cpu_device::Tensor::numbers(&arrived[0], to.dtype);
        for bytes in &arrived[1..] {
            cpu_device::add(&mut sum, &cpu_device::Tensor::numbers(bytes, to.dtype));
        }
        self.device
            .launcher
            .write(to.address(), &cpu_device::Tensor::message(sum, to.dtype))
    }
}

impl Links for HostLinks<'_> {
    fn collective(
        &self,
        kind: Collective,
        group: &Group,
        what: &str,
        from: &[Tensor],
        to: &[Tensor],
    ) -> Result<Ticket, CudaError> {
        if group.size() == 1 {
            return copied(&*self.device.launcher, &from[0], &to[0]);
        }
        let messages = from.iter().map(|x| self.message(x));
        let mut messages = messages.collect::<Result<Vec<_>, _>>()?;
        let pending = match kind {
            Collective::AllReduce | Collective::AllGather => {
                group.all_gather(self.comm, what, messages.swap_remove(0))
            }
            Collective::ReduceScatter | Collective::AllToAll => {
                group.all_to_all(self.comm, what, messages)
            }
        };
        let pending = pending.map_err(CpuError::from)?;
        let way = match kind {
            Collective::AllReduce | Collective::ReduceScatter => Way::Summing(pending),
            Collective::AllGather | Collective::AllToAll => Way::Arriving(pending),
        };
        let tensors = to.to_vec();
        Ok(Ticket { tensors, way })
    }

    fn wait(&self, ticket: Ticket) -> Result<(), CudaError> {
        let arrived = |pending: Pending| pending.wait(self.comm).map_err(CpuError::from);
        match ticket.way {
            Way::Arriving(pending) => {
                let tensors = ticket.tensors.iter().enumerate();
                for ((peer, to), bytes) in tensors.zip(arrived(pending)?) {
                    self.overwrite(to, &bytes, peer)?;
                }
                Ok(())
            }
            Way::Summing(pending) => self.sum(&ticket.tensors[0], &arrived(pending)?),
            Way::Event(_) | Way::Done => Ok(()),
        }
    }

    fn meet(&self, _: &[(usize, u64)]) -> Result<(), CudaError> {
        Ok(())
    }

    fn send(&self, to: usize, channel: u64, what: &str, x: &Tensor) -> Result<Ticket, CudaError> {
        let message = self.message(x)?;
        let sent = self.comm.send(to, channel, what, message);
        sent.map_err(CpuError::from)?;
        Ok(Ticket::done())
    }

    fn receive(&self, from: usize, channel: u64, what: &str, x: &Tensor) -> Result<(), CudaError> {
        let message = self.comm.receive(from, channel, what);
        self.overwrite(x, &message.map_err(CpuError::from)?, from)
    }

    fn settle(&self, _: &str) -> Result<(), CudaError> {
        self.device.launcher.synchronize()
    }

    fn captures(&self) -> Result<(), &'static str> {
        match self.comm.world() {
            1 => Ok(()),
            _ => Err("messages pass through the memory of the hosts"),
        }
    }
}
