//! The runtime of a published run: named by what its source says of itself, then changed where the run says
//! otherwise.

use catalog::runs::Run;
use catalog::runtime::{AttentionKernel, Rewrite};
use catalog::{DType, Runtime};

/// The runtime, as the run used it.
pub(super) fn runtime(run: &Run) -> Result<Runtime, String> {
    let mut runtime = catalog::load::runtime(name(run)).map_err(|e| e.to_string())?;
    apply_statements(run, &mut runtime);
    Ok(runtime)
}

/// What a run says of how it shards states.
pub(super) fn sharding(run: &Run) -> &str {
    run.text("zero", run.zero.as_deref()).unwrap_or("")
}

fn text_flag<'a>(run: &'a Run, name: &str) -> Option<&'a str> {
    run.flag(name).and_then(serde_json::Value::as_str)
}

/// The preset that the words of the source name.
fn name(run: &Run) -> &'static str {
    let words = format!(
        "{} {} {} {}",
        text_flag(run, "framework").unwrap_or(""),
        run.sw_version.as_deref().unwrap_or(""),
        run.source,
        sharding(run)
    )
    .to_lowercase();
    let compiled =
        run.is_on("compile") || run.precision.as_deref().is_some_and(|p| p.contains("fp8"));
    let has = |word: &str| words.contains(word);
    if has("maxtext") || has("paxml") || has("(jax)") {
        "maxtext"
    } else if has("nemo") {
        "nemo"
    } else if has("torchtitan") {
        match compiled {
            true if has("2025") => "torchtitan-compile-2025",
            true => "torchtitan-compile",
            false => "torchtitan",
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
        megatron_of_its_time(run, has("2205.05198"))
    } else if has("zero") {
        "deepspeed"
    } else {
        "fsdp2"
    }
}

/// What the source does not name is Megatron's kind of system of its time; `selective` says that it cites the
/// paper on selective recomputation.
fn megatron_of_its_time(run: &Run, selective: bool) -> &'static str {
    let recompute = run.recompute.as_deref();
    let selective = selective || recompute.is_some_and(|r| r.contains("selective"));
    if modern(run) {
        "megatron-core"
    } else if run.sequence_parallel == Some(true) || selective {
        "megatron-2022"
    } else {
        "megatron-2021"
    }
}

/// What the run itself says outranks the runtime's habit.
fn apply_statements(run: &Run, runtime: &mut Runtime) {
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
    match text_flag(run, "grad_sync_dtype") {
        Some("bf16") => runtime.states.reduce = DType::Bf16,
        Some("fp32") => {
            runtime.states.reduce = DType::F32;
            runtime.states.gradient = Some(DType::F32);
        }
        _ => {}
    }
    // Policies that name the output projection, or every product outside the feed-forward.
    let policy = run.recompute.as_deref().unwrap_or("");
    if policy.contains("out_proj") || policy.contains("save_dot") {
        runtime.rewrites.insert(Rewrite::KeepOutputProjection);
    }
    // Composer's mixed-precision modes: DEFAULT reduces gradients in 32 bits, PURE in the training type.
    match text_flag(run, "fsdp_mixed_precision_mode") {
        Some("DEFAULT") => runtime.states.reduce = DType::F32,
        Some("PURE") => runtime.states.reduce = DType::Bf16,
        _ => {}
    }
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
