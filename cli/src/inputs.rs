//! Resolves flags to a scenario, checks it, and echoes it.

use catalog::{Cluster, Precision, Runtime, Workload, WorkloadError, WorkloadSizes};
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

/// Resolves flags.
pub(crate) fn resolve(args: &ScenarioArgs) -> Result<Inputs, CliError> {
    let model = catalog::load::model(&args.model)?;
    let cluster = catalog::load::cluster(&args.cluster)?;
    let runtime = runtime(args.runtime.as_deref(), &cluster)?;
    check_gpus(args.gpus, &cluster).map_err(|e| for_own_ranks(e, &runtime, &cluster))?;
    if !(0.0..1.0).contains(&args.headroom) {
        return usage(format!(
            "--headroom {}: expected a share in [0, 1)",
            args.headroom
        ));
    }
    let precision = precision(args.precision);
    let workload = workload(args.gpus, args.seq, args.global_batch, precision)?;
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
        cluster_arg: args.cluster.clone(),
    })
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
        CliError::Usage(format!(
            "{flag} {}: expected 1 to {} {}",
            wrong.value, wrong.most, wrong.unit
        ))
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
    let usual = if cluster.profile.is_some() {
        EXECUTOR
    } else {
        DEFAULT_RUNTIME
    };
    Ok(catalog::load::runtime(asked.unwrap_or(usual))?)
}

/// Checks that the cluster has this many GPUs, and that they fill whole nodes if there are several.
pub(crate) fn check_gpus(gpus: u64, cluster: &Cluster) -> Result<(), CliError> {
    cluster
        .check_devices(gpus)
        .map_err(|wrong| CliError::Usage(format!("--gpus {gpus}: {wrong}")))
}

/// Adds to an error about GPUs that our own executor runs any number of ranks on a cpu.
fn for_own_ranks(error: CliError, runtime: &Runtime, cluster: &Cluster) -> CliError {
    if runtime.name != EXECUTOR || cluster.profile.is_some() {
        return error;
    }
    CliError::Usage(format!(
        "{error}; for ranks on this machine's cpu, of any number, `vescale-plan profile` it and plan with --cluster local"
    ))
}

/// About 4 Mi tokens in at most [`MAX_DEFAULT_BATCH`] sequences, and at least one sequence per GPU, in
/// whole multiples of the GPUs' largest power of two so that it divides.
fn default_batch(gpus: u64, seq: u64) -> u64 {
    let sequences = (DEFAULT_TOKENS_PER_STEP / seq).clamp(1, MAX_DEFAULT_BATCH);
    let unit = 1u64 << gpus.trailing_zeros();
    let odd = gpus / unit;
    let batch = sequences.max(unit.min(2048));
    batch.div_ceil(odd) * odd
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

/// Tokens and price from the flags, checked before anything takes time.
pub(crate) fn training(args: &BudgetArgs, cluster: &Cluster) -> Result<Training, CliError> {
    let price = match args.price {
        Some(price) if !(price.is_finite() && price >= 0.0) => {
            return usage(format!(
                "--price {price}: expected dollars per GPU and hour"
            ));
        }
        Some(price) => Some(price),
        None => cluster.dollars_per_gpu_hour.as_ref().map(|p| p.value),
    };
    let tokens = args.tokens.as_deref().map(tokens).transpose()?;
    Ok(Training { tokens, price })
}

/// Most tokens of a training run: a million times the largest so far.
const MAX_TOKENS: f64 = 1e20;

fn tokens(text: &str) -> Result<f64, CliError> {
    let (number, scale) = match text.trim().char_indices().last() {
        Some((i, 'K' | 'k')) => (&text.trim()[..i], 1e3),
        Some((i, 'M')) => (&text.trim()[..i], 1e6),
        Some((i, 'B' | 'G')) => (&text.trim()[..i], 1e9),
        Some((i, 'T')) => (&text.trim()[..i], 1e12),
        _ => (text.trim(), 1.0),
    };
    match number.parse::<f64>() {
        Ok(n) if n > 0.0 && n * scale <= MAX_TOKENS => Ok(n * scale),
        _ if text.trim().ends_with(['B', 'b']) => usage(format!(
            "--tokens {text}: expected tokens, not bytes, such as 15T or 300B (B is 10^9)"
        )),
        _ => usage(format!(
            "--tokens {text}: expected a number of tokens such as 15T or 300B"
        )),
    }
}

pub(crate) fn usage<T>(message: String) -> Result<T, CliError> {
    Err(CliError::Usage(message))
}
