//! Constraints as a file has them: what flags say, in YAML.

use std::collections::BTreeMap;
use std::fmt::{self, Formatter};

use schemars::JsonSchema;
use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// What a search is held to.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Constraints")]
pub(crate) struct ConstraintsFile {
    /// Smallest value of a numeric dimension, such as `pp: 2`.
    pub(crate) min: BTreeMap<String, u64>,
    /// Largest value of a numeric dimension.
    pub(crate) max: BTreeMap<String, u64>,
    /// Values that a dimension may have, by name: one, such as `tp: 8`, or several, such as `zero: [1, 3]`.
    #[schemars(with = "BTreeMap<String, OneOrMore>")]
    pub(crate) fix: BTreeMap<String, Words>,
    /// Dimensions whose size is 1: one, or several.
    #[schemars(with = "OneOrMore")]
    pub(crate) forbid: Words,
    /// Most by which a stage at either end may be lighter than the others, in layers; 1 if absent.
    #[schemars(range(max = 64))]
    pub(crate) uneven: Option<u64>,
}

/// One word or several. A word is written as a text, a number or a switch: `none`, `8`, `on`.
#[derive(Debug, Default)]
pub(crate) struct Words(pub(crate) Vec<String>);

/// What a file may write for [`Words`], for its schema.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
enum OneOrMore {
    One(Word),
    More(Vec<Word>),
}

#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
enum Word {
    Text(String),
    Number(u64),
    Switch(bool),
}

/// Written by hand, so that an error names its line and what is expected.
impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyWords)
    }
}

struct AnyWords;

impl<'de> Visitor<'de> for AnyWords {
    type Value = Words;

    fn expecting(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str("a value, such as 8 or none, or a list of values")
    }

    fn visit_str<E: de::Error>(self, word: &str) -> Result<Words, E> {
        Ok(Words(vec![word.to_owned()]))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Words, E> {
        Ok(Words(vec![number.to_string()]))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Words, E> {
        Ok(Words(vec![number.to_string()]))
    }

    fn visit_bool<E: de::Error>(self, on: bool) -> Result<Words, E> {
        Ok(Words(vec![if on { "on" } else { "off" }.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Words, A::Error> {
        let mut words = Vec::new();
        while let Some(Words(more)) = list.next_element()? {
            words.extend(more);
        }
        Ok(Words(words))
    }
}
