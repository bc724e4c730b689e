//! Self-attention: grouped-query and latent.

use dtensor::{AttentionShape, DTensor, Placement};
use spec::model::{AttentionKind, Position};
use spec::{Axis, CpKind, LayerClass};

use crate::decoder::Block;
use crate::error::ModelError;

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
        fused_qkv,
    } = config.kind
    else {
        unreachable!("called for grouped attention")
    };
    let (heads, hidden, bias) = (config.heads, block.model.hidden, config.qkv_bias);
    let scope = |name: &str| format!("{}.{name}", n.attention);
    let x = block.tape.at(&scope("input"), x)?;
    let (q, k, v) = if fused_qkv {
        let width = (heads + 2 * kv_heads) * head_dim;
        let qkv = block.linear(&scope(n.qkv), &x, width, hidden, bias)?;
        let whole = |heads: u64| [x.shape[0], x.shape[1], heads * head_dim];
        let q = block.tape.slice(&qkv, 0, &whole(heads));
        let k = block.tape.slice(&qkv, heads * head_dim, &whole(kv_heads));
        let v = block
            .tape
            .slice(&qkv, (heads + kv_heads) * head_dim, &whole(kv_heads));
        (q, k, v)
    } else {
        let q = block.linear(&scope(n.q), &x, heads * head_dim, hidden, bias)?;
        let k = block.linear(&scope(n.k), &x, kv_heads * head_dim, hidden, bias)?;
        let v = block.linear(&scope(n.v), &x, kv_heads * head_dim, hidden, bias)?;
        (q, k, v)
    };
    let (mut q, mut k) = (q, k);
    if qk_norm {
        q = block.norm_over(&scope("q_norm"), &q, head_dim);
        k = block.norm_over(&scope("k_norm"), &k, head_dim);
    }
    if let Position::Rope { dims } = block.model.position {
        let constants = &block.model.constants;
        let frequencies = (constants.rope_theta, constants.rope_scaling);
        let head = [head_dim, dims];
        q = block.tape.rope(&scope("rotary_emb"), &q, head, frequencies);
        k = block.tape.rope(&scope("rotary_emb"), &k, head, frequencies);
    }
    if config.sinks {
        block
            .tape
            .parameter(&scope("sinks"), &[heads], block.dtype, 1);
    }
    let dims = Dims {
        heads,
        kv_heads,
        qk_dim: head_dim,
        v_dim: head_dim,
    };
    let out = core(block, class, [q, k, v], dims)?;
    block.linear(&scope(n.o), &out, hidden, heads * head_dim, config.out_bias)
}

/// Multi-head latent attention (DeepSeek-V2, §2.1).
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
    let x = block.tape.at(&scope("input"), x)?;
    let q = match q_lora_rank {
        Some(rank) => {
            let a = block.linear(&scope("q_a_proj"), &x, rank, hidden, false)?;
            let a = block.norm_over(&scope("q_a_layernorm"), &a, rank);
            block.linear(&scope("q_b_proj"), &a, heads * qk_dim, rank, false)?
        }
        None => block.linear(&scope("q_proj"), &x, heads * qk_dim, hidden, false)?,
    };
    let down = kv_lora_rank + qk_rope_dim;
    let a = block.linear(&scope("kv_a_proj_with_mqa"), &x, down, hidden, false)?;
    let latent = [x.shape[0], x.shape[1], kv_lora_rank];
    let a = block.tape.slice(&a, 0, &latent);
    let a = block.norm_over(&scope("kv_a_layernorm"), &a, kv_lora_rank);
    let up = block.linear(
        &scope("kv_b_proj"),
        &a,
        heads * (qk_nope_dim + v_dim),
        kv_lora_rank,
        false,
    )?;
    let head = [qk_dim, qk_rope_dim];
    let constants = &block.model.constants;
    let frequencies = (constants.rope_theta, constants.rope_scaling);
    let q = block.tape.rope(&scope("rotary_emb"), &q, head, frequencies);
    let keys = [x.shape[0], x.shape[1], heads * qk_nope_dim];
    let k = block.tape.slice(&up, 0, &keys);
    // The shared rotated part is joined to every head's key: a copy.
    let k = block.tape.widened(
        &scope("keys"),
        &k,
        &[x.shape[0], x.shape[1], heads * qk_dim],
    );
    let v = block.tape.slice(
        &up,
        heads * qk_nope_dim,
        &[x.shape[0], x.shape[1], heads * v_dim],
    );
    let dims = Dims {
        heads,
        kv_heads: heads,
        qk_dim,
        v_dim,
    };
    let out = core(block, class, [q, k, v], dims)?;
    block.linear(&scope(n.o), &out, hidden, heads * v_dim, config.out_bias)
}

struct Dims {
    heads: u64,
    kv_heads: u64,
    qk_dim: u64,
    v_dim: u64,
}

/// Core attention with its exchange over the sharded sequence.
fn core(
    block: &mut Block<'_, '_, '_>,
    class: LayerClass,
    [q, k, v]: [DTensor; 3],
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
    let dropout = block.model.attention_dropout;
    if mesh.cp == 1 {
        return Ok(block.tape.attention(&scope, [&q, &k, &v], shape, dropout));
    }
    let name = format!("{scope}.input");
    match block.tape.attention_exchange() {
        CpKind::Ring => {
            block.tape.ring_exchange(&scope, &k, &v);
            Ok(block.tape.attention(&scope, [&q, &k, &v], shape, dropout))
        }
        CpKind::AllGather => {
            let k = block
                .tape
                .redistribute(&name, &k, Axis::Cp, Placement::Replicate)?;
            let v = block
                .tape
                .redistribute(&name, &v, Axis::Cp, Placement::Replicate)?;
            Ok(block.tape.attention(&scope, [&q, &k, &v], shape, dropout))
        }
        CpKind::AllToAll => {
            shape.heads = shape.heads.div_ceil(mesh.cp);
            shape.kv_heads = shape.kv_heads.div_ceil(mesh.cp);
            shape.q_len = sequence;
            let heads = Placement::Shard(2);
            let q = block.tape.redistribute(&name, &q, Axis::Cp, heads)?;
            let k = block.tape.redistribute(&name, &k, Axis::Cp, heads)?;
            let v = block.tape.redistribute(&name, &v, Axis::Cp, heads)?;
            let out = block.tape.attention(&scope, [&q, &k, &v], shape, dropout);
            let back = format!("{scope}.output");
            Ok(block
                .tape
                .redistribute(&back, &out, Axis::Cp, Placement::Shard(1))?)
        }
    }
}
