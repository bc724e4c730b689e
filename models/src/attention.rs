//! Self-attention: grouped-query and multi-head latent attention.

use catalog::model::{AttentionKind, ModelConfig, Position, Projections, QkNorm, Rotated};
use catalog::{AdaptedModule, Axis, CpKind, LayerClass, RopeScaling};
use dtensor::{AttentionShape, DTensor, Placement, Rotary, Site, SoftmaxRule, TensorId};

use crate::error::ModelError;
use crate::modules::Block;

/// Multi-head, grouped-query or multi-query attention.
pub(crate) fn grouped(
    block: &mut Block<'_, '_, '_>,
    class: LayerClass,
    x: DTensor,
) -> Result<DTensor, ModelError> {
    let n = block.names;
    let config = &block.model.attention;
    let AttentionKind::Grouped {
        kv_heads,
        head_dim,
        qk_norm,
        projections,
    } = config.kind
    else {
        unreachable!("called for grouped attention")
    };
    let (heads, hidden) = (config.heads, block.model.hidden);
    let scope = |name: &str| format!("{}.{name}", n.attention);
    let x = block.tape.at(&scope("input"), x)?;
    let sizes = [heads, kv_heads, head_dim];
    let ([mut q, mut k, v], gate) = projected(block, &x, sizes, projections)?;
    match qk_norm {
        QkNorm::Absent | QkNorm::Unweighted => {}
        QkNorm::Heads => {
            q = block.norm_over(&scope("q_norm"), &q, head_dim);
            k = block.norm_over(&scope("k_norm"), &k, head_dim);
        }
        QkNorm::Whole => {
            q = whole_norm(block, &scope("q_norm"), q)?;
            k = whole_norm(block, &scope("k_norm"), k)?;
        }
    }
    let [q, k] = rotated(block, class, [q, k], (head_dim, qk_norm));
    let sinks = config.sinks.then(|| {
        let name = scope("sinks");
        block.weight(&name, &[heads]).id
    });
    let dims = Dims {
        heads,
        kv_heads,
        qk_dim: head_dim,
        v_dim: head_dim,
        sinks,
    };
    let mut out = core(block, class, [q, k, v], dims)?;
    if let Some(gate) = gate {
        out = block.tape.sigmoid_gate(&scope("gate"), &out, &gate)?;
    }
    let (site, inner) = (Site::AttentionOutput, heads * head_dim);
    let y = block.linear(site, &scope(n.o), &out, hidden, inner, config.out_bias)?;
    block.adapted(&[AdaptedModule::Proj], &scope(n.o), &out, y)
}

/// Rotates queries and keys in layers with rotary positions, then norms them if the model does
/// (Llama 4). In other layers, scales queries by position if the model has a temperature.
fn rotated(
    block: &mut Block<'_, '_, '_>,
    class: LayerClass,
    [mut q, mut k]: [DTensor; 2],
    (head_dim, qk_norm): (u64, QkNorm),
) -> [DTensor; 2] {
    let n = block.names;
    let scope = |name: &str| format!("{}.{name}", n.attention);
    let config = &block.model.attention;
    let constants = &block.model.constants;
    let rotates = config.rotated == Rotated::All || class.window.is_some();
    if let (Position::Rope { dims }, true) = (block.model.position, rotates) {
        let (theta, scaling) = match (class.window, constants.local_rope_theta) {
            (Some(_), Some(theta)) => (theta, RopeScaling::None),
            _ => (constants.rope_theta, constants.rope_scaling),
        };
        let rotary = Rotary {
            head_dim,
            first: 0,
            dims,
            neighbours: constants.rope_neighbours,
            theta,
            scaling,
        };
        q = block.tape.rope(&scope("rotary_emb"), &q, rotary);
        k = block.tape.rope(&scope("rotary_emb"), &k, rotary);
        if qk_norm == QkNorm::Unweighted {
            let epsilon = constants.norm_epsilon;
            let tape = &mut *block.tape;
            q = tape.unit_norm(&scope("q_norm"), &q, head_dim, epsilon);
            k = tape.unit_norm(&scope("k_norm"), &k, head_dim, epsilon);
        }
    } else if let Some(temperature) = constants.temperature {
        let name = scope("temperature");
        q = block.tape.temperature(&name, &q, temperature);
    }
    [q, k]
}

/// Norm over all heads of queries or keys. The sharding plan exchanges heads for tokens before it
/// and back after it, so that each rank has whole rows.
fn whole_norm(
    block: &mut Block<'_, '_, '_>,
    scope: &str,
    x: DTensor,
) -> Result<DTensor, ModelError> {
    let width = *x.shape.last().expect("queries and keys have a width");
    let x = block.tape.at(&format!("{scope}.input"), x)?;
    let normed = block.norm_over(scope, &x, width);
    Ok(block.tape.at(&format!("{scope}.output"), normed)?)
}

/// Projects queries, keys and values of grouped attention, with separate or fused weights; also the
/// gate of attention's output, if it has one. A fused weight has one adapter if all three parts
/// have one; otherwise each adapted part gets its own after the split.
fn projected(
    block: &mut Block<'_, '_, '_>,
    x: &DTensor,
    [heads, kv_heads, head_dim]: [u64; 3],
    projections: Projections,
) -> Result<([DTensor; 3], Option<DTensor>), ModelError> {
    use AdaptedModule::{K, Q, V};
    if (block.model.hybrid.as_ref()).is_some_and(|of| of.gated_attention) {
        return projected_with_gate(block, x, [heads, kv_heads, head_dim]);
    }
    let n = block.names;
    let (hidden, bias) = (block.model.hidden, block.model.attention.qkv_bias);
    let scope = |name: &str| format!("{}.{name}", n.attention);
    let mut part = |name: &str, heads: u64, adapted: &[AdaptedModule]| {
        let site = Site::AttentionInput;
        let y = block.linear(site, &scope(name), x, heads * head_dim, hidden, bias)?;
        block.adapted(adapted, &scope(name), x, y)
    };
    // Query heads, and key (or value) heads, in each repetition of the fused weight's pattern.
    let (q, kv) = match projections {
        Projections::Separate => {
            let q = part(n.q, heads, &[Q])?;
            let k = part(n.k, kv_heads, &[K])?;
            return Ok(([q, k, part(n.v, kv_heads, &[V])?], None));
        }
        Projections::Grouped => (heads / kv_heads, 1),
        Projections::Stacked => (heads, kv_heads),
    };
    let all = [Q, K, V];
    let qkv = part(n.qkv, heads + 2 * kv_heads, &all)?;
    let together = (block.model.adapters).is_some_and(|of| of.modules.contains_all(&all));
    let mut cut = |first: u64, heads: u64, name: &str, module: AdaptedModule| {
        let columns = [first, heads, q + 2 * kv].map(|heads| heads * head_dim);
        let part = block.tape.slice(&qkv, columns);
        match together {
            true => Ok(part),
            false => block.adapted(&[module], &scope(name), x, part),
        }
    };
    let parts = [
        cut(0, q, n.q, Q)?,
        cut(q, kv, n.k, K)?,
        cut(q + kv, kv, n.v, V)?,
    ];
    Ok((parts, None))
}

/// Projects queries, keys and values, and the gate of attention's output, which is projected head by head with the queries.
fn projected_with_gate(
    block: &mut Block<'_, '_, '_>,
    x: &DTensor,
    [heads, kv_heads, head_dim]: [u64; 3],
) -> Result<([DTensor; 3], Option<DTensor>), ModelError> {
    let n = block.names;
    let (hidden, bias) = (block.model.hidden, block.model.attention.qkv_bias);
    let mut part = |name: &str, heads: u64| {
        let (site, scope) = (Site::AttentionInput, format!("{}.{name}", n.attention));
        block.linear(site, &scope, x, heads * head_dim, hidden, bias)
    };
    let both = part(n.q, 2 * heads)?;
    let (k, v) = (part(n.k, kv_heads)?, part(n.v, kv_heads)?);
    let mut half = |first: u64| {
        let columns = [first, head_dim, 2 * head_dim];
        block.tape.slice(&both, columns)
    };
    let (q, gate) = (half(0), half(head_dim));
    Ok(([q, k, v], Some(gate)))
}

/// Epsilon of the norms of compressed queries, keys and values: a constant in DeepSeek's code, independent of the
/// model's.
const LATENT_EPSILON: f64 = 1e-6;

/// Multi-head latent attention, MLA (DeepSeek-V2, §2.1).
pub(crate) fn latent(
    block: &mut Block<'_, '_, '_>,
    class: LayerClass,
    x: DTensor,
) -> Result<DTensor, ModelError> {
    let n = block.names;
    let config = &block.model.attention;
    let AttentionKind::Latent {
        q_lora_rank,
        kv_lora_rank,
        qk_nope_dim,
        qk_rope_dim,
        v_dim,
    } = config.kind
    else {
        unreachable!("called for latent attention")
    };
    let (heads, hidden) = (config.heads, block.model.hidden);
    let qk_dim = qk_nope_dim + qk_rope_dim;
    let scope = |name: &str| format!("{}.{name}", n.attention);
    let q = latent_queries(block, &x, q_lora_rank, heads * qk_dim)?;
    let down = kv_lora_rank + qk_rope_dim;
    let (site, name) = (Site::AttentionInput, scope("kv_a_proj_with_mqa"));
    let a = block.linear(site, &name, &x, down, hidden, false)?;
    let compressed = block.tape.slice(&a, [0, kv_lora_rank, down]);
    let period = qk_nope_dim + v_dim;
    let names = ["kv_a_layernorm", "kv_b_proj"];
    let up = raised(block, names, &compressed, kv_lora_rank, heads * period)?;
    let constants = &block.model.constants;
    let rotary = Rotary {
        head_dim: qk_dim,
        first: qk_nope_dim,
        dims: qk_rope_dim,
        neighbours: constants.rope_neighbours,
        theta: constants.rope_theta,
        scaling: constants.rope_scaling,
    };
    let rope = scope("rotary_emb");
    let q = block.tape.rope(&rope, &q, rotary);
    // All heads share one rotary part of the keys.
    let shared = block.tape.slice(&a, [kv_lora_rank, qk_rope_dim, down]);
    let mut alone = rotary;
    (alone.head_dim, alone.first) = (qk_rope_dim, 0);
    let shared = block.tape.rope(&rope, &shared, alone);
    let shared = block.tape.at(&scope("k_rope.input"), shared)?;
    let k = block.tape.slice(&up, [0, qk_nope_dim, period]);
    let k = block.tape.join(&scope("keys"), &k, &shared, heads);
    let v = block.tape.slice(&up, [qk_nope_dim, v_dim, period]);
    let dims = Dims {
        heads,
        kv_heads: heads,
        qk_dim,
        v_dim,
        sinks: None,
    };
    let out = core(block, class, [q, k, v], dims)?;
    let (site, inner) = (Site::AttentionOutput, heads * v_dim);
    block.linear(site, &scope(n.o), &out, hidden, inner, config.out_bias)
}

/// Queries of latent attention, through a low-rank compression if the model has one. Down-projections run on the
/// rank's own tokens; their output is gathered, because it is narrower.
fn latent_queries(
    block: &mut Block<'_, '_, '_>,
    x: &DTensor,
    compressed: Option<u64>,
    out: u64,
) -> Result<DTensor, ModelError> {
    let hidden = block.model.hidden;
    let module = block.names.attention;
    let Some(rank) = compressed else {
        let name = format!("{module}.q_proj");
        let x = block.tape.at(&format!("{name}.input"), x.clone())?;
        return block.linear(Site::AttentionInput, &name, &x, out, hidden, false);
    };
    let name = format!("{module}.q_a_proj");
    let a = block.linear(Site::AttentionInput, &name, x, rank, hidden, false)?;
    raised(block, ["q_a_layernorm", "q_b_proj"], &a, rank, out)
}

/// Norms and up-projects a compressed tensor; the names are the norm's and the projection's.
fn raised(
    block: &mut Block<'_, '_, '_>,
    [norm, up]: [&str; 2],
    compressed: &DTensor,
    rank: u64,
    out: u64,
) -> Result<DTensor, ModelError> {
    let module = block.names.attention;
    let norm = format!("{module}.{norm}");
    let normed = block.norm_with(&norm, compressed, rank, LATENT_EPSILON);
    let up = format!("{module}.{up}");
    let normed = block.tape.at(&format!("{up}.input"), normed)?;
    block.linear(Site::AttentionInput, &up, &normed, out, rank, false)
}

struct Dims {
    heads: u64,
    kv_heads: u64,
    qk_dim: u64,
    v_dim: u64,
    sinks: Option<TensorId>,
}

fn softmax(model: &ModelConfig, dims: &Dims) -> SoftmaxRule {
    let usual = 1.0 / (dims.qk_dim as f64).sqrt();
    SoftmaxRule {
        scale: model.constants.attention_scale.unwrap_or(usual),
        cap: model.constants.attention_cap,
        sinks: dims.sinks,
        alibi: (model.position == Position::Alibi).then_some(dims.heads),
    }
}

/// Core attention, including its context-parallel exchange.
fn core(
    block: &mut Block<'_, '_, '_>,
    class: LayerClass,
    [mut q, mut k, mut v]: [DTensor; 3],
    dims: Dims,
) -> Result<DTensor, ModelError> {
    let scope = format!("{}.core_attention", block.names.attention);
    let mesh = *block.tape.mesh();
    let (batch, sequence) = (q.shape[0], q.shape[1]);
    let mut shape = AttentionShape {
        batch,
        heads: dims.heads.div_ceil(mesh.tp),
        kv_heads: dims.kv_heads.div_ceil(mesh.tp),
        q_len: sequence / mesh.cp,
        kv_len: sequence,
        qk_dim: dims.qk_dim,
        v_dim: dims.v_dim,
        causal: true,
        window: class.window,
    };
    let weights = (softmax(block.model, &dims), block.model.attention_dropout);
    let exchange = (mesh.cp > 1).then(|| block.tape.attention_exchange());
    let name = format!("{scope}.input");
    let mut moved = |x: &DTensor, to| block.tape.redistribute(&name, x, Axis::Cp, to);
    match exchange {
        None => {}
        Some(CpKind::Ring) => block.tape.ring_exchange(&scope, &k, &v),
        Some(CpKind::AllGather) => {
            k = moved(&k, Placement::Replicate)?;
            v = moved(&v, Placement::Replicate)?;
        }
        Some(CpKind::AllToAll) => {
            shape.heads = shape.heads.div_ceil(mesh.cp);
            shape.kv_heads = shape.kv_heads.div_ceil(mesh.cp);
            shape.q_len = sequence;
            let heads = Placement::Shard(2);
            [q, k, v] = [moved(&q, heads)?, moved(&k, heads)?, moved(&v, heads)?];
        }
    }
    let out = block.tape.attention(&scope, [&q, &k, &v], shape, weights);
    if exchange != Some(CpKind::AllToAll) {
        return Ok(out);
    }
    let back = format!("{scope}.output");
    Ok((block.tape).redistribute(&back, &out, Axis::Cp, Placement::Shard(1))?)
}
