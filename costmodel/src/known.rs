//! Every number in the prices that is in no preset: its value, unit, source and reason.
//!
//! A prediction's provenance lists all those that can enter it. A test finds numbers written straight into formulas.

use catalog::{Architecture, Fabric, FlopRate, Origin, Seconds};
use plans::UsedConstant;

/// Mean time between failures of one GPU in a long training: 54 days of 16,384 H100 with 419
/// unexpected interruptions (Llama Team, The Llama 3 Herd of Models, arXiv:2407.21783, section
/// 3.3.4). No prediction of a step uses it, so it has no row in the provenance. Answers that use it
/// cite it.
pub(crate) const PUBLISHED_MTBF: Seconds = Seconds(54.0 * 86_400.0 * 16_384.0 / 419.0);

/// A number with its evidence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    name: &'static str,
    value: f64,
    unit: Unit,
    origin: Origin,
    source: &'static str,
    only: Only,
}

/// The unit of a number, and so how it is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// A time in seconds.
    Time,
    /// Seconds per square root of a megabyte.
    TimePerRoot,
    /// Seconds per megabyte.
    TimePerMegabyte,
    /// Floating-point operations per second of one multiprocessor (SM), shown in TFLOP/s.
    TeraflopsOfSm,
    /// Watts for each TFLOP/s of the peak in 16 bits.
    WattsPerTeraflop,
    /// A factor without unit.
    Times,
}

/// All generations of GPUs: each has matrix units. CPUs are left out.
const WITH_MATRIX_UNITS: &[Architecture] = &[
    Architecture::Volta,
    Architecture::Ampere,
    Architecture::Ada,
    Architecture::Hopper,
    Architecture::Blackwell,
    Architecture::BlackwellRtx,
    Architecture::Cdna3,
];

/// Which predictions a number can enter.
#[derive(Clone, Copy, Debug)]
enum Only {
    /// All predictions.
    Any,
    /// Predictions for GPUs of these generations.
    Parts(&'static [Architecture]),
    /// Predictions for clusters with this network.
    Network(Fabric),
    /// Predictions of strategies with this feature.
    With(Feature),
}

/// Features of a prediction that bring in numbers which other predictions do not use.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Feature {
    /// The model has experts, and our own executor's GPU kernel computes their matrix products.
    PortableExperts,
    /// Optimizer states, parameters or activations are kept in host memory.
    Host,
    /// The optimizer has moments in 8 bits.
    EightBits,
    /// Whole steps are captured in CUDA graphs.
    GraphedStep,
    /// The optimizer updates one tensor after the other ([`catalog::runtime::Rewrite::OptimizerByTensor`]).
    ByTensor,
    /// Gradients are put into buckets one after the other, once backward has ended.
    Bucketed,
    /// The model has experts, and each expert's matrix products are launched by themselves
    /// ([`catalog::runtime::Rewrite::LaunchExpertsApart`]).
    ExpertsApart,
    /// Devices of a node are joined by PCI Express.
    PciExpress,
    /// Products are split to overlap with tensor-parallel messages.
    SplitProducts,
}

impl Only {
    const fn narrowed_to(self, only: Self) -> Self {
        only
    }

    fn includes(self, architecture: Architecture, fabric: Fabric) -> bool {
        match self {
            Self::Any => true,
            Self::Parts(parts) => parts.contains(&architecture),
            Self::Network(network) => network == fabric,
            Self::With(_) => false,
        }
    }
}

impl Known {
    /// The value of a number that is the compute rate of one multiprocessor (SM).
    pub(crate) const fn of_multiprocessor(&self) -> FlopRate {
        FlopRate(self.value)
    }

    /// The value of a number that is a factor.
    pub(crate) const fn factor(&self) -> f64 {
        self.value
    }

    /// The value of a number that is a power limit over a peak, in watts per TFLOP/s.
    pub(crate) const fn watts_per_teraflop(&self) -> f64 {
        self.value
    }

    /// The value of a number that is a time.
    pub(crate) const fn seconds(&self) -> Seconds {
        Seconds(self.value)
    }

    /// This number as a row of the list of constants that a prediction used.
    fn row(&self) -> UsedConstant {
        let value = match self.unit {
            Unit::Time => Seconds(self.value).to_string(),
            Unit::TimePerRoot => format!("{}/√MB", Seconds(self.value)),
            Unit::TimePerMegabyte => format!("{}/MB", Seconds(self.value)),
            Unit::TeraflopsOfSm => format!("{} TFLOP/s per SM", self.value / 1e12),
            Unit::WattsPerTeraflop => format!("{} W per TFLOP/s", self.value),
            Unit::Times => format!("{}×", (self.value * 1e4).round() / 1e4),
        };
        constant(self.name, value, self.origin, self.source)
    }
}

/// Builds a row of a prediction's provenance.
pub(crate) fn constant(name: &str, value: String, origin: Origin, source: &str) -> UsedConstant {
    UsedConstant {
        name: name.to_owned(),
        value,
        origin,
        source: source.to_owned(),
    }
}

/// Declares the numbers and a list of all of them, so that none is missing from the provenance.
macro_rules! known {
    ($(
        $id:ident: $name:literal = $value:expr, $unit:ident, $origin:ident, $source:literal
        $(, $only:expr)?;
    )*) => {
        $(#[doc = $name] pub(crate) const $id: Known = Known {
            name: $name,
            value: $value,
            unit: Unit::$unit,
            origin: Origin::$origin,
            source: $source,
            only: Only::Any$(.narrowed_to($only))?,
        };)*
        /// Every declared number.
        const ALL: &[Known] = &[$($id),*];
    };
}

known! {
    // Matrix products.
    WEIGHT_GRADIENT: "weight-gradient products over forward" = 1.04, Times, Published,
        "MooreThreads/SimuMax@4dcaae5, NT against TN tables of A100 and B200: medians 3-5% apart";
    GROUPED: "grouped over single products" = 1.0 / 0.85, Times, Fitted,
        "rate 0.85: SimuMax group_matmul against matmul medians; DeepGEMM on H800, 0.84-0.9";
    VECTOR_UNITS: "rate of vector units in 32 bits over matrix units in 16, after Volta" = 1.0 / 16.0, Times, Datasheet,
        "A100: 19.5 and 312 TFLOP/s; H100: 67 and 989";
    ODD_FORWARD: "products with rows that begin at odd multiples of 2 bytes, forward" = 0.73e12, TeraflopsOfSm, Measured,
        "our profile of an H200 (docs/cuda.md): 94-99 TFLOP/s on 132 SMs, and PyTorch's the same",
        Only::Parts(WITH_MATRIX_UNITS);
    ODD_BACKWARD: "products with rows that begin at odd multiples of 2 bytes, backward" = 1.1e12, TeraflopsOfSm, Measured,
        "our profile of an H200 (docs/cuda.md): 138-155 TFLOP/s on 132 SMs",
        Only::Parts(WITH_MATRIX_UNITS);
    UNALIGNED: "products with rows that begin at multiples of 4 or 8 bytes, not of 16" = 2e12, TeraflopsOfSm, Measured,
        "PyTorch on an H200 (docs/cuda.md): 241-293 TFLOP/s on 132 SMs",
        Only::Parts(WITH_MATRIX_UNITS);
    PORTABLE_GROUPED: "grouped products by our own kernel" = 1.35e12, TeraflopsOfSm, Measured,
        "our profile of an H200 (docs/cuda.md): 159-192 TFLOP/s on 132 SMs",
        Only::With(Feature::PortableExperts);
    ROWWISE: "time of forward products in 8 bits scaled by row over those scaled by tensor" = 1.05, Times, Published,
        "pytorch/pytorch issue 147971: most products of H100 reach 90-100% of the rate of those scaled by tensor, the middle is taken";
    BLOCKWISE: "8-bit products scaled by blocks of 128 over those scaled by tensor" = 1.23, Times, Published,
        "NVIDIA/TransformerEngine@8f2e635, docs/examples/gemm_profiling: H200 NVL, 22.9 ms with casts where scales of earlier steps take 19.0, 16.8 of them products",
        Only::Parts(&[Architecture::Hopper]);
    MICROSCALED: "8-bit products scaled by 32 numbers over those scaled by tensor" = 1.05, Times, Published,
        "NVIDIA/TransformerEngine@8f2e635, docs/examples/gemm_profiling: B300, 7.16 and 6.81 ms without casts",
        Only::Parts(&[Architecture::Blackwell]);
    SMALL_TILES: "waves of tiles of 128 by 128 over waves of 256 by 128, for each result" = 1.1, Times, Fitted,
        "ai-dynamo/aiconfigurator@095f58a, 5203 products of A100 beside the grid: median error 3.9% without waves, 3.1% with",
        Only::Parts(&[Architecture::Volta, Architecture::Ampere, Architecture::Ada, Architecture::BlackwellRtx]);
    AMPERE_SUSTAINED: "long training over short products, 4096 cubed, A100" = 1.11, Times, Published,
        "Azure/AI-benchmarking-guide@8fd0c6e: ten thousand iterations of cuBLASLt against the table",
        Only::Parts(&[Architecture::Ampere]);
    AMPERE_SUSTAINED_LARGE: "long training over short products, from 8192 cubed on, A100" = 1.01, Times, Published,
        "Azure/AI-benchmarking-guide@8fd0c6e",
        Only::Parts(&[Architecture::Ampere]);
    OTHER_SUSTAINED: "long training over short products, generations without measurements" = 1.06, Times, Assumed,
        "between those of A100 and none",
        Only::Parts(&[Architecture::Volta, Architecture::Ada, Architecture::BlackwellRtx, Architecture::Cdna3, Architecture::Cpu]);
    HOPPER_BEST_8: "best rate of 8-bit products in short benchmarks over the peak, H100 and H200" = 0.709, Times,
        Published, "stas00/ml-engineering@744d01e, maximum achievable matmul",
        Only::Parts(&[Architecture::Hopper]);
    BLACKWELL_BEST_8: "best rate of 8-bit products in short benchmarks over the peak, B200 and GB200" = 0.743, Times,
        Published, "stas00/ml-engineering@744d01e, maximum achievable matmul: 0.763 and 0.723",
        Only::Parts(&[Architecture::Blackwell]);
    NARROW: "8-bit products over tables that were collected with a serving engine's kernels" = 0.85, Times, Published,
        "Azure/AI-benchmarking-guide@8fd0c6e: cuBLASLt on H100 over the table at 2048 to 16384 cubed, median";
    POWER_LIMITED_SLOWDOWN: "kernels beside NCCL's, where power limits products" = 1.15, Times, Published,
        "NCCL takes 16-24 of 132 multiprocessors (ai-dynamo/aiconfigurator, NVIDIA/nccl tuning notes)",
        Only::Parts(&[Architecture::Hopper, Architecture::Blackwell, Architecture::Cdna3, Architecture::Cpu]);
    PCI_EXPRESS_CHANNELS: "NCCL's channels over PCI Express over those over NVLink" = 2.0 / 24.0, Times, Published,
        "NVIDIA/nccl@5067397, graph/search.cc and connect.cc: one ring, used twice; 12 rings over an A100's 12 links",
        Only::With(Feature::PciExpress);
    SPLIT_SLOWDOWN: "kernels beside tensor-parallel messages that products are split for" = 1.15, Times, Published,
        "Transformer Engine's user buffers take 16 of 132 multiprocessors, or copy engines (NVIDIA/TransformerEngine@v2.9, module/base.py, initialize_ub)",
        Only::With(Feature::SplitProducts);
    EXPOSED_EPILOGUE: "share of the gradient accumulation in a product's epilogue that matrix units do not hide" = 0.55,
        Times, Published, "SimuMax products that accumulate in 32 bits, A100, 28672 x 8192 x 4096: 5.7% slower where the traffic alone takes 10%";
    CLOCK_EXPONENT: "exponent of power over peak in the sustained clock of a part that has less of it than its table's" = 0.5, Times,
        Assumed, "between a cube root, where voltage follows the clock, and one, where voltage is at its floor; at 0.5 the best \
        product of H100 PCIe is 4% too slow (ACCURACY.md)";
    SLOWER_UNITS: "slowdown of operations over that of the rest, from which matrix units are slower ones" = 1.5, Times, Datasheet,
        "operations per clock of a multiprocessor are powers of two: 4096 on H100, 1024 on H20; 1024 on L40S, 512 on RTX 4090";
    AMPERE_RTX_POWER: "power over peak with which Ampere's workstation and GeForce cards hold their clocks" = 2.5,
        WattsPerTeraflop, Published, "zzc0721/torch-performance-test-data@9d82827: RTX A6000, 300 W, 123 of 155 TFLOP/s",
        Only::Parts(&[Architecture::Ampere]);
    // Fused attention.
    ATTENTION_START: "shortest fused attention" = 8e-6, Time, Published, "ai-dynamo/aiconfigurator tables";
    ATTENTION_BACKWARD: "products of fused attention, backward over forward" = 2.5, Times, Published,
        "Dao 2023, section 4.1: five products for two";
    FLASH1: "rate of FlashAttention 1 over 2, heads of 128" = 0.44, Times, Published,
        "Dao 2023, figure 4d: 69, 76, 80 and 83 against 155, 173, 182 and 189 TFLOP/s from 2048 tokens on";
    FLASH1_NARROW: "rate of FlashAttention 1 over 2, heads of 64" = 0.56, Times, Published,
        "Dao 2023, figure 4c: 77, 87, 92 and 97 against 140, 156, 165 and 171 TFLOP/s from 2048 tokens on";
    TRITON_FORWARD: "rate of FlashAttention in Triton over FlashAttention 2, forward" = 1.0 / 1.4, Times, Published,
        "Dao 2023, section 4.1: FlashAttention 2 is 1.3 to 1.5 times as fast";
    TRITON_BACKWARD: "rate of FlashAttention in Triton over FlashAttention 2, backward" = 0.5, Times, Published,
        "Dao 2023, section 4.1: FlashAttention 2 is twice as fast";
    TRITON_NARROW: "the same rates with heads of 64 over those with heads of 128" = 1.12, Times, Published,
        "Dao 2023, figure 4c and d: 76, 79 and 80 of 156, 165 and 171 TFLOP/s against 74, 78 and 80 of 173, 182 and 189";
    OLDER_ON_BLACKWELL: "rate of older attention kernels on Blackwell over its own" = 0.5, Times, Assumed,
        "without its instructions a kernel of the generation before reaches about half",
        Only::Parts(&[Architecture::Blackwell]);
    SHORTEST_ATTENTION: "least rate of attention over short sequences, over that at 512" = 0.1, Times, Assumed,
        "rates fall in proportion below the shortest chart";
    // Memory-bound kernels: shares of the bandwidth.
    KERNEL_START: "start of a memory-bound kernel" = 3e-6, Time, Published,
        "ai-dynamo/aiconfigurator mem_empirical_constant_latency";
    POINTWISE: "elementwise kernels, of memory bandwidth" = 0.87, Times, Published,
        "BabelStream 0.79-0.87 (Azure/AI-benchmarking-guide); vidur add 0.95, act 0.5-0.58";
    NORM_FORWARD: "fused norms, forward, of memory bandwidth" = 0.74, Times, Published,
        "cudnn-frontend@3929da2 norms, H200: 3352-3770 of 4800 GB/s";
    NORM_BACKWARD: "fused norms, backward, of memory bandwidth" = 0.66, Times, Published,
        "cudnn-frontend@3929da2 norms, H200: 3087-3801 of 4800 GB/s";
    EAGER_NORM_FORWARD: "PyTorch's norms, forward, of memory bandwidth" = 0.56, Times, Published,
        "cudnn-frontend@3929da2 norms, PyTorch on H200: 2670 of 4800 GB/s";
    EAGER_NORM_BACKWARD: "PyTorch's norms, backward, of memory bandwidth" = 0.31, Times, Published,
        "cudnn-frontend@3929da2 norms, PyTorch on H200: 1467 of 4800 GB/s";
    SOFTMAX: "softmax of scores, of memory bandwidth" = 0.70, Times, Assumed, "between norm and elementwise kernels";
    CROSS_ENTROPY: "cross-entropy in one kernel, of memory bandwidth" = 0.30, Times, Assumed,
        "12 bytes per logit; Liger-Kernel@ead96b61, 8192 × 131072 on H100: 8.0 ms by its kernel is 0.48, 18.2 ms by Megatron's TorchScript is 0.21";
    LOSS_OPERATORS: "cross-entropy by operators, of memory bandwidth" = 0.76, Times, Published,
        "Liger-Kernel@ead96b61, 8192 × 131072 on H100: 21.2 ms by Megatron's operators, which move 40 bytes per logit beside 12 of casts";
    EMBEDDING: "embedding, of memory bandwidth" = 0.50, Times, Published, "gathered rows; Liger-Kernel embedding benchmark";
    PERMUTE: "ordering of tokens by expert, of memory bandwidth" = 0.35, Times, Published,
        "SimuMax permute 0.19 (A100), 0.50 (B200)";
    SCAN: "recurrences in chunks, of memory bandwidth" = 0.34, Times, Published,
        "flashinfer-ai/flashinfer#2742, gated delta rule of flash-linear-attention on B200: 5120 bytes per token and head, 1.49 ms for 8192 tokens and 96 heads";
    DROPOUT: "dropout, of memory bandwidth" = 0.70, Times, Assumed, "elementwise with random numbers";
    OPTIMIZER: "fused optimizer, of memory bandwidth" = 0.80, Times, Published, "fused Adam 0.75-0.85 of bandwidth";
    UNFUSED_OPTIMIZER: "unfused optimizer, of memory bandwidth" = 0.27, Times, Published,
        "torch foreach AdamW on B200: 0.23-0.31";
    KERNELS_PER_TENSOR: "kernels per tensor of an optimizer that updates one after the other" = 10.0, Times, Published,
        "transformers 4.12, optimization.py, AdamW: 7 without weight decay; norm and scaling by torch 1.10's clip_grad_norm_, and zero_grad",
        Only::With(Feature::ByTensor);
    CALLS_PER_BUCKETED_GRADIENT: "launches that last as long as putting a gradient into a bucket" = 2.0, Times, Assumed,
        "DeepSpeed stage2.py@v0.5.6, reduce_independent_p_g_buckets_and_remove_grads and average_tensor: one copy, seven calls that launch nothing, and a loop in Python over the ranks that own parts of the gradient",
        Only::With(Feature::Bucketed);
    CALLS_PER_EXPERT_GRADIENT: "launches that last as long as handing the gradient of one expert's weight to data parallelism" = 1.0, Times, Assumed,
        "NVIDIA/Megatron-LM@d98e8a6, core/distributed/distributed_data_parallel.py, _make_backward_post_hook: autograd calls a function in Python for every weight and micro-batch",
        Only::With(Feature::ExpertsApart);
    PRODUCT_OF_EXPERT: "time in which C++ launches the product of one expert" = 20e-6, Time, Published,
        "cuBLASLt's products take the host 13-20 us each, upper end (NVIDIA/TransformerEngine issue 2053); every call asks for an algorithm (common/gemm/cublaslt_gemm.cu)",
        Only::With(Feature::ExpertsApart);
    CALLS_PER_EXPERT_PRODUCT: "launches that last as long as Python's handling of one expert's tensors in a product" = 0.25, Times, Assumed,
        "NVIDIA/TransformerEngine@d0067d0, pytorch/module/grouped_linear.py: lists over all experts of weights, biases, quantisers and outputs, and autograd's handling of them, but no kernel",
        Only::With(Feature::ExpertsApart);
    CAST_OF_EXPERT: "time in which C++ launches a cast of one expert's rows" = 5e-6, Time, Published,
        "cudaLaunchKernel and dispatch 2-5 us, upper end (kernel-launch notes gathered 2026-11)",
        Only::With(Feature::ExpertsApart);
    EIGHT_BIT_OPTIMIZER: "optimizer with 8-bit moments, of memory bandwidth" = 0.38, Times, Published,
        "bitsandbytes Adam on V100, 47 ms for 16 bytes of each of a billion 32-bit weights (Dettmers et al., arXiv:2110.02861, runtimes)",
        Only::With(Feature::EightBits);
    GRAPHED_STEP: "memory of passes that are captured in one CUDA graph" = 1.5, Times, Published,
        "full-iteration graphs raise the peak by 1.5 to 2 times (NVIDIA-NeMo/Megatron-Bridge@067f987, skills/nemo-mbridge-perf-cuda-graphs); a pair of captures there: 119.8 GiB with graphs, 85.9 without",
        Only::With(Feature::GraphedStep);
    // Host memory.
    HOST_COPY: "copies between device and host, of the link's rate" = 0.85, Times, Published,
        "nvbandwidth host_to_device_memcpy_ce: 55.6 of 63 GB/s (NVIDIA developer blog), 12.4 of 15.75 GB/s (its README)",
        Only::With(Feature::Host);
    HOST_OPTIMIZER: "fused optimizer of the host, of its memory bandwidth" = 0.43, Times, Published,
        "CPU-Adam, 28 bytes for each of 1 to 10 billion parameters in 0.22 to 2.57 s on 256 GB/s: 0.36-0.50 (ZeRO-Offload, arXiv:2101.06840, table 4)",
        Only::With(Feature::Host);
    UNFUSED_HOST_OPTIMIZER: "PyTorch's unfused optimizer of the host, of its memory bandwidth" = 0.077, Times, Published,
        "PT-CPU, 1 to 10 billion parameters in 1.39 to 14.76 s on 256 GB/s: 0.074-0.080 (ZeRO-Offload, arXiv:2101.06840, table 4)",
        Only::With(Feature::Host);
    // Messages.
    CARDS_FOR_ALL_CHANNELS: "network cards that together use as many NCCL channels as messages inside a node" = 8.0, Times, Published,
        "NCCL has 16 channels or more inside nodes of eight GPUs, and two for every card between nodes (NVIDIA/nccl@5067397, graph/connect.cc)";
    CARD_SHARE: "share of a network card's rate" = 0.95, Times, Published, "aliyun/SimAI@cef83f9 nic_ratio: 0.95-0.96";
    NEAR_SHARE: "share of the scale-up rate that one transfer reaches" = 0.70, Times, Published,
        "microsoft/vidur send_recv tables, H100 and A100";
    NEAR_TRANSFER: "start of a transfer inside a domain" = 8e-6, Time, Published,
        "microsoft/vidur send_recv tables: 5-10 µs on H100";
    FAR_TRANSFER: "start of a transfer between domains" = 17e-6, Time, Published,
        "microsoft/vidur send_recv tables, H100";
    RING_SHARE: "all-reduce without in-switch reduction, of the scale-up rate" = 0.82, Times, Assumed,
        "a ring bounds it like the other collectives";
    UNMEASURED_SHARE: "collectives without a table, of the scale-up rate" = 0.75, Times, Assumed,
        "below what tables of other parts reach";
    UNMEASURED_START: "start of collectives without a table" = 12e-6, Time, Assumed, "as of tables of other parts";
    UNMEASURED_RAMP: "ramp of collectives without a table" = 5e-6, TimePerRoot, Assumed,
        "as of tables of other parts";
    RING_STEP: "latency of a ring step between nodes" = 4.5e-6, Time, Fitted,
        "aliyun/SimAI@cef83f9 nic_ratio of all-gather, 64 MiB-1 GiB, 16-512 GPUs";
    SHORT_RING_START: "start of a ring between nodes for short messages" = 6.6e-6, Time, Published,
        "NVIDIA/nccl@5067397, src/graph/tuning.cc, baseLatencies: ring, protocol LL";
    SHORT_RING_STEP: "latency of a ring step inside a node for short messages" = 1e-6, Time, Published,
        "NVIDIA/nccl@5067397, src/graph/tuning.cc, hwLatencies: 0.6 µs over NVLink in protocol LL; at least the network's overhead, 1 µs";
    SHORT_RING_CROSSING: "latency of a ring step between nodes for short messages" = 2.7e-6, Time, Published,
        "NVIDIA/nccl@5067397, src/graph/tuning.cc, hwLatencies: network, ring, protocol LL";
    SHORT_RING_TRAFFIC: "time of a ring between nodes for short messages" = 50e-6, TimePerMegabyte, Published,
        "NVIDIA/nccl@5067397, src/graph/tuning.cc, llMaxBws: 19 to 20.4 GB/s over three nodes and more";
    TREE_LEVEL: "latency of a level of a tree between nodes, up and down" = 25e-6, Time, Fitted,
        "p5 tables: small all-reduces over 2 nodes take 69 µs";
    TREE_RAMP: "ramp of all-reduce between nodes" = 20e-6, TimePerRoot, Fitted, "p5 tables, 16 MiB-1 GiB";
    TREE_TRAFFIC: "traffic of a tree over that of a ring" = 1.05, Times, Assumed, "leaves and inner nodes differ";
    EXCHANGE_SHARE: "share of a network card's rate in all-to-all" = 0.75, Times, Assumed,
        "DeepEP reaches 43-58 of 50 GB/s at best, NCCL's pairwise form less";
    EXCHANGE_START: "start of all-to-all between nodes" = 15e-6, Time, Assumed, "as of a transfer";
    EXCHANGE_PEER: "start of all-to-all between nodes, for each rank" = 1e-6, Time, Assumed,
        "a message to every rank";
    ROCE: "latency of a step over RoCE beyond InfiniBand" = 2e-6, Time, Assumed, "switches",
        Only::Network(Fabric::Roce);
    EFA: "latency of a step over EFA beyond InfiniBand" = 15e-6, Time, Fitted,
        "p5: small all-reduces take 69 µs where NCCL's model on InfiniBand gives 31 µs",
        Only::Network(Fabric::Efa);
    TCPX: "latency of a step over TCPX beyond InfiniBand" = 25e-6, Time, Assumed, "through the host's kernel",
        Only::Network(Fabric::Tcpx);
    ETHERNET: "latency of a step over Ethernet beyond InfiniBand" = 40e-6, Time, Assumed, "sockets",
        Only::Network(Fabric::Ethernet);
}

/// Provenance rows of the numbers that can enter predictions for a GPU generation and a network.
pub(crate) fn rows(architecture: Architecture, fabric: Fabric) -> Vec<UsedConstant> {
    let here = |known: &&Known| known.only.includes(architecture, fabric);
    ALL.iter().filter(here).map(Known::row).collect()
}

/// Provenance rows of the numbers that a strategy's features bring in.
pub(crate) fn rows_of_strategy(has: impl Fn(Feature) -> bool) -> Vec<UsedConstant> {
    let needed = |known: &&Known| matches!(known.only, Only::With(feature) if has(feature));
    ALL.iter().filter(needed).map(Known::row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_of_the_part_and_its_network() {
        let has =
            |architecture, fabric, known: Known| rows(architecture, fabric).contains(&known.row());
        let (hopper, ampere) = (Architecture::Hopper, Architecture::Ampere);
        assert!(has(ampere, Fabric::Efa, AMPERE_SUSTAINED));
        assert!(!has(hopper, Fabric::Efa, AMPERE_SUSTAINED));
        assert!(has(hopper, Fabric::Efa, EFA) && !has(hopper, Fabric::InfiniBand, EFA));
        assert!(has(hopper, Fabric::InfiniBand, RING_STEP));
    }
}
