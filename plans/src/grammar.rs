//! Strategies as text: `tp=8,pp=4,vpp=2,zero=1,recompute=selective,…`. Printing and parsing are inverse; parsing fills
//! in the runtime's defaults for what the text leaves out.

use std::fmt;

use catalog::model::ModelConfig;
use catalog::runtime::SequenceParallelUse;
use catalog::{Axis, AxisOrder, CpKind, Overlap, Runtime, ScheduleKind, Workload, Zero};

use crate::decisions::{Decisions, Recompute};
use crate::legality::StrategyError;
use crate::partition::StagePartition;
use crate::strategy::Strategy;

const KEYS: [&str; 20] = [
    "tp",
    "pp",
    "vpp",
    "cp",
    "cp_kind",
    "ep",
    "etp",
    "dp",
    "dp_shard",
    "dp_replicate",
    "zero",
    "reshard",
    "sp",
    "mbs",
    "m",
    "recompute",
    "schedule",
    "order",
    "stages",
    "overlap",
];

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = &**self;
        write!(
            f,
            "tp={},pp={},vpp={},cp={},cp_kind={}",
            d.tp,
            d.pp,
            d.vpp,
            d.cp,
            d.cp_kind.name()
        )?;
        write!(
            f,
            ",ep={},etp={},dp_shard={},dp_replicate={}",
            d.ep, d.etp, d.dp_shard, d.dp_replicate
        )?;
        write!(
            f,
            ",zero={},reshard={}",
            u8::from(d.zero),
            switch(d.reshard_after_forward)
        )?;
        write!(
            f,
            ",sp={},mbs={},m={}",
            switch(d.sequence_parallel),
            d.micro_batch,
            d.num_micro_batches
        )?;
        write!(
            f,
            ",recompute={},schedule={}",
            recompute_name(d.recompute),
            d.schedule
        )?;
        write!(f, ",order={}", order_name(d.axis_order))?;
        let stages: Vec<String> = d.stages.0.iter().map(ToString::to_string).collect();
        write!(
            f,
            ",stages={},overlap={}",
            stages.join("/"),
            overlap_name(d.overlap)
        )
    }
}

/// The decisions a reader asks for first, in the shortest form: `tp8 pp4 vpp2 dp16 zero1 sp mbs1 selective`.
#[must_use]
pub fn short(d: &Decisions) -> String {
    let mut parts = vec![format!("tp{}", d.tp), format!("pp{}", d.pp)];
    if d.vpp > 1 {
        parts.push(format!("vpp{}", d.vpp));
    }
    if d.cp > 1 {
        parts.push(format!("cp{}({})", d.cp, d.cp_kind.name()));
    }
    if d.ep > 1 || d.etp > 1 {
        parts.push(format!("ep{}·etp{}", d.ep, d.etp));
    }
    if d.zero != Zero::Z0 && d.dp_replicate > 1 {
        parts.push(format!("dp{}×{}", d.dp_shard, d.dp_replicate));
    } else {
        parts.push(format!("dp{}", d.dp()));
    }
    parts.push(format!("zero{}", u8::from(d.zero)));
    if d.sequence_parallel {
        parts.push("sp".into());
    }
    parts.push(format!("mbs{}", d.micro_batch));
    if d.pp > 1 {
        parts.push(d.schedule.to_string());
        if d.axis_order != AxisOrder::TP_CP_DP_PP {
            parts.push(format!("order {}", order_name(d.axis_order)));
        }
    }
    parts.push(format!("recompute {}", recompute_name(d.recompute)));
    parts.join(" ")
}

/// Name of a recompute choice.
#[must_use]
pub fn recompute_name(recompute: Recompute) -> String {
    match recompute {
        Recompute::None => "none".into(),
        Recompute::Selective => "selective".into(),
        Recompute::Full => "full".into(),
        Recompute::Layers(n) => format!("layers:{n}"),
        Recompute::SelectiveOps => "selective_ops".into(),
    }
}

/// Name of an axis order, innermost first.
#[must_use]
pub fn order_name(order: AxisOrder) -> String {
    order.0.map(Axis::name).join("-")
}

fn switch(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// Name of an overlap choice.
#[must_use]
pub fn overlap_name(o: Overlap) -> String {
    let parts: Vec<&str> = [
        (o.grad_reduce, "grad"),
        (o.param_gather, "param"),
        (o.tensor_parallel, "tp"),
        (o.pipeline, "pp"),
    ]
    .into_iter()
    .filter_map(|(on, name)| on.then_some(name))
    .collect();
    if parts.is_empty() {
        "none".into()
    } else {
        parts.join("+")
    }
}

/// Parses a strategy; what the text leaves out is filled in.
///
/// # Errors
/// Unknown keys with the nearest known one, values that are not of the key's form, and strategies
/// that are not legal.
pub fn parse(
    text: &str,
    model: &ModelConfig,
    workload: &Workload,
    runtime: &Runtime,
) -> Result<Strategy, StrategyError> {
    let fields = Fields::read(text)?;
    let decisions = fields.fill(model, workload, runtime)?;
    Strategy::new(decisions, model, workload)
}

/// A strategy's text with some keys given other values. Keys that follow from a changed one are left out, to be filled
/// in again: stages follow from virtual stages, virtual stages from the schedule.
#[must_use]
pub fn with(text: &str, changes: &[(&str, String)]) -> String {
    let changed = |key: &str| changes.iter().rev().find(|(k, _)| *k == key);
    let schedule = changed("schedule").map(|(_, value)| value.as_str());
    let pipelined = schedule.is_some() || changed("vpp").is_some() || changed("pp").is_some();
    let mut parts: Vec<String> = Vec::new();
    for part in text.split(',') {
        let Some((key, value)) = part.split_once('=') else {
            continue;
        };
        match (changed(key), key) {
            (Some((_, value)), _) => parts.push(format!("{key}={value}")),
            (None, "stages") if pipelined => {}
            (None, "vpp") if schedule == Some("1f1b") || schedule == Some("gpipe") => {
                parts.push("vpp=1".to_owned());
            }
            (None, "vpp") if schedule == Some("interleaved") && value == "1" => {
                parts.push("vpp=2".to_owned());
            }
            (None, "dp_shard" | "dp_replicate") if changed("zero").is_some() => {}
            (None, _) => parts.push(part.to_owned()),
        }
    }
    let added = changes.iter().filter(|(key, _)| {
        let given = |part: &String| part.split_once('=').is_some_and(|(k, _)| k == *key);
        !parts.iter().any(given)
    });
    let added: Vec<String> = added.map(|(k, v)| format!("{k}={v}")).collect();
    parts.extend(added);
    parts.join(",")
}

struct Fields<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Fields<'a> {
    fn read(text: &'a str) -> Result<Self, StrategyError> {
        let mut fields: Vec<(&str, &str)> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| syntax(format!("`{part}` is not of the form key=value")))?;
            if !KEYS.contains(&key) {
                let hint = catalog::suggest::nearest(key, KEYS).map_or_else(
                    || format!("keys: {}", KEYS.join(", ")),
                    |k| format!("did you mean `{k}`?"),
                );
                return Err(syntax(format!("unknown key `{key}`; {hint}")));
            }
            if fields.iter().any(|(known, _)| *known == key) {
                return Err(syntax(format!("key `{key}` is given twice")));
            }
            fields.push((key, value));
        }
        Ok(Self(fields))
    }

    fn get(&self, key: &str) -> Option<&'a str> {
        self.0
            .iter()
            .find(|(k, _)| *k == key)
            .map(|(_, value)| *value)
    }

    fn size(&self, key: &str) -> Result<Option<u64>, StrategyError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.parse::<u64>() {
            Ok(size) if (1..=1 << 24).contains(&size) => Ok(Some(size)),
            _ => Err(syntax(format!(
                "{key}={value}: expected a whole number from 1 to {}",
                1 << 24
            ))),
        }
    }

    fn switch(&self, key: &str) -> Result<Option<bool>, StrategyError> {
        match self.get(key) {
            None => Ok(None),
            Some("on" | "true") => Ok(Some(true)),
            Some("off" | "false") => Ok(Some(false)),
            Some(value) => Err(syntax(format!("{key}={value}: expected on or off"))),
        }
    }

    fn fill(
        &self,
        model: &ModelConfig,
        workload: &Workload,
        runtime: &Runtime,
    ) -> Result<Decisions, StrategyError> {
        let tp = self.size("tp")?.unwrap_or(1);
        let pp = self.size("pp")?.unwrap_or(1);
        let vpp = self.size("vpp")?.unwrap_or(1);
        let cp = self.size("cp")?.unwrap_or(1);
        let rest = (workload.gpus / tp.saturating_mul(pp).saturating_mul(cp).max(1)).max(1);
        let zero = self.zero(runtime, rest * cp)?;
        let dp_replicate = self.size("dp_replicate")?;
        let dp_shard = self.size("dp_shard")?;
        let dp = self.size("dp")?.unwrap_or(rest);
        let (dp_shard, dp_replicate) = match (dp_shard, dp_replicate) {
            (Some(shard), Some(replicate)) => (shard, replicate),
            (Some(shard), None) => (shard, (dp / shard).max(1)),
            (None, Some(replicate)) if zero == Zero::Z0 => (1, replicate),
            (None, Some(replicate)) => ((dp / replicate).max(1), replicate),
            (None, None) if zero == Zero::Z0 => (1, dp),
            (None, None) => (dp, 1),
        };
        let micro_batch = self.size("mbs")?.unwrap_or(1);
        let per_rank = dp_shard
            .saturating_mul(dp_replicate)
            .saturating_mul(micro_batch)
            .max(1);
        let num_micro_batches = self
            .size("m")?
            .unwrap_or((workload.global_batch / per_rank).max(1));
        let sequence_parallel = self
            .switch("sp")?
            .unwrap_or(tp > 1 && runtime.space.sequence_parallel != SequenceParallelUse::Never);
        Ok(Decisions {
            tp,
            pp,
            vpp,
            cp,
            cp_kind: self.cp_kind(runtime)?,
            ep: self.size("ep")?.unwrap_or(1),
            etp: self.size("etp")?.unwrap_or(1),
            dp_shard,
            dp_replicate,
            zero,
            reshard_after_forward: self.switch("reshard")?.unwrap_or(zero == Zero::Z3),
            sequence_parallel,
            micro_batch,
            num_micro_batches,
            recompute: self.recompute()?,
            schedule: self.schedule(vpp)?,
            axis_order: self.order(runtime)?,
            stages: self.stages(model, pp.saturating_mul(vpp))?,
            overlap: self.overlap(runtime)?,
        })
    }

    fn zero(&self, runtime: &Runtime, shared_by: u64) -> Result<Zero, StrategyError> {
        let Some(value) = self.get("zero") else {
            let best = runtime.space.zero.iter().max().copied().unwrap_or(Zero::Z0);
            return Ok(if shared_by == 1 { Zero::Z0 } else { best });
        };
        value
            .parse::<u8>()
            .ok()
            .and_then(|level| Zero::try_from(level).ok())
            .ok_or_else(|| syntax(format!("zero={value}: expected 0, 1, 2 or 3")))
    }

    fn cp_kind(&self, runtime: &Runtime) -> Result<CpKind, StrategyError> {
        match self.get("cp_kind") {
            None => Ok(runtime
                .space
                .cp_kinds
                .first()
                .copied()
                .unwrap_or(CpKind::Ring)),
            Some(value) => one_of("cp_kind", value, &CpKind::ALL, CpKind::name),
        }
    }

    fn recompute(&self) -> Result<Recompute, StrategyError> {
        match self.get("recompute") {
            None | Some("none") => Ok(Recompute::None),
            Some("selective") => Ok(Recompute::Selective),
            Some("full") => Ok(Recompute::Full),
            Some("selective_ops") => Ok(Recompute::SelectiveOps),
            Some(value) => value
                .strip_prefix("layers:")
                .and_then(|n| n.parse().ok())
                .map(Recompute::Layers)
                .ok_or_else(|| {
                    syntax(format!(
                        "recompute={value}: expected none, selective, full, selective_ops or layers:N"
                    ))
                }),
        }
    }

    fn schedule(&self, vpp: u64) -> Result<ScheduleKind, StrategyError> {
        match self.get("schedule") {
            None if vpp > 1 => Ok(ScheduleKind::Interleaved),
            None => Ok(ScheduleKind::OneFOneB),
            Some(value) => one_of("schedule", value, &ScheduleKind::ALL, ScheduleKind::name),
        }
    }

    fn order(&self, runtime: &Runtime) -> Result<AxisOrder, StrategyError> {
        let Some(value) = self.get("order") else {
            return Ok(runtime
                .space
                .axis_orders
                .first()
                .copied()
                .unwrap_or(AxisOrder::TP_CP_DP_PP));
        };
        let axes = [
            Axis::Tp,
            Axis::Cp,
            Axis::DpShard,
            Axis::DpReplicate,
            Axis::Pp,
        ];
        let mut found = Vec::new();
        for name in value.split('-') {
            found.push(one_of("order", name, &axes, Axis::name)?);
        }
        let order: [Axis; 5] = found.try_into().map_err(|_| {
            syntax(format!(
                "order={value}: expected five axes, innermost first"
            ))
        })?;
        if axes.iter().all(|axis| order.contains(axis)) {
            Ok(AxisOrder(order))
        } else {
            Err(syntax(format!("order={value}: every axis stands once")))
        }
    }

    fn stages(&self, model: &ModelConfig, count: u64) -> Result<StagePartition, StrategyError> {
        let Some(value) = self.get("stages") else {
            return Ok(StagePartition::even(model.layers, count));
        };
        value
            .split('/')
            .map(|n| n.parse::<u64>().ok())
            .collect::<Option<Vec<u64>>>()
            .map(StagePartition)
            .ok_or_else(|| {
                syntax(format!(
                    "stages={value}: expected layers per stage, as 10/10/10/10"
                ))
            })
    }

    fn overlap(&self, runtime: &Runtime) -> Result<Overlap, StrategyError> {
        let Some(value) = self.get("overlap") else {
            return Ok(runtime.overlap);
        };
        let mut overlap = Overlap::NONE;
        if value == "none" {
            return Ok(overlap);
        }
        for part in value.split('+') {
            match part {
                "grad" => overlap.grad_reduce = true,
                "param" => overlap.param_gather = true,
                "tp" => overlap.tensor_parallel = true,
                "pp" => overlap.pipeline = true,
                _ => {
                    return Err(syntax(format!(
                        "overlap={value}: expected none, or grad+param+tp+pp"
                    )));
                }
            }
        }
        Ok(overlap)
    }
}

fn one_of<T: Copy>(
    key: &str,
    value: &str,
    all: &[T],
    name: fn(T) -> &'static str,
) -> Result<T, StrategyError> {
    all.iter()
        .copied()
        .find(|&item| name(item) == value)
        .ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|&item| name(item)).collect();
            syntax(format!(
                "{key}={value}: expected one of {}",
                names.join(", ")
            ))
        })
}

fn syntax(message: String) -> StrategyError {
    StrategyError::Syntax(message)
}
