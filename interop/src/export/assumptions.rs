//! What a prediction assumed of kernels, and what the launched system does instead.

use std::collections::BTreeSet;

use catalog::runtime::Rewrite;

/// An assumption of the prediction that the target does not meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assumption {
    /// The rewrite of the operator graph in which they differ.
    pub rewrite: Rewrite,
    /// Whether the target performs it, though the prediction assumed that it does not; otherwise the contrary.
    pub performed: bool,
    /// Why.
    pub why: String,
}

/// How a target stands to a rewrite, for one plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stance {
    /// The file says it, either way.
    Written,
    /// It always performs it.
    Always(&'static str),
    /// It never performs it.
    Never(&'static str),
    /// The user's own model code performs it or not.
    Yours,
    /// Nothing in this plan could be rewritten so.
    Absent,
}

/// The assumptions that a target does not meet, given how it stands to each rewrite.
pub(crate) fn unmet(
    assumed: &BTreeSet<Rewrite>,
    stance: impl Fn(Rewrite) -> Stance,
) -> Vec<Assumption> {
    let differs = |rewrite: Rewrite| {
        let (performed, why) = match stance(rewrite) {
            Stance::Written | Stance::Yours | Stance::Absent => return None,
            Stance::Always(why) => (true, why),
            Stance::Never(why) => (false, why),
        };
        let differs = performed != assumed.contains(&rewrite);
        differs.then(|| Assumption {
            rewrite,
            performed,
            why: why.to_owned(),
        })
    };
    Rewrite::ALL.into_iter().filter_map(differs).collect()
}

/// What the prediction assumed and only the user's own model code can do, as one sentence; none where it assumed nothing.
pub(crate) fn yours(
    assumed: &BTreeSet<Rewrite>,
    stance: impl Fn(Rewrite) -> Stance,
) -> Option<String> {
    let names: Vec<String> = assumed
        .iter()
        .filter(|rewrite| stance(**rewrite) == Stance::Yours)
        .map(|rewrite| rewrite.name())
        .collect();
    let list = names.join(", ");
    (!names.is_empty()).then(|| format!("the prediction assumed of your model's code: {list}"))
}
