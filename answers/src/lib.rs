//! Answers questions: inputs with their defaults, the search, and the result as text, JSON, plan
//! file and report, with the next commands. Also explains, compares and reports on plans. The
//! command line, the playground and Python share this code, so it has no clocks or threads, and
//! reads files only through `catalog`.

use catalog::Mistake;
use serde::Serialize;

pub mod arrangements;
pub mod budget;
pub mod comparison;
mod error;
pub mod explanation;
pub mod failures;
pub mod file_names;
pub mod find;
pub mod going_on;
pub mod inputs;
pub mod launch;
pub mod losses;
pub mod next_change;
pub mod opened;
pub mod origins;
mod other_runtimes;
pub mod plan;
pub mod planned;
pub mod present;
pub mod report;
pub mod search;
pub mod together;
pub mod values;

pub use budget::{Budget, Training};
pub use error::AnswerError;
pub use find::{Answer, Now, Search};
pub use going_on::GoingOn;
pub use inputs::{Inputs, InputsJson, Question};
pub use losses::{Left, Loss};
pub use opened::Opened;
pub use planned::Planned;
pub use search::Found;
pub use together::Together;

/// Version of the JSON documents.
pub const SCHEMA_VERSION: u32 = 1;

/// A document as JSON text.
///
/// # Errors
/// When a key of the document is no text.
pub fn json<T: Serialize>(document: &T) -> Result<String, Mistake> {
    match serde_json::to_string_pretty(document) {
        Ok(text) => Ok(text + "\n"),
        Err(error) => Err(Mistake::new(format!("cannot write JSON: {error}"))),
    }
}
