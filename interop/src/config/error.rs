//! A file that is not what its syntax asks, and where.

/// A file that is not what its syntax asks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", place(path, *line))]
pub struct SyntaxError {
    /// File.
    pub path: String,
    /// Line, 0 if unknown.
    pub line: usize,
    /// What is wrong.
    pub message: String,
}

/// `file:line`, or the file alone.
#[must_use]
pub fn place(path: &str, line: usize) -> String {
    if line == 0 {
        path.to_owned()
    } else {
        format!("{path}:{line}")
    }
}

impl SyntaxError {
    /// An error of `path` at `line`.
    #[must_use]
    pub fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line,
            message: message.into(),
        }
    }
}
