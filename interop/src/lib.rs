//! Configurations and logs of other training systems: exports a plan as a configuration, imports one as a strategy,
//! checks one against its system's schema, and reads step times and memory from logs.

pub mod check;
pub mod config;
pub mod export;
pub mod import;
pub mod training_log;
