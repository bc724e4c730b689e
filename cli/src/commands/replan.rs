//! `replan`: the best plan for the GPUs that are left after some were lost, and what going on under it takes.

use std::path::Path;
use std::process::ExitCode;

use answers::failures::Checkpoint;
use answers::launch::{self, Launchable};
use answers::{Inputs, InputsJson, Opened, Planned, SCHEMA_VERSION, file_names};
use catalog::files::Kind;
use catalog::load::beside;
use catalog::{Bandwidth, Bytes, Cluster, Mistake, Seconds, Workload, elementary};
use costmodel::{CostModel, Scenario};
use planner::{Constraints, PlannerError, SearchOptions, SearchSpace};
use plans::json::{CandidateJson, PredictedJson};
use plans::{Candidate, Prediction, SearchOutcome};
use reports::terminal::Ground;
use reports::{format, lines::of};
use serde::Serialize;

use crate::args::ReplanArgs;
use crate::commands::next;
use crate::commands::plan;
use crate::destinations::Target;
use crate::error::{CliError, code};
use crate::inputs;
use crate::output::{self, Progress};

#[derive(Serialize)]
struct ReplanJson {
    schema_version: u32,
    /// The job on the GPUs that are left.
    inputs: InputsJson,
    /// Plan that was in use.
    plan_id: String,
    lost_gpus: u64,
    global_batch_before: u64,
    before: PredictedJson,
    best: Option<CandidateJson>,
    /// A batch that more layouts divide, if it gives more tokens per second than the error of comparisons.
    other_batch: Option<OtherBatch>,
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

/// What going on under the new plan takes.
#[derive(Clone, Copy, Serialize)]
struct GoingOn {
    states_bytes: u64,
    /// Nodes on which every state is, at least: fewer may be lost without going back to a checkpoint.
    nodes_with_every_state: u64,
    from_checkpoint: bool,
    /// Bytes that ranks read from the checkpoint, or send to each other.
    bytes: u64,
    /// Most of them that one GPU receives.
    most_bytes: u64,
    /// Time at the rate of links, or at that of `--checkpoint`.
    seconds: Option<f64>,
}

/// Runs `replan`.
pub(crate) fn run(args: &ReplanArgs) -> Result<ExitCode, CliError> {
    inputs::risk(args.risk)?;
    let loaded = loaded(args)?;
    let left = left(args, &loaded)?;
    let path = file_names::derived(&args.plan, &format!("{left}gpus.plan.yaml"));
    let to = match &args.output_plan {
        Some(path) => Target::named(path, Kind::Plan, args.force)?,
        None => Target::chosen(&path, Kind::Plan, args.force)?,
    };
    let before = loaded.costs.predict(&loaded.strategy)?;
    let progress = Progress::new(args.output.quiet || args.output.json, "searching");
    let found = search(args, &loaded, left)?;
    progress.finish();
    let best = found.outcome.top.first();
    let going_on = best.map(|best| going_on(args, &loaded, &found.costs, best));
    let going_on = going_on.transpose()?;
    let inputs = inputs(&args.plan, &loaded, &found.costs)?;
    let saved = best.map(|best| {
        let file = answers::plan::file(&inputs, &best.strategy, &best.prediction)?;
        to.of_plan(&file.id, &file.to_yaml()?)?.commit()?;
        Ok::<_, CliError>(())
    });
    let written = matches!(saved, Some(Ok(())));
    if args.output.json {
        let scenario = &inputs.scenario;
        let json = |c| CandidateJson::new(c, &scenario.runtime, scenario.workload.precision);
        output::json(&ReplanJson {
            schema_version: SCHEMA_VERSION,
            inputs: inputs.json.clone(),
            plan_id: loaded.file.id.clone(),
            lost_gpus: loaded.inputs.gpus - left,
            global_batch_before: loaded.inputs.global_batch,
            before: PredictedJson::from(&before),
            best: best.map(json),
            other_batch: (found.other.as_ref()).map(|(batch, share, best)| OtherBatch {
                global_batch: *batch,
                share: *share,
                best: json(best),
            }),
            going_on,
            relax: (found.outcome.relax.iter())
                .map(|way| way.says.clone())
                .collect(),
            plan_path: written.then(|| to.text()),
        })?;
    } else {
        print(args, &loaded, &found, &before, going_on);
        if written {
            to.say(args.output.quiet, "plan");
            let plan = to.text();
            suggest(args, &inputs, &found, &plan);
        }
    }
    saved.transpose()?;
    Ok(match found.outcome.top.is_empty() {
        true => ExitCode::from(code::DOES_NOT_FIT),
        false => ExitCode::SUCCESS,
    })
}

/// The plan, on a cluster whose nodes are all alike.
fn loaded(args: &ReplanArgs) -> Result<Opened, CliError> {
    match plan::planned(&args.plan)? {
        Planned::Alike(plan) if plan.scenario.cluster.pools.is_none() => Ok(*plan),
        planned => Err(of_pools(args, &planned)?),
    }
}

/// The error for a plan on several pools, with the search on what is left of them.
fn of_pools(args: &ReplanArgs, planned: &Planned) -> Result<CliError, CliError> {
    let inputs = match planned {
        Planned::Alike(plan) => inputs(&args.plan, plan, &plan.costs)?,
        Planned::Groups(_, together) => together.inputs.clone(),
    };
    let wrong = Mistake::new("`replan` plans for clusters whose nodes are all alike")
        .at(args.plan.display().to_string())
        .expected(
            "a search on what is left of the pools, whose plan the last checkpoint goes on under",
        );
    let pools = inputs.scenario.cluster.pools.iter();
    let mut pools = pools.flat_map(|pools| {
        let named = |cluster: &Cluster| match args.lost.device() {
            Some(device) => cluster.device.name.starts_with(device),
            None => true,
        };
        let lost = pools.parts.iter().enumerate().rev();
        let lost = lost.filter(move |(_, pool)| named(&pool.cluster));
        lost.filter_map(|(at, pool)| pools.without(at, args.lost.count(&pool.cluster)))
    });
    let example = match pools.next() {
        None => "vescale-plan search --cluster '16 x dgx-h100 + 8 x dgx-a100' --gpus 24".to_owned(),
        Some(left) => {
            let flags = launch::options(&inputs).into_iter();
            let flags = flags.filter(|(name, _)| !["cluster", "gpus"].contains(name));
            let left = [("cluster", left.arg), ("gpus", left.gpus.to_string())];
            format!("vescale-plan search {}", launch::joined(flags.chain(left)))
        }
    };
    Ok(CliError::Input(wrong.example(example)))
}

/// Number of GPUs that are left; whole nodes if there are several.
fn left(args: &ReplanArgs, loaded: &Opened) -> Result<u64, CliError> {
    let (had, cluster) = (loaded.inputs.gpus, &loaded.costs.scenario().cluster);
    let lost = args.lost.count(cluster);
    let node = cluster.gpus_per_node;
    let wrong = |what: String| {
        Mistake::new(what)
            .at(format!("--lost {}", args.lost))
            .example("--lost 2nodes or --lost 8")
    };
    if args.lost.device().is_some() {
        let out = wrong("the plan says which GPUs there are".to_owned());
        return Err(CliError::Input(out.expected("a number of GPUs or nodes")));
    }
    if lost == 0 || lost >= had {
        let out = wrong(format!("{lost} GPUs are lost, and the plan has {had}"));
        let expected = match had {
            1 => "a plan of 2 GPUs or more".to_owned(),
            _ => format!("1 to {}", had - 1),
        };
        return Err(CliError::Input(out.expected(expected)));
    }
    let left = had - lost;
    if let Err(why) = cluster.check_devices(left) {
        let nodes = lost.div_ceil(node) * node;
        let near = (nodes < had).then(|| nodes.to_string());
        let out = wrong(format!("{left} GPUs are left: {why}"));
        return Err(CliError::Input(out.nearest(near)));
    }
    Ok(left)
}

/// What was found for the GPUs that are left.
struct Found {
    costs: CostModel,
    outcome: SearchOutcome,
    /// A batch that is better divided: its gain in tokens per second, and its best plan.
    other: Option<(u64, f64, Candidate)>,
}

/// Searches with the global batch asked for, or else the plan's; if nothing fits then, with the nearest batch that the
/// GPUs divide.
fn search(args: &ReplanArgs, loaded: &Opened, left: u64) -> Result<Found, CliError> {
    let own = &loaded.costs.scenario().workload;
    let asked = args.global_batch.unwrap_or(own.global_batch);
    let on = |global_batch: u64| {
        let left = own
            .with_gpus(left)
            .and_then(|own| own.with_batch(global_batch));
        left.map_err(PlannerError::from)
    };
    let mut constraints = inputs::constraints(&args.constraints)?;
    let kept = inputs::words(&args.keep);
    planner::present::keep(&kept, &loaded.strategy, &mut constraints, &loaded.scenario)?;
    let costs = loaded.costs.with_workload(on(asked)?)?;
    planner::legal_values::check(costs.scenario(), &[left], &constraints)?;
    planner::present::keep_results(&loaded.strategy, &mut constraints, costs.scenario());
    let options = SearchOptions {
        top: 2,
        risk: Some(args.risk),
        ..SearchOptions::default()
    };
    let mut outcome = best(&costs, &constraints, loaded, &options)?;
    let batch = nearest_batch(asked, left);
    let mut other = None;
    if batch != own.global_batch && args.global_batch.is_none() {
        let changed = costs.with_workload(on(batch)?)?;
        let found = best(&changed, &constraints, loaded, &options)?;
        if outcome.top.is_empty() && !found.top.is_empty() {
            return Ok(Found {
                costs: changed,
                outcome: found,
                other: None,
            });
        }
        other = better(&outcome, found, &costs).map(|(share, best)| (batch, share, best));
    }
    if outcome.top.is_empty() {
        outcome.relax = planner::size::relaxations(&costs, &constraints, &options)?;
    }
    Ok(Found {
        costs,
        outcome,
        other,
    })
}

fn best(
    costs: &CostModel,
    constraints: &Constraints,
    loaded: &Opened,
    options: &SearchOptions<'_>,
) -> Result<SearchOutcome, PlannerError> {
    let space = SearchSpace::with_present(costs.scenario(), constraints, &loaded.strategy);
    planner::search(costs, &space, options, &|_| {})
}

/// The gain in tokens per second of another search's best plan, and the plan, if the gain is more than the error of
/// comparisons.
fn better(
    than: &SearchOutcome,
    found: SearchOutcome,
    costs: &CostModel,
) -> Option<(f64, Candidate)> {
    let rate = |c: &Candidate| c.prediction.tokens_per_s_per_gpu;
    let first = found.top.into_iter().next()?;
    let ratio = rate(&first) / rate(than.top.first()?);
    (elementary::ln(ratio) > costs.scenario().comparison_error()).then_some((ratio - 1.0, first))
}

/// The batch nearest to another that a number of GPUs divides; where there are more GPUs than sequences, half of them or a
/// quarter, and so on.
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

fn going_on(
    args: &ReplanArgs,
    loaded: &Opened,
    costs: &CostModel,
    best: &Candidate,
) -> Result<GoingOn, CliError> {
    let moves = costs.resharding(&loaded.strategy, &best.strategy)?;
    let cluster = &loaded.costs.scenario().cluster;
    let node = cluster.gpus_per_node;
    let lost_nodes = args.lost.count(cluster).div_ceil(node);
    let from_checkpoint = lost_nodes >= moves.nodes;
    let link = match best.strategy.world() > cluster.scale_up_domain {
        true => cluster.scale_out.bandwidth.value,
        false => cluster.scale_up.bandwidth.value,
    };
    let at = |bytes: Bytes, rate: Bandwidth| (bytes / rate).0;
    let (bytes, most_bytes, seconds) = match from_checkpoint {
        true => {
            let each = Bytes(moves.held.0 / best.strategy.world());
            let seconds = args.checkpoint.map(|checkpoint| match checkpoint {
                Checkpoint::Rate(rate) => at(moves.held, rate),
                Checkpoint::Time(time) => time.0,
            });
            (moves.held, each, seconds)
        }
        false => (moves.moved, moves.most, Some(at(moves.most, link))),
    };
    Ok(GoingOn {
        states_bytes: moves.whole.0,
        nodes_with_every_state: moves.nodes,
        from_checkpoint,
        bytes: bytes.0,
        most_bytes: most_bytes.0,
        seconds,
    })
}

/// The job on the GPUs that are left.
fn inputs(path: &Path, loaded: &Opened, costs: &CostModel) -> Result<Inputs, CliError> {
    let scenario = Scenario {
        workload: costs.scenario().workload.clone(),
        ..loaded.scenario.clone()
    };
    let parameters = models::parameter_count(&scenario.model);
    let parameters =
        parameters.map_err(|e| CliError::wrong(&scenario.model.name, e.to_string()))?;
    Ok(Inputs {
        json: InputsJson::of(&scenario, parameters),
        scenario,
        model_arg: beside(path, &loaded.file.model),
        cluster_arg: beside(path, &loaded.file.cluster),
    })
}

fn print(
    args: &ReplanArgs,
    loaded: &Opened,
    found: &Found,
    before: &Prediction,
    going_on: Option<GoingOn>,
) {
    let style = output::style();
    let ground = Ground {
        runtime: &loaded.scenario.runtime,
        ..answers::plan::ground(&found.costs)
    };
    let now = &found.costs.scenario().workload;
    let gpus = format!("{} of {} are left", now.gpus, loaded.inputs.gpus);
    let mut rows = vec![("GPUs", gpus), ("global batch", batch(args, loaded, now))];
    let Some(best) = found.outcome.top.first() else {
        output::print(&style.pairs(&rows));
        output::print(&reports::terminal::search(&found.outcome, ground, style));
        return;
    };
    rows.push((
        "throughput",
        throughput(loaded, before, now, &best.prediction),
    ));
    rows.extend(going_on.map(|going_on| ("states", states(going_on))));
    if let Some((batch, share, other)) = &found.other {
        let plan = plans::grammar::short(&other.strategy);
        let faster = of(*share);
        let text = format!("--global-batch {batch} would train {faster} faster: {plan}");
        rows.push(("other batch", text));
    }
    output::print(&style.pairs(&rows));
    output::print("\n");
    let text = reports::terminal::prediction(&best.strategy, &best.prediction, ground, style);
    output::print(&text);
}

/// What becomes of the global batch, in words.
fn batch(args: &ReplanArgs, loaded: &Opened, now: &Workload) -> String {
    let own = loaded.inputs.global_batch;
    match (now.global_batch == own, args.global_batch) {
        (true, _) => format!("{own} sequences, as before"),
        (false, Some(_)) => format!("{} sequences instead of {own}", now.global_batch),
        (false, None) => format!(
            "{} sequences instead of {own}, with which nothing fits {} GPUs",
            now.global_batch, now.gpus
        ),
    }
}

/// Tokens per second of all GPUs, before and after.
fn throughput(loaded: &Opened, before: &Prediction, now: &Workload, after: &Prediction) -> String {
    let all = |p: &Prediction, gpus: u64| p.tokens_per_s_per_gpu * gpus as f64;
    let (was, is) = (all(before, loaded.inputs.gpus), all(after, now.gpus));
    format!(
        "{} tokens/s instead of {} ({:+.1}%; GPUs {:+.1}%)",
        format::significant(is),
        format::significant(was),
        (is / was - 1.0) * 100.0,
        (now.gpus as f64 / loaded.inputs.gpus as f64 - 1.0) * 100.0
    )
}

/// What going on takes, in words.
fn states(going_on: GoingOn) -> String {
    let bytes = |n: u64| format::bytes(Bytes(n));
    let time = going_on.seconds.map(|s| format::duration(Seconds(s)));
    let whole = bytes(going_on.states_bytes);
    match (going_on.from_checkpoint, going_on.bytes) {
        (true, n) => {
            let took = time.map_or_else(
                || "--checkpoint RATE says how long".to_owned(),
                |time| format!("in {time}"),
            );
            format!(
                "{whole}; some may have been on the lost GPUs alone, so all go back to the last checkpoint and read {} together ({took})",
                bytes(n)
            )
        }
        (false, 0) => format!("{whole}; every rank that is left holds what it needs"),
        (false, n) => format!(
            "{whole}, each on {} nodes or more: ranks that are left send each other {}, at most {} to one GPU ({} at the links' peak)",
            going_on.nodes_with_every_state,
            bytes(n),
            bytes(going_on.most_bytes),
            time.unwrap_or_default()
        ),
    }
}

fn suggest(args: &ReplanArgs, inputs: &Inputs, found: &Found, plan: &str) {
    let Some(best) = found.outcome.top.first() else {
        return;
    };
    let of = Launchable {
        scenario: &inputs.scenario,
        strategy: &best.strategy,
        plan,
    };
    let old = args.plan.display().to_string();
    let compare = (
        "compare it with the plan before",
        vec![launch::compare(of, &old)],
    );
    next::print(&launch::after_plan(of, Some(compare)), args.output);
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
