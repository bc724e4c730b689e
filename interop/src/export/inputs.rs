//! What a user gives beside the plan (tokenizer, data, the model's name on the Hugging Face hub), and the list of what
//! is still to be filled in before a launch.

/// What the launched job reads beside the plan; what is missing is left open in the files, and the launch script stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inputs<'a> {
    /// Folder or hub name of the tokenizer.
    pub tokenizer: Option<&'a str>,
    /// Dataset: a path or a hub name, as the target reads it.
    pub data: Option<&'a str>,
    /// Name of the model on the Hugging Face hub, or a folder in its format.
    pub hf_id: Option<&'a str>,
}

/// Something that only the user knows and has not said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfilled {
    /// What stands for it: a placeholder in the files, or a variable of the environment.
    pub name: &'static str,
    /// What to put there.
    pub what: String,
    /// Whether `name` is a placeholder in the files.
    pub placeholder: bool,
}

/// What every placeholder begins with: the launch script and `export --check` look for it.
pub(crate) const PLACEHOLDER: &str = "FILL_IN_";

/// One of the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    Tokenizer,
    Data,
    HfId,
}

impl Input {
    /// What was given for it.
    pub(crate) fn given<'a>(self, inputs: &Inputs<'a>) -> Option<&'a str> {
        match self {
            Self::Tokenizer => inputs.tokenizer,
            Self::Data => inputs.data,
            Self::HfId => inputs.hf_id,
        }
    }

    /// What stands in the files until it is given.
    pub(crate) fn placeholder(self) -> &'static str {
        match self {
            Self::Tokenizer => "FILL_IN_TOKENIZER",
            Self::Data => "FILL_IN_DATA",
            Self::HfId => "FILL_IN_HF_ID",
        }
    }

    /// The option of `export` that gives it.
    pub(crate) fn option(self) -> &'static str {
        match self {
            Self::Tokenizer => "--tokenizer",
            Self::Data => "--data",
            Self::HfId => "--hf-id",
        }
    }
}

/// The list of what is missing, one line each.
pub(crate) fn lines(unfilled: &[Unfilled]) -> Vec<String> {
    if unfilled.is_empty() {
        return Vec::new();
    }
    let mut lines = vec!["To fill in before the launch:".to_owned()];
    lines.extend(unfilled.iter().map(|u| format!("  {}: {}", u.name, u.what)));
    lines
}
