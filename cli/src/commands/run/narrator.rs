//! Reports the progress of training: a bar on a terminal, lines elsewhere, a log for programs.

use std::fs::File;
use std::io::{IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use catalog::files::{self, FileError, Kind, Replace};
use executor::{Observer, StepReport};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::args::RunArgs;
use crate::error::CliError;
use crate::output;

/// Reports progress on stderr and in a log.
pub(crate) struct Narrator {
    quiet: bool,
    steps: u64,
    tokens: f64,
    /// Seconds that a step's model FLOPs take at the machine's peak, if a profile gives it.
    at_peak: Option<f64>,
    bar: Option<ProgressBar>,
    log: Option<Log>,
}

/// The file of `--log`, one line per step. A new run makes or empties it at its first step, so that
/// a run refused earlier leaves and loses nothing. A resumed run appends, and steps after its
/// checkpoint get a second line: the later line is the valid one.
pub(crate) struct Log {
    path: PathBuf,
    replace: Replace,
    resumed: bool,
    lines: Mutex<Lines>,
}

/// Where the next line of a log goes.
enum Lines {
    /// To a file that is not there yet.
    Unopened,
    /// To this open file; this run has written nothing yet.
    Opened(File),
    /// To this open file; this run has written to it.
    Begun(File),
    /// Nowhere: a line could not be written, as on a full disk, and the log ends there.
    Ended,
}

impl Log {
    /// Checks that the log of `--log` can be written and returns it; `None` without the flag.
    pub(crate) fn check(args: &RunArgs) -> Result<Option<Self>, CliError> {
        let Some(path) = args.log.clone() else {
            return Ok(None);
        };
        let replace = Replace::forced(args.force);
        // An existing file is opened now: a pipe waits for its reader before training.
        let lines = if path.exists() {
            Lines::Opened(files::open_log(&path, Kind::RunLog, replace)?)
        } else {
            files::check_log(&path, Kind::RunLog, replace)?;
            Lines::Unopened
        };
        Ok(Some(Self {
            path,
            replace,
            resumed: args.resume.is_some(),
            lines: Mutex::new(lines),
        }))
    }

    fn add(&self, text: &str) {
        let lines = self.lines.lock();
        let mut lines = lines.unwrap_or_else(std::sync::PoisonError::into_inner);
        // A full disk must not stop training.
        if let Err(error) = self.write(&mut lines, text) {
            output::lost(&format!("the log ends early: {error}"));
        }
    }

    /// Writes a line; after an error the log has ended.
    fn write(&self, lines: &mut Lines, text: &str) -> Result<(), FileError> {
        let failed = |source| FileError::Io {
            path: files::shown(&self.path),
            source,
        };
        let mut file = match std::mem::replace(lines, Lines::Ended) {
            Lines::Unopened => files::open_log(&self.path, Kind::RunLog, self.replace)?,
            Lines::Opened(file) => self.begun(file).map_err(failed)?,
            Lines::Begun(file) => file,
            Lines::Ended => return Ok(()),
        };
        file.write_all(format!("{text}\n").as_bytes())
            .map_err(failed)?;
        *lines = Lines::Begun(file);
        Ok(())
    }

    /// Prepares the file for the first line: empties it, or, when the run is resumed, ends an unfinished last line.
    fn begun(&self, mut file: File) -> std::io::Result<File> {
        if !self.resumed {
            // A pipe or a device cannot be emptied.
            let _ = file.set_len(0);
        } else if !ends_a_line(&self.path)? {
            // The run before was killed while it wrote its last line.
            writeln!(file)?;
        }
        Ok(file)
    }
}

/// Whether a file is empty or ends with a newline; true for anything that is not a regular file.
fn ends_a_line(path: &Path) -> std::io::Result<bool> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() || metadata.len() == 0 {
        return Ok(true);
    }
    let mut file = File::open(path)?;
    file.seek(SeekFrom::End(-1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

/// One line of the log.
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
    /// For a run of `steps` steps of `tokens` tokens each.
    pub(crate) fn new(
        quiet: bool,
        (steps, tokens): (u64, u64),
        at_peak: Option<f64>,
        log: Option<Log>,
    ) -> Self {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("[{bar:30}] {pos}/{len}  {msg}  {eta} left");
            let bar = ProgressBar::new(steps);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Self {
            quiet,
            steps,
            tokens: tokens as f64,
            at_peak,
            bar,
            log,
        }
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
            log.add(&serde_json::to_string(&line).unwrap_or_default());
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
        let text = format!("saved {}", files::shown(path));
        match &self.bar {
            Some(bar) => bar.println(text),
            None => output::note(self.quiet, &text),
        }
    }
}
