//! File-system operations of checkpoints: those that change a folder, and bounded reads of its files.
//!
//! Saving, replacing and recovering go through [`Files`] alone, so that a test can stop them at any call, as a kill
//! or a full disk would.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use super::problem::{self, wrong};
use crate::error::ExecutorError;

/// Every operation that changes a folder of checkpoints. Reads are not here: they change nothing, so a kill during a
/// read leaves the same state as one between two of these operations.
pub(crate) trait Files: Sync {
    /// Makes a folder whose parent exists.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes a new file; it is an error if anything, even a link, has its name.
    fn create(&self, path: &Path) -> io::Result<File>;
    /// Appends bytes to a file.
    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()>;
    /// Waits until a file's bytes are on disk (fsync).
    fn sync(&self, file: &File) -> io::Result<()>;
    /// Waits until the names in a folder are on disk (fsync).
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Renames a file or folder.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file or a link.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty folder.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
}

/// The real file system.
pub(crate) struct Disk;

impl Files for Disk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().write(true).create_new(true).open(path)
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }
}

/// Makes a folder and its missing parents; their names are on disk when this returns.
pub(crate) fn create_dirs(files: &dyn Files, path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if parent != path {
        create_dirs(files, parent)?;
    }
    match files.create_dir(path) {
        // Another rank made it in the meantime.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(e) => Err(e),
        Ok(()) => files.sync_dir(parent),
    }
}

/// Removes a folder and the files in it. The file `first` goes first: without it the rest is no checkpoint. A link is
/// removed, never followed; a missing folder is no error.
pub(crate) fn remove_tree(files: &dyn Files, path: &Path, first: &str) -> io::Result<()> {
    let gone = |result: io::Result<()>| match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    match fs::symlink_metadata(path) {
        Err(e) => return gone(Err(e)),
        Ok(kind) if !kind.is_dir() => return gone(files.remove_file(path)),
        Ok(_) => {}
    }
    gone(files.remove_file(&path.join(first)))?;
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(files, &entry.path(), first)?;
        } else {
            gone(files.remove_file(&entry.path()))?;
        }
    }
    gone(files.remove_dir(path))
}

/// Size of a regular file in bytes; an error for devices and pipes, whose reads would not end.
pub(super) fn regular(path: &Path) -> Result<u64, ExecutorError> {
    let metadata = fs::metadata(path).map_err(|e| problem::io(path, &e))?;
    match metadata.is_file() {
        true => Ok(metadata.len()),
        false => Err(wrong(path, "is not a file".to_owned())),
    }
}

/// Reads a whole file of at most `most` bytes.
pub(super) fn read_bounded(path: &Path, most: u64) -> Result<Vec<u8>, ExecutorError> {
    let size = regular(path)?;
    if size > most {
        let reason = format!("the file has {size} bytes, expected at most {most} bytes");
        return Err(wrong(path, reason));
    }
    let mut bytes = vec![0; size as usize];
    read_at(path, 0, &mut bytes)?;
    Ok(bytes)
}

pub(super) fn read_at(path: &Path, offset: u64, into: &mut [u8]) -> Result<(), ExecutorError> {
    File::open(path)
        .and_then(|mut file| {
            file.seek(SeekFrom::Start(offset))?;
            file.read_exact(into)
        })
        .map_err(|e| problem::io(path, &e))
}
