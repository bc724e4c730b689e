//! What a training system cannot express: refusals and notes, collected while an exporter writes, and the error
//! that lists them.

/// A decision that the target cannot express.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The decision, as `--strategy` or the command line writes it, such as `zero=2`.
    pub decision: String,
    /// Why not.
    pub why: String,
    /// The choice to make instead, as key and value of `--strategy`; none when it is no decision of
    /// the strategy.
    pub instead: Option<(&'static str, String)>,
}

/// Why there is no export.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// No such target.
    #[error("unknown target `{asked}`; {hint}targets: {known}")]
    UnknownTarget {
        /// What was asked.
        asked: String,
        /// Did you mean.
        hint: String,
        /// All targets.
        known: String,
    },
    /// No such version of the target.
    #[error("{target} has no version `{asked}`; versions: {known}")]
    UnknownVersion {
        /// Target.
        target: String,
        /// What was asked.
        asked: String,
        /// Its versions, the default first.
        known: String,
    },
    /// The target cannot express the plan.
    #[error("{target} cannot express this plan:{}", listed(refusals))]
    Inexpressible {
        /// Target and version.
        target: String,
        /// What it cannot express, with what it can.
        refusals: Vec<Refusal>,
    },
}

fn listed(refusals: &[Refusal]) -> String {
    refusals.iter().fold(String::new(), |mut text, r| {
        text.push_str(&format!("\n  {}: {}", r.decision, r.why));
        if let Some((key, value)) = &r.instead {
            text.push_str(&format!("; nearest: {key}={value}"));
        }
        text
    })
}

/// Collects refusals and notes while an exporter writes.
#[derive(Debug, Default)]
pub(crate) struct Limits {
    pub(super) refusals: Vec<Refusal>,
    pub(super) notes: Vec<String>,
}

impl Limits {
    /// Refuses `decision` when `refused`, offering `instead`.
    pub(crate) fn refuse(
        &mut self,
        refused: bool,
        decision: impl Into<String>,
        why: impl Into<String>,
        instead: Option<(&'static str, String)>,
    ) {
        if refused {
            self.refusals.push(Refusal {
                decision: decision.into(),
                why: why.into(),
                instead,
            });
        }
    }

    /// Says something the user should know.
    pub(crate) fn note(&mut self, when: bool, text: impl Into<String>) {
        if when {
            self.notes.push(text.into());
        }
    }
}
