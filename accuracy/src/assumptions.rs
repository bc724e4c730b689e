//! How probable published runs are by what `calibrate` assumes about a user's system, and by half and twice as much.
//!
//! A few runs are drawn from each source, as if it were a user's system of which no more is known. All runs of a source would
//! say less about systems, because runs of one model err alike, and the assumed noise takes them to be independent.

use serde::Serialize;

use super::few_shot::{self, Response};
use super::own_runs::{self, Assumptions, Logs, USUAL};

/// Numbers of runs that are drawn from a source.
const KNOWN: [usize; 3] = [1, 3, 6];

/// An assumption, and what changing it does to the probability of the drawn runs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tested {
    /// What is assumed.
    pub(crate) name: &'static str,
    /// The value that `calibrate` uses.
    pub(crate) value: f64,
    /// Change of the mean logarithm of a run's probability if the value is halved, every source weighing the same.
    pub(crate) halved: f64,
    /// The same if the value is doubled.
    pub(crate) doubled: f64,
}

/// Finds one of the assumptions.
type Change = fn(&mut Assumptions) -> &mut f64;

/// Runs drawn from one source: how far their logarithms of time are off, and how these change with the factors.
struct Drawn {
    weight: f64,
    off: Vec<f64>,
    slopes: Vec<Logs>,
}

/// Tests every assumption against runs of all sources; empty if no runs of a source are ever `known`.
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
