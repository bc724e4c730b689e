//! Resolves flags to the question that they ask.

use std::fmt::Display;
use std::path::Path;

use answers::{Inputs, Question};
use catalog::{Lengths, Mistake, Model, Packing, Precision, Workload};
use planner::Constraints;

use crate::args::{AssumedArgs, ConstraintArgs, PackingArg, PrecisionArg, ScenarioArgs};
use crate::error::CliError;

/// Resolves flags.
pub(crate) fn resolve(args: &ScenarioArgs) -> Result<Inputs, CliError> {
    let (Some(model), Some(gpus)) = (&args.model, &args.gpus) else {
        return Err(missing(args));
    };
    Ok(answers::inputs::resolve(&Question {
        model: model.clone(),
        config: None,
        cluster: args.cluster.clone(),
        gpus: gpus.clone(),
        runtime: args.runtime.clone(),
        seq: args.seq,
        global_batch: args.global_batch,
        precision: precision(args.assumed.precision),
        headroom: args.assumed.headroom,
        documents: documents(&args.assumed),
        adapters: args.assumed.lora,
        jitter: args.assumed.jitter,
    })?)
}

/// The error that the model or the number of GPUs is not given.
fn missing(args: &ScenarioArgs) -> CliError {
    let flags = [
        ("--model", args.model.is_none()),
        ("--gpus", args.gpus.is_none()),
    ];
    let missing = flags.iter().filter(|(_, missing)| *missing);
    let missing: Vec<&str> = missing.map(|(flag, _)| *flag).collect();
    let wrong = Mistake::new(format!("{} is missing", missing.join(", ")));
    (wrong.at("vescale-plan search"))
        .expected("a model and the GPUs to plan for, or --from with a file that says them")
        .example("vescale-plan search --model llama3-8b --gpus 64")
        .into()
}

pub(crate) fn precision(arg: PrecisionArg) -> Precision {
    match arg {
        PrecisionArg::Fp32 => Precision::Fp32,
        PrecisionArg::Fp16 => Precision::Fp16,
        PrecisionArg::Bf16 => Precision::Bf16,
        PrecisionArg::Fp8 => Precision::Fp8,
    }
}

/// Lengths of documents and how these become sequences, if lengths are given.
pub(crate) fn documents(args: &AssumedArgs) -> Option<(Lengths, Packing)> {
    let packing = args.packing.map(|packing| match packing {
        PackingArg::Within => Packing::Within,
        PackingArg::Across => Packing::Across,
        PackingArg::Padded => Packing::Padded,
    });
    Some((args.lengths.clone()?, packing.unwrap_or_default()))
}

/// Constraints from flags, which override those from a file. Whether they make sense is not checked yet.
pub(crate) fn constraints(args: &ConstraintArgs) -> Result<Constraints, CliError> {
    let file: Constraints = match &args.constraints {
        Some(path) => {
            let text = catalog::text::read(path)?;
            catalog::text::yaml(&text, &path.display().to_string())?
        }
        None => Constraints::default(),
    };
    let flags = Constraints::parse(&args.fix, &args.min, &args.max, &args.forbid)?;
    Ok(file.overridden_by(flags))
}

/// Refuses sequences of a file that are longer than the model's learned table of positions.
pub(crate) fn sequence(model: &Model, workload: &Workload, file: &Path) -> Result<(), CliError> {
    let checked = model.check_sequence(workload.seq_len);
    Ok(checked.map_err(|wrong| wrong.at(file.display().to_string()))?)
}

/// Splits the values of a flag, which may be given several times, at commas.
pub(crate) fn words(given: &[String]) -> Vec<String> {
    let all = given.iter().flat_map(|text| text.split(','));
    all.map(|word| word.trim().to_owned()).collect()
}

/// Checks a probability that plans do not fit.
pub(crate) fn risk(risk: f64) -> Result<(), CliError> {
    if risk > 0.0 && risk < 1.0 {
        return Ok(());
    }
    refuse("--risk", risk, "a probability above 0 and below 1")
}

/// Refuses flags of the cuda device alone, if any of them is given.
pub(crate) fn of_cuda(gpus: Option<u64>, others: &[(&str, bool)]) -> Result<(), CliError> {
    let others = others.iter().filter(|(_, given)| *given);
    let others = others.map(|(flag, _)| (*flag).to_owned());
    let given = gpus.map(|gpus| format!("--gpus {gpus}")).into_iter();
    match given.chain(others).next() {
        Some(flag) => {
            let what = "only the cuda device has this flag";
            Err(CliError::unexpected(flag, what, "--device cuda with it"))
        }
        None => Ok(()),
    }
}

/// The error that a flag's value is out of range, with what was expected.
pub(crate) fn refuse<T>(flag: &str, value: impl Display, expected: &str) -> Result<T, CliError> {
    Err(Mistake::out_of_range(flag, value, expected).into())
}
