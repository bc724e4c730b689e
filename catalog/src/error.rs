//! Errors in the input: files, fields and names.

/// Bad input: a file, a field, a name.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// No preset of that name, and no such file.
    #[error("unknown {kind} `{name}`{}", hint(nearest.as_ref()))]
    Unknown {
        /// What the name stands for: model, cluster, runtime …
        kind: &'static str,
        /// The name that was asked for.
        name: String,
        /// The name of the most similar preset.
        nearest: Option<String>,
    },
    /// A file cannot be read.
    #[error("{path}: {reason}")]
    Unreadable {
        /// Path of the file.
        path: String,
        /// Why it cannot be read.
        reason: String,
    },
    /// A file does not follow its format.
    #[error("{path}: {message}")]
    Malformed {
        /// Path of the file, or name of the preset.
        path: String,
        /// What is wrong, with line and field where known.
        message: String,
    },
    /// A field is missing or has a value that makes no sense.
    #[error("{path}: field `{field}`: {message}")]
    Field {
        /// Path of the file, or name of the preset.
        path: String,
        /// Name of the field.
        field: String,
        /// What is wrong and what was expected.
        message: String,
    },
}

fn hint(nearest: Option<&String>) -> String {
    nearest.map_or_else(String::new, |name| format!("; did you mean `{name}`?"))
}
