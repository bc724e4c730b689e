//! Printing: answers on stdout, notes on stderr. The only module that touches either.
//!
//! A stream may be closed or full. That never ends the program early: files are still written. Lost output for stdout or for
//! the log of a run makes the exit code 1; there is no message if the reader closed its end of a pipe, as `head` does. A stdout that was
//! closed before the program started counts as `/dev/null`.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use catalog::{Mistake, names};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use reports::lines::{Shade, Style};
use serde::Serialize;
use terminal_size::{Height, Width, terminal_size_of};

use crate::args::ColorArg;
use crate::error::CliError;

/// Set once output for stdout, or for the log of a run, was lost.
static LOST: AtomicBool = AtomicBool::new(false);

/// Prints one JSON document.
pub(crate) fn json<T: Serialize>(document: &T) -> Result<(), CliError> {
    self::document(&answers::json(document)?);
    Ok(())
}

/// Prints a document for programs unchanged.
pub(crate) fn document(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes());
    let Err(error) = written.and_then(|()| stdout.flush()) else {
        return;
    };
    // Work goes on, because files may still be written; the exit code reports the loss. There is no message for a
    // closed pipe, whose reader knows what it left unread.
    let first = !LOST.swap(true, Ordering::Relaxed);
    if first && error.kind() != std::io::ErrorKind::BrokenPipe {
        self::error(&format!("cannot write to stdout: {error}"));
    }
}

/// Prints text for people.
pub(crate) fn print(text: &str) {
    document(&visible(text, style().colour));
}

/// Prints a note to stderr, unless quiet.
pub(crate) fn note(quiet: bool, text: &str) {
    if !quiet {
        say(text);
    }
}

/// Prints a warning to stderr, even when notes are off.
pub(crate) fn warning(text: &str) {
    say_after("warning", Shade::Careful, text);
}

/// Prints an error to stderr.
pub(crate) fn error(text: &str) {
    say_after("error", Shade::Bad, text);
}

/// Reports that output was lost, while the command goes on.
pub(crate) fn lost(text: &str) {
    LOST.store(true, Ordering::Relaxed);
    error(text);
}

/// Prints a mistake in the input to stderr, each part on a line of its own.
pub(crate) fn mistake(mistake: &Mistake) {
    let parts = [
        ("where", &mistake.place),
        ("expected", &mistake.expected),
        ("nearest", &mistake.nearest),
        ("example", &mistake.example),
    ];
    let said = parts.into_iter().filter_map(|(name, part)| {
        let part = part.as_ref()?;
        Some(format!("\n  {name:<8}  {part}"))
    });
    error(&format!("{}{}", mistake.what, said.collect::<String>()));
}

fn say_after(word: &str, shade: Shade, text: &str) {
    let style = Style {
        width: 0,
        colour: coloured(std::io::stderr().is_terminal()),
    };
    say(&format!("{}: {text}", style.paint(shade, word)));
}

/// Prints a message of one or several lines. Lines after the first are indented, so that no text from outside looks
/// like a message of its own.
fn say(text: &str) {
    let mut lines = visible(text, coloured(std::io::stderr().is_terminal()));
    lines = lines
        .trim_end()
        .replace("\n", "\n  ")
        .replace("\n    ", "\n  ");
    let lines = match messages_width() {
        Some(width) => {
            let style = Style {
                width,
                colour: false,
            };
            lines.lines().map(|line| style.fitted(line)).collect()
        }
        None => lines + "\n",
    };
    // If stderr cannot be written either, only the exit code tells.
    let _ = std::io::stderr().lock().write_all(lines.as_bytes());
}

/// The final exit code: success only if nothing was lost.
pub(crate) fn ended(code: ExitCode) -> ExitCode {
    if code == ExitCode::SUCCESS && LOST.load(Ordering::Relaxed) {
        return ExitCode::FAILURE;
    }
    code
}

/// Text for a terminal: control characters are escaped, except newlines, tabs and, when `coloured`, sequences that only
/// set colours.
fn visible(text: &str, coloured: bool) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if coloured && let Some(length) = colour_sequence(rest) {
            shown.push_str(&rest[..length]);
            rest = &rest[length..];
            continue;
        }
        if names::is_control(c) && !matches!(c, '\n' | '\t') {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
        rest = &rest[c.len_utf8()..];
    }
    shown
}

/// Length of the escape sequence at the start of `text` if it sets a colour or weight.
fn colour_sequence(text: &str) -> Option<usize> {
    let inside = text.strip_prefix("\u{1b}[")?;
    let end = inside.find(|c: char| !c.is_ascii_digit() && c != ';')?;
    inside[end..].starts_with('m').then_some(end + 3)
}

/// When to colour; set once, before anything is printed.
static COLOR: OnceLock<ColorArg> = OnceLock::new();

/// Settles when to colour, for everything printed from now on.
pub(crate) fn set_color(when: ColorArg) {
    let _ = COLOR.set(when);
}

/// Whether a stream is coloured: as `--color` says; if that is `auto`, only on a terminal without NO_COLOR.
fn coloured(terminal: bool) -> bool {
    match COLOR.get() {
        Some(ColorArg::Always) => true,
        Some(ColorArg::Never) => false,
        Some(ColorArg::Auto) | None => {
            terminal && std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty())
        }
    }
}

/// Characters on a line where neither COLUMNS nor a terminal gives a width.
const USUAL_WIDTH: usize = 100;

/// Characters on a line: as COLUMNS says, else the width of a terminal of this size.
fn width(terminal: Option<(Width, Height)>) -> Option<usize> {
    let said = std::env::var("COLUMNS").ok().and_then(|c| c.parse().ok());
    let width = said.or_else(|| terminal.map(|(width, _)| usize::from(width.0)));
    width.filter(|w| *w > 0)
}

/// Characters on a line of messages; `None` where no person reads them, so that programs find each on one line.
fn messages_width() -> Option<usize> {
    let stderr = std::io::stderr();
    let terminal = stderr.is_terminal();
    terminal.then(|| width(terminal_size_of(stderr))).flatten()
}

/// How text is laid out on stdout: as wide as COLUMNS says, else as the terminal is.
pub(crate) fn style() -> Style {
    Style {
        width: width(terminal_size_of(std::io::stdout())).unwrap_or(USUAL_WIDTH),
        colour: coloured(std::io::stdout().is_terminal()),
    }
}

/// [`style`] for lists that programs search line by line: lines do not wrap unless COLUMNS or a
/// terminal gives a width.
pub(crate) fn list_style() -> Style {
    let known = std::env::var_os("COLUMNS").is_some() || std::io::stdout().is_terminal();
    Style {
        width: if known {
            style().width
        } else {
            usize::from(u16::MAX)
        },
        ..style()
    }
}

/// Interval between updates of a progress bar.
const TICK: Duration = Duration::from_millis(150);

/// A progress bar on stderr that moves while work goes on, even where the share done is unknown.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    pub(crate) fn new(quiet: bool, what: &str) -> Self {
        let bar = ProgressBar::hidden();
        bar.set_length(1000);
        let style = ProgressStyle::with_template("{spinner} {msg} [{bar:30}] {percent}% {elapsed}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style);
        bar.set_message(what.to_owned());
        if !quiet && std::io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::stderr());
            bar.enable_steady_tick(TICK);
        }
        Self(bar)
    }

    pub(crate) fn update(&self, share: f64) {
        self.0.set_position((share.clamp(0.0, 1.0) * 1000.0) as u64);
    }

    /// Does something that prints while the bar is out of the way.
    pub(crate) fn beside(&self, print: impl FnOnce()) {
        self.0.suspend(print);
    }

    pub(crate) fn finish(self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::visible;

    #[test]
    fn a_terminal_is_not_moved_by_what_is_shown() {
        for (text, plain, coloured) in [
            ("a\tb\nc é", "a\tb\nc é", "a\tb\nc é"),
            (
                "\u{1b}[1mbold\u{1b}[0m",
                "\\u{1b}[1mbold\\u{1b}[0m",
                "\u{1b}[1mbold\u{1b}[0m",
            ),
            ("\u{1b}[2J", "\\u{1b}[2J", "\\u{1b}[2J"),
            (
                "\u{1b}]0;title\u{7}",
                "\\u{1b}]0;title\\u{7}",
                "\\u{1b}]0;title\\u{7}",
            ),
            ("\u{1b}[", "\\u{1b}[", "\\u{1b}["),
            (
                "a\rb\u{9b}2J\u{202e}c",
                "a\\rb\\u{9b}2J\\u{202e}c",
                "a\\rb\\u{9b}2J\\u{202e}c",
            ),
        ] {
            assert_eq!(visible(text, false), plain);
            assert_eq!(visible(text, true), coloured);
        }
    }
}
