//! The formats in which the files of each training system are written.

use crate::config::SyntaxError;
use crate::export::Dialect;

/// Suffixes of file names, each with the format that it stands for.
const SUFFIXES: [(&str, &str); 5] = [
    ("py", PYTHON),
    ("toml", TOML),
    ("json", JSON),
    ("yaml", YAML),
    ("yml", YAML),
];
const PYTHON: &str = "Python";
const TOML: &str = "TOML";
const JSON: &str = "JSON";
const YAML: &str = "YAML";

/// The formats of a system's files, beside launch scripts.
fn of(dialect: Dialect) -> &'static [&'static str] {
    match dialect {
        _ if dialect.is_python() => &[PYTHON],
        Dialect::Torchtitan02 => &[TOML],
        Dialect::DeepSpeed => &[JSON],
        Dialect::MegatronLm => &[YAML],
        _ => &[YAML, JSON],
    }
}

/// Refuses a file whose name says that it is in a format which the system does not read.
pub(super) fn readable(path: &str, dialect: Dialect) -> Result<(), SyntaxError> {
    let suffix = path.rsplit_once('.').map_or("", |(_, suffix)| suffix);
    let named = SUFFIXES.into_iter().find(|(known, _)| *known == suffix);
    let Some((_, found)) = named.filter(|(_, format)| !of(dialect).contains(format)) else {
        return Ok(());
    };
    let mut others = Dialect::ALL
        .iter()
        .filter(|other| other.target() == dialect.target() && of(**other).contains(&found));
    let other = others.next().map_or_else(String::new, |other| {
        format!("; to read this file, use {}", other.name())
    });
    let message = format!(
        "{} reads {}, and this is {found}{other}",
        dialect.name(),
        of(dialect).join(" or ")
    );
    Err(SyntaxError::new(path, 0, message))
}
