//! Parser of launch scripts and argument files, for the part of shell syntax that they use: comments, quotes,
//! continuation lines, assignments, arrays, `$VAR`, `${VAR:-default}`, `"${ARRAY[@]}"`, `$((…))`,
//! `source FILE`, `bash -c` with a quoted script of several lines, loops, and `#SBATCH`. `if`, `case`, `&&` and `||` are followed where
//! they depend on values that the script itself sets.
//!
//! No command is executed: `$(command)` stays text, and the caller decides conditions that depend on it.

mod arithmetic;
mod batch;
mod cases;
mod condition;
mod expand;
mod lexer;
mod run;
mod script;
mod written;

pub use self::batch::Job;
pub use self::script::{Assumed, Script, Undecided, Word};

use self::run::{Around, run};
use super::error::SyntaxError;

/// Reads a script. `include` returns the text of a sourced file by its base name, if it exists; `assumed` chooses at
/// conditions that the script does not decide.
///
/// # Errors
/// An unclosed quote or bracket, too deep nesting, or too much expanded text, with its line.
pub fn parse(
    text: &str,
    path: &str,
    include: &dyn Fn(&str) -> Option<String>,
    assumed: &Assumed,
) -> Result<Script, SyntaxError> {
    let mut script = Script::of_job(Job::of(text));
    run(text, (path, 1), Around { include, assumed }, &mut script, 0)?;
    Ok(script)
}
