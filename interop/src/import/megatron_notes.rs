//! Options of a Megatron-LM script that a plan expresses as another setting, or not at all: a note on each.

use catalog::model::ModelConfig;
use catalog::{DType, Zero};

use super::document::Document;
use super::error::ImportError;
use super::kernels::{self, When, assumed};
use crate::config::{Node, Value};
use crate::export::schema::Schema;
use plans::decisions::Decisions;

/// Options that no strategy can express.
const LEFT_OUT: [&str; 6] = [
    "--rampup-batch-size",
    "--tensor-parallel-num-weight-shards",
    "--expert-tensor-parallel-num-weight-shards",
    "--freeze-all-layers",
    "--logits-load-dir",
    "--perform-rl-step",
];

/// An option or a prefix that ends in `-`; values predicted as such; what is planned for others.
type Row = (&'static str, &'static [&'static str], &'static str);

/// Options that are predicted as another setting, sorted by the plans on which they have an effect.
#[rustfmt::skip]
const OTHERWISE: &[(When, &[Row])] = &[
    (|_, _| true, &[
        ("--flash-attention-version", &[], "the kernel that --attention-backend auto takes"),
        ("--transformer-impl", &["transformer_engine"], "transformer_engine"),
        ("--optimizer", &["adam"], "Adam"),
        ("--main-params-dtype", &["fp32"], "fp32"),
        ("--optimizer-cuda-graph", &[], "an optimizer that the host launches"),
        ("--fp32-residual-connection", &[], "16 bits between layers"),
        ("--distribute-saved-activations", &[], "inputs of layers kept whole by every tensor-parallel rank"),
        ("--fine-grained-activation-offloading", &[], "activations that stay on the device"),
        ("--delay-wgrad-compute", &[], "gradients of weights made right after those of inputs"),
        ("--mlp-chunks-for-training", &["1"], "1: the whole sequence at once"),
        ("--fp16-lm-cross-entropy", &[], "a loss in 32 bits"),
        ("--output-logit-dtype", &["bf16"], "bf16"),
        ("--te-precision-config-file", &[], "one precision for all layers"),
        ("--disable-jit-fuser", &[], "fused kernels"),
        ("--fused-residual-rmsnorm", &[], "norms and sums in kernels of their own"),
        ("--use-transformer-engine-op-fuser", &[], "layers without Transformer Engine's fused operators"),
        ("--deterministic-mode", &[], "the fastest kernels"),
        ("--batch-invariant-mode", &[], "the fastest kernels"),
        ("--empty-unused-memory-level", &["0"], "0"),
        ("--distributed-backend", &["nccl"], "nccl"),
        ("--dataloader-inter-document-masking", &[], WHOLE_SEQUENCES),
        ("--sft", &[], WHOLE_SEQUENCES),
    ]),
    (|d, _| d.fp8_recipe.is_some(), &[
        ("--first-last-layers-bf16", &[], "8 bits in the first and last layers too"),
        ("--fp8-output-proj", &[], "an output layer in 16 bits"),
        ("--disable-fp8-wgrad", &[], "gradients of weights made in 8 bits"),
        ("--no-fp8-wgrad", &[], "gradients of weights made in 8 bits"),
        ("--keep-fp8-transpose-cache", &[], "transposed weights that are not kept"),
    ]),
    (|d, _| d.fp8_recipe.is_some() && d.zero <= Zero::Z1, &[
        ("--fp8-param-gather", &[], "in NeMo, which holds weights in 8 bits (--runtime nemo)"),
    ]),
    (|d, _| d.dp() * d.cp > 1, &[
        ("--ddp-num-buckets", &[], "buckets of Megatron-LM's own size"),
        ("--ddp-param-name-patterns-for-fp32-local-accumulation", &[], "gradients of one type"),
        ("--overlap-param-gather-with-optimizer-step", &[], "a gather after the optimizer's step"),
        ("--use-nccl-ub", &[], "messages from buffers that are not registered with NCCL"),
        ("--use-sharp", &[], "sums that GPUs form, not switches"),
    ]),
    // `max(40000000, 1000000 * dp)` (distributed_data_parallel.py) is what predictions assume.
    (|d, _| (2..=40).contains(&(d.dp() * d.cp)), &[
        ("--ddp-bucket-size", &["40000000"], "40000000 elements"),
    ]),
    (|d, _| d.dp() * d.cp > 40, &[
        ("--ddp-bucket-size", &[], "1000000 elements for each data-parallel rank"),
    ]),
    (|d, _| d.gradients.is_some_and(|types| types.reduced != DType::F32), &[
        ("--ddp-reduce-scatter-with-fp32-accumulation", &[], "sums formed in the type that is sent"),
    ]),
    (|d, _| d.zero >= Zero::Z2, &[
        ("--use-torch-fsdp2", &[], "ZeRO-3 of Megatron's own FSDP"),
        ("--outer-dp-sharding-strategy", &["no_shard"], "no_shard"),
        ("--megatron-fsdp-version", &["1"], "1"),
        ("--fsdp-double-buffer", &[], "buffers made when they are needed"),
        ("--megatron-fsdp-max-pool-double-buffer", &[], "buffers made when they are needed"),
        ("--megatron-fsdp-main-params-dtype", &["fp32"], "fp32"),
        ("--megatron-fsdp-enable-fine-grained-param-gather", &[], "a gather of whole layers"),
        ("--suggested-communication-unit-size", &[], "a gather of whole layers"),
    ]),
    (|d, _| d.zero >= Zero::Z2 || d.offload.is_some(), &[
        ("--exp-avg-dtype", &["fp32"], "fp32"),
        ("--exp-avg-sq-dtype", &["fp32"], "fp32"),
    ]),
    (|d, _| d.overlap.tensor_parallel, &[
        ("--disable-tp-comm-", &[], "overlapped like the rest of --tp-comm-overlap"),
        ("--no-tp-comm-", &[], "overlapped like the rest of --tp-comm-overlap"),
    ]),
    (|d, _| d.cp > 1, &[
        ("--hybrid-context-parallel", &[], "every sequence divided over all context-parallel ranks"),
    ]),
    (|d, _| d.pp > 1, &[
        ("--pipeline-model-parallel-comm-backend", &["nccl"], "nccl"),
        ("--defer-embedding-wgrad-compute", &[], "gradients of the head made in every backward pass"),
    ]),
    (|d, _| d.offload.is_some(), &[
        ("--overlap-cpu-optimizer-d2h-h2d", &[], "copies before and after the host's update"),
        ("--no-pin-cpu-grads", &[], "pinned memory"),
        ("--no-pin-cpu-params", &[], "pinned memory"),
    ]),
    (|_, model| model.moe.is_some(), &[
        ("--moe-expert-capacity-factor", &[], "experts that take all their tokens, without padding"),
        ("--moe-expert-rank-capacity-factor", &[], "experts that take all their tokens"),
        ("--moe-router-force-biased", &[], "experts that get equally many tokens"),
        ("--moe-shared-expert-overlap", &[], "shared experts that run beside no messages"),
        ("--moe-paged-stash", &[], "activations of experts that stay where they were made"),
        ("--moe-router-fusion", &[], "a router of several kernels"),
        ("--overlap-dispatch-backward-with-experts-wgrad", &[], "messages beside no gradients of experts"),
    ]),
];
/// The switch by which experts run in one product; it is planned as on.
const GROUPED: &str = "--moe-grouped-gemm";
const WHOLE_SEQUENCES: &str = "attention over whole sequences, as the script does not say how long documents are; `search --from` \
     with this file takes --lengths, to plan attention within them";

/// A note on options that Megatron-LM does not have, as scripts of its descendants may. An option
/// that looks misspelt is an error.
pub(super) fn unknown(doc: &Document) -> Result<Option<String>, ImportError> {
    let schema = Schema::of(doc.dialect)?;
    let unknown = doc.root.entries().iter().map(|(key, _)| key.as_str());
    let unknown = unknown.filter(|key| schema.kind(key).is_none());
    // A file with more was written for another system.
    let unknown: Vec<&str> = unknown.take(100).collect();
    if let Some(key) = unknown.iter().find(|key| schema.misspells(key)) {
        let nearest = schema.nearest(key).unwrap_or_default();
        let message = format!("unknown to megatron-lm; did you mean `{nearest}`?");
        return Err(doc.unsupported(key, &message));
    }
    let shown = unknown.iter().map(|key| {
        let nearest = schema.nearest(key);
        let nearest = nearest.map_or_else(String::new, |near| format!(", nearest is {near}"));
        format!("{key} ({}{nearest})", doc.place(key))
    });
    let shown: Vec<String> = shown.collect();
    let shown = shown.join(", ");
    Ok((!unknown.is_empty()).then(|| format!("unknown to megatron-lm and left out: {shown}")))
}

/// Whether there is a note on an option for some plan or model.
pub(super) fn is_noted(option: &str) -> bool {
    let mut rows = OTHERWISE.iter().flat_map(|(_, rows)| *rows);
    LEFT_OUT.contains(&option) || kernels::switches(option) || rows.any(|row| names(row, option))
}

/// Whether a row is about an option.
fn names((name, ..): &Row, option: &str) -> bool {
    option == *name || name.ends_with('-') && option.starts_with(name)
}

/// A note for each option that is planned as another setting, or that a strategy cannot express.
pub(super) fn planned_otherwise(doc: &Document, model: &ModelConfig, d: &Decisions) -> Vec<String> {
    let counts = OTHERWISE.iter().filter(|(when, _)| when(d, model));
    let rows: Vec<&Row> = counts.flat_map(|(_, rows)| *rows).collect();
    let note = |(key, node): &(String, Node)| {
        let place = doc.place(key);
        let value = match &node.value {
            // Of an option given twice, the last counts.
            _ if !doc.find(key).is_some_and(|last| std::ptr::eq(last, node)) => return None,
            Value::Null | Value::Bool(false) => return None,
            Value::Bool(true) | Value::List(_) => String::new(),
            Value::Str(text) => format!(" {text}"),
            other => format!(" {}", other.shown()),
        };
        if LEFT_OUT.contains(&key.as_str()) {
            let what = "has no part in a strategy and is left out";
            return Some(format!("{place}: {} {what}", doc.in_own_words(key, "")));
        }
        let (_, planned, what) = rows.iter().find(|row| names(row, key))?;
        let other = !planned.contains(&value.trim_start());
        let said = doc.in_own_words(key, &value);
        other.then(|| format!("{place}: {said} is planned as {what}"))
    };
    let one_by_one = model.moe.is_some() && doc.root.get(GROUPED).is_none();
    let without = "experts run one after another (SequentialMLP)";
    let said = doc.root.entries().iter().filter_map(note);
    said.chain(one_by_one.then(|| assumed(doc, GROUPED, without)))
        .collect()
}
