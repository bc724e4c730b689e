//! What the sequences of a workload are made of: documents of different lengths, packed together or padded.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr, VariantArray};

use crate::lengths::Lengths;

/// How documents become sequences of equal length.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
#[derive(Display, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum Packing {
    /// Documents fill a sequence; a token attends to its own document alone (a block-diagonal mask).
    #[default]
    Within,
    /// Documents fill a sequence; a token attends to everything before it in the sequence.
    Across,
    /// A sequence holds one document; the rest is padding, which is computed like other tokens.
    Padded,
}

impl Packing {
    /// All ways to make sequences of documents.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Its name in `--packing`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

impl FromStr for Packing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::ALL.iter().find(|packing| packing.name() == text);
        named.copied().ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|packing| packing.name()).collect();
            let names = names.join(", ");
            format!("`{text}` is not a way of packing; known: {names}")
        })
    }
}

/// Documents of one length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OfLength {
    /// Tokens of a document.
    pub length: u64,
    /// Share of all tokens that are in documents of this length.
    pub tokens: f64,
}

/// The documents of a workload, and how they become sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct Documents {
    lengths: Lengths,
    packing: Packing,
    by_length: Vec<OfLength>,
    mean: f64,
}

/// A document does not fit in a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a document of {length} tokens is longer than a sequence of {seq_len}")]
pub struct DocumentTooLong {
    /// Tokens of the longest listed document, or mean tokens of a distribution.
    pub length: u64,
    /// Tokens of a sequence.
    pub seq_len: u64,
}

impl Documents {
    /// Documents of these lengths in sequences of `seq_len` tokens. A log-normal distribution has no longest document:
    /// those longer than a sequence are cut to it.
    ///
    /// # Errors
    /// When a document that is listed, or the mean of a distribution, is longer than a sequence.
    pub fn new(lengths: Lengths, packing: Packing, seq_len: u64) -> Result<Self, DocumentTooLong> {
        let length = lengths.longest();
        if length > seq_len {
            return Err(DocumentTooLong { length, seq_len });
        }
        let shares = lengths.shares(seq_len);
        let tokens = |&(length, share): &(u64, f64)| length as f64 * share;
        let mean: f64 = shares.iter().map(tokens).sum();
        let of_length = |pair: &(u64, f64)| OfLength {
            length: pair.0,
            tokens: tokens(pair) / mean,
        };
        Ok(Self {
            by_length: shares.iter().map(of_length).collect(),
            lengths,
            packing,
            mean,
        })
    }

    /// Document lengths, as they were given.
    #[must_use]
    pub fn lengths(&self) -> &Lengths {
        &self.lengths
    }

    /// How documents become sequences.
    #[must_use]
    pub fn packing(&self) -> Packing {
        self.packing
    }

    /// Every length, ascending, with its share of the tokens. The shares add up to 1.
    #[must_use]
    pub fn by_length(&self) -> &[OfLength] {
        &self.by_length
    }

    /// Mean number of tokens of a document, after those longer than a sequence are cut.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.mean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(lengths: &str, seq_len: u64) -> Result<Documents, DocumentTooLong> {
        Documents::new(lengths.parse().expect(lengths), Packing::Within, seq_len)
    }

    #[test]
    fn tokens_are_shared_by_length_times_number() {
        let of = documents("1k:0.75,3k:0.25", 4096).expect("documents");
        assert_eq!(of.mean(), 1536.0);
        let shares: Vec<f64> = of.by_length().iter().map(|of| of.tokens).collect();
        assert_eq!(shares, [0.5, 0.5]);
        let alone = documents("4k:1", 4096).expect("documents");
        assert_eq!(alone.by_length()[0].tokens.to_bits(), 1.0f64.to_bits());
    }

    #[test]
    fn documents_longer_than_a_sequence_are_refused_or_cut() {
        let wrong = documents("512:0.5,8k:0.5", 4096).expect_err("too long");
        assert_eq!(
            wrong.to_string(),
            "a document of 8192 tokens is longer than a sequence of 4096"
        );
        assert!(documents("lognormal:mean=8k,sigma=1", 4096).is_err());
        let cut = documents("lognormal:mean=2k,sigma=1", 4096).expect("documents");
        assert_eq!(cut.by_length().last().map(|of| of.length), Some(4096));
        assert!(cut.mean() < 2048.0);
    }
}
