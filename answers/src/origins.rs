//! The inputs of a prediction as rows, with where each value came from.

use std::collections::{BTreeMap, BTreeSet};

use reports::InputFact;

use crate::inputs::InputsJson;

/// Where values come from that the command line does not give.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rest {
    /// The tool's defaults.
    #[default]
    Default,
    /// A plan file, which gives all of them.
    Plan,
}

/// Which values were given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    flags: BTreeSet<String>,
    /// Flags whose default the user set, each with the variable or file that sets it.
    set: BTreeMap<String, String>,
    rest: Rest,
}

impl Asked {
    /// Values given by `flags`; `set` has flags whose default the user set, and what sets each.
    #[must_use]
    pub fn these(flags: BTreeSet<String>, set: BTreeMap<String, String>) -> Self {
        Self {
            flags,
            set,
            rest: Rest::Default,
        }
    }

    /// All inputs come from the plan file, except the headroom if the file does not give it.
    pub fn in_plan(says_headroom: bool) -> Self {
        let silent = (!says_headroom).then(|| "headroom".to_owned());
        Self {
            flags: silent.into_iter().collect(),
            set: BTreeMap::new(),
            rest: Rest::Plan,
        }
    }

    /// Whether a flag, by the name of its argument, was given.
    #[must_use]
    pub fn says(&self, flag: &str) -> bool {
        self.flags.contains(flag)
    }

    fn origin(&self, flag: &str) -> String {
        let set = self.set.get(flag).map(String::as_str);
        match (self.rest, self.flags.contains(flag)) {
            (Rest::Default, true) => "asked",
            (Rest::Plan, false) => "plan file",
            (Rest::Default, false) => set.unwrap_or("default"),
            (Rest::Plan, true) => "default",
        }
        .to_owned()
    }
}

/// Inputs as rows for people.
pub fn rows(json: &InputsJson, asked: &Asked) -> Vec<InputFact> {
    let billions = json.parameters as f64 / 1e9;
    let text = match &json.text_of {
        Some(kind) => format!("; the text part of {kind}, which alone is planned"),
        None => String::new(),
    };
    let left_out = json.left_out();
    let left_out = left_out.map_or_else(String::new, |what| format!(", {what}"));
    let model = format!(
        "{} ({billions:.2} B parameters{text}){left_out}",
        json.model
    );
    let batch = format!("{} sequences", json.global_batch);
    let mut values = vec![
        ("model", "model", model),
        ("cluster", "cluster", json.cluster.clone()),
        ("gpus", "GPUs", json.gpus.to_string()),
        ("runtime", "runtime", json.runtime.clone()),
        ("seq", "sequence", json.sequence()),
        ("global_batch", "global batch", batch),
        ("precision", "precision", json.precision.name().to_owned()),
        ("headroom", "memory headroom", percent(json.headroom)),
    ];
    if let (Some(lengths), Some(packing)) = (&json.lengths, json.packing) {
        values.push(("lengths", "documents", lengths.clone()));
        values.push(("packing", "packing", packing.to_string()));
    }
    let adapters = json.adapters.clone();
    values.extend(adapters.map(|adapters| ("lora", "adapters (LoRA)", adapters)));
    let row = |(flag, name, value)| InputFact {
        name,
        value,
        origin: asked.origin(flag),
    };
    let mut rows: Vec<InputFact> = values.into_iter().map(row).collect();
    if let Some(profile) = &json.profile {
        let measured = InputFact {
            name: "profile",
            value: profile.clone(),
            origin: "cluster file".to_owned(),
        };
        rows.insert(2, measured);
    }
    rows
}

/// A share with all its digits, so that the value shown is the one that the command gives.
fn percent(share: f64) -> String {
    let percent = (share * 1e8).round() / 1e6;
    format!("{percent}%")
}
