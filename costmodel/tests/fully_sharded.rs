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

fn predicted(plan: &str, change: impl Fn(&mut Scenario)) -> Prediction {
    let mut scenario = Scenario {
        model: catalog::load::model("llama3-8b").expect("a preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("a preset"),
        runtime: catalog::load::runtime("fsdp2").expect("a preset"),
        workload: Workload::new(WorkloadSizes {
            gpus: 8,
            seq_len: 2048,
            global_batch: 8,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
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
