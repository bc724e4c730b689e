//! What is fuzzed: a reader, the project's own files that it reads, and how those are changed.

use std::time::Duration;

use crate::outcome::Outcome;
use crate::rng::Rng;

/// Longest that one input may take, unless its target says otherwise.
pub const MOST_TIME: Duration = Duration::from_secs(2);

/// How far an accepted input is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Read, checked and resolved.
    Read,
    /// Then priced, predicted, exported and written back.
    Use,
}

/// A reader under test.
pub trait Target: Send + Sync {
    /// Name on the command line and of its folder in the corpus.
    fn name(&self) -> &'static str;

    /// Valid inputs to start from.
    fn seeds(&self) -> Vec<Vec<u8>>;

    /// A new input, made of inputs and words of the pool by random changes.
    fn mutate(&self, pool: &Pool, rng: &mut Rng) -> Vec<u8>;

    /// Feeds one input to the reader.
    fn run(&self, input: &[u8], depth: Depth) -> Outcome;

    /// Longest that one input may take.
    fn most_time(&self) -> Duration {
        MOST_TIME
    }

    /// One accepted input in so many is followed with [`Depth::Use`].
    fn use_every(&self) -> u64 {
        64
    }
}

/// Inputs to change: the target's own, and those that were the first of their kind.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    seeds: Vec<Vec<u8>>,
    found: Vec<Vec<u8>>,
    /// Words of the seeds, to put in place of others.
    pub words: Vec<String>,
}

/// Inputs kept beside the seeds at most.
const MOST_FOUND: usize = 512;
/// Larger inputs are not kept, so that speed stays.
const LARGEST: usize = 64 << 10;

impl Pool {
    /// The pool that a campaign starts with.
    #[must_use]
    pub fn of(seeds: Vec<Vec<u8>>) -> Self {
        let mut words: Vec<String> = Vec::new();
        for seed in &seeds {
            let text = String::from_utf8_lossy(seed);
            let parts = text.split(|c: char| !(c.is_ascii_alphanumeric() || "_-./+".contains(c)));
            words.extend(
                parts
                    .filter(|w| (2..40).contains(&w.len()))
                    .map(str::to_owned),
            );
        }
        words.sort();
        words.dedup();
        Self {
            seeds,
            found: Vec::new(),
            words,
        }
    }

    /// Adds an input that led to something new.
    pub fn keep(&mut self, input: Vec<u8>) {
        if self.found.len() < MOST_FOUND && input.len() <= LARGEST {
            self.found.push(input);
        }
    }

    /// An input to change.
    ///
    /// # Panics
    /// When the target has no seeds.
    #[must_use]
    pub fn pick(&self, rng: &mut Rng) -> &[u8] {
        if !self.found.is_empty() && rng.percent(30) {
            rng.pick::<Vec<u8>>(&self.found)
        } else {
            rng.pick::<Vec<u8>>(&self.seeds)
        }
    }

    /// A valid input, unchanged.
    ///
    /// # Panics
    /// When the target has no seeds.
    #[must_use]
    pub fn seed(&self, rng: &mut Rng) -> &[u8] {
        rng.pick::<Vec<u8>>(&self.seeds)
    }

    /// One of the words.
    #[must_use]
    pub fn word(&self, rng: &mut Rng) -> String {
        if self.words.is_empty() {
            return "x".to_owned();
        }
        rng.pick(&self.words).clone()
    }
}
