//! Prints what to do after an answer.

use answers::launch::Step;

use crate::args::OutputArgs;
use crate::output;

/// Prints the suggested commands unless notes are off (`-q`), and the meaning of abbreviations if asked for.
pub(crate) fn print(steps: &[Step], format: OutputArgs) {
    if !format.quiet {
        output::print(&reports::terminal::next(steps, output::style()));
    }
    terms(format);
}

/// Prints the meaning of abbreviations if asked for (`--explain-terms`).
pub(crate) fn terms(format: OutputArgs) {
    if format.explain_terms {
        output::print(&reports::terminal::terms(output::style()));
    }
}
