//! Folders of files that are written together: all of them or none.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{Destination, Draft, FileError, Kind, Replace, folder_of, shown, takes_files};

/// A file of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedFile<'a> {
    /// Name, without folder.
    pub name: &'a str,
    /// Content.
    pub content: &'a [u8],
    /// Whether it is to be run.
    pub executable: bool,
}

/// A folder that was found fit to be written to. Links among the folders above a file are followed, as
/// everywhere; a file's own name never is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderDestination {
    path: PathBuf,
    kind: Kind,
    replace: Replace,
}

impl FolderDestination {
    /// Checks that files can be written to the folder `path`, which is made when it is not there.
    ///
    /// # Errors
    /// When it, or the folder that is to hold it, takes no files.
    pub fn check(path: &Path, kind: Kind, replace: Replace) -> Result<Self, FileError> {
        match std::fs::metadata(path) {
            Ok(found) if !found.is_dir() => {
                return Err(FileError::NotAFolder { path: shown(path) });
            }
            Ok(_) => takes_files(path, path)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // A link to nothing is no place for a folder.
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

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes all files or none; returns the paths of those that replaced another.
    ///
    /// # Errors
    /// When one cannot be written, or may not replace what lies there.
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

    /// Fills a folder beside and gives it its name.
    fn make(&self, files: &[NamedFile<'_>]) -> Result<(), FileError> {
        let failed = |e| FileError::io(&self.path, e);
        let mut builder = tempfile::Builder::new();
        builder.prefix(".vescale-plan-").suffix(".draft");
        super::set_mode(&mut builder, 0o777);
        let staged = builder.tempdir_in(above(&self.path)?).map_err(failed)?;
        for draft in self.drafts(staged.path(), files)? {
            draft.commit()?;
        }
        std::fs::rename(staged.path(), &self.path).map_err(failed)?;
        // It has another name now; there is nothing to remove.
        let _ = staged.keep();
        Ok(())
    }

    /// Adds to a folder: every file is drafted before the first is put in place.
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
        let draft = |file: &NamedFile<'_>| {
            let path = folder.join(file.name);
            // The very same bytes may be written again, whatever they are.
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
        files.iter().map(draft).collect()
    }
}

/// The folder that holds a folder, whose name may end in a separator.
fn above(path: &Path) -> Result<&Path, FileError> {
    match path.file_name() {
        Some(_) => {
            let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
            Ok(parent.unwrap_or(Path::new(".")))
        }
        None => folder_of(path),
    }
}

/// Whether a file holds just that.
fn holds(path: &Path, content: &[u8]) -> bool {
    let found = std::fs::symlink_metadata(path);
    found.is_ok_and(|found| found.is_file() && found.len() == content.len() as u64)
        && std::fs::read(path).is_ok_and(|held| held == content)
}
