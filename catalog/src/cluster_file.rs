//! Devices and clusters as files.

use std::collections::BTreeMap;
use std::fmt::{self, Formatter};

use schemars::JsonSchema;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::cluster::{Algorithm, Cluster, Fabric, Link};
use crate::device::{Architecture, Device};
use crate::dtype::DType;
use crate::error::SpecError;
use crate::host::Host;
use crate::provenance::Sourced;
use crate::units::{Bandwidth, Bytes, FlopRate, Seconds};

/// A device as its file describes it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceFile {
    /// Version of this format: 1.
    #[schemars(extend("const" = 1))]
    pub schema_version: u32,
    /// Preset name.
    pub name: String,
    /// Other names.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Microarchitecture.
    pub architecture: Architecture,
    /// Memory that PyTorch reports in total. It is less than the label says.
    pub memory: Sourced<Bytes>,
    /// Peak memory bandwidth.
    pub memory_bandwidth: Sourced<Bandwidth>,
    /// Peaks without sparsity, by operand type; the `f32` peak is for TF32 products.
    pub peak: BTreeMap<DType, Sourced<FlopRate>>,
    /// Highest rates of large products that were measured at the power limit, by operand type, where it keeps them far below the peaks.
    #[serde(default)]
    pub best_products: BTreeMap<DType, Sourced<FlopRate>>,
    /// Multiprocessors or compute units.
    #[schemars(range(min = 1, max = 65536))]
    pub sm_count: u64,
    /// Power limit in watts.
    #[schemars(range(min = 1, max = 100_000))]
    pub power_watts: Option<f64>,
    /// The clock that the peaks are stated for, in MHz. It tells whether matrix units are slower, as those of GeForce cards are.
    #[schemars(range(min = 1, max = 100_000))]
    pub clock_mhz: Option<f64>,
    /// Whether the driver lets devices reach each other's memory over PCI Express, by default true. NVIDIA's does not for
    /// GeForce cards.
    #[serde(default = "yes")]
    pub peers_over_pci_express: bool,
    /// Name of the measured kernel tables; if absent, assumed to be the nearest architecture's.
    pub kernels: Option<String>,
}

/// The value of a switch that a file leaves out.
fn yes() -> bool {
    true
}

/// A cluster as its file describes it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// Version of this format: 1.
    #[schemars(extend("const" = 1))]
    pub schema_version: u32,
    /// Preset name.
    pub name: String,
    /// Other names.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// A device preset by name, a device file beside this one, or a device in full.
    pub device: DeviceRef,
    /// Devices per host.
    #[schemars(range(min = 1, max = 65536))]
    pub gpus_per_node: u64,
    /// Devices in one scale-up domain; by default `gpus_per_node`.
    #[schemars(range(min = 1, max = 65536))]
    pub scale_up_domain: Option<u64>,
    /// Network inside a domain, per device and direction.
    pub scale_up: LinkFile,
    /// Whether the network inside a domain is PCI Express. If absent: if it has at most 64 GB/s.
    pub pci_express: Option<bool>,
    /// Network between domains, per device and direction.
    pub scale_out: LinkFile,
    /// The host of every node. Without it, no plan can keep data in host memory.
    pub host: Option<Host>,
    /// Whether switches reduce inside a domain.
    #[serde(default)]
    pub in_switch_reduction: bool,
    /// Kind of scale-out network.
    pub fabric: Fabric,
    /// Algorithms that collectives between domains may use; by default those with measured prices.
    /// One that is left out is used only for a collective that no listed one can do.
    pub algorithms: Option<Vec<Algorithm>>,
    /// Price of a device, dollars per hour.
    pub dollars_per_gpu_hour: Option<Sourced<f64>>,
    /// Number of devices that exist; no limit if absent.
    #[schemars(range(min = 1, max = 1_048_576))]
    pub max_gpus: Option<u64>,
    /// How fast the devices compute, as a share of what their tables say, above 0 and up to 1: below 1 where they
    /// throttle.
    #[schemars(extend("properties" = {"value": {"exclusiveMinimum": 0, "maximum": 1}}))]
    pub speed: Option<Sourced<f64>>,
    /// Standard deviation of the time that a rank takes for a pass, as a share of that time, from 0 to below 1.
    #[schemars(extend("properties" = {"value": {"minimum": 0, "exclusiveMaximum": 1}}))]
    pub jitter: Option<Sourced<f64>>,
}

/// One level of the network as a file describes it.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LinkFile {
    /// Peak bandwidth per device and direction.
    pub bandwidth: Sourced<Bandwidth>,
    /// Latency of a step beyond the collective library's own; none if absent.
    pub latency: Option<Sourced<Seconds>>,
}

/// A device by name or in full.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(untagged)]
pub enum DeviceRef {
    /// Name of a preset, or a file beside the cluster's.
    Name(String),
    /// A device in full.
    Inline(Box<DeviceFile>),
}

/// Written by hand, so that an error inside a device names its line and field.
impl<'de> Deserialize<'de> for DeviceRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameOrDevice;
        impl<'de> Visitor<'de> for NameOrDevice {
            type Value = DeviceRef;
            fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
                f.write_str("the name or file of a device, or a device in full")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<DeviceRef, E> {
                Ok(DeviceRef::Name(name.to_owned()))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DeviceRef, A::Error> {
                DeviceFile::deserialize(MapAccessDeserializer::new(map))
                    .map(|file| DeviceRef::Inline(Box::new(file)))
            }
        }
        deserializer.deserialize_any(NameOrDevice)
    }
}

impl DeviceFile {
    /// Checks the values and finds the kernel tables; `path` is for error messages.
    ///
    /// # Errors
    /// When a value makes no sense or a table does not exist.
    pub fn resolve(self, path: &str) -> Result<Device, SpecError> {
        let wrong = |field: &str, message: String| SpecError::field(path, field, message);
        version(self.schema_version, path)?;
        crate::names::checked(&self.name, path, "name")?;
        if !self.peak.contains_key(&DType::Bf16) && !self.peak.contains_key(&DType::F16) {
            return Err(wrong("peak", "needs bf16 or f16".to_owned()));
        }
        let tables: Vec<&str> = crate::tables::gemm_names().collect();
        let known = tables.join(", ");
        let wide = [DType::Bf16, DType::F16];
        let peak = wide.iter().find_map(|dtype| self.peak.get(dtype));
        let power = self
            .power_watts
            .zip(peak)
            .map(|(watts, peak)| watts / peak.value.0);
        let nearest = self.architecture.nearest_tables(power).map(str::to_owned);
        let kernels = self.kernels.or(nearest).ok_or_else(|| {
            let message = format!("no architecture is near this one; expected one of: {known}");
            wrong("kernels", message)
        })?;
        if !tables.contains(&kernels.as_str()) {
            return Err(wrong(
                "kernels",
                format!("unknown table `{kernels}`; expected one of {known}"),
            ));
        }
        let device = Device {
            name: self.name,
            architecture: self.architecture,
            memory: self.memory,
            memory_bandwidth: self.memory_bandwidth,
            peak: self.peak,
            best_products: self.best_products,
            sm_count: self.sm_count,
            power_watts: self.power_watts,
            clock_mhz: self.clock_mhz,
            peers_over_pci_express: self.peers_over_pci_express,
            kernels,
        };
        device
            .check()
            .map_err(|(field, message)| wrong(field, message))?;
        Ok(device)
    }
}

impl ClusterFile {
    /// Checks the values and finds the device; `device` returns a preset or device file by name.
    ///
    /// # Errors
    /// When a value makes no sense or the device is unknown.
    pub fn resolve(
        self,
        path: &str,
        device: impl Fn(&str) -> Result<Device, SpecError>,
    ) -> Result<Cluster, SpecError> {
        let wrong = |field: &str, message: String| SpecError::field(path, field, message);
        version(self.schema_version, path)?;
        crate::names::checked(&self.name, path, "name")?;
        let device = match self.device {
            DeviceRef::Name(name) => {
                device(&name).map_err(|wrong| wrong.in_field(path, "device", "h100-sxm"))?
            }
            DeviceRef::Inline(file) => file.resolve(path)?,
        };
        let scale_up = self.scale_up.resolve();
        let cluster = Cluster {
            name: self.name,
            device,
            pci_express: (self.pci_express).unwrap_or_else(|| scale_up.is_pci_express()),
            gpus_per_node: self.gpus_per_node,
            scale_up_domain: self.scale_up_domain.unwrap_or(self.gpus_per_node),
            scale_up,
            scale_out: self.scale_out.resolve(),
            host: self.host,
            in_switch_reduction: self.in_switch_reduction,
            fabric: self.fabric,
            algorithms: self
                .algorithms
                .unwrap_or_else(|| Algorithm::MEASURED.to_vec()),
            dollars_per_gpu_hour: self.dollars_per_gpu_hour,
            max_gpus: self.max_gpus,
            profile: None,
            gpu_profile: None,
            calibration: None,
            speed: self.speed,
            jitter: self.jitter,
            pools: None,
        };
        cluster
            .check()
            .map_err(|(field, message)| wrong(field, message))?;
        Ok(cluster)
    }
}

impl LinkFile {
    fn resolve(self) -> Link {
        let latency = self.latency.unwrap_or_else(|| Sourced {
            value: Seconds(0.0),
            origin: crate::provenance::Origin::Assumed,
            source: "no latency beyond the collective library's own".to_owned(),
        });
        Link {
            bandwidth: self.bandwidth,
            latency,
        }
    }
}

fn version(found: u32, path: &str) -> Result<(), SpecError> {
    if found == 1 {
        return Ok(());
    }
    let message = format!("{found}; expected version 1");
    Err(SpecError::field(path, "schema_version", message))
}
