//! What failures take from a long training: checkpoints, restarts, and work that is done twice.
//!
//! A training computes for τ, then stops for δ to write a checkpoint. Failures are random, with a
//! mean time M between two. After a failure the training restarts, which takes R, and repeats what
//! it did since the last checkpoint. A training that takes T without all this then takes
//!
//! ```text
//! M e^(R/M) (e^((τ+δ)/M) − 1) T/τ
//! ```
//!
//! (J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
//! Systems 22, 2006). T over this time is the goodput. It is greatest near
//! τ = √(2δM) (1 + ⅓ √(δ/2M) + ⅑ δ/2M) − δ for δ < 2M, and τ = M for slower checkpoints (Daly); √(2δM) alone is Young's
//! estimate (J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17,
//! 1974).

use catalog::{Seconds, elementary};

use crate::known::PUBLISHED_MTBF;

/// Source of [`published_mtbf`], the default, in words.
pub const PUBLISHED: &str =
    "419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3, arXiv:2407.21783)";

/// Mean time between failures of one GPU, from a published training.
#[must_use]
pub fn published_mtbf() -> Seconds {
    PUBLISHED_MTBF
}

/// Times that decide what failures cost a training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Failures {
    /// Mean time between two failures of the whole job, M.
    pub between: Seconds,
    /// Time for which writing a checkpoint stops the training, δ.
    pub checkpoint: Seconds,
    /// Time from a failure until training goes on, R.
    pub restart: Seconds,
}

impl Failures {
    /// The compute time τ between two checkpoints at which least is lost.
    #[must_use]
    pub fn best_interval(&self) -> Seconds {
        let (m, d) = (self.between.0, self.checkpoint.0);
        if d >= 2.0 * m {
            return self.between;
        }
        let root = (d / (2.0 * m)).sqrt() / 3.0;
        Seconds((2.0 * d * m).sqrt() * (1.0 + root + root * root) - d)
    }

    /// Share of time that goes into steps which are kept; `interval` is τ.
    #[must_use]
    pub fn goodput(&self, interval: Seconds) -> f64 {
        let m = self.between.0;
        let lost = elementary::exp(self.restart.0 / m)
            * elementary::exp_m1((interval.0 + self.checkpoint.0) / m);
        let share = interval.0 / m / lost;
        if share.is_finite() { share } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: f64 = 60.0;

    fn failures(between: f64, checkpoint: f64, restart: f64) -> Failures {
        Failures {
            between: Seconds(between * MINUTE),
            checkpoint: Seconds(checkpoint * MINUTE),
            restart: Seconds(restart * MINUTE),
        }
    }

    /// Daly's figures 3 to 5: checkpoints of 5 minutes, restarts of 10.
    #[test]
    fn intervals_are_those_of_the_paper() {
        for (between, interval) in [(24.0 * 60.0, 117.0), (6.0 * 60.0, 57.0), (15.0, 9.1)] {
            let best = failures(between, 5.0, 10.0).best_interval().0 / MINUTE;
            assert!((best - interval).abs() < 0.5, "{between}: {best}");
        }
    }

    /// The published rate on 16,384 GPUs, checkpoints of 30 s, restarts of 10 min, computed by hand. Young: √(2 · 30 s ·
    /// 11,140 s) = 817.6 s. Daly: 817.6 s · (1 + 0.01223 + 0.00015) − 30 s = 797.7 s; then e^(R/M) = 1.05534 and
    /// (e^((τ+δ)/M) − 1) M/τ = 1.07713, and their product is 1/0.8797.
    #[test]
    fn goodput_is_what_a_hand_computes() {
        let f = Failures {
            between: Seconds(11_140.0),
            checkpoint: Seconds(30.0),
            restart: Seconds(600.0),
        };
        let best = f.best_interval();
        assert!((best.0 - 797.7).abs() < 0.1, "{best:?}");
        assert!((f.goodput(best) - 0.8797).abs() < 1e-4);
        let young = Seconds((2.0f64 * 30.0 * 11_140.0).sqrt());
        assert!((young.0 - 817.6).abs() < 0.1);
        assert!((f.goodput(best) - f.goodput(young)).abs() < 1e-4);
    }

    /// Rare failures cost √(2δ/M) for checkpoints and repeated work (Young), and R/M for restarts.
    #[test]
    fn rare_failures_cost_what_young_says() {
        for (checkpoint, restart) in [(1.0, 10.0), (5.0, 0.1), (0.1, 60.0)] {
            let f = failures(1e7, checkpoint, restart);
            let lost = 1.0 - f.goodput(f.best_interval());
            let young = (2.0 * checkpoint / 1e7f64).sqrt() + restart / 1e7;
            assert!((lost / young - 1.0).abs() < 2e-3, "{lost} {young}");
        }
    }

    #[test]
    fn no_interval_is_better() {
        for between in [0.5, 3.0, 15.0, 600.0, 1e5] {
            for checkpoint in [0.01, 0.5, 5.0] {
                let f = failures(between, checkpoint, 10.0);
                let best = f.goodput(f.best_interval());
                for percent in 1..400 {
                    let other = Seconds(f.best_interval().0 * f64::from(percent) / 100.0);
                    assert!(f.goodput(other) <= best * 1.03, "{f:?}: {other:?}");
                }
            }
        }
    }

    #[test]
    fn goodput_is_a_share() {
        // There are hardly any failures: only checkpoints cost time.
        let rare = failures(1e9, 1.0, 10.0);
        let share = rare.goodput(Seconds(99.0 * MINUTE));
        assert!((share - 0.99).abs() < 1e-4, "{share}");
        // A step is never done: restarts take longer than the time between failures.
        assert!(failures(1.0, 1.0, 1e6).goodput(Seconds(60.0)) < 1e-9);
        let hourly = failures(180.0, 0.5, 5.0);
        let share = hourly.goodput(hourly.best_interval());
        assert!((0.89..0.91).contains(&share), "{share}");
    }

    #[test]
    fn the_published_rate_is_a_failure_every_three_hours() {
        let hours = published_mtbf().0 / 16384.0 / 3600.0;
        assert!((3.0..3.2).contains(&hours), "{hours}");
    }
}
