//! Imports configurations of training systems as strategies, so that the setup a user has today can be predicted,
//! explained and compared.

mod adapters;
mod bridge;
mod bridge_recipe;
mod deepspeed;
mod dispatcher;
pub mod document;
mod error;
mod formats;
mod fsdp;
mod graphs;
mod hf_axes;
mod hf_precision;
mod imported;
mod kernels;
mod launch;
mod layout;
mod manifest;
mod mca;
mod megatron;
mod megatron_config;
mod megatron_model;
mod megatron_notes;
mod megatron_stages;
mod model;
mod nan_checks;
mod nanotron;
mod optimizer;
mod readings;
mod script;
mod settled;
mod sizes;
mod titan_keys;
mod titan_model;
mod titan_precision;
mod torchtitan;
mod trainer;
mod unplanned;

pub(crate) use self::bridge::field as bridge_field;
pub use self::document::Document;
pub use self::error::ImportError;
pub use self::imported::{Given, Imported};
pub use self::kernels::SaidKernel;
pub use self::launch::{Launch, Open};
pub use self::layout::parse_layout;
pub use self::model::{OfFile, of_file};
pub use self::readings::Way;

use crate::export::Dialect;

/// Reads a configuration as a strategy.
///
/// # Errors
/// When a required value is missing or invalid, or no strategy can express it.
pub fn import(document: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    if let [first, .., last] = document.python.functions.as_slice() {
        let message = format!(
            "{} functions make configurations, {first} to {last}",
            document.python.functions.len()
        );
        let how = format!("{message}; say which: {}:{first}", document.path);
        return Err(document.missing("the configuration", how));
    }
    refuse_without_configuration(document)?;
    let read = |document: &Document| -> Result<Imported, ImportError> {
        let other_model = model::same(document, given.model)?;
        let mut imported = of_dialect(document, given)?;
        imported.notes.splice(0..0, other_model);
        Ok(imported)
    };
    settled::settled(document, |document| {
        let mut imported = read(document)?;
        // Notes name what else a script may state.
        imported.notes.clear();
        imported.kernels.clear();
        let runtime = imported.runtime(document);
        Ok((imported, runtime))
    })?;
    let mut imported = read(document)?;
    let planned = imported.workload.gpus;
    let other_devices = sizes::other_devices(document, given.gpus, planned)?;
    imported.notes.extend(other_devices);
    imported.notes.extend(settled::notes(document));
    Ok(imported)
}

/// Refuses a Python file that sets no key, and takes its configuration from nowhere else: it is a program of another kind.
fn refuse_without_configuration(document: &Document) -> Result<(), ImportError> {
    let python = &document.python;
    let elsewhere = python.hub_model.is_some()
        || python.registry.is_some()
        || python.makes_trainer
        || !python.made.is_empty();
    match document.states_nothing()? {
        Some(why) if document.dialect.is_python() && !elsewhere => Err(document.missing(
            "a configuration",
            format!("{why}; give a file that configures the job"),
        )),
        _ => Ok(()),
    }
}

fn of_dialect(document: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    match document.dialect {
        Dialect::MegatronLm => megatron::import(document, given),
        Dialect::Torchtitan02 | Dialect::Torchtitan03 | Dialect::TorchtitanMain => {
            torchtitan::import(document, given)
        }
        Dialect::DeepSpeed => deepspeed::import(document, given),
        Dialect::MegatronBridge => bridge::import(document, given),
        Dialect::Nanotron => nanotron::import(document, given),
        Dialect::LlamaFactory if mca::is(document) => mca::import(document, given),
        Dialect::Accelerate
        | Dialect::Axolotl
        | Dialect::Transformers
        | Dialect::TransformersDeepSpeed
        | Dialect::LlamaFactory => trainer::import(document, given),
        Dialect::VeScale => Err(ImportError::NotImportable {
            path: document.path.clone(),
            dialect: document.dialect.name(),
        }),
    }
}
