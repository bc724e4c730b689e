//! Contribution of every mechanism of the cost model to accuracy: the errors of the runs that it
//! affects, with and without it.

use catalog::runs::Run;
use catalog::runtime::Rewrite;
use catalog::{Fitted, Fp8Recipe, Precision, Seconds};
use costmodel::Scenario;
use rayon::prelude::*;
use serde::Serialize;
use strum::VariantArray;

use super::score::{self, Scored};
use super::summary::is_complete;
use super::weighed::Weighed;

/// Errors of the runs whose prediction changes without a mechanism; every source weighs the same.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Ablation {
    pub(crate) mechanism: String,
    /// Quantity whose errors are compared: `time` or `memory`.
    pub(crate) quantity: &'static str,
    /// Number of runs whose prediction changes without it.
    pub(crate) runs: usize,
    /// Number of sources that those runs come from.
    pub(crate) sources: usize,
    /// Median and 90th percentile of the errors without it.
    pub(crate) without: [f64; 2],
    /// Median and 90th percentile of the errors with it.
    pub(crate) with: [f64; 2],
}

/// A part of the cost model that can be switched off. `leave_out` removes it from a scenario and returns whether the
/// scenario had it.
struct Mechanism {
    name: String,
    leave_out: Box<dyn Fn(&mut Scenario) -> bool + Sync>,
}

/// Predicts all runs again with one mechanism at a time left out, using the shipped constants. `progress` receives the
/// share done, in `[0, 1]`.
pub(crate) fn ablations(
    runs: &[(Run, String)],
    scored: &[Scored],
    progress: &dyn Fn(f64),
) -> Vec<Ablation> {
    let mechanisms = mechanisms();
    let mut found = Vec::new();
    for (done, mechanism) in mechanisms.iter().enumerate() {
        progress(done as f64 / mechanisms.len() as f64);
        let pairs = without(mechanism, runs, scored);
        found.extend(compared(&mechanism.name, "time", &pairs, |s| {
            s.error.step_time
        }));
        found.extend(compared(&mechanism.name, "memory", &pairs, |s| {
            s.error.peak_memory
        }));
    }
    progress(1.0);
    found
}

/// The mechanisms that can be left out: every rewrite of the operator graph, the runtime's four overheads in time, the power limit,
/// the slow-down of kernels beside messages, and recipes of 8-bit scaling other than delayed scaling.
fn mechanisms() -> Vec<Mechanism> {
    let rewrites = Rewrite::VARIANTS.iter().map(|&rewrite| Mechanism {
        name: rewrite.name(),
        leave_out: Box::new(move |scenario| scenario.runtime.rewrites.remove(&rewrite)),
    });
    let time = |name: &str, of: fn(&mut Scenario) -> &mut Seconds| Mechanism {
        name: name.to_owned(),
        leave_out: Box::new(move |scenario| {
            let time = of(scenario);
            std::mem::replace(time, Seconds(0.0)) != Seconds(0.0)
        }),
    };
    let others = [
        time("host time per launch", |s| {
            &mut s.runtime.overheads.launch.value
        }),
        time("host time per step", |s| {
            &mut s.runtime.overheads.step.value
        }),
        time("time per pipeline transfer", |s| {
            &mut s.runtime.overheads.transfer.value
        }),
        time("time per byte of gradients", |s| {
            &mut s.runtime.overheads.gradient_byte.value
        }),
        Mechanism {
            name: "power limit".to_owned(),
            leave_out: Box::new(|s| s.cluster.device.power_watts.take().is_some()),
        },
        Mechanism {
            name: "slow-down beside messages".to_owned(),
            leave_out: Box::new(|s| {
                let slowdown = &mut s.runtime.overheads.overlap_slowdown.value;
                std::mem::replace(slowdown, 1.0) > 1.0
            }),
        },
        Mechanism {
            name: "scales of 8-bit products".to_owned(),
            leave_out: Box::new(|s| {
                let own = std::mem::replace(&mut s.runtime.fp8_recipe, Fp8Recipe::Delayed);
                s.workload.precision == Precision::Fp8 && own != Fp8Recipe::Delayed
            }),
        },
    ];
    rewrites.chain(others).collect()
}

/// Runs with complete facts to which a mechanism applies, predicted with and without it.
fn without<'s>(
    mechanism: &Mechanism,
    runs: &[(Run, String)],
    scored: &'s [Scored],
) -> Vec<(&'s Scored, Scored)> {
    let complete = runs.par_iter().zip(scored);
    let complete = complete.filter(|(_, s)| is_complete(s) && s.predicted.is_some());
    complete
        .filter_map(|((run, source), with)| {
            let left_out = std::sync::atomic::AtomicBool::new(false);
            let constants = |scenario: &mut Scenario| {
                let did = (mechanism.leave_out)(scenario);
                left_out.store(did, std::sync::atomic::Ordering::Relaxed);
                Fitted::default()
            };
            let without = score::score(run, source, &constants, None);
            left_out.into_inner().then_some((with, without))
        })
        .collect()
}

fn compared(
    mechanism: &str,
    quantity: &'static str,
    pairs: &[(&Scored, Scored)],
    error: fn(&Scored) -> Option<f64>,
) -> Option<Ablation> {
    let touched: Vec<(&str, f64, f64)> = pairs
        .iter()
        .filter_map(|(with, without)| {
            let [with_it, without_it] = [error(with)?, error(without)?];
            let changes = (with_it - without_it).abs() > 1e-6;
            changes.then_some((with.file.as_str(), without_it.abs(), with_it.abs()))
        })
        .collect();
    let without = Weighed::new(touched.iter().map(|&(source, error, _)| (source, error)));
    let with = Weighed::new(touched.iter().map(|&(source, _, error)| (source, error)));
    let mut sources: Vec<&str> = touched.iter().map(|t| t.0).collect();
    sources.sort_unstable();
    sources.dedup();
    Some(Ablation {
        mechanism: mechanism.to_owned(),
        quantity,
        runs: touched.len(),
        sources: sources.len(),
        without: [without.quantile(0.5)?, without.quantile(0.9)?],
        with: [with.quantile(0.5)?, with.quantile(0.9)?],
    })
}
