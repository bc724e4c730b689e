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

/// A note if the file or its launcher states another number of devices than was given, with which the job is then planned.
///
/// # Errors
/// If the file's degrees make a job of another number of devices than was given.
pub(crate) fn other_devices(
    document: &Document,
    given: Option<u64>,
    planned: u64,
) -> Result<Option<String>, ImportError> {
    let Some(given) = given else { return Ok(None) };
    let path = &document.path;
    if given != planned {
        return Err(ImportError::Sizes {
            path: path.clone(),
            what: format!("the file's degrees make a job of {planned} GPUs, not of {given}"),
            expected:
                "the file's own number of GPUs, or degrees that leave the rest to data parallelism"
                    .to_owned(),
        });
    }
    let stated = devices(document, None).ok().flatten();
    let other = stated.filter(|stated| *stated != given);
    Ok(other.map(|stated| {
        format!(
            "{path}: the file starts {stated} GPUs; the job is planned on the {given} that were asked for"
        )
    }))
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
