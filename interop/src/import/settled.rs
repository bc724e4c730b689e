//! Values that a script gives whichever way its undecided conditions turn out.

use super::document::Document;
use super::error::ImportError;

/// What is read from a document, if it is the same along every way through its script.
pub(super) fn settled<T: PartialEq>(
    document: &Document,
    read: impl Fn(&Document) -> Result<T, ImportError>,
) -> Result<T, ImportError> {
    let found = read(document);
    let mut others = document.others.iter();
    match others.find(|(_, other)| read(other) != found) {
        Some((way, _)) => Err(way.error()),
        None => found,
    }
}

/// Notes on conditions that the script does not decide and that do not change the plan.
pub(super) fn notes(document: &Document) -> impl Iterator<Item = String> {
    document.others.iter().map(|(way, _)| {
        let (place, assumption) = (&way.place, way.assumption());
        let options = way.options.join(", ");
        format!("{place}: {assumption}: {options} would differ, the strategy would not")
    })
}
