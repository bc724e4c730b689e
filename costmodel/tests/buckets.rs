//! What data-parallel messages hold: every message has a latency that grows with its ranks, so it counts how many there are.

use catalog::{Precision, Workload};
use costmodel::{CostModel, Scenario};
use plans::Prediction;

fn predict(model: &str, runtime: &str, [gpus, batch]: [u64; 2], text: &str) -> Prediction {
    let s = Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus,
            seq_len: 4096,
            global_batch: batch,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    };
    let strategy = plans::grammar::parse(text, &s.model, &s.workload, &s.runtime).expect(text);
    let costs = CostModel::new(s).expect("priced");
    costs.predict(&strategy).expect("priced")
}

/// Seconds between two of a ring's steps, as `known.rs` has them.
const RING_STEP: f64 = 4.5e-6;

/// FSDP gathers every block twice and reduces it once, however small the block is: 30 layers of 3.5 million parameters each. A message
/// as short as 7 MB goes round 512 ranks, 8 of each node, by NCCL's protocol for short ones. Passes hide less than half of them.
#[test]
fn fsdp_sends_every_block_by_itself() {
    let exposed = |gpus| {
        let predicted = predict("smollm2-135m", "fsdp2", [gpus, 8 * gpus], "zero3 mbs1");
        predicted.breakdown.dp_exposed_s
    };
    let latency = 6.6e-6 + 448e-6 + 63.0 * 2.7e-6;
    let micro_batches = 8.0;
    let messages = micro_batches * 30.0 * 3.0 * latency;
    assert!(
        exposed(512) > 0.5 * messages,
        "{} of {messages}",
        exposed(512)
    );
}

/// Without overlap Megatron-LM reduces all gradients in one message, and gathers all parameters in another. 35.3 GB of gradients in 32
/// bits leave a node by eight cards of 50 GB/s, and half as many bytes of parameters.
#[test]
fn megatron_sends_a_whole_stage_at_once_if_nothing_overlaps() {
    let text = "tp8 zero1 mbs1 overlap=none";
    let exposed = |gpus: u64| {
        let predicted = predict("llama3-70b", "megatron-core", [gpus, gpus / 4], text);
        predicted.breakdown.dp_exposed_s
    };
    let (few, many) = (exposed(1024), exposed(8192));
    let messages = 2.0 * (1023.0 - 127.0) * RING_STEP;
    let more = many - few;
    assert!(
        (messages..2.0 * messages).contains(&more),
        "{more}, {messages}"
    );
}

/// Megatron-LM's later pipeline ranks have one bucket each, so that their latency does not grow with their layers.
#[test]
fn megatron_sends_the_later_stages_of_a_pipeline_at_once() {
    let step = |dp: u64| {
        let sizes = [64 * dp, 16 * dp];
        predict(
            "llama3-70b",
            "megatron-core",
            sizes,
            "tp8 pp8 vpp1 zero1 mbs1",
        )
        .step_time
        .0
    };
    // The first rank's ten layers fill few buckets of a million parameters for each data-parallel rank.
    let more = step(512) - step(128);
    let messages = 384.0 * RING_STEP;
    assert!(more < 16.0 * messages, "{more} of {messages} a message");
}
