//! Compares predictions with measurements: published runs, predicted from nothing but their configuration, and training
//! logs.

mod ablation;
pub mod alternatives;
mod assumptions;
mod baseline;
mod chance;
mod contradictions;
pub mod diagnose;
pub mod diagnosis;
pub mod drift;
mod few_shot;
mod fits;
mod framework;
mod intervals;
mod kernels;
pub mod logged_run;
mod machine;
mod mapping;
mod markdown;
mod model;
pub mod own_runs;
mod plot;
mod refit;
mod report;
mod score;
mod summary;
mod sweeps;
mod tables;
mod weighed;

pub use markdown::PLOTS;
pub use report::Report;

use catalog::runs::Run;

/// Whether a published run says enough to be predicted.
#[must_use]
pub fn is_predictable(run: &Run) -> bool {
    mapping::map(run).is_ok()
}

/// The embedded runs, each with the name of its source.
///
/// # Errors
/// When the embedded file is malformed.
pub fn embedded() -> Result<Vec<(Run, String)>, catalog::SpecError> {
    let runs = catalog::runs::embedded()?;
    Ok(runs
        .into_iter()
        .map(|run| {
            let source = named(&run);
            (run, source)
        })
        .collect())
}

/// The name of an embedded run's source: the part before the revision.
fn named(run: &Run) -> String {
    run.source
        .split(['@', ':', ',', '('])
        .next()
        .unwrap_or("")
        .trim()
        .to_owned()
}
