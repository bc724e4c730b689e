//! The runtime presets that come with the tool.

use crate::embedded::embedded;
use crate::runtime::Runtime;
use crate::runtime_file::RuntimeFile;

/// Every preset, parents before children.
const FILES: &[(&str, &str)] = embedded!(
    "runtimes",
    [
        "vescale",
        "vescale-cuda",
        "megatron-2021",
        "megatron-deepspeed",
        "megatron-deepspeed-bf16",
        "megatron-2022",
        "megatron-core",
        "megatron-fsdp",
        "nemo",
        "fsdp1",
        "llm-foundry",
        "deepspeed",
        "deepspeed-2021",
        "fsdp2",
        "torchtitan",
        "torchtitan-compile",
        "torchtitan-compile-2025",
        "torchtitan-2026",
        "torchtitan-compile-2026",
        "maxtext",
        "hf-trainer",
        "hf-trainer-2021",
        "hf-deepspeed",
        "hf-deepspeed-2021",
        "nanotron",
        "internevo",
        "internlm-2023",
        "colossalai",
        "paddle",
        "generic-fused",
        "generic-eager",
    ]
);

/// A runtime preset with its other names.
#[derive(Clone, Debug, PartialEq)]
pub struct RuntimePreset {
    /// Other names of the preset.
    pub aliases: Vec<String>,
    /// The runtime.
    pub runtime: Runtime,
}

/// Every preset, resolved.
///
/// # Panics
/// Never: a test resolves every embedded file.
#[must_use]
pub fn presets() -> Vec<RuntimePreset> {
    let mut presets: Vec<RuntimePreset> = Vec::new();
    for (file, text) in FILES {
        let parsed: RuntimeFile =
            serde_saphyr::from_str(text).unwrap_or_else(|e| panic!("embedded preset {file}: {e}"));
        let parent = parsed.extends.as_ref().map(|name| {
            &presets
                .iter()
                .find(|p| &p.runtime.name == name)
                .unwrap_or_else(|| {
                    panic!("embedded preset {file} extends {name}, which is not before it in FILES")
                })
                .runtime
        });
        let aliases = parsed.aliases.clone();
        let runtime = parsed
            .resolve(parent)
            .unwrap_or_else(|e| panic!("embedded preset {file}: {e}"));
        presets.push(RuntimePreset { aliases, runtime });
    }
    presets
}

#[cfg(test)]
mod tests {
    use super::presets;

    #[test]
    fn every_preset_resolves_and_is_named_once() {
        let mut names: Vec<String> = presets()
            .into_iter()
            .flat_map(|p| p.aliases.into_iter().chain([p.runtime.name]))
            .collect();
        let total = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), total);
    }
}
