//! A question with its defaults: resolved to a scenario, checked, and echoed.

use catalog::workload::MAX_GPUS;
use catalog::{
    Adapters, Cluster, Documents, Lengths, Mistake, ModelConfig, Packing, Precision, Runtime,
    SpecError, Workload, WorkloadError, WorkloadSizes,
};
use costmodel::Scenario;
use serde::Serialize;

use crate::error::AnswerError;
use crate::values::{ADAPTERS, Gpus};

/// Tokens per step when no batch is given: what Llama 3 405B started with (Llama 3 paper, §3.4.1).
const DEFAULT_TOKENS_PER_STEP: u64 = 4 << 20;

/// Most sequences per step when no batch is given: with very short sequences, 4 Mi tokens would be more micro-batches
/// than any training has.
const MAX_DEFAULT_BATCH: u64 = 1 << 14;

/// The runtime that plans are for when none is named.
const DEFAULT_RUNTIME: &str = "megatron-core";
/// The name of our own executor as a runtime.
pub const EXECUTOR: &str = "vescale";

/// The inputs of a prediction, as JSON echoes them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InputsJson {
    /// Name of the model.
    pub model: String,
    /// Name of the cluster.
    pub cluster: String,
    /// Name of the GPUs whose measurements take precedence over the cluster's tables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Name of the training system.
    pub runtime: String,
    /// Number of GPUs.
    pub gpus: u64,
    /// Tokens per sequence.
    pub seq_len: u64,
    /// Tokens of the longest sequence that the model declares, if sequences here are longer; absent if they are not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_declared: Option<u64>,
    /// Sequences per optimizer step.
    pub global_batch: u64,
    /// Lengths of the documents that sequences are made of, in the notation of `--lengths`; absent if each sequence is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lengths: Option<String>,
    /// How documents become sequences.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packing: Option<Packing>,
    /// Precision of linear layers.
    pub precision: Precision,
    /// Share of each GPU's memory that a plan must leave free, from 0 to 1.
    pub headroom: f64,
    /// Number of the model's parameters, including those of adapters.
    pub parameters: u64,
    /// Type of the multimodal model of which only the text part is planned; absent for models of text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_of: Option<String>,
    /// Number of the model's prediction modules that the runtime does not train; absent if it trains all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modules_left_out: Option<u64>,
    /// The LoRA adapters in the notation of `--lora`; absent if all weights are trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapters: Option<String>,
}

impl InputsJson {
    /// The sequence length in words. If it is longer than the model declares, the words say what the model declares.
    #[must_use]
    pub fn sequence(&self) -> String {
        let longer = self.longest_declared.map_or_else(String::new, |most| {
            format!("; {} declares at most {most}", self.model)
        });
        format!("{} tokens{longer}", self.seq_len)
    }

    /// What of the model the runtime does not train, in words; `None` if it trains all.
    #[must_use]
    pub fn left_out(&self) -> Option<String> {
        let modules = match self.modules_left_out? {
            1 => "the module".to_owned(),
            many => format!("the {many} modules"),
        };
        Some(format!(
            "without {modules} for multi-token prediction, which {} does not train",
            self.runtime
        ))
    }

    /// The inputs of a scenario; `parameters` is its model's count.
    pub fn of(scenario: &Scenario, parameters: u64) -> Self {
        let Scenario {
            model,
            cluster,
            runtime,
            workload,
            headroom,
        } = scenario;
        let profile = cluster.gpu_profile.as_ref();
        Self {
            model: model.name.clone(),
            cluster: cluster.name.clone(),
            profile: profile.map(|profile| profile.machine.described()),
            runtime: runtime.name.clone(),
            gpus: workload.gpus,
            seq_len: workload.seq_len,
            longest_declared: model.exceeded_by(workload.seq_len),
            global_batch: workload.global_batch,
            lengths: workload.documents().map(|of| of.lengths().to_string()),
            packing: workload.documents().map(Documents::packing),
            precision: workload.precision,
            headroom: *headroom,
            parameters,
            text_of: model.text_of.clone(),
            modules_left_out: Some(model.modules_left_out()).filter(|&n| n > 0),
            adapters: model.adapters.map(|adapters| adapters.to_string()),
        }
    }
}

/// A scenario, with the names it was resolved from.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The resolved question.
    pub scenario: Scenario,
    /// The model as it was named.
    pub model_arg: String,
    /// The cluster as it was named.
    pub cluster_arg: String,
    /// The inputs as JSON echoes them.
    pub json: InputsJson,
}

/// Which inputs are the tool's own defaults, so that a command need not say them.
pub(crate) struct Usual {
    pub(crate) cluster: bool,
    pub(crate) runtime: bool,
    pub(crate) seq: bool,
    pub(crate) batch: bool,
    pub(crate) precision: bool,
    pub(crate) headroom: bool,
}

impl Inputs {
    /// Compares the inputs with the defaults that hold where nothing is set.
    pub(crate) fn usual(&self) -> Usual {
        let w = &self.scenario.workload;
        let usual_runtime = usual_runtime(&self.scenario.cluster);
        Usual {
            cluster: self.cluster_arg == DEFAULT_CLUSTER,
            runtime: self.scenario.runtime.name == usual_runtime,
            seq: w.seq_len == default_seq(&self.scenario.model),
            batch: w.global_batch == default_batch(w.gpus, w.seq_len),
            precision: w.precision == Precision::Bf16,
            headroom: self.scenario.headroom == DEFAULT_HEADROOM,
        }
    }
}

/// Default length of a sequence in tokens. A model whose learned table of positions is shorter gets
/// that length ([`default_seq`]).
const DEFAULT_SEQ: u64 = 8192;
/// Headroom where none is given, as a share of capacity.
pub const DEFAULT_HEADROOM: f64 = 0.05;

/// A question as it was asked; what is left out has a default.
#[derive(Clone, Debug)]
pub struct Question {
    /// Model preset, or the path of a `config.json`.
    pub model: String,
    /// Text of the `config.json`, if `model` is only its name.
    pub config: Option<String>,
    /// Cluster preset, path, or one line that describes it.
    pub cluster: Option<String>,
    /// Number of GPUs.
    pub gpus: Gpus,
    /// Runtime preset.
    pub runtime: Option<String>,
    /// Tokens per sequence.
    pub seq: Option<u64>,
    /// Sequences per optimizer step.
    pub global_batch: Option<u64>,
    /// Lengths of documents and how they are packed; `None` if each sequence is one document.
    pub documents: Option<(Lengths, Packing)>,
    /// Precision of linear layers.
    pub precision: Precision,
    /// Share of device memory to leave free.
    pub headroom: f64,
    /// LoRA adapters to train while the model's own weights stay frozen; `None` trains all weights.
    pub adapters: Option<Adapters>,
    /// Standard deviation of the time of a rank's pass, as a share of it; `None`: as the cluster says.
    pub jitter: Option<f64>,
}

/// Resolves a question to its scenario.
///
/// # Errors
/// When a name is unknown, or a number is out of range.
pub fn resolve(args: &Question) -> Result<Inputs, AnswerError> {
    let model = match &args.config {
        Some(config) => catalog::load::model_from(config, &args.model)?,
        None => catalog::load::model(&args.model)?,
    };
    let cluster_arg = cluster_arg(args.cluster.as_deref(), args.gpus.device())?;
    let cluster_arg = jittering(cluster_arg, args.jitter)?;
    let cluster = cluster(&cluster_arg, args.gpus.device())?;
    let gpus = args.gpus.count(&cluster);
    let runtime = runtime(args.runtime.as_deref(), &cluster)?;
    let model = model.trained_under(&runtime);
    let model = model.with_adapters(args.adapters).map_err(of_adapters)?;
    check_precision_of_runtime(args.precision, &runtime)?;
    check_gpus(gpus, &cluster).map_err(|e| with_hint_for_own_ranks(e, &runtime, &cluster))?;
    check_precision_of_cluster(args.precision, &cluster)?;
    let seq_len = args.seq.unwrap_or_else(|| default_seq(&model));
    let workload = workload(gpus, seq_len, args.global_batch, args.precision)?;
    model.check_sequence(seq_len)?;
    let workload = of_documents(workload, args.documents.clone())?;
    let parameters = models::parameter_count(&model)
        .map_err(|e| AnswerError::from(Mistake::new(format!("model {}: {e}", args.model))))?;
    let scenario = Scenario {
        model,
        cluster,
        runtime,
        workload,
        headroom: args.headroom,
    };
    Ok(Inputs {
        json: InputsJson::of(&scenario, parameters),
        scenario,
        model_arg: args.model.clone(),
        cluster_arg,
    })
}

/// Refuses a precision that a runtime does not train in.
fn check_precision_of_runtime(asked: Precision, runtime: &Runtime) -> Result<(), AnswerError> {
    let all = &runtime.space.precisions;
    if all.contains(&asked) {
        return Ok(());
    }
    let names: Vec<&str> = all.iter().map(|of| of.name()).collect();
    let (runtime, asked) = (&runtime.name, asked.name());
    let wrong = Mistake::new(format!("runtime {runtime} does not train in {asked}"))
        .at(format!("--precision {asked}"))
        .expected(names.join(", "))
        .example("--precision bf16");
    Err(AnswerError::from(wrong))
}

/// Tokens per sequence where none are given: 8192, or fewer if the model's learned table of positions is shorter.
#[must_use]
pub fn default_seq(model: &ModelConfig) -> u64 {
    let table = model.table_of_positions();
    table.map_or(DEFAULT_SEQ, |most| most.min(DEFAULT_SEQ))
}

/// The cluster that is planned for when none is named.
pub const DEFAULT_CLUSTER: &str = "dgx-h100";

/// The cluster asked for; without one, the usual cluster of the GPU that was named.
pub fn cluster_arg(asked: Option<&str>, device: Option<&str>) -> Result<String, AnswerError> {
    match (asked, device) {
        (Some(asked), _) => Ok(asked.to_owned()),
        (None, Some(device)) => Ok(catalog::load::cluster_of_device(device)?),
        (None, None) => Ok(DEFAULT_CLUSTER.to_owned()),
    }
}

/// The cluster with the jitter asked for, if one is.
///
/// # Errors
/// When the cluster has a speed or a jitter that is not a number.
pub fn jittering(cluster_arg: String, jitter: Option<f64>) -> Result<String, AnswerError> {
    match jitter {
        None => Ok(cluster_arg),
        Some(jitter) => Ok(catalog::condition::jittering(&cluster_arg, jitter)?),
    }
}

/// Loads a cluster, and checks that it has the GPUs that were named, if any were.
pub fn cluster(arg: &str, device: Option<&str>) -> Result<Cluster, AnswerError> {
    let cluster = catalog::load::cluster(arg)?;
    let Some(asked) = device.map(catalog::load::device).transpose()? else {
        return Ok(cluster);
    };
    if asked.name == cluster.device.name {
        return Ok(cluster);
    }
    let has = &cluster.device.name;
    let wrong = Mistake::new(format!(
        "{} has GPUs of kind {has}, not {}",
        cluster.name, asked.name
    ))
    .at("--gpus and --cluster")
    .expected("GPUs of one kind in both")
    .nearest(Some(has.clone()));
    Err(AnswerError::from(wrong))
}

/// The workload of the flags; without a batch, with the default one.
pub fn workload(
    gpus: u64,
    seq_len: u64,
    global_batch: Option<u64>,
    precision: Precision,
) -> Result<Workload, AnswerError> {
    let sizes = WorkloadSizes {
        gpus,
        seq_len,
        global_batch: global_batch.unwrap_or(1),
        precision,
    };
    let flag = |wrong: WorkloadError| {
        let flag = match wrong.field {
            "seq_len" => "--seq",
            "global_batch" => "--global-batch",
            _ => "--gpus",
        };
        let out = Mistake::new(format!("{} is out of range", wrong.value))
            .at(format!("{flag} {}", wrong.value))
            .expected(format!("1 to {} {}", wrong.most, wrong.unit));
        AnswerError::from(out)
    };
    let checked = Workload::new(sizes).map_err(flag)?;
    match global_batch {
        Some(_) => Ok(checked),
        None => Workload::new(WorkloadSizes {
            global_batch: default_batch(gpus, seq_len),
            ..sizes
        })
        .map_err(flag),
    }
}

/// The workload with sequences made of documents, if lengths are given.
pub fn of_documents(
    workload: Workload,
    documents: Option<(Lengths, Packing)>,
) -> Result<Workload, AnswerError> {
    let Some((lengths, packing)) = documents else {
        return Ok(workload);
    };
    let made = workload.of_documents(lengths, packing);
    made.map_err(|wrong| {
        let wrong = Mistake::new(wrong.to_string()).at("--lengths");
        AnswerError::from(wrong.expected("documents of at most --seq tokens"))
    })
}

/// The runtime asked for, or the default for the cluster: our own executor on a profiled machine.
fn runtime(asked: Option<&str>, cluster: &Cluster) -> Result<Runtime, AnswerError> {
    let name = asked.unwrap_or_else(|| usual_runtime(cluster));
    Ok(catalog::load::runtime(name)?)
}

fn usual_runtime(cluster: &Cluster) -> &'static str {
    match cluster.profile {
        Some(_) => EXECUTOR,
        None => DEFAULT_RUNTIME,
    }
}

/// Checks that the cluster has this many GPUs, and that they fill whole nodes if there are several.
pub fn check_gpus(gpus: u64, cluster: &Cluster) -> Result<(), AnswerError> {
    if !(1..=MAX_GPUS).contains(&gpus) {
        let most = format!("1 to {MAX_GPUS}");
        return Err(Mistake::out_of_range("--gpus", gpus, most).into());
    }
    cluster.check_devices(gpus).map_err(|wrong| {
        let mistake = Mistake::new(wrong).at(format!("--gpus {gpus}"));
        AnswerError::from(mistake.expected("GPUs that the cluster has, in whole nodes"))
    })
}

/// Checks that the cluster's GPUs have the precision. Of several pools a search uses those that have it.
fn check_precision_of_cluster(precision: Precision, cluster: &Cluster) -> Result<(), AnswerError> {
    if cluster.pools.is_some() {
        return Ok(());
    }
    costmodel::check_precision(cluster, precision).map_err(|error| {
        let mistake = Mistake::of_sentence(&error.to_string());
        let others = mistake.expected.clone().unwrap_or_default();
        let other = others.rsplit(", ").next().unwrap_or_default();
        let other = other.trim_start_matches("--precision ");
        let place = format!("--precision {}", precision.name());
        let example = format!("--precision {other}");
        AnswerError::from(mistake.at(place).example(example))
    })
}

/// Names the flag `--lora` in an error about adapters that a model does not take.
fn of_adapters(error: SpecError) -> AnswerError {
    AnswerError::from(match error {
        SpecError::Field { message, .. } => Mistake::of_sentence(&message)
            .at("--lora")
            .example(ADAPTERS),
        other => other.mistake(),
    })
}

/// Adds a hint to an error about GPUs: on a cpu, our own executor runs any number of ranks.
fn with_hint_for_own_ranks(
    error: AnswerError,
    runtime: &Runtime,
    cluster: &Cluster,
) -> AnswerError {
    if runtime.name != EXECUTOR || cluster.profile.is_some() {
        return error;
    }
    AnswerError::from(error.mistake().example(
        "for any number of ranks on this machine's cpu, run `vescale-plan profile`, then plan with --cluster local",
    ))
}

/// About 4 Mi tokens in at most 16,384 sequences, and at least one sequence for each of up to 2,048 GPUs: a power of two times
/// the GPUs' odd factor, so that it divides among them, or, where their power of two is above 2,048, among groups of them.
pub fn default_batch(gpus: u64, seq: u64) -> u64 {
    let sequences = (DEFAULT_TOKENS_PER_STEP / seq.max(1)).clamp(1, MAX_DEFAULT_BATCH);
    let unit = 1u64 << gpus.trailing_zeros();
    let odd = gpus / unit;
    let times = sequences.max(unit.min(2048)) / odd;
    odd * (1 << times.max(1).ilog2()).max(unit.min(2048))
}
