//! Did-you-mean.

/// Alike enough among a few names.
const ALIKE: f64 = 0.72;

/// The candidate most like `input`, if any is alike enough to be what was meant.
#[must_use]
pub fn nearest<S: AsRef<str>>(
    input: &str,
    candidates: impl IntoIterator<Item = S>,
) -> Option<String> {
    nearest_above(input, candidates, ALIKE)
}

/// The same where the likeness must be at least so much: among many names some is always a little
/// alike.
#[must_use]
pub fn nearest_above<S: AsRef<str>>(
    input: &str,
    candidates: impl IntoIterator<Item = S>,
    least: f64,
) -> Option<String> {
    let input = input.to_lowercase();
    candidates
        .into_iter()
        .map(|c| {
            let score = strsim::jaro_winkler(&input, &c.as_ref().to_lowercase());
            (score, c.as_ref().to_owned())
        })
        .filter(|(score, _)| *score > least)
        .max_by(|a, b| a.0.total_cmp(&b.0).then_with(|| b.1.cmp(&a.1)))
        .map(|(_, candidate)| candidate)
}
