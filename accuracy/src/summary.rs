//! Errors by group.

use std::collections::BTreeMap;

use catalog::runs::{Status, Tier};
use serde::Serialize;

use super::score::Scored;

/// How far predictions are off on runs that are alike in one way, such as in their GPU.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Group {
    pub(crate) by: &'static str,
    pub(crate) name: String,
    pub(crate) step_time: Option<Stats>,
    pub(crate) peak_memory: Option<Stats>,
    /// Number of runs that did run but are predicted not to fit.
    pub(crate) wrongly_too_large: usize,
}

/// Quantiles of absolute relative errors of a group.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Stats {
    pub(crate) count: usize,
    pub(crate) median: f64,
    pub(crate) p90: f64,
    /// Median of the signed errors.
    pub(crate) bias: f64,
}

/// Computes the statistics from signed errors.
pub(crate) fn stats(errors: &[f64]) -> Option<Stats> {
    if errors.is_empty() {
        return None;
    }
    let mut sizes: Vec<f64> = errors.iter().map(|e| e.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let mut signed = errors.to_vec();
    signed.sort_by(f64::total_cmp);
    let at = |list: &[f64], q: f64| list[((list.len() - 1) as f64 * q).round() as usize];
    Some(Stats {
        count: sizes.len(),
        median: at(&sizes, 0.5),
        p90: at(&sizes, 0.9),
        bias: at(&signed, 0.5),
    })
}

type Key = fn(&Scored) -> String;

const GROUPINGS: [(&str, Key); 8] = [
    ("all", |_| "all".to_owned()),
    ("source", |s| s.file.clone()),
    ("runtime", |s| s.runtime.clone().unwrap_or_default()),
    ("gpu", |s| s.gpu.clone().unwrap_or_default()),
    ("model", |s| s.model.clone()),
    ("precision", |s| s.precision.clone().unwrap_or_default()),
    ("architecture", |s| {
        if s.moe { "experts" } else { "dense" }.to_owned()
    }),
    ("scale", |s| scale(s.gpus.unwrap_or(0))),
];

fn scale(gpus: u64) -> String {
    match gpus {
        0..=8 => "1-8 GPUs".to_owned(),
        9..=64 => "16-64 GPUs".to_owned(),
        65..=512 => "72-512 GPUs".to_owned(),
        _ => "more than 512 GPUs".to_owned(),
    }
}

/// All groups of all groupings, over the runs of tier A and B (complete facts).
pub(crate) fn groups(scored: &[Scored]) -> Vec<Group> {
    let complete: Vec<&Scored> = scored.iter().filter(|s| is_complete(s)).collect();
    let mut groups = Vec::new();
    for (by, key) in GROUPINGS {
        let mut members: BTreeMap<String, Vec<&Scored>> = BTreeMap::new();
        for s in complete.iter().filter(|s| s.predicted.is_some()) {
            members.entry(key(s)).or_default().push(s);
        }
        for (name, list) in members {
            let times: Vec<f64> = list.iter().filter_map(|s| s.error.step_time).collect();
            let memories: Vec<f64> = list.iter().filter_map(|s| s.error.peak_memory).collect();
            groups.push(Group {
                by,
                name,
                step_time: stats(&times),
                peak_memory: stats(&memories),
                wrongly_too_large: wrongly_too_large(list),
            });
        }
    }
    groups
}

/// Number of runs that did run but are predicted not to fit.
pub(crate) fn wrongly_too_large<'a>(scored: impl IntoIterator<Item = &'a Scored>) -> usize {
    let too_large =
        |s: &&Scored| s.status == Status::Ok && s.predicted.as_ref().is_some_and(|p| !p.fits);
    scored.into_iter().filter(too_large).count()
}

/// Whether a run counts: tier A or B (facts stated or assumed), and no other row contradicts it.
pub(crate) fn is_complete(s: &Scored) -> bool {
    matches!(s.tier, Some(Tier::A | Tier::B)) && !(s.predicted.is_some() && s.skipped.is_some())
}

/// Reasons for leaving runs out, with the number of runs.
pub(crate) fn skipped(scored: &[Scored]) -> Vec<(String, usize)> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for reason in scored.iter().filter_map(|s| s.skipped.as_ref()) {
        *counts.entry(reason.clone()).or_default() += 1;
    }
    let mut list: Vec<(String, usize)> = counts.into_iter().collect();
    list.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    list
}
