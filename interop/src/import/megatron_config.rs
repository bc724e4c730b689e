//! Writes the options of a Megatron-LM script as a `config.json`, for models that the library lacks. The caller compares
//! the model read from it with the script option by option.

use catalog::load;
use serde_json::{Map, Value as Json};

use super::document::Document;
use super::error::ImportError;
use super::layout::parse_layout;
use super::nanotron::json;
use crate::export::flag::field;

/// Megatron-LM's default for rounding the vocabulary up: to a multiple of this times the tensor-parallel size.
pub(super) const DIVISIBLE_BY: u64 = 128;

/// Options that change the model in ways which are not modelled.
const NOT_MODELLED: [&str; 9] = [
    "--apply-residual-connection-post-layernorm",
    "--attention-output-gate",
    "--enable-mhc-connections",
    "--experimental-attention-variant",
    "--heterogeneous-layers-config-path",
    "--moe-latent-size",
    "--mtp-use-repeated-layer",
    "--no-rope-freq",
    "--qk-l2-norm",
];

/// The script's options as fields of a `config.json`; its reader takes those that define the model.
pub(super) fn config(doc: &Document) -> Result<Json, ImportError> {
    if let Some(key) = NOT_MODELLED.into_iter().find(|key| doc.find(key).is_some()) {
        return Err(doc.unsupported(key, "is not modelled"));
    }
    let options = doc.root.entries().iter();
    let fields = options.map(|(key, node)| (field(key), json(&node.value)));
    let mut config: Map<String, Json> = fields.collect();
    config.insert("model_type".to_owned(), "megatron_lm".into());
    config.insert("padded_vocab_size".to_owned(), vocabulary(doc)?.into());
    for (key, nth) in [(EXPERT_LAYERS, 1), (WINDOW_LAYERS, 0)] {
        if let Some(layers) = listed(doc, key, nth)? {
            config.insert(field(key), layers.into());
        }
    }
    Ok(Json::Object(config))
}

/// The option that says which layers have experts: 1 for these, 0 for dense ones.
const EXPERT_LAYERS: &str = "--moe-layer-freq";
/// The option that says which layers attend to a window: 1 for these, 0 for those that attend to all tokens.
pub(super) const WINDOW_LAYERS: &str = "--window-attn-skip-freq";

/// A 0 or 1 for each layer, from a number or a Python expression such as `([0]*1+[1]*23)`. For a number n, every n-th layer gets
/// the value `of_multiple` and the others its opposite: layers with experts are numbered from 0
/// (`get_moe_layer_freq` in gpt_layer_specs.py), those with a window from 1 (`is_layer_window_attention`).
pub(super) fn listed(
    doc: &Document,
    key: &str,
    of_multiple: u64,
) -> Result<Option<Vec<u64>>, ImportError> {
    let Some(node) = doc.find(key) else {
        return Ok(None);
    };
    let text = node.value.plain();
    if let Some(every) = text.parse().ok().filter(|every: &u64| *every > 0) {
        let layers = 0..doc.size("--num-layers")?.unwrap_or(0).min(1 << 16);
        let first = u64::from(key == WINDOW_LAYERS);
        let value = |layer: u64| match (layer + first).is_multiple_of(every) {
            true => of_multiple,
            false => 1 - of_multiple,
        };
        return Ok(Some(layers.map(value).collect()));
    }
    // In a pipeline layout's terms, each layer is a stage with one decoder layer or with none.
    let mut listed = false;
    let as_layout = text.chars().map(|c| {
        listed = c == '[' || listed && c != ']';
        match (c, listed) {
            ('[', _) => "(".to_owned(),
            (']', _) => ")".to_owned(),
            ('0', true) => "m|".to_owned(),
            ('1', true) => "t|".to_owned(),
            ('+', _) => String::new(),
            (other, _) => other.to_string(),
        }
    });
    let mut layers = parse_layout(&as_layout.collect::<String>())
        .ok_or_else(|| doc.wrong(key, "a number or a list such as ([0]*1+[1]*23)"))?;
    layers.pop();
    Ok(Some(layers))
}

/// Rows of the embedding table: as stated, or the tokenizer's, rounded up as Megatron-LM does.
fn vocabulary(doc: &Document) -> Result<u64, ImportError> {
    if let Some(rows) = doc.size("--padded-vocab-size")? {
        return Ok(rows);
    }
    let said = match doc.size("--vocab-size")? {
        Some(rows) => Some(rows),
        None => implied_vocabulary(doc)?,
    };
    let how = "its rows are the tokenizer's; give --vocab-size in the script, or --model";
    let rows = said.ok_or_else(|| doc.missing("the vocabulary", how))?;
    let unit = doc
        .size("--make-vocab-size-divisible-by")?
        .unwrap_or(DIVISIBLE_BY);
    let unit = unit
        .saturating_mul(doc.degree("--tensor-model-parallel-size")?)
        .max(1);
    Ok(rows.div_ceil(unit).saturating_mul(unit))
}

/// Rows of the tokenizer that the script names, or that its program takes where the script names none
/// (`args_defaults` in pretrain_gpt.py).
pub(super) fn implied_vocabulary(doc: &Document) -> Result<Option<u64>, ImportError> {
    let program = doc.launch.program.as_ref();
    let own = program.is_some_and(|program| program.text == "pretrain_gpt.py");
    let own = own && doc.find("--tokenizer-model").is_none();
    let kind = doc.text("--tokenizer-type")?;
    Ok(match kind.or(own.then_some("GPT2BPETokenizer")) {
        Some("GPT2BPETokenizer") => Some(50_257),
        Some("Llama2Tokenizer") => Some(32_000),
        _ => match doc
            .text("--tokenizer-model")?
            .and_then(load::preset_of_hub_name)
        {
            Some(preset) => Some(load::model(preset)?.vocab),
            None => None,
        },
    })
}
