//! Activations, rotary embedding, additions.

use catalog::model::Activation;
use catalog::profile::Measured;
use cuda_device::launcher::TurningArgument;
use cuda_device::{Buffer, CudaError, Device, Tensor};
use dtensor::Nonlinearity;

use super::operator::Operator;
use crate::ProfilerError;
use crate::cuda::operands::{Tiled, check};
use crate::cuda::timing::timed;
use crate::lanes::Effort;

/// √(2/π) and the cubic term of GELU's tanh approximation (Hendrycks and Gimpel 2016).
const GELU: [f64; 2] = [0.797_884_560_802_865_4, 0.044_715];
/// Dimensions per head, if they divide the columns.
const HEAD: u64 = 128;
/// Most tokens per sequence.
const SEQUENCE: u64 = 2048;
/// Base of the rotary frequencies.
const THETA: f64 = 1e4;

/// GELU of one activation.
pub(super) fn gelu(
    operator: &Operator,
    device: &Device,
    effort: Effort,
) -> Result<Vec<Measured>, ProfilerError> {
    let f = Nonlinearity {
        function: Activation::Gelu,
        tanh: true,
    };
    let sets: Vec<[Tiled; 2]> = operator.operands(device)?;
    let [forward, backward] = operator.kernels();
    let [x, dy] = &sets[0];
    let memory = &device.memory;
    let y = memory.poisoned(|| device.activation(f, &x.tensor))?;
    check(device, &forward[0], &y, |at| {
        operator.near(gelu_of(x.at(at))[0], 1.0)
    })?;
    let dx = memory.poisoned(|| device.activation_backward(f, &dy.tensor, &x.tensor))?;
    check(device, &backward[0], &dx, |at| {
        operator.near(dy.at(at) * gelu_of(x.at(at))[1], 1.0)
    })?;
    let set = |call: usize| &sets[call % sets.len()];
    let mut measured = timed(device, effort, &forward, |call| {
        device.activation(f, &set(call)[0].tensor).map(drop)
    })?;
    measured.extend(timed(device, effort, &backward, |call| {
        let [x, dy] = set(call);
        device
            .activation_backward(f, &dy.tensor, &x.tensor)
            .map(drop)
    })?);
    Ok(measured)
}

/// GELU and its derivative.
fn gelu_of(x: f64) -> [f64; 2] {
    let [scale, cube] = GELU;
    let t = (scale * (x + cube * x.powi(3))).tanh();
    let inner = scale * (1.0 + 3.0 * cube * x * x);
    [
        0.5 * x * (1.0 + t),
        0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner,
    ]
}

/// SwiGLU of gate and up projections.
pub(super) fn gated(
    operator: &Operator,
    device: &Device,
    effort: Effort,
) -> Result<Vec<Measured>, ProfilerError> {
    let f = Nonlinearity {
        function: Activation::Silu,
        tanh: true,
    };
    let sets: Vec<[Tiled; 3]> = operator.operands(device)?;
    let [forward, backward] = operator.kernels();
    let [gate, up, dy] = &sets[0];
    let memory = &device.memory;
    let y = memory.poisoned(|| device.gated(f, &gate.tensor, Some(&up.tensor)))?;
    check(device, &forward[0], &y, |at| {
        operator.near(silu_of(gate.at(at))[0] * up.at(at), 1.0)
    })?;
    let back = || device.gated_backward(f, &dy.tensor, &gate.tensor, Some(&up.tensor));
    let (d_gate, d_up) = memory.poisoned(back)?;
    check(device, &backward[0], &d_gate, |at| {
        operator.near(dy.at(at) * up.at(at) * silu_of(gate.at(at))[1], 1.0)
    })?;
    if let Some(d_up) = d_up {
        check(device, &backward[0], &d_up, |at| {
            operator.near(dy.at(at) * silu_of(gate.at(at))[0], 1.0)
        })?;
    }
    let set = |call: usize| &sets[call % sets.len()];
    let mut measured = timed(device, effort, &forward, |call| {
        let [gate, up, _] = set(call);
        device.gated(f, &gate.tensor, Some(&up.tensor)).map(drop)
    })?;
    measured.extend(timed(device, effort, &backward, |call| {
        let [gate, up, dy] = set(call);
        let done = device.gated_backward(f, &dy.tensor, &gate.tensor, Some(&up.tensor));
        done.map(drop)
    })?);
    Ok(measured)
}

/// SiLU and its derivative.
fn silu_of(x: f64) -> [f64; 2] {
    let s = 1.0 / (1.0 + (-x).exp());
    [x * s, s * (1.0 + x * (1.0 - s))]
}

/// Addition: of the residual in forward, of gradients in backward.
pub(super) fn add(
    operator: &Operator,
    device: &Device,
    effort: Effort,
) -> Result<Vec<Measured>, ProfilerError> {
    let sets: Vec<[Tiled; 2]> = operator.operands(device)?;
    let [a, b] = &sets[0];
    let sum = device
        .memory
        .poisoned(|| device.add(&a.tensor, &b.tensor))?;
    let kernels = operator.kernels().concat();
    check(device, &kernels[0], &sum, |at| {
        operator.near(a.at(at) + b.at(at), 1.0)
    })?;
    let mut measured = Vec::new();
    for kernel in &kernels {
        measured.extend(timed(
            device,
            effort,
            std::slice::from_ref(kernel),
            |call| {
                let [a, b] = &sets[call % sets.len()];
                device.add(&a.tensor, &b.tensor).map(drop)
            },
        )?);
    }
    Ok(measured)
}

/// Rotation angles of a sequence's positions.
struct Turns {
    head: usize,
    sequence: usize,
    buffer: Buffer,
}

impl Turns {
    fn new(operator: &Operator, device: &Device) -> Result<Self, CudaError> {
        let whole = operator.columns.is_multiple_of(HEAD);
        let head = if whole { HEAD } else { operator.columns } as usize;
        let sequence = operator.rows.min(SEQUENCE) as usize;
        let mut bits = Vec::with_capacity(sequence * head);
        for position in 0..sequence {
            for pair in 0..head / 2 {
                let (sine, cosine) = angle(position, pair, head).sin_cos();
                bits.extend([cosine, sine].map(|x| (x as f32).to_bits()));
            }
        }
        Ok(Self {
            head,
            sequence,
            buffer: device.indices(&bits)?,
        })
    }

    fn rotate(&self, device: &Device, x: &Tensor, backward: bool) -> Result<Tensor, CudaError> {
        let turning = TurningArgument {
            sequence: self.sequence as i64,
            heads: (x.columns() / self.head) as i64,
            dims: [self.head, 0, self.head].map(|n| n as i64),
            neighbours: 0,
            direction: if backward { -1.0 } else { 1.0 },
        };
        device.rope(x, &self.buffer, turning)
    }

    /// An element after rotation.
    fn turned(&self, x: &Tiled, at: usize, backward: bool) -> f64 {
        let columns = x.tensor.columns();
        let (row, c) = (at / columns, at % columns);
        let (start, half) = (at - c % self.head, self.head / 2);
        let pair = c % self.head % half;
        let (sine, cosine) = angle(row % self.sequence, pair, self.head).sin_cos();
        let sine = if backward { -sine } else { sine };
        let (low, high) = (x.at(start + pair), x.at(start + half + pair));
        match c % self.head < half {
            true => low * cosine - high * sine,
            false => high * cosine + low * sine,
        }
    }
}

fn angle(position: usize, pair: usize, head: usize) -> f64 {
    position as f64 * THETA.powf(-2.0 * pair as f64 / head as f64)
}

/// Rotary embedding, and its inverse in backward.
pub(super) fn rope(
    operator: &Operator,
    device: &Device,
    effort: Effort,
) -> Result<Vec<Measured>, ProfilerError> {
    let turns = Turns::new(operator, device)?;
    let sets: Vec<[Tiled; 1]> = operator.operands(device)?;
    let mut measured = Vec::new();
    for (kernels, backward) in operator.kernels().iter().zip([false, true]) {
        let [x] = &sets[0];
        let rotated = || turns.rotate(device, &x.tensor, backward);
        let turned = device.memory.poisoned(rotated)?;
        check(device, &kernels[0], &turned, |at| {
            operator.near(turns.turned(x, at, backward), 1.0)
        })?;
        measured.extend(timed(device, effort, kernels, |count| {
            let [x] = &sets[count % sets.len()];
            turns.rotate(device, &x.tensor, backward).map(drop)
        })?);
    }
    Ok(measured)
}
