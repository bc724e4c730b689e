//! Writing: JSON on stdout, notes on stderr, files whole or not at all.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::error::CliError;

/// Version of the JSON documents.
pub(crate) const SCHEMA_VERSION: u32 = 1;

/// Writes a file whole or not at all: to a temporary one beside it, then renamed.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), CliError> {
    let failed = |reason: String| CliError::Write {
        path: path.display().to_string(),
        reason,
    };
    let folder = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    if path.is_dir() {
        return Err(failed("it is a folder".to_owned()));
    }
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(|e| failed(e.to_string()))?;
    file.write_all(text.as_bytes())
        .map_err(|e| failed(e.to_string()))?;
    set_readable(&file);
    file.persist(path)
        .map_err(|e| failed(e.error.to_string()))?;
    Ok(())
}

/// Temporary files are private; outputs are for everyone the umask allows.
#[cfg(unix)]
fn set_readable(file: &tempfile::NamedTempFile) {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::Permissions::from_mode(0o644);
    // A file system without modes is no reason to fail.
    let _ = file.as_file().set_permissions(mode);
}

#[cfg(not(unix))]
fn set_readable(_: &tempfile::NamedTempFile) {}

/// Prints one JSON document.
pub(crate) fn json<T: Serialize>(document: &T) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(document)
        .map_err(|e| CliError::Usage(format!("cannot write JSON: {e}")))?;
    print(&format!("{text}\n"));
    Ok(())
}

/// Prints to stdout; a closed pipe is the reader's choice.
pub(crate) fn print(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

/// Notes to stderr unless quiet.
pub(crate) fn note(quiet: bool, text: &str) {
    if !quiet {
        eprintln!("{text}");
    }
}

/// What the user must know of even when notes are off, to stderr.
pub(crate) fn warning(text: &str) {
    eprintln!("warning: {text}");
}

/// What went wrong, to stderr.
pub(crate) fn error(text: &str) {
    eprintln!("error: {text}");
}

/// Whether stdout takes colour.
pub(crate) fn colour() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}

/// A bar on stderr that shows itself once a second has passed.
pub(crate) struct Progress {
    bar: ProgressBar,
    started: Instant,
    shown: bool,
}

impl Progress {
    pub(crate) fn new(quiet: bool, what: &str) -> Self {
        let shown = !quiet && std::io::stderr().is_terminal();
        let bar = ProgressBar::hidden();
        bar.set_length(1000);
        let style = ProgressStyle::with_template("{msg} [{bar:30}] {percent}%")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style);
        bar.set_message(what.to_owned());
        Self {
            bar,
            started: Instant::now(),
            shown,
        }
    }

    pub(crate) fn update(&self, share: f64) {
        if self.shown && self.started.elapsed() > Duration::from_secs(1) {
            self.bar
                .set_draw_target(indicatif::ProgressDrawTarget::stderr());
        }
        self.bar
            .set_position((share.clamp(0.0, 1.0) * 1000.0) as u64);
    }

    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
    }
}
