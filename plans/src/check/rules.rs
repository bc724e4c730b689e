//! Keys that contradict each other, system by system: what their own parsers assert, and what only
//! shows when the ranks have started.

use spec::model::ModelConfig;

use super::Finding;
use crate::config::{Node, Value};
use crate::export::Dialect;
use crate::import::Document;

/// Findings of one document, collected.
struct Rules<'a> {
    doc: &'a Document,
    findings: &'a mut Vec<Finding>,
}

pub(super) fn contradictions(
    doc: &Document,
    model: Option<&ModelConfig>,
    findings: &mut Vec<Finding>,
) {
    let mut rules = Rules { doc, findings };
    match doc.dialect {
        Dialect::MegatronLm => megatron(&mut rules, model),
        Dialect::Torchtitan02 | Dialect::Torchtitan03 | Dialect::TorchtitanMain => {
            torchtitan(&mut rules, model);
        }
        Dialect::DeepSpeed => deepspeed(&mut rules),
        Dialect::Accelerate => accelerate(&mut rules),
        Dialect::Axolotl => axolotl(&mut rules),
        Dialect::Nanotron => nanotron(&mut rules),
        Dialect::MegatronBridge => bridge(&mut rules, model),
        Dialect::VeScale => {}
    }
}

impl Rules<'_> {
    fn size(&self, key: &str) -> Option<u64> {
        // What is of the wrong kind was found already.
        self.doc.size(key).ok().flatten()
    }

    fn size_or_one(&self, key: &str) -> u64 {
        self.size(key).unwrap_or(1).max(1)
    }

    fn on(&self, key: &str) -> bool {
        self.doc.flag(key).ok().flatten() == Some(true)
    }

    fn has(&self, key: &str) -> bool {
        self.doc
            .find(key)
            .is_some_and(|node| node.value != Value::Null)
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.doc.text(key).ok().flatten()
    }

    fn require(&mut self, holds: bool, key: &str, message: impl Into<String>) {
        if !holds {
            self.findings.push(Finding {
                path: self.doc.path.clone(),
                line: self.doc.find(key).map_or(0, |node| node.line),
                key: key.to_owned(),
                message: message.into(),
            });
        }
    }
}

/// A product that does not overflow: nonsense sizes are found as such.
fn times(sizes: &[u64]) -> u64 {
    sizes.iter().fold(1, |all, &size| all.saturating_mul(size))
}

fn megatron(r: &mut Rules<'_>, model: Option<&ModelConfig>) {
    let (tp, pp, cp) = (
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--context-parallel-size",
    );
    let (t, p, c) = (r.size_or_one(tp), r.size_or_one(pp), r.size_or_one(cp));
    let sp = "--sequence-parallel";
    r.require(
        !r.on(sp) || t > 1,
        sp,
        format!("has no effect without {tp} of at least 2; Megatron-LM switches it off"),
    );
    let experts = r.has("--num-experts");
    r.require(
        !experts || t == 1 || r.on(sp),
        tp,
        format!("experts with tensor parallelism need {sp}"),
    );
    let virtual_stages = [
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
        "--pipeline-model-parallel-layout",
    ];
    let given: Vec<&str> = virtual_stages.into_iter().filter(|k| r.has(k)).collect();
    if let [first, rest @ ..] = given.as_slice() {
        for key in rest {
            r.require(
                false,
                key,
                format!("cannot stand beside {first}; one of them says the stages"),
            );
        }
        r.require(p > 1, first, format!("needs {pp} of at least 2"));
    }
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
    let overlap = "--tp-comm-overlap";
    r.require(!r.on(overlap) || r.on(sp), overlap, format!("needs {sp}"));
    for key in [
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
    ] {
        let used = r.size(key).is_some_and(|n| n > 1);
        r.require(!used || experts, key, "needs a model with --num-experts");
    }
    recomputation(r);
    fsdp(r, p);
    heads(r, t, model);
    let layers = r.size("--num-layers").or(model.map(|m| m.layers));
    let stated = given.is_empty()
        && !r.has("--decoder-first-pipeline-num-layers")
        && !r.has("--decoder-last-pipeline-num-layers")
        && !r.on("--account-for-embedding-in-pipeline-split")
        && !r.on("--account-for-loss-in-pipeline-split")
        && !r.has("--hybrid-layer-pattern");
    if let Some(layers) = layers.filter(|_| stated) {
        r.require(layers.is_multiple_of(p), pp, format!("{layers} layers do not divide into {p} stages; give --pipeline-model-parallel-layout"));
    }
    let layout = r
        .text("--pipeline-model-parallel-layout")
        .map(str::to_owned);
    if let (Some(layers), Some(layout)) = (layers, layout) {
        layout_rules(r, &layout, layers, p);
    }
    if r.on("--no-overlap-p2p-communication") && p == 2 && !given.is_empty() {
        r.require(
            false,
            "--no-overlap-p2p-communication",
            "interleaving over 2 ranks needs overlapped sends and receives",
        );
    }
    let sequence = r.size("--seq-length");
    if let Some(s) = sequence.filter(|_| c > 1) {
        r.require(
            s.is_multiple_of(times(&[2, c])),
            "--seq-length",
            format!("{s} is not a multiple of 2·cp = {}", times(&[2, c])),
        );
    }
    if let (Some(s), Some(most)) = (sequence, r.size("--max-position-embeddings")) {
        r.require(
            s <= most,
            "--seq-length",
            format!("{s} is above --max-position-embeddings {most}"),
        );
    }
    let both = r.on("--bf16") && r.on("--fp16");
    r.require(!both, "--fp16", "cannot stand beside --bf16");
    r.require(
        !r.has("--fp8-format") || !r.has("--fp4-format"),
        "--fp4-format",
        "cannot stand beside --fp8-format",
    );
    batch_of_megatron(r, times(&[t, p, c]));
}

fn batch_of_megatron(r: &mut Rules<'_>, model_parallel: u64) {
    let (micro, global) = (r.size("--micro-batch-size"), r.size("--global-batch-size"));
    let Some(gpus) = r.doc.gpus else { return };
    let key = "--tensor-model-parallel-size";
    r.require(
        gpus.is_multiple_of(model_parallel),
        key,
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
    r.require(
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
        let key = "--tensor-model-parallel-size";
        r.require(
            heads.is_multiple_of(tp),
            key,
            format!("{tp} does not divide the {heads} attention heads"),
        );
    }
}

fn layout_rules(r: &mut Rules<'_>, layout: &str, layers: u64, pp: u64) {
    let key = "--pipeline-model-parallel-layout";
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

fn torchtitan(r: &mut Rules<'_>, model: Option<&ModelConfig>) {
    let axis = |name: &str| format!("parallelism.{name}");
    let (tp, pp) = (
        axis("tensor_parallel_degree"),
        axis("pipeline_parallel_degree"),
    );
    let (t, p) = (r.size_or_one(&tp), r.size_or_one(&pp));
    if let Some(kv) = model.map(|m| m.attention.kv_heads()) {
        r.require(
            kv.is_multiple_of(t),
            &tp,
            format!("{t} does not divide the {kv} key/value heads"),
        );
    }
    let graphs = "training.disable_cuda_graphs";
    if r.doc.dialect != Dialect::Torchtitan02 {
        r.require(
            p == 1 || r.on(graphs),
            &pp,
            format!("{p} needs {graphs} = True: CUDA graphs do not do pipeline parallelism"),
        );
    }
    titan_batch(r, p);
    let parts = axis("module_fqns_per_model_part");
    if let Some(list) = r.doc.find(&parts).and_then(Node::list) {
        let count = list.len() as u64;
        r.require(
            count.is_multiple_of(p),
            &parts,
            format!("has {count} parts, not a multiple of {p} ranks"),
        );
    }
    let ep = r.size_or_one(&axis("expert_parallel_degree"));
    let etp = r.size(&axis("expert_tensor_parallel_degree")).unwrap_or(1);
    if r.doc.dialect == Dialect::Torchtitan02 {
        let key = axis("expert_tensor_parallel_degree");
        r.require(
            ep == 1 || etp == t || etp == 1,
            &key,
            format!("{etp} is neither 1 nor tp = {t}"),
        );
    }
    if let Some(shard) = r.size(&axis("data_parallel_shard_degree")) {
        let cp = r.size_or_one(&axis("context_parallel_degree"));
        let inner = times(&[shard, cp, t]);
        let key = axis("expert_parallel_degree");
        r.require(
            inner.is_multiple_of(ep),
            &key,
            format!("{ep} does not divide dp_shard·cp·tp = {inner}"),
        );
    }
    async_tensor_parallel(r);
    if r.text("activation_checkpoint.mode") == Some("memory_budget") {
        r.require(
            r.on("compile.enable"),
            "activation_checkpoint.mode",
            "memory_budget needs compile.enable",
        );
    }
}

fn async_tensor_parallel(r: &mut Rules<'_>) {
    let key = if r.doc.dialect == Dialect::Torchtitan02 {
        "parallelism.enable_async_tensor_parallel"
    } else {
        "compile.enable_async_tensor_parallel"
    };
    if r.on(key) {
        let components = r.doc.find("compile.components").and_then(Node::list);
        let model = components.is_none_or(|list| list.iter().any(|c| c.text() == Some("model")));
        r.require(
            r.on("compile.enable") && model,
            key,
            "needs compile.enable with `model` in compile.components",
        );
    }
}

fn titan_batch(r: &mut Rules<'_>, pp: u64) {
    let micro = "parallelism.pipeline_parallel_microbatch_size";
    let local = r.size("training.local_batch_size");
    if let (Some(local), Some(size)) = (local, r.size(micro).filter(|_| pp > 1)) {
        r.require(
            size > 0 && local.is_multiple_of(size),
            micro,
            format!("{size} does not divide training.local_batch_size {local}"),
        );
    }
    let (replicate, shard) = (
        "parallelism.data_parallel_replicate_degree",
        "parallelism.data_parallel_shard_degree",
    );
    let Some(shard) = r.size(shard) else { return };
    let dp = times(&[shard, r.size_or_one(replicate)]);
    let global = "training.global_batch_size";
    if let (Some(local), Some(all)) = (local, r.size(global)) {
        let each = times(&[local, dp]);
        r.require(
            each > 0 && all.is_multiple_of(each),
            global,
            format!("{all} is not a multiple of local batch · dp = {each}"),
        );
    }
}

fn deepspeed(r: &mut Rules<'_>) {
    let (global, micro) = ("train_batch_size", "train_micro_batch_size_per_gpu");
    let accumulate = "gradient_accumulation_steps";
    if let (Some(g), Some(m), Some(a)) = (r.size(global), r.size(micro), r.size(accumulate)) {
        r.require(m > 0 && a > 0 && g.is_multiple_of(times(&[m, a])), global, format!("{g} is not a multiple of {micro} {m} · {accumulate} {a}; the rest is the data-parallel size"));
    }
    let both = r.on("bf16.enabled") && r.on("fp16.enabled");
    r.require(!both, "fp16.enabled", "cannot stand beside bf16.enabled");
    let stage = "zero_optimization.stage";
    let level = r.size(stage).unwrap_or(0);
    let parameters = "zero_optimization.offload_param";
    r.require(
        !r.has(parameters) || level == 3,
        parameters,
        format!("needs {stage} 3, not {level}"),
    );
    let optimizer = "zero_optimization.offload_optimizer";
    r.require(
        !r.has(optimizer) || level > 0,
        optimizer,
        format!("needs {stage} of at least 1"),
    );
    let section = r.doc.find("zero_optimization");
    let of_third = |(key, _): &&(String, Node)| key.starts_with("stage3_") && level != 3;
    for (key, _) in section
        .map_or(&[][..], Node::entries)
        .iter()
        .filter(of_third)
    {
        let key = format!("zero_optimization.{key}");
        r.require(false, &key, format!("has no effect at {stage} {level}"));
    }
}

fn accelerate(r: &mut Rules<'_>) {
    let axis = |name: &str| format!("parallelism_config.parallelism_config_{name}_size");
    let sizes: Vec<u64> = ["dp_replicate", "dp_shard", "tp", "cp", "sp"]
        .into_iter()
        .map(|name| r.size_or_one(&axis(name)))
        .collect();
    let product = times(&sizes);
    if let Some(processes) = r
        .size("num_processes")
        .filter(|_| r.has("parallelism_config"))
    {
        r.require(
            product == processes,
            "num_processes",
            format!("{processes} is not the product of the parallel sizes, {product}"),
        );
    }
    let kind = r.text("distributed_type").map(str::to_owned);
    let fsdp = kind.as_deref() == Some("FSDP");
    let section = r.doc.find("fsdp_config");
    let filled = section.is_some_and(|node| !node.entries().is_empty());
    r.require(
        !filled || fsdp,
        "fsdp_config",
        "has no effect unless distributed_type is FSDP",
    );
    r.require(
        sizes[3] == 1 || r.size("fsdp_config.fsdp_version") == Some(2),
        &axis("cp"),
        "context parallelism needs fsdp_version 2",
    );
    let lone = sizes[0] > 1 && sizes[1] == 1 && sizes[2] > 1;
    r.require(
        !lone,
        &axis("dp_replicate"),
        "replicated data parallelism with tensor parallelism needs dp_shard of at least 2",
    );
    if r.size("fsdp_config.fsdp_version") == Some(2) {
        for key in [
            "sharding_strategy",
            "backward_prefetch",
            "forward_prefetch",
            "use_orig_params",
            "sync_module_states",
        ] {
            let key = format!("fsdp_config.fsdp_{key}");
            r.require(
                !r.has(&key),
                &key,
                "is of FSDP1; with fsdp_version 2 it is dropped",
            );
        }
    }
}

fn axolotl(r: &mut Rules<'_>) {
    let cp = r.size_or_one("context_parallel_size");
    let chosen = r.text("attn_implementation");
    let flash = r.on("flash_attention") || chosen.is_some_and(|a| a.contains("flash_attention_2"));
    let key = "context_parallel_size";
    r.require(
        cp == 1 || flash,
        key,
        "ring attention needs attn_implementation: flash_attention_2",
    );
    let packed = cp > 1 && r.on("sample_packing");
    let single = r.size("micro_batch_size").is_none_or(|n| n == 1);
    r.require(
        !packed || single,
        "micro_batch_size",
        "must be 1 with sample_packing and context_parallel_size",
    );
    let both = r.has("fsdp_config") && r.has("deepspeed");
    r.require(!both, "deepspeed", "cannot stand beside fsdp_config");
    let ep = r.size_or_one("expert_parallel_size");
    let plugin = r
        .doc
        .find("plugins")
        .and_then(Node::list)
        .is_some_and(|plugins| {
            plugins
                .iter()
                .any(|p| p.text().is_some_and(|p| p.contains("ExpertParallelPlugin")))
        });
    r.require(
        ep == 1 || plugin,
        "expert_parallel_size",
        "needs axolotl.integrations.expert_parallel.ExpertParallelPlugin in plugins",
    );
    let sharded = r.size_or_one("dp_shard_size") > 1 || cp > 1;
    r.require(
        !sharded || r.has("fsdp_config"),
        "dp_shard_size",
        "needs fsdp_config",
    );
    let half = r.on("bf16") && r.on("fp16");
    r.require(!half, "fp16", "cannot stand beside bf16");
}

fn nanotron(r: &mut Rules<'_>) {
    let tp = r.size_or_one("parallelism.tp");
    let mode = "parallelism.tp_mode";
    let linear = "parallelism.tp_linear_async_communication";
    let scatter = r
        .text(mode)
        .is_some_and(|m| m.eq_ignore_ascii_case("REDUCE_SCATTER"));
    r.require(
        !r.on(linear) || scatter,
        linear,
        "needs tp_mode REDUCE_SCATTER",
    );
    let heads = r.size("model.model_config.num_attention_heads");
    if let Some(heads) = heads {
        r.require(
            heads.is_multiple_of(tp),
            "parallelism.tp",
            format!("{tp} does not divide the {heads} attention heads"),
        );
    }
}

fn bridge(r: &mut Rules<'_>, model: Option<&ModelConfig>) {
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
