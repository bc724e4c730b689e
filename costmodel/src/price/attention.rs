//! Fused attention: the rate achieved, by kernel generation, sequence length and head dimension.
//!
//! FLOPs forward: `2 · b · h · s_q · s_kv · (d_qk + d_v)`, half of that when causal; backward 2.5
//! times forward (Dao 2023, §4.1). A window leaves a share of these (`windows`): attention with a window takes as long as causal
//! attention over fewer keys, so few that a query sees as many of them on average.
//!
//! The charts are of 16-bit kernels; a kernel that takes 32 bits (PyTorch's memory-efficient attention, our own) is taken to reach the
//! same share of the device's 32-bit peak. If a profile of the cluster's own GPUs measured a library's causal attention, its
//! times correct the charts' (`ratios`).

use catalog::attention_charts::{AttentionChart, FIRST_LENGTH, attention_charts};
use catalog::runtime::AttentionKernel;
use catalog::tables::MeasuredOn;
use catalog::{Architecture, DType, Device, Fitted, FlopRate, Origin, Seconds, elementary};
use dtensor::AttentionShape;
use plans::UsedConstant;

use super::borrowed::SlowerUnits;
use super::clocks::{clock_factor, sustained};
use super::measured::{self, OfGpus};
use super::ratios::Ratios;
use super::windows;
use crate::known::{self, constant};

/// Head dimensions: up to the first, a kernel runs at the charts' rate for narrow heads, from the second on at their
/// full rate; in between the rate is interpolated.
const HEADS: [u64; 2] = [64, 96];

#[derive(Clone, Debug)]
pub(super) struct AttentionPrices {
    architecture: Architecture,
    peak: f64,
    /// Factor by which kernels take longer because of the power limit. `peak` is already divided by
    /// it.
    clocks: f64,
    /// If matrix units are slower than those of the GPU whose products price this one: how, and that GPU's peak. Charts are
    /// taken to hold for that GPU in proportion to its peak.
    slower_units: Option<(SlowerUnits, FlopRate)>,
    /// Time in 32 bits over time in 16 bits, the same as for matrix products.
    single: f64,
    /// Time of a kernel in long training over its time in a chart that was measured at boost clocks.
    sustained: f64,
    /// Measured over charted time: forward, then backward.
    ratios: [Ratios<4>; 2],
    source: Option<String>,
}

/// The kernel generation whose charted times measured attention corrects.
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
        let clocks = clock_factor(device, part);
        let charts = Self {
            architecture: device.architecture,
            peak: peak / clocks,
            clocks,
            slower_units: SlowerUnits::of(device, part).map(|units| (units, part.peak.value)),
            single,
            sustained: match device.architecture {
                // The only chart of Hopper at boost clocks is FlashAttention 2's. At a third of the peak, power does not limit it.
                Architecture::Hopper => 1.0,
                _ => sustained(device, part, fitted),
            },
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

    fn rates(&self, kernel: AttentionKernel) -> (&'static AttentionChart, f64) {
        let charts = attention_charts();
        if kernel == AttentionKernel::Flash2TwoPass {
            return (&charts.own_h200, 1.0);
        }
        let newest = matches!(kernel, NEWEST | AttentionKernel::CudnnFp8);
        match self.architecture {
            Architecture::Hopper if newest => (&charts.cudnn_h200, 1.0),
            Architecture::Blackwell if kernel == AttentionKernel::CudnnFp8 => {
                (&charts.cudnn_gb200_mxfp8, 1.0)
            }
            Architecture::Blackwell if newest => (&charts.cudnn_gb200, 1.0),
            Architecture::Hopper | Architecture::Cdna3 => (&charts.flash2_h100, 1.0),
            Architecture::Blackwell => (&charts.cudnn_gb200, known::OLDER_ON_BLACKWELL.factor()),
            Architecture::Volta
            | Architecture::Ampere
            | Architecture::Ada
            | Architecture::BlackwellRtx
            | Architecture::Cpu => (&charts.flash2_a100, 1.0),
        }
    }

    pub(super) fn price(
        &self,
        s: &AttentionShape,
        kernel: AttentionKernel,
        dtype: DType,
        backward: bool,
    ) -> Seconds {
        let wide = dtype == DType::F32;
        let windowed = s.window.is_some_and(|w| w.tokens() < s.kv_len);
        let plain = !wide && s.causal && !windowed;
        let sizes = [s.batch * s.heads, s.q_len, s.kv_len, s.qk_dim];
        let ratio = match kernel == NEWEST && plain {
            true => self.ratios[usize::from(backward)].at(sizes),
            false => None,
        };
        let factor = ratio.unwrap_or(if wide { self.single } else { 1.0 });
        let time = self.charted(s, kernel, backward) * factor;
        if !windowed {
            return time;
        }
        // Measured attention corrects the charts without windows only. A window leaves keys out, so it costs no more than none.
        let whole = AttentionShape { window: None, ..*s };
        time.min(self.price(&whole, kernel, dtype, backward))
    }

    fn charted(&self, s: &AttentionShape, kernel: AttentionKernel, backward: bool) -> Seconds {
        let (rates, factor) = self.rates(kernel);
        // Keys of a causal sequence in which a query sees as many, half of them on average.
        let keys = s.kv_len as f64 * windows::share(s);
        let half = if s.causal { 0.5 } else { 1.0 };
        let tokens = s.batch as f64 * s.heads as f64 * s.q_len as f64 * keys;
        let forward = 2.0 * tokens * (s.qk_dim + s.v_dim) as f64 * half;
        let again = known::ATTENTION_BACKWARD.factor();
        let flops = if backward { again * forward } else { forward };
        let table = if backward {
            &rates.backward_tflops
        } else {
            &rates.forward_tflops
        };
        let [first, full] = HEADS.map(|dim| dim as f64);
        let beyond = ((s.qk_dim as f64 - first) / (full - first)).clamp(-1.0, 1.0);
        let between = |[narrow, wide]: [f64; 2], beyond| narrow + (wide - narrow) * beyond;
        let width = between([rates.narrow, 1.0], beyond);
        let of_age = match self.architecture {
            // PyTorch's memory-efficient kernel runs there; it is assumed to be as fast as FlashAttention 1.
            Architecture::Volta => AttentionKernel::Flash1,
            _ => kernel,
        };
        let older = between(before_flash_2(of_age, backward), beyond.max(0.0));
        let rate = at_length(table, keys) * factor * older * width;
        let sustained = if rates.boost { self.sustained } else { 1.0 };
        let time = match self.slower_units {
            Some((units, peak)) => {
                let at_peak = Seconds(flops / peak.0);
                units.time(at_peak * (rates.peak_tflops / rate), at_peak) * self.clocks * sustained
            }
            None => {
                let rate = rate * self.peak / (rates.peak_tflops * sustained);
                Seconds(flops / (rate * 1e12))
            }
        };
        time.max(known::ATTENTION_START.seconds())
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
                rates.forward_tflops[4], rates.backward_tflops[4]
            ),
            Origin::Published,
            &rates.source,
        );
        measured.into_iter().chain([charted]).collect()
    }
}

/// The rate of a kernel that is older than FlashAttention 2, over that kernel's: with heads of 64, then with heads of 128. 1 for other
/// kernels.
fn before_flash_2(kernel: AttentionKernel, backward: bool) -> [f64; 2] {
    let triton = |wide: f64| [wide * known::TRITON_NARROW.factor(), wide];
    match (kernel, backward) {
        (AttentionKernel::Flash1, _) => [known::FLASH1_NARROW.factor(), known::FLASH1.factor()],
        (AttentionKernel::FlashTriton, false) => triton(known::TRITON_FORWARD.factor()),
        (AttentionKernel::FlashTriton, true) => triton(known::TRITON_BACKWARD.factor()),
        _ => [1.0; 2],
    }
}

/// The rate at a key length, interpolated between the chart's lengths in their logarithm: beyond
/// the longest it stays, below the shortest it falls with the length, to a tenth at least.
fn at_length(table: &[f64; 7], length: f64) -> f64 {
    let position = elementary::log2(length.max(1.0) / FIRST_LENGTH as f64);
    if position <= 0.0 {
        return table[0] * elementary::exp2(position).max(known::SHORTEST_ATTENTION.factor());
    }
    let cell = (position as usize).min(5);
    let f = (position - cell as f64).min(1.0);
    table[cell] + (table[cell + 1] - table[cell]) * f
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::price::TablePrices;

    /// Dao 2023, figure 4: forward and backward of causal attention on A100, in TFLOP/s.
    #[test]
    fn older_kernels_reach_the_rates_of_their_chart() {
        use AttentionKernel::{Flash1, Flash2};
        let cluster = catalog::load::cluster("dgx-a100").expect("a preset");
        let prices = TablePrices::new(&cluster, 8, &Fitted::default()).expect("prices");
        // The chart is of short series of launches.
        let boost = prices.attention.sustained;
        for (kernel, head, tokens, charted) in [
            (Flash2, 64, 4096, 156.0),
            (Flash2, 128, 4096, 173.0),
            (Flash1, 64, 2048, 77.0),
            (Flash1, 64, 8192, 92.0),
            (Flash1, 128, 2048, 69.0),
            (Flash1, 128, 8192, 80.0),
        ] {
            let shape = measured::attention([16_384 / tokens * 2048 / head, tokens, tokens, head]);
            let time = |backward| prices.attention(&shape, kernel, DType::Bf16, backward).0;
            let flops = 3.5 * 2.0 * 16_384.0 * 2048.0 * tokens as f64;
            let rate = flops / (time(false) + time(true)) / 1e12 * boost;
            assert!(
                (rate / charted - 1.0).abs() < 0.06,
                "{kernel:?} {head} {tokens}: {rate}"
            );
        }
    }

    /// Dao 2023, section 4.1: FlashAttention 2 is 1.3 to 1.5 times as fast in forward, and twice as fast in backward.
    #[test]
    fn triton_is_slower_in_backward_than_in_forward() {
        use AttentionKernel::{Flash2, FlashTriton};
        for (cluster, head, [forward, backward]) in [
            ("dgx-a100", 128, [1.4, 2.0]),
            ("dgx-h100", 128, [1.4, 2.0]),
            // Heads of 64 slow FlashAttention 2 more. Of narrower ones there is no chart.
            ("dgx-a100", 64, [1.25, 1.79]),
            ("dgx-b200", 64, [1.25, 1.79]),
            ("dgx-b200", 32, [1.25, 1.79]),
        ] {
            let shape = measured::attention([64, 8192, 8192, head]);
            let cluster = catalog::load::cluster(cluster).expect("a preset");
            let prices = TablePrices::new(&cluster, 8, &Fitted::default()).expect("prices");
            for (in_backward, expected) in [(false, forward), (true, backward)] {
                let of = |kernel| prices.attention(&shape, kernel, DType::Bf16, in_backward).0;
                let slower = of(FlashTriton) / of(Flash2);
                assert!((slower - expected).abs() < 0.01, "{head} {slower}");
            }
        }
    }
}
