//! From a published run to a scenario and a strategy, by rules that know no run, model or source.

use catalog::runs::Run;
use catalog::runtime::{AttentionKernel, Rewrite};
use catalog::{CpKind, Precision, Runtime, ScheduleKind, Workload, WorkloadSizes, Zero};
use costmodel::Scenario;
use plans::{Decisions, Recompute, StagePartition, Strategy};

/// A run ready to predict.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) scenario: Scenario,
    pub(crate) strategy: Strategy,
    pub(crate) device_matched: bool,
}

/// Maps a run, or says what is missing.
pub(crate) fn map(run: &Run) -> Result<Mapped, String> {
    out_of_scope(run)?;
    let runtime = runtime(run)?;
    let (cluster, device_matched) = cluster(run)?;
    let precision = precision(run)?;
    let need = |value: Option<u64>, field: &str| {
        run.size(field, value)
            .filter(|&v| v > 0)
            .ok_or_else(|| format!("{field} is not stated"))
    };
    let gpus = need(run.num_gpus, "num_gpus")?;
    let tp = need(run.tp, "tp")?;
    let pp = need(run.pp, "pp")?;
    let cp = run.size("cp", run.cp).unwrap_or(1);
    let seq_len = need(run.seq_len, "seq_len")?;
    let dp = gpus / tp.saturating_mul(pp).saturating_mul(cp).max(1);
    let micro_batch = micro_batch(run, dp)?;
    let global_batch = match run.size("global_batch", run.global_batch) {
        Some(batch) => batch,
        None => run
            .grad_accum
            .ok_or("global_batch is not stated")?
            .saturating_mul(micro_batch)
            .saturating_mul(dp),
    };
    // GPT-3's recipes of the Megatron family train with dropout 0.1 (NeMo `megatron_gpt_config.yaml`).
    let dropout = runtime.name.starts_with("megatron") || runtime.name.starts_with("nemo");
    let model = super::model::build(run, tp, seq_len, dropout)?;
    let workload = Workload::new(WorkloadSizes {
        gpus,
        seq_len,
        global_batch,
        precision,
    })
    .map_err(|e| e.to_string())?;
    let vpp = run.size("vpp", run.vpp).unwrap_or(1);
    let zero = zero(run, dp * cp)?;
    let replicas = run
        .flag("hsdp_replicas")
        .and_then(serde_json::Value::as_u64)
        .unwrap_or(1);
    let replicate = if zero == Zero::Z0 {
        dp
    } else {
        replicas.max(1)
    };
    let mut overlap = runtime.overlap;
    let said = |names: &[&str], habit: bool| {
        let flag = names.iter().find_map(|name| run.flag(name));
        flag.and_then(serde_json::Value::as_bool).unwrap_or(habit)
    };
    overlap.tensor_parallel = said(&["tp_comm_overlap", "async_tp"], overlap.tensor_parallel);
    overlap.grad_reduce = said(
        &["overlap_grad", "overlap_grad_sync", "overlap_grad_reduce"],
        overlap.grad_reduce,
    );
    overlap.param_gather = said(
        &["overlap_param_sync", "overlap_param_gather"],
        overlap.param_gather,
    );
    overlap.pipeline = said(&["overlap_p2p"], overlap.pipeline);
    // Megatron-Core recomputes nothing unless told (`recompute_granularity` is null by default, and in
    // NeMo's scripts/performance/recommended_model_configs).
    let habit = ["nemo", "megatron-core"]
        .contains(&runtime.name.as_str())
        .then_some("none");
    let always = runtime.space.sequence_parallel == catalog::runtime::SequenceParallelUse::Always;
    let decisions = Decisions {
        tp,
        pp,
        vpp,
        cp,
        cp_kind: CpKind::Ring,
        ep: run.size("ep", run.ep).unwrap_or(1),
        etp: run
            .size("etp", run.etp)
            .unwrap_or_else(|| default_etp(run, tp)),
        dp_shard: if zero == Zero::Z0 { 1 } else { dp / replicate },
        dp_replicate: replicate,
        zero,
        // FSDP under a pipeline keeps parameters gathered, or every micro-batch would gather them
        // (torchtitan's default policy).
        reshard_after_forward: zero == Zero::Z3 && !label(run).contains("shard_grad_op") && pp == 1,
        sequence_parallel: tp > 1 && run.sequence_parallel.unwrap_or(always),
        micro_batch,
        num_micro_batches: global_batch / (dp * micro_batch).max(1),
        recompute: recompute(run, model.layers / (pp * vpp).max(1), habit)?,
        schedule: if vpp > 1 {
            ScheduleKind::Interleaved
        } else {
            ScheduleKind::OneFOneB
        },
        axis_order: runtime.space.axis_orders[0],
        stages: StagePartition::even(model.layers, pp * vpp),
        overlap,
    };
    let strategy =
        Strategy::new(decisions, &model, &workload).map_err(|e| format!("strategy: {e}"))?;
    let scenario = Scenario {
        model,
        cluster,
        runtime,
        workload,
        headroom: 0.0,
    };
    Ok(Mapped {
        scenario,
        strategy,
        device_matched,
    })
}

fn label(run: &Run) -> &str {
    run.text("zero", run.zero.as_deref()).unwrap_or("")
}

/// With experts but no word of their tensor parallelism, Megatron splits them like the rest unless
/// expert parallelism takes the ranks.
fn default_etp(run: &Run, tp: u64) -> u64 {
    if run.model.experts.is_some_and(|e| e > 1) && label(run).contains("megatron") {
        tp
    } else {
        1
    }
}

fn out_of_scope(run: &Run) -> Result<(), String> {
    for (flag, what) in [
        ("lora", "LoRA"),
        ("act_offload", "activation offload"),
        ("activation_cpu_offload", "activation offload"),
        ("memory_only", "computed, not measured"),
        ("analytic", "computed, not measured"),
        ("optim_in_bwd", "optimizer in backward"),
        ("adamw8bit", "8-bit optimizer"),
        ("variable_length", "sequences of varying length"),
    ] {
        if run.is_on(flag) {
            return Err(format!("out of scope: {what}"));
        }
    }
    for key in ["method", "task"] {
        let value = run
            .flag(key)
            .and_then(serde_json::Value::as_str)
            .unwrap_or("");
        if value.contains("LoRA") || value.contains("offload") || value.contains("SFT") {
            return Err(format!("out of scope: {value}"));
        }
    }
    Ok(())
}

/// The framework, from what the source says of itself.
pub(crate) fn runtime(run: &Run) -> Result<Runtime, String> {
    let framework = run
        .flag("framework")
        .and_then(serde_json::Value::as_str)
        .unwrap_or("");
    let words = format!(
        "{framework} {} {} {}",
        run.sw_version.as_deref().unwrap_or(""),
        run.source,
        label(run)
    )
    .to_lowercase();
    let compiled =
        run.is_on("compile") || run.precision.as_deref().is_some_and(|p| p.contains("fp8"));
    let selective = run
        .recompute
        .as_deref()
        .is_some_and(|r| r.contains("selective"));
    let has = |word: &str| words.contains(word);
    let name = if has("maxtext") || has("paxml") || has("(jax)") {
        "maxtext"
    } else if has("nemo") {
        "nemo"
    } else if has("torchtitan") {
        if compiled && has("2025") {
            "torchtitan-compile-2025"
        } else if compiled {
            "torchtitan-compile"
        } else {
            "torchtitan"
        }
    } else if has("bigscience") || has("megatron-deepspeed") || has("neox") {
        if run.precision.as_deref() == Some("bf16") {
            "megatron-deepspeed-bf16"
        } else {
            "megatron-deepspeed"
        }
    } else if has("megatron-core") || has("megatron_distopt") {
        "megatron-core"
    } else if has("llm-foundry") || has("mosaic") {
        "fsdp1"
    } else if has("deepspeed") {
        if year(run).is_some_and(|year| year <= 2021) {
            "deepspeed-2021"
        } else {
            "deepspeed"
        }
    } else if model_parallel(run) || has("megatron") {
        // What the source does not name is Megatron's kind of system of its time.
        if modern(run) {
            "megatron-core"
        } else if run.sequence_parallel == Some(true) || selective || has("2205.05198") {
            "megatron-2022"
        } else {
            "megatron-2021"
        }
    } else if has("zero") {
        "deepspeed"
    } else {
        "fsdp2"
    };
    let mut runtime = catalog::load::runtime(name).map_err(|e| e.to_string())?;
    if run.is_on("flash_attention") && runtime.attention == AttentionKernel::Unfused {
        runtime.attention = AttentionKernel::Flash2;
    }
    if run
        .precision
        .as_deref()
        .is_some_and(|p| p.contains("rowwise"))
    {
        runtime.rewrites.remove(&Rewrite::GatherQuantised);
        runtime.rewrites.insert(Rewrite::RowwiseScaling);
    }
    // What the run itself says of its gradients outranks the runtime's habit.
    match run
        .flag("grad_sync_dtype")
        .and_then(serde_json::Value::as_str)
    {
        Some("bf16") => runtime.states.reduce = catalog::DType::Bf16,
        Some("fp32") => {
            runtime.states.reduce = catalog::DType::F32;
            runtime.states.gradient = Some(catalog::DType::F32);
        }
        _ => {}
    }
    // Policies that name the output projection, or every product outside the feed-forward.
    let policy = run.recompute.as_deref().unwrap_or("");
    if policy.contains("out_proj") || policy.contains("save_dot") {
        runtime.rewrites.insert(Rewrite::KeepOutputProjection);
    }
    // Composer's mixed-precision modes: DEFAULT reduces gradients in 32 bits, PURE in the training type.
    match run
        .flag("fsdp_mixed_precision_mode")
        .and_then(serde_json::Value::as_str)
    {
        Some("DEFAULT") => runtime.states.reduce = catalog::DType::F32,
        Some("PURE") => runtime.states.reduce = catalog::DType::Bf16,
        _ => {}
    }
    Ok(runtime)
}

/// Whether layers are split over devices.
fn model_parallel(run: &Run) -> bool {
    [run.tp, run.pp, run.ep, run.cp]
        .iter()
        .any(|size| size.is_some_and(|n| n > 1))
}

/// The year that a run states.
fn year(run: &Run) -> Option<u32> {
    run.date.as_deref()?.get(..4)?.parse().ok()
}

/// Whether a run is of the years of fused attention: its date, its device, its precision or its
/// model says so.
fn modern(run: &Run) -> bool {
    let gpu = run.gpu.as_deref().unwrap_or("").to_lowercase();
    let precision = run.precision.as_deref().unwrap_or("");
    let grouped = run.model.kv_heads.zip(run.model.heads);
    year(run).is_some_and(|year| year >= 2023)
        || !(gpu.contains("a100") || gpu.contains("v100"))
        || precision.contains("fp8")
        || grouped.is_some_and(|(kv, heads)| kv < heads)
        || run.model.experts.is_some_and(|experts| experts > 1)
}

/// The cluster preset that the words of the GPU name.
fn cluster(run: &Run) -> Result<(catalog::Cluster, bool), String> {
    let gpu = run
        .text("gpu", run.gpu.as_deref())
        .ok_or("gpu is not stated")?
        .to_lowercase();
    let has = |word: &str| gpu.contains(word);
    let (name, matched) = if has("jean zay") {
        ("jean-zay-a100", true)
    } else if has("gb200") {
        ("gb200-nvl72", true)
    } else if has("gb300") {
        ("gb300-nvl72", true)
    } else if has("b200") {
        ("dgx-b200", true)
    } else if has("b300") {
        ("dgx-b300", true)
    } else if has("h200") {
        ("dgx-h200", true)
    } else if has("h800") {
        ("h800", true)
    } else if has("h100") && (has("96gb") || has("94") || has("95gb") || has("hbm2e")) {
        ("grand-teton-96gb", true)
    } else if has("h100") {
        ("dgx-h100", true)
    } else if has("a100") && has("40gb") && !has("80gb") {
        ("dgx-a100-40gb", true)
    } else if has("a100") {
        ("dgx-a100", true)
    } else if has("v100") {
        ("dgx2-v100", true)
    } else if has("mi300") {
        ("mi300x", true)
    } else if has("4090") {
        ("rtx-4090-node", true)
    } else if has("a6000") {
        ("rtx-a6000-node", true)
    } else if has("l40s") {
        ("l40s-node", true)
    } else {
        return Err(format!("gpu `{gpu}` is not recognised"));
    };
    let mut cluster = catalog::load::cluster(name).map_err(|e| e.to_string())?;
    if let Some(node) = run
        .size("gpus_per_node", run.gpus_per_node)
        .filter(|&n| n > 0)
        && cluster.scale_up_domain == cluster.gpus_per_node
    {
        cluster.gpus_per_node = node;
        cluster.scale_up_domain = node;
    }
    Ok((cluster, matched))
}

fn precision(run: &Run) -> Result<Precision, String> {
    let label = run
        .text("precision", run.precision.as_deref())
        .ok_or("precision is not stated")?;
    let label = label.to_lowercase();
    if label.contains("fp8") || label.contains("mxfp8") {
        Ok(Precision::Fp8)
    } else if label.contains("fp4") {
        Err("out of scope: 4-bit products".to_owned())
    } else if label.contains("bf16") {
        Ok(Precision::Bf16)
    } else if label.contains("fp16") || label.contains("16-mixed") {
        Ok(Precision::Fp16)
    } else if label.contains("32") {
        Ok(Precision::Fp32)
    } else {
        Err(format!("precision `{label}` is not recognised"))
    }
}

fn micro_batch(run: &Run, dp: u64) -> Result<u64, String> {
    if let Some(batch) = run.size("micro_batch", run.micro_batch).filter(|&b| b > 0) {
        return Ok(batch);
    }
    match (run.global_batch, run.grad_accum) {
        (Some(global), Some(steps)) if dp * steps > 0 && global.is_multiple_of(dp * steps) => {
            Ok(global / (dp * steps))
        }
        _ => Err("micro_batch is not stated".to_owned()),
    }
}

fn zero(run: &Run, shared: u64) -> Result<Zero, String> {
    let label = label(run).to_lowercase();
    if shared == 1 {
        return Ok(Zero::Z0);
    }
    if label.contains("zero3")
        || label.contains("full_shard")
        || label.contains("fsdp")
        || label.contains("hsdp")
    {
        Ok(Zero::Z3)
    } else if label.contains("zero2") {
        Ok(Zero::Z2)
    } else if label.contains("zero1") || label.contains("distopt") {
        Ok(Zero::Z1)
    } else if label.contains("none") || label.contains("ddp") || label.contains("zero0") {
        Ok(Zero::Z0)
    } else {
        Err("zero is not stated".to_owned())
    }
}

fn recompute(run: &Run, per_stage: u64, habit: Option<&str>) -> Result<Recompute, String> {
    let label = run
        .text("recompute", run.recompute.as_deref())
        .or(habit)
        .ok_or("recompute is not stated")?;
    let label = label.to_lowercase();
    if label == "none" {
        Ok(Recompute::None)
    } else if label.contains("every 2nd") {
        Ok(Recompute::Layers(per_stage / 2))
    } else if let Some(layers) = label.strip_prefix("block:") {
        let digits: String = layers.chars().take_while(char::is_ascii_digit).collect();
        digits
            .parse()
            .map(Recompute::Layers)
            .map_err(|_| format!("recompute `{label}`"))
    } else if label.contains("(op)") || label.contains("save") || label.contains("custom") {
        Ok(Recompute::SelectiveOps)
    } else if label.contains("selective") {
        Ok(Recompute::Selective)
    } else if label.contains("full") {
        Ok(Recompute::Full)
    } else {
        Err(format!("recompute `{label}` is not recognised"))
    }
}
