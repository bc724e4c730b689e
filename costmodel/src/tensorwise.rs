//! ZeRO-3 as DeepSpeed first had it: parameters gathered and gradients reduced tensor by tensor.
//!
//! Each rank's piece of a tensor is a view and a copy that the host issues by itself, so a
//! collective costs one launch per rank in addition to its latency and the time of its bytes, and
//! the device is synchronised before it, so nothing hides it
//! (`deepspeed/runtime/zero/partition_parameters.py`, `stage3.py` at c83e49f).

use catalog::{Bytes, Seconds};
use dtensor::CollectiveKind;

use crate::CostError;
use crate::messages::Message;
use crate::price::{MemoryKind, TablePrices};
use crate::stage::{Run, StageWork};
use crate::stage_traffic::Traffic;
use crate::work::Work;

/// Adds the gathers and reductions of a stage to its work of every micro-batch. `stage.layers` must already hold the
/// times of the collectives, as if each block had a single one.
///
/// # Errors
/// When a message was not measured.
pub(crate) fn expose(
    traffic: &Traffic<'_>,
    prices: &TablePrices,
    message: Message<'_>,
    runs: &[Run],
    stage: &mut StageWork,
) -> Result<(), CostError> {
    let (scenario, parallel) = (traffic.scenario, traffic.parallel);
    let launch = scenario.by_host(&scenario.runtime.overheads.launch);
    let ranks = parallel.ranks() as f64;
    let sum = |count: fn(&Run) -> u64| -> u64 { runs.iter().map(|r| count(r) * r.count).sum() };
    let gathered = sum(|run| run.cost.tensors.gathered);
    let reduced = sum(|run| run.cost.tensors.reduced);
    let blocks = sum(|run| u64::from(run.cost.tensors.gathered > 0));
    let size = scenario.workload.precision.activation().size();
    let [whole, trained] = [
        sum(|run| run.cost.weights.all().total()),
        sum(|run| run.cost.weights.trained.total()),
    ];
    let start = |kind, elements: u64, tensors: u64| {
        let bytes = Bytes(elements * size / tensors.max(1));
        parallel.start(kind, bytes, message)
    };
    let gather_start = start(CollectiveKind::AllGather, whole, gathered)?;
    let reduce_start = start(CollectiveKind::ReduceScatter, trained, reduced)?;
    // The first tensor of a block has its start in the block's collective.
    let tensors = |count: u64, start: Seconds| {
        launch * (count as f64 * ranks) + start * count.saturating_sub(blocks) as f64
    };
    let passes = |count: u64, elements: u64| {
        let moved = Bytes(count * (elements * size));
        prices.memory_bound(MemoryKind::Pointwise, moved)
    };
    let collectives = |time: fn(&crate::stage::LayerTraffic) -> Seconds| -> Seconds {
        let layers = stage.layers.iter();
        layers.map(|layer| time(layer) * layer.count as f64).sum()
    };
    // Three passes: clearing the buffer, reading the collective's buffer, writing the pieces.
    let gather = collectives(|layer| layer.gather) + passes(3, whole);
    // Two passes: reading the gradients, writing the collective's buffer.
    let reduce = collectives(|layer| layer.reduce) + passes(2, trained);
    let waits = |dp: Seconds| Work {
        dp,
        ..Work::default()
    };
    let all = gather + tensors(gathered, gather_start);
    stage.forward += waits(all);
    // Recomputation frees what it gathered, except the tensor it used last, which backward begins with.
    if stage.recompute.duration().0 > 0.0 {
        let again = gather + tensors(gathered.saturating_sub(blocks), gather_start);
        stage.backward.add_input(waits(again));
    }
    stage.backward.add_input(waits(all));
    (stage.backward).add_weight(waits(reduce + tensors(reduced, reduce_start)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use catalog::{Precision, Seconds, WorkloadSizes};

    use crate::{CostModel, testing};

    /// Data-parallel seconds that nothing hides, of GPT-3 under DeepSpeed's first ZeRO-3. `launch` and `hop` are the seconds in which
    /// the host issues a copy and a message gets from one node to the next.
    fn exposed(gpus: u64, [launch, hop]: [f64; 2], recompute: &str) -> f64 {
        let sizes = WorkloadSizes {
            gpus,
            seq_len: 2048,
            global_batch: gpus,
            precision: Precision::Fp16,
        };
        let mut scenario = testing::scenario(["gpt3-175b", "dgx-a100", "deepspeed-2021"], sizes);
        scenario.runtime.overheads.launch.value = Seconds(launch);
        scenario.cluster.scale_out.latency.value = Seconds(hop);
        let text = format!("dp_shard={gpus},zero=3,mbs=1,recompute={recompute}");
        let plan = testing::strategy(&scenario, &text);
        let costs = CostModel::new(scenario).expect("priced");
        costs.predict(&plan).expect("priced").breakdown.dp_exposed_s
    }

    #[test]
    fn every_piece_costs_a_launch_every_tensor_a_ring_and_nothing_hides_the_bytes() {
        // A layer has four tensors that are gathered and twelve that are reduced. Recomputation gathers
        // them once more, but for one.
        for (recompute, per_layer) in [("full", 4 + 3 + 4 + 12), ("none", 4 + 4 + 12)] {
            for gpus in [64, 512] {
                let time = 1e-5;
                let ends = |count: f64| count - 96.0 * f64::from(per_layer);
                let bytes = exposed(gpus, [0.0, 0.0], recompute);
                let pieces = (exposed(gpus, [time, 0.0], recompute) - bytes) / time / gpus as f64;
                assert!(
                    (0.0..24.0).contains(&ends(pieces)),
                    "{gpus} {recompute}: {pieces}"
                );
                // A ring crosses from node to node once for every eight GPUs.
                let rings =
                    (exposed(gpus, [0.0, time], recompute) - bytes) / time / gpus as f64 * 8.0;
                assert!(
                    (0.0..24.0).contains(&ends(rings)),
                    "{gpus} {recompute}: {rings}"
                );
                // 350 GB in 16 bits, gathered and reduced by each device at no more than its node's 200 GB/s.
                assert!(bytes > 3.0 * 350.0 / 200.0, "{gpus} {recompute}: {bytes} s");
            }
        }
    }
}
