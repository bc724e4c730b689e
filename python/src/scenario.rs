//! Turns what Python passes into a scenario.

use answers::values::{self, Gpus};
use answers::{Inputs, Question};
use catalog::Mistake;
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
    seq_len: Option<u64>,
    global_batch: Option<u64>,
    /// As `--lengths` and `--packing` take them.
    lengths: Option<String>,
    packing: Option<String>,
    precision: String,
    headroom: f64,
}

/// Resolves what was passed to its scenario.
pub(crate) fn resolve(given: Given) -> Result<Inputs, PlanError> {
    let lengths = given.lengths.as_deref().map(values::lengths).transpose();
    let lengths = lengths.map_err(|wrong| wrong.at("lengths"))?;
    let packing = given.packing.as_deref().map(str::parse).transpose();
    let packing = packing.map_err(|wrong: String| Mistake::new(wrong).at("packing"))?;
    let documents = match (lengths, packing) {
        (Some(lengths), packing) => Some((lengths, packing.unwrap_or_default())),
        (None, None) => None,
        (None, Some(_)) => {
            let without = "packing is of documents, and their lengths are not given";
            let mistake = Mistake::new(without).at("packing");
            return Err(mistake
                .expected("lengths too, such as 512:0.7,4k:0.3")
                .into());
        }
    };
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
        documents,
        adapters: None,
        jitter: None,
    })?)
}
