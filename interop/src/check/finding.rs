//! Problems that a check of a configuration reports.

use serde::Serialize;

use crate::config::place;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The system refuses the file, or does something else than the file says.
    Error,
    /// The system ignores the key or switches it off, which changes nothing else.
    Warning,
}

/// A problem of a configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Path of the file.
    #[serde(skip)]
    pub path: String,
    /// Line, 0 if unknown.
    pub line: usize,
    /// Key or option.
    pub key: String,
    /// What is wrong, and what would be right.
    pub message: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = place(&self.path, self.line);
        let kind = match self.severity {
            Severity::Error => "",
            Severity::Warning => "warning: ",
        };
        write!(f, "{place}: {kind}`{}`: {}", self.key, self.message)
    }
}
