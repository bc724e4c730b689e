//! Words as written in a script: which of them set variables, and how messages show them.

use super::lexer::{Piece, Raw, Token, is_name};

/// A variable that a word sets, or extends if `append`, with the value.
pub(super) struct Assignment {
    pub(super) name: String,
    pub(super) append: bool,
    pub(super) value: Raw,
}

/// Reads `NAME=…` or `NAME+=…`.
pub(super) fn assignment(raw: &Raw) -> Option<Assignment> {
    let Some(Piece::Text(text, false)) = raw.pieces.first() else {
        return None;
    };
    let (name, value) = text.split_once('=')?;
    let (name, append) = match name.strip_suffix('+') {
        Some(name) => (name, true),
        None => (name, false),
    };
    let mut letters = name.chars();
    let head = letters.next()?;
    if !(head.is_ascii_alphabetic() || head == '_') || !letters.all(is_name) {
        return None;
    }
    let mut rest = raw.clone();
    rest.pieces[0] = Piece::Text(value.to_owned(), true);
    Some(Assignment {
        name: name.to_owned(),
        append,
        value: rest,
    })
}

/// Words as written, without quotes, on one line.
pub(super) fn shown(tokens: &[Token]) -> String {
    let parts = tokens.iter().map(|token| match token {
        Token::Word(raw) => written(&raw.pieces),
        Token::Arithmetic(raw) => format!("(({}))", written(&raw.pieces)),
        Token::And => "&&".to_owned(),
        Token::Or => "||".to_owned(),
        Token::Pipe => "|".to_owned(),
        Token::Open => "(".to_owned(),
        Token::Close => ")".to_owned(),
        Token::End | Token::Clause | Token::Here(..) => String::new(),
    });
    let parts: Vec<String> = parts.filter(|part| !part.is_empty()).collect();
    parts.join(" ")
}

fn written(pieces: &[Piece]) -> String {
    let pieces = pieces.iter().map(|piece| match piece {
        Piece::Text(text, _) => text.clone(),
        Piece::Variable { name, .. } => format!("${name}"),
        Piece::Arithmetic(inner) => format!("$(({}))", written(inner)),
    });
    pieces.collect()
}
