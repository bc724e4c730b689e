//! Computes the cost of one block under one layout: trace, lower, price, run.

use catalog::{Bytes, Seconds};
use plans::NamedTime;

use crate::block_cost::{BlockCost, BlockKey, Tensors, elements};
use crate::book::{BlockToPrice, PriceBook, PricedBlock};
use crate::issue::Launch;
use crate::lower::Lowering;
use crate::streams::{self, Task};
use crate::work::Backward;
use crate::{CostError, Scenario};

/// Computes the cost of a block.
///
/// # Errors
/// When the model cannot be traced under the layout, or an operator has no price.
pub(crate) fn price(
    scenario: &Scenario,
    book: &dyn PriceBook,
    key: &BlockKey,
) -> Result<BlockCost, CostError> {
    let trace = models::trace_block(&scenario.model, key.class, &key.layout)
        .map_err(|e| CostError::Trace(e.to_string()))?;
    let lowering = Lowering {
        runtime: &scenario.runtime,
    };
    let lowered = lowering.lower(&trace);
    let mut cost = BlockCost {
        elements: elements(&trace),
        tensors: Tensors::of(&trace),
        memory: lowering.memory(&trace, &lowered, key.recompute, key.layout.tp),
        output: trace.output.map_or(Bytes(0), |id| trace.tensor(id).bytes()),
        ..BlockCost::default()
    };
    let of = BlockToPrice {
        scenario,
        key,
        trace: &trace,
        lowering,
        lowered: &lowered,
    };
    let slowdown = scenario.runtime.overheads.overlap_slowdown.value;
    time(&book.block(&of)?, slowdown, &mut cost);
    Ok(cost)
}

/// Runs every pass by itself, on idle streams, and adds up its time by category and by kernel.
fn time(priced: &PricedBlock, slowdown: f64, cost: &mut BlockCost) {
    let named = |pass: &[Launch], what: &str, kernels: &mut Vec<NamedTime>| {
        let mut spent = vec![Seconds(0.0); priced.kernels.len()];
        let work = streams::run(&tasks(priced, pass), slowdown, |task, time| {
            spent[pass[task].kernel] += time;
        });
        for (kernel, seconds) in priced.kernels.iter().zip(&spent) {
            if seconds.0 > 0.0 {
                kernels.push(NamedTime {
                    name: format!("{}{what}", kernel.name),
                    seconds: seconds.0,
                });
            }
        }
        work
    };
    let alone = |pass: &[Launch]| streams::run(&tasks(priced, pass), slowdown, |_, _| {});
    let kernels = &mut cost.kernels;
    cost.forward = named(&priced.forward, "", kernels);
    cost.recompute = named(&priced.recompute, " (recomputed)", kernels);
    cost.backward = Backward {
        whole: named(&priced.backward, "", kernels),
        input: alone(&priced.backward_input),
        weight: alone(&priced.backward_weight),
    };
}

fn tasks(priced: &PricedBlock, pass: &[Launch]) -> Vec<Task> {
    let task = |launch: &Launch| {
        let kernel = &priced.kernels[launch.kernel];
        Task {
            stream: launch.stream,
            duration: match launch.parts {
                1 => kernel.time,
                parts => kernel.part.unwrap_or(kernel.time * (1.0 / parts as f64)),
            },
            host: kernel.host,
            waits: launch.waits,
        }
    };
    pass.iter().map(task).collect()
}
