//! Every model of the library × every target: each of the model's fields is in the written file, or
//! the model is refused by the field's name. Expected values come from the model, not from the
//! exporters.

use super::*;
use catalog::RopeScaling;
use catalog::model::{
    Activation, AttentionKind, Family, ModelConfig, Position, QkNorm, WindowPattern,
};
use interop::config::Value;

/// Megatron-LM's options that a model must be launched with.
fn of_megatron(model: &ModelConfig) -> Vec<(&'static str, Option<String>)> {
    let c = &model.constants;
    let said = |value: String| Some(value);
    let mut expected = vec![
        ("--num-layers", said(model.layers.to_string())),
        ("--hidden-size", said(model.hidden.to_string())),
        ("--ffn-hidden-size", said(model.mlp.ffn.to_string())),
        ("--padded-vocab-size", said(model.vocab.to_string())),
        (
            "--num-attention-heads",
            said(model.attention.heads.to_string()),
        ),
        ("--norm-epsilon", said(c.norm_epsilon.to_string())),
        ("--init-method-std", said(c.initializer_range.to_string())),
    ];
    let mut switch = |name, on: bool| {
        if on {
            expected.push((name, None));
        }
    };
    switch(
        "--untie-embeddings-and-output-weights",
        !model.tied_embeddings,
    );
    switch("--apply-layernorm-1p", c.norm_from_one);
    let biases = model.attention.out_bias;
    switch("--disable-bias-linear", !biases);
    switch("--add-qkv-bias", model.attention.qkv_bias);
    let silu = model.mlp.activation == Activation::Silu && c.bounded_glu.is_none();
    switch("--swiglu", silu);
    switch("--squared-relu", model.mlp.activation == Activation::Relu2);
    switch("--quick-geglu", c.bounded_glu.is_some());
    if let Some(bound) = c.bounded_glu {
        expected.push(("--activation-func-clamp-value", said(bound.to_string())));
        expected.push(("--glu-linear-offset", said("1".to_owned())));
    }
    if model.attention.sinks {
        expected.push(("--softmax-type", said("learnable".to_owned())));
    }
    match model.attention.window {
        WindowPattern::Full => {}
        WindowPattern::All { window } | WindowPattern::Alternating { window, .. } => {
            expected.push(("--window-size", said(format!("{},0", window.tokens() - 1))));
        }
    }
    if let WindowPattern::Alternating { period, .. } = model.attention.window {
        expected.push(("--window-attn-skip-freq", said(period.to_string())));
    }
    if let Position::Rope { .. } = model.position {
        expected.push(("--rotary-base", said(c.rope_theta.to_string())));
    }
    match (c.rope_scaling, &model.attention.kind) {
        (RopeScaling::Llama3 { .. }, _) => expected.push(("--use-rope-scaling", None)),
        (RopeScaling::Yarn { factor, .. }, kind) => {
            expected.push(("--rotary-scaling-factor", said(factor.to_string())));
            let latent = matches!(kind, AttentionKind::Latent { .. });
            let option = if latent {
                "--rope-type"
            } else {
                "--position-embedding-type"
            };
            expected.push((option, said("yarn".to_owned())));
        }
        _ => {}
    }
    if model.mtp_layers > 0 {
        expected.push(("--mtp-num-layers", said(model.mtp_layers.to_string())));
    }
    expected.extend(of_attention(model));
    expected.extend(of_experts(model));
    expected
}

fn of_attention(model: &ModelConfig) -> Vec<(&'static str, Option<String>)> {
    let number = |n: u64| Some(n.to_string());
    match model.attention.kind {
        AttentionKind::Grouped {
            kv_heads,
            head_dim,
            qk_norm,
            ..
        } => {
            let mut expected = vec![("--kv-channels", number(head_dim))];
            if kv_heads != model.attention.heads {
                expected.push(("--num-query-groups", number(kv_heads)));
            }
            if qk_norm == QkNorm::Heads {
                expected.push(("--qk-layernorm", None));
            }
            expected
        }
        AttentionKind::Latent {
            q_lora_rank,
            kv_lora_rank,
            qk_nope_dim,
            qk_rope_dim,
            v_dim,
        } => {
            let mut expected = vec![
                ("--multi-latent-attention", None),
                ("--kv-lora-rank", number(kv_lora_rank)),
                ("--qk-head-dim", number(qk_nope_dim)),
                ("--qk-pos-emb-head-dim", number(qk_rope_dim)),
                ("--v-head-dim", number(v_dim)),
            ];
            expected.extend(q_lora_rank.map(|rank| ("--q-lora-rank", number(rank))));
            expected
        }
    }
}

fn of_experts(model: &ModelConfig) -> Vec<(&'static str, Option<String>)> {
    let Some(moe) = model.moe else {
        return Vec::new();
    };
    let router = model.constants.router;
    let number = |n: u64| Some(n.to_string());
    let mut expected = vec![
        ("--num-experts", number(moe.experts)),
        ("--moe-router-topk", number(moe.top_k)),
        ("--moe-ffn-hidden-size", number(moe.expert_ffn)),
    ];
    if moe.shared_ffn > 0 {
        let option = "--moe-shared-expert-intermediate-size";
        expected.push((option, number(moe.shared_ffn)));
    }
    if moe.shared_gate {
        expected.push(("--moe-shared-expert-gate", None));
    }
    if moe.first_dense > 0 || moe.every > 1 {
        let layers = (0..model.layers).map(|l| u8::from(moe.is_moe_layer(l)));
        let runs: Vec<u8> = layers.collect();
        let runs = runs.chunk_by(|a, b| a == b);
        let runs: Vec<String> = runs.map(|r| format!("[{}]*{}", r[0], r.len())).collect();
        expected.push(("--moe-layer-freq", Some(format!("({})", runs.join("+")))));
    }
    if router.sigmoid {
        expected.push(("--moe-router-score-function", Some("sigmoid".to_owned())));
    } else if !router.normalise {
        expected.push(("--moe-router-pre-softmax", None));
    }
    if router.scale != 1.0 {
        let option = "--moe-router-topk-scaling-factor";
        expected.push((option, Some(router.scale.to_string())));
    }
    if router.groups > 1 {
        expected.push(("--moe-router-num-groups", number(router.groups)));
        expected.push(("--moe-router-group-topk", number(router.best_groups)));
    }
    if moe.router_correction_bias {
        expected.push(("--moe-router-enable-expert-bias", None));
    }
    expected
}

/// A value as a command line would hold it.
fn word(value: &Value) -> String {
    match value {
        Value::Int(n) => n.to_string(),
        Value::Float(f) => f.to_string(),
        Value::Str(s) | Value::Expression(s) => s.clone(),
        other => other.shown(),
    }
}

fn taken(name: &str, dialect: Dialect) -> Result<Exported, Vec<String>> {
    let (model, workload) = scene(name, 1, Precision::Bf16);
    // A table of positions is as long as it is.
    let workload = Workload::new(catalog::WorkloadSizes {
        gpus: 1,
        seq_len: workload.seq_len.min(model.max_position),
        global_batch: workload.global_batch,
        precision: workload.precision,
    })
    .expect("a workload");
    let strategy = parse("tp=1", &model, &workload).expect("legal");
    match exported_for("megatron-core", &strategy, &model, &workload, dialect, None) {
        Ok(exported) => Ok(exported),
        Err(ExportError::Inexpressible { refusals, .. }) => {
            assert!(refusals.iter().all(|r| r.of_model), "{name} {refusals:?}");
            // accelerate and axolotl take any model of Transformers, so somebody takes it.
            assert!(refusals.iter().all(|r| r.taken_by.is_some()));
            Err(refusals.into_iter().map(|r| r.decision).collect())
        }
        Err(error) => panic!("{error}"),
    }
}

fn document(name: &str, dialect: Dialect) -> Option<Document> {
    let exported = taken(name, dialect).ok()?;
    let file = &exported.files[0];
    Some(read(&file.text, &file.name, Some(dialect)))
}

#[test]
fn megatron_lm_gets_every_field() {
    for preset in catalog::load::model_names() {
        let model = catalog::load::model(&preset.name).expect("preset");
        let Some(document) = document(&preset.name, Dialect::MegatronLm) else {
            continue;
        };
        for (option, value) in of_megatron(&model) {
            let found = document.root.get(option);
            let found = found.unwrap_or_else(|| panic!("{}: no {option}", preset.name));
            if let Some(value) = value {
                assert_eq!(word(&found.value), value, "{} {option}", preset.name);
            }
        }
    }
}

/// A provider gets the same values as the command line, by the fields that the options set.
#[test]
fn megatron_bridge_gets_every_field() {
    let same = [
        ("--num-layers", "num_layers"),
        ("--hidden-size", "hidden_size"),
        ("--ffn-hidden-size", "ffn_hidden_size"),
        ("--padded-vocab-size", "vocab_size"),
        ("--norm-epsilon", "layernorm_epsilon"),
        ("--rotary-base", "rotary_base"),
        ("--kv-channels", "kv_channels"),
        ("--num-query-groups", "num_query_groups"),
        ("--num-experts", "num_moe_experts"),
        ("--moe-router-topk", "moe_router_topk"),
        (
            "--moe-router-topk-scaling-factor",
            "moe_router_topk_scaling_factor",
        ),
        ("--moe-router-num-groups", "moe_router_num_groups"),
        ("--moe-router-group-topk", "moe_router_group_topk"),
        (
            "--activation-func-clamp-value",
            "activation_func_clamp_value",
        ),
        ("--softmax-type", "softmax_type"),
        ("--mtp-num-layers", "mtp_num_layers"),
        ("--kv-lora-rank", "kv_lora_rank"),
    ];
    let text = |name: &str| {
        let exported = taken(name, Dialect::MegatronBridge).expect("taken");
        exported.files[0].text.clone()
    };
    for preset in catalog::load::model_names() {
        let model = catalog::load::model(&preset.name).expect("preset");
        let Some(document) = document(&preset.name, Dialect::MegatronBridge) else {
            continue;
        };
        if document.root.at("model.num_layers").is_none() {
            // Bridge makes it from the hub; the file compares its sizes.
            assert!(
                text(&preset.name).contains(&format!("cfg.model.num_layers != {}:", model.layers))
            );
            continue;
        }
        for (option, value) in of_megatron(&model) {
            let Some((_, field)) = same.iter().find(|(known, _)| *known == option) else {
                continue;
            };
            let found = document.root.at(&format!("model.{field}"));
            let found = found.unwrap_or_else(|| panic!("{}: no {field}", preset.name));
            assert_eq!(Some(word(&found.value)), value, "{} {field}", preset.name);
        }
        if let RopeScaling::Llama3 { factor, .. } = model.constants.rope_scaling {
            let found = document.root.at("model.rope_scaling_factor");
            assert_eq!(found.map(|f| word(&f.value)), Some(factor.to_string()));
        }
    }
}

#[test]
fn nanotron_gets_every_field() {
    for preset in catalog::load::model_names() {
        let model = catalog::load::model(&preset.name).expect("preset");
        let Some(document) = document(&preset.name, Dialect::Nanotron) else {
            continue;
        };
        let mut expected = vec![
            ("hidden_size", model.hidden.to_string()),
            ("num_hidden_layers", model.layers.to_string()),
            ("intermediate_size", model.mlp.ffn.to_string()),
            ("vocab_size", model.vocab.to_string()),
            ("num_attention_heads", model.attention.heads.to_string()),
            (
                "num_key_value_heads",
                model.attention.kv_heads().to_string(),
            ),
            ("rms_norm_eps", model.constants.norm_epsilon.to_string()),
            ("rope_theta", model.constants.rope_theta.to_string()),
            ("tie_word_embeddings", model.tied_embeddings.to_string()),
            ("attention_bias", model.attention.qkv_bias.to_string()),
        ];
        if let Some(moe) = model.moe {
            expected.push(("moe_config.num_experts", moe.experts.to_string()));
            expected.push(("moe_config.top_k", moe.top_k.to_string()));
        }
        for (key, value) in expected {
            let found = document.root.at(&format!("model.model_config.{key}"));
            let found = found.unwrap_or_else(|| panic!("{}: no {key}", preset.name));
            assert_eq!(word(&found.value), value, "{} {key}", preset.name);
        }
    }
}

/// The models of the library that each target accepts, and the field for which it refuses each
/// other.
#[test]
fn each_pair_is_accepted_or_refused_by_a_field() {
    let mut table = String::new();
    for preset in catalog::load::model_names() {
        table.push_str(&format!("{}\n", preset.name));
        for &dialect in Dialect::ALL {
            if let Err(fields) = taken(&preset.name, dialect) {
                table.push_str(&format!("  {}: {}\n", dialect.name(), fields.join("; ")));
            }
        }
    }
    insta::assert_snapshot!(table);
}

/// A model of another family is not one of torchtitan's, whatever its sizes.
#[test]
fn families_are_distinct() {
    for preset in catalog::load::model_names() {
        let model = catalog::load::model(&preset.name).expect("preset");
        let Some(document) = document(&preset.name, Dialect::Torchtitan02) else {
            continue;
        };
        let qwen3 = preset.name.starts_with("qwen3");
        let expected = match model.family {
            Family::Llama if qwen3 => "qwen3",
            Family::Llama => "llama3",
            Family::QwenMoe => "qwen3",
            Family::DeepSeek => "deepseek_v3",
            Family::GptOss => "gpt_oss",
            other => panic!("{} of {other:?} taken", preset.name),
        };
        let name = document.root.at("model.name").and_then(Node::text);
        assert_eq!(name, Some(expected), "{}", preset.name);
    }
}

/// A decoder that torchtitan's registries lack is made of its parts, with every number of the model.
#[test]
fn torchtitan_gets_models_made_of_its_parts() {
    let written = |name: &str| {
        taken(name, Dialect::Torchtitan03).expect("taken").files[0]
            .text
            .clone()
    };
    let has = |text: &str, parts: &[&str]| {
        for part in parts {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    };
    let llama = [
        "Llama3Model.Config(",
        "dim=4096,",
        "vocab_size=32000,",
        "eps=1e-5",
        "theta=10000.0)",
        "n_kv_heads=32",
        "range(32)",
        "hidden_dim=11008",
        "enable_weight_tying=False",
        "qk_norm=None",
    ];
    has(&written("llama2-7b"), &llama);
    has(
        &written("qwen2.5-7b"),
        &["eps=1e-6", "theta=1000000.0)", "wqkv, \"bias\", True)"],
    );
    let experts = [
        "Qwen3Model.Config(",
        "num_experts=8, top_k=2",
        "hidden_dim=14336",
        "score_func=\"softmax\", route_norm=True",
        "qk_norm=None",
    ];
    has(&written("mixtral-8x7b"), &experts);
}

/// A file's model is found again in the library: the one it was written for, or one with the same sizes.
#[test]
fn the_model_of_a_file_is_found_in_the_library() {
    for preset in catalog::load::model_names() {
        for dialect in [Dialect::MegatronLm, Dialect::Torchtitan02] {
            let Some(document) = document(&preset.name, dialect) else {
                continue;
            };
            let found = interop::import::of_file(&document).map(|found| found.name);
            let found = found.unwrap_or_else(|e| panic!("{}: {e}", preset.name));
            let model = catalog::load::model(&preset.name).expect("preset");
            let again = catalog::load::model(&found).expect("preset");
            let sizes = |m: &ModelConfig| (m.layers, m.hidden, m.attention.heads, m.vocab, m.mlp);
            assert_eq!(
                sizes(&model),
                sizes(&again),
                "{} found as {found}",
                preset.name
            );
        }
    }
}

/// A file for another model than the one that is given is not imported.
#[test]
fn another_model_is_refused() {
    let cases = [
        (
            "flux.toml",
            "[model]\nname = \"flux\"\nflavor = \"flux-dev\"\n[parallelism]\ndata_parallel_shard_degree = 8\n",
            "flux is no model that this program knows",
        ),
        (
            "qwen.toml",
            "[model]\nname = \"qwen3\"\nflavor = \"32B\"\n[parallelism]\ndata_parallel_shard_degree = 8\n",
            "layers 64, but model llama3-8b has 32",
        ),
        (
            "mamba.sh",
            "torchrun pretrain_mamba.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --spec a b --micro-batch-size 1",
            "no decoder-only transformer",
        ),
        (
            "gpt.sh",
            "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1",
            "`--swiglu`: none, but model llama3-8b has on",
        ),
    ];
    for (name, text, expected) in cases {
        let document = read(text, name, None);
        let model = catalog::load::model("llama3-8b").expect("preset");
        let given = Given {
            model: &model,
            gpus: Some(8),
            seq_len: None,
            gpus_per_node: 8,
        };
        let error = import(&document, &given).expect_err(name).to_string();
        assert!(error.contains(expected), "{error}");
    }
}
