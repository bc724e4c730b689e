//! How positions enter the model, as fields of Megatron-Core's configuration: rotary frequencies and position tables.

use catalog::model::{AttentionKind, ModelConfig, Position};
use catalog::{RopeScaling, elementary};

use super::configuration::{Core, Reach};
use crate::config::Value;

impl Core<'_> {
    /// `seq_len` and the longest sequence that the model declares, in tokens.
    pub(super) fn positions(&mut self, model: &ModelConfig, (seq_len, longest): (u64, u64)) {
        let (attention, constants) = (&model.attention, &model.constants);
        let (theta, scaling) = (constants.rope_theta, constants.rope_scaling);
        let (neighbours, scale) = (constants.rope_neighbours, constants.attention_scale);
        let why = "layers with a window rotate as all others";
        self.lacks(
            constants.local_rope_theta.is_some(),
            "local_rope_theta",
            why,
        );
        match model.position {
            Position::Rope { dims } => {
                self.set("rotary_base", whole(theta));
                let fraction = theta.fract() != 0.0;
                self.lacks(
                    fraction,
                    format_args!("rope_theta {theta}"),
                    "its base is whole",
                );
                let (head, _) = attention.head_dims();
                let plain = 1.0 / (head as f64).sqrt();
                if matches!(attention.kind, AttentionKind::Latent { .. }) {
                    self.set("position_embedding_type", "rope");
                    let why = "latent attention turns neighbouring dimensions";
                    self.lacks(!neighbours, "rope_neighbours false", why);
                    self.latent_rope(scaling, scale.map_or(1.0, |s| s / plain));
                } else {
                    self.set("rotary_percent", dims as f64 / head as f64);
                    self.set("rotary_interleaved", neighbours);
                    self.rope(scaling);
                    self.scale(scale, plain);
                }
            }
            Position::Learned { rows } => {
                self.set("position_embedding_type", "learned_absolute");
                self.lacks(
                    rows < seq_len,
                    format_args!("position.rows {rows}"),
                    "the sequence is longer than the table of positions",
                );
                self.lacks(
                    self.reach == Reach::Provider && rows > seq_len,
                    format_args!("position.rows {rows}"),
                    "the table of positions has a row per token of the sequence",
                );
                self.set("max_position_embeddings", rows);
                return;
            }
            Position::Absent => self.set("position_embedding_type", "none"),
            Position::Alibi => {
                self.lacks(true, "position alibi", "it has no linear biases (ALiBi)")
            }
        }
        self.set("max_position_embeddings", longest);
    }

    /// Sets an unusual factor of attention scores; refuses it for options, as none of them sets it.
    fn scale(&mut self, scale: Option<f64>, usual: f64) {
        let Some(scale) = scale.filter(|s| (s / usual - 1.0).abs() > 1e-9) else {
            return;
        };
        let why = "no option sets the factor of attention scores";
        self.unreached(true, format_args!("attention_scale {scale}"), why);
        self.set("softmax_scale", scale);
    }

    /// Rotary frequencies of grouped-query attention.
    fn rope(&mut self, scaling: RopeScaling) {
        let kind = match scaling {
            RopeScaling::Yarn { .. } => "yarn",
            _ => "rope",
        };
        self.set("position_embedding_type", kind);
        match scaling {
            RopeScaling::None => self.set("rope_scaling", false),
            RopeScaling::Linear { factor } => {
                let why = "--rotary-seq-len-interpolation-factor is whole";
                let part = factor.fract() != 0.0;
                self.unreached(part, format_args!("rope_scaling linear {factor}"), why);
                self.set("seq_len_interpolation_factor", whole(factor));
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original,
            } => {
                let usual = (low_freq_factor, high_freq_factor, original) == (1.0, 4.0, 8192.0);
                self.lacks(
                    !usual,
                    "rope_scaling llama3",
                    "its frequency factors are 1 and 4, its original context is 8192",
                );
                let why = "pretrain_gpt.py does not hand --rope-scaling-factor to the model, which takes 8";
                let other = factor != 8.0;
                self.unreached(other, format_args!("rope_scaling.factor {factor}"), why);
                self.set("rope_scaling", true);
                self.set("rope_scaling_factor", factor);
            }
            RopeScaling::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                attention,
                whole_pairs,
            } => {
                self.set("yarn_rotary_scaling_factor", factor);
                self.set("yarn_original_max_position_embeddings", whole(original));
                self.set("yarn_beta_fast", beta_fast);
                self.set("yarn_beta_slow", beta_slow);
                self.set("yarn_mscale", tidy(temperature(factor, attention)));
                self.set("yarn_mscale_all_dim", 0.0);
                self.set("yarn_correction_range_round_to_int", whole_pairs);
            }
            RopeScaling::Other => {
                self.lacks(true, "rope_scaling", "this scaling is not known");
            }
        }
    }

    /// Rotary frequencies of latent attention; `scale` is a factor of scores beside `1/√d`.
    fn latent_rope(&mut self, scaling: RopeScaling, scale: f64) {
        match scaling {
            RopeScaling::None => {
                self.set("rope_type", "rope");
                let other = (scale - 1.0).abs() > 1e-9;
                self.lacks(
                    other,
                    "attention_scale",
                    "latent attention derives it from YaRN",
                );
            }
            RopeScaling::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                attention,
                whole_pairs,
            } => {
                let all = scale.sqrt();
                self.set("rope_type", "yarn");
                self.set("rotary_scaling_factor", factor);
                self.set("mscale", tidy(temperature(factor, attention * all)));
                self.set("mscale_all_dim", tidy(temperature(factor, all)));
                let usual = (original, beta_fast, beta_slow) == (4096.0, 32.0, 1.0);
                self.unreached(
                    !usual,
                    "rope_scaling yarn",
                    "latent attention's original context is 4096, its betas are 32 and 1",
                );
                self.set("original_max_position_embeddings", whole(original));
                self.set("beta_fast", beta_fast);
                self.set("beta_slow", beta_slow);
                self.lacks(
                    !whole_pairs,
                    "rope_scaling.truncate false",
                    "it rounds to whole pairs",
                );
            }
            RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } | RopeScaling::Other => {
                let why = "latent attention has plain and YaRN rotation";
                self.lacks(true, "rope_scaling", why);
            }
        }
    }
}

/// The YaRN scale that gives this temperature for a context extended by `factor`: `0.1·scale·ln(factor) + 1`.
pub(crate) fn temperature(factor: f64, temperature: f64) -> f64 {
    if factor > 1.0 {
        (temperature - 1.0) / (0.1 * elementary::ln(factor))
    } else {
        0.0
    }
}

/// Rounds off the last bits, which arithmetic may have changed.
pub(crate) fn tidy(number: f64) -> f64 {
    (number * 1e9).round() / 1e9
}

/// A number as an integer value if it is whole.
fn whole(number: f64) -> Value {
    if number.fract() == 0.0 && number.abs() < 9e15 {
        Value::Int(number as i64)
    } else {
        Value::Float(number)
    }
}
