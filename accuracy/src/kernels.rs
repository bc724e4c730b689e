//! How well the kernel tables interpolate: every point is left out and predicted from its neighbours.

use catalog::attention_charts::attention_charts;
use catalog::tables::{self, CollectiveOp, GemmGrid};
use catalog::{DType, Fitted};
use costmodel::price::TablePrices;
use ndarray::s;

use super::summary::{Stats, stats};

/// Column names of [`rows`].
pub(crate) const HEADER: [&str; 4] = ["table", "points", "median", "p90"];

/// Leave-one-out errors of every table. A point at the end of an axis is not predicted along that axis,
/// because nothing beyond it is known.
pub(crate) fn rows() -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for name in tables::gemm_names() {
        for (dtype, bits) in [(DType::Bf16, "bf16"), (DType::F8, "8 bits")] {
            if let Some(grid) = tables::gemm(name, dtype) {
                let what = format!("matrix products, {name}, {bits}");
                rows.extend(row(&what, &grid_errors(&grid)));
            }
        }
    }
    for chart in attention_charts().all() {
        let passes = [
            ("forward", chart.forward_tflops),
            ("backward", chart.backward_tflops),
        ];
        for (pass, rates) in passes {
            let middles = rates.windows(3).map(|w| (w[0] + w[2]) / 2.0 / w[1] - 1.0);
            let what = format!("{}, {pass}", chart.name);
            rows.extend(row(&what, &middles.collect::<Vec<_>>()));
        }
    }
    rows
}

/// Column names of [`collective_rows`].
pub(crate) const COLLECTIVES: [&str; 5] = [
    "device",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
];

/// Errors of the fits of one-node collectives, the largest over all numbers of ranks.
pub(crate) fn collective_rows() -> Vec<Vec<String>> {
    let worst = |name: &str, op: CollectiveOp| {
        let fits = tables::one_node_collectives(name);
        let of_op = fits.iter().filter(|fit| fit.op == op);
        of_op.map(|fit| fit.error).fold(0.0, f64::max)
    };
    tables::gemm_names()
        .map(|name| {
            let cells = [
                CollectiveOp::AllReduce,
                CollectiveOp::AllGather,
                CollectiveOp::ReduceScatter,
                CollectiveOp::AllToAll,
            ]
            .map(|op| percent(worst(name, op)));
            [vec![name.to_owned()], cells.to_vec()].concat()
        })
        .collect()
}

/// Column names of [`square_rows`].
pub(crate) const SQUARES: [&str; 6] = [
    "device",
    "table",
    "machines",
    "measured, TFLOP/s",
    "priced",
    "error",
];

/// The best square product of every GPU that a public benchmark measured, priced as a short run. Errors are against the
/// middle of the measured machines.
pub(crate) fn square_rows() -> Vec<Vec<String>> {
    let rows = tables::best_squares().into_iter().filter_map(|measured| {
        let priced = best_square(&measured.device)?;
        let middle = (measured.lowest + measured.highest) / 2.0;
        let range = match measured.machines {
            1 => format!("{:.0}", measured.lowest),
            _ => format!("{:.0}–{:.0}", measured.lowest, measured.highest),
        };
        Some(vec![
            measured.device.clone(),
            catalog::load::device(&measured.device).ok()?.kernels,
            measured.machines.to_string(),
            range,
            format!("{priced:.0}"),
            format!("{:+.0}%", (priced / middle - 1.0) * 100.0),
        ])
    });
    rows.collect()
}

/// The best priced rate of the measured sizes, in TFLOP/s.
fn best_square(device: &str) -> Option<f64> {
    let cluster = catalog::load::cluster(&format!("{device} x 8 per node, 100 Gb/s")).ok()?;
    let prices = TablePrices::new(&cluster, 8, &Fitted::default()).ok()?;
    let rates = tables::SQUARES.map(|size| {
        let time = prices.short_gemm([size; 3], DType::Bf16);
        2.0 * (size as f64).powi(3) / time.0 / 1e12
    });
    rates.into_iter().max_by(f64::total_cmp)
}

fn row(what: &str, errors: &[f64]) -> Option<Vec<String>> {
    let Stats {
        count, median, p90, ..
    } = stats(errors)?;
    Some(vec![
        what.to_owned(),
        count.to_string(),
        percent(median),
        percent(p90),
    ])
}

fn percent(error: f64) -> String {
    format!("{:.1}%", error * 100.0)
}

/// Errors of interpolation at every point, averaged over the axes on which it has neighbours.
fn grid_errors(grid: &GemmGrid) -> Vec<f64> {
    let logs = grid.microseconds.mapv(f64::ln);
    logs.indexed_iter()
        .filter_map(|((m, n, k), own)| {
            let lines = [
                (logs.slice(s![.., n, k]), m),
                (logs.slice(s![m, .., k]), n),
                (logs.slice(s![m, n, ..]), k),
            ];
            let along: Vec<f64> = (lines.iter().zip(&grid.sizes))
                .filter_map(|((line, at), sizes)| {
                    let position = between(sizes, *at)?;
                    let (before, after) = (line[at - 1], line[at + 1]);
                    Some(before + (after - before) * position)
                })
                .collect();
            let mean = along.iter().sum::<f64>() / along.len().max(1) as f64;
            (!along.is_empty()).then(|| (mean - own).exp() - 1.0)
        })
        .collect()
}

/// Position of a size between its two neighbours, in logarithms: 0 at the lower, 1 at the upper.
fn between(sizes: &[u64], at: usize) -> Option<f64> {
    let log = |index: usize| sizes.get(index).map(|&size| (size as f64).ln());
    let (before, own, after) = (log(at.checked_sub(1)?)?, log(at)?, log(at + 1)?);
    Some((own - before) / (after - before))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array3;

    #[test]
    fn a_power_law_is_interpolated_exactly_and_a_bump_is_its_own_error() {
        let sizes = vec![256, 512, 2048, 4096];
        let product = |(m, n, k)| (sizes[m] * sizes[n] * sizes[k]) as f64;
        let mut grid = GemmGrid {
            sizes: [(); 3].map(|()| sizes.clone()),
            microseconds: Array3::from_shape_fn((4, 4, 4), product),
        };
        let errors = grid_errors(&grid);
        // All but the corners have both neighbours along some axis.
        assert_eq!(errors.len(), 64 - 8);
        assert!(errors.iter().all(|e| e.abs() < 1e-9));
        grid.microseconds[[1, 1, 1]] *= 2.0;
        let largest = grid_errors(&grid).into_iter().map(f64::abs);
        let largest = largest.fold(0.0, f64::max);
        assert!((largest - 0.5).abs() < 1e-9, "{largest}");
    }

    /// GeForce cards run above the clocks of their datasheets, so their prices may be this much too high.
    #[test]
    fn best_squares_are_within_a_sixth_of_public_measurements() {
        assert_eq!(square_rows().len(), tables::best_squares().len());
        for measured in tables::best_squares() {
            let priced = best_square(&measured.device).expect("a preset");
            let range = measured.lowest * 5.0 / 6.0..measured.highest * 7.0 / 6.0;
            assert!(range.contains(&priced), "{}: {priced}", measured.device);
        }
    }

    #[test]
    fn every_device_with_a_table_has_its_rows() {
        let devices = tables::gemm_names().count();
        assert_eq!(collective_rows().len(), devices);
        assert!(rows().len() >= devices + 8);
    }
}
