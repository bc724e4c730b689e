//! Refuses a `config.json` with a field that changes the model but is not read by its family's reader, unless the
//! field's value leaves the model as it is.

use serde_json::Value;

use super::fields::{Fields, short};
use crate::error::SpecError;

/// Fields that change the model of some family, each with a JSON value that leaves the model as it is; null always
/// does. A field with several such values has several rows.
const UNCHANGING: &[(&str, &str)] = &[
    ("is_encoder_decoder", "false"),
    ("add_cross_attention", "false"),
    ("attention_bias", "false"),
    ("mlp_bias", "false"),
    ("clip_qkv", "null"),
    ("softmax_scale", "null"),
    ("logit_scale", "null"),
    ("partial_rotary_factor", "1"),
    ("rotary_pct", "1"),
    ("rope_percent", "1"),
    ("rope_percentage", "1"),
    ("scale_attn_weights", "true"),
    ("scale_attn_by_inverse_layer_idx", "false"),
    ("enable_bias", "true"),
    ("layer_norm_elementwise_affine", "true"),
    ("_remove_final_layer_norm", "false"),
    ("layerdrop", "0"),
    ("parallel_attn", "true"),
    ("alibi", "false"),
    ("alibi_bias_max", "8"),
    ("attn_type", "\"multihead_attention\""),
    ("prefix_lm", "false"),
    ("attn_uses_sequence_id", "false"),
    ("embedding_fraction", "1"),
    ("use_bidirectional_attention", "false"),
    ("router_jitter_noise", "0"),
    ("swiglu_alpha", "1.702"),
    ("mlp_only_layers", "[]"),
    ("hidden_dropout", "0"),
    ("use_qk_norm", "false"),
    ("shared_intermediate_size", "0"),
    ("num_experts", "0"),
    ("num_experts", "1"),
    ("num_local_experts", "0"),
    ("num_local_experts", "1"),
    ("n_routed_experts", "0"),
    ("n_routed_experts", "1"),
    ("moe_num_experts", "0"),
    ("moe_num_experts", "1"),
    ("moe_intermediate_size", "0"),
    ("n_shared_experts", "0"),
    ("num_shared_experts", "0"),
    ("num_shared_expert", "0"),
    ("moe_num_shared_experts", "0"),
    ("kv_lora_rank", "0"),
    ("q_lora_rank", "0"),
    ("hybrid_override_pattern", "null"),
    ("layers_block_type", "null"),
    ("mamba_num_heads", "0"),
    ("mamba_n_heads", "0"),
    ("linear_num_value_heads", "0"),
    ("full_attention_interval", "1"),
    ("lm_head_bias", "false"),
];

/// Refuses the first field that changes the model and has not been read.
pub(super) fn check(f: &Fields<'_>, kind: &str) -> Result<(), SpecError> {
    for (field, value) in f.unread() {
        let known = UNCHANGING.iter().filter(|(name, _)| *name == field);
        let unchanging: Vec<&str> = known.map(|(_, value)| *value).collect();
        if !unchanging.is_empty() && !unchanging.iter().any(|known| same(value, known)) {
            let message = format!(
                "{} is not modelled for {kind}; expected {}",
                short(value),
                unchanging.join(" or ")
            );
            return Err(f.wrong(field, message));
        }
    }
    Ok(())
}

fn same(value: &Value, unchanging: &str) -> bool {
    match value {
        Value::Null => true,
        Value::Number(number) => number.as_f64() == unchanging.parse().ok(),
        other => serde_json::from_str::<Value>(unchanging).is_ok_and(|known| known == *other),
    }
}

/// The fields that are refused where they are not read.
#[cfg(test)]
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    UNCHANGING.iter().map(|(name, _)| *name)
}
