//! Measured rates of fused attention, as data.

use std::sync::OnceLock;

use serde::Deserialize;

/// Key lengths of a chart: this one, and its doubles.
pub const FIRST_LENGTH: u64 = 512;

/// Achieved rates of one kernel on one part: causal, 16 bits, head dimension 128.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionChart {
    /// Kernel and part.
    pub name: String,
    /// By key length, TFLOP/s.
    pub forward_tflops: [f64; 7],
    /// By key length, TFLOP/s.
    pub backward_tflops: [f64; 7],
    /// Rate at head dimension 64 over 128.
    pub narrow: f64,
    /// Peak of the part, TFLOP/s.
    pub peak_tflops: f64,
    /// Whether it ran at boost clocks: single launches do, long series do not.
    pub boost: bool,
    /// Where it was published.
    pub source: String,
}

/// Every chart.
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
}

impl AttentionCharts {
    /// All of them.
    #[must_use]
    pub fn all(&self) -> [&AttentionChart; 4] {
        [
            &self.flash2_a100,
            &self.flash2_h100,
            &self.cudnn_h200,
            &self.cudnn_gb200,
        ]
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[allow(
        dead_code,
        reason = "read so that other versions are refused by the schema"
    )]
    schema_version: u32,
    charts: AttentionCharts,
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
        let file: Result<File, _> = crate::text::yaml(text, "attention.yaml");
        file.expect("the embedded file is well-formed, a test shows")
            .charts
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
