//! Ratios of measured times to a table's prices, interpolated over sizes.
//!
//! At sizes that were measured, the table's price times the ratio is what was measured. Between them the logarithm of
//! the ratio is interpolated over the nearest ones in the logarithm of every size, weighted by inverse squared distance
//! (Shepard 1968): the table says how time grows with size, measurements how fast this device is.

use catalog::elementary;

/// Number of nearest measurements that an interpolated value rests on.
const NEIGHBOURS: usize = 4;

/// Ratios of measured to tabled time of kernels with `N` sizes.
#[derive(Clone, Debug, Default)]
pub(super) struct Ratios<const N: usize> {
    points: Vec<Point<N>>,
}

#[derive(Clone, Copy, Debug)]
struct Point<const N: usize> {
    sizes: [f64; N],
    ratio: f64,
}

impl<const N: usize> Ratios<N> {
    /// Ratios of `(sizes, measured seconds)` to what `table` gives for the same sizes.
    pub(super) fn new(
        measured: impl IntoIterator<Item = ([u64; N], f64)>,
        table: impl Fn([u64; N]) -> f64,
    ) -> Self {
        let point = |(sizes, seconds): ([u64; N], f64)| Point {
            sizes: logs(sizes),
            ratio: elementary::ln(seconds / table(sizes)),
        };
        Self {
            points: measured.into_iter().map(point).collect(),
        }
    }

    /// The ratio at these sizes; `None` if nothing was measured.
    pub(super) fn at(&self, sizes: [u64; N]) -> Option<f64> {
        if self.points.is_empty() {
            return None;
        }
        let sizes = logs(sizes);
        let points = self.points.iter();
        let near = between(points.map(|point| (squared(&point.sizes, &sizes), point.ratio)));
        near.map(elementary::exp)
    }

    /// Number of measurements, with the lowest and the highest ratio; `None` without measurements.
    pub(super) fn summary(&self) -> Option<(usize, [f64; 2])> {
        let ratios = || self.points.iter().map(|point| point.ratio);
        let lowest = ratios().reduce(f64::min)?;
        let highest = ratios().reduce(f64::max)?;
        Some((
            self.points.len(),
            [elementary::exp(lowest), elementary::exp(highest)],
        ))
    }
}

/// Mean of the nearest points' values, given as `(squared distance, value)`, weighted by inverse squared distance. A
/// point at distance zero gives its own value. `None` without points.
pub(super) fn between(points: impl Iterator<Item = (f64, f64)>) -> Option<f64> {
    let mut near: Vec<(f64, f64)> = points.collect();
    if near.len() > NEIGHBOURS {
        near.select_nth_unstable_by(NEIGHBOURS - 1, |a, b| a.0.total_cmp(&b.0));
        near.truncate(NEIGHBOURS);
    }
    if let Some((_, value)) = near.iter().find(|(distance, _)| *distance == 0.0) {
        return Some(*value);
    }
    let weights: f64 = near.iter().map(|(distance, _)| 1.0 / distance).sum();
    let sum: f64 = near.iter().map(|(distance, value)| value / distance).sum();
    (!near.is_empty()).then(|| sum / weights)
}

/// Squared distance of two vectors.
pub(super) fn squared(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum()
}

fn logs<const N: usize>(sizes: [u64; N]) -> [f64; N] {
    sizes.map(|size| elementary::ln(size.max(1) as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_sizes_have_their_ratio_and_others_one_between() {
        let table = |[m, n]: [u64; 2]| (m * n) as f64;
        let measured = [([8, 8], 64.0 * 2.0), ([16, 8], 128.0 * 0.5)];
        let ratios = Ratios::new(measured, table);
        for (sizes, wanted) in [
            ([8, 8], 2.0),
            ([16, 8], 0.5),
            // As far from both, and at squared distances of 2 to 1 and of 5 to 2.
            ([8, 8 << 3], 2f64.powf((10.0 - 9.0) / 19.0)),
            ([16, 16], 2f64.powf(-1.0 / 3.0)),
        ] {
            let ratio = ratios.at(sizes).expect("measured");
            assert!((ratio - wanted).abs() < 1e-9, "{sizes:?}: {ratio}");
        }
        assert_eq!(ratios.summary(), Some((2, [0.5, 2.0])));
        assert_eq!(Ratios::new([], table).at([1, 1]), None);
        assert_eq!(Ratios::new([], table).summary(), None);
    }

    #[test]
    fn the_nearest_four_count() {
        let table = |_: [u64; 1]| 1.0;
        let near = [1u64, 2, 8, 16].map(|size| ([size], 3.0));
        let ratios = Ratios::new(near.into_iter().chain([([1 << 30], 9.0)]), table);
        let ratio = ratios.at([4]).expect("measured");
        assert!((ratio - 3.0).abs() < 1e-9, "{ratio}");
    }
}
