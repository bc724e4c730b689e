//! Learns from a few measured steps how long work takes on a user's own system.
//!
//! The fit finds four factors, by which predicted times of compute, memory, network and host are multiplied. It is a ridge
//! regression on logarithms (Hoerl and Kennard 1970): a factor moves away from 1 only as far as the runs demand, and stays 1 if no
//! run depends on it. What the factors do not explain of a run is noise.
//!
//! Ridge regression needs two assumptions: how large the noise is, and how much factors differ between systems
//! (`Assumptions`). The regression is made for every multiple of the noise in `NOISE` and of the spread in `WIDER`. The result is
//! the mean of these fits, and the fits whose assumptions make the measured times most probable weigh most (MacKay 1992, "Bayesian
//! interpolation"). For example, if all runs took 20% longer than predicted, the factors explain nearly all of it. If half of the
//! runs took 20% longer and half 20% less, the factors stay near 1.

use catalog::Seconds;
use catalog::calibration::{Calibration, Rate, TimeFactors, Unexplained};
use costmodel::{CostError, CostModel, Scenario};
use plans::Strategy;

/// What is assumed about a user's system before any of its steps is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Assumptions {
    /// How much single runs differ from what the factors explain: the standard deviation of `ln(measured / predicted)`, so 0.07 is
    /// about 7%. It is the median over systems.
    pub(crate) noise: f64,
    /// How much each factor differs between systems: the standard deviation of its logarithm, so 0.2 is about 20%. In the order of
    /// [`Rate::ALL`]: compute, memory, network, host.
    pub(crate) spread: Logs,
}

/// The assumptions under which a few runs drawn from each published source were most probable when they were chosen (empirical
/// Bayes). `ACCURACY.md` says how probable the runs are today if one assumption is halved or doubled. Less for compute would be more
/// probable: it is kept at 2%, because clocks and cooling do differ between real systems. Half of memory's 20% would be a little more
/// probable too: the 20% were chosen before the predictions of one source became better.
pub(crate) const USUAL: Assumptions = Assumptions {
    noise: 0.07,
    spread: [0.02, 0.20, 0.15, 0.10],
};

/// Multiples of the median noise that are tried, each with the logarithm of its weight before any run is known: a log-normal
/// distribution with standard deviation ln 2, in steps of half a deviation.
const NOISE: [(f64, f64); 9] = [
    (0.25, -2.0),
    (0.354, -1.125),
    (0.5, -0.5),
    (0.707, -0.125),
    (1.0, 0.0),
    (1.414, -0.125),
    (2.0, -0.5),
    (2.83, -1.125),
    (4.0, -2.0),
];

/// Multiples of the spread that are tried, because a user's system may be more unusual than the published ones, or less: Grace cores
/// take 2.5 times what Xeons do for a launch (NVIDIA/TransformerEngine issue 2053). The second number of each pair is the logarithm
/// of the weight that the multiple has before any run is known. The weights follow a log-normal distribution with median 1 and
/// standard deviation ln 2.
const WIDER: [(f64, f64); 7] = [
    (0.5, -0.5),
    (1.0, 0.0),
    (2.0, -0.5),
    (4.0, -2.0),
    (8.0, -4.5),
    (16.0, -8.0),
    (32.0, -12.5),
];

/// Step in a factor's logarithm over which slopes are measured by finite differences.
const STEP: f64 = 0.05;

/// Largest logarithm of a factor: cluster files take factors from 0.1 to 10.
pub(crate) const MOST: f64 = 2.3;

const ROUNDS: usize = 12;

/// Logarithms of the four factors, in the order of [`Rate::ALL`].
pub(crate) type Logs = [f64; 4];

/// A measured run of the user's own system.
#[derive(Clone, Copy, Debug)]
pub struct OwnRun<'a> {
    /// Model, workload, runtime and cluster of the run.
    pub scenario: &'a Scenario,
    /// The strategy that it ran.
    pub strategy: &'a Strategy,
    /// Measured time of one step.
    pub step_time: Seconds,
}

/// The factors that measured runs of a system show.
#[derive(Clone, Debug, PartialEq)]
pub struct Learned {
    /// Factors that multiply predicted times, by kind of work.
    pub factors: TimeFactors,
    /// How far the runs leave the factors open: the covariance of their logarithms.
    pub covariance: [Logs; 4],
    /// How the factors explain each run, in the order of the runs given.
    pub runs: Vec<Explained>,
}

impl Learned {
    /// The kinds of work whose factors moved as far as they may.
    #[must_use]
    pub fn at_bounds(&self) -> Vec<Rate> {
        let at_bound = |rate: &Rate| self.factors.of(*rate).ln().abs() > MOST - 1e-6;
        Rate::ALL.iter().copied().filter(at_bound).collect()
    }
}

/// How much of one run's error the factors explain.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// Predicted time of one step without the factors.
    pub before: Seconds,
    /// Predicted time of one step with all factors.
    pub after: Seconds,
    /// Predicted time of one step with the least factors: peak rates bound it.
    pub shortest: Seconds,
    /// For each kind of work, the relative change from `before` when only its factor is applied.
    pub by_rate: Vec<(Rate, f64)>,
}

/// Learns the factors of a system from its runs.
///
/// # Errors
/// When a run cannot be predicted.
pub fn learn(runs: &[OwnRun<'_>]) -> Result<Learned, CostError> {
    let measured: Vec<f64> = runs.iter().map(|run| run.step_time.0.ln()).collect();
    let time = |run: usize, logs| Ok::<f64, CostError>(predicted(&runs[run], logs)?.0.ln());
    let logs = fit(&measured, &time)?;
    let covariance = Near::new(&measured, &time, logs)?.covariance(logs);
    let explained = runs.iter().map(|run| {
        let before = predicted(run, [0.0; 4])?;
        let alone = |at: usize| {
            let mut only = [0.0; 4];
            only[at] = logs[at];
            Ok((Rate::ALL[at], predicted(run, only)?.0 / before.0 - 1.0))
        };
        Ok(Explained {
            before,
            after: predicted(run, logs)?,
            shortest: predicted(run, [-MOST; 4])?,
            by_rate: (0..4).map(alone).collect::<Result<_, CostError>>()?,
        })
    });
    Ok(Learned {
        factors: TimeFactors::from_logs(logs),
        covariance,
        runs: explained.collect::<Result<_, CostError>>()?,
    })
}

/// Step time of a run on its cluster, with these factors instead of those that the cluster has.
pub(crate) fn predicted(run: &OwnRun<'_>, logs: Logs) -> Result<Seconds, CostError> {
    let scenario = with_factors(run.scenario, logs);
    Ok(CostModel::new(scenario)?.score(run.strategy)?.step_time)
}

/// A scenario whose cluster has these factors.
pub(crate) fn with_factors(scenario: &Scenario, logs: Logs) -> Scenario {
    let mut scenario = scenario.clone();
    let calibration = calibration(&scenario.runtime.name, TimeFactors::from_logs(logs));
    scenario.cluster.calibration = Some(calibration);
    scenario
}

/// A calibration that says nothing but these factors.
pub(crate) fn calibration(runtime: &str, factors: TimeFactors) -> Calibration {
    Calibration {
        runtime: runtime.to_owned(),
        runs: 1,
        time_factors: factors,
        unexplained: Unexplained::default(),
        covariance: [[0.0; 4]; 4],
        alternatives: Vec::new(),
        measured: Vec::new(),
        source: String::new(),
    }
}

/// Fits the logarithms of the factors to `measured`, the logarithms of step times; `time(run, logs)` is the logarithm
/// of a run's predicted step time under these factors.
pub(crate) fn fit<E>(
    measured: &[f64],
    time: &dyn Fn(usize, Logs) -> Result<f64, E>,
) -> Result<Logs, E> {
    let mut logs = [0.0; 4];
    for _ in 0..ROUNDS {
        let next = Near::new(measured, time, logs)?.expected();
        let moved = (0..4).map(|at| (next[at] - logs[at]).abs());
        let farthest = moved.fold(0.0, f64::max);
        logs = next;
        if farthest < 1e-4 {
            break;
        }
    }
    Ok(logs)
}

/// Runs as seen near some factors: logarithms of step times are taken to change linearly with those of the factors.
struct Near {
    /// For every run, measured less predicted logarithm of the time where all factors are 1.
    off: Vec<f64>,
    /// For every run, how fast the predicted logarithm grows with that of each factor.
    slopes: Vec<Logs>,
}

impl Near {
    /// How runs look near the factors with these logarithms.
    fn new<E>(
        measured: &[f64],
        time: &dyn Fn(usize, Logs) -> Result<f64, E>,
        logs: Logs,
    ) -> Result<Self, E> {
        let mut off = Vec::with_capacity(measured.len());
        let mut slopes = Vec::with_capacity(measured.len());
        for (run, &measured) in measured.iter().enumerate() {
            let here = time(run, logs)?;
            let mut slope = [0.0; 4];
            for (at, slope) in slope.iter_mut().enumerate() {
                let mut beside = logs;
                beside[at] += STEP;
                *slope = (time(run, beside)? - here) / STEP;
            }
            off.push(measured - here + dot(slope, logs));
            slopes.push(slope);
        }
        Ok(Self { off, slopes })
    }

    /// The mean of the fits under all assumptions about noise and spread.
    fn expected(&self) -> Logs {
        let explained = explanations(&self.off, &self.slopes, USUAL);
        let all = log_of_sum(&explained);
        let mean = |at: usize| {
            let terms = explained
                .iter()
                .map(|(of, weight)| of.logs[at] * (weight - all).exp());
            terms.sum::<f64>().clamp(-MOST, MOST)
        };
        std::array::from_fn(mean)
    }

    /// The covariance of the logarithms of the factors around these: within each fit, and between the fits.
    fn covariance(&self, mean: Logs) -> [Logs; 4] {
        let explained = explanations(&self.off, &self.slopes, USUAL);
        let all = log_of_sum(&explained);
        let mut sum = [[0.0; 4]; 4];
        for (of, weight) in &explained {
            let share = (weight - all).exp();
            for (at, row) in sum.iter_mut().enumerate() {
                let unit = std::array::from_fn(|other| f64::from(u8::from(other == at)));
                let (within, _) = solved(of.normal, unit);
                for (other, entry) in row.iter_mut().enumerate() {
                    let between = (of.logs[at] - mean[at]) * (of.logs[other] - mean[other]);
                    *entry += share * (within[other] + between);
                }
            }
        }
        sum
    }
}

/// The fits under every multiple of the assumed noise and spread, each with the logarithm of its weight.
fn explanations(off: &[f64], slopes: &[Logs], usual: Assumptions) -> Vec<(Explanation, f64)> {
    let assumed = WIDER
        .iter()
        .flat_map(|wider| NOISE.map(|noise| (*wider, noise)));
    assumed
        .map(|((wider, of_wider), (noise, of_noise))| {
            let spread = usual.spread.map(|spread| spread * wider);
            let explained = Explanation::new(off, slopes, usual.noise * noise, spread);
            let weight = of_wider + of_noise + explained.log_evidence;
            (explained, weight)
        })
        .collect()
}

/// How probable measured runs are under some assumptions. The result is a logarithm, and a constant that is the same for all
/// assumptions is left out of it. For each run, `off` has `ln(measured / predicted)`, and `slopes` how fast that prediction's
/// logarithm grows with each factor's.
pub(crate) fn log_probability(off: &[f64], slopes: &[Logs], usual: Assumptions) -> f64 {
    log_of_sum(&explanations(off, slopes, usual))
}

/// Logarithm of the sum of the fits' weights, which are given as logarithms. Weights are taken
/// relative to the largest, because most are too small for an `f64`.
fn log_of_sum(explained: &[(Explanation, f64)]) -> f64 {
    let weights = || explained.iter().map(|(_, weight)| *weight);
    let best = weights().fold(f64::NEG_INFINITY, f64::max);
    best + weights().map(|of| (of - best).exp()).sum::<f64>().ln()
}

fn dot(a: Logs, b: Logs) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A fit of the factors under one assumption about the noise and one about how much systems differ.
struct Explanation {
    /// The most likely logarithms of the factors.
    logs: Logs,
    /// The inverse of their covariance.
    normal: [Logs; 4],
    /// Logarithm of how probable the assumptions make the measured times. A constant that all fits share is left out.
    log_evidence: f64,
}

impl Explanation {
    /// Fits factors that close the gaps `off`, given each run's slopes. `noise` is the standard deviation of the noise, `spread`
    /// are those of the factors.
    fn new(off: &[f64], slopes: &[Logs], noise: f64, spread: Logs) -> Self {
        let (mut normal, mut right) = ([[0.0; 4]; 4], [0.0; 4]);
        for (at, row) in normal.iter_mut().enumerate() {
            for (other, entry) in row.iter_mut().enumerate() {
                let products = slopes.iter().map(|slope| slope[at] * slope[other]);
                *entry = products.sum::<f64>() / noise.powi(2);
            }
            row[at] += spread[at].powi(-2);
            let products = slopes.iter().zip(off).map(|(slope, off)| slope[at] * off);
            right[at] = products.sum::<f64>() / noise.powi(2);
        }
        let (logs, log_determinant) = solved(normal, right);
        let missed = (off.iter().zip(slopes)).map(|(off, &slope)| (off - dot(slope, logs)) / noise);
        let moved = logs.iter().zip(spread).map(|(log, spread)| log / spread);
        let squares: f64 = missed.chain(moved).map(|x| x * x).sum();
        Self {
            logs,
            normal,
            log_evidence: -0.5 * (squares + log_determinant)
                - off.len() as f64 * noise.ln()
                - spread.map(f64::ln).iter().sum::<f64>(),
        }
    }
}

/// The solution of a symmetric positive definite system by Gaussian elimination, and the logarithm of its determinant.
fn solved(mut matrix: [[f64; 4]; 4], mut right: [f64; 4]) -> (Logs, f64) {
    let mut log_determinant = 0.0;
    for at in 0..4 {
        log_determinant += matrix[at][at].ln();
        let (pivot, of_pivot) = (matrix[at], right[at]);
        for below in at + 1..4 {
            let share = matrix[below][at] / pivot[at];
            for (entry, of_pivot) in matrix[below].iter_mut().zip(pivot) {
                *entry -= share * of_pivot;
            }
            right[below] -= share * of_pivot;
        }
    }
    let mut logs = [0.0; 4];
    for at in (0..4).rev() {
        logs[at] = (right[at] - dot(matrix[at], logs)) / matrix[at][at];
    }
    (logs, log_determinant)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step with these shares of compute, memory and network; the host bounds it from below.
    fn step(shares: [f64; 3], host: f64, logs: Logs) -> Result<f64, ()> {
        let device: f64 = (0..3).map(|i| shares[i] * logs[i].exp()).sum();
        Ok(device.max(host * logs[3].exp()).ln())
    }

    #[test]
    fn factors_move_as_far_as_runs_depend_on_them() {
        let runs = [[0.9, 0.1, 0.0], [0.5, 0.1, 0.4], [0.8, 0.1, 0.1]];
        let truth = [0.03, 0.0, 0.4, 0.0];
        let measured: Vec<f64> = runs
            .iter()
            .map(|&run| step(run, 0.1, truth).expect("a time"))
            .collect();
        let found = fit(&measured, &|run, logs| step(runs[run], 0.1, logs)).expect("a fit");
        // Compute and memory slow all three runs alike, so either may explain the other's share.
        // More than half of the evidence on the network's factor comes from the second run.
        for (&run, &measured) in runs.iter().zip(&measured) {
            let off = step(run, 0.1, found).expect("a time") - measured;
            assert!(off.abs() < 0.05, "{run:?} is off by {off}");
        }
        assert!((0.2..0.4).contains(&found[2]), "{found:?}");
        assert_eq!(found[3], 0.0, "no run waits for the host");
        let one = fit(&measured[1..2], &|_, logs| step(runs[1], 0.1, logs)).expect("a fit");
        let after = step(runs[1], 0.1, one).expect("a time");
        let moved = after / measured[1];
        assert!((0.5..1.0).contains(&moved), "{moved}");
    }

    #[test]
    fn runs_leave_open_what_they_do_not_tell_apart() {
        let runs = [[0.6, 0.0, 0.4], [0.99, 0.0, 0.01]];
        let open = |known: &[[f64; 3]]| {
            let time = |run: usize, logs| step(known[run], 0.0, logs);
            let measured: Vec<f64> = (0..known.len())
                .map(|run| time(run, [0.0, 0.0, 0.7, 0.0]).expect("a time"))
                .collect();
            let logs = fit(&measured, &time).expect("a fit");
            let near = Near::new(&measured, &time, logs).expect("near");
            let covariance = near.covariance(logs);
            let of = |slopes: Logs| dot(covariance.map(|row| dot(row, slopes)), slopes).sqrt();
            [
                of([0.6, 0.0, 0.4, 0.0]),
                of([1.0, 0.0, 0.0, 0.0]),
                of([0.0, 0.0, 1.0, 0.0]),
            ]
        };
        let ([own, compute, network], both) = (open(&runs[..1]), open(&runs));
        // One run fixes its own time better than either factor, and the second run the factor that it depends on.
        assert!(own < network && compute > 0.02, "{own} {compute} {network}");
        assert!(
            both[1] < compute && both[2] < network,
            "{both:?} {compute} {network}"
        );
    }

    /// Logarithm of the compute factor learned from compute-only steps with these log errors.
    fn of_compute(off: &[f64]) -> f64 {
        let time = |_: usize, logs: Logs| step([1.0, 0.0, 0.0], 0.0, logs);
        fit(off, &time).expect("a fit")[0]
    }

    #[test]
    fn runs_that_agree_move_a_factor_farther_than_runs_that_do_not() {
        let agreed = of_compute(&[0.11, 0.1, 0.09]);
        assert!((0.05..0.1).contains(&agreed), "{agreed}");
        let apart = of_compute(&[0.3, 0.1, -0.1]);
        assert!((0.0..0.7 * agreed).contains(&apart), "{apart}");
        // One run may be off by noise; three that are alike are not.
        assert!(of_compute(&[0.1]) < 0.75 * agreed);
        let far = of_compute(&[1.02, 1.0, 0.98]);
        assert!((0.9..1.0).contains(&far), "{far}");
    }

    #[test]
    fn elimination_solves_a_system() {
        let matrix = [
            [4.0, 1.0, 0.0, 0.5],
            [1.0, 3.0, 0.2, 0.0],
            [0.0, 0.2, 2.0, 0.1],
            [0.5, 0.0, 0.1, 1.0],
        ];
        let x = [1.0, -2.0, 0.5, 3.0];
        let (solved, log_determinant) = solved(matrix, matrix.map(|row| dot(row, x)));
        for (got, wanted) in solved.iter().zip(x) {
            assert!((got - wanted).abs() < 1e-12, "{got} {wanted}");
        }
        let (_, of_diagonal) = super::solved(
            [
                [2.0, 0.0, 0.0, 0.0],
                [0.0, 3.0, 0.0, 0.0],
                [0.0, 0.0, 5.0, 0.0],
                [0.0, 0.0, 0.0, 7.0],
            ],
            x,
        );
        assert!((of_diagonal - 210_f64.ln()).abs() < 1e-12 && log_determinant > 0.0);
    }

    #[test]
    fn a_run_that_waits_for_the_host_moves_its_factor_alone() {
        let found = fit(&[0.5], &|_, logs| step([0.3, 0.1, 0.1], 1.0, logs)).expect("a fit");
        assert_eq!(found[..3], [0.0; 3]);
        assert!((0.35..0.5).contains(&found[3]), "{found:?}");
    }
}
