//! After the optimizer has updated its shares, ranks gather the whole parameters. Some runtimes do so while the next forward
//! passes run, so that the step takes no longer; DeepSpeed does so at the end of the step, which takes longer by the messages.

use catalog::runtime::Rewrite;
use catalog::{Precision, Workload};
use costmodel::{CostModel, Scenario};
use plans::prediction::Breakdown;

/// Number of parameters of GPT-2 XL (Radford et al. 2019).
const WEIGHTS: f64 = 1.5575e9;
/// Peak rate of an A100's NVLink in one direction, in bytes per second.
const NVLINK: f64 = 300e9;
const GPUS: u64 = 8;
/// DeepSpeed as it is, and the same system if it gathered updated parameters while forward passes run.
const ALTERNATIVES: [Option<Rewrite>; 2] = [None, Some(Rewrite::GatherInStep)];

fn scenario(runtime: &str) -> Scenario {
    Scenario {
        model: catalog::load::model("gpt2-xl").expect("preset"),
        cluster: catalog::load::cluster("dgx-a100").expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus: GPUS,
            seq_len: 1024,
            global_batch: 16 * GPUS,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    }
}

fn predicted(s: Scenario, plan: &str) -> Breakdown {
    let plan = plans::grammar::parse(plan, &s.model, &s.workload, &s.runtime).expect(plan);
    let costs = CostModel::new(s).expect("priced");
    costs.predict(&plan).expect("priced").breakdown
}

/// The parts of a step's time under DeepSpeed; with `unless`, under a DeepSpeed without this
/// rewrite.
fn breakdown(plan: &str, unless: Option<Rewrite>) -> Breakdown {
    let mut s = scenario("deepspeed");
    if let Some(rewrite) = unless {
        assert!(s.runtime.rewrites.remove(&rewrite), "{rewrite:?}");
    }
    if unless == Some(Rewrite::GatherInStep) {
        // A system that flattens and frees gradients and gathers no parameters in the step would be FSDP.
        s.runtime.rewrites.remove(&Rewrite::ReleaseGradients);
    }
    predicted(s, plan)
}

/// Seconds in which ranks wait for data-parallel messages, because no computation runs beside them.
fn exposed(plan: &str, unless: Option<Rewrite>) -> f64 {
    breakdown(plan, unless).dp_exposed_s
}

#[test]
fn deepspeed_hides_no_gather_of_updated_parameters() {
    // Every rank receives seven eighths of the 16-bit parameters.
    let gather = 2.0 * WEIGHTS * (GPUS - 1) as f64 / GPUS as f64 / NVLINK;
    for plan in ["dp8 zero1 mbs4", "dp8 zero2 mbs4"] {
        let [within, beside] = ALTERNATIVES.map(|unless| exposed(plan, unless));
        assert!(within - beside > 0.9 * gather, "{plan}: {within} {beside}");
    }
    let zero_3 = ALTERNATIVES.map(|unless| exposed("dp8 zero3 mbs4", unless));
    // Gathered before every pass. Other systems have a message for every block, DeepSpeed a share of a bucket's.
    let ratio = zero_3[0] / zero_3[1];
    assert!((ratio - 1.0).abs() < 0.05, "{ratio}");
}

#[test]
fn deepspeed_puts_gradients_into_buckets_one_after_the_other() {
    // Twelve tensors of every layer, two embeddings, and weight and bias of the last norm.
    let tensors = 48.0 * 12.0 + 2.0 + 2.0;
    let launch = catalog::load::runtime("deepspeed").expect("preset");
    let launch = launch.overheads.launch.value.0;
    let step = |plan| breakdown(plan, None).optimizer_s;
    let waits = step("dp8 zero1 mbs4 overlap=param") - step("dp8 zero1 mbs4");
    assert!(
        (waits / (2.0 * launch * tensors) - 1.0).abs() < 0.01,
        "{waits}"
    );
    let hooked = step("dp8 zero2 mbs4 overlap=param") - step("dp8 zero2 mbs4");
    assert_eq!(hooked, 0.0, "in backward");
}

/// Seconds of a step under Megatron-Core as it is, and if all its stages had a bucket for every block.
fn steps(plan: &str) -> [f64; 2] {
    [true, false].map(|whole| {
        let mut s = Scenario {
            model: catalog::load::model("gpt2-xl").expect("preset"),
            cluster: catalog::load::cluster("dgx-a100").expect("preset"),
            runtime: catalog::load::runtime("megatron-core").expect("preset"),
            workload: Workload::new(catalog::WorkloadSizes {
                gpus: 2 * GPUS,
                seq_len: 1024,
                global_batch: 16 * GPUS,
                precision: Precision::Bf16,
            })
            .expect("a workload"),
            headroom: 0.0,
        };
        assert!(s.runtime.rewrites.contains(&Rewrite::WholeStageBuckets));
        if !whole {
            s.runtime.rewrites.remove(&Rewrite::WholeStageBuckets);
        }
        let plan = plans::grammar::parse(plan, &s.model, &s.workload, &s.runtime).expect(plan);
        let costs = CostModel::new(s).expect("priced");
        costs.predict(&plan).expect("priced").step_time.0
    })
}

/// The stages of such a pipeline begin one after the other, and each waits for its parameters. In exchange nothing slows its last
/// backward pass.
#[test]
fn later_stages_gather_and_reduce_at_once() {
    let of_stage = 2.0 * WEIGHTS / 4.0 * 3.0 / 4.0 / NVLINK;
    let gathers = |plan: &str| {
        let [whole, by_block] = steps(plan);
        let [reduced, reduced_by_block] = steps(&plan.replace("grad+param", "grad"));
        assert!(reduced < reduced_by_block, "{plan}");
        (whole - reduced) - (by_block - reduced_by_block)
    };
    let waits = gathers("dp4 pp4 zero1 mbs1 overlap=grad+param");
    assert!(waits > 0.8 * 3.0 * of_stage, "{waits} {of_stage}");
    let [whole, by_block] = steps("dp16 zero1 mbs1");
    assert_eq!(whole, by_block);
    // Several stages of a rank do not wait, but their messages have fewer starts.
    let [whole, by_block] = steps("dp4 pp4 vpp2 zero1 mbs1");
    assert!(
        (0.99 * by_block..by_block).contains(&whole),
        "{whole} {by_block}"
    );
}

/// Under ZeRO-1 and 2 DeepSpeed sums buckets by all-reduce, which sends every gradient twice; ZeRO-2 does so for every micro-batch. Under
/// ZeRO-3 it reduces to shards.
#[test]
fn deepspeed_sends_sums_to_every_rank() {
    let once = 2.0 * WEIGHTS * (GPUS - 1) as f64 / GPUS as f64 / NVLINK;
    for (plan, times) in [
        ("dp8 zero1 mbs4 overlap=param", 1.0),
        ("dp8 zero2 mbs4 overlap=param", 4.0),
        ("dp8 zero3 mbs4 overlap=param", 0.0),
    ] {
        let alternatives = [None, Some(Rewrite::AllReduceGradients)];
        let [all, shards] = alternatives.map(|unless| exposed(plan, unless));
        let more = (all - shards) / once;
        assert!(
            (0.9 * times..=1.6 * times).contains(&more),
            "{plan}: {more}"
        );
    }
    let before = catalog::load::runtime("hf-deepspeed-2021").expect("preset");
    assert!(!before.rewrites.contains(&Rewrite::AllReduceGradients));
}

/// DeepSpeed without ZeRO and Colossal-AI's pipelines reduce gradients when the last backward pass is over, whatever the strategy says.
#[test]
fn gradients_are_reduced_last_where_the_runtime_does_so() {
    // Runtime, plan, and the share of the weights whose 16-bit gradients a rank then sends and receives, each time all parts but its own.
    for (runtime, plan, sent) in [
        ("deepspeed", "dp8 zero0 mbs4", Some(2.0 * 7.0 / 8.0)),
        ("deepspeed", "dp8 zero1 mbs4", None),
        (
            "colossalai",
            "pp2 dp4 zero1 mbs4",
            Some(0.5 * 2.0 * 3.0 / 4.0),
        ),
        ("colossalai", "dp8 zero1 mbs4", None),
    ] {
        let exposed = |plan: &str| predicted(scenario(runtime), plan).dp_exposed_s;
        let (own, after) = (exposed(plan), exposed(&format!("{plan} overlap=none")));
        match sent {
            Some(share) => {
                assert_eq!(own, after, "{runtime} {plan}");
                let least = 2.0 * WEIGHTS * share / NVLINK;
                assert!(own > 0.9 * least, "{runtime} {plan}: {own} {least}");
            }
            None => assert!(own < after, "{runtime} {plan}: {own} {after}"),
        }
    }
}
