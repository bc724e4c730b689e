//! Other factors that explain measured runs as well as those that were learned, and which strategy to measure to tell them apart.
//!
//! Where a run is far off its prediction, the regression finds the factor that differs most between
//! systems. But another kind of work that takes longer may make the run look the same: a run that
//! is three times as slow has a slow network, or slow kernels.

use catalog::calibration::{Rate, TimeFactors};
use costmodel::{CostError, CostModel};
use plans::{Strategy, grammar};

use crate::own_runs::{Learned, Logs, MOST, OwnRun, USUAL, predicted};

/// A factor outside this range is far from 1: published systems hardly differ so much.
const USUAL_FACTORS: std::ops::RangeInclusive<f64> = 0.5..=2.0;

/// Rounds of Newton's method for one factor; it is near after four.
const ROUNDS: usize = 12;

/// Step in a factor's logarithm over which slopes are measured.
const STEP: f64 = 0.05;

/// Smallest difference, as a logarithm, between the step times that two explanations predict for a
/// strategy that tells them apart.
const APART: f64 = 0.1;

/// Tensor- and pipeline-parallel sizes of the strategies from which the one that tells explanations
/// apart is chosen.
const SIZES: [u64; 4] = [1, 2, 4, 8];

/// The kinds of work whose learned factors are far from 1.
#[must_use]
pub fn far(learned: &Learned) -> Vec<Rate> {
    let outside = |rate: &Rate| !USUAL_FACTORS.contains(&learned.factors.of(*rate));
    Rate::ALL.iter().copied().filter(outside).collect()
}

/// The alternatives to the learned factors, if one of these is far from 1: each kind of work whose
/// factor alone would explain the runs as well, with the factors that do so.
///
/// # Errors
/// When a run cannot be predicted.
pub fn alternatives(
    runs: &[OwnRun<'_>],
    learned: &Learned,
) -> Result<Vec<(Rate, TimeFactors)>, CostError> {
    let far = far(learned);
    let mut found = Vec::new();
    if far.is_empty() {
        return Ok(found);
    }
    let measured = |run: &OwnRun<'_>| run.step_time.0.ln();
    let misses = (runs.iter().zip(&learned.runs))
        .map(|(run, explained)| (measured(run) - explained.after.0.ln()).abs());
    // Alternatives may miss runs by as much as the learned factors do, or by twice the usual noise.
    let allowed = misses.fold(2.0 * USUAL.noise, f64::max);
    let others = Rate::ALL.iter().copied().enumerate();
    for (at, rate) in others.filter(|(_, rate)| far != [*rate]) {
        let logs = alone(runs, at)?;
        let mut worst = 0.0_f64;
        for run in runs {
            worst = worst.max((measured(run) - predicted(run, logs)?.0.ln()).abs());
        }
        if worst <= allowed {
            found.push((rate, TimeFactors::from_logs(logs)));
        }
    }
    Ok(found)
}

/// Logarithms of the factors that explain the runs best if only factor `at` may differ from 1.
fn alone(runs: &[OwnRun<'_>], at: usize) -> Result<Logs, CostError> {
    let mut logs = [0.0; 4];
    for _ in 0..ROUNDS {
        let (mut along, mut squares) = (0.0, 0.0);
        for run in runs {
            let here = predicted(run, logs)?.0.ln();
            let mut beside = logs;
            beside[at] += STEP;
            let slope = (predicted(run, beside)?.0.ln() - here) / STEP;
            along += slope * (run.step_time.0.ln() - here);
            squares += slope * slope;
        }
        if squares < 1e-9 {
            break;
        }
        logs[at] = (logs[at] + along / squares).clamp(-MOST, MOST);
    }
    Ok(logs)
}

/// The strategy of a run's job for which the learned factors and the alternatives predict the most different step times, among layouts
/// with other tensor and pipeline parallelism that fit; `None` if all predict nearly the same.
///
/// # Errors
/// When a strategy cannot be predicted.
pub fn telling_apart(
    run: &OwnRun<'_>,
    learned: &Learned,
    alternatives: &[(Rate, TimeFactors)],
) -> Result<Option<Strategy>, CostError> {
    let with = |factors: TimeFactors| {
        let mut scenario = run.scenario.clone();
        let calibration = crate::own_runs::calibration(&scenario.runtime.name, factors);
        scenario.cluster.calibration = Some(calibration);
        CostModel::new(scenario)
    };
    let usual = with(learned.factors)?;
    let others = alternatives.iter().map(|(_, factors)| with(*factors));
    let others: Vec<CostModel> = others.collect::<Result<_, _>>()?;
    let mut best: Option<(f64, Strategy)> = None;
    for strategy in layouts(run) {
        let Ok(score) = usual.score(&strategy) else {
            continue;
        };
        if !(score.fits && score.fits_host) {
            continue;
        }
        let mut apart = 0.0_f64;
        for other in &others {
            let ratio = other.score(&strategy)?.step_time / score.step_time;
            apart = apart.max(ratio.ln().abs());
        }
        if apart > best.as_ref().map_or(APART, |(most, _)| *most) {
            best = Some((apart, strategy));
        }
    }
    Ok(best.map(|(_, strategy)| strategy))
}

/// Layouts of a run's job, with its expert parallelism and recomputation.
fn layouts(run: &OwnRun<'_>) -> Vec<Strategy> {
    let (scenario, d) = (run.scenario, run.strategy);
    let recompute = grammar::recompute_name(d.recompute);
    let pairs = SIZES.iter().flat_map(|tp| SIZES.map(|pp| (*tp, pp)));
    let zero = u8::from(d.zero);
    let rest = format!("ep={},zero={zero},recompute={recompute}", d.ep);
    let texts = pairs.map(|(tp, pp)| format!("tp={tp},pp={pp},{rest}"));
    let legal = |text: String| {
        grammar::parse(
            &text,
            &scenario.model,
            &scenario.workload,
            &scenario.runtime,
        )
        .ok()
    };
    texts
        .filter_map(legal)
        .filter(|strategy| strategy != d)
        .collect()
}
