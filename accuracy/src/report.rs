//! The accuracy report on published runs.

use std::sync::atomic::{AtomicUsize, Ordering};

use catalog::Fitted;
use catalog::runs::Run;
use rayon::prelude::*;
use serde::Serialize;

use super::ablation::{self, Ablation};
use super::intervals::{self, Coverage};
use super::refit::{self, LeftOut};
use super::score::{self, Scored};
use super::summary::{self, Group};
use super::sweeps::{self, Ranking, Sweep};
use super::{baseline, contradictions, fits};

/// The accuracy report on published runs; as JSON it is what `validate --json` prints.
#[derive(Debug, Serialize)]
pub struct Report {
    pub(crate) runs: Vec<Scored>,
    pub(crate) summary: Vec<Group>,
    pub(crate) skipped: Vec<(String, usize)>,
    pub(crate) sweeps: Vec<Sweep>,
    pub(crate) ranking: Ranking,
    pub(crate) intervals: Vec<Coverage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) leave_source_out: Option<LeftOut>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) ablations: Vec<Ablation>,
}

impl Report {
    /// Predicts the runs, each given with the name of its source; `progress` receives the share done, in `[0, 1]`.
    #[must_use]
    pub fn new(
        runs: &[(Run, String)],
        constants: &Fitted,
        progress: &(dyn Fn(f64) + Sync),
    ) -> Self {
        let done = AtomicUsize::new(0);
        let scored: Vec<Scored> = runs
            .par_iter()
            .enumerate()
            .map(|(index, (run, source))| {
                let left_out = contradictions::contradicted(runs, index);
                let scored = score::score(run, source, &|_| *constants, left_out);
                let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                progress(done as f64 / runs.len() as f64);
                scored
            })
            .collect();
        let sweeps = sweeps::sweeps(runs, &scored);
        Self {
            summary: summary::groups(&scored),
            skipped: summary::skipped(&scored),
            ranking: sweeps::ranking(&sweeps),
            intervals: intervals::coverage(&scored),
            leave_source_out: None,
            ablations: Vec::new(),
            sweeps,
            runs: scored,
        }
    }

    /// Leaves out each source in turn: fits the constants without it and predicts its runs with
    /// them, then once more for each number in `known`, with that number of its own runs known.
    /// `progress` receives the share done, in `[0, 1]`.
    #[must_use]
    pub fn with_leave_source_out(
        mut self,
        runs: &[(Run, String)],
        known: &[usize],
        progress: &dyn Fn(f64),
    ) -> Self {
        let found = refit::leave_source_out(runs, &self.runs, known, progress);
        self.leave_source_out = Some(found);
        self
    }

    /// Predicts all runs again with one mechanism of the cost model at a time left out. `progress` receives the share
    /// done, in `[0, 1]`.
    #[must_use]
    pub fn with_ablations(mut self, runs: &[(Run, String)], progress: &dyn Fn(f64)) -> Self {
        self.ablations = ablation::ablations(runs, &self.runs, progress);
        self
    }

    /// Median of the relative errors of all predicted step times; `None` without any.
    #[must_use]
    pub fn median_error(&self) -> Option<f64> {
        let all = self.summary.iter().find(|group| group.by == "all")?;
        all.step_time.map(|errors| errors.median)
    }

    /// Median errors by group as CSV: a baseline that later reports are compared with.
    #[must_use]
    pub fn baseline(&self) -> String {
        baseline::text(&self.summary)
    }

    /// Sentences on groups whose errors have grown beyond those of a baseline CSV.
    #[must_use]
    pub fn worse_than(&self, baseline: &str) -> Vec<String> {
        baseline::grown(&self.summary, baseline)
    }

    /// Errors on sources that were left out, as CSV, from which intervals are made; `None` without
    /// [`Self::with_leave_source_out`].
    #[must_use]
    pub fn residuals(&self) -> Option<String> {
        let left_out = self.leave_source_out.as_ref()?;
        Some(intervals::table(
            &left_out.runs,
            &left_out.sweeps,
            &left_out.few_shot,
            fits::chance(&left_out.runs),
        ))
    }
}
