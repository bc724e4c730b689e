//! The text of a strategy, taken apart into keys and values. Two forms of a word say the same: `tp=8` and `tp8`.

use catalog::{Mistake, ScheduleKind};

use crate::legality::StrategyError;

/// Every key of a strategy.
pub const KEYS: [&str; 28] = [
    "tp",
    "pp",
    "vpp",
    "cp",
    "cp_kind",
    "ep",
    "etp",
    "dp",
    "dp_shard",
    "dp_replicate",
    "zero",
    "reshard",
    "sp",
    "mbs",
    "m",
    "recompute",
    "schedule",
    "order",
    "stages",
    "overlap",
    "grad_dtype",
    "optim_states",
    "offload",
    "offload_layers",
    "prefetch",
    "dispatcher",
    "graphs",
    "fp8_recipe",
];

/// Keys whose value may be the next word: `recompute none`.
const BEFORE_THEIR_VALUE: [&str; 12] = [
    "recompute",
    "order",
    "stages",
    "schedule",
    "overlap",
    "cp_kind",
    "grad_dtype",
    "optim_states",
    "offload",
    "dispatcher",
    "graphs",
    "fp8_recipe",
];

/// Keys that are switched on by a word without a value.
const SWITCHES: [&str; 2] = ["sp", "reshard"];

/// An example for messages, which also shows that keys may be left out.
pub(crate) const EXAMPLE: &str = "--strategy tp=4,pp=2,recompute=selective";

/// Values by key, in the order of the text.
#[derive(Debug, Default)]
pub(crate) struct Words(Vec<(&'static str, String)>);

impl Words {
    /// Reads words separated by commas, `·` or spaces.
    ///
    /// # Errors
    /// A word that is not a key with a value, or a key that is given twice.
    pub(crate) fn read(text: &str) -> Result<Self, StrategyError> {
        let text = text.to_ascii_lowercase();
        let parting = |c: char| c == ',' || c == '·' || c.is_whitespace();
        let mut rest = text.split(parting).filter(|word| !word.is_empty());
        let mut words = Self::default();
        while let Some(word) = rest.next() {
            if let Some((key, value)) = word.split_once('=') {
                words.add(known(key)?, value)?;
            } else if let Some(key) = listed(&BEFORE_THEIR_VALUE, word) {
                let value = rest.next().ok_or_else(|| {
                    StrategyError::Syntax(
                        Mistake::new(format!("`{word}` has no value"))
                            .expected(format!("{word}=VALUE"))
                            .example(EXAMPLE),
                    )
                })?;
                words.add(key, value)?;
            } else if let Some(key) = listed(&SWITCHES, word) {
                words.add(key, "on")?;
            } else if ScheduleKind::ALL.iter().any(|kind| kind.name() == word) {
                words.add("schedule", word)?;
            } else {
                words.sized(word)?;
            }
        }
        Ok(words)
    }

    /// Reads a key with its number: `tp8`, `cp2(ring)`, or `dp8x4` (shards by replicas).
    fn sized(&mut self, word: &str) -> Result<(), StrategyError> {
        let digits = word
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(word.len());
        let (key, value) = word.split_at(digits);
        if value.is_empty() {
            return Err(no_key(word));
        }
        let key = known(key)?;
        if let Some((shards, replicas)) = value.split_once(['x', '×'])
            && key == "dp"
        {
            self.add("dp_shard", shards)?;
            return self.add("dp_replicate", replicas);
        }
        match value.strip_suffix(')').and_then(|v| v.split_once('(')) {
            Some((size, kind)) if key == "cp" => {
                self.add("cp", size)?;
                self.add("cp_kind", kind)
            }
            _ => self.add(key, value),
        }
    }

    fn add(&mut self, key: &'static str, value: &str) -> Result<(), StrategyError> {
        if self.get(key).is_some() {
            return Err(StrategyError::Syntax(
                Mistake::new(format!("key `{key}` is given twice"))
                    .expected("every key once")
                    .example(EXAMPLE),
            ));
        }
        self.0.push((key, value.to_owned()));
        Ok(())
    }

    /// The keys of the text.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|(key, _)| *key)
    }

    /// The value of a key, if the text has it.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        let found = self.0.iter().find(|(known, _)| *known == key);
        found.map(|(_, value)| value.as_str())
    }
}

fn listed(keys: &[&'static str], word: &str) -> Option<&'static str> {
    keys.iter().copied().find(|key| *key == word)
}

fn known(key: &str) -> Result<&'static str, StrategyError> {
    listed(&KEYS, key).ok_or_else(|| {
        let nearest = catalog::suggest::nearest(key, KEYS);
        StrategyError::Syntax(
            Mistake::new(format!("unknown key `{key}`"))
                .expected(format!("one of the keys {}", KEYS.join(", ")))
                .nearest(nearest)
                .example(EXAMPLE),
        )
    })
}

fn no_key(word: &str) -> StrategyError {
    let names = KEYS
        .into_iter()
        .chain(ScheduleKind::ALL.map(ScheduleKind::name));
    StrategyError::Syntax(
        Mistake::new(format!("`{word}` is not of the form key=value"))
            .expected("keys with their values, as in tp=8 or tp8")
            .nearest(catalog::suggest::nearest(word, names))
            .example(EXAMPLE),
    )
}

/// The error for a value that is not of its key's form.
pub(crate) fn syntax(key: &str, value: &str, expected: impl Into<String>) -> StrategyError {
    let wrong = Mistake::new(format!("`{value}` is not a value of `{key}`"));
    StrategyError::Syntax(wrong.expected(expected).example(EXAMPLE))
}
