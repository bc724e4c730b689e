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
mod utf8;

use interop::export::Dialect;

use crate::target::Target;

/// Every reader, and the scenarios.
#[must_use]
pub fn all() -> Vec<Box<dyn Target>> {
    let mut all: Vec<Box<dyn Target>> = vec![
        Box::new(units::Units),
        Box::new(grammar::Grammar),
        Box::new(constraints::Flags),
        Box::new(constraints::Files),
        Box::new(clusters::Clusters),
        Box::new(clusters::Devices),
        Box::new(clusters::Extensions),
        Box::new(profiles::Profiles),
        Box::new(plan_files::Plans),
        Box::new(models::Configs),
        Box::new(published::Runs),
    ];
    for dialect in Dialect::ALL {
        all.push(Box::new(documents::Documents(dialect)));
    }
    all.push(Box::new(logs::Logs));
    all.push(Box::new(checkpoints::Checkpoints));
    all.push(Box::new(checkpoints::Hub));
    all.push(Box::new(checkpoints::Tokens));
    all.push(Box::new(tcp::Frames));
    all.push(Box::new(tcp::Admissions));
    all.push(Box::new(scenarios::Scenarios));
    all
}

/// The target of a name.
#[must_use]
pub fn of(name: &str) -> Option<Box<dyn Target>> {
    all().into_iter().find(|target| target.name() == name)
}
