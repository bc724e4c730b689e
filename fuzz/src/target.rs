//! Targets of fuzzing: a reader, the project's own files that it reads, and how these are changed.

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
pub struct Target {
    /// Name on the command line and of its folder in the corpus.
    pub name: &'static str,
    /// Makes valid inputs to start from.
    pub seeds: Seeds,
    /// Makes a new input: changes inputs of the pool at random, also with its words.
    pub mutate: Mutate,
    /// Feeds one input to the reader.
    pub run: Run,
    /// Longest that one input may take.
    pub most_time: Duration,
    /// One in this many accepted inputs is followed with [`Depth::Use`].
    pub use_every: u64,
}

type Seeds = Box<dyn Fn() -> Vec<Vec<u8>> + Send + Sync>;
type Mutate = Box<dyn Fn(&Pool, &mut Rng) -> Vec<u8> + Send + Sync>;
type Run = Box<dyn Fn(&[u8], Depth) -> Outcome + Send + Sync>;

impl Target {
    /// A reader of bytes.
    pub fn new(
        name: &'static str,
        seeds: impl Fn() -> Vec<Vec<u8>> + Send + Sync + 'static,
        mutate: impl Fn(&Pool, &mut Rng) -> Vec<u8> + Send + Sync + 'static,
        run: impl Fn(&[u8], Depth) -> Outcome + Send + Sync + 'static,
    ) -> Self {
        Self {
            name,
            seeds: Box::new(seeds),
            mutate: Box::new(mutate),
            run: Box::new(run),
            most_time: MOST_TIME,
            use_every: 64,
        }
    }

    /// A reader of text, to which inputs that are not UTF-8 are malformed.
    pub fn of_text(
        name: &'static str,
        seeds: impl Fn() -> Vec<Vec<u8>> + Send + Sync + 'static,
        mutate: impl Fn(&Pool, &mut Rng) -> Vec<u8> + Send + Sync + 'static,
        run: impl Fn(&str, Depth) -> Outcome + Send + Sync + 'static,
    ) -> Self {
        let run = move |input: &[u8], depth| match std::str::from_utf8(input) {
            Ok(text) => run(text, depth),
            Err(_) => Outcome::malformed(&"not UTF-8 text"),
        };
        Self::new(name, seeds, mutate, run)
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

/// Largest number of inputs kept in addition to the seeds.
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
