//! Errors in the input: files, fields and names.

use std::fmt::Display;
use std::ops::RangeInclusive;

use crate::mistake::Mistake;

/// The name of a field with a wrong value, and what is wrong with it.
pub(crate) type Wrong = (&'static str, String);

/// Refuses a value outside of a range.
pub(crate) fn in_range<T: PartialOrd + Display>(
    value: T,
    range: RangeInclusive<T>,
) -> Result<(), String> {
    if range.contains(&value) {
        return Ok(());
    }
    let (least, most) = range.into_inner();
    Err(format!(
        "{value} is out of range; expected {least} to {most}"
    ))
}

/// Refuses a value that is not above 0 and at most `most`.
pub(crate) fn above_zero<T: PartialOrd + Display + Default>(
    value: T,
    most: T,
) -> Result<(), String> {
    if value > T::default() && value <= most {
        return Ok(());
    }
    Err(format!(
        "{value} is out of range; expected above 0 and up to {most}"
    ))
}

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
    /// A value is wrong; the mistake says where.
    #[error("{0}")]
    Wrong(Mistake),
}

impl SpecError {
    /// The error that a field of a file is wrong.
    #[must_use]
    pub fn field(path: impl Display, field: &str, message: impl Into<String>) -> Self {
        Self::Field {
            path: path.to_string(),
            field: field.to_owned(),
            message: message.into(),
        }
    }

    /// The error of a name in a file: an unknown name is placed at its field, with a right value of that field. Other errors
    /// have a place of their own.
    pub(crate) fn in_field(self, path: impl Display, field: &str, right: &str) -> Self {
        if !matches!(self, Self::Unknown { .. }) {
            return self;
        }
        let mistake = self.mistake().at(format!("{path}, field `{field}`"));
        Self::Wrong(mistake.example(format!("{field}: {right}")))
    }

    /// The error split into what is wrong, where, what was expected, the nearest right value and an example.
    #[must_use]
    pub fn mistake(&self) -> Mistake {
        match self {
            Self::Unknown {
                kind,
                name,
                nearest,
            } => {
                let (expected, example) = of_kind(kind);
                Mistake::new(format!("unknown {kind} `{name}`"))
                    .expected(expected)
                    .nearest(nearest.clone())
                    .example(example)
            }
            Self::Unreadable { path, reason } => Mistake::of_sentence(reason).at(path),
            Self::Malformed { path, message } => Mistake::of_sentence(message).at(path),
            Self::Field {
                path,
                field,
                message,
            } => {
                let mut wrong = Mistake::of_sentence(message);
                // A value alone says nothing of what is wrong with it.
                if wrong.what.parse::<f64>().is_ok() {
                    wrong.what = format!("`{}` is not a value of this field", wrong.what);
                }
                wrong.at(format!("{path}, field `{field}`"))
            }
            Self::Wrong(mistake) => mistake.clone(),
        }
    }
}

/// What is accepted where a name of this kind is expected, and an example.
fn of_kind(kind: &str) -> (&'static str, &'static str) {
    match kind {
        "model" => (
            "a preset (`vescale-plan models`), a config.json, or a folder that holds one",
            "--model llama3-70b",
        ),
        "cluster" => (
            "a preset (`vescale-plan clusters`), a YAML file, or GPUs and networks in one line",
            "--cluster 'h100-sxm x 8 per node, 400 Gb/s x 8'",
        ),
        "runtime" => (
            "a training system (`vescale-plan runtimes`)",
            "--runtime torchtitan",
        ),
        "device" => (
            "a GPU that a preset is made of (`vescale-plan clusters`)",
            "h100-sxm",
        ),
        "model_type" => (
            "a family of models that `vescale-plan models` lists, or one built like it",
            "\"model_type\": \"llama\"",
        ),
        _ => ("a known name", "vescale-plan --help"),
    }
}

fn hint(nearest: Option<&String>) -> String {
    nearest.map_or_else(String::new, |name| format!("; did you mean `{name}`?"))
}
