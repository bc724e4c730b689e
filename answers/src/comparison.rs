//! Compares plans: two of them part by part, or several side by side on a page.

use catalog::{Offload, OptimizerStates, Seconds};
use costmodel::Scenario;
use planner::explain::differences;
use plans::json::PredictedJson;
use plans::{Prediction, StagePartition, Strategy};
use reports::format;
use reports::html::compare::{Compared, Fact};
use reports::lines::{Style, of};
use serde::Serialize;

use crate::SCHEMA_VERSION;
use crate::error::AnswerError;
use crate::inputs::InputsJson;
use crate::planned::{CLUSTER, Planned};

#[derive(Serialize)]
struct CompareJson {
    schema_version: u32,
    /// The questions that the plans answer, the first plan's before the second's.
    inputs: [InputsJson; 2],
    /// The strategies of the two plans in the short form.
    strategies: [String; 2],
    first: PredictedJson,
    second: PredictedJson,
    changed: Vec<(String, String, String)>,
    differences: Vec<(String, f64, f64)>,
}

/// Two compared plans.
#[derive(Debug)]
pub struct Comparison {
    inputs: [InputsJson; 2],
    strategies: [String; 2],
    first: Prediction,
    second: Prediction,
    /// Name, value of the first plan and value of the second, of everything that differs: first of the jobs (model, cluster, batch),
    /// then of the strategies.
    changed: Vec<(String, String, String)>,
}

/// Compares two plans.
///
/// # Errors
/// When a plan cannot be priced.
pub fn compare(first: &Planned, second: &Planned) -> Result<Comparison, AnswerError> {
    Ok(Comparison {
        inputs: [first, second].map(|plan| plan.question().clone()),
        strategies: [first, second].map(Planned::written),
        first: first.prediction()?,
        second: second.prediction()?,
        changed: (other_job(first, second).into_iter())
            .chain(changed(first, second))
            .collect(),
    })
}

impl Comparison {
    /// The comparison for programs.
    #[must_use]
    pub fn document(&self) -> impl Serialize {
        let parts = differences(&self.first.breakdown, &self.second.breakdown);
        let parts = parts.into_iter();
        CompareJson {
            schema_version: SCHEMA_VERSION,
            inputs: self.inputs.clone(),
            strategies: self.strategies.clone(),
            first: PredictedJson::from(&self.first),
            second: PredictedJson::from(&self.second),
            changed: self.changed.clone(),
            differences: parts
                .map(|d| (d.name.to_owned(), d.first_s, d.second_s))
                .collect(),
        }
    }

    /// The comparison for people; `names` head the plans' columns.
    #[must_use]
    pub fn text(&self, names: [&str; 2], style: Style) -> String {
        let (a, b) = (&self.first, &self.second);
        let row =
            |name: &str, shown: fn(&Prediction) -> String| [name.to_owned(), shown(a), shown(b)];
        let mut rows = vec![
            row("step time", |p| format::seconds(p.step_time)),
            row("tokens/s/GPU", |p| {
                format::significant(p.tokens_per_s_per_gpu)
            }),
            row("MFU", |p| of(p.mfu)),
            row("MFU, PaLM convention", |p| of(p.mfu_palm)),
            row("peak memory", |p| format::bytes(p.peak_memory)),
            row("fits", |p| {
                if p.fit.fits() { "yes" } else { "no" }.to_owned()
            }),
        ];
        let parts = differences(&a.breakdown, &b.breakdown);
        for d in parts.iter().filter(|d| d.first_s.max(d.second_s) > 1e-6) {
            let time = |s: f64| format::seconds(Seconds(s));
            rows.push([d.name.to_owned(), time(d.first_s), time(d.second_s)]);
        }
        rows.extend(self.changed.iter().map(|(key, x, y)| {
            let [x, y] = [x, y].map(|value| shown(key, value));
            [key.clone(), x, y]
        }));
        let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
        style.columns(&["", names[0], names[1]], &rows)
    }
}

/// A decision's value as strategies are written; consecutive equal stages become a count, such as `4x20/18`.
fn shown(key: &str, value: &str) -> String {
    match key.ends_with("stages") {
        true => StagePartition::read(value).map_or(value.to_owned(), |stages| stages.runs()),
        false => value.to_owned(),
    }
}

/// An HTML page of plans side by side; each plan comes with the name shown above it.
///
/// # Errors
/// When a plan cannot be priced.
pub fn page(plans: &[(String, Planned)]) -> Result<String, AnswerError> {
    let predictions = plans.iter().map(|(_, plan)| plan.prediction());
    let predictions = predictions.collect::<Result<Vec<_>, _>>()?;
    let opened: Vec<&Planned> = plans.iter().map(|(_, plan)| plan).collect();
    let compared = plans.iter().zip(&predictions).zip(facts(&opened));
    let compared: Vec<Compared<'_>> = compared
        .map(|(((name, plan), prediction), facts)| Compared {
            name: name.clone(),
            job: plan.job(),
            facts,
            strategy: plan.written(),
            said: plan.said(),
            prediction,
            fullest: plan.rank(prediction.peak_rank),
        })
        .collect();
    Ok(reports::html::compare::report(
        &compared,
        env!("CARGO_PKG_VERSION"),
    ))
}

/// What each plan is for, fact by fact. A cluster of the first plan's name that is not the same cluster says so.
fn facts(plans: &[&Planned]) -> Vec<Vec<Fact>> {
    let of = |plan: &&Planned| {
        let mut facts = plan.facts().to_vec();
        let of_first = plans[0].facts();
        let other = plan.scenario().cluster != plans[0].scenario().cluster;
        let same_name = (facts.iter_mut().zip(&of_first))
            .filter(|(fact, of_first)| fact.0 == CLUSTER && *fact == *of_first);
        for (fact, _) in same_name.filter(|_| other) {
            fact.1.push_str(" (another of that name)");
        }
        facts
    };
    plans.iter().map(of).collect()
}

/// The facts about the job, such as model and devices, in which two plans differ.
fn other_job(first: &Planned, second: &Planned) -> Vec<(String, String, String)> {
    let both = facts(&[first, second]);
    let facts = both[0].iter().cloned().zip(both[1].iter().cloned());
    facts
        .filter(|(a, b)| a != b)
        .map(|((name, a), (_, b))| (name.to_owned(), a, b))
        .collect()
}

/// Decisions that differ, group by group; or, where plans have different numbers of groups of replicas, these numbers.
fn changed(first: &Planned, second: &Planned) -> Vec<(String, String, String)> {
    let [one, two] = [first.shares(), second.shares()];
    if one.len() != two.len() {
        let [one, two] = [one, two].map(|groups| groups.len().to_string());
        return vec![("groups".to_owned(), one, two)];
    }
    let mut all = Vec::new();
    let alike = one.len() == 1;
    for (number, ((share, a), (other, b))) in (1..).zip(one.into_iter().zip(two)) {
        let key = |key: &str| match alike {
            true => key.to_owned(),
            false => format!("group {number}: {key}"),
        };
        // The batch of a plan whose replicas are all alike is the job's.
        if share != other && !alike {
            all.push((key("sequences"), share.to_string(), other.to_string()));
        }
        let decisions = decisions((a, first.scenario()), (b, second.scenario())).into_iter();
        all.extend(decisions.map(|(name, a, b)| (key(&name), a, b)));
    }
    all
}

/// The keys of two strategies whose values differ. Where only one strategy has a key, the other has its runtime's own value. Values
/// that have no effect, such as the overlap of messages that are never sent, do not differ.
fn decisions(
    first: (&Strategy, &Scenario),
    second: (&Strategy, &Scenario),
) -> Vec<(String, String, String)> {
    let texts =
        [first, second].map(|(strategy, scenario)| strategy.canonical(&scenario.model).to_string());
    let [a, b] = [&texts[0], &texts[1]].map(|text| -> Vec<(&str, &str)> {
        let words = text.split(',');
        words.filter_map(|word| word.split_once('=')).collect()
    });
    let value = |words: &[(&str, &str)], key: &str, scenario: &Scenario| {
        let said = words.iter().find(|(name, _)| *name == key);
        said.map_or_else(|| own(key, scenario), |(_, value)| (*value).to_owned())
    };
    let of_both = |(key, _): &(&str, &str)| {
        let values = (value(&a, key, first.1), value(&b, key, second.1));
        ((*key).to_owned(), values.0, values.1)
    };
    let new = (b.iter()).filter(|(key, _)| a.iter().all(|(name, _)| name != key));
    (a.iter().chain(new).map(of_both))
        .filter(|(_, first, second)| first != second)
        .collect()
}

/// The value that a decision has by default under the scenario's runtime. `key` is its name in strategies.
fn own(key: &str, scenario: &Scenario) -> String {
    let runtime = &scenario.runtime;
    match key {
        "grad_dtype" => runtime.own_gradients(scenario.workload.precision).name(),
        "offload" => Offload::NONE.to_owned(),
        "offload_layers" => "0".to_owned(),
        "prefetch" => "1".to_owned(),
        "dispatcher" => runtime.dispatcher.name().to_owned(),
        "graphs" => runtime.graphs.name().to_owned(),
        "fp8_recipe" => runtime.fp8_recipe.name().to_owned(),
        _ => OptimizerStates::OWN.to_owned(),
    }
}
