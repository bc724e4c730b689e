//! The manifest of a checkpoint: what it contains, which run it belongs to, and checksums.

use std::collections::BTreeMap;
use std::path::Path;

use catalog::model::ModelConfig;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::files::read_bounded;
use super::problem::{Problem, wrong};
use crate::error::ExecutorError;
use crate::job::Job;

/// File name of the manifest in a checkpoint's folder.
pub(super) const MANIFEST: &str = "manifest.json";
/// Format version that is written. Version 1 had no `run`, `parameters` or `sha256`.
const SCHEMA_VERSION: u32 = 2;
/// Largest manifest that is read, in bytes. One of a million ranks or parameters is smaller.
const LARGEST: u64 = 256 << 20;

/// The manifest: a checkpoint's description of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the manifest's format.
    pub schema_version: u32,
    /// Number of training steps done.
    pub step: u64,
    /// Seed of the job: with the step, the state of every random stream and of the data.
    pub seed: u64,
    /// Name of the model.
    pub model: String,
    /// The strategy that wrote the checkpoint, as text.
    pub strategy: String,
    /// Identity of the run; absent if the checkpoint was resharded from one without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunIdentity>,
    /// Global shape of every parameter that the files must contain. Absent in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameters: Option<BTreeMap<String, Vec<u64>>>,
    /// The data files, one per rank.
    pub files: Vec<FileEntry>,
    /// SHA-256 of all the fields above. Absent in version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// One data file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// File name within the checkpoint's folder.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 of the file's header.
    pub header_sha256: String,
}

/// What identifies a run whatever its layout: a run may continue from a checkpoint with the same identity and seed as
/// if it had never stopped. Numerics and device are not part of it: like the layout, they change a run only within
/// rounding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunIdentity {
    /// SHA-256 of the model's configuration without its name.
    pub model_sha256: String,
    /// SHA-256 of all tokens.
    pub data_sha256: String,
    /// Sequences and tokens per step.
    pub batch: String,
    /// Precision of activations.
    pub precision: String,
    /// Hyperparameters of the optimizer.
    pub optimizer: String,
    /// Learning-rate schedule.
    pub learning_rate: String,
}

impl RunIdentity {
    /// The identity of a job's run.
    #[must_use]
    pub fn of(job: &Job) -> Self {
        let mut model = ModelConfig::clone(&job.model);
        model.name.clear();
        let adamw = &job.settings.optimizer;
        Self {
            model_sha256: hex(format!("{model:?}").as_bytes()),
            data_sha256: job.data.digest(),
            batch: format!("{} sequences of {} tokens", job.global_batch, job.seq_len),
            precision: job.precision.name().to_owned(),
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

impl RunIdentity {
    /// Differences between the runs of two jobs: name, value in the first, value in the second.
    #[must_use]
    pub fn differences(first: &Job, second: &Job) -> Vec<[String; 3]> {
        differences(
            (
                &first.model.name,
                first.settings.seed,
                Some(&Self::of(first)),
            ),
            (&second.model.name, second.settings.seed, &Self::of(second)),
        )
    }
}

impl Manifest {
    /// The manifest of a checkpoint that was just written.
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

    /// Sets `sha256` to the digest of the other fields.
    #[must_use]
    pub fn sealed(mut self) -> Self {
        self.sha256 = None;
        self.sha256 = Some(hex(&self.bytes()));
        self
    }

    /// The manifest as written to its file.
    pub(super) fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("names and numbers become JSON")
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

    /// Checks version, digest and entries.
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

    /// Differences between the run of this checkpoint and another: name, value in the checkpoint, value in the job.
    /// Empty for what the checkpoint does not record.
    #[must_use]
    pub fn differences(&self, job: &Job) -> Vec<[String; 3]> {
        differences(
            (&self.model, self.seed, self.run.as_ref()),
            (&job.model.name, job.settings.seed, &RunIdentity::of(job)),
        )
    }
}

/// Differences between two runs, each by its model's name, its seed and its identity; only names and seeds are compared
/// with a run whose identity is not known.
fn differences(
    (name_there, seed_there, there): (&str, u64, Option<&RunIdentity>),
    (name_here, seed_here, here): (&str, u64, &RunIdentity),
) -> Vec<[String; 3]> {
    let mut found = Vec::new();
    let mut differ = |what: &str, there: &str, here: &str| {
        if there != here {
            found.push([what, there, here].map(str::to_owned));
        }
    };
    match there {
        // The same model may be in a folder of another name.
        Some(there) if there.model_sha256 != here.model_sha256 => {
            if name_there == name_here {
                let digests = (&there.model_sha256, &here.model_sha256);
                differ("model configuration", short(digests.0), short(digests.1));
            } else {
                differ("model", name_there, name_here);
            }
        }
        Some(_) => {}
        None => differ("model", name_there, name_here),
    }
    differ("seed", &seed_there.to_string(), &seed_here.to_string());
    if let Some(there) = there {
        let data = (short(&there.data_sha256), short(&here.data_sha256));
        differ("data", data.0, data.1);
        differ("batch", &there.batch, &here.batch);
        differ("precision", &there.precision, &here.precision);
        differ("optimizer", &there.optimizer, &here.optimizer);
        differ("learning rate", &there.learning_rate, &here.learning_rate);
    }
    found
}

/// The first digits of a digest, enough to tell it from others.
fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

/// SHA-256 of data, in hexadecimal.
pub(super) fn hex(data: &[u8]) -> String {
    hex_of(Sha256::new_with_prefix(data))
}

/// A finished SHA-256, in hexadecimal.
pub(crate) fn hex_of(digest: Sha256) -> String {
    digest
        .finalize()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

/// File name of a rank's data.
pub(super) fn rank_file(rank: usize) -> String {
    format!("rank-{rank:05}.bin")
}

/// The step of a folder named as a complete checkpoint, else `None`.
pub(super) fn step_of(folder: &Path) -> Option<u64> {
    let digits = folder.file_name()?.to_str()?.strip_prefix("step-")?;
    let all = digits.bytes().all(|b| b.is_ascii_digit());
    digits.parse().ok().filter(|_| all)
}
