//! Translates fields of Megatron-Core's configuration to options of Megatron-LM's command line
//! (`megatron/training/arguments.py`).

use super::core_model::Field;
use super::flag::{self, Flag};
use crate::config::{Node, Value};

/// Options that set `fields`; `model` has all fields of the model, `tp` ranks share the vocabulary.
pub(crate) fn options(fields: &[Field], model: &[Field], tp: u64) -> Vec<Flag> {
    let activation = model.iter().find(|(name, _)| *name == "activation_func");
    let activation = match activation {
        Some((_, Value::Str(name))) => name.as_str(),
        _ => "gelu",
    };
    let mut flags = Vec::new();
    for (name, value) in fields {
        flags.extend(option(name, value, activation));
        if let ("vocab_size", Value::Int(vocab)) = (*name, value) {
            // Independent of the tokenizer, the table has the model's rows, padded to a multiple of tp.
            let rows = vocab.unsigned_abs().div_ceil(tp) * tp;
            flags.push(Flag::value("--padded-vocab-size", rows));
        }
    }
    flags
}

fn option(field: &str, value: &Value, activation: &str) -> Vec<Flag> {
    let switch = |name: &str, on: bool| on.then(|| Flag::switch(name)).into_iter().collect();
    let valued = |name: &str| vec![Flag::value(name, value.plain())];
    match (field, value) {
        (_, Value::Null) => Vec::new(),
        ("activation_func", _) => match activation {
            "silu" => vec![Flag::switch("--swiglu")],
            "squared_relu" => vec![Flag::switch("--squared-relu")],
            "quick_gelu" => vec![Flag::switch("--quick-geglu")],
            _ => Vec::new(),
        },
        // Implied by the activation and the kind of positions.
        ("gated_linear_unit" | "rope_scaling_factor", _) => Vec::new(),
        // Fields of latent attention that no option reaches: they have their only possible values.
        ("original_max_position_embeddings" | "beta_fast" | "beta_slow", _) => Vec::new(),
        ("num_query_groups", _) => vec![
            Flag::switch("--group-query-attention"),
            Flag::value("--num-query-groups", value.plain()),
        ],
        ("window_size", Value::List(sides)) => {
            let sides: Vec<String> = sides.iter().map(|side| side.value.plain()).collect();
            vec![Flag::value("--window-size", sides.join(","))]
        }
        ("moe_layer_freq", Value::List(layers)) if layers.iter().any(|l| l.int() == Some(0)) => {
            vec![Flag::value("--moe-layer-freq", compact(layers))]
        }
        ("moe_layer_freq", _) => Vec::new(),
        ("num_moe_experts", _) => valued("--num-experts"),
        ("layernorm_epsilon", _) => valued("--norm-epsilon"),
        ("seq_len_interpolation_factor", _) => valued("--rotary-seq-len-interpolation-factor"),
        ("yarn_rotary_scaling_factor", _) => valued("--rotary-scaling-factor"),
        ("yarn_mscale", _) => valued("--mscale"),
        ("yarn_mscale_all_dim", _) => valued("--mscale-all-dim"),
        ("layernorm_zero_centered_gamma", Value::Bool(on)) => switch("--apply-layernorm-1p", *on),
        ("rope_scaling", Value::Bool(on)) => switch("--use-rope-scaling", *on),
        ("yarn_correction_range_round_to_int", Value::Bool(false)) => {
            vec![Flag::switch("--no-yarn-correction-range-round-to-int")]
        }
        ("share_embeddings_and_output_weights", Value::Bool(on)) => {
            switch("--untie-embeddings-and-output-weights", !on)
        }
        ("add_bias_linear", Value::Bool(on)) => switch("--disable-bias-linear", !on),
        ("bias_activation_fusion", Value::Bool(on)) => match activation {
            "silu" => switch("--no-bias-swiglu-fusion", !on),
            _ => switch("--no-bias-gelu-fusion", !on),
        },
        ("bias_dropout_fusion", Value::Bool(on)) => switch("--no-bias-dropout-fusion", !on),
        ("masked_softmax_fusion", Value::Bool(on)) => switch("--no-masked-softmax-fusion", !on),
        ("gradient_accumulation_fusion", Value::Bool(on)) => {
            switch("--no-gradient-accumulation-fusion", !on)
        }
        ("apply_rope_fusion", Value::Bool(on)) => switch("--no-rope-fusion", !on),
        (_, Value::Bool(on)) => switch(&flag::option(field), *on),
        _ => valued(&flag::option(field)),
    }
}

/// The list expression that Megatron-LM evaluates, such as `([0]*3+[1]*58)`.
fn compact(layers: &[Node]) -> String {
    let runs = layers.chunk_by(|a, b| a.int() == b.int());
    let parts: Vec<String> = runs
        .map(|run| format!("[{}]*{}", run[0].int().unwrap_or(0), run.len()))
        .collect();
    format!("({})", parts.join("+"))
}
