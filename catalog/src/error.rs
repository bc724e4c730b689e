//! What can be wrong with what we are given.

/// Bad input: a file, a field, a name.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// No preset of that name, and no such file.
    #[error("unknown {kind} `{name}`{}", hint(nearest.as_ref()))]
    Unknown {
        /// Model, cluster, runtime …
        kind: &'static str,
        /// What was asked.
        name: String,
        /// The most similar preset.
        nearest: Option<String>,
    },
    /// A file cannot be read.
    #[error("{path}: {reason}")]
    Unreadable {
        /// Path.
        path: String,
        /// Why.
        reason: String,
    },
    /// A file is not what its format asks.
    #[error("{path}: {message}")]
    Malformed {
        /// Path or preset.
        path: String,
        /// What is wrong, with line and field where known.
        message: String,
    },
    /// A field is missing or has a value that makes no sense.
    #[error("{path}: field `{field}`: {message}")]
    Field {
        /// Path or preset.
        path: String,
        /// Field.
        field: String,
        /// What is wrong and what was expected.
        message: String,
    },
}

fn hint(nearest: Option<&String>) -> String {
    nearest.map_or_else(String::new, |name| format!("; did you mean `{name}`?"))
}
