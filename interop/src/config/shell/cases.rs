//! Branches of `case`.

use super::condition;
use super::expand::settled;
use super::lexer::Token;
use super::run::Runner;
use super::written::shown;
use crate::config::error::SyntaxError;

impl Runner<'_> {
    /// Reads the rest of `case WORD in PATTERN) …;; esac`.
    pub(super) fn cases(&mut self, runs: bool) -> Result<(), SyntaxError> {
        let begin = self.at;
        let value = match self.word().filter(|_| runs) {
            None => Ok(String::new()),
            Some(raw) => {
                let words = self.joined(raw)?;
                settled(words.first().map_or("", |w| w.text.as_str()), self.script)
            }
        };
        self.at = (begin + 1).min(self.tokens.len());
        self.skip_ends();
        self.take(&["in"]);
        let mut bodies: Vec<(Vec<String>, usize)> = Vec::new();
        let mut end = ";;";
        while end == ";;" {
            self.skip_ends();
            if self.take(&["esac"]).is_some() {
                break;
            }
            let patterns = self.patterns(runs)?;
            bodies.push((patterns, self.at));
            end = self.block(&[";;", "esac"], false)?.1;
        }
        let after = self.at;
        let chosen = match runs {
            true => self.chosen(value, &bodies, begin),
            false => None,
        };
        if let Some((_, body)) = chosen.and_then(|at| bodies.get(at)) {
            self.at = *body;
            self.block(&[";;", "esac"], true)?;
        }
        self.at = after;
        Ok(())
    }

    /// Index in `bodies` of the branch that runs; `None` if no pattern matches.
    fn chosen(
        &mut self,
        value: Result<String, String>,
        bodies: &[(Vec<String>, usize)],
        begin: usize,
    ) -> Option<usize> {
        let unknown = match value {
            Ok(value) => {
                let matches = |pattern: &String| condition::matches(pattern, &value) == Some(true);
                let mut patterns = bodies.iter().map(|(patterns, _)| patterns);
                return patterns.position(|patterns| patterns.iter().any(matches));
            }
            Err(unknown) => unknown,
        };
        let patterns = bodies.iter().map(|(patterns, _)| patterns.join("|"));
        let mut choices: Vec<String> = patterns.collect();
        // Without `*`, a value may match no pattern.
        if !choices.iter().any(|choice| choice == "*") {
            choices.insert(0, "none of its patterns".to_owned());
        }
        let none = choices.len() - bodies.len();
        let subject = shown(&self.tokens[begin..(begin + 1).min(self.tokens.len())]);
        let text = format!("case {subject}");
        let chosen = self.assume((begin, text), Some(unknown), Some(choices));
        chosen.checked_sub(none)
    }

    /// Reads the patterns of a branch of `case`, and the parenthesis after them.
    fn patterns(&mut self, runs: bool) -> Result<Vec<String>, SyntaxError> {
        let mut patterns = Vec::new();
        while let Some(token) = self.token() {
            let raw = match token {
                Token::End if !patterns.is_empty() => break,
                Token::Word(raw) => Some(raw),
                _ => None,
            };
            self.at += 1;
            if let Some(raw) = raw.filter(|_| runs) {
                let words = self.joined(raw)?;
                patterns.extend(words.into_iter().map(|word| word.text));
            }
            if matches!(token, Token::Close) {
                break;
            }
        }
        Ok(patterns)
    }
}
