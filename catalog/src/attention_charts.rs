//! Measured rates of fused attention kernels, read from `presets/kernels/attention.yaml`.

use std::sync::OnceLock;

use serde::Deserialize;

/// Number of keys, in tokens, at the first point of every chart; each further point has twice as many.
pub const FIRST_LENGTH: u64 = 512;

/// Rates that one attention kernel achieves on one GPU, for causal attention with head dimension 128, in 16 bits unless its field says otherwise.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionChart {
    /// Name of the kernel and of the GPU, such as `cuDNN, H200`.
    pub name: String,
    /// Forward rates in TFLOP/s, one for each number of keys.
    pub forward_tflops: [f64; 7],
    /// Backward rates in TFLOP/s, one for each number of keys.
    pub backward_tflops: [f64; 7],
    /// Rate with head dimension 64 over that with 128.
    pub narrow: f64,
    /// Dense 16-bit peak of that GPU, TFLOP/s.
    pub peak_tflops: f64,
    /// Whether the GPU ran at boost clocks while it was measured: true for single launches, false
    /// for long series of launches.
    pub boost: bool,
    /// Where it was published.
    pub source: String,
}

/// The charts that the program carries.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionCharts {
    /// FlashAttention 2 on A100.
    pub flash2_a100: AttentionChart,
    /// FlashAttention 2 on H100.
    pub flash2_h100: AttentionChart,
    /// cuDNN 9 on H200.
    pub cudnn_h200: AttentionChart,
    /// cuDNN 9 on GB200.
    pub cudnn_gb200: AttentionChart,
    /// cuDNN 9 on GB200, in 8 bits (MXFP8); shares of the 16-bit peak.
    pub cudnn_gb200_mxfp8: AttentionChart,
    /// Our own executor's kernels on H200. Their backward computes the scores twice.
    pub own_h200: AttentionChart,
}

impl AttentionCharts {
    /// The charts in the order of their fields.
    #[must_use]
    pub fn all(&self) -> [&AttentionChart; 6] {
        [
            &self.flash2_a100,
            &self.flash2_h100,
            &self.cudnn_h200,
            &self.cudnn_gb200,
            &self.cudnn_gb200_mxfp8,
            &self.own_h200,
        ]
    }
}

/// The charts that the program carries.
///
/// # Panics
/// Never: a test parses the embedded file.
#[must_use]
pub fn attention_charts() -> &'static AttentionCharts {
    static CHARTS: OnceLock<AttentionCharts> = OnceLock::new();
    CHARTS.get_or_init(|| {
        let text = include_str!("../presets/kernels/attention.yaml");
        let charts = crate::text::yaml(text, "attention.yaml");
        charts.expect("the embedded file is well-formed, a test shows")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_below_the_peak() {
        for chart in attention_charts().all() {
            let rates = chart.forward_tflops.iter().chain(&chart.backward_tflops);
            for &rate in rates {
                assert!(0.0 < rate && rate < chart.peak_tflops, "{}", chart.name);
            }
        }
    }
}
