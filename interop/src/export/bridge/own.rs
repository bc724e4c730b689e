//! Models that Megatron Bridge builds by classes of its own, because no field of Megatron-Core's configuration says what
//! they have. Bridge makes them from the model's name on the hub; the file compares their sizes with the plan's.

use catalog::CudaGraphs;
use catalog::model::{Family, ModelConfig, Residual};

use crate::config::Value;
use crate::export::graphs;
use crate::export::job::Job;
use crate::export::refusal::{Limits, Refusal};

/// The name of Bridge's own class of models that this one belongs to (`src/megatron/bridge/models`).
pub(super) fn class(model: &ModelConfig) -> Option<&'static str> {
    match (model.family, model.residual) {
        (Family::MiniMax, _) => Some("MiniMax-M2"),
        (Family::NemotronH, _) => Some("Nemotron-H"),
        (Family::QwenMoe, _) if model.hybrid.is_some() => Some("Qwen3-Next"),
        (Family::Llama, Residual::Sandwich) if model.constants.attention_cap.is_some() => {
            Some("Gemma 2")
        }
        (Family::Llama, Residual::Sandwich) if model.constants.local_rope_theta.is_some() => {
            Some("Gemma 3")
        }
        _ => None,
    }
}

/// Whether Bridge makes this model by itself, from its name on the hub.
pub(crate) fn from_hub(job: &Job<'_>) -> bool {
    job.inputs.hf_id.is_some() && class(job.model).is_some()
}

/// Adds the refusals `parts`, of what no field can express. If Bridge makes the model from the hub,
/// refuses instead what its class cannot run.
pub(super) fn refuse(job: &Job<'_>, parts: Vec<Refusal>, limits: &mut Limits) {
    let name = class(job.model);
    if let Some(name) = name.filter(|_| from_hub(job)) {
        let d = job.decisions;
        limits.refuse(
            d.cp > 1 && job.model.constants.attention_cap.is_some(),
            "cp=1",
            format!("Bridge's {name} attends within one rank"),
        );
        limits.refuse(
            job.model.hybrid.is_some() && d.pp > 1,
            "pp=1",
            "Bridge itself divides layers of different kinds into stages",
        );
        let graphs = graphs::asked(job);
        limits.refuse_graphs(
            graphs == CudaGraphs::Layers && job.model.has_state_spaces() && job.model.moe.is_none(),
            graphs,
            &format!("Bridge's {name} has a number of experts even where no layer has any, and then captures no dense feed-forward part"),
        );
        limits.note(true, format!("the model is Bridge's own {name}"));
        return;
    }
    for mut part in parts {
        if let Some(name) = name {
            let why = format!("; with --hf-id, Bridge's own {name} is taken");
            part.why.push_str(&why);
        }
        limits.refusals.push(part);
    }
}

/// Sizes by which the model that Bridge makes is compared with the plan's.
pub(super) fn sizes(model: &ModelConfig) -> Vec<(&'static str, Value)> {
    let mut sizes: Vec<(&str, Value)> = vec![
        ("num_layers", model.layers.into()),
        ("hidden_size", model.hidden.into()),
        ("num_attention_heads", model.attention.heads.into()),
        ("num_query_groups", model.attention.kv_heads().into()),
        ("vocab_size", model.vocab.into()),
    ];
    sizes.extend(model.moe.map(|moe| ("num_moe_experts", moe.experts.into())));
    sizes
}
