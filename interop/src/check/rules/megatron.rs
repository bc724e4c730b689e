//! Rules of Megatron-LM (`validate_args` of `megatron/training/arguments.py`) and Megatron Bridge.

use catalog::model::ModelConfig;

use super::collector::{Rules, times};
use crate::config::Node;
use crate::export::core_precision::RECIPE;
use crate::export::megatron::OFFLOAD;

const TP: &str = "--tensor-model-parallel-size";
const PP: &str = "--pipeline-model-parallel-size";
const SP: &str = "--sequence-parallel";
const LAYOUT: &str = "--pipeline-model-parallel-layout";

pub(super) fn megatron(r: &mut Rules<'_>, model: Option<&ModelConfig>) {
    let (t, p) = (r.size_or_one(TP), r.size_or_one(PP));
    let c = r.size_or_one("--context-parallel-size");
    sequence_parallel(r, t);
    let interleaved = virtual_stages(r, p);
    overlap(r);
    let experts = r.has("--num-experts");
    let used = |r: &Rules<'_>, key: &str| r.size(key).is_some_and(|n| n > 1);
    let parallel = "--expert-model-parallel-size";
    let needs = "needs a model with --num-experts";
    r.require(!used(r, parallel) || experts, parallel, needs);
    let split = "--expert-tensor-parallel-size";
    let nothing = "has no effect without --num-experts";
    r.advise(!used(r, split) || experts, split, nothing);
    recomputation(r);
    eight_bits(r);
    fsdp(r, p);
    heads(r, t, model);
    layers(r, p, interleaved, model);
    if r.on("--no-overlap-p2p-communication") && p == 2 && interleaved {
        r.require(
            false,
            "--no-overlap-p2p-communication",
            "interleaving over 2 ranks needs overlapped sends and receives",
        );
    }
    sequence(r, c);
    let both = r.on("--bf16") && r.on("--fp16");
    r.require(!both, "--fp16", "cannot stand beside --bf16");
    r.require(
        !r.has("--fp8-format") || !r.has("--fp4-format"),
        "--fp4-format",
        "cannot stand beside --fp8-format",
    );
    batch_of_megatron(r, times(&[t, p, c]));
}

fn sequence_parallel(r: &mut Rules<'_>, tp: u64) {
    r.advise(
        !r.on(SP) || tp > 1,
        SP,
        format!("has no effect without {TP} of at least 2; Megatron-LM switches it off"),
    );
    r.require(
        !r.has("--num-experts") || tp == 1 || r.on(SP),
        TP,
        format!("experts with tensor parallelism need {SP}"),
    );
}

/// Whether the file sets virtual stages; reports if more than one option does.
fn virtual_stages(r: &mut Rules<'_>, pp: u64) -> bool {
    let stating = [
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        LAYOUT,
    ];
    let given: Vec<&str> = stating.into_iter().filter(|k| r.has(k)).collect();
    let [first, rest @ ..] = given.as_slice() else {
        return false;
    };
    for key in rest {
        r.require(
            false,
            key,
            format!("cannot stand beside {first}; one of them says the stages"),
        );
    }
    r.require(pp > 1, first, format!("needs {PP} of at least 2"));
    true
}

fn overlap(r: &mut Rules<'_>) {
    let gather = "--overlap-param-gather";
    if r.on(gather) {
        let sharded = r.on("--use-distributed-optimizer") || r.on("--use-megatron-fsdp");
        r.require(
            sharded,
            gather,
            "needs --use-distributed-optimizer or --use-megatron-fsdp",
        );
        r.require(
            r.on("--overlap-grad-reduce"),
            gather,
            "needs --overlap-grad-reduce",
        );
    }
    let tensor = "--tp-comm-overlap";
    r.require(!r.on(tensor) || r.on(SP), tensor, format!("needs {SP}"));
}

/// Checks that layers divide evenly over pipeline stages, unless virtual stages, a layout, a hybrid pattern or options
/// for uneven first and last stages are given; checks the layout.
fn layers(r: &mut Rules<'_>, pp: u64, interleaved: bool, model: Option<&ModelConfig>) {
    let Some(layers) = r.size("--num-layers").or(model.map(|m| m.layers)) else {
        return;
    };
    let even = !interleaved
        && !r.has("--decoder-first-pipeline-num-layers")
        && !r.has("--decoder-last-pipeline-num-layers")
        && !r.on("--account-for-embedding-in-pipeline-split")
        && !r.on("--account-for-loss-in-pipeline-split")
        && !r.has("--hybrid-layer-pattern");
    r.require(
        !even || layers.is_multiple_of(pp),
        PP,
        format!("{layers} layers do not divide into {pp} stages; give {LAYOUT}"),
    );
    if let Some(layout) = r.text(LAYOUT).map(str::to_owned) {
        layout_rules(r, &layout, layers, pp);
    }
}

fn sequence(r: &mut Rules<'_>, cp: u64) {
    let key = "--seq-length";
    let Some(sequence) = r.size(key) else { return };
    let parts = times(&[2, cp]);
    r.require(
        cp <= 1 || sequence.is_multiple_of(parts),
        key,
        format!("{sequence} is not a multiple of 2·cp = {parts}"),
    );
    if let Some(most) = r.size("--max-position-embeddings") {
        r.require(
            sequence <= most,
            key,
            format!("{sequence} is above --max-position-embeddings {most}"),
        );
    }
}

fn batch_of_megatron(r: &mut Rules<'_>, model_parallel: u64) {
    let (micro, global) = (r.size("--micro-batch-size"), r.size("--global-batch-size"));
    let Some(gpus) = r.doc.launch.gpus else {
        return;
    };
    r.require(
        gpus.is_multiple_of(model_parallel),
        TP,
        format!("tp·pp·cp = {model_parallel} does not divide the {gpus} GPUs"),
    );
    if let (Some(micro), Some(global)) = (micro, global) {
        let each = times(&[micro, (gpus / model_parallel).max(1)]);
        r.require(
            each > 0 && global.is_multiple_of(each),
            "--global-batch-size",
            format!("{global} is not a multiple of micro-batch · dp = {each}"),
        );
    }
}

fn recomputation(r: &mut Rules<'_>) {
    let (granularity, method) = ("--recompute-granularity", "--recompute-method");
    let full = r.text(granularity) == Some("full");
    r.require(
        !r.has(method) || full,
        method,
        "needs --recompute-granularity full",
    );
    r.require(
        !full || r.has(method),
        granularity,
        "full needs --recompute-method uniform or block",
    );
    r.require(
        !full || r.has("--recompute-num-layers"),
        granularity,
        "full needs --recompute-num-layers",
    );
    let modules = "--recompute-modules";
    let selective = r.text(granularity) == Some("selective") || r.on("--recompute-activations");
    r.require(
        !r.has(modules) || selective,
        modules,
        "needs --recompute-granularity selective",
    );
    let delayed = r.has("--fp8-format") && matches!(r.text(RECIPE), None | Some("delayed"));
    let again = (r.doc.find(modules).and_then(Node::list)).is_some_and(|list| {
        let named = list.iter().filter_map(Node::text);
        named
            .into_iter()
            .any(|name| ["layernorm", "moe_act"].contains(&name))
    });
    r.require(
        !(delayed && again),
        modules,
        "layernorm and moe_act are not recomputed with --fp8-recipe delayed, the default",
    );
}

fn eight_bits(r: &mut Rules<'_>) {
    let gather = "--fp8-param-gather";
    let sharded = [
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
    ];
    r.require(
        !r.on(gather) || sharded.iter().any(|option| r.on(option)),
        gather,
        "needs --use-distributed-optimizer or FSDP",
    );
    let delayed = matches!(r.text(RECIPE), None | Some("delayed"));
    r.require(
        !(r.on(gather) && r.on(OFFLOAD)) || delayed,
        gather,
        "needs --fp8-recipe delayed beside --optimizer-cpu-offload",
    );
}

fn fsdp(r: &mut Rules<'_>, pp: u64) {
    let torch = "--use-torch-fsdp2";
    if r.on(torch) {
        r.require(pp == 1, torch, "has no pipeline parallelism");
        let ep = r.size_or_one("--expert-model-parallel-size");
        r.require(ep == 1, torch, "has no expert parallelism");
        let untied = r.on("--untie-embeddings-and-output-weights");
        r.require(untied, torch, "needs --untie-embeddings-and-output-weights");
    }
    let megatron = "--use-megatron-fsdp";
    if r.on(megatron) {
        let format = r.text("--ckpt-format") == Some("fsdp_dtensor");
        r.require(format, megatron, "needs --ckpt-format fsdp_dtensor");
    }
    let strategy = "--data-parallel-sharding-strategy";
    r.advise(
        !r.has(strategy) || r.on(megatron),
        strategy,
        format!("has no effect without {megatron}"),
    );
    let instances = "--num-distributed-optimizer-instances";
    let used = r.size(instances).is_some_and(|n| n > 1);
    let sharded = r.on("--use-distributed-optimizer") || r.on(megatron);
    r.require(
        !used || sharded,
        instances,
        "needs --use-distributed-optimizer",
    );
}

fn heads(r: &mut Rules<'_>, tp: u64, model: Option<&ModelConfig>) {
    let heads = r
        .size("--num-attention-heads")
        .or(model.map(|m| m.attention.heads));
    if let Some(heads) = heads {
        r.require(
            heads.is_multiple_of(tp),
            TP,
            format!("{tp} does not divide the {heads} attention heads"),
        );
    }
}

fn layout_rules(r: &mut Rules<'_>, layout: &str, layers: u64, pp: u64) {
    let key = LAYOUT;
    let Some(stages) = crate::import::parse_layout(layout) else {
        r.require(false, key, "is not a layout such as Et*9|t*10|t*11L");
        return;
    };
    let held: u64 = stages.iter().sum();
    r.require(
        held == layers,
        key,
        format!("holds {held} decoder layers; the model has {layers}"),
    );
    let count = stages.len() as u64;
    r.require(
        count.is_multiple_of(pp),
        key,
        format!("has {count} stages, not a multiple of {pp} ranks"),
    );
    let ends = layout.trim().starts_with('E') && layout.trim().ends_with('L');
    r.require(
        ends,
        key,
        "begins with the embedding E and ends with the loss L",
    );
}

pub(super) fn bridge(r: &mut Rules<'_>, model: Option<&ModelConfig>) {
    let tp = r.size_or_one("model.tensor_model_parallel_size");
    let sp = "model.sequence_parallel";
    r.require(
        !r.on(sp) || tp > 1,
        sp,
        "needs tensor_model_parallel_size of at least 2",
    );
    let (sequence, data) = ("model.seq_length", "dataset.seq_length");
    if let (Some(a), Some(b)) = (r.size(sequence), r.size(data)) {
        r.require(a == b, data, format!("{b} is not {sequence} {a}"));
    }
    let gather = "ddp.overlap_param_gather";
    r.require(
        !r.on(gather) || r.on("ddp.use_distributed_optimizer"),
        gather,
        "needs ddp.use_distributed_optimizer",
    );
    let both = r.has("model.virtual_pipeline_model_parallel_size")
        && r.has("model.pipeline_model_parallel_layout");
    r.require(
        !both,
        "model.virtual_pipeline_model_parallel_size",
        "cannot stand beside model.pipeline_model_parallel_layout",
    );
    if let Some(heads) = model.map(|m| m.attention.heads) {
        let key = "model.tensor_model_parallel_size";
        r.require(
            heads.is_multiple_of(tp),
            key,
            format!("{tp} does not divide the {heads} attention heads"),
        );
    }
}
