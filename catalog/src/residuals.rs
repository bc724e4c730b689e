//! How far predictions lay from published runs, by kind of run: what intervals are made of.
//!
//! A kind is a runtime with a precision; a quantile of `ln(measured / predicted)` over its runs bounds
//! the next run of that kind. With `n` runs the 80% interval is between the `⌊0.1·(n+1)⌋`-th smallest
//! and the `⌊0.1·(n+1)⌋`-th largest (split-conformal prediction), so a kind needs nine runs; a smaller
//! one takes the next wider kind.

use crate::dtype::Precision;

/// Fewest runs whose order statistics bound an 80% interval.
pub const FEWEST: usize = 9;

const TABLE: &str = include_str!("../presets/runs/residuals.csv");

/// What was compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Quantity {
    /// Step time.
    Time,
    /// Peak memory.
    Memory,
    /// Ratio of two step times of one sweep (same model and devices, another strategy).
    Ratio,
}

/// An 80% interval of `ln(measured / predicted)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Residual {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Runs it rests on; 0 when nothing is known.
    pub runs: usize,
}

impl Residual {
    /// The interval around a prediction.
    #[must_use]
    pub fn around(&self, predicted: f64) -> (f64, f64) {
        (predicted * self.low.exp(), predicted * self.high.exp())
    }
}

impl Quantity {
    /// Its name in the table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Time => "time",
            Self::Memory => "memory",
            Self::Ratio => "ratio",
        }
    }

    /// Assumed half-width where no run says anything.
    fn assumed(self) -> f64 {
        match self {
            Self::Time => 0.15,
            Self::Memory => 0.10,
            Self::Ratio => 0.05,
        }
    }
}

/// The residual of the narrowest kind that has enough runs: this runtime and precision, the runtime,
/// the precision, all.
#[must_use]
pub fn of(quantity: Quantity, runtime: &str, precision: Precision) -> Residual {
    let precision = precision_name(precision);
    [
        (runtime, precision),
        (runtime, "*"),
        ("*", precision),
        ("*", "*"),
    ]
    .into_iter()
    .find_map(|(runtime, precision)| row(quantity, runtime, precision))
    .unwrap_or(Residual {
        low: -quantity.assumed(),
        high: quantity.assumed(),
        runs: 0,
    })
}

/// Name of a precision's kind.
#[must_use]
pub fn precision_name(precision: Precision) -> &'static str {
    match precision {
        Precision::Bf16 => "bf16",
        Precision::Fp16 => "fp16",
        Precision::Fp8 => "fp8",
        Precision::Fp32 => "fp32",
    }
}

/// The 80% interval of some residuals, with the prediction itself; `None` below [`FEWEST`].
#[must_use]
pub fn interval(residuals: &[f64]) -> Option<Residual> {
    let runs = residuals.len();
    if runs < FEWEST {
        return None;
    }
    let mut sorted = residuals.to_vec();
    sorted.sort_by(f64::total_cmp);
    let outside = ((runs + 1) as f64 * 0.1).floor() as usize;
    Some(Residual {
        low: sorted[outside - 1].min(0.0),
        high: sorted[runs - outside].max(0.0),
        runs,
    })
}

fn row(quantity: Quantity, runtime: &str, precision: &str) -> Option<Residual> {
    TABLE.lines().find_map(|line| {
        let cells: Vec<&str> = line.split(',').collect();
        let [name, of_runtime, of_precision, runs, low, high] = cells[..] else {
            return None;
        };
        if (name, of_runtime, of_precision) != (quantity.name(), runtime, precision) {
            return None;
        }
        Some(Residual {
            runs: runs.parse().ok()?,
            low: low.parse().ok()?,
            high: high.parse().ok()?,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nine_runs_bound_an_interval_and_eight_do_not() {
        let runs: Vec<f64> = (0..9).map(f64::from).collect();
        assert_eq!(interval(&runs[..8]), None);
        let found = interval(&runs).expect("nine are enough");
        assert_eq!((found.low, found.high), (0.0, 8.0));
    }

    #[test]
    fn an_unknown_runtime_takes_what_all_runs_say() {
        for quantity in [Quantity::Time, Quantity::Memory, Quantity::Ratio] {
            let found = of(quantity, "no such runtime", Precision::Fp32);
            assert!(
                found.low < 0.0 && found.high > 0.0,
                "{quantity:?} {found:?}"
            );
        }
    }
}
