//! Compares a model with torchtitan's own of the same name: every field is equal, set by the Python file, or refused.

use catalog::RopeScaling;
use catalog::model::{
    Attention, AttentionKind, Mlp, ModelConfig, ModelConstants, Moe, Norm, Router,
};

use super::edition::Edition;
use super::parts;
use super::registry::{Flavor, nearest};
use crate::export::core_model::{self, tidy};
use crate::export::refusal::Limits;

/// A model that torchtitan can build, with the fields that the Python file overrides.
#[derive(Clone, Debug)]
pub(super) struct Chosen {
    pub(super) flavor: Flavor,
    /// Overrides: configuration class, field and value.
    pub(super) set: Vec<(&'static str, &'static str, f64)>,
    /// Number of MTP layers.
    pub(super) mtp_layers: u64,
}

/// Collects the fields in which a model differs from torchtitan's.
struct Differences<'a> {
    edition: Edition,
    found: Vec<(String, String)>,
    chosen: &'a mut Chosen,
}

macro_rules! equal {
    ($differences:ident, $theirs:expr; $($field:ident),+ $(,)?) => {
        $($differences.equal(stringify!($field), $field, &$theirs.$field);)+
    };
}

/// torchtitan's counterpart of this model: the flavor of its registry, else a decoder made of its parts. If there is none,
/// or a field cannot be matched, the model is refused.
pub(super) fn choose(model: &ModelConfig, edition: Edition, limits: &mut Limits) -> Option<Chosen> {
    let candidates = [nearest(model, edition), parts::like(model, edition)];
    let mut compared: Vec<_> = candidates
        .into_iter()
        .flatten()
        .map(|flavor| compare(model, flavor, edition))
        .collect();
    let Some(at) = compared
        .iter()
        .position(|(_, found)| found.is_empty())
        .or((!compared.is_empty()).then_some(0))
    else {
        let name = &model.name;
        limits.refuse_model(true, name, "its registries have no such model");
        return None;
    };
    let (chosen, found) = compared.swap_remove(at);
    let place = chosen.flavor.place();
    for (field, theirs) in found {
        limits.refuse_model(true, field, format!("torchtitan's {place} has {theirs}"));
    }
    Some(chosen)
}

/// Compares a flavor with our model. Returns the flavor with the fields to override, and the fields
/// that cannot be made equal, each with our value and torchtitan's.
fn compare(
    model: &ModelConfig,
    flavor: Flavor,
    edition: Edition,
) -> (Chosen, Vec<(String, String)>) {
    let theirs = flavor.model.clone();
    let mut chosen = Chosen {
        flavor,
        set: Vec::new(),
        mtp_layers: 0,
    };
    let mut differences = Differences {
        edition,
        found: Vec::new(),
        chosen: &mut chosen,
    };
    differences.model(model, &theirs);
    let found = differences.found;
    (chosen, found)
}

impl Differences<'_> {
    fn equal<T: PartialEq + std::fmt::Debug>(&mut self, field: &str, ours: &T, theirs: &T) {
        if ours != theirs {
            self.found
                .push((format!("{field} {ours:?}"), format!("{theirs:?}")));
        }
    }

    /// Accepts a number that is equal up to rounding, or that the Python file can set.
    fn number(&mut self, field: &str, ours: f64, theirs: f64, set: (&'static str, &'static str)) {
        if (ours / theirs - 1.0).abs() < 1e-9 {
            return;
        }
        if self.edition == Edition::Toml02 {
            self.equal(field, &ours, &theirs);
        } else {
            self.chosen.set.push((set.0, set.1, ours));
        }
    }

    fn model(&mut self, ours: &ModelConfig, theirs: &ModelConfig) {
        let ModelConfig {
            // How the weights are named and stored, not what is computed. Adapters and hybrids were refused before.
            name: _,
            text_of: _,
            stored_as: _,
            adapters: _,
            hybrid: _,
            family,
            hidden,
            layers,
            vocab,
            tied_embeddings,
            head_bias,
            norm,
            embedding_norm,
            position,
            attention,
            mlp,
            moe,
            residual,
            hidden_dropout,
            attention_dropout,
            mtp_layers,
            // torchtitan's rotary tables are as long as the training sequence.
            max_position: _,
            constants,
        } = ours;
        equal!(self, theirs; family, hidden, layers, vocab, tied_embeddings, head_bias, embedding_norm,
            position, residual, hidden_dropout, attention_dropout);
        self.norm(*norm, theirs.norm);
        self.attention(attention, &theirs.attention);
        let dense = (0..*layers).any(|layer| !moe.is_some_and(|m| m.is_moe_layer(layer)));
        if dense {
            self.mlp(*mlp, theirs.mlp);
        }
        match (moe, &theirs.moe) {
            (Some(moe), Some(theirs)) => self.moe(*moe, *theirs),
            (moe, theirs) => self.equal("moe", moe, theirs),
        }
        let deepseek = matches!(attention.kind, AttentionKind::Latent { .. });
        // 0.2 leaves them out, as the export notes.
        if self.edition != Edition::Toml02 {
            match deepseek {
                true => self.chosen.mtp_layers = *mtp_layers,
                false => self.equal("mtp_layers", mtp_layers, &theirs.mtp_layers),
            }
        }
        self.constants(constants, &theirs.constants, attention, moe.is_some());
    }

    fn norm(&mut self, ours: Norm, theirs: Norm) {
        let Norm { kind, bias } = &ours;
        self.equal("norm.kind", kind, &theirs.kind);
        self.equal("norm.bias", bias, &theirs.bias);
    }

    fn attention(&mut self, ours: &Attention, theirs: &Attention) {
        let Attention {
            heads,
            kind,
            qkv_bias,
            out_bias,
            window,
            rotated,
            sinks,
        } = ours;
        equal!(self, theirs; heads, qkv_bias, out_bias, window, rotated, sinks);
        match (kind, &theirs.kind) {
            (
                AttentionKind::Grouped {
                    kv_heads,
                    head_dim,
                    qk_norm,
                    // How weights are stored.
                    projections: _,
                },
                AttentionKind::Grouped {
                    kv_heads: their_kv,
                    head_dim: their_dim,
                    qk_norm: their_norm,
                    projections: _,
                },
            ) => {
                self.equal("kv_heads", kv_heads, their_kv);
                self.equal("head_dim", head_dim, their_dim);
                self.equal("qk_norm", qk_norm, their_norm);
            }
            (kind, theirs) => self.equal("attention", kind, theirs),
        }
    }

    fn mlp(&mut self, ours: Mlp, theirs: Mlp) {
        let Mlp {
            ffn,
            activation,
            gated,
            bias,
            // How weights are stored.
            fused_gate_up: _,
        } = &ours;
        equal!(self, theirs; ffn, activation, gated);
        self.equal("mlp.bias", bias, &theirs.bias);
    }

    fn moe(&mut self, ours: Moe, theirs: Moe) {
        let Moe {
            experts,
            top_k,
            expert_ffn,
            shared_ffn,
            shared_gate,
            first_dense,
            every,
            bias,
            // torchtitan balances every mixture of experts by a bias, as a note says.
            router_correction_bias: _,
        } = &ours;
        equal!(self, theirs; experts, top_k, expert_ffn, shared_ffn, shared_gate, first_dense, every, bias);
    }

    fn constants(
        &mut self,
        ours: &ModelConstants,
        theirs: &ModelConstants,
        attention: &Attention,
        routed: bool,
    ) {
        let ModelConstants {
            norm_epsilon,
            rope_theta,
            rope_scaling,
            local_rope_theta,
            // torchtitan's models use no GELU.
            gelu_tanh: _,
            norm_from_one,
            embedding_scale,
            attention_scale,
            temperature,
            attention_cap,
            logit_cap,
            rope_neighbours,
            router,
            bounded_glu,
            initializer_range,
        } = ours;
        let epsilon = ("RMSNorm.Config", "eps");
        self.number("norm_epsilon", *norm_epsilon, theirs.norm_epsilon, epsilon);
        let theta = ("RoPE.Config", "theta");
        self.number("rope_theta", *rope_theta, theirs.rope_theta, theta);
        self.scaling(*rope_scaling, theirs.rope_scaling);
        equal!(self, theirs; local_rope_theta, norm_from_one, embedding_scale, temperature, attention_cap, logit_cap,
            rope_neighbours, bounded_glu, initializer_range);
        if routed {
            self.router(*router, theirs.router);
        }
        let (qk, _) = attention.head_dims();
        let plain = 1.0 / (qk as f64).sqrt();
        let ours = attention_scale.unwrap_or(plain);
        let theirs = theirs.attention_scale.unwrap_or(plain);
        let factor = match *rope_scaling {
            RopeScaling::Yarn { factor, .. } if attention_scale.is_some() => factor,
            _ => return self.equal("attention_scale", &ours, &theirs),
        };
        if (ours / theirs - 1.0).abs() > 1e-9 && self.edition != Edition::Toml02 {
            let scale = tidy(core_model::temperature(factor, (ours / plain).sqrt()));
            self.chosen.set.push(("Attention.Config", "mscale", scale));
        } else {
            self.number(
                "attention_scale",
                ours,
                theirs,
                ("Attention.Config", "mscale"),
            );
        }
    }

    fn router(&mut self, ours: Router, theirs: Router) {
        let Router {
            sigmoid,
            normalise,
            scale,
            groups,
            best_groups,
            weighs_inputs,
        } = &ours;
        equal!(self, theirs; sigmoid, normalise, scale, groups, best_groups, weighs_inputs);
        // torchtitan scores a group by the sum of its two best experts.
        if !sigmoid && *groups > 1 {
            let field = format!("router.groups {groups}, scored by their best expert");
            self.found
                .push((field, "the sum of their two best".to_owned()));
        }
    }

    fn scaling(&mut self, ours: RopeScaling, theirs: RopeScaling) {
        match (ours, theirs) {
            (
                RopeScaling::Llama3 {
                    factor,
                    low_freq_factor,
                    high_freq_factor,
                    original,
                },
                RopeScaling::Llama3 {
                    factor: their_factor,
                    low_freq_factor: their_low,
                    high_freq_factor: their_high,
                    original: their_original,
                },
            ) => {
                let set = |field| ("RoPE.Config", field);
                self.number(
                    "rope_scaling.factor",
                    factor,
                    their_factor,
                    set("scaling_factor"),
                );
                let low = "rope_scaling.low_freq_factor";
                self.number(low, low_freq_factor, their_low, set("low_freq_factor"));
                let high = "rope_scaling.high_freq_factor";
                self.number(high, high_freq_factor, their_high, set("high_freq_factor"));
                self.equal("rope_scaling.original", &original, &their_original);
            }
            (ours, theirs) => {
                let tidied = |mut scaling: RopeScaling| {
                    if let RopeScaling::Yarn { attention, .. } = &mut scaling {
                        *attention = tidy(*attention);
                    }
                    scaling
                };
                self.equal("rope_scaling", &tidied(ours), &tidied(theirs));
            }
        }
    }
}
