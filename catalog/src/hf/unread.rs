//! Refuses a `config.json` with a field that changes the model but is not read by its family's reader, unless the
//! field's value leaves the model as it is.

use serde_json::Value;

use super::fields::{Fields, short};
use crate::error::SpecError;

/// Fields that change the model of some family, each with the JSON value that leaves the model as it is; null always
/// does.
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
];

/// Refuses the first field that changes the model and has not been read.
pub(super) fn check(f: &Fields<'_>, kind: &str) -> Result<(), SpecError> {
    for (field, value) in f.unread() {
        let known = UNCHANGING.iter().find(|(name, _)| *name == field);
        if let Some((_, unchanging)) = known.filter(|(_, unchanging)| !same(value, unchanging)) {
            let message = format!(
                "{} is not modelled for {kind}; expected {unchanging}",
                short(value)
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
