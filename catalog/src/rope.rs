//! Frequencies of rotary positions (Su et al. 2021), and how models rescale them for contexts longer
//! than they were first trained on. Names are those of Hugging Face configurations.

use std::f64::consts::PI;

use crate::elementary;

/// How a model rescales rotary frequencies for longer contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// Frequencies are not rescaled.
    #[default]
    None,
    /// All frequencies are divided by a factor (Chen et al. 2023).
    Linear {
        /// Ratio of the new context length to the original.
        factor: f64,
    },
    /// Low frequencies are divided by a factor, high ones stay, and those between are interpolated (Llama 3.1).
    Llama3 {
        /// Ratio of the new context length to the original.
        factor: f64,
        /// Turns in the original context below which a frequency is divided by the whole factor.
        low_freq_factor: f64,
        /// Turns in the original context above which a frequency stays.
        high_freq_factor: f64,
        /// Original context length, in tokens.
        original: f64,
    },
    /// Interpolation by frequency, with a temperature (YaRN, Peng et al. 2023).
    Yarn {
        /// Ratio of the new context length to the original.
        factor: f64,
        /// Original context length, in tokens.
        original: f64,
        /// Turns in the original context above which a frequency stays.
        beta_fast: f64,
        /// Turns in the original context below which a frequency is divided by the whole factor.
        beta_slow: f64,
        /// Factor on queries and on keys.
        attention: f64,
        /// Whether the ends of the interpolated range are rounded to whole pairs of dimensions.
        whole_pairs: bool,
    },
    /// A kind of Transformers whose frequencies are not computed here.
    Other,
}

impl RopeScaling {
    /// Radians per token of each of the `dims / 2` pairs of rotated dimensions.
    #[must_use]
    pub fn frequencies(self, theta: f64, dims: u64) -> Vec<f64> {
        let pairs = 0..dims / 2;
        pairs
            .map(|i| {
                let plain = elementary::powf(theta, -2.0 * i as f64 / dims as f64);
                self.scaled(plain, i as f64, theta, dims as f64)
            })
            .collect()
    }

    /// Factor on rotated queries and on rotated keys.
    #[must_use]
    pub fn magnitude(self) -> f64 {
        match self {
            Self::Yarn { attention, .. } => attention,
            Self::None | Self::Linear { .. } | Self::Llama3 { .. } | Self::Other => 1.0,
        }
    }

    fn scaled(self, plain: f64, pair: f64, theta: f64, dims: f64) -> f64 {
        match self {
            Self::None | Self::Other => plain,
            Self::Linear { factor } => plain / factor,
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original,
            } => {
                let turns = original * plain / (2.0 * PI);
                let ramp = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                mixed(plain, plain / factor, ramp.clamp(0.0, 1.0))
            }
            Self::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                whole_pairs,
                ..
            } => {
                // The index of the pair whose frequency makes that many turns in the original context.
                let pair_of = |turns: f64| {
                    dims * elementary::ln(original / (turns * 2.0 * PI))
                        / (2.0 * elementary::ln(theta))
                };
                let (first, last) = (pair_of(beta_fast), pair_of(beta_slow));
                let (first, last) = match whole_pairs {
                    true => (first.floor(), last.ceil()),
                    false => (first, last),
                };
                let (first, last) = (first.max(0.0), last.min(dims - 1.0));
                let width = if last > first { last - first } else { 0.001 };
                let ramp = ((pair - first) / width).clamp(0.0, 1.0);
                mixed(plain, plain / factor, 1.0 - ramp)
            }
        }
    }
}

/// The weighted mean of `fast`, with weight `share`, and `slow`.
fn mixed(fast: f64, slow: f64, share: f64) -> f64 {
    share * fast + (1.0 - share) * slow
}

#[cfg(test)]
mod tests {
    use super::RopeScaling;

    /// The published settings of Llama 3.1: eight times the context of 8192 tokens.
    const LLAMA31: RopeScaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original: 8192.0,
    };

    #[test]
    fn fast_pairs_stay_and_slow_ones_slow_down_by_the_factor() {
        let yarn = RopeScaling::Yarn {
            factor: 8.0,
            original: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention: 0.1 * 8f64.ln() + 1.0,
            whole_pairs: true,
        };
        for scaling in [LLAMA31, yarn] {
            let plain = RopeScaling::None.frequencies(500_000.0, 128);
            let scaled = scaling.frequencies(500_000.0, 128);
            let ratios: Vec<f64> = plain.iter().zip(&scaled).map(|(p, s)| p / s).collect();
            assert_eq!(ratios[0], 1.0);
            assert!((ratios[63] - 8.0).abs() < 1e-12);
            assert!(ratios.is_sorted(), "{ratios:?}");
        }
        let linear = RopeScaling::Linear { factor: 4.0 };
        assert_eq!(linear.frequencies(1e4, 4), [0.25, 0.0025]);
    }
}
