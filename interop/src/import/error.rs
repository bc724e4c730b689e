//! Errors of imports.

use catalog::Mistake;

use crate::config::SyntaxError;

/// What can be imported.
const IMPORTABLE: &str = "megatron-lm, megatron-bridge, torchtitan, deepspeed, accelerate, axolotl, transformers, llama-factory, nanotron, Hugging Face config.json";

/// Why a configuration was not imported.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ImportError {
    /// The file does not follow its syntax.
    #[error(transparent)]
    Syntax(#[from] SyntaxError),
    /// An embedded schema is broken; a test reads them all.
    #[error(transparent)]
    Schema(#[from] catalog::SpecError),
    /// The system that the file is for cannot be detected.
    #[error("{path}: cannot tell which training system this is for; name it as TARGET[@VERSION]")]
    UnknownKind {
        /// Path of the file.
        path: String,
    },
    /// The file's dialect is known but cannot be imported.
    #[error("{path}: {dialect} files can be checked but not imported; importable: {IMPORTABLE}")]
    NotImportable {
        /// Path of the file.
        path: String,
        /// The dialect of the file.
        dialect: String,
    },
    /// A value is invalid, or no strategy can express it.
    #[error("{place}: `{key}`: {message}")]
    Value {
        /// Place of the value as `file:line`.
        place: String,
        /// Key or option with the value.
        key: String,
        /// What is wrong with the value.
        message: String,
    },
    /// A condition of a launch script decides the plan, and is not decided by the script.
    #[error(
        "{place}: the script does not decide `{condition}`, and with it {options}; write {how}"
    )]
    Undecided {
        /// Place of the condition as `file:line`.
        place: String,
        /// The condition.
        condition: String,
        /// The options that it decides.
        options: String,
        /// What to write.
        how: String,
    },
    /// A size of the workload is out of range.
    #[error("{path}: {error}")]
    Workload {
        /// Path of the file.
        path: String,
        /// The size, and its allowed range.
        error: catalog::WorkloadError,
    },
    /// Sizes contradict each other.
    #[error("{path}: {what}; expected {expected}")]
    Sizes {
        /// Path of the file.
        path: String,
        /// How they contradict each other.
        what: String,
        /// What was expected.
        expected: String,
    },
    /// A required value is missing.
    #[error("{path}: {what} is not given; {how}")]
    Missing {
        /// Path of the file.
        path: String,
        /// The value that is missing.
        what: String,
        /// How to give it.
        how: String,
    },
}

impl ImportError {
    /// The error for a value at a place.
    pub(super) fn value(place: String, key: &str, message: impl Into<String>) -> Self {
        Self::Value {
            place,
            key: key.to_owned(),
            message: message.into(),
        }
    }

    /// The error that a number of ranks does not divide evenly, in words.
    pub(super) fn uneven(path: &str, what: impl Into<String>) -> Self {
        Self::Sizes {
            path: path.to_owned(),
            what: what.into(),
            expected: "degrees whose product divides the GPUs; --gpus gives their number"
                .to_owned(),
        }
    }

    /// The error split into what is wrong, where, and what was expected.
    #[must_use]
    pub fn mistake(&self) -> Mistake {
        match self {
            Self::Schema(error) => error.mistake(),
            Self::UnknownKind { path } => {
                Mistake::new("cannot tell which training system this file is for")
                    .at(path)
                    .expected("a configuration that shows its system, or the system's name: --from of `import`, --to of `export`")
            }
            Self::NotImportable { path, dialect } => Mistake::new(format!(
                "{dialect} files can be checked but not imported"
            ))
            .at(path)
            .expected(IMPORTABLE),
            Self::Value {
                place,
                key,
                message,
            } => Mistake::new(format!("`{key}`: {message}")).at(place),
            Self::Undecided {
                place,
                condition,
                options,
                how,
            } => Mistake::new(format!(
                "the script does not decide `{condition}`, and with it {options}"
            ))
            .at(place)
            .expected(how),
            Self::Workload { path, error } => Mistake::new(error.to_string()).at(path),
            Self::Sizes {
                path,
                what,
                expected,
            } => Mistake::new(what).at(path).expected(expected),
            Self::Missing { path, what, how } => {
                Mistake::new(format!("{what} is not given")).at(path).expected(how)
            }
            Self::Syntax(error) => {
                Mistake::new(&error.message).at(crate::config::place(&error.path, error.line))
            }
        }
    }
}
