//! What the modules of a block share: tape, module names, norms and linear layers.

use catalog::DType;
use catalog::model::ModelConfig;
use dtensor::{DTensor, Norm, Site, Tape};

use crate::error::ModelError;
use crate::names::Names;

/// What the modules of one block share.
pub(crate) struct Block<'t, 'p, 'm> {
    pub(crate) tape: &'t mut Tape<'p>,
    pub(crate) model: &'m ModelConfig,
    pub(crate) names: Names,
    pub(crate) dtype: DType,
}

impl Block<'_, '_, '_> {
    /// Norm over the hidden size.
    pub(crate) fn norm(&mut self, scope: &str, x: &DTensor) -> DTensor {
        self.norm_over(scope, x, self.model.hidden)
    }

    /// Norm over a given width.
    pub(crate) fn norm_over(&mut self, scope: &str, x: &DTensor, width: u64) -> DTensor {
        self.norm_with(scope, x, width, self.model.constants.norm_epsilon)
    }

    /// Norm over a given width, with a given epsilon.
    pub(crate) fn norm_with(
        &mut self,
        scope: &str,
        x: &DTensor,
        width: u64,
        epsilon: f64,
    ) -> DTensor {
        let norm = self.model.norm;
        let weight = self
            .tape
            .parameter(&format!("{scope}.weight"), &[width], self.dtype, 1);
        let bias = norm.bias.then(|| {
            self.tape
                .parameter(&format!("{scope}.bias"), &[width], self.dtype, 1)
        });
        let norm = Norm {
            kind: norm.kind,
            epsilon,
            bias: bias.map(|b| b.id),
            from_one: self.model.constants.norm_from_one,
        };
        let bare = scope.trim_start_matches('/');
        self.tape.norm(bare, x, &weight, norm)
    }

    /// Linear layer with the plan's redistribution and an optional bias. The router's runs in fp32.
    pub(crate) fn linear(
        &mut self,
        site: Site,
        scope: &str,
        x: &DTensor,
        out: u64,
        inner: u64,
        bias: bool,
    ) -> Result<DTensor, ModelError> {
        let dtype = match site {
            Site::Router => DType::F32,
            _ => self.dtype,
        };
        let w = self
            .tape
            .parameter(&format!("{scope}.weight"), &[out, inner], dtype, 1);
        let bare = scope.trim_start_matches('/');
        let y = self.tape.linear(bare, x, &w, site)?;
        let y = self.tape.at(&format!("{bare}.output"), y)?;
        if !bias {
            return Ok(y);
        }
        let b = self
            .tape
            .parameter(&format!("{scope}.bias"), &[out], dtype, 1);
        Ok(self.tape.bias(bare, &y, &b))
    }
}
