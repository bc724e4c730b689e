//! Output for people: the self-contained HTML report, terminal tables and Perfetto traces.
//!
//! Nothing here computes a cost. Every function turns values of `plans` into text; the caller
//! prints or writes it.

pub mod format;
pub mod groups;
pub mod html;
pub mod input;
pub mod lines;
pub mod perfetto;
pub mod present;
pub mod terminal;
pub mod words;

pub use input::{Alternative, Budget, InputFact, Launch, Point, ReportInput};
