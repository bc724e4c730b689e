//! Everything that ends a command early, with its exit code.

use std::fmt::Display;

use accuracy::logged_run::LoggedRunError;
use answers::AnswerError;
use catalog::{Mistake, SpecError};
use executor::ExecutorError;
use interop::export::ExportError;
use planner::PlannerError;

use crate::args::{examples, words};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// A name, file or field of the input is invalid.
    #[error(transparent)]
    Spec(#[from] catalog::SpecError),
    /// A strategy is not legal.
    #[error(transparent)]
    Strategy(#[from] plans::StrategyError),
    /// A search cannot run.
    #[error(transparent)]
    Planner(#[from] planner::PlannerError),
    /// A scenario cannot be priced.
    #[error(transparent)]
    Cost(#[from] costmodel::CostError),
    /// Training cannot start or go on.
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// A measurement failed.
    #[error(transparent)]
    Profiler(#[from] profiler::ProfilerError),
    /// A cuda device is missing or does not work.
    #[error(transparent)]
    Cuda(#[from] cuda_device::CudaError),
    /// An export is not possible.
    #[error(transparent)]
    Export(#[from] interop::export::ExportError),
    /// An error that was already reported; holds its exit code.
    #[cfg_attr(
        not(feature = "mpi"),
        allow(dead_code, reason = "ranks as processes say theirs")
    )]
    #[error("said before")]
    Said(u8),
    /// A configuration cannot be read as a strategy.
    #[error(transparent)]
    Import(#[from] interop::import::ImportError),
    /// A training log cannot be read.
    #[error(transparent)]
    Log(#[from] interop::training_log::LogError),
    /// A value on the command line, in the environment or in the settings is wrong.
    #[error(transparent)]
    Input(#[from] Mistake),
    /// A file cannot be written, or must not be replaced.
    #[error(transparent)]
    File(#[from] catalog::files::FileError),
    /// A name that the tool chose belongs to another plan or to a file made from one.
    #[error(
        "{path} is of another plan, and was left as it is; give a name with -o, or replace it with --force"
    )]
    OtherPlan {
        /// Path of the file.
        path: String,
    },
}

impl CliError {
    /// The error that something is wrong in a place: a flag with its value, or a file.
    pub(crate) fn wrong(place: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Input(Mistake::new(what).at(place))
    }

    /// The error that something is wrong in a place, with what was expected there.
    pub(crate) fn unexpected(
        place: impl Display,
        what: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        let wrong = Mistake::new(what).at(place.to_string());
        Self::Input(wrong.expected(expected))
    }

    /// The error split into what is wrong, where, what was expected and an example. For bad input,
    /// a missing place or example is taken from the command that was typed.
    pub(crate) fn mistake(&self) -> Mistake {
        let mut mistake = self.parts();
        if self.exit_code() == 2 {
            mistake.place.get_or_insert_with(examples::command);
            mistake
                .example
                .get_or_insert_with(|| examples::typed().to_owned());
        }
        mistake
    }

    /// What is wrong, where, what was expected and the nearest valid choice, as far as the error itself knows them.
    fn parts(&self) -> Mistake {
        match self {
            Self::Spec(error) => of_spec(error),
            Self::Strategy(error) => placed(
                error.mistake(),
                given(&["--strategy", "--why-not", "--from"]),
            ),
            Self::Planner(PlannerError::Constraint(mistake)) | Self::Input(mistake) => {
                mistake.clone()
            }
            Self::File(error) => error.mistake(),
            Self::Executor(
                ExecutorError::Data { path, reason }
                | ExecutorError::Checkpoint { path, reason }
                | ExecutorError::Unsaved { path, reason },
            ) => Mistake::of_sentence(reason).at(path),
            Self::Import(error) => error.mistake(),
            Self::Log(error) => error.mistake(),
            Self::OtherPlan { path } => {
                Mistake::new("the file is of another plan, and was left as it is")
                    .at(path)
                    .expected("another name with -o, or --force to replace it")
            }
            Self::Export(ExportError::UnknownTarget {
                asked,
                nearest,
                known,
            }) => Mistake::new(format!("unknown target `{asked}`"))
                .expected(format!("one of the targets {known}"))
                .nearest(nearest.clone())
                .at(format!("--to {asked}"))
                .example("--to torchtitan"),
            Self::Export(ExportError::UnknownVersion {
                target,
                asked,
                known,
            }) => Mistake::new(format!("{target} has no version `{asked}`"))
                .expected(format!("one of the versions {known}"))
                .at(format!("--to {target}@{asked}"))
                .example(format!("--to {target}")),
            other => Mistake::of_sentence(&other.to_string()),
        }
    }

    /// Exit code: 1 for our or the machine's faults, 2 for bad input, 4 for an impossible export.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Cost(costmodel::CostError::Trace(_)) | Self::Profiler(_) | Self::Cuda(_) => 1,
            Self::Executor(error) if error.is_failure() => 1,
            Self::File(catalog::files::FileError::Io { .. }) => 1,
            Self::Said(code) => *code,
            Self::Export(interop::export::ExportError::Inexpressible { .. }) => {
                code::EXPORT_INVALID
            }
            Self::Spec(_)
            | Self::Strategy(_)
            | Self::Planner(_)
            | Self::Cost(_)
            | Self::Executor(_)
            | Self::Export(_)
            | Self::Import(_)
            | Self::Log(_)
            | Self::Input(_)
            | Self::File(_)
            | Self::OtherPlan { .. } => 2,
        }
    }
}

impl From<AnswerError> for CliError {
    fn from(error: AnswerError) -> Self {
        match error {
            AnswerError::Spec(error) => Self::Spec(*error),
            AnswerError::Strategy(error) => Self::Strategy(*error),
            AnswerError::Planner(error) => Self::Planner(*error),
            AnswerError::Cost(error) => Self::Cost(error),
            AnswerError::Input(mistake) => Self::Input(*mistake),
        }
    }
}

impl From<LoggedRunError> for CliError {
    fn from(error: LoggedRunError) -> Self {
        match error {
            LoggedRunError::Log(error) => Self::Log(error),
            LoggedRunError::Cost(error) => Self::Cost(error),
        }
    }
}

/// Describes a catalog error to the user. An unknown name gets the flag that gave it; an unreadable
/// or malformed file gets the form that it should have.
fn of_spec(error: &SpecError) -> Mistake {
    let mistake = error.mistake();
    match error {
        SpecError::Unknown { kind, name, .. } => {
            // GPUs are named with their number.
            let flag = match *kind {
                "device" => "--gpus".to_owned(),
                kind => format!("--{kind}"),
            };
            let given = given(&[&flag]);
            let given = given.filter(|(_, value)| value.ends_with(name));
            placed(mistake, given)
        }
        SpecError::Unreadable { .. } | SpecError::Malformed { .. } => {
            let expected = mistake.expected.clone();
            mistake.expected(expected.unwrap_or_else(|| of_file(error).to_owned()))
        }
        _ => mistake,
    }
}

/// The form that an unreadable file should have.
fn of_file(error: &SpecError) -> &'static str {
    match error {
        SpecError::Malformed { path, .. } if path.ends_with(".json") => {
            "JSON, as in a model's config.json"
        }
        SpecError::Malformed { .. } => "YAML that a schema describes (`vescale-plan schema`)",
        _ => "a file of text (UTF-8) that is there, of at most 64 MiB",
    }
}

/// The first of these flags on the command line, with its value.
fn given(flags: &[&str]) -> Option<(String, String)> {
    let words: Vec<String> = words::given().skip(1).collect();
    words.iter().enumerate().find_map(|(at, word)| {
        let (flag, value) = match word.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (word.as_str(), words.get(at + 1).cloned()),
        };
        flags.contains(&flag).then_some((flag.to_owned(), value?))
    })
}

/// The mistake with a flag and its value as its place, unless it has a place.
fn placed(mistake: Mistake, given: Option<(String, String)>) -> Mistake {
    match (given, &mistake.place) {
        (Some((flag, value)), None) => mistake.at(format!("{flag} {value}")),
        _ => mistake,
    }
}

/// Exit codes of outcomes that are not errors.
pub(crate) mod code {
    use std::process::ExitCode;

    /// Success, or this code.
    pub(crate) fn unless(good: bool, code: u8) -> ExitCode {
        ExitCode::from(if good { 0 } else { code })
    }

    /// There is no feasible plan, or the plan does not fit.
    pub(crate) const DOES_NOT_FIT: u8 = 3;
    /// The checkpoint is damaged.
    pub(crate) const DAMAGED: u8 = 2;
    /// The target refuses the configuration, or cannot express the plan.
    pub(crate) const EXPORT_INVALID: u8 = 4;
    /// The prediction is outside the tolerance asked for.
    pub(crate) const OUTSIDE_TOLERANCE: u8 = 5;
    /// The search was interrupted; the best plan so far was saved.
    pub(crate) const INTERRUPTED: u8 = 130;
}
