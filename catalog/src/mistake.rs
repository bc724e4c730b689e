//! A mistake in an input, told the same way everywhere: what is wrong, where, what was expected, the nearest right
//! value, and an example.

use std::fmt;

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
    /// A mistake of which only this is known; the methods below add the rest.
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
