//! A shell script after parsing: the words of its commands and its variables, with a limit on the text that variables
//! expand to.

use std::collections::{BTreeMap, BTreeSet};

use super::batch::Job;
use crate::config::error::SyntaxError;

/// Largest expansion, in bytes; all expansions of a script may have four times as many.
pub(super) const MAX_TEXT: usize = 1 << 22;

/// A word with the line on which it begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    /// Text after expansion.
    pub text: String,
    /// Line in the script, from 1.
    pub line: usize,
}

impl Word {
    /// The words that blanks in it divide it into.
    pub(crate) fn split(&self) -> impl Iterator<Item = Self> {
        let line = self.line;
        let text = |part: &str| part.to_owned();
        let parts = self.text.split_whitespace().map(text);
        parts.map(move |text| Self { text, line })
    }
}

/// Identifies a condition of a script: the path of its file, and the index of one of its tokens.
pub type Condition = (String, usize);

/// Index of the branch to take at each condition that a script does not decide. A condition that is
/// missing here is taken as false; a `case` takes its `*`, or no branch if it has none.
pub type Assumed = BTreeMap<Condition, usize>;

/// A condition that the script does not decide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Undecided {
    /// Identifies the condition.
    pub condition: Condition,
    /// Its line in the file, from 1.
    pub line: usize,
    /// The condition as written, without quotes.
    pub text: String,
    /// A value in the condition that only a run of the script would show, such as `$1` or the output of a command. `None` if the
    /// condition is undecided for another reason; whether a file exists, for example, is no value.
    pub unknown: Option<String>,
    /// Its branches, in words.
    pub choices: Vec<String>,
    /// Which of `choices` was assumed to be taken, from 0.
    pub assumed: usize,
}

/// A script's commands, and the variables that it sets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// Words of each command, in order.
    pub commands: Vec<Vec<Word>>,
    /// Variables and arrays with their words; an ordinary variable has one word.
    pub variables: BTreeMap<String, Vec<Word>>,
    /// What the script asks of Slurm.
    pub job: Job,
    /// Conditions that the script does not decide, with what was assumed.
    pub undecided: Vec<Undecided>,
    /// Variables that change from one pass of a loop to the next.
    pub(super) varying: BTreeSet<String>,
    /// Bytes of expanded text so far.
    made: usize,
}

impl Script {
    /// A script before its first command, in the environment of a job of Slurm.
    pub(super) fn of_job(job: Job) -> Self {
        let variable = |(name, value): (&str, u64)| {
            let text = value.to_string();
            (name.to_owned(), vec![Word { text, line: 1 }])
        };
        Self {
            variables: job.variables().map(variable).collect(),
            job,
            ..Self::default()
        }
    }

    /// Counts the bytes of an expansion and returns its words; too many bytes are an error.
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
