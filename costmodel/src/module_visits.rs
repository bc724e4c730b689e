//! What DeepSpeed's ZeRO-3 engine does in Python for every module of a model, in every pass over it.
//!
//! Hooks around a module's forward let the compute stream wait for its gathered parameters and apply two functions to its
//! inputs and outputs. Backward runs these two functions' backwards, and waits for the parameters again
//! (`runtime/zero/parameter_offload.py`, `_register_hooks_recursively`; `partitioned_param_coordinator.py`,
//! `fetch_sub_module`). Each of these calls takes the host as long as launching a kernel.

use std::sync::Arc;

use models::BlockClass;
use plans::Recompute;

use crate::Scenario;
use crate::block_cost::BlockCost;
use crate::stage::{Run, StageWork};
use crate::work::Work;

/// Calls for a module in each pass: a wait of the compute stream, and two functions of autograd.
const VISIT: u64 = 3;
/// Calls for a sharded parameter in each pass: gathering it, or copying it out of what was gathered with it, and freeing it
/// (`partition_parameters.py`, `all_gather_coalesced`, `free_param`).
const GATHER: u64 = 2;
/// Calls for the gradient of a parameter: a copy into the bucket that is reduced, and one out of it (`stage3.py`,
/// `__add_grad_to_ipg_bucket`, `partition_grads`).
const REDUCE: u64 = 2;
/// Modules of a decoder layer apart from those that hold a matrix: the layer, its attention, its
/// feed-forward part, the activation and two norms (transformers, `LlamaDecoderLayer`).
const OF_LAYER: u64 = 6;

/// Adds the host's time for these calls to a stage; returns its rows of blocks with that time.
pub(crate) fn add(
    scenario: &Scenario,
    ranks: u64,
    runs: &[Run],
    stage: &mut StageWork,
) -> Vec<Run> {
    let launch = scenario.by_host(&scenario.runtime.overheads.launch);
    let with_visits = |run: &Run| {
        let work = |calls: u64| Work {
            host: launch * calls as f64,
            ..Work::default()
        };
        let pass = calls_of_pass(run, ranks);
        let again = match run.cost.key.recompute {
            Recompute::Full => pass,
            _ => 0,
        };
        let reduced = REDUCE * run.cost.tensors.reduced;
        stage.forward += work(pass * run.count);
        stage.recompute += work(again * run.count);
        stage.backward.add_input(work(pass * run.count));
        stage.backward.add_weight(work(reduced * run.count));
        let mut cost = BlockCost::clone(&run.cost);
        cost.forward += work(pass);
        cost.recompute += work(again);
        cost.backward.add_input(work(pass));
        cost.backward.add_weight(work(reduced));
        Run {
            cost: Arc::new(cost),
            ..*run
        }
    };
    runs.iter().map(with_visits).collect()
}

/// Number of calls of a pass over a block, which visits its modules and gathers their parameters.
fn calls_of_pass(run: &Run, ranks: u64) -> u64 {
    let gathered = run.cost.tensors.gathered;
    let others = match run.cost.key.class {
        BlockClass::Layer(_) | BlockClass::Mtp => OF_LAYER,
        BlockClass::Embedding | BlockClass::Head => 0,
    };
    let gathers = if ranks > 1 { GATHER * gathered } else { 0 };
    VISIT * (gathered + others) + gathers
}

#[cfg(test)]
mod tests {
    use catalog::runtime::Rewrite;
    use catalog::{Precision, Seconds, WorkloadSizes};

    use crate::{CostModel, testing};

    /// Time of a step of Llama 3 8B under the Trainer with DeepSpeed on two GPUs, for a sequence of 128 tokens.
    fn step(zero: &str, recompute: &str, visits: bool) -> f64 {
        let sizes = WorkloadSizes {
            gpus: 2,
            seq_len: 128,
            global_batch: 2,
            precision: Precision::Bf16,
        };
        let mut scenario = testing::scenario(["llama3-8b", "dgx-h100", "hf-deepspeed"], sizes);
        scenario.runtime.overheads.launch.value = Seconds(1e-3);
        if !visits {
            scenario.runtime.rewrites.remove(&Rewrite::VisitModules);
        }
        let text = format!("zero={zero},mbs=1,recompute={recompute}");
        let plan = testing::strategy(&scenario, &text);
        let costs = CostModel::new(scenario).expect("priced");
        costs.predict(&plan).expect("priced").step_time.0
    }

    #[test]
    fn every_pass_visits_every_module_of_a_layer() {
        // Seven matrices are modules that are gathered, and six more modules are visited; nine gradients are reduced.
        let pass = 13 * 3 + 7 * 2;
        for (recompute, passes) in [("none", 2), ("full", 3)] {
            let longer = step("3", recompute, true) - step("3", recompute, false);
            // Embedding and head are three modules more, of which two are gathered.
            let layers = 32 * (passes * pass + 9 * 2);
            let ends = longer / 1e-3 - f64::from(layers);
            assert!((0.0..60.0).contains(&ends), "{recompute}: {ends}");
            let unsharded = step("2", recompute, true) - step("2", recompute, false);
            assert_eq!(unsharded, 0.0, "only ZeRO-3 does so");
        }
    }
}
