//! Which part of a step Megatron-Core captures in CUDA graphs, and what it cannot capture.

use catalog::{CudaGraphs, Zero};
use plans::support::graphs_cannot_capture;

use super::flag::Flag;
use super::job::Job;
use super::refusal::Limits;

/// Option for how Megatron-Core captures CUDA graphs.
pub(crate) const IMPL: &str = "--cuda-graph-impl";
/// Option for the modules of each layer that are captured.
pub(crate) const MODULES: &str = "--cuda-graph-modules";
/// Value of [`IMPL`] that captures each layer in graphs of its own.
pub(crate) const LAYERS: &str = "transformer_engine";
/// Value of [`IMPL`] that captures all passes of a step.
pub(crate) const STEP: &str = "full_iteration";

/// What the plan captures: its own choice, or its runtime's.
pub(crate) fn asked(job: &Job<'_>) -> CudaGraphs {
    job.decisions.graphs.unwrap_or(job.runtime.graphs)
}

/// Megatron-Core's options for the plan's CUDA graphs.
pub(crate) fn flags(job: &Job<'_>, limits: &mut Limits) -> Vec<Flag> {
    refuse(job, limits);
    // Random numbers of a graph are drawn by Transformer Engine's generator.
    let random = Flag::switch("--te-rng-tracker");
    match asked(job) {
        CudaGraphs::None => Vec::new(),
        CudaGraphs::Layers => vec![
            Flag::value(IMPL, LAYERS),
            Flag {
                name: MODULES.to_owned(),
                values: modules(job).into_iter().map(str::to_owned).collect(),
            },
            random,
        ],
        CudaGraphs::Step => vec![Flag::value(IMPL, STEP), random],
    }
}

/// The modules of every layer that are captured: all but experts and what carries tokens to them. Dense feed-forward parts
/// are not captured beside messages to experts (`transformer_config.py`).
fn modules(job: &Job<'_>) -> Vec<&'static str> {
    let d = job.decisions;
    let beside = d.overlap.expert_parallel && d.ep > 1;
    let mut modules = vec!["attn"];
    if job.model.has_state_spaces() {
        modules.push("mamba");
    }
    if job.model.has_dense_feed_forward() && !beside {
        modules.push("mlp");
    }
    if job.model.moe.is_some() {
        modules.extend(["moe_router", "moe_preprocess"]);
    }
    modules
}

/// Refuses what Megatron-Core does not capture.
fn refuse(job: &Job<'_>, limits: &mut Limits) {
    let (d, graphs) = (job.decisions, asked(job));
    let why = match graphs {
        CudaGraphs::None => return,
        _ if d.zero >= Zero::Z2 => Some("parameters that stay where they are: zero=0 or 1"),
        CudaGraphs::Layers if d.offload_layers > 0 => Some("activations on the device"),
        CudaGraphs::Step if job.model.moe.is_some() => {
            Some("a model without experts, because the host reads how many tokens arrive at them")
        }
        _ => graphs_cannot_capture(graphs, d.recompute, job.model),
    };
    limits.refuse_graphs(
        why.is_some(),
        graphs,
        &format!("it needs {}", why.unwrap_or_default()),
    );
}

/// Shell line that graphs of layers need: they replay NCCL's kernels, whose buffers must not move
/// with PyTorch's expandable segments (Megatron-LM's `arguments.py`).
pub(crate) fn environment(job: &Job<'_>) -> Option<&'static str> {
    (asked(job) == CudaGraphs::Layers).then_some("export NCCL_GRAPH_REGISTER=0")
}
