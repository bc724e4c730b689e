//! The models that torchtitan knows.

use catalog::model::{Family, ModelConfig};

/// A model that torchtitan's registries hold.
#[derive(Clone, Copy)]
pub(super) struct Registered {
    pub(super) module: &'static str,
    pub(super) flavor: &'static str,
    /// Whether 0.2 has the flavor.
    pub(super) in_02: bool,
    /// The configuration function of 0.3 and main.
    pub(super) function: Option<&'static str>,
}

/// Registries of torchtitan 0.2.2 (`models/*/__init__.py`) and 0.3.0 (`models/*/config_registry.py`),
/// by family, layers and width.
pub(super) fn registered(model: &ModelConfig) -> Option<Registered> {
    let entry = |module, flavor, function| Registered {
        module,
        flavor,
        in_02: true,
        function,
    };
    Some(match (model.family, model.layers, model.hidden) {
        (Family::Llama, 32, 4096) if model.vocab == 128_256 => {
            entry("llama3", "8B", Some("llama3_8b"))
        }
        (Family::Llama, 80, 8192) if model.vocab == 128_256 => {
            entry("llama3", "70B", Some("llama3_70b"))
        }
        (Family::Llama, 126, 16384) => entry("llama3", "405B", Some("llama3_405b")),
        (Family::Llama, 36, 4096) if model.vocab == 151_936 => entry("qwen3", "8B", None),
        (Family::Llama, 64, 5120) if model.vocab == 151_936 && model.attention.kv_heads() == 8 => {
            entry("qwen3", "32B", Some("qwen3_32b"))
        }
        (Family::QwenMoe, 48, 2048) => entry("qwen3", "30B-A3B", Some("qwen3_30b_a3b")),
        (Family::QwenMoe, 94, 4096) => entry("qwen3", "235B-A22B", None),
        (Family::DeepSeek, 27, 2048) => entry("deepseek_v3", "16B", Some("deepseek_v3_16b")),
        (Family::DeepSeek, 60, 5120) => entry("deepseek_v3", "236B", None),
        (Family::DeepSeek, 61, 7168) => entry("deepseek_v3", "671B", Some("deepseek_v3_671b")),
        (Family::GptOss, 24, _) => entry("gpt_oss", "20b", Some("gpt_oss_20b")),
        (Family::GptOss, 36, _) => entry("gpt_oss", "120b", Some("gpt_oss_120b")),
        _ => return None,
    })
}

/// The torchtitan model nearest to a family; none where its layers differ from all of them.
pub(super) fn family_module(model: &ModelConfig) -> Option<&'static str> {
    match model.family {
        Family::QwenMoe => Some("qwen3"),
        Family::DeepSeek => Some("deepseek_v3"),
        Family::GptOss => Some("gpt_oss"),
        Family::Starcoder2 => None,
        Family::Gpt2
        | Family::Opt
        | Family::Bloom
        | Family::GptNeox
        | Family::Falcon
        | Family::Mpt
        | Family::Llama
        | Family::Phi3
        | Family::Mixtral => Some("llama3"),
    }
}
