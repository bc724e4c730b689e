//! The models that torchtitan's registries hold, as models of this program: 0.2.2 (`models/*/__init__.py`,
//! `model/args.py`), 0.3.0 and main (`models/*/__init__.py`).

use catalog::model::{
    Attention, AttentionKind, Family, ModelConfig, Moe, Position, Projections, QkNorm, Rotated,
    Router, WindowPattern,
};
use catalog::{RopeScaling, Window, elementary};

use super::edition::Edition;

/// A model of torchtitan's registries.
#[derive(Clone, Debug)]
pub(super) struct Flavor {
    /// Module below `torchtitan.models`.
    pub(super) module: &'static str,
    /// Name in the module's registry; `None` for a decoder that the Python file makes of the module's parts.
    pub(super) name: Option<&'static str>,
    /// The configuration function of 0.3 and main whose settings it is trained with: its own, or that of a model with
    /// the same vocabulary.
    pub(super) function: &'static str,
    /// The architecture in this program's terms.
    pub(super) model: ModelConfig,
}

impl Flavor {
    fn registered(
        module: &'static str,
        name: &'static str,
        function: &'static str,
        model: ModelConfig,
    ) -> Self {
        Self {
            module,
            name: Some(name),
            function,
            model,
        }
    }

    /// The flavor in a message.
    pub(super) fn place(&self) -> String {
        match self.name {
            Some(name) => format!("{} {name}", self.module),
            None => format!("{} decoder", self.module),
        }
    }
}

/// The flavor of the same family, depth, width and vocabulary, if an edition has one.
pub(super) fn nearest(model: &ModelConfig, edition: Edition) -> Option<Flavor> {
    let same = |flavor: &Flavor| {
        let theirs = &flavor.model;
        (theirs.family, theirs.layers, theirs.hidden) == (model.family, model.layers, model.hidden)
            && theirs.moe.is_some() == model.moe.is_some()
            && qk_norm(theirs) == qk_norm(model)
            && theirs.vocab == model.vocab
    };
    flavors(edition).into_iter().find(same)
}

/// Whether queries and keys are normalised, which distinguishes Qwen3 from Llama.
pub(super) fn qk_norm(model: &ModelConfig) -> bool {
    matches!(
        model.attention.kind,
        AttentionKind::Grouped {
            qk_norm: QkNorm::Heads,
            ..
        }
    )
}

/// Every flavor of an edition.
pub(super) fn flavors(edition: Edition) -> Vec<Flavor> {
    let mut all = llamas(edition);
    all.extend(qwens());
    all.extend(deepseeks());
    for (name, function, layers, experts) in [
        ("20b", "gpt_oss_20b", 24, 32),
        ("120b", "gpt_oss_120b", 36, 128),
    ] {
        let model = gpt_oss(layers, experts);
        all.push(Flavor::registered("gpt_oss", name, function, model));
    }
    all
}

fn llamas(edition: Edition) -> Vec<Flavor> {
    let flavor = |name, function, sizes: [u64; 4], tied| {
        let [layers, hidden, heads, ffn] = sizes;
        let mut model = ModelConfig::decoder(Family::Llama, layers, hidden, 128_256);
        model.tied_embeddings = tied;
        model.attention.heads = heads;
        model.attention.kind = grouped(8, hidden / heads, false);
        model.position = Position::Rope {
            dims: hidden / heads,
        };
        model.mlp.ffn = ffn;
        model.constants.rope_theta = 500_000.0;
        model.constants.rope_scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original: 8192.0,
        };
        Flavor::registered("llama3", name, function, model)
    };
    let mut all = vec![
        flavor("8B", "llama3_8b", [32, 4096, 32, 14_336], false),
        flavor("70B", "llama3_70b", [80, 8192, 64, 28_672], false),
        flavor("405B", "llama3_405b", [126, 16_384, 128, 53_248], false),
    ];
    if edition != Edition::Toml02 {
        all.push(flavor("1B", "llama3_8b", [16, 2048, 32, 8192], true));
        all.push(flavor("3B", "llama3_8b", [28, 3072, 24, 8192], true));
    }
    all
}

fn qwens() -> Vec<Flavor> {
    let qwen = |family, layers, hidden, heads, kv_heads| {
        let mut model = ModelConfig::decoder(family, layers, hidden, 151_936);
        model.attention.heads = heads;
        model.attention.kind = grouped(kv_heads, 128, true);
        model.position = Position::Rope { dims: 128 };
        model.constants.norm_epsilon = 1e-6;
        model.constants.rope_theta = 1e6;
        model
    };
    let dense = |(name, [layers, hidden, heads, ffn], tied): (&'static str, [u64; 4], bool)| {
        let mut model = qwen(Family::Llama, layers, hidden, heads, 8);
        model.mlp.ffn = ffn;
        model.tied_embeddings = tied;
        Flavor::registered("qwen3", name, "qwen3_32b", model)
    };
    let sparse = |(name, [layers, hidden, heads, ffn], theta): (&'static str, [u64; 4], f64)| {
        let mut model = qwen(Family::QwenMoe, layers, hidden, heads, 4);
        model.moe = Some(Moe::routed(128, 8, ffn));
        model.constants.rope_theta = theta;
        Flavor::registered("qwen3", name, "qwen3_30b_a3b", model)
    };
    let dense = [
        ("0.6B", [28, 1024, 16, 3072], true),
        ("1.7B", [28, 2048, 16, 6144], true),
        ("4B", [36, 2560, 32, 9728], true),
        ("8B", [36, 4096, 32, 12_288], false),
        ("14B", [40, 5120, 40, 17_408], false),
        ("32B", [64, 5120, 64, 25_600], false),
    ]
    .map(dense);
    let sparse = [
        ("30B-A3B", [48, 2048, 32, 768], 1e6),
        ("235B-A22B", [94, 4096, 64, 1536], 5e6),
    ]
    .map(sparse);
    dense.into_iter().chain(sparse).collect()
}

fn deepseeks() -> Vec<Flavor> {
    let flavor = |name, function, [layers, hidden, heads, ffn]: [u64; 4], mscale: f64| {
        let mut model = ModelConfig::decoder(Family::DeepSeek, layers, hidden, 102_400);
        model.attention.heads = heads;
        model.attention.kind = AttentionKind::Latent {
            q_lora_rank: Some(1536),
            kv_lora_rank: 512,
            qk_nope_dim: 128,
            qk_rope_dim: 64,
            v_dim: 128,
        };
        model.position = Position::Rope { dims: 64 };
        model.mlp.ffn = ffn;
        let grown = 0.1 * mscale * elementary::ln(40.0) + 1.0;
        model.constants.attention_scale = Some(grown.powi(2) / 192f64.sqrt());
        model.constants.rope_neighbours = true;
        model.constants.rope_scaling = yarn(40.0, 1.0, true);
        Flavor::registered("deepseek_v3", name, function, model)
    };
    let chosen = |sigmoid, scale, groups, best_groups| Router {
        sigmoid,
        normalise: sigmoid,
        scale,
        groups,
        best_groups,
        weighs_inputs: false,
    };
    let moe = |of: Moe, shared_ffn, first_dense| Moe {
        shared_ffn,
        first_dense,
        ..of
    };
    let mut small = flavor("16B", "deepseek_v3_16b", [27, 2048, 16, 10_944], 0.7);
    if let AttentionKind::Latent { q_lora_rank, .. } = &mut small.model.attention.kind {
        *q_lora_rank = None;
    }
    small.model.moe = Some(moe(Moe::routed(64, 6, 1408), 2816, 1));
    small.model.constants.router = chosen(false, 1.0, 1, 1);
    let mut middle = flavor("236B", "deepseek_v3_16b", [60, 5120, 128, 12_288], 1.0);
    middle.model.moe = Some(moe(Moe::routed(160, 6, 1536), 3072, 1));
    middle.model.constants.router = chosen(false, 16.0, 8, 3);
    let mut large = flavor("671B", "deepseek_v3_671b", [61, 7168, 128, 18_432], 1.0);
    large.model.vocab = 129_280;
    large.model.moe = Some(Moe {
        router_correction_bias: true,
        ..moe(Moe::routed(256, 8, 2048), 2048, 3)
    });
    large.model.constants.router = chosen(true, 2.5, 8, 4);
    vec![small, middle, large]
}

fn gpt_oss(layers: u64, count: u64) -> ModelConfig {
    let mut model = ModelConfig::decoder(Family::GptOss, layers, 2880, 201_088);
    model.attention = Attention {
        heads: 64,
        kind: grouped(8, 64, false),
        qkv_bias: true,
        out_bias: true,
        window: WindowPattern::Alternating {
            window: Window::Sliding(128),
            period: 2,
        },
        rotated: Rotated::All,
        sinks: true,
    };
    model.position = Position::Rope { dims: 64 };
    model.mlp.ffn = 2880;
    model.moe = Some(Moe {
        bias: true,
        ..Moe::routed(count, 4, 2880)
    });
    model.constants.rope_theta = 150_000.0;
    model.constants.rope_scaling = yarn(32.0, 0.1 * elementary::ln(32.0) + 1.0, false);
    model.constants.bounded_glu = Some(7.0);
    model
}

/// YaRN extension of a context of 4096 tokens.
fn yarn(factor: f64, attention: f64, whole_pairs: bool) -> RopeScaling {
    RopeScaling::Yarn {
        factor,
        original: 4096.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention,
        whole_pairs,
    }
}

pub(super) fn grouped(kv_heads: u64, head_dim: u64, qk_norm: bool) -> AttentionKind {
    AttentionKind::Grouped {
        kv_heads,
        head_dim,
        qk_norm: match qk_norm {
            true => QkNorm::Heads,
            false => QkNorm::Absent,
        },
        projections: Projections::Separate,
    }
}
