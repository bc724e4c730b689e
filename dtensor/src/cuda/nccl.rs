//! Collectives between the GPUs of a group of ranks, by NCCL, in the order of each device's stream.
//!
//! Ranks meet over another communicator, which carries NCCL's id; it also carries the news of a failed
//! rank, upon which the group is aborted so that nobody waits inside a kernel.

#![allow(unsafe_code, reason = "functions of NCCL")]

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use spec::DType;

use super::error::CudaError;
use super::gpu::Gpu;
use super::launcher::Launcher;
use super::library::Name;
use super::sys::nccl::{self, Comm, Nccl, UniqueId};
use super::tensor::Tensor;
use crate::comm::{CommError, Communicator, Group};

/// Between two looks at whether queued work is done.
const POLL: Duration = Duration::from_micros(50);

/// A group's collectives failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NcclError {
    /// A call failed, or a library is missing.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The ranks could not meet.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// The ranks of a group, each with its GPU.
pub struct NcclGroup {
    nccl: Rc<Nccl>,
    comm: Comm,
    /// Whether NCCL has let go of it already.
    aborted: Cell<bool>,
    gpu: Rc<Gpu>,
    /// Ranks in the group.
    pub size: usize,
    /// This rank among them.
    pub index: usize,
}

/// How a sum is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Sum.
    Sum,
    /// Largest.
    Max,
}

fn element(dtype: DType) -> (c_int, usize) {
    match dtype {
        DType::Bf16 => (nccl::BF16, 1),
        DType::F32 => (nccl::F32, 1),
        other => (nccl::U8, other.size() as usize),
    }
}

fn operator(reduction: Reduction) -> c_int {
    match reduction {
        Reduction::Sum => nccl::SUM,
        Reduction::Max => nccl::MAX,
    }
}

impl NcclGroup {
    /// Meets the other ranks of a group.
    ///
    /// # Errors
    /// When NCCL is missing, or the ranks cannot meet.
    pub fn new(gpu: Rc<Gpu>, comm: &dyn Communicator, group: &Group) -> Result<Self, NcclError> {
        let nccl = Rc::new(Nccl::load()?);
        let what = "meeting for NCCL";
        let own = match group.index {
            0 => Some(Arc::new(unique_id(&nccl)?.0.to_vec())),
            _ => None,
        };
        let told = group.broadcast(comm, what, 0, own)?;
        let id = <[u8; 128]>::try_from(told.as_slice()).map_err(|_| CommError::Size {
            rank: comm.rank(),
            peer: group.ranks[0],
            collective: what.to_owned(),
            got: told.len(),
            expected: 128,
        })?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the id is NCCL's own; the GPU's context is current in this thread.
        unsafe {
            nccl.init(
                &raw mut handle,
                group.size() as c_int,
                UniqueId(id),
                group.index as c_int,
            )
        }?;
        Ok(Self {
            nccl,
            comm: handle,
            aborted: Cell::new(false),
            gpu,
            size: group.size(),
            index: group.index,
        })
    }

    fn stream(&self) -> *mut c_void {
        self.gpu.stream()
    }

    /// Every rank's tensor becomes the reduction of all.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn all_reduce(&self, x: &Tensor, reduction: Reduction) -> Result<(), CudaError> {
        let (kind, _) = element(x.dtype);
        let at = x.address();
        // SAFETY: in place, over the whole tensor.
        unsafe {
            self.nccl.all_reduce(
                at,
                at,
                x.len(),
                kind,
                operator(reduction),
                self.comm()?,
                self.stream(),
            )
        }
    }

    /// `whole` becomes the parts of all ranks, in their order.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn all_gather(&self, part: &Tensor, whole: &Tensor) -> Result<(), CudaError> {
        debug_assert_eq!(part.len() * self.size, whole.len());
        let (kind, units) = element(part.dtype);
        // SAFETY: the whole holds as many parts as there are ranks.
        unsafe {
            self.nccl.all_gather(
                part.address(),
                whole.address(),
                part.len() * units,
                kind,
                self.comm()?,
                self.stream(),
            )
        }
    }

    /// `part` becomes this rank's part of the sum of all ranks' wholes.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn reduce_scatter(&self, whole: &Tensor, part: &Tensor) -> Result<(), CudaError> {
        debug_assert_eq!(part.len() * self.size, whole.len());
        let (kind, _) = element(part.dtype);
        // SAFETY: the whole holds as many parts as there are ranks.
        unsafe {
            self.nccl.reduce_scatter(
                whole.address(),
                part.address(),
                part.len(),
                kind,
                nccl::SUM,
                self.comm()?,
                self.stream(),
            )
        }
    }

    /// Every rank's tensor becomes that of rank `root`.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn broadcast(&self, x: &Tensor, root: usize) -> Result<(), CudaError> {
        let (kind, units) = element(x.dtype);
        let at = x.address();
        // SAFETY: in place, over the whole tensor.
        unsafe {
            self.nccl.broadcast(
                at,
                at,
                x.len() * units,
                kind,
                root as c_int,
                self.comm()?,
                self.stream(),
            )
        }
    }

    /// Sends equal parts of `from` to all ranks, in their order, and receives theirs into `to`.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn all_to_all(&self, from: &Tensor, to: &Tensor) -> Result<(), CudaError> {
        debug_assert_eq!(from.len(), to.len());
        let (kind, units) = element(from.dtype);
        let count = from.len() / self.size * units;
        let bytes = from.bytes() / self.size as u64;
        self.together(|| {
            for peer in 0..self.size {
                let shift = peer as u64 * bytes;
                let (from, to) = (from.address() + shift, to.address() + shift);
                let (peer, stream) = (peer as c_int, self.stream());
                // SAFETY: parts lie within the tensors.
                unsafe {
                    self.nccl
                        .send(from, count, kind, peer, self.comm()?, stream)?;
                    self.nccl
                        .receive(to, count, kind, peer, self.comm()?, stream)?;
                }
            }
            Ok(())
        })
    }

    /// Sends a tensor to one rank and receives another from one, at the same time.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn exchange(
        &self,
        send: Option<(&Tensor, usize)>,
        receive: Option<(&Tensor, usize)>,
    ) -> Result<(), CudaError> {
        let stream = self.stream();
        self.together(|| {
            if let Some((x, peer)) = send {
                let (kind, units) = element(x.dtype);
                let count = x.len() * units;
                // SAFETY: the whole tensor.
                unsafe {
                    self.nccl.send(
                        x.address(),
                        count,
                        kind,
                        peer as c_int,
                        self.comm()?,
                        stream,
                    )
                }?;
            }
            if let Some((x, peer)) = receive {
                let (kind, units) = element(x.dtype);
                let count = x.len() * units;
                // SAFETY: the whole tensor.
                unsafe {
                    self.nccl.receive(
                        x.address(),
                        count,
                        kind,
                        peer as c_int,
                        self.comm()?,
                        stream,
                    )
                }?;
            }
            Ok(())
        })
    }

    fn together(&self, queue: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
        // SAFETY: ended below, also where queueing failed.
        unsafe { self.nccl.group_start() }?;
        let queued = queue();
        // SAFETY: begun above.
        let ended = unsafe { self.nccl.group_end() };
        queued.and(ended)
    }

    /// Waits until all queued work is done; gives up, and lets go of the peers, when one of them failed or
    /// it takes longer than `timeout`.
    ///
    /// # Errors
    /// When a peer failed, or did not come in time.
    pub fn finish(
        &self,
        comm: &dyn Communicator,
        what: &str,
        timeout: Duration,
    ) -> Result<(), NcclError> {
        let done = self.gpu.event()?;
        let start = Instant::now();
        while !done.is_reached()? {
            let mut state = 0;
            // SAFETY: writes one number.
            unsafe { self.nccl.state(self.comm()?, &raw mut state) }?;
            let late = start.elapsed() >= timeout;
            let broken = state != 0 && state != nccl::IN_PROGRESS;
            if late || broken {
                self.abort()?;
                comm.fail(&format!("{what}: a GPU of the group did not answer"));
                return Err(NcclError::Comm(CommError::Timeout {
                    rank: comm.rank(),
                    peer: comm.rank(),
                    collective: what.to_owned(),
                    waited: start.elapsed(),
                }));
            }
            std::thread::sleep(POLL);
        }
        self.gpu.synchronize()?;
        Ok(())
    }
}

impl NcclGroup {
    /// Ends kernels that wait for a peer. Nothing can be queued after.
    fn abort(&self) -> Result<(), CudaError> {
        if self.aborted.replace(true) {
            return Ok(());
        }
        // SAFETY: NCCL frees the communicator; `aborted` keeps this from using it again.
        unsafe { self.nccl.abort(self.comm) }
    }

    /// The communicator, while there is one.
    fn comm(&self) -> Result<Comm, CudaError> {
        match self.aborted.get() {
            false => Ok(self.comm),
            true => Err(CudaError::Call {
                library: Name::Nccl,
                call: "ncclCommAbort",
                code: 0,
                reason: "the group was given up before".to_owned(),
            }),
        }
    }
}

impl Drop for NcclGroup {
    fn drop(&mut self) {
        if !self.aborted.get() {
            // SAFETY: used no more. Nothing can be done where it fails.
            let _ = unsafe { self.nccl.destroy(self.comm) };
        }
    }
}

fn unique_id(nccl: &Nccl) -> Result<UniqueId, CudaError> {
    let mut id = UniqueId([0; 128]);
    // SAFETY: writes 128 bytes.
    unsafe { nccl.unique_id(&raw mut id) }?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_made_without_a_gpu() {
        let nccl = match Nccl::load() {
            Ok(nccl) => nccl,
            Err(error) => {
                assert_eq!(Name::Nccl.open().err(), Some(error));
                return;
            }
        };
        let mut version = 0;
        // SAFETY: writes one number.
        unsafe { nccl.version(&raw mut version) }.expect("has a version");
        assert!(version >= 22_000, "{version}");
        let (a, b) = (unique_id(&nccl), unique_id(&nccl));
        assert!(a.is_ok() && b.is_ok() && a != b);
    }
}
