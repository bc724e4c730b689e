//! Parallel axes of files for Hugging Face's Trainer: their sizes, and how data-parallel ranks divide into those that share
//! states and replicas of these.

use catalog::Zero;

use super::document::Document;
use super::error::ImportError;
use super::fsdp::Sharding;
use super::imported::Given;
use super::sizes::{data_parallel, devices, said_devices};
use crate::export::Dialect;

/// The sizes of a file's axes, and the GPUs that they divide.
pub(super) struct Axes {
    pub(super) gpus: u64,
    pub(super) tp: u64,
    pub(super) cp: u64,
    pub(super) ep: u64,
    /// Data-parallel ranks.
    pub(super) dp: u64,
}

impl Axes {
    pub(super) fn of(doc: &Document, given: &Given<'_>) -> Result<Self, ImportError> {
        let axis = |name: &str| axis(doc, name);
        let (tp, cp) = (axis("tensor_parallel")?, axis("context_parallel")?);
        let beside = tp.saturating_mul(cp);
        let stated = [doc.size(&key(doc, SHARD))?, doc.size(&key(doc, REPLICATE))?];
        let gpus = match (devices(doc, given.gpus)?, stated) {
            (None, [Some(shards @ 1..), Some(replicas @ 1..)]) => {
                beside.saturating_mul(shards).saturating_mul(replicas)
            }
            _ => said_devices(doc, given.gpus)?,
        };
        Ok(Self {
            gpus,
            tp,
            cp,
            ep: axis("expert_parallel")?,
            dp: data_parallel(doc, gpus, beside)?,
        })
    }
}

const SHARD: &str = "dp_shard";
const REPLICATE: &str = "dp_replicate";

/// The key of a parallel axis, which `name` names as axolotl does.
fn key(doc: &Document, name: &str) -> String {
    if doc.dialect == Dialect::Axolotl {
        return format!("{name}_size");
    }
    let name = match name {
        "tensor_parallel" => "tp",
        "context_parallel" => "cp",
        other => other,
    };
    format!("parallelism_config.parallelism_config_{name}_size")
}

/// The size of a parallel axis, which `name` names as axolotl does.
pub(super) fn axis(doc: &Document, name: &str) -> Result<u64, ImportError> {
    let key = key(doc, name);
    if doc.dialect != Dialect::Axolotl {
        return doc.degree(&key);
    }
    // Sizes that are not above 1 leave the axis out (axolotl@067b021, utils/distributed.py, `_get_parallel_config_kwargs`).
    match doc.degree_or_unset(&key)? {
        // axolotl's earlier name of the key.
        1 if name == "context_parallel" => doc.degree_or_unset("sequence_parallel_degree"),
        size => Ok(size),
    }
}

/// Divides data-parallel ranks into those that share states, and replicas of these. Adds a note where a plan divides them
/// otherwise.
pub(super) fn ranks(
    doc: &Document,
    given: &Given<'_>,
    axes: &Axes,
    sharding: Sharding,
    notes: &mut Vec<String>,
) -> Result<(u64, u64), ImportError> {
    let shard_key = key(doc, SHARD);
    let shards = axis(doc, SHARD)?;
    let replicas = axis(doc, REPLICATE)?;
    let axolotl = doc.dialect == Dialect::Axolotl;
    if axolotl && shards > 1 && sharding.zero == Zero::Z0 {
        let why = "axolotl does not start with it and without fsdp_config";
        return Err(doc.unsupported(&shard_key, why));
    }
    if axolotl && axes.ep > 1 {
        return beside_experts(doc, axes, sharding, shards, notes);
    }
    // accelerate's file that states no shards leaves them to the number of processes.
    let stated = shards > 1 && sharding.zero != Zero::Z0;
    if !stated {
        return sharding.ranks(doc, given, axes.dp, replicas);
    }
    match shards.saturating_mul(replicas) {
        product if product == axes.dp => Ok((shards, replicas)),
        // axolotl makes replicas of the rest (utils/distributed.py, `_get_parallel_config_kwargs`); accelerate stops.
        _ if axolotl && replicas == 1 && axes.dp.is_multiple_of(shards) => {
            Ok((shards, axes.dp / shards))
        }
        product => {
            let why = format!(
                "{shards} shards in each of {replicas} replicas are {product} ranks, and {} GPUs over tp={} and cp={} are {}",
                axes.gpus, axes.tp, axes.cp, axes.dp
            );
            Err(doc.unsupported(&shard_key, &why))
        }
    }
}

/// The same beside axolotl's expert parallelism, which is an axis of its own: all axes multiplied are the GPUs, or axolotl stops
/// (axolotl@067b021, integrations/expert_parallel/plugin.py, `_resolve_ep_group`). In a plan experts are divided over the ranks
/// that share the other weights.
fn beside_experts(
    doc: &Document,
    axes: &Axes,
    sharding: Sharding,
    shards: u64,
    notes: &mut Vec<String>,
) -> Result<(u64, u64), ImportError> {
    let Axes {
        gpus,
        tp,
        cp,
        ep,
        dp,
    } = *axes;
    let key = "expert_parallel_size";
    let product = [shards, tp, cp].into_iter().fold(ep, u64::saturating_mul);
    if product != gpus {
        let why = format!(
            "{ep} times dp_shard_size {shards}, tensor_parallel_size {tp} and context_parallel_size {cp} is {product}, \
             not the {gpus} GPUs, and axolotl stops"
        );
        return Err(doc.unsupported(key, &why));
    }
    if sharding.zero == Zero::Z0 {
        return Ok((1, dp));
    }
    if shards > 1 {
        notes.push(doc.note(
            key,
            format!(
                "weights outside experts are planned as sharded over all {dp} data-parallel ranks; axolotl shards them \
                 over the {shards} of dp_shard_size, which takes more memory"
            ),
        ));
    }
    Ok((dp, 1))
}
