//! Configurations and logs of other training systems: a plan exported as one, one imported as a strategy, one
//! checked against its system's schema, and the step times and losses of a log.

pub mod check;
pub mod config;
pub mod export;
pub mod import;
pub mod training_log;
