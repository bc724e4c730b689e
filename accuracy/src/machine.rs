//! The cluster of a published run: the preset of its GPU, changed by what the run states about its network, nodes and
//! power limit.

use catalog::runs::{Recipe, Run};
use catalog::units::Bandwidth;
use catalog::{Cluster, Fabric, Origin};

/// Cluster presets, with the words that must all be in a run's description of its GPU; the first match wins.
const CLUSTERS: [(&[&str], &str); 46] = [
    (&["jean", "zay"], "jean-zay-a100"),
    (&["gb300"], "gb300-nvl72"),
    (&["gb200"], "gb200-nvl72"),
    (&["b300"], "dgx-b300"),
    (&["b200"], "dgx-b200"),
    (&["gh200", "144gb"], "gh200-144gb-node"),
    (&["gh200"], "gh200-node"),
    (&["h200", "nvl"], "h200-nvl-node"),
    (&["h200"], "dgx-h200"),
    (&["h20", "141gb"], "h20-141gb"),
    (&["h20"], "h20"),
    (&["h800", "pcie"], "h800-pcie-node"),
    (&["h800"], "h800"),
    (&["h100", "pcie"], "h100-pcie-node"),
    (&["h100", "nvl"], "h100-nvl-node"),
    (&["h100", "96gb"], "grand-teton-96gb"),
    (&["h100", "95gb"], "grand-teton-96gb"),
    (&["h100", "hbm2e"], "grand-teton-96gb"),
    (&["h100"], "dgx-h100"),
    (&["a800", "pcie"], "a800-pcie-node"),
    (&["a800"], "a800-node"),
    (&["a100", "pcie", "40gb"], "a100-pcie-40gb-node"),
    (&["a100", "pcie"], "a100-pcie-node"),
    (&["a100", "80gb"], "dgx-a100"),
    (&["a100", "40gb"], "dgx-a100-40gb"),
    (&["a100"], "dgx-a100"),
    (&["v100", "16gb"], "v100-node"),
    (&["v100"], "dgx2-v100"),
    (&["mi355x"], "mi355x"),
    (&["mi350x"], "mi350x"),
    (&["mi325x"], "mi325x"),
    (&["mi300x"], "mi300x"),
    (&["4090"], "rtx-4090-node"),
    (&["5090"], "rtx-5090-node"),
    (&["3090"], "rtx-3090-node"),
    (&["a6000"], "rtx-a6000-node"),
    (&["6000", "ada"], "rtx-6000-ada-node"),
    (&["pro", "6000"], "rtx-pro-6000-node"),
    (&["l40s"], "l40s-node"),
    (&["l40"], "l40-node"),
    (&["a40"], "a40-node"),
    (&["a30"], "a30-node"),
    (&["a10g"], "a10g-node"),
    (&["a10"], "a10-node"),
    (&["l20"], "l20-node"),
    (&["l4"], "l4-node"),
];

/// GPUs that are sold with several memory sizes.
const SEVERAL_SIZES: [&str; 3] = ["a100", "v100", "h20"];

/// The cluster of a run, and whether the run's description of its GPU fits only one variant of it.
pub(super) fn cluster(run: &Run) -> Result<(Cluster, bool), String> {
    let gpu = run
        .text("gpu", run.gpu.as_deref())
        .ok_or("gpu is not stated")?
        .to_lowercase()
        .replace(" gb", "gb");
    let words = words(&gpu);
    let has = |word: &str| words.contains(&word);
    let found = CLUSTERS
        .iter()
        .find(|(all, _)| all.iter().all(|word| has(word)));
    let (_, name) = found.ok_or_else(|| format!("gpu `{gpu}` is not recognised"))?;
    let mut cluster = catalog::load::cluster(name).map_err(|e| e.to_string())?;
    let sized = words.iter().any(|word| size(word, "gb").is_some());
    let is_one_part = sized || !SEVERAL_SIZES.iter().any(|part| has(part));
    if let Some(node) = run
        .size("gpus_per_node", run.gpus_per_node)
        .filter(|&n| n > 0)
        && cluster.scale_up_domain == cluster.gpus_per_node
    {
        cluster.gpus_per_node = node;
        cluster.scale_up_domain = node;
    }
    if let Some(watts) = words.iter().find_map(|word| size(word, "w")) {
        cluster.device.power_watts = Some(watts);
    }
    let of_recipe = || Recipe::of(run)?.interconnect.as_deref();
    if let Some(text) = run
        .text("interconnect", run.interconnect.as_deref())
        .or_else(of_recipe)
    {
        network(text, &mut cluster);
    }
    Ok((cluster, is_one_part))
}

/// The words of a text, made of letters and digits; a count is dropped, so that `8xH100` becomes `h100`.
fn words(text: &str) -> Vec<&str> {
    text.split(|c: char| !c.is_alphanumeric())
        .map(|word| match word.split_once('x') {
            Some((count, part)) if !part.is_empty() && count.parse::<u64>().is_ok() => part,
            _ => word,
        })
        .map(|word| word.strip_prefix("rtx").unwrap_or(word))
        .filter(|word| !word.is_empty())
        .collect()
}

/// The number in a word such as `500w`.
fn size(word: &str, unit: &str) -> Option<f64> {
    word.strip_suffix(unit)?.parse().ok()
}

/// Applies what a run states about the network between its nodes: `4 x 100Gb RoCE per node`, `400
/// Gb/s per GPU`, `1600 Gbps node-node`. A rate with neither a count nor `per node` or `per GPU` is
/// that of one network card; their number is unknown, so the preset's rate stays.
fn network(text: &str, cluster: &mut Cluster) {
    let text = text.to_lowercase();
    for part in text.split([';', ',']) {
        let inside = ["intra", "nvlink", "nvswitch"]
            .iter()
            .any(|w| part.contains(w));
        if inside && !part.contains("inter-") {
            continue;
        }
        if let Some(rate) = per_gpu(part, cluster.gpus_per_node) {
            cluster.scale_out.bandwidth.value = rate;
            cluster.scale_out.bandwidth.origin = Origin::Published;
            cluster.scale_out.bandwidth.source = format!("stated by the run: {}", part.trim());
        }
        let has = |names: &[&str]| names.iter().any(|name| part.contains(name));
        if has(&["roce"]) {
            cluster.fabric = Fabric::Roce;
        } else if has(&["efa"]) {
            cluster.fabric = Fabric::Efa;
        } else if has(&["ethernet", "tcp"]) {
            cluster.fabric = Fabric::Ethernet;
        } else if has(&["infiniband", "hdr", "ndr", " ib"]) {
            cluster.fabric = Fabric::InfiniBand;
        }
    }
}

/// Each GPU's share of the network, in bytes per second.
fn per_gpu(part: &str, node: u64) -> Option<Bandwidth> {
    let spaced = part
        .replace("gbit/s", "gb")
        .replace("gb/s", "gb")
        .replace("gbps", "gb");
    let spaced: String = spaced
        .chars()
        .map(|c| if c == '×' { 'x' } else { c })
        .collect();
    let mut count: Option<f64> = None;
    let mut number: Option<f64> = None;
    let mut rate = None;
    for word in spaced
        .replace('x', " x ")
        .replace("gb", " gb ")
        .split_whitespace()
    {
        match word {
            "x" => count = number.take(),
            "gb" if rate.is_none() => rate = number.take(),
            _ => number = word.trim_end_matches("hdr").parse().ok(),
        }
    }
    let rate = rate? * 1e9 / 8.0;
    let whole = ["per node", "total", "node-node", "/node", "a node"];
    let each = ["per gpu", "/gpu", "each gpu", "per card"];
    if each.iter().any(|word| part.contains(word)) {
        return Some(Bandwidth(rate));
    }
    match count {
        Some(count) => Some(Bandwidth(rate * count / node as f64)),
        None if whole.iter().any(|word| part.contains(word)) => Some(Bandwidth(rate / node as f64)),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_read_as_their_sources_write_them() {
        for (text, gigabytes) in [
            ("4 x 100Gb RoCE per node", Some(6.25)),
            ("inter-node 800 Gbps total", Some(12.5)),
            ("1600 Gbps node-node (RoCE)", Some(25.0)),
            ("backend RDMA 400 Gb/s per GPU", Some(50.0)),
            ("8x HDR 200Gb/s IB inter", Some(25.0)),
            ("InfiniBand 200Gb/s", None),
            ("8×400 Gb/s", Some(50.0)),
        ] {
            let read = per_gpu(&text.to_lowercase(), 8).map(|b| b.0 / 1e9);
            assert_eq!(read, gigabytes, "{text}");
        }
    }

    #[test]
    fn a_recipe_tells_the_network_that_a_run_does_not_state() {
        let gigabytes = |state: &str| {
            let mut run = Run {
                source: "bigscience-workshop/bigscience@1:chronicles-prequel.md".to_owned(),
                gpu: Some("A100-80GB SXM (Jean Zay)".to_owned()),
                ..Run::default()
            };
            let flags = run.flags.get_or_insert_default();
            flags.insert("hw_state".to_owned(), state.into());
            let (cluster, _) = cluster(&run).expect("a preset");
            cluster.scale_out.bandwidth.value.0 / 1e9
        };
        assert_eq!(gigabytes("pre-2022-02-25"), 2.0 * 41.0 / 8.0 / 8.0);
        assert_eq!(gigabytes("after PCIe/NUMA tuning (02-25)"), 2.56);
    }

    #[test]
    fn gpus_are_told_apart_by_whole_words() {
        let of = |gpu: &str| {
            let run = Run {
                gpu: Some(gpu.to_owned()),
                ..Run::default()
            };
            cluster(&run).map(|(cluster, one)| (cluster.name, one))
        };
        for (gpu, name, one) in [
            ("A100", "dgx-a100", false),
            ("A100-40GB SXM4", "dgx-a100-40gb", true),
            ("NVIDIA A100 (40 GB)", "dgx-a100-40gb", true),
            ("8xH100-80GB", "dgx-h100", true),
            ("NVIDIA A10G", "a10g-node", true),
            ("H20", "h20", false),
            ("RTX 4090", "rtx-4090-node", true),
            (
                "H100-96GB HBM2e 2.4TB/s, 500W (Grand Teton)",
                "grand-teton-96gb",
                true,
            ),
        ] {
            assert_eq!(of(gpu), Ok((name.to_owned(), one)), "{gpu}");
        }
        assert!(of("TPU v5p").is_err());
    }

    #[test]
    fn runs_on_every_preset_device_are_recognised() {
        for preset in catalog::load::cluster_names().expect("presets are valid") {
            let device = catalog::load::cluster(&preset.name)
                .expect("a preset")
                .device;
            let run = Run {
                gpu: Some(device.name.clone()),
                ..Run::default()
            };
            let found = cluster(&run).map(|(cluster, _)| cluster.device.name);
            assert_eq!(found, Ok(device.name));
        }
    }
}
