//! Types of gradients under Megatron-LM, which depend on the precision unless a flag sets them: jobs in bf16 hold and reduce
//! gradients in 32 bits, jobs in fp16 in 16 bits.

use catalog::{Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use plans::Prediction;

const PLAN: &str = "dp16 zero0 mbs1";

fn predicted(runtime: &str, precision: Precision, decisions: &str) -> Prediction {
    let scenario = Scenario {
        model: catalog::load::model("gpt2-xl").expect("a preset"),
        cluster: catalog::load::cluster("dgx-a100").expect("a preset"),
        runtime: catalog::load::runtime(runtime).expect("a preset"),
        workload: Workload::new(WorkloadSizes {
            gpus: 16,
            seq_len: 1024,
            global_batch: 16,
            precision,
        })
        .expect("a workload"),
        headroom: 0.0,
    };
    let plan = format!("{PLAN} {decisions}");
    let plan = plans::grammar::parse(
        &plan,
        &scenario.model,
        &scenario.workload,
        &scenario.runtime,
    )
    .expect("a strategy");
    let costs = CostModel::new(scenario).expect("a cost model");
    costs.predict(&plan).expect("a prediction")
}

#[test]
fn megatron_reduces_gradients_of_fp16_in_16_bits() {
    for runtime in ["megatron-2021", "megatron-2022"] {
        let [bf16, fp16] =
            [Precision::Bf16, Precision::Fp16].map(|precision| predicted(runtime, precision, ""));
        let [wide, narrow] = [&bf16, &fp16].map(|of| of.breakdown.dp_exposed_s);
        assert!(
            (0.45..0.6).contains(&(narrow / wide)),
            "{runtime}: {narrow} {wide}"
        );
        let [wide, narrow] = [&bf16, &fp16].map(|of| of.memory_of("gradients").0);
        assert_eq!(2 * narrow, wide, "{runtime}");
    }
}

#[test]
fn megatron_core_can_be_told_to_reduce_them_in_32_bits() {
    let of = |decisions| predicted("megatron-core", Precision::Fp16, decisions);
    let [own, told] = ["", "grad_dtype=fp32"].map(of);
    assert_eq!(
        2 * own.memory_of("gradients").0,
        told.memory_of("gradients").0
    );
}

#[test]
fn systems_with_types_of_their_own_keep_them() {
    let of = |precision| predicted("nanotron", precision, "");
    let [bf16, fp16] = [Precision::Bf16, Precision::Fp16].map(of);
    assert_eq!(bf16.memory_of("gradients").0, fp16.memory_of("gradients").0);
}
