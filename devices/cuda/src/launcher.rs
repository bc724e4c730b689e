//! What the cuda device needs of the machine below it: memory, copies, kernels, GEMMs. [`super::Gpu`] implements it;
//! the tests have an emulator that runs the same kernels on the host.

#![allow(
    unsafe_code,
    reason = "arguments of kernels are plain bytes in the layout of C"
)]

use bytemuck::Pod;
use catalog::DType;

use super::error::CudaError;
use super::kernels::Kernel;
use dtensor::CausalAttention;
use dtensor::philox::Stream;

/// An address in device memory.
pub type Address = u64;

/// What lies in device memory, as a kernel's argument.
pub trait Located {
    /// Address of the argument in device memory; 0 if there is nothing.
    fn located(&self) -> Address;
}

impl Located for Address {
    fn located(&self) -> Address {
        *self
    }
}

impl<T: Located> Located for Option<T> {
    fn located(&self) -> Address {
        self.as_ref().map_or(0, T::located)
    }
}

impl<T: Located> Located for &T {
    fn located(&self) -> Address {
        T::located(self)
    }
}

/// Arguments of a kernel, each aligned to eight bytes.
#[derive(Clone, Debug, Default)]
pub struct Arguments {
    words: Vec<u64>,
    starts: Vec<usize>,
}

impl Arguments {
    /// Addresses, which most kernels take first.
    #[must_use]
    pub fn of(places: &[&dyn Located]) -> Self {
        let places = places.iter().map(|place| place.located());
        places.fold(Self::default(), Self::with)
    }

    /// Appends sizes, which kernels take as 64-bit integers.
    #[must_use]
    pub fn sizes<const N: usize>(self, sizes: [usize; N]) -> Self {
        sizes
            .into_iter()
            .fold(self, |all, size| all.with(size as i64))
    }

    /// Appends an argument.
    #[must_use]
    pub fn with<T: Pod>(mut self, value: T) -> Self {
        let bytes = bytemuck::bytes_of(&value);
        self.starts.push(self.words.len());
        self.words.extend(bytes.chunks(8).map(|part| {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            u64::from_ne_bytes(word)
        }));
        self
    }

    /// Pointers to the arguments, as a kernel launch takes them.
    pub fn pointers(&mut self) -> Vec<*mut std::ffi::c_void> {
        let base = self.words.as_mut_ptr();
        self.starts
            .iter()
            // SAFETY: starts lie within the words.
            .map(|&start| unsafe { base.add(start) }.cast())
            .collect()
    }
}

/// Launch dimensions of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks of the grid.
    pub grid: [u32; 3],
    /// Threads per block.
    pub threads: u32,
    /// Bytes of shared memory beyond what the kernel itself declares.
    pub shared: u32,
}

/// How a GEMM of 32-bit operands rounds them before it multiplies. It accumulates in 32 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Compute {
    /// Not at all.
    #[default]
    Whole,
    /// To TF32, with 10 bits of mantissa, for tensor cores.
    Tf32,
}

/// An FP8 format (Micikevicius et al. 2022).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float8 {
    /// 4 bits of exponent, 3 of mantissa, no infinity: for weights and activations.
    E4m3,
    /// 5 bits of exponent, 2 of mantissa: for gradients.
    E5m2,
}

/// Element type of a GEMM operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 32 bits or bf16.
    Plain(DType),
    /// FP8, to be multiplied by the 32-bit scale at this address.
    Scaled(Float8, Address),
}

/// A GEMM operand in row-major order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Address of the first element.
    pub address: Address,
    /// Element type.
    pub element: Element,
    /// Whether memory holds the transpose of the matrix that the product needs.
    pub transposed: bool,
}

/// What a GEMM does with its 32-bit result before it writes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Epilogue {
    /// Nothing.
    #[default]
    Nothing,
    /// Adds a bias vector over columns, of the result's type, at this address.
    Bias(Address),
    /// Adds a bias, if there is one, and applies the GELU (tanh approximation) to the sum.
    Gelu {
        /// Bias vector over columns, of the result's type.
        bias: Option<Address>,
        /// Where to also write the GELU's input, in the result's layout, if it is needed later.
        input: Option<Address>,
    },
    /// Multiplies by the derivative of the GELU (tanh approximation).
    GeluGradient {
        /// The GELU's input, in the result's layout.
        input: Address,
    },
}

/// A GEMM: `c = a · b`, or `c += a · b`, with `c: [m, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// `[m, n, k]`: rows, columns, contracted length.
    pub sizes: [u64; 3],
    /// Left operand `[m, k]`.
    pub a: Operand,
    /// Right operand `[k, n]`.
    pub b: Operand,
    /// Address of the result.
    pub c: Address,
    /// Element type of the result.
    pub dtype: DType,
    /// How 32-bit operands are rounded.
    pub compute: Compute,
    /// Whether to add to what the result holds already.
    pub accumulate: bool,
    /// What is done with the result before it is written.
    pub epilogue: Epilogue,
}

/// What runs core attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionBy {
    /// cuDNN, where it is installed and supports the sizes; else the project's own kernels.
    #[default]
    Library,
    /// The project's own kernels, which sum in a fixed order.
    Own,
}

/// Operands of core attention run by a library.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOperands {
    /// Queries, keys, values, output, and the log-sum-exps of the scores: 32 bits, `[batch, heads, length]`.
    pub tensors: [Address; 5],
    /// In backward, the gradients of output, queries, keys and values.
    pub gradients: Option<[Address; 4]>,
    /// Factor that scores are multiplied by.
    pub scale: f32,
    /// Workspace, as large as [`Launcher::attention_workspaces`] says for the pass.
    pub workspace: Address,
}

/// A device's memory and one in-order stream of work.
pub trait Launcher {
    /// Allocates memory, aligned to 256 bytes.
    ///
    /// # Errors
    /// When not enough is free.
    fn allocate(&self, bytes: u64) -> Result<Address, CudaError>;
    /// Frees memory once all work queued so far is done.
    ///
    /// # Errors
    /// When the device fails.
    fn free(&self, address: Address) -> Result<(), CudaError>;
    /// Copies bytes from the host to the device. The caller may overwrite them once this returns.
    ///
    /// # Errors
    /// When the device fails.
    fn write(&self, to: Address, bytes: &[u8]) -> Result<(), CudaError>;
    /// Copies bytes from the device to the host, after all work queued so far.
    ///
    /// # Errors
    /// When the device failed, or earlier work did.
    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError>;
    /// Copies within the device.
    ///
    /// # Errors
    /// When the device fails.
    fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), CudaError>;
    /// Sets bytes to a value.
    ///
    /// # Errors
    /// When the device fails.
    fn fill(&self, to: Address, value: u8, bytes: u64) -> Result<(), CudaError>;
    /// Runs a kernel.
    ///
    /// # Errors
    /// When it does not compile or cannot start.
    fn launch(&self, kernel: Kernel, launch: Launch, arguments: Arguments)
    -> Result<(), CudaError>;
    /// Whether the library has an algorithm for a GEMM; the answer for a shape is cached.
    ///
    /// # Errors
    /// When the search for an algorithm fails.
    fn takes(&self, product: &Product) -> Result<bool, CudaError>;
    /// Queues a GEMM.
    ///
    /// # Errors
    /// When there is no algorithm for it.
    fn multiply(&self, product: &Product) -> Result<(), CudaError>;
    /// Bytes of workspace that a library's attention needs in forward and backward; `None` where no library supports
    /// it.
    ///
    /// # Errors
    /// When the device fails.
    fn attention_workspaces(&self, of: &CausalAttention) -> Result<Option<[u64; 2]>, CudaError>;
    /// Runs core attention by a library, for sizes whose workspace was asked for before.
    ///
    /// # Errors
    /// When it cannot start.
    fn attend(&self, of: &CausalAttention, operands: &AttentionOperands) -> Result<(), CudaError>;
    /// Name and version of the library that ran core attention, or why none did; `None` where none was asked for.
    fn attention_library(&self) -> Option<Result<String, String>>;
    /// Records an event at the end of all work queued so far.
    ///
    /// # Errors
    /// When the device fails.
    fn mark(&self) -> Result<(), CudaError>;
    /// Seconds between consecutive marks since the last call; the marks are then discarded.
    ///
    /// # Errors
    /// When work before a mark failed.
    fn laps(&self) -> Result<Vec<f64>, CudaError>;
    /// Waits for all work queued so far.
    ///
    /// # Errors
    /// When any of it failed.
    fn synchronize(&self) -> Result<(), CudaError>;
    /// Begins capture: work is recorded with its addresses and arguments, not run. The host must
    /// neither write nor read device memory until [`Launcher::end_capture`].
    ///
    /// # Errors
    /// When the device fails.
    fn begin_capture(&self) -> Result<(), CudaError>;
    /// Ends capture, also after a failure; returns the captured work. Work queued later runs again.
    ///
    /// # Errors
    /// When what was asked for cannot be recorded.
    fn end_capture(&self) -> Result<GraphId, CudaError>;
    /// Queues recorded work with one call.
    ///
    /// # Errors
    /// When the device fails.
    fn replay(&self, graph: GraphId) -> Result<(), CudaError>;
    /// Destroys recorded work.
    fn forget(&self, graph: GraphId);
    /// Number of SMs.
    fn multiprocessors(&self) -> u32;
    /// Whether a GEMM with a fused GELU is faster than a GEMM and a separate kernel.
    fn fuses_gelu(&self) -> bool;
}

/// Identifies work that a launcher recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphId(pub usize);

/// Seed of a random stream as kernels take it: `struct Stream` of `prelude.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StreamArgument {
    key: [u32; 2],
    step: Address,
    operator: u32,
    padding: u32,
}

impl StreamArgument {
    /// The random stream of an operator; every run reads the number of the step at address `step`.
    #[must_use]
    pub fn new(stream: Stream, step: Address) -> Self {
        let (key, [_, operator]) = stream.words();
        Self {
            key,
            step,
            operator,
            padding: 0,
        }
    }
}

/// Position of a local tensor in the global one, for dropout: `struct Place` of `elementwise.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Random stream of the mask.
    pub stream: StreamArgument,
    /// An element is dropped where its 24-bit random number is below this.
    pub threshold: u32,
    /// Factor of the elements that are kept.
    pub scale: f32,
    /// Index of the first sequence in the global batch.
    pub first_sequence: i64,
    /// Tokens per sequence on this rank, and over all ranks.
    pub sequence: [i64; 2],
    /// Columns on this rank, index of the first of them, and columns over all ranks.
    pub columns: [i64; 3],
}

/// Rotary embedding: `struct Turning` of `elementwise.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TurningArgument {
    /// Tokens per sequence on this rank.
    pub sequence: i64,
    /// Heads per row.
    pub heads: i64,
    /// Dimensions of a head, the first that is rotated, and how many are.
    pub dims: [i64; 3],
    /// 1 where adjacent dimensions are rotated as pairs, 0 where dimension `i` pairs with `i + dims/2`.
    pub neighbours: i32,
    /// 1 to rotate forward, −1 to undo it in backward.
    pub direction: f32,
}

/// A router's rule: `struct Router` of `expert.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RouterArgument {
    /// Number of experts, and how many are chosen per token.
    pub experts: [i32; 2],
    /// Whether scores are sigmoids, and whether the scores of the chosen experts are normalised.
    pub rule: [i32; 2],
    /// Number of expert groups, and how many of them experts are chosen from.
    pub groups: [i32; 2],
    /// Factor of the chosen experts' weights.
    pub scale: f32,
}

/// A run of numbers whose norm is taken: `struct Numbers` of `reduce.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NumbersArgument {
    /// Address of the first number, in 32 bits.
    pub address: Address,
    /// Number of elements.
    pub count: i64,
    /// Index of the run's first chunk among the chunks of the launch.
    pub first: i64,
    /// Whether their squares add to the norm; otherwise they are only checked to be finite.
    pub counts: i64,
}

/// A run of weights of the optimizer: `struct Weights` of `reduce.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WeightsArgument {
    /// Addresses of master weights, first moments, second moments and gradients, in 32 bits.
    pub states: [Address; 4],
    /// Address of the copy that other kernels read; 0 for none.
    pub weights: Address,
    /// Number of elements.
    pub count: i64,
    /// Index of the run's first chunk among the chunks of the launch.
    pub first: i64,
    /// Whether that copy is bf16.
    pub is_bf16: i32,
    /// Whether weight decay applies.
    pub decays: i32,
}

/// Sizes, mask and dropout of core attention: `struct Attention` of `attention_prelude.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgument {
    /// Queries and keys per sequence on this rank.
    pub lengths: [i64; 2],
    /// Heads of queries and of keys on this rank.
    pub heads: [i64; 2],
    /// Dimensions of a query or key head, and of a value head.
    pub dims: [i64; 2],
    /// Sliding window: the most keys that a query attends to.
    pub window: i64,
    /// Factor that scores are multiplied by.
    pub scale: f32,
    /// Dropout: a weight is dropped where its 24-bit random number is below this.
    pub threshold: u32,
    /// Factor of the weights that are kept.
    pub keep: f32,
    /// Soft cap of the scaled scores; 0 for none.
    pub cap: f32,
    /// Random stream of the dropout mask.
    pub stream: StreamArgument,
    /// Index of the first sequence in the global batch.
    pub first_sequence: i64,
    /// Global index of the first head on this rank.
    pub first_head: i64,
    /// Heads over all ranks.
    pub global_heads: i64,
    /// Queries per sequence over all ranks.
    pub global_queries: i64,
    /// Address of the ALiBi slopes by head, in 32 bits; 0 for none.
    pub slopes: Address,
    /// Address of the sink logits by head, of the queries' type; 0 for none.
    pub sinks: Address,
}

macro_rules! plain {
    ($($name:ident)*) => {$(
        // SAFETY: the structure has no padding, and every bit pattern is a valid value.
        unsafe impl bytemuck::Zeroable for $name {}
        // SAFETY: as above.
        unsafe impl Pod for $name {}
    )*};
}
plain!(StreamArgument Place TurningArgument RouterArgument NumbersArgument WeightsArgument AttentionArgument);

/// Dropout probability as a threshold for 24-bit random numbers: a uniform number of 24 bits is below the probability
/// exactly when its integer is below the threshold.
#[must_use]
pub fn threshold(probability: f64) -> u32 {
    (probability * f64::from(1 << 24)).ceil() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_lie_as_c_lays_them_out() {
        assert_eq!(size_of::<Place>(), 24 + 8 + 48);
        assert_eq!(size_of::<TurningArgument>(), 40 + 8);
        assert_eq!(size_of::<RouterArgument>(), 24 + 4);
        assert_eq!(size_of::<NumbersArgument>(), 32);
        assert_eq!(size_of::<WeightsArgument>(), 64);
        assert_eq!(size_of::<AttentionArgument>(), 56 + 12 + 4 + 24 + 32 + 16);
        let mut arguments = Arguments::default().with(7i32).with(2.5f64).with(1u64);
        let base = arguments.words.as_ptr() as usize;
        let at: Vec<usize> = arguments.pointers().iter().map(|&p| p as usize).collect();
        assert_eq!(at, [base, base + 8, base + 16]);
        assert_eq!(arguments.words, [7, 2.5f64.to_bits(), 1]);
    }

    #[test]
    fn thresholds_drop_what_the_cpu_drops() {
        for probability in [0.0, 0.1, 0.25, 0.3, 1.0 / 3.0, 0.999] {
            let threshold = threshold(probability);
            for word in (0..1u32 << 24)
                .step_by(997)
                .chain(threshold.saturating_sub(2)..threshold + 2)
            {
                let uniform = f64::from(word as f32 / 16_777_216.0);
                assert_eq!(
                    word >= threshold,
                    uniform >= probability,
                    "{probability} {word}"
                );
            }
        }
    }
}
