//! Runtimes, models and traced blocks for tests.

use catalog::{DType, Model, Runtime};
use dtensor::Trace;
use models::{BlockClass, BlockLayout};

use super::kernel::Lowered;
use super::lowering::Lowering;

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

/// The runtime of this name.
pub(crate) fn runtime(name: &str) -> Runtime {
    catalog::load::runtime(name).expect("a preset")
}

/// The first layer of a model under a layout.
pub(crate) fn layer(model: &Model, layout: &BlockLayout) -> Trace {
    let class = BlockClass::Layer(model.layer_class(0));
    models::trace_block(model, class, layout).expect("a block")
}

/// The first layer of a preset, whole, for 32 tokens in bf16.
pub(crate) fn layer_of(preset: &str) -> Trace {
    let model = catalog::load::model(preset).expect("a preset");
    layer(&model, &BlockLayout::alone(1, TOKENS, DType::Bf16))
}

/// The kernels by which a runtime runs a block if nothing is decided.
pub(crate) fn lowered(runtime: &Runtime, trace: &Trace) -> Lowered {
    Lowering::new(runtime, runtime.fp8_recipe).lower(trace)
}
