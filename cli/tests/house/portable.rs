//! What makes a plan runs anywhere, also in a browser, and gives the same bits there: no threads but rayon's, no clocks, no
//! files outside the modules that read and write them, and no functions whose last bit a system's library decides.

use std::collections::BTreeMap;

use regex::Regex;

use crate::{root, sources};

/// The crates that a plan is made by.
const CRATES: [&str; 10] = [
    "catalog",
    "plans",
    "interop",
    "dtensor",
    "models",
    "costmodel",
    "planner",
    "reports",
    "answers",
    "playground",
];

/// Modules that read and write files.
const FILES: [&str; 2] = ["catalog/src/files/", "catalog/src/text.rs"];

/// What a text without comments, strings and tests uses that differs between machines.
fn unportable(text: &str) -> Vec<String> {
    let code = text.split("#[cfg(test)]").next().unwrap_or("");
    let noise = Regex::new(r#"//[^\n]*|"(?s:\\.|[^"\\])*""#).expect("a pattern");
    let code = noise.replace_all(code, "");
    let functions = "(exp|exp2|exp_m1|ln|ln_1p|log|log2|log10|powf|cbrt|hypot|sinh?|cosh?|tanh?|sin_cos|mul_add)";
    let words = Regex::new(&format!(
        r"std::(thread|time|fs|env|net|process)\b|\.{functions}\(|f(32|64)::{functions}\b"
    ));
    let words = words.expect("a pattern");
    let found = words.find_iter(&code);
    found.map(|m| m.as_str().to_owned()).collect()
}

#[test]
fn plans_are_the_same_on_every_machine() {
    let mut found = Vec::new();
    for folder in CRATES {
        let mut files = BTreeMap::new();
        sources(&root().join(folder).join("src"), &mut files);
        for (path, text) in files {
            let file = path.strip_prefix(root()).expect("below the root");
            let file = file.display().to_string();
            if !FILES.iter().any(|part| file.starts_with(part)) {
                let uses = unportable(&text).into_iter();
                found.extend(uses.map(|word| format!("{file} uses {word}")));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn functions_of_the_system_are_found() {
    let text = "fn a(x: f64) -> f64 { x.sqrt() + x.ln() } // x.exp()\nlet b = c.map(f64::exp);\nuse std::time::Instant;\n#[cfg(test)]\nmod tests { 2f64.powf(1.0) }";
    assert_eq!(unportable(text), [".ln(", "f64::exp", "std::time"]);
}
