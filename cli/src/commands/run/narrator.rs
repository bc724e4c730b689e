//! Says how training goes: a bar on a terminal, lines elsewhere, a log for programs.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Mutex;

use executor::{Observer, StepReport};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::error::CliError;
use crate::output;

/// Says on stderr, and in a log, how training goes.
pub(crate) struct Narrator {
    quiet: bool,
    steps: u64,
    tokens: f64,
    /// Model FLOPs of a step over the machine's peak, seconds: where a profile says.
    at_peak: Option<f64>,
    bar: Option<ProgressBar>,
    log: Option<Mutex<File>>,
}

/// A line of the log.
#[derive(Serialize)]
struct Line {
    step: u64,
    loss: f64,
    gradient_norm: f64,
    step_time_s: f64,
    tokens_per_s: f64,
    mfu: Option<f64>,
    peak_memory_bytes: Option<u64>,
}

impl Narrator {
    /// Of a run of `steps` steps of `tokens` tokens.
    pub(crate) fn new(
        quiet: bool,
        (steps, tokens): (u64, u64),
        at_peak: Option<f64>,
        log: Option<&Path>,
    ) -> Result<Self, CliError> {
        let log = log.map(|path| {
            File::create(path)
                .map(Mutex::new)
                .map_err(|e| CliError::Write {
                    path: path.display().to_string(),
                    reason: e.to_string(),
                })
        });
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("[{bar:30}] {pos}/{len}  {msg}  {eta} left");
            let bar = ProgressBar::new(steps);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Ok(Self {
            quiet,
            steps,
            tokens: tokens as f64,
            at_peak,
            bar,
            log: log.transpose()?,
        })
    }

    fn line(&self, report: &StepReport) -> Line {
        Line {
            step: report.step,
            loss: report.loss,
            gradient_norm: report.gradient_norm,
            step_time_s: report.seconds,
            tokens_per_s: self.tokens / report.seconds,
            mfu: self.at_peak.map(|seconds| seconds / report.seconds),
            peak_memory_bytes: report.peak_memory,
        }
    }
}

impl Observer for Narrator {
    fn step(&self, report: &StepReport) {
        let line = self.line(report);
        if let Some(log) = &self.log {
            let text = serde_json::to_string(&line).unwrap_or_default();
            let mut log = log
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            // A full disk must not stop training; the log ends where it was full.
            let _ = writeln!(log, "{text}");
        }
        let mfu = line
            .mfu
            .map_or_else(String::new, |mfu| format!("  MFU {:.1}%", mfu * 100.0));
        let text = format!(
            "loss {:.4}  {:.0} tokens/s{mfu}",
            line.loss, line.tokens_per_s
        );
        if let Some(bar) = &self.bar {
            bar.set_position(report.step + 1);
            bar.set_message(text);
            if report.step + 1 == self.steps {
                bar.finish_and_clear();
            }
            return;
        }
        let every = (self.steps / 20).max(1);
        if report.step.is_multiple_of(every) || report.step + 1 == self.steps {
            output::note(self.quiet, &format!("step {:>6}  {text}", report.step));
        }
    }

    fn saved(&self, path: &Path) {
        let text = format!("saved {}", path.display());
        match &self.bar {
            Some(bar) => bar.println(text),
            None => output::note(self.quiet, &text),
        }
    }
}
