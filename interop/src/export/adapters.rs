//! The linear layers that have adapters, named as in PEFT's `target_modules`.

use catalog::AdaptedModule;
use catalog::model::{AttentionKind, Family, ModelConfig, Projections};

use super::refusal::Limits;

/// Names of the linear layers of a model that have adapters. A model that names them otherwise than Llama is refused.
pub(super) fn names(model: &ModelConfig, limits: &mut Limits) -> Vec<&'static str> {
    let llama = match model.family {
        Family::Llama | Family::Mixtral | Family::QwenMoe | Family::GptOss => true,
        Family::Gpt2
        | Family::Opt
        | Family::Bloom
        | Family::GptNeox
        | Family::Falcon
        | Family::Mpt
        | Family::Phi3
        | Family::DeepSeek
        | Family::NemotronH
        | Family::MiniMax
        | Family::Ernie
        | Family::Llama4
        | Family::Starcoder2 => false,
    };
    let separate = matches!(
        model.attention.kind,
        AttentionKind::Grouped {
            projections: Projections::Separate,
            ..
        }
    );
    let why = "its linear layers are not named as Llama's; edit target modules by hand";
    limits.refuse_model(!llama || !separate || !model.mlp.gated, "adapters", why);
    let modules = model.adapters.map(|of| of.modules).unwrap_or_default();
    modules.modules().flat_map(named).copied().collect()
}

fn named(module: AdaptedModule) -> &'static [&'static str] {
    match module {
        AdaptedModule::Q => &["q_proj"],
        AdaptedModule::K => &["k_proj"],
        AdaptedModule::V => &["v_proj"],
        AdaptedModule::Proj => &["o_proj"],
        AdaptedModule::Fc1 => &["gate_proj", "up_proj"],
        AdaptedModule::Fc2 => &["down_proj"],
    }
}
