//! Writing files: the one module through which anything that lasts is written.
//!
//! A file is written to a draft beside its destination and renamed into place, so that it is whole or
//! absent. The destination is checked first, before the work whose result it will hold: its folder is there
//! and takes files, and what lies there already is a file of the kind about to be written, or the caller
//! forces its replacement. A symbolic link is not followed. Drafts are new files of random names
//! (`O_EXCL`), with the modes that the umask leaves.

mod folder;
mod kind;
mod lock;
mod log;

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

pub use folder::{FolderDestination, NamedFile};
pub use kind::Kind;
pub use lock::lock;
pub use log::open_log;

/// Why a file is not written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The folder that is to hold the file is not there.
    #[error("cannot write {path}: there is no folder {folder}")]
    NoFolder {
        /// Destination.
        path: String,
        /// Its folder.
        folder: String,
    },
    /// The folder that is to hold the file takes none.
    #[error("cannot write {path}: no file can be made in {folder}: {source}")]
    Unwritable {
        /// Destination.
        path: String,
        /// Its folder.
        folder: String,
        /// What the system says.
        source: io::Error,
    },
    /// The destination is a folder.
    #[error("cannot write {path}: it is a folder")]
    Folder {
        /// Destination.
        path: String,
    },
    /// A folder is to be written where a file is.
    #[error("cannot write {path}: it is no folder")]
    NotAFolder {
        /// Destination.
        path: String,
    },
    /// The destination is a symbolic link.
    #[error(
        "cannot write {path}: it is a symbolic link, which is not followed; name the file it points to, or \
         replace the link with --force"
    )]
    Link {
        /// Destination.
        path: String,
    },
    /// The destination is a device, a pipe or a socket.
    #[error("cannot write {path}: it is a device, pipe or socket, and only files are written")]
    Special {
        /// Destination.
        path: String,
    },
    /// The destination holds something else.
    #[error(
        "cannot write {path}: the file there is not {kind}; name another, or replace it with --force"
    )]
    OtherKind {
        /// Destination.
        path: String,
        /// What was to be written.
        kind: Kind,
    },
    /// The system refuses.
    #[error("cannot write {path}: {source}")]
    Io {
        /// Destination.
        path: String,
        /// What the system says.
        source: io::Error,
    },
}

impl FileError {
    fn io(path: &Path, source: io::Error) -> Self {
        let path = shown(path);
        Self::Io { path, source }
    }
}

/// What may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replace {
    /// A file of the same kind, or an empty one.
    SameKind,
    /// Any file, and a symbolic link itself: what `--force` asks for.
    Anything,
}

impl Replace {
    /// What `--force`, or its absence, allows.
    #[must_use]
    pub fn forced(force: bool) -> Self {
        if force {
            Self::Anything
        } else {
            Self::SameKind
        }
    }
}

/// A path that was found fit to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    path: PathBuf,
    kind: Kind,
    replace: Replace,
    replaces: bool,
    executable: bool,
}

impl Destination {
    /// Checks that a file of `kind` can be written at `path`. Nothing is left there.
    ///
    /// # Errors
    /// When its folder is missing or takes no files; when what lies there may not be replaced.
    pub fn check(path: &Path, kind: Kind, replace: Replace) -> Result<Self, FileError> {
        let folder = folder_of(path)?;
        takes_files(path, folder)?;
        Ok(Self {
            replaces: replaceable(path, kind, replace)?,
            path: path.to_owned(),
            kind,
            replace,
            executable: false,
        })
    }

    /// The same, to be run: its mode allows it.
    #[must_use]
    pub fn executable(self, executable: bool) -> Self {
        Self { executable, ..self }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a file was there when it was checked.
    #[must_use]
    pub fn replaces(&self) -> bool {
        self.replaces
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    /// When it cannot be written, or something else has come to lie there since the check.
    pub fn write(&self, content: impl AsRef<[u8]>) -> Result<(), FileError> {
        let mut draft = self.draft()?;
        let written = draft.write_all(content.as_ref());
        written.map_err(|e| FileError::io(&self.path, e))?;
        draft.commit()
    }

    /// A file to write to that is put in place by [`Draft::commit`].
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn draft(&self) -> Result<Draft, FileError> {
        let folder = folder_of(&self.path)?;
        let mut builder = tempfile::Builder::new();
        builder.prefix(".vescale-plan-").suffix(".draft");
        set_mode(&mut builder, if self.executable { 0o777 } else { 0o666 });
        let made = builder.tempfile_in(folder);
        Ok(Draft {
            file: made.map_err(|e| FileError::io(&self.path, e))?,
            destination: self.clone(),
        })
    }
}

/// A file that is being written: removed when dropped, in place once committed.
#[derive(Debug)]
pub struct Draft {
    file: tempfile::NamedTempFile,
    destination: Destination,
}

impl Draft {
    /// Puts the file in place, on disk before its name is.
    ///
    /// # Errors
    /// When it cannot be, or something else has come to lie there since the check.
    pub fn commit(self) -> Result<(), FileError> {
        let Self { file, destination } = self;
        let path = destination.path;
        file.as_file()
            .sync_all()
            .map_err(|e| FileError::io(&path, e))?;
        replaceable(&path, destination.kind, destination.replace)?;
        file.persist(&path)
            .map_err(|e| FileError::io(&path, e.error))?;
        sync_folder(&path);
        Ok(())
    }
}

impl Write for Draft {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Of the file itself: an error of the draft would name the draft.
        self.file.as_file_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_file_mut().flush()
    }
}

/// Checks and writes in one step, where no work lies between.
///
/// # Errors
/// As [`Destination::check`] and [`Destination::write`].
pub fn write(
    path: &Path,
    kind: Kind,
    replace: Replace,
    content: impl AsRef<[u8]>,
) -> Result<(), FileError> {
    Destination::check(path, kind, replace)?.write(content)
}

/// A path for messages: what a terminal would act on is written as an escape.
#[must_use]
pub fn shown(path: &Path) -> String {
    crate::names::shown(&path.to_string_lossy())
}

/// The folder of a path that can be a file's.
fn folder_of(path: &Path) -> Result<&Path, FileError> {
    // `plan.yaml/` asks for a folder, and so do `.`, `..` and `/`.
    let ends = path.as_os_str().as_encoded_bytes().last();
    let is_separator = ends.is_some_and(|&b| std::path::is_separator(b.into()));
    if is_separator || path.file_name().is_none() {
        return Err(FileError::Folder { path: shown(path) });
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    Ok(folder.unwrap_or(Path::new(".")))
}

/// Whether files can be made in a folder: one without a name is made, and is gone.
fn takes_files(path: &Path, folder: &Path) -> Result<(), FileError> {
    match std::fs::metadata(folder) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => {
            let path = shown(folder);
            return Err(FileError::NotAFolder { path });
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(FileError::NoFolder {
                path: shown(path),
                folder: shown(folder),
            });
        }
        Err(e) => return Err(FileError::io(path, e)),
    }
    tempfile::tempfile_in(folder)
        .map(drop)
        .map_err(|source| FileError::Unwritable {
            path: shown(path),
            folder: shown(folder),
            source,
        })
}

/// Whether a file lies at `path`; an error when it may not be replaced.
fn replaceable(path: &Path, kind: Kind, replace: Replace) -> Result<bool, FileError> {
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(FileError::io(path, e)),
    };
    let shown = shown(path);
    let forced = replace == Replace::Anything;
    if found.is_dir() {
        return Err(FileError::Folder { path: shown });
    }
    if found.is_symlink() {
        return if forced {
            Ok(true)
        } else {
            Err(FileError::Link { path: shown })
        };
    }
    if !found.is_file() {
        return Err(FileError::Special { path: shown });
    }
    if forced || kind.recognises(&head(path)?) {
        return Ok(true);
    }
    Err(FileError::OtherKind { path: shown, kind })
}

/// How much of a file says what it is.
const HEAD_BYTES: u64 = 64 << 10;

fn head(path: &Path) -> Result<Vec<u8>, FileError> {
    let mut head = Vec::new();
    let file = std::fs::File::open(path);
    file.and_then(|file| file.take(HEAD_BYTES).read_to_end(&mut head))
        .map_err(|e| FileError::io(path, e))?;
    Ok(head)
}

#[cfg(unix)]
fn set_mode(builder: &mut tempfile::Builder<'_, '_>, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    // Given when the file is made, so that the umask applies to it.
    builder.permissions(std::fs::Permissions::from_mode(mode));
}

#[cfg(not(unix))]
fn set_mode(_: &mut tempfile::Builder<'_, '_>, _: u32) {}

/// Puts a new name on disk too. Not every file system takes this, and the file is whole without it.
fn sync_folder(path: &Path) {
    if let Ok(folder) = folder_of(path)
        && let Ok(folder) = std::fs::File::open(folder)
    {
        let _ = folder.sync_all();
    }
}
