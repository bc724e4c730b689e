//! Training data: one long list of tokens, and which sequences of it make which batch.

use std::path::Path;

use dtensor::philox::Stream;
use sha2::{Digest, Sha256};

use crate::error::ExecutorError;

/// Tokens to train on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dataset {
    tokens: Vec<u32>,
}

impl Dataset {
    /// Reads text (`.txt`: one token per byte, or per distinct character when `vocab` is smaller
    /// than 256) or pre-tokenised little-endian 16-bit tokens (`.bin`).
    ///
    /// # Errors
    /// When the file cannot be read, is too short for one sequence, or has tokens beyond the
    /// vocabulary.
    pub fn read(path: &Path, vocab: u64, seq_len: u64) -> Result<Self, ExecutorError> {
        let wrong = |reason: String| ExecutorError::Data {
            path: path.display().to_string(),
            reason,
        };
        let bytes = std::fs::read(path).map_err(|e| wrong(e.to_string()))?;
        let tokens: Vec<u32> = if path.extension().is_some_and(|e| e == "bin") {
            if bytes.len() % 2 != 0 {
                return Err(wrong(format!(
                    "{} bytes are not a whole number of 16-bit tokens",
                    bytes.len()
                )));
            }
            let pairs = bytes.chunks_exact(2);
            pairs
                .map(|b| u32::from(u16::from_le_bytes([b[0], b[1]])))
                .collect()
        } else {
            characters(&bytes)
        };
        if let Some((at, token)) = tokens
            .iter()
            .enumerate()
            .find(|&(_, &t)| u64::from(t) >= vocab)
        {
            return Err(wrong(format!(
                "token {token} at position {at} is beyond the model's vocabulary of {vocab}"
            )));
        }
        if tokens.len() as u64 <= seq_len {
            return Err(wrong(format!(
                "{} tokens are too few for one sequence of {seq_len} and its labels",
                tokens.len()
            )));
        }
        Ok(Self { tokens })
    }

    /// SHA-256 of the tokens.
    #[must_use]
    pub fn digest(&self) -> String {
        let digest = Sha256::digest(bytemuck::cast_slice::<u32, u8>(&self.tokens));
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Tokens in all.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Where a sequence of the global batch starts: drawn by the sequence's number, so that every
    /// layout and every resumed run reads the same.
    #[must_use]
    pub fn start(&self, seed: u64, sequence: u64, seq_len: u64) -> usize {
        let words = Stream::new(seed, 0, "data").block(sequence);
        let wide = u64::from(words[0]) << 32 | u64::from(words[1]);
        (wide % (self.tokens.len() as u64 - seq_len)) as usize
    }

    /// The token at a place.
    #[must_use]
    pub fn token(&self, at: usize) -> u32 {
        self.tokens[at]
    }
}

/// One token per distinct byte, in byte order.
fn characters(bytes: &[u8]) -> Vec<u32> {
    let mut seen = [false; 256];
    for &b in bytes {
        seen[usize::from(b)] = true;
    }
    let mut number = [0u32; 256];
    let present = (0..256).filter(|&byte| seen[byte]);
    for (token, byte) in (0u32..).zip(present) {
        number[byte] = token;
    }
    bytes.iter().map(|&b| number[usize::from(b)]).collect()
}
