//! Kinds of files that the tool writes, and how each is recognised.

use strum::VariantArray;

use std::fmt;

/// The kind of a file. Unless forced, a write replaces only files of its kind or empty ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, VariantArray)]
pub enum Kind {
    /// A plan (YAML).
    Plan,
    /// A report, of a plan or of a run (HTML).
    Report,
    /// A timeline (Chrome trace events, JSON).
    Trace,
    /// Measurements of a machine (YAML).
    Profile,
    /// A cluster that extends another (YAML).
    Cluster,
    /// Steps of a training run, a line each (JSON).
    RunLog,
    /// Weights (safetensors).
    Weights,
    /// Published runs, a line each (JSON).
    PublishedRuns,
    /// Baseline of median errors on published runs, by group (CSV).
    Baseline,
    /// Residuals of published runs (CSV).
    Residuals,
    /// The accuracy report (Markdown).
    AccuracyReport,
    /// A plot (SVG).
    Plot,
    /// A model's `config.json`.
    ModelConfig,
    /// A file of an export for a training system, in its own format.
    Exported,
}

impl Kind {
    /// Every kind of file.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Whether a file that begins with `head` is of this kind. An empty file counts as any: replacing it loses nothing.
    #[must_use]
    pub fn recognises(self, head: &[u8]) -> bool {
        if head.is_empty() {
            return true;
        }
        if self == Self::Weights {
            return is_safetensors(head);
        }
        let text = String::from_utf8_lossy(head);
        let begins = |start: &str| text.starts_with(start);
        let has_keys = |keys: &[&str]| {
            let is = |key: &&str| text.lines().any(|line| line.starts_with(*key));
            keys.iter().all(is)
        };
        match self {
            Self::Plan => has_keys(&["schema_version:", "strategy:"]),
            Self::Profile => has_keys(&["schema_version:", "machine:", "measured:"]),
            Self::Cluster => has_keys(&["schema_version:", "extends:"]),
            Self::Report => begins("<!DOCTYPE html>") && before(&text, "<style>", "vescale-plan"),
            Self::Trace => begins("{") && text.contains("\"traceEvents\""),
            Self::RunLog => begins("{\"step\":"),
            Self::PublishedRuns => begins("{\"id\":"),
            Self::Baseline => begins("# Medians of absolute relative errors"),
            Self::Residuals => begins("# ln(measured / predicted)"),
            Self::AccuracyReport => begins("# Accuracy\n"),
            Self::Plot => begins("<svg "),
            Self::ModelConfig => begins("{") && text.contains("\"model_type\""),
            // Slurm's options stand before it.
            Self::Exported => text.lines().take(10).any(is_heading),
            Self::Weights => false,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plan => "a plan",
            Self::Report => "a report of this tool",
            Self::Trace => "a trace",
            Self::Profile => "a profile",
            Self::Cluster => "a cluster file that extends another",
            Self::RunLog => "a log of a run",
            Self::Weights => "a safetensors file",
            Self::PublishedRuns => "a file of published runs",
            Self::Baseline => "a baseline of errors",
            Self::Residuals => "a table of residuals",
            Self::AccuracyReport => "an accuracy report",
            Self::Plot => "a plot (SVG)",
            Self::ModelConfig => "a model's config.json",
            Self::Exported => "an export of this tool",
        })
    }
}

/// Whether a line is the comment that begins an exported file.
fn is_heading(line: &str) -> bool {
    line.trim_start_matches(['#', '"', ' '])
        .starts_with("vescale-plan ")
}

/// Whether `word` occurs in `text` before the first `end`.
fn before(text: &str, end: &str, word: &str) -> bool {
    text.split(end).next().is_some_and(|t| t.contains(word))
}

/// Whether a file begins as safetensors does: the header's length in eight bytes, then the header, a JSON object.
fn is_safetensors(head: &[u8]) -> bool {
    head.len() > 9 && head[6..8] == [0, 0] && head[8] == b'{'
}
