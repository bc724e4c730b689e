//! A measured machine, as a cluster whose devices and links have the rates that its kernels and
//! messages reached.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::cluster::{Algorithm, Cluster, Fabric, Link};
use crate::cluster_file::DeviceFile;
use crate::cluster_presets::DEVICES;
use crate::device::{Architecture, Device};
use crate::dtype::DType;
use crate::error::SpecError;
use crate::profile::Profile;
use crate::provenance::{Origin, Sourced};
use crate::text;
use crate::units::{Bandwidth, Bytes, FlopRate, Seconds};

impl Profile {
    /// The machine as a cluster whose devices are its GPUs, or ranks that share its cores.
    ///
    /// # Errors
    /// When what was measured makes no sense as a device or a link.
    pub fn cluster(self, path: &str) -> Result<Cluster, SpecError> {
        let source = format!("{path}: {}", self.machine.processor);
        let copies = self.fastest("copy", |sizes| {
            8.0 * sizes.iter().map(|&s| s as f64).product::<f64>()
        });
        let copies = Bandwidth(copies.max(1e9));
        let link = self.link(copies, &source);
        let gpu = self.machine.gpu.as_ref();
        let cluster = Cluster {
            name: "local".to_owned(),
            device: self.device(copies, &source),
            gpus_per_node: 1 << 10,
            scale_up_domain: 1 << 10,
            scale_up: link.clone(),
            pci_express: false,
            scale_out: link,
            host: None,
            in_switch_reduction: false,
            fabric: Fabric::Local,
            algorithms: Algorithm::MEASURED.to_vec(),
            dollars_per_gpu_hour: None,
            max_gpus: Some(gpu.map_or(1 << 10, |gpu| gpu.count)),
            profile: Some(Arc::new(self)),
            gpu_profile: None,
            calibration: None,
            speed: None,
            jitter: None,
            pools: None,
        };
        let checked = cluster.device.check().and_then(|()| cluster.check());
        checked.map_err(|(field, message)| SpecError::field(path, field, message))?;
        Ok(cluster)
    }

    /// A GPU of the machine, or one rank's share of its CPU.
    fn device(&self, copies: Bandwidth, source: &str) -> Device {
        let (name, sm_count, cores) = match &self.machine.gpu {
            Some(gpu) => {
                let name = self.machine.processor.clone();
                (name, u64::from(gpu.multiprocessors), 1)
            }
            None => ("cpu".to_owned(), 1, self.machine.cores),
        };
        let peak = [DType::F32, DType::Bf16].map(|dtype| {
            let rate = FlopRate(self.peak_of(dtype).0 / cores as f64);
            (dtype, measured(rate, source))
        });
        Device {
            peers_over_pci_express: !name.contains("GeForce"),
            architecture: self
                .machine
                .gpu
                .as_ref()
                .map_or(Architecture::Cpu, |_| generation(&name)),
            name,
            memory: measured(Bytes(self.machine.memory_bytes / cores), source),
            memory_bandwidth: measured(copies, source),
            peak: peak.into_iter().collect(),
            best_products: BTreeMap::new(),
            sm_count,
            power_watts: None,
            clock_mhz: None,
            kernels: "profile".to_owned(),
        }
    }

    /// The link between ranks, as fast as the fastest NCCL transfer measured, or else as copies.
    fn link(&self, copies: Bandwidth, source: &str) -> Link {
        let messages = self.fastest("nccl send and receive", |sizes| {
            sizes.get(1).map_or(0.0, |&bytes| bytes as f64)
        });
        let bandwidth = if messages > 0.0 {
            Bandwidth(messages)
        } else {
            copies
        };
        Link {
            bandwidth: measured(bandwidth, source),
            latency: measured(Seconds(0.0), source),
        }
    }

    /// Largest measured rate of a kernel in bytes/s; `bytes` computes its bytes from its sizes.
    fn fastest(&self, kernel: &str, bytes: impl Fn(&[u64]) -> f64) -> f64 {
        let of = self.measured.iter().filter(|m| m.kernel == kernel);
        let rates = of.map(|m| bytes(&m.sizes) / m.seconds);
        rates.fold(0.0, f64::max)
    }
}

/// The generation of a GPU, from the name that its driver reports, such as `NVIDIA H100 80GB HBM3`:
/// that of the device preset with the same model number (`h100`) that shares most words with the
/// name. `Cpu` if no preset matches.
fn generation(name: &str) -> Architecture {
    let name = name.to_lowercase();
    let words: Vec<&str> = name.split(|c: char| !c.is_alphanumeric()).collect();
    let alike = DEVICES.iter().filter_map(|(path, yaml)| {
        let preset: DeviceFile = text::yaml(yaml, path).ok()?;
        let number = |word: &&str| word.contains(|c: char| c.is_ascii_digit());
        let named = preset.name.split('-').find(number);
        let has = |word: &&str| words.contains(word);
        let common = preset.name.split('-').filter(has).count();
        named
            .is_some_and(|number| words.contains(&number))
            .then_some((common, preset.architecture))
    });
    let best = alike.max_by_key(|&(common, _)| common);
    best.map_or(Architecture::Cpu, |(_, architecture)| architecture)
}

fn measured<T>(value: T, source: &str) -> Sourced<T> {
    Sourced {
        value,
        origin: Origin::Measured,
        source: source.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_names_tell_the_generation() {
        for (name, wanted) in [
            ("NVIDIA H200", Architecture::Hopper),
            ("NVIDIA H100 80GB HBM3", Architecture::Hopper),
            ("NVIDIA A100-SXM4-80GB", Architecture::Ampere),
            ("Tesla V100-SXM2-16GB", Architecture::Volta),
            ("NVIDIA B200", Architecture::Blackwell),
            ("NVIDIA GeForce RTX 4090", Architecture::Ada),
            ("NVIDIA RTX 6000 Ada Generation", Architecture::Ada),
            ("NVIDIA RTX PRO 6000 Blackwell", Architecture::BlackwellRtx),
            ("an emulated GPU", Architecture::Cpu),
        ] {
            assert_eq!(generation(name), wanted, "{name}");
        }
    }
}
