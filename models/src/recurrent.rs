//! Layers that carry a state along the sequence: Mamba-2's mixer and the gated delta net.

use catalog::DType;
use catalog::hybrid::{GatedDelta, Recurrence, StateSpace};
use dtensor::{Convolution, DTensor, GatedNorm, Scan, ScanRule, Site};

use crate::error::ModelError;
use crate::modules::Block;

/// Tokens per chunk of the gated delta rule, a constant in flash-linear-attention's kernels
/// (`fla/ops/gated_delta_rule/chunk.py`).
const DELTA_CHUNK: u64 = 64;

/// Applies the model's recurrence.
pub(crate) fn mixed(block: &mut Block<'_, '_, '_>, x: DTensor) -> Result<DTensor, ModelError> {
    let Some(hybrid) = &block.model.hybrid else {
        unreachable!("only hybrid models have layers with a recurrence")
    };
    let input = format!("{}.input", block.names.recurrence);
    let x = block.tape.at(&input, x)?;
    match hybrid.recurrence {
        Recurrence::StateSpace(sizes) => state_space(block, sizes, &x),
        Recurrence::GatedDelta(sizes) => gated_delta(block, sizes, &x),
    }
}

/// Mamba-2's mixer: one projection to the gate, the input, B, C and the steps; a convolution of input, B and C; the
/// recurrence; the norm of its gated output; the projection back.
fn state_space(
    block: &mut Block<'_, '_, '_>,
    sizes: StateSpace,
    x: &DTensor,
) -> Result<DTensor, ModelError> {
    let module = block.names.recurrence;
    let scope = |name: &str| format!("{module}.{name}");
    let (width, shared, heads) = (sizes.width(), sizes.shared(), sizes.heads);
    let hidden = block.model.hidden;
    let all = 2 * width + 2 * shared + heads;
    let site = Site::AttentionInput;
    let made = block.linear(site, &scope("in_proj"), x, all, hidden, false)?;
    let channels = width + 2 * shared;
    let gate = block.tape.slice(&made, [0, width, all]);
    let inner = block.tape.slice(&made, [width, channels, all]);
    let step = block.tape.slice(&made, [width + channels, heads, all]);
    // mamba_ssm's `mamba_split_conv1d_scan_combined`, which Megatron-Core and transformers train
    // with, keeps only the convolution's input.
    let of = Convolution {
        kernel: sizes.kernel,
        again: true,
    };
    let inner = convolved(block, &[&inner], (channels, sizes.kernel_bias), of)?;
    let mut part = |first: u64, columns: u64| block.tape.slice(&inner, [first, columns, channels]);
    let (input, b, c) = (
        part(0, width),
        part(width, shared),
        part(width + shared, shared),
    );
    let [rates, skip, bias] = [
        ("A_log", DType::F32),
        ("D", DType::F32),
        ("dt_bias", block.dtype),
    ]
    .map(|(name, dtype)| block.tape.parameter(&scope(name), &[heads], dtype, 1));
    let [local, groups] = [heads, sizes.groups].map(|n| n.div_ceil(block.tape.mesh().tp));
    let scan = Scan {
        batch: x.shape[0],
        length: x.shape[1],
        chunk: sizes.chunk,
        heads: local,
        rule: ScanRule::StateSpace {
            head_dim: sizes.head_dim,
            state: sizes.state,
            groups,
        },
    };
    let (inputs, weights) = ([&input, &b, &c, &step], [&rates, &skip, &bias]);
    let out = block.tape.scan(&scope("scan"), &inputs, &weights, scan)?;
    let norm = GatedNorm {
        group: width / sizes.groups,
        epsilon: block.model.constants.norm_epsilon,
        gate_first: true,
    };
    finished(block, [&out, &gate], (width, norm))
}

/// The gated delta net: projections to queries, keys, values and gate and to the two numbers of every value head, stored
/// key head by key head; a convolution of queries, keys and values; the rule; the norm of every head, times the gate; the
/// projection back.
fn gated_delta(
    block: &mut Block<'_, '_, '_>,
    sizes: GatedDelta,
    x: &DTensor,
) -> Result<DTensor, ModelError> {
    let module = block.names.recurrence;
    let scope = |name: &str| format!("{module}.{name}");
    let [keys, values] = sizes.widths();
    let (hidden, heads) = (block.model.hidden, sizes.value_heads);
    let mut into = |name: &str, out: u64| {
        block.linear(Site::AttentionInput, &scope(name), x, out, hidden, false)
    };
    let made = into("in_proj_qkvz", 2 * keys + 2 * values)?;
    let gates = into("in_proj_ba", 2 * heads)?;
    // Columns of one key head: its query and key, then values and gates of the value heads that share it.
    let (key, each) = (sizes.key_dim, heads / sizes.key_heads);
    let value = each * sizes.value_dim;
    let period = 2 * (key + value);
    let mut part = |from: &DTensor, columns: [u64; 3]| block.tape.slice(from, columns);
    let q = part(&made, [0, key, period]);
    let k = part(&made, [key, key, period]);
    let v = part(&made, [2 * key, value, period]);
    let gate = part(&made, [2 * key + value, value, period]);
    let write = part(&gates, [0, each, 2 * each]);
    let forget = part(&gates, [each, each, 2 * each]);
    let of = Convolution {
        kernel: sizes.kernel,
        again: false,
    };
    let channels = 2 * keys + values;
    let inner = convolved(block, &[&q, &k, &v], (channels, false), of)?;
    let mut part = |first: u64, columns: u64| block.tape.slice(&inner, [first, columns, channels]);
    let (q, k, v) = (part(0, keys), part(keys, keys), part(2 * keys, values));
    let [rates, bias] = [("A_log", DType::F32), ("dt_bias", block.dtype)]
        .map(|(name, dtype)| block.tape.parameter(&scope(name), &[heads], dtype, 1));
    let [local, key_heads] = [heads, sizes.key_heads].map(|n| n.div_ceil(block.tape.mesh().tp));
    let scan = Scan {
        batch: x.shape[0],
        length: x.shape[1],
        chunk: DELTA_CHUNK,
        heads: local,
        rule: ScanRule::GatedDelta {
            key_heads,
            key_dim: key,
            value_dim: sizes.value_dim,
        },
    };
    let (inputs, weights) = ([&q, &k, &v, &write, &forget], [&rates, &bias]);
    let out = (block.tape).scan(&scope("delta_rule"), &inputs, &weights, scan)?;
    let norm = GatedNorm {
        group: sizes.value_dim,
        epsilon: block.model.constants.norm_epsilon,
        gate_first: false,
    };
    finished(block, [&out, &gate], (sizes.value_dim, norm))
}

/// The convolution before a recurrence.
fn convolved(
    block: &mut Block<'_, '_, '_>,
    inputs: &[&DTensor],
    (channels, biased): (u64, bool),
    of: Convolution,
) -> Result<DTensor, ModelError> {
    let scope = format!("{}.conv1d", block.names.recurrence);
    let mut own = |name: &str, shape: &[u64]| block.weight(&format!("{scope}.{name}"), shape);
    let weight = own("weight", &[channels, 1, of.kernel]);
    let bias = biased.then(|| own("bias", &[channels]));
    let weights = (&weight, bias.as_ref());
    Ok(block.tape.causal_convolution(&scope, inputs, weights, of)?)
}

/// Norms a recurrence's output with its gate, with a weight of this width, and projects it back.
fn finished(
    block: &mut Block<'_, '_, '_>,
    [out, gate]: [&DTensor; 2],
    (width, norm): (u64, GatedNorm),
) -> Result<DTensor, ModelError> {
    let module = block.names.recurrence;
    let scope = format!("{module}.norm");
    let weight = block.weight(&format!("{scope}.weight"), &[width]);
    let normed = block.tape.gated_norm(&scope, [out, gate], &weight, norm)?;
    let (hidden, inner) = (block.model.hidden, out.shape[2]);
    let name = format!("{module}.out_proj");
    block.linear(Site::AttentionOutput, &name, &normed, hidden, inner, false)
}
