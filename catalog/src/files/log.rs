//! Logs: files that are written by appending lines, so without a draft.

use std::fs::{File, Metadata, OpenOptions};
use std::path::Path;

use super::{Destination, FileError, Kind, Replace, shown};

/// Opens a log to append lines, after checking that `path` holds a log or nothing. It may be a pipe or a device,
/// because nothing there is replaced.
///
/// # Errors
/// As [`Destination::check`]; a symbolic link is refused even when forced, because a log is not replaced.
pub fn open_log(path: &Path, kind: Kind, replace: Replace) -> Result<File, FileError> {
    let found = std::fs::symlink_metadata(path).map(|found| found.file_type());
    if found.is_ok_and(|found| !found.is_file() && !found.is_dir() && !found.is_symlink()) {
        let opened = OpenOptions::new().append(true).open(path);
        return opened.map_err(|e| FileError::io(path, e));
    }
    Destination::check(path, kind, replace)?;
    let refuse_link = || FileError::Link { path: shown(path) };
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) {
        return Err(refuse_link());
    }
    let opened = OpenOptions::new().create(true).append(true).open(path);
    let file = opened.map_err(|e| FileError::io(path, e))?;
    // A link made since the check would lead to another file than the one at `path`.
    let named = std::fs::symlink_metadata(path).map_err(|e| FileError::io(path, e))?;
    let held = file.metadata().map_err(|e| FileError::io(path, e))?;
    if same_file(&named, &held) {
        Ok(file)
    } else {
        Err(refuse_link())
    }
}

#[cfg(unix)]
fn same_file(a: &Metadata, b: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(not(unix))]
fn same_file(a: &Metadata, _: &Metadata) -> bool {
    !a.is_symlink()
}
