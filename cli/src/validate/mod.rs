//! Published runs, predicted with nothing but their configuration.

pub(crate) mod mapping;
pub(crate) mod model;
pub(crate) mod score;
pub(crate) mod summary;
