//! The cost of scaling the operands of 8-bit products, and the devices that support each recipe.

use catalog::{Fp8Recipe, Precision, Workload};
use costmodel::{CostModel, Scenario};
use plans::Strategy;
use plans::support::allowed_by;

fn scenario(cluster: &str, runtime: &str) -> Scenario {
    Scenario {
        model: catalog::load::model("llama3-8b").expect("preset"),
        cluster: catalog::load::cluster(cluster).expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus: 8,
            seq_len: 8192,
            global_batch: 64,
            precision: Precision::Fp8,
        })
        .expect("a workload"),
        headroom: 0.0,
    }
}

fn strategy(scenario: &Scenario, text: &str) -> Result<Strategy, String> {
    let Scenario {
        model,
        workload,
        runtime,
        ..
    } = scenario;
    let strategy = plans::grammar::parse(text, model, workload, runtime).map_err(said)?;
    allowed_by(&strategy, model, runtime, workload.precision).map_err(said)?;
    Ok(strategy)
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Seconds of a step, or the error if it cannot be predicted.
fn step(scenario: &Scenario, recipe: Fp8Recipe) -> Result<f64, String> {
    let text = format!("tp=1,zero=0,mbs=1,fp8_recipe={}", recipe.name());
    let costs = CostModel::new(scenario.clone()).expect("priced");
    let predicted = costs.predict(&strategy(scenario, &text)?);
    predicted.map(|p| p.step_time.0).map_err(said)
}

/// Transformer Engine casts all 6.98 billion weights of the layers once per step, which reads 2 bytes of each and writes 2; a scale of
/// a weight's own largest magnitude reads 2 more. NeMo holds weights in 8 bits. What every micro-batch does is the same in all of them.
#[test]
fn weights_are_cast_once_per_step() {
    use Fp8Recipe::{Delayed, Tensorwise};
    for (runtime, recipe, bytes) in [
        ("megatron-core", Delayed, 4.0),
        ("megatron-core", Tensorwise, 6.0),
        ("nemo", Delayed, 0.0),
    ] {
        let mut s = scenario("dgx-h100", runtime);
        let compute = |s: &Scenario| {
            let text = format!("tp=1,zero=0,mbs=1,fp8_recipe={}", recipe.name());
            let costs = CostModel::new(s.clone()).expect("priced");
            let predicted = costs.predict(&strategy(s, &text).expect("allowed"));
            predicted.expect("priced").breakdown.compute_s
        };
        let mut of_batch = |batch| {
            s.workload = s.workload.with_batch(batch).expect("a batch");
            compute(&s)
        };
        let once = 2.0 * of_batch(8) - of_batch(16);
        let expected = bytes * 6.98e9 / 3.35e12;
        let range = expected - 1e-6..expected * 1.25 + 1e-6;
        assert!(
            range.contains(&once),
            "{runtime} {recipe:?}: {once}, {expected}"
        );
    }
}

#[test]
fn more_scales_take_more_time() {
    use Fp8Recipe::{Blockwise, Delayed, Mxfp8, Rowwise, Tensorwise};
    for (cluster, runtime, ordered) in [
        (
            "dgx-h100",
            "megatron-core",
            vec![Delayed, Tensorwise, Blockwise],
        ),
        ("dgx-b200", "megatron-core", vec![Delayed, Mxfp8]),
        ("dgx-b200", "megatron-core", vec![Delayed, Tensorwise]),
        ("dgx-h100", "torchtitan-compile", vec![Tensorwise, Rowwise]),
    ] {
        let scenario = scenario(cluster, runtime);
        let times: Vec<f64> = (ordered.iter())
            .map(|&recipe| step(&scenario, recipe).expect("predicted"))
            .collect();
        let increasing = times.windows(2).all(|pair| pair[0] < pair[1]);
        let most = times[times.len() - 1] / times[0];
        assert!(
            increasing && most < 1.35,
            "{cluster}, {runtime}, {ordered:?}: {times:?}"
        );
    }
}

#[test]
fn recipes_are_refused_where_they_do_not_exist() {
    for (cluster, runtime, recipe, said) in [
        (
            "dgx-h100",
            "megatron-core",
            Fp8Recipe::Mxfp8,
            "expected delayed, tensorwise, blockwise",
        ),
        (
            "dgx-b200",
            "megatron-core",
            Fp8Recipe::Blockwise,
            "expected delayed, tensorwise, mxfp8",
        ),
        (
            "dgx-h100",
            "megatron-core",
            Fp8Recipe::Rowwise,
            "delayed, tensorwise, blockwise, mxfp8",
        ),
        (
            "dgx-h100",
            "torchtitan",
            Fp8Recipe::Delayed,
            "tensorwise, rowwise",
        ),
    ] {
        let refused = step(&scenario(cluster, runtime), recipe).expect_err("refused");
        assert!(refused.contains(said), "{refused}");
    }
    let mut bf16 = scenario("dgx-h100", "megatron-core");
    bf16.workload = bf16.workload.with_precision(Precision::Bf16);
    let refused = step(&bf16, Fp8Recipe::Tensorwise).expect_err("refused");
    assert!(refused.contains("--precision fp8"), "{refused}");
}

#[test]
fn parts_that_need_scales_of_now_are_not_recomputed_with_earlier_ones() {
    let scenario = scenario("dgx-h100", "megatron-core");
    let text = "tp=2,zero=1,mbs=1,recompute=selective:norms+mlp";
    let refused = strategy(&scenario, text).expect_err("refused");
    assert!(refused.contains("fp8_recipe=tensorwise"), "{refused}");
    let taken = strategy(&scenario, &format!("{text},fp8_recipe=tensorwise")).expect("legal");
    assert_eq!(taken.fp8_recipe, Some(Fp8Recipe::Tensorwise));
    // The runtime's own recipe is nobody's decision.
    let own = strategy(&scenario, "tp=2,zero=1,mbs=1,fp8_recipe=delayed").expect("legal");
    assert_eq!(own.fp8_recipe, None);
}
