//! Nonlinearities and their derivatives. Each is a type of its own, so that loops over rows are
//! compiled for it and vectorise.

use catalog::model::Activation;
use dtensor::{GatedUnit, Nonlinearity};

use super::math::{exp, sigmoid, tanh};

/// √(2/π) of the tanh approximation of the GELU.
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBE: f32 = 0.044_715;
/// Density of the standard normal at 0: 1/√(2π).
const NORMAL_DENSITY: f32 = 0.398_942_3;

/// A function of one number.
trait Scalar: Sync {
    fn value(x: f32) -> f32;
    fn derivative(x: f32) -> f32;
}

/// A nonlinearity on slices of equal length.
pub(super) trait Nonlinear: Sync {
    /// `x ← f(x)`.
    fn forward(&self, x: &mut [f32]);
    /// `x ← dy · f'(x)`.
    fn backward(&self, x: &mut [f32], dy: &[f32]);
    /// `out ← f(gate) · up`.
    fn gated(&self, out: &mut [f32], gate: &[f32], up: &[f32]);
    /// `gate ← dy · up · f'(gate)`, `up ← dy · f(gate)`.
    fn gated_backward(&self, gate: &mut [f32], up: &mut [f32], dy: &[f32]);
}

impl<S: Scalar> Nonlinear for S {
    fn forward(&self, x: &mut [f32]) {
        for x in x {
            *x = S::value(*x);
        }
    }

    fn backward(&self, x: &mut [f32], dy: &[f32]) {
        for (x, d) in x.iter_mut().zip(dy) {
            *x = d * S::derivative(*x);
        }
    }

    fn gated(&self, out: &mut [f32], gate: &[f32], up: &[f32]) {
        for ((y, &g), u) in out.iter_mut().zip(gate).zip(up) {
            *y = S::value(g) * u;
        }
    }

    fn gated_backward(&self, gate: &mut [f32], up: &mut [f32], dy: &[f32]) {
        for ((g, u), d) in gate.iter_mut().zip(up).zip(dy) {
            (*g, *u) = (d * *u * S::derivative(*g), d * S::value(*g));
        }
    }
}

/// The kernels of a nonlinearity.
pub(super) fn kernels(of: Nonlinearity) -> &'static dyn Nonlinear {
    match of.function {
        Activation::Gelu if of.tanh => &GeluTanh,
        Activation::Gelu => &Gelu,
        Activation::Silu => &Silu,
        Activation::Relu => &Relu,
        Activation::Relu2 => &Relu2,
    }
}

/// Writes the gated linear unit of the gate and up projections to `out`.
pub(super) fn gated(unit: GatedUnit, out: &mut [f32], gate: &[f32], up: &[f32]) {
    match unit {
        GatedUnit::Plain(function) => kernels(function).gated(out, gate, up),
        GatedUnit::Bounded(limit) => bounded_glu(out, gate, up, limit as f32),
    }
}

/// Backward of a gated linear unit: gradients overwrite the gate and up projections.
pub(super) fn gated_backward(unit: GatedUnit, gate: &mut [f32], up: &mut [f32], dy: &[f32]) {
    match unit {
        GatedUnit::Plain(function) => kernels(function).gated_backward(gate, up, dy),
        GatedUnit::Bounded(limit) => bounded_glu_backward(gate, up, dy, limit as f32),
    }
}

/// Factor of the sigmoid's argument in gpt-oss's gate.
const STEEP: f32 = 1.702;

/// `out ← min(g, c)·σ(1.702·min(g, c))·(clamp(u, ±c) + 1)`, with `g` = gate, `u` = up, `c` = limit.
fn bounded_glu(out: &mut [f32], gate: &[f32], up: &[f32], limit: f32) {
    for ((y, g), u) in out.iter_mut().zip(gate).zip(up) {
        let bounded = g.min(limit);
        *y = bounded * sigmoid(STEEP * bounded) * (u.clamp(-limit, limit) + 1.0);
    }
}

/// Overwrites gate and up projections by their gradients; the gradient of a clamped value is 0.
fn bounded_glu_backward(gate: &mut [f32], up: &mut [f32], dy: &[f32], limit: f32) {
    for ((g, u), d) in gate.iter_mut().zip(up).zip(dy) {
        let bounded = g.min(limit);
        let s = sigmoid(STEEP * bounded);
        let slope = s * (1.0 + STEEP * bounded * (1.0 - s));
        let d_gate = d * (u.clamp(-limit, limit) + 1.0) * slope;
        let d_up = d * bounded * s;
        (*g, *u) = (
            if *g > limit { 0.0 } else { d_gate },
            if u.abs() > limit { 0.0 } else { d_up },
        );
    }
}

struct GeluTanh;

impl Scalar for GeluTanh {
    #[inline]
    fn value(x: f32) -> f32 {
        0.5 * x * (1.0 + tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x)))
    }

    #[inline]
    fn derivative(x: f32) -> f32 {
        let t = tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x));
        let inner = GELU_SCALE * (1.0 + 3.0 * GELU_CUBE * x * x);
        0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    }
}

struct Gelu;

impl Scalar for Gelu {
    #[inline]
    fn value(x: f32) -> f32 {
        0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2))
    }

    #[inline]
    fn derivative(x: f32) -> f32 {
        let cumulative = 0.5 * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2));
        cumulative + x * NORMAL_DENSITY * exp(-0.5 * x * x)
    }
}

struct Silu;

impl Scalar for Silu {
    #[inline]
    fn value(x: f32) -> f32 {
        x * sigmoid(x)
    }

    #[inline]
    fn derivative(x: f32) -> f32 {
        let s = sigmoid(x);
        s * (1.0 + x * (1.0 - s))
    }
}

struct Relu;

impl Scalar for Relu {
    #[inline]
    fn value(x: f32) -> f32 {
        x.max(0.0)
    }

    #[inline]
    fn derivative(x: f32) -> f32 {
        f32::from(x > 0.0)
    }
}

/// The square of the rectifier.
struct Relu2;

impl Scalar for Relu2 {
    #[inline]
    fn value(x: f32) -> f32 {
        x.max(0.0) * x.max(0.0)
    }

    #[inline]
    fn derivative(x: f32) -> f32 {
        2.0 * x.max(0.0)
    }
}
