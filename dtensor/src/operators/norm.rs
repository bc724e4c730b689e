//! Layer and RMS norms.

use catalog::DType;
use catalog::model::NormKind;

use crate::operator::{Class, CostClass, Norm, Operator};
use crate::tape::{DTensor, Tape};
use crate::tensor::TensorRole;

impl Tape<'_> {
    /// Layer or RMS norm over the last dim, or over each run of `weight`'s length in it (per-head norm). Saves the
    /// input and fp32 statistics per norm (mean and reciprocal deviation, or the latter alone).
    pub fn norm(&mut self, scope: &str, x: &DTensor, weight: &DTensor, norm: Norm) -> DTensor {
        let statistics = match norm.kind {
            NormKind::LayerNorm => 2,
            NormKind::RmsNorm => 1,
        };
        let out = self.like(scope, x, x.dtype);
        let rows = self.trace.tensor(x.id).elements() / weight.shape[0].max(1);
        let name = format!("{scope}.statistics");
        let shape = vec![rows, statistics];
        let stats = self.local_tensor(&name, shape, DType::F32, TensorRole::Activation);
        let saved = [x.id, stats];
        self.record(scope, Operator::Norm(norm), &[x, weight], &out, &saved);
        self.also_makes(stats);
        out
    }
}

impl Norm {
    /// Name in profiles and cost class.
    pub(super) fn class(self) -> Class {
        let name = match self.kind {
            NormKind::LayerNorm => "layer norm",
            NormKind::RmsNorm => "rms norm",
        };
        (name.into(), CostClass::Norm)
    }
}
