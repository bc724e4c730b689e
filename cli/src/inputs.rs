//! Resolves flags to a scenario, checks it, and echoes it.

use std::fmt::Display;

use catalog::workload::MAX_GPUS;
use catalog::{Cluster, Mistake, Precision, Runtime, Workload, WorkloadError, WorkloadSizes};
use costmodel::Scenario;
use planner::Constraints;
use serde::Serialize;

use crate::args::{BudgetArgs, ConstraintArgs, PrecisionArg, ScenarioArgs};
use crate::error::CliError;

/// Tokens per step when no batch is given: what Llama 3 405B started with (Llama 3 paper, §3.4.1).
const DEFAULT_TOKENS_PER_STEP: u64 = 4 << 20;

/// Most sequences per step when no batch is given: with very short sequences, 4 Mi tokens would be more micro-batches
/// than any training has.
const MAX_DEFAULT_BATCH: u64 = 1 << 14;

/// The runtime that plans are for when none is named.
const DEFAULT_RUNTIME: &str = "megatron-core";
/// The runtime that our executor is.
pub(crate) const EXECUTOR: &str = "vescale";

/// The inputs of a prediction, as JSON echoes them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct InputsJson {
    pub(crate) model: String,
    pub(crate) cluster: String,
    /// Name of the GPUs whose measurements take precedence over the cluster's tables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) profile: Option<String>,
    pub(crate) runtime: String,
    pub(crate) gpus: u64,
    pub(crate) seq_len: u64,
    pub(crate) global_batch: u64,
    pub(crate) precision: Precision,
    pub(crate) headroom: f64,
    pub(crate) parameters: u64,
}

impl InputsJson {
    /// The inputs of a scenario; `parameters` is its model's count.
    pub(crate) fn of(scenario: &Scenario, parameters: u64) -> Self {
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
            global_batch: workload.global_batch,
            precision: workload.precision,
            headroom: *headroom,
            parameters,
        }
    }
}

/// A scenario, with the names it was resolved from.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    pub(crate) scenario: Scenario,
    pub(crate) model_arg: String,
    pub(crate) cluster_arg: String,
    pub(crate) json: InputsJson,
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
            seq: w.seq_len == DEFAULT_SEQ,
            batch: w.global_batch == default_batch(w.gpus, w.seq_len),
            precision: w.precision == Precision::Bf16,
            headroom: self.scenario.headroom == DEFAULT_HEADROOM,
        }
    }
}

/// Tokens per sequence where none are given.
const DEFAULT_SEQ: u64 = 8192;
/// Headroom where none is given, as a share of capacity.
pub(crate) const DEFAULT_HEADROOM: f64 = 0.05;

/// Resolves flags.
pub(crate) fn resolve(args: &ScenarioArgs) -> Result<Inputs, CliError> {
    let model = catalog::load::model(&args.model)?;
    let cluster_arg = cluster_arg(args.cluster.as_deref(), args.gpus.device())?;
    let cluster = cluster(&cluster_arg, args.gpus.device())?;
    let gpus = args.gpus.count(&cluster);
    let runtime = runtime(args.runtime.as_deref(), &cluster)?;
    check_gpus(gpus, &cluster).map_err(|e| for_own_ranks(e, &runtime, &cluster))?;
    let precision = precision(args.precision);
    let workload = workload(gpus, args.seq, args.global_batch, precision)?;
    let parameters = models::parameter_count(&model)
        .map_err(|e| CliError::Usage(format!("model {}: {e}", args.model)))?;
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

/// The cluster that is planned for when none is named.
pub(crate) const DEFAULT_CLUSTER: &str = "dgx-h100";

/// The cluster asked for; without one, the usual cluster of the GPU that was named.
pub(crate) fn cluster_arg(asked: Option<&str>, device: Option<&str>) -> Result<String, CliError> {
    match (asked, device) {
        (Some(asked), _) => Ok(asked.to_owned()),
        (None, Some(device)) => Ok(catalog::load::cluster_of_device(device)?),
        (None, None) => Ok(DEFAULT_CLUSTER.to_owned()),
    }
}

/// Loads a cluster, and checks that it has the GPUs that were named, if any were.
fn cluster(arg: &str, device: Option<&str>) -> Result<Cluster, CliError> {
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
    Err(CliError::Input(wrong))
}

/// The workload of the flags; without a batch, with the default one.
pub(crate) fn workload(
    gpus: u64,
    seq_len: u64,
    global_batch: Option<u64>,
    precision: Precision,
) -> Result<Workload, CliError> {
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
        CliError::Input(out)
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

/// The runtime asked for, or the default for the cluster: our own executor on a profiled machine.
fn runtime(asked: Option<&str>, cluster: &Cluster) -> Result<Runtime, CliError> {
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
pub(crate) fn check_gpus(gpus: u64, cluster: &Cluster) -> Result<(), CliError> {
    if !(1..=MAX_GPUS).contains(&gpus) {
        return refuse("--gpus", gpus, &format!("1 to {MAX_GPUS}"));
    }
    cluster
        .check_devices(gpus)
        .map_err(|wrong| CliError::Input(Mistake::new(wrong).at(format!("--gpus {gpus}"))))
}

/// Adds to an error about GPUs that our own executor runs any number of ranks on a cpu.
fn for_own_ranks(error: CliError, runtime: &Runtime, cluster: &Cluster) -> CliError {
    if runtime.name != EXECUTOR || cluster.profile.is_some() {
        return error;
    }
    CliError::Input(error.mistake().example(
        "for ranks on this machine's cpu, of any number, `vescale-plan profile` and plan with --cluster local",
    ))
}

/// About 4 Mi tokens in at most [`MAX_DEFAULT_BATCH`] sequences, and up to 2,048 GPUs at least one sequence per GPU: a
/// power of two times the GPUs' odd part, so that all their divisors divide it.
pub(crate) fn default_batch(gpus: u64, seq: u64) -> u64 {
    let sequences = (DEFAULT_TOKENS_PER_STEP / seq.max(1)).clamp(1, MAX_DEFAULT_BATCH);
    let unit = 1u64 << gpus.trailing_zeros();
    let odd = gpus / unit;
    let times = sequences.max(unit.min(2048)) / odd;
    odd * (1 << times.max(1).ilog2()).max(unit.min(2048))
}

pub(crate) fn precision(arg: PrecisionArg) -> Precision {
    match arg {
        PrecisionArg::Fp32 => Precision::Fp32,
        PrecisionArg::Fp16 => Precision::Fp16,
        PrecisionArg::Bf16 => Precision::Bf16,
        PrecisionArg::Fp8 => Precision::Fp8,
    }
}

/// Constraints from flags, which override those from a file, checked for a scenario at the given numbers of GPUs.
pub(crate) fn constraints(
    args: &ConstraintArgs,
    scenario: &Scenario,
    counts: &[u64],
) -> Result<Constraints, CliError> {
    let file: Constraints = match &args.constraints {
        Some(path) => {
            let text = catalog::text::read(path)?;
            catalog::text::yaml(&text, &path.display().to_string())?
        }
        None => Constraints::default(),
    };
    let flags = Constraints::parse(&args.fix, &args.min, &args.max, &args.forbid)?;
    let constraints = file.overridden_by(flags);
    planner::legal_values::check(scenario, counts, &constraints)?;
    Ok(constraints)
}

/// Days and dollars of a training run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Budget {
    /// Number of tokens trained on.
    pub(crate) tokens: f64,
    /// Days at the predicted rate.
    pub(crate) days: f64,
    /// Dollars per device-hour, if known.
    pub(crate) price: Option<f64>,
    /// Dollars of the whole run, if the price is known.
    pub(crate) dollars: Option<f64>,
}

/// The training run whose cost was asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Training {
    tokens: Option<f64>,
    price: Option<f64>,
}

impl Training {
    /// Days and dollars of the run at a predicted rate, if a number of tokens was given.
    pub(crate) fn budget(&self, gpus: u64, tokens_per_s_per_gpu: f64) -> Option<Budget> {
        let tokens = self.tokens?;
        let seconds = tokens / (tokens_per_s_per_gpu * gpus as f64);
        Some(Budget {
            tokens,
            days: seconds / 86400.0,
            price: self.price,
            dollars: self
                .price
                .map(|price| price * gpus as f64 * seconds / 3600.0),
        })
    }
}

/// Tokens and price from the flags; without a price, the cluster's.
pub(crate) fn training(args: &BudgetArgs, cluster: &Cluster) -> Training {
    let usual = || cluster.dollars_per_gpu_hour.as_ref().map(|p| p.value);
    Training {
        tokens: args.tokens,
        price: args.price.or_else(usual),
    }
}

/// Checks a probability that plans do not fit.
pub(crate) fn risk(risk: f64) -> Result<(), CliError> {
    if risk > 0.0 && risk < 1.0 {
        return Ok(());
    }
    usage(format!(
        "--risk {risk}: expected a probability above 0 and below 1"
    ))
}

/// The error that a flag's value is out of range, with what was expected.
pub(crate) fn refuse<T>(flag: &str, value: impl Display, expected: &str) -> Result<T, CliError> {
    let wrong = Mistake::new(format!("{value} is out of range"));
    let wrong = wrong.at(format!("{flag} {value}")).expected(expected);
    Err(CliError::Input(wrong))
}

pub(crate) fn usage<T>(message: String) -> Result<T, CliError> {
    Err(CliError::Usage(message))
}
