//! Functions of each element, or of each row.

use catalog::DType;
use catalog::model::Temperature;

use crate::error::DTensorError;
use crate::gradients::{Backward, Of};
use crate::operator::{
    Class, CostClass, GatedUnit, Gradient, Name, Nonlinearity, Operator, Pointwise, Rotary,
};
use crate::placement::{BLOCK_AXES, Placement};
use crate::tape::{DTensor, Tape, no_rule};
use crate::tensor::{TensorId, TensorRole};

impl Tape<'_> {
    /// Records a pointwise function of tensors with equal placements; the output has the same placements.
    fn pointwise(
        &mut self,
        scope: &str,
        function: Pointwise,
        inputs: &[&DTensor],
        saved: &[TensorId],
    ) -> DTensor {
        let out = self.like(scope, inputs[0], inputs[0].dtype);
        self.record(scope, Operator::Pointwise(function), inputs, &out, saved);
        out
    }

    /// An activation function. Saves its input.
    pub fn activation(&mut self, scope: &str, function: Nonlinearity, x: &DTensor) -> DTensor {
        self.pointwise(scope, Pointwise::Activation(function), &[x], &[x.id])
    }

    /// The activation of a gated MLP. Saves both inputs.
    pub fn gated_activation(
        &mut self,
        scope: &str,
        unit: GatedUnit,
        gate: &DTensor,
        up: &DTensor,
    ) -> DTensor {
        let saved = [gate.id, up.id];
        self.pointwise(scope, Pointwise::Gated(unit), &[gate, up], &saved)
    }

    /// As [`Tape::gated_activation`] on one tensor that holds gate and up, `[…, 2f]` → `[…, f]`.
    pub fn fused_gated_activation(
        &mut self,
        scope: &str,
        unit: GatedUnit,
        both: &DTensor,
    ) -> DTensor {
        let mut shape = both.shape.clone();
        *shape.last_mut().expect("activations have a last dim") /= 2;
        let out = self.output(scope, &shape, both.placements.of_a_part(), both.dtype);
        let unit = Operator::Pointwise(Pointwise::FusedGated(unit));
        self.record(scope, unit, &[both], &out, &[both.id]);
        out
    }

    /// Soft cap `c·tanh(x/c)`. Saves its input.
    pub fn cap(&mut self, scope: &str, x: &DTensor, bound: f64) -> DTensor {
        self.pointwise(scope, Pointwise::Cap(bound), &[x], &[x.id])
    }

    /// Rotary position embedding of `x: [b, s, heads·d]`.
    pub fn rope(&mut self, scope: &str, x: &DTensor, rotary: Rotary) -> DTensor {
        self.pointwise(scope, Pointwise::Rope(rotary), &[x], &[])
    }

    /// Multiplies by a constant.
    pub fn scale(&mut self, scope: &str, x: &DTensor, factor: f64) -> DTensor {
        self.pointwise(scope, Pointwise::Scale(factor), &[x], &[])
    }

    /// Multiplies queries by a factor of their position.
    pub fn temperature(&mut self, scope: &str, x: &DTensor, temperature: Temperature) -> DTensor {
        self.pointwise(scope, Pointwise::Temperature(temperature), &[x], &[])
    }

    /// RMS norm, without a weight, of every run of `width` columns. Saves its input.
    pub fn unit_norm(&mut self, scope: &str, x: &DTensor, width: u64, epsilon: f64) -> DTensor {
        let norm = Pointwise::UnitNorm { width, epsilon };
        self.pointwise(scope, norm, &[x], &[x.id])
    }

    /// Multiplies every row of `x` by the sigmoid of the row's number in `gate: […, 1]`. Saves both inputs.
    ///
    /// # Errors
    /// When the placements of the gate differ from those of the rows.
    pub fn gate(
        &mut self,
        scope: &str,
        x: &DTensor,
        gate: &DTensor,
    ) -> Result<DTensor, DTensorError> {
        self.gated(scope, ("gate", Pointwise::Gate), x, gate)
    }

    /// Multiplies every element of `x` by the sigmoid of the gate's element. Saves both inputs.
    ///
    /// # Errors
    /// When the placements of the gate differ from those of `x`.
    pub fn sigmoid_gate(
        &mut self,
        scope: &str,
        x: &DTensor,
        gate: &DTensor,
    ) -> Result<DTensor, DTensorError> {
        self.gated(scope, ("sigmoid gate", Pointwise::SigmoidGate), x, gate)
    }

    fn gated(
        &mut self,
        scope: &str,
        (name, operator): (&'static str, Pointwise),
        x: &DTensor,
        gate: &DTensor,
    ) -> Result<DTensor, DTensorError> {
        if !self.lie_alike(x, gate) {
            return Err(no_rule(name, scope, &[x, gate]));
        }
        Ok(self.pointwise(scope, operator, &[x, gate], &[x.id, gate.id]))
    }

    /// Adds a bias vector.
    pub fn bias(&mut self, scope: &str, x: &DTensor, b: &DTensor) -> DTensor {
        self.pointwise(scope, Pointwise::Bias, &[x, b], &[])
    }

    /// Adds two tensors of equal placement.
    ///
    /// # Errors
    /// When placements differ.
    pub fn add(&mut self, scope: &str, a: &DTensor, b: &DTensor) -> Result<DTensor, DTensorError> {
        if !self.lie_alike(a, b) {
            return Err(no_rule("add", scope, &[a, b]));
        }
        let out = self.like(scope, a, a.dtype);
        self.record(scope, Operator::Add, &[a, b], &out, &[]);
        Ok(out)
    }

    /// Dropout; saves a one-byte mask.
    pub fn dropout(&mut self, scope: &str, x: &DTensor, probability: f64) -> DTensor {
        let operator = Operator::Pointwise(Pointwise::Dropout(probability));
        self.masked(scope, operator, x)
    }

    /// Records an operator that saves a one-byte mask.
    pub(super) fn masked(&mut self, scope: &str, operator: Operator, x: &DTensor) -> DTensor {
        let out = self.like(scope, x, x.dtype);
        let shape = self.trace.tensor(x.id).shape.clone();
        let name = format!("{scope}.mask");
        let mask = self.local_tensor(&name, shape, DType::U8, TensorRole::Activation);
        self.record(scope, operator, &[x], &out, &[mask]);
        self.also_makes(mask);
        out
    }

    /// Copies to another type.
    pub fn cast(&mut self, scope: &str, x: &DTensor, dtype: DType) -> DTensor {
        let out = self.like(&format!("{scope}.cast"), x, dtype);
        let copy = Operator::Pointwise(Pointwise::Copy);
        self.record(scope, copy, &[x], &out, &[]);
        out
    }

    /// Appends the columns of `shared: […, r]` to those of every head of `x: […, heads·d]`. Saves nothing. The
    /// gradient of `shared` is a sum over heads: a partial sum over the local ones, where heads are sharded.
    pub fn join(&mut self, scope: &str, x: &DTensor, shared: &DTensor, heads: u64) -> DTensor {
        let last = x.shape.len() - 1;
        let (own, more) = (x.shape[last] / heads, shared.shape[last]);
        let mut shape = x.shape.clone();
        shape[last] = heads * (own + more);
        let out = self.output(scope, &shape, x.placements, x.dtype);
        let join = Operator::Pointwise(Pointwise::Join { own, shared: more });
        self.record(scope, join, &[x, shared], &out, &[]);
        out
    }
}

impl Pointwise {
    /// One operator. A bias passes the gradient on; its own gradient is the column sum.
    pub(super) fn backward(self, to: &mut Backward<'_, '_>, of: Of<'_>, gradient: DTensor) {
        let operator = Gradient::Pointwise(of.index, self);
        match self {
            Self::Bias => to.push_sum(of, gradient, (operator, of.record.inputs[1].id)),
            Self::Join { .. } => {
                let (mesh, heads) = (*to.tape.mesh(), &of.record.inputs[0]);
                let last = heads.shape.len() - 1;
                to.push_one(of, &gradient, operator, |index, mut placed| {
                    for axis in BLOCK_AXES.into_iter().filter(|_| index == 1) {
                        if mesh.size(axis) > 1 && heads.placements.on(axis).shards(last) {
                            placed = placed.with(axis, Placement::Partial);
                        }
                    }
                    placed
                });
            }
            _ => to.push_one(of, &gradient, operator, |_, placed| placed),
        }
    }

    /// Name in profiles and cost class.
    pub(super) fn class(self) -> Class {
        let activation = |gated| CostClass::Activation { gated };
        match self {
            Self::Activation(function) => (Name::Activation(function, false), activation(false)),
            Self::Gated(unit) | Self::FusedGated(unit) => {
                let name = match unit {
                    GatedUnit::Plain(function) => Name::Activation(function, true),
                    GatedUnit::Bounded(_) => "activation".into(),
                };
                (name, activation(true))
            }
            Self::SigmoidGate => ("sigmoid gate".into(), activation(true)),
            Self::Cap(_) => ("activation".into(), activation(false)),
            Self::Rope(_) => ("rotary embedding".into(), CostClass::Rope),
            Self::Scale(_) | Self::Gate => ("scale".into(), CostClass::Scale),
            Self::Temperature(_) => ("temperature".into(), CostClass::Scale),
            Self::UnitNorm { .. } => ("unit norm".into(), CostClass::Norm),
            Self::Bias => ("bias".into(), CostClass::Bias),
            Self::Dropout(_) => ("dropout".into(), CostClass::Dropout),
            Self::Copy | Self::Join { .. } => ("copy".into(), CostClass::Copy),
        }
    }
}
