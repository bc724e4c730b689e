//! From what Python passes to a scenario.

use answers::values::{self, Gpus};
use answers::{Inputs, Question};
use pyo3::FromPyObject;

use crate::error::PlanError;

/// What to plan for, as the Python side collected it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Given {
    /// Preset, path, or the name to record for `config`.
    model: String,
    /// A `config.json`'s text, when the model is in memory.
    config: Option<String>,
    cluster: String,
    gpus: u64,
    runtime: String,
    seq_len: u64,
    global_batch: Option<u64>,
    precision: String,
    headroom: f64,
}

/// Resolves what was passed to its scenario.
pub(crate) fn resolve(given: Given) -> Result<Inputs, PlanError> {
    let headroom = values::share(&given.headroom.to_string());
    Ok(answers::inputs::resolve(&Question {
        model: given.model,
        config: given.config,
        cluster: Some(given.cluster),
        gpus: Gpus::Count(given.gpus),
        runtime: Some(given.runtime),
        seq: given.seq_len,
        global_batch: given.global_batch,
        precision: values::precision(&given.precision)?,
        headroom: headroom.map_err(|wrong| wrong.at("headroom"))?,
        adapters: None,
    })?)
}
