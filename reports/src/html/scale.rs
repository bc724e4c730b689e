//! Round values for the axes of charts.

use catalog::elementary;

/// What an axis of a chart spans.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Scale {
    /// About five round values inside the scale.
    pub(super) fn ticks(self) -> Vec<f64> {
        let rough = (self.high - self.low) / 5.0;
        let magnitude = elementary::powf(10.0, elementary::log10(rough).floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|s| s * magnitude);
        let step = steps.into_iter().find(|s| *s >= rough).unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        let last = (self.high / step).floor() as i64;
        (first..=last).map(|i| i as f64 * step).collect()
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
            let scale = Scale { low: 0.0, high };
            let made = scale.ticks();
            assert_eq!(made.len(), ticks.len(), "{high}: {made:?}");
            let near = made.iter().zip(&ticks).all(|(a, b)| (a - b).abs() < 1e-9);
            assert!(near, "{high}: {made:?}");
        }
    }
}
