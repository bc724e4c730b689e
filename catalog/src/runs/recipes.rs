//! What published runs leave out because the recipes that made them set it.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Deserialize;
use serde_json::Value;

use super::Run;
use crate::adapters::Adapters;
use crate::runtime::Rewrite;

/// What the recipes of a source set.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Sources, as `owner/repository`.
    repositories: Vec<String>,
    /// Flags that a run must state with these values, where a source's tables were made by different recipes.
    #[serde(default)]
    flags: BTreeMap<String, Value>,
    /// The software that the recipes pin, where rows do not name it.
    pub software: Option<String>,
    /// The adapters that are trained in runs of LoRA.
    pub adapters: Option<Adapters>,
    /// Lengths of the documents that fine-tuning packs into sequences, in the notation of `--lengths`.
    pub documents: Option<String>,
    /// Layers of each virtual stage of a pipeline, where the source's table has no column for them.
    pub virtual_stage_layers: Option<u64>,
    /// Number of ranks that share parameters, where rows do not say that larger jobs consist of several such groups.
    pub shard_group: Option<u64>,
    /// What is recomputed.
    pub recompute: Option<String>,
    /// What printed memory counts.
    pub memory_counter: Option<MemoryCounter>,
    /// Rewrites to add to the preset of the framework, because the code of this source does them.
    #[serde(default)]
    pub rewrites: Vec<Rewrite>,
    /// Bytes of memory traffic for each element that the source's own optimizer updates, if it is not Adam.
    pub optimizer_bytes: Option<f64>,
    /// The code that was read.
    pub reason: String,
}

/// What a framework's own figure of memory counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryCounter {
    /// Bytes of tensors that are alive.
    Allocated,
    /// Bytes of tensors that are alive during the first step. The optimizer has no states until it updates at the end of that step.
    AllocatedInFirstStep,
}

impl Recipe {
    /// The recipes that made a run, if its source is known.
    #[must_use]
    pub fn of(run: &Run) -> Option<&'static Self> {
        let made = |recipe: &&Self| {
            let stated = |(name, value): (&String, &Value)| run.flag(name) == Some(value);
            let published = recipe.repositories.iter().any(|r| r == run.repository());
            published && recipe.flags.iter().all(stated)
        };
        all().iter().find(made)
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
        assert!(Recipe::of(&run("someone/else@1")).is_none());
        assert!(all().iter().all(|recipe| !recipe.reason.is_empty()));
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
        let paxml = |framework: &str| {
            let recipe = found("NVIDIA/dgxc-benchmarking@1", "framework", framework);
            recipe.and_then(|recipe| recipe.shard_group)
        };
        assert_eq!(paxml("Paxml (JAX)"), Some(128));
        assert_eq!(paxml("NeMo"), None);
    }
}
