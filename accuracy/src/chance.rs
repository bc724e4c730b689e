//! The probability that a plan fits, found from published runs that fitted and that did not.
//!
//! Only sources that list what ran out of memory count. The others publish what ran, so that all of theirs fit, however
//! little room they leave.

use std::collections::{BTreeMap, BTreeSet};

use catalog::residuals::Chance;

/// Whether a published run fitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome<'a> {
    /// The run's source.
    pub(crate) source: &'a str,
    /// The room that it left by its prediction; see [`Chance`].
    pub(crate) room: f64,
    /// Whether it fitted.
    pub(crate) fitted: bool,
}

/// Logistic regression of the outcomes on room, every source that lists failures weighing the same; `None` if there is
/// no such source.
///
/// A failure with much room and a success with little may both be missing. Then no steepness is too great for the likelihood,
/// and it is found by Firth's penalised likelihood ("Bias reduction of maximum likelihood estimates", Biometrika 1993), as
/// Heinze and Schemper advise ("A solution to the problem of separation in logistic regression", 2002).
pub(crate) fn fit<'a>(outcomes: impl Iterator<Item = Outcome<'a>>) -> Option<Chance> {
    let all: Vec<Outcome<'_>> = outcomes.collect();
    let failed = all.iter().filter(|outcome| !outcome.fitted);
    let listing: BTreeSet<&str> = failed.map(|outcome| outcome.source).collect();
    let mut counts: BTreeMap<&str, f64> = BTreeMap::new();
    let used = all
        .iter()
        .filter(|outcome| listing.contains(outcome.source));
    let used: Vec<&Outcome<'_>> = used.collect();
    for outcome in &used {
        *counts.entry(outcome.source).or_default() += 1.0;
    }
    let runs = used.len();
    let of_each = runs as f64 / counts.len() as f64;
    let weighed = used.iter().map(|outcome| Weighed {
        weight: of_each / counts[outcome.source],
        room: outcome.room,
        fitted: f64::from(u8::from(outcome.fitted)),
    });
    let (even, slope) = firth(&weighed.collect::<Vec<_>>())?;
    Some(Chance { even, slope, runs })
}

/// An outcome with the weight of its source.
struct Weighed {
    weight: f64,
    room: f64,
    fitted: f64,
}

/// The constant and the slope for which the penalised score vanishes, by Newton's method with the Fisher information.
fn firth(outcomes: &[Weighed]) -> Option<(f64, f64)> {
    const STEPS: usize = 500;
    /// No step changes either of the two by more, so that the first ones do not overshoot.
    const LONGEST: f64 = 0.5;
    let (mut even, mut slope) = (0.0, 1.0);
    for _ in 0..STEPS {
        let step = step(outcomes, even, slope)?;
        let longest = step[0].abs().max(step[1].abs());
        let part = (LONGEST / longest).min(1.0);
        even += part * step[0];
        slope += part * step[1];
        if longest < 1e-9 {
            return Some((even, slope));
        }
    }
    None
}

/// Newton's step from a constant and a slope; `None` if the outcomes do not determine it.
fn step(outcomes: &[Weighed], even: f64, slope: f64) -> Option<[f64; 2]> {
    let p = |o: &Weighed| 1.0 / (1.0 + (-(even + slope * o.room)).exp());
    let sum = |of: &dyn Fn(&Weighed, f64) -> f64| -> f64 {
        let terms = outcomes
            .iter()
            .map(|o| of(o, o.weight * p(o) * (1.0 - p(o))));
        terms.sum()
    };
    // The information matrix [[ones, rooms], [rooms, squares]].
    let (ones, rooms) = (sum(&|_, v| v), sum(&|o, v| v * o.room));
    let squares = sum(&|o, v| v * o.room * o.room);
    let determinant = ones * squares - rooms * rooms;
    if determinant.is_nan() || determinant <= 0.0 {
        return None;
    }
    let leverage = |o: &Weighed, v: f64| {
        v * (squares - 2.0 * rooms * o.room + ones * o.room * o.room) / determinant
    };
    let score = |o: &Weighed, v: f64| o.weight * (o.fitted - p(o)) + leverage(o, v) * (0.5 - p(o));
    let (of_even, of_slope) = (sum(&score), sum(&|o, v| score(o, v) * o.room));
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

    /// For outcomes that do not depend on room, the penalty adds half a success and half a failure for each of the two
    /// parameters' share: the odds stay even.
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
