//! Saved activations of a GPT layer equal Korthikanti et al. 2022, table 2, term by term; which products run in 8 bits.

use std::collections::BTreeMap;

use catalog::{DType, Model};
use dtensor::{AnyOp, AttentionPiece, CostClass, Gemm, Operator, Pointwise, Product, Trace};
use models::{BlockClass, BlockLayout, trace_block};

const S: u64 = 128;
const B: u64 = 2;

fn gpt() -> Model {
    let text = r#"{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 512,
        "n_positions": 128, "resid_pdrop": 0.1, "attn_pdrop": 0.1}"#;
    catalog::hf::decode(text, "test", "test").expect("decodes")
}

fn trace(tp: u64, sequence_parallel: bool) -> Trace {
    let model = gpt();
    let layout = BlockLayout {
        tp,
        sequence_parallel,
        ..BlockLayout::alone(B, S, DType::Bf16)
    };
    trace_block(&model, BlockClass::Layer(model.layer_class(0)), &layout).expect("traces")
}

/// Kept bytes by kind of operator; a storage counts once, for the first that keeps it. With
/// `regather` the gathered inputs of column-parallel linears count as their shards, as Megatron
/// keeps them.
fn saved(trace: &Trace, regather: bool) -> BTreeMap<&'static str, u64> {
    let mut seen = Vec::new();
    let mut bytes: BTreeMap<&'static str, u64> = BTreeMap::new();
    let gathers: Vec<_> = trace
        .forward
        .iter()
        .filter(|op| matches!(op.operator, Operator::Exchange(_)))
        .collect();
    for op in &trace.forward {
        for &id in &op.saved {
            let id = match gathers.iter().find(|g| g.outputs.contains(&id)) {
                Some(gather) if regather => gather.inputs[0],
                _ => id,
            };
            let storage = trace.tensor(id).storage;
            let info = trace.tensor(storage);
            // The paper leaves out the norms' statistics, 4·s·b bytes each.
            let statistics = info.dtype == DType::F32;
            if info.role.is_weight() || statistics || seen.contains(&storage) {
                continue;
            }
            seen.push(storage);
            let kind = match op.operator {
                Operator::Norm(_) => "norm inputs",
                Operator::Product(Product::Matmul(..)) => "linear inputs",
                Operator::Attention(attention) => match attention.piece {
                    AttentionPiece::Scores => "queries and keys",
                    AttentionPiece::Softmax(_) => "softmax output",
                    AttentionPiece::Dropout(_) => "attention mask",
                    AttentionPiece::Context if id == op.inputs[0] => "attention dropout output",
                    AttentionPiece::Context => "values",
                },
                Operator::Pointwise(Pointwise::Dropout(_)) => "hidden masks",
                Operator::Pointwise(Pointwise::Activation(_)) => "gelu input",
                _ => "other",
            };
            *bytes.entry(kind).or_default() += info.bytes().0;
        }
    }
    bytes
}

fn check(tp: u64, sequence_parallel: bool, expected: &[(&'static str, u64)], total: u64) {
    let found = saved(&trace(tp, sequence_parallel), sequence_parallel);
    assert_eq!(
        found,
        expected.iter().copied().collect(),
        "tp {tp} sp {sequence_parallel}"
    );
    assert_eq!(found.values().sum::<u64>(), total);
}

#[test]
fn a_layer_keeps_34sbh_and_5as2b() {
    let (h, a) = (64, 8);
    let sbh = S * B * h;
    let scores = a * S * S * B;
    check(
        1,
        false,
        &[
            ("norm inputs", 4 * sbh),
            // Norm outputs (2 · 2sbh), attention output (2sbh), GELU output (8sbh).
            ("linear inputs", 14 * sbh),
            ("queries and keys", 4 * sbh),
            ("values", 2 * sbh),
            ("gelu input", 8 * sbh),
            ("hidden masks", 2 * sbh),
            ("softmax output", 2 * scores),
            ("attention mask", scores),
            ("attention dropout output", 2 * scores),
        ],
        34 * sbh + 5 * scores,
    );
}

#[test]
fn tensor_parallelism_divides_24sbh_and_the_scores() {
    let (h, a, t) = (64, 8, 4);
    let sbh = S * B * h;
    let scores = a * S * S * B;
    check(
        t,
        false,
        &[
            ("norm inputs", 4 * sbh),
            ("linear inputs", 4 * sbh + 10 * sbh / t),
            ("queries and keys", 4 * sbh / t),
            ("values", 2 * sbh / t),
            ("gelu input", 8 * sbh / t),
            ("hidden masks", 2 * sbh),
            ("softmax output", 2 * scores / t),
            ("attention mask", scores / t),
            ("attention dropout output", 2 * scores / t),
        ],
        10 * sbh + 24 * sbh / t + 5 * scores / t,
    );
}

#[test]
fn sequence_parallelism_divides_everything() {
    let (h, a, t) = (64, 8, 4);
    let sbh = S * B * h;
    let scores = a * S * S * B;
    let total: u64 = saved(&trace(t, true), true).values().sum();
    assert_eq!(total, (34 * sbh + 5 * scores) / t);
}

#[test]
fn matrix_flops_equal_the_closed_form() {
    // 24·b·s·h²·(1 + s/(6h)) forward, twice that backward (Narayanan et al. 2021, appendix).
    let trace = trace(1, false);
    let flops = |op: dtensor::AnyOp<'_>| match op.cost() {
        CostClass::Product(Product::Matmul(Gemm { m, n, k }, _)) => 2 * m * n * k,
        CostClass::AttentionScores(s) => 2 * s.batch * s.heads * s.q_len * s.kv_len * s.qk_dim,
        CostClass::AttentionContext(s) => 2 * s.batch * s.heads * s.q_len * s.kv_len * s.v_dim,
        _ => 0,
    };
    let h = 64;
    let forward = 24 * B * S * h * h + 4 * B * S * S * h;
    assert_eq!(trace.forward_ops().map(flops).sum::<u64>(), forward);
    assert_eq!(trace.backward_ops().map(flops).sum::<u64>(), 2 * forward);
}

#[test]
fn router_and_head_of_a_prediction_module_multiply_in_16_bits() {
    let model = catalog::load::model("deepseek-v3").expect("a preset");
    let layout = BlockLayout {
        eight_bits: true,
        ..BlockLayout::alone(1, 32, DType::Bf16)
    };
    let trace = trace_block(&model, BlockClass::Mtp, &layout).expect("traces");
    let wide = trace.forward.iter().filter_map(|op| match op.operator {
        Operator::Product(of @ Product::Matmul(..)) if !trace.is_eight_bit(of) => {
            Some(op.scope.as_str())
        }
        _ => None,
    });
    assert_eq!(wide.collect::<Vec<_>>(), ["mlp.gate", "lm_head"]);
}

/// Bytes that tensor parallelism moves around the projection of a prediction module, by pass, and the elements of its weight.
#[test]
fn the_projection_of_a_prediction_module_is_column_parallel() {
    let model = catalog::load::model("deepseek-v3").expect("a preset");
    let (tokens, hidden) = (32, model.hidden);
    for (tp, sequence_parallel, wanted) in [
        // The result is gathered; the gradient of what is read, which is twice as wide, is summed.
        (4, false, [vec![1], vec![2]]),
        // What is read is gathered, then the result. In backward its gradient is gathered, then the other one scattered.
        (4, true, [vec![2, 1], vec![1, 2]]),
        (1, false, [vec![], vec![]]),
    ] {
        let layout = BlockLayout {
            tp,
            sequence_parallel,
            ..BlockLayout::alone(1, tokens, DType::Bf16)
        };
        let trace = trace_block(&model, BlockClass::Mtp, &layout).expect("traces");
        // Of backward, what comes after the layer's first norm.
        let sizes = |op: AnyOp<'_>| match op.cost() {
            CostClass::Collective(of) => Some(of.bytes / (tokens * hidden * 2)),
            _ => None,
        };
        let forward = trace.forward_ops();
        let forward = forward.filter(|op| op.scope.starts_with("eh_proj"));
        let mut backward: Vec<_> = trace.backward_ops().collect();
        let layer = backward
            .iter()
            .rposition(|op| op.scope.starts_with("input_layernorm"));
        let backward = backward.split_off(layer.expect("a norm"));
        let sent: [Vec<u64>; 2] = [
            forward.filter_map(sizes).collect(),
            backward.into_iter().filter_map(sizes).collect(),
        ];
        assert_eq!(sent, wanted, "tp={tp}, sp {sequence_parallel}");
        let weight = trace
            .parameters
            .iter()
            .find(|p| p.name.ends_with("eh_proj.weight"));
        let elements = weight.expect("a projection").local_elements;
        assert_eq!(elements, 2 * hidden * hidden / tp, "tp={tp}");
    }
}
