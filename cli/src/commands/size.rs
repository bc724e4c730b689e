//! `size`: finds how many GPUs to use.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use answers::launch::{self, Step};
use answers::search::BestJson;
use answers::{Answer, Budget, Inputs, InputsJson, SCHEMA_VERSION, Search, Training, arrangements};
use catalog::elementary::greatest_common_divisor;
use catalog::{Pool, Pools, Seconds};
use costmodel::{CostModel, Scenario};
use planner::size::{Sized, sized, usual_counts, usual_counts_of_pools, why_none};
use planner::{Constraints, PlannerError, SearchOptions};
use plans::Candidate;
use reports::{format, lines::of};
use serde::Serialize;

use crate::args::{ScenarioArgs, SizeArgs};
use crate::budget;
use crate::commands::next;
use crate::commands::search;
use crate::error::{CliError, code};
use crate::inputs;
use crate::output::{self, Progress, note};
use answers::values::Gpus;

/// Largest number of GPUs that is tried when none are given.
const DEFAULT_MOST: u64 = 2048;
/// Limit on the common multiple of odd factors by which the default batch is made a multiple for all numbers of GPUs.
const MOST_ODD: u64 = 315;

#[derive(Serialize)]
struct SizeJson {
    schema_version: u32,
    inputs: InputsJson,
    /// Largest allowed probability that a plan does not fit.
    risk: f64,
    smallest: Option<u64>,
    sizes: Vec<SizeRow>,
    interrupted: bool,
}

#[derive(Serialize)]
struct SizeRow {
    gpus: u64,
    best: Option<BestJson>,
    /// Why there is no plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    why_none: Option<String>,
    /// On several pools, the devices of the best plan; those of groups are separated by ` | `.
    #[serde(skip_serializing_if = "Option::is_none")]
    devices: Option<String>,
    tokens_per_s: Option<f64>,
    budget: Option<Budget>,
    pareto: bool,
    /// Dollars per hour of the plan's devices; if prices are not known, the number of devices.
    #[serde(skip)]
    hourly: f64,
    /// The plan in short lines.
    #[serde(skip)]
    lines: Vec<String>,
}

impl SizeRow {
    /// Whether there is a plan that is predicted to fit; a high `--risk` also takes others.
    fn fits(&self) -> bool {
        let best = self.best.as_ref();
        best.is_some_and(|best| best.plan.predicted.fits)
    }
}

/// Runs `size`.
pub(crate) fn run(args: &SizeArgs) -> Result<ExitCode, CliError> {
    let (resolved, counts) = question(args)?;
    let scenario = &resolved.scenario;
    inputs::risk(args.risk)?;
    let constraints = inputs::constraints(&args.constraints)?;
    match scenario.cluster.pools {
        None => planner::legal_values::check(scenario, &counts, &constraints)?,
        Some(_) => arrangements::check(&resolved, &constraints)?,
    }
    let training = budget::training(&args.budget, scenario)?;
    say_batch(args, &resolved, &counts);
    let cancelled = search::interrupt_flag();
    let sizes = Sizes {
        args,
        question: &resolved,
        counts: &counts,
        constraints: &constraints,
        training: &training,
        cancelled: &cancelled,
    };
    let mut rows = match &scenario.cluster.pools {
        None => sizes.of_nodes_alike()?,
        Some(pools) => sizes.of_pools(pools)?,
    };
    mark(&mut rows);
    let stopped = cancelled.load(Ordering::Relaxed);
    let smallest = rows.iter().find(|row| row.best.is_some());
    let smallest = smallest.map(|row| row.gpus);
    let fits = rows.iter().any(SizeRow::fits);
    if args.output.json {
        output::json(&SizeJson {
            schema_version: SCHEMA_VERSION,
            inputs: resolved.json,
            risk: args.risk,
            smallest,
            sizes: rows,
            interrupted: stopped,
        })?;
    } else {
        if stopped {
            let (done, all) = (rows.len(), counts.len());
            output::print(&format!(
                "\nInterrupted after {done} of {all} numbers of GPUs.\n"
            ));
        }
        if !stopped || smallest.is_some() {
            conclude(&rows, smallest, args.risk);
        }
        let steps = steps(&resolved, smallest, &constraints, args.risk)?;
        next::print(&steps, args.output);
    }
    Ok(match stopped {
        true => ExitCode::from(code::INTERRUPTED),
        false => code::unless(fits, code::DOES_NOT_FIT),
    })
}

/// The job on the largest number of GPUs, and the numbers to try.
fn question(args: &SizeArgs) -> Result<(Inputs, Vec<u64>), CliError> {
    let cluster_arg = answers::inputs::cluster_arg(args.cluster.as_deref(), None)?;
    let cluster = catalog::load::cluster(&cluster_arg)?;
    let counts = match (&cluster.pools, args.gpus.is_empty()) {
        (_, false) => args.gpus.clone(),
        (None, true) => usual_counts(cluster.gpus_per_node, DEFAULT_MOST),
        (Some(pools), true) => usual_counts_of_pools(pools),
    };
    for &gpus in &counts {
        match &cluster.pools {
            None => answers::inputs::check_gpus(gpus, &cluster)?,
            Some(pools) => drop(of_pools(pools, gpus)?),
        }
    }
    let most = counts.iter().copied().max().unwrap_or(1);
    let model = catalog::load::model(&args.model)?;
    let seq = (args.seq).unwrap_or_else(|| answers::inputs::default_seq(&model));
    let global_batch = (args.global_batch).unwrap_or_else(|| batch(&counts, seq));
    // On several pools, the cluster has the first pools, as many as the most GPUs tried need.
    let cluster_arg = match &cluster.pools {
        None => cluster_arg,
        Some(pools) => of_pools(pools, most)?.arg,
    };
    let resolved = inputs::resolve(&ScenarioArgs {
        model: Some(args.model.clone()),
        cluster: Some(cluster_arg),
        gpus: Some(Gpus::Count(most)),
        runtime: args.runtime.clone(),
        seq: Some(seq),
        global_batch: Some(global_batch),
        assumed: args.assumed.clone(),
    })?;
    Ok((resolved, counts))
}

/// The first `gpus` GPUs as one pool: all of the first pool, then those of the next, and so on.
fn of_pools(pools: &Pools, gpus: u64) -> Result<Pool, CliError> {
    pools.first(gpus).map_err(|wrong| {
        let expected = "GPUs of the pools in their order, in whole nodes of each";
        let expected = format!("{expected}: {}", pools.listed());
        CliError::unexpected(format!("--gpus {gpus}"), wrong, expected)
    })
}

/// The numbers of GPUs to size.
struct Sizes<'a> {
    args: &'a SizeArgs,
    question: &'a Inputs,
    counts: &'a [u64],
    constraints: &'a Constraints,
    training: &'a Training,
    cancelled: &'a AtomicBool,
}

impl Sizes<'_> {
    fn options(&self) -> SearchOptions<'_> {
        SearchOptions {
            risk: Some(self.args.risk),
            cancelled: Some(self.cancelled),
            ..SearchOptions::default()
        }
    }

    /// Sizes numbers of GPUs of a cluster whose nodes are all alike; costs of blocks are shared between them.
    fn of_nodes_alike(&self) -> Result<Vec<SizeRow>, CliError> {
        let scenario = &self.question.scenario;
        let costs = CostModel::new(scenario.clone())?;
        self.each(|gpus| {
            let sized = sized(&costs, self.constraints, gpus, &self.options())?;
            Ok(row_of_nodes_alike(self.training, scenario, &sized))
        })
    }

    /// Sizes numbers of GPUs of several pools, taken in their order; each as `search` plans them.
    fn of_pools(&self, pools: &Pools) -> Result<Vec<SizeRow>, CliError> {
        let order: Vec<String> = pools.parts.iter().map(|pool| pool.named()).collect();
        let order = format!("GPUs are taken in this order: {}", order.join(", then "));
        note(self.args.output.quiet, &order);
        // Dollars are compared only if all pools have a price.
        let given = self.args.budget.price;
        let cluster = &self.question.scenario.cluster;
        let priced = cluster.dollars_per_gpu_hour.is_some();
        self.each(|gpus| {
            let pool = of_pools(pools, gpus)?;
            let workload = self.question.scenario.workload.with_gpus(gpus);
            let workload = workload.map_err(PlannerError::from)?;
            let question = arrangements::on_pool(self.question, &pool, workload);
            let search = Search {
                constraints: self.constraints,
                options: SearchOptions {
                    top: 1,
                    ..self.options()
                },
                by_cost: false,
                in_use: None,
                compared: None,
                progress: &|_| {},
            };
            let costs = || CostModel::new(question.scenario.clone()).map(Arc::new);
            let answer = search.best(&question, costs)?;
            let scenario = &answer.inputs.scenario;
            let each = scenario.cluster.dollars_per_gpu_hour.as_ref();
            let each = each.filter(|_| priced && given.is_none());
            let hourly = each.map_or(1.0, |price| price.value) * answer.inputs.json.gpus as f64;
            let training = budget::training(&self.args.budget, scenario)?;
            Ok(row_of_pools(gpus, &training, &answer, hourly))
        })
    }

    /// Sizes every number of GPUs, and prints each as it is found; stops early when cancelled.
    fn each(
        &self,
        size: impl Fn(u64) -> Result<SizeRow, CliError>,
    ) -> Result<Vec<SizeRow>, CliError> {
        let output = self.args.output;
        let progress = Progress::new(output.quiet || output.json, "sizing");
        let mut found = Vec::with_capacity(self.counts.len());
        for (done, &gpus) in self.counts.iter().enumerate() {
            progress.update(done as f64 / self.counts.len() as f64);
            let row = size(gpus)?;
            if self.cancelled.load(Ordering::Relaxed) {
                break;
            }
            if !output.json {
                if found.is_empty() {
                    progress.beside(|| output::print(&line(HEADER.map(str::to_owned))));
                }
                progress.beside(|| output::print(&shown(&row)));
            }
            found.push(row);
        }
        progress.finish();
        Ok(found)
    }
}

/// The default global batch: that of `search` with the most GPUs, made a multiple of the odd factors of all numbers of GPUs if these have
/// a small common multiple.
fn batch(counts: &[u64], seq: u64) -> u64 {
    let odd = |gpus: u64| gpus >> gpus.trailing_zeros();
    let all = counts.iter().map(|&gpus| odd(gpus));
    let all = all.fold(1, |all, odd| {
        (all / greatest_common_divisor(all, odd)).saturating_mul(odd)
    });
    let twos = counts.iter().map(|&gpus| gpus / odd(gpus)).max();
    let gpus = match all <= MOST_ODD {
        true => twos.unwrap_or(1) * all,
        false => counts.iter().copied().max().unwrap_or(1),
    };
    answers::inputs::default_batch(gpus, seq)
}

/// Says the batch, and warns of numbers of GPUs whose odd factors do not divide the default one: few of their strategies are legal with it,
/// or none.
fn say_batch(args: &SizeArgs, resolved: &Inputs, counts: &[u64]) {
    let batch = resolved.scenario.workload.global_batch;
    let sequence = resolved.json.sequence();
    let said = format!("global batch {batch} sequences of {sequence}");
    note(args.output.quiet, &said);
    let odd = |gpus: &u64| gpus >> gpus.trailing_zeros();
    let unsuited = counts.iter();
    let unsuited = unsuited.filter(|gpus| !batch.is_multiple_of(odd(gpus)));
    let unsuited: Vec<String> = unsuited.map(u64::to_string).collect();
    if args.global_batch.is_none() && !unsuited.is_empty() {
        output::warning(&format!(
            "the default batch of {batch} sequences does not divide evenly among {} GPUs; --global-batch gives another",
            unsuited.join(", ")
        ));
    }
}

/// Commands to suggest for the smallest number of GPUs with a plan; none if there is none.
fn steps(
    resolved: &Inputs,
    smallest: Option<u64>,
    constraints: &Constraints,
    risk: f64,
) -> Result<Vec<Step>, CliError> {
    let Some(gpus) = smallest else {
        return Ok(Vec::new());
    };
    let workload = resolved.scenario.workload.with_gpus(gpus);
    let workload = workload.map_err(PlannerError::from)?;
    let cluster = match &resolved.scenario.cluster.pools {
        Some(pools) => of_pools(pools, gpus)?,
        None => Pool {
            arg: resolved.cluster_arg.clone(),
            cluster: resolved.scenario.cluster.clone(),
            gpus,
        },
    };
    let chosen = arrangements::on_pool(resolved, &cluster, workload);
    let flags = launch::joined(launch::search_options(&chosen, constraints, risk));
    let search = format!("vescale-plan search {flags}");
    Ok(vec![("plan the smallest in full".into(), vec![search])])
}

/// The row of one number of GPUs, of which the best plan uses `used`. [`mark`] adds whether it is
/// on the Pareto front.
fn row(
    [gpus, used]: [u64; 2],
    training: &Training,
    scenario: &Scenario,
    best: Option<&Candidate>,
) -> SizeRow {
    let rate = |best: &Candidate| best.prediction.tokens_per_s_per_gpu;
    SizeRow {
        gpus,
        best: None,
        why_none: None,
        devices: None,
        tokens_per_s: best.map(|best| rate(best) * used as f64),
        budget: best.and_then(|best| training.budget(scenario, used, &best.strategy, rate(best))),
        pareto: false,
        hourly: gpus as f64,
        lines: Vec::new(),
    }
}

/// The row of one number of GPUs of a cluster whose nodes are all alike.
fn row_of_nodes_alike(training: &Training, scenario: &Scenario, sized: &Sized) -> SizeRow {
    let best = sized.best.as_ref();
    let best_json = best.map(|best| BestJson::alike(best, scenario));
    let summary = best_json.as_ref().map(|best| best.plan.summary.clone());
    SizeRow {
        lines: summary.into_iter().collect(),
        best: best_json,
        why_none: sized.why_none.clone(),
        ..row([sized.gpus; 2], training, scenario, best)
    }
}

/// The row of one number of GPUs of several pools. The best plan may use fewer.
fn row_of_pools(gpus: u64, training: &Training, answer: &Answer, hourly: f64) -> SizeRow {
    let (scenario, used) = (&answer.inputs.scenario, answer.inputs.json.gpus);
    let best = answer.outcome.top.first();
    let best_json = BestJson::of(answer);
    let (devices, lines) = match &answer.together {
        Some(together) => {
            let groups = (1..).zip(together.said());
            let groups = groups.map(|(number, group)| format!("group {number}: {group}"));
            (together.devices(), groups.collect())
        }
        None => {
            let devices = scenario.cluster.devices(used);
            let summary = best_json.as_ref().map(|best| &best.plan.summary);
            let line = summary.map(|summary| format!("{devices}: {summary}"));
            (devices, line.into_iter().collect())
        }
    };
    SizeRow {
        devices: best.map(|_| devices),
        lines,
        best: best_json,
        why_none: best.is_none().then(|| why_none(&answer.outcome.space)),
        hourly,
        ..row([gpus, used], training, scenario, best)
    }
}

/// Marks the rows that no other beats in both speed and cost per token. If several numbers of GPUs
/// have the same plan, which leaves some GPUs out, the smallest counts.
fn mark(rows: &mut [SizeRow]) {
    for index in 0..rows.len() {
        let Some((rate, per_cost)) = speed(&rows[index]) else {
            continue;
        };
        let gpus = rows[index].gpus;
        let better = |row: &SizeRow| {
            let (other, other_per_cost) = speed(row)?;
            let better = other > rate || other_per_cost > per_cost || row.gpus < gpus;
            Some(other >= rate && other_per_cost >= per_cost && better)
        };
        rows[index].pareto = !rows.iter().filter_map(better).any(|better| better);
    }
}

/// Tokens per second, and the same per GPU or, if prices differ, per dollar an hour.
fn speed(row: &SizeRow) -> Option<(f64, f64)> {
    let failures = row.budget.and_then(|budget| budget.failures);
    let goodput = failures.map_or(1.0, |lost| lost.goodput);
    let kept = row.tokens_per_s? * goodput;
    Some((kept, kept / row.hourly))
}

/// Titles of the columns, and their widths. The plan is printed below each row.
const HEADER: [&str; 6] = ["GPUs", "tokens/s", "MFU", "fits", "days", "cost"];
const WIDTHS: [usize; 6] = [8, 10, 8, 7, 9, 10];

fn line(cells: [String; 6]) -> String {
    let cells = cells.into_iter().zip(WIDTHS);
    let line: String = cells
        .map(|(cell, width)| format!("{cell:<width$}"))
        .collect();
    format!("{}\n", line.trim_end())
}

fn shown(row: &SizeRow) -> String {
    let gpus = row.gpus.to_string();
    let Some(best) = &row.best else {
        let why = row.why_none.as_deref().unwrap_or_default();
        let lines = output::style().paragraph("        ", why);
        return format!("{gpus:<8}{}", lines.trim_start());
    };
    let (days, dollars) = row.budget.map_or((String::new(), String::new()), |b| {
        let dollars = b.dollars.map_or_else(String::new, format::dollars);
        let days = match b.days.is_finite() {
            true => format::significant(b.days),
            false => "never".to_owned(),
        };
        (days, dollars)
    });
    let predicted = &best.plan.predicted;
    let chance = predicted.p_fits;
    let figures = line([
        gpus,
        format::short_count(row.tokens_per_s.unwrap_or(0.0)),
        of(predicted.mfu),
        chance.map_or_else(String::new, format::probability),
        days,
        dollars,
    ]);
    let below = |text: &str| output::style().paragraph("        ", text);
    let done = row.budget.filter(|budget| budget.days.is_finite());
    let failures = done.and_then(|budget| budget.failures).map(|lost| {
        let every = format::duration(Seconds(lost.checkpoint_every_s));
        below(&format!(
            "goodput {}; a checkpoint every {every}",
            of(lost.goodput)
        ))
    });
    let plan: String = row.lines.iter().map(|line| below(line)).collect();
    figures + &plan + &failures.unwrap_or_default()
}

/// Prints what follows from all rows, of which `smallest` is the first with a plan.
fn conclude(rows: &[SizeRow], smallest: Option<u64>, risk: f64) {
    let Some(smallest) = smallest else {
        output::print("\nNothing fits at these sizes.\n");
        return;
    };
    let gpus = |count: u64| format!("{count} GPU{}", if count == 1 { "" } else { "s" });
    let front = rows.iter().filter(|row| row.pareto);
    let front: Vec<String> = front.map(|row| row.gpus.to_string()).collect();
    let fits = rows.iter().find(|row| row.fits()).map(|row| row.gpus);
    let mut said = match fits {
        Some(fits) => format!("Smallest that fits: {}\n", gpus(fits)),
        None => "No plan has a predicted peak that fits.\n".to_owned(),
    };
    if fits != Some(smallest) {
        said = format!("Smallest within --risk {risk}: {}\n{said}", gpus(smallest));
    }
    output::print(&format!(
        "\nNot beaten in both speed and cost: {} GPUs\n{said}",
        front.join(", "),
    ));
    let rates = rows
        .iter()
        .filter_map(|row| Some((row.gpus, row.tokens_per_s?)));
    output::print(&slower(&rates.collect::<Vec<_>>()));
}

/// Names the numbers of GPUs that are slower than a smaller number, as where they divide badly over
/// nodes or experts. `rates` has each number with its tokens per second.
fn slower(rates: &[(u64, f64)]) -> String {
    let says = |&(gpus, rate): &(u64, f64)| {
        let smaller = rates.iter().filter(|(other, _)| *other < gpus);
        let (other, best) = smaller.max_by(|a, b| a.1.total_cmp(&b.1))?;
        let [rate, best] = [rate, *best].map(|rate| (rate, format::short_count(rate)));
        let differs = rate.0 < best.0 && rate.1 != best.1;
        differs.then(|| {
            format!(
                "{gpus} GPUs are slower than {other}: {} tokens/s, not {}\n",
                rate.1, best.1
            )
        })
    };
    rates.iter().filter_map(says).collect()
}

#[cfg(test)]
mod tests {
    use super::{batch, slower};

    #[test]
    fn numbers_of_gpus_that_slow_a_job_are_named() {
        for (rates, says) in [
            (
                &[(128, 540e3), (144, 528e3)][..],
                "144 GPUs are slower than 128: 528 k tokens/s, not 540 k\n",
            ),
            (
                &[(144, 528e3), (64, 300e3), (128, 540e3)],
                "144 GPUs are slower than 128: 528 k tokens/s, not 540 k\n",
            ),
            (&[(128, 540e3), (144, 600e3)], ""),
            // Figures that print alike are no difference.
            (&[(128, 540.04e3), (144, 540.01e3)], ""),
            (&[], ""),
        ] {
            assert_eq!(slower(rates), says, "{rates:?}");
        }
    }

    #[test]
    fn every_number_of_gpus_divides_the_default_batch() {
        for (counts, seq, found) in [
            (&[64, 72, 80][..], 4096, 2880),
            (&[80, 72, 64], 4096, 2880),
            (&[1, 2, 4, 8, 16], 8192, 512),
            (&[8, 24], 8192, 384),
            (&[7], 8192, 448),
            (&[1_000_000], 1024, 1_000_000),
            (&[100_000], 8192, 100_000),
            (&[999_992], 1024, 999_992),
            // The odd factors have no small common multiple: the batch suits the largest.
            (&[99_992, 100_000], 8192, 100_000),
        ] {
            let batch = batch(counts, seq);
            assert_eq!(batch, found, "{counts:?}");
            let suited = |gpus: &u64| batch.is_multiple_of(*gpus);
            assert!(counts.iter().max().is_some_and(suited), "{counts:?}");
            let all = counts.iter().all(suited);
            assert!(all || counts == [99_992, 100_000], "{counts:?}");
        }
    }
}
