//! Which weights a file for Hugging Face's Trainer trains: all, or adapters (LoRA) as axolotl and LLaMA-Factory write
//! them.

use catalog::{AdaptedModule, AdaptedModules, Adapters};

use super::document::Document;
use super::error::ImportError;
use crate::config::{Node, Value};
use crate::export::Dialect;

/// The adapters that the file trains; `None` if it trains all weights. Other ways to train a part of the weights, and
/// quantized weights, are refused.
pub(super) fn read(doc: &Document) -> Result<Option<Adapters>, ImportError> {
    let why = "only training of all weights, and of adapters (lora), is planned";
    for key in ["load_in_8bit", "load_in_4bit"] {
        if doc.flag(key)? == Some(true) {
            return Err(doc.unsupported(key, "frozen weights are planned in 16 bits only"));
        }
    }
    for key in [
        "quantization_bit",
        "additional_target",
        "lora_modules_to_save",
    ] {
        if doc.find(key).is_some_and(|node| node.value != Value::Null) {
            return Err(doc.unsupported(
                key,
                "weights beside adapters are planned frozen, in 16 bits",
            ));
        }
    }
    let stage = doc.text("stage")?.unwrap_or("pt");
    if !["pt", "sft"].contains(&stage) {
        return Err(doc.unsupported("stage", why));
    }
    let (key, whole, usual) = match doc.dialect {
        Dialect::Axolotl => ("adapter", "", ""),
        // The default of its `FinetuningArguments`.
        Dialect::LlamaFactory => ("finetuning_type", "full", "lora"),
        _ => ("finetuning_type", "full", "full"),
    };
    match doc.text(key)?.unwrap_or(usual) {
        kind if kind == whole => Ok(None),
        "lora" => adapters(doc).map(Some),
        _ => Err(doc.unsupported(key, why)),
    }
}

fn adapters(doc: &Document) -> Result<Adapters, ImportError> {
    let axolotl = doc.dialect == Dialect::Axolotl;
    let rank = doc.size(if axolotl { "lora_r" } else { "lora_rank" })?;
    // LLaMA-Factory's default; axolotl has none.
    let rank = match rank {
        Some(rank) => rank,
        None if axolotl => return Err(doc.missing("lora_r", "axolotl has no default")),
        None => 8,
    };
    let dropout = match doc.find("lora_dropout").map(|node| &node.value) {
        None | Some(Value::Null) => 0.0,
        Some(Value::Int(whole)) => *whole as f64,
        Some(Value::Float(share)) => *share,
        Some(_) => return Err(doc.wrong("lora_dropout", "a number")),
    };
    let alpha = doc.size("lora_alpha")?;
    Ok(Adapters {
        rank,
        alpha: alpha.unwrap_or(rank.saturating_mul(2)),
        modules: modules(doc, axolotl)?,
        dropout,
    })
}

/// The linear layers that have adapters: a list, or names with commas between them. Gate and up have theirs together.
fn modules(doc: &Document, axolotl: bool) -> Result<AdaptedModules, ImportError> {
    if axolotl && doc.flag("lora_target_linear")? == Some(true) {
        return Ok(AdaptedModules::all());
    }
    let key = match axolotl {
        true => "lora_target_modules",
        false => "lora_target",
    };
    let names: Vec<&str> = match doc.find(key).map(|node| &node.value) {
        Some(Value::List(items)) => items.iter().filter_map(Node::text).collect(),
        Some(Value::Str(names)) => names.split(',').map(str::trim).collect(),
        None if !axolotl => vec!["all"],
        _ => return Err(doc.missing(key, "name the linear layers that have adapters")),
    };
    let has = |name: &str| names.contains(&name);
    let mut all: Vec<AdaptedModule> = Vec::new();
    for name in &names {
        match AdaptedModules::named(name) {
            Some(modules) => all.extend(modules.modules()),
            None if has("gate_proj") && has("up_proj") && name.ends_with("_proj") => {
                all.push(AdaptedModule::Fc1);
            }
            None => {
                let why = "adapters are planned of q_proj, k_proj, v_proj, o_proj, down_proj, and of gate_proj \
                           together with up_proj";
                return Err(doc.unsupported(key, why));
            }
        }
    }
    Ok(all.into_iter().collect())
}
