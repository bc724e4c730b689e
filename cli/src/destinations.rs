//! Where commands write, and what they may replace there.
//!
//! A name that the user gave is taken at its word: a file of the same kind is replaced, and that is said. A
//! name that the tool chose never replaces what belongs to another plan. `--force` replaces any file.

use std::path::{Path, PathBuf};

use catalog::files::{Destination, Draft, FileError, Kind, Replace, shown};

use crate::error::CliError;
use crate::output;

/// A file that a command will write.
pub(crate) struct Target {
    to: Destination,
    /// Whether files of other plans are to be kept: the tool chose the name.
    keep_others: bool,
}

impl Target {
    /// Under a name that the user gave. Called before the work whose result it will hold.
    pub(crate) fn named(path: &Path, kind: Kind, force: bool) -> Result<Self, FileError> {
        Ok(Self {
            to: Destination::check(path, kind, Replace::forced(force))?,
            keep_others: false,
        })
    }

    /// Under a name that the tool chose.
    pub(crate) fn chosen(path: &Path, kind: Kind, force: bool) -> Result<Self, FileError> {
        Ok(Self {
            keep_others: !force,
            ..Self::named(path, kind, force)?
        })
    }

    /// Under the name given, if one is.
    pub(crate) fn optional(
        path: Option<&PathBuf>,
        kind: Kind,
        force: bool,
    ) -> Result<Option<Self>, FileError> {
        path.map(|path| Self::named(path, kind, force)).transpose()
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        self.to.path()
    }

    /// Where it is, for JSON.
    pub(crate) fn text(&self) -> String {
        self.path().display().to_string()
    }

    /// The content of a plan or of what was made from one, written beside its place.
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
    pub(crate) fn write(&self, content: &str) -> Result<(), FileError> {
        self.to.write(content)
    }

    /// Says on stderr what was written, and whether it replaced something.
    pub(crate) fn say(&self, quiet: bool, what: &str) {
        let replaced = if self.to.replaces() && !self.keep_others {
            " (replaced the file that was there)"
        } else {
            ""
        };
        output::note(quiet, &format!("{what} {}{replaced}", shown(self.path())));
    }
}

/// Whether a file holds the id of a plan: its own, or that of the plan it was made from.
fn mentions(path: &Path, id: &str) -> bool {
    catalog::text::read(path).is_ok_and(|text| text.contains(id))
}

/// A name for files, of the words that describe what they hold: letters, digits, `.`, `_` and `-`.
pub(crate) fn stem(words: &[&str]) -> String {
    /// Keeps the whole name far below the 255 bytes that file systems take.
    const LONGEST: usize = 40;
    let safe = |word: &&str| {
        let mut safe: String = word
            .chars()
            .map(|c| match c {
                'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '_' => c,
                _ => '-',
            })
            .take(LONGEST)
            .collect();
        while safe.contains("--") {
            safe = safe.replace("--", "-");
        }
        safe.trim_matches(['-', '.']).to_owned()
    };
    let words = words.iter().map(safe).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::stem;

    #[test]
    fn names_are_safe_for_file_systems() {
        for (words, name) in [
            (
                &["llama3-70b", "512gpus", "dgx-h100"][..],
                "llama3-70b-512gpus-dgx-h100",
            ),
            (&["../../etc/passwd", "8gpus"], "etc-passwd-8gpus"),
            (&["a b'$(x)`\"", "8gpus"], "a-b-x-8gpus"),
            (&["...", "8gpus"], "8gpus"),
            (&["-rf", "中文", "v1.5"], "rf-v1.5"),
            (&["a\n\u{1b}b"], "a-b"),
        ] {
            assert_eq!(stem(words), name);
        }
        assert!(stem(&[&"n".repeat(300)[..]; 3]).len() < 200);
    }
}
