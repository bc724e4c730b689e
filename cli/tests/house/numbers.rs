//! Numbers that decide predictions are only in data or in `costmodel`'s list of known numbers, each
//! with unit and source. A prediction's provenance shows all of that list.

use std::collections::BTreeMap;

use regex::Regex;

use crate::{root, sources};

/// Numbers that need no source: neutral ones, halves and doubles, products of a linear's three passes and of two
/// dimensions, percent.
const PLAIN: [&str; 7] = ["0.0", "0.5", "1.0", "2.0", "3.0", "6.0", "100.0"];

/// Numbers with a fraction or an exponent in a text without comments, strings and tests; powers of ten are units.
fn numbers(text: &str) -> Vec<String> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or("");
    let noise = Regex::new(r#"//[^\n]*|"(?s:\\.|[^"\\])*""#).expect("a pattern");
    let number = Regex::new(r"\b\d[\d_]*(\.\d+(e-?\d+)?|e-?\d+)").expect("a pattern");
    let power = Regex::new(r"^1e-?\d+$").expect("a pattern");
    let code = noise.replace_all(code, "");
    let found = number.find_iter(&code).map(|m| m.as_str().to_owned());
    found
        .filter(|n| !PLAIN.contains(&n.as_str()) && !power.is_match(n))
        .collect()
}

#[test]
fn numbers_of_the_cost_model_are_known() {
    let mut files = BTreeMap::new();
    sources(&root().join("costmodel/src"), &mut files);
    assert!(files.len() > 30);
    let mut unknown = Vec::new();
    for (path, text) in files {
        if !path.ends_with("known.rs") {
            let found = numbers(&text);
            unknown.extend(
                found
                    .into_iter()
                    .map(|n| format!("{n} in {}", path.display())),
            );
        }
    }
    assert!(unknown.is_empty(), "{}", unknown.join("\n"));
}

#[test]
fn a_number_in_a_formula_is_found() {
    let text = "let x = 2.0 * y * 1e-6; // 0.7\nlet s = \"0.8\";\nlet z = 0.93 * x + 2.5e-6 + t.0;";
    assert_eq!(numbers(text), ["0.93", "2.5e-6"]);
}
