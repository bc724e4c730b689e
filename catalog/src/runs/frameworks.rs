//! Chooses the runtime that a published run is predicted with, from data about what each source says of its framework.

use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::Value;

use super::Run;
use crate::runtime::Rewrite;

/// A rule that assigns a runtime preset to runs, by the framework they name or by source.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Framework {
    /// The runtime preset that runs of this framework are predicted with.
    pub runtime: String,
    /// Words; one of them must occur in a run's framework, software or sharding text.
    named: Vec<String>,
    /// If given, one of these must occur in the run's sharding text.
    #[serde(default)]
    sharding: Vec<String>,
    /// Whether the run's sharding text must be empty.
    #[serde(default)]
    unsaid_sharding: bool,
    /// Sources of this framework whose rows do not name it, as `owner/repository`.
    #[serde(default)]
    repositories: Vec<String>,
    /// Rewrites of the runtime preset, such as fused kernels, that are left out of predictions: the
    /// older code of these runs did not have them.
    #[serde(default)]
    pub without: Vec<Rewrite>,
    /// Memory counter of the framework's own log (`reserved`); `None` if sources read the device's.
    #[serde(default)]
    pub memory_counter: Option<String>,
    /// Why this runtime was chosen, with the code that was read.
    pub reason: String,
}

impl Framework {
    /// The framework that a run names, or that its source is known to use; `None` if neither is known.
    #[must_use]
    pub fn of(run: &Run) -> Option<&'static Self> {
        Self::named(run, run.text_flag("framework"))
    }

    /// The framework that the row of a run names itself; what the run's recipe says does not count.
    pub(super) fn stated_by(run: &Run) -> Option<&'static Self> {
        Self::named(run, run.stated("framework").and_then(Value::as_str))
    }

    /// The framework of a run for which `said` is the value of the flag `framework`.
    fn named(run: &Run, said: Option<&str>) -> Option<&'static Self> {
        let sharding = run.text("zero", run.zero.as_deref()).unwrap_or("");
        let software = run.sw_version.as_deref();
        // The remark in `zero3 (DeepSpeed)` names a framework; `zero3` alone does not.
        let remark = sharding.split_once('(').map_or("", |(_, remark)| remark);
        let software = [said.unwrap_or(""), software.unwrap_or(""), remark].join(" ");
        let (software, sharding) = (software.to_lowercase(), sharding.to_lowercase());
        let has =
            |text: &str, list: &[String]| list.iter().any(|word| text.contains(word.as_str()));
        let shards = |f: &Self| {
            let said = f.sharding.is_empty() || has(&sharding, &f.sharding);
            said && (!f.unsaid_sharding || sharding.is_empty())
        };
        let named_in = |text: &str| all().iter().find(|f| has(text, &f.named) && shards(f));
        let listed = |f: &&Self| f.repositories.iter().any(|r| r == run.repository());
        let by_source = || all().iter().find(listed);
        named_in(&software)
            .or_else(by_source)
            .or_else(|| named_in(&sharding))
    }
}

/// Every framework, in the order in which they are tried.
fn all() -> &'static [Framework] {
    static ALL: OnceLock<Vec<Framework>> = OnceLock::new();
    ALL.get_or_init(|| {
        let text = include_str!("../../presets/runs/frameworks.yaml");
        crate::text::yaml(text, "frameworks.yaml").expect("a test reads the embedded file")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_framework_has_a_runtime() {
        for framework in all() {
            crate::load::runtime(&framework.runtime).expect(&framework.runtime);
        }
    }

    #[test]
    fn sharding_tells_engines_of_one_framework_apart() {
        let of = |software: &str, zero: Option<&str>| {
            let run = Run {
                sw_version: Some(software.to_owned()),
                zero: zero.map(str::to_owned),
                ..Run::default()
            };
            Framework::of(&run).map(|f| f.runtime.as_str())
        };
        let own = of("Megatron-DeepSpeed", Some("none (Megatron DDP)"));
        assert_eq!(own, Some("megatron-2022"));
        let engine = of("Megatron-DeepSpeed", Some("zero1"));
        assert_eq!(engine, Some("megatron-deepspeed"));
        assert_eq!(of("a trainer of ours", None), None);
    }
}
