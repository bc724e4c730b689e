//! Tests what `calibrate` assumes about a user's system before any step of it is measured.
//!
//! A few runs are drawn from each published source, as if the source were a user's system. The test says how probable these
//! runs are under the assumptions, and how probable if one assumption is halved or doubled. Few runs are drawn because the
//! assumed noise is independent from run to run, and the errors of many runs of one source are not.

use serde::Serialize;

use super::few_shot::{self, Response};
use super::own_runs::{self, Assumptions, Logs, USUAL};

/// How many runs of each source are drawn at random to be taken as known: first one, then three, then six.
const KNOWN: [usize; 3] = [1, 3, 6];

/// One assumption, and how much more or less probable the drawn runs become if it changes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tested {
    /// What the assumption is about, in words.
    pub(crate) name: &'static str,
    /// What `calibrate` assumes.
    pub(crate) value: f64,
    /// If half of `value` is assumed: the change of the logarithm of a run's probability, as a mean over the drawn runs. Every
    /// source weighs the same.
    pub(crate) halved: f64,
    /// If twice `value` is assumed: the change, as in `halved`.
    pub(crate) doubled: f64,
}

/// Selects the assumption to change.
type Change = fn(&mut Assumptions) -> &mut f64;

/// Runs drawn from one source, as arguments of [`own_runs::log_probability`].
struct Drawn {
    /// The share of this draw in the mean over all draws.
    weight: f64,
    off: Vec<f64>,
    slopes: Vec<Logs>,
}

/// Tests every assumption on runs drawn from all sources; nothing if `known` is empty.
pub(crate) fn tested(responses: &[Response], known: &[usize]) -> Vec<Tested> {
    if known.is_empty() {
        return Vec::new();
    }
    let drawn = drawn(responses);
    let mean = |assumed: Assumptions| {
        let of = |d: &Drawn| d.weight * own_runs::log_probability(&d.off, &d.slopes, assumed);
        drawn.iter().map(of).sum::<f64>()
    };
    let shipped = mean(USUAL);
    let test = |(name, change): (&'static str, Change)| {
        let with = |times: f64| {
            let mut assumed = USUAL;
            *change(&mut assumed) *= times;
            mean(assumed) - shipped
        };
        Tested {
            name,
            value: *change(&mut USUAL.clone()),
            halved: with(0.5),
            doubled: with(2.0),
        }
    };
    let all: [(&str, Change); 5] = [
        ("noise of one run, median", |a| &mut a.noise),
        ("compute factor, spread", |a| &mut a.spread[0]),
        ("memory factor, spread", |a| &mut a.spread[1]),
        ("network factor, spread", |a| &mut a.spread[2]),
        ("host factor, spread", |a| &mut a.spread[3]),
    ];
    all.into_iter().map(test).collect()
}

fn drawn(responses: &[Response]) -> Vec<Drawn> {
    let mut drawn = Vec::new();
    for known in KNOWN {
        // Every source has the same number of draws.
        let all = few_shot::draws(responses, known);
        let weight = 1.0 / (all.len() * known * KNOWN.len()) as f64;
        drawn.extend(all.into_iter().map(|own| Drawn {
            weight,
            off: own.iter().map(|run| run.off()).collect(),
            slopes: own.iter().map(|run| run.slopes()).collect(),
        }));
    }
    drawn
}
