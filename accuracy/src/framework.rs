//! The runtime of a published run: its framework's preset, changed where the run says otherwise.

use catalog::runs::{Framework, Recipe, Run};
use catalog::runtime::{AttentionKernel, Rewrite};
use catalog::{
    CudaGraphs, DType, Dispatcher, Fp8Recipe, Origin, RecomputeModule, Runtime, Seconds, Selection,
    Sourced,
};
use serde_json::Value;

/// The runtime as the run used it, and whether the run or its source names its framework.
pub(super) fn runtime(run: &Run) -> Result<(Runtime, bool), String> {
    let framework = Framework::of(run);
    let name = framework.map_or_else(|| unnamed(run), |f| preset_of(run, &f.runtime));
    let mut runtime = catalog::load::runtime(name).map_err(|e| e.to_string())?;
    for rewrite in framework.iter().flat_map(|f| &f.without) {
        runtime.rewrites.remove(rewrite);
    }
    apply_statements(run, &mut runtime);
    if pytorch(run).is_some_and(|version| version < (2, 1)) {
        // `torch.utils.checkpoint` stops after the last tensor that backward needs since 2.1 (`set_checkpoint_early_stop`).
        runtime.rewrites.remove(&Rewrite::EarlyStopRecompute);
    }
    if let Some(recipe) = Recipe::of(run) {
        runtime.rewrites.extend(recipe.rewrites.iter().copied());
        for rewrite in &recipe.without {
            runtime.rewrites.remove(rewrite);
        }
        if let Some(optimizer) = recipe.optimizer {
            let overheads = &mut runtime.overheads;
            let measured = |us: f64| of_recipe(recipe, Origin::Measured, Seconds(us * 1e-6));
            overheads.optimizer_bytes = of_recipe(recipe, Origin::Published, optimizer.bytes);
            overheads.optimizer_tensor = measured(optimizer.tensor_us);
            overheads.whole_gradient = measured(optimizer.whole_gradient_us);
        }
    }
    if let Some(modules) = modules(run)? {
        runtime.selective = modules;
    }
    Ok((runtime, framework.is_some()))
}

/// Turns a number that a recipe states into a sourced number. The recipe's reason says where the number comes from.
fn of_recipe<T>(recipe: &Recipe, origin: Origin, value: T) -> Sourced<T> {
    Sourced {
        value,
        origin,
        source: recipe.reason.clone(),
    }
}

/// Major and minor version of the PyTorch that a run names, or that the recipes of its source pin.
fn pytorch(run: &Run) -> Option<(u32, u32)> {
    let pinned = || Recipe::of(run)?.software.as_deref();
    let software = run.sw_version.as_deref().or_else(pinned)?;
    let (_, version) = software.split_once("PyTorch ")?;
    let mut numbers = version.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// What a run recomputes, in the words of its row; of its recipe, if the row has none.
pub(super) fn recompute(run: &Run) -> Option<&str> {
    run.text("recompute", run.recompute.as_deref())
        .or_else(|| Recipe::of(run)?.recompute.as_deref())
}

/// The modules that a run recomputes, if it lists them as `selective:layernorm,moe_act`.
fn modules(run: &Run) -> Result<Option<Selection>, String> {
    let label = recompute(run).unwrap_or("");
    let Some(list) = label.strip_prefix("selective:") else {
        return Ok(None);
    };
    let module = |name: &str| {
        let name = name.trim();
        RecomputeModule::of_megatron(name)
            .ok_or_else(|| format!("out of scope: recomputation of the module `{name}`"))
    };
    list.split(',')
        .map(module)
        .collect::<Result<_, _>>()
        .map(Some)
}

/// A run's text about how it shards states; empty if it has none.
pub(super) fn sharding(run: &Run) -> &str {
    run.text("zero", run.zero.as_deref()).unwrap_or("")
}

/// Picks the preset of a framework that has several, by the run's year, precision, compilation and software.
fn preset_of<'a>(run: &Run, runtime: &'a str) -> &'a str {
    let compiled =
        run.is_on("compile") || run.precision.as_deref().is_some_and(|p| p.contains("fp8"));
    let late = year(run).is_some_and(|year| year >= 2025)
        || run
            .sw_version
            .as_deref()
            .is_some_and(|v| v.contains("2025"));
    match runtime {
        "torchtitan" if compiled && ran_torchtitan_0_3(run) => "torchtitan-compile-2026",
        "torchtitan" if ran_torchtitan_0_3(run) => "torchtitan-2026",
        "torchtitan" if compiled && late => "torchtitan-compile-2025",
        "torchtitan" if compiled => "torchtitan-compile",
        "megatron-core" if !modern(run) => before_fused_attention(run),
        "megatron-deepspeed" if run.precision.as_deref() == Some("bf16") => {
            "megatron-deepspeed-bf16"
        }
        "deepspeed" if year(run).is_some_and(|year| year <= 2021) && !of_hugging_face(run) => {
            "deepspeed-2021"
        }
        name => name,
    }
}

/// Whether a run used torchtitan 0.3 or later: by its stated version or, if it states none, by its year (2026 or later).
fn ran_torchtitan_0_3(run: &Run) -> bool {
    let software = run.sw_version.as_deref().unwrap_or("");
    let after = software.split_once("torchtitan").map(|(_, after)| after);
    let stated = after.and_then(|after| {
        let version = after.trim_start_matches([' ', '=', '@', 'v']);
        let (major, rest) = version.split_once('.')?;
        let minor = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    });
    stated.map_or_else(
        || year(run).is_some_and(|year| year >= 2026),
        |version| version >= (0, 3),
    )
}

fn of_hugging_face(run: &Run) -> bool {
    let software = run.sw_version.as_deref().unwrap_or("");
    software.contains("transformers")
}

/// The runtime of a run that names no framework: a generation of Megatron if layers are split over devices, chosen by
/// whether fused attention and sequence parallelism existed; else PyTorch with the stated sharding.
fn unnamed(run: &Run) -> &'static str {
    if !model_parallel(run) {
        "generic-eager"
    } else if modern(run) {
        "generic-fused"
    } else {
        before_fused_attention(run)
    }
}

/// The runtime preset for a Megatron-LM run without fused attention: `megatron-2022` or `megatron-2021`. A run belongs to 2022
/// if its date says so or is later, or if it uses sequence parallelism or selective recomputation, which are new in 2022.
fn before_fused_attention(run: &Run) -> &'static str {
    let recompute = run.recompute.as_deref();
    let selective = recompute.is_some_and(|r| r.contains("selective"));
    let late = year(run).is_some_and(|year| year >= 2022);
    if run.sequence_parallel == Some(true) || selective || late {
        "megatron-2022"
    } else {
        "megatron-2021"
    }
}

/// Changes the runtime's defaults to what the run itself states.
fn apply_statements(run: &Run, runtime: &mut Runtime) {
    match run.flag("flash_attention") {
        Some(Value::Bool(true)) if runtime.attention == AttentionKernel::Unfused => {
            runtime.attention = AttentionKernel::Flash2;
        }
        Some(Value::Bool(false)) => runtime.attention = AttentionKernel::Unfused,
        Some(Value::String(version)) if version.starts_with('1') => {
            runtime.attention = AttentionKernel::Flash1;
        }
        Some(Value::String(version)) if version.starts_with('2') => {
            runtime.attention = AttentionKernel::Flash2;
        }
        _ => {}
    }
    let attention = run.text_flag("attention").unwrap_or("").to_lowercase();
    if attention.contains("eager") || attention.contains("unfused") {
        runtime.attention = AttentionKernel::Unfused;
    } else if attention == "te flash" {
        // Transformer Engine without cuDNN's attention (`NVTE_FUSED_ATTN=0`). Assumed: without FlashAttention 3 too.
        runtime.attention = AttentionKernel::Flash2;
    }
    if run.is_on("fp8_dot_product_attention") && runtime.attention == AttentionKernel::CudnnOrFlash3
    {
        runtime.attention = AttentionKernel::CudnnFp8;
    }
    if run.is_on("compile") {
        runtime.rewrites.insert(Rewrite::FusePointwise);
    }
    if let Some(fused) = run.switch("fused_rms_norm") {
        let kinds = [Rewrite::NormInF32, Rewrite::FuseNorm];
        let [without, with] = if fused { kinds } else { [kinds[1], kinds[0]] };
        runtime.rewrites.remove(&without);
        runtime.rewrites.insert(with);
    }
    experts(run, runtime);
    deepspeed(run, runtime);
    let named = run.precision.as_deref().and_then(fp8_recipe);
    runtime.fp8_recipe = named.unwrap_or(runtime.fp8_recipe);
    match run.text_flag("grad_sync_dtype") {
        Some("bf16") => runtime.states.reduce = DType::Bf16,
        Some("fp32") => {
            runtime.states.reduce = DType::F32;
            runtime.states.gradient = Some(DType::F32);
            runtime.fp16_gradients = None;
        }
        _ => {}
    }
    // These policies keep the output projection, or every product outside the feed-forward.
    let policy = run.recompute.as_deref().unwrap_or("");
    if policy.contains("out_proj") || policy.contains("save_dot") {
        runtime.rewrites.insert(Rewrite::KeepOutputProjection);
    }
    // Composer's mixed-precision modes: DEFAULT reduces gradients in 32 bits, PURE in the training type.
    match run.text_flag("fsdp_mixed_precision_mode") {
        Some("DEFAULT") => runtime.states.reduce = DType::F32,
        Some("PURE") => runtime.states.reduce = DType::Bf16,
        _ => {}
    }
}

/// The recipe of 8-bit products that a run's precision names; `None` if it names none.
fn fp8_recipe(precision: &str) -> Option<Fp8Recipe> {
    let all = [
        ("rowwise", Fp8Recipe::Rowwise),
        ("tensorwise", Fp8Recipe::Tensorwise),
        ("current_scaling", Fp8Recipe::Tensorwise),
        ("subchannel", Fp8Recipe::Blockwise),
        ("mxfp8", Fp8Recipe::Mxfp8),
    ];
    let named = all.into_iter().find(|(name, _)| precision.contains(name));
    named.map(|(_, recipe)| recipe)
}

/// Sets how a run launches its layers and routes tokens to experts: the scope of its CUDA graphs, its token dispatcher.
fn experts(run: &Run, runtime: &mut Runtime) {
    let graphs: String = ["cuda_graph_scope", "cuda_graph_impl"]
        .iter()
        .filter_map(|name| run.flag(name))
        .map(ToString::to_string)
        .collect();
    if graphs.contains("full_iteration") {
        runtime.graphs = CudaGraphs::Step;
    } else if graphs.contains("attn") {
        // A scope of `moe_router` and `moe_preprocess` alone leaves nearly all kernels to the host: Megatron-Core runs attention before
        // it replays the graph (NVIDIA/Megatron-LM@d98e8a6, `_te_cuda_graph_replay` in `transformer_layer.py`).
        runtime.graphs = CudaGraphs::Layers;
    }
    let dispatcher = ["moe_flex_dispatcher_backend", "moe_dispatcher"]
        .iter()
        .find_map(|name| run.text_flag(name));
    let named = |part: &str| dispatcher.is_some_and(|name| name.contains(part));
    if let Some((_, dispatcher)) = [
        ("deepep", Dispatcher::DeepEp),
        ("hybridep", Dispatcher::HybridEp),
        ("allgather", Dispatcher::AllGather),
    ]
    .into_iter()
    .find(|(name, _)| named(name))
    {
        runtime.dispatcher = dispatcher;
    }
    let overlaps = ["moe_a2a_overlap", "overlap_moe_expert_parallel_comm"];
    if overlaps.iter().any(|name| run.is_on(name)) {
        runtime.overlap.expert_parallel = true;
    }
    if run.is_on("cutedsl_fused_grouped_mlp") {
        runtime.rewrites.remove(&Rewrite::LaunchExpertsApart);
    }
}

/// Sets whether DeepSpeed reduces gradients while backward still runs. At ZeRO stages 1 and 2 it does so only if the run sets
/// `overlap_comm`, whose default is off there (deepspeedai/DeepSpeed@edaa722, `zero/config.py`, `overlap_comm_valid`).
fn deepspeed(run: &Run, runtime: &mut Runtime) {
    let its_engine = runtime.rewrites.contains(&Rewrite::GatherInStep);
    let unsharded_parameters = ["zero1", "zero-1", "zero2", "zero-2"].contains(&sharding(run));
    if its_engine && unsharded_parameters {
        runtime.overlap.grad_reduce = run.is_on("overlap_comm");
    }
}

/// Whether a run splits layers over devices.
fn model_parallel(run: &Run) -> bool {
    let sizes = [
        ("tp", run.tp),
        ("pp", run.pp),
        ("ep", run.ep),
        ("cp", run.cp),
    ];
    let mut sizes = sizes.into_iter();
    sizes.any(|(name, stated)| run.size(name, stated).is_some_and(|n| n > 1))
}

/// The year that a run states.
fn year(run: &Run) -> Option<u32> {
    run.date.as_deref()?.get(..4)?.parse().ok()
}

/// Whether a run is recent enough for fused attention, judging by its date, device, precision or model.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_is_of_the_kernel_that_a_run_or_its_recipe_names() {
        let runs = catalog::runs::embedded().expect("embedded runs are well-formed");
        for (id, attention) in [
            ("dgxc_v24111_grok1_bf16_h100_n512", AttentionKernel::Flash2),
            (
                "dgxc_v24111_gpt3-175b_bf16_h100_n128",
                AttentionKernel::Flash2,
            ),
            (
                "dgxc_v2502_gpt3-175b_bf16_h100_n128",
                AttentionKernel::CudnnOrFlash3,
            ),
            ("h3_enoki_h28_tp1_gb4", AttentionKernel::Flash2),
            (
                "mb_2606_qwen3-30b-a3b_gb200_mxfp8_n8_gbs512",
                AttentionKernel::CudnnFp8,
            ),
            (
                "mb_2604_gpt-oss-120b_gb200_bf16_n64_gbs1280",
                AttentionKernel::CudnnOrFlash3,
            ),
        ] {
            let run = runs.iter().find(|run| run.id == id);
            let (runtime, _) = runtime(run.expect(id)).expect(id);
            assert_eq!(runtime.attention, attention, "{id}");
        }
    }

    #[test]
    fn graphs_and_recomputation_are_those_of_the_run_or_its_recipe() {
        let runs = catalog::runs::embedded().expect("embedded runs are well-formed");
        for (id, graphs, modules) in [
            (
                "dgxc_v250505_nemotron4-340b_fp8_gb200_n128",
                CudaGraphs::Layers,
                None,
            ),
            (
                "dgxc_v250505_nemotron4-340b_fp8_h100_n256",
                CudaGraphs::None,
                None,
            ),
            (
                "dgxc_v250505_deepseek-v3_bf16_h100_n512",
                CudaGraphs::None,
                Some(RecomputeModule::LatentProjections),
            ),
            (
                "dgxc_v250505_deepseek-v3_bf16_gb200_n512",
                CudaGraphs::None,
                Some(RecomputeModule::CoreAttention),
            ),
            (
                "mb_2602_deepseekv3_gb200_mxfp8_n256_gbs4096",
                CudaGraphs::Layers,
                Some(RecomputeModule::LatentProjections),
            ),
        ] {
            let run = runs.iter().find(|run| run.id == id).expect(id);
            let (runtime, _) = runtime(run).expect(id);
            assert_eq!(runtime.graphs, graphs, "{id}");
            let of_run = super::modules(run).expect(id);
            assert_eq!(
                of_run,
                modules.map(|module| Selection::from_iter([module])),
                "{id}"
            );
        }
    }

    #[test]
    fn torchtitan_before_0_2_is_predicted_as_it_was() {
        let runs = catalog::runs::embedded().expect("embedded runs are well-formed");
        let of_torchtitan = |run: &&Run| run.source.starts_with("pytorch/torchtitan");
        for run in runs.iter().filter(of_torchtitan) {
            let (runtime, _) = runtime(run).expect("a runtime");
            let does = |rewrite| runtime.rewrites.contains(&rewrite);
            let (early, frees) = (
                does(Rewrite::EarlyStopRecompute),
                does(Rewrite::FreeEmbedding),
            );
            let found = (runtime.attention, early, frees);
            assert_eq!(found, (AttentionKernel::Flash2, true, false), "{}", run.id);
            let keeps = does(Rewrite::KeepPassedOn);
            assert!(keeps || run.pp.is_none_or(|pp| pp == 1), "{}", run.id);
        }
    }

    #[test]
    fn flagperfs_llama_2_runs_megatrons_own_layers() {
        let runs = catalog::runs::embedded().expect("embedded runs are well-formed");
        for (id, attention, recomputed) in [
            ("flagperf_llama2_70b_h800_0", AttentionKernel::Unfused, true),
            ("flagperf_llama2_70b_h800_1", AttentionKernel::Flash2, false),
            ("flagperf_llama2_70b_h800_3", AttentionKernel::Flash2, false),
        ] {
            let run = runs.iter().find(|run| run.id == id).expect("a run");
            let (runtime, named) = runtime(run).expect("a runtime");
            let does = |rewrite| runtime.rewrites.contains(&rewrite);
            let found = [Rewrite::RepeatKeys, Rewrite::FuseSwiglu, Rewrite::FuseRope].map(does);
            assert_eq!((found, named), ([true, false, false], true), "{id}");
            assert_eq!(runtime.attention, attention, "{id}");
            let selective = recompute(run).is_some_and(|said| said.contains("selective"));
            assert_eq!(selective, recomputed, "{id}");
        }
    }

    #[test]
    fn torchtitan_is_of_its_stated_version_or_else_of_its_year() {
        let runs = catalog::runs::embedded().expect("embedded runs are well-formed");
        let any = runs.first().expect("a run");
        for (software, date, ran) in [
            ("torchtitan 0.3.0", "2025-12", true),
            ("torchtitan==0.2.2 torch 2.10.3", "2026-03", false),
            ("torchtitan + torch 2.10.1", "2026-09", true),
            ("torchtitan 2024-04/08", "2024-08", false),
            ("torchtitan v0.10", "2025-01", true),
            ("", "2025-06", false),
        ] {
            let run = Run {
                sw_version: Some(software.to_owned()),
                date: Some(date.to_owned()),
                ..any.clone()
            };
            assert_eq!(ran_torchtitan_0_3(&run), ran, "{software}, {date}");
        }
    }
}
