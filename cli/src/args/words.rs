//! The words of the command line, before they are parsed.

use catalog::Mistake;

/// The words of the command line. Bytes that are no text stand in them as `�`; `refuse_other_text` refuses such words.
pub(crate) fn given() -> impl Iterator<Item = String> {
    std::env::args_os().map(|word| word.to_string_lossy().into_owned())
}

/// Refuses words of the command line that are not UTF-8: answers, plans and the commands that they suggest hold paths as text.
pub(crate) fn refuse_other_text() -> Result<(), Mistake> {
    let mut given = std::env::args_os().skip(1);
    match given.find(|word| word.to_str().is_none()) {
        None => Ok(()),
        Some(word) => Err(Mistake::new("an argument is not text in UTF-8")
            .at(word.to_string_lossy())
            .expected("UTF-8; a file with another name can be renamed, or reached by a link")),
    }
}
