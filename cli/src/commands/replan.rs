//! `replan`: the best plan for the GPUs left after a loss, and the cost of continuing under it.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use answers::arrangements::{self, Tried};
use answers::launch::{self, Launchable, Step};
use answers::search::BestJson;
use answers::{
    Answer, GoingOn, Inputs, InputsJson, Left, Planned, SCHEMA_VERSION, Search, Together,
    file_names,
};
use catalog::files::Kind;
use catalog::{Workload, elementary};
use costmodel::CostModel;
use planner::size::why_none;
use planner::{Constraints, PlannerError, SearchOptions};
use plans::json::{CandidateJson, PredictedJson};
use plans::plan_file::TrainFile;
use plans::{Candidate, PlanFile, Prediction, Strategy};
use reports::terminal::Ground;
use reports::{format, lines::of};
use serde::Serialize;

use crate::args::ReplanArgs;
use crate::commands::{keep, next, plan};
use crate::destinations::Target;
use crate::error::{CliError, code};
use crate::inputs;
use crate::output::{self, Progress};

/// Smallest gain in tokens per second, as a share, for which another batch is named.
const WORTH: f64 = 0.01;

#[derive(Serialize)]
struct ReplanJson {
    schema_version: u32,
    /// The job on the GPUs that are left; on several pools, on those that the best plan uses.
    inputs: InputsJson,
    /// Plan that was in use.
    plan_id: String,
    lost_gpus: u64,
    global_batch_before: u64,
    before: PredictedJson,
    best: Option<BestJson>,
    /// A batch that more layouts divide, if it gives more tokens per second.
    other_batch: Option<OtherBatch>,
    /// The ways to use the pools that are left.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    arrangements: Vec<Tried>,
    going_on: Option<GoingOn>,
    relax: Vec<String>,
    plan_path: Option<String>,
}

#[derive(Serialize)]
struct OtherBatch {
    global_batch: u64,
    /// Gain in tokens per second.
    share: f64,
    best: CandidateJson,
}

/// The plan that was in use, and what is left of its GPUs.
struct Before {
    planned: Planned,
    inputs: Inputs,
    prediction: Prediction,
    left: Left,
}

/// Runs `replan`.
pub(crate) fn run(args: &ReplanArgs) -> Result<ExitCode, CliError> {
    inputs::risk(args.risk)?;
    let planned = plan::planned(&args.plan)?;
    let inputs = planned.inputs(&args.plan);
    let left = Left::of(&inputs, &args.lost)?;
    let gpus = left.cluster.gpus;
    let path = file_names::derived(&args.plan, &format!("{gpus}gpus.plan.yaml"));
    let to = Target::given_or(args.output_plan.as_ref(), &path, Kind::Plan, args.force)?;
    let before = Before {
        prediction: planned.prediction()?,
        planned,
        inputs,
        left,
    };
    let progress = Progress::new(args.output.quiet || args.output.json, "searching");
    let found = search(args, &before, &|share| progress.update(share))?;
    progress.finish();
    let best = found.best();
    let going_on = best.map(|best| {
        let (planned, left, strategy) = (&before.planned, &before.left, &best.strategy);
        GoingOn::new(planned, left, &found.answer, strategy, args.checkpoint)
    });
    let going_on = going_on.transpose().map_err(PlannerError::from)?;
    let saved = best.map(|best| {
        let file = PlanFile {
            train: train(&before.planned, &args.plan, to.path()),
            ..found.answer.plan(best)?
        };
        to.of_plan(&file.id, &file.to_yaml()?)?.commit()?;
        Ok::<_, CliError>(())
    });
    let written = matches!(saved, Some(Ok(())));
    let path = written.then(|| to.text());
    if args.output.json {
        output::json(&json(&before, &found, going_on, path))?;
    } else {
        print(args, &before, &found, going_on);
        if let Some(path) = path {
            to.say(args.output.quiet, "plan");
            next::print(&steps(args, &found, &path), args.output);
        }
    }
    saved.transpose()?;
    let fits = best.is_some_and(|best| best.prediction.fit.fits());
    Ok(code::unless(fits, code::DOES_NOT_FIT))
}

/// The old plan's `train` section for the new plan; in another folder, with an absolute data path.
fn train(planned: &Planned, old: &Path, new: &Path) -> Option<TrainFile> {
    let mut train = planned.file().train.clone()?;
    if old.parent() != new.parent() {
        let data = catalog::files::beside(old, &train.data);
        let whole = std::path::absolute(&data).map(|path| path.display().to_string());
        train.data = whole.unwrap_or(data);
    }
    Some(train)
}

fn json(
    before: &Before,
    found: &Found,
    going_on: Option<GoingOn>,
    plan_path: Option<String>,
) -> ReplanJson {
    let answer = &found.answer;
    let scenario = &answer.inputs.scenario;
    let other = |(batch, share, best): &(u64, f64, Candidate)| OtherBatch {
        global_batch: *batch,
        share: *share,
        best: CandidateJson::new(best, &scenario.runtime, scenario.workload.precision),
    };
    let relax = answer.outcome.relax.iter().map(|way| way.says.clone());
    ReplanJson {
        schema_version: SCHEMA_VERSION,
        inputs: answer.inputs.json.clone(),
        plan_id: before.planned.id().to_owned(),
        lost_gpus: before.left.gpus_lost(),
        global_batch_before: before.inputs.json.global_batch,
        before: PredictedJson::from(&before.prediction),
        best: BestJson::of(answer),
        other_batch: found.other.as_ref().map(other),
        arrangements: answer.tried.clone(),
        going_on,
        relax: relax.collect(),
        plan_path,
    }
}

/// The result for the GPUs that are left.
struct Found {
    answer: Answer,
    /// A batch that trains faster: sequences, relative gain in tokens per second, best plan.
    other: Option<(u64, f64, Candidate)>,
    /// Why the plan's own batch has no plan, if the answer has another for that reason.
    own_batch: Option<String>,
}

impl Found {
    fn best(&self) -> Option<&Candidate> {
        self.answer.outcome.top.first()
    }
}

/// Searches with the global batch asked for, or else the plan's; if nothing fits then, with the nearest batch that the
/// GPUs divide.
fn search(
    args: &ReplanArgs,
    before: &Before,
    progress: &(dyn Fn(f64) + Sync),
) -> Result<Found, CliError> {
    let own = &before.inputs.scenario.workload;
    let (cluster, gpus) = (&before.left.cluster, before.left.cluster.gpus);
    let on = |global_batch: u64| {
        let left = own
            .with_gpus(gpus)
            .and_then(|own| own.with_batch(global_batch));
        let left = left.map_err(PlannerError::from)?;
        Ok::<_, CliError>(arrangements::on_pool(&before.inputs, cluster, left))
    };
    let asked = args.global_batch.unwrap_or(own.global_batch);
    let question = on(asked)?;
    let mut constraints = inputs::constraints(&args.constraints)?;
    let shares = before.planned.shares();
    let groups: Vec<&Strategy> = shares.into_iter().map(|(_, strategy)| strategy).collect();
    let kept = inputs::words(&args.keep);
    keep::keep(&kept, &groups, &mut constraints, &question.scenario)?;
    arrangements::check(&question, &constraints)?;
    planner::present::keep_results(groups[0], &mut constraints, &question.scenario);
    let answer = best(args, before, &constraints, &question, progress)?;
    let batch = nearest_batch(asked, gpus);
    // Groups of replicas divide any batch, so on several pools another is searched only if this one has no plan.
    let only = |answer| Found {
        answer,
        other: None,
        own_batch: None,
    };
    let nothing = answer.outcome.top.is_empty();
    let other_may_help = question.scenario.cluster.pools.is_none() || nothing;
    if batch == own.global_batch || args.global_batch.is_some() || !other_may_help {
        return Ok(only(answer));
    }
    let other = best(args, before, &constraints, &on(batch)?, progress)?;
    if nothing && !other.outcome.top.is_empty() {
        return Ok(Found {
            own_batch: Some(why_none(&answer.outcome.space)),
            ..only(other)
        });
    }
    let other = better(&answer, other).map(|(share, best)| (batch, share, best));
    Ok(Found {
        other,
        ..only(answer)
    })
}

/// The best plan for a question on what is left.
fn best(
    args: &ReplanArgs,
    before: &Before,
    constraints: &Constraints,
    question: &Inputs,
    progress: &(dyn Fn(f64) + Sync),
) -> Result<Answer, CliError> {
    let search = Search {
        constraints,
        options: SearchOptions {
            top: 2,
            risk: Some(args.risk),
            ..SearchOptions::default()
        },
        by_cost: false,
        in_use: match &before.planned {
            Planned::Alike(plan) => Some(&plan.strategy),
            Planned::Groups(..) => None,
        },
        compared: None,
        progress,
    };
    let known = before.planned.costs();
    let costs = || CostModel::sharing(question.scenario.clone(), &known).map(Arc::new);
    Ok(search.find(question, costs)?)
}

/// The gain in tokens per second of another search's best plan, and the plan, if the gain is worth naming.
fn better(than: &Answer, found: Answer) -> Option<(f64, Candidate)> {
    let rate = |c: &Candidate| c.prediction.tokens_per_s_per_gpu;
    let first = found.outcome.top.into_iter().next()?;
    let ratio = rate(&first) / rate(than.outcome.top.first()?);
    (ratio > 1.0 + WORTH).then_some((ratio - 1.0, first))
}

/// The multiple of `gpus` that is nearest to `batch`. If there are more GPUs than sequences, a
/// multiple of half of `gpus`, or a quarter, and so on.
fn nearest_batch(batch: u64, gpus: u64) -> u64 {
    let mut unit = gpus;
    while unit > batch && unit.is_multiple_of(2) {
        unit /= 2;
    }
    let below = batch / unit * unit;
    match below == 0 || batch - below > unit / 2 {
        true => below + unit,
        false => below,
    }
}

fn print(args: &ReplanArgs, before: &Before, found: &Found, going_on: Option<GoingOn>) {
    let style = output::style();
    let answer = &found.answer;
    let groups = answer
        .together
        .as_ref()
        .map_or_else(Vec::new, Together::shown);
    let ground = Ground {
        groups: &groups,
        runtime: &before.inputs.scenario.runtime,
        ..answers::plan::ground(&answer.costs)
    };
    let now = &answer.inputs.scenario.workload;
    let mut rows = vec![
        ("GPUs", gpus(before, now)),
        ("global batch", batch(args, before, found, now)),
    ];
    let Some(best) = found.best() else {
        output::print(&style.pairs(&rows));
        output::print(&reports::terminal::search(&answer.outcome, ground, style));
        print_ways(&answer.tried);
        return;
    };
    rows.push(("throughput", throughput(before, now, &best.prediction)));
    rows.extend(going_on.map(|going_on| ("states", going_on.said())));
    if let Some((batch, share, other)) = &found.other {
        let plan = plans::grammar::written(&other.strategy, ground.runtime);
        let faster = of(*share);
        let error = best
            .prediction
            .ratio_error
            .max(other.prediction.ratio_error);
        let certain = match elementary::ln(1.0 + share) > error {
            true => "",
            false => " (within the error of comparisons)",
        };
        let text = format!("--global-batch {batch} would train {faster} faster{certain}: {plan}");
        rows.push(("other batch", text));
    }
    output::print(&style.pairs(&rows));
    output::print("\n");
    output::print(&reports::terminal::best_plan(best, ground, style));
    print_ways(&answer.tried);
}

/// The ways to use the pools that are left, if there are several.
fn print_ways(tried: &[Tried]) {
    if !tried.is_empty() {
        output::print(&arrangements::text(tried, output::style()));
    }
}

/// How many GPUs are left, and which of them are used, in words.
fn gpus(before: &Before, now: &Workload) -> String {
    let left = &before.left;
    let are = if left.cluster.gpus == 1 { "is" } else { "are" };
    let mut text = format!("{} of {} {are} left", left.cluster.gpus, left.gpus_had());
    if left.had.len() > 1 {
        let devices = left.cluster.cluster.devices(left.cluster.gpus);
        text.push_str(&format!(": {devices}"));
    }
    if now.gpus < left.cluster.gpus {
        text.push_str(&format!("; the best plan uses {}", now.gpus));
    }
    text
}

/// The global batch and why it changed, in words.
fn batch(args: &ReplanArgs, before: &Before, found: &Found, now: &Workload) -> String {
    let own = before.inputs.json.global_batch;
    match (now.global_batch == own, args.global_batch) {
        (true, _) => format!("{own} sequences, as before"),
        (false, Some(_)) => format!("{} sequences instead of {own}", now.global_batch),
        (false, None) => {
            let kept = inputs::words(&args.keep).join(", ");
            let keeps = match kept.is_empty() {
                true => String::new(),
                false => format!(" that keeps {kept}"),
            };
            let why = found.own_batch.as_deref().unwrap_or_default();
            format!(
                "{} sequences instead of {own}, for which {} GPUs have no plan{keeps}: {why}",
                now.global_batch, before.left.cluster.gpus
            )
        }
    }
}

/// Tokens per second of all GPUs, before and after.
fn throughput(before: &Before, now: &Workload, after: &Prediction) -> String {
    let all = |p: &Prediction, gpus: u64| p.tokens_per_s_per_gpu * gpus as f64;
    let had = before.left.gpus_had();
    let (was, is) = (all(&before.prediction, had), all(after, now.gpus));
    format!(
        "{} tokens/s instead of {} ({:+.1}%; GPUs {:+.1}%)",
        format::significant(is),
        format::significant(was),
        (is / was - 1.0) * 100.0,
        (now.gpus as f64 / had as f64 - 1.0) * 100.0
    )
}

/// Commands to suggest after a plan was written.
fn steps(args: &ReplanArgs, found: &Found, plan: &str) -> Vec<Step> {
    let Some(best) = found.best() else {
        return Vec::new();
    };
    let old = args.plan.display().to_string();
    let compare = (
        "compare it with the plan before".into(),
        vec![launch::comparing(plan, &old)],
    );
    if let Some(together) = &found.answer.together {
        let mut steps = launch::of_groups(plan, together.parts.len());
        steps.push(compare);
        return steps;
    }
    let of = Launchable {
        scenario: &found.answer.inputs.scenario,
        strategy: &best.strategy,
        plan,
    };
    launch::after_plan(of, Some(compare))
}

#[cfg(test)]
mod tests {
    use super::nearest_batch;

    #[test]
    fn batches_stay_near() {
        for (batch, gpus, near) in [
            (512, 48, 528),
            (512, 64, 512),
            (512, 496, 496),
            (510, 496, 496),
            (512, 56, 504),
            (2, 56, 7),
            (16, 56, 14),
            (7, 7, 7),
        ] {
            assert_eq!(nearest_batch(batch, gpus), near, "{batch} on {gpus}");
        }
    }
}
