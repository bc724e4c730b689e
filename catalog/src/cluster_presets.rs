//! The devices and clusters that come with the tool.

use crate::cluster_file::ClusterFile;
use crate::embedded::embedded;
use crate::names::same;
use crate::text;

/// Device files: path and text.
pub(crate) const DEVICES: &[(&str, &str)] = embedded!(
    "devices",
    [
        "v100-sxm2",
        "a100-40gb",
        "a100-80gb",
        "a100-pcie",
        "h100-sxm",
        "h100-pcie",
        "h100-nvl",
        "h800",
        "h20",
        "h200",
        "b200",
        "b300",
        "gb200",
        "gb300",
        "l40s",
        "mi300x",
        "h100-96gb",
        "rtx-4090",
        "rtx-a6000",
        "a800",
        "a800-pcie",
        "a100-pcie-40gb",
        "a30",
        "a40",
        "a10",
        "a10g",
        "rtx-3090",
        "rtx-5090",
        "rtx-6000-ada",
        "rtx-pro-6000",
        "l40",
        "l20",
        "l4",
        "h20-141gb",
        "h200-nvl",
        "gh200",
        "gh200-144gb",
        "h800-pcie",
        "v100-16gb",
        "mi325x",
        "mi350x",
        "mi355x",
    ]
);

/// Cluster files: path and text.
pub(crate) const CLUSTERS: &[(&str, &str)] = embedded!(
    "clusters",
    [
        "dgx-h100",
        "dgx-a100",
        "dgx-a100-40gb",
        "dgx-h200",
        "dgx-b200",
        "dgx-b300",
        "gb200-nvl72",
        "gb300-nvl72",
        "aws-p4d",
        "aws-p4de",
        "aws-p5",
        "aws-p5en",
        "aws-p6-b200",
        "gcp-a3-high",
        "gcp-a3-mega",
        "gcp-a3-ultra",
        "azure-ndv4",
        "azure-ndmv4",
        "azure-ndv5",
        "meta-roce-h100",
        "grand-teton-96gb",
        "jean-zay-a100",
        "h20",
        "h800",
        "mi300x",
        "dgx2-v100",
        "l40s-node",
        "rtx-4090-node",
        "rtx-a6000-node",
        "a800-node",
        "a800-pcie-node",
        "a100-pcie-node",
        "a100-pcie-40gb-node",
        "a30-node",
        "a40-node",
        "a10-node",
        "a10g-node",
        "rtx-3090-node",
        "rtx-6000-ada-node",
        "l40-node",
        "l20-node",
        "l4-node",
        "rtx-5090-node",
        "rtx-pro-6000-node",
        "h100-pcie-node",
        "h100-nvl-node",
        "h200-nvl-node",
        "h800-pcie-node",
        "h20-141gb",
        "gh200-node",
        "gh200-144gb-node",
        "v100-node",
        "mi325x",
        "mi350x",
        "mi355x",
    ]
);

/// The path and content of the cluster preset with this name or alias; `None` if there is none.
pub(crate) fn named(name: &str) -> Option<(&'static str, ClusterFile)> {
    CLUSTERS.iter().find_map(|(path, yaml)| {
        let file: ClusterFile = text::yaml(yaml, path).ok()?;
        same(&file.name, &file.aliases, name).then_some((*path, file))
    })
}
