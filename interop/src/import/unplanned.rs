//! Settings of files for Hugging Face's Trainer, of LLaMA-Factory's and of axolotl's, that change memory or time and that no plan
//! expresses: a note for each says what is predicted in its place.

use super::document::Document;
use crate::config::Value;
use crate::export::Dialect;

/// How to plan attention within documents, of which files do not say how long they are.
pub(super) const LENGTHS: &str =
    "`search --from` with this file takes --lengths, to plan attention within them";

/// Settings that no plan expresses (`key`, or `key value`), and what is predicted in their place.
const UNPLANNED: [(&[&str], &str); 13] = [
    (
        &["use_liger_kernel", "enable_liger_kernel"],
        "the prediction shows more memory and time, with the logits of all tokens in memory and a kernel for every operation",
    ),
    (
        &[
            "liger_fused_linear_cross_entropy",
            "cut_cross_entropy",
            "chunked_cross_entropy",
        ],
        "the prediction shows more memory, with the logits of all tokens in memory at once",
    ),
    (
        &["liger_cross_entropy", "flash_attn_cross_entropy"],
        "the prediction shows more memory and time, with a loss of several kernels",
    ),
    (
        &[
            "liger_glu_activation",
            "liger_swiglu",
            "liger_rms_norm",
            "liger_rope",
            "lora_mlp_kernel",
            "lora_qkv_kernel",
            "lora_o_kernel",
            "use_unsloth",
            "torch_compile",
            "deepcompile",
        ],
        "the prediction shows more memory and time, with a kernel for every operation",
    ),
    (
        &[
            "use_unsloth_gc",
            "activation_offloading hidden_states",
            "gradient_checkpointing_kwargs.offload",
            "activation_checkpointing_kwargs.offload",
        ],
        INPUTS_ON_DEVICE,
    ),
    (
        &["layer_offloading"],
        "the prediction shows more memory and less time, with all parameters on the device",
    ),
    (
        &["tiled_mlp"],
        "the prediction shows more memory, with the whole sequence in a feed-forward layer at once",
    ),
    (
        &["selective_checkpointing"],
        "the prediction shows less memory and more time, with whole layers computed again",
    ),
    (
        &["shift_attn"],
        "the prediction shows more time, with attention to the whole sequence",
    ),
    (
        &[
            "eager_attention",
            "attn_implementation eager",
            "flash_attn disabled",
        ],
        "the prediction shows less memory and time, with attention that does not hold its scores",
    ),
    (
        &["upcast_lmhead_output"],
        "the prediction shows less memory, with logits in 16 bits",
    ),
    (
        &["use_asft_loss"],
        "the prediction shows less memory and time, without a second model",
    ),
    (
        &["qat"],
        "the prediction shows less time, without rounding weights and activations",
    ),
];

/// What is predicted for files that keep the inputs of recomputed layers in host memory.
pub(super) const INPUTS_ON_DEVICE: &str = "the prediction shows more memory and less time, with the inputs of recomputed layers on the device";

/// A note on settings and what is predicted in their place.
pub(super) fn note(doc: &Document, keys: &[&str], instead: &str) -> String {
    let place = doc.place(keys.first().unwrap_or(&""));
    format!("{place}: {}: not planned for; {instead}", keys.join(", "))
}

/// A note on a setting that holds weights and states in 16 bits, without copies in 32.
pub(super) fn in_16_bits(doc: &Document, key: &str, value: &str) -> String {
    format!(
        "{}: {key} {value}: no plan can express weights and states in 16 bits alone; the prediction counts 32-bit copies, which take more memory",
        doc.place(key)
    )
}

/// Notes on the settings of a file that no plan expresses.
pub(super) fn notes(doc: &Document) -> impl Iterator<Item = String> {
    of(doc, &UNPLANNED)
}

/// A plugin of axolotl, and the key that naming it switches on: its field is true unless the file says otherwise
/// (axolotl@067b021, integrations/cut_cross_entropy/args.py).
const PLUGIN: (&str, &str) = ("CutCrossEntropyPlugin", "cut_cross_entropy");

/// Whether the file names a plugin of axolotl.
pub(super) fn has_plugin(doc: &Document, name: &str) -> bool {
    let named = doc.words("plugins");
    doc.dialect == Dialect::Axolotl && named.iter().any(|plugin| plugin.contains(name))
}

/// Notes on those of the settings that a file uses; a setting is a key, with its value if it is not a switch.
pub(super) fn of<'a>(
    doc: &'a Document,
    settings: &'a [(&'a [&'a str], &'a str)],
) -> impl Iterator<Item = String> {
    let used = |setting: &&'a str| {
        let (key, value) = setting.split_once(' ').unwrap_or((*setting, ""));
        let on = match doc.find(key).map(|node| &node.value) {
            Some(Value::Str(text)) => text == value || value.is_empty() && !text.is_empty(),
            Some(Value::Bool(on)) => *on && value.is_empty(),
            Some(Value::Int(number)) => *number > 1 && value.is_empty(),
            Some(Value::Table(_)) => value.is_empty(),
            None => key == PLUGIN.1 && has_plugin(doc, PLUGIN.0),
            _ => false,
        };
        on.then_some(key)
    };
    settings.iter().filter_map(move |(settings, instead)| {
        let keys: Vec<&str> = settings.iter().filter_map(used).collect();
        (!keys.is_empty()).then(|| note(doc, &keys, instead))
    })
}
