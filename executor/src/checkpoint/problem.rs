//! Errors of checkpoints.

use std::path::Path;

use crate::error::ExecutorError;

/// What is wrong with a file; the caller adds its path.
pub(super) type Problem = String;

pub(super) fn wrong(path: &Path, reason: Problem) -> ExecutorError {
    ExecutorError::Checkpoint {
        path: path.display().to_string(),
        reason,
    }
}

pub(super) fn io(path: &Path, error: &std::io::Error) -> ExecutorError {
    wrong(path, error.to_string())
}
