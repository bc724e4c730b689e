//! Where commands write files, and which existing files they may replace.
//!
//! A path that the user gave is used as it is: a file of the same kind is replaced, with a message. A name that the
//! tool chose never replaces a file of another plan. `--force` replaces any file.

use std::path::{Path, PathBuf};

use catalog::files::{Destination, Draft, FileError, Kind, Replace, shown};

use crate::error::CliError;
use crate::output;

/// A file that a command will write.
pub(crate) struct Target {
    to: Destination,
    /// Whether a file of another plan must not be replaced, because the tool chose the name.
    keep_others: bool,
}

impl Target {
    /// A target under a path that the user gave. Made before the work whose result it will hold.
    pub(crate) fn named(path: &Path, kind: Kind, force: bool) -> Result<Self, FileError> {
        Ok(Self {
            to: Destination::check(path, kind, Replace::forced(force))?,
            keep_others: false,
        })
    }

    /// A target under a name that the tool chose.
    pub(crate) fn chosen(path: &Path, kind: Kind, force: bool) -> Result<Self, FileError> {
        Ok(Self {
            keep_others: !force,
            ..Self::named(path, kind, force)?
        })
    }

    /// A target under the path given, or else under a name that the tool chose.
    pub(crate) fn given_or(
        given: Option<&PathBuf>,
        usual: &Path,
        kind: Kind,
        force: bool,
    ) -> Result<Self, FileError> {
        match given {
            Some(path) => Self::named(path, kind, force),
            None => Self::chosen(usual, kind, force),
        }
    }

    /// A target under the path given, if there is one.
    pub(crate) fn optional(
        path: Option<&PathBuf>,
        kind: Kind,
        force: bool,
    ) -> Result<Option<Self>, FileError> {
        path.map(|path| Self::named(path, kind, force)).transpose()
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> &Path {
        self.to.path()
    }

    /// Path as text, for JSON.
    pub(crate) fn text(&self) -> String {
        self.path().display().to_string()
    }

    /// Drafts a plan, or a file made from one, beside its destination.
    pub(crate) fn of_plan(&self, id: &str, content: &str) -> Result<Draft, CliError> {
        if self.keep_others && self.path().exists() && !mentions(self.path(), id) {
            return Err(CliError::OtherPlan {
                path: shown(self.path()),
            });
        }
        let mut draft = self.to.draft()?;
        let written = std::io::Write::write_all(&mut draft, content.as_bytes());
        written.map_err(|source| FileError::Io {
            path: shown(self.path()),
            source,
        })?;
        Ok(draft)
    }

    /// Writes the file.
    pub(crate) fn write(&self, content: &(impl AsRef<[u8]> + ?Sized)) -> Result<(), FileError> {
        self.to.write(content)
    }

    /// Reports on stderr what was written, and whether it replaced a file.
    pub(crate) fn say(&self, quiet: bool, what: &str) {
        let replaced = replaced(self.to.replaces() && !self.keep_others);
        output::note(quiet, &format!("{what} {}{replaced}", shown(self.path())));
    }
}

/// What is said behind the name of a file that may have replaced another.
pub(crate) fn replaced(another: bool) -> &'static str {
    match another {
        true => " (replaced the file that was there)",
        false => "",
    }
}

/// Checks that files which one command writes have a path each; `files` are the flags that name them, and their paths.
pub(crate) fn distinct(files: &[(&str, Option<&Path>)]) -> Result<(), CliError> {
    let mut seen: Vec<(&str, PathBuf)> = Vec::new();
    for (flag, path) in files {
        let Some(path) = path else { continue };
        let place = resolved(path);
        if let Some((other, _)) = seen.iter().find(|(_, known)| *known == place) {
            let what = format!("{other} and {flag} name the same file");
            let expected = "a file of its own for each";
            return Err(CliError::unexpected(shown(path), what, expected));
        }
        seen.push((flag, place));
    }
    Ok(())
}

/// The path with all links and dots of its folder resolved, as far as the folder is there.
fn resolved(path: &Path) -> PathBuf {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let folder = std::fs::canonicalize(folder.unwrap_or(Path::new(".")));
    match (folder, path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    }
}

/// Whether a file contains the id of a plan: it is the plan, or was made from it.
fn mentions(path: &Path, id: &str) -> bool {
    catalog::text::read(path).is_ok_and(|text| text.contains(id))
}
