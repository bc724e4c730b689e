//! The outcome of one input.

/// How far an input came, and which promises its treatment broke.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the reader's syntax took it: YAML, JSON, `key=value`, a shell script.
    pub syntax: bool,
    /// Whether the reader accepted its content.
    pub accepted: bool,
    /// Its kind: the error with names and numbers taken out, or features of what was accepted. The
    /// number of kinds seen is the coverage that is reported.
    pub class: String,
    /// Promises that were broken.
    pub violations: Vec<String>,
}

/// Largest number of broken promises that are reported for one input.
const MOST_VIOLATIONS: usize = 8;

impl Outcome {
    /// Refused for its syntax.
    #[must_use]
    pub fn malformed(error: &impl ToString) -> Self {
        Self {
            class: format!("malformed: {}", kind(&error.to_string())),
            ..Self::default()
        }
    }

    /// A well-formed input that was refused for its content.
    #[must_use]
    pub fn refused(error: &impl ToString) -> Self {
        Self {
            syntax: true,
            class: format!("refused: {}", kind(&error.to_string())),
            ..Self::default()
        }
    }

    /// Taken.
    #[must_use]
    pub fn accepted(features: impl Into<String>) -> Self {
        Self {
            syntax: true,
            accepted: true,
            class: format!("accepted: {}", features.into()),
            ..Self::default()
        }
    }

    /// Records `broken` as a violation unless a promise was `kept`.
    pub fn expect(&mut self, kept: bool, broken: impl FnOnce() -> String) {
        if kept || self.violations.len() >= MOST_VIOLATIONS {
            return;
        }
        let broken = broken();
        let of = kind(&broken);
        if self.violations.iter().all(|known| kind(known) != of) {
            self.violations.push(broken);
        }
    }
}

/// A message without names and numbers: what is quoted and every run of digits is taken out.
#[must_use]
pub fn kind(message: &str) -> String {
    let mut kind = String::with_capacity(message.len());
    let mut chars = message.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '`' | '"' => {
                kind.push(c);
                while chars.next().is_some_and(|next| next != c) {}
                kind.push(c);
            }
            '0'..='9' => {
                while chars
                    .next_if(|c| c.is_ascii_digit() || matches!(c, '.' | '_'))
                    .is_some()
                {}
                kind.push('0');
            }
            _ => kind.push(c),
        }
        if kind.len() > 160 {
            break;
        }
    }
    kind
}
