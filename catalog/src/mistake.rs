//! A mistake in an input, told the same way everywhere: what is wrong, where, what was expected, the nearest right
//! value, and an example.

use std::fmt;

use crate::suggest::nearest;

/// A mistake in an input. Shown on one line by `Display`; the command shows each part on a line of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mistake {
    /// What is wrong, in words.
    pub what: String,
    /// Where the mistake is: a flag, or a file with its line.
    pub place: Option<String>,
    /// What was expected instead.
    pub expected: Option<String>,
    /// The right value that is most like what was given.
    pub nearest: Option<String>,
    /// An input that is right.
    pub example: Option<String>,
}

impl Mistake {
    /// A mistake with only this description; the methods below add the other parts.
    #[must_use]
    pub fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            ..Self::default()
        }
    }

    /// The mistake of giving a flag a value outside its range.
    #[must_use]
    pub fn out_of_range(flag: &str, value: impl fmt::Display, expected: impl Into<String>) -> Self {
        let wrong = Self::new(format!("{value} is out of range"));
        wrong.at(format!("{flag} {value}")).expected(expected)
    }

    /// Splits a mistake told in one sentence, such as `unknown field ...; expected one of ...`, into what is wrong and what was
    /// expected, with the nearest of several words. A line quoted at the end stays with what is wrong.
    #[must_use]
    pub fn of_sentence(text: &str) -> Self {
        let (sentence, quoted) = match text.split_once(", in `") {
            Some((sentence, quoted)) => (sentence, format!(", in `{quoted}")),
            None => (text, String::new()),
        };
        let parts = ["; expected ", ": expected ", ", expected "];
        let split = parts
            .iter()
            .find_map(|between| sentence.split_once(between));
        let Some((what, expected)) = split else {
            return Self::new(text);
        };
        let near = nearest_word(what, expected);
        Self::new(format!("{what}{quoted}"))
            .expected(expected)
            .nearest(near)
    }

    /// Says where the mistake is.
    #[must_use]
    pub fn at(mut self, place: impl Into<String>) -> Self {
        self.place = Some(place.into());
        self
    }

    /// Says what was expected.
    #[must_use]
    pub fn expected(mut self, expected: impl Into<String>) -> Self {
        self.expected = Some(expected.into());
        self
    }

    /// Says which right value is nearest, if any is near.
    #[must_use]
    pub fn nearest(mut self, nearest: Option<String>) -> Self {
        self.nearest = nearest;
        self
    }

    /// Gives an example.
    #[must_use]
    pub fn example(mut self, example: impl Into<String>) -> Self {
        self.example = Some(example.into());
        self
    }
}

/// Of words that were expected, as ``one of a, b`` or ``\`a\` or \`b\```, the nearest to the unknown word of a sentence.
fn nearest_word(what: &str, expected: &str) -> Option<String> {
    let (_, word) = what.split_once("unknown ")?;
    let word = word.split('`').nth(1)?;
    // Nearly every word is near to one of two letters.
    if word.chars().count() < 3 {
        return None;
    }
    let list = expected.strip_prefix("one of ").unwrap_or(expected);
    let words = list.split(", ").flat_map(|words| words.split(" or "));
    nearest(word, words.map(|word| word.trim_matches('`')))
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "{place}: ")?;
        }
        f.write_str(&self.what)?;
        if let Some(expected) = &self.expected {
            write!(f, "; expected {expected}")?;
        }
        if let Some(nearest) = &self.nearest {
            write!(f, "; did you mean `{nearest}`?")?;
        }
        Ok(())
    }
}

impl std::error::Error for Mistake {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_is_split_where_it_says_what_was_expected() {
        for (text, what, expected) in [
            ("0; expected 1 to 4", "0", Some("1 to 4")),
            (
                "line 1: unknown field `a`, expected one of b, c, in `a: 1`",
                "line 1: unknown field `a`, in `a: 1`",
                Some("one of b, c"),
            ),
            ("there is no such file", "there is no such file", None),
        ] {
            let mistake = Mistake::of_sentence(text);
            assert_eq!(
                (mistake.what.as_str(), mistake.expected.as_deref()),
                (what, expected)
            );
        }
    }

    #[test]
    fn the_nearest_of_several_words_is_suggested() {
        for (text, near) in [
            (
                "unknown field `smcount`, expected one of name, sm_count, in `smcount: 1`",
                Some("sm_count"),
            ),
            (
                "unknown variant `rign`, expected `ring` or `tree`",
                Some("ring"),
            ),
            (
                "unknown table `b200_sxn`; expected one of h100_sxm, b200_sxm",
                Some("b200_sxm"),
            ),
            ("unknown field `x`, expected one of name, sm_count", None),
            ("0; expected 1 to 4", None),
        ] {
            assert_eq!(
                Mistake::of_sentence(text).nearest.as_deref(),
                near,
                "{text}"
            );
        }
    }
}
