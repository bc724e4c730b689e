//! A device that runs the kernels on the host: the system's C++ compiler builds them over
//! `tests/emulator/emulator.h`.

#![allow(
    unsafe_code,
    reason = "calls into libraries built here, on memory allocated here"
)]

#[path = "library_attention.rs"]
mod library;
#[path = "sources.rs"]
pub mod sources;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use catalog::DType;
use cuda_device::kernels::{Head, Kernel, Source};
use cuda_device::launcher::{
    Address, Arguments, AttentionOperands, Compute, Element, Epilogue, Float8, GraphId, Launch,
    Launcher, Operand, Product,
};
use cuda_device::{CudaError, Device, Gpu};
use dtensor::CausalAttention;
use half::bf16;
use sha2::{Digest, Sha256};

/// Bytes around every allocation that nobody may write.
const GUARD: usize = 256;
/// Byte that memory is filled with before it is written: NaN in any float type.
const POISON: u8 = 0xFF;

/// Kernels of one file, built for the host. One runs at a time: threads share its static memory.
struct Built {
    library: libloading::Library,
    running: Mutex<()>,
}

/// An emulated device. Its kernels run on the host, in host memory.
#[derive(Default)]
pub struct Emulator {
    pieces: RefCell<HashMap<Address, Vec<u8>>>,
    /// How it orders work that a device may order freely: bit 0 runs warps backwards, bit 1 completes
    /// asynchronous copies at once rather than when they are waited for.
    order: u32,
    /// Whether products with a fused GELU have no algorithm.
    refuses_gelus: bool,
    /// Whether a library runs core attention.
    has_attention: bool,
    /// Whether the library was called.
    attended: Cell<bool>,
    marks: RefCell<Vec<Instant>>,
    /// The work recorded by a capture under way.
    recording: RefCell<Option<Vec<Recorded>>>,
    graphs: RefCell<Vec<Option<Rc<Vec<Recorded>>>>>,
}

/// Work with the arguments it was queued with.
#[derive(Clone, Debug)]
enum Recorded {
    Launch(Kernel, Launch, Arguments),
    Multiply(Product),
    Attend(CausalAttention, AttentionOperands),
    Copy(Address, Address, u64),
    Fill(Address, u8, u64),
}

/// All orders in which a device may run.
pub const ORDERS: std::ops::Range<u32> = 0..4;

/// A device emulated on this machine's processor; `None` without a C++ compiler.
pub fn device() -> Option<Device> {
    device_in(0)
}

/// Two devices whose orders differ in everything; empty without a C++ compiler.
pub fn devices() -> Vec<Device> {
    device().map_or_else(Vec::new, |first| {
        let last = device_in(3).expect("there is a compiler");
        vec![first, last]
    })
}

/// Set to run these tests on GPU 0 of this machine rather than on the emulator.
pub const ON_GPU: &str = "VESCALE_TEST_GPU";

/// A device that runs in one of the [`ORDERS`]; GPU 0 if [`ON_GPU`] is set.
pub fn device_in(order: u32) -> Option<Device> {
    if std::env::var_os(ON_GPU).is_some() {
        return Some(Device::new(Rc::new(Gpu::new(0).expect("a GPU"))));
    }
    static COMPILER: OnceLock<bool> = OnceLock::new();
    let there = COMPILER.get_or_init(|| Command::new("c++").arg("--version").output().is_ok());
    if !there {
        eprintln!("not tested: no C++ compiler (c++) is here");
        return None;
    }
    Some(Device::new(Rc::new(Emulator {
        order,
        ..Emulator::default()
    })))
}

/// A device on which products with our fused GELU have no algorithm; `None` on a GPU, whose library
/// decides.
pub fn device_without_gelus() -> Option<Device> {
    if std::env::var_os(ON_GPU).is_some() {
        return None;
    }
    device()?;
    Some(Device::new(Rc::new(Emulator {
        refuses_gelus: true,
        ..Emulator::default()
    })))
}

/// A device whose library runs core attention, where it supports the sizes.
pub fn device_with_library() -> Option<Device> {
    if std::env::var_os(ON_GPU).is_some() {
        return device();
    }
    device()?;
    Some(Device::new(Rc::new(Emulator {
        has_attention: true,
        ..Emulator::default()
    })))
}

fn built(source: Source, head: Head) -> Arc<Built> {
    type Libraries = HashMap<(Source, Head), Arc<Built>>;
    static LIBRARIES: OnceLock<Mutex<Libraries>> = OnceLock::new();
    let mut libraries = LIBRARIES
        .get_or_init(Mutex::default)
        .lock()
        .expect("builds do not panic halfway");
    let build = || Arc::new(build(source, head));
    Arc::clone(libraries.entry((source, head)).or_insert_with(build))
}

fn build(source: Source, head: Head) -> Built {
    let header = include_str!("../emulator/emulator.h");
    let mut text = format!(
        "#define HEAD {}\n#define VALUE {}\n{header}\n{}\n",
        head.key,
        head.value,
        source.text()
    );
    for name in sources::kernels(source) {
        text += &format!(
            "extern \"C\" void run_{name}(const unsigned* sizes, unsigned shared, void** arguments, unsigned mode) \
             {{ emulator::launch({name}, sizes, shared, arguments, mode); }}\n"
        );
    }
    let hash: String = Sha256::digest(text.as_bytes())
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let path = folder.join(format!("{}-{hash}.so", source.file()));
    if !path.exists() {
        let draft = folder.join(format!("{}-{hash}-{}", source.file(), std::process::id()));
        let code = draft.with_extension("cpp");
        std::fs::write(&code, text).expect("the target folder is writable");
        let output = Command::new("c++")
            .args([
                "-std=c++17",
                "-O2",
                "-fno-strict-aliasing",
                "-U_FORTIFY_SOURCE",
                "-w",
                "-shared",
                "-fPIC",
                "-o",
            ])
            .arg(&draft)
            .arg(&code)
            .output()
            .expect("asked for its version before");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", source.file());
        std::fs::rename(&draft, &path).expect("the target folder is writable");
    }
    // SAFETY: built above from our own code, whose initialisers set numbers to 0.
    let library = unsafe { libloading::Library::new(&path) }.expect("was just built");
    Built {
        library,
        running: Mutex::new(()),
    }
}

impl Emulator {
    /// Runs work, or records it during a capture.
    fn queue(&self, work: Recorded) {
        match &mut *self.recording.borrow_mut() {
            Some(recorded) => recorded.push(work),
            None => self.run(&work),
        }
    }

    fn run(&self, work: &Recorded) {
        match work {
            Recorded::Launch(kernel, launch, arguments) => {
                self.run_kernel(*kernel, *launch, arguments.clone());
            }
            Recorded::Multiply(product) => self.run_product(product),
            Recorded::Attend(of, operands) => {
                self.attended.set(true);
                library::attend(of, operands);
            }
            // SAFETY: the caller allocated as much.
            Recorded::Copy(to, from, bytes) => unsafe {
                std::ptr::copy(*from as *const u8, *to as *mut u8, *bytes as usize);
            },
            // SAFETY: as above.
            Recorded::Fill(to, value, bytes) => unsafe {
                std::ptr::write_bytes(*to as *mut u8, *value, *bytes as usize);
            },
        }
    }

    /// Refuses exchanges between host and device during a capture.
    fn with_host(&self, what: &'static str) -> Result<(), CudaError> {
        match *self.recording.borrow() {
            Some(_) => Err(CudaError::Captured { what }),
            None => Ok(()),
        }
    }

    fn run_kernel(&self, kernel: Kernel, launch: Launch, mut arguments: Arguments) {
        assert!(launch.threads <= 1024 && launch.threads.is_multiple_of(32));
        let built = built(kernel.source, kernel.head);
        type Run = unsafe extern "C" fn(*const u32, u32, *mut *mut c_void, u32);
        let name = format!("run_{}\0", kernel.name);
        // SAFETY: of this type, by the text that was built.
        let run =
            unsafe { built.library.get::<Run>(name.as_bytes()) }.expect("every kernel is built");
        let [x, y, z] = launch.grid;
        let sizes = [x, y, z, launch.threads, 1, 1];
        let mut pointers = arguments.pointers();
        let _one = built.running.lock().expect("kernels do not panic");
        // SAFETY: arguments are those of the kernel, as the device's callers give them.
        unsafe {
            run(
                sizes.as_ptr(),
                launch.shared,
                pointers.as_mut_ptr(),
                self.order,
            )
        };
    }

    fn run_product(&self, product: &Product) {
        if let (Element::Plain(a), Element::Plain(b)) = (product.a.element, product.b.element) {
            assert_eq!(a, b, "cuBLASLt has no such product");
        }
        let [m, n, k] = product.sizes.map(|size| size as usize);
        let mut a = self.operand(&product.a, m, k);
        let mut b = self.operand(&product.b, k, n);
        if product.compute == Compute::Tf32 && product.a.element == Element::Plain(DType::F32) {
            for x in a.iter_mut().chain(&mut b) {
                *x = tf32(*x);
            }
        }
        for i in 0..m {
            for j in 0..n {
                let mut sum: f64 = (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
                if product.accumulate {
                    sum += self.number(product.c, product.dtype, i * n + j);
                }
                let made = self.ended(product, sum, [i, j]);
                self.put(product.c, product.dtype, i * n + j, made);
            }
        }
    }

    /// The result of a product's epilogue for one element.
    fn ended(&self, product: &Product, sum: f64, [i, j]: [usize; 2]) -> f64 {
        let (dtype, at) = (product.dtype, i * product.sizes[1] as usize + j);
        if !matches!(product.epilogue, Epilogue::Nothing | Epilogue::Bias(_)) {
            // What cuBLASLt requires of such products.
            assert_eq!((dtype, product.accumulate), (DType::Bf16, false));
            assert!(product.sizes[1].is_multiple_of(8));
        }
        match product.epilogue {
            Epilogue::Nothing => sum,
            Epilogue::Bias(bias) => sum + self.number(bias, dtype, j),
            Epilogue::Gelu { bias, input } => {
                let sum = sum + bias.map_or(0.0, |bias| self.number(bias, dtype, j));
                if let Some(input) = input {
                    self.put(input, dtype, at, sum);
                }
                gelu(sum)[0]
            }
            Epilogue::GeluGradient { input } => sum * gelu(self.number(input, dtype, at))[1],
        }
    }

    fn put(&self, address: Address, dtype: DType, index: usize, x: f64) {
        // SAFETY: products name results that were allocated here.
        unsafe {
            match dtype {
                DType::Bf16 => (address as *mut bf16).add(index).write(bf16::from_f64(x)),
                _ => (address as *mut f32).add(index).write(x as f32),
            }
        }
    }

    fn number(&self, address: Address, dtype: DType, index: usize) -> f64 {
        // SAFETY: products name operands that were allocated here.
        unsafe {
            match dtype {
                DType::Bf16 => (address as *const bf16).add(index).read().to_f64(),
                _ => f64::from((address as *const f32).add(index).read()),
            }
        }
    }

    fn element(&self, address: Address, element: Element, index: usize) -> f64 {
        match element {
            Element::Plain(dtype) => self.number(address, dtype, index),
            Element::Scaled(format, factor) => {
                // SAFETY: as above.
                let code = unsafe { (address as *const u8).add(index).read() };
                decoded(format, code) * self.number(factor, DType::F32, 0)
            }
        }
    }

    fn operand(&self, x: &Operand, rows: usize, columns: usize) -> Vec<f64> {
        let at = |i: usize, j: usize| {
            let index = if x.transposed {
                j * rows + i
            } else {
                i * columns + j
            };
            self.element(x.address, x.element, index)
        };
        (0..rows * columns)
            .map(|index| at(index / columns, index % columns))
            .collect()
    }
}

/// A number in 32 bits with 10 bits of mantissa, to nearest, ties away from zero, as `cvt.rna.tf32.f32`.
pub fn tf32(x: f64) -> f64 {
    let bits = (x as f32).to_bits() + 0x1000;
    f64::from(f32::from_bits(bits & !0x1FFF))
}

/// The GELU by tanh (Hendrycks and Gimpel 2016), and its slope.
pub fn gelu(x: f64) -> [f64; 2] {
    let scale = (2.0 / std::f64::consts::PI).sqrt();
    let t = (scale * (x + 0.044_715 * x.powi(3))).tanh();
    let inner = scale * (1.0 + 3.0 * 0.044_715 * x * x);
    [
        0.5 * x * (1.0 + t),
        0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner,
    ]
}

/// The number of a code of 8 bits, by the formats' definition: sign, exponent, mantissa.
pub fn decoded(format: Float8, code: u8) -> f64 {
    let (mantissa, bias) = match format {
        Float8::E4m3 => (3, 7),
        Float8::E5m2 => (2, 15),
    };
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(code & 0x7F) >> mantissa;
    let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
    let special = match format {
        Float8::E4m3 => code & 0x7F == 0x7F,
        Float8::E5m2 => exponent == 31,
    };
    match (special, exponent) {
        (true, _) if format == Float8::E5m2 && fraction == 0.0 => sign * f64::INFINITY,
        (true, _) => f64::NAN,
        (_, 0) => sign * fraction * 2f64.powi(1 - bias),
        _ => sign * (1.0 + fraction) * 2f64.powi(exponent - bias),
    }
}

fn intact(piece: &[u8]) -> bool {
    let inside = piece.len() - 2 * GUARD;
    let edges = piece[..GUARD].iter().chain(&piece[GUARD + inside..]);
    edges.copied().all(|byte| byte == POISON)
}

impl Launcher for Emulator {
    fn allocate(&self, bytes: u64) -> Result<Address, CudaError> {
        let piece = vec![POISON; bytes as usize + 3 * GUARD];
        let start = piece.as_ptr() as usize;
        let shift = (start + GUARD).next_multiple_of(GUARD) - start;
        let address = (start + shift) as Address;
        self.pieces.borrow_mut().insert(address, piece);
        Ok(address)
    }

    fn free(&self, address: Address) -> Result<(), CudaError> {
        let piece = self.pieces.borrow_mut().remove(&address);
        let piece = piece.expect("was allocated here");
        assert!(intact(&piece), "a kernel wrote beside its memory");
        Ok(())
    }

    fn write(&self, to: Address, bytes: &[u8]) -> Result<(), CudaError> {
        self.with_host("a copy to the device")?;
        // SAFETY: the caller allocated as much.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) };
        Ok(())
    }

    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.with_host("a copy to the host")?;
        // SAFETY: the caller allocated as much.
        unsafe {
            std::ptr::copy_nonoverlapping(from as *const u8, bytes.as_mut_ptr(), bytes.len());
        }
        Ok(())
    }

    fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), CudaError> {
        self.queue(Recorded::Copy(to, from, bytes));
        Ok(())
    }

    fn fill(&self, to: Address, value: u8, bytes: u64) -> Result<(), CudaError> {
        self.queue(Recorded::Fill(to, value, bytes));
        Ok(())
    }

    fn launch(
        &self,
        kernel: Kernel,
        launch: Launch,
        arguments: Arguments,
    ) -> Result<(), CudaError> {
        self.queue(Recorded::Launch(kernel, launch, arguments));
        Ok(())
    }

    fn takes(&self, product: &Product) -> Result<bool, CudaError> {
        let plain = matches!(product.epilogue, Epilogue::Nothing | Epilogue::Bias(_));
        Ok(plain || !self.refuses_gelus)
    }

    fn multiply(&self, product: &Product) -> Result<(), CudaError> {
        assert!(self.takes(product)?, "there is no algorithm for it");
        self.queue(Recorded::Multiply(*product));
        Ok(())
    }

    fn attention_workspaces(&self, of: &CausalAttention) -> Result<Option<[u64; 2]>, CudaError> {
        let backward = of.backward_workspace();
        Ok(self.has_attention.then_some([256, backward]))
    }

    fn attend(&self, of: &CausalAttention, operands: &AttentionOperands) -> Result<(), CudaError> {
        self.queue(Recorded::Attend(*of, *operands));
        Ok(())
    }

    fn attention_library(&self) -> Option<Result<String, String>> {
        self.attended
            .get()
            .then(|| Ok("an emulated library".to_owned()))
    }

    fn begin_capture(&self) -> Result<(), CudaError> {
        let before = self.recording.replace(Some(Vec::new()));
        assert!(before.is_none(), "a capture in a capture");
        Ok(())
    }

    fn end_capture(&self) -> Result<GraphId, CudaError> {
        let recorded = self.recording.take().expect("a capture was begun");
        let mut graphs = self.graphs.borrow_mut();
        graphs.push(Some(Rc::new(recorded)));
        Ok(GraphId(graphs.len() - 1))
    }

    fn replay(&self, GraphId(at): GraphId) -> Result<(), CudaError> {
        let recorded = self.graphs.borrow()[at].clone();
        for work in &*recorded.expect("what was forgotten is not run again") {
            self.run(work);
        }
        Ok(())
    }

    fn forget(&self, GraphId(at): GraphId) {
        self.graphs.borrow_mut()[at] = None;
    }

    fn mark(&self) -> Result<(), CudaError> {
        self.with_host("a measured time")?;
        self.marks.borrow_mut().push(Instant::now());
        Ok(())
    }

    fn laps(&self) -> Result<Vec<f64>, CudaError> {
        let marks = std::mem::take(&mut *self.marks.borrow_mut());
        let lap = |pair: &[Instant]| (pair[1] - pair[0]).as_secs_f64();
        Ok(marks.windows(2).map(lap).collect())
    }

    fn synchronize(&self) -> Result<(), CudaError> {
        self.with_host("waiting for the device")?;
        let pieces = self.pieces.borrow();
        assert!(
            pieces.values().all(|p| intact(p)),
            "a kernel wrote beside its memory"
        );
        Ok(())
    }

    fn multiprocessors(&self) -> u32 {
        3
    }

    fn fuses_gelu(&self) -> bool {
        true
    }
}
