//! `search --from`: the strategy in use, its question, and the pools that it runs on.

use std::path::Path;
use std::sync::Arc;

use answers::origins::Asked;
use answers::present::Read;
use answers::values::Gpus;
use answers::{Inputs, Now, Planned, Together, arrangements, opened};
use catalog::paths::beside;
use catalog::{Mistake, Pool, Pools};
use costmodel::CostError;
use planner::PlannerError;
use plans::{Axis, Strategy};

use crate::args::SearchArgs;
use crate::commands::plan;
use crate::commands::present_source::Given;
use crate::error::CliError;
use crate::inputs;

/// The strategy in use that `--from` names, with its question.
pub(crate) struct InUse {
    /// The question.
    pub(crate) inputs: Inputs,
    /// The question on the devices that the strategy in use runs on, perhaps not all pools.
    pub(crate) on: Inputs,
    /// What was read; with several groups of replicas, the strategy is that of the first group.
    pub(crate) read: Read,
    /// The groups of replicas, if not all replicas are alike.
    pub(crate) together: Option<Box<Together>>,
}

impl InUse {
    /// The strategy, or groups of replicas, to compare with the best plan.
    pub(crate) fn now(&self) -> Now<'_> {
        match &self.together {
            Some(together) => Now::Groups(together),
            None => Now::Alike(&self.read.strategy, &self.on),
        }
    }

    /// The strategies of its groups of replicas, one if all are alike.
    pub(crate) fn strategies(&self) -> Vec<&Strategy> {
        match &self.together {
            Some(together) => together.parts.iter().map(|part| &part.strategy).collect(),
            None => vec![&self.read.strategy],
        }
    }
}

/// Reads what `--from` names.
pub(crate) fn read(from: &str, args: &SearchArgs, asked: &Asked) -> Result<InUse, CliError> {
    let from = Given::of(from)?;
    if let Given::Plan(path) = &from
        && let Planned::Groups(_, together) = plan::planned(path)?
    {
        return of_groups(path, *together, args, asked);
    }
    let several = several(&from, args, asked)?;
    let Some((whole, pools)) = several else {
        if let Some(on) = &args.on {
            let what = "the nodes of the cluster are all alike";
            let expected = "a cluster of several pools";
            return Err(CliError::unexpected(format!("--on '{on}'"), what, expected));
        }
        let (inputs, read) = from.read(args, asked, None)?;
        return Ok(InUse {
            on: inputs.clone(),
            inputs,
            read,
            together: None,
        });
    };
    let (on, read) = placed(&from, args, asked, &pools)?;
    let workload = on.scenario.workload.with_gpus(whole.gpus);
    let workload = workload.map_err(PlannerError::from)?;
    Ok(InUse {
        inputs: arrangements::on_pool(&on, &whole, workload),
        on,
        read,
        together: None,
    })
}

/// The cluster that is searched, if it has several pools.
fn several(
    from: &Given<'_>,
    args: &SearchArgs,
    asked: &Asked,
) -> Result<Option<(Pool, Arc<Pools>)>, CliError> {
    let flags = &args.scenario;
    let gpus = flags.gpus.as_ref().filter(|_| asked.says("gpus"));
    let device = gpus.and_then(Gpus::device);
    let named = flags.cluster.as_deref();
    let arg = match from {
        Given::Plan(path) if !asked.says("cluster") && device.is_none() => {
            beside(path, &opened::read(path)?.cluster)
        }
        _ => answers::inputs::cluster_arg(named, device)?,
    };
    let arg = answers::inputs::jittering(arg, flags.assumed.jitter)?;
    let cluster = answers::inputs::cluster(&arg, device)?;
    let Some(pools) = cluster.pools.clone() else {
        return Ok(None);
    };
    let total = pools.gpus();
    if let Some(gpus) = gpus {
        answers::inputs::check_gpus(gpus.count(&cluster), &cluster)?;
    }
    let whole = Pool {
        arg,
        cluster,
        gpus: total,
    };
    Ok(Some((whole, pools)))
}

/// The strategy on the pools that it runs on: those that `--on` names, those of its plan file, all of them, or else the only
/// ones that it can run on.
fn placed(
    from: &Given<'_>,
    args: &SearchArgs,
    asked: &Asked,
    pools: &Pools,
) -> Result<(Inputs, Read), CliError> {
    if let Some(names) = &args.on {
        let wrong = |mistake: Mistake| {
            let mistake = mistake.at(format!("--on '{names}'"));
            let mistake = mistake.example(format!("--on '{}'", pools.names()[0]));
            CliError::Input(mistake)
        };
        return on_pools(from, args, asked, &pools.chosen(names).map_err(wrong)?);
    }
    let mut arrangements = pools.arrangements();
    if let Given::Plan(path) = from {
        let file = opened::read(path)?;
        let cluster = opened::cluster(path, &file.cluster)?;
        let own = arrangements
            .iter()
            .position(|pool| pool.cluster == cluster && pool.gpus == file.workload.gpus);
        if let Some(own) = own {
            arrangements.swap(0, own);
        }
    }
    let first = match on_pools(from, args, asked, &arrangements[0]) {
        Ok(found) => return Ok(found),
        Err(error) => error,
    };
    let others = arrangements[1..].iter().filter_map(|pool| {
        let found = on_pools(from, args, asked, pool).ok()?;
        Some((pool, found))
    });
    let mut others: Vec<(&Pool, (Inputs, Read))> = others.collect();
    if others.len() > 1 {
        let names: Vec<&str> = others.iter().map(|(pool, _)| &pool.arg[..]).collect();
        let wrong = Mistake::new("the strategy in use can run on several of the pools")
            .at(format!(
                "--from {}",
                args.from.as_deref().unwrap_or_default()
            ))
            .expected(format!("--on with one of {}", names.join(", ")))
            .example(format!("--on '{}'", names[0]));
        return Err(wrong.into());
    }
    others.pop().map(|(_, found)| found).ok_or(first)
}

/// The question and the strategy on some of a cluster's pools, if the strategy can run there.
fn on_pools(
    from: &Given<'_>,
    args: &SearchArgs,
    asked: &Asked,
    pool: &Pool,
) -> Result<(Inputs, Read), CliError> {
    let (inputs, read) = from.read(args, asked, Some(pool))?;
    let outermost = read.strategy.axis_order.0.last() == Some(&Axis::Pp);
    match &pool.cluster.pools {
        Some(pools) if pools.of_pipeline(read.strategy.pp).is_none() || !outermost => {
            let wrong = CostError::AcrossPools {
                ranks: read.strategy.pp,
                gpus: pools.parts.iter().map(|pool| pool.gpus).collect(),
            };
            Err(CliError::from(wrong))
        }
        _ => Ok((inputs, read)),
    }
}

/// A plan with several groups of replicas, unchanged; the cluster to search may be another.
fn of_groups(
    path: &Path,
    together: Together,
    args: &SearchArgs,
    asked: &Asked,
) -> Result<InUse, CliError> {
    let shown = path.display().to_string();
    let changed = [
        "model",
        "runtime",
        "seq",
        "global_batch",
        "precision",
        "headroom",
        "jitter",
        "on",
    ];
    if let Some(flag) = changed.into_iter().find(|flag| asked.says(flag)) {
        let flag = flag.replace('_', "-");
        let place = format!("--from {shown} --{flag}");
        let what = "a plan with several groups of replicas is compared as it is";
        let expected = format!("no --{flag}, or one of its groups, such as {shown}#1");
        return Err(CliError::unexpected(place, what, expected));
    }
    let Some((whole, _)) = several(&Given::Plan(path.to_owned()), args, asked)? else {
        let cluster = args.scenario.cluster.as_deref().unwrap_or("");
        let what = "a plan with several groups of replicas needs several pools";
        let expected =
            format!("a cluster of several pools, or one of its groups, such as {shown}#1");
        return Err(CliError::unexpected(
            format!("--cluster {cluster}"),
            what,
            expected,
        ));
    };
    let workload = together.inputs.scenario.workload.with_gpus(whole.gpus);
    let workload = workload.map_err(PlannerError::from)?;
    let inputs = arrangements::on_pool(&together.inputs, &whole, workload);
    let read = Read {
        from: shown.clone(),
        strategy: together.parts[0].strategy.clone(),
        kept: inputs::words(&args.keep),
        notes: Vec::new(),
        plan: shown,
        writes_plan: None,
    };
    Ok(InUse {
        inputs,
        on: together.inputs.clone(),
        read,
        together: Some(Box::new(together)),
    })
}
