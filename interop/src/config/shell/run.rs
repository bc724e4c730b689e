//! Follows the commands of a script: assignments, branches, loops, sourced files.

use super::condition::{self, Decided, Part};
use super::expand::{expand, joined, settled};
use super::lexer::{Lexer, Other, Piece, Raw, Token};
use super::script::{Assumed, Script, Undecided, Word};
use super::written::{Assignment, assignment, shown};
use crate::config::error::SyntaxError;

/// Deepest nesting of `if`, `case`, loops and groups.
const MOST_NESTED: usize = 64;
/// Longest chain of files that source each other.
const MOST_SOURCED: usize = 8;

/// Where a script's sourced files and assumptions come from.
#[derive(Clone, Copy)]
pub(super) struct Around<'a> {
    pub(super) include: &'a dyn Fn(&str) -> Option<String>,
    pub(super) assumed: &'a Assumed,
}

/// Exit status of a command, as far as it is known.
#[derive(Clone, Debug)]
pub(super) enum Status {
    /// The command is a test, which holds or not, or is undecided.
    Test(Decided),
    /// The command is a program, which is assumed to succeed.
    Ran,
}

/// Follows the commands of a text whose first line has the number `line`.
pub(super) fn run(
    text: &str,
    (path, line): (&str, usize),
    around: Around<'_>,
    script: &mut Script,
    sourced: usize,
) -> Result<(), SyntaxError> {
    let tokens = Lexer::new(text, path, line).tokens()?;
    let mut runner = Runner {
        tokens: &tokens,
        at: 0,
        path,
        around,
        script,
        sourced,
        nested: 0,
    };
    runner.block(&[], true).map(|_| ())
}

/// A script being read, with the position reached.
pub(super) struct Runner<'a> {
    pub(super) tokens: &'a [Token],
    pub(super) at: usize,
    pub(super) path: &'a str,
    around: Around<'a>,
    pub(super) script: &'a mut Script,
    sourced: usize,
    nested: usize,
}

impl<'a> Runner<'a> {
    pub(super) fn token(&self) -> Option<&'a Token> {
        self.tokens.get(self.at)
    }

    pub(super) fn word(&self) -> Option<&'a Raw> {
        match self.token() {
            Some(Token::Word(raw)) => Some(raw),
            _ => None,
        }
    }

    /// Line of the first word from the token before `at` on; 0 if there is none.
    fn line(&self, at: usize) -> usize {
        let lines = self.tokens.iter().skip(at.saturating_sub(1));
        let mut lines = lines.filter_map(|token| match token {
            Token::Word(raw) | Token::Arithmetic(raw) => Some(raw.line),
            _ => None,
        });
        lines.next().unwrap_or(0)
    }

    /// Reads one of these words, or `)` or `;;`, if it comes next.
    pub(super) fn take(&mut self, words: &[&'static str]) -> Option<&'static str> {
        let found = match self.token()? {
            Token::Word(raw) => raw.bare()?,
            Token::Close => ")",
            Token::Clause => ";;",
            _ => return None,
        };
        let found = words.iter().find(|word| **word == found)?;
        self.at += 1;
        Some(found)
    }

    pub(super) fn skip_ends(&mut self) {
        while matches!(self.token(), Some(Token::End)) {
            self.at += 1;
        }
    }

    /// Reads commands up to one of the words `ends`, and follows them if `live`. Returns the status
    /// of the last one followed, and the word.
    pub(super) fn block(
        &mut self,
        ends: &[&'static str],
        live: bool,
    ) -> Result<(Status, &'static str), SyntaxError> {
        let line = self.line(self.at);
        self.nested += 1;
        if self.nested > MOST_NESTED {
            let message = "commands are nested too deeply";
            return Err(SyntaxError::new(self.path, line, message));
        }
        let mut status = Status::Ran;
        let mut before: Option<(bool, Decided)> = None;
        let mut runs = live;
        let end = loop {
            if let Some(end) = self.take(ends) {
                break end;
            }
            match self.token() {
                None => break self.unclosed(ends, line)?,
                Some(Token::End | Token::Close | Token::Clause) => {
                    self.at += 1;
                    runs = live;
                }
                Some(Token::Pipe) => self.at += 1,
                Some(operator @ (Token::And | Token::Or)) => {
                    self.at += 1;
                    self.skip_ends();
                    let and = matches!(operator, Token::And);
                    (runs, before) = match live {
                        true => self.joins(&mut status, and)?,
                        false => (false, None),
                    };
                }
                Some(_) => {
                    let found = self.command(runs)?;
                    if let (Some((and, left)), Status::Test(right)) = (before.take(), &found) {
                        let both = if and { condition::and } else { condition::or };
                        status = Status::Test(both(left, right.clone()));
                    } else if runs {
                        status = found;
                    }
                }
            }
        };
        self.nested -= 1;
        Ok((status, end))
    }

    /// Fails because the file ended before one of the closing words `ends`. Tolerates a missing
    /// parenthesis or brace, and succeeds if no word is needed.
    fn unclosed(&self, ends: &[&str], line: usize) -> Result<&'static str, SyntaxError> {
        match ends.last() {
            None | Some(&(")" | "}")) => Ok(""),
            Some(end) => {
                let message = format!("no `{end}` follows what begins here");
                Err(SyntaxError::new(self.path, line, message))
            }
        }
    }

    /// Whether the command after `&&` or `||` runs. If it is a test and the result before it is
    /// unknown, both results together decide what follows: then the second value holds whether the
    /// operator is `&&`, and the result before it.
    fn joins(
        &mut self,
        status: &mut Status,
        and: bool,
    ) -> Result<(bool, Option<(bool, Decided)>), SyntaxError> {
        let is_test = match self.token() {
            Some(Token::Arithmetic(_)) => true,
            Some(Token::Word(raw)) => matches!(raw.bare(), Some("[" | "[[" | "test" | "!")),
            _ => false,
        };
        match status {
            // A program's success is unknown if a test follows it, and assumed otherwise.
            Status::Ran if is_test => Ok((and, Some((and, Err(None))))),
            Status::Ran => Ok((and, None)),
            Status::Test(Ok(holds)) => Ok((*holds == and, None)),
            Status::Test(undecided) if is_test => Ok((true, Some((and, undecided.clone())))),
            Status::Test(undecided) => {
                let at = self.at;
                let begin = self.tokens[..at.saturating_sub(1)]
                    .iter()
                    .rposition(|token| matches!(token, Token::End | Token::Clause));
                let text = shown(&self.tokens[begin.map_or(0, |at| at + 1)..at.saturating_sub(1)]);
                let holds = self.assume((at, text), undecided.clone().err().flatten(), None) == 1;
                *status = Status::Test(Ok(holds));
                Ok((holds == and, None))
            }
        }
    }

    /// Chooses at an undecided condition: index of a branch of `case`, or 1 if it holds, else 0.
    pub(super) fn assume(
        &mut self,
        (at, text): (usize, String),
        unknown: Option<String>,
        branches: Option<Vec<String>>,
    ) -> usize {
        let condition = (self.path.to_owned(), at);
        let choices = branches.unwrap_or_else(|| vec!["false".to_owned(), "true".to_owned()]);
        let usual = choices.iter().position(|choice| choice == "*");
        let assumed = self.around.assumed.get(&condition).copied();
        let assumed = assumed.or(usual).unwrap_or(0).min(choices.len() - 1);
        let line = self.line(at);
        self.script.undecided.push(Undecided {
            condition,
            line,
            text,
            unknown,
            choices,
            assumed,
        });
        assumed
    }

    /// Reads one command.
    fn command(&mut self, runs: bool) -> Result<Status, SyntaxError> {
        let mut inverted = false;
        while self.take(&["!"]).is_some() {
            inverted = !inverted;
        }
        let status = match self.token() {
            Some(Token::Word(raw)) => self.of_word(raw, runs)?,
            Some(Token::Open) => {
                self.at += 1;
                self.block(&[")"], runs)?.0
            }
            Some(Token::Arithmetic(raw)) => {
                self.at += 1;
                self.calculation(raw, runs)
            }
            Some(Token::Here(text, line)) => {
                self.at += 1;
                self.here_document(text, *line, runs)?;
                Status::Ran
            }
            _ => Status::Ran,
        };
        Ok(match status {
            Status::Test(found) if inverted => Status::Test(condition::not(found)),
            status => status,
        })
    }

    fn of_word(&mut self, raw: &Raw, runs: bool) -> Result<Status, SyntaxError> {
        let Some(word) = raw.bare() else {
            return self.simple(runs);
        };
        let begin = self.at;
        self.at += 1;
        match word {
            "if" => self.branches(runs)?,
            "case" => self.cases(runs)?,
            "for" | "select" => self.for_each(runs)?,
            "while" | "until" => self.repeated(word == "while", runs)?,
            "{" => return Ok(self.block(&["}"], runs)?.0),
            "[[" | "[" | "test" => return self.test(word, runs),
            "export" | "declare" | "local" | "readonly" | "typeset" => {
                let option = |raw: &Raw| raw.bare().is_some_and(|text| text.starts_with('-'));
                while self.word().is_some_and(option) {
                    self.at += 1;
                }
                return self.simple(runs);
            }
            _ => {
                self.at = begin;
                return self.simple(runs);
            }
        }
        Ok(Status::Ran)
    }

    /// Reads an `if` command from the word after `if` to its `fi`; runs the branch that its conditions choose.
    fn branches(&mut self, runs: bool) -> Result<(), SyntaxError> {
        let mut open = runs;
        loop {
            let begin = self.at;
            let (status, _) = self.block(&["then"], open)?;
            let holds = open && self.holds(status, begin);
            let (_, end) = self.block(&["elif", "else", "fi"], holds)?;
            open &= !holds;
            match end {
                "elif" => {}
                "else" => return self.block(&["fi"], open).map(|_| ()),
                _ => return Ok(()),
            }
        }
    }

    /// Whether the condition that begins at token `begin` holds, or is assumed to.
    fn holds(&mut self, status: Status, begin: usize) -> bool {
        let unknown = match status {
            Status::Test(Ok(holds)) => return holds,
            Status::Test(Err(unknown)) => unknown,
            Status::Ran => None,
        };
        let text = shown(&self.tokens[begin..self.at.saturating_sub(1)]);
        self.assume((begin + 1, text), unknown, None) == 1
    }

    /// Reads the rest of `while …; do …; done`; a body whose condition is a program is run once.
    fn repeated(&mut self, wanted: bool, runs: bool) -> Result<(), SyntaxError> {
        let begin = self.at;
        let (status, _) = self.block(&["do"], runs)?;
        let live = runs
            && match status {
                Status::Ran => true,
                status => self.holds(status, begin) == wanted,
            };
        self.block(&["done"], live).map(|_| ())
    }

    /// Reads the rest of `for NAME in …; do …; done`. Follows the body at most once, NAME unknown.
    fn for_each(&mut self, runs: bool) -> Result<(), SyntaxError> {
        let mut live = runs;
        if let Some(raw) = self.word() {
            self.at += 1;
            let mut values = 0;
            self.take(&["in"]);
            while let Some(raw) = self.word().filter(|_| runs) {
                self.at += 1;
                values += self.words(raw)?.len();
            }
            live = runs && values > 0;
            if let Some(name) = raw.bare().filter(|_| live) {
                self.script.variables.remove(name);
                self.script.varying.insert(name.to_owned());
            }
        }
        self.block(&["do"], false)?;
        self.block(&["done"], live).map(|_| ())
    }

    /// Reads the rest of `[ … ]`, `[[ … ]]` or `test …`.
    fn test(&mut self, kind: &str, runs: bool) -> Result<Status, SyntaxError> {
        let double = kind == "[[";
        let end: &[&'static str] = match kind {
            "[[" => &["]]"],
            "[" => &["]"],
            _ => &[],
        };
        let mut parts = Vec::new();
        while self.take(end).is_none() {
            let part = match self.token() {
                None => break,
                Some(Token::Word(raw)) => {
                    if runs {
                        self.operands(raw, double, &mut parts)?;
                    }
                    self.at += 1;
                    continue;
                }
                Some(Token::And) if double => Some(Part::And),
                Some(Token::Or) if double => Some(Part::Or),
                Some(Token::Open) if double => Some(Part::Open),
                Some(Token::Close) if double => Some(Part::Close),
                Some(_) if double => None,
                Some(_) => break,
            };
            self.at += 1;
            parts.extend(part);
        }
        // Redirections follow.
        while self.word().is_some() {
            self.at += 1;
        }
        Ok(match runs {
            true => Status::Test(condition::decide(&parts, double, self.script)),
            false => Status::Ran,
        })
    }

    /// Expands a word of a test into `parts`.
    fn operands(
        &mut self,
        raw: &Raw,
        double: bool,
        parts: &mut Vec<Part>,
    ) -> Result<(), SyntaxError> {
        match raw.bare() {
            Some("-a") if !double => parts.push(Part::And),
            Some("-o") if !double => parts.push(Part::Or),
            _ => {
                let words = match double {
                    true => self.joined(raw)?,
                    false => self.words(raw)?,
                };
                let quoted = raw.pieces.iter().any(|piece| match piece {
                    Piece::Text(_, quoted) | Piece::Variable { quoted, .. } => *quoted,
                    Piece::Arithmetic(_) => true,
                });
                let words = words.iter().map(|word| settled(&word.text, self.script));
                // An empty word without quotes vanishes.
                let words = words.filter(|word| double || quoted || *word != Ok(String::new()));
                parts.extend(words.map(Part::Word));
            }
        }
        Ok(())
    }

    /// Runs `((…))`, which may set a variable.
    fn calculation(&mut self, raw: &Raw, runs: bool) -> Status {
        let words = joined(raw, self.script).filter(|_| runs);
        let Some(text) = words.and_then(|words| words.into_iter().next()) else {
            return Status::Ran;
        };
        let text = text.text;
        let Some((name, value)) = condition::assigned(&text) else {
            let found = condition::calculated(&text, self.script);
            return Status::Test(found.map(|value| value != 0));
        };
        let found = condition::calculated(&value, self.script);
        let text = found.map_or_else(
            |unknown| unknown.unwrap_or_else(|| format!("$({value})")),
            |value| value.to_string(),
        );
        let line = raw.line;
        let words = vec![Word { text, line }];
        self.script.variables.insert(name, words);
        Status::Ran
    }

    /// Follows the commands of a here-document, as far as it is a script.
    fn here_document(&mut self, text: &str, line: usize, runs: bool) -> Result<(), SyntaxError> {
        if !runs || self.sourced >= MOST_SOURCED {
            return Ok(());
        }
        // Here-documents may hold other text: errors are ignored.
        self.source(text, (self.path, line)).or(Ok(()))
    }

    /// Runs text in place, as `source` does.
    fn source(&mut self, text: &str, begin: (&str, usize)) -> Result<(), SyntaxError> {
        run(text, begin, self.around, self.script, self.sourced + 1)
    }

    /// Reads a simple command, which starts with no keyword such as `if` or `for`: assignments,
    /// then a program with its arguments. The file of `source FILE` is followed in place.
    fn simple(&mut self, runs: bool) -> Result<Status, SyntaxError> {
        let mut words = Vec::new();
        while let Some(raw) = self.word() {
            self.at += 1;
            match assignment(raw).filter(|_| words.is_empty()) {
                Some(assigned) => self.assign(assigned, raw.line, runs)?,
                None if runs => words.extend(self.words(raw)?),
                None => {}
            }
        }
        let first = words.first().map_or("", |word| word.text.as_str());
        let status = match first {
            "true" | ":" | "" => Status::Test(Ok(true)),
            "false" => Status::Test(Ok(false)),
            _ => Status::Ran,
        };
        if matches!(first, "source" | ".") && self.sourced < MOST_SOURCED {
            let base = words.get(1).and_then(|w| w.text.rsplit('/').next());
            let base = base.unwrap_or_default().to_owned();
            if let Some(text) = (self.around.include)(&base) {
                self.source(&text, (&base, 1))?;
                return Ok(status);
            }
        }
        let of_a_shell = script_of_a_shell(&words).filter(|_| self.sourced < MOST_SOURCED);
        let text = of_a_shell.map(|at| words.remove(at));
        if !words.is_empty() {
            self.script.commands.push(words);
        }
        if let Some(text) = text {
            self.script_in_a_word(text);
        }
        Ok(status)
    }

    /// Runs the lines of a script that another shell is given. A script that is not understood is kept as one word.
    fn script_in_a_word(&mut self, text: Word) {
        if self.source(&text.text, (self.path, text.line)).is_err() {
            self.script.commands.push(vec![text]);
        }
    }

    /// What a word stands for, as in an assignment.
    pub(super) fn joined(&mut self, raw: &Raw) -> Result<Vec<Word>, SyntaxError> {
        let words = joined(raw, self.script);
        self.script.made(words, self.path, raw.line)
    }

    /// Expands a word into words; `${NAME:=…}` also sets the variable.
    fn words(&mut self, raw: &Raw) -> Result<Vec<Word>, SyntaxError> {
        let words = self
            .script
            .made(expand(raw, self.script), self.path, raw.line)?;
        for piece in &raw.pieces {
            if let Piece::Variable { name, other, .. } = piece
                && let Some(Other::Else(_, true)) = other
            {
                let line = raw.line;
                let pieces = vec![piece.clone()];
                let value = self.joined(&Raw { pieces, line })?;
                self.script.variables.insert(name.clone(), value);
            }
        }
        Ok(words)
    }

    /// Sets a variable, or an array, whose elements follow in parentheses.
    fn assign(&mut self, assigned: Assignment, line: usize, runs: bool) -> Result<(), SyntaxError> {
        let array = matches!(self.token(), Some(Token::Open));
        let words = if array {
            self.elements(line, runs)?
        } else if runs {
            self.joined(&assigned.value)?
        } else {
            Vec::new()
        };
        if !runs {
            return Ok(());
        }
        let slot = self.script.variables.entry(assigned.name).or_default();
        if assigned.append && array {
            slot.extend(words);
        } else if assigned.append {
            let text = |words: &[Word]| words.first().map_or(String::new(), |w| w.text.clone());
            let text = text(slot) + &text(&words);
            *slot = vec![Word { text, line }];
        } else {
            *slot = words;
        }
        Ok(())
    }

    fn elements(&mut self, line: usize, runs: bool) -> Result<Vec<Word>, SyntaxError> {
        let mut words = Vec::new();
        while let Some(token) = self.token() {
            self.at += 1;
            match token {
                Token::Close => return Ok(words),
                Token::Word(raw) if runs => words.extend(self.words(raw)?),
                _ => {}
            }
        }
        Err(SyntaxError::new(self.path, line, "`(` is not closed"))
    }
}

/// The index of the word that is an inline script, such as the quoted text in `srun bash -c '…'`. `None` if the command has none, or
/// one of a single line.
fn script_of_a_shell(words: &[Word]) -> Option<usize> {
    let shells = ["bash", "sh"];
    let at = words.windows(2).position(|pair| {
        let [name, option] = pair else { return false };
        let name = name.text.rsplit('/').next().unwrap_or_default();
        shells.contains(&name) && matches!(option.text.as_str(), "-c" | "-lc")
    })?;
    let text = words.get(at + 2)?;
    text.text.contains('\n').then_some(at + 2)
}
