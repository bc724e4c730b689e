//! Training data: one long list of tokens, and which sequences of it form which batch.

use std::path::Path;

use dtensor::philox::Stream;
use sha2::{Digest, Sha256};

use crate::error::ExecutorError;

/// Tokens to train on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dataset {
    tokens: Vec<u32>,
}

/// The format of a data file, given by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// `.txt`: one token per byte, numbered by the distinct bytes of the file.
    Text,
    /// `.bin` and `.u16.bin`: little-endian 16-bit tokens.
    Words16,
    /// `.u32.bin`: little-endian 32-bit tokens.
    Words32,
}

/// Largest vocabulary that 16-bit tokens can hold.
const MOST_OF_16_BITS: u64 = 1 << 16;
/// Largest vocabulary of byte tokens.
const MOST_OF_BYTES: u64 = 1 << 8;
/// Least number of words for which it cannot be chance that every second one is tiny.
const TELLING: usize = 32;
/// Upper halves of 32-bit tokens are at most this, if the vocabulary is at most 262,144. A file of
/// 16-bit tokens has larger numbers there, which distinguishes the two.
const UPPER_HALF: u16 = 3;

impl Dataset {
    /// Reads text (`.txt`: one token per byte, numbered by the distinct bytes of the file) or little-endian
    /// tokens of 16 bits (`.bin`, `.u16.bin`) or 32 bits (`.u32.bin`).
    ///
    /// # Errors
    /// When the file cannot be read, its name has no known suffix, its tokens' width or numbering does not suit the
    /// model's vocabulary, it is too short for one sequence, or it has tokens beyond the vocabulary.
    pub fn read(path: &Path, vocab: u64, seq_len: u64) -> Result<Self, ExecutorError> {
        let wrong = |reason: String| ExecutorError::Data {
            path: path.display().to_string(),
            reason,
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let metadata = std::fs::metadata(path).map_err(|e| wrong(e.to_string()))?;
        if !metadata.is_file() {
            return Err(wrong("is no file".to_owned()));
        }
        let format = Format::of(&name).map_err(wrong)?;
        let bytes = std::fs::read(path).map_err(|e| wrong(e.to_string()))?;
        let tokens = format.tokens(&bytes, vocab).map_err(wrong)?;
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

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// First token of a sequence of the global batch: drawn by the sequence's number, so that every layout and every
    /// resumed run reads the same data.
    #[must_use]
    pub fn start(&self, seed: u64, sequence: u64, seq_len: u64) -> usize {
        let words = Stream::new(seed, 0, "data").block(sequence);
        let wide = u64::from(words[0]) << 32 | u64::from(words[1]);
        (wide % (self.tokens.len() as u64 - seq_len)) as usize
    }

    /// The token at an index.
    #[must_use]
    pub fn token(&self, at: usize) -> u32 {
        self.tokens[at]
    }
}

impl Format {
    fn of(name: &str) -> Result<Self, String> {
        let name = name.to_ascii_lowercase();
        match name.rsplit_once('.') {
            Some((_, "txt")) => Ok(Self::Text),
            Some((stem, "bin")) if stem.ends_with(".u32") => Ok(Self::Words32),
            Some((_, "bin")) => Ok(Self::Words16),
            _ => Err(
                "its name says no format of training data: expected .txt (text), .bin or .u16.bin (16-bit tokens) or .u32.bin (32-bit tokens)"
                    .to_owned(),
            ),
        }
    }

    /// Converts a file's bytes to tokens for a model with vocabulary `vocab`.
    fn tokens(self, bytes: &[u8], vocab: u64) -> Result<Vec<u32>, String> {
        let tokens: Vec<u32> = match self {
            Self::Text => {
                if vocab > MOST_OF_BYTES {
                    return Err(format!(
                        "text is numbered by its distinct bytes, and the model has a vocabulary of {vocab}: expected the tokens of its tokenizer, in a file named {}",
                        named_for(vocab)
                    ));
                }
                characters(bytes)
            }
            Self::Words16 => words_16(bytes, vocab)?,
            Self::Words32 => whole(bytes, 4)?
                .chunks_exact(4)
                .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        };
        let beyond = |&(_, &token): &(usize, &u32)| u64::from(token) >= vocab;
        let Some((at, token)) = tokens.iter().enumerate().find(beyond) else {
            return Ok(tokens);
        };
        let hint = match self {
            Self::Words32 => "; a file of 16-bit tokens is named .u16.bin",
            _ => "",
        };
        Err(format!(
            "token {token} at position {at} is beyond the model's vocabulary of {vocab}{hint}"
        ))
    }
}

fn named_for(vocab: u64) -> &'static str {
    if vocab > MOST_OF_16_BITS {
        ".u32.bin (32-bit tokens)"
    } else {
        ".u16.bin (16-bit tokens) or .u32.bin (32-bit tokens)"
    }
}

fn whole(bytes: &[u8], width: usize) -> Result<&[u8], String> {
    if bytes.len().is_multiple_of(width) {
        return Ok(bytes);
    }
    Err(format!(
        "{} bytes are not a whole number of {}-bit tokens",
        bytes.len(),
        8 * width
    ))
}

fn words_16(bytes: &[u8], vocab: u64) -> Result<Vec<u32>, String> {
    if vocab > MOST_OF_16_BITS {
        return Err(format!(
            "is of 16-bit tokens, and the model's vocabulary of {vocab} needs more: expected 32-bit tokens, in a file named .u32.bin"
        ));
    }
    let words: Vec<u16> = whole(bytes, 2)?
        .chunks_exact(2)
        .map(|b| u16::from_le_bytes([b[0], b[1]]))
        .collect();
    let most = |first: usize| words.iter().skip(first).step_by(2).max().copied();
    let (lower, upper) = (most(0).unwrap_or(0), most(1).unwrap_or(0));
    if words.len() >= TELLING && lower.min(upper) <= UPPER_HALF && lower.max(upper) > UPPER_HALF {
        return Err(format!(
            "every second 16-bit token is {} or less, as in a file of 32-bit tokens: name such a file .u32.bin",
            lower.min(upper)
        ));
    }
    Ok(words.into_iter().map(u32::from).collect())
}

/// One token per byte of the text, numbered by the distinct bytes in ascending order.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, bytes: &[u8], vocab: u64) -> Result<Vec<u32>, String> {
        Format::of(name)?.tokens(bytes, vocab)
    }

    fn words<const N: usize>(tokens: &[u32]) -> Vec<u8> {
        let bytes = tokens.iter().map(|token| token.to_le_bytes());
        bytes.flat_map(|bytes| bytes[..N].to_vec()).collect()
    }

    /// Tokens spread over a vocabulary.
    fn tokens(vocab: u32) -> Vec<u32> {
        (0..100u32)
            .map(|i| i.wrapping_mul(2_654_435_761) % vocab)
            .collect()
    }

    #[test]
    fn tokens_of_either_width_read_as_written() {
        for (vocab, names) in [
            (128, &["a.bin", "a.u16.bin", "A.U16.BIN", "u32.bin"][..]),
            (65_536, &["a.bin", "a.u16.bin"]),
        ] {
            for name in names {
                let read = read(name, &words::<2>(&tokens(vocab)), u64::from(vocab));
                assert_eq!(read, Ok(tokens(vocab)), "{name} {vocab}");
            }
        }
        for vocab in [128, 50_257, 128_256, 262_144] {
            let read = read("a.u32.bin", &words::<4>(&tokens(vocab)), u64::from(vocab));
            assert_eq!(read, Ok(tokens(vocab)), "{vocab}");
        }
    }

    #[test]
    fn text_is_numbered_by_its_distinct_bytes() {
        assert_eq!(read("a.txt", b"hello", 4), Ok(vec![1, 0, 2, 2, 3]));
        assert_eq!(read("a.txt", b"hello", 256), Ok(vec![1, 0, 2, 2, 3]));
        let every: Vec<u8> = (0..=255).collect();
        assert_eq!(read("a.txt", &every, 256), Ok((0..256).collect()));
    }

    #[test]
    fn what_cannot_be_the_models_tokens_is_refused() {
        let small = tokens(128);
        let (narrow, wide) = (words::<2>(&small), words::<4>(&small));
        #[rustfmt::skip]
        let cases: &[(&str, &[u8], u64, &str)] = &[
            ("a.bin", &wide, 128, "as in a file of 32-bit tokens: name such a file .u32.bin"),
            ("a.u16.bin", &wide, 50_257, "every second 16-bit token is 0 or less"),
            ("a.bin", &words::<4>(&tokens(128_256)), 65_536, "every second 16-bit token is 1 or less"),
            ("a.u32.bin", &narrow, 50_257, "a file of 16-bit tokens is named .u16.bin"),
            ("a.bin", &narrow, 128_256, "the model's vocabulary of 128256 needs more"),
            ("a.bin", &narrow[..7], 128, "7 bytes are not a whole number of 16-bit"),
            ("a.u32.bin", &wide[..6], 128, "6 bytes are not a whole number of 32-bit"),
            ("a.bin", &narrow, 5, "is beyond the model's vocabulary of 5"),
            ("a.txt", b"hello", 3, "is beyond the model's vocabulary of 3"),
            ("a.txt", b"hello", 257, "in a file named .u16.bin (16-bit tokens) or .u32.bin"),
            ("a.txt", b"hello", 50_257, "numbered by its distinct bytes"),
            ("a.txt", b"hello", 128_256, "in a file named .u32.bin"),
            ("a.jsonl", b"{}", 128, "expected .txt (text), .bin or .u16.bin"),
            ("a.npy", &narrow, 128, "its name says no format"),
            ("tokens", &narrow, 128, "its name says no format"),
        ];
        for (name, bytes, vocab, said) in cases {
            let error = read(name, bytes, *vocab).expect_err(name);
            assert!(error.contains(said), "{name} {vocab}: {error}");
        }
    }

    #[test]
    fn a_folder_or_a_device_is_no_data() {
        for path in ["/", "/dev/zero"] {
            let path = Path::new(path);
            if path.exists() {
                let error = Dataset::read(path, 128, 8).expect_err("refused");
                assert!(error.to_string().contains("is no file"), "{error}");
            }
        }
    }
}
