//! Mutates YAML and JSON as trees: a file is parsed, one place of it is changed, and it is written again. Most
//! inputs made this way are well-formed.

use serde_json::{Map, Value};

use crate::mutate::{self, HOSTILE};
use crate::rng::Rng;
use crate::target::Pool;

/// How a tree is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// YAML.
    Yaml,
    /// JSON.
    Json,
}

impl Format {
    /// The tree of a text, if it is one.
    #[must_use]
    pub fn parse(self, text: &str) -> Option<Value> {
        match self {
            Self::Yaml => catalog::text::yaml(text, "input").ok(),
            Self::Json => serde_json::from_str(text).ok(),
        }
    }

    /// The text of a tree.
    #[must_use]
    pub fn print(self, value: &Value) -> String {
        match self {
            Self::Yaml => serde_saphyr::to_string(value).unwrap_or_default(),
            Self::Json => value.to_string(),
        }
    }

    /// A new input: mostly by a change of the tree, otherwise by one of the text.
    #[must_use]
    pub fn mutate(self, pool: &Pool, rng: &mut Rng) -> Vec<u8> {
        let input = pool.pick(rng);
        if rng.percent(70) {
            let tree = std::str::from_utf8(input).ok().and_then(|t| self.parse(t));
            if let Some(mut tree) = tree {
                for _ in 0..1 + rng.below(3) {
                    change(&mut tree, pool, rng);
                }
                return self.print(&tree).into_bytes();
            }
        }
        if rng.percent(90) {
            return mutate::text(pool, rng);
        }
        mutate::bytes(input, rng)
    }
}

/// Number of nodes of a tree.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(map) => map.values().map(count).sum(),
        _ => 0,
    }
}

/// The node with the number `at`, counted in the order of the text.
fn node<'v>(value: &'v mut Value, at: &mut usize) -> Option<&'v mut Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| node(item, at)),
        Value::Object(map) => map.values_mut().find_map(|item| node(item, at)),
        _ => None,
    }
}

/// Changes one node.
pub fn change(tree: &mut Value, pool: &Pool, rng: &mut Rng) {
    let mut at = rng.below(count(tree));
    let borrowed = {
        let mut other = rng.below(count(tree));
        node(tree, &mut other).map(|v| v.clone())
    };
    let Some(found) = node(tree, &mut at) else {
        return;
    };
    match (rng.below(20), borrowed) {
        (0, Some(other)) if count(&other) < 64 => *found = other,
        (1, _) => *found = Value::Null,
        (2, _) => *found = Value::Array(vec![found.take()]),
        (3, _) => {
            let mut map = Map::new();
            map.insert(pool.word(rng), found.take());
            *found = Value::Object(map);
        }
        (4, _) => {
            *found = match found {
                Value::String(s) => s.parse().map_or(Value::Bool(true), Value::Number),
                ref other => Value::String(other.to_string()),
            }
        }
        _ => inside(found, pool, rng),
    }
}

fn inside(value: &mut Value, pool: &Pool, rng: &mut Rng) {
    match value {
        Value::Bool(on) => *on = !*on,
        Value::Null => *value = Value::from(rng.below(9)),
        Value::Number(n) => {
            let text = mutate::number(&n.to_string(), rng);
            *value = serde_json::from_str(&text).unwrap_or(Value::String(text));
        }
        Value::String(s) => {
            *s = match rng.below(10) {
                0 => (*rng.pick(&HOSTILE)).to_owned(),
                1..=2 => pool.word(rng),
                3..=7 => mutate::one_number(s, rng),
                _ => mutate::one_word(s, pool, rng),
            }
        }
        Value::Array(items) => elements(items, rng),
        Value::Object(map) => entries(map, pool, rng),
    }
}

fn elements(items: &mut Vec<Value>, rng: &mut Rng) {
    if items.is_empty() {
        items.push(Value::from(1));
        return;
    }
    let at = rng.below(items.len());
    match rng.below(4) {
        0 => drop(items.remove(at)),
        1 => items.insert(at, items[at].clone()),
        2 => {
            let to = rng.below(items.len());
            items.swap(at, to);
        }
        _ if items.len() < 64 => {
            let copies = vec![items[at].clone(); 1 + rng.below(24)];
            items.extend(copies);
        }
        _ => items.truncate(at),
    }
}

fn entries(map: &mut Map<String, Value>, pool: &Pool, rng: &mut Rng) {
    let keys: Vec<String> = map.keys().cloned().collect();
    if keys.is_empty() {
        map.insert(pool.word(rng), Value::from(1));
        return;
    }
    let key = rng.pick(&keys).clone();
    match rng.below(6) {
        0..=1 => drop(map.shift_remove(&key)),
        2 => {
            if let Some(value) = map.shift_remove(&key) {
                map.insert(pool.word(rng), value);
            }
        }
        3 => drop(map.insert(pool.word(rng), Value::from(rng.below(64)))),
        // A value deeper down is changed more often than the map itself.
        _ => {
            if let Some(value) = map.get_mut(&key) {
                inside(value, pool, rng);
            }
        }
    }
}
