//! Inputs of targets that read text.

use crate::outcome::Outcome;

/// An input as text.
pub(super) fn text(input: &[u8]) -> Result<&str, Outcome> {
    std::str::from_utf8(input).map_err(|_| Outcome::malformed(&"not UTF-8 text".to_owned()))
}
