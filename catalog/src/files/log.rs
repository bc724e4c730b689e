//! Logs: files that are written by appending lines, so without a draft.

use std::fs::{File, Metadata, OpenOptions};
use std::path::Path;

use super::{Destination, FileError, Kind, Replace, shown};

/// Checks that a log can be written at `path`, and leaves nothing there. The path may name a pipe
/// or a device, because nothing is replaced.
///
/// # Errors
/// As [`Destination::check`]; a symbolic link is refused even if forced, as a log is appended to.
pub fn check_log(path: &Path, kind: Kind, replace: Replace) -> Result<(), FileError> {
    if is_special(path) {
        return Ok(());
    }
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) {
        return Err(FileError::LogLink { path: shown(path) });
    }
    Destination::check(path, kind, replace).map(drop)
}

/// Whether there is something at `path` that is no file, folder or link: a pipe, a socket or a device.
fn is_special(path: &Path) -> bool {
    let found = std::fs::symlink_metadata(path).map(|found| found.file_type());
    found.is_ok_and(|found| !found.is_file() && !found.is_dir() && !found.is_symlink())
}

/// Opens a log to append lines, after checking it.
///
/// # Errors
/// As [`check_log`]; when it cannot be opened.
pub fn open_log(path: &Path, kind: Kind, replace: Replace) -> Result<File, FileError> {
    check_log(path, kind, replace)?;
    if is_special(path) {
        let opened = OpenOptions::new().append(true).open(path);
        return opened.map_err(|e| FileError::io(path, e));
    }
    let opened = OpenOptions::new().create(true).append(true).open(path);
    let file = opened.map_err(|e| FileError::io(path, e))?;
    // A link made since the check would lead to another file than the one at `path`.
    let named = std::fs::symlink_metadata(path).map_err(|e| FileError::io(path, e))?;
    let held = file.metadata().map_err(|e| FileError::io(path, e))?;
    if same_file(&named, &held) {
        Ok(file)
    } else {
        Err(FileError::LogLink { path: shown(path) })
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
