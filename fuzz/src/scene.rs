//! The question that a strategy or a configuration belongs to, as the first line of an input: `#!
//! model=gpt2 cluster=dgx-h100 runtime=megatron-core gpus=8 seq=1024 batch=64 precision=bf16`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use catalog::{Cluster, Model, Precision, Runtime, Workload, WorkloadSizes};
use costmodel::Scenario;

use crate::rng::Rng;

/// Models small enough to be priced often.
pub const MODELS: [&str; 8] = [
    "gpt2",
    "llama3.2-1b",
    "llama3-8b",
    "mixtral-8x7b",
    "deepseek-v2-lite",
    "gpt-oss-20b",
    "gemma2-9b",
    "falcon-7b",
];
/// Clusters of several generations.
pub const CLUSTERS: [&str; 7] = [
    "dgx-h100",
    "dgx-a100",
    "gb200-nvl72",
    "dgx-b200",
    "l40s-node",
    "dgx2-v100",
    "mi300x",
];
/// Runtimes whose search spaces differ.
pub const RUNTIMES: [&str; 7] = [
    "megatron-core",
    "torchtitan",
    "fsdp2",
    "deepspeed",
    "vescale",
    "megatron-2022",
    "nemo",
];
const PRECISIONS: [(&str, Precision); 4] = [
    ("fp32", Precision::Fp32),
    ("fp16", Precision::Fp16),
    ("bf16", Precision::Bf16),
    ("fp8", Precision::Fp8),
];

/// The names and sizes of a scenario.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names are those of the command line")]
pub struct Scene {
    pub model: String,
    pub cluster: String,
    pub runtime: String,
    pub gpus: u64,
    pub seq: u64,
    pub batch: u64,
    pub precision: String,
    pub headroom: f64,
}

impl fmt::Display for Scene {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            model,
            cluster,
            runtime,
            gpus,
            seq,
            batch,
            precision,
            headroom,
        } = self;
        write!(
            f,
            "#! model={model} cluster={cluster} runtime={runtime} gpus={gpus} seq={seq} batch={batch} precision={precision} headroom={headroom}"
        )
    }
}

impl Default for Scene {
    fn default() -> Self {
        Self {
            model: "gpt2".to_owned(),
            cluster: "dgx-h100".to_owned(),
            runtime: "megatron-core".to_owned(),
            gpus: 8,
            seq: 1024,
            batch: 64,
            precision: "bf16".to_owned(),
            headroom: 0.05,
        }
    }
}

impl Scene {
    /// The scene in an input's first line, and the remaining lines; the default scene if there is
    /// none.
    #[must_use]
    pub fn split(input: &str) -> (Self, &str) {
        let Some((line, rest)) = input.strip_prefix("#!").and_then(|t| t.split_once('\n')) else {
            return (Self::default(), input);
        };
        let mut scene = Self::default();
        for (key, value) in line.split_whitespace().filter_map(|p| p.split_once('=')) {
            let number = || value.parse().unwrap_or(0);
            match key {
                "model" => scene.model = value.to_owned(),
                "cluster" => scene.cluster = value.to_owned(),
                "runtime" => scene.runtime = value.to_owned(),
                "gpus" => scene.gpus = number(),
                "seq" => scene.seq = number(),
                "batch" => scene.batch = number(),
                "precision" => scene.precision = value.to_owned(),
                "headroom" => scene.headroom = value.parse().unwrap_or(0.0),
                _ => {}
            }
        }
        (scene, rest)
    }

    /// A scene at random, of sizes that are priced quickly.
    #[must_use]
    pub fn random(rng: &mut Rng) -> Self {
        let text = |rng: &mut Rng, names: &[&str]| (*rng.pick(names)).to_owned();
        Self {
            model: text(rng, &MODELS),
            cluster: text(rng, &CLUSTERS),
            runtime: text(rng, &RUNTIMES),
            gpus: *rng.pick(&[1, 2, 4, 8, 8, 16, 16, 32, 64, 72]),
            seq: *rng.pick(&[128, 512, 1024, 2048, 4096, 4097, 8192, 32768]),
            batch: *rng.pick(&[1, 3, 8, 16, 32, 64, 64, 96, 128]),
            precision: (*rng.pick(&["bf16", "bf16", "bf16", "fp16", "fp32", "fp8"])).to_owned(),
            headroom: *rng.pick(&[0.0, 0.05, 0.05, 0.2, 0.5]),
        }
    }

    /// The scenario with these names and sizes, made by the constructors that the command line
    /// uses.
    ///
    /// # Errors
    /// When a name is unknown or a size is out of range.
    pub fn scenario(&self) -> Result<Scenario, String> {
        let model = model(&self.model)?;
        let cluster = cluster(&self.cluster)?;
        let runtime = runtime(&self.runtime)?;
        cluster.check_devices(self.gpus)?;
        let scenario = Scenario {
            model,
            cluster,
            runtime,
            workload: self.workload()?,
            headroom: self.headroom,
        };
        Ok(scenario)
    }

    /// Devices, sequence, batch and precision.
    ///
    /// # Errors
    /// Sizes out of range.
    pub fn workload(&self) -> Result<Workload, String> {
        let precision = PRECISIONS.iter().find(|(name, _)| *name == self.precision);
        let (_, precision) = precision.ok_or_else(|| format!("precision {}", self.precision))?;
        workload(self.gpus, self.seq, self.batch, *precision)
    }
}

/// A workload of sizes that a command would take.
///
/// # Errors
/// Sizes out of range.
pub fn workload(
    gpus: u64,
    seq_len: u64,
    global_batch: u64,
    precision: Precision,
) -> Result<Workload, String> {
    let sizes = WorkloadSizes {
        gpus,
        seq_len,
        global_batch,
        precision,
    };
    Workload::new(sizes).map_err(|e| e.to_string())
}

/// Presets that were resolved before.
struct Known<T>(OnceLock<Mutex<BTreeMap<String, Result<T, String>>>>);

impl<T: Clone> Known<T> {
    const fn new() -> Self {
        Self(OnceLock::new())
    }

    fn get(&self, name: &str, load: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        let known = self.0.get_or_init(Mutex::default);
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = known.get(name) {
            return value.clone();
        }
        let value = load();
        if value.is_ok() {
            known.insert(name.to_owned(), value.clone());
        }
        value
    }
}

static KNOWN_MODELS: Known<Model> = Known::new();
static KNOWN_CLUSTERS: Known<Cluster> = Known::new();
static KNOWN_RUNTIMES: Known<Runtime> = Known::new();

/// Refuses names that are paths of files, so that inputs stay in memory.
fn preset(kind: &str, name: &str) -> Result<(), String> {
    if name.contains(['/', '.', '\0']) && !name.contains("llama3.") && !name.contains("qwen2.") {
        return Err(format!("{kind} `{name}` is no preset"));
    }
    Ok(())
}

/// A model preset.
///
/// # Errors
/// When there is none of that name.
pub fn model(name: &str) -> Result<Model, String> {
    preset("model", name)?;
    KNOWN_MODELS.get(name, || {
        catalog::load::model(name).map_err(|e| e.to_string())
    })
}

/// A cluster preset.
///
/// # Errors
/// When there is none of that name.
pub fn cluster(name: &str) -> Result<Cluster, String> {
    preset("cluster", name)?;
    KNOWN_CLUSTERS.get(name, || {
        catalog::load::cluster(name).map_err(|e| e.to_string())
    })
}

/// A runtime preset.
///
/// # Errors
/// When there is none of that name.
pub fn runtime(name: &str) -> Result<Runtime, String> {
    KNOWN_RUNTIMES.get(name, || {
        catalog::load::runtime(name).map_err(|e| e.to_string())
    })
}

/// Contents of the project's own files in a folder whose names end in `ending`.
#[must_use]
pub fn files(folder: &str, ending: &str) -> Vec<Vec<u8>> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.parent().unwrap_or(root).join(folder);
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<_> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    paths.retain(|p| p.to_string_lossy().ends_with(ending));
    paths.sort();
    paths.iter().filter_map(|p| std::fs::read(p).ok()).collect()
}
