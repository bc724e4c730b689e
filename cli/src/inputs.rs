//! From flags to a scenario: everything resolved, checked and echoed.

use costmodel::Scenario;
use planner::Constraints;
use serde::Serialize;
use spec::{Cluster, Precision, Runtime, Workload};

use crate::args::{BudgetArgs, ConstraintArgs, PrecisionArg, ScenarioArgs};
use crate::error::CliError;

/// Tokens per step when no batch is given: what Llama 3 405B started with (Llama 3 paper, §3.4.1).
const DEFAULT_TOKENS_PER_STEP: u64 = 4 << 20;

/// The runtime that plans are for when none is named.
const DEFAULT_RUNTIME: &str = "megatron-core";
/// The runtime that our executor is.
pub(crate) const EXECUTOR: &str = "vescale";

/// What was planned for, as echoed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct InputsJson {
    pub(crate) model: String,
    pub(crate) cluster: String,
    /// The GPUs whose measurements beat the cluster's tables.
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
    /// What a scenario is of, with its model's parameters.
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

/// A scenario with the words it was made from.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    pub(crate) scenario: Scenario,
    pub(crate) model_arg: String,
    pub(crate) cluster_arg: String,
    pub(crate) json: InputsJson,
}

/// Resolves flags.
pub(crate) fn resolve(args: &ScenarioArgs) -> Result<Inputs, CliError> {
    let model = spec::load::model(&args.model)?;
    let cluster = spec::load::cluster(&args.cluster)?;
    let runtime = runtime(args.runtime.as_deref(), &cluster)?;
    check_gpus(args.gpus, &cluster).map_err(|e| for_own_ranks(e, &runtime, &cluster))?;
    if args.seq == 0 || args.seq > 1 << 24 {
        return usage(format!(
            "--seq {}: expected 1 to {} tokens",
            args.seq,
            1 << 24
        ));
    }
    if !(0.0..1.0).contains(&args.headroom) {
        return usage(format!(
            "--headroom {}: expected a share in [0, 1)",
            args.headroom
        ));
    }
    let global_batch = match args.global_batch {
        Some(batch) if batch == 0 || batch > 1 << 24 => {
            return usage(format!(
                "--global-batch {batch}: expected 1 to {} sequences",
                1 << 24
            ));
        }
        Some(batch) => batch,
        None => default_batch(args.gpus, args.seq),
    };
    let precision = precision(args.precision);
    let workload = Workload {
        gpus: args.gpus,
        seq_len: args.seq,
        global_batch,
        precision,
    };
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

/// The runtime asked for, or the one that plans on such a cluster are usually for: our own executor
/// is what runs on a profiled machine.
fn runtime(asked: Option<&str>, cluster: &Cluster) -> Result<Runtime, CliError> {
    let usual = if cluster.profile.is_some() {
        EXECUTOR
    } else {
        DEFAULT_RUNTIME
    };
    Ok(spec::load::runtime(asked.unwrap_or(usual))?)
}

/// GPUs must be there, and fill nodes when there is more than one.
pub(crate) fn check_gpus(gpus: u64, cluster: &Cluster) -> Result<(), CliError> {
    cluster
        .check_devices(gpus)
        .map_err(|wrong| CliError::Usage(format!("--gpus {gpus}: {wrong}")))
}

/// Our own executor runs any number of ranks on a cpu; a cluster of GPUs has nodes to fill.
fn for_own_ranks(error: CliError, runtime: &Runtime, cluster: &Cluster) -> CliError {
    if runtime.name != EXECUTOR || cluster.profile.is_some() {
        return error;
    }
    CliError::Usage(format!(
        "{error}; for ranks on this machine's cpu, of any number, `vescale-plan profile` it and plan with --cluster local"
    ))
}

/// About 4 Mi tokens, and at least one sequence per GPU, in whole multiples of the GPUs' largest
/// power of two so that it divides.
pub(crate) fn default_batch(gpus: u64, seq: u64) -> u64 {
    let sequences = (DEFAULT_TOKENS_PER_STEP / seq).max(1);
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

/// Constraints from flags over those from a file.
pub(crate) fn constraints(args: &ConstraintArgs) -> Result<Constraints, CliError> {
    let mut constraints = match &args.constraints {
        Some(path) => {
            let text = spec::text::read(path)?;
            spec::text::yaml(&text, &path.display().to_string())?
        }
        None => Constraints::default(),
    };
    for text in &args.fix {
        constraints.fix(text)?;
    }
    for text in &args.min {
        constraints.at_least(text)?;
    }
    for text in &args.max {
        constraints.at_most(text)?;
    }
    for text in &args.forbid {
        constraints.forbid(text)?;
    }
    constraints.check()?;
    Ok(constraints)
}

/// Days and dollars of a training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Budget {
    /// Tokens trained on.
    pub(crate) tokens: f64,
    /// Days at the predicted rate.
    pub(crate) days: f64,
    /// Dollars per device and hour, if known.
    pub(crate) price: Option<f64>,
    /// Dollars, if a price is known.
    pub(crate) dollars: Option<f64>,
}

/// What a training of that many tokens takes.
pub(crate) fn budget(
    args: &BudgetArgs,
    cluster: &Cluster,
    gpus: u64,
    tokens_per_s_per_gpu: f64,
) -> Result<Option<Budget>, CliError> {
    let price = match args.price {
        Some(price) if !(price.is_finite() && price >= 0.0) => {
            return usage(format!(
                "--price {price}: expected dollars per GPU and hour"
            ));
        }
        Some(price) => Some(price),
        None => cluster.dollars_per_gpu_hour.as_ref().map(|p| p.value),
    };
    let Some(text) = &args.tokens else {
        return Ok(None);
    };
    let tokens = tokens(text)?;
    let seconds = tokens / (tokens_per_s_per_gpu * gpus as f64);
    let dollars = price.map(|price| price * gpus as f64 * seconds / 3600.0);
    Ok(Some(Budget {
        tokens,
        days: seconds / 86400.0,
        price,
        dollars,
    }))
}

fn tokens(text: &str) -> Result<f64, CliError> {
    let (number, scale) = match text.trim().char_indices().last() {
        Some((i, 'K' | 'k')) => (&text.trim()[..i], 1e3),
        Some((i, 'M')) => (&text.trim()[..i], 1e6),
        Some((i, 'B' | 'G')) => (&text.trim()[..i], 1e9),
        Some((i, 'T')) => (&text.trim()[..i], 1e12),
        _ => (text.trim(), 1.0),
    };
    match number.parse::<f64>() {
        Ok(n) if n.is_finite() && n > 0.0 => Ok(n * scale),
        _ => usage(format!(
            "--tokens {text}: expected a number such as 15T or 300B"
        )),
    }
}

pub(crate) fn usage<T>(message: String) -> Result<T, CliError> {
    Err(CliError::Usage(message))
}
