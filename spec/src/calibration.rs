//! What runs on a cluster have shown: measured over predicted step time, for one runtime and
//! precision. A calibration file extends a cluster by such ratios; predictions for that cluster are
//! multiplied by them, and say so. A ratio says how far, not why: it is right for runs like those it
//! was measured on, and moves every strategy alike, so it never changes which plan is best.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::dtype::Precision;
use crate::error::SpecError;
use crate::provenance::Sourced;

/// Ratios beyond these come from a wrong plan or log, not from a cluster.
const PLAUSIBLE: std::ops::RangeInclusive<f64> = 0.1..=10.0;

/// Measured over predicted step time of some runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Runtime of the runs; others are left alone.
    pub runtime: String,
    /// Precision of the runs; others are left alone.
    pub precision: Precision,
    /// Measured over predicted step time.
    pub step_time: Sourced<f64>,
}

/// A cluster that differs from another by its calibration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CalibrationFile {
    /// Version of this format: 1.
    pub schema_version: u32,
    /// Name to show.
    pub name: String,
    /// The cluster: a preset, or a file relative to this one.
    pub extends: String,
    /// Ratios.
    pub calibration: Vec<Calibration>,
}

impl CalibrationFile {
    /// Whether a file is of this kind.
    #[must_use]
    pub fn is(yaml: &str) -> bool {
        yaml.lines().any(|line| line.starts_with("extends:"))
    }

    /// Reads a file; `path` is for messages.
    ///
    /// # Errors
    /// With line and field when it is malformed or a ratio makes no sense.
    pub fn from_yaml(text: &str, path: &str) -> Result<Self, SpecError> {
        let file: Self = crate::text::yaml(text, path)?;
        let wrong = |field: &str, message: String| SpecError::Field {
            path: path.to_owned(),
            field: field.to_owned(),
            message,
        };
        if file.schema_version != 1 {
            let message = format!("{}; this tool reads version 1", file.schema_version);
            return Err(wrong("schema_version", message));
        }
        for (i, entry) in file.calibration.iter().enumerate() {
            if !PLAUSIBLE.contains(&entry.step_time.value) {
                let message = format!(
                    "{} is not from {} to {}",
                    entry.step_time.value,
                    PLAUSIBLE.start(),
                    PLAUSIBLE.end()
                );
                return Err(wrong("step_time", message));
            }
            let same = |other: &Calibration| {
                other.runtime == entry.runtime && other.precision == entry.precision
            };
            if file.calibration[..i].iter().any(same) {
                let message = format!("{} {:?} is there twice", entry.runtime, entry.precision);
                return Err(wrong("calibration", message));
            }
        }
        Ok(file)
    }

    /// The file's text.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provenance::Origin;

    fn file(ratio: f64) -> CalibrationFile {
        CalibrationFile {
            schema_version: 1,
            name: "ours".to_owned(),
            extends: "dgx-h100".to_owned(),
            calibration: vec![Calibration {
                runtime: "megatron-core".to_owned(),
                precision: Precision::Bf16,
                step_time: Sourced {
                    value: ratio,
                    origin: Origin::Measured,
                    source: "run.log: 90 steps".to_owned(),
                },
            }],
        }
    }

    #[test]
    fn calibrations_read_back_and_extend_their_cluster() {
        let text = file(1.25).to_yaml().expect("YAML");
        assert!(CalibrationFile::is(&text));
        assert_eq!(CalibrationFile::from_yaml(&text, "x"), Ok(file(1.25)));
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("ours.yaml");
        std::fs::write(&path, text).expect("written");
        let cluster = crate::load::cluster(&path.display().to_string()).expect("cluster");
        assert_eq!(cluster.name, "ours");
        assert_eq!(cluster.device.name, "h100-sxm");
        let ratio =
            |runtime, precision| cluster.step_time_ratio(runtime, precision).map(|r| r.value);
        assert_eq!(ratio("megatron-core", Precision::Bf16), Some(1.25));
        assert_eq!(ratio("megatron-core", Precision::Fp8), None);
        assert_eq!(ratio("torchtitan", Precision::Bf16), None);
    }

    #[test]
    fn nonsense_is_refused() {
        let check = |edit: fn(&mut CalibrationFile), expected: &str| {
            let mut file = file(1.25);
            edit(&mut file);
            let text = file.to_yaml().expect("YAML");
            let error = CalibrationFile::from_yaml(&text, "x").expect_err("refused");
            assert_eq!(error.to_string(), expected);
        };
        check(
            |f| f.calibration[0].step_time.value = 25.0,
            "x: field `step_time`: 25 is not from 0.1 to 10",
        );
        check(
            |f| f.calibration.push(f.calibration[0].clone()),
            "x: field `calibration`: megatron-core Bf16 is there twice",
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
