//! Finds the probability that a plan fits from published runs: some fitted, and some ran out of memory.
//!
//! Only sources that list runs out of memory count. Other sources list only runs that fitted, so they cannot tell how often
//! one does not.

use std::collections::BTreeMap;

use catalog::residuals::Chance;

/// A published run: how much memory its prediction left free, and whether it fitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome<'a> {
    /// The run's source.
    pub(crate) source: &'a str,
    /// Room that the prediction leaves in memory, as [`Chance`] defines it.
    pub(crate) room: f64,
    /// Whether the run fitted. If not, it ran out of memory.
    pub(crate) fitted: bool,
}

/// Fits the probability by logistic regression. Every source that lists runs out of memory weighs
/// the same. `None` if no source lists any, or if the fit does not converge.
///
/// If every run above some room fitted and every run below it did not, steeper curves fit ever
/// better, and ordinary regression does not converge. So the likelihood is penalised as in Firth
/// ("Bias reduction of maximum likelihood estimates", Biometrika 1993), which Heinze and Schemper
/// advise for this case ("A solution to the problem of separation in logistic regression", 2002).
pub(crate) fn fit<'a>(outcomes: impl Iterator<Item = Outcome<'a>>) -> Option<Chance> {
    let mut by_source: BTreeMap<&str, Vec<Outcome<'_>>> = BTreeMap::new();
    for outcome in outcomes {
        by_source.entry(outcome.source).or_default().push(outcome);
    }
    by_source.retain(|_, runs| runs.iter().any(|run| !run.fitted));
    let runs: usize = by_source.values().map(Vec::len).sum();
    let of_each = runs as f64 / by_source.len() as f64;
    let weighed: Vec<(Outcome<'_>, f64)> = by_source
        .into_values()
        .flat_map(|runs| {
            let weight = of_each / runs.len() as f64;
            runs.into_iter().map(move |run| (run, weight))
        })
        .collect();
    firth(&weighed)
}

/// Maximises the penalised likelihood of outcomes with their weights, by Newton's method with the Fisher information.
fn firth(outcomes: &[(Outcome<'_>, f64)]) -> Option<Chance> {
    const STEPS: usize = 500;
    /// The most by which one step changes either number. A longer step may jump past the solution.
    const LONGEST: f64 = 0.5;
    let mut chance = Chance {
        even: 0.0,
        slope: 1.0,
        runs: outcomes.len(),
    };
    for _ in 0..STEPS {
        let step = step(outcomes, chance)?;
        let longest = step[0].abs().max(step[1].abs());
        let part = (LONGEST / longest).min(1.0);
        chance.even += part * step[0];
        chance.slope += part * step[1];
        if longest < 1e-9 {
            return Some(chance);
        }
    }
    None
}

/// Changes of [`Chance::even`] and [`Chance::slope`] in a Newton step; `None` if undetermined.
fn step(outcomes: &[(Outcome<'_>, f64)], chance: Chance) -> Option<[f64; 2]> {
    let sum = |term: &dyn Fn(f64, f64, f64, f64) -> f64| -> f64 {
        let terms = outcomes.iter().map(|(outcome, weight)| {
            let p = chance.at(outcome.room);
            let missed = f64::from(u8::from(outcome.fitted)) - p;
            term(outcome.room, p, weight * p * (1.0 - p), weight * missed)
        });
        terms.sum()
    };
    // The Fisher information, a symmetric matrix of two rows.
    let ones = sum(&|_, _, variance, _| variance);
    let rooms = sum(&|room, _, variance, _| variance * room);
    let squares = sum(&|room, _, variance, _| variance * room * room);
    let determinant = ones * squares - rooms * rooms;
    if determinant.is_nan() || determinant <= 0.0 {
        return None;
    }
    let score = |room: f64, p: f64, variance: f64, missed: f64| {
        let leverage = variance * (squares - 2.0 * rooms * room + ones * room * room) / determinant;
        missed + leverage * (0.5 - p)
    };
    let of_even = sum(&score);
    let of_slope = sum(&|room, p, variance, missed| score(room, p, variance, missed) * room);
    Some([
        (squares * of_even - rooms * of_slope) / determinant,
        (ones * of_slope - rooms * of_even) / determinant,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(source: &'static str, rooms: &[(f64, bool)]) -> Vec<Outcome<'static>> {
        let outcome = |&(room, fitted)| Outcome {
            source,
            room,
            fitted,
        };
        rooms.iter().map(outcome).collect()
    }

    #[test]
    fn separated_outcomes_give_a_finite_slope_between_them() {
        let rooms: Vec<(f64, bool)> = (-10..10)
            .map(|tenths| (f64::from(tenths) / 10.0 + 0.05, tenths >= 0))
            .collect();
        let chance = fit(of("lists", &rooms).into_iter()).expect("failures");
        assert!(chance.even.abs() < 1e-6, "{chance:?}");
        assert!((2.0..100.0).contains(&chance.slope), "{chance:?}");
        assert_eq!(chance.runs, 20);
    }

    #[test]
    fn sources_that_publish_successes_alone_do_not_count() {
        let rooms: Vec<(f64, bool)> = (-10..10)
            .map(|tenths| {
                (
                    f64::from(tenths) / 10.0,
                    (tenths + 12) % 4 != 0 && tenths > -5,
                )
            })
            .collect();
        let lists = of("lists", &rooms);
        let survivors = of("survivors", &[(-1.0, true), (-0.5, true)]);
        let both = lists.iter().chain(&survivors).copied();
        assert_eq!(fit(lists.iter().copied()), fit(both));
        assert_eq!(fit(survivors.into_iter()), None);
    }

    /// At every room one run fits and one does not, so the probability is one half everywhere.
    #[test]
    fn outcomes_that_room_does_not_explain_give_no_slope() {
        let rooms: Vec<(f64, bool)> = (0..40)
            .map(|n| (f64::from(n / 2 - 10), n % 2 == 0))
            .collect();
        let chance = fit(of("lists", &rooms).into_iter()).expect("failures");
        assert!(
            chance.even.abs() < 1e-6 && chance.slope.abs() < 1e-6,
            "{chance:?}"
        );
    }
}
