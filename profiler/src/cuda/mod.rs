//! Measures a GPU: GEMMs, attention and memory-bound operators over grids of shapes, operators of traced blocks as a
//! rank runs them, the optimizer, copies, and the cost of queueing a kernel.
//!
//! Times are taken between events in the stream, so nothing waits during a measurement. Results of grids are compared
//! with the host's at sampled elements, after memory was filled with NaNs.

mod attention;
mod blocks;
mod copies;
mod exchange;
mod operands;
mod operators;
mod products;
mod session;
mod states;
mod timing;

use std::rc::Rc;
use std::time::Duration;

use catalog::profile::{self, Kernel, Measured};
use cuda_device::launcher::AttentionBy;
use cuda_device::{Condition, CudaError, Device, Gpu};

pub use attention::Causal;
pub use blocks::blocks;
pub use exchange::{
    COLLECTIVES, Collective, Exchange, Fleet, GpuRank, MOST_RANKS, Peers, Rank, follow,
    group_sizes, with_fleet,
};
pub use operators::{OPERATORS, Operator, OperatorKind};
pub use products::{ELEMENTS, Element, Linear, Way};
pub use session::{Asked, Meter, complete};
pub use timing::Budget;

use crate::ProfilerError;
use crate::blocks::BlockRequest;
use crate::lanes::Effort;

/// Time for which each product of [`BUSY`] keeps the device busy before measurements.
const WARM_UP: Duration = Duration::from_millis(500);
/// GEMM that keeps all SMs of a GPU busy.
const BUSY: Linear = Linear {
    rows: 4096,
    inputs: 4096,
    outputs: 4096,
    element: ELEMENTS[0],
};

/// A GPU to measure, with its description.
pub struct Target {
    /// The device.
    pub device: Device,
    /// Description of the machine for the profile.
    pub machine: profile::Machine,
    ordinal: u32,
    /// SM clocks seen at the end of measurements, in MHz.
    clocks: Vec<u32>,
}

impl Target {
    /// Opens the GPU of this ordinal, with core attention run as `attention` says.
    ///
    /// # Errors
    /// When there is none or a library is missing.
    pub fn new(ordinal: u32, attention: AttentionBy) -> Result<Self, ProfilerError> {
        let facts = cuda_device::ready()?;
        let facts = facts.get(ordinal as usize).ok_or(CudaError::NoDevice)?;
        let mut gpu = profile::Gpu {
            count: 1,
            multiprocessors: facts.multiprocessors,
            ..profile::Gpu::default()
        };
        // NVML is optional: what it cannot report stays unknown.
        if let Ok(condition) = cuda_device::condition(ordinal) {
            describe(&mut gpu, &condition);
        }
        Ok(Self {
            device: Device::new(Rc::new(Gpu::new(ordinal)?)).with_attention(attention),
            machine: profile::Machine {
                processor: facts.name.clone(),
                cores: 1,
                memory_bytes: facts.memory_bytes,
                gpu: Some(gpu),
            },
            ordinal,
            clocks: Vec::new(),
        })
    }

    /// Why core attention ran on the project's own kernels although a library was asked for.
    #[must_use]
    pub fn without_library(&self) -> Option<String> {
        self.device.launcher.attention_library()?.err()
    }

    /// Keeps the device busy, so that its clocks settle as in a long run.
    ///
    /// # Errors
    /// When memory or the device fails, or a product is wrong.
    pub fn warm_up(&mut self) -> Result<(), ProfilerError> {
        let effort = Effort {
            time: WARM_UP,
            least: 1,
            // No GEMM takes less than a microsecond.
            most: WARM_UP.as_micros() as usize,
        };
        Meter::measure(self, &Request::Product(BUSY), effort).map(drop)
    }
}

impl Meter for Target {
    type Asked = Request;

    /// Runs a request, and records the clock at its end.
    fn measure(
        &mut self,
        request: &Request,
        effort: Effort,
    ) -> Result<Vec<Measured>, ProfilerError> {
        let measured = request.measure(&self.device, effort)?;
        if let Ok(condition) = cuda_device::condition(self.ordinal) {
            self.clocks.push(condition.clock_mhz[0]);
        }
        Ok(measured)
    }

    fn machine(&self) -> profile::Machine {
        let clock_mhz = lowest_and_median(&self.clocks);
        let gpu = self.machine.gpu.clone();
        let attention = self
            .device
            .launcher
            .attention_library()
            .and_then(Result::ok);
        profile::Machine {
            gpu: gpu.map(|gpu| profile::Gpu {
                clock_mhz,
                attention,
                ..gpu
            }),
            ..self.machine.clone()
        }
    }
}

fn describe(gpu: &mut profile::Gpu, condition: &Condition) {
    gpu.driver = Some(condition.driver.clone());
    gpu.most_clock_mhz = Some(condition.clock_mhz[1]);
    gpu.memory_clock_mhz = Some(condition.memory_clock_mhz);
    gpu.power_limit_watts = Some(condition.power_watts[1]);
}

fn lowest_and_median(clocks: &[u32]) -> Option<[u32; 2]> {
    let mut sorted = clocks.to_vec();
    sorted.sort_unstable();
    let lowest = sorted.first()?;
    Some([*lowest, sorted[sorted.len() / 2]])
}

/// Something to measure on one GPU.
#[derive(Clone, Debug)]
pub enum Request {
    /// GEMMs of a linear layer.
    Product(Linear),
    /// Core attention.
    Attention(Causal),
    /// A memory-bound operator.
    Operator(Operator),
    /// Copies of this many bytes between host and device.
    Copies(u64),
    /// Optimizer, gradient norm and copies over this many elements.
    States(u64),
    /// How long the host takes to queue a kernel, and the device to start it.
    Launches,
    /// The operators of a block.
    Block(Box<BlockRequest>),
}

impl Asked for Request {
    fn kernels(&self) -> Vec<Kernel> {
        match self {
            Self::Product(linear) => linear.kernels().into(),
            Self::Attention(attention) => attention.kernels().concat(),
            Self::Operator(operator) => operator.kernels().concat(),
            Self::Copies(bytes) => copies::kernels(*bytes).into(),
            Self::States(elements) => states::kernels(*elements).into(),
            Self::Launches => states::launch_kernels().into(),
            Self::Block(block) => blocks::kernels(block),
        }
    }

    fn parts(&self) -> usize {
        match self {
            Self::Product(_) => 3,
            Self::Attention(_) => 2,
            Self::Operator(operator) => operator.kernels().iter().filter(|k| !k.is_empty()).count(),
            Self::Copies(_) | Self::States(_) | Self::Launches | Self::Block(_) => 1,
        }
    }

    fn described(&self) -> String {
        match self {
            Self::Block(block) => {
                format!("a block of {} tokens", block.micro_batch * block.seq_len)
            }
            other => {
                let first = other.kernels().into_iter().next();
                first.map_or_else(String::new, |k| format!("{} {:?}", k.name, k.sizes))
            }
        }
    }
}

impl Request {
    /// Runs the measurement.
    ///
    /// # Errors
    /// When memory or the device fails, or a result is wrong.
    pub fn measure(&self, device: &Device, effort: Effort) -> Result<Vec<Measured>, ProfilerError> {
        match self {
            Self::Product(linear) => linear.measure(device, effort),
            Self::Attention(attention) => attention.measure(device, effort),
            Self::Operator(operator) => operator.measure(device, effort),
            Self::Copies(bytes) => copies::measure(device, *bytes, effort),
            Self::States(elements) => states::measure(device, *elements, effort),
            Self::Launches => states::launches(device, effort),
            Self::Block(block) => blocks(device, block, effort),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_throttled_clock_shows() {
        for (clocks, want) in [
            (&[][..], None),
            (&[1980], Some([1980, 1980])),
            (&[1980, 1200, 1830], Some([1200, 1830])),
        ] {
            assert_eq!(lowest_and_median(clocks), want, "{clocks:?}");
        }
    }
}
