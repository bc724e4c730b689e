//! The models that come with the tool: sizes from each model's published `config.json`.

use crate::names::same;

/// Lists models, each as its name, its other names, and the text of the file `presets/models/NAME.json`.
macro_rules! models {
    ($($name:literal => [$($other:literal),*];)*) => {
        &[$((
            $name,
            &[$($other),*],
            include_str!(concat!("../presets/models/", $name, ".json")),
        )),*]
    };
}

/// Name, other names, and the text of a `config.json`.
pub(crate) const MODELS: &[(&str, &[&str], &str)] = models! {
    "llama3-8b" => ["llama3.1-8b", "llama8b"];
    "llama3-70b" => ["llama70b", "llama3.1-70b", "llama3.3-70b"];
    // Llama 3 of April 2024; `llama3-8b` and `llama3-70b` are Llama 3.1, whose rotations are rescaled.
    "meta-llama-3-8b" => [];
    "meta-llama-3-70b" => [];
    "llama3.1-405b" => ["llama405b", "llama3-405b"];
    "llama3.2-1b" => [];
    "llama3.2-3b" => [];
    "llama2-7b" => [];
    "llama2-13b" => [];
    "llama2-70b" => [];
    "tinyllama-1.1b" => ["tinyllama", "tinyllama-1.1b-chat-v1.0"];
    "mistral-7b" => [];
    "mixtral-8x7b" => [];
    "mixtral-8x22b" => [];
    "qwen2.5-7b" => ["qwen2-7b", "qwen2.5-coder-7b"];
    "qwen2.5-72b" => ["qwen2-72b"];
    "qwen2.5-0.5b" => ["qwen2-0.5b"];
    "qwen3-8b" => [];
    "qwen3-32b" => [];
    "qwen3-30b-a3b" => [];
    "qwen3-235b-a22b" => [];
    "gemma2-9b" => [];
    "gemma2-27b" => [];
    "gemma3-27b" => [];
    "phi3-mini" => ["phi-3-mini"];
    "phi3-medium" => ["phi-3-medium"];
    "starcoder2-3b" => [];
    "starcoder2-7b" => [];
    "gpt2" => ["gpt2-small", "gpt2-124m"];
    "gpt2-medium" => [];
    "gpt2-large" => [];
    "gpt2-xl" => [];
    "gpt3-175b" => ["gpt3"];
    "megatron-22b" => ["gpt-22b"];
    "megatron-530b" => ["gpt-530b", "mt-nlg"];
    "megatron-1t" => ["gpt-1t"];
    "opt-6.7b" => [];
    "opt-13b" => [];
    "opt-30b" => [];
    "opt-66b" => [];
    "bloom-176b" => ["bloom"];
    "bloom-7b1" => [];
    "gpt-neox-20b" => ["neox-20b"];
    "falcon-7b" => [];
    "falcon-40b" => [];
    "falcon-180b" => [];
    "mpt-7b" => [];
    "mpt-30b" => [];
    "deepseek-v2" => [];
    "deepseek-v2-lite" => [];
    "deepseek-v3" => ["deepseek-r1"];
    "gpt-oss-20b" => [];
    "gpt-oss-120b" => [];
    "nemotron-4-15b" => ["nemotron-15b"];
    "nemotron-4-340b" => ["nemotron-340b"];
    "qwen2.5-1.5b" => ["qwen2-1.5b"];
    "qwen2.5-3b" => [];
    "qwen2.5-14b" => [];
    "qwen2.5-32b" => ["qwen2.5-coder-32b"];
    "qwen3-0.6b" => [];
    "qwen3-1.7b" => [];
    "qwen3-4b" => [];
    "qwen3-4b-2507" => ["qwen3-4b-instruct-2507"];
    "qwen3-14b" => [];
    "qwen3-30b-a3b-2507" => ["qwen3-30b-a3b-instruct-2507"];
    "gemma3-12b" => ["gemma-3-12b"];
    "smollm-360m" => [];
    "smollm2-135m" => [];
    "smollm2-360m" => [];
    "smollm2-1.7b" => [];
    "llama-7b" => [];
    "llama-13b" => [];
    "open-llama-3b" => ["open-llama-3b-v2"];
    "starcoder2-15b" => [];
    "mistral-7b-v0.1" => [];
    "pythia-12b" => ["pythia-12b-deduped"];
    "redpajama-3b" => ["redpajama-incite-chat-3b-v1"];
    "kimi-k2" => [];
    "nemotron-mini-4b" => [];
    // DeepSeek-V3 without its multi-token-prediction layer.
    "deepseek-v3-main" => [];
    // Sizes of Nemotron-H 47B and 56B as NVIDIA-NeMo/Megatron-Bridge has them (`NemotronHModelProvider47B`, `…56B`).
    "nemotron-h-8b" => ["nemotron-h-8b-base-8k"];
    "nemotron-h-47b" => ["nemotron-h-47b-base-8k"];
    "nemotron-h-56b" => ["nemotron-h-56b-base-8k"];
    "nemotron-3-nano-30b-a3b" => ["nemotron-3-nano"];
    "qwen3-next-80b-a3b" => ["qwen3-next"];
    "glm4.5" => ["glm-4.5"];
    "glm4.5-air" => ["glm-4.5-air"];
    "glm4.6" => ["glm-4.6"];
    "olmo2-1b" => ["olmo-2-0425-1b"];
    "olmo2-7b" => ["olmo-2-1124-7b"];
    "olmo2-13b" => ["olmo-2-1124-13b"];
    "olmo2-32b" => ["olmo-2-0325-32b"];
    "olmo3-7b" => ["olmo-3-1025-7b"];
    "olmo3-32b" => ["olmo-3-1125-32b"];
    "minimax-m2" => [];
    "llama4-scout" => ["llama-4-scout-17b-16e"];
    "llama4-maverick" => ["llama-4-maverick-17b-128e"];
    "kimi-k2-0905" => ["kimi-k2-instruct-0905"];
    "qwen3-coder-480b-a35b" => ["qwen3-coder-480b"];
    "ernie4.5-21b-a3b" => ["ernie-4.5-21b-a3b"];
};

/// Endings of published names that do not tell presets apart: of fine-tuning, file format, length of training and of context.
const IGNORED_ENDINGS: [&str; 8] = [
    "-instruct",
    "-base",
    "-chat",
    "-hf",
    "-it",
    "-pt",
    "-intermediate-step-1431k-3t",
    "-4k",
];

/// Whether a preset has this name or alias.
pub(crate) fn is_preset(name: &str) -> bool {
    let mut presets = MODELS.iter();
    presets.any(|(preset, aliases, _)| same(preset, aliases, name))
}

/// The preset of a model by its name on the Hugging Face hub; `None` if there is none. The owner,
/// hyphens, underscores and some endings are ignored, and `meta-` if no preset has it.
#[must_use]
pub fn preset_of_hub_name(id: &str) -> Option<&'static str> {
    let plain = |name: &str, left_out: &str| {
        let lower = name.to_lowercase();
        let mut name = lower.strip_prefix(left_out).unwrap_or(&lower);
        while let Some(shorter) = IGNORED_ENDINGS
            .iter()
            .find_map(|end| name.strip_suffix(end))
        {
            name = shorter;
        }
        name.replace(['-', '_'], "")
    };
    let last = id.rsplit('/').next().unwrap_or(id);
    ["", "meta-"].into_iter().find_map(|left_out| {
        let asked = plain(last, left_out);
        let is = |name: &&str| plain(name, left_out) == asked;
        let mut presets = MODELS.iter();
        let found = presets.find(|(name, aliases, _)| aliases.iter().chain([name]).any(is));
        found.map(|(name, ..)| *name)
    })
}
