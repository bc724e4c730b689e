//! Hybrid models: which operators their layers run, how tensor parallelism splits them, what they keep for backward, and
//! that the sequence is never split.

use catalog::{DType, LayerKind, Model};
use dtensor::{
    CostClass, Op, Operator, Placement, Recurrent, Scan, ScanRule, TensorId, TensorRole, Trace,
};
use models::{BlockClass, BlockLayout, ModelError, trace_block};

const NEMOTRON: &str = "nemotron-h-8b";
const NANO: &str = "nemotron-3-nano-30b-a3b";
const QWEN: &str = "qwen3-next-80b-a3b";

fn preset(name: &str) -> Model {
    catalog::load::model(name).expect("a preset")
}

/// The first layer of a kind, traced with two sequences of 512 tokens.
fn layer(name: &str, kind: LayerKind, tp: u64) -> Trace {
    let model = preset(name);
    let classes = (0..model.layers).map(|index| model.layer_class(index));
    let class = classes.into_iter().find(|class| class.kind == kind);
    let class = BlockClass::Layer(class.expect("the model has such a layer"));
    let layout = BlockLayout {
        tp,
        sequence_parallel: tp > 1,
        ..BlockLayout::alone(2, 512, DType::Bf16)
    };
    trace_block(&model, class, &layout).expect("traces")
}

fn recurrent(trace: &Trace) -> Vec<(&Op, Recurrent)> {
    let ops = trace.forward.iter();
    ops.filter_map(|op| match op.operator {
        Operator::Recurrent(recurrent) => Some((op, recurrent)),
        _ => None,
    })
    .collect()
}

fn scan(trace: &Trace) -> (&Op, Scan) {
    let found = recurrent(trace).into_iter();
    let mut scans = found.filter_map(|(op, recurrent)| match recurrent {
        Recurrent::Scan(scan) => Some((op, scan)),
        _ => None,
    });
    scans.next().expect("a recurrence")
}

#[test]
fn patterns_give_each_layer_its_kind() {
    let kinds = |name: &str| -> Vec<LayerKind> {
        let model = preset(name);
        (0..model.layers)
            .map(|i| model.layer_class(i).kind)
            .collect()
    };
    let count = |kinds: &[LayerKind], of| kinds.iter().filter(|&&kind| kind == of).count();
    let nemotron = kinds(NEMOTRON);
    assert_eq!(count(&nemotron, LayerKind::Recurrence), 24);
    assert_eq!(count(&nemotron, LayerKind::FeedForward), 24);
    assert_eq!(count(&nemotron, LayerKind::Attention), 4);
    let nano = kinds(NANO);
    assert_eq!(count(&nano, LayerKind::Recurrence), 23);
    assert_eq!(count(&nano, LayerKind::Experts), 23);
    assert_eq!(count(&nano, LayerKind::Attention), 6);
    let qwen = kinds(QWEN);
    assert_eq!(count(&qwen, LayerKind::RecurrenceThenFeedForward), 36);
    assert_eq!(qwen[3], LayerKind::AttentionThenFeedForward);
}

#[test]
fn a_layer_runs_the_sublayers_of_its_kind_alone() {
    let attends = |trace: &Trace| !trace.attentions.is_empty();
    let routes = |trace: &Trace| trace.forward_ops().any(|op| op.cost() == CostClass::TopK);
    for (name, kind, expected) in [
        (NEMOTRON, LayerKind::Recurrence, [true, false, false]),
        (NEMOTRON, LayerKind::Attention, [false, true, false]),
        (NEMOTRON, LayerKind::FeedForward, [false, false, false]),
        (NANO, LayerKind::Experts, [false, false, true]),
        (
            QWEN,
            LayerKind::RecurrenceThenFeedForward,
            [true, false, true],
        ),
        (
            QWEN,
            LayerKind::AttentionThenFeedForward,
            [false, true, true],
        ),
    ] {
        let trace = layer(name, kind, 1);
        let runs = [
            !recurrent(&trace).is_empty(),
            attends(&trace),
            routes(&trace),
        ];
        assert_eq!(runs, expected, "{name} {kind:?}");
    }
}

#[test]
fn tensor_parallelism_splits_heads_and_groups() {
    for (name, kind) in [
        (NEMOTRON, LayerKind::Recurrence),
        (QWEN, LayerKind::RecurrenceThenFeedForward),
    ] {
        let (whole, split) = (layer(name, kind, 1), layer(name, kind, 2));
        let [(_, one), (op, two)] = [scan(&whole), scan(&split)];
        assert_eq!(one.heads, 2 * two.heads, "{name}");
        match (one.rule, two.rule) {
            (ScanRule::StateSpace { groups: a, .. }, ScanRule::StateSpace { groups: b, .. }) => {
                assert_eq!(a, 2 * b)
            }
            (
                ScanRule::GatedDelta { key_heads: a, .. },
                ScanRule::GatedDelta { key_heads: b, .. },
            ) => assert_eq!(a, 2 * b),
            rules => panic!("{rules:?}"),
        }
        // Whole sequences, half of the columns.
        let input = split.tensor(op.inputs[0]);
        assert_eq!(input.shape[..2], [2, 512], "{name}");
        assert_eq!(2 * input.shape[2], input.global[2], "{name}");
        for (a, b) in whole.parameters.iter().zip(&split.parameters) {
            let by_head = ["in_proj", "conv1d", "A_log", "dt_bias", "out_proj"];
            if by_head.iter().any(|part| a.name.contains(part)) {
                assert_eq!(a.local_elements, 2 * b.local_elements, "{}", a.name);
            }
        }
    }
}

#[test]
fn parts_of_a_fused_projection_keep_their_placement() {
    let trace = layer(NEMOTRON, LayerKind::Recurrence, 2);
    let (convolution, _) = recurrent(&trace)[0];
    let tp = |id: TensorId| trace.tensor(id).placements.on(catalog::Axis::Tp);
    // Input, B and C, side by side: each is split by itself.
    assert!(matches!(
        tp(convolution.inputs[0]),
        Placement::Interleaved(2, _)
    ));
    assert_eq!(tp(convolution.inputs[0]), tp(convolution.outputs[0]));
    let (scan, _) = scan(&trace);
    for &input in &scan.inputs[..4] {
        assert_eq!(tp(input), Placement::Shard(2));
    }
}

#[test]
fn the_sequence_may_not_be_split() {
    for name in [NEMOTRON, QWEN] {
        let model = preset(name);
        let layout = BlockLayout {
            cp: 2,
            ..BlockLayout::alone(1, 512, DType::Bf16)
        };
        let class = BlockClass::Layer(model.layer_class(0));
        let error = trace_block(&model, class, &layout).expect_err("split");
        assert!(matches!(error, ModelError::Placement(_)), "{error}");
        assert!(error.to_string().contains("causal convolution"), "{error}");
    }
}

#[test]
fn every_activation_gets_a_gradient_and_none_is_lost() {
    for (name, kind) in [
        (NEMOTRON, LayerKind::Recurrence),
        (NEMOTRON, LayerKind::FeedForward),
        (QWEN, LayerKind::RecurrenceThenFeedForward),
        (QWEN, LayerKind::AttentionThenFeedForward),
    ] {
        let trace = layer(name, kind, 2);
        assert!(trace.input_gradient.is_some(), "{name} {kind:?}");
        let forward = recurrent(&trace).len();
        let backward = (trace.backward.iter())
            .filter(|op| matches!(op.operator, dtensor::Gradient::Recurrent(..)))
            .count();
        assert_eq!(forward, backward, "{name} {kind:?}");
    }
}

#[test]
fn a_recurrence_keeps_what_its_backward_reads() {
    let kept = |name, kind| {
        let trace = layer(name, kind, 1);
        let (op, _) = scan(&trace);
        let activations = op.saved.iter().map(|&id| trace.tensor(id));
        let activations = activations.filter(|t| t.role == TensorRole::Activation);
        activations
            .map(dtensor::TensorInfo::bytes)
            .sum::<catalog::Bytes>()
            .0
    };
    // Per token of Nemotron-H 8B: input, B, C and output in 16 bits, 128 steps in 16 and sums in 32.
    let nemotron = (8192 + 2 * 1024 + 8192 + 128) * 2 + 128 * 4;
    assert_eq!(kept(NEMOTRON, LayerKind::Recurrence), 1024 * nemotron);
    // Of Qwen3-Next: values, normed queries and keys of 32 heads, inverses of 64 columns, two numbers of each head.
    let qwen = (4096 + 2 * 4096 + 32 * 64 + 32) * 2 + 32 * 4;
    assert_eq!(
        kept(QWEN, LayerKind::RecurrenceThenFeedForward),
        1024 * qwen
    );
}

#[test]
fn work_of_a_chunked_recurrence_is_that_counted_by_hand() {
    // One token, one head and group: 64 channels, 128 numbers of state, chunks of 128.
    let state_space = Scan {
        batch: 1,
        length: 1,
        chunk: 128,
        heads: 1,
        rule: ScanRule::StateSpace {
            head_dim: 64,
            state: 128,
            groups: 1,
        },
    };
    let forward = state_space.work(DType::Bf16, false);
    // States in and out, the products within a chunk, C·Bᵀ.
    let flops = 2 * 2 * 64 * 128 + 2 * 128 * 64 + 2 * 128 * 128;
    assert_eq!(forward.flops, f64::from(flops));
    // 64 states per token are written and read in 32 bits, then in 16; products twice in 32.
    let bytes = 2 * (3 * 64 + 4 * 128 + 2 * 64 + 1) + 4 * (2 * 64 + 2 * 128 + 6);
    assert_eq!(forward.bytes, f64::from(bytes));
    let delta = Scan {
        chunk: 64,
        rule: ScanRule::GatedDelta {
            key_heads: 1,
            key_dim: 128,
            value_dim: 128,
        },
        ..state_space
    };
    let forward = delta.work(DType::Bf16, false);
    let flops = 6.0 * 128.0 * 128.0 + 2.0 * 64.0 * 5.0 * 128.0 + 2.0 * 64.0 * 64.0 / 3.0;
    assert!((forward.flops - flops).abs() < 1e-6);
    // Without the norms of queries and keys, 4 · 128 numbers: the 5120 bytes that the price was measured over.
    assert_eq!(forward.bytes - f64::from(4 * 128 * 2 + 24), 5120.0);
    for scan in [state_space, delta] {
        let [forward, backward] = [false, true].map(|pass| scan.work(DType::Bf16, pass));
        let ratio = backward.flops / forward.flops;
        assert!((2.0..3.0).contains(&ratio), "{scan:?}: {ratio}");
    }
}
