//! Suggests a name for a misspelt one.

/// Similarity from which a candidate is suggested, if there are only a few names.
const ALIKE: f64 = 0.72;

/// The candidate most similar to `input`, if it is similar enough to be what was meant.
#[must_use]
pub fn nearest<S: AsRef<str>>(
    input: &str,
    candidates: impl IntoIterator<Item = S>,
) -> Option<String> {
    nearest_above(input, candidates, ALIKE)
}

/// As [`nearest`], for a given least similarity: among many names, some is always a little similar.
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

/// Whether an input of at least five letters differs from a candidate by a slip: at most two
/// letters are missing, doubled, wrong or swapped, or at most four are missing at the end.
pub fn is_slip<S: AsRef<str>>(input: &str, candidates: impl IntoIterator<Item = S>) -> bool {
    let close = |c: S| {
        let rest = c.as_ref().strip_prefix(input);
        let short = rest.is_some_and(|rest| (1..=4).contains(&rest.len()));
        short || (1..=2).contains(&strsim::damerau_levenshtein(input, c.as_ref()))
    };
    input.len() > 4 && candidates.into_iter().any(close)
}
