//! Combines measurements of the same kernels taken at several times.

use std::collections::BTreeMap;

use catalog::profile::{Kernel, Measured};

/// Number of times at which everything is measured. A machine's clock and load change from minute to minute; if every
/// kernel were measured in one go, prices of different shapes would stem from different conditions.
pub const VISITS: usize = 3;

/// Combines several visits' measurements of each kernel: the median over visits. Its spread is the larger of the middle
/// visit's own and half the distance between the extremes.
#[must_use]
pub fn middle(visits: impl IntoIterator<Item = Measured>) -> Vec<Measured> {
    let mut of: BTreeMap<(Kernel, u64), Vec<Measured>> = BTreeMap::new();
    for measured in visits {
        let kernel = Kernel::new(measured.kernel.clone(), measured.sizes.clone());
        of.entry((kernel, measured.ranks))
            .or_default()
            .push(measured);
    }
    of.into_values()
        .map(|mut visits| {
            visits.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
            let range = visits[visits.len() - 1].seconds - visits[0].seconds;
            let mut middle = visits.swap_remove(visits.len() / 2);
            middle.spread = middle.spread.max(range / 2.0 / middle.seconds);
            middle
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_minute_does_not_count() {
        let seen = |kernel: &str, seconds: f64| Measured {
            kernel: kernel.to_owned(),
            sizes: vec![2, 3],
            ranks: 1,
            seconds,
            spread: 0.01,
        };
        let visits = [
            seen("a", 1.0),
            seen("b", 4.0),
            seen("a", 3.0),
            seen("b", 4.0),
            seen("a", 1.1),
            seen("b", 4.0),
        ];
        let middle = middle(visits);
        let of: Vec<(&str, f64)> = middle
            .iter()
            .map(|m| (m.kernel.as_str(), m.seconds))
            .collect();
        assert_eq!(of, [("a", 1.1), ("b", 4.0)]);
        assert!((middle[0].spread - 1.0 / 1.1).abs() < 1e-12);
        assert!((middle[1].spread - 0.01).abs() < 1e-12);
    }
}
