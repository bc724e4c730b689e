//! Writing files: the only module that writes files which outlive the process.
//!
//! A file is written to a draft beside its destination and renamed into place, so that it is whole or absent. The
//! destination is checked before the work whose result it will hold: its folder must exist and be writable, and an
//! existing file must be of the kind about to be written, unless the caller forces its replacement. A symbolic link is
//! not followed. Drafts are new files with random names (`O_EXCL`), with the modes that the umask leaves.

mod folder;
mod kind;
mod lock;
mod log;

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::mistake::Mistake;

pub use folder::{FolderDestination, NamedFile};
pub use kind::Kind;
pub use lock::lock;
pub use log::{check_log, open_log};

/// Why a file cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The folder of the destination does not exist.
    #[error("cannot write {path}: there is no folder {folder}")]
    NoFolder {
        /// Path of the destination.
        path: String,
        /// Path of its folder.
        folder: String,
    },
    /// The folder of the destination cannot be written to.
    #[error("cannot write {path}: no file can be made in {folder}: {source}")]
    Unwritable {
        /// Path of the destination.
        path: String,
        /// Path of its folder.
        folder: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// The destination is a folder.
    #[error("cannot write {path}: it is a folder")]
    Folder {
        /// Path of the destination.
        path: String,
    },
    /// The destination of a folder is a file.
    #[error("cannot write {path}: it is not a folder")]
    NotAFolder {
        /// Path of the destination.
        path: String,
    },
    /// The destination is a symbolic link.
    #[error(
        "cannot write {path}: it is a symbolic link, which is not followed; name the file it points to, or \
         replace the link with --force"
    )]
    Link {
        /// Path of the destination.
        path: String,
    },
    /// The destination of a log is a symbolic link.
    #[error(
        "cannot write {path}: it is a symbolic link, which is not followed; name the file it points to"
    )]
    LogLink {
        /// Path of the destination.
        path: String,
    },
    /// The destination is a device, a pipe or a socket.
    #[error("cannot write {path}: it is a device, pipe or socket, and only files are written")]
    Special {
        /// Path of the destination.
        path: String,
    },
    /// The destination is `-`, which other programs take for stdout.
    #[error(
        "cannot write {path}: a file is written, and stdout is not one; name a file, or ./- for one of that name"
    )]
    Stdout {
        /// Path of the destination.
        path: String,
    },
    /// The destination holds a file of another kind.
    #[error(
        "cannot write {path}: the file there is not {kind}; name another, or replace it with --force"
    )]
    OtherKind {
        /// Path of the destination.
        path: String,
        /// The kind of file that was to be written.
        kind: Kind,
    },
    /// The operating system refuses to write.
    #[error("cannot write {path}: {source}")]
    Io {
        /// Path of the destination.
        path: String,
        /// The operating system's error.
        source: io::Error,
    },
}

impl FileError {
    fn io(path: &Path, source: io::Error) -> Self {
        let path = shown(path);
        let source = own(source);
        Self::Io { path, source }
    }

    /// The same error of the operating system, about another path.
    fn about(self, path: &Path) -> Self {
        match self {
            Self::Io { source, .. } => Self::io(path, source),
            other => other,
        }
    }

    /// The error split into what is wrong, where, and what would be right.
    #[must_use]
    pub fn mistake(&self) -> Mistake {
        let (path, expected) = match self {
            Self::NoFolder { path, .. } => (path, "a folder that is there"),
            Self::Unwritable { path, .. } | Self::Io { path, .. } => {
                (path, "a place that can be written to")
            }
            Self::Folder { path } | Self::Special { path } => (path, "the name of a file"),
            Self::Stdout { path } => (path, "the name of a file, or ./- for one of that name"),
            Self::NotAFolder { path } => (path, "the name of a folder"),
            Self::Link { path } => (
                path,
                "the file that it points to, or --force to replace the link",
            ),
            Self::LogLink { path } => (path, "the file that it points to"),
            Self::OtherKind { path, .. } => (path, "another name, or --force to replace the file"),
        };
        let said = self.to_string();
        let why = said.strip_prefix(&format!("cannot write {path}: "));
        let why = why.unwrap_or(&said).split("; ").next().unwrap_or(&said);
        Mistake::new(format!("cannot write: {why}"))
            .at(path)
            .expected(expected)
    }
}

/// Which existing files may be replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replace {
    /// A file of the same kind, or an empty one.
    SameKind,
    /// Any file, and a symbolic link itself (not its target): what `--force` allows.
    Anything,
}

impl Replace {
    /// `Anything` with `--force`, `SameKind` without.
    #[must_use]
    pub fn forced(force: bool) -> Self {
        if force {
            Self::Anything
        } else {
            Self::SameKind
        }
    }
}

/// A path that was checked and can be written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    path: PathBuf,
    kind: Kind,
    replace: Replace,
    replaces: bool,
    executable: bool,
}

impl Destination {
    /// Checks that a file of `kind` can be written at `path`, and leaves nothing there.
    ///
    /// # Errors
    /// When its folder does not exist or cannot be written to, or an existing file may not be replaced.
    pub fn check(path: &Path, kind: Kind, replace: Replace) -> Result<Self, FileError> {
        not_stdout(path)?;
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

    /// The same destination, for a file that is made executable.
    #[must_use]
    pub fn executable(self, executable: bool) -> Self {
        Self { executable, ..self }
    }

    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a file existed there when it was checked.
    #[must_use]
    pub fn replaces(&self) -> bool {
        self.replaces
    }

    /// Writes the file, completely or not at all.
    ///
    /// # Errors
    /// When it cannot be written, or another file has appeared there since the check.
    pub fn write(&self, content: impl AsRef<[u8]>) -> Result<(), FileError> {
        let mut draft = self.draft()?;
        let written = draft.write_all(content.as_ref());
        written.map_err(|e| FileError::io(&self.path, e))?;
        draft.commit()
    }

    /// Creates a draft of the file, which [`Draft::commit`] puts in place.
    ///
    /// # Errors
    /// When the draft cannot be created.
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

/// A file that is being written: put in place when committed, removed when dropped before.
#[derive(Debug)]
pub struct Draft {
    file: tempfile::NamedTempFile,
    destination: Destination,
}

impl Draft {
    /// Puts the file in place, after its content is on disk.
    ///
    /// # Errors
    /// When it cannot be put in place, or another file has appeared there since the check.
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
        // Written through the inner file: an error of the draft would name the draft's path.
        self.file.as_file_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_file_mut().flush()
    }
}

/// Checks and writes in one step, for callers without work in between.
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

/// The path of a file that another file names, relative to that file; a name that is no file beside it stays as it is.
#[must_use]
pub fn beside(file: &Path, name: &str) -> String {
    let near = file.parent().map(|folder| folder.join(name));
    // The folder itself is no file that an empty name means.
    match near.filter(|p| p.exists() && !name.is_empty()) {
        Some(near) => near.display().to_string(),
        None => name.to_owned(),
    }
}

/// The path of a file that is there, with all links and dots resolved; `None` if there is none.
#[must_use]
pub fn full(path: &Path) -> Option<PathBuf> {
    std::fs::canonicalize(path).ok()
}

/// A path as text for messages: characters that a terminal would act on are escaped.
#[must_use]
pub fn shown(path: &Path) -> String {
    crate::names::shown(&path.to_string_lossy())
}

/// The folder of a file's path; an error if the path cannot be a file's.
fn folder_of(path: &Path) -> Result<&Path, FileError> {
    // Paths such as `plan.yaml/`, `.`, `..` and `/` name folders.
    let ends = path.as_os_str().as_encoded_bytes().last();
    let is_separator = ends.is_some_and(|&b| std::path::is_separator(b.into()));
    if is_separator || path.file_name().is_none() {
        return Err(FileError::Folder { path: shown(path) });
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    Ok(folder.unwrap_or(Path::new(".")))
}

/// Checks that a folder can be written to, by creating a file without a name, which vanishes when closed.
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
            source: own(source),
        })
}

/// The error without the path that `tempfile` adds: that of a draft, which a user has never named.
fn own(error: io::Error) -> io::Error {
    let said = error.to_string();
    match said.split_once(" at path ") {
        Some((what, _)) => io::Error::new(error.kind(), what.to_owned()),
        None => error,
    }
}

/// Refuses `-`, which other programs take for stdout.
fn not_stdout(path: &Path) -> Result<(), FileError> {
    match path.as_os_str() == "-" {
        true => Err(FileError::Stdout { path: shown(path) }),
        false => Ok(()),
    }
}

/// Whether a file exists at `path`; an error if it may not be replaced.
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

/// Number of bytes at the beginning of a file that are read to recognise its kind.
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
    // The mode is given when the file is created, so that the umask applies to it.
    builder.permissions(std::fs::Permissions::from_mode(mode));
}

#[cfg(not(unix))]
fn set_mode(_: &mut tempfile::Builder<'_, '_>, _: u32) {}

/// Flushes a folder, so that a new name in it is on disk. Errors are ignored: the file is whole without it.
fn sync_folder(path: &Path) {
    if let Ok(folder) = folder_of(path)
        && let Ok(folder) = std::fs::File::open(folder)
    {
        let _ = folder.sync_all();
    }
}
