//! Checked models: impossible sizes are refused here, whatever file or flag they came from.

use std::ops::Deref;
use std::sync::Arc;

use serde_json::Value;

use crate::adapters::{AdaptedModule, AdaptedModules, Adapters};
use crate::error::{SpecError, Wrong, in_range};
use crate::model::{AttentionKind, ModelConfig, Moe, Position, Projections, WindowPattern};
use crate::prediction_modules::PredictionModules;
use crate::runtime::Runtime;

/// Largest size of any one dimension of a model.
pub(crate) const MAX_DIM: u64 = 1 << 24;
/// Largest number of decoder layers.
const MAX_LAYERS: u64 = 4096;
/// Largest rank of adapters.
const MAX_RANK: u64 = 1 << 16;
/// Largest number of experts in a layer.
const MAX_EXPERTS: u64 = 1 << 16;
/// Largest number of parameters: a hundred times the largest published model, and few enough that bytes of states stay
/// far below 2^64.
const MAX_PARAMETERS: u64 = 1 << 50;

/// A model whose sizes were checked. Fields are read through `Deref`.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    config: ModelConfig,
    /// Prediction modules that the configuration declares; `config` has those that are trained.
    declared_modules: u64,
    definition: Option<Arc<Value>>,
}

impl Model {
    /// Makes a model from a configuration, if its sizes are possible; `path` is for error messages.
    ///
    /// # Errors
    /// The first size that is out of range, does not divide another, or makes the model too large.
    pub fn new(config: ModelConfig, path: &str) -> Result<Self, SpecError> {
        crate::names::checked(&config.name, path, "name")?;
        check(&config).map_err(|(field, message)| SpecError::field(path, field, message))?;
        Ok(Self {
            declared_modules: config.mtp_layers,
            config,
            definition: None,
        })
    }

    /// The same model with frozen weights and these adapters, which are trained; without adapters, the model itself.
    ///
    /// # Errors
    /// When a size of the adapters is out of range, or adapters are not predicted for this model.
    pub fn with_adapters(mut self, adapters: Option<Adapters>) -> Result<Self, SpecError> {
        if let Some(adapters) = &adapters {
            self::adapters(adapters, &self.config)
                .map_err(|(field, message)| SpecError::field(&self.config.name, field, message))?;
        }
        self.config.adapters = adapters;
        Ok(self)
    }

    /// The model as a runtime trains it: with the prediction modules that the configuration declares, unless the runtime leaves
    /// them out. The runtime that it was trained under before does not matter.
    #[must_use]
    pub fn trained_under(mut self, runtime: &Runtime) -> Self {
        self.config.mtp_layers = match runtime.space.prediction_modules {
            PredictionModules::LeftOut => 0,
            PredictionModules::Trained | PredictionModules::Undivided => self.declared_modules,
        };
        self
    }

    /// Number of prediction modules that the configuration declares and that the runtime does not train.
    #[must_use]
    pub fn modules_left_out(&self) -> u64 {
        self.declared_modules - self.config.mtp_layers
    }

    /// The same model, with the `config.json` fields that it was read from.
    pub(crate) fn defined_by(self, definition: Value) -> Self {
        Self {
            definition: Some(Arc::new(definition)),
            ..self
        }
    }

    /// The same model, defined by its preset name instead of by `config.json` fields.
    pub(crate) fn of_library(self) -> Self {
        Self {
            definition: None,
            ..self
        }
    }

    /// The `config.json` fields that define the model; `None` if its preset name defines it.
    #[must_use]
    pub fn definition(&self) -> Option<&Value> {
        self.definition.as_deref()
    }

    /// The same model with fused projections: one weight for queries, keys and values, and one for gate and up. A fused weight is as
    /// large as its parts together.
    #[must_use]
    pub fn with_fused_projections(self) -> Self {
        let mut model = self.with_fused_qkv();
        model.config.mlp.fused_gate_up = model.config.mlp.gated;
        model
    }

    /// The same model with one weight for queries, keys and values.
    #[must_use]
    pub fn with_fused_qkv(mut self) -> Self {
        if let AttentionKind::Grouped { projections, .. } = &mut self.config.attention.kind {
            *projections = Projections::Stacked;
        }
        self
    }
}

impl Deref for Model {
    type Target = ModelConfig;
    fn deref(&self) -> &ModelConfig {
        &self.config
    }
}

fn check(model: &ModelConfig) -> Result<(), Wrong> {
    let sizes = [
        ("hidden size", model.hidden, MAX_DIM),
        ("layers", model.layers, MAX_LAYERS),
        ("vocabulary", model.vocab, MAX_DIM),
        ("attention heads", model.attention.heads, MAX_DIM),
        ("key/value heads", model.attention.kv_heads(), MAX_DIM),
        ("feed-forward size", model.mlp.ffn, MAX_DIM),
    ];
    for (field, size, most) in sizes {
        in_range(size, 1..=most).map_err(|wrong| (field, wrong))?;
    }
    if model.mtp_layers > model.layers {
        let message = format!(
            "{} is more than the {} layers",
            model.mtp_layers, model.layers
        );
        return Err(("prediction layers", message));
    }
    attention(model)?;
    if let Some(moe) = &model.moe {
        experts(moe, model.layers)?;
    }
    if let Some(hybrid) = &model.hybrid {
        hybrid.check(model.layers, model.moe.is_some())?;
    }
    probabilities(model)?;
    let parameters = parameters(model);
    if parameters.is_none_or(|n| n > MAX_PARAMETERS) {
        let message = format!(
            "the sizes multiply to more than {MAX_PARAMETERS} parameters, the most planned"
        );
        return Err(("hidden size", message));
    }
    Ok(())
}

fn attention(model: &ModelConfig) -> Result<(), Wrong> {
    let attention = &model.attention;
    let (heads, kv) = (attention.heads, attention.kv_heads());
    if !heads.is_multiple_of(kv) {
        let message = format!(
            "{kv} does not divide the {heads} attention heads; expected one of their divisors"
        );
        return Err(("key/value heads", message));
    }
    let (qk, v) = attention.head_dims();
    for dim in [qk, v] {
        if dim == 0 || heads.checked_mul(dim).is_none_or(|width| width > MAX_DIM) {
            let message =
                format!("{heads} heads of {dim} are too wide; expected 1 to {MAX_DIM} together");
            return Err(("head dimension", message));
        }
    }
    if let AttentionKind::Latent {
        q_lora_rank,
        kv_lora_rank,
        ..
    } = attention.kind
    {
        for rank in [q_lora_rank.unwrap_or(1), kv_lora_rank] {
            in_range(rank, 1..=MAX_DIM).map_err(|wrong| ("latent rank", wrong))?;
        }
    }
    match attention.window {
        WindowPattern::Full => {}
        WindowPattern::All { window } if window.tokens() > 0 => {}
        WindowPattern::Alternating { window, period } if window.tokens() > 0 && period > 0 => {}
        WindowPattern::All { .. } | WindowPattern::Alternating { .. } => {
            return Err((
                "sliding window",
                "windows and their period start at 1".to_owned(),
            ));
        }
    }
    match model.position {
        Position::Rope { dims } if dims > qk => {
            let message = format!("{dims} dimensions of a head of {qk} cannot be rotated");
            Err(("rotary dimensions", message))
        }
        Position::Learned { rows } if rows == 0 || rows > MAX_DIM + 2 => Err((
            "positions",
            format!("{rows} is out of range; expected 1 to {MAX_DIM}"),
        )),
        Position::Rope { .. } | Position::Learned { .. } | Position::Alibi | Position::Absent => {
            Ok(())
        }
    }
}

fn experts(moe: &Moe, layers: u64) -> Result<(), Wrong> {
    let possible = (1..=MAX_EXPERTS).contains(&moe.experts)
        && (1..=moe.experts).contains(&moe.top_k)
        && (1..=MAX_DIM).contains(&moe.expert_ffn)
        && moe.shared_ffn <= MAX_DIM;
    if !possible {
        let message = format!(
            "{} experts, {} per token, width {}, shared width {}; expected 1 to {MAX_EXPERTS} experts, \
             1 per token or more, widths up to {MAX_DIM}",
            moe.experts, moe.top_k, moe.expert_ffn, moe.shared_ffn
        );
        return Err(("experts", message));
    }
    if moe.every == 0 || moe.first_dense > layers {
        let message = format!(
            "every {} layers after the first {}, of {layers}",
            moe.every, moe.first_dense
        );
        return Err(("layers with experts", message));
    }
    Ok(())
}

fn probabilities(model: &ModelConfig) -> Result<(), Wrong> {
    for (field, p) in [
        ("dropout", model.hidden_dropout),
        ("attention dropout", model.attention_dropout),
    ] {
        if !(0.0..1.0).contains(&p) {
            return Err((field, format!("{p} is not in [0, 1)")));
        }
    }
    Ok(())
}

/// Checks that adapters have possible sizes and are predicted for this model's layers.
fn adapters(adapters: &Adapters, model: &ModelConfig) -> Result<(), Wrong> {
    let Adapters {
        rank,
        alpha,
        modules,
        dropout,
    } = *adapters;
    in_range(rank, 1..=MAX_RANK).map_err(|wrong| ("adapters", format!("rank {wrong}")))?;
    if !(1..=MAX_DIM).contains(&alpha) || !(0.0..1.0).contains(&dropout) {
        let message = format!(
            "alpha {alpha}, dropout {dropout}; expected an alpha of 1 to {MAX_DIM} and a dropout in [0, 1)"
        );
        return Err(("adapters", message));
    }
    if modules == AdaptedModules::default() {
        return Err(("adapters", "no linear layer has one".to_owned()));
    }
    let feeds = [AdaptedModule::Fc1, AdaptedModule::Fc2];
    let why = match model.attention.kind {
        _ if model.hybrid.is_some() => "adapters beside recurrent layers are not predicted",
        AttentionKind::Latent { .. } => "adapters beside latent attention (MLA) are not predicted",
        AttentionKind::Grouped { .. } if model.mtp_layers > 0 => {
            "adapters of a model with prediction modules (MTP) are not predicted"
        }
        AttentionKind::Grouped { .. }
            if model.moe.is_some() && feeds.iter().any(|&m| modules.contains(m)) =>
        {
            "adapters beside experts are not predicted; adapters of attention are (modules=attention)"
        }
        AttentionKind::Grouped { .. } => return Ok(()),
    };
    Err(("adapters", why.to_owned()))
}

impl ModelConfig {
    /// Upper bound on the parameters of one layer that a rank holds. `of_experts` ranks share the
    /// experts, `tp` ranks share all other parameters of the layer.
    #[must_use]
    pub fn most_in_layer(&self, tp: u64, of_experts: u64) -> u64 {
        let Some([others, experts]) = in_layer(self) else {
            return u64::MAX;
        };
        let others = others.div_ceil(tp.max(1));
        others.saturating_add(experts.div_ceil(of_experts.max(1)))
    }
}

/// Upper bound on the model's number of parameters; `None` if it does not fit in 64 bits.
fn parameters(model: &ModelConfig) -> Option<u64> {
    let layers = model.layers.checked_add(model.mtp_layers)?;
    let embeddings = model.hidden.checked_mul(model.vocab)?.checked_mul(2)?;
    let [others, experts] = in_layer(model)?;
    layers
        .checked_mul(others.checked_add(experts)?)?
        .checked_add(embeddings)
}

/// Upper bounds on one layer's parameters: `[all but experts, experts]`, as [`parameters`].
fn in_layer(model: &ModelConfig) -> Option<[u64; 2]> {
    let a = &model.attention;
    let (qk, v) = a.head_dims();
    // Queries, keys, values and output; the ranks of latent attention widen both factors.
    let latent = match a.kind {
        AttentionKind::Grouped { .. } => 0,
        AttentionKind::Latent {
            q_lora_rank,
            kv_lora_rank,
            ..
        } => q_lora_rank.unwrap_or(0).checked_add(kv_lora_rank)?,
    };
    let width = model.hidden.checked_add(latent)?;
    let heads = a.heads.checked_mul(qk.checked_add(v)?)?.checked_mul(2)?;
    let attention = width.checked_mul(heads.checked_add(latent)?)?;
    let dense = model.hidden.checked_mul(model.mlp.ffn)?.checked_mul(3)?;
    let experts = match &model.moe {
        None => 0,
        Some(moe) => {
            let routed = moe.experts.checked_mul(moe.expert_ffn)?;
            let inner = routed.checked_add(moe.shared_ffn)?.checked_mul(3)?;
            model.hidden.checked_mul(inner.checked_add(moe.experts)?)?
        }
    };
    let recurrence = match &model.hybrid {
        None => 0,
        Some(of) => {
            let projections = of.recurrence.projections(model.hidden);
            projections.checked_add(2 * of.recurrence.convolution())?
        }
    };
    let mixers = attention.checked_add(recurrence)?;
    Some([mixers.checked_add(dense)?, experts])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn llama() -> ModelConfig {
        crate::load::model("llama3-8b").expect("a preset").config
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        type Change = fn(&mut ModelConfig);
        let cases: [(&str, Change); 9] = [
            ("layers", |m| m.layers = 5000),
            ("hidden size", |m| m.hidden = 0),
            ("feed-forward size", |m| m.mlp.ffn = u64::MAX),
            ("key/value heads", |m| m.attention.heads = 7),
            ("head dimension", |m| {
                m.attention.heads = 1 << 24;
                m.attention.kind = AttentionKind::Grouped {
                    kv_heads: 1 << 24,
                    head_dim: 1 << 20,
                    qk_norm: crate::model::QkNorm::Absent,
                    projections: crate::model::Projections::Separate,
                };
            }),
            ("rotary dimensions", |m| {
                m.position = Position::Rope { dims: 4096 };
            }),
            ("sliding window", |m| {
                m.attention.window = WindowPattern::Alternating {
                    window: crate::Window::Sliding(1),
                    period: 0,
                };
            }),
            ("dropout", |m| m.hidden_dropout = f64::NAN),
            // Each size alone is in range; their product is not.
            ("hidden size", |m| {
                m.hidden = 1 << 24;
                m.mlp.ffn = 1 << 24;
                m.layers = 4096;
            }),
        ];
        for (field, change) in cases {
            let mut config = llama();
            change(&mut config);
            let error = Model::new(config, "m.json").expect_err(field).to_string();
            assert!(error.contains(&format!("field `{field}`")), "{error}");
        }
    }

    #[test]
    fn the_bound_of_parameters_holds_for_every_preset() {
        for info in crate::load::model_names() {
            let model = crate::load::model(&info.name).expect("a preset");
            let bound = parameters(&model).expect("fits 64 bits");
            assert!(bound < MAX_PARAMETERS, "{}", info.name);
        }
    }

    #[test]
    fn adapters_that_cannot_be_predicted_are_refused() {
        for (model, text, part) in [
            ("llama3-8b", "rank=0", "rank 0"),
            ("llama3-8b", "rank=8,dropout=1", "dropout 1"),
            ("mixtral-8x7b", "rank=8", "modules=attention"),
            ("deepseek-v3", "rank=8,modules=attention", "latent"),
        ] {
            let model = crate::load::model(model).expect("a preset");
            let adapters = text.parse().expect(text);
            let error = model
                .with_adapters(Some(adapters))
                .expect_err(text)
                .to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn runtimes_train_prediction_modules_or_leave_them_out() {
        let mut model = crate::load::model("glm4.5-air").expect("a preset");
        for (runtime, left_out) in [
            ("megatron-core", 0),
            ("hf-trainer", 1),
            ("hf-deepspeed", 1),
            ("deepspeed", 1),
            ("torchtitan-compile-2025", 1),
            ("torchtitan-2026", 0),
            ("maxtext", 0),
            ("nanotron", 1),
            ("fsdp2", 0),
        ] {
            let runtime = crate::load::runtime(runtime).expect("a preset");
            model = model.trained_under(&runtime);
            let found = (model.mtp_layers, model.modules_left_out());
            assert_eq!(found, (1 - left_out, left_out), "{}", runtime.name);
        }
    }
}
