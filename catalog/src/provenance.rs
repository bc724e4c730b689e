//! Where a number comes from. Every number in a preset or table is [`Sourced`].

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The kind of evidence behind a number, from strongest to weakest.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Measured by this project's profiler on the machine named in the source.
    Measured,
    /// Printed in a vendor's datasheet.
    Datasheet,
    /// Published by a third party who measured it.
    Published,
    /// Fitted by us on the data the source names.
    Fitted,
    /// Taken as plausible, without evidence at hand.
    Assumed,
}

/// A value together with the evidence for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sourced<T> {
    /// The value itself.
    pub value: T,
    /// What kind of evidence supports it.
    pub origin: Origin,
    /// Document, table, command or reasoning, in a few words.
    pub source: String,
}

impl<T> Sourced<T> {
    /// A fact of a cluster that the user states on the command line.
    pub(crate) fn given(value: T) -> Self {
        Self {
            value,
            origin: Origin::Datasheet,
            source: "given with --cluster".to_owned(),
        }
    }
}
