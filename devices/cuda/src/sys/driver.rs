//! The CUDA driver.

#![allow(unsafe_code, reason = "functions of a C library")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::error::CudaError;
use crate::library::Name;
use crate::loading::functions;

/// A device's number.
pub type Device = c_int;
/// An address in a device's memory.
pub type Address = u64;
/// An opaque handle: context, stream, event, module, function, graph.
pub type Handle = *mut c_void;

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
pub const MULTIPROCESSORS: c_int = 16;
/// `CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE`.
pub const L2_CACHE: c_int = 38;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
pub const CAPABILITY_MAJOR: c_int = 75;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
pub const CAPABILITY_MINOR: c_int = 76;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub const DYNAMIC_SHARED_BYTES: c_int = 8;
/// `CU_STREAM_NON_BLOCKING`.
pub const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DEFAULT`: with time.
pub const EVENT_TIMED: c_uint = 0;
/// `CU_EVENT_DISABLE_TIMING`.
pub const EVENT_PLAIN: c_uint = 2;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: memory may be taken, and modules loaded, meanwhile.
pub const CAPTURE_RELAXED: c_int = 2;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: i32 = 2;
/// `CUDA_ERROR_NOT_READY`.
pub const NOT_READY: i32 = 600;

functions! {
    /// Functions of the driver.
    Driver of Name::Driver;
    fn error_name = "cuGetErrorName"(code: i32, name: *mut *const c_char);
    fn init = "cuInit"(flags: c_uint);
    fn version = "cuDriverGetVersion"(version: *mut c_int);
    fn device_count = "cuDeviceGetCount"(count: *mut c_int);
    fn device = "cuDeviceGet"(device: *mut Device, ordinal: c_int);
    fn device_name = "cuDeviceGetName"(name: *mut c_char, len: c_int, device: Device);
    fn device_memory = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: Device);
    fn device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: Device);
    fn retain_context = "cuDevicePrimaryCtxRetain"(context: *mut Handle, device: Device);
    fn release_context = "cuDevicePrimaryCtxRelease_v2"(device: Device);
    fn set_context = "cuCtxSetCurrent"(context: Handle);
    fn memory = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    fn allocate = "cuMemAlloc_v2"(address: *mut Address, bytes: usize);
    fn free = "cuMemFree_v2"(address: Address);
    fn allocate_host = "cuMemAllocHost_v2"(pointer: *mut *mut c_void, bytes: usize);
    fn free_host = "cuMemFreeHost"(pointer: *mut c_void);
    fn copy_in = "cuMemcpyHtoDAsync_v2"(to: Address, from: *const c_void, bytes: usize, stream: Handle);
    fn copy_out = "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: Address, bytes: usize, stream: Handle);
    fn copy = "cuMemcpyDtoDAsync_v2"(to: Address, from: Address, bytes: usize, stream: Handle);
    fn fill = "cuMemsetD8Async"(to: Address, value: u8, bytes: usize, stream: Handle);
    fn create_stream = "cuStreamCreate"(stream: *mut Handle, flags: c_uint);
    fn destroy_stream = "cuStreamDestroy_v2"(stream: Handle);
    fn synchronize_stream = "cuStreamSynchronize"(stream: Handle);
    fn wait_event = "cuStreamWaitEvent"(stream: Handle, event: Handle, flags: c_uint);
    fn create_event = "cuEventCreate"(event: *mut Handle, flags: c_uint);
    fn destroy_event = "cuEventDestroy_v2"(event: Handle);
    fn record_event = "cuEventRecord"(event: Handle, stream: Handle);
    fn query_event = "cuEventQuery"(event: Handle);
    fn synchronize_event = "cuEventSynchronize"(event: Handle);
    fn elapsed = "cuEventElapsedTime"(milliseconds: *mut f32, start: Handle, end: Handle);
    fn load_module = "cuModuleLoadData"(module: *mut Handle, image: *const c_void);
    fn unload_module = "cuModuleUnload"(module: Handle);
    fn function = "cuModuleGetFunction"(function: *mut Handle, module: Handle, name: *const c_char);
    fn function_attribute = "cuFuncSetAttribute"(function: Handle, attribute: c_int, value: c_int);
    fn launch = "cuLaunchKernel"(
        function: Handle,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: Handle, arguments: *mut *mut c_void, extra: *mut *mut c_void,
    );
    fn begin_capture = "cuStreamBeginCapture_v2"(stream: Handle, mode: c_int);
    fn end_capture = "cuStreamEndCapture"(stream: Handle, graph: *mut Handle);
    fn instantiate = "cuGraphInstantiateWithFlags"(executable: *mut Handle, graph: Handle, flags: u64);
    fn launch_graph = "cuGraphLaunch"(executable: Handle, stream: Handle);
    fn destroy_executable = "cuGraphExecDestroy"(executable: Handle);
    fn destroy_graph = "cuGraphDestroy"(graph: Handle);
}

impl Driver {
    /// Memory of the device whose context is current.
    ///
    /// # Errors
    /// When it is full.
    pub fn take(&self, bytes: u64) -> Result<Address, CudaError> {
        let mut address = 0;
        // SAFETY: writes one address.
        let result = unsafe { self.allocate(&raw mut address, bytes as usize) };
        match result {
            Err(CudaError::Call { code, .. }) if code == OUT_OF_MEMORY => {
                let (mut free, mut total) = (0, 0);
                // SAFETY: writes two numbers.
                unsafe { self.memory(&raw mut free, &raw mut total) }?;
                Err(CudaError::OutOfMemory {
                    asked: bytes,
                    live: (total - free) as u64,
                    free: free as u64,
                })
            }
            other => other.map(|()| address),
        }
    }

    fn reason(&self, code: i32) -> String {
        let mut name = std::ptr::null();
        // SAFETY: writes a pointer to the driver's own text, or leaves it null.
        let found = unsafe { (self.error_name)(code, &raw mut name) } == 0;
        found
            .then(|| text(name))
            .flatten()
            .unwrap_or_else(|| "unknown error".to_owned())
    }
}

/// What the driver calls an error: text it owns, which lives as long as the program.
fn text(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the driver returns strings of its own tables, ended by 0.
    let text = unsafe { CStr::from_ptr(pointer) };
    Some(text.to_string_lossy().into_owned())
}
