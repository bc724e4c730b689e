//! Bounds that count data-parallel messages never exceed the simulated step, however slow messages are.

use catalog::{Bandwidth, Offload, Precision, ScheduleKind, Workload, WorkloadSizes};
use costmodel::{CostModel, Lightest, Scenario};
use plans::Decisions;
use proptest::prelude::*;

fn scenario(model: &str, runtime: &str, global_batch: u64, network: f64) -> Scenario {
    let mut cluster = catalog::load::cluster("dgx-h100").expect("preset");
    let link = &mut cluster.scale_out.bandwidth.value;
    *link = Bandwidth(link.0 * network);
    let mut runtime = catalog::load::runtime(runtime).expect("preset");
    runtime.space.schedules = ScheduleKind::ALL.to_vec();
    Scenario {
        model: catalog::load::model(model).expect("preset"),
        cluster,
        runtime,
        workload: Workload::new(WorkloadSizes {
            gpus: 64,
            seq_len: 2048,
            global_batch,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    }
}

const RUNTIMES: [&str; 7] = [
    "vescale",
    "megatron-core",
    "megatron-fsdp",
    "fsdp1",
    "fsdp2",
    "deepspeed",
    "torchtitan",
];

const SCHEDULES: [&str; 8] = [
    "1f1b",
    "1f1b",
    "interleaved,vpp=2",
    "interleaved,vpp=4",
    "gpipe",
    "zb-h1",
    "zb-v,vpp=2",
    "dualpipe-v,vpp=2",
];

const REST: [&str; 10] = [
    "recompute=none",
    "recompute=full",
    "recompute=layers:2",
    "recompute=falling:3",
    "recompute=none,prefetch=2",
    "recompute=none,prefetch=0",
    "recompute=none,reshard=off",
    "recompute=none,offload=optimizer",
    "recompute=none,offload=parameters",
    "recompute=none,offload=parameters,reshard=off",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn bounds_with_messages_never_exceed_the_simulation(
        runtime in 0..RUNTIMES.len(),
        mixture in any::<bool>(),
        sizes in (0u32..3, 0u32..4, 0u32..2),
        zero in 0u8..4,
        schedule in 0..SCHEDULES.len(),
        rest in 0..REST.len(),
        batches in 1u64..5,
        network in 0.02f64..2.0,
    ) {
        let (tp, pp, cp) = (1u64 << sizes.0, 1u64 << sizes.1, 1u64 << sizes.2);
        let dp = 64 / (tp * pp * cp);
        let model = if mixture { "mixtral-8x7b" } else { "llama3-8b" };
        let s = scenario(model, RUNTIMES[runtime], dp * pp.max(2) * batches, network);
        let experts = if mixture { ",ep=2" } else { "" };
        let schedule = if pp > 1 { SCHEDULES[schedule] } else { "1f1b" };
        let text = format!("tp={tp},pp={pp},cp={cp},zero={zero},mbs=1,schedule={schedule},{}{experts}", REST[rest]);
        let Ok(one) = plans::grammar::parse(&text, &s.model, &s.workload, &s.runtime) else {
            return Ok(());
        };
        let costs = CostModel::new(s).expect("priced");
        let score = costs.score(&one).expect("priced").step_time;
        let d = std::slice::from_ref(&*one);
        let layout = costs.layout_bounds(d, &Lightest::default(), &[one.axis_order]).expect("priced");
        // Optimizer states in host memory send what those on devices do.
        let on_device = Decisions {
            offload: one.offload.filter(|&of| of == Offload::Parameters),
            ..d[0].clone()
        };
        let senders = std::slice::from_ref(&on_device);
        let messages = costs.messages(d, senders).expect("priced");
        let shape = costs.shape(&one).expect("a schedule");
        let floors = costs.pipeline_floors(&layout, &shape, &messages, None).expect("priced").floors;
        prop_assert!(floors.time.0 <= score.0, "{one}: {floors:?} {score:?}");
        let passes = costs.passes(&on_device).expect("priced").expect("not on cores");
        prop_assert!(passes.0 <= score.0, "{one}: {passes:?} {score:?}");
        let floors = costs.floors(&one, Some(passes), None).expect("priced");
        prop_assert!(floors.time.0 <= score.0, "{one}: {floors:?} {score:?}");
    }
}
