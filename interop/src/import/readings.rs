//! What a launch script states: its options, and what else they may be where a condition is not decided by the script.

use std::collections::{BTreeMap, BTreeSet};

use super::error::ImportError;
use super::launch::{Launch, accelerate};
use super::script::{command, options, without_options};
use crate::config::shell::{self, Assumed, Undecided};
use crate::config::{Node, SyntaxError, Value, place};
use crate::export::Dialect;

/// Limit on how often a script is read again, each time with another branch taken at a condition that it does not decide.
const MOST: usize = 64;

/// The options of the training program and the command that starts it, as one way through a script gives them.
pub(super) type Reading = (Node, Launch);

/// Another way through a script, which gives other options.
#[derive(Clone, Debug)]
pub struct Way {
    /// Place of the condition that chooses it, as `file:line`.
    pub place: String,
    /// The condition.
    pub condition: Undecided,
    /// The options that differ.
    pub options: Vec<String>,
}

/// Reads a script with an assumed branch at every condition that it does not decide, and then once for each other branch that
/// gives other options or another launch command.
pub(super) fn readings(
    text: &str,
    path: &str,
    dialect: Dialect,
    include: &dyn Fn(&str) -> Option<String>,
) -> Result<(Reading, Vec<(Way, Reading)>), ImportError> {
    let read = |assumed: &Assumed| -> Result<_, ImportError> {
        let script = shell::parse(text, path, include, assumed)?;
        let command = command(&script);
        let mut launch = Launch::of(&script, &command);
        launch.settings = accelerate(&command.launcher, path, include)?;
        let none = || without_options(&script, path).into();
        let root = options(&command.arguments, dialect).and_then(|root| root.ok_or_else(none));
        Ok((root, launch, script.undecided))
    };
    let (root, launch, undecided) = read(&Assumed::new())?;
    let mut seen = BTreeSet::new();
    let mut open: Vec<(Assumed, Undecided)> = Vec::new();
    let mut others = |open: &mut Vec<_>, taken: &Assumed, undecided: Vec<Undecided>| {
        for undecided in undecided {
            if !seen.insert(undecided.condition.clone()) {
                continue;
            }
            for choice in (0..undecided.choices.len()).filter(|at| *at != undecided.assumed) {
                let mut assumed = taken.clone();
                assumed.insert(undecided.condition.clone(), choice);
                open.push((assumed, undecided.clone()));
            }
        }
    };
    others(&mut open, &Assumed::new(), undecided);
    let mut ways = Vec::new();
    let mut at = 0;
    while let Some((assumed, condition)) = open.get(at).cloned() {
        at += 1;
        if at > MOST {
            let message = "too many conditions are not decided by the script; state their values";
            return Err(SyntaxError::new(path, condition.line, message).into());
        }
        let (other, other_launch, undecided) = read(&assumed)?;
        others(&mut open, &assumed, undecided);
        let Ok(other) = other else { continue };
        let nothing = Node::table();
        let mut options = differing(root.as_ref().unwrap_or(&nothing), &other);
        options.extend((launch != other_launch).then(|| "the launch command".to_owned()));
        if !options.is_empty() {
            let way = Way {
                place: place(&condition.condition.0, condition.line),
                condition,
                options,
            };
            ways.push((way, (other, other_launch)));
        }
    }
    match (root, ways.first()) {
        (Ok(root), _) => Ok(((root, launch), ways)),
        (Err(_), Some((way, _))) => Err(way.error()),
        (Err(error), None) => Err(error),
    }
}

/// Names of the options that have other values.
fn differing(one: &Node, other: &Node) -> Vec<String> {
    let values = |node: &Node| -> BTreeMap<String, Value> {
        let entries = node.entries().iter();
        entries
            .map(|(key, node)| (key.clone(), node.value.clone()))
            .collect()
    };
    let (one, other) = (values(one), values(other));
    let names: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    let names = names
        .into_iter()
        .filter(|name| one.get(*name) != other.get(*name));
    names.cloned().collect()
}

impl Way {
    /// What was assumed, as a sentence.
    #[must_use]
    pub fn assumption(&self) -> String {
        let Undecided {
            text,
            choices,
            assumed,
            ..
        } = &self.condition;
        let assumed = choices.get(*assumed).map_or("false", String::as_str);
        format!("the script does not decide `{text}`, taken as {assumed}")
    }

    /// The error where this way leads to another plan.
    pub(super) fn error(&self) -> ImportError {
        ImportError::Undecided {
            place: self.place.clone(),
            condition: self.condition.text.clone(),
            options: self.options.join(", "),
            how: match &self.condition.unknown {
                Some(unknown) => format!("the value of your runs in place of `{unknown}`"),
                None => "`true` or `false` in its place, as in your runs".to_owned(),
            },
        }
    }
}
