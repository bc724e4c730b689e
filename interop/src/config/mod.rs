//! Configuration files of training systems as one tree with line numbers: what exporters write,
//! importers read and `export --check` judges, whatever the syntax.

pub mod definitions;
mod error;
pub mod escape;
mod functions;
pub mod json;
mod node;
pub mod python;
pub mod shell;
pub mod toml;
pub mod write;
pub mod yaml;

pub use self::error::{SyntaxError, place};
pub(crate) use self::node::below;
pub use self::node::{Node, Value};
