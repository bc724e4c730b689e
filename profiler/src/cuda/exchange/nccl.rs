//! Ranks on GPUs of this host, connected by NCCL.

use std::rc::Rc;

use comm::{Communicator, Group};
use cuda_device::{Device, Gpu, NcclGroup, Tensor};

use super::collective::Collective;
use super::fleet::TIMEOUT;
use super::peers::{Peers, Rank};
use crate::ProfilerError;

/// A rank on a GPU of this host.
pub struct GpuRank {
    gpu: Rc<Gpu>,
    device: Device,
}

impl GpuRank {
    /// Opens the GPU of this ordinal.
    ///
    /// # Errors
    /// When there is none, or a library is missing.
    pub fn new(ordinal: u32) -> Result<Self, ProfilerError> {
        let gpu = Rc::new(Gpu::new(ordinal)?);
        let device = Device::new(Rc::<Gpu>::clone(&gpu));
        Ok(Self { gpu, device })
    }
}

impl Rank for GpuRank {
    fn device(&self) -> &Device {
        &self.device
    }

    fn join(
        &self,
        comm: &dyn Communicator,
        group: &Group,
    ) -> Result<Box<dyn Peers>, ProfilerError> {
        let met = NcclGroup::new(Rc::clone(&self.gpu), comm, group)?;
        Ok(Box::new(Nccl(met)))
    }
}

/// Runs exchanges by NCCL on the GPU's own stream.
struct Nccl(NcclGroup);

impl Peers for Nccl {
    fn exchange(
        &self,
        _: &dyn Communicator,
        collective: Collective,
        from: &Tensor,
        to: &Tensor,
    ) -> Result<(), ProfilerError> {
        let met = &self.0;
        let size = met.size;
        match collective {
            Collective::AllReduce => met.all_reduce(from, to)?,
            Collective::AllGather => met.all_gather(from, to)?,
            Collective::ReduceScatter => met.reduce_scatter(from, to)?,
            Collective::AllToAll => met.all_to_all(&parts(from, size), &parts(to, size))?,
            Collective::Broadcast => met.broadcast(from, to, 0)?,
            Collective::SendAndReceive => {
                let (next, before) = ((met.index + 1) % size, (met.index + size - 1) % size);
                met.together(|| {
                    met.send(from, next)?;
                    met.receive(to, before)
                })?;
            }
        }
        Ok(())
    }

    fn finish(&self, comm: &dyn Communicator) -> Result<(), ProfilerError> {
        Ok(self.0.finish(comm, "exchanges", TIMEOUT)?)
    }
}

fn parts(whole: &Tensor, ranks: usize) -> Vec<Tensor> {
    let len = whole.len() / ranks;
    (0..ranks).map(|i| whole.part(i * len, vec![len])).collect()
}
