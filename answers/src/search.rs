//! The answer to a search in every form in which it is given: JSON, text, plan file, report, next commands.

use catalog::Seconds;
use costmodel::Scenario;
use plans::json::{CandidateJson, DetailJson};
use plans::prediction::SpaceReport;
use plans::{Candidate, GroupJson, PlanFile};
use reports::InputFact;
use reports::format;
use reports::html::nothing::Nothing;
use reports::lines::Style;
use reports::present::Shown;
use reports::terminal::Ground;
use serde::Serialize;

use crate::SCHEMA_VERSION;
use crate::arrangements::{self, Tried};
use crate::budget::{self, Budget, Training};
use crate::error::AnswerError;
use crate::find::Answer;
use crate::inputs::InputsJson;
use crate::launch::{self, Launchable, Step};
use crate::next_change;
use crate::origins::{self, Asked};
use crate::plan;
use crate::present::{InUse, PresentJson, Read};
use crate::report::{self, OfGroups, ReportSource};
use crate::together::Together;

/// Layouts that an answer lists, if no other number is asked for.
pub const TOP: usize = 5;

/// Number of strategies of the space that are looked at for a report; it draws those that come near to fitting.
const DRAWN: u64 = 12_000;
/// [`DRAWN`] for a mixture of experts, most of whose strategies have blocks of their own to price.
const DRAWN_OF_MIXTURE: u64 = 3_000;
/// Strategies that take more than this multiple of the plan's time are not drawn.
const DRAWN_LONGEST: f64 = 2.0;

/// The purpose of a search with the number of GPUs that fits.
const OTHER_GPUS: &str = "plan for the number of GPUs that fits";

/// The answer as a JSON document.
#[derive(Serialize)]
pub struct SearchJson {
    schema_version: u32,
    inputs: InputsJson,
    best: Option<BestJson>,
    detail: Option<DetailJson>,
    /// The best plans, the best first: where `best` has groups of replicas, it is the only one.
    top: Vec<BestJson>,
    /// For each wish other than the shortest step, such as the least memory, the plan that is best by it.
    wishes: Vec<WishJson>,
    space: SpaceReport,
    /// The ways to use the pools of the cluster.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    arrangements: Vec<Tried>,
    relax: Vec<String>,
    /// The strategy in use, if one was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    present: Option<PresentJson>,
    /// Largest probability that a plan does not fit.
    risk: f64,
    budget: Option<Budget>,
    interrupted: bool,
    elapsed_s: f64,
    plan_path: Option<String>,
    report_path: Option<String>,
}

/// A plan of an answer.
#[derive(Serialize)]
pub struct BestJson {
    /// The plan.
    #[serde(flatten)]
    pub plan: CandidateJson,
    /// Its groups of replicas, if not all replicas are alike; its strategy is then that of the first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    groups: Vec<GroupJson>,
}

impl BestJson {
    /// A plan whose replicas are all alike.
    #[must_use]
    pub fn alike(best: &Candidate, scenario: &Scenario) -> Self {
        Self {
            plan: CandidateJson::new(best, &scenario.runtime, scenario.workload.precision),
            groups: Vec::new(),
        }
    }

    /// The best plan of an answer, if any fits.
    #[must_use]
    pub fn of(answer: &Answer) -> Option<Self> {
        answer.outcome.top.first().map(|best| Self {
            groups: (answer.together.as_ref()).map_or_else(Vec::new, Together::json),
            ..Self::alike(best, &answer.inputs.scenario)
        })
    }
}

/// A plan that is best by another measure than step time; `wish` names the measure, such as `least memory`.
#[derive(Serialize)]
struct WishJson {
    wish: String,
    #[serde(flatten)]
    plan: CandidateJson,
}

/// The result of a search, with the question.
#[derive(Clone, Copy)]
pub struct Found<'a> {
    /// What was found, with the question.
    pub answer: &'a Answer,
    /// Which values of the question were given.
    pub asked: &'a Asked,
    /// The strategy in use as it was read, if one was given.
    pub read: Option<&'a Read>,
    /// The training whose days and dollars are asked for.
    pub training: Training,
    /// Largest probability that a plan does not fit.
    pub risk: f64,
}

impl Found<'_> {
    /// The best plan, if any fits.
    #[must_use]
    pub fn best(&self) -> Option<&Candidate> {
        self.answer.outcome.top.first()
    }

    fn in_use(&self) -> Option<InUse<'_>> {
        let compared = self.answer.compared.as_ref()?;
        let read = self.read?;
        Some(InUse { read, compared })
    }

    /// The inputs, each with its origin. If the plan leaves out some of the pools that were asked
    /// for, rows for those that it uses are added.
    fn rows(&self) -> Vec<InputFact> {
        let mut rows = self.rows_of_question();
        if self.answer.outcome.interrupted {
            rows.push(InputFact {
                name: "search",
                value: "interrupted: the best plan until then".to_owned(),
                origin: "Ctrl-C".to_owned(),
            });
        }
        rows
    }

    fn rows_of_question(&self) -> Vec<InputFact> {
        let used = &self.answer.inputs.json;
        let left_out = (self.answer.pools.as_ref()).filter(|(_, gpus)| *gpus != used.gpus);
        let Some((cluster, gpus)) = left_out else {
            return origins::rows(used, self.asked);
        };
        let asked = InputsJson {
            cluster: cluster.clone(),
            gpus: *gpus,
            ..used.clone()
        };
        let of_plan = |name, value: String| InputFact {
            name,
            value,
            origin: "the best use of the pools".to_owned(),
        };
        let mut rows = origins::rows(&asked, self.asked);
        rows.push(of_plan("pools of the plan", used.cluster.clone()));
        rows.push(of_plan("GPUs of the plan", used.gpus.to_string()));
        rows
    }

    fn budget(&self) -> Option<Budget> {
        let best = self.best()?;
        let rate = best.prediction.tokens_per_s_per_gpu;
        let inputs = &self.answer.inputs;
        (self.training).budget(&inputs.scenario, inputs.json.gpus, &best.strategy, rate)
    }

    /// The answer as JSON. The search took `elapsed_s` seconds; paths are those of written files.
    #[must_use]
    pub fn json(
        &self,
        elapsed_s: f64,
        plan_path: Option<String>,
        report_path: Option<String>,
    ) -> SearchJson {
        let scenario = &self.answer.inputs.scenario;
        let precision = scenario.workload.precision;
        let candidate = |c| CandidateJson::new(c, &scenario.runtime, precision);
        let outcome = &self.answer.outcome;
        SearchJson {
            schema_version: SCHEMA_VERSION,
            inputs: self.answer.inputs.json.clone(),
            best: BestJson::of(self.answer),
            detail: self.best().map(|c| DetailJson::from(&c.prediction)),
            top: (BestJson::of(self.answer).into_iter())
                .chain(
                    outcome
                        .top
                        .iter()
                        .skip(1)
                        .map(|c| BestJson::alike(c, scenario)),
                )
                .collect(),
            wishes: (outcome.wishes.iter())
                .map(|(wish, plan)| WishJson {
                    wish: wish.clone(),
                    plan: candidate(plan),
                })
                .collect(),
            space: outcome.space.clone(),
            arrangements: self.answer.tried.clone(),
            relax: outcome.relax.iter().map(|r| r.says.clone()).collect(),
            present: self
                .in_use()
                .map(|in_use| PresentJson::new(in_use, precision, self.best())),
            risk: self.risk,
            budget: self.budget(),
            interrupted: outcome.interrupted,
            elapsed_s,
            plan_path,
            report_path,
        }
    }

    /// The answer for people: the strategy in use, if any, then the best plan.
    #[must_use]
    pub fn text(&self, elapsed_s: f64, style: Style) -> String {
        let together = self.answer.together.as_ref();
        let groups = together.map_or_else(Vec::new, Together::shown);
        let ground = Ground {
            groups: &groups,
            ..plan::ground(&self.answer.costs)
        };
        let mut text = String::new();
        if let Some(InUse { read, compared }) = self.in_use() {
            let shown = Shown {
                present: compared,
                best: self.best(),
                kept: &read.kept,
                runtime: ground.runtime,
            };
            text.push_str(&reports::present::section(shown, style));
            text.push_str(&style.heading("Best plan"));
        }
        text.push_str(&reports::terminal::search(
            &self.answer.outcome,
            ground,
            style,
        ));
        if let Some(risky) = self.best().filter(|best| !best.prediction.fit.fits()) {
            let said = format!(
                "The predicted peak of this plan does not fit. It is within --risk {}: with probability {} it fits if the allocator \
                 caches less.",
                self.risk,
                format::probability(risky.prediction.p_fits)
            );
            text.push_str(&format!("\n{}", style.paragraph("", &said)));
        }
        if !self.answer.tried.is_empty() {
            text.push_str(&arrangements::text(&self.answer.tried, style));
        }
        if let Some(budget) = self.budget() {
            text.push_str(&budget::lines(&budget, style));
        }
        let elapsed = format::seconds(Seconds(elapsed_s));
        text.push_str(&format!("\nsearched in {elapsed}\n"));
        text
    }

    /// Commands to suggest: launch, explain and compare the plan whose file was written, or find how many GPUs would fit.
    #[must_use]
    pub fn steps(&self, plan_path: Option<&str>) -> Vec<Step> {
        let inputs = &self.answer.inputs;
        if let (Some(together), Some(plan)) = (&self.answer.together, plan_path) {
            return self.steps_together(together, plan);
        }
        let mut top = self.answer.outcome.top.iter().map(|c| &c.strategy);
        if let (Some(strategy), Some(plan)) = (top.next(), plan_path) {
            let of = Launchable {
                scenario: &inputs.scenario,
                strategy,
                plan,
            };
            let runner_up = |other| launch::runner_up(inputs, of, other);
            let compare = match self.in_use() {
                Some(in_use) => Some(with_present(in_use.read, of.plan)),
                None => top.next().map(runner_up),
            };
            return launch::after_plan(of, compare);
        }
        let steps = self.without_plan().into_iter();
        steps
            .map(|(purpose, command)| (purpose.into(), vec![command]))
            .collect()
    }

    /// Commands to suggest after a plan with groups of replicas that differ was written.
    fn steps_together(&self, together: &Together, plan: &str) -> Vec<Step> {
        let of_groups =
            |(name, value): &(&str, String)| *name == "fix" && value.starts_with("groups=");
        let mut alike = self.asked_with();
        alike.retain(|flag| !of_groups(flag));
        alike.push(("fix", "groups=1".to_owned()));
        let alike = format!("vescale-plan search {}", launch::joined(alike));
        let mut steps = launch::of_groups(plan, together.parts.len());
        steps.extend(self.in_use().map(|in_use| with_present(in_use.read, plan)));
        steps.push((
            "find the best plan whose replicas are all alike".into(),
            vec![alike],
        ));
        steps
    }

    /// Commands to try where nothing fits, each with its purpose.
    fn without_plan(&self) -> Vec<(&'static str, String)> {
        let ways = self.answer.outcome.relax.iter();
        let mut commands: Vec<_> = ways
            .filter_map(|way| way.instead.as_ref())
            .map(|(flag, value)| {
                let purpose = match *flag {
                    "gpus" => OTHER_GPUS,
                    "risk" => "take a larger risk that the plan does not fit",
                    "global-batch" => "train with the smaller batch",
                    "runtime" => "plan for another training system",
                    _ => "keep what does not fit in host memory",
                };
                // Another value of the same flag, or of the same decision, takes the place of what was asked.
                let decision = |value: &str| value.split('=').next().map(str::to_owned);
                let stands = |(name, old): &(&str, String)| {
                    name != flag || *flag == "fix" && decision(old) != decision(value)
                };
                let kept = self.asked_with().into_iter().filter(stands);
                let flags = launch::joined(kept.chain([(*flag, value.clone())]));
                (purpose, format!("vescale-plan search {flags}"))
            })
            .collect();
        // Numbers of GPUs are compared where another one fits.
        if commands.iter().any(|(purpose, _)| *purpose == OTHER_GPUS) {
            let sizes = self.asked_with().into_iter();
            let sizes = launch::joined(sizes.filter(|(name, _)| *name != "gpus"));
            commands.push((
                "compare numbers of GPUs",
                format!("vescale-plan size {sizes}"),
            ));
        }
        commands
    }

    /// Flags, without dashes, that repeat the question: what is planned for, the constraints, and the risk if it is not the
    /// usual one.
    fn asked_with(&self) -> Vec<(&'static str, String)> {
        launch::search_options(&self.answer.inputs, &self.answer.constraints, self.risk)
    }

    /// The best plan as a plan file.
    ///
    /// # Errors
    /// When the model cannot be sharded as the plan says.
    pub fn plan(&self, best: &Candidate) -> Result<PlanFile, AnswerError> {
        self.answer.plan(best)
    }

    /// The report of the best plan, whose file has this path.
    ///
    /// # Errors
    /// When the plan cannot be priced.
    pub fn report(
        &self,
        best: &Candidate,
        plan: &PlanFile,
        plan_path: &str,
    ) -> Result<String, AnswerError> {
        let Answer {
            inputs,
            costs,
            space,
            outcome,
            together,
            tried,
            ..
        } = self.answer;
        if let Some(together) = together {
            return report::of_groups(&OfGroups {
                together,
                plan,
                plan_path,
                inputs: self.rows(),
                space: Some(&outcome.space),
                ways: arrangements::rows(tried),
                budget: self.budget(),
                command: format!("vescale-plan search {}", launch::joined(self.asked_with())),
                present: self.in_use().map(|in_use| in_use.compared),
            });
        }
        let longest = best.prediction.step_time * DRAWN_LONGEST;
        let drawn = match inputs.scenario.model.moe {
            None => DRAWN,
            Some(_) => DRAWN_OF_MIXTURE,
        };
        let sampled = planner::sample(costs, space, drawn, longest)?;
        Ok(report::html(&ReportSource {
            inputs: self.rows(),
            model: &inputs.json.model,
            model_arg: &inputs.model_arg,
            cluster_arg: &inputs.cluster_arg,
            scenario: &inputs.scenario,
            plan,
            best,
            top: &outcome.top,
            wishes: &outcome.wishes,
            sampled: &sampled,
            space: Some(&outcome.space),
            ways: arrangements::rows(tried),
            timeline: &costs.timeline(&best.strategy)?,
            budget: self.budget(),
            plan_path,
            keep: None,
            present: self.in_use().map(|in_use| in_use.compared),
            next_change: next_change::best(costs, &best.strategy, &best.prediction, &[])?,
        }))
    }

    /// The report of a search in which nothing fits.
    #[must_use]
    pub fn nothing(&self) -> String {
        let Answer {
            inputs, outcome, ..
        } = self.answer;
        let json = &inputs.json;
        reports::html::nothing::report(&Nothing {
            model: &json.model,
            devices: &inputs.scenario.cluster.devices(json.gpus),
            relax: outcome.relax.iter().map(|way| way.says.as_str()).collect(),
            next: &self.without_plan(),
            space: &outcome.space,
            inputs: &self.rows(),
            command: &format!("vescale-plan search {}", launch::joined(self.asked_with())),
            version: env!("CARGO_PKG_VERSION"),
        })
    }
}

/// Commands that compare a plan with the strategy in use.
fn with_present(read: &Read, plan: &str) -> Step {
    let mut commands: Vec<String> = read.writes_plan.clone().into_iter().collect();
    commands.push(launch::comparing(plan, &read.plan));
    ("compare it with the present strategy".into(), commands)
}
