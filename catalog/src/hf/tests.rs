//! Tests against the configuration classes of transformers: `catalog/tests/hf_configs.json` holds every family's
//! fields with their defaults.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::fields::Fields;
use super::{decode, model, unread, usual};
use crate::model::{Activation, ModelConfig, Position, Residual, WindowPattern};
use crate::window::Window;

/// Fields without influence on what a model computes in training; comments say why.
const WITHOUT_INFLUENCE: &[&str] = &[
    "model_type",
    // Other tasks than predicting the next token.
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
    "classifier_dropout",
    "is_decoder",
    // Losses beside that of the tokens, which the training system sets.
    "output_router_logits",
    "router_aux_loss_coef",
    // How the same numbers are computed.
    "reorder_and_upcast_attn",
    "pretraining_tp",
    "slow_but_exact",
    "attn_impl",
    "init_device",
    // Tables of positions that ALiBi replaces.
    "learned_pos_emb",
    "use_mamba_kernels",
    "moe_shared_expert_overlap",
    // Generation only: which logits are kept, and the type of a kept state.
    "num_logits_to_keep",
    "mamba_ssm_cache_dtype",
    // Initial values of weights.
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "rescale_prenorm_residual",
    // Implied by heads and their dimension; one shared block has the width that the file states.
    "expand",
    // For prediction modules, which are refused.
    "mtp_layers_block_type",
    // A divisor's lower bound, which the chosen softmax scores never reach.
    "moe_norm_min",
    // Implied by the sizes of latent attention.
    "head_dim",
    "num_key_value_heads",
    // Read where windows or the new architecture are switched on, or where rotation is rescaled.
    "max_window_layers",
    "num_kv_heads",
    "original_max_position_embeddings",
];

fn published() -> Vec<(String, Value)> {
    let text = include_str!("../../tests/hf_configs.json");
    let all: serde_json::Map<String, Value> = serde_json::from_str(text).expect("JSON");
    let families = all.into_iter().filter(|(name, _)| name != "transformers");
    families.collect()
}

fn read(config: &Value) -> Result<ModelConfig, String> {
    let read = decode(&config.to_string(), "config.json", "test");
    read.map(|model| (*model).clone())
        .map_err(|error| error.to_string())
}

fn with(kind: &str, changes: &Value) -> Value {
    let mut config = published()
        .into_iter()
        .find(|(name, _)| name == kind)
        .expect("a family")
        .1;
    for (key, value) in changes.as_object().expect("fields") {
        config[key] = value.clone();
    }
    config
}

#[test]
fn every_field_is_read_or_refused_or_without_influence() {
    for (kind, config) in published() {
        let fields = Fields::new(&config, "config.json").expect("an object");
        model(&fields, &kind).unwrap_or_else(|e| panic!("{kind}: {e}"));
        let known: BTreeSet<&str> = WITHOUT_INFLUENCE
            .iter()
            .copied()
            .chain(unread::names())
            .collect();
        for (field, _) in fields.unread() {
            assert!(known.contains(field), "{kind} does not read `{field}`");
        }
        read(&config).unwrap_or_else(|e| panic!("{kind}: {e}"));
    }
}

#[test]
fn constants_left_out_are_those_of_the_family() {
    for (kind, config) in published() {
        let whole = read(&config).expect("a model");
        let mut bare = config.clone();
        let map = bare.as_object_mut().expect("an object");
        for field in [
            "rms_norm_eps",
            "norm_eps",
            "norm_epsilon",
            "layer_norm_eps",
            "layer_norm_epsilon",
            "initializer_range",
            "init_std",
            "rope_parameters",
            "head_dim",
            "sliding_window",
            "hidden_act",
            "hidden_activation",
            "activation_function",
            "activation",
        ] {
            // Always published: gpt-oss's rotation, GLM-4.5's head dimension.
            let published = [("gpt_oss", "rope_parameters"), ("glm4_moe", "head_dim")];
            if !published.contains(&(kind.as_str(), field)) {
                map.remove(field);
            }
        }
        assert_eq!(read(&bare), Ok(whole), "{kind}");
    }
}

#[test]
fn an_absent_size_is_that_of_the_class_and_a_null_one_follows_the_heads() {
    for (kind, config) in published() {
        let whole = read(&config);
        for (_, field) in usual::all().filter(|(named, _)| *named == kind) {
            let mut bare = config.clone();
            let had = bare.as_object_mut().expect("an object").remove(field);
            assert!(had.is_some() || field == "head_dim", "{kind} {field}");
            assert_eq!(read(&bare), whole, "{kind} without {field}");
        }
    }
    let null = read(&with("mistral", &json!({"num_key_value_heads": null})));
    assert_eq!(null.expect("a model").attention.kv_heads(), 32);
    let whole = read(&with("deepseek_v3", &json!({"q_lora_rank": null}))).expect("a model");
    assert_ne!(Ok(whole), read(&with("deepseek_v3", &json!({}))));
    let mut opt = with("opt", &json!({}));
    opt.as_object_mut().expect("an object").remove("dropout");
    assert_eq!(read(&opt).map(|opt| opt.hidden_dropout), Ok(0.1));
}

#[test]
fn a_nested_text_model_is_its_differences_from_the_class() {
    let nested = json!({"model_type": "gemma3", "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
    }});
    let model = read(&nested).expect("a model");
    assert_eq!((model.vocab, model.attention.heads), (262_208, 8));
    assert_eq!(model.attention.kv_heads(), 4);
    let llama4 = json!({"model_type": "llama4", "text_config": {"num_local_experts": 128}});
    let model = read(&llama4).expect("a model");
    assert_eq!(
        (model.vocab, model.hidden, model.layers),
        (202_048, 5120, 48)
    );
}

#[test]
fn nemotron_rotates_half_and_has_norms_around_one() {
    let rotated = |changes: Value| {
        let model = read(&with("nemotron", &changes)).expect("a model");
        assert!(model.constants.norm_from_one);
        assert_eq!(model.mlp.activation, Activation::Relu2);
        model.position
    };
    let half = Position::Rope { dims: 64 };
    let share = |share: f64| json!({"partial_rotary_factor": share, "rope_parameters": null});
    assert_eq!(rotated(share(0.5)), half);
    assert_eq!(rotated(share(0.25)), Position::Rope { dims: 32 });
    let older = json!({"rope_percent": 0.75, "rope_parameters": null});
    assert_eq!(rotated(older), Position::Rope { dims: 96 });
    assert_eq!(rotated(json!({"rope_parameters": null})), half);
    let phi4 = with(
        "phi3",
        &json!({"partial_rotary_factor": 0.75, "rope_parameters": null}),
    );
    assert_eq!(
        read(&phi4).expect("a model").position,
        Position::Rope { dims: 72 }
    );
}

#[test]
fn what_would_be_another_model_is_refused_by_name() {
    let cases = [
        ("llama", json!({"partial_rotary_factor": 0.5})),
        (
            "llama",
            json!({"rope_parameters": {"partial_rotary_factor": 0.5}}),
        ),
        ("llama", json!({"hidden_act": "relu"})),
        ("gpt2", json!({"scale_attn_by_inverse_layer_idx": true})),
        ("gpt2", json!({"embd_pdrop": 0.2})),
        ("gpt2", json!({"add_cross_attention": true})),
        ("opt", json!({"activation_function": "gelu"})),
        ("opt", json!({"enable_bias": false})),
        ("falcon", json!({"alibi": true})),
        ("falcon", json!({"parallel_attn": false})),
        ("mpt", json!({"logit_scale": 0.5})),
        ("mpt", json!({"norm_type": "rmsnorm"})),
        ("qwen3_moe", json!({"mlp_only_layers": [0, 1]})),
        ("mixtral", json!({"router_jitter_noise": 0.01})),
        ("deepseek_v2", json!({"scoring_func": "sigmoid"})),
        ("deepseek_v3", json!({"topk_method": "greedy"})),
        ("glm4_moe", json!({"scoring_func": "softmax"})),
        ("llama", json!({"use_qk_norm": true})),
        ("minimax_m2", json!({"attn_type_list": [0, 1]})),
        ("ernie4_5_moe", json!({"moe_layer_interval": 2})),
        ("ernie4_5_moe", json!({"moe_layer_end_index": 20})),
        ("llama4_text", json!({"moe_layers": [0, 3]})),
        ("llama4_text", json!({"no_rope_layers": vec![0; 47]})),
        (
            "llama4_text",
            json!({"layer_types": vec!["chunked_attention"; 48]}),
        ),
        ("minimax_m2", json!({"use_qk_norm": false})),
        ("minimax_m2", json!({"shared_intermediate_size": 1536})),
        ("gpt_oss", json!({"swiglu_alpha": 1.5})),
        ("gemma2", json!({"use_bidirectional_attention": true})),
        (
            "gemma2",
            json!({"layer_types": vec!["chunked_attention"; 26]}),
        ),
    ];
    refused(&cases);
}

/// Checks that each of these fields is refused by its name.
fn refused(cases: &[(&str, Value)]) {
    for (kind, changes) in cases {
        let field = changes.as_object().and_then(|map| map.keys().next());
        let field = field
            .expect("a field")
            .replace("rope_parameters", "partial_rotary_factor");
        let error = read(&with(kind, changes)).expect_err(&field);
        assert!(error.contains(&format!("`{field}`")), "{kind}: {error}");
    }
}

#[test]
fn features_of_other_families_are_refused_by_name() {
    refused(&[
        ("olmo2", json!({"num_experts": 64})),
        ("llama", json!({"num_local_experts": 16})),
        ("mistral", json!({"num_local_experts": 8})),
        ("llama", json!({"n_routed_experts": 64})),
        ("llama", json!({"moe_num_experts": 64})),
        ("llama", json!({"moe_intermediate_size": 1024})),
        ("llama", json!({"num_shared_expert": 1})),
        ("llama", json!({"lm_head_bias": true})),
        ("qwen3", json!({"kv_lora_rank": 512})),
        ("qwen3", json!({"q_lora_rank": 1536})),
        ("qwen3", json!({"hybrid_override_pattern": "M*M-"})),
        (
            "llama",
            json!({"layers_block_type": ["mamba", "attention"]}),
        ),
        ("llama", json!({"mamba_n_heads": 128})),
        ("qwen3", json!({"linear_num_value_heads": 32})),
        ("qwen3", json!({"full_attention_interval": 4})),
        (
            "qwen3",
            json!({"layer_types": vec!["linear_attention"; 32]}),
        ),
    ]);
}

#[test]
fn values_that_switch_a_feature_off_leave_the_model_as_it_is() {
    let plain = read(&with("llama", &json!({})));
    for changes in [
        json!({"num_experts": 0, "num_local_experts": 1, "n_routed_experts": null}),
        json!({"lm_head_bias": false, "q_lora_rank": null, "full_attention_interval": 1}),
        json!({"layer_types": vec!["full_attention"; 32]}),
    ] {
        assert_eq!(read(&with("llama", &changes)), plain, "{changes}");
    }
}

#[test]
fn windows_follow_the_list_of_layers() {
    let of = |kind: &str, changes: Value| {
        let model = read(&with(kind, &changes)).expect("a model");
        model.attention.window
    };
    let full_each = |layers: usize, period: usize| -> Vec<&str> {
        let name = |i: usize| match i % period {
            0 => "full_attention",
            _ => "sliding_attention",
        };
        (1..=layers).map(name).collect()
    };
    let window = 1024;
    assert_eq!(
        of(
            "gemma3_text",
            json!({"layer_types": full_each(26, 6), "sliding_window": window})
        ),
        WindowPattern::Alternating {
            window: Window::Sliding(window),
            period: 6
        }
    );
    let on = json!({"use_sliding_window": true, "sliding_window": window, "layer_types": null});
    assert_eq!(
        of("qwen2", with_field(&on, "max_window_layers", 0)),
        WindowPattern::All {
            window: Window::Sliding(window)
        }
    );
    assert_eq!(
        of("qwen2", with_field(&on, "max_window_layers", 32)),
        WindowPattern::Full
    );
    let half = read(&with("qwen2", &with_field(&on, "max_window_layers", 16)));
    assert!(half.is_err_and(|error| error.contains("`max_window_layers`")));
}

#[test]
fn qwen_s_mixture_has_its_window_in_all_layers() {
    let of = |changes: Value| read(&with("qwen3_moe", &changes)).map(|m| m.attention.window);
    let all = |window: u64| {
        let window = Window::Sliding(window);
        Ok(WindowPattern::All { window })
    };
    let on = json!({"use_sliding_window": true, "sliding_window": 1024, "max_window_layers": 12});
    assert_eq!(of(on), all(1024));
    let mut absent = with("qwen3_moe", &json!({"use_sliding_window": true}));
    let map = absent.as_object_mut().expect("an object");
    map.remove("sliding_window");
    assert_eq!(read(&absent).map(|m| m.attention.window), all(4096));
}

#[test]
fn other_spellings_of_a_default_are_read() {
    for (kind, changes) in [
        ("llama4_text", json!({"attn_temperature_tuning": 4})),
        ("ernie4_5_moe", json!({"moe_layer_end_index": -1})),
    ] {
        assert_eq!(read(&with(kind, &changes)), read(&with(kind, &json!({}))));
    }
    let text = with("nemotron_h", &json!({"time_step_limit": [0.0, "limit"]})).to_string();
    let python = text.replace("\"limit\"", "Infinity");
    decode(&python, "config.json", "test").expect("a model");
}

#[test]
fn a_wrapper_s_storage_format_is_that_of_its_text_model() {
    let of = |method: &str| {
        let text = json!({"text_config": {}, "model_type": "gemma3",
            "quantization_config": {"quant_method": method}});
        decode(&text.to_string(), "config.json", "test")
    };
    let model = of("fp8").expect("a model");
    assert_eq!(model.stored_as.as_deref(), Some("fp8"));
    let again = model.definition().expect("its fields").to_string();
    let again = decode(&again, "config.json", "test").expect("a model");
    assert_eq!(*again, *model);
    let refused = of("bitsandbytes")
        .expect_err("not for training")
        .to_string();
    assert!(refused.contains("for inference"), "{refused}");
}

fn with_field(object: &Value, field: &str, value: u64) -> Value {
    let mut object = object.clone();
    object[field] = value.into();
    object
}

#[test]
fn falcon_with_one_norm_shares_it() {
    let changes = json!({"new_decoder_architecture": true, "num_ln_in_parallel_attn": 1});
    let model = read(&with("falcon", &changes)).expect("a model");
    assert_eq!(model.residual, Residual::Parallel { shared_norm: true });
}

#[test]
fn kimi_k2_is_a_deepseek_v3_and_selected_attention_is_refused() {
    let named = |kind: &str| {
        let mut config = with("deepseek_v3", &json!({}));
        config["model_type"] = kind.into();
        read(&config)
    };
    assert_eq!(named("kimi_k2"), named("deepseek_v3"));
    for kind in ["deepseek_v32", "glm_moe_dsa"] {
        let error = named(kind).expect_err(kind);
        assert!(error.contains("an indexer selects"), "{error}");
    }
}

#[test]
fn another_family_is_no_misspelling() {
    for (kind, nearest) in [
        ("lama", Some("llama")),
        ("qwen3-moe", Some("qwen3_moe")),
        ("olmoe", None),
        ("glm4_moe_lite", None),
        ("mistral3", None),
    ] {
        let json = format!(r#"{{"model_type": "{kind}"}}"#);
        let wrong = decode(&json, "config.json", "test").expect_err(kind);
        assert_eq!(wrong.mistake().nearest.as_deref(), nearest, "{kind}");
    }
}
