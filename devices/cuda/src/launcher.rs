//! What the cuda device asks of the machine below it: memory, copies, kernels, matrix products. A GPU
//! is one answer ([`super::Gpu`]); the tests have another that runs the same kernels on the host.

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

/// An address in the device's memory.
pub type Address = u64;

/// Arguments of a kernel, each at a multiple of eight bytes.
#[derive(Clone, Debug, Default)]
pub struct Arguments {
    words: Vec<u64>,
    starts: Vec<usize>,
}

impl Arguments {
    /// Adds one.
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

    /// Where each begins, as launches want it.
    pub fn pointers(&mut self) -> Vec<*mut std::ffi::c_void> {
        let base = self.words.as_mut_ptr();
        self.starts
            .iter()
            // SAFETY: starts lie within the words.
            .map(|&start| unsafe { base.add(start) }.cast())
            .collect()
    }
}

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of shared memory beyond what the kernel itself declares.
    pub shared: u32,
}

/// What a product of numbers in 32 bits rounds on its way. Sums are in 32 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Compute {
    /// Nothing.
    #[default]
    Whole,
    /// Operands to TF32, with 10 bits of mantissa: what tensor cores take of them.
    Tf32,
}

/// A format of 8 bits (Micikevicius et al. 2022).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float8 {
    /// 4 bits of exponent, 3 of mantissa, no infinity: weights and activations.
    E4m3,
    /// 5 bits of exponent, 2 of mantissa: gradients.
    E5m2,
}

/// Elements of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// As they are, in 32 bits or bf16.
    Plain(DType),
    /// Codes of 8 bits to be multiplied by the number in 32 bits that lies at an address.
    Scaled(Float8, Address),
}

/// A matrix operand, by rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// First element.
    pub address: Address,
    /// Its elements.
    pub element: Element,
    /// Whether it lies transposed: by columns of what the product needs.
    pub transposed: bool,
}

/// What a product does with what it makes, in 32 bits, before it writes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Epilogue {
    /// Nothing.
    #[default]
    Nothing,
    /// Adds a number by column, of the result's type.
    Bias(Address),
    /// Adds a bias, if there is one, and takes the GELU by tanh of the sum.
    Gelu {
        /// By column, of the result's type.
        bias: Option<Address>,
        /// Where the sum is to stay, if it is: as the result lies.
        input: Option<Address>,
    },
    /// Multiplies by the slope of the GELU by tanh.
    GeluGradient {
        /// What the GELU was taken of: as the result lies.
        input: Address,
    },
}

/// `c = a · b`, or `c += a · b`, with `c: [m, n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Rows, columns, contracted length.
    pub sizes: [u64; 3],
    /// `[m, k]`.
    pub a: Operand,
    /// `[k, n]`.
    pub b: Operand,
    /// Result.
    pub c: Address,
    /// Its type.
    pub dtype: DType,
    /// How operands in 32 bits are multiplied.
    pub compute: Compute,
    /// Whether to add to what is there.
    pub accumulate: bool,
    /// What else it does.
    pub epilogue: Epilogue,
}

/// Who runs core attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionBy {
    /// A library, where it is there and takes the sizes; else the project's own kernels.
    #[default]
    Library,
    /// The project's own kernels, whose sums have one order.
    Own,
}

/// Operands of a library's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOperands {
    /// Queries, keys, values, output, and in 32 bits `[batch, heads, length]` the log-sum-exps of the scores.
    pub tensors: [Address; 5],
    /// In backward, gradients of output, queries, keys and values.
    pub gradients: Option<[Address; 4]>,
    /// Factor of the scores.
    pub scale: f32,
    /// As many bytes as the pass asks for.
    pub workspace: Address,
}

/// A device's memory and one queue of work in order.
pub trait Launcher {
    /// Memory at a multiple of 256 bytes.
    ///
    /// # Errors
    /// When there is not enough.
    fn allocate(&self, bytes: u64) -> Result<Address, CudaError>;
    /// Gives memory back once all work so far is done with it.
    ///
    /// # Errors
    /// When the device fails.
    fn free(&self, address: Address) -> Result<(), CudaError>;
    /// Bytes of the host to the device. They may change when this returns.
    ///
    /// # Errors
    /// When the device fails.
    fn write(&self, to: Address, bytes: &[u8]) -> Result<(), CudaError>;
    /// Bytes of the device, after all work so far.
    ///
    /// # Errors
    /// When the device, or work before, failed.
    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<(), CudaError>;
    /// Copies within the device.
    ///
    /// # Errors
    /// When the device fails.
    fn copy(&self, to: Address, from: Address, bytes: u64) -> Result<(), CudaError>;
    /// Fills bytes.
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
    /// Whether there is an algorithm for a matrix product; a shape is asked about once.
    ///
    /// # Errors
    /// When it cannot be found out.
    fn takes(&self, product: &Product) -> Result<bool, CudaError>;
    /// A matrix product.
    ///
    /// # Errors
    /// When there is no algorithm for it.
    fn multiply(&self, product: &Product) -> Result<(), CudaError>;
    /// Bytes of workspace of a library's attention, forward and backward; none where no library has it.
    ///
    /// # Errors
    /// When the device fails.
    fn attention_workspaces(&self, of: &CausalAttention) -> Result<Option<[u64; 2]>, CudaError>;
    /// Runs a library's attention, which has said what workspace it wants.
    ///
    /// # Errors
    /// When it cannot start.
    fn attend(&self, of: &CausalAttention, operands: &AttentionOperands) -> Result<(), CudaError>;
    /// The library that has run core attention, with its release, or why none did; nothing where none was asked.
    fn attention_library(&self) -> Option<Result<String, String>>;
    /// Marks the end of all work so far.
    ///
    /// # Errors
    /// When the device fails.
    fn mark(&self) -> Result<(), CudaError>;
    /// Seconds between the marks so far, which are forgotten.
    ///
    /// # Errors
    /// When work before a mark failed.
    fn laps(&self) -> Result<Vec<f64>, CudaError>;
    /// Waits for all work so far.
    ///
    /// # Errors
    /// When any of it failed.
    fn synchronize(&self) -> Result<(), CudaError>;
    /// From here on records work instead of running it. Addresses and arguments stay as they are recorded;
    /// the host neither writes nor reads until [`Launcher::end_capture`].
    ///
    /// # Errors
    /// When the device fails.
    fn begin_capture(&self) -> Result<(), CudaError>;
    /// Runs work again from here on; returns what was recorded. Also where recording failed.
    ///
    /// # Errors
    /// When what was asked for cannot be recorded.
    fn end_capture(&self) -> Result<GraphId, CudaError>;
    /// Runs what was recorded, all of it by one call.
    ///
    /// # Errors
    /// When the device fails.
    fn replay(&self, graph: GraphId) -> Result<(), CudaError>;
    /// Frees what was recorded.
    fn forget(&self, graph: GraphId);
    /// Multiprocessors of the device: how many blocks run side by side.
    fn multiprocessors(&self) -> u32;
    /// Whether its products take a GELU in less time than a kernel after them.
    fn fuses_gelu(&self) -> bool;
}

/// Work that a launcher recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphId(pub usize);

/// A random stream as kernels take it: `struct Stream` of `prelude.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StreamArgument {
    key: [u32; 2],
    step: Address,
    operator: u32,
    padding: u32,
}

impl StreamArgument {
    /// The stream of an operator, in the step that the word at `step` says when a kernel runs.
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

/// `struct Place` of `elementwise.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Random numbers.
    pub stream: StreamArgument,
    /// 24-bit numbers below it are dropped.
    pub threshold: u32,
    /// Of what is kept.
    pub scale: f32,
    /// Of the global batch.
    pub first_sequence: i64,
    /// Tokens per sequence here and over all ranks.
    pub sequence: [i64; 2],
    /// Columns here, the first of them, and over all ranks.
    pub columns: [i64; 3],
}

/// `struct Turning` of `elementwise.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TurningArgument {
    /// Tokens of a sequence here.
    pub sequence: i64,
    /// Heads of a row.
    pub heads: i64,
    /// Dimensions of a head, the first that turns, and how many turn.
    pub dims: [i64; 3],
    /// 1 where neighbours turn together, 0 where dimensions half of those that turn apart do.
    pub neighbours: i32,
    /// −1 to turn back, else 1.
    pub direction: f32,
}

/// `struct Router` of `expert.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RouterArgument {
    /// All experts, and how many are chosen.
    pub experts: [i32; 2],
    /// Whether scores are sigmoids, and whether those of the chosen are normalised.
    pub rule: [i32; 2],
    /// Groups of experts, and how many of them are chosen from.
    pub groups: [i32; 2],
    /// Of the weights.
    pub scale: f32,
}

/// `struct Step` of `reduce.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StepArgument {
    /// Learning rate.
    pub rate: f32,
    /// Decay of the moments.
    pub betas: [f32; 2],
    /// `1 − βᵗ` of both.
    pub corrections: [f32; 2],
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Factor of the weights that decay.
    pub keep: f32,
}

/// `struct Numbers` of `reduce.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NumbersArgument {
    /// First number, in 32 bits.
    pub address: Address,
    /// How many.
    pub count: i64,
    /// The first of the kernel launch's chunks that reads these numbers.
    pub first: i64,
    /// Whether their squares count; else they must only be finite.
    pub counts: i64,
}

/// `struct Weights` of `reduce.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WeightsArgument {
    /// Weights, momentum, variance and gradient, in 32 bits.
    pub states: [Address; 4],
    /// Weights as other kernels read them; none: 0.
    pub weights: Address,
    /// How many.
    pub count: i64,
    /// The first of the kernel launch's chunks that reads these numbers.
    pub first: i64,
    /// Whether other kernels read them in bf16.
    pub is_bf16: i32,
    /// Whether they decay.
    pub decays: i32,
}

/// `struct Attention` of `attention_prelude.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgument {
    /// Queries and keys per sequence.
    pub lengths: [i64; 2],
    /// Heads of queries and of keys.
    pub heads: [i64; 2],
    /// Dimensions of a head of queries and keys, and of values.
    pub dims: [i64; 2],
    /// Keys seen at most.
    pub window: i64,
    /// Of the scores.
    pub scale: f32,
    /// Dropout: 24-bit numbers below it are dropped.
    pub threshold: u32,
    /// Of what is kept.
    pub keep: f32,
    /// Bound of the scaled scores; 0 for none.
    pub cap: f32,
    /// Random numbers.
    pub stream: StreamArgument,
    /// Of the global batch.
    pub first_sequence: i64,
    /// Of all heads.
    pub first_head: i64,
    /// Heads over all ranks.
    pub global_heads: i64,
    /// Queries per sequence over all ranks.
    pub global_queries: i64,
    /// What a score loses per token of distance, by head, in 32 bits; 0 for none.
    pub slopes: Address,
    /// A score of every head beside the others, of the queries' type; 0 for none.
    pub sinks: Address,
}

macro_rules! plain {
    ($($name:ident)*) => {$(
        // SAFETY: the fields leave no byte of the structure without meaning, and any bytes are a value.
        unsafe impl bytemuck::Zeroable for $name {}
        // SAFETY: as above.
        unsafe impl Pod for $name {}
    )*};
}
plain!(StreamArgument Place TurningArgument RouterArgument StepArgument NumbersArgument WeightsArgument AttentionArgument);

/// A probability as a threshold of 24-bit numbers: a uniform of that many bits is below the
/// probability exactly when the number is below the threshold.
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
        assert_eq!(size_of::<StepArgument>(), 28);
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
