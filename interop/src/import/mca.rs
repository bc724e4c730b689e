//! Import of LLaMA-Factory's files for its Megatron back ends (`USE_MCA=1` with mcore_adapter, `USE_MEGATRON_BRIDGE=1` with
//! Megatron Bridge): the parallel sizes have the names of Megatron-LM's options, so the file is read as a script with these
//! options.

use catalog::model::ModelConfig;
use catalog::{AdaptedModules, Adapters};

use super::adapters;
use super::bridge::Options;
use super::document::Document;
use super::error::ImportError;
use super::imported::{Given, Imported};
use super::megatron;
use super::sizes::{data_parallel, said_devices};
use crate::export::Dialect;
use crate::export::flag::option;

/// Keys that hold decisions, and that Megatron-LM has as options of the same name.
const SAME: [&str; 14] = [
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "overlap_param_gather",
    "overlap_grad_reduce",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm",
];

/// Whether the file is for a Megatron back end.
pub(super) fn is(doc: &Document) -> bool {
    doc.dialect == Dialect::LlamaFactory && SAME[..5].iter().any(|key| doc.find(key).is_some())
}

pub(super) fn import(doc: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    let mut all = Options::default();
    for key in SAME {
        all.copy(doc, key, &option(key));
    }
    let chunks = "virtual_pipeline_model_parallel_size";
    all.copy(doc, chunks, "--num-virtual-stages-per-pipeline-rank");
    let whole = doc.text("recompute_granularity")? == Some("full");
    if whole && doc.find("recompute_method").is_none() {
        // The adapter recomputes every layer then.
        all.put("--recompute-method", 0, "uniform");
        all.put("--recompute-num-layers", 0, 1);
    }
    for precision in ["bf16", "fp16"] {
        all.put(&option(precision), 0, doc.on(precision)?);
    }
    // The default of `TrainingArguments`.
    let micro_batch = doc.size("per_device_train_batch_size")?.unwrap_or(8);
    all.put("--micro-batch-size", 0, micro_batch);
    let gpus = said_devices(doc, given.gpus)?;
    let mut split = ["tensor_model", "pipeline_model", "context"].into_iter();
    let split = split.try_fold(1_u64, |product, axis| {
        let size = doc.degree(&format!("{axis}_parallel_size"))?;
        Ok::<_, ImportError>(product.saturating_mul(size))
    })?;
    let count = doc.degree("gradient_accumulation_steps")?;
    let per_step = micro_batch.saturating_mul(data_parallel(doc, gpus, split)?);
    all.put("--global-batch-size", 0, per_step.saturating_mul(count));
    all.copy(doc, "cutoff_len", "--seq-length");
    let mut imported = megatron::of_options(&all.script(doc), given)?;
    imported.adapters = adapted(doc, given.model)?;
    Ok(imported)
}

/// The adapters that Megatron Bridge trains for the file; mcore_adapter trains none. They have the file's rank and are beside all
/// linear layers, whichever it names, and without dropout (`_create_peft_config` in train/megatron_bridge). Pre-training has
/// none.
fn adapted(doc: &Document, model: &ModelConfig) -> Result<Option<Adapters>, ImportError> {
    let found = adapters::read(doc, model)?;
    let pretrains = doc.text("stage")? == Some("pt");
    Ok(found.filter(|_| !pretrains).map(|found| Adapters {
        modules: AdaptedModules::all(),
        dropout: 0.0,
        ..found
    }))
}
