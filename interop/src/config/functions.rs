//! The functions of a Python file: the lines of one of them and of those that it calls, and the order in which they are
//! executed.

use std::collections::BTreeMap;
use std::ops::Range;

/// The text with every line blanked except those of one top-level function, of the functions that it calls, and of
/// module-level assignments; `None` if there is no such function.
#[must_use]
pub fn only_function(text: &str, name: &str) -> Option<String> {
    let defined: Vec<&str> = text.lines().filter_map(defines).collect();
    let mut wanted = vec![*defined.iter().find(|of| **of == name)?];
    let mut at = 0;
    while at < wanted.len() {
        let body = kept(text, &wanted[at..=at], false);
        for other in &defined {
            if !wanted.contains(other) && body.contains(&format!("{other}(")) {
                wanted.push(other);
            }
        }
        at += 1;
    }
    Some(kept(text, &wanted, true))
}

/// The name of the top-level function that a line defines.
fn defines(line: &str) -> Option<&str> {
    let (name, _) = line.strip_prefix("def ")?.split_once('(')?;
    Some(name.trim())
}

/// The text with every line blanked except those of these functions and, if `module`, module-level assignments. The `def`
/// lines of all but the first function are indented by a blank.
fn kept(text: &str, functions: &[&str], module: bool) -> String {
    let mut keeps = module;
    let mut kept = String::with_capacity(text.len());
    for line in text.lines() {
        let top = !line.starts_with([' ', '\t', ')', ']', '}', '#']) && !line.is_empty();
        if top {
            let other = ["class ", "@", "if "]
                .iter()
                .any(|word| line.starts_with(word));
            keeps = match defines(line) {
                Some(name) => functions.contains(&name),
                None => module && !other,
            };
        }
        // Marks called functions, so that the text defines a single configuration.
        if keeps && defines(line).is_some_and(|name| name != functions[0]) {
            kept.push(CALLED);
        }
        if keeps {
            kept.push_str(line);
        }
        kept.push('\n');
    }
    kept
}

/// Marks, at the start of its `def` line, a function that the chosen one calls.
const CALLED: char = ' ';

/// The bodies of functions, as line numbers from 1, and their indices by name.
#[derive(Default)]
struct Bodies<'a> {
    lines: Vec<Range<usize>>,
    by_name: BTreeMap<&'a str, usize>,
}

impl<'a> Bodies<'a> {
    /// The functions in [`only_function`]'s output, the chosen one first; empty if it has one only.
    fn of(lines: &[&'a str]) -> Self {
        let mut found = Self::default();
        let mut chosen = 0;
        let mut calls = false;
        let mut open = false;
        for (line, number) in lines.iter().zip(1..) {
            let called = line.strip_prefix(CALLED);
            if let Some(name) = defines(called.unwrap_or(line)) {
                if called.is_none() {
                    chosen = found.lines.len();
                }
                calls |= called.is_some();
                found.by_name.insert(name, found.lines.len());
                found.lines.push(number + 1..number + 1);
                open = true;
            } else if line.starts_with(|c: char| c.is_alphabetic() || c == '_') {
                open = false;
            } else if let Some(body) = found.lines.last_mut().filter(|_| open) {
                body.end = number + 1;
            }
        }
        if !calls {
            return Self::default();
        }
        found.lines.swap(0, chosen);
        for index in found.by_name.values_mut() {
            *index = match *index {
                0 => chosen,
                at if at == chosen => 0,
                at => at,
            };
        }
        found
    }

    /// Index of the first function that a line calls and that is not `seen` yet.
    fn called(&self, line: &str, seen: &[bool]) -> Option<usize> {
        let before = line.match_indices('(').map(|(at, _)| &line[..at]);
        let name = |text: &'_ str| {
            let part = |c: char| c.is_alphanumeric() || c == '_';
            text.trim_end_matches(part).len()
        };
        let mut all = before.filter_map(|text| self.by_name.get(&text[name(text)..]));
        all.find(|index| !seen[**index]).copied()
    }
}

/// Rank of each line, by its number, in order of execution: 0 in the module; in the chosen
/// function, called functions come before the line that first calls them. Empty if it calls none.
pub(super) fn ranks(text: &str) -> Vec<usize> {
    let lines: Vec<&str> = text.lines().collect();
    let bodies = Bodies::of(&lines);
    let Some(chosen) = bodies.lines.first() else {
        return Vec::new();
    };
    let mut ranks = vec![0; lines.len() + 1];
    let mut seen = vec![false; bodies.lines.len()];
    seen[0] = true;
    let mut next = 0;
    // Functions that are being executed, each with the line that comes next.
    let mut stack = vec![(0, chosen.start)];
    while let Some((body, line)) = stack.pop() {
        if line >= bodies.lines[body].end {
            continue;
        }
        if let Some(called) = bodies.called(lines[line - 1], &seen) {
            seen[called] = true;
            stack.push((body, line));
            stack.push((called, bodies.lines[called].start));
            continue;
        }
        next += 1;
        ranks[line] = next;
        stack.push((body, line + 1));
    }
    ranks
}
