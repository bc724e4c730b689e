//! Settings that published runs do not state because the recipes that made them imply them.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::Value;

use super::{Framework, Run};
use crate::adapters::Adapters;
use crate::runtime::Rewrite;

/// Settings of the recipes that made the runs of a source.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Sources, as `owner/repository`; if empty, sources of every organisation.
    #[serde(default)]
    repositories: Vec<String>,
    /// If not empty, the framework that a run states must be predicted with one of these runtimes.
    #[serde(default)]
    runtimes: Vec<String>,
    /// If not empty, the name of a run's GPU must contain one of these words.
    #[serde(default)]
    gpus: Vec<String>,
    /// The last month for which this is true, as `2025-03`. A run that is younger, or has no date, does not match.
    until: Option<String>,
    /// If not empty, a run's source must contain one of these texts, such as `@v1:folder/`.
    #[serde(default)]
    tables: Vec<String>,
    /// Flags that a run must state with these values, where a source's tables were made by different recipes.
    #[serde(default)]
    flags: BTreeMap<String, Value>,
    /// Flags that the recipes set, where rows do not state them.
    #[serde(default)]
    sets: BTreeMap<String, Value>,
    /// The software that the recipes pin, where rows do not name it.
    pub software: Option<String>,
    /// The network between nodes, in the words of a row's `interconnect`.
    pub interconnect: Option<String>,
    /// The adapters that are trained in runs of LoRA.
    pub adapters: Option<Adapters>,
    /// Lengths of the documents that fine-tuning packs into sequences, in the notation of `--lengths`.
    pub documents: Option<String>,
    /// Layers of each virtual stage of a pipeline, where the source's table has no column for them.
    pub virtual_stage_layers: Option<u64>,
    /// How many layers fewer the first stage of a pipeline holds than a stage in the middle; then the same of the last stage.
    pub fewer_layers: Option<[u64; 2]>,
    /// Whether all tokens of the data, and their positions, are the same.
    #[serde(default)]
    pub alike_tokens: bool,
    /// Number of ranks that share parameters, where rows do not say that larger jobs consist of several such groups.
    pub shard_group: Option<u64>,
    /// What is recomputed.
    pub recompute: Option<String>,
    /// Which bytes the printed memory counts.
    pub memory_counter: Option<MemoryCounter>,
    /// Rewrites to add to the preset of the framework, because the code of this source does them.
    #[serde(default)]
    pub rewrites: Vec<Rewrite>,
    /// Rewrites to take from that preset, because the code of this source does not do them.
    #[serde(default)]
    pub without: Vec<Rewrite>,
    /// The source's own optimizer, if it is not Adam.
    pub optimizer: Option<OwnOptimizer>,
    /// The code that was read.
    pub reason: String,
}

/// Costs of an optimizer that updates one parameter tensor after the other.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnOptimizer {
    /// Bytes of device memory that the optimizer reads and writes to update one element.
    pub bytes: f64,
    /// Microseconds that the host takes to update one tensor.
    pub tensor_us: f64,
    /// Microseconds that the host takes to gather one gradient and find its norm. Only gradients that tensor parallelism shards are
    /// gathered, to clip them.
    pub whole_gradient_us: f64,
}

/// Which bytes a framework's own memory figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryCounter {
    /// Bytes of tensors that are alive.
    Allocated,
    /// Bytes of tensors that are alive during the first step. The optimizer has no states until it updates at the end of that step.
    AllocatedInFirstStep,
}

impl Recipe {
    /// The recipes that made a run; `None` if its source is not known.
    #[must_use]
    pub fn of(run: &Run) -> Option<&'static Self> {
        let made = |recipe: &&Self| {
            let stated = |(name, value): (&String, &Value)| run.stated(name) == Some(value);
            let holds = |texts: &[String], is: &dyn Fn(&str) -> bool| {
                texts.is_empty() || texts.iter().any(|text| is(text))
            };
            let runtime = Framework::stated_by(run).map(|framework| framework.runtime.as_str());
            let gpu = run
                .text("gpu", run.gpu.as_deref())
                .unwrap_or("")
                .to_lowercase();
            let month = run.date.as_deref().and_then(|date| date.get(..7));
            holds(&recipe.repositories, &|name| name == run.repository())
                && holds(&recipe.runtimes, &|name| runtime == Some(name))
                && holds(&recipe.gpus, &|word| gpu.contains(word))
                && holds(&recipe.tables, &|table| run.source.contains(table))
                && (recipe.until.as_deref()).is_none_or(|until| month.is_some_and(|m| m <= until))
                && recipe.flags.iter().all(stated)
        };
        all().iter().find(made)
    }

    /// A flag that the recipe sets.
    pub(super) fn sets(&self, name: &str) -> Option<&Value> {
        self.sets.get(name)
    }
}

fn all() -> &'static [Recipe] {
    static ALL: OnceLock<Vec<Recipe>> = OnceLock::new();
    ALL.get_or_init(|| {
        let text = include_str!("../../presets/runs/recipes.yaml");
        crate::text::yaml(text, "recipes.yaml").expect("a test reads the embedded file")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_are_found_by_their_source() {
        let run = |source: &str| Run {
            source: source.to_owned(),
            ..Run::default()
        };
        let known = run("Lightning-AI/litgpt@2685705:tutorials/resource-tables.md");
        let recipe = Recipe::of(&known).expect("known");
        assert_eq!(recipe.adapters.map(|of| of.rank), Some(8));
        let of_line = |line: u64| {
            let file = "NVIDIA-NeMo/Megatron-Bridge@067f987df0:docs/performance-summary-archive.md";
            let recipe = Recipe::of(&run(&format!("{file}#L{line} (25.11 NeMo Container)")));
            recipe.and_then(|recipe| recipe.recompute.as_deref())
        };
        // GPT-OSS on B200, on H100, and another model.
        let modules = Some("selective:layernorm,moe_act");
        assert_eq!([581, 592, 582].map(of_line), [modules, modules, None]);
        assert!(Recipe::of(&run("someone/else@1")).is_none());
        assert!(all().iter().all(|recipe| !recipe.reason.is_empty()));
    }

    #[test]
    fn facts_of_a_version_hold_for_all_runs_of_its_time() {
        let attention = |software: &str, gpu: &str, date: Option<&str>| {
            let run = Run {
                source: "someone/else@1".to_owned(),
                sw_version: Some(software.to_owned()),
                gpu: Some(gpu.to_owned()),
                date: date.map(str::to_owned),
                ..Run::default()
            };
            run.flag("flash_attention")
                .or(run.flag("attention"))
                .cloned()
        };
        let (flash, te) = (Some("2".into()), Some("TE flash".into()));
        for (software, gpu, date, kernel) in [
            ("torchtitan", "H100", Some("2024-12"), &flash),
            ("torchtitan", "H100", Some("2025-08-01"), &flash),
            ("torchtitan", "B200", Some("2025-06"), &None),
            ("torchtitan", "H100", Some("2025-11"), &None),
            ("torchtitan", "H100", None, &None),
            ("NeMo 24.05", "H100", Some("2024-06"), &te),
            ("Megatron-Core", "H100", Some("2024-06"), &None),
        ] {
            assert_eq!(
                &attention(software, gpu, date),
                kernel,
                "{software} {date:?}"
            );
        }
    }

    #[test]
    fn a_recipe_with_flags_needs_all_of_them() {
        let found = |source: &str, flag: &str, value: &str| {
            let mut run = Run {
                source: source.to_owned(),
                ..Run::default()
            };
            run.flags
                .get_or_insert_default()
                .insert(flag.to_owned(), value.into());
            Recipe::of(&run)
        };
        let nemo = |task: &str| found("NVIDIA/NeMo@1", "task", task).expect("known");
        assert_eq!(nemo("SFT packed").virtual_stage_layers, Some(1));
        assert_eq!(nemo("LoRA").virtual_stage_layers, None);
        assert!(nemo("LoRA").documents.is_some());
        let dgxc = |framework: &str| {
            let recipe = found("NVIDIA/dgxc-benchmarking@1", "framework", framework);
            recipe.map(|recipe| (recipe.shard_group, recipe.alike_tokens))
        };
        assert_eq!(dgxc("Paxml (JAX)"), Some((Some(128), false)));
        assert_eq!(dgxc("MaxText (JAX)"), Some((None, true)));
        assert_eq!(dgxc("NeMo"), None);
    }

    #[test]
    fn flags_of_a_recipe_hold_for_its_own_tables_where_rows_do_not_state_them() {
        let attention = |source: &str, own: Option<&str>| {
            let mut run = Run {
                source: source.to_owned(),
                ..Run::default()
            };
            if let Some(own) = own {
                let flags = run.flags.get_or_insert_default();
                flags.insert("attention".to_owned(), own.into());
            }
            run.flag("attention").cloned()
        };
        let nemo_24 = "NVIDIA/dgxc-benchmarking@v24.11.1 (35a9aecc8d):nemo_megatron/README_175b.md";
        let nemo_25 = "NVIDIA/dgxc-benchmarking@v25.02 (8f5cbb3799):nemo_megatron/README_175b.md";
        assert_eq!(attention(nemo_24, None), Some("TE flash".into()));
        assert_eq!(attention(nemo_24, Some("eager")), Some("eager".into()));
        assert_eq!(attention(nemo_25, None), None);
    }
}
