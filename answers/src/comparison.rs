//! Compares plans: two of them part by part, or several side by side on a page.

use catalog::Seconds;
use planner::explain::differences;
use plans::json::PredictedJson;
use plans::{Prediction, StagePartition};
use reports::html::compare::Compared;
use reports::lines::{Style, of};
use reports::{format, words};
use serde::Serialize;

use crate::SCHEMA_VERSION;
use crate::error::AnswerError;
use crate::opened::Opened;

#[derive(Serialize)]
struct CompareJson {
    schema_version: u32,
    first: PredictedJson,
    second: PredictedJson,
    changed: Vec<(String, String, String)>,
    differences: Vec<(String, f64, f64)>,
}

/// Two compared plans.
#[derive(Debug)]
pub struct Comparison {
    first: Prediction,
    second: Prediction,
    /// Decisions that differ: name, value of the first plan, value of the second.
    changed: Vec<(String, String, String)>,
}

/// Compares two plans.
///
/// # Errors
/// When a plan cannot be priced.
pub fn compare(first: &Opened, second: &Opened) -> Result<Comparison, AnswerError> {
    Ok(Comparison {
        first: first.costs.predict(&first.strategy)?,
        second: second.costs.predict(&second.strategy)?,
        changed: changed(&first.file.strategy_text, &second.file.strategy_text),
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
            first: PredictedJson::from(&self.first),
            second: PredictedJson::from(&self.second),
            changed: self.changed.clone(),
            differences: parts
                .map(|d| (d.name.to_owned(), d.first_s, d.second_s))
                .collect(),
        }
    }

    /// The comparison for people; `names` stand above the plans' columns.
    #[must_use]
    pub fn text(&self, names: [&str; 2], style: Style) -> String {
        let (a, b) = (&self.first, &self.second);
        let row =
            |name: &str, shown: fn(&Prediction) -> String| [name.to_owned(), shown(a), shown(b)];
        let mut rows = vec![
            row("step time", |p| format::seconds(p.step_time)),
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
    match key {
        "stages" => StagePartition::read(value).map_or(value.to_owned(), |stages| stages.runs()),
        _ => value.to_owned(),
    }
}

/// Plans side by side, as HTML; each has the name that stands above it.
///
/// # Errors
/// When a plan cannot be priced.
pub fn page(plans: &[(String, Opened)]) -> Result<String, AnswerError> {
    let predictions = plans.iter().map(|(_, p)| p.costs.predict(&p.strategy));
    let predictions = predictions.collect::<Result<Vec<_>, _>>()?;
    let compared = plans
        .iter()
        .zip(&predictions)
        .map(|((name, p), prediction)| {
            let s = p.costs.scenario();
            Compared {
                name: name.clone(),
                job: format!(
                    "{} on {}, {}",
                    s.model.name,
                    s.cluster.devices(s.workload.gpus),
                    s.runtime.name
                ),
                strategy: plans::grammar::written(&p.strategy, &s.runtime),
                said: words::plan(&p.strategy, s.cluster.gpus_per_node),
                prediction,
            }
        });
    let compared: Vec<Compared<'_>> = compared.collect();
    Ok(reports::html::compare::report(
        &compared,
        env!("CARGO_PKG_VERSION"),
    ))
}

/// Decisions that differ.
fn changed(first: &str, second: &str) -> Vec<(String, String, String)> {
    first
        .split(',')
        .zip(second.split(','))
        .filter(|(a, b)| a != b)
        .filter_map(|(a, b)| {
            let (key, x) = a.split_once('=')?;
            let (_, y) = b.split_once('=')?;
            Some((key.to_owned(), x.to_owned(), y.to_owned()))
        })
        .collect()
}
