//! Decides shell tests, `[ … ]`, `[[ … ]]` and `((…))`, from the values that a script sets.

use super::arithmetic::evaluate;
use super::expand::settled;
use super::lexer::is_name;
use super::script::Script;

/// Deepest nesting of negations and parentheses in a test.
const MOST_NESTED: usize = 32;
/// Longest text, and longest pattern, that are compared, in bytes.
const LONGEST: usize = 4096;

/// Whether a test holds. `Err` if that is unknown, with the unknown value if the test has one.
pub(super) type Decided = Result<bool, Option<String>>;

/// A part of a test. A word holds its value, or as an error what has no known value.
#[derive(Clone, Debug)]
pub(super) enum Part {
    Word(Result<String, String>),
    And,
    Or,
    Open,
    Close,
}

/// Decides `[[ … ]]` (`double`) or `[ … ]`, where `=` compares text and not patterns.
pub(super) fn decide(parts: &[Part], double: bool, script: &Script) -> Decided {
    let mut test = Test {
        parts,
        double,
        script,
        nested: 0,
    };
    let found = test.any();
    if test.parts.is_empty() {
        found
    } else {
        Err(None)
    }
}

/// Value of `((…))`, where variables that nothing sets are 0.
pub(super) fn calculated(text: &str, script: &Script) -> Result<i64, Option<String>> {
    let held = |name: &str| {
        let held = script.variables.get(name).and_then(|words| words.first());
        let text = settled(held.map_or("", |word| word.text.as_str()), script)?;
        match text.trim() {
            "" => Ok(0),
            text => text.parse().map_err(|_| format!("${name}")),
        }
    };
    let text = settled(text, script).map_err(Some)?;
    evaluate(&text, &held).map_err(Some)
}

/// The variable that `((…))` sets, and the expression that it is set to.
pub(super) fn assigned(text: &str) -> Option<(String, String)> {
    let end = text.find(|c| !is_name(c) && c != ' ')?;
    let (name, rest) = (text[..end].trim(), &text[end..]);
    let (operator, value) = rest.split_once('=').filter(|_| !name.is_empty())?;
    match operator {
        "" if !value.starts_with('=') => Some((name.to_owned(), value.to_owned())),
        "+" | "-" | "*" | "/" | "%" => {
            Some((name.to_owned(), format!("{name} {operator} ({value})")))
        }
        _ => None,
    }
}

/// Whether two tests both hold, as far as that is known.
pub(super) fn and(left: Decided, right: Decided) -> Decided {
    match (left, right) {
        (Ok(false), _) | (_, Ok(false)) => Ok(false),
        (Ok(true), other) | (other, Ok(true)) => other,
        (unknown, _) => unknown,
    }
}

pub(super) fn not(found: Decided) -> Decided {
    found.map(|holds| !holds)
}

pub(super) fn or(left: Decided, right: Decided) -> Decided {
    not(and(not(left), not(right)))
}

struct Test<'a> {
    parts: &'a [Part],
    double: bool,
    script: &'a Script,
    nested: usize,
}

impl Test<'_> {
    fn take(&mut self, wanted: fn(&Part) -> bool) -> bool {
        let found = self.parts.first().is_some_and(wanted);
        self.parts = &self.parts[usize::from(found)..];
        found
    }

    fn any(&mut self) -> Decided {
        let mut found = self.all();
        while self.take(|part| matches!(part, Part::Or)) {
            found = or(found, self.all());
        }
        found
    }

    fn all(&mut self) -> Decided {
        let mut found = self.one();
        while self.take(|part| matches!(part, Part::And)) {
            found = and(found, self.one());
        }
        found
    }

    fn one(&mut self) -> Decided {
        self.nested += 1;
        if self.nested > MOST_NESTED {
            return Err(None);
        }
        let found = if self.take(|part| matches!(part, Part::Word(Ok(word)) if word == "!")) {
            not(self.one())
        } else if self.take(|part| matches!(part, Part::Open)) {
            let found = self.any();
            let closed = self.take(|part| matches!(part, Part::Close));
            if closed { found } else { Err(None) }
        } else {
            let words = self.parts.iter().map_while(|part| match part {
                Part::Word(word) => Some(word),
                _ => None,
            });
            let words: Vec<&Result<String, String>> = words.collect();
            self.parts = &self.parts[words.len()..];
            self.words(&words)
        };
        self.nested -= 1;
        found
    }

    /// A test without `!`, `&&`, `||` and parentheses.
    fn words(&self, words: &[&Result<String, String>]) -> Decided {
        let words: Result<Vec<&str>, &String> = words
            .iter()
            .map(|word| word.as_ref().map(String::as_str))
            .collect();
        let words = words.map_err(|unknown| Some(unknown.clone()))?;
        match words.as_slice() {
            [] => Ok(false),
            [text] | ["-n", text] => Ok(!text.is_empty()),
            ["-z", text] => Ok(text.is_empty()),
            ["-v", name] => Ok(self.script.variables.contains_key(*name)),
            // An empty variable without quotes leaves no word: an error, so the test fails.
            [
                "=" | "==" | "!=" | "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge",
                _,
            ] => Ok(false),
            [left, operator, right] => self.compared(left, operator, right),
            _ => Err(None),
        }
    }

    fn compared(&self, left: &str, operator: &str, right: &str) -> Decided {
        match operator {
            "=" | "==" if self.double => matches(right, left).ok_or(None),
            "!=" if self.double => not(matches(right, left).ok_or(None)),
            "=" | "==" => Ok(left == right),
            "!=" => Ok(left != right),
            "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" => {
                let number = |text: &str| match self.double {
                    true if text.is_empty() => Ok(Some(0)),
                    true => calculated(text, self.script).map(Some),
                    false => Ok(text.trim().parse::<i64>().ok()),
                };
                let (Some(left), Some(right)) = (number(left)?, number(right)?) else {
                    return Ok(false);
                };
                Ok(match operator {
                    "-eq" => left == right,
                    "-ne" => left != right,
                    "-lt" => left < right,
                    "-le" => left <= right,
                    "-gt" => left > right,
                    _ => left >= right,
                })
            }
            _ => Err(None),
        }
    }
}

/// Whether a text matches a pattern with `*`, `?` and `[…]`; `None` if the two are too long to compare.
pub(super) fn matches(pattern: &str, text: &str) -> Option<bool> {
    if pattern.len().max(text.len()) > LONGEST {
        return None;
    }
    let pattern: Vec<char> = pattern.chars().collect();
    let text: Vec<char> = text.chars().collect();
    let (mut at, mut read) = (0, 0);
    // Index of the last `*`, and where in the text its match ends so far.
    let mut star: Option<(usize, usize)> = None;
    while let Some(&letter) = text.get(read) {
        if pattern.get(at) == Some(&'*') {
            star = Some((at, read));
            at += 1;
        } else if let Some(length) = letter_of(&pattern[at..], letter) {
            at += length;
            read += 1;
        } else if let Some((star_at, before)) = star {
            at = star_at + 1;
            read = before + 1;
            star = Some((star_at, read));
        } else {
            return Some(false);
        }
    }
    Some(pattern[at..].iter().all(|&c| c == '*'))
}

/// Length of the first part of a pattern, if that part matches this letter.
fn letter_of(pattern: &[char], letter: char) -> Option<usize> {
    match *pattern.first()? {
        '[' => {
            let end = pattern.iter().skip(2).position(|&c| c == ']')? + 2;
            let (inverted, class) = match pattern[1] {
                '!' | '^' => (true, &pattern[2..end]),
                _ => (false, &pattern[1..end]),
            };
            let ranges = class
                .windows(3)
                .any(|w| w[1] == '-' && (w[0]..=w[2]).contains(&letter));
            ((class.contains(&letter) || ranges) != inverted).then_some(end + 1)
        }
        '?' => Some(1),
        c => (c == letter).then_some(1),
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns_match_as_in_shells() {
        for (pattern, text, expected) in [
            ("fp8", "fp8", true),
            ("fp8", "fp88", false),
            ("*", "", true),
            ("llama*8b", "llama3-8b", true),
            ("*Hybrid*", "a Hybrid b", true),
            ("*a*b", "aab", true),
            ("*a*b", "aba", false),
            ("[Yy]?s", "yes", true),
            ("[!0-9]", "7", false),
            ("[0-9]b", "8b", true),
            ("[", "x", false),
        ] {
            assert_eq!(matches(pattern, text), Some(expected), "{pattern} {text}");
        }
    }
}
