//! What CUDA graphs of layers, or of a step, cost in memory.
//!
//! A graph of a layer replays on fixed addresses. Transformer Engine keeps an input buffer per
//! layer and micro-batch in flight (`make_graphed_callables`, `_reuse_graph_input_output_buffers`),
//! and copies inputs into it. Temporaries of all graphs share a pool that nothing else can use. If
//! a whole step is captured, the pool holds everything that passes keep and need.

use catalog::{Bytes, CudaGraphs};
use models::BlockClass;
use plans::Decisions;

use crate::Scenario;
use crate::known;
use crate::stage::{Run, StageWork};

/// What a strategy captures at a cost in memory: only graphs for which the runtime has an option.
pub(crate) fn priced(scenario: &Scenario, d: &Decisions) -> CudaGraphs {
    let runtime = &scenario.runtime;
    let graphs = d.graphs.unwrap_or(runtime.graphs);
    match runtime.graph_option(graphs) {
        Some(_) => graphs,
        None => CudaGraphs::None,
    }
}

/// Adds what graphs hold to the memory of a stage's passes.
pub(crate) fn hold(scenario: &Scenario, d: &Decisions, runs: &[Run], work: &mut StageWork) {
    match priced(scenario, d) {
        CudaGraphs::None => {}
        CudaGraphs::Layers => {
            let layers = || {
                let is = |run: &&Run| matches!(run.cost.key.class, BlockClass::Layer(_));
                runs.iter().filter(is)
            };
            work.saved += layers().map(|run| run.cost.output * run.count).sum();
            let temporary = |run: &Run| {
                let memory = &run.cost.memory;
                memory.transient_forward.max(memory.transient_backward)
            };
            let pool = layers().map(temporary).max().unwrap_or_default();
            work.transient_forward += pool;
            work.transient_backward += pool;
        }
        CudaGraphs::Step => {
            let factor = known::GRAPHED_STEP.factor();
            for bytes in [
                &mut work.saved,
                &mut work.saved_for_weight,
                &mut work.transient_forward,
                &mut work.transient_backward,
            ] {
                *bytes = Bytes((bytes.as_f64() * factor) as u64);
            }
        }
    }
}
