//! Which of two plans is simpler, and which plans are the same layout.

use catalog::{DType, OptimizerStates, Runtime, ScheduleKind};
use plans::{Decisions, Recompute};

/// How complicated a plan is; simpler ones are less. What lies in host memory counts first, then axes, then everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Complexity {
    /// How many of the two (states, activations) have parts in host memory.
    on_host: u8,
    /// Mesh axes with more than one rank, without data parallelism.
    axes: u8,
    /// Decisions that are not the usual ones.
    unusual: u8,
}

/// Traits of a plan: whether it has each, and its name.
type Traits<const N: usize> = [(bool, &'static str); N];

/// Everything that makes a plan complicated, in words: what lies in host memory, axes, and the rest.
fn traits(d: &Decisions, runtime: &Runtime) -> (Traits<2>, Traits<5>, Traits<18>) {
    let space = &runtime.space;
    let on_host = [
        (d.offload.is_some(), "offload to the host"),
        (d.offload_layers > 0, "activations in host memory"),
    ];
    let axes = [
        (d.tp > 1, "tensor parallelism"),
        (d.pp > 1, "a pipeline"),
        (d.cp > 1, "context parallelism"),
        (d.ep > 1, "expert parallelism"),
        (d.etp > 1, "tensor-parallel experts"),
    ];
    let simple = [ScheduleKind::OneFOneB, ScheduleKind::Interleaved];
    let usual_order = space.axis_orders.first().is_none_or(|&o| o == d.axis_order);
    let usual_kind = d.cp == 1 || space.cp_kinds.first().is_none_or(|&k| k == d.cp_kind);
    let falls = matches!(d.recompute, Recompute::Falling(_));
    let partly = falls || matches!(d.recompute, Recompute::Layers(_) | Recompute::Modules(_));
    let switched = d.tp > 1 && d.overlap.tensor_parallel != runtime.overlap.tensor_parallel;
    let narrow = (d.gradients).is_some_and(|types| types.reduced.size() < DType::F32.size());
    let expert_overlap = d.overlap.expert_parallel != runtime.overlap.expert_parallel;
    let unusual = [
        (switched, "another overlap of tensor-parallel messages"),
        (
            d.ep > 1 && expert_overlap,
            "another overlap of messages to experts",
        ),
        (d.dispatcher.is_some(), "another dispatcher of tokens"),
        (d.graphs.is_some(), "CUDA graphs"),
        (d.fp8_recipe.is_some(), "other scales of 8-bit products"),
        (d.vpp > 1, "virtual stages"),
        (!simple.contains(&d.schedule), "another schedule"),
        (!d.stages.is_uniform(), "uneven stages"),
        (!usual_order, "another axis order"),
        (!usual_kind, "another kind of context parallelism"),
        (d.dp_shard > 1 && d.dp_replicate > 1, "hybrid sharding"),
        (partly, "partial recomputation"),
        (falls, "fewer recomputed layers on later ranks"),
        (narrow, "16-bit gradients"),
        (d.gradients.is_some() && !narrow, "32-bit gradients"),
        (d.optimizer_states.is_some(), "other optimizer states"),
        (
            d.optimizer_states
                .is_some_and(OptimizerStates::changes_results),
            "smaller moments",
        ),
        (d.prefetch.is_some(), "another depth of prefetching"),
    ];
    (on_host, axes, unusual)
}

/// How complicated a plan is for a runtime.
#[must_use]
pub fn complexity(d: &Decisions, runtime: &Runtime) -> Complexity {
    let (on_host, axes, unusual) = traits(d, runtime);
    let count = |traits: &[(bool, &str)]| traits.iter().filter(|(has, _)| *has).count() as u8;
    Complexity {
        on_host: count(&on_host),
        axes: count(&axes),
        unusual: count(&unusual),
    }
}

/// What a plan has that makes it more complicated than another, in words.
#[must_use]
pub fn beyond(d: &Decisions, simpler: &Decisions, runtime: &Runtime) -> String {
    let all = |d| {
        let (on_host, axes, unusual) = traits(d, runtime);
        on_host.into_iter().chain(axes).chain(unusual)
    };
    let more = all(d).zip(all(simpler));
    let more: Vec<&str> = more
        .filter(|((has, _), (had, _))| *has && !had)
        .map(|((_, name), _)| name)
        .collect();
    match more.split_last() {
        None => String::new(),
        Some((last, [])) => (*last).to_owned(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
    }
}

/// The layout of a plan: the sizes of its mesh, and its micro-batch.
#[must_use]
pub fn layout(d: &Decisions) -> [u64; 7] {
    [d.tp, d.pp, d.cp, d.ep, d.etp, d.dp(), d.micro_batch]
}

/// What is recomputed, without numbers of layers: two strategies that differ only in these have the same kind.
#[must_use]
pub fn kind(recompute: Recompute) -> Recompute {
    match recompute {
        Recompute::Layers(_) | Recompute::Falling(_) => Recompute::Layers(0),
        other => other,
    }
}
