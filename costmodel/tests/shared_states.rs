//! Memory and messages of ranks that share states: under PyTorch's `fully_shard` (FSDP2), under
//! tensor parallelism with whole embedding and head, and where several blocks read one vocabulary
//! table.

use catalog::runtime::Rewrite;
use catalog::{Model, Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use plans::Prediction;

/// Weights of Llama 3 8B, of its embedding or its head, and of one of its norms (Meta's `params.json`).
const WEIGHTS: u64 = 8_030_261_248;
const VOCABULARY: u64 = 128_256 * 4096;
const NORM: u64 = 4096;

const IN_FLIGHT: &str = "gathered parameters and gradients in flight";

fn of_sequences(global_batch: u64) -> Workload {
    workload(8, 2048, global_batch)
}

fn workload(gpus: u64, seq_len: u64, global_batch: u64) -> Workload {
    Workload::new(WorkloadSizes {
        gpus,
        seq_len,
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

/// The peak is the backward pass of the loss, at which all other casts are still there that autograd holds.
#[test]
fn autograd_keeps_autocasts_casts_of_layers_that_do_not_run_again() {
    let temporaries = |recompute: &str, tied: bool| {
        let of = predicted(&format!("dp8 zero0 mbs1 recompute={recompute}"), |s| {
            let json = include_str!("../../catalog/presets/models/llama3.2-1b.json");
            let json = match tied {
                true => json.to_owned(),
                false => json.replace(
                    "\"tie_word_embeddings\": true",
                    "\"tie_word_embeddings\": false",
                ),
            };
            s.model = catalog::hf::decode(&json, "test", "test").expect("a model");
            s.runtime = catalog::load::runtime("hf-trainer").expect("a preset");
            s.workload = workload(8, 8192, 16);
        });
        assert!(of.peak_moment.starts_with("B s"), "{}", of.peak_moment);
        of.memory_of("temporaries").0
    };
    // Weights without the table of embedding and head, and without the norm before the head.
    let layers = 1_235_814_400 - 128_256 * 2048 - 2048;
    for tied in [true, false] {
        let [none, full] = ["none", "full"].map(|recompute| temporaries(recompute, tied));
        assert_eq!(none - full, 2 * layers, "tied: {tied}");
        // Looking up rows of the embedding casts nothing.
        assert_eq!(none, temporaries("none", true));
    }
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
        predicted(&format!("{plan} mbs1"), |s| {
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
        ("generic-eager", "dp8 zero0", 1.0, 0),
        ("torchtitan-2026", "dp8 zero0", 4.0, 0),
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

/// Freed after its forward pass, an embedding is not gathered together with the head, but gathered once more.
#[test]
fn an_embedding_with_a_table_of_its_own_is_freed_between_its_passes() {
    for (runtime, plan, tied, is_freed) in [
        ("torchtitan", "dp8 zero3 reshard=on mbs1", false, true),
        ("torchtitan-2026", "dp8 zero3 reshard=on mbs1", false, true),
        ("hf-trainer", "dp8 zero3 reshard=on mbs1", false, true),
        ("torchtitan", "dp8 zero3 reshard=on mbs1", true, false),
        ("torchtitan", "dp8 zero3 reshard=off mbs1", false, false),
        ("fsdp2", "dp8 zero3 reshard=on mbs1", false, false),
    ] {
        let of = |as_preset: bool| {
            predicted(plan, |s| {
                s.runtime = catalog::load::runtime(runtime).expect("a preset");
                if !as_preset {
                    s.runtime.rewrites.remove(&Rewrite::FreeEmbedding);
                }
                let mut config = (*s.model).clone();
                config.tied_embeddings = tied;
                s.model = Model::new(config, "changed").expect("a model");
                // So slow that nothing else takes time.
                s.cluster.scale_up.bandwidth.value.0 /= 1e4;
            })
        };
        let [kept, freed] = [false, true].map(of);
        let less = kept.memory_of(IN_FLIGHT).0 - freed.memory_of(IN_FLIGHT).0;
        let more = freed.step_time.0 - kept.step_time.0;
        let expected = if is_freed { 2 * VOCABULARY } else { 0 };
        assert_eq!(less, expected, "{runtime} {plan} {tied}");
        assert_eq!(
            more > 0.01 * kept.step_time.0,
            is_freed,
            "{runtime} {plan} {tied}: {more}"
        );
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

/// 32 short sequences of a model on 16 GPUs under Megatron-Core.
fn on_megatron(model: &str, plan: &str, change: impl Fn(&mut Scenario)) -> Prediction {
    predicted(plan, |s| {
        s.model = catalog::load::model(model).expect("a preset");
        s.runtime = catalog::load::runtime("megatron-core").expect("a preset");
        s.workload = workload(16, 512, 32);
        change(s);
    })
}

fn untied(scenario: &mut Scenario) {
    let mut config = (*scenario.model).clone();
    config.tied_embeddings = false;
    scenario.model = Model::new(config, "changed").expect("a model");
}

#[test]
fn a_rank_holds_every_parameter_once() {
    for (name, modules) in [
        ("llama3-8b", 0),
        ("qwen2.5-0.5b", 0),
        ("deepseek-v3", 0),
        ("deepseek-v3", 1),
        ("deepseek-v3", 3),
    ] {
        let with_modules = |scenario: &mut Scenario| {
            let mut config = (*scenario.model).clone();
            config.mtp_layers = modules;
            scenario.model = Model::new(config, "changed").expect("a model");
        };
        let held = on_megatron(name, "dp16 zero0 mbs1", with_modules).memory_of("parameters");
        let mut config = (*catalog::load::model(name).expect("a preset")).clone();
        config.mtp_layers = modules;
        let all = models::parameters(&config).expect("a model");
        let elements: u64 = all.iter().map(|parameter| parameter.global_elements).sum();
        assert_eq!(held.0, 2 * elements, "{name}, {modules} modules");
    }
}

#[test]
fn the_gradients_of_a_tied_table_are_sent_once() {
    let exposed = |change: fn(&mut Scenario)| {
        let plan = "dp16 zero0 mbs2 overlap=none";
        let of = on_megatron("qwen2.5-0.5b", plan, |s| {
            change(s);
            s.cluster.scale_out.bandwidth.value.0 /= 100.0;
        });
        of.breakdown.dp_exposed_s
    };
    // 494 million parameters, and 136 million of the table.
    let ratio = exposed(|_| ()) / exposed(untied);
    assert!((ratio - 494.0 / 630.0).abs() < 0.01, "{ratio}");
}

#[test]
fn both_ends_of_a_pipeline_sum_the_gradients_of_a_tied_table() {
    let seconds = |change: fn(&mut Scenario)| {
        let of = on_megatron("qwen2.5-0.5b", "pp2 dp8 zero0 mbs2", change);
        of.breakdown.dp_exposed_s
    };
    // 136 million gradients of 32 bits cross from node to node at about 47.5 GB/s.
    let more = seconds(|_| ()) - seconds(untied);
    assert!((0.008..0.016).contains(&more), "{more}");
}
