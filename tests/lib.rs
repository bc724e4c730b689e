//! Home of the end-to-end tests; see `tests/main.rs`.
