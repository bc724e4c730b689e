//! Turns a run's model block into a model, by generic rules without names.

use std::sync::LazyLock;

use catalog::Model;
use catalog::model::{
    Activation, Attention, AttentionKind, Family, Mlp, ModelConfig, Moe, Norm, NormKind, Position,
    Projections, QkNorm, Rotated, WindowPattern,
};
use catalog::runs::{Run, RunModel};
use serde_json::Value;

/// Ranks of latent attention, which the schema does not carry: those of DeepSeek-V2 and V3, the only published models
/// that have it (arXiv 2405.04434, table of hyper-parameters).
const LATENT: AttentionKind = AttentionKind::Latent {
    q_lora_rank: Some(1536),
    kv_lora_rank: 512,
    qk_nope_dim: 128,
    qk_rope_dim: 64,
    v_dim: 128,
};

/// Builds a run's model; `dropout`: whether its runtime uses dropout by default, as GPT-3 did.
pub(super) fn build(run: &Run, tp: u64, seq_len: u64, dropout: bool) -> Result<Model, String> {
    let m = &run.model;
    let need = |value: Option<u64>, field: &str| {
        value
            .filter(|&v| v > 0)
            .ok_or_else(|| format!("model.{field} is not stated"))
    };
    let hidden = need(m.hidden, "hidden")?;
    let layers = need(m.layers, "layers")?;
    let heads = need(m.heads, "heads")?;
    let vocab = need(run.size("vocab", m.vocab), "vocab")?;
    let mlp_kind = m.mlp.as_deref().unwrap_or("gelu_2mat");
    let gpt = mlp_kind.starts_with("gelu");
    let ffn = need(m.ffn.or(m.moe_ffn), "ffn")?;
    let head_dim = m.head_dim.unwrap_or(hidden / heads);
    let moe = experts(m, layers, ffn);
    if let Some(official) = official(m) {
        return published(run, official, (padded(vocab, tp)?, seq_len), dropout);
    }
    let dropout = if dropout && gpt { 0.1 } else { 0.0 };
    let family = match (gpt, moe) {
        (true, _) => Family::Gpt2,
        (false, Some(_)) => Family::Mixtral,
        (false, None) => Family::Llama,
    };
    let mut config = ModelConfig {
        name: m.name.clone().unwrap_or_else(|| "unnamed".to_owned()),
        tied_embeddings: m.tied_embeddings.unwrap_or(gpt),
        norm: norm(gpt),
        position: if gpt && !run.is_on("rotary") {
            Position::Learned { rows: seq_len }
        } else {
            Position::Rope { dims: head_dim }
        },
        attention: attention(run, heads, head_dim, gpt),
        mlp: mlp(ffn, mlp_kind, gpt),
        moe,
        hidden_dropout: dropout,
        attention_dropout: dropout,
        max_position: seq_len,
        ..ModelConfig::decoder(family, layers, hidden, padded(vocab, tp)?)
    };
    apply_statements(run, &mut config);
    Model::new(config, &run.id).map_err(|e| e.to_string())
}

/// A published model as a run trains it: with the run's padded vocabulary and sequence length, without modules for multi-token
/// prediction unless the run or its recipe has them, and without dropout unless its system trains with it.
fn published(
    run: &Run,
    official: &ModelConfig,
    (vocab, max_position): (u64, u64),
    dropout: bool,
) -> Result<Model, String> {
    let dropped = |of: f64| if dropout { of } else { 0.0 };
    let stated = run.model.name.as_ref();
    let mut config = ModelConfig {
        name: stated.unwrap_or(&official.name).clone(),
        vocab,
        mtp_layers: 0,
        max_position,
        hidden_dropout: dropped(official.hidden_dropout),
        attention_dropout: dropped(official.attention_dropout),
        ..official.clone()
    };
    apply_statements(run, &mut config);
    Model::new(config, &run.id).map_err(|e| e.to_string())
}

/// Applies what a run or its recipes state about the model: dropout, positions, biases, tied
/// embeddings and modules for multi-token prediction. Everything else is unchanged.
fn apply_statements(run: &Run, config: &mut ModelConfig) {
    if let Some(dropout) = run.flag("dropout").and_then(Value::as_f64) {
        config.hidden_dropout = dropout;
        config.attention_dropout = dropout;
    }
    if run.switch("rotary") == Some(false) {
        config.position = Position::Learned {
            rows: config.max_position,
        };
    }
    if let Some(bias) = run.switch("bias") {
        config.norm.bias = bias;
    }
    if let Some(bias) = run.switch("bias_linear").or_else(|| run.switch("bias")) {
        config.attention.qkv_bias = bias;
        config.attention.out_bias = bias;
        config.mlp.bias = bias;
    }
    config.tied_embeddings = run
        .switch("tied_embeddings")
        .unwrap_or(config.tied_embeddings);
    config.mtp_layers = run.size_flag("mtp_layers").unwrap_or(config.mtp_layers);
}

/// The preset of a run's model, if the run says that its sizes are those of a published model (`arch_source: official`) and a
/// preset has all of them. The preset also knows what a run's sizes do not say: biases of experts, attention sinks, windows, and
/// norms of queries and keys.
fn official(m: &RunModel) -> Option<&'static ModelConfig> {
    static PRESETS: LazyLock<Vec<ModelConfig>> = LazyLock::new(|| {
        let names = catalog::load::model_names().into_iter();
        names
            .filter_map(|preset| catalog::load::model(&preset.name).ok())
            .map(|model| (*model).clone())
            .collect()
    });
    if !m.arch_source.as_deref()?.starts_with("official") {
        return None;
    }
    let same = |of: &&ModelConfig| {
        let grouped = match of.attention.kind {
            AttentionKind::Grouped {
                kv_heads, head_dim, ..
            } => m.kv_heads == Some(kv_heads) && m.head_dim.is_none_or(|dim| dim == head_dim),
            AttentionKind::Latent { .. } => is_latent(m),
        };
        let experts = of.moe.map(|moe| [moe.experts, moe.top_k, moe.expert_ffn]);
        let stated = m.experts.filter(|&e| e > 1).map(|experts| {
            let ffn = m.moe_ffn.or(m.ffn).unwrap_or(0);
            [experts, m.topk.unwrap_or(1), ffn]
        });
        let sizes = [of.hidden, of.layers, of.attention.heads, of.vocab].map(Some);
        grouped
            && sizes == [m.hidden, m.layers, m.heads, m.vocab]
            && experts == stated
            && (experts.is_some() || m.ffn == Some(of.mlp.ffn))
    };
    PRESETS.iter().find(same)
}

/// The vocabulary padded as by Megatron: to a multiple of 128 per tensor-parallel rank, if several.
fn padded(vocab: u64, tp: u64) -> Result<u64, String> {
    if tp <= 1 {
        return Ok(vocab);
    }
    let padded = vocab.checked_next_multiple_of(tp.saturating_mul(128));
    padded.ok_or_else(|| "model.vocab is too large".to_owned())
}

fn is_latent(m: &RunModel) -> bool {
    m.attn.as_deref() == Some("mla")
}

fn experts(m: &RunModel, layers: u64, ffn: u64) -> Option<Moe> {
    let experts = m.experts.filter(|&e| e > 1)?;
    let expert_ffn = m.moe_ffn.unwrap_or(ffn);
    Some(Moe {
        shared_ffn: m.shared_experts.unwrap_or(0).saturating_mul(expert_ffn),
        first_dense: m.dense_layers.unwrap_or(0).min(layers),
        router_correction_bias: is_latent(m),
        ..Moe::routed(experts, m.topk.unwrap_or(1), expert_ffn)
    })
}

fn norm(gpt: bool) -> Norm {
    let kind = if gpt {
        NormKind::LayerNorm
    } else {
        NormKind::RmsNorm
    };
    Norm { kind, bias: gpt }
}

fn attention(run: &Run, heads: u64, head_dim: u64, gpt: bool) -> Attention {
    let m = &run.model;
    let kind = if is_latent(m) {
        LATENT
    } else {
        AttentionKind::Grouped {
            kv_heads: m.kv_heads.unwrap_or(heads),
            head_dim,
            qk_norm: if run.is_on("qk_layernorm") {
                QkNorm::Heads
            } else {
                QkNorm::Absent
            },
            projections: if gpt {
                Projections::Stacked
            } else {
                Projections::Separate
            },
        }
    };
    Attention {
        heads,
        kind,
        qkv_bias: gpt,
        out_bias: gpt,
        window: WindowPattern::Full,
        rotated: Rotated::All,
        sinks: false,
    }
}

fn mlp(ffn: u64, kind: &str, gpt: bool) -> Mlp {
    Mlp {
        ffn,
        activation: if gpt {
            Activation::Gelu
        } else {
            Activation::Silu
        },
        gated: kind.contains("3mat"),
        bias: gpt,
        fused_gate_up: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Change = fn(&mut RunModel);

    /// A published run of GPT-OSS 120B, which says that its sizes are the official ones, after `change` was applied to its model.
    fn gpt_oss(change: Change) -> Run {
        let runs = catalog::runs::embedded().expect("embedded runs are well-formed");
        let mut run = runs
            .into_iter()
            .find(|run| run.id == "mb_2606_gpt-oss-120b_gb200_mxfp8_n64_gbs1280")
            .expect("a published run");
        change(&mut run.model);
        run
    }

    #[test]
    fn a_model_is_a_published_one_only_if_the_run_says_so_and_all_sizes_are_its_own() {
        let cases: [(&str, Change, bool); 5] = [
            ("as stated", |_| (), true),
            ("of another name", |m| m.name = None, true),
            (
                "sizes guessed",
                |m| m.arch_source = Some("inferred".to_owned()),
                false,
            ),
            ("fewer experts", |m| m.experts = Some(64), false),
            (
                "one layer more",
                |m| m.layers = m.layers.map(|n| n + 1),
                false,
            ),
        ];
        for (what, change, expected) in cases {
            let model = build(&gpt_oss(change), 1, 4096, true).expect(what);
            assert_eq!(model.attention.sinks, expected, "{what}: attention sinks");
            assert_eq!(model.hidden_dropout, 0.0, "{what}: dropout");
            assert_eq!(model.max_position, 4096, "{what}: positions");
        }
    }

    #[test]
    fn a_published_model_is_trained_as_its_recipe_says() {
        let runs = catalog::runs::embedded().expect("embedded runs are well-formed");
        let id = "flagperf_llama3_8b_h100_n8_bf16_tp2_pp1_dp4";
        let run = runs.iter().find(|run| run.id == id).expect(id);
        let model = build(run, 1, 8192, true).expect(id);
        assert_eq!((model.hidden_dropout, model.attention_dropout), (0.1, 0.1));
        assert_eq!(model.position, Position::Learned { rows: 8192 });
        assert!(model.attention.qkv_bias && model.mlp.bias && model.tied_embeddings);
    }
}
