//! What a runtime cannot run is refused, with what it has instead.

use catalog::{Precision, Workload, WorkloadSizes};

/// The refusal of a strategy on 64 GPUs; empty if the runtime supports it.
fn said(runtime: &str, model: &str, strategy: &str) -> String {
    let model = catalog::load::model(model).expect("a preset");
    let runtime = catalog::load::runtime(runtime).expect("a preset");
    let sizes = WorkloadSizes {
        gpus: 64,
        seq_len: 4096,
        global_batch: 128,
        precision: Precision::Bf16,
    };
    let workload = Workload::new(sizes).expect("a workload");
    let strategy = plans::grammar::parse(strategy, &model, &workload, &runtime);
    let strategy = strategy.expect("a strategy");
    let allowed = plans::support::allowed_by(&strategy, &model, &runtime, workload.precision);
    allowed.map_or_else(|error| error.to_string(), |()| String::new())
}

#[rustfmt::skip]
#[test]
fn what_a_runtime_lacks_is_refused() {
    let inner = "order=tp-cp-pp-dp_shard-dp_replicate";
    for (runtime, model, strategy, wanted) in [
        ("megatron-core", "llama3-8b", format!("tp2 pp4 {inner}"), ""),
        ("megatron-core", "llama3-8b", format!("tp2 cp2 pp4 {inner}"), "it has pp last, or cp=1"),
        ("megatron-core", "mixtral-8x7b", format!("tp2 cp2 pp2 ep4 {inner}"), ""),
        ("megatron-core", "mixtral-8x7b", format!("tp2 pp2 ep4 {inner}"), "it has pp last, or ep·etp = tp·cp"),
        ("vescale", "mixtral-8x7b", format!("tp2 pp2 ep4 {inner}"), ""),
        ("megatron-core", "llama3-8b", format!("tp8 cp2 pp4 dp1 {inner}"), ""),
        ("megatron-core", "llama3-8b", format!("tp8 dp8 {inner}"), ""),
        ("fsdp2", "llama3-8b", "dp64 order=pp-tp-cp-dp_shard-dp_replicate".to_owned(), ""),
        ("megatron-core", "llama3-8b", "tp8 pp8 dp1 order=pp-tp-cp-dp_shard-dp_replicate".to_owned(), "no axis order pp-tp-cp-dp_shard-dp_replicate; it has tp-cp-dp_shard-dp_replicate-pp, tp-cp-pp-dp_shard-dp_replicate"),
        ("megatron-core", "llama3-8b", "tp8 dp8 order=dp_shard-tp-cp-dp_replicate-pp".to_owned(), "no axis order dp_shard-tp-cp-dp_replicate-pp; it has"),
        ("megatron-core", "llama3-8b", "tp2 pp4 dp8 order=pp-tp-cp-dp_shard-dp_replicate".to_owned(), "no axis order pp-tp-cp-dp_shard-dp_replicate; it has"),
        ("megatron-core", "llama3-8b", "tp8 recompute=selective:norms".to_owned(), "no recompute selective:norms for this model, whose norms are part of the linear layers after them; it has selective:core_attention+mlp"),
        ("megatron-core", "llama3-8b", "tp8 recompute=selective:expert_activation".to_owned(), "for this model, which has no such part; it has"),
        ("megatron-core", "llama3-8b", "tp8 recompute=selective:norms+mlp".to_owned(), ""),
        ("megatron-core", "mixtral-8x7b", "tp8 recompute=selective:norms".to_owned(), ""),
        ("megatron-core", "mixtral-8x7b", "tp8 recompute=selective:mlp".to_owned(), "no recompute selective:mlp for this model"),
        ("megatron-core", "gpt-oss-20b", "cp2 cp_kind=all_to_all".to_owned(), ""),
        ("megatron-core", "gpt-oss-20b", "cp2 cp_kind=all_gather".to_owned(), "with sinks under context parallelism by all_gather; it has all_to_all"),
        ("megatron-core", "mistral-7b-v0.1", "cp2 cp_kind=ring".to_owned(), "with a sliding window under context parallelism by ring; it has all_gather, all_to_all"),
        ("megatron-core", "llama3-8b", "cp2 cp_kind=ring".to_owned(), ""),
        ("megatron-core", "llama3-8b", "tp2 sp=off".to_owned(), ""),
        ("megatron-core", "llama3-8b", "tp2 sp=off overlap=grad+param+tp+pp".to_owned(), "no overlap of tensor-parallel messages without sequence parallelism; it has sp=on"),
        ("nemo", "llama3-8b", "tp2 sp=off".to_owned(), ""),
        ("nemo", "llama3-8b", "tp2 sp=off overlap=grad+param+pp".to_owned(), ""),
        ("megatron-fsdp", "llama3-8b", "tp2 sp=off zero3".to_owned(), ""),
        ("torchtitan-2026", "llama3-8b", "tp2 sp=off zero3".to_owned(), ""),
        ("torchtitan-compile-2026", "llama3-8b", "tp2 sp=off zero3".to_owned(), ""),
        ("torchtitan-2026", "deepseek-v3", "tp2 zero3".to_owned(), ""),
        ("torchtitan-2026", "deepseek-v3", "cp2 cp_kind=all_gather zero3".to_owned(), "no context parallelism beside multi-token-prediction modules; it has cp=1"),
        ("torchtitan-compile-2026", "deepseek-v3", "pp2 zero3".to_owned(), "no pipeline parallelism beside multi-token-prediction modules; it has pp=1"),
        ("torchtitan-2026", "deepseek-v3-main", "pp2 zero3".to_owned(), ""),
        ("megatron-core", "deepseek-v3", "pp2 cp2".to_owned(), ""),
        ("torchtitan", "llama3-8b", "tp2 sp=off zero3".to_owned(), "no tensor parallelism without sequence parallelism; it has sp=on"),
        ("torchtitan-compile-2025", "llama3-8b", "tp2 sp=off zero3".to_owned(), "it has sp=on"),
        ("internevo", "llama3-8b", "tp2 overlap=grad+tp".to_owned(), "no overlap of tensor-parallel messages; it has overlap=grad"),
        ("megatron-2022", "llama3-8b", "tp8 overlap=grad".to_owned(), "no overlap of gradients; it has overlap=none"),
        ("megatron-core", "llama3-8b", "tp2 overlap=grad+param+tp+pp".to_owned(), ""),
        ("deepspeed", "llama3-8b", "dp64 zero0 grad_dtype=fp32".to_owned(), "no gradients in fp32 at zero=0; it has bf16"),
        ("deepspeed", "llama3-8b", "dp64 zero1 grad_dtype=fp32".to_owned(), "no gradients in fp32 at zero=1; it has bf16"),
        ("deepspeed", "llama3-8b", "dp64 zero2 grad_dtype=fp32".to_owned(), ""),
        ("paddle", "llama3-8b", "tp2 zero3".to_owned(), ""),
        ("paddle", "llama3-8b", "pp2 zero3".to_owned(), "no ZeRO-3 beside pipeline parallelism; it has ZeRO-0, ZeRO-1"),
        ("paddle", "llama3-8b", "pp2".to_owned(), ""),
        ("colossalai", "llama3-8b", "pp2 zero2".to_owned(), "no ZeRO-2 beside pipeline parallelism; it has ZeRO-0, ZeRO-1"),
        ("colossalai", "llama3-8b", "pp2 zero1".to_owned(), ""),
        // Each of 2 replicas takes 64 of 128 sequences: 4 micro-batches of 16, or 2 of 32.
        ("torchtitan", "llama3-8b", "tp8 pp4 dp2 zero3 mbs16".to_owned(), ""),
        ("torchtitan", "llama3-8b", "tp8 pp4 dp2 zero3 mbs32".to_owned(), "no pipeline schedule 1f1b of 2 micro-batches on 4 ranks; it has it with 4 micro-batches or more"),
        ("torchtitan", "llama3-8b", "tp8 pp4 dp2 zero3 mbs32 schedule=gpipe".to_owned(), ""),
        ("torchtitan", "llama3-8b", "tp8 pp4 dp2 zero3 mbs32 schedule=zb-v vpp=2".to_owned(), ""),
        ("nanotron", "llama3-8b", "tp2 pp8 dp4 mbs4".to_owned(), ""),
        ("nanotron", "llama3-8b", "tp4 pp4 dp4 mbs16".to_owned(), "it with 3 micro-batches or more"),
        ("colossalai", "llama3-8b", "tp2 pp8 dp4 mbs8".to_owned(), "it with 8 micro-batches or more"),
        ("megatron-core", "llama3-8b", "tp2 pp8 dp4 mbs8".to_owned(), ""),
        ("nanotron", "llama3-8b", "dp64 zero1".to_owned(), "no ZeRO-1; it has ZeRO-0"),
        ("torchtitan", "mixtral-8x7b", "tp4 ep4 etp4 zero3".to_owned(), ""),
        ("torchtitan", "mixtral-8x7b", "tp4 ep4 etp2 zero3".to_owned(), "no etp=2 beside ep=4 and tp=4; it has etp=1, etp=4"),
        ("torchtitan", "mixtral-8x7b", "tp4 ep4 etp4 zero3 dispatcher=deepep".to_owned(), "no dispatcher deepep with etp=4; it has it with etp=1"),
        ("torchtitan", "mixtral-8x7b", "tp4 ep4 etp1 zero3 dispatcher=deepep".to_owned(), ""),
        ("torchtitan", "mixtral-8x7b", "tp4 etp1 zero3".to_owned(), "no etp=1 beside ep=1 and tp=4; it has etp=4"),
        ("torchtitan", "mixtral-8x7b", "tp4 zero3".to_owned(), ""),
        ("torchtitan-2026", "mixtral-8x7b", "tp4 ep4 etp4 zero3".to_owned(), "no etp=4 beside ep=4 and tp=4; it has etp=1"),
        ("torchtitan-2026", "mixtral-8x7b", "tp4 ep4 zero3".to_owned(), ""),
        ("megatron-core", "mixtral-8x7b", "tp4 ep4 etp2".to_owned(), ""),
        ("fsdp2", "llama3-8b", "dp64 zero3 overlap=param+pp".to_owned(), "no gradient reduction apart from backward at zero=3; it has overlap=grad+param+pp"),
        ("fsdp1", "llama3-8b", "dp64 zero0 overlap=param+pp".to_owned(), "no gradient reduction apart from backward at zero=0; it has overlap=grad+param+pp"),
        ("torchtitan", "llama3-8b", "dp64 zero3 overlap=grad+pp".to_owned(), "no parameter gathering apart from passes at zero=3; it has overlap=grad+param+pp"),
        ("hf-trainer", "llama3-8b", "dp64 zero0 overlap=grad+pp".to_owned(), ""),
        ("deepspeed", "llama3-8b", "dp64 zero0 overlap=param+pp".to_owned(), ""),
        ("deepspeed", "llama3-8b", "dp64 zero2 overlap=pp".to_owned(), ""),
        ("deepspeed", "llama3-8b", "dp64 zero3 overlap=grad+pp".to_owned(), "at zero=3; it has overlap=grad+param+pp"),
        ("megatron-core", "llama3-8b", "tp8 dp8 zero1 overlap=pp".to_owned(), ""),
        ("deepspeed", "llama3-8b", "dp64 zero3 reshard=off".to_owned(), "no parameters that stay gathered after forward; it has reshard=on"),
        ("fsdp2", "llama3-8b", "dp64 zero3 reshard=off".to_owned(), ""),
        ("vescale", "llama3-8b", "dp64 zero3 overlap=pp".to_owned(), ""),
        ("torchtitan", "llama3-8b", "tp8 pp8 dp1 zero3".to_owned(), "no bf16 with tp or pp unless states are sharded"),
        ("torchtitan", "llama3-8b", "tp8 pp4 dp2 zero3".to_owned(), ""),
        ("torchtitan", "llama3-8b", "tp8 pp4 cp2 cp_kind=all_gather dp1 zero0".to_owned(), ""),
        ("torchtitan-2026", "llama3-8b", "tp8 pp8 dp1 zero3".to_owned(), ""),
        ("nemo", "llama3-8b", "tp8 pp8 dp1 zero3".to_owned(), "no ZeRO-3; it has ZeRO-0, ZeRO-1"),
        ("nemo", "mixtral-8x7b", "tp8 pp8 dp1 ep2 zero2".to_owned(), "no ZeRO-2; it has ZeRO-0, ZeRO-1"),
        ("nemo", "mixtral-8x7b", "tp8 pp8 dp1 ep2 zero1".to_owned(), ""),
    ] {
        let said = said(runtime, model, &strategy);
        let right = said.contains(wanted) && wanted.is_empty() == said.is_empty();
        assert!(right, "{runtime}, {model}, {strategy}: {said:?}, not {wanted:?}");
    }
}

/// The example in a refusal is supported by the runtime.
#[test]
fn the_example_runs_everywhere() {
    let lack = plans::StrategyError::Runtime {
        runtime: "torchtitan".to_owned(),
        what: "recompute selective".to_owned(),
        has: "none, full".to_owned(),
    };
    let example = lack.mistake().example.expect("an example");
    let strategy = example.strip_prefix("--strategy ").expect("a strategy");
    for preset in catalog::runtime_presets::presets() {
        let name = &preset.runtime.name;
        assert_eq!(said(name, "llama3-8b", strategy), "", "{name}");
    }
}

/// Precisions that a runtime does not train in are refused, with those that it has.
#[test]
fn a_precision_that_a_runtime_lacks_is_refused() {
    for (runtime, precision, wanted) in [
        (
            "torchtitan-2026",
            Precision::Fp16,
            "no training in fp16; it has --precision fp32, --precision bf16, --precision fp8",
        ),
        ("torchtitan-compile", Precision::Fp8, ""),
        ("deepspeed", Precision::Fp8, "no training in fp8; it has"),
        ("hf-deepspeed", Precision::Fp8, ""),
        ("nanotron", Precision::Fp8, "no training in fp8; it has"),
        ("nanotron", Precision::Fp16, ""),
        ("megatron-core", Precision::Fp16, ""),
    ] {
        let model = catalog::load::model("llama3-8b").expect("a preset");
        let runtime = catalog::load::runtime(runtime).expect("a preset");
        let sizes = WorkloadSizes {
            gpus: 64,
            seq_len: 4096,
            global_batch: 128,
            precision,
        };
        let workload = Workload::new(sizes).expect("a workload");
        let strategy = plans::grammar::parse("dp=64", &model, &workload, &runtime);
        let strategy = strategy.expect("a strategy");
        let allowed = plans::support::allowed_by(&strategy, &model, &runtime, precision);
        let said = allowed.map_or_else(|error| error.to_string(), |()| String::new());
        let right = said.contains(wanted) && said.is_empty() == wanted.is_empty();
        assert!(right, "{} {precision:?}: {said}", runtime.name);
    }
}
