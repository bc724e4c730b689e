//! Folders whose files are written together: no file is put in place before all drafts are written.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{Destination, Draft, FileError, Kind, Replace, folder_of, shown, takes_files};

/// A file to be written to a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedFile<'a> {
    /// Name of the file, without its folder.
    pub name: &'a str,
    /// Bytes of the file.
    pub content: &'a [u8],
    /// Whether the file is made executable.
    pub executable: bool,
}

/// A folder that was checked and can be written to. Symbolic links in the path to the folder are
/// followed; a symbolic link in place of a file to write is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderDestination {
    path: PathBuf,
    kind: Kind,
    replace: Replace,
}

impl FolderDestination {
    /// Checks that files can be written to the folder `path`, which is created if it does not exist.
    ///
    /// # Errors
    /// When the folder, or the one it is to be created in, cannot be written to.
    pub fn check(path: &Path, kind: Kind, replace: Replace) -> Result<Self, FileError> {
        super::not_stdout(path)?;
        match std::fs::metadata(path) {
            Ok(found) if !found.is_dir() => {
                return Err(FileError::NotAFolder { path: shown(path) });
            }
            Ok(_) => takes_files(path, path)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // A dangling link is not replaced by a folder.
                if std::fs::symlink_metadata(path).is_ok() {
                    return Err(FileError::Link { path: shown(path) });
                }
                takes_files(path, above(path)?)?;
            }
            Err(e) => return Err(FileError::io(path, e)),
        }
        Ok(Self {
            path: path.to_owned(),
            kind,
            replace,
        })
    }

    /// The path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes all drafts, then puts the files in place; returns the paths of replaced files.
    ///
    /// # Errors
    /// When a file cannot be written, or may not replace an existing one.
    pub fn write(&self, files: &[NamedFile<'_>]) -> Result<Vec<PathBuf>, FileError> {
        for file in files {
            let name = Path::new(file.name);
            let plain = name.file_name().is_some_and(|n| n == name.as_os_str());
            if !plain {
                let outside = io::Error::other("its name leads out of the folder");
                return Err(FileError::io(&self.path.join(name), outside));
            }
        }
        if self.path.exists() {
            self.fill(files)
        } else {
            self.make(files).map(|()| Vec::new())
        }
    }

    /// Removes a file of this folder, which is no link.
    ///
    /// # Errors
    /// When it is not there or cannot be removed.
    pub fn remove(&self, name: &str) -> Result<PathBuf, FileError> {
        let path = self.path.join(name);
        let found = std::fs::symlink_metadata(&path).map_err(|e| FileError::io(&path, e))?;
        if !found.is_file() {
            return Err(FileError::Special { path: shown(&path) });
        }
        std::fs::remove_file(&path).map_err(|e| FileError::io(&path, e))?;
        Ok(path)
    }

    /// Writes the files to a temporary folder beside this one, then renames it.
    fn make(&self, files: &[NamedFile<'_>]) -> Result<(), FileError> {
        let failed = |e| FileError::io(&self.path, e);
        let mut builder = tempfile::Builder::new();
        builder.prefix(".vescale-plan-").suffix(".draft");
        super::set_mode(&mut builder, 0o777);
        let staged = builder.tempdir_in(above(&self.path)?).map_err(failed)?;
        let drafts = self.drafts(staged.path(), files)?;
        for (draft, file) in drafts.into_iter().zip(files) {
            let committed = draft.commit();
            committed.map_err(|error| error.about(&self.path.join(file.name)))?;
        }
        std::fs::rename(staged.path(), &self.path).map_err(failed)?;
        // The folder has been renamed, so there is no temporary one to remove.
        let _ = staged.keep();
        Ok(())
    }

    /// Adds files to an existing folder: all drafts are written before the first file is put in place.
    fn fill(&self, files: &[NamedFile<'_>]) -> Result<Vec<PathBuf>, FileError> {
        let drafts = self.drafts(&self.path, files)?;
        let replaced = drafts.iter().filter(|draft| draft.destination.replaces);
        let replaced = replaced.map(|d| d.destination.path.clone()).collect();
        for draft in drafts {
            draft.commit()?;
        }
        Ok(replaced)
    }

    fn drafts(&self, folder: &Path, files: &[NamedFile<'_>]) -> Result<Vec<Draft>, FileError> {
        let drafted = |file: &NamedFile<'_>| -> Result<Draft, FileError> {
            let path = folder.join(file.name);
            // A file may always be written again with the same bytes, whatever it is.
            let replace = if holds(&path, file.content) {
                Replace::Anything
            } else {
                self.replace
            };
            let destination = Destination::check(&path, self.kind, replace)?;
            let mut draft = destination.executable(file.executable).draft()?;
            draft
                .write_all(file.content)
                .map_err(|e| FileError::io(&path, e))?;
            Ok(draft)
        };
        // The folder may be a draft itself, which the user has never named.
        let draft = |file: &NamedFile<'_>| {
            drafted(file).map_err(|error| error.about(&self.path.join(file.name)))
        };
        files.iter().map(draft).collect()
    }
}

/// The parent of a folder, whose path may end in a separator.
fn above(path: &Path) -> Result<&Path, FileError> {
    match path.file_name() {
        Some(_) => {
            let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
            Ok(parent.unwrap_or(Path::new(".")))
        }
        None => folder_of(path),
    }
}

/// Whether a file has exactly this content.
fn holds(path: &Path, content: &[u8]) -> bool {
    let found = std::fs::symlink_metadata(path);
    found.is_ok_and(|found| found.is_file() && found.len() == content.len() as u64)
        && std::fs::read(path).is_ok_and(|held| held == content)
}
