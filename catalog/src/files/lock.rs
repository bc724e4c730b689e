//! Locks: one writer of a file at a time.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

use super::FileError;

/// Waits until no other process holds the lock of the file at `path`, and holds it until the result
/// is dropped. The locked file is `.NAME.lock` beside it, because writes replace the file itself;
/// it is never removed, as another process might hold it. `None` if the file system has no locks.
///
/// # Errors
/// When the lock file cannot be created or locked.
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
