//! What the modules of a block share: tape, module names, norms, linear layers and adapters beside them.

use catalog::model::ModelConfig;
use catalog::{AdaptedModule, DType};
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
    /// Declares a parameter in the block's dtype.
    pub(crate) fn weight(&mut self, name: &str, shape: &[u64]) -> DTensor {
        self.tape.parameter(name, shape, self.dtype, 1)
    }

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
        let weight = self.weight(&format!("{scope}.weight"), &[width]);
        let bias = (norm.bias).then(|| self.weight(&format!("{scope}.bias"), &[width]));
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

    /// Adds the output of a LoRA adapter to `y`, the output of its linear layer for `x`, if all of
    /// `modules` have adapters; else returns `y`. Under tensor parallelism the adapter is split by
    /// rank and outputs beside a column-parallel layer, by inputs beside a row-parallel one.
    pub(crate) fn adapted(
        &mut self,
        modules: &[AdaptedModule],
        scope: &str,
        x: &DTensor,
        y: DTensor,
    ) -> Result<DTensor, ModelError> {
        let adapters = self.model.adapters;
        let Some(of) = adapters.filter(|of| of.modules.contains_all(modules)) else {
            return Ok(y);
        };
        let width = |t: &DTensor| t.shape.last().copied().unwrap_or(0);
        let [a, b] = ["lora_A", "lora_B"].map(|name| format!("{scope}.{name}"));
        let (inner, out) = (width(x), width(&y));
        let x = match of.dropout {
            0.0 => x.clone(),
            dropout => self
                .tape
                .dropout(&format!("{scope}.lora_dropout"), x, dropout),
        };
        let weight = |scope: &str| format!("{scope}.weight");
        let down = self
            .tape
            .adapter(&weight(&a), &[of.rank, inner], self.dtype);
        let h = self.tape.linear(&a, &x, &down, Site::Adapter)?;
        let h = self.tape.at(&format!("{a}.output"), h)?;
        let up = self.tape.adapter(&weight(&b), &[out, of.rank], self.dtype);
        let beside = self.tape.linear(&b, &h, &up, Site::Adapter)?;
        let scaled = self
            .tape
            .scale(&b, &beside, of.alpha as f64 / of.rank as f64);
        Ok(self.tape.add(&format!("{scope}.lora"), &y, &scaled)?)
    }
}
