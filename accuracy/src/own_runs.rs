//! Learns from a few measured steps how long work takes on a user's own system.
//!
//! Four factors that multiply predicted times are fitted: of compute, memory, network and host. The fit minimises the
//! sum over runs of `(ln(measured / predicted) / NOISE)²` plus the sum over factors of `(ln factor / SPREAD)²`, by
//! Gauss-Newton steps: a factor moves only as far as the runs depend on it, and one that they do not depend on stays 1
//! (ridge regression; Hoerl and Kennard 1970).

use catalog::Seconds;
use catalog::calibration::{Calibration, Rate, TimeFactors};
use costmodel::{CostError, CostModel, Scenario};
use plans::Strategy;

/// Assumed standard deviation of `ln(measured / predicted)` among runs of one system, which no factor explains. Within
/// sources left out of the fit it is 0.03 to 0.28, with a median of 0.10 (robust, `vescale-plan validate
/// --leave-source-out`); any value from 0.06 to 0.12 gives the same errors after one or three known runs.
const NOISE: f64 = 0.07;

/// Standard deviations of the logarithms of the factors before any step is measured, in the order of [`Rate::ALL`]:
/// clocks and kernel libraries differ less between systems than networks do, and hosts differ most (Grace cores take
/// 2.5 times what Xeons do for a launch, NVIDIA/TransformerEngine issue 2053).
const SPREAD: [f64; 4] = [0.10, 0.15, 0.30, 0.60];

/// Step in a factor's logarithm over which slopes are measured by finite differences.
const STEP: f64 = 0.05;

/// Largest logarithm of a factor: cluster files take factors from 0.1 to 10.
const MOST: f64 = 2.3;

const ROUNDS: usize = 12;
const SWEEPS: usize = 60;

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

/// What measured runs tell about a system.
#[derive(Clone, Debug, PartialEq)]
pub struct Learned {
    /// Factors that multiply predicted times, by kind of work.
    pub factors: TimeFactors,
    /// How the factors explain each run, in the order of the runs given.
    pub runs: Vec<Explained>,
}

/// How far the factors explain one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// Predicted time of one step without the factors.
    pub before: Seconds,
    /// Predicted time of one step with all factors.
    pub after: Seconds,
    /// For each kind of work, the relative change from `before` when only its factor is applied.
    pub by_rate: Vec<(Rate, f64)>,
}

/// Learns the factors of a system from its runs.
///
/// # Errors
/// When a run cannot be predicted.
pub fn learn(runs: &[OwnRun<'_>]) -> Result<Learned, CostError> {
    let measured: Vec<f64> = runs.iter().map(|run| run.step_time.0.ln()).collect();
    let logs = fit(&measured, &|run, logs| {
        Ok(predicted(&runs[run], logs)?.0.ln())
    })?;
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
            by_rate: (0..4).map(alone).collect::<Result<_, CostError>>()?,
        })
    });
    Ok(Learned {
        factors: TimeFactors::from_logs(logs),
        runs: explained.collect::<Result<_, CostError>>()?,
    })
}

/// Step time of a run on its cluster, with these factors instead of those that the cluster has.
fn predicted(run: &OwnRun<'_>, logs: Logs) -> Result<Seconds, CostError> {
    let scenario = with_factors(run.scenario, logs);
    Ok(CostModel::new(scenario)?.score(run.strategy)?.step_time)
}

/// A scenario whose cluster has these factors.
pub(crate) fn with_factors(scenario: &Scenario, logs: Logs) -> Scenario {
    let mut scenario = scenario.clone();
    scenario.cluster.calibration = Some(Calibration {
        runtime: scenario.runtime.name.clone(),
        runs: 1,
        time_factors: TimeFactors::from_logs(logs),
        source: String::new(),
    });
    scenario
}

/// Fits the logarithms of the factors to `measured`, the logarithms of step times; `time(run, logs)` is the logarithm
/// of a run's predicted step time under these factors.
pub(crate) fn fit<E>(
    measured: &[f64],
    time: &dyn Fn(usize, Logs) -> Result<f64, E>,
) -> Result<Logs, E> {
    let mut logs = [0.0; 4];
    for _ in 0..ROUNDS {
        let mut gaps = Vec::with_capacity(measured.len());
        let mut slopes = Vec::with_capacity(measured.len());
        for (run, &measured) in measured.iter().enumerate() {
            let here = time(run, logs)?;
            let mut slope = [0.0; 4];
            for (at, slope) in slope.iter_mut().enumerate() {
                let mut beside = logs;
                beside[at] += STEP;
                *slope = (time(run, beside)? - here) / STEP;
            }
            gaps.push(measured - here);
            slopes.push(slope);
        }
        let next = least(&gaps, &slopes, logs);
        let moved = (0..4).map(|at| (next[at] - logs[at]).abs());
        let farthest = moved.fold(0.0, f64::max);
        logs = next;
        if farthest < 1e-4 {
            break;
        }
    }
    Ok(logs)
}

/// Logarithms that minimise the linearised sum of squares, by coordinate descent; `gaps` and `slopes` were taken at
/// `from`.
fn least(gaps: &[f64], slopes: &[Logs], from: Logs) -> Logs {
    let mut logs = from;
    for _ in 0..SWEEPS {
        for at in 0..4 {
            let (mut pull, mut stiffness) = (0.0, SPREAD[at].powi(-2));
            for (gap, slope) in gaps.iter().zip(slopes) {
                let others = (0..4).filter(|&other| other != at);
                let moved: f64 = others.map(|o| slope[o] * (logs[o] - from[o])).sum();
                let left = gap - moved + slope[at] * from[at];
                pull += slope[at] * left * NOISE.powi(-2);
                stiffness += (slope[at] / NOISE).powi(2);
            }
            logs[at] = (pull / stiffness).clamp(-MOST, MOST);
        }
    }
    logs
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
        let truth = [0.06, 0.0, 0.4, 0.0];
        let measured: Vec<f64> = runs
            .iter()
            .map(|&run| step(run, 0.1, truth).expect("a time"))
            .collect();
        let found = fit(&measured, &|run, logs| step(runs[run], 0.1, logs)).expect("a fit");
        for (found, truth) in found.iter().zip(truth) {
            // Three runs that scatter by 7% move a factor most of the way.
            assert!((found - truth).abs() < 0.12, "{found} {truth}");
        }
        assert_eq!(found[3], 0.0, "no run waits for the host");
        let one = fit(&measured[1..2], &|_, logs| step(runs[1], 0.1, logs)).expect("a fit");
        let after = step(runs[1], 0.1, one).expect("a time");
        let moved = after / measured[1];
        assert!((0.5..1.0).contains(&moved), "{moved}");
    }

    #[test]
    fn a_run_that_waits_for_the_host_moves_its_factor_alone() {
        let found = fit(&[0.5], &|_, logs| step([0.3, 0.1, 0.1], 1.0, logs)).expect("a fit");
        assert_eq!(found[..3], [0.0; 3]);
        assert!((0.45..0.5).contains(&found[3]), "{found:?}");
    }
}
