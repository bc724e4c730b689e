//! What tests of several packages share; the end-to-end tests themselves start in `tests/main.rs`.

pub mod emulated;
