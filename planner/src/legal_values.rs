//! Refuses constraints that no strategy can satisfy. The error lists the legal values of the dimension and
//! names the nearest.
//!
//! A value is legal if at least one strategy of the search space has it, for the given model, runtime and
//! number of devices. The check uses a batch and a sequence length that every size divides, so that these
//! two never decide.

use std::collections::BTreeSet;

use catalog::{GradientTypes, Mistake, Offload, Precision, Workload, WorkloadSizes, elementary};
use costmodel::Scenario;
use plans::grammar::overlap_name;

use crate::PlannerError;
use crate::choices::{divisors, eighths};
use crate::constraints::{Constraints, DIMENSIONS, mistake, names_of};
use crate::layouts::micro_batches;
use crate::space::SearchSpace;

/// Largest number of legal values that a message lists.
const LISTED: usize = 24;
/// Micro-batches per pipeline rank that every schedule can work with.
const MICRO_BATCHES_PER_STAGE: u64 = 2;
/// Values of `recompute` without numbers of layers or names of parts.
const RECOMPUTE: [&str; 6] = [
    "none",
    "selective",
    "full",
    "layers",
    "falling",
    "selective_ops",
];

/// Refuses constraints that contradict themselves, and values that no strategy can have at any of
/// several numbers of devices.
///
/// # Errors
/// The first such constraint, with the legal values and the nearest.
pub fn check(
    scenario: &Scenario,
    counts: &[u64],
    constraints: &Constraints,
) -> Result<(), PlannerError> {
    constraints.check()?;
    for (key, values) in &constraints.fix {
        for value in values {
            decides(scenario, key, value)?;
            refuse(scenario, counts, key, &fix(key, value), value)?;
        }
    }
    for (key, &bound) in &constraints.min {
        let least = Constraints {
            min: [(key.clone(), bound)].into(),
            ..Constraints::default()
        };
        refuse(scenario, counts, key, &least, &bound.to_string())?;
    }
    Ok(())
}

/// The constraints for the search of one group of replicas: all but those on their number.
///
/// # Errors
/// When no number of groups from 1 to `most` is allowed.
pub fn of_each_group(constraints: &Constraints, most: u64) -> Result<Constraints, PlannerError> {
    if (1..=most).any(|groups| constraints.allows("groups", groups)) {
        return Ok(constraints.of_one_group());
    }
    let of_groups = |(flag, value): (&str, String)| {
        (value.starts_with("groups=")).then(|| format!("--{flag} {value}"))
    };
    let said: Vec<String> = constraints
        .flags()
        .into_iter()
        .filter_map(of_groups)
        .collect();
    let (what, expected) = match most {
        1 => (
            "the nodes of the cluster are all alike, and so are its replicas".to_owned(),
            "1".to_owned(),
        ),
        _ => (
            format!("replicas on {most} pools that differ lie in at most {most} groups"),
            format!("1 to {most}"),
        ),
    };
    let wrong = Mistake::new(what).expected(expected);
    Err(mistake(
        &said.join(" "),
        wrong.nearest(Some(most.to_string())),
    ))
}

fn fix(key: &str, value: &str) -> Constraints {
    Constraints {
        fix: [(key.to_owned(), vec![value.to_owned()])].into(),
        ..Constraints::default()
    }
}

fn refuse(
    scenario: &Scenario,
    counts: &[u64],
    key: &str,
    asked: &Constraints,
    value: &str,
) -> Result<(), PlannerError> {
    if is_legal(scenario, counts, asked) {
        return Ok(());
    }
    let known = candidates(scenario, counts, key);
    let mut legal = known.clone();
    legal.retain(|value| is_legal(scenario, counts, &fix(key, value)));
    let near = nearest(value, &legal);
    let elsewhere = match (&near, nearest(value, &known)) {
        (None, Some(name)) => elsewhere(scenario, counts, key, &name),
        _ => String::new(),
    };
    let more = if legal.len() > LISTED { ", …" } else { "" };
    legal.truncate(LISTED);
    let counts: Vec<String> = counts.iter().map(u64::to_string).collect();
    let text = match asked.min.is_empty() {
        true => format!("{key}={value}"),
        false => format!("{key} at least {value}"),
    };
    let none = Mistake::new(format!(
        "no strategy of {} on {} GPUs under {} has it{elsewhere}",
        scenario.model.name,
        counts.join(", "),
        scenario.runtime.name,
    ));
    let none = none.expected(format!("`{key}` from {}{more}", legal.join(", ")));
    Err(mistake(&text, none.nearest(near)))
}

/// Refuses a choice that would decide nothing: a dispatcher without experts, a way to scale 8-bit products without any.
fn decides(scenario: &Scenario, key: &str, value: &str) -> Result<(), PlannerError> {
    let (runtime, model) = (&scenario.runtime, &scenario.model);
    let precision = scenario.workload.precision;
    let (own, met, lacks, expected) = match key {
        "dispatcher" => (
            runtime.dispatcher.name(),
            model.moe.is_some(),
            format!("{} has no experts to send tokens to", model.name),
            "a model with experts, or no such constraint",
        ),
        "fp8_recipe" => (
            runtime.fp8_recipe.name(),
            precision == Precision::Fp8,
            "no product is in 8 bits".to_owned(),
            "--precision fp8, or no such constraint",
        ),
        _ => return Ok(()),
    };
    if met || value == own {
        return Ok(());
    }
    let wrong = Mistake::new(lacks).expected(expected);
    Err(mistake(&format!("{key}={value}"), wrong))
}

/// The end of a message that refuses a value: whether another runtime offers that value for this model and cluster.
fn elsewhere(scenario: &Scenario, counts: &[u64], key: &str, name: &str) -> String {
    let mut others = catalog::runtime_presets::presets().into_iter();
    let any = others.any(|preset| {
        let other = Scenario {
            model: scenario.model.clone().trained_under(&preset.runtime),
            runtime: preset.runtime,
            ..scenario.clone()
        };
        is_legal(&other, counts, &fix(key, name))
    });
    let device = &scenario.cluster.device.name;
    match any {
        true => format!("; other runtimes have `{name}` (`vescale-plan runtimes` lists them)"),
        false => format!("; no runtime has `{name}` for this model on {device}"),
    }
}

/// Whether some strategy satisfies one constraint, at some number of devices.
fn is_legal(scenario: &Scenario, counts: &[u64], asked: &Constraints) -> bool {
    let micro_batch = asked.fixed("mbs").max().unwrap_or(1);
    counts.iter().any(|&gpus| {
        let sizes = WorkloadSizes {
            gpus,
            seq_len: 2 * gpus,
            global_batch: gpus
                .saturating_mul(MICRO_BATCHES_PER_STAGE)
                .saturating_mul(micro_batch),
            precision: scenario.workload.precision,
        };
        Workload::new(sizes).is_ok_and(|workload| {
            let roomy = Scenario {
                workload,
                ..scenario.clone()
            };
            SearchSpace::has_any(&roomy, asked)
        })
    })
}

/// Values of a dimension that are tried for legality.
fn candidates(scenario: &Scenario, counts: &[u64], key: &str) -> Vec<String> {
    let model = &scenario.model;
    let sizes: Vec<u64> = match key {
        "vpp" => (1..=model.layers).collect(),
        "ep" => model
            .moe
            .map_or(vec![1], |moe| divisors(moe.experts).collect()),
        "mbs" => micro_batches().collect(),
        "groups" => vec![1],
        key if DIMENSIONS.contains(&key) => {
            let mut all: Vec<u64> = counts.iter().flat_map(|&gpus| divisors(gpus)).collect();
            all.sort_unstable();
            all.dedup();
            all
        }
        _ => Vec::new(),
    };
    let own = overlap_name(scenario.runtime.overlap);
    let names: Vec<&str> = match key {
        "prefetch" => vec!["0", "1", "2"],
        "overlap" => vec![&own, "none", "grad+param+tp+pp", "grad+param+ep+pp"],
        "offload" => vec![Offload::NONE, "optimizer", "optimizer:50", "parameters"],
        "recompute" => RECOMPUTE.to_vec(),
        _ => names_of(key),
    };
    let sizes = sizes.into_iter().map(|size| size.to_string());
    let mut all: Vec<String> = sizes.chain(names.into_iter().map(str::to_owned)).collect();
    if key == "offload_layers" {
        let counts = [0].into_iter().chain(eighths(model.layers));
        all.extend(counts.map(|layers| layers.to_string()));
    }
    if key == "recompute" {
        let selections = scenario.runtime.selections_of(&scenario.model);
        let names = selections.iter().map(|s| format!("selective:{}", s.name()));
        all.extend(names);
    }
    if key == "grad_dtype" {
        let (runtime, precision) = (&scenario.runtime, scenario.workload.precision);
        all.push(runtime.own_gradients(precision).name());
        all.extend(runtime.other_gradients(precision).map(GradientTypes::name));
    }
    let mut listed = BTreeSet::new();
    all.retain(|value| listed.insert(value.clone()));
    all
}

/// The nearest legal value: by ratio among numbers, by spelling among names.
fn nearest(value: &str, legal: &[String]) -> Option<String> {
    if let Ok(asked) = value.parse::<f64>() {
        let apart = |v: &&String| {
            let size = v.parse::<f64>().unwrap_or(f64::MAX);
            elementary::ln((size + 1.0) / (asked + 1.0)).abs()
        };
        return legal
            .iter()
            .min_by(|a, b| apart(a).total_cmp(&apart(b)))
            .cloned();
    }
    catalog::suggest::nearest(value, legal)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also the values of a runtime whose own way of overlapping is one of those that are tried for every runtime, as NeMo's is.
    #[test]
    fn a_value_is_listed_once() {
        let sizes = WorkloadSizes {
            gpus: 8,
            seq_len: 4096,
            global_batch: 64,
            precision: Precision::Bf16,
        };
        for runtime in ["megatron-core", "nemo", "paddle", "fsdp2"] {
            let scenario = Scenario {
                model: catalog::load::model("mixtral-8x7b").expect("a preset"),
                cluster: catalog::load::cluster("dgx-h100").expect("a preset"),
                runtime: catalog::load::runtime(runtime).expect("a preset"),
                workload: Workload::new(sizes).expect("a workload"),
                headroom: 0.05,
            };
            for key in ["tp", "mbs", "overlap", "recompute", "grad_dtype"] {
                let listed = candidates(&scenario, &[8], key);
                let once: BTreeSet<&String> = listed.iter().collect();
                assert_eq!(listed.len(), once.len(), "{runtime} {key}: {listed:?}");
            }
        }
    }
}
