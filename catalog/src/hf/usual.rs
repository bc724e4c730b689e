//! Sizes that a `config.json` may leave out: the defaults of Transformers' configuration classes.
//!
//! The nested object of a multi-modal model is saved as its differences from these defaults, so any of them may be absent.

/// The sizes of a family, by field.
type Sizes = &'static [(&'static str, u64)];

/// Fields with a default, by family. A family whose field is not here has no default, or takes it from other fields.
const USUAL: &[(&str, Sizes)] = &[
    ("mistral", &[("num_key_value_heads", 8)]),
    ("mixtral", &[("num_key_value_heads", 8)]),
    ("starcoder2", &[("num_key_value_heads", 2)]),
    ("qwen2", &[("num_key_value_heads", 32)]),
    ("qwen3", &[("num_key_value_heads", 32), ("head_dim", 128)]),
    (
        "qwen2_moe",
        &[
            ("num_key_value_heads", 16),
            ("shared_expert_intermediate_size", 5632),
        ],
    ),
    ("qwen3_moe", &[("num_key_value_heads", 4)]),
    (
        "qwen3_next",
        &[
            ("num_key_value_heads", 2),
            ("head_dim", 256),
            ("shared_expert_intermediate_size", 512),
        ],
    ),
    ("gemma2", &[("num_key_value_heads", 4), ("head_dim", 256)]),
    ("gemma3", GEMMA3),
    ("gemma3_text", GEMMA3),
    ("llama4", LLAMA4),
    ("llama4_text", LLAMA4),
    ("gpt_oss", &[("num_key_value_heads", 8), ("head_dim", 64)]),
    (
        "minimax_m2",
        &[("num_key_value_heads", 8), ("head_dim", 128)],
    ),
    ("nemotron_h", &[("num_key_value_heads", 8)]),
    ("ernie4_5_moe", &[("num_key_value_heads", 4)]),
    (
        "glm4_moe",
        &[
            ("num_key_value_heads", 8),
            ("n_shared_experts", 1),
            ("first_k_dense_replace", 1),
        ],
    ),
    (
        "deepseek_v2",
        &[("n_shared_experts", 2), ("q_lora_rank", 1536)],
    ),
    (
        "deepseek_v3",
        &[
            ("n_shared_experts", 1),
            ("first_k_dense_replace", 3),
            ("q_lora_rank", 1536),
        ],
    ),
];

const GEMMA3: Sizes = &[
    ("vocab_size", 262_208),
    ("hidden_size", 2304),
    ("intermediate_size", 9216),
    ("num_hidden_layers", 26),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("max_position_embeddings", 131_072),
];

const LLAMA4: Sizes = &[
    ("vocab_size", 202_048),
    ("hidden_size", 5120),
    ("intermediate_size", 8192),
    ("intermediate_size_mlp", 16_384),
    ("num_hidden_layers", 48),
    ("num_attention_heads", 40),
    ("num_key_value_heads", 8),
    ("head_dim", 128),
    ("num_local_experts", 16),
    ("max_position_embeddings", 131_072),
];

/// The default of a family's field; `None` if it has none.
pub(super) fn size(kind: &str, field: &str) -> Option<u64> {
    let (_, sizes) = USUAL.iter().find(|(named, _)| *named == kind)?;
    let found = sizes.iter().find(|(named, _)| *named == field);
    found.map(|(_, size)| *size)
}

/// Every family's field with a default.
#[cfg(test)]
pub(super) fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    let fields = |(kind, sizes): &(&'static str, Sizes)| {
        let kind = *kind;
        sizes.iter().map(move |(field, _)| (kind, *field))
    };
    USUAL.iter().flat_map(fields)
}
