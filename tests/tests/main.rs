//! End-to-end tests.

mod executor;
