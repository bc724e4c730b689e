//! Twenty questions for which experts published a layout: the plan found is at least as fast, fits with the usual
//! probability, and stands among different layouts. The table in `docs/published_layouts.md` is made here, by
//! `VESCALE_GOLDENS=write cargo test -p vescale-planner --test published_layouts`.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use catalog::{Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use planner::{Constraints, RISK, SearchOptions, SearchSpace, explain, search, simplicity};
use plans::{Candidate, Prediction};
use serde::Deserialize;

/// Fewest different layouts among the first five plans.
const LAYOUTS: usize = 4;

/// A question, with the layout that experts published for it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    model: String,
    cluster: String,
    gpus: u64,
    runtime: String,
    precision: Precision,
    seq_len: u64,
    batch: u64,
    strategy: String,
    source: String,
}

impl Question {
    fn scenario(&self) -> Scenario {
        Scenario {
            model: catalog::load::model(&self.model).expect("a preset"),
            cluster: catalog::load::cluster(&self.cluster).expect("a preset"),
            runtime: catalog::load::runtime(&self.runtime).expect("a preset"),
            workload: Workload::new(WorkloadSizes {
                gpus: self.gpus,
                seq_len: self.seq_len,
                global_batch: self.batch,
                precision: self.precision,
            })
            .expect("a workload"),
            headroom: 0.0,
        }
    }
}

/// The published layout beside the plans found.
struct Answer {
    published: Prediction,
    /// The best plans within the usual risk.
    top: Vec<Candidate>,
    /// The best plan at the risk of the published layout, if that is more than the usual one.
    at_its_risk: Option<Candidate>,
}

impl Answer {
    fn new(question: &Question) -> Self {
        let scenario = question.scenario();
        let costs = CostModel::new(scenario.clone()).expect("priced");
        let space = SearchSpace::new(&scenario, &Constraints::default());
        let within = |risk: f64, top: usize| {
            let options = SearchOptions {
                top,
                risk: Some(risk),
                ..SearchOptions::default()
            };
            let found = search(&costs, &space, &options, &|_| {});
            found.expect("searched").top
        };
        let Scenario {
            model,
            workload,
            runtime,
            ..
        } = &scenario;
        let strategy = plans::grammar::parse(&question.strategy, model, workload, runtime)
            .unwrap_or_else(|e| panic!("{}: {e}", question.strategy));
        let published = costs.predict(&strategy).expect("predicted");
        let own = 1.0 - published.p_fits;
        Self {
            at_its_risk: (own > RISK)
                .then(|| within(own.min(0.999), 1))
                .and_then(|top| top.into_iter().next()),
            top: within(RISK, 5),
            published,
        }
    }

    /// The plan that the published layout is compared with: the best one at the same risk.
    fn rival(&self) -> Option<&Candidate> {
        self.at_its_risk.as_ref().or(self.top.first())
    }

    fn layouts(&self) -> usize {
        let layout = |c: &Candidate| simplicity::layout(&c.strategy);
        self.top.iter().map(layout).collect::<BTreeSet<_>>().len()
    }

    fn row(&self, question: &Question) -> String {
        let runtime = catalog::load::runtime(&question.runtime).expect("a preset");
        let cell = |c: Option<&Candidate>| {
            c.map_or_else(
                || "–".to_owned(),
                |c| {
                    format!(
                        "{:.3} s, {:.0}%: `{}`",
                        c.prediction.step_time.0,
                        c.prediction.p_fits * 100.0,
                        plans::grammar::written(&c.strategy, &runtime)
                    )
                },
            )
        };
        let why = self.rival().map_or_else(String::new, |best| {
            explain::why_not_first(&best.prediction, &self.published, "")
        });
        format!(
            "| {} on {} {}, {} ({}) | {:.3} s, {:.0}%: `{}` | {} | {} | {} |\n",
            question.model,
            question.gpus,
            question.cluster,
            question.runtime,
            question.source,
            self.published.step_time.0,
            self.published.p_fits * 100.0,
            question.strategy,
            cell(self.top.first()),
            cell(self.at_its_risk.as_ref()),
            why
        )
    }

    /// The faults of an answer; empty if there are none.
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self
            .top
            .first()
            .is_some_and(|c| c.prediction.p_fits < 1.0 - RISK)
        {
            faults.push("the plan found may not fit".to_owned());
        }
        if self.layouts() < LAYOUTS.min(self.top.len()) || self.top.is_empty() {
            faults.push(format!("only {} layouts", self.layouts()));
        }
        match self.rival() {
            Some(best) if best.prediction.step_time <= self.published.step_time => {}
            Some(best) => faults.push(format!(
                "the published layout is faster: {} against {}",
                self.published.step_time.0, best.prediction.step_time.0
            )),
            None => faults.push("nothing fits".to_owned()),
        }
        faults
    }
}

#[test]
fn plans_are_at_least_as_fast_as_published_layouts() {
    let text = include_str!("published_layouts.yaml");
    let questions: Vec<Question> = serde_saphyr::from_str(text).expect("questions");
    assert!(questions.len() >= 20);
    let mut table = String::from(HEADER);
    let mut faults = Vec::new();
    for question in &questions {
        let answer = Answer::new(question);
        let _ = write!(table, "{}", answer.row(question));
        let asked = format!("{} {} {}", question.model, question.gpus, question.runtime);
        faults.extend(answer.faults().into_iter().map(|f| format!("{asked}: {f}")));
    }
    assert!(faults.is_empty(), "{}\n{table}", faults.join("\n"));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/published_layouts.md");
    if std::env::var("VESCALE_GOLDENS").is_ok_and(|v| v == "write") {
        std::fs::write(path, table).expect("written");
    } else {
        let kept = std::fs::read_to_string(path).expect("the table");
        assert!(
            kept == table,
            "docs/published_layouts.md is old; the new table:\n{table}"
        );
    }
}

const HEADER: &str = "\
# Published layouts

Layouts that experts published, beside the best plan that a search finds for the same model, machine, training system and
batch: step time as predicted, the probability that it fits, and the plan. A layout whose own probability to fit is below
90% is compared with the best plan at the same risk. The questions and their sources stand in
`planner/tests/published_layouts.yaml`; the table is made by
`VESCALE_GOLDENS=write cargo test -p vescale-planner --test published_layouts`, and a test holds that no published layout
is faster.

| question (source) | published | found | found at the same risk | the published layout against it |
|---|---|---|---|---|
";
