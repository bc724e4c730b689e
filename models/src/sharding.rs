//! The sharding plan of a decoder under a layout: Megatron's column- and row-parallel linears with sequence
//! parallelism between them, the sequence sharded over context parallelism, experts over expert parallelism.

use catalog::Axis;
use catalog::dispatcher::RoutedTokens;
use catalog::hybrid::Recurrence;
use catalog::model::{AttentionKind, Family, ModelConfig, Projections, QkNorm};
use dtensor::{BlockMesh, Entry, Parts, Placement, Placements, ShardingPlan};

use crate::block::BlockLayout;
use crate::error::ModelError;
use crate::names::{Names, names};

/// A pattern of names, with the placements that they get.
type Pattern = (String, Vec<(Axis, Placement)>);

/// Index of the sequence dimension in `[batch, sequence, hidden]`.
pub(crate) const SEQUENCE: usize = 1;
/// Index of the heads of queries and keys, `[batch, sequence, heads · dims]`.
const HEADS: usize = 2;

/// The sharding plan of every block of a model under a layout.
///
/// # Errors
/// When a pattern is malformed, which a test rules out for every family.
pub fn sharding_plan(
    model: &ModelConfig,
    layout: &BlockLayout,
) -> Result<ShardingPlan, ModelError> {
    let names = names(model);
    let mesh = BlockMesh {
        tp: layout.tp,
        cp: layout.cp,
        ep: layout.ep,
        etp: layout.etp,
    };
    let between = if layout.sequence_parallel && layout.tp > 1 {
        Placement::Shard(SEQUENCE)
    } else {
        Placement::Replicate
    };
    let mut input = Placements::REPLICATE.with(Axis::Tp, between);
    if layout.cp > 1 {
        input = input.with(Axis::Cp, Placement::Shard(SEQUENCE));
    }
    let [weights, outputs] = adapters(model, &names, between);
    let whole = [parameters(model, &names), weights].concat();
    Ok(ShardingPlan {
        mesh,
        parameter: entries(whole)?,
        forward: entries([forward(model, &names, (between, layout)), outputs].concat())?,
        input,
        attention_exchange: layout.cp_kind,
        shares_rows: layout.routed_tokens.are_gathered(layout.ep),
        routing: layout.routing,
    })
}

fn entries(patterns: Vec<Pattern>) -> Result<Vec<Entry>, ModelError> {
    patterns
        .into_iter()
        .map(|(pattern, placements)| {
            Entry::new(pattern.clone(), placements).map_err(|e| ModelError::Pattern {
                pattern,
                reason: e.to_string(),
            })
        })
        .collect()
}

/// Patterns `[adapters' weights, outputs of their first layers]`. Adapters are split like their
/// layer (Megatron-Bridge `peft/utils.py`, `ParallelLinearAdapter`): by rank and outputs if it is
/// column-parallel (weight and bias split), by inputs if row-parallel (only the weight split).
fn adapters(model: &ModelConfig, n: &Names, between: Placement) -> [Vec<Pattern>; 2] {
    let mut patterns = [Vec::new(), Vec::new()];
    if model.adapters.is_none() {
        return patterns;
    }
    let linears = attention_parameters(model, n).into_iter();
    for (pattern, split) in linears.chain(mlp_parameters(model, n)) {
        let [weights, outputs] = &mut patterns;
        let mut add = |name: &str, first, second: Option<_>, to| {
            weights.push((format!("{name}\\.lora_A\\.weight"), first));
            weights.extend(second.map(|split| (format!("{name}\\.lora_B\\.weight"), split)));
            outputs.push((format!("{name}\\.lora_A\\.output"), vec![(Axis::Tp, to)]));
        };
        if let Some(name) = pattern.strip_suffix("\\.(weight|bias)") {
            add(name, column(), Some(split), Placement::Replicate);
        } else if let Some(name) = pattern.strip_suffix("\\.weight") {
            add(name, split, None, between);
        }
    }
    patterns
}

fn column() -> Vec<(Axis, Placement)> {
    vec![(Axis::Tp, Placement::Shard(0))]
}

fn row() -> Vec<(Axis, Placement)> {
    vec![(Axis::Tp, Placement::Shard(1))]
}

fn fused(parts: Parts) -> Vec<(Axis, Placement)> {
    vec![(Axis::Tp, Placement::Interleaved(0, parts))]
}

fn parameters(model: &ModelConfig, n: &Names) -> Vec<Pattern> {
    let mut patterns = attention_parameters(model, n);
    patterns.extend(mlp_parameters(model, n));
    if let Some(hybrid) = &model.hybrid {
        patterns.extend(recurrent_parameters(&hybrid.recurrence, n));
    }
    for (index, (ending, dim)) in [("(weight|bias)", 0), ("(weight|bias)", 0), ("weight", 1)]
        .into_iter()
        .enumerate()
    {
        let expert = regex::escape(n.expert[index]);
        let shard = vec![(Axis::Etp, Placement::Shard(dim))];
        patterns.push((format!("{}\\.{expert}\\.{ending}", n.moe), shard));
    }
    let halves = vec![(Axis::Etp, Placement::Interleaved(0, Parts::HALVES))];
    let expert = regex::escape(n.expert_gate_up);
    patterns.push((format!("{}\\.{expert}\\.(weight|bias)", n.moe), halves));
    patterns.push(("eh_proj\\.weight".to_owned(), column()));
    patterns.push((
        format!(
            "/?({}|{})\\.(weight|bias)",
            regex::escape(n.embedding),
            regex::escape(n.head)
        ),
        column(),
    ));
    patterns
}

fn attention_parameters(model: &ModelConfig, n: &Names) -> Vec<Pattern> {
    // If each key head is stored next to its query heads, plain shards hold whole groups.
    let qkv = match model.attention.kind {
        AttentionKind::Grouped {
            projections: Projections::Stacked,
            kv_heads,
            ..
        } => fused(Parts::qkv(model.attention.heads / kv_heads)),
        _ => column(),
    };
    let a = regex::escape(n.attention);
    vec![
        (
            format!(
                "{a}\\.({}|{}|{}|q_b_proj|kv_b_proj)\\.(weight|bias)",
                n.q, n.k, n.v
            ),
            column(),
        ),
        (format!("{a}\\.{}\\.(weight|bias)", n.qkv), qkv),
        (format!("{a}\\.{}\\.weight", n.o), row()),
        (format!("{a}\\.sinks"), column()),
    ]
}

/// Placements of a recurrence's weights under tensor parallelism: each rank has whole heads, or groups of them, with their
/// columns of every part of a fused weight (Megatron-Core `ssm/mamba_mixer.py`, `ssm/gated_delta_net`).
fn recurrent_parameters(recurrence: &Recurrence, n: &Names) -> Vec<Pattern> {
    let r = n.recurrence;
    let (into, convolution, by_head) = match recurrence {
        Recurrence::StateSpace(of) => {
            let (width, shared) = (of.width(), of.shared());
            let all = Parts::of([width, width, shared, shared, of.heads]);
            let convolved = Parts::of([width, shared, shared]);
            let into = vec![(format!("{r}\\.in_proj\\.weight"), fused(all))];
            (into, convolved, "(A_log|D|dt_bias|norm\\.weight)")
        }
        Recurrence::GatedDelta(of) => {
            let [keys, values] = of.widths();
            // The weight is stored key head by key head, so plain shards hold whole key heads.
            let into = vec![(format!("{r}\\.in_proj_(qkvz|ba)\\.weight"), column())];
            (into, Parts::of([keys, keys, values]), "(A_log|dt_bias)")
        }
    };
    let others = [
        (format!("{r}\\.conv1d\\.(weight|bias)"), fused(convolution)),
        (format!("{r}\\.{by_head}"), column()),
        (format!("{r}\\.out_proj\\.weight"), row()),
    ];
    into.into_iter().chain(others).collect()
}

fn mlp_parameters(model: &ModelConfig, n: &Names) -> Vec<Pattern> {
    let m = regex::escape(n.mlp);
    // OPT's projections are directly in the layer.
    let inside = |name: &str| match model.family {
        Family::Opt => name.to_owned(),
        _ => format!("{m}\\.{name}"),
    };
    let (up, down) = (inside(n.up), inside(n.down));
    vec![
        (
            format!(
                "({up}|{m}\\.{}|.*{}\\.({}|{}))\\.(weight|bias)",
                n.gate, n.shared, n.up, n.gate
            ),
            column(),
        ),
        (
            format!("({m}|.*{})\\.{}\\.(weight|bias)", n.shared, n.gate_up),
            fused(Parts::HALVES),
        ),
        (
            format!("({down}|.*{}\\.{})\\.weight", n.shared, n.down),
            row(),
        ),
    ]
}

fn forward(
    model: &ModelConfig,
    n: &Names,
    (between, layout): (Placement, &BlockLayout),
) -> Vec<Pattern> {
    let whole = || vec![(Axis::Tp, Placement::Replicate)];
    let out = || vec![(Axis::Tp, between)];
    let (a, m) = (n.attention, n.mlp);
    let whole_norms = match model.attention.kind {
        AttentionKind::Grouped {
            qk_norm: QkNorm::Whole,
            ..
        } => vec![("input", SEQUENCE), ("output", HEADS)],
        _ => Vec::new(),
    };
    let norms = whole_norms.into_iter().map(|(end, dim)| {
        let split = vec![(Axis::Tp, Placement::Shard(dim))];
        (format!("{a}\\.(q_norm|k_norm)\\.{end}"), split)
    });
    let mut row_parallel = vec![
        format!("{a}\\.{}", n.o),
        format!("{m}\\.{}", n.down),
        n.down.to_owned(),
    ];
    // If ranks gather all tokens, the shared expert's part is added up with the others'.
    let gathers = layout.routed_tokens.are_gathered(layout.ep);
    if !gathers {
        row_parallel.push(format!("{}\\.{}", n.shared, n.down));
    }
    let mut patterns = vec![
        (format!("({a}|{m}|{})\\.input", n.shared), whole()),
        (
            format!("{a}\\.(q_proj|q_b_proj|kv_b_proj|k_rope)\\.input"),
            whole(),
        ),
        (format!("({})\\.output", row_parallel.join("|")), out()),
        (format!("{}\\.output", regex::escape(n.embedding)), out()),
        (format!("{}\\.input", regex::escape(n.head)), whole()),
        // The columns that the ranks compute are gathered, then each rank keeps its tokens (Megatron-Core
        // `multi_token_prediction.py`, `_concat_embeddings`).
        ("eh_proj\\.(input|output)".to_owned(), whole()),
        ("eh_proj\\.tokens".to_owned(), out()),
    ];
    patterns.extend(norms);
    if gathers {
        patterns.push((format!("{}\\.tokens", n.moe), whole()));
        patterns.push((format!("{}\\.sum", n.moe), out()));
    }
    if layout.routed_tokens == RoutedTokens::Gathered {
        let rows = vec![(Axis::Etp, Placement::Replicate)];
        patterns.push((format!("{}\\.rows", n.moe), rows));
    }
    if model.hybrid.is_some() {
        let r = n.recurrence;
        patterns.push((format!("{r}\\.input"), whole()));
        patterns.push((format!("{r}\\.out_proj\\.output"), out()));
    }
    patterns
}
