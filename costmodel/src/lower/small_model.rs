//! A model of one small layer, for tests of casts.

use catalog::Model;

/// Tokens of a sequence.
pub(super) const TOKENS: u64 = 32;
/// Width of the residual stream.
pub(super) const HIDDEN: u64 = 64;
/// Width of all keys, and of all values.
pub(super) const KEYS: u64 = 32;
/// Width between the products of the feed-forward block.
pub(super) const INNER: u64 = 96;

/// A model of the kind that `model_type` names, with `more` fields of its `config.json`.
pub(super) fn model(kind: &str, more: &str) -> Model {
    let json = format!(
        r#"{{"model_type": "{kind}", "hidden_size": {HIDDEN}, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": {INNER},
            "vocab_size": 128, "max_position_embeddings": 64, "rms_norm_eps": 1e-5{more}}}"#
    );
    catalog::hf::decode(&json, "test", kind).expect("a model")
}
