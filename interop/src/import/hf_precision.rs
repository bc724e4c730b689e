//! The precision of files for Hugging Face's Trainer, LLaMA-Factory, axolotl and accelerate, and the type of their weights.

use catalog::Precision;

use super::document::Document;
use super::error::ImportError;
use super::fsdp;
use super::imported::Imported;
use super::unplanned;
use crate::config::Value;
use crate::export::Dialect;

/// The precision of the Trainer's own switches or, where none is on, of accelerate's.
pub(super) fn precision(doc: &Document) -> Result<Precision, ImportError> {
    let on = |key: &str| match doc.text(key) {
        Ok(Some("auto" | "full")) => Ok(true),
        _ => doc.on(key),
    };
    if doc.dialect == Dialect::Axolotl && !on("fp8")? {
        return of_axolotl(doc);
    }
    if doc.dialect != Dialect::Accelerate {
        if on("fp8")? {
            return Ok(Precision::Fp8);
        }
        if on("bf16")? || on("pure_bf16")? {
            return Ok(Precision::Bf16);
        }
        if on("fp16")? {
            return Ok(Precision::Fp16);
        }
    }
    let key = "mixed_precision";
    match doc.text(key)? {
        None if keeps_checkpoints_type(doc)? => Ok(Precision::Bf16),
        None | Some("no") => Ok(Precision::Fp32),
        Some("bf16") => Ok(Precision::Bf16),
        Some("fp16") => Ok(Precision::Fp16),
        Some("fp8") => Ok(Precision::Fp8),
        Some(_) => Err(doc.wrong(key, "no, fp16, bf16 or fp8")),
    }
}

/// Whether LLaMA-Factory computes in the type of the checkpoint: the file has no switch of a type, and most of the weights are
/// not copied to 32 bits. It loads them as they are (LLaMA-Factory@ff6d4d1, model/loader.py, `load_model`) and copies those that
/// are trained, but not for BAdam (model/adapter.py, `init_adapter`). DeepSpeed's ZeRO-3 makes all in 32 bits without a switch
/// (DeepSpeed@edaa722, runtime/zero/partition_parameters.py, `_set_dtype`).
fn keeps_checkpoints_type(doc: &Document) -> Result<bool, ImportError> {
    if doc.dialect != Dialect::LlamaFactory || doc.said("mixed_precision").is_some() {
        return Ok(false);
    }
    let stages = [
        "deepspeed.zero_optimization.stage",
        "deepspeed_config.zero_stage",
    ];
    let whole = stages
        .iter()
        .any(|key| matches!(doc.size(key), Ok(Some(3))));
    let switches = ["bf16", "pure_bf16", "fp16", "fp8"];
    let switched = switches.iter().any(|key| matches!(doc.on(key), Ok(true)));
    // `lora` is the default of its `FinetuningArguments`.
    let adapters = matches!(doc.text("finetuning_type")?, None | Some("lora"));
    Ok(!whole && !switched && (adapters || doc.on("use_badam")?))
}

/// Notes on the type of weights and of products, where it is not what the file's precision says alone.
pub(super) fn notes(doc: &Document, imported: &Imported) -> Result<Vec<String>, ImportError> {
    let mut notes = Vec::new();
    if keeps_checkpoints_type(doc)? {
        notes.push(format!(
            "{}: without bf16 or fp16 LLaMA-Factory computes in the type of the checkpoint, which is taken as bf16",
            doc.path
        ));
    }
    notes.extend(without_tf32(doc, imported));
    if imported.adapters.is_none() {
        notes.extend(loads_in_16_bits(doc, imported)?);
    }
    Ok(notes)
}

/// A note on 32-bit products that are predicted on TF32 units and run without them: PyTorch leaves these off unless the Trainer
/// is told to use them, or compiles (transformers, training_args.py, `__post_init__`; axolotl@067b021, core/builders/base.py).
fn without_tf32(doc: &Document, imported: &Imported) -> Option<String> {
    let key = "tf32";
    let value = |key: &str| doc.said(key).map(|node| &node.value);
    let on = match value(key) {
        Some(Value::Bool(on)) => *on,
        // axolotl's `auto` takes them where they are.
        Some(_) => true,
        None => value("torch_compile") == Some(&Value::Bool(true)),
    };
    (imported.workload.precision == Precision::Fp32 && !on).then(|| {
        doc.note(
            key,
            "products in 32 bits are predicted on TF32 units, which GPUs since Ampere have; without tf32: true PyTorch runs them on \
             ordinary 32-bit units, which take several times as long",
        )
    })
}

/// axolotl's precision: 16-bit numbers unless both switches are off. `bf16` is `auto` where the file does not say, and then
/// gives way to `fp16` (utils/config, `resolve_dtype`).
fn of_axolotl(doc: &Document) -> Result<Precision, ImportError> {
    let auto = doc.find("bf16").is_none() || matches!(doc.text("bf16"), Ok(Some("auto")));
    let fp16 = doc.on("fp16")?;
    let bf16 = match doc.text("bf16") {
        Ok(Some("full")) => true,
        _ if auto => !fp16,
        _ => doc.on("bf16")?,
    };
    Ok(
        match (bf16 || doc.on("bfloat16")?, fp16 || doc.on("float16")?) {
            (true, _) => Precision::Bf16,
            (false, true) => Precision::Fp16,
            (false, false) => Precision::Fp32,
        },
    )
}

/// A note on weights that are loaded in 16 bits and trained so, without copies in 32. DeepSpeed's engine makes such copies, as
/// does accelerate under FSDP.
fn loads_in_16_bits(doc: &Document, imported: &Imported) -> Result<Option<String>, ImportError> {
    let sixteen = matches!(
        imported.workload.precision,
        Precision::Bf16 | Precision::Fp8
    );
    if !sixteen || imported.dialect == Dialect::DeepSpeed || fsdp::upcasts(doc)? {
        return Ok(None);
    }
    Ok(match doc.dialect {
        Dialect::Axolotl => of_its_switch(doc),
        Dialect::Transformers | Dialect::TransformersDeepSpeed => of_script(doc)?,
        _ => None,
    })
}

/// axolotl loads a model in the type in which it computes (utils/config, `resolve_dtype`).
fn of_its_switch(doc: &Document) -> Option<String> {
    let value = match doc.find("bf16").map(|node| &node.value) {
        Some(Value::Bool(on)) => on.to_string(),
        Some(Value::Str(text)) if text == "full" => return None,
        _ => "auto".to_owned(),
    };
    Some(unplanned::in_16_bits(doc, "bf16", &value))
}

/// The Trainer trains weights in the type in which its script loads them; autocast makes no copies in 32 bits. Transformers 5
/// loads them as they are on the hub unless the script gives a type (modeling_utils.py, `from_pretrained`), as TRL's scripts do
/// (huggingface/trl#5457).
fn of_script(doc: &Document) -> Result<Option<String>, ImportError> {
    for key in ["dtype", "torch_dtype"] {
        if let Some(name) = doc.text(key)? {
            let wide = ["float32", "fp32"].contains(&name);
            return Ok((!wide).then(|| unplanned::in_16_bits(doc, key, name)));
        }
    }
    let loads = doc.said("model_name_or_path").is_some();
    Ok(loads.then(|| {
        format!(
            "{}: the file has no dtype: unless its script gives one, Transformers 5 loads and trains weights in the type of the checkpoint, \
             in most 16 bits; the prediction counts weights and states in 32 bits, as with dtype float32, which take more memory",
            doc.path
        )
    }))
}
