//! What the page shows.

use std::path::Path;
use std::sync::Arc;

use answers::{AnswerError, Found, Search, file_names, inputs};
use catalog::Mistake;
use costmodel::CostModel;
use planner::{Constraints, SearchOptions};
use reports::lines::Style;
use serde::Serialize;

use crate::question::Asked;

/// An answer, or why there is none.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// What was found.
    Found(Box<Files>),
    /// What is wrong with the question.
    Mistake(Wrong),
}

/// The answer in every form that the command line gives.
#[derive(Serialize)]
pub(crate) struct Files {
    /// Whether a plan fits.
    fits: bool,
    /// What a terminal shows.
    text: String,
    /// What `search --json` prints.
    json: String,
    /// The plan file, unless nothing fits.
    plan: Option<File>,
    /// The HTML report.
    report: File,
}

/// A file to keep.
#[derive(Serialize)]
struct File {
    name: String,
    text: String,
}

/// A mistake in a question.
#[derive(Serialize)]
pub(crate) struct Wrong {
    what: String,
    place: Option<String>,
    expected: Option<String>,
    nearest: Option<String>,
    example: Option<String>,
}

impl Answer {
    /// The answer to a question. `now` are milliseconds on a clock.
    pub(crate) fn to(
        asked: &Asked,
        columns: u32,
        now: &dyn Fn() -> f64,
        progress: &(dyn Fn(f64) + Sync),
    ) -> Self {
        match searched(asked, columns, now, progress) {
            Ok(files) => Self::Found(Box::new(files)),
            Err(error) => Self::none(error.mistake()),
        }
    }

    /// No answer, because of a mistake.
    pub(crate) fn none(mistake: Mistake) -> Self {
        Self::Mistake(Wrong {
            what: mistake.what,
            place: mistake.place,
            expected: mistake.expected,
            nearest: mistake.nearest,
            example: mistake.example,
        })
    }
}

fn searched(
    asked: &Asked,
    columns: u32,
    now: &dyn Fn() -> f64,
    progress: &(dyn Fn(f64) + Sync),
) -> Result<Files, AnswerError> {
    let started = now();
    let inputs = inputs::resolve(&asked.question()?)?;
    let training = asked.training(&inputs.scenario.cluster)?;
    let search = Search {
        constraints: &Constraints::default(),
        options: SearchOptions {
            top: answers::search::TOP,
            ..SearchOptions::default()
        },
        by_cost: false,
        in_use: None,
        compared: None,
        progress,
    };
    let costs = || CostModel::new(inputs.scenario.clone()).map(Arc::new);
    let answer = search.find(&inputs, costs)?;
    let elapsed_s = (now() - started) / 1000.0;
    let found = Found {
        answer: &answer,
        asked: &asked.given(),
        read: None,
        training,
        risk: planner::RISK,
    };
    files(&found, elapsed_s, columns)
}

fn files(found: &Found<'_>, elapsed_s: f64, columns: u32) -> Result<Files, AnswerError> {
    let name = file_names::plan(&found.answer.inputs.json);
    let beside = |ending| {
        let path = file_names::derived(Path::new(&name), ending);
        path.display().to_string()
    };
    let (plan, report) = match found.best() {
        Some(best) => {
            let plan = found.plan(best)?;
            let report = File {
                name: beside(file_names::REPORT),
                text: found.report(best, &plan, &name)?,
            };
            let plan = File {
                name: name.clone(),
                text: plan.to_yaml()?,
            };
            (Some(plan), report)
        }
        None => {
            let report = File {
                name: beside(file_names::NOTHING_FITS),
                text: found.nothing(),
            };
            (None, report)
        }
    };
    let style = Style {
        width: columns as usize,
        colour: false,
    };
    let plan_name = plan.as_ref().map(|plan| plan.name.clone());
    let steps = found.steps(plan_name.as_deref());
    let json = found.json(elapsed_s, plan_name, Some(report.name.clone()));
    Ok(Files {
        fits: plan.is_some(),
        text: found.text(elapsed_s, style) + &reports::terminal::next(&steps, style),
        json: answers::json(&json)?,
        plan,
        report,
    })
}
