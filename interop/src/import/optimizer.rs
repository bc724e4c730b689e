//! The optimizer of a file for Hugging Face's Trainer: AdamW with states in 32 or 8 bits. Other
//! optimizers are planned as AdamW, with a note.

use catalog::OptimizerStates;

use super::document::Document;
use super::error::ImportError;
use super::imported::Imported;
use super::unplanned;
use crate::export::Dialect;

/// Switches of LLaMA-Factory that put another optimizer in AdamW's place, or hold fewer states.
const INSTEAD: [&str; 5] = [
    "use_galore",
    "use_apollo",
    "use_badam",
    "use_muon",
    "use_adam_mini",
];

/// Parts of the names of AdamW whose states are not in 32 bits.
const FEWER_BITS: [&str; 4] = ["8bit", "4bit", "fp8", "anyprecision"];

/// 8-bit optimizer states, planned for FSDP and plain replicas only; `None` for the runtime's own.
pub(super) fn states(
    doc: &Document,
    imported: &mut Imported,
) -> Result<Option<OptimizerStates>, ImportError> {
    for key in INSTEAD {
        if doc.on(key)? {
            imported.notes.push(as_adamw(doc, key));
        }
    }
    // BAdam leaves weights in the type that they were loaded in (LLaMA-Factory@ff6d4d1, model/adapter.py, `init_adapter`).
    for (key, value) in [
        ("pure_bf16", "true"),
        ("bf16", "full"),
        ("use_badam", "true"),
    ] {
        let on = doc
            .find(key)
            .is_some_and(|node| node.value.shown().trim_matches('`') == value);
        if on {
            imported.notes.push(unplanned::in_16_bits(doc, key, value));
        }
    }
    let key = match doc.dialect {
        Dialect::Axolotl => "optimizer",
        Dialect::Transformers | Dialect::TransformersDeepSpeed | Dialect::LlamaFactory => "optim",
        _ => return Ok(None),
    };
    let Some(name) = doc.text(key)? else {
        return Ok(None);
    };
    let on_device = imported.dialect != Dialect::DeepSpeed && imported.decisions.offload.is_none();
    if name.contains("adamw") && name.contains("8bit") && on_device {
        // Paged ones lie on the device as long as there is room.
        return Ok(Some(OptimizerStates::EightBitMoments));
    }
    let plain = name.strip_prefix("paged_").unwrap_or(name);
    if !plain.starts_with("adamw") || FEWER_BITS.iter().any(|bits| name.contains(bits)) {
        imported.notes.push(as_adamw(doc, &format!("{key} {name}")));
    }
    Ok(None)
}

/// The note on an optimizer that is planned as AdamW; `setting` is its key, alone or with a value.
pub(super) fn as_adamw(doc: &Document, setting: &str) -> String {
    let key = setting.split(' ').next().unwrap_or(setting);
    let place = doc.place(key);
    format!("{place}: {setting} is planned as AdamW with 32-bit states")
}
