//! Collectives between the GPUs of a group of ranks by NCCL, in the order of each GPU's stream.
//!
//! Ranks meet over another communicator, which carries NCCL's id. It also reports failed ranks; the group is then
//! aborted, so that no kernel waits forever.

#![allow(unsafe_code, reason = "functions of NCCL")]

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use catalog::DType;

use super::error::CudaError;
use super::gpu::{Event, Gpu, Stream};
use super::library::Name;
use super::sys::call;
use super::sys::nccl::{
    cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId,
};
use super::tensor::Tensor;
use comm::{CommError, Communicator, Group};
use cpu_device::CpuError;

/// Interval at which a wait polls queued work that did not finish at once.
const POLL: Duration = Duration::from_micros(50);
const SOON: Duration = Duration::from_millis(1);

/// The oldest NCCL version that can abort several groups together.
const OLDEST: c_int = 22_200;

/// An NCCL communicator over the ranks of a group, each with its GPU.
pub struct NcclGroup {
    comm: ncclComm_t,
    /// Whether the communicator was aborted.
    aborted: Cell<bool>,
    /// Whether something was queued that is not known to have ended.
    open: Cell<bool>,
    gpu: Rc<Gpu>,
    /// The group's own stream, if it does not use the GPU's.
    side: Option<Stream>,
    /// Number of ranks in the group.
    pub size: usize,
    /// Index of this rank in the group.
    pub index: usize,
}

/// Element type and count under which NCCL sees a tensor: numbers it can add, or bytes.
fn units(x: &Tensor) -> (ncclDataType_t, usize) {
    match x.dtype {
        DType::Bf16 => (ncclDataType_t::ncclBfloat16, x.len()),
        DType::F32 => (ncclDataType_t::ncclFloat32, x.len()),
        _ => (ncclDataType_t::ncclUint8, x.bytes() as usize),
    }
}

impl NcclGroup {
    /// Creates the communicator with the other ranks of a group. Its collectives run on the GPU's own stream.
    ///
    /// # Errors
    /// When NCCL is missing, or the ranks cannot meet.
    pub fn new(gpu: Rc<Gpu>, comm: &dyn Communicator, group: &Group) -> Result<Self, CudaError> {
        Self::meet(gpu, comm, group, None)
    }

    /// As [`NcclGroup::new`], on a stream of its own: the caller synchronizes it with the GPU's.
    ///
    /// # Errors
    /// See [`NcclGroup::new`].
    pub fn beside(gpu: Rc<Gpu>, comm: &dyn Communicator, group: &Group) -> Result<Self, CudaError> {
        let side = gpu.side_stream()?;
        Self::meet(gpu, comm, group, Some(side))
    }

    fn meet(
        gpu: Rc<Gpu>,
        comm: &dyn Communicator,
        group: &Group,
        side: Option<Stream>,
    ) -> Result<Self, CudaError> {
        load()?;
        let what = "meeting for NCCL";
        let own = match group.index {
            0 => Some(Arc::new(unique_id()?.to_vec())),
            _ => None,
        };
        let told = group.broadcast(comm, what, 0, own);
        let told = told.map_err(CpuError::from)?;
        let mut id = [0; 128];
        let ends = [comm.rank(), group.ranks[0]];
        CommError::check_size(ends, what, told.len(), id.len()).map_err(CpuError::from)?;
        id.copy_from_slice(&told);
        // NCCL would wait forever for a rank that never comes; this barrier times out and says which is missing.
        group.barrier(comm).map_err(CpuError::from)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the id is NCCL's own; the GPU's context is current in this thread.
        unsafe {
            call!(nccl::ncclCommInitRank(
                &raw mut handle,
                group.size() as c_int,
                ncclUniqueId {
                    internal: id.map(|byte| byte as c_char)
                },
                group.index as c_int,
            ))
        }?;
        Ok(Self {
            comm: handle,
            aborted: Cell::new(false),
            open: Cell::new(false),
            gpu,
            side,
            size: group.size(),
            index: group.index,
        })
    }

    /// The group's own stream, if it was created by [`NcclGroup::beside`].
    #[must_use]
    pub fn side(&self) -> Option<&Stream> {
        self.side.as_ref()
    }

    fn stream(&self) -> cudaStream_t {
        self.side
            .as_ref()
            .map_or_else(|| self.gpu.stream(), Stream::handle)
            .cast()
    }

    /// All-reduce: `to`, which may be `from`, becomes the sum of all ranks' `from`.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn all_reduce(&self, from: &Tensor, to: &Tensor) -> Result<(), CudaError> {
        debug_assert_eq!(from.len(), to.len());
        let (kind, count) = units(from);
        let (from, to) = (from.address() as *const c_void, to.address() as *mut c_void);
        let operator = ncclRedOp_t::ncclSum;
        let (comm, stream) = (self.comm()?, self.stream());
        // SAFETY: whole tensors.
        unsafe {
            call!(nccl::ncclAllReduce(
                from, to, count, kind, operator, comm, stream
            ))
        }
    }

    /// All-gather: `whole` becomes the parts of all ranks, in their order.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn all_gather(&self, part: &Tensor, whole: &Tensor) -> Result<(), CudaError> {
        debug_assert_eq!(part.len() * self.size, whole.len());
        let (kind, count) = units(part);
        let (from, to) = (
            part.address() as *const c_void,
            whole.address() as *mut c_void,
        );
        let (comm, stream) = (self.comm()?, self.stream());
        // SAFETY: the whole holds as many parts as there are ranks.
        unsafe { call!(nccl::ncclAllGather(from, to, count, kind, comm, stream)) }
    }

    /// Reduce-scatter: `part` becomes this rank's part of the sum of all ranks' `whole`.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn reduce_scatter(&self, whole: &Tensor, part: &Tensor) -> Result<(), CudaError> {
        debug_assert_eq!(part.len() * self.size, whole.len());
        let (kind, count) = units(part);
        let (from, to) = (
            whole.address() as *const c_void,
            part.address() as *mut c_void,
        );
        let (comm, stream) = (self.comm()?, self.stream());
        // SAFETY: the whole holds as many parts as there are ranks.
        unsafe {
            call!(nccl::ncclReduceScatter(
                from,
                to,
                count,
                kind,
                ncclRedOp_t::ncclSum,
                comm,
                stream
            ))
        }
    }

    /// Reduce: `to` on rank `root` becomes the sum of all ranks' `from`; the other ranks' `to` is not written.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn reduce(&self, from: &Tensor, to: &Tensor, root: usize) -> Result<(), CudaError> {
        let (kind, count) = units(from);
        let (from, to) = (from.address() as *const c_void, to.address() as *mut c_void);
        let (comm, stream) = (self.comm()?, self.stream());
        // SAFETY: `to` is as long as `from` where it is written.
        unsafe {
            call!(nccl::ncclReduce(
                from,
                to,
                count,
                kind,
                ncclRedOp_t::ncclSum,
                root as c_int,
                comm,
                stream,
            ))
        }
    }

    /// Broadcast: `to` on every rank becomes `from` of rank `root`.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn broadcast(&self, from: &Tensor, to: &Tensor, root: usize) -> Result<(), CudaError> {
        let (kind, count) = units(to);
        let (from, to) = (from.address() as *const c_void, to.address() as *mut c_void);
        let (comm, stream) = (self.comm()?, self.stream());
        // SAFETY: `from` is as long as `to` where it is read.
        unsafe {
            call!(nccl::ncclBroadcast(
                from,
                to,
                count,
                kind,
                root as c_int,
                comm,
                stream
            ))
        }
    }

    /// All-to-all: sends tensor `i` to rank `i`, and receives the tensor that it has for this rank.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn all_to_all(&self, from: &[Tensor], to: &[Tensor]) -> Result<(), CudaError> {
        self.together(|| {
            for (peer, (from, to)) in from.iter().zip(to).enumerate() {
                self.send(from, peer)?;
                self.receive(to, peer)?;
            }
            Ok(())
        })
    }

    /// Sends a tensor to a rank.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn send(&self, x: &Tensor, peer: usize) -> Result<(), CudaError> {
        let (kind, count) = units(x);
        if count == 0 {
            return Ok(());
        }
        let (comm, stream) = (self.comm()?, self.stream());
        // SAFETY: the whole tensor.
        unsafe {
            call!(nccl::ncclSend(
                x.address() as *const c_void,
                count,
                kind,
                peer as c_int,
                comm,
                stream
            ))
        }
    }

    /// Receives a tensor from a rank.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub fn receive(&self, x: &Tensor, peer: usize) -> Result<(), CudaError> {
        let (kind, count) = units(x);
        if count == 0 {
            return Ok(());
        }
        let (comm, stream) = (self.comm()?, self.stream());
        // SAFETY: the whole tensor.
        unsafe {
            call!(nccl::ncclRecv(
                x.address() as *mut c_void,
                count,
                kind,
                peer as c_int,
                comm,
                stream
            ))
        }
    }

    /// Sends the byte at an address to a rank and receives one into the next, to make NCCL connect the two.
    ///
    /// # Errors
    /// When the device or a peer failed.
    pub(super) fn greet(&self, byte: u64, peer: usize) -> Result<(), CudaError> {
        let (comm, stream, peer) = (self.comm()?, self.stream(), peer as c_int);
        self.together(|| {
            // SAFETY: the caller allocated two bytes.
            unsafe {
                call!(nccl::ncclSend(
                    byte as *const c_void,
                    1,
                    ncclDataType_t::ncclUint8,
                    peer,
                    comm,
                    stream
                ))?;
                call!(nccl::ncclRecv(
                    (byte + 1) as *mut c_void,
                    1,
                    ncclDataType_t::ncclUint8,
                    peer,
                    comm,
                    stream
                ))
            }
        })
    }

    /// Runs `queue` within an NCCL group call, so that its messages progress at the same time.
    ///
    /// # Errors
    /// When the device or a peer failed, or `queue` did.
    pub fn together(&self, queue: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
        // SAFETY: ended below, also where queueing failed.
        unsafe { call!(nccl::ncclGroupStart()) }?;
        let queued = queue();
        // SAFETY: begun above.
        let ended = unsafe { call!(nccl::ncclGroupEnd()) };
        queued.and(ended)
    }

    /// Queues a call for each rank's part of a tensor, if there is any of it, within one group call.
    pub(super) fn by_rank(
        &self,
        parts: &[Tensor],
        queue: impl Fn(&Tensor, usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut parts = parts.iter().zip(0..).filter(|(part, _)| !part.is_empty());
        self.together(|| parts.try_for_each(|(part, rank)| queue(part, rank)))
    }

    /// Blocks until all work on the GPU's own stream is done; aborts the group if a peer failed or it takes longer than
    /// `timeout`.
    ///
    /// # Errors
    /// When a peer failed, or did not come in time.
    pub fn finish(
        &self,
        comm: &dyn Communicator,
        what: &str,
        timeout: Duration,
    ) -> Result<(), CudaError> {
        settle(&[self], &self.gpu.event()?, comm, (what, timeout))
    }

    /// Whether NCCL reports an asynchronous error.
    fn is_broken(&self) -> Result<bool, CudaError> {
        let mut state = 0i32;
        // SAFETY: writes one number.
        unsafe {
            call!(nccl::ncclCommGetAsyncError(
                self.comm()?,
                (&raw mut state).cast()
            ))
        }?;
        Ok(state != 0 && state != ncclResult_t::ncclInProgress as i32)
    }

    /// Whether something was queued that is not known to have ended.
    pub(super) fn is_open(&self) -> bool {
        self.open.get()
    }

    /// Aborts the communicator, which ends kernels that wait for a peer. Nothing can be queued afterwards.
    fn abort(&self) -> Result<(), CudaError> {
        if self.aborted.replace(true) {
            return Ok(());
        }
        // SAFETY: NCCL frees the communicator; `aborted` keeps this from using it again.
        unsafe { call!(nccl::ncclCommAbort(self.comm)) }
    }

    /// The communicator for queueing work; an error if it was aborted.
    fn comm(&self) -> Result<ncclComm_t, CudaError> {
        self.open.set(true);
        match self.aborted.get() {
            false => Ok(self.comm),
            true => Err(CudaError::Call {
                library: Name::Nccl,
                call: "ncclCommAbort",
                code: 0,
                reason: "the group was aborted before".to_owned(),
            }),
        }
    }
}

/// Whether `done` is reached now or very soon: even on an idle device an event is not reached at once.
pub(super) fn is_soon(done: &Event) -> Result<bool, CudaError> {
    let start = Instant::now();
    while !done.is_reached()? {
        if start.elapsed() >= SOON {
            return Ok(false);
        }
        std::hint::spin_loop();
    }
    Ok(true)
}

/// Aborts all NCCL groups of one GPU in one call, so that kernels that wait for a peer end. Captured graphs are forgotten first,
/// because NCCL keeps a group that a graph uses. One call for all (possible since NCCL 2.22): aborting one group alone may wait for a
/// kernel that waits in another (NVIDIA/nccl#1013).
pub(super) fn give_up(groups: &[&NcclGroup]) -> Result<(), CudaError> {
    let Some(first) = groups.first() else {
        return Ok(());
    };
    first.gpu.forget_captured();
    first.together(|| {
        let given_up = groups.iter().map(|group| group.abort());
        given_up.fold(Ok(()), Result::and)
    })
}

/// Blocks the host until `done` is reached. When a peer failed or it takes longer than the timeout, aborts all groups,
/// so that nothing on the device waits any more.
pub(super) fn settle(
    groups: &[&NcclGroup],
    done: &Event,
    comm: &dyn Communicator,
    (what, timeout): (&str, Duration),
) -> Result<(), CudaError> {
    let start = Instant::now();
    while !done.is_reached()? {
        let mut failed = comm.check(what).err();
        let mut broken = start.elapsed() >= timeout;
        for group in groups {
            broken |= group.is_broken()?;
        }
        if failed.is_none() && broken {
            failed = Some(CommError::Timeout {
                rank: comm.rank(),
                peer: comm.rank(),
                collective: what.to_owned(),
                waited: start.elapsed(),
            });
        }
        if let Some(failed) = failed {
            give_up(groups)?;
            comm.fail(&format!("{what}: a GPU of a group did not answer"));
            return Err(CudaError::Host(CpuError::Comm(failed)));
        }
        match start.elapsed() < SOON {
            true => std::hint::spin_loop(),
            false => std::thread::sleep(POLL),
        }
    }
    for group in groups {
        group.open.set(false);
    }
    Ok(())
}

impl Drop for NcclGroup {
    fn drop(&mut self) {
        if self.aborted.get() {
            return;
        }
        // SAFETY: used no more. Work that may still wait for a peer is aborted, because destroying
        // waits for it. A failure here cannot be handled.
        let _ = unsafe {
            match self.open.get() {
                false => call!(nccl::ncclCommDestroy(self.comm)),
                true => call!(nccl::ncclCommAbort(self.comm)),
            }
        };
    }
}

/// Loads NCCL; fails if its version is too old.
pub(super) fn load() -> Result<(), CudaError> {
    let path = &Name::Nccl.open()?.path;
    let mut version = 0;
    // SAFETY: writes one number.
    unsafe { call!(nccl::ncclGetVersion(&raw mut version)) }?;
    let release = |code: c_int| format!("{}.{}.{}", code / 10_000, code / 100 % 100, code % 100);
    if version < OLDEST {
        return Err(CudaError::Old {
            library: Name::Nccl,
            release: release(version),
            path: path.clone(),
            oldest: release(OLDEST),
        });
    }
    Ok(())
}

fn unique_id() -> Result<[u8; 128], CudaError> {
    let mut id = [0; 128];
    // SAFETY: writes 128 bytes.
    unsafe { call!(nccl::ncclGetUniqueId((&raw mut id).cast())) }?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_made_without_a_gpu() {
        if let Err(error) = load() {
            assert_eq!(Name::Nccl.open().err(), Some(error));
            return;
        }
        let (a, b) = (unique_id(), unique_id());
        assert!(a.is_ok() && b.is_ok() && a != b);
    }
}
