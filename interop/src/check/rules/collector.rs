//! Collects the findings of one document: helpers with which rules read values and report problems.

use crate::check::finding::{Finding, Severity};
use crate::config::Value;
use crate::import::Document;

/// A document and the findings about it so far.
pub(super) struct Rules<'a> {
    pub(super) doc: &'a Document,
    pub(super) findings: &'a mut Vec<Finding>,
}

impl Rules<'_> {
    pub(super) fn size(&self, key: &str) -> Option<u64> {
        // A value of the wrong type was reported before.
        self.doc.size(key).ok().flatten()
    }

    pub(super) fn size_or_one(&self, key: &str) -> u64 {
        self.size(key).unwrap_or(1).max(1)
    }

    pub(super) fn on(&self, key: &str) -> bool {
        self.doc.flag(key).ok().flatten() == Some(true)
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.doc
            .find(key)
            .is_some_and(|node| node.value != Value::Null)
    }

    pub(super) fn text(&self, key: &str) -> Option<&str> {
        self.doc.text(key).ok().flatten()
    }

    /// Reports an error for a key unless the condition holds.
    pub(super) fn require(&mut self, holds: bool, key: &str, message: impl Into<String>) {
        if !holds {
            self.find(Severity::Error, key, message.into());
        }
    }

    /// Reports an error for the key of a degree of parallelism unless it divides a number of heads.
    pub(super) fn divides(&mut self, degree: u64, key: &str, heads: u64, which: &str) {
        let message = format!("{degree} does not divide the {heads} {which} heads");
        self.require(heads.is_multiple_of(degree), key, message);
    }

    /// Reports a warning for a key unless the condition holds.
    pub(super) fn advise(&mut self, holds: bool, key: &str, message: impl Into<String>) {
        if !holds {
            self.find(Severity::Warning, key, message.into());
        }
    }

    /// Reports a problem of a key.
    pub(super) fn find(&mut self, severity: Severity, key: &str, message: String) {
        self.findings.push(Finding {
            severity,
            path: self.doc.path.clone(),
            line: self.doc.find(key).map_or(0, |node| node.line),
            key: key.to_owned(),
            message,
        });
    }
}

/// A saturating product, so that nonsensical sizes are reported as such.
pub(super) fn times(sizes: &[u64]) -> u64 {
    sizes.iter().fold(1, |all, &size| all.saturating_mul(size))
}
