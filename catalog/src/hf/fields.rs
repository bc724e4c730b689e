//! Typed access to the fields of a `config.json`, with errors that name the field.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::usual;
use crate::checked::MAX_DIM;
use crate::error::SpecError;

/// Parts of a model as messages name them, each with its names in files of the families.
const PARTS: [(&str, &[&str]); 6] = [
    ("hidden size", &["hidden_size", "n_embd", "d_model"]),
    ("layers", &["num_hidden_layers", "n_layer", "num_layers"]),
    ("vocabulary", &["vocab_size"]),
    ("attention heads", &["num_attention_heads", "n_head"]),
    (
        "key/value heads",
        &["num_key_value_heads", "num_kv_heads", "num_query_groups"],
    ),
    (
        "feed-forward size",
        &["intermediate_size", "n_inner", "ffn_dim"],
    ),
];

/// The fields of one JSON object, and which of them have been read.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// The family whose defaults absent sizes take; empty if there are none.
    kind: &'a str,
    path: &'a str,
    read: RefCell<BTreeSet<&'a str>>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(value: &'a Value, path: &'a str) -> Result<Self, SpecError> {
        match value {
            Value::Object(map) => Ok(Self::of(map, path)),
            _ => Err(SpecError::Malformed {
                path: path.to_owned(),
                message: "expected an object, as in a model's config.json".to_owned(),
            }),
        }
    }

    fn of(map: &'a Map<String, Value>, path: &'a str) -> Self {
        let read = RefCell::default();
        let kind = "";
        Self {
            map,
            kind,
            path,
            read,
        }
    }

    /// The same fields, where absent sizes take the defaults of a family.
    pub(super) fn of_kind(self, kind: &'a str) -> Self {
        Self { kind, ..self }
    }

    /// The fields that have not been read, with their values.
    pub(super) fn unread(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        let read = self.read.borrow().clone();
        let all = self.map.iter().map(|(key, value)| (key.as_str(), value));
        all.filter(move |(key, _)| !read.contains(key))
    }

    /// The fields that have been read, which define the model, as an object with this `model_type`.
    pub(super) fn definition(&self, kind: &str) -> Value {
        let read = self.read.borrow();
        let of_map = |key: &&str| self.map.get(*key).map(|v| ((*key).to_owned(), v.clone()));
        let mut fields: Map<String, Value> = read.iter().filter_map(of_map).collect();
        fields.insert("model_type".to_owned(), kind.into());
        Value::Object(fields)
    }

    pub(super) fn wrong(&self, field: &str, message: impl Into<String>) -> SpecError {
        SpecError::field(self.path, field, message)
    }

    fn present(&self, field: &str) -> Option<&'a Value> {
        let (key, value) = self.map.get_key_value(field)?;
        self.read.borrow_mut().insert(key);
        Some(value).filter(|value| !value.is_null())
    }

    /// A whole number, which may be absent if the family has a default.
    pub(super) fn size(&self, field: &str) -> Result<u64, SpecError> {
        self.usual(field)?
            .ok_or_else(|| self.wrong(field, "missing; expected a whole number"))
    }

    /// A required whole number, from the first of these names that is present.
    pub(super) fn any(&self, names: &[&str]) -> Result<u64, SpecError> {
        let mut found = None;
        for name in names {
            let said = self.maybe(name)?;
            found = found.or(said);
        }
        let usual = || names.iter().find_map(|name| usual::size(self.kind, name));
        found
            .or_else(usual)
            .ok_or_else(|| self.wrong(&names.join("` or `"), "missing; expected a whole number"))
    }

    /// An optional whole number.
    pub(super) fn maybe(&self, field: &str) -> Result<Option<u64>, SpecError> {
        match self.present(field) {
            None => Ok(None),
            Some(value) => value
                .as_u64()
                .filter(|&size| size <= MAX_DIM)
                .map(Some)
                .ok_or_else(|| {
                    self.wrong(
                        field,
                        format!(
                            "{} is not a size; expected a whole number up to 2^24",
                            short(value)
                        ),
                    )
                }),
        }
    }

    /// A whole number; `usual` if the field is absent, `None` if it is null.
    pub(super) fn maybe_or(
        &self,
        field: &str,
        usual: Option<u64>,
    ) -> Result<Option<u64>, SpecError> {
        match self.map.contains_key(field) {
            true => self.maybe(field),
            false => Ok(usual),
        }
    }

    /// A whole number; the family's default if the field is absent, `None` if there is no default or the field is null.
    pub(super) fn usual(&self, field: &str) -> Result<Option<u64>, SpecError> {
        self.maybe_or(field, usual::size(self.kind, field))
    }

    /// A list of texts; `None` if the field is absent.
    pub(super) fn texts(&self, field: &str) -> Result<Option<Vec<&'a str>>, SpecError> {
        let Some(value) = self.present(field) else {
            return Ok(None);
        };
        let items = value.as_array().map(Vec::as_slice);
        let texts = items.and_then(|items| items.iter().map(Value::as_str).collect());
        match texts {
            Some(texts) => Ok(Some(texts)),
            None => Err(self.wrong(field, "expected a list of texts")),
        }
    }

    /// A list of whole numbers; `None` if the field is absent.
    pub(super) fn numbers(&self, field: &str) -> Result<Option<Vec<u64>>, SpecError> {
        let Some(value) = self.present(field) else {
            return Ok(None);
        };
        let items = value.as_array().map(Vec::as_slice);
        let numbers = items.and_then(|items| items.iter().map(Value::as_u64).collect());
        match numbers {
            Some(numbers) => Ok(Some(numbers)),
            None => Err(self.wrong(field, "expected a list of whole numbers")),
        }
    }

    pub(super) fn flag(&self, field: &str, default: bool) -> Result<bool, SpecError> {
        match self.present(field) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| self.wrong(field, format!("{} is not true or false", short(value)))),
        }
    }

    /// As [`Fields::flag`]; a whole number is true unless it is 0, as in Python.
    pub(super) fn truth(&self, field: &str, default: bool) -> Result<bool, SpecError> {
        match self.present(field).and_then(Value::as_u64) {
            Some(number) => Ok(number != 0),
            None => self.flag(field, default),
        }
    }

    /// The index of one of `count` layers; -1 stands for the last one.
    pub(super) fn layer(&self, field: &str, count: u64) -> Result<Option<u64>, SpecError> {
        match self.present(field).and_then(Value::as_i64) {
            Some(-1) => Ok(Some(count.saturating_sub(1))),
            _ => self.maybe(field),
        }
    }

    /// Checks a switch that is modelled only in its usual position.
    pub(super) fn only(&self, field: &str, usual: bool) -> Result<(), SpecError> {
        if self.flag(field, usual)? == usual {
            return Ok(());
        }
        Err(self.wrong(
            field,
            format!("{} is not modelled; expected {usual}", !usual),
        ))
    }

    /// A positive number; `usual` if the field is absent, `None` if it is null.
    pub(super) fn real_or(&self, field: &str, usual: f64) -> Result<Option<f64>, SpecError> {
        match self.map.contains_key(field) {
            true => self.real(field),
            false => Ok(Some(usual)),
        }
    }

    /// A probability; 0 if the field is absent.
    pub(super) fn fraction(&self, field: &str) -> Result<f64, SpecError> {
        Ok(self.maybe_fraction(field)?.unwrap_or(0.0))
    }

    /// An optional probability.
    pub(super) fn maybe_fraction(&self, field: &str) -> Result<Option<f64>, SpecError> {
        let valid = |value: &Value| value.as_f64().filter(|p| (0.0..1.0).contains(p));
        self.present(field)
            .map(|value| {
                let wrong = || self.wrong(field, format!("{} is not in [0, 1)", short(value)));
                valid(value).ok_or_else(wrong)
            })
            .transpose()
    }

    /// A probability that several fields may give; present ones must agree. 0 if none is present.
    pub(super) fn same_fraction(&self, fields: &[&str]) -> Result<f64, SpecError> {
        let mut known: Option<(&str, f64)> = None;
        for field in fields {
            let Some(p) = self.maybe_fraction(field)? else {
                continue;
            };
            if let Some((other, q)) = known.filter(|(_, q)| *q != p) {
                let message = format!(
                    "{p}, but `{other}` is {q}; one dropout of all hidden states is modelled"
                );
                return Err(self.wrong(field, message));
            }
            known = Some((field, p));
        }
        Ok(known.map_or(0.0, |(_, p)| p))
    }

    pub(super) fn text(&self, field: &str) -> Result<&'a str, SpecError> {
        match self.present(field) {
            None => Err(self.wrong(field, "missing; expected a text")),
            Some(value) => value.as_str().ok_or_else(|| {
                self.wrong(
                    field,
                    format!("{} is not a text; expected a text", short(value)),
                )
            }),
        }
    }

    /// An error that names a part of the model, with the name that the part has in this file, or in files of its family.
    pub(super) fn in_file(&self, error: SpecError) -> SpecError {
        let SpecError::Field {
            path,
            field,
            message,
        } = error
        else {
            return error;
        };
        let read = self.read.borrow();
        let known = PARTS.iter().find(|(part, _)| *part == field);
        let named = known.and_then(|(_, names)| names.iter().find(|name| read.contains(*name)));
        SpecError::Field {
            path,
            field: named.map_or(field, |name| (*name).to_owned()),
            message,
        }
    }

    /// The error that `field` names something unknown.
    pub(super) fn unknown(
        &self,
        field: &'static str,
        name: &str,
        nearest: Option<String>,
    ) -> SpecError {
        let unknown = SpecError::Unknown {
            kind: field,
            name: name.to_owned(),
            nearest,
        };
        let place = format!("{}, field `{field}`", self.path);
        SpecError::Wrong(unknown.mistake().at(place))
    }

    /// An optional positive number.
    pub(super) fn real(&self, field: &str) -> Result<Option<f64>, SpecError> {
        match self.not_negative(field)? {
            Some(0.0) => Err(self.wrong(field, "0 is not a positive number")),
            found => Ok(found),
        }
    }

    /// An optional number that is not negative.
    pub(super) fn not_negative(&self, field: &str) -> Result<Option<f64>, SpecError> {
        let valid = |x: &f64| *x >= 0.0 && x.is_finite();
        let wrong = |value| self.wrong(field, format!("{} is not a number >= 0", short(value)));
        self.present(field)
            .map(|value| value.as_f64().filter(valid).ok_or_else(|| wrong(value)))
            .transpose()
    }

    /// A required positive number.
    pub(super) fn needed(&self, field: &str) -> Result<f64, SpecError> {
        self.real(field)?
            .ok_or_else(|| self.wrong(field, "missing; expected a positive number"))
    }

    /// An optional text.
    pub(super) fn maybe_text(&self, field: &str) -> Result<Option<&'a str>, SpecError> {
        self.present(field)
            .map(|value| {
                value
                    .as_str()
                    .ok_or_else(|| self.wrong(field, format!("{} is not a text", short(value))))
            })
            .transpose()
    }

    /// An optional nested object; `None` if the field is absent or null.
    pub(super) fn nested(&self, field: &str) -> Result<Option<Fields<'a>>, SpecError> {
        let wrong = |value| {
            let message = format!("{} is not an object; expected an object", short(value));
            self.wrong(field, message)
        };
        self.present(field)
            .map(|value| match value.as_object() {
                Some(map) => Ok(Fields::of(map, self.path)),
                None => Err(wrong(value)),
            })
            .transpose()
    }
}

pub(super) fn short(value: &Value) -> String {
    value.to_string().chars().take(40).collect()
}
