//! The keys of every dialect, as data that was extracted from the systems' own parsers and configuration classes; each
//! schema states repository and commit.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Deserialize;

use crate::config::{Node, Value};
use crate::export::dialect::Dialect;

/// The keys of a dialect.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schema {
    /// Name of the training system.
    pub target: String,
    /// Version of the training system.
    pub version: String,
    /// Repository, revision and files that the keys were read from.
    pub source: String,
    /// Sections whose content is the user's own: any key below them is accepted.
    #[serde(default)]
    pub open: Vec<String>,
    /// Type of each key, by dotted path.
    keys: BTreeMap<String, String>,
}

/// The type of value that a key takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A switch without a value.
    Flag,
    /// A boolean.
    Bool,
    /// An integer.
    Int,
    /// An integer of at least 1: sizes that the system itself refuses below that, or divides by.
    Size,
    /// A number, whole or not.
    Float,
    /// A string.
    Str,
    /// Any value.
    Any,
    /// A table of keys.
    Map,
    /// A list whose items are of this type.
    List(Box<Kind>),
    /// One of these words.
    OneOf(Vec<String>),
    /// Null, or a value of this type.
    Optional(Box<Kind>),
    /// A value of any of these types.
    Either(Vec<Kind>),
}

impl Schema {
    /// The schema of a dialect, parsed on first use.
    ///
    /// # Errors
    /// Never for the embedded schemas; a test reads them all.
    pub fn of(dialect: Dialect) -> Result<&'static Self, catalog::SpecError> {
        static READ: [OnceLock<Schema>; Dialect::ALL.len()] =
            [const { OnceLock::new() }; Dialect::ALL.len()];
        let place = &READ[dialect as usize];
        if let Some(schema) = place.get() {
            return Ok(schema);
        }
        let schema = Self::read(dialect)?;
        Ok(place.get_or_init(|| schema))
    }

    fn read(dialect: Dialect) -> Result<Self, catalog::SpecError> {
        let text = match dialect {
            Dialect::MegatronLm => include_str!("schemas/megatron-lm-0.20.yaml"),
            Dialect::MegatronBridge => include_str!("schemas/megatron-bridge-main.yaml"),
            Dialect::Torchtitan02 => include_str!("schemas/torchtitan-0.2.yaml"),
            Dialect::Torchtitan03 => include_str!("schemas/torchtitan-0.3.yaml"),
            Dialect::TorchtitanMain => include_str!("schemas/torchtitan-main.yaml"),
            Dialect::DeepSpeed => include_str!("schemas/deepspeed-0.19.yaml"),
            Dialect::Accelerate => include_str!("schemas/accelerate-1.15.yaml"),
            Dialect::Axolotl => include_str!("schemas/axolotl-0.19.yaml"),
            Dialect::Transformers | Dialect::TransformersDeepSpeed => {
                include_str!("schemas/transformers-5.23.yaml")
            }
            Dialect::LlamaFactory => include_str!("schemas/llama-factory-main.yaml"),
            Dialect::Nanotron => include_str!("schemas/nanotron-main.yaml"),
            Dialect::VeScale => include_str!("schemas/vescale-legacy.yaml"),
        };
        catalog::text::yaml(text, &dialect.name())
    }

    /// The type of a key's value; `None` for unknown keys.
    #[must_use]
    pub fn kind(&self, key: &str) -> Option<Kind> {
        if let Some(text) = self.keys.get(key) {
            return Some(Kind::parse(text));
        }
        self.is_open(key).then_some(Kind::Any)
    }

    /// Whether the key is a user-defined section, or lies in one.
    #[must_use]
    pub fn is_open(&self, key: &str) -> bool {
        self.open.iter().any(|section| {
            key.strip_prefix(section.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    }

    /// The known key most similar to this one: in the same section, with the same name elsewhere, or similar as a
    /// whole.
    #[must_use]
    pub fn nearest(&self, key: &str) -> Option<String> {
        // Hundreds of options share words; only a likely typo deserves a suggestion.
        const ALIKE: f64 = 0.86;
        let (prefix, name) = in_section(key);
        let all = || self.keys().chain(self.open.iter().map(String::as_str));
        let names = self.siblings(prefix);
        if let Some(near) = catalog::suggest::nearest_above(name, names, ALIKE) {
            return Some(format!("{prefix}{near}"));
        }
        let moved = all().find(|k| k.rsplit('.').next() == Some(name));
        moved.map(str::to_owned).or_else(|| {
            catalog::suggest::nearest_above(key, all(), ALIKE).filter(|_| prefix.is_empty())
        })
    }

    /// Whether an unknown key is a known one misspelt.
    #[must_use]
    pub fn misspells(&self, key: &str) -> bool {
        let (prefix, name) = in_section(key);
        catalog::suggest::is_slip(name, self.siblings(prefix))
    }

    /// Names directly below the section `prefix`, which ends with a dot; an empty one is the root.
    fn siblings<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        let all = self.keys().chain(self.open.iter().map(String::as_str));
        all.filter_map(move |k| k.strip_prefix(prefix))
            .map(|rest| rest.split('.').next().unwrap_or(rest))
    }

    /// Whether keys lie below this path.
    #[must_use]
    pub fn is_section(&self, path: &str) -> bool {
        let prefix = format!("{path}.");
        self.keys
            .keys()
            .chain(&self.open)
            .any(|k| k.starts_with(&prefix))
    }

    /// The known keys.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.keys.keys().map(String::as_str)
    }
}

impl Kind {
    /// Parses the type of a key as schemas write it, such as `int`, `size` (a whole number of at least 1), `[str]` (a list), `a|b` (one
    /// of these words), `int?` (or null) and `bool or str`.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        if text.contains(" or ") {
            return Self::Either(text.split(" or ").map(Self::parse).collect());
        }
        if let Some(inner) = text.strip_suffix('?') {
            return Self::Optional(Box::new(Self::parse(inner)));
        }
        if let Some(inner) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
            return Self::List(Box::new(Self::parse(inner)));
        }
        match text {
            "flag" => Self::Flag,
            "bool" => Self::Bool,
            "int" => Self::Int,
            "size" => Self::Size,
            "float" => Self::Float,
            "str" => Self::Str,
            "any" => Self::Any,
            "map" => Self::Map,
            words => Self::OneOf(words.split('|').map(str::to_owned).collect()),
        }
    }

    /// Whether a value is of this type.
    #[must_use]
    pub fn accepts(&self, node: &Node) -> bool {
        match (self, &node.value) {
            (Self::Any, _) | (_, Value::Expression(_)) => true,
            // The result of a call such as `int(…)` is unknown here.
            (_, Value::Call(name, _)) if matches!(name.as_str(), "int" | "float" | "str") => true,
            (Self::Flag | Self::Bool, Value::Bool(_))
            | (Self::Int | Self::Float, Value::Int(_))
            | (Self::Float, Value::Float(_))
            | (Self::Str, Value::Str(_))
            | (Self::Map, Value::Table(_) | Value::Call(..)) => true,
            (Self::List(inner), Value::List(items)) => items.iter().all(|i| inner.accepts(i)),
            (Self::Size, Value::Int(size)) => *size >= 1,
            (Self::Size, Value::Float(f)) => *f >= 1.0 && f.fract() == 0.0,
            // DeepSpeed writes whole numbers as `5e8`.
            (Self::Int, Value::Float(f)) => f.fract() == 0.0,
            (Self::OneOf(words), Value::Str(word)) => words.contains(word),
            (Self::OneOf(words), Value::Int(number)) => words.contains(&number.to_string()),
            (Self::Optional(_), Value::Null) => true,
            (Self::Optional(inner), _) => inner.accepts(node),
            (Self::Either(kinds), _) => kinds.iter().any(|k| k.accepts(node)),
            _ => false,
        }
    }

    /// The words to choose from, if the type is a choice.
    #[must_use]
    pub fn words_of(&self) -> Option<&[String]> {
        match self {
            Self::OneOf(words) => Some(words),
            Self::Optional(inner) | Self::List(inner) => inner.words_of(),
            _ => None,
        }
    }

    /// The type in words, for messages.
    #[must_use]
    pub fn words(&self) -> String {
        match self {
            Self::Flag => "no value".to_owned(),
            Self::Bool => "true or false".to_owned(),
            Self::Int => "a whole number".to_owned(),
            Self::Size => "a whole number of at least 1".to_owned(),
            Self::Float => "a number".to_owned(),
            Self::Str => "text".to_owned(),
            Self::Any => "anything".to_owned(),
            Self::Map => "a section".to_owned(),
            Self::List(inner) => format!("a list of: {}", inner.words()),
            Self::OneOf(words) => format!("one of {}", words.join(", ")),
            Self::Optional(inner) => format!("{}, or null", inner.words()),
            Self::Either(kinds) => {
                let words: Vec<String> = kinds.iter().map(Self::words).collect();
                words.join(", or ")
            }
        }
    }
}

/// A key split into its section, with the dot, and its name.
fn in_section(key: &str) -> (&str, &str) {
    let at = key.rfind('.').map_or(0, |dot| dot + 1);
    key.split_at(at)
}
