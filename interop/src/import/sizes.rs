//! Derives sizes from others that a file states: data parallelism, micro-batches, the workload.

use catalog::{Workload, WorkloadSizes};

use super::document::Document;
use super::error::ImportError;
use crate::config::place;
use crate::export::Dialect;

/// Number of devices: as given, from the launch command, or from the file; `None` if none has it.
pub(crate) fn devices(document: &Document, given: Option<u64>) -> Result<Option<u64>, ImportError> {
    let launch = &document.launch;
    match (given.or(launch.gpus), &launch.open) {
        (None, Some(open)) => {
            let message = format!("`{}` is not known here; give --gpus", open.value);
            let place = place(&document.path, open.line);
            Err(ImportError::value(place, &open.option, message))
        }
        (None, None) if document.dialect == Dialect::LlamaFactory => {
            // Workers that Ray starts, each on a device of its own.
            document.size("ray_num_workers")
        }
        (None, None) => document.size("num_processes"),
        (known, _) => Ok(known),
    }
}

/// Number of devices; an error if nothing gives it.
pub(crate) fn said_devices(document: &Document, given: Option<u64>) -> Result<u64, ImportError> {
    let how = "give --gpus";
    devices(document, given)?.ok_or_else(|| document.missing("the number of GPUs", how))
}

/// Data-parallel degree: the number of devices divided by the other degrees.
pub(crate) fn data_parallel(document: &Document, gpus: u64, rest: u64) -> Result<u64, ImportError> {
    if rest == 0 || gpus == 0 || !gpus.is_multiple_of(rest) {
        let what =
            format!("{gpus} ranks are no multiple of {rest}, the product of parallel degrees");
        return Err(ImportError::uneven(&document.path, what));
    }
    Ok(gpus / rest)
}

/// Number of micro-batches per rank and step.
pub(crate) fn micro_batches(
    document: &Document,
    key: &str,
    global: u64,
    per_step: u64,
) -> Result<u64, ImportError> {
    if per_step == 0 || global == 0 || !global.is_multiple_of(per_step) {
        let message =
            format!("{global} sequences are not a multiple of micro-batch · dp = {per_step}");
        return Err(document.unsupported(key, &message));
    }
    Ok(global / per_step)
}

/// The workload of the file.
pub(crate) fn workload(document: &Document, sizes: WorkloadSizes) -> Result<Workload, ImportError> {
    Workload::new(sizes).map_err(|error| ImportError::Workload {
        path: document.path.clone(),
        error,
    })
}
