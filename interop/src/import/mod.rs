//! Imports configurations of training systems as strategies, so that the setup a user has today can be predicted,
//! explained and compared.

mod deepspeed;
pub mod document;
mod error;
mod imported;
mod layout;
mod megatron;
mod megatron_model;
mod model;
mod sizes;
mod titan_model;
mod torchtitan;

pub use self::document::Document;
pub use self::error::ImportError;
pub use self::imported::{Given, Imported};
pub(crate) use self::layout::parse_layout;
pub use self::model::of_library;

use crate::export::Dialect;

/// Reads a configuration as a strategy.
///
/// # Errors
/// When a required value is missing or invalid, or no strategy can express it.
pub fn import(document: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    match document.dialect {
        Dialect::MegatronLm => megatron::import(document, given),
        Dialect::Torchtitan02 | Dialect::Torchtitan03 | Dialect::TorchtitanMain => {
            torchtitan::import(document, given)
        }
        Dialect::DeepSpeed => deepspeed::import(document, given),
        Dialect::MegatronBridge
        | Dialect::Accelerate
        | Dialect::Axolotl
        | Dialect::Nanotron
        | Dialect::VeScale => Err(ImportError::NotImportable {
            path: document.path.clone(),
            dialect: document.dialect.name(),
        }),
    }
}
