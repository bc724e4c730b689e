//! Clusters, devices and extensions of clusters, as YAML.

use std::sync::Arc;

use catalog::cluster_file::{ClusterFile, DeviceFile};
use catalog::extension::ExtensionFile;
use catalog::{Cluster, Device, SpecError};

use crate::outcome::Outcome;
use crate::promises;
use crate::scene::{self, Scene};
use crate::target::{Depth, Target};
use crate::tree::Format;

/// The outcome of a refused text: malformed if it is not YAML, else refused for what it says.
pub(super) fn refused(text: &str, error: &SpecError) -> Outcome {
    if Format::Yaml.parse(text).is_some() {
        Outcome::refused(error)
    } else {
        Outcome::malformed(error)
    }
}

/// Prices a small job on a cluster.
pub(super) fn priced(cluster: Cluster, outcome: &mut Outcome) {
    let scene = Scene::default();
    let runtime = if cluster.profile.is_some() {
        "vescale"
    } else {
        "megatron-core"
    };
    for gpus in [1, 2 * cluster.gpus_per_node] {
        if cluster.check_devices(gpus).is_err() || gpus > 1024 {
            continue;
        }
        let (Ok(base), Ok(runtime)) = (scene.scenario(), scene::runtime(runtime)) else {
            return;
        };
        let Ok(workload) = scene::workload(gpus, 512, gpus * 2, base.workload.precision) else {
            return;
        };
        let scenario = costmodel::Scenario {
            cluster: cluster.clone(),
            runtime,
            workload,
            ..base
        };
        let text = if gpus.is_multiple_of(2) { "tp=2" } else { "" };
        let parsed =
            plans::grammar::parse(text, &scenario.model, &scenario.workload, &scenario.runtime);
        if let Ok(strategy) = parsed {
            promises::predicted(&scenario, &strategy, outcome);
        }
    }
}

fn features(cluster: &Cluster) -> String {
    format!(
        "{:?} {} per node, domain of {}, reduces {}, {:?}",
        cluster.fabric,
        cluster.gpus_per_node.ilog2(),
        cluster.scale_up_domain.ilog2(),
        cluster.in_switch_reduction,
        cluster.device.architecture
    )
}

fn device(name: &str) -> Result<Device, SpecError> {
    let unknown = SpecError::Unknown {
        kind: "device",
        name: name.to_owned(),
        nearest: None,
    };
    let known = scene::CLUSTERS
        .iter()
        .filter_map(|c| scene::cluster(c).ok());
    let mut known = known.map(|c| c.device);
    known.find(|d| d.name == name).ok_or(unknown)
}

/// Fuzzes cluster files, which name their device or define it.
pub(super) fn clusters() -> Target {
    Target::of_text(
        "clusters",
        clusters_seeds,
        |pool, rng| Format::Yaml.mutate(pool, rng),
        clusters_read,
    )
}

fn clusters_seeds() -> Vec<Vec<u8>> {
    let mut seeds = scene::files("catalog/presets/clusters", ".yaml");
    // A seed that defines its device.
    let inline = scene::files("catalog/presets/devices", "h100-sxm.yaml");
    let parsed = |text: &[u8]| Format::Yaml.parse(&String::from_utf8_lossy(text));
    let whole = inline.first().and_then(|t| parsed(t));
    let first = seeds.first().and_then(|t| parsed(t));
    if let (Some(device), Some(mut cluster)) = (whole, first) {
        cluster["device"] = device;
        seeds.push(Format::Yaml.print(&cluster).into_bytes());
    }
    seeds
}

fn clusters_read(text: &str, depth: Depth) -> Outcome {
    let file: Result<ClusterFile, SpecError> = catalog::text::yaml(text, "input");
    match file.and_then(|file| file.resolve("input", device)) {
        Ok(cluster) => {
            let mut outcome = Outcome::accepted(features(&cluster));
            of_cluster(&cluster, &mut outcome);
            if depth == Depth::Use {
                priced(cluster, &mut outcome);
            }
            outcome
        }
        Err(error) => refused(text, &error),
    }
}

/// Checks the numbers of a cluster that enter prices.
fn of_cluster(cluster: &Cluster, outcome: &mut Outcome) {
    for link in [&cluster.scale_up, &cluster.scale_out] {
        let bandwidth = link.bandwidth.value.0;
        outcome.expect(bandwidth.is_finite() && bandwidth > 0.0, || {
            format!("bandwidth {bandwidth}")
        });
        let latency = link.latency.value.0;
        outcome.expect(latency.is_finite() && latency >= 0.0, || {
            format!("latency {latency}")
        });
    }
    if let Some(price) = &cluster.dollars_per_gpu_hour {
        let dollars = price.value;
        outcome.expect(dollars.is_finite() && dollars >= 0.0, || {
            format!("price {dollars}")
        });
    }
    let (domain, node) = (cluster.scale_up_domain, cluster.gpus_per_node);
    outcome.expect(
        domain.is_multiple_of(node) || node.is_multiple_of(domain),
        || format!("domains of {domain} and nodes of {node}"),
    );
    of_device(&cluster.device, outcome);
}

fn of_device(device: &Device, outcome: &mut Outcome) {
    for (dtype, rate) in &device.peak {
        let rate = rate.value.0;
        outcome.expect(rate.is_finite() && rate > 0.0, || {
            format!("{dtype:?} {rate}")
        });
    }
    let bandwidth = device.memory_bandwidth.value.0;
    outcome.expect(bandwidth.is_finite(), || {
        format!("memory bandwidth {bandwidth}")
    });
    outcome.expect(
        device.power_watts.is_none_or(|w| w.is_finite() && w >= 0.0),
        || "power".to_owned(),
    );
}

/// Fuzzes device files.
pub(super) fn devices() -> Target {
    Target::of_text(
        "devices",
        || scene::files("catalog/presets/devices", ".yaml"),
        |pool, rng| Format::Yaml.mutate(pool, rng),
        devices_read,
    )
}

fn devices_read(text: &str, depth: Depth) -> Outcome {
    let file: Result<DeviceFile, SpecError> = catalog::text::yaml(text, "input");
    match file.and_then(|file| file.resolve("input")) {
        Ok(device) => {
            let types: Vec<_> = device.peak.keys().collect();
            let mut outcome = Outcome::accepted(format!("{:?} {types:?}", device.architecture));
            of_device(&device, &mut outcome);
            if let (Depth::Use, Ok(cluster)) = (depth, scene::cluster("dgx-h100")) {
                let mut cluster = cluster;
                cluster.device = device;
                priced(cluster, &mut outcome);
            }
            outcome
        }
        Err(error) => refused(text, &error),
    }
}

/// Fuzzes files that extend a cluster.
pub(super) fn extensions() -> Target {
    Target::of_text(
        "extensions",
        extensions_seeds,
        |pool, rng| Format::Yaml.mutate(pool, rng),
        extensions_read,
    )
}

fn extensions_seeds() -> Vec<Vec<u8>> {
    let factors = "time_factors: {compute: 1.07, memory: 1.0, network: 1.2, host: 1.5}";
    let with = |rest: &str| {
        format!("schema_version: 1\nname: ours\nextends: dgx-h100\n{rest}").into_bytes()
    };
    vec![
        with(&format!(
            "calibration:\n  runtime: megatron-core\n  runs: 1\n  {factors}\n  source: 'run.log: median of 20 steps'\n"
        )),
        with("profile: gpu-profile.yaml\n"),
    ]
}

fn extensions_read(text: &str, depth: Depth) -> Outcome {
    match ExtensionFile::from_yaml(text, "input") {
        Ok(file) => {
            let mut outcome = Outcome::accepted(format!(
                "profile {} calibration {}",
                file.profile.is_some(),
                file.calibration.is_some()
            ));
            let again = file
                .to_yaml()
                .and_then(|t| ExtensionFile::from_yaml(&t, "input"));
            outcome.expect(again.as_ref() == Ok(&file), || {
                format!("written and read again: {again:?}")
            });
            if let (Depth::Use, Ok(cluster)) = (depth, scene::cluster("dgx-h100")) {
                let calibration = file.calibration;
                let mut cluster = cluster;
                cluster.calibration = calibration;
                priced(cluster, &mut outcome);
            }
            outcome
        }
        Err(error) => refused(text, &error),
    }
}

/// An H100 cluster with this profile of its GPUs.
pub(super) fn with_profile(profile: catalog::Profile) -> Option<Cluster> {
    let mut cluster = scene::cluster("dgx-h100").ok()?;
    cluster.gpu_profile = Some(Arc::new(profile));
    Some(cluster)
}
