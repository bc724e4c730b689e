//! Prices from a profile of this machine.
//!
//! A kernel that was measured at its very sizes costs what was measured. Between measurements the
//! rate per unit of work (the product of sizes) is interpolated over the nearest ones in the
//! logarithm of every size, weighted by inverse squared distance (Shepard 1968). Products are
//! interpolated only between products whose rows are aligned alike, because unaligned ones are far slower (`alignment`).

use std::collections::BTreeMap;

use catalog::profile::{Kernel, Measured, Profile};
use catalog::{Origin, Seconds, elementary};
use plans::UsedConstant;

use super::alignment::Rows;
use super::between_gpus::BetweenGpus;
use super::ratios::{between, squared};
use crate::known::constant;

/// Prices of kernels from a profile, on ranks that share a machine's cores or have a GPU each.
#[derive(Clone, Debug)]
pub struct ProfilePrices {
    kernels: BTreeMap<String, Vec<Point>>,
    /// Measured times of messages between GPUs.
    pub(crate) messages: BetweenGpus,
    /// Name of the measured machine, as the source of a price.
    source: String,
    /// Whether the profile is of GPUs, so that ranks share no cores.
    pub(crate) of_gpus: bool,
    /// Number of cores that ranks share.
    pub(crate) cores: u64,
    /// Number of ranks that compute at the same time.
    pub(crate) ranks: u64,
}

#[derive(Clone, Debug)]
struct Point {
    sizes: Vec<u64>,
    rows: Rows,
    ranks: u64,
    seconds: f64,
}

impl ProfilePrices {
    pub(crate) fn new(profile: &Profile, ranks: u64) -> Self {
        let mut kernels: BTreeMap<String, Vec<Point>> = BTreeMap::new();
        let kernel = |m: &&Measured| BetweenGpus::sizes(m).is_none();
        for m in profile.measured.iter().filter(kernel) {
            kernels.entry(m.kernel.clone()).or_default().push(Point {
                sizes: m.sizes.clone(),
                rows: Rows::of_measured(&m.kernel, &m.sizes),
                ranks: m.ranks,
                seconds: m.seconds,
            });
        }
        let machine = &profile.machine;
        Self {
            kernels,
            messages: BetweenGpus::of(profile),
            of_gpus: machine.gpu.is_some(),
            source: format!("profile of {}", machine.described()),
            cores: machine.cores,
            ranks,
        }
    }

    /// Time of a kernel while `ranks` ranks compute; `None` if nothing of its kind was measured.
    #[must_use]
    pub fn time(&self, kernel: &Kernel, ranks: u64) -> Option<Seconds> {
        let points = self.kernels.get(&kernel.name)?;
        let rows = Rows::of_measured(&kernel.name, &kernel.sizes);
        let has_own = points.iter().any(|p| p.rows == rows);
        let alike = |p: &&Point| {
            let same = p.rows == rows || !has_own;
            p.sizes.len() == kernel.sizes.len() && same
        };
        // Without measurements for this number of ranks, those for the nearest number are used.
        let apart = |p: &Point| elementary::ln(p.ranks as f64 / ranks as f64).abs();
        let nearest = points
            .iter()
            .filter(alike)
            .map(apart)
            .min_by(f64::total_cmp)?;
        let wanted = logs(&kernel.sizes);
        let here = |p: &&Point| apart(p) <= nearest;
        let near = points.iter().filter(alike).filter(here).map(|p| {
            let per_unit = p.seconds / work(&p.sizes);
            (squared(&logs(&p.sizes), &wanted), elementary::ln(per_unit))
        });
        between(near).map(|per_unit| Seconds(elementary::exp(per_unit) * work(&kernel.sizes)))
    }

    pub(crate) fn constants(&self) -> Vec<UsedConstant> {
        let count = self.kernels.values().map(Vec::len).sum::<usize>();
        let messages = self.messages.count();
        vec![constant(
            "kernels and messages",
            format!("{} measurements", count + messages),
            Origin::Measured,
            &self.source,
        )]
    }
}

fn logs(sizes: &[u64]) -> Vec<f64> {
    sizes
        .iter()
        .map(|&size| elementary::ln(size as f64))
        .collect()
}

fn work(sizes: &[u64]) -> f64 {
    sizes.iter().map(|&s| s as f64).product()
}

#[cfg(test)]
mod tests {
    use super::*;
    use catalog::profile::Machine;

    fn prices(points: &[(&[u64], u64, f64)]) -> ProfilePrices {
        let measured = points.iter().map(|&(sizes, ranks, seconds)| Measured {
            kernel: "matmul".to_owned(),
            sizes: sizes.to_vec(),
            ranks,
            seconds,
            spread: 0.0,
        });
        let mut profile = empty();
        profile.measured = measured.collect();
        ProfilePrices::new(&profile, 1)
    }

    fn empty() -> Profile {
        Profile {
            schema_version: 1,
            tool_version: String::new(),
            machine: Machine {
                processor: String::new(),
                cores: 2,
                memory_bytes: 1 << 30,
                gpu: None,
            },
            measured: Vec::new(),
        }
    }

    #[test]
    fn unaligned_products_are_interpolated_among_themselves() {
        let point = |sizes: [u64; 3], seconds: f64| Measured {
            kernel: "matmul forward bf16".to_owned(),
            sizes: sizes.to_vec(),
            ranks: 1,
            seconds,
            spread: 0.0,
        };
        let mut profile = empty();
        profile.measured = vec![point([1024, 512, 768], 1.0), point([1024, 513, 768], 6.0)];
        let prices = ProfilePrices::new(&profile, 1);
        for (columns, wanted) in [(520, 520.0 / 512.0), (515, 6.0 * 515.0 / 513.0)] {
            let kernel = Kernel::new("matmul forward bf16", [1024, columns, 768]);
            let time = prices.time(&kernel, 1).expect("measured");
            assert!((time.0 - wanted).abs() < 1e-9, "{columns}: {time:?}");
        }
    }

    #[test]
    fn measured_sizes_cost_what_was_measured_and_others_lie_between() {
        let p = prices(&[(&[8, 8], 1, 1.0), (&[16, 8], 1, 4.0), (&[8, 8], 2, 3.0)]);
        let check = |sizes: &[u64], ranks: u64, expected: f64| {
            let time = p
                .time(&Kernel::new("matmul", sizes), ranks)
                .expect("measured");
            assert!((time.0 - expected).abs() < 1e-9, "{sizes:?}: {time:?}");
        };
        check(&[8, 8], 1, 1.0);
        check(&[16, 8], 1, 4.0);
        check(&[8, 8], 2, 3.0);
        // Twice the work of (8, 8), at rates 1 and 2 with weights 2 and 1: the distances are ln 2 and
        // √2·ln 2.
        check(&[8, 16], 1, 2.0 * 2f64.powf(1.0 / 3.0));
        assert_eq!(p.time(&Kernel::new("other", [1u64]), 1), None);
        // Four ranks were not measured; two are nearer than one.
        check(&[8, 8], 4, 3.0);
    }
}
