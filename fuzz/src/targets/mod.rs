//! The readers under test.

mod checkpoints;
mod clusters;
mod constraints;
mod documents;
mod grammar;
mod logs;
mod models;
mod plan_files;
mod profiles;
mod published;
mod scenarios;
mod tcp;
mod units;

use interop::export::Dialect;

use crate::target::Target;

/// Every reader, and the scenarios.
#[must_use]
pub fn all() -> Vec<Target> {
    let mut all = vec![
        units::units(),
        grammar::grammar(),
        constraints::flags(),
        constraints::files(),
        clusters::clusters(),
        clusters::devices(),
        clusters::extensions(),
        profiles::profiles(),
        plan_files::plan_files(),
        models::configs(),
        published::runs(),
    ];
    all.extend(Dialect::ALL.iter().copied().map(documents::documents));
    all.extend([
        logs::logs(),
        checkpoints::checkpoints(),
        checkpoints::safetensors(),
        checkpoints::token_files(),
        tcp::frames(),
        tcp::admissions(),
        scenarios::scenarios(),
    ]);
    all
}

/// The target of a name.
#[must_use]
pub fn of(name: &str) -> Option<Target> {
    all().into_iter().find(|target| target.name == name)
}
