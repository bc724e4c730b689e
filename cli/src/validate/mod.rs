//! Published runs, predicted with nothing but their configuration.

use catalog::Fitted;
use catalog::runs::Run;
use rayon::prelude::*;
use serde::Serialize;

use intervals::Coverage;
use refit::Refit;
use score::Scored;
use summary::Group;
use sweeps::{Ranking, Sweep};

pub(crate) mod baseline;
pub(crate) mod contradictions;
pub(crate) mod intervals;
pub(crate) mod kernels;
pub(crate) mod mapping;
pub(crate) mod markdown;
pub(crate) mod model;
pub(crate) mod plot;
pub(crate) mod refit;
pub(crate) mod score;
pub(crate) mod summary;
pub(crate) mod sweeps;
pub(crate) mod tables;

/// Everything there is to say about some published runs.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) runs: Vec<Scored>,
    pub(crate) summary: Vec<Group>,
    pub(crate) skipped: Vec<(String, usize)>,
    pub(crate) sweeps: Vec<Sweep>,
    pub(crate) ranking: Ranking,
    pub(crate) intervals: Vec<Coverage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) leave_one_out: Option<Refit>,
}

impl Report {
    /// Predicts the runs, each with the name of its source.
    pub(crate) fn new(runs: &[(Run, String)], constants: &Fitted) -> Self {
        let scored: Vec<Scored> = runs
            .par_iter()
            .enumerate()
            .map(|(index, (run, source))| {
                let left_out = contradictions::contradicted(runs, index);
                score::score(run, source, constants, left_out)
            })
            .collect();
        let sweeps = sweeps::sweeps(runs, &scored);
        Self {
            summary: summary::groups(&scored),
            skipped: summary::skipped(&scored),
            ranking: sweeps::ranking(&sweeps),
            intervals: intervals::coverage(&scored),
            leave_one_out: None,
            sweeps,
            runs: scored,
        }
    }
}

/// The embedded runs, each with the name of its source.
pub(crate) fn embedded() -> Result<Vec<(Run, String)>, catalog::SpecError> {
    let runs = catalog::runs::embedded()?;
    Ok(runs
        .into_iter()
        .map(|run| {
            let source = named(&run);
            (run, source)
        })
        .collect())
}

/// The source of an embedded run: what stands before the revision.
fn named(run: &Run) -> String {
    run.source
        .split(['@', ':', ',', '('])
        .next()
        .unwrap_or("")
        .trim()
        .to_owned()
}
