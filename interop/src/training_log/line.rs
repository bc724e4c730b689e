//! A line of a log, from which labelled numbers are read.

use super::log::LogError;

/// A line of a log, without terminal colours.
pub(super) struct Line<'a> {
    pub(super) text: &'a str,
    pub(super) number: usize,
    pub(super) path: &'a str,
}

impl<'a> Line<'a> {
    /// The word after a label.
    pub(super) fn after(&self, label: &str) -> Option<&'a str> {
        let (_, rest) = self.text.split_once(label)?;
        let end = |c: char| c.is_whitespace() || c == '|' || c == '(' || c == '/';
        let word = rest.trim_start().split(end).next()?;
        (!word.is_empty()).then_some(word)
    }

    /// The rank that a launcher names before each line: `[rank3]:`, `[default3]:` (torchrun), `3: ` (`srun --label`).
    pub(super) fn rank(&self) -> Option<&'a str> {
        let (label, rest) = self.text.trim_start().split_once(':')?;
        let inside = label.strip_prefix('[').and_then(|l| l.strip_suffix(']'));
        let inside = inside.map(|l| l.trim_start_matches(|c: char| c.is_ascii_lowercase()));
        // The hour of a time has no space after it.
        let number = inside.or(rest.starts_with(' ').then_some(label))?;
        let is_number = !number.is_empty() && number.chars().all(|c| c.is_ascii_digit());
        is_number.then_some(number)
    }

    /// The number after a label; `1,234`, `10.7K`, `30.5GiB` and `41.7%` are numbers.
    pub(super) fn number(&self, label: &'static str) -> Result<Option<f64>, LogError> {
        let Some(word) = self.after(label) else {
            return Ok(None);
        };
        let name = label.trim_end_matches(" (TFLOP/s/GPU):");
        let name = name.trim_matches([' ', ',', ':', '=']);
        let number = quantity(word).map(Some);
        number.ok_or_else(|| self.wrong(name, word))
    }

    /// The error for text where a number is expected.
    pub(super) fn wrong(&self, field: &str, found: &str) -> LogError {
        self.not(field, found, "a number")
    }

    /// The error for text where something else is expected.
    pub(super) fn not(&self, field: &str, found: &str, expected: &'static str) -> LogError {
        LogError::Number {
            path: self.path.to_owned(),
            line: self.number,
            field: field.to_owned(),
            found: found.chars().take(40).collect(),
            expected,
        }
    }
}

/// Largest number that any step logs: far above tokens, milliseconds and bytes of every run, and small enough
/// that sums of them stay finite.
pub(super) const MOST: f64 = 1e18;

/// Parses a number with thousands separators and a unit.
pub(super) fn quantity(word: &str) -> Option<f64> {
    let word = word.trim_end_matches([',', '.', ';', '|']).replace(',', "");
    let end = word.find(|c: char| c.is_ascii_alphabetic() && c != 'e' && c != 'E' || c == '%');
    let (digits, unit) = word.split_at(end.unwrap_or(word.len()));
    let scale = match unit {
        "" | "%" => 1.0,
        "K" => 1e3,
        "M" => 1e6,
        "B" => 1e9,
        "T" => 1e12,
        "ms" => 1.0,
        "MiB" | "MB" => 1024f64.powi(2),
        "GiB" | "GB" => 1024f64.powi(3),
        _ => return None,
    };
    let number = digits.parse::<f64>().ok()? * scale;
    (0.0..=MOST).contains(&number).then_some(number)
}

/// Whether what follows a bracket is the rest of a colour: one or two digits and `m`.
fn is_colour(mut chars: std::iter::Peekable<std::str::Chars<'_>>) -> bool {
    let digits = std::iter::from_fn(|| chars.next_if(char::is_ascii_digit)).count();
    (1..=2).contains(&digits) && chars.next() == Some('m')
}

/// Removes terminal colours, which torchtitan writes; where a program has dropped the escape character, also what is
/// left of them (`[36m`).
pub(super) fn without_colour(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' && chars.next_if_eq(&'[').is_some() {
            while chars.next().is_some_and(|c| !c.is_ascii_alphabetic()) {}
        } else if c == '[' && is_colour(chars.clone()) {
            while chars.next().is_some_and(|c| c != 'm') {}
        } else {
            plain.push(c);
        }
    }
    plain
}
