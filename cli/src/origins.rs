//! The inputs of a prediction as rows, with where each value came from.

use std::collections::{BTreeMap, BTreeSet};

use clap::ArgMatches;
use clap::parser::ValueSource;

use crate::inputs::InputsJson;
use crate::settings::Settings;

/// Where values come from that the command line does not give.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Rest {
    /// The tool's defaults.
    #[default]
    Default,
    /// A plan file, which gives all of them.
    Plan,
}

/// Which values were given on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    flags: BTreeSet<String>,
    /// Flags whose default the user set, each with the variable or file that sets it.
    set: BTreeMap<String, String>,
    rest: Rest,
}

/// One input: its name, value and origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    pub(crate) origin: String,
}

impl Asked {
    /// The flags of a subcommand that were on the command line.
    pub(crate) fn on(matches: &ArgMatches, settings: &Settings) -> Self {
        let Some((_, matches)) = matches.subcommand() else {
            return Self::default();
        };
        let given =
            |id: &&clap::Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
        let flags = matches.ids().filter(given).map(|id| id.to_string());
        let set = matches.ids().filter_map(|id| {
            let setting = settings.get(&id.as_str().replace('_', "-"))?;
            Some((id.to_string(), setting.origin.clone()))
        });
        Self {
            flags: flags.collect(),
            set: set.collect(),
            rest: Rest::Default,
        }
    }

    /// All inputs come from the plan file, except the headroom if the file does not give it.
    pub(crate) fn in_plan(says_headroom: bool) -> Self {
        let silent = (!says_headroom).then(|| "headroom".to_owned());
        Self {
            flags: silent.into_iter().collect(),
            set: BTreeMap::new(),
            rest: Rest::Plan,
        }
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
pub(crate) fn rows(json: &InputsJson, asked: &Asked) -> Vec<Row> {
    let billions = json.parameters as f64 / 1e9;
    let values = [
        (
            "model",
            "model",
            format!("{} ({billions:.2} B parameters)", json.model),
        ),
        ("cluster", "cluster", json.cluster.clone()),
        ("gpus", "GPUs", json.gpus.to_string()),
        ("runtime", "runtime", json.runtime.clone()),
        ("seq", "sequence", format!("{} tokens", json.seq_len)),
        (
            "global_batch",
            "global batch",
            format!("{} sequences", json.global_batch),
        ),
        (
            "precision",
            "precision",
            format!("{:?}", json.precision).to_lowercase(),
        ),
        ("headroom", "memory headroom", percent(json.headroom)),
    ];
    let mut rows: Vec<Row> = values
        .into_iter()
        .map(|(flag, name, value)| Row {
            name,
            value,
            origin: asked.origin(flag),
        })
        .collect();
    if let Some(profile) = &json.profile {
        let measured = Row {
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
