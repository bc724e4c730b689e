//! Profiles: times that the profiler measured on a machine and from which the cost model predicts.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::error::{SpecError, in_range};
use crate::text;
use crate::units::FlopRate;

/// Version of the file format.
pub const SCHEMA_VERSION: u32 = 1;
/// Largest number of cores of a machine.
const MAX_CORES: u64 = 1 << 16;
/// Longest accepted time of one run of a kernel, in seconds.
const MAX_SECONDS: f64 = 86_400.0;
/// Shortest accepted time of one run of a kernel, in seconds, so that work per second stays finite.
const MIN_SECONDS: f64 = 1e-9;
/// Largest accepted size of a kernel, so that products of sizes stay finite.
const MAX_SIZE: u64 = 1 << 48;
/// Where `profile` writes, and where the cluster `local` is read from, by default.
pub const DEFAULT_PATH: &str = "vescale-profile.yaml";

/// A kernel with its local sizes, for which a time is measured or predicted.
#[derive(
    Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub struct Kernel {
    /// Operator, variant, pass and element type, such as `matmul forward f32`.
    pub name: String,
    /// The sizes its time depends on; their product grows with its work.
    pub sizes: Vec<u64>,
}

impl Kernel {
    /// Makes a kernel from its name and sizes.
    #[must_use]
    pub fn new(name: impl Into<String>, sizes: impl Into<Vec<u64>>) -> Self {
        Self {
            name: name.into(),
            sizes: sizes.into(),
        }
    }
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Name of the kernel.
    pub kernel: String,
    /// Its sizes.
    pub sizes: Vec<u64>,
    /// Ranks that ran it at the same time, sharing the machine's cores.
    pub ranks: u64,
    /// Mean seconds of one run, outliers left out.
    pub seconds: f64,
    /// Half the distance between the quartiles, over `seconds`.
    pub spread: f64,
}

impl Measured {
    /// Whether a price can be made from the measurement.
    fn makes_sense(&self) -> bool {
        let time = (MIN_SECONDS..=MAX_SECONDS).contains(&self.seconds);
        let spread = self.spread.is_finite() && self.spread >= 0.0;
        let sized = self.sizes.iter().all(|size| (1..=MAX_SIZE).contains(size));
        time && spread && self.ranks > 0 && sized
    }
}

/// The machine that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Name that the processor or the GPU reports.
    pub processor: String,
    /// Cores that ranks share.
    pub cores: u64,
    /// Bytes of memory: of the host, or of one GPU.
    pub memory_bytes: u64,
    /// Facts of the GPUs that were measured; absent if ranks shared the cores of a host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
}

impl Machine {
    /// Name and [`Self::shared`], as text.
    #[must_use]
    pub fn described(&self) -> String {
        format!("{}, {}", self.processor, self.shared())
    }

    /// The GPUs and their condition, or the number of cores, as text.
    #[must_use]
    pub fn shared(&self) -> String {
        match &self.gpu {
            Some(gpu) => gpu.described(),
            None => format!("{} cores", self.cores),
        }
    }
}

/// GPUs of a host that were measured, and their condition. What NVML did not report is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// GPUs of a host that were measured together.
    pub count: u64,
    /// Hosts that messages were measured between, where they are several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<u64>,
    /// Multiprocessors (SMs) of each GPU.
    pub multiprocessors: u32,
    /// Version of the driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// The library that ran core attention, with its release; absent where this program's own kernels did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<String>,
    /// Lowest and median clock of the multiprocessors at the end of each measurement, MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_mhz: Option<[u32; 2]>,
    /// Highest clock of the multiprocessors, MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub most_clock_mhz: Option<u32>,
    /// Clock of the memory, MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_clock_mhz: Option<u32>,
    /// Power that each may draw, W.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_watts: Option<u32>,
}

impl Gpu {
    /// The GPUs and their condition on one line, for people.
    #[must_use]
    pub fn described(&self) -> String {
        let gpus = format!("{} GPU{}", self.count, plural(self.count));
        let mut parts = vec![match self.hosts {
            Some(hosts) => format!("{hosts} hosts of {gpus}"),
            None => gpus,
        }];
        if let Some([lowest, median]) = self.clock_mhz {
            let most = self
                .most_clock_mhz
                .map_or(String::new(), |most| format!(" of {most}"));
            parts.push(format!("{median}{most} MHz, {lowest} at least"));
        }
        if let Some(watts) = self.power_limit_watts {
            parts.push(format!("{watts} W"));
        }
        if let Some(driver) = &self.driver {
            parts.push(format!("driver {driver}"));
        }
        if let Some(library) = &self.attention {
            parts.push(format!("attention by {library}"));
        }
        parts.join(", ")
    }

    /// The section as a YAML flow mapping.
    fn to_yaml(&self) -> String {
        let mut fields = vec![
            format!("count: {}", self.count),
            format!("multiprocessors: {}", self.multiprocessors),
        ];
        if let Some(hosts) = self.hosts {
            fields.push(format!("hosts: {hosts}"));
        }
        if let Some(driver) = &self.driver {
            fields.push(format!("driver: {}", quoted(driver)));
        }
        if let Some(library) = &self.attention {
            fields.push(format!("attention: {}", quoted(library)));
        }
        if let Some([lowest, median]) = self.clock_mhz {
            fields.push(format!("clock_mhz: [{lowest}, {median}]"));
        }
        let numbers = [
            ("most_clock_mhz", self.most_clock_mhz),
            ("memory_clock_mhz", self.memory_clock_mhz),
            ("power_limit_watts", self.power_limit_watts),
        ];
        for (name, value) in numbers {
            fields.extend(value.map(|value| format!("{name}: {value}")));
        }
        format!("  gpu: {{{}}}\n", fields.join(", "))
    }
}

fn plural(count: u64) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Any text as a double-quoted YAML scalar: JSON's quoting, plus escapes for characters that YAML does not allow.
fn quoted(text: &str) -> String {
    let json = serde_json::Value::from(text).to_string();
    let mut quoted = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\u{7f}'..='\u{9f}'
            | '\u{2028}'
            | '\u{2029}'
            | '\u{feff}'
            | '\u{fffe}'
            | '\u{ffff}' => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted
}

/// A profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Version of this format: 1.
    #[schemars(extend("const" = 1))]
    pub schema_version: u32,
    /// Version of the tool that measured.
    pub tool_version: String,
    /// The machine.
    pub machine: Machine,
    /// Measurements, ordered by kernel, ranks and sizes.
    pub measured: Vec<Measured>,
}

impl Profile {
    /// Reads a profile from a file's text.
    ///
    /// # Errors
    /// When the text is no profile of this version, or one of its numbers is not plausible.
    pub fn from_yaml(yaml: &str, path: &str) -> Result<Self, SpecError> {
        let profile: Self = text::yaml(yaml, path)?;
        let wrong = |field: &str, message: &str| SpecError::field(path, field, message);
        if profile.schema_version != SCHEMA_VERSION {
            let message = format!(
                "{}; expected version {SCHEMA_VERSION}",
                profile.schema_version
            );
            return Err(wrong("schema_version", &message));
        }
        in_range(profile.machine.cores, 1..=MAX_CORES)
            .map_err(|message| wrong("machine.cores", &message))?;
        for (index, m) in profile.measured.iter().enumerate() {
            if !m.makes_sense() {
                let field = format!("measured[{index}] ({})", m.kernel);
                return Err(wrong(
                    &field,
                    "expected positive sizes and ranks, a nanosecond to a day, and a finite spread of at least 0",
                ));
            }
        }
        Ok(profile)
    }

    /// Writes the profile as a file: one line per measurement.
    #[must_use]
    pub fn to_yaml(&self) -> String {
        let m = &self.machine;
        let mut yaml = format!(
            "schema_version: {}\ntool_version: {}\nmachine:\n  processor: {}\n  cores: {}\n  memory_bytes: {}\n{}measured:{}\n",
            self.schema_version,
            quoted(&self.tool_version),
            quoted(&m.processor),
            m.cores,
            m.memory_bytes,
            m.gpu.as_ref().map_or_else(String::new, Gpu::to_yaml),
            if self.measured.is_empty() { " []" } else { "" }
        );
        for m in &self.measured {
            let sizes: Vec<String> = m.sizes.iter().map(u64::to_string).collect();
            let _ = writeln!(
                yaml,
                "  - {{kernel: {}, sizes: [{}], ranks: {}, seconds: {:.4e}, spread: {:.3}}}",
                quoted(&m.kernel),
                sizes.join(", "),
                m.ranks,
                m.seconds,
                m.spread
            );
        }
        yaml
    }

    /// Adds measurements; a kernel that is measured again replaces the older measurement. Implausible ones, such as
    /// times below the clock's resolution, are left out, because no reader would accept the file.
    pub fn add(&mut self, measured: impl IntoIterator<Item = Measured>) {
        let key = |m: &Measured| (m.kernel.clone(), m.ranks, m.sizes.clone());
        let mut all: BTreeMap<_, Measured> = std::mem::take(&mut self.measured)
            .into_iter()
            .map(|m| (key(&m), m))
            .collect();
        let measured = measured.into_iter().filter(Measured::makes_sense);
        all.extend(measured.map(|m| (key(&m), m)));
        self.measured = all.into_values().collect();
    }

    /// The peak compute rate of the machine, taken as that of its fastest measured matrix product with operands of at least
    /// 16 bits. Where several ranks of a processor ran that product at the same time, their rates are added.
    #[must_use]
    pub fn peak(&self) -> FlopRate {
        let rate = self.fastest_product(|element| element != "f8");
        rate.unwrap_or(FlopRate(1.0))
    }

    /// The peak compute rate for one type, taken as that of its fastest measured matrix product. TF32 products count as 32-bit
    /// products. If no product of the type was measured, it is [`Self::peak`].
    #[must_use]
    pub fn peak_of(&self, dtype: DType) -> FlopRate {
        let elements: &[&str] = match dtype {
            DType::F32 => &["f32", "tf32"],
            DType::Bf16 => &["bf16"],
            _ => &[],
        };
        let rate = self.fastest_product(|element| elements.contains(&element));
        rate.unwrap_or_else(|| self.peak())
    }

    /// Whether kernels were measured on elements of this type, which is the last word of their names.
    #[must_use]
    pub fn has_kernels_in(&self, dtype: DType) -> bool {
        let element = format!("{dtype:?}").to_lowercase();
        let elements = self.measured.iter().map(|m| m.kernel.rsplit(' ').next());
        elements
            .flatten()
            .any(|measured| measured == element.as_str())
    }

    /// The highest rate of the measured matrix products whose element type satisfies `wanted`. The type is the last word of
    /// the kernel's name, as in `matmul forward bf16`.
    fn fastest_product(&self, wanted: impl Fn(&str) -> bool) -> Option<FlopRate> {
        let products = self.measured.iter().filter(|m| {
            let element = m.kernel.rsplit(' ').next().unwrap_or_default();
            m.kernel.starts_with("matmul ") && m.sizes.len() == 3 && wanted(element)
        });
        let rates = products.map(|m| {
            let flops = 2.0 * m.sizes.iter().map(|&s| s as f64).product::<f64>();
            flops / m.seconds * m.ranks.min(self.machine.cores) as f64
        });
        rates.reduce(f64::max).map(|rate| FlopRate(rate.max(1.0)))
    }
}

#[cfg(test)]
mod tests;
