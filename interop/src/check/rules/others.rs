//! Rules of DeepSpeed, accelerate, axolotl, Hugging Face's Trainer and nanotron.

use super::collector::{Rules, times};
use crate::config::Node;

pub(super) fn deepspeed(r: &mut Rules<'_>) {
    let (global, micro) = ("train_batch_size", "train_micro_batch_size_per_gpu");
    let accumulate = "gradient_accumulation_steps";
    if let (Some(g), Some(m), Some(a)) = (r.size(global), r.size(micro), r.size(accumulate)) {
        r.require(m > 0 && a > 0 && g.is_multiple_of(times(&[m, a])), global, format!("{g} is not a multiple of {micro} {m} · {accumulate} {a}; the rest is the data-parallel size"));
    }
    let both = r.on("bf16.enabled") && r.on("fp16.enabled");
    r.require(
        !both,
        "fp16.enabled",
        "cannot be combined with bf16.enabled",
    );
    let stage = "zero_optimization.stage";
    let level = r.size(stage).unwrap_or(0);
    let held = "data_types.grad_accum_dtype";
    if let Some(own) = ["bf16", "fp16"]
        .into_iter()
        .find(|own| r.on(&format!("{own}.enabled")))
    {
        // runtime/engine.py, `_do_optimizer_sanity_check`.
        let fits = level > 0 || r.text(held).is_none_or(|name| name == own);
        r.require(
            fits,
            held,
            format!(
                "must be {own} at {stage} 0: without ZeRO, gradients have the type of the weights"
            ),
        );
    }
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
        r.advise(false, &key, format!("has no effect at {stage} {level}"));
    }
}

pub(super) fn accelerate(r: &mut Rules<'_>) {
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
    r.advise(
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
            r.advise(
                !r.has(&key),
                &key,
                "is an option of FSDP1, which fsdp_version 2 ignores",
            );
        }
    }
}

pub(super) fn axolotl(r: &mut Rules<'_>) {
    context_parallelism(r);
    let both = r.has("fsdp_config") && r.has("deepspeed");
    r.require(!both, "deepspeed", "cannot be combined with fsdp_config");
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
    r.require(
        r.size_or_one("dp_shard_size") == 1 || r.has("fsdp_config"),
        "dp_shard_size",
        "needs fsdp_config",
    );
    let half = r.on("bf16") && r.on("fp16");
    r.require(!half, "fp16", "cannot be combined with bf16");
    let rate = "learning_rate";
    r.require(r.has(rate), rate, "is missing, and has no default");
    let version = ["fsdp_version", "fsdp_config.fsdp_version"];
    let second = version.iter().any(|key| r.size(key) == Some(2));
    eight_bit_moments(r, "optimizer", second && r.has("fsdp_config"));
}

fn context_parallelism(r: &mut Rules<'_>) {
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
    // monkeypatch/ring_attn/patch.py: only varlen_llama3 reads where packed documents begin.
    let (own, other) = match packed {
        true => ("varlen_llama3", "batch_ring"),
        false => ("batch_ring", "varlen_llama3"),
    };
    let ring = "ring_attn_func";
    r.require(
        cp == 1 || r.text(ring) != Some(other),
        ring,
        format!("{other} is wrong with sample_packing {packed}; use {own}"),
    );
    let single = r.size("micro_batch_size").is_none_or(|n| n == 1);
    r.require(
        !packed || single,
        "micro_batch_size",
        "must be 1 with sample_packing and context_parallel_size",
    );
    r.require(
        cp == 1 || r.has("fsdp_config") || r.has("deepspeed"),
        key,
        "needs fsdp_config or deepspeed",
    );
}

/// Refuses bitsandbytes' 8-bit Adam under FSDP2's DTensors (axolotl, utils/schemas/validation.py).
fn eight_bit_moments(r: &mut Rules<'_>, key: &str, fsdp2: bool) {
    let names = ["adamw_8bit", "adamw_bnb_8bit"];
    let fits = !fsdp2 || r.text(key).is_none_or(|name| !names.contains(&name));
    r.require(fits, key, "does not run under FSDP2; use adamw_torch_8bit");
}

pub(super) fn trainer(r: &mut Rules<'_>) {
    let half = r.on("bf16") && r.on("fp16");
    r.require(!half, "fp16", "cannot be combined with bf16");
    let fsdp = r.has("fsdp") && !matches!(r.doc.flag("fsdp"), Ok(Some(false)));
    let fsdp = fsdp && r.text("fsdp") != Some("");
    // A launcher's configuration file may switch it on.
    let launched = r.text("distributed_type") == Some("FSDP");
    r.require(
        !fsdp || !r.has("deepspeed"),
        "deepspeed",
        "cannot be combined with fsdp",
    );
    let fsdp = fsdp || launched;
    r.advise(
        fsdp || !r.has("fsdp_config"),
        "fsdp_config",
        "has no effect without fsdp",
    );
    let first = ["version", "fsdp_version"].map(|key| r.size(&format!("fsdp_config.{key}")));
    eight_bit_moments(r, "optim", fsdp && !first.contains(&Some(1)));
    // The Trainer refuses a DeepSpeed value that differs from its own; `auto` takes its own.
    for (own, engine) in [
        (
            "per_device_train_batch_size",
            "deepspeed.train_micro_batch_size_per_gpu",
        ),
        (
            "gradient_accumulation_steps",
            "deepspeed.gradient_accumulation_steps",
        ),
    ] {
        if let (Some(ours), Some(theirs)) = (r.size(own), r.size(engine)) {
            r.require(
                ours == theirs,
                engine,
                format!("{theirs} is not {own} {ours}; give both the same, or auto"),
            );
        }
    }
    let both = r.on("gradient_checkpointing") && r.on("fsdp_config.activation_checkpointing");
    r.require(
        !both,
        "gradient_checkpointing",
        "cannot be combined with fsdp_config.activation_checkpointing",
    );
}

pub(super) fn nanotron(r: &mut Rules<'_>) {
    let key = "parallelism.tp";
    let tp = r.size_or_one(key);
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
        r.divides(tp, key, heads, "attention");
    }
}
