//! The fields of Megatron-Core's configuration while they are filled in, and what refuses the model on the way.

use crate::config::Value;
use crate::export::refusal::Limits;

/// What fills the configuration in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The options of `pretrain_gpt.py`, which do not reach every field.
    Options,
    /// A provider's fields, all of them.
    Provider,
}

/// One field of the configuration.
pub(crate) type Field = (&'static str, Value);

/// The fields so far.
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

    /// Refuses the model for a field.
    pub(super) fn lacks(&mut self, refused: bool, field: impl std::fmt::Display, why: &str) {
        self.limits.refuse_model(refused, field, why);
    }

    /// Refuses what only a provider's field reaches.
    pub(super) fn unreached(&mut self, refused: bool, field: impl std::fmt::Display, why: &str) {
        self.lacks(refused && self.reach == Reach::Options, field, why);
    }
}
