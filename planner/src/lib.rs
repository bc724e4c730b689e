//! Chooses a plan: the finite space of strategies, the exact pruned search over it, and explanations.
//! No formula lives here; costs and bounds come from `costmodel`.

pub mod constraints;
mod error;
pub mod explain;
pub mod legal_values;
pub mod search;
pub mod size;
pub mod space;

pub use constraints::Constraints;
pub use error::PlannerError;
pub use search::{Objective, SearchOptions, search};
pub use space::SearchSpace;
