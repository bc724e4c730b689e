//! NCCL: messages between devices.

#![allow(unsafe_code, reason = "functions of a C library")]

use std::ffi::{c_int, c_void};

use crate::library::Name;
use crate::loading::functions;

/// A communicator.
pub type Comm = *mut c_void;

/// `ncclUint8`.
pub const U8: c_int = 1;
/// `ncclFloat32`.
pub const F32: c_int = 7;
/// `ncclBfloat16`.
pub const BF16: c_int = 9;
/// `ncclSum`.
pub const SUM: c_int = 0;
/// `ncclMax`.
pub const MAX: c_int = 2;
/// `ncclInProgress`.
pub const IN_PROGRESS: i32 = 7;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

functions! {
    /// Functions of NCCL.
    Nccl of Name::Nccl;
    fn version = "ncclGetVersion"(version: *mut c_int);
    fn unique_id = "ncclGetUniqueId"(id: *mut UniqueId);
    fn init = "ncclCommInitRank"(comm: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int);
    fn destroy = "ncclCommDestroy"(comm: Comm);
    fn abort = "ncclCommAbort"(comm: Comm);
    fn state = "ncclCommGetAsyncError"(comm: Comm, error: *mut i32);
    fn all_reduce = "ncclAllReduce"(
        from: u64, to: u64, count: usize, element: c_int, reduction: c_int, comm: Comm, stream: *mut c_void,
    );
    fn all_gather = "ncclAllGather"(
        from: u64, to: u64, count: usize, element: c_int, comm: Comm, stream: *mut c_void,
    );
    fn reduce_scatter = "ncclReduceScatter"(
        from: u64, to: u64, count: usize, element: c_int, reduction: c_int, comm: Comm, stream: *mut c_void,
    );
    fn reduce = "ncclReduce"(
        from: u64, to: u64, count: usize, element: c_int, reduction: c_int, root: c_int, comm: Comm,
        stream: *mut c_void,
    );
    fn broadcast = "ncclBroadcast"(
        from: u64, to: u64, count: usize, element: c_int, root: c_int, comm: Comm, stream: *mut c_void,
    );
    fn send = "ncclSend"(
        from: u64, count: usize, element: c_int, peer: c_int, comm: Comm, stream: *mut c_void,
    );
    fn receive = "ncclRecv"(
        to: u64, count: usize, element: c_int, peer: c_int, comm: Comm, stream: *mut c_void,
    );
    fn group_start = "ncclGroupStart"();
    fn group_end = "ncclGroupEnd"();
}

impl Nccl {
    /// `ncclResult_t` of the header.
    #[allow(clippy::unused_self, reason = "every table says its reasons")]
    fn reason(&self, code: i32) -> String {
        match code {
            1 => "a CUDA call inside failed",
            2 => "a system call failed; NCCL_DEBUG=WARN says which",
            3 => "internal error",
            4 => "invalid argument",
            5 => "invalid usage",
            6 => "a peer failed",
            7 => "in progress",
            _ => "unknown error",
        }
        .to_owned()
    }
}
