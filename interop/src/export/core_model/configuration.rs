//! Collects the fields of Megatron-Core's configuration, and the reasons to refuse the model.

use crate::config::Value;
use crate::export::refusal::Limits;

/// How the configuration is filled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Through the options of `pretrain_gpt.py`, which do not reach every field.
    Options,
    /// Through a provider, which reaches every field.
    Provider,
}

/// A field of the configuration: its name and value.
pub(crate) type Field = (&'static str, Value);

/// The fields collected so far.
pub(super) struct Core<'a> {
    pub(super) reach: Reach,
    limits: &'a mut Limits,
    pub(super) fields: Vec<Field>,
}

impl<'a> Core<'a> {
    pub(super) fn new(reach: Reach, limits: &'a mut Limits) -> Self {
        Self {
            reach,
            limits,
            fields: Vec::new(),
        }
    }

    /// Sets a field.
    pub(super) fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        self.fields.push((name, value.into()));
    }

    /// Refuses the model for one of its fields when `refused`.
    pub(super) fn lacks(&mut self, refused: bool, field: impl std::fmt::Display, why: &str) {
        self.limits.refuse_model(refused, field, why);
    }

    /// Refuses a model that needs a field which only a provider reaches, when `refused` and exporting options.
    pub(super) fn unreached(&mut self, refused: bool, field: impl std::fmt::Display, why: &str) {
        self.lacks(refused && self.reach == Reach::Options, field, why);
    }
}
