//! Cluster files that extend another cluster with what was measured on it: kernels, messages, and whole steps.

use std::path::Path;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::calibration::Calibration;
use crate::cluster::Cluster;
use crate::error::SpecError;
use crate::names;
use crate::profile::Profile;
use crate::provenance::Sourced;
use crate::text;
use crate::units::Bytes;

/// Largest number of extensions that extend one another, so that a cycle ends.
pub(crate) const MAX_EXTENDS: usize = 8;

/// Largest relative difference between a GPU's memory as the driver reports it and the device
/// preset's. Labels, the framework's share and error correction make smaller differences; variants
/// of a chip with another memory size make larger ones.
const MEMORY_APART: f64 = 0.12;

/// A cluster file that extends another cluster with measurements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExtensionFile {
    /// Version of this format: 1.
    #[schemars(extend("const" = 1))]
    pub schema_version: u32,
    /// Name to show.
    pub name: String,
    /// The cluster that is extended: a preset, or a file relative to this one.
    pub extends: String,
    /// File of a profile of its GPUs, relative to this one; it replaces the built-in tables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Time factors learned from measured steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration: Option<Calibration>,
    /// Compute speed of its devices relative to their tables, above 0 and up to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("properties" = {"value": {"exclusiveMinimum": 0, "maximum": 1}}))]
    pub speed: Option<Sourced<f64>>,
    /// Standard deviation of the time that a rank takes for a pass, as a share of that time, from 0 to below 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("properties" = {"value": {"minimum": 0, "exclusiveMaximum": 1}}))]
    pub jitter: Option<Sourced<f64>>,
}

impl ExtensionFile {
    /// Whether a file is an extension of a cluster.
    #[must_use]
    pub fn is(yaml: &str) -> bool {
        yaml.lines().any(|line| line.starts_with("extends:"))
    }

    /// Reads an extension file; `path` is for error messages.
    ///
    /// # Errors
    /// With line and field when it is malformed or a factor makes no sense.
    pub fn from_yaml(text: &str, path: &str) -> Result<Self, SpecError> {
        let file: Self = text::yaml(text, path)?;
        let wrong = |field: &str, message: String| SpecError::field(path, field, message);
        if file.schema_version != 1 {
            let message = format!("{}; expected version 1", file.schema_version);
            return Err(wrong("schema_version", message));
        }
        let says = [
            file.profile.is_some(),
            file.calibration.is_some(),
            file.speed.is_some(),
            file.jitter.is_some(),
        ];
        if !says.contains(&true) {
            let message =
                "adds nothing: expected `profile`, `calibration`, `speed` or `jitter`".to_owned();
            return Err(wrong("extends", message));
        }
        if let Some(calibration) = &file.calibration {
            calibration
                .check()
                .map_err(|(field, message)| wrong(field, message))?;
        }
        Ok(file)
    }

    /// The cluster that this file at `path` makes of the one that it extends.
    ///
    /// # Errors
    /// When what it adds does not fit that cluster.
    pub(crate) fn extend(self, mut cluster: Cluster, path: &Path) -> Result<Cluster, SpecError> {
        let base = cluster.name.clone();
        if cluster.pools.is_some() {
            let message = format!(
                "{base} has several pools; expected one pool's cluster: what is measured holds for the nodes of one, and a pool may \
                 be a file, as in '16 x ours.yaml + 8 x dgx-a100'"
            );
            return Err(self.wrong(path, "extends", message));
        }
        if let Some(arg) = &self.profile {
            if cluster.profile.is_some() {
                let message = format!("{base} is a profile itself");
                return Err(self.wrong(path, "profile", message));
            }
            let at = path.with_file_name(arg);
            let profile = Profile::from_yaml(&text::read(&at)?, &at.display().to_string())?;
            of_its_gpus(&profile, &cluster)
                .map_err(|other| self.wrong(path, "profile", format!("{arg} {other}")))?;
            cluster.gpu_profile = Some(Arc::new(profile));
        }
        let of_profile = [
            ("calibration", self.calibration.is_some()),
            ("speed", self.speed.is_some()),
            ("jitter", self.jitter.is_some()),
        ];
        let said = of_profile.into_iter().find(|(_, said)| *said);
        if let Some((field, _)) = said.filter(|_| cluster.profile.is_some()) {
            let message = format!("{base} is measured as it is, not predicted from tables");
            return Err(self.wrong(path, field, message));
        }
        let name = names::checked(&self.name, &path.display().to_string(), "name")?;
        cluster.name = name.to_owned();
        // Newer factors replace older ones: both are relative to the tables.
        cluster.calibration = self.calibration.clone().or(cluster.calibration);
        cluster.speed = self.speed.clone().or(cluster.speed);
        cluster.jitter = self.jitter.clone().or(cluster.jitter);
        cluster
            .check()
            .map_err(|(field, message)| self.wrong(path, field, message))?;
        Ok(cluster)
    }

    /// The error that one of its fields is wrong; it was read from `path`.
    pub(crate) fn wrong(&self, path: &Path, field: &str, message: String) -> SpecError {
        SpecError::Field {
            path: path.display().to_string(),
            field: field.to_owned(),
            message,
        }
    }

    /// Writes the extension as a YAML file.
    ///
    /// # Errors
    /// When a value cannot be written as YAML.
    pub fn to_yaml(&self) -> Result<String, SpecError> {
        serde_saphyr::to_string(self).map_err(|e| SpecError::Malformed {
            path: self.name.clone(),
            message: e.to_string(),
        })
    }
}

/// Checks that a profile was measured on the GPUs that a cluster has.
///
/// # Errors
/// How the profile and the cluster differ.
fn of_its_gpus(profile: &Profile, cluster: &Cluster) -> Result<(), String> {
    let machine = &profile.machine;
    let Some(gpu) = &machine.gpu else {
        return Err(format!(
            "was measured on the processor {}; `vescale-plan profile --device cuda` measures GPUs",
            machine.processor
        ));
    };
    let device = &cluster.device;
    let memory = device.memory.value.as_f64();
    let apart = (machine.memory_bytes as f64 / memory - 1.0).abs();
    if u64::from(gpu.multiprocessors) == device.sm_count && apart <= MEMORY_APART {
        return Ok(());
    }
    Err(format!(
        "was measured on {} with {} multiprocessors and {}, but {} has {} with {} and {}",
        machine.processor,
        gpu.multiprocessors,
        Bytes(machine.memory_bytes),
        cluster.name,
        device.name,
        device.sm_count,
        device.memory.value,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calibration::{MeasuredRun, TimeFactors};
    use crate::dtype::Precision;
    use crate::profile::{Gpu, Machine};
    use crate::residuals::ModelKind;

    fn file(compute: f64) -> ExtensionFile {
        ExtensionFile {
            schema_version: 1,
            name: "ours".to_owned(),
            extends: "dgx-h100".to_owned(),
            profile: None,
            calibration: Some(Calibration {
                runtime: "megatron-core".to_owned(),
                runs: 1,
                time_factors: TimeFactors {
                    compute,
                    host: 2.0,
                    ..TimeFactors::default()
                },
                unexplained: crate::calibration::Unexplained::default(),
                covariance: [[0.0025, 1.25e-9, 0.0, 0.0]; 4],
                alternatives: vec![TimeFactors::default()],
                measured: vec![run()],
                source: "run.log: 90 steps".to_owned(),
            }),
            speed: None,
            jitter: None,
        }
    }

    fn run() -> MeasuredRun {
        MeasuredRun {
            about: "run.log: 90 steps".to_owned(),
            step_time_s: 1.5,
            model: "gpt2".to_owned(),
            model_config: None,
            adapters: None,
            model_kind: ModelKind::Dense,
            precision: Precision::Bf16,
            gpus: 8,
            seq_len: 1024,
            global_batch: 8,
            lengths: None,
            packing: None,
            experts_across: false,
            strategy: "tp=2".to_owned(),
        }
    }

    fn profile(multiprocessors: Option<u32>, memory: u64) -> Profile {
        Profile {
            schema_version: 1,
            tool_version: String::new(),
            machine: Machine {
                processor: "NVIDIA H100 80GB HBM3".to_owned(),
                cores: 1,
                memory_bytes: memory,
                gpu: multiprocessors.map(|multiprocessors| Gpu {
                    count: 8,
                    multiprocessors,
                    ..Gpu::default()
                }),
            },
            measured: Vec::new(),
        }
    }

    #[test]
    fn extensions_read_back_and_extend_their_cluster() {
        let text = file(1.25).to_yaml().expect("YAML");
        assert!(ExtensionFile::is(&text));
        assert_eq!(ExtensionFile::from_yaml(&text, "x"), Ok(file(1.25)));
        let folder = tempfile::tempdir().expect("temporary folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("written");
            path.display().to_string()
        };
        write("gpu.yaml", &profile(Some(132), 80 << 30).to_yaml());
        write("measured.yaml", MEASURED);
        // Both files are beside the file that names them, not in the current folder.
        let calibrated = ExtensionFile {
            extends: "measured.yaml".to_owned(),
            ..file(1.25)
        };
        let path = write("ours.yaml", &calibrated.to_yaml().expect("YAML"));
        let cluster = crate::load::cluster(&path).expect("cluster");
        assert_eq!(cluster.name, "ours");
        assert_eq!(cluster.device.name, "h100-sxm");
        assert!(cluster.profile.is_none() && cluster.gpu_profile.is_some());
        let learned = cluster.calibration.expect("learned");
        let factors = |runtime| {
            let of: TimeFactors = learned.factors(runtime);
            (of.compute, of.host)
        };
        assert_eq!(factors("megatron-core"), (1.25, 2.0));
        assert_eq!(factors("torchtitan"), (1.25, 1.0));
    }

    const MEASURED: &str =
        "schema_version: 1\nname: measured\nextends: dgx-h100\nprofile: gpu.yaml\n";

    #[test]
    fn profiles_of_other_machines_are_refused() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("measured.yaml");
        std::fs::write(&path, MEASURED).expect("written");
        for (profile, wanted) in [
            (None, "gpu.yaml"),
            (
                Some(profile(None, 80 << 30)),
                "field `profile`: gpu.yaml was measured on the processor",
            ),
            (
                Some(profile(Some(108), 80 << 30)),
                "with 108 multiprocessors and 80 GiB, but dgx-h100 has h100-sxm with 132 and",
            ),
            (
                Some(profile(Some(132), 141 << 30)),
                "and 141 GiB, but dgx-h100 has h100-sxm",
            ),
        ] {
            if let Some(profile) = profile {
                std::fs::write(folder.path().join("gpu.yaml"), profile.to_yaml()).expect("written");
            }
            let error = crate::load::cluster(&path.display().to_string()).expect_err("refused");
            assert!(error.to_string().contains(wanted), "{error}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let check = |edit: fn(&mut ExtensionFile), expected: &str| {
            let mut file = file(1.25);
            edit(&mut file);
            let text = file.to_yaml().expect("YAML");
            let error = ExtensionFile::from_yaml(&text, "x").expect_err("refused");
            assert_eq!(error.to_string(), expected);
        };
        check(
            |f| {
                f.calibration
                    .as_mut()
                    .expect("learned")
                    .time_factors
                    .network = 25.0
            },
            "x: field `network`: 25 is out of range; expected 0.1 to 10",
        );
        check(
            |f| f.calibration.as_mut().expect("learned").unexplained.most = 0.8,
            "x: field `most`: 0.8 is out of range; expected 1 to 10",
        );
        check(
            |f| f.calibration.as_mut().expect("learned").runs = 0,
            "x: field `runs`: 0; expected at least one measured run",
        );
        check(
            |f| f.calibration.as_mut().expect("learned").runs = 2,
            "x: field `runs`: 2; expected the 1 listed in `measured`",
        );
        check(
            |f| f.calibration.as_mut().expect("learned").covariance[1][1] = -0.5,
            "x: field `covariance`: -0.5 is out of range; expected 0 to 100",
        );
        check(
            |f| f.calibration.as_mut().expect("learned").measured[0].step_time_s = 0.0,
            "x: field `step_time_s`: 0 is out of range; expected above 0",
        );
        check(
            |f| f.calibration = None,
            "x: field `extends`: adds nothing: expected `profile`, `calibration`, `speed` or `jitter`",
        );
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("loop.yaml");
        let mut own = file(1.0);
        own.extends = "loop.yaml".to_owned();
        std::fs::write(&path, own.to_yaml().expect("YAML")).expect("written");
        let error = crate::load::cluster(&path.display().to_string()).expect_err("refused");
        assert!(error.to_string().contains("extends itself"), "{error}");
    }
}
