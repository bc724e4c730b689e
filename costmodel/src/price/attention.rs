//! Fused attention: achieved rate by kernel generation, sequence and head dimension.
//!
//! FLOPs forward: `2 · b · h · s_q · s_kv · (d_qk + d_v)`, half of that when causal; backward 2.5
//! times forward (Dao 2023, §4.1). With a sliding window `s_kv` is the window. The charts are of 16-bit
//! kernels; a kernel that takes 32 bits (PyTorch's memory-efficient attention, our own) reaches the same
//! share of the device's 32-bit peak. Where a profile of the very GPUs measured a library's causal attention,
//! its times beat the charts' (`ratios`).

use catalog::runtime::AttentionKernel;
use catalog::tables::MeasuredOn;
use catalog::{Architecture, DType, Device, Fitted, Origin, Seconds};
use dtensor::AttentionShape;
use plans::UsedConstant;

use super::clocks::{clock_factor, sustained};
use super::measured::{self, OfGpus};
use super::priced::{Priced, constant};
use super::ratios::Ratios;

/// Achieved TFLOP/s at head dimension 128, causal, by key length 512 · 2^i.
struct Rates {
    forward: [f64; 7],
    backward: [f64; 7],
    /// Rate at head dimension 64 over 128.
    narrow: f64,
    /// Peak of the device measured, TFLOP/s.
    peak: f64,
    /// Whether the measurement ran at boost clocks: charts time single launches, the cuDNN tables
    /// long series.
    boost: bool,
    source: &'static str,
}

/// FlashAttention 2 on A100: charts of Dao-AILab/flash-attention@0251105, forward and backward
/// together; FlashAttention 1 runs at 0.6 of it (same charts).
const FLASH2_AMPERE: Rates = Rates {
    forward: [110.0, 145.0, 168.0, 185.0, 193.0, 199.0, 200.0],
    backward: [95.0, 129.0, 150.0, 168.0, 178.0, 185.0, 188.0],
    narrow: 0.90,
    peak: 312.0,
    boost: true,
    source: "Dao-AILab/flash-attention@0251105 flash2_a100_fwd_bwd_benchmark.png",
};

/// FlashAttention 2 on H100, same charts.
const FLASH2_HOPPER: Rates = Rates {
    forward: [191.0, 260.0, 298.0, 319.0, 333.0, 335.0, 337.0],
    backward: [154.0, 208.0, 254.0, 285.0, 299.0, 325.0, 327.0],
    narrow: 0.87,
    peak: 989.0,
    boost: true,
    source: "Dao-AILab/flash-attention@0251105 flash2_h100_fwd_bwd_benchmark.png, flash3_fp16_fwd.png",
};

/// cuDNN 9 on H200: NVIDIA/cudnn-frontend@3929da2 sdpa benchmarks, below 2048 the FlashAttention 3
/// chart's shape.
const CUDNN_HOPPER: Rates = Rates {
    forward: [292.0, 400.0, 484.0, 591.0, 644.0, 673.0, 688.0],
    backward: [205.0, 290.0, 370.0, 474.0, 541.0, 579.0, 581.0],
    narrow: 0.72,
    peak: 989.0,
    boost: false,
    source: "NVIDIA/cudnn-frontend@3929da2 benchmark/sdpa_benchmark_training, H200",
};

/// cuDNN 9 on GB200, same source.
const CUDNN_BLACKWELL: Rates = Rates {
    forward: [600.0, 880.0, 1150.0, 1408.0, 1574.0, 1708.0, 1622.0],
    backward: [420.0, 650.0, 900.0, 1198.0, 1332.0, 1328.0, 1226.0],
    narrow: 0.72,
    peak: 2500.0,
    boost: false,
    source: "NVIDIA/cudnn-frontend@3929da2 benchmark/sdpa_benchmark_training, GB200",
};

/// A chart of achieved rates by key length, 512 · 2^i: `(what, TFLOP/s)`.
pub type Chart = (&'static str, [f64; 7]);

/// Every chart of fused attention, forward and backward.
#[must_use]
pub fn charts() -> [Chart; 8] {
    [
        ("FlashAttention 2, A100, forward", FLASH2_AMPERE.forward),
        ("FlashAttention 2, A100, backward", FLASH2_AMPERE.backward),
        ("FlashAttention 2, H100, forward", FLASH2_HOPPER.forward),
        ("FlashAttention 2, H100, backward", FLASH2_HOPPER.backward),
        ("cuDNN, H200, forward", CUDNN_HOPPER.forward),
        ("cuDNN, H200, backward", CUDNN_HOPPER.backward),
        ("cuDNN, GB200, forward", CUDNN_BLACKWELL.forward),
        ("cuDNN, GB200, backward", CUDNN_BLACKWELL.backward),
    ]
}

/// Smallest measured attention kernel (ai-dynamo/aiconfigurator tables).
const LAUNCH: Seconds = Seconds(8e-6);
/// FlashAttention 1 over 2 (Dao 2023, figure 4).
const FLASH1: f64 = 0.6;
/// Products of a backward in two passes over those of one pass: scores and gradients of probabilities are computed
/// for the gradients of keys and values, and again for those of queries.
const TWO_PASSES: f64 = 7.0 / 5.0;

#[derive(Clone, Debug)]
pub(super) struct AttentionPrices {
    architecture: Architecture,
    peak: f64,
    /// Time in 32 bits over that in 16, as of products.
    single: f64,
    sustained: f64,
    /// Measured over charted time, forward and backward.
    ratios: [Ratios<4>; 2],
    source: Option<String>,
}

/// What measured attention beats.
const NEWEST: AttentionKernel = AttentionKernel::CudnnOrFlash3;

impl AttentionPrices {
    pub(super) fn new(
        device: &Device,
        fitted: &Fitted,
        part: &MeasuredOn,
        profile: Option<OfGpus<'_>>,
    ) -> Self {
        let peak = device
            .peak_rate(DType::Bf16)
            .map_or(1.0, |rate| rate.0 / 1e12);
        let single = device
            .peak_rate(DType::F32)
            .map_or(1.0, |rate| (peak * 1e12 / rate.0).max(1.0));
        let peak = peak / clock_factor(device, part, fitted);
        let charts = Self {
            architecture: device.architecture,
            peak,
            single,
            sustained: sustained(device.architecture, fitted),
            ratios: Default::default(),
            source: profile.map(|profile| profile.source()),
        };
        let ratios = [false, true].map(|backward| {
            let measured = profile.map_or_else(Vec::new, |profile| profile.attentions(backward));
            Ratios::new(measured, |sizes| {
                let shape = measured::attention(sizes);
                charts.charted(&shape, NEWEST, backward).0
            })
        });
        Self { ratios, ..charts }
    }

    fn rates(&self, kernel: AttentionKernel) -> (&'static Rates, f64) {
        let newest = kernel == NEWEST;
        let older = if kernel == AttentionKernel::Flash1 {
            FLASH1
        } else {
            1.0
        };
        match self.architecture {
            Architecture::Hopper if newest => (&CUDNN_HOPPER, 1.0),
            Architecture::Blackwell if newest => (&CUDNN_BLACKWELL, 1.0),
            Architecture::Hopper => (&FLASH2_HOPPER, older),
            // Without its own instructions a kernel of the previous generation reaches about half.
            Architecture::Blackwell => (&CUDNN_BLACKWELL, 0.5 * older),
            Architecture::Cdna3 => (&FLASH2_HOPPER, older),
            Architecture::Volta | Architecture::Ampere | Architecture::Ada | Architecture::Cpu => {
                (&FLASH2_AMPERE, older)
            }
        }
    }

    pub(super) fn price(
        &self,
        s: &AttentionShape,
        kernel: AttentionKernel,
        dtype: DType,
        backward: bool,
    ) -> Priced {
        let wide = dtype == DType::F32;
        let plain = !wide && s.causal && s.window.is_none_or(|w| w >= s.kv_len);
        let sizes = [s.batch * s.heads, s.q_len, s.kv_len, s.qk_dim];
        let ratio = match kernel == NEWEST && plain {
            true => self.ratios[usize::from(backward)].at(sizes),
            false => None,
        };
        Priced {
            time: self.charted(s, kernel, backward)
                * ratio.unwrap_or(if wide { self.single } else { 1.0 }),
            origin: ratio.map_or(Origin::Published, |_| Origin::Measured),
        }
    }

    fn charted(&self, s: &AttentionShape, kernel: AttentionKernel, backward: bool) -> Seconds {
        let (rates, factor) = self.rates(kernel);
        let seen = s.window.map_or(s.kv_len, |w| w.min(s.kv_len));
        let half = if s.causal && s.window.is_none_or(|w| w >= s.kv_len) {
            0.5
        } else {
            1.0
        };
        let tokens = s.batch as f64 * s.heads as f64 * s.q_len as f64 * seen as f64;
        let forward = 2.0 * tokens * (s.qk_dim + s.v_dim) as f64 * half;
        let flops = match (backward, kernel) {
            (true, AttentionKernel::Flash2TwoPass) => 2.5 * TWO_PASSES * forward,
            (true, _) => 2.5 * forward,
            (false, _) => forward,
        };
        let table = if backward {
            &rates.backward
        } else {
            &rates.forward
        };
        let width = if s.qk_dim >= 96 {
            1.0
        } else {
            rates.narrow + (1.0 - rates.narrow) * ((s.qk_dim as f64 - 64.0) / 32.0).clamp(-1.0, 1.0)
        };
        let sustained = if rates.boost { self.sustained } else { 1.0 };
        let rate = at_length(table, seen) * factor * width * self.peak / (rates.peak * sustained);
        Seconds(flops / (rate * 1e12)).max(LAUNCH)
    }

    pub(super) fn provenance(&self) -> Vec<UsedConstant> {
        let (rates, _) = self.rates(NEWEST);
        let [forward, _] = self.ratios.each_ref().map(Ratios::summary);
        let measured = forward
            .zip(self.source.as_deref())
            .map(|(summary, source)| {
                let value = measured::beside(summary, "the charts");
                constant(
                    "fused attention, causal, forward",
                    value,
                    Origin::Measured,
                    source,
                )
            });
        let charted = constant(
            "fused attention, causal, head dimension 128, 8192 tokens",
            format!(
                "{} / {} TFLOP/s forward / backward",
                rates.forward[4], rates.backward[4]
            ),
            Origin::Published,
            rates.source,
        );
        measured.into_iter().chain([charted]).collect()
    }
}

/// Interpolates over the logarithm of the length; flat beyond the ends, falling in proportion below.
fn at_length(table: &[f64; 7], length: u64) -> f64 {
    let position = (length.max(1) as f64 / 512.0).log2();
    if position <= 0.0 {
        return table[0] * position.exp2().max(0.1);
    }
    let cell = (position as usize).min(5);
    let f = (position - cell as f64).min(1.0);
    table[cell] + (table[cell + 1] - table[cell]) * f
}
