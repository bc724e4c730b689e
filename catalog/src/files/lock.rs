//! Locks: one writer of a file at a time.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

use super::FileError;

/// Waits until no other process holds the lock of the file at `path`, and holds it until what is returned is
/// dropped. What is locked is a file beside it, `.NAME.lock`, for the file itself is another after it is
/// replaced; it stays, because who removes it might remove it from under another's lock. Gives nothing where
/// the file system has no locks.
///
/// # Errors
/// When the lock's file cannot be made or locked.
pub fn lock(path: &Path) -> Result<Option<File>, FileError> {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".lock");
    let beside = path.with_file_name(name);
    let failed = |source| FileError::io(&beside, source);
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&beside)
        .map_err(failed)?;
    match file.lock() {
        Ok(()) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(None),
        Err(error) => Err(failed(error)),
    }
}
