//! A cluster described in one line: `h100-sxm x 8 per node, 400 Gb/s x 8`. Whatever the line leaves
//! out is taken from the preset with the same GPU.

use crate::cluster::{Cluster, Link};
use crate::error::SpecError;
use crate::mistake::Mistake;
use crate::provenance::Sourced;
use crate::units::Bandwidth;

const EXAMPLE: &str = "--cluster 'h100-sxm x 8 per node, 400 Gb/s x 8'";

/// Whether a text describes a cluster, rather than names one.
pub(crate) fn describes_cluster(text: &str) -> bool {
    text.contains("per node")
}

/// The cluster that a line describes, such as `h100-sxm x 8 per node`. `like` finds the preset with the GPU of this name.
///
/// # Errors
/// When a part cannot be read, the GPU is unknown, or sizes make no sense.
pub(crate) fn read(
    line: &str,
    like: impl Fn(&str) -> Result<Cluster, SpecError>,
) -> Result<Cluster, SpecError> {
    let mut parts = line.split(',').map(str::trim);
    let first = parts.next().unwrap_or_default();
    let (device, count) = gpus(first).ok_or_else(|| wrong(line, first))?;
    let mut cluster = like(device)?;
    if count != cluster.gpus_per_node {
        cluster.scale_up_domain = count;
    }
    cluster.gpus_per_node = count;
    cluster.max_gpus = None;
    cluster.name = line.to_owned();
    let mut said = Vec::new();
    for part in parts {
        let kind = set(&mut cluster, part).ok_or_else(|| wrong(line, part))?;
        if said.contains(&kind) {
            return Err(twice(line, part, kind));
        }
        said.push(kind);
    }
    cluster.check().map_err(|(field, message)| {
        SpecError::Wrong(
            Mistake::new(message)
                .at(format!("cluster `{line}`, {field}"))
                .example(EXAMPLE),
        )
    })?;
    Ok(cluster)
}

/// Sets what a part of the line says after the GPUs, and returns what that is; `None` if it cannot be read.
fn set(cluster: &mut Cluster, part: &str) -> Option<&'static str> {
    if let Some((link @ ("nvlink" | "pcie"), rate)) = part.split_once(' ') {
        set_rate(&mut cluster.scale_up, rate.trim().parse().ok()?);
        cluster.pci_express = link == "pcie";
        return Some("the link inside a node");
    }
    if let Some(size) = part.strip_prefix("domain ") {
        cluster.scale_up_domain = size.trim().parse().ok()?;
        return Some("the domain");
    }
    if let Some(price) = part.strip_prefix('$') {
        let price = price.trim_end_matches("/h").trim().parse();
        cluster.dollars_per_gpu_hour = Some(Sourced::given(price.ok()?));
        return Some("the price");
    }
    let (rate, cards) = product(part)?;
    let rate: Bandwidth = rate.parse().ok()?;
    let gpus = cluster.gpus_per_node.max(1);
    set_rate(
        &mut cluster.scale_out,
        Bandwidth(rate.0 * cards as f64 / gpus as f64),
    );
    Some("the network between nodes")
}

/// Parses `h100-sxm x 8 per node` or `8 x h100-sxm per node` into the GPU and its count.
fn gpus(part: &str) -> Option<(&str, u64)> {
    let (left, right) = times(part.strip_suffix("per node")?.trim())?;
    match (left.parse(), right.parse()) {
        (_, Ok(count)) => Some((left, count)),
        (Ok(count), _) => Some((right, count)),
        _ => None,
    }
}

/// Parses `400 Gb/s x 8`, or one card: `400 Gb/s`, into the rate of a card and the number of cards.
fn product(part: &str) -> Option<(&str, u64)> {
    match times(part) {
        Some((rate, cards)) => Some((rate, cards.parse().ok().filter(|n| (1..=1024).contains(n))?)),
        None => Some((part, 1)),
    }
}

fn times(text: &str) -> Option<(&str, &str)> {
    let (left, right) = text.split_once(" x ").or_else(|| text.split_once('×'))?;
    Some((left.trim(), right.trim()))
}

fn set_rate(link: &mut Link, rate: Bandwidth) {
    link.bandwidth = Sourced::given(rate);
}

fn twice(line: &str, part: &str, kind: &str) -> SpecError {
    SpecError::Wrong(
        Mistake::new(format!("`{part}` gives {kind} a second time"))
            .at(format!("cluster `{line}`"))
            .expected("each part once")
            .example(EXAMPLE),
    )
}

fn wrong(line: &str, part: &str) -> SpecError {
    SpecError::Wrong(
        Mistake::new(format!("`{part}` is not understood"))
            .at(format!("cluster `{line}`"))
            .expected(
                "GPU x COUNT per node, then if needed RATE x CARDS between nodes, nvlink or pcie RATE inside, domain GPUS on NVLink, $ per GPU and hour",
            )
            .example(EXAMPLE),
    )
}
