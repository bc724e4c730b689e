//! Inputs that a user gives beside the plan (tokenizer, data, the model's name on the Hugging Face hub), and the list
//! of those still to be filled in before a launch.

use serde::Serialize;

/// Inputs of the launched job beside the plan. A missing one becomes a placeholder, and the launch script stops on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inputs<'a> {
    /// Folder or hub name of the tokenizer.
    pub tokenizer: Option<&'a str>,
    /// Dataset: a path or a hub name, in the form that the target reads.
    pub data: Option<&'a str>,
    /// Name of the model on the Hugging Face hub, or a folder in its format.
    pub hf_id: Option<&'a str>,
}

/// An input that only the user knows and has not given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unfilled {
    /// Its name: a placeholder in the files, or an environment variable.
    pub name: &'static str,
    /// What to put there.
    pub what: String,
    /// Whether `name` is a placeholder in the files.
    #[serde(skip)]
    pub placeholder: bool,
}

/// Prefix of every placeholder: the launch script and `export --check` look for it.
pub(crate) const PLACEHOLDER: &str = "FILL_IN_";

/// An input of the launched job that only the user knows: a field of [`Inputs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    Tokenizer,
    Data,
    HfId,
}

impl Input {
    /// The value that the user gave, if any.
    pub(crate) fn given<'a>(self, inputs: &Inputs<'a>) -> Option<&'a str> {
        match self {
            Self::Tokenizer => inputs.tokenizer,
            Self::Data => inputs.data,
            Self::HfId => inputs.hf_id,
        }
    }

    /// The placeholder in the files until a value is given, and the option of `export` that gives it.
    pub(crate) fn placeholder_and_option(self) -> (&'static str, &'static str) {
        match self {
            Self::Tokenizer => ("FILL_IN_TOKENIZER", "--tokenizer"),
            Self::Data => ("FILL_IN_DATA", "--data"),
            Self::HfId => ("FILL_IN_HF_ID", "--hf-id"),
        }
    }
}

/// The missing inputs, one line each.
pub(crate) fn lines(unfilled: &[Unfilled]) -> Vec<String> {
    if unfilled.is_empty() {
        return Vec::new();
    }
    let mut lines = vec!["To fill in before the launch:".to_owned()];
    lines.extend(unfilled.iter().map(|u| format!("  {}: {}", u.name, u.what)));
    lines
}
