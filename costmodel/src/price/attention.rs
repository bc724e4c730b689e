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
use super::clocks::{clock_factor, sustained, throttled};
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
    /// How much longer kernels take because of the power limit; `peak` is less by it.
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
                // The only chart of Hopper at boost clocks is FlashAttention 2's.
                Architecture::Hopper => throttled(known::FLASH2_SUSTAINED.factor(), device, part),
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
        let newest = kernel == NEWEST;
        let older = if kernel == AttentionKernel::Flash1 {
            known::FLASH1.factor()
        } else {
            1.0
        };
        match self.architecture {
            Architecture::Hopper if newest => (&charts.cudnn_h200, 1.0),
            Architecture::Blackwell if newest => (&charts.cudnn_gb200, 1.0),
            Architecture::Hopper => (&charts.flash2_h100, older),
            Architecture::Blackwell => (
                &charts.cudnn_gb200,
                known::OLDER_ON_BLACKWELL.factor() * older,
            ),
            Architecture::Cdna3 => (&charts.flash2_h100, older),
            Architecture::Volta
            | Architecture::Ampere
            | Architecture::Ada
            | Architecture::BlackwellRtx
            | Architecture::Cpu => (&charts.flash2_a100, older),
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
        let [narrow, wide] = HEADS.map(|dim| dim as f64);
        let width = if s.qk_dim >= HEADS[1] {
            1.0
        } else {
            let beyond = (s.qk_dim as f64 - narrow) / (wide - narrow);
            rates.narrow + (1.0 - rates.narrow) * beyond.clamp(-1.0, 1.0)
        };
        let rate = at_length(table, keys) * factor * width;
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
