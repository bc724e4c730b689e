//! Which weights a file for Hugging Face's Trainer trains: all, or adapters (LoRA) as axolotl, LLaMA-Factory and TRL write
//! them.

use catalog::model::{Family, ModelConfig};
use catalog::{AdaptedModule, AdaptedModules, Adapters};

use super::document::Document;
use super::error::ImportError;
use super::unplanned;
use crate::config::{Node, Value};
use crate::export::Dialect;

/// Why training of another kind is refused.
const PLANNED: &str = "only training of all weights, and of adapters (lora), is planned";

/// Settings of training that is not planned, each with the reason.
const REFUSED: [(&str, &str); 24] = [
    ("load_in_8bit", "frozen weights are planned in 16 bits only"),
    ("load_in_4bit", "frozen weights are planned in 16 bits only"),
    ("q_lora", "frozen weights are planned in 16 bits only"),
    ("quantization_bit", BESIDE),
    ("additional_target", BESIDE),
    ("lora_modules_to_save", BESIDE),
    ("lora_target_parameters", PLANNED),
    ("unfrozen_parameters", PLANNED),
    ("spectrum_top_fraction", PLANNED),
    ("freeze_backbone", PLANNED),
    ("peft_layers_to_transform", PLANNED),
    ("peft_layer_replication", PLANNED),
    ("peft_trainable_token_indices", PLANNED),
    ("lisa_n_layers", PLANNED),
    ("relora", PLANNED),
    ("use_dora", PLANNED),
    ("peft_use_dora", PLANNED),
    (
        "quantize_moe_experts",
        "frozen weights are planned in 16 bits only",
    ),
    // axolotl's preference and reward training.
    ("rl", NEXT_TOKEN),
    ("reward_model", NEXT_TOKEN),
    ("process_reward_model", NEXT_TOKEN),
    (
        "mixture_of_depths",
        "layers that some tokens skip are not planned",
    ),
    (
        "use_kt",
        "experts that the host's processors compute are not planned",
    ),
    ("use_hyper_parallel", "plans of HyperParallel are not read"),
];
const NEXT_TOKEN: &str = "only training for the next token is planned";
const BESIDE: &str = "weights beside adapters are planned frozen, in 16 bits";

/// Switches with which training scripts train adapters; TRL's is the first.
const SWITCHES: [&str; 3] = ["use_peft", "use_lora", "lora_enable"];

/// Settings of adapters, which a script may have without training any.
const SETTINGS: [&str; 4] = ["lora_r", "lora_rank", "lora_alpha", "lora_target_modules"];

/// The adapters that the file trains; `None` if it trains all weights. Other ways to train a part of the weights, and
/// quantized weights, are refused.
pub(super) fn read(doc: &Document, model: &ModelConfig) -> Result<Option<Adapters>, ImportError> {
    if let Some((key, why)) = REFUSED.into_iter().find(|(key, _)| is_set(doc, key)) {
        return Err(doc.unsupported(key, why));
    }
    // It trains half of the layers where the file has no share (axolotl@067b021, integrations/spectrum/args.py).
    if unplanned::has_plugin(doc, "SpectrumPlugin") {
        return Err(doc.unsupported("plugins", PLANNED));
    }
    let stage = doc.text("stage")?.unwrap_or("pt");
    if !["pt", "sft"].contains(&stage) {
        return Err(doc.unsupported("stage", PLANNED));
    }
    let (key, whole, usual) = match doc.dialect {
        Dialect::Axolotl => ("adapter", "", ""),
        // The default of its `FinetuningArguments`.
        Dialect::LlamaFactory => ("finetuning_type", "full", "lora"),
        _ if switched_on(doc)? => return adapters(doc, model).map(Some),
        _ => ("finetuning_type", "full", "full"),
    };
    match doc.text(key)?.unwrap_or(usual) {
        kind if kind == whole => Ok(None),
        "lora" => adapters(doc, model).map(Some),
        _ => Err(doc.unsupported(key, PLANNED)),
    }
}

/// Whether the file gives a key a value that switches it on.
fn is_set(doc: &Document, key: &str) -> bool {
    match doc.find(key).map(|node| &node.value) {
        None | Some(Value::Null | Value::Bool(false) | Value::Int(0)) => false,
        Some(Value::List(items)) => !items.is_empty(),
        Some(Value::Str(text)) => !text.is_empty(),
        Some(_) => true,
    }
}

/// Whether a file of the Trainer's switches adapters on. One that has their settings but no switch is refused: its script
/// decides.
fn switched_on(doc: &Document) -> Result<bool, ImportError> {
    let mut said = false;
    for key in SWITCHES {
        match doc.flag(key)? {
            Some(true) => return Ok(true),
            off => said |= off.is_some(),
        }
    }
    let setting = SETTINGS.into_iter().find(|key| is_set(doc, key));
    match setting.filter(|_| !said && doc.find("finetuning_type").is_none()) {
        Some(key) => {
            let why =
                "the file does not say whether adapters are trained; set use_peft to true or false";
            Err(doc.unsupported(key, why))
        }
        None => Ok(false),
    }
}

/// The adapters of a file that trains them. What it leaves open has its system's default: axolotl
/// has none for the rank; those of LLaMA-Factory and TRL (`ModelConfig`) differ.
fn adapters(doc: &Document, model: &ModelConfig) -> Result<Adapters, ImportError> {
    let of_file = match doc.size("lora_r")? {
        Some(rank) => Some(rank),
        None => doc.size("lora_rank")?,
    };
    let (rank, alpha, dropout) = match (doc.dialect, of_file) {
        (Dialect::Axolotl, None) => return Err(doc.missing("lora_r", "axolotl has no default")),
        (Dialect::Axolotl, Some(rank)) => (rank, rank.saturating_mul(2), 0.0),
        (Dialect::LlamaFactory, rank) => {
            (rank.unwrap_or(8), rank.unwrap_or(8).saturating_mul(2), 0.0)
        }
        (_, rank) => (rank.unwrap_or(16), 32, 0.05),
    };
    let dropout = match doc.said("lora_dropout") {
        None => dropout,
        Some(node) => (node.float())
            .or_else(|| node.text()?.parse().ok())
            .ok_or_else(|| doc.wrong("lora_dropout", "a number"))?,
    };
    Ok(Adapters {
        rank,
        alpha: doc.size("lora_alpha")?.unwrap_or(alpha),
        modules: modules(doc, model)?,
        dropout,
    })
}

/// The linear layers that have adapters, from a list or from comma-separated names. Gate and up
/// must be named together.
fn modules(doc: &Document, model: &ModelConfig) -> Result<AdaptedModules, ImportError> {
    if doc.dialect == Dialect::Axolotl && doc.on("lora_target_linear")? {
        return Ok(AdaptedModules::all());
    }
    let key = match doc.dialect {
        Dialect::LlamaFactory => "lora_target",
        _ => "lora_target_modules",
    };
    // PEFT adapts `q_proj` and `v_proj` of these families by default.
    let as_llama = matches!(model.family, Family::Llama | Family::Mixtral);
    let names: Vec<&str> = match (doc.find(key).map(|node| &node.value), doc.dialect) {
        (Some(Value::List(items)), _) => items.iter().filter_map(Node::text).collect(),
        (Some(Value::Str(names)), _) => names.split(',').map(str::trim).collect(),
        (None | Some(Value::Null), Dialect::LlamaFactory) => vec!["all"],
        (None | Some(Value::Null), Dialect::Transformers | Dialect::TransformersDeepSpeed)
            if as_llama =>
        {
            vec!["q_proj", "v_proj"]
        }
        _ => return Err(doc.missing(key, "name the linear layers that have adapters")),
    };
    let has = |name: &str| names.contains(&name);
    let mut all: Vec<AdaptedModule> = Vec::new();
    for name in &names {
        match AdaptedModules::named(name) {
            None if *name == "all-linear" => all.extend(AdaptedModule::ALL),
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
