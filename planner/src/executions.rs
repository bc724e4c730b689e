//! How a runtime may be told to run the passes of a layout: which messages overlap with compute, what carries tokens to their
//! experts, what is captured in CUDA graphs.
//!
//! These choices change what a pass takes, and little that a rank holds; a layout is therefore bounded by the least that its
//! blocks take under any of them.

use catalog::{CudaGraphs, Dispatcher, ModelConfig, Offload, Overlap, Runtime};
use costmodel::Scenario;
use plans::Decisions;
use plans::support::{
    MAX_OVERLAPPED_MTP, experts_cannot_overlap, graphs_allowed, graphs_cannot_capture,
};

use crate::choices::{ActivationChoice, Asked, PipelineChoice, ShardingChoice};
use crate::layouts::Layout;

/// A way to run the passes of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExecutionChoice {
    /// Which messages overlap with compute.
    pub overlap: Overlap,
    /// How tokens are sent to their experts; `None`: as the runtime does by itself.
    pub dispatcher: Option<Dispatcher>,
    /// What is captured in CUDA graphs; `None`: what the runtime captures by itself.
    pub graphs: Option<CudaGraphs>,
}

/// What pipelines and recomputations allow of ways to run passes; those that allow the same are bounded together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Allows {
    /// Messages to experts may overlap.
    expert_overlap: bool,
    /// Layers, and whole steps, may be captured in CUDA graphs.
    graphs: [bool; 2],
}

impl Allows {
    /// What a pipeline of a layout allows with what becomes of its activations.
    pub(crate) fn of(
        model: &ModelConfig,
        layout: &Layout,
        pipeline: &PipelineChoice,
        activations: ActivationChoice,
    ) -> Self {
        let recompute = activations.recompute;
        let captures = |graphs| {
            let copies = activations.offload_layers > 0 && graphs == CudaGraphs::Layers;
            !copies && graphs_cannot_capture(graphs, recompute, model).is_none()
        };
        let copied = activations.offload_layers;
        let lacks = experts_cannot_overlap(pipeline.schedule, layout.pp, recompute, copied);
        Self {
            expert_overlap: lacks.is_none(),
            graphs: [CudaGraphs::Layers, CudaGraphs::Step].map(captures),
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
            ..d.clone()
        }
    }

    /// Whether no other way holds less: captured graphs keep inputs, a layer of another micro-batch is under way beside messages
    /// to experts, and a dispatcher that gathers has the tokens of all ranks.
    pub(crate) fn holds_least(self, runtime: &Runtime) -> bool {
        let graphs = self.graphs.unwrap_or(runtime.graphs);
        let dispatcher = self.dispatcher.unwrap_or(runtime.dispatcher);
        graphs == CudaGraphs::None
            && !self.overlap.expert_parallel
            && dispatcher != Dispatcher::AllGather
    }

    /// Whether states may be sharded and held in a way beside this: graphs replay on parameters that stay on the device.
    pub(crate) fn leaves(self, way: &ShardingChoice) -> bool {
        let captures = self.graphs.is_some_and(|graphs| graphs != CudaGraphs::None);
        !(captures && way.offload == Some(Offload::Parameters))
    }

    /// Whether a runtime whose own overlap is given runs passes in this way where so much is allowed.
    fn is_in(self, allows: Allows, own: Overlap) -> bool {
        let [layers, step] = allows.graphs;
        let captures = match self.graphs {
            None | Some(CudaGraphs::None) => true,
            Some(CudaGraphs::Layers) => layers,
            Some(CudaGraphs::Step) => step,
        };
        captures && (allows.expert_overlap || self.overlap.expert_parallel <= own.expert_parallel)
    }
}

/// The same decisions without those ways to run passes, switched on or taken instead of the runtime's own, that they leave no
/// room for.
pub(crate) fn adapted(d: Decisions, scenario: &Scenario) -> Decisions {
    let (runtime, cluster) = (&scenario.runtime, &scenario.cluster);
    let across = d.experts_lie_across(cluster.scale_up_domain);
    let dispatcher = (d.dispatcher).filter(|of| d.ep > 1 && of.exists_on(cluster, across));
    let overlaps = d.ep > 1
        && d.num_micro_batches > d.pp
        && dispatcher != Some(Dispatcher::AllGather)
        && experts_cannot_overlap(d.schedule, d.pp, d.recompute, d.offload_layers).is_none();
    let own = runtime.overlap.expert_parallel;
    let d = Decisions {
        overlap: Overlap {
            expert_parallel: d.overlap.expert_parallel && (overlaps || own),
            ..d.overlap
        },
        dispatcher,
        ..d
    };
    let captures = graphs_allowed(&d, &scenario.model, runtime);
    Decisions {
        graphs: d.graphs.filter(|_| captures),
        ..d
    }
}

impl Asked<'_> {
    /// All ways to run the passes of a layout, the runtime's own first unless a constraint forbids it. Not every pipeline runs
    /// in all of them.
    pub(crate) fn executions(&self, layout: &Layout) -> Vec<ExecutionChoice> {
        let (dispatchers, graphs) = (self.dispatchers(layout), self.graphs(layout));
        let mut all = Vec::new();
        for overlap in self.overlaps(layout) {
            for &dispatcher in &dispatchers {
                let gathers = dispatcher == Some(Dispatcher::AllGather);
                let own = self.scenario.runtime.overlap.expert_parallel;
                if !(gathers && overlap.expert_parallel && !own) {
                    all.extend(graphs.iter().map(|&graphs| ExecutionChoice {
                        overlap,
                        dispatcher,
                        graphs,
                    }));
                }
            }
        }
        all
    }

    /// Those of them that a pipeline has.
    pub(crate) fn executions_with(&self, layout: &Layout, allows: Allows) -> Vec<ExecutionChoice> {
        let own = self.scenario.runtime.overlap;
        let mut all = self.executions(layout);
        all.retain(|execution| execution.is_in(allows, own));
        all
    }

    /// The overlaps to try in a layout: those that a constraint lists; without one the runtime's own, then the same with
    /// each kind of message switched that the runtime can switch. Messages that the layout never sends keep the runtime's own
    /// value, so that no strategy counts twice.
    fn overlaps(&self, layout: &Layout) -> Vec<Overlap> {
        let runtime = &self.scenario.runtime;
        let own = runtime.overlap;
        let mut all: Vec<Overlap> = self.constraints.fixed_overlaps().collect();
        if all.is_empty() {
            all.push(own);
            if runtime.space.tensor_parallel_overlap && layout.sequence_parallel {
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
            overlap.expert_parallel = sent(ep > 1, overlap.expert_parallel, own.expert_parallel);
        }
        let possible = |overlap: &Overlap| {
            overlap.expert_parallel <= own.expert_parallel || self.may_overlap_experts(layout)
        };
        let mut distinct: Vec<Overlap> = Vec::with_capacity(all.len());
        for overlap in all.into_iter().filter(possible) {
            if !distinct.contains(&overlap) {
                distinct.push(overlap);
            }
        }
        distinct
    }

    /// Whether messages to experts may be told to overlap in some pipeline of a layout. With no more micro-batches than
    /// pipeline ranks, no forward pass runs beside a backward pass.
    fn may_overlap_experts(&self, layout: &Layout) -> bool {
        self.scenario.runtime.space.expert_overlap
            && layout.ep > 1
            && layout.num_micro_batches > layout.pp
            && self.scenario.model.mtp_layers <= MAX_OVERLAPPED_MTP
    }

    /// What to try to capture in CUDA graphs in a layout: what a constraint lists, without one all that the runtime can.
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
        let others = CudaGraphs::ALL
            .into_iter()
            .filter(|of| *of != runtime.graphs);
        let mut all: Vec<CudaGraphs> = match fixed {
            true => self.constraints.fixed_graphs().collect(),
            false => own.chain(others).collect(),
        };
        all.retain(possible);
        let choice = |graphs| Some(graphs).filter(|graphs| *graphs != runtime.graphs);
        all.into_iter().map(choice).collect()
    }

    /// The dispatchers to try in a layout; `None` is the runtime's own. They are those that a constraint lists; without a
    /// constraint, one of each price. Without expert parallelism only the runtime's own is tried.
    pub(crate) fn dispatchers(&self, layout: &Layout) -> Vec<Option<Dispatcher>> {
        if layout.ep == 1 {
            return vec![None];
        }
        let (runtime, cluster) = (&self.scenario.runtime, &self.scenario.cluster);
        let across = !cluster
            .scale_up_domain
            .is_multiple_of(layout.ep * layout.etp);
        let possible = |dispatcher: &Dispatcher| {
            let known = runtime.space.dispatchers.contains(dispatcher);
            *dispatcher == runtime.dispatcher || known && dispatcher.exists_on(cluster, across)
        };
        let mut all: Vec<Dispatcher> = self.constraints.fixed_dispatchers().collect();
        match self.constraints.fix.contains_key("dispatcher") {
            true => all.retain(possible),
            false => all = runtime.dispatchers_on(cluster, across),
        }
        let choice = |dispatcher| Some(dispatcher).filter(|d| *d != runtime.dispatcher);
        all.into_iter().map(choice).collect()
    }
}
