//! Tokens that tensor-parallel ranks gather before a layer with experts.

use catalog::{Axis, Precision, Workload};
use costmodel::{BlockCost, BlockKey, CostModel, Scenario};
use dtensor::{AnyOp, CollectiveKind, CostClass};
use models::BlockClass;
use plans::{Recompute, Strategy};

/// Qwen3 30B, of whose 128 experts a token chooses 8, on 32 H100.
fn scenario(runtime: &str) -> Scenario {
    Scenario {
        model: catalog::load::model("qwen3-30b-a3b").expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus: 32,
            seq_len: 8192,
            global_batch: 512,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    }
}

fn strategy(s: &Scenario, text: &str) -> Strategy {
    plans::grammar::parse(text, &s.model, &s.workload, &s.runtime).expect(text)
}

fn key(s: &Scenario, text: &str) -> BlockKey {
    let class = BlockClass::Layer(s.model.layer_class(0));
    BlockKey::of(s, &strategy(s, text), class, Recompute::None)
}

/// The cost of a layer for one micro-batch.
fn layer(s: &Scenario, text: &str) -> BlockCost {
    let costs = CostModel::new(s.clone()).expect("priced");
    costs.block(&key(s, text)).expect("priced").as_ref().clone()
}

/// Bytes of the messages of a layer's passes over an axis, by kind, in the order in which they are sent.
fn messages(s: &Scenario, text: &str, axis: Axis) -> [Vec<(CollectiveKind, u64)>; 2] {
    let key = key(s, text);
    let trace = models::trace_block(&s.model, key.class, &key.layout).expect("traced");
    let of = |op: AnyOp<'_>| match op.cost() {
        CostClass::Collective(of) if of.axis == axis => Some((of.kind, of.bytes)),
        _ => None,
    };
    [
        trace.forward_ops().filter_map(of).collect(),
        trace.backward_ops().filter_map(of).collect(),
    ]
}

/// torchtitan gathers all tokens before a layer with experts and reduces and scatters sums after it; Megatron-Core routes the tokens that
/// sequence parallelism left on each rank. Ranks with columns of every expert multiply rows of all tokens, which nothing gathers.
#[test]
fn tokens_are_gathered_before_experts_where_the_runtime_says_so() {
    use CollectiveKind::{AllGather, AllReduce, ReduceScatter};
    let tokens = 8192 * 2048 * 2;
    let rows = 8 * tokens;
    let attention = [
        vec![(AllGather, tokens), (ReduceScatter, tokens)],
        vec![(AllGather, tokens), (ReduceScatter, tokens)],
    ];
    let gathered = [
        vec![(AllGather, tokens), (ReduceScatter, tokens)],
        vec![(AllGather, tokens)],
    ];
    let none = || [Vec::new(), Vec::new()];
    for (runtime, sizes, around, between) in [
        ("megatron-core", "tp4 dp8 ep8 etp1", none(), none()),
        (
            "torchtitan",
            "tp4 dp8 ep8 etp1 zero3",
            gathered.clone(),
            none(),
        ),
        (
            "torchtitan",
            "tp4 dp8 ep1 etp4 zero3",
            gathered.clone(),
            [Vec::new(), vec![(AllReduce, rows)]],
        ),
        ("torchtitan-2026", "tp4 dp8 ep8 etp1 zero3", none(), none()),
        (
            "torchtitan-2026",
            "tp4 dp8 ep1 etp4 zero3",
            [
                gathered[0].clone(),
                vec![(AllGather, tokens), (ReduceScatter, tokens)],
            ],
            none(),
        ),
    ] {
        let s = scenario(runtime);
        let text = format!("{sizes} mbs1");
        let [forward, backward] = messages(&s, &text, Axis::Tp);
        let [before, after] = &attention;
        assert_eq!(
            forward,
            [before.clone(), around[0].clone()].concat(),
            "{runtime} {sizes}"
        );
        assert_eq!(
            backward,
            [around[1].clone(), after.clone()].concat(),
            "{runtime} {sizes}"
        );
        assert_eq!(messages(&s, &text, Axis::Etp), between, "{runtime} {sizes}");
    }
}

/// A rank that has all tokens adds up rows of all their experts; those that other ranks computed are zeros.
#[test]
fn rows_of_other_ranks_are_kept_as_zeros() {
    let kept = |runtime: &str| {
        let s = scenario(runtime);
        layer(&s, "tp4 dp8 ep8 etp1 zero3 mbs1")
            .memory
            .saved_bytes
            .0
    };
    let rows = 8 * 8192 * 2048 * 4_u32;
    let more = kept("torchtitan") as f64 - kept("torchtitan-2026") as f64;
    let expected = f64::from(rows) * 0.75;
    assert!((more / expected - 1.0).abs() < 0.1, "{more}, {expected}");
}
