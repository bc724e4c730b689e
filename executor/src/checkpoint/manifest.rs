//! A checkpoint's manifest: what it holds, of which run it is, and whether it is as it was written.

use std::collections::BTreeMap;
use std::path::Path;

use catalog::model::ModelConfig;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::files::read_bounded;
use super::problem::{Problem, wrong};
use crate::error::ExecutorError;
use crate::job::Job;

/// Name of the manifest in a checkpoint's folder.
pub(super) const MANIFEST: &str = "manifest.json";
/// Version that is written. Version 1 had neither `run` nor `parameters` nor `sha256`.
const SCHEMA_VERSION: u32 = 2;
/// More than any manifest has: a million ranks, or a million parameters.
const LARGEST: u64 = 256 << 20;

/// What a checkpoint says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of this format.
    pub schema_version: u32,
    /// Steps done.
    pub step: u64,
    /// Seed of the job: with the step, the state of every random stream and of the data.
    pub seed: u64,
    /// Model.
    pub model: String,
    /// Strategy that wrote it.
    pub strategy: String,
    /// The run that it is of; absent where the one that it was resharded from did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunIdentity>,
    /// Shape of every parameter: what must be in the files. Absent in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<BTreeMap<String, Vec<u64>>>,
    /// One file per rank.
    pub files: Vec<FileEntry>,
    /// SHA-256 of all of the above. Absent in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Name in the checkpoint's folder.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// SHA-256 of its header.
    pub header_sha256: String,
}

/// What makes two runs the same but for their layout: a run may go on from a checkpoint of the same identity and
/// seed as if nothing had happened. How sums are evaluated is not part of it, nor is the device: they change a run
/// within rounding, as a layout does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunIdentity {
    /// SHA-256 of the model's configuration without its name.
    pub model_sha256: String,
    /// SHA-256 of all tokens.
    pub data_sha256: String,
    /// Sequences and tokens of a step.
    pub batch: String,
    /// Precision of activations.
    pub precision: String,
    /// Constants of the optimizer.
    pub optimizer: String,
    /// Learning rate of every step.
    pub learning_rate: String,
}

impl RunIdentity {
    /// Of a job.
    #[must_use]
    pub fn of(job: &Job) -> Self {
        let mut model = ModelConfig::clone(&job.model);
        model.name.clear();
        let adamw = &job.settings.optimizer;
        Self {
            model_sha256: hex(format!("{model:?}").as_bytes()),
            data_sha256: job.data.digest(),
            batch: format!("{} sequences of {} tokens", job.global_batch, job.seq_len),
            precision: catalog::residuals::precision_name(job.precision).to_owned(),
            optimizer: format!(
                "AdamW, betas {} and {}, epsilon {:e}, weight decay {}, clipped at {}",
                adamw.beta1,
                adamw.beta2,
                adamw.epsilon,
                adamw.weight_decay,
                adamw
                    .clip_norm
                    .map_or_else(|| "no norm".to_owned(), |norm| format!("norm {norm}")),
            ),
            learning_rate: format!(
                "{} to {} over {} steps, {} of them warm-up",
                adamw.learning_rate,
                adamw.min_learning_rate,
                job.settings.steps,
                adamw.warmup_steps,
            ),
        }
    }
}

impl Manifest {
    /// Of a checkpoint that was just written.
    pub(crate) fn new(
        (step, seed): (u64, u64),
        (model, strategy): (String, String),
        run: Option<RunIdentity>,
        (files, parameters): (Vec<FileEntry>, BTreeMap<String, Vec<u64>>),
    ) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            step,
            seed,
            model,
            strategy,
            run,
            parameters: Some(parameters),
            files,
            sha256: None,
        }
        .sealed()
    }

    /// With the SHA-256 of what it says.
    #[must_use]
    pub fn sealed(mut self) -> Self {
        self.sha256 = None;
        self.sha256 = Some(hex(&self.bytes()));
        self
    }

    fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("names and numbers become JSON")
    }

    /// As the file has it.
    pub(super) fn text(&self) -> Vec<u8> {
        self.bytes()
    }

    /// Reads and checks the manifest of a checkpoint's folder.
    pub(crate) fn read(folder: &Path) -> Result<Self, ExecutorError> {
        let path = folder.join(MANIFEST);
        let text = read_bounded(&path, LARGEST)?;
        let manifest: Self =
            serde_json::from_slice(&text).map_err(|e| wrong(&path, e.to_string()))?;
        manifest.check().map_err(|reason| wrong(&path, reason))?;
        let named = step_of(folder).filter(|&step| step != manifest.step);
        match named {
            Some(step) => Err(wrong(
                &path,
                format!("it is of step {}, its folder of step {step}", manifest.step),
            )),
            None => Ok(manifest),
        }
    }

    /// Whether it can be a manifest that was written here.
    fn check(&self) -> Result<(), Problem> {
        let version = self.schema_version;
        let sealed = [
            self.parameters.is_some(),
            self.sha256.is_some(),
            self.run.is_some(),
        ];
        match (version, sealed) {
            (1, [false, false, false]) | (SCHEMA_VERSION, [true, true, _]) => {}
            (1 | SCHEMA_VERSION, _) => {
                return Err(format!(
                    "it lacks fields of schema_version {version}, or has another version's"
                ));
            }
            _ => {
                return Err(format!(
                    "schema_version {version}; this tool reads versions 1 and {SCHEMA_VERSION}"
                ));
            }
        }
        if version == SCHEMA_VERSION && self.clone().sealed().sha256 != self.sha256 {
            return Err("it does not match its own checksum: it was changed".to_owned());
        }
        if self.files.is_empty() {
            return Err("it lists no files".to_owned());
        }
        for (rank, file) in self.files.iter().enumerate() {
            let expected = rank_file(rank);
            if file.name != expected {
                return Err(format!(
                    "file {rank} of its list is called {:?}, expected {expected}",
                    file.name
                ));
            }
        }
        Ok(())
    }

    /// What differs between the run that a checkpoint is of and another: name, there, here. Nothing where the
    /// checkpoint does not say.
    #[must_use]
    pub fn differences(&self, job: &Job, here: &RunIdentity) -> Vec<[String; 3]> {
        let mut found = Vec::new();
        let mut differ = |what: &str, there: &str, here: &str| {
            if there != here {
                found.push([what, there, here].map(str::to_owned));
            }
        };
        let seeds = (self.seed.to_string(), job.settings.seed.to_string());
        match &self.run {
            // The same model may lie in another folder, whose name it has.
            Some(there) if there.model_sha256 != here.model_sha256 => {
                let names = (&self.model, &job.model.name);
                if names.0 == names.1 {
                    let digests = (&there.model_sha256, &here.model_sha256);
                    differ("model configuration", short(digests.0), short(digests.1));
                } else {
                    differ("model", names.0, names.1);
                }
            }
            Some(_) => {}
            None => differ("model", &self.model, &job.model.name),
        }
        differ("seed", &seeds.0, &seeds.1);
        if let Some(there) = &self.run {
            let data = (short(&there.data_sha256), short(&here.data_sha256));
            differ("data", data.0, data.1);
            differ("batch", &there.batch, &here.batch);
            differ("precision", &there.precision, &here.precision);
            differ("optimizer", &there.optimizer, &here.optimizer);
            differ("learning rate", &there.learning_rate, &here.learning_rate);
        }
        found
    }
}

/// Enough of a digest to tell it from another.
fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

/// SHA-256 in hexadecimal digits.
pub(super) fn hex(data: &[u8]) -> String {
    hex_of(Sha256::new_with_prefix(data))
}

/// A finished SHA-256 in hexadecimal digits.
pub(super) fn hex_of(digest: Sha256) -> String {
    digest
        .finalize()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

/// Name of a rank's file.
pub(super) fn rank_file(rank: usize) -> String {
    format!("rank-{rank:05}.bin")
}

/// The step of a folder that has a checkpoint's final name.
pub(super) fn step_of(folder: &Path) -> Option<u64> {
    let digits = folder.file_name()?.to_str()?.strip_prefix("step-")?;
    let all = digits.bytes().all(|b| b.is_ascii_digit());
    digits.parse().ok().filter(|_| all)
}
