//! Memory of a rank under PyTorch's `fully_shard` (FSDP2), and under tensor parallelism that leaves embedding and head whole.

use catalog::runtime::Rewrite;
use catalog::{Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use plans::Prediction;

/// Weights of Llama 3 8B, of its embedding or its head, and of one of its norms (Meta's `params.json`).
const WEIGHTS: u64 = 8_030_261_248;
const VOCABULARY: u64 = 128_256 * 4096;
const NORM: u64 = 4096;

const IN_FLIGHT: &str = "gathered parameters and gradients in flight";

fn of_sequences(global_batch: u64) -> Workload {
    Workload::new(WorkloadSizes {
        gpus: 8,
        seq_len: 2048,
        global_batch,
        precision: Precision::Bf16,
    })
    .expect("a workload")
}

fn predicted(plan: &str, change: impl Fn(&mut Scenario)) -> Prediction {
    let mut scenario = Scenario {
        model: catalog::load::model("llama3-8b").expect("a preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("a preset"),
        runtime: catalog::load::runtime("fsdp2").expect("a preset"),
        workload: of_sequences(8),
        headroom: 0.0,
    };
    change(&mut scenario);
    let Scenario {
        model,
        workload,
        runtime,
        ..
    } = &scenario;
    let plan = plans::grammar::parse(plan, model, workload, runtime).expect(plan);
    let costs = CostModel::new(scenario).expect("a cost model");
    costs.predict(&plan).expect("a prediction")
}

#[test]
fn gradients_are_copied_to_the_buffer_that_is_reduced() {
    let in_flight = |copies: bool| {
        let of = predicted("dp8 zero3 mbs1", |s| {
            if !copies {
                s.runtime.rewrites.remove(&Rewrite::CopyShards);
                s.runtime.rewrites.insert(Rewrite::FlattenGradients);
            }
        });
        of.memory_of(IN_FLIGHT).0
    };
    // The largest gradients of 16 bits are those of the head and the norm before it.
    assert_eq!(in_flight(true) - in_flight(false), 2 * (VOCABULARY + NORM));
}

#[test]
fn autograd_keeps_casts_of_gathered_parameters_unless_layers_run_again() {
    let in_flight = |recompute: &str| {
        let of = predicted(&format!("dp8 zero3 mbs1 recompute={recompute}"), |s| {
            let code = [Rewrite::Autocast, Rewrite::GatherHeldType];
            s.runtime.rewrites.extend(code);
        });
        of.memory_of(IN_FLIGHT).0
    };
    assert_eq!(in_flight("none") - in_flight("full"), 2 * WEIGHTS);
}

#[test]
fn a_vocabulary_may_be_whole_on_every_tensor_parallel_rank() {
    let parameters = |plan: &str, whole: bool| {
        let of = predicted(plan, |s| {
            if whole {
                s.runtime.rewrites.insert(Rewrite::WholeVocabulary);
            }
        });
        of.memory_of("parameters").0
    };
    let plan = "tp8 dp1 zero0 sp=off mbs1";
    // Seven eighths of embedding and head more, in 32 bits.
    let more = parameters(plan, true) - parameters(plan, false);
    assert_eq!(more, 4 * 2 * VOCABULARY / 8 * 7);
    let divided = "tp8 dp1 zero0 sp mbs1";
    assert_eq!(parameters(divided, true), parameters(divided, false));
}

#[test]
fn frameworks_differ_in_what_they_do_for_every_micro_batch() {
    let on = |runtime: &str, plan: &str, micro_batches: u64| {
        predicted(&format!("{plan} mbs1 overlap=none"), |s| {
            s.runtime = catalog::load::runtime(runtime).expect("a preset");
            s.workload = of_sequences(8 * micro_batches);
            // So slow that nothing else takes time.
            s.cluster.scale_up.bandwidth.value.0 /= 1e4;
        })
    };
    // Of a step with four micro-batches: its messages, as many times those of a step with one; bytes of unreduced gradients that the
    // other micro-batches leave, for each parameter.
    for (runtime, plan, messages, unreduced) in [
        ("fsdp2", "dp8 zero3 reshard=on", 4.0, 0),
        ("fsdp2", "dp8 zero3 reshard=off", 4.0, 0),
        // `no_sync`: of two gathers and a reduction of equal size, the reduction happens once.
        ("hf-trainer", "dp8 zero3 reshard=on", 3.0, 2),
        ("hf-trainer", "dp8 zero3 reshard=off", 2.5, 2),
        ("vescale", "dp8 zero3 reshard=on", 4.0, 0),
    ] {
        let [one, four] = [1, 4].map(|micro_batches| on(runtime, plan, micro_batches));
        let more = four.step_time.0 / one.step_time.0;
        assert!(
            (more / messages - 1.0).abs() < 0.03,
            "{runtime} {plan}: {more}"
        );
        let left = four.memory_of(IN_FLIGHT).0 - one.memory_of(IN_FLIGHT).0;
        let each = (left as f64 / WEIGHTS as f64).round() as u64;
        assert_eq!(each, unreduced, "{runtime} {plan}");
    }
}

#[test]
fn pipelines_of_pytorch_reduce_gradients_once() {
    let in_flight = |plan: &str| {
        let of = predicted(plan, |s| {
            s.runtime = catalog::load::runtime("torchtitan").expect("a preset");
            s.workload = of_sequences(64);
        });
        of.memory_of(IN_FLIGHT).0
    };
    // Half of the model's gradients, in 32 bits.
    let on = in_flight("pp2 dp4 zero3 reshard=on mbs1");
    let alone = in_flight("dp8 zero3 reshard=on mbs1");
    assert!(on > 4 * WEIGHTS / 2 && alone < WEIGHTS, "{on} {alone}");
    let default = in_flight("pp2 dp4 zero3 mbs1");
    assert_eq!(default, in_flight("pp2 dp4 zero3 reshard=off mbs1"));
}

#[test]
fn one_rank_of_fsdp_casts_parameters_block_by_block() {
    let of = |runtime: &str, plan: &str| {
        predicted(plan, |s| {
            s.runtime = catalog::load::runtime(runtime).expect("a preset");
        })
    };
    // A block and the next one, gradients of the largest block, and none of the model's.
    let in_flight = |plan: &str| of("torchtitan-2026", plan).memory_of(IN_FLIGHT).0;
    assert!(in_flight("tp4 dp2 zero0 mbs1") < WEIGHTS / 4 * 4);
    // Plain copies keep buckets of all gradients.
    let buckets = of("generic-eager", "tp4 dp2 zero0 mbs1")
        .memory_of(IN_FLIGHT)
        .0;
    assert!(buckets >= WEIGHTS / 4 * 4);
}

#[test]
fn a_compiler_keeps_the_sum_of_a_layer_and_its_adapter() {
    let saved = |runtime: &str| {
        let of = predicted("dp8 zero3 mbs1", |s| {
            s.runtime = catalog::load::runtime(runtime).expect("a preset");
            let adapters = Some("rank=16".parse().expect("adapters"));
            let model = s.model.clone().with_adapters(adapters);
            s.model = model.expect("a model");
        });
        of.memory_of("saved activations").0
    };
    let (eager, compiled) = (saved("torchtitan"), saved("torchtitan-compile"));
    assert!(0 < compiled && compiled < eager, "{compiled} {eager}");
}
