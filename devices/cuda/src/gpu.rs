//! A GPU: one context, one stream for all work, kernels compiled by NVRTC, GEMMs by cuBLASLt.

#![allow(unsafe_code, reason = "functions of the CUDA driver and of cuBLASLt")]

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};

use super::compile::Compiler;
use super::cudnn::Attentions;
use super::error::CudaError;
use super::kernels::{Head, Kernel, Source};
use super::launcher::{Address, Arguments, AttentionOperands, GraphId, Launch, Launcher, Product};
use super::library::Name;
use super::probe::{attribute, capability};
use super::products::Products;
use super::sys::driver::{
    CUdevice, CUdevice_attribute, CUevent, CUevent_flags, CUfunction, CUfunction_attribute,
    CUgraphExec, CUmodule, CUresult, CUstream, CUstream_flags, CUstreamCaptureMode,
};
use super::sys::{call, take};
use dtensor::CausalAttention;

/// Bytes of dynamic shared memory that a kernel may use without opting in to more.
const PLAIN_SHARED: u32 = 48 << 10;

/// Bytes of pinned staging memory for copies to the GPU. If it is full, the host waits for the GPU.
const STAGED: usize = 16 << 20;

/// A GPU of this machine.
pub struct Gpu {
    compiler: Compiler,
    products: Products,
    /// cuDNN, loaded on first use because that takes a second.
    attentions: OnceCell<Result<Attentions, CudaError>>,
    device: CUdevice,
    stream: CUstream,
    /// Pinned memory that holds bytes until the GPU has read them. A copy straight from a caller's
    /// memory may read it even after the call returned (CUDA's "API synchronization behavior").
    staging: *mut u8,
    /// Bytes of `staging` that the GPU may still read: those written since the last synchronize.
    staged: Cell<usize>,
    capability: [u32; 2],
    multiprocessors: u32,
    modules: RefCell<HashMap<(Source, Head), CUmodule>>,
    functions: RefCell<HashMap<Kernel, CUfunction>>,
    /// Events recorded by `mark` since the last call of `laps`.
    marks: RefCell<Vec<Event>>,
    /// Whether work is being captured into a graph instead of run.
    capturing: Cell<bool>,
    /// Instantiated CUDA graphs, by [`GraphId`].
    graphs: RefCell<Vec<Option<CUgraphExec>>>,
}

/// A CUDA event: a point in the stream whose time is measured.
pub struct Event {
    handle: CUevent,
}

/// A CUDA stream beside the GPU's own, such as one for a group's collectives.
pub struct Stream {
    handle: CUstream,
}

/// Creates a stream on the device whose context is current.
fn create_stream() -> Result<CUstream, CudaError> {
    let mut stream = std::ptr::null_mut();
    let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: writes one handle, which its owner destroys.
    unsafe { call!(driver::cuStreamCreate(&raw mut stream, flags)) }?;
    Ok(stream)
}

impl Gpu {
    /// Opens the GPU of this ordinal.
    ///
    /// # Errors
    /// When a library is missing or the device does not start.
    pub fn new(ordinal: u32) -> Result<Self, CudaError> {
        Name::Driver.open()?;
        let compiler = Compiler::new()?;
        // SAFETY: the first call, with the only flag there is.
        unsafe { call!(driver::cuInit(0)) }?;
        let mut count = 0;
        // SAFETY: writes one number.
        unsafe { call!(driver::cuDeviceGetCount(&raw mut count)) }?;
        if c_int::try_from(ordinal).map_or(true, |ordinal| ordinal >= count) {
            return Err(CudaError::NoDevice);
        }
        let mut device = 0;
        // SAFETY: writes one number.
        unsafe { call!(driver::cuDeviceGet(&raw mut device, ordinal as c_int)) }?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the primary context is released when this is dropped.
        unsafe { call!(driver::cuDevicePrimaryCtxRetain(&raw mut context, device)) }?;
        // SAFETY: retained above.
        unsafe { call!(driver::cuCtxSetCurrent(context)) }?;
        let stream = create_stream()?;
        let mut staging: *mut c_void = std::ptr::null_mut();
        // SAFETY: the context is current; freed when this is dropped.
        unsafe { call!(driver::cuMemAllocHost_v2(&raw mut staging, STAGED)) }?;
        let capability = capability(device)?;
        let multiprocessors = attribute(
            device,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )?;
        let products = Products::new(capability)?;
        Ok(Self {
            compiler,
            products,
            attentions: OnceCell::new(),
            device,
            stream,
            staging: staging.cast(),
            staged: Cell::new(0),
            capability,
            multiprocessors,
            modules: RefCell::default(),
            functions: RefCell::default(),
            marks: RefCell::default(),
            capturing: Cell::new(false),
            graphs: RefCell::default(),
        })
    }

    /// The GPU's own stream, for libraries that queue work on it themselves.
    pub(crate) fn stream(&self) -> CUstream {
        self.stream
    }

    /// cuDNN, or why it cannot be used.
    fn attentions(&self) -> Result<&Attentions, &CudaError> {
        let load = || Attentions::new(self.stream);
        self.attentions.get_or_init(load).as_ref()
    }

    /// Records an event: it is reached once all work queued so far is done.
    ///
    /// # Errors
    /// When the device fails.
    pub fn event(&self) -> Result<Event, CudaError> {
        self.event_on(self.stream, CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn event_on(&self, stream: CUstream, flags: CUevent_flags) -> Result<Event, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed when dropped.
        unsafe { call!(driver::cuEventCreate(&raw mut handle, flags as u32)) }?;
        let event = Event { handle };
        // SAFETY: both are of this context.
        unsafe { call!(driver::cuEventRecord(handle, stream)) }?;
        Ok(event)
    }

    /// Creates another stream.
    ///
    /// # Errors
    /// When the device fails; the same holds for the functions below.
    pub fn side_stream(&self) -> Result<Stream, CudaError> {
        create_stream().map(|handle| Stream { handle })
    }

    /// Makes work queued on `side` from now on wait for all work queued on the GPU's own stream so far.
    pub fn fork(&self, side: &Stream) -> Result<(), CudaError> {
        let here = self.event_on(self.stream, CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
        // SAFETY: both are of this context; the driver keeps the event until it is reached.
        unsafe { call!(driver::cuStreamWaitEvent(side.handle, here.handle, 0)) }
    }

    /// Records an event at the end of all work queued on another stream so far.
    pub fn end_of(&self, side: &Stream) -> Result<Event, CudaError> {
        self.event_on(side.handle, CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Makes work queued from now on, on the GPU's own stream, wait for an event.
    pub fn join(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both are of this context.
        unsafe { call!(driver::cuStreamWaitEvent(self.stream, event.handle, 0)) }
    }

    /// Destroys all captured graphs; replays that are already queued still complete.
    pub fn forget_captured(&self) {
        let graphs = self.graphs.borrow().len();
        for at in 0..graphs {
            self.forget(GraphId(at));
        }
    }

    /// Returns an error while work is captured into a CUDA graph, because `what` needs the host.
    fn with_host(&self, what: &'static str) -> Result<(), CudaError> {
        match self.capturing.get() {
            true => Err(CudaError::Captured { what }),
            false => Ok(()),
        }
    }

    fn module(&self, kernel: Kernel) -> Result<CUmodule, CudaError> {
        let key = (kernel.source, kernel.head);
        if let Some(&module) = self.modules.borrow().get(&key) {
            return Ok(module);
        }
        let cubin = self
            .compiler
            .cubin(kernel.source, kernel.head, self.capability)?;
        let mut module = std::ptr::null_mut();
        // SAFETY: machine code for this device, as the compiler made it.
        unsafe {
            call!(driver::cuModuleLoadData(
                &raw mut module,
                cubin.as_ptr().cast()
            ))
        }?;
        self.modules.borrow_mut().insert(key, module);
        Ok(module)
    }

    fn function(&self, kernel: Kernel, shared: u32) -> Result<CUfunction, CudaError> {
        if let Some(&function) = self.functions.borrow().get(&kernel) {
            return Ok(function);
        }
        let module = self.module(kernel)?;
        let name = CString::new(kernel.name).expect("kernels' names have no zeros");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded and the name ends in 0.
        unsafe {
            call!(driver::cuModuleGetFunction(
                &raw mut function,
                module,
                name.as_ptr()
            ))
        }?;
        if shared > PLAIN_SHARED {
            // SAFETY: a kernel is always launched with the same amount of shared memory.
            unsafe {
                call!(driver::cuFuncSetAttribute(
                    function,
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared as c_int,
                ))
            }?;
        }
        self.functions.borrow_mut().insert(kernel, function);
        Ok(function)
    }
}

impl Launcher for Gpu {
    fn allocate(&self, bytes: u64) -> Result<Address, CudaError> {
        take(bytes)
    }

    fn free(&self, address: Address) -> Result<(), CudaError> {
        // The driver waits for all work before it frees.
        // SAFETY: allocated above and used no more.
        unsafe { call!(driver::cuMemFree_v2(address)) }
    }

    fn write(&self, to: Address, bytes: &[u8]) -> Result<(), CudaError> {
        self.with_host("a copy to the device")?;
        for (at, part) in (to..).step_by(STAGED).zip(bytes.chunks(STAGED)) {
            if part.len() > STAGED - self.staged.get() {
                self.synchronize()?;
            }
            // SAFETY: the GPU reads no staging memory from `staged` on; the caller allocated `to`.
            unsafe {
                let from = self.staging.add(self.staged.get());
                std::ptr::copy_nonoverlapping(part.as_ptr(), from, part.len());
                call!(driver::cuMemcpyHtoDAsync_v2(
                    at,
                    from.cast(),
                    part.len(),
                    self.stream
                ))
            }?;
            self.staged.set(self.staged.get() + part.len());
        }
        Ok(())
    }

    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.with_host("a copy to the host")?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller allocated the source; nobody reads `bytes` before the synchronization.
        unsafe {
            call!(driver::cuMemcpyDtoHAsync_v2(
                bytes.as_mut_ptr().cast(),
                from,
                bytes.len(),
                self.stream
            ))
        }?;
        self.synchronize()
    }

    fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller allocated both ranges.
        unsafe {
            call!(driver::cuMemcpyDtoDAsync_v2(
                to,
                from,
                bytes as usize,
                self.stream
            ))
        }
    }

    fn fill(&self, to: Address, value: u8, bytes: u64) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller allocated the range.
        unsafe {
            call!(driver::cuMemsetD8Async(
                to,
                value,
                bytes as usize,
                self.stream
            ))
        }
    }

    fn launch(
        &self,
        kernel: Kernel,
        launch: Launch,
        mut arguments: Arguments,
    ) -> Result<(), CudaError> {
        let function = self.function(kernel, launch.shared)?;
        let [x, y, z] = launch.grid;
        let mut pointers = arguments.pointers();
        // SAFETY: the arguments are those of the kernel, copied before this returns.
        unsafe {
            call!(driver::cuLaunchKernel(
                function,
                x,
                y,
                z,
                launch.threads,
                1,
                1,
                launch.shared,
                self.stream,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            ))
        }
    }

    fn takes(&self, product: &Product) -> Result<bool, CudaError> {
        self.products.takes(product)
    }

    fn multiply(&self, product: &Product) -> Result<(), CudaError> {
        self.products.multiply(product, self.stream)
    }

    fn attention_workspaces(&self, of: &CausalAttention) -> Result<Option<[u64; 2]>, CudaError> {
        let cudnn = self.attentions().ok();
        Ok(cudnn.and_then(|cudnn| cudnn.workspaces(of)))
    }

    fn attend(&self, of: &CausalAttention, operands: &AttentionOperands) -> Result<(), CudaError> {
        let cudnn = self.attentions().expect("it has said what it asks for");
        cudnn.attend(of, operands)
    }

    fn attention_library(&self) -> Option<Result<String, String>> {
        Some(match self.attentions.get()? {
            Ok(cudnn) => cudnn.part(),
            Err(error) => Err(error.why_unused()),
        })
    }

    fn mark(&self) -> Result<(), CudaError> {
        self.with_host("a measured time")?;
        let event = self.event()?;
        self.marks.borrow_mut().push(event);
        Ok(())
    }

    fn laps(&self) -> Result<Vec<f64>, CudaError> {
        let marks = std::mem::take(&mut *self.marks.borrow_mut());
        let pairs = marks.windows(2);
        pairs.map(|pair| pair[1].since(&pair[0])).collect()
    }

    fn synchronize(&self) -> Result<(), CudaError> {
        self.with_host("waiting for the device")?;
        // SAFETY: the stream is ours.
        unsafe { call!(driver::cuStreamSynchronize(self.stream)) }?;
        self.staged.set(0);
        Ok(())
    }

    fn begin_capture(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is ours and not being captured.
        unsafe {
            call!(driver::cuStreamBeginCapture_v2(
                self.stream,
                CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED
            ))
        }?;
        self.capturing.set(true);
        Ok(())
    }

    fn end_capture(&self) -> Result<GraphId, CudaError> {
        self.capturing.set(false);
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture of this stream was begun before.
        unsafe { call!(driver::cuStreamEndCapture(self.stream, &raw mut graph)) }?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph was made above and is destroyed below.
        let made = unsafe {
            call!(driver::cuGraphInstantiateWithFlags(
                &raw mut executable,
                graph,
                0
            ))
        };
        // SAFETY: made above, used no more.
        unsafe { call!(driver::cuGraphDestroy(graph)) }?;
        made?;
        let mut graphs = self.graphs.borrow_mut();
        graphs.push(Some(executable));
        Ok(GraphId(graphs.len() - 1))
    }

    fn replay(&self, GraphId(at): GraphId) -> Result<(), CudaError> {
        let executable = self.graphs.borrow()[at];
        let executable = executable.expect("what was forgotten is not run again");
        // SAFETY: instantiated in this context.
        unsafe { call!(driver::cuGraphLaunch(executable, self.stream)) }
    }

    fn forget(&self, GraphId(at): GraphId) {
        if let Some(executable) = self.graphs.borrow_mut()[at].take() {
            // SAFETY: instantiated here, used no more; a launched graph still runs to its end. A
            // failure here cannot be handled.
            let _ = unsafe { call!(driver::cuGraphExecDestroy(executable)) };
        }
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn fuses_gelu(&self) -> bool {
        self.products.fuses_gelu()
    }
}

impl Event {
    /// Whether all work before it is done.
    ///
    /// # Errors
    /// When work before it failed.
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        // SAFETY: recorded when made.
        match unsafe { call!(driver::cuEventQuery(self.handle)) } {
            Err(CudaError::Call { code, .. }) if code == CUresult::CUDA_ERROR_NOT_READY as i32 => {
                Ok(false)
            }
            other => other.map(|()| true),
        }
    }

    /// Waits for this event; returns the seconds from `start` to it.
    ///
    /// # Errors
    /// When work before it failed.
    pub fn since(&self, start: &Self) -> Result<f64, CudaError> {
        // SAFETY: both were recorded.
        unsafe { call!(driver::cuEventSynchronize(self.handle)) }?;
        let mut milliseconds = 0.0;
        // SAFETY: writes one number.
        unsafe {
            call!(driver::cuEventElapsedTime(
                &raw mut milliseconds,
                start.handle,
                self.handle
            ))
        }?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a point in a queue")
    }
}

impl Stream {
    /// The raw handle, as libraries take it.
    pub(crate) fn handle(&self) -> CUstream {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by this driver, used no more; work queued on it still completes. A failure
        // here cannot be handled.
        let _ = unsafe { call!(driver::cuStreamDestroy_v2(self.handle)) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by this driver, used no more. A failure here cannot be handled.
        let _ = unsafe { call!(driver::cuEventDestroy_v2(self.handle)) };
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let modules = std::mem::take(&mut *self.modules.borrow_mut());
        self.marks.borrow_mut().clear();
        self.forget_captured();
        // SAFETY: all of them belong to this context, which is released last. Failures here cannot
        // be handled.
        unsafe {
            let _ = call!(driver::cuStreamSynchronize(self.stream));
            self.products.release();
            let _ = call!(driver::cuMemFreeHost(self.staging.cast()));
            if let Some(Ok(cudnn)) = self.attentions.get() {
                cudnn.release();
            }
            for module in modules.into_values() {
                let _ = call!(driver::cuModuleUnload(module));
            }
            let _ = call!(driver::cuStreamDestroy_v2(self.stream));
            let _ = call!(driver::cuDevicePrimaryCtxRelease_v2(self.device));
        }
    }
}
