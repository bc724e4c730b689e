//! Linear scales of charts, with round values for their axes.

/// A linear scale from data to pixels.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) from: f64,
    pub(super) to: f64,
}

impl Scale {
    /// A scale around values, with room on both sides.
    pub(super) fn around(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values {
            low = low.min(value);
            high = high.max(value);
        }
        // A tenth of the range, or of the value where all are equal, keeps dots off the edges.
        let pad = ((high - low) * 0.1)
            .max(high.abs() * 0.005)
            .max(f64::MIN_POSITIVE);
        Self {
            low: low - pad,
            high: high + pad,
            from,
            to,
        }
    }

    /// About five round values inside the scale.
    pub(super) fn ticks(self) -> Vec<f64> {
        let rough = (self.high - self.low) / 5.0;
        let magnitude = 10f64.powf(rough.log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|s| s * magnitude);
        let step = steps.into_iter().find(|s| *s >= rough).unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        let last = (self.high / step).floor() as i64;
        (first..=last).map(|i| i as f64 * step).collect()
    }

    /// Data to pixels, rounded to a tenth so that files are small.
    pub(super) fn px(self, value: f64) -> f64 {
        let share = (value - self.low) / (self.high - self.low);
        ((self.from + share * (self.to - self.from)) * 10.0).round() / 10.0
    }
}

#[cfg(test)]
mod tests {
    use super::Scale;

    #[test]
    fn axes_have_round_values() {
        for (high, ticks) in [
            (8.28, vec![0.0, 2.0, 4.0, 6.0, 8.0]),
            (75.1, vec![0.0, 20.0, 40.0, 60.0]),
            (1.0, vec![0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ] {
            let scale = Scale {
                low: 0.0,
                high,
                from: 0.0,
                to: 1.0,
            };
            let made = scale.ticks();
            assert_eq!(made.len(), ticks.len(), "{high}: {made:?}");
            let near = made.iter().zip(&ticks).all(|(a, b)| (a - b).abs() < 1e-9);
            assert!(near, "{high}: {made:?}");
        }
    }
}
