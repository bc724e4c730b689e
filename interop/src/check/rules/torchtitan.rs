//! Rules of torchtitan: what its configuration classes and `ParallelDims` assert.

use catalog::model::ModelConfig;

use super::collector::{Rules, times};
use crate::config::Node;
use crate::export::Dialect;

pub(super) fn torchtitan(r: &mut Rules<'_>, model: Option<&ModelConfig>) {
    let axis = |name: &str| format!("parallelism.{name}");
    let (tp, pp) = (
        axis("tensor_parallel_degree"),
        axis("pipeline_parallel_degree"),
    );
    let (t, p) = (r.size_or_one(&tp), r.size_or_one(&pp));
    if let Some(kv) = model.map(|m| m.attention.kv_heads()) {
        r.divides(t, &tp, kv, "key/value");
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
    experts(r, t);
    async_tensor_parallel(r);
    if r.text("activation_checkpoint.mode") == Some("memory_budget") {
        r.require(
            r.on("compile.enable"),
            "activation_checkpoint.mode",
            "memory_budget needs compile.enable",
        );
    }
}

fn experts(r: &mut Rules<'_>, tp: u64) {
    let axis = |name: &str| format!("parallelism.{name}");
    let ep = r.size_or_one(&axis("expert_parallel_degree"));
    let etp = r.size(&axis("expert_tensor_parallel_degree")).unwrap_or(1);
    if r.doc.dialect == Dialect::Torchtitan02 {
        let key = axis("expert_tensor_parallel_degree");
        r.require(
            ep == 1 || etp == tp || etp == 1,
            &key,
            format!("{etp} is neither 1 nor tp = {tp}"),
        );
    }
    if let Some(shard) = r.size(&axis("data_parallel_shard_degree")) {
        let cp = r.size_or_one(&axis("context_parallel_degree"));
        let inner = times(&[shard, cp, tp]);
        let key = axis("expert_parallel_degree");
        r.require(
            inner.is_multiple_of(ep),
            &key,
            format!("{ep} does not divide dp_shard·cp·tp = {inner}"),
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
