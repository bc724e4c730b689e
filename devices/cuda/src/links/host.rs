//! Exchanges between devices through host memory: for machines without NCCL, and for tests.

use super::lines::{Links, Ticket, Way};
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

    fn messages(&self, tensors: &[Tensor]) -> Result<Vec<Message>, CudaError> {
        tensors.iter().map(|x| self.message(x)).collect()
    }

    /// The exchange of a group of one: a copy.
    fn copied(&self, from: &Tensor, to: &Tensor) -> Result<Ticket, CudaError> {
        let launcher = &self.device.launcher;
        if from.address() != to.address() {
            launcher.copy(to.address(), from.address(), from.bytes())?;
        }
        Ok(Ticket::done())
    }

    fn overwrite(&self, to: &Tensor, bytes: &[u8], peer: usize) -> Result<(), CudaError> {
        if to.bytes() != bytes.len() as u64 {
            return Err(CudaError::Host(CpuError::Comm(CommError::Size {
                rank: self.comm.rank(),
                peer,
                collective: "messages between devices".to_owned(),
                got: bytes.len(),
                expected: to.bytes() as usize,
            })));
        }
        self.device.launcher.write(to.address(), bytes)
    }

    fn sum(&self, to: &Tensor, arrived: &[Message]) -> Result<(), CudaError> {
        let part = |bytes: &Message| {
            cpu_device::Tensor::unpack(to.shape.clone(), bytes, to.dtype).into_f32()
        };
        let mut sum = part(&arrived[0]);
        for bytes in &arrived[1..] {
            for (a, b) in sum.iter_mut().zip(part(bytes)) {
                *a += b;
            }
        }
        let sum = cpu_device::Tensor::new(to.shape.clone(), sum, to.dtype);
        self.device.launcher.write(to.address(), &sum.pack())
    }
}

fn arriving(pending: Result<Pending, CommError>, to: &[Tensor]) -> Result<Ticket, CpuError> {
    Ok(Ticket {
        tensors: to.to_vec(),
        way: Way::Arriving(pending?),
    })
}

fn summing(pending: Result<Pending, CommError>, to: &Tensor) -> Result<Ticket, CpuError> {
    Ok(Ticket {
        tensors: vec![to.clone()],
        way: Way::Summing(pending?),
    })
}

impl Links for HostLinks<'_> {
    fn all_reduce(
        &self,
        group: &Group,
        what: &str,
        from: &Tensor,
        to: &Tensor,
    ) -> Result<Ticket, CudaError> {
        if group.size() == 1 {
            return self.copied(from, to);
        }
        let own = self.message(from)?;
        let pending = group.all_gather(self.comm, what, own);
        Ok(summing(pending, to)?)
    }

    fn reduce_scatter(
        &self,
        group: &Group,
        what: &str,
        parts: &[Tensor],
        own: &Tensor,
    ) -> Result<Ticket, CudaError> {
        if group.size() == 1 {
            return self.copied(&parts[0], own);
        }
        let parts = self.messages(parts)?;
        let pending = group.all_to_all(self.comm, what, parts);
        Ok(summing(pending, own)?)
    }

    fn all_gather(
        &self,
        group: &Group,
        what: &str,
        own: &Tensor,
        parts: &[Tensor],
    ) -> Result<Ticket, CudaError> {
        if group.size() == 1 {
            return self.copied(own, &parts[0]);
        }
        let own = self.message(own)?;
        let pending = group.all_gather(self.comm, what, own);
        Ok(arriving(pending, parts)?)
    }

    fn all_to_all(
        &self,
        group: &Group,
        what: &str,
        from: &[Tensor],
        to: &[Tensor],
    ) -> Result<Ticket, CudaError> {
        if group.size() == 1 {
            return self.copied(&from[0], &to[0]);
        }
        let from = self.messages(from)?;
        let pending = group.all_to_all(self.comm, what, from);
        Ok(arriving(pending, to)?)
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
