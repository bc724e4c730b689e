//! Functions stay short enough to be read at once.

use crate::{crates, root, sources};
use std::collections::BTreeMap;

/// Lines that no function has more than.
const MOST: usize = 80;
/// Lines that few functions have more than, and how many may.
const FEW: (usize, usize) = (60, 10);

/// Functions of a text with their lines: from `fn` to the brace under it.
fn lengths(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = &line[..line.len() - code.len()];
        let Some((before, name)) = code.split_once("fn ") else {
            continue;
        };
        let words = ["pub", "const", "async", "unsafe", "extern", "\"C\""];
        let is_head = before
            .split_whitespace()
            .all(|word| words.contains(&word) || word.starts_with("pub(") || word.ends_with(')'));
        let name: String = name
            .chars()
            .take_while(|c| c.is_alphanumeric() || *c == '_')
            .collect();
        if !is_head || name.is_empty() || line.ends_with('}') {
            continue;
        }
        let end = format!("{indent}}}");
        // A signature without a body ends before the next brace at this depth.
        let last = lines[start..].iter().position(|line| *line == end);
        let body = lines[start..]
            .iter()
            .position(|line| line.trim_end().ends_with('{'));
        let semicolon = lines[start..]
            .iter()
            .position(|line| line.trim_end().ends_with(';'));
        if let (Some(last), Some(body)) = (last, body)
            && semicolon.is_none_or(|at| at > body)
        {
            found.push((name, last + 1));
        }
    }
    found
}

#[test]
fn functions_stay_short() {
    let mut long = Vec::new();
    for folder in crates() {
        let mut files = BTreeMap::new();
        sources(&root().join(&folder).join("src"), &mut files);
        for (path, text) in files {
            let file = path
                .strip_prefix(root())
                .expect("below the root")
                .display()
                .to_string();
            let of_file = lengths(&text)
                .into_iter()
                .filter(|(_, lines)| *lines > FEW.0);
            long.extend(of_file.map(|(name, lines)| format!("{lines} lines: {name} in {file}")));
        }
    }
    long.sort();
    let shown = long.join("\n");
    let most = long
        .iter()
        .filter_map(|l| l.split(' ').next()?.parse().ok())
        .max();
    assert!(most.unwrap_or(0) <= MOST && long.len() <= FEW.1, "{shown}");
}

#[test]
fn lengths_are_counted() {
    let text = "fn a() {\n    x();\n}\ntrait T {\n    fn b(\n        &self,\n    );\n    pub(crate) fn c() {}\n}\n";
    assert_eq!(lengths(text), [("a".to_owned(), 3)]);
}
