//! Syntax errors of configuration files, with their places.

/// A file does not follow its syntax.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", place(path, *line))]
pub struct SyntaxError {
    /// Path of the file.
    pub path: String,
    /// Line from 1; 0 if unknown.
    pub line: usize,
    /// What is wrong with it.
    pub message: String,
}

/// The place as `file:line`, or the file alone where the line is unknown.
#[must_use]
pub fn place(path: &str, line: usize) -> String {
    if line == 0 {
        path.to_owned()
    } else {
        format!("{path}:{line}")
    }
}

impl SyntaxError {
    /// An error in the file `path` at `line`.
    #[must_use]
    pub fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line,
            message: message.into(),
        }
    }
}
