//! A GPU: one context, one stream that all work goes through, kernels by NVRTC, products by cuBLASLt.

#![allow(unsafe_code, reason = "functions of the CUDA driver and of cuBLASLt")]

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::rc::Rc;

use super::compile::Compiler;
use super::cudnn::Attentions;
use super::error::CudaError;
use super::kernels::{Head, Kernel, Source};
use super::launcher::{Address, Arguments, AttentionOperands, GraphId, Launch, Launcher, Product};
use super::products::Products;
use super::sys::driver::{self, Driver, Handle};
use dtensor::CausalAttention;

/// Dynamic shared memory that a kernel may ask for without saying so first.
const PLAIN_SHARED: u32 = 48 << 10;

/// A GPU of this machine.
pub struct Gpu {
    driver: Rc<Driver>,
    compiler: Compiler,
    products: Products,
    /// Loaded when first asked for: it takes a second.
    attentions: OnceCell<Result<Attentions, CudaError>>,
    device: driver::Device,
    stream: Handle,
    capability: [u32; 2],
    multiprocessors: u32,
    modules: RefCell<HashMap<(Source, Head), Handle>>,
    functions: RefCell<HashMap<Kernel, Handle>>,
    /// Kernels and products queued so far.
    launches: Cell<u64>,
    marks: RefCell<Vec<Event>>,
    /// Whether work is recorded instead of run.
    capturing: Cell<bool>,
    /// Recorded work, made ready to run.
    graphs: RefCell<Vec<Option<Handle>>>,
}

/// A point in the stream whose time is measured.
pub struct Event {
    driver: Rc<Driver>,
    handle: Handle,
}

/// A queue of work beside the GPU's own, such as that of a group's messages.
pub struct Stream {
    driver: Rc<Driver>,
    handle: Handle,
}

impl Gpu {
    /// The GPU of that number.
    ///
    /// # Errors
    /// When a library is missing or the device does not start.
    pub fn new(ordinal: u32) -> Result<Self, CudaError> {
        let driver = Rc::new(Driver::load()?);
        let compiler = Compiler::new()?;
        // SAFETY: the first call, with the only flag there is.
        unsafe { driver.init(0) }?;
        let mut count = 0;
        // SAFETY: writes one number.
        unsafe { driver.device_count(&raw mut count) }?;
        if c_int::try_from(ordinal).map_or(true, |ordinal| ordinal >= count) {
            return Err(CudaError::NoDevice);
        }
        let mut device = 0;
        // SAFETY: writes one number.
        unsafe { driver.device(&raw mut device, ordinal as c_int) }?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the primary context is released when this is dropped.
        unsafe { driver.retain_context(&raw mut context, device) }?;
        // SAFETY: retained above.
        unsafe { driver.set_context(context) }?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the context is current.
        unsafe { driver.create_stream(&raw mut stream, driver::NON_BLOCKING) }?;
        let attribute = |which: c_int| -> Result<u32, CudaError> {
            let mut value = 0;
            // SAFETY: writes one number.
            unsafe { driver.device_attribute(&raw mut value, which, device) }?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        let capability = [
            attribute(driver::CAPABILITY_MAJOR)?,
            attribute(driver::CAPABILITY_MINOR)?,
        ];
        let multiprocessors = attribute(driver::MULTIPROCESSORS)?;
        let products = Products::new(&driver, capability)?;
        Ok(Self {
            compiler,
            products,
            attentions: OnceCell::new(),
            device,
            stream,
            capability,
            multiprocessors,
            modules: RefCell::default(),
            functions: RefCell::default(),
            launches: Cell::new(0),
            marks: RefCell::default(),
            capturing: Cell::new(false),
            graphs: RefCell::default(),
            driver,
        })
    }

    /// Its stream, for libraries that queue work of their own.
    #[must_use]
    pub fn stream(&self) -> *mut c_void {
        self.stream
    }

    /// Kernels and products queued so far.
    #[must_use]
    pub fn launches(&self) -> u64 {
        self.launches.get()
    }

    /// cuDNN, or why it cannot be used.
    fn attentions(&self) -> Result<&Attentions, &CudaError> {
        let load = || Attentions::new(self.stream);
        self.attentions.get_or_init(load).as_ref()
    }

    /// The release of cuDNN that runs core attention.
    ///
    /// # Errors
    /// Why it does not: it is missing, too old, or does not start.
    pub fn cudnn(&self) -> Result<[i32; 3], CudaError> {
        let loaded = self.attentions().map_err(Clone::clone)?;
        Ok(loaded.version())
    }

    /// A mark in the stream: the time at which all work so far is done.
    ///
    /// # Errors
    /// When the device fails.
    pub fn event(&self) -> Result<Event, CudaError> {
        self.event_on(self.stream, driver::EVENT_TIMED)
    }

    fn event_on(&self, stream: Handle, flags: c_uint) -> Result<Event, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed when dropped.
        unsafe { self.driver.create_event(&raw mut handle, flags) }?;
        let event = Event {
            driver: Rc::clone(&self.driver),
            handle,
        };
        // SAFETY: both are of this context.
        unsafe { self.driver.record_event(handle, stream) }?;
        Ok(event)
    }

    /// Another queue.
    ///
    /// # Errors
    /// When the device fails; so of what follows.
    pub fn side_stream(&self) -> Result<Stream, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed when dropped.
        unsafe {
            self.driver
                .create_stream(&raw mut handle, driver::NON_BLOCKING)
        }?;
        Ok(Stream {
            driver: Rc::clone(&self.driver),
            handle,
        })
    }

    /// Has what is queued there from now on come after all work of the GPU's own queue so far.
    ///
    /// # Errors
    /// See [`Gpu::side_stream`].
    pub fn fork(&self, side: &Stream) -> Result<(), CudaError> {
        let here = self.event_on(self.stream, driver::EVENT_PLAIN)?;
        // SAFETY: both are of this context; the driver keeps the event until it is reached.
        unsafe { self.driver.wait_event(side.handle, here.handle, 0) }
    }

    /// The end of all work of another queue so far.
    ///
    /// # Errors
    /// See [`Gpu::side_stream`].
    pub fn end_of(&self, side: &Stream) -> Result<Event, CudaError> {
        self.event_on(side.handle, driver::EVENT_PLAIN)
    }

    /// Has what is queued from now on come after an event.
    ///
    /// # Errors
    /// See [`Gpu::side_stream`].
    pub fn join(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both are of this context.
        unsafe { self.driver.wait_event(self.stream, event.handle, 0) }
    }

    /// Whether work is only recorded.
    #[must_use]
    pub fn is_capturing(&self) -> bool {
        self.capturing.get()
    }

    /// Lets go of all captured work; what of it runs goes on to its end.
    pub fn forget_captured(&self) {
        let graphs = self.graphs.borrow().len();
        for at in 0..graphs {
            self.forget(GraphId(at));
        }
    }

    /// Refuses what the host and the device do together while work is only recorded.
    fn with_host(&self, what: &'static str) -> Result<(), CudaError> {
        match self.capturing.get() {
            true => Err(CudaError::Captured { what }),
            false => Ok(()),
        }
    }

    fn module(&self, kernel: Kernel) -> Result<Handle, CudaError> {
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
            self.driver
                .load_module(&raw mut module, cubin.as_ptr().cast())
        }?;
        self.modules.borrow_mut().insert(key, module);
        Ok(module)
    }

    fn function(&self, kernel: Kernel, shared: u32) -> Result<Handle, CudaError> {
        if let Some(&function) = self.functions.borrow().get(&kernel) {
            return Ok(function);
        }
        let module = self.module(kernel)?;
        let name = CString::new(kernel.name).expect("kernels' names have no zeros");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded and the name ends in 0.
        unsafe {
            self.driver
                .function(&raw mut function, module, name.as_ptr())
        }?;
        if shared > PLAIN_SHARED {
            // SAFETY: a kernel asks for the same amount whenever it runs.
            unsafe {
                self.driver.function_attribute(
                    function,
                    driver::DYNAMIC_SHARED_BYTES,
                    shared as c_int,
                )
            }?;
        }
        self.functions.borrow_mut().insert(kernel, function);
        Ok(function)
    }
}

impl Launcher for Gpu {
    fn allocate(&self, bytes: u64) -> Result<Address, CudaError> {
        self.driver.take(bytes)
    }

    fn free(&self, address: Address) -> Result<(), CudaError> {
        // The driver waits for all work before it frees.
        // SAFETY: allocated above and used no more.
        unsafe { self.driver.free(address) }
    }

    fn write(&self, to: Address, bytes: &[u8]) -> Result<(), CudaError> {
        self.with_host("a copy to the device")?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: pageable memory is copied before this returns; the caller allocated as much.
        unsafe {
            self.driver
                .copy_in(to, bytes.as_ptr().cast(), bytes.len(), self.stream)
        }
    }

    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.with_host("a copy to the host")?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller allocated as much; the bytes are not looked at before all work is done.
        unsafe {
            self.driver
                .copy_out(bytes.as_mut_ptr().cast(), from, bytes.len(), self.stream)
        }?;
        self.synchronize()
    }

    fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller allocated as much.
        unsafe { self.driver.copy(to, from, bytes as usize, self.stream) }
    }

    fn fill(&self, to: Address, value: u8, bytes: u64) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller allocated as much.
        unsafe { self.driver.fill(to, value, bytes as usize, self.stream) }
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
        self.launches.set(self.launches.get() + 1);
        // SAFETY: the arguments are those of the kernel, copied before this returns.
        unsafe {
            self.driver.launch(
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
            )
        }
    }

    fn takes(&self, product: &Product) -> Result<bool, CudaError> {
        self.products.takes(product)
    }

    fn multiply(&self, product: &Product) -> Result<(), CudaError> {
        self.launches.set(self.launches.get() + 1);
        self.products.multiply(product, self.stream)
    }

    fn attention_workspaces(&self, of: &CausalAttention) -> Result<Option<[u64; 2]>, CudaError> {
        let cudnn = self.attentions().ok();
        Ok(cudnn.and_then(|cudnn| cudnn.workspaces(of)))
    }

    fn attend(&self, of: &CausalAttention, operands: &AttentionOperands) -> Result<(), CudaError> {
        self.launches.set(self.launches.get() + 1);
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
        unsafe { self.driver.synchronize_stream(self.stream) }
    }

    fn begin_capture(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is ours and not being captured.
        unsafe {
            self.driver
                .begin_capture(self.stream, driver::CAPTURE_RELAXED)
        }?;
        self.capturing.set(true);
        Ok(())
    }

    fn end_capture(&self) -> Result<GraphId, CudaError> {
        self.capturing.set(false);
        let mut graph = std::ptr::null_mut();
        // SAFETY: begun before.
        unsafe { self.driver.end_capture(self.stream, &raw mut graph) }?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph was made above and is destroyed below.
        let made = unsafe { self.driver.instantiate(&raw mut executable, graph, 0) };
        // SAFETY: made above, used no more.
        unsafe { self.driver.destroy_graph(graph) }?;
        made?;
        let mut graphs = self.graphs.borrow_mut();
        graphs.push(Some(executable));
        Ok(GraphId(graphs.len() - 1))
    }

    fn replay(&self, GraphId(at): GraphId) -> Result<(), CudaError> {
        let executable = self.graphs.borrow()[at];
        let executable = executable.expect("what was forgotten is not run again");
        // SAFETY: instantiated in this context.
        unsafe { self.driver.launch_graph(executable, self.stream) }
    }

    fn forget(&self, GraphId(at): GraphId) {
        if let Some(executable) = self.graphs.borrow_mut()[at].take() {
            // SAFETY: instantiated here, used no more. The driver keeps it until it has run. Nothing can
            // be done where it fails.
            let _ = unsafe { self.driver.destroy_executable(executable) };
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
        match unsafe { self.driver.query_event(self.handle) } {
            Err(CudaError::Call { code, .. }) if code == driver::NOT_READY => Ok(false),
            other => other.map(|()| true),
        }
    }

    /// Seconds from another event to this one, after waiting for it.
    ///
    /// # Errors
    /// When work before it failed.
    pub fn since(&self, start: &Self) -> Result<f64, CudaError> {
        // SAFETY: both were recorded.
        unsafe { self.driver.synchronize_event(self.handle) }?;
        let mut milliseconds = 0.0;
        // SAFETY: writes one number.
        unsafe {
            self.driver
                .elapsed(&raw mut milliseconds, start.handle, self.handle)
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
    /// As libraries take it.
    #[must_use]
    pub fn handle(&self) -> *mut c_void {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by this driver, used no more; its work goes on to its end. Nothing can be done where
        // it fails.
        let _ = unsafe { self.driver.destroy_stream(self.handle) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by this driver, used no more. Nothing can be done where it fails.
        let _ = unsafe { self.driver.destroy_event(self.handle) };
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let modules = std::mem::take(&mut *self.modules.borrow_mut());
        self.marks.borrow_mut().clear();
        self.forget_captured();
        // SAFETY: all of them are of this context, which is released last. Nothing can be done where one
        // fails.
        unsafe {
            let _ = self.driver.synchronize_stream(self.stream);
            self.products.release(&self.driver);
            if let Some(Ok(cudnn)) = self.attentions.get() {
                cudnn.release();
            }
            for module in modules.into_values() {
                let _ = self.driver.unload_module(module);
            }
            let _ = self.driver.destroy_stream(self.stream);
            let _ = self.driver.release_context(self.device);
        }
    }
}
