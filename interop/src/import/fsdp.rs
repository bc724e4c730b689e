//! Reads settings of PyTorch's FSDP: how ranks divide states, and which states are in host memory.

use catalog::{Offload, Zero};

use super::document::Document;
use super::error::ImportError;
use super::imported::Given;
use super::sizes::data_parallel;
use crate::config::{Node, Value};
use crate::export::Dialect;

/// How data-parallel ranks divide states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sharding {
    pub(super) zero: Zero,
    /// Whether parameters are freed after forward.
    pub(super) reshard: bool,
    /// Whether the ranks of a node divide states among them, and nodes hold replicas.
    within_node: bool,
}

/// Plain replicas, which `NO_SHARD` asks for too.
const REPLICAS: Sharding = Sharding {
    zero: Zero::Z0,
    reshard: false,
    within_node: false,
};

/// FSDP's default. Kinds that keep parameters gathered from forward to backward shard them too.
const FULL: Sharding = Sharding {
    zero: Zero::Z3,
    reshard: true,
    within_node: false,
};

impl Sharding {
    /// The sharding that a word, or accelerate's number for it, names; `None` if it names none.
    fn named(name: &str) -> Option<Self> {
        let kept = Self {
            reshard: false,
            ..FULL
        };
        let within_node = |of: Self| Self {
            within_node: true,
            ..of
        };
        match name.to_uppercase().trim_start_matches('_') {
            "FULL_SHARD" | "1" => Some(FULL),
            "SHARD_GRAD_OP" | "2" => Some(kept),
            "NO_SHARD" | "3" => Some(REPLICAS),
            "HYBRID_SHARD" | "4" => Some(within_node(FULL)),
            "HYBRID_SHARD_ZERO2" | "5" => Some(within_node(kept)),
            _ => None,
        }
    }

    /// How the file divides states: plain replicas if it has no FSDP.
    pub(super) fn of(doc: &Document) -> Result<Self, ImportError> {
        let words = words(doc);
        let section = doc.find("fsdp_config");
        if let Some(path) = section.and_then(Node::text) {
            let why = format!(
                "`{path}` cannot be read, from the folder of the configuration or from here"
            );
            return Err(doc.unsupported("fsdp_config", &why));
        }
        if !is_on(doc)? {
            return Ok(REPLICAS);
        }
        let mut sharding = FULL;
        // accelerate drops the strategy's name where it drives FSDP2.
        let named = version(doc)? != Some(2) || doc.dialect == Dialect::Axolotl;
        for key in [
            "fsdp_config.reshard_after_forward",
            "fsdp_config.fsdp_reshard_after_forward",
            "fsdp_config.sharding_strategy",
            "fsdp_config.fsdp_sharding_strategy",
        ] {
            let name = match doc.find(key).map(|node| &node.value) {
                Some(Value::Bool(freed)) => freed.to_string(),
                Some(Value::Str(name)) => name.to_lowercase(),
                Some(Value::Int(number)) => number.to_string(),
                _ => continue,
            };
            if let Ok(freed) = name.parse() {
                sharding.reshard = freed;
                continue;
            }
            if named {
                let strategies =
                    "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2";
                sharding = Self::named(&name).ok_or_else(|| doc.wrong(key, strategies))?;
            }
        }
        let mut of_words = words.into_iter().rev().filter_map(Self::named);
        Ok(of_words.next().unwrap_or(sharding))
    }

    /// Splits `dp` ranks into those that shard states, and replicas (`replicas` in the file).
    pub(super) fn ranks(
        self,
        doc: &Document,
        given: &Given<'_>,
        dp: u64,
        replicas: u64,
    ) -> Result<(u64, u64), ImportError> {
        if self.zero == Zero::Z0 {
            return Ok((1, dp));
        }
        if !self.within_node || replicas > 1 {
            return Ok((data_parallel(doc, dp, replicas)?, replicas));
        }
        let of_file = match (doc.size("num_processes")?, doc.size("num_machines")?) {
            (Some(all), Some(nodes @ 1..)) => Some(all / nodes),
            _ => None,
        };
        let each = doc.launch.gpus_per_node.or(of_file);
        let each = each.unwrap_or(given.gpus_per_node).clamp(1, dp);
        if !dp.is_multiple_of(each) {
            let what = format!(
                "HYBRID_SHARD divides states within a node, and {dp} ranks fill no whole number of nodes of {each}"
            );
            return Err(ImportError::uneven(&doc.path, what));
        }
        Ok((each, dp / each))
    }
}

/// Whether the file trains under FSDP.
fn is_on(doc: &Document) -> Result<bool, ImportError> {
    let section = doc.find("fsdp_config");
    let switched = matches!(
        doc.find("fsdp").map(|node| &node.value),
        Some(Value::Bool(true))
    );
    let by_section =
        doc.dialect == Dialect::Axolotl && section.is_some_and(|node| !node.entries().is_empty());
    let launched = doc.text("distributed_type")? == Some("FSDP");
    Ok(switched || !words(doc).is_empty() || by_section || launched)
}

/// Whether FSDP holds weights in 32 bits that were loaded in 16: accelerate copies those that are trained under mixed precision
/// (accelerate@16cb6eb, accelerator.py, `prepare_model`; utils/fsdp_utils.py, `fsdp2_prepare_model`). axolotl puts a function of
/// its own in place of that for FSDP2, which does not (axolotl@067b021, monkeypatch/accelerate/fsdp2.py).
pub(super) fn upcasts(doc: &Document) -> Result<bool, ImportError> {
    let by_axolotl = doc.dialect == Dialect::Axolotl && version(doc)? == Some(2);
    Ok(is_on(doc)? && !by_axolotl)
}

/// The words of the Trainer's `fsdp`.
fn words(doc: &Document) -> Vec<&str> {
    match doc.find("fsdp").map(|node| &node.value) {
        Some(Value::Str(words)) => words.split_whitespace().collect(),
        Some(Value::List(items)) => items.iter().filter_map(Node::text).collect(),
        _ => Vec::new(),
    }
}

/// The version of FSDP that the file says it is for, 1 or 2.
fn version(doc: &Document) -> Result<Option<u64>, ImportError> {
    for key in [
        "fsdp_config.fsdp_version",
        "fsdp_config.version",
        "fsdp_version",
    ] {
        if let Some(version) = doc.size(key)? {
            return Ok(Some(version));
        }
    }
    Ok(None)
}

/// The states that FSDP keeps in host memory, which are planned if parameters are freed after forward.
pub(super) fn offload(
    doc: &Document,
    sharding: Sharding,
    notes: &mut Vec<String>,
) -> Result<Option<Offload>, ImportError> {
    let mut on = words(doc).contains(&"offload").then_some("fsdp");
    for key in [
        "fsdp_config.fsdp_offload_params",
        "fsdp_config.offload_params",
        // The Trainer's own (training_args.py, `_process_fsdp_args`).
        "fsdp_config.cpu_offload",
    ] {
        if doc.on(key)? {
            on = Some(key);
        }
    }
    match on {
        Some(_) if sharding.reshard => Ok(Some(Offload::Parameters)),
        Some(key) => {
            let place = doc.place(key);
            notes.push(format!("{place}: {key}: offload is not planned for without freeing parameters after forward, and left out"));
            Ok(None)
        }
        None => Ok(None),
    }
}

/// Always `None`: files of FSDP2 do not set prefetching. Adds a note on FSDP1's `NO_PREFETCH`.
pub(super) fn prefetch(
    doc: &Document,
    notes: &mut Vec<String>,
) -> Result<Option<u64>, ImportError> {
    let key = "fsdp_config.fsdp_backward_prefetch";
    if version(doc)? != Some(2) && doc.text(key)? == Some("NO_PREFETCH") {
        notes.push(format!(
            "{}: {key} NO_PREFETCH is not planned for and left out: the prediction gathers one block ahead",
            doc.place(key)
        ));
    }
    Ok(None)
}
