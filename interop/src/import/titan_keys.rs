//! Keys of torchtitan before 0.2, where they differ from those of 0.2 (`torchtitan/config_manager.py` of v0.1.0, and of 49c6d6f
//! for files before March 2025).

use crate::config::Node;

/// The value of a key of 0.2 under its earlier name, in a file for an earlier torchtitan.
pub(super) fn earlier<'a>(root: &'a Node, key: &str) -> Option<&'a Node> {
    let (section, name) = key.rsplit_once('.')?;
    let within = |section: &str| root.at(&format!("{section}.{name}"));
    match (section, name) {
        ("compile", "enable") => root.at("training.compile"),
        ("training", "local_batch_size") => root.at("training.batch_size"),
        ("parallelism", _) => within("training").or_else(|| within("experimental")),
        ("quantize.linear.float8", _) => within("float8"),
        _ => None,
    }
}

/// Whether the file is from before March 2025, when `parallelism` became a section.
pub(super) fn without_parallelism(root: &Node) -> bool {
    let old = [
        "training.batch_size",
        "training.tensor_parallel_degree",
        "experimental.pipeline_parallel_degree",
    ];
    root.get("parallelism").is_none() && old.into_iter().any(|key| root.at(key).is_some())
}
