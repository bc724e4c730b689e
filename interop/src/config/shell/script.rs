//! A shell script as it was read: the words of its commands and its variables, with a bound on the text that
//! variables expand to.

use std::collections::BTreeMap;

use crate::config::error::SyntaxError;

/// More text than this comes from variables that double themselves.
pub(super) const MAX_TEXT: usize = 1 << 22;

/// A word with the line it began on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    /// Text, expanded.
    pub text: String,
    /// Line, from 1.
    pub line: usize,
}

/// A script's words, command by command, and the variables it sets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// Words of each command.
    pub commands: Vec<Vec<Word>>,
    /// Variables and arrays; an ordinary variable has one word.
    pub variables: BTreeMap<String, Vec<Word>>,
    /// Bytes of text made so far.
    made: usize,
}

impl Script {
    /// Counts what an expansion made; too much is an error.
    pub(super) fn made(
        &mut self,
        words: Option<Vec<Word>>,
        path: &str,
        line: usize,
    ) -> Result<Vec<Word>, SyntaxError> {
        let length = |words: &Vec<Word>| words.iter().map(|w| w.text.len() + 1).sum::<usize>();
        self.made += words.as_ref().map_or(MAX_TEXT, length).max(1);
        match words {
            Some(words) if self.made <= 4 * MAX_TEXT => Ok(words),
            _ => {
                let message = "the script's variables expand to too much text";
                Err(SyntaxError::new(path, line, message))
            }
        }
    }
}
