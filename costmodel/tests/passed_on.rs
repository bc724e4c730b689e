//! What pipeline stages hold of the tensors that they receive and pass on, by the memory of one more micro-batch.

use catalog::runtime::Rewrite;
use catalog::{Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};

const RANKS: usize = 4;
const SEQUENCE: u64 = 4096;

/// Bytes that every pipeline rank needs at its peak for so many micro-batches of one sequence.
fn memory(runtime: &str, holds: &[Rewrite], plan: &str, micro_batches: u64) -> Vec<u64> {
    let mut runtime = catalog::load::runtime(runtime).expect("a preset");
    runtime.overheads.fragmentation.value = 1.0;
    runtime.rewrites.extend(holds.iter().copied());
    let scenario = Scenario {
        model: catalog::load::model("llama3-8b").expect("a preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("a preset"),
        runtime,
        workload: Workload::new(WorkloadSizes {
            gpus: 8,
            seq_len: SEQUENCE,
            global_batch: micro_batches,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    };
    let plan = plans::grammar::parse(plan, &scenario.model, &scenario.workload, &scenario.runtime)
        .expect("a strategy");
    let costs = CostModel::new(scenario).expect("a cost model");
    let predicted = costs.predict(&plan).expect("a prediction");
    predicted.memory_by_rank.iter().map(|b| b.0).collect()
}

/// Bytes that every rank needs for one more micro-batch.
fn of_one_more(runtime: &str, holds: &[Rewrite], plan: &str) -> Vec<u64> {
    let [few, many] = [16, 24].map(|count| memory(runtime, holds, plan, count));
    let pairs = few.iter().zip(&many);
    pairs.map(|(few, many)| (many - few) / 8).collect()
}

#[test]
fn one_more_micro_batch_takes_what_stages_hold_of_it() {
    let model = catalog::load::model("llama3-8b").expect("a preset");
    // Sequence parallelism gives each of two ranks half of what stages send.
    let sent = SEQUENCE * model.hidden * 2 / 2;
    let logits = SEQUENCE * model.vocab.div_ceil(2) * 2;
    let one = "tp2 pp4 zero0 sp mbs1 1f1b";
    let two = "tp2 pp4 vpp2 zero0 sp mbs1 interleaved";
    // A buffer for the input, and one for the gradient of the output.
    let buffers = [1, 2, 2, 1].map(|tensors| tensors * sent);
    // What was sent beside them: outputs and gradients of inputs.
    let all = [2, 4, 4, 2].map(|tensors| tensors * sent);
    let with_logits = [all[0], all[1], all[2], all[3] + logits];
    let of_two_stages = [6, 8, 8, 6].map(|tensors| tensors * sent);
    // The last rank has two neighbouring stages, which send each other nothing.
    let v = "tp2 pp4 vpp2 zero0 sp mbs1 zb-v";
    let of_v = [4, 8, 8, 6].map(|tensors| tensors * sent);
    for (runtime, holds, plan, expected) in [
        ("torchtitan", &[][..], one, buffers),
        ("torchtitan", &[Rewrite::KeepPassedOn][..], one, with_logits),
        ("torchtitan", &[], two, of_two_stages),
        ("torchtitan", &[], v, of_v),
        ("megatron-core", &[], one, [0; RANKS]),
        ("megatron-core", &[], two, [0; RANKS]),
    ] {
        let found = of_one_more(runtime, holds, plan);
        assert_eq!(found, expected, "{runtime} {plan} {holds:?}");
    }
}

#[test]
fn an_input_in_a_buffer_is_not_saved_a_second_time() {
    let model = catalog::load::model("llama3-8b").expect("a preset");
    let sent = SEQUENCE * model.hidden * 2 / 2;
    let plan = "tp2 pp4 zero0 sp mbs1 1f1b";
    let keeps = [Rewrite::KeepStageOutput];
    let without = memory("megatron-core", &keeps, plan, 16);
    let buffers = memory(
        "megatron-core",
        &[keeps[0], Rewrite::BufferMicroBatches],
        plan,
        16,
    );
    // Rank `r` has `RANKS - r` micro-batches in flight. The first rank receives no inputs, the last one no gradients.
    let expected = [16, 16 + 16 - 3, 16 + 16 - 2, 16 - 1];
    for (rank, tensors) in expected.into_iter().enumerate() {
        assert_eq!(buffers[rank] - without[rank], tensors * sent, "rank {rank}");
    }
}
