//! Which part of a step Megatron-LM captures in CUDA graphs.

use catalog::CudaGraphs;

use super::document::Document;
use super::error::ImportError;
use crate::export::graphs::{IMPL, LAYERS, MODULES, STEP};

/// How earlier versions of Megatron-Core spell `--cuda-graph-modules`.
const SCOPE: &str = "--cuda-graph-scope";

/// Reads which part of a step a script captures in CUDA graphs. Adds a note if it captures modules
/// of layers without their attention.
pub(super) fn graphs(
    doc: &Document,
    notes: &mut Vec<String>,
) -> Result<Option<CudaGraphs>, ImportError> {
    let captured = match doc.text(IMPL)? {
        // The earlier switches.
        None | Some("none")
            if doc.on("--enable-cuda-graph")? || doc.on("--external-cuda-graph")? =>
        {
            CudaGraphs::Layers
        }
        None | Some("none") => CudaGraphs::None,
        Some(LAYERS | "local") => CudaGraphs::Layers,
        Some(STEP) => CudaGraphs::Step,
        Some(_) => return Err(doc.wrong(IMPL, "none, local, transformer_engine or full_iteration")),
    };
    let key = [MODULES, SCOPE]
        .into_iter()
        .find(|key| doc.find(key).is_some());
    let Some(key) = key.filter(|_| captured == CudaGraphs::Layers) else {
        return Ok(Some(captured));
    };
    let modules = doc.words(key);
    if modules.contains(&STEP) {
        return Ok(Some(CudaGraphs::Step));
    }
    let whole = modules.is_empty() || modules.contains(&"full") || modules.contains(&"attn");
    if !whole {
        let note = "planned as layers captured with their attention";
        notes.push(doc.note(key, note));
    }
    Ok(Some(captured))
}
