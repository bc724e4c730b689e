//! Something wrong with a configuration, and where.

use crate::config::place;

/// Something wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// File.
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
        write!(f, "{place}: `{}`: {}", self.key, self.message)
    }
}
