//! How a runtime may be told to run the passes of a layout: which messages overlap with compute, what carries tokens to their
//! experts, what is captured in CUDA graphs, how the operands of 8-bit products are scaled.
//!
//! These choices change the time of a pass, and hardly the memory of a rank. So a layout is bounded
//! by the least that its blocks take under any of them.

use std::collections::BTreeSet;

use catalog::{CudaGraphs, Dispatcher, Fp8Recipe, Offload, Overlap, Precision, Runtime};
use costmodel::Scenario;
use plans::grammar::read_overlap;
use plans::support::{
    MAX_OVERLAPPED_MTP, cannot_expose, cannot_overlap, experts_cannot_overlap, graphs_allowed,
    graphs_cannot_capture, recipe_cannot_recompute,
};
use plans::{Decisions, Group};

use crate::choices::{ActivationChoice, Asked, PipelineChoice, ShardingChoice};
use crate::constraints::Constraints;
use crate::layouts::Layout;

/// A way to run the passes of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExecutionChoice {
    /// Which messages overlap with compute.
    pub overlap: Overlap,
    /// How tokens are sent to their experts; `None`: the runtime's default.
    pub dispatcher: Option<Dispatcher>,
    /// What is captured in CUDA graphs; `None`: the runtime's default.
    pub graphs: Option<CudaGraphs>,
    /// How the operands of 8-bit products are scaled; `None`: the runtime's default.
    pub fp8_recipe: Option<Fp8Recipe>,
}

/// The ways to run passes that a pipeline allows; pipelines that allow the same share their bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Allows {
    /// Messages to experts may overlap.
    expert_overlap: bool,
    /// Layers, and whole steps, may be captured in CUDA graphs.
    graphs: [bool; 2],
    /// Operands of 8-bit products may have scales of earlier steps.
    delayed_scales: bool,
}

impl Allows {
    /// What a pipeline of a layout allows with a choice for its activations.
    pub(crate) fn of(
        scenario: &Scenario,
        layout: &Layout,
        pipeline: &PipelineChoice,
        activations: ActivationChoice,
    ) -> Self {
        let recompute = activations.recompute;
        let captures = |graphs| {
            let copies = activations.offload_layers > 0 && graphs == CudaGraphs::Layers;
            !copies && graphs_cannot_capture(graphs, recompute, &scenario.model).is_none()
        };
        let runtime = &scenario.runtime;
        let again = recipe_cannot_recompute(Fp8Recipe::Delayed, recompute, runtime);
        let copied = activations.offload_layers;
        let lacks = experts_cannot_overlap(pipeline.schedule, layout.pp, recompute, copied);
        Self {
            expert_overlap: lacks.is_none(),
            graphs: [CudaGraphs::Layers, CudaGraphs::Step].map(captures),
            delayed_scales: scenario.workload.precision != Precision::Fp8 || again.is_none(),
        }
    }
}

impl ExecutionChoice {
    /// The decisions with passes run in this way.
    #[must_use]
    pub fn of(self, d: &Decisions) -> Decisions {
        Decisions {
            overlap: self.overlap,
            dispatcher: self.dispatcher,
            graphs: self.graphs,
            fp8_recipe: self.fp8_recipe,
            ..d.clone()
        }
    }

    /// Whether no other way takes less memory. CUDA graphs keep inputs, expert overlap keeps a
    /// layer of a second micro-batch, and the all-gather dispatcher holds the tokens of all ranks.
    pub(crate) fn holds_least(self, runtime: &Runtime) -> bool {
        let graphs = self.graphs.unwrap_or(runtime.graphs);
        let dispatcher = self.dispatcher.unwrap_or(runtime.dispatcher);
        graphs == CudaGraphs::None
            && !self.overlap.expert_parallel
            && dispatcher != Dispatcher::AllGather
    }

    /// Whether this way to run passes can be combined with a way to shard states. CUDA graphs need parameters that stay on the
    /// device, and some runtimes can switch overlap off only at certain ZeRO levels.
    pub(crate) fn leaves(self, way: &ShardingChoice, runtime: &Runtime) -> bool {
        let captures = self.graphs.is_some_and(|graphs| graphs != CudaGraphs::None);
        !(captures && way.offload == Some(Offload::Parameters))
            && cannot_expose(self.overlap, way.zero, runtime).is_none()
    }

    /// Whether a runtime can run passes in this way within what `allows` permits.
    fn is_in(self, allows: Allows, runtime: &Runtime) -> bool {
        let own = runtime.overlap;
        let recipe = self.fp8_recipe.unwrap_or(runtime.fp8_recipe);
        let [layers, step] = allows.graphs;
        let captures = match self.graphs {
            None | Some(CudaGraphs::None) => true,
            Some(CudaGraphs::Layers) => layers,
            Some(CudaGraphs::Step) => step,
        };
        let scales = allows.delayed_scales || recipe != Fp8Recipe::Delayed;
        captures
            && scales
            && (allows.expert_overlap || self.overlap.expert_parallel <= own.expert_parallel)
    }
}

/// The decisions without those ways to run passes that do not go with the rest or with the cluster. An
/// overlap that the runtime cannot switch off stays on.
pub(crate) fn adapted(d: Decisions, scenario: &Scenario) -> Decisions {
    let (runtime, cluster) = (&scenario.runtime, &scenario.cluster);
    let across = d.experts_lie_across(cluster);
    let runs = |of: &Dispatcher| {
        of.exists_on(cluster, across) && runtime.space.expert_split.goes_with(*of, d.etp)
    };
    let dispatcher = d.dispatcher.filter(|of| d.ep > 1 && runs(of));
    let overlaps = d.ep > 1
        && d.num_micro_batches > d.pp
        && dispatcher != Some(Dispatcher::AllGather)
        && experts_cannot_overlap(d.schedule, d.pp, d.recompute, d.offload_layers).is_none();
    let own = runtime.overlap;
    let messages_overlap = d.sequence_parallel && cluster.reaches_peers();
    let kept = match cannot_expose(d.overlap, d.zero, runtime) {
        None => d.overlap,
        Some(_) => Overlap {
            grad_reduce: own.grad_reduce,
            param_gather: own.param_gather,
            ..d.overlap
        },
    };
    let d = Decisions {
        overlap: Overlap {
            expert_parallel: kept.expert_parallel && (overlaps || own.expert_parallel),
            tensor_parallel: kept.tensor_parallel && (messages_overlap || own.tensor_parallel),
            ..kept
        },
        dispatcher,
        fp8_recipe: followed_recipe(&d, scenario),
        ..d
    };
    let captures = graphs_allowed(&d, &scenario.model, runtime);
    Decisions {
        graphs: d.graphs.filter(|_| captures),
        ..d
    }
}

/// The scenario with only the runtime's own way to run passes, which has the same lightest strategy
/// and fewer blocks. `None` if another way may hold less, or a constraint asks for one.
pub(crate) fn plain(scenario: &Scenario, constraints: &Constraints) -> Option<Scenario> {
    let runtime = &scenario.runtime;
    let own = ExecutionChoice {
        overlap: runtime.overlap,
        dispatcher: None,
        graphs: None,
        fp8_recipe: None,
    };
    let asked = ["overlap", "dispatcher", "graphs"];
    if !own.holds_least(runtime) || asked.iter().any(|key| constraints.fix.contains_key(*key)) {
        return None;
    }
    let mut plain = scenario.clone();
    plain.runtime.space.tensor_parallel_overlap = false;
    plain.runtime.space.expert_overlap = false;
    plain.runtime.space.dispatchers.clear();
    plain.runtime.space.graphs.clear();
    Some(plain)
}

/// The fp8 recipe after a change: the same if it goes with what is recomputed, else the first that
/// does. `None`: the runtime's own.
fn followed_recipe(d: &Decisions, scenario: &Scenario) -> Option<Fp8Recipe> {
    let (runtime, cluster) = (&scenario.runtime, &scenario.cluster);
    if scenario.workload.precision != Precision::Fp8 {
        return None;
    }
    let fits = |recipe: &Fp8Recipe| {
        recipe.exists_on(cluster)
            && recipe_cannot_recompute(*recipe, d.recompute, runtime).is_none()
    };
    let asked = d.fp8_recipe.unwrap_or(runtime.fp8_recipe);
    let mut all = [asked].into_iter().chain(runtime.fp8_recipes_on(cluster));
    let found = all.find(fits).unwrap_or(asked);
    Some(found).filter(|recipe| *recipe != runtime.fp8_recipe)
}

impl Asked<'_> {
    /// All ways to run the passes of a layout, the runtime's own first unless a constraint forbids it. Not every pipeline runs
    /// in all of them.
    pub(crate) fn executions(&self, layout: &Layout) -> Vec<ExecutionChoice> {
        let (dispatchers, graphs) = (self.dispatchers(layout), self.graphs(layout));
        let recipes = self.fp8_recipes();
        let own = self.scenario.runtime.overlap.expert_parallel;
        let mut all = Vec::new();
        for overlap in self.overlaps(layout) {
            for &dispatcher in &dispatchers {
                let gathers = dispatcher == Some(Dispatcher::AllGather);
                if gathers && overlap.expert_parallel && !own {
                    continue;
                }
                for &graphs in &graphs {
                    all.extend(recipes.iter().map(|&fp8_recipe| ExecutionChoice {
                        overlap,
                        dispatcher,
                        graphs,
                        fp8_recipe,
                    }));
                }
            }
        }
        all
    }

    /// The ways to run passes in a layout that `allows` permits.
    pub(crate) fn executions_with(&self, layout: &Layout, allows: Allows) -> Vec<ExecutionChoice> {
        let mut all = self.executions(layout);
        all.retain(|execution| execution.is_in(allows, &self.scenario.runtime));
        all
    }

    /// The overlaps to try in a layout: those that a constraint lists, or else the runtime's own
    /// and its variants in the messages that the runtime can switch. Messages that the layout never
    /// sends keep the runtime's own value, so that no strategy counts twice.
    fn overlaps(&self, layout: &Layout) -> Vec<Overlap> {
        let runtime = &self.scenario.runtime;
        let own = runtime.overlap;
        let switches_tp = runtime.overlaps_tensor_parallel_on(&self.scenario.cluster);
        let mut all: Vec<Overlap> =
            (self.constraints.read_fixed("overlap", read_overlap)).collect();
        if all.is_empty() {
            all.push(own);
            if switches_tp && layout.sequence_parallel {
                let tensor_parallel = !own.tensor_parallel;
                all.push(Overlap {
                    tensor_parallel,
                    ..own
                });
            }
            if self.may_overlap_experts(layout) {
                let switched = |&overlap: &Overlap| Overlap {
                    expert_parallel: !own.expert_parallel,
                    ..overlap
                };
                let switched: Vec<Overlap> = all.iter().map(switched).collect();
                all.extend(switched);
            }
        }
        let sent = |sends: bool, fixed: bool, own: bool| if sends { fixed } else { own };
        for overlap in &mut all {
            let Layout {
                tp, pp, dp, cp, ep, ..
            } = *layout;
            overlap.tensor_parallel = sent(tp > 1, overlap.tensor_parallel, own.tensor_parallel);
            overlap.pipeline = sent(pp > 1, overlap.pipeline, own.pipeline);
            overlap.grad_reduce = sent(dp * cp > 1, overlap.grad_reduce, own.grad_reduce);
            overlap.param_gather = sent(dp * cp > 1, overlap.param_gather, own.param_gather);
            overlap.expert_parallel = sent(ep > 1, overlap.expert_parallel, own.expert_parallel);
        }
        let possible = |overlap: &Overlap| {
            cannot_overlap(*overlap, runtime).is_none()
                && (overlap.tensor_parallel <= own.tensor_parallel || switches_tp)
                && (overlap.expert_parallel <= own.expert_parallel
                    || self.may_overlap_experts(layout))
        };
        all.retain(possible);
        let mut known = BTreeSet::new();
        all.retain(|overlap| known.insert(*overlap));
        all
    }

    /// Whether messages to experts may be told to overlap in some pipeline of a layout. With no more micro-batches than
    /// pipeline ranks, no forward pass runs beside a backward pass.
    fn may_overlap_experts(&self, layout: &Layout) -> bool {
        self.scenario.runtime.space.expert_overlap
            && self.scenario.workload.precision != Precision::Fp32
            && layout.ep > 1
            && layout.num_micro_batches > layout.pp
            && self.scenario.model.mtp_layers <= MAX_OVERLAPPED_MTP
    }

    /// The CUDA graph captures to try: those of a constraint, else all that the runtime can do.
    pub(crate) fn graphs(&self, layout: &Layout) -> Vec<Option<CudaGraphs>> {
        let scenario = self.scenario;
        let runtime = &scenario.runtime;
        let fixed = self.constraints.fix.contains_key("graphs");
        let static_shapes = scenario.workload.documents_apart().is_none();
        let possible = |graphs: &CudaGraphs| {
            *graphs == runtime.graphs
                || static_shapes
                    && runtime.graph_option(*graphs).is_some_and(|option| {
                        (layout.pp == 1 || option.pipelines)
                            && (scenario.model.moe.is_none() || option.experts)
                            && (layout.ep == 1 || *graphs != CudaGraphs::Step)
                    })
        };
        let own = [runtime.graphs].into_iter();
        let others = CudaGraphs::ALL.iter().copied();
        let others = others.filter(|of| *of != runtime.graphs);
        let mut all: Vec<CudaGraphs> = match fixed {
            true => (self.constraints).fixed_among("graphs").collect(),
            false => own.chain(others).collect(),
        };
        all.retain(possible);
        let choice = |graphs| Some(graphs).filter(|graphs| *graphs != runtime.graphs);
        all.into_iter().map(choice).collect()
    }

    /// The ways to scale operands of 8-bit products; `None` is the runtime's own. They are those that a constraint lists;
    /// without a constraint, all that the runtime has on the cluster.
    pub(crate) fn fp8_recipes(&self) -> Vec<Option<Fp8Recipe>> {
        let (runtime, cluster) = (&self.scenario.runtime, &self.scenario.cluster);
        if self.scenario.workload.precision != Precision::Fp8 {
            return vec![None];
        }
        let mut all = runtime.fp8_recipes_on(cluster);
        if self.constraints.fix.contains_key("fp8_recipe") {
            let fixed: Vec<Fp8Recipe> = (self.constraints).fixed_among("fp8_recipe").collect();
            all.retain(|recipe| fixed.contains(recipe));
        }
        let choice = |recipe| Some(recipe).filter(|recipe| *recipe != runtime.fp8_recipe);
        all.into_iter().map(choice).collect()
    }

    /// The dispatchers to try; `None` is the runtime's own, the only one without expert
    /// parallelism. They are those of a constraint, else all that the runtime has on the cluster.
    pub(crate) fn dispatchers(&self, layout: &Layout) -> Vec<Option<Dispatcher>> {
        if layout.ep == 1 {
            return vec![None];
        }
        let (runtime, cluster) = (&self.scenario.runtime, &self.scenario.cluster);
        let size = layout.ep * layout.etp;
        let domain = cluster.domain(self.scenario.workload.gpus);
        let across = Group { size, stride: 1 }.lies_across(domain);
        let possible = |dispatcher: &Dispatcher| {
            let known = runtime.space.dispatchers.contains(dispatcher);
            *dispatcher == runtime.dispatcher || known && dispatcher.exists_on(cluster, across)
        };
        let mut all: Vec<Dispatcher> = (self.constraints).fixed_among("dispatcher").collect();
        match self.constraints.fix.contains_key("dispatcher") {
            true => all.retain(possible),
            false => all = runtime.dispatchers_on(cluster, across),
        }
        let split = runtime.space.expert_split;
        all.retain(|dispatcher| split.goes_with(*dispatcher, layout.etp));
        let choice = |dispatcher| Some(dispatcher).filter(|d| *d != runtime.dispatcher);
        all.into_iter().map(choice).collect()
    }
}
