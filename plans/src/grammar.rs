//! Strategies as text, in full for files (`tp=8,pp=4,vpp=2,…`) and in short for people (`tp8 pp4 vpp2 …`). Both are read
//! back as the same strategy; what a text leaves out is filled in with the runtime's defaults.

use std::fmt;

use catalog::model::ModelConfig;
use catalog::runtime::SequenceParallelUse;
use catalog::{
    Axis, AxisOrder, CpKind, CudaGraphs, Dispatcher, Fp8Recipe, GradientTypes, Mistake, Offload,
    OptimizerStates, Overlap, RecomputeModule, Runtime, ScheduleKind, Selection, Workload, Zero,
};

use crate::decisions::{Decisions, Recompute, alone};
use crate::legality::StrategyError;
use crate::partition::{MAX_STAGES, StagePartition};
use crate::strategy::Strategy;
use crate::strategy_words::{Words, syntax};

impl fmt::Display for Decisions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let d = self;
        let [tp, pp, vpp, cp, ep, etp] = [d.tp, d.pp, d.vpp, d.cp, d.ep, d.etp];
        let (dp_shard, dp_replicate) = (d.dp_shard, d.dp_replicate);
        let (zero, reshard) = (u8::from(d.zero), switch(d.reshard_after_forward));
        let (sp, mbs, m) = (
            switch(d.sequence_parallel),
            d.micro_batch,
            d.num_micro_batches,
        );
        let (kind, order) = (d.cp_kind.name(), order_name(d.axis_order));
        let (recompute, schedule) = (recompute_name(d.recompute), d.schedule);
        let stages: Vec<String> = d.stages.0.iter().map(ToString::to_string).collect();
        let (stages, overlap) = (stages.join("/"), overlap_name(d.overlap));
        write!(
            f,
            "tp={tp},pp={pp},vpp={vpp},cp={cp},cp_kind={kind},ep={ep},etp={etp},dp_shard={dp_shard},\
             dp_replicate={dp_replicate},zero={zero},reshard={reshard},sp={sp},mbs={mbs},m={m},recompute={recompute},\
             schedule={schedule},order={order},stages={stages},overlap={overlap}"
        )?;
        choices(d).try_for_each(|choice| write!(f, ",{choice}"))
    }
}

/// The choices that differ from the runtime's own, as `key=value`.
fn choices(d: &Decisions) -> impl Iterator<Item = String> {
    let layers = Some(d.offload_layers).filter(|layers| *layers > 0);
    let named = |name: Option<&str>| name.map(str::to_owned);
    let all = [
        ("grad_dtype", d.gradients.map(GradientTypes::name)),
        (
            "optim_states",
            named(d.optimizer_states.map(OptimizerStates::name)),
        ),
        ("offload", d.offload.map(Offload::name)),
        ("prefetch", d.prefetch.map(|ahead| ahead.to_string())),
        ("offload_layers", layers.map(|layers| layers.to_string())),
        ("dispatcher", named(d.dispatcher.map(Dispatcher::name))),
        ("graphs", named(d.graphs.map(CudaGraphs::name))),
        ("fp8_recipe", named(d.fp8_recipe.map(Fp8Recipe::name))),
    ];
    let written =
        |(key, value): (&str, Option<String>)| value.map(|value| format!("{key}={value}"));
    all.into_iter().filter_map(written)
}

/// A strategy in the shortest form that is read back as the same job, as long as overlap is the runtime's own:
/// `tp8 pp4 vpp2 dp16 zero1 sp mbs1 interleaved recompute=selective`. [`written`] says the overlap too.
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
        parts.push(format!("ep{} etp{}", d.ep, d.etp));
    }
    if d.zero != Zero::Z0 && d.dp_replicate > 1 {
        parts.push(format!("dp{}x{}", d.dp_shard, d.dp_replicate));
    } else {
        parts.push(format!("dp{}", d.dp()));
    }
    parts.push(format!("zero{}", u8::from(d.zero)));
    // With a pipeline, the default of `reshard` depends on the runtime.
    if d.zero == Zero::Z3 && (d.pp > 1 || !d.reshard_after_forward) {
        parts.push(format!("reshard={}", switch(d.reshard_after_forward)));
    }
    if d.sequence_parallel {
        parts.push("sp".into());
    } else if d.tp > 1 {
        parts.push("sp=off".into());
    }
    parts.push(format!("mbs{}", d.micro_batch));
    if d.pp > 1 {
        parts.push(d.schedule.to_string());
    }
    if d.usual_order() != AxisOrder::TP_CP_DP_PP {
        parts.push(format!("order={}", order_name(d.axis_order)));
    }
    parts.push(format!("recompute={}", recompute_name(d.recompute)));
    if d.stages != StagePartition::even(d.stages.layers(), d.pp.saturating_mul(d.vpp)) {
        parts.push(format!("stages={}", d.stages.runs()));
    }
    parts.extend(choices(d));
    parts.join(" ")
}

/// The short form, with the overlap if it is not the runtime's own: what users can give back.
#[must_use]
pub fn written(d: &Decisions, runtime: &Runtime) -> String {
    let short = short(d);
    let own = Decisions {
        overlap: runtime.overlap,
        ..d.clone()
    };
    if d.canonical_overlap() == own.canonical_overlap() {
        return short;
    }
    format!("{short} overlap={}", overlap_name(d.overlap))
}

/// What differs between two strategies, in the words of the short form: `tp8 dp2 → tp4 dp4`.
#[must_use]
pub fn changed_words(from: &Decisions, to: &Decisions) -> String {
    let words = |d: &Decisions| -> Vec<String> {
        let mut words: Vec<String> = short(d).split(' ').map(str::to_owned).collect();
        if from.overlap != to.overlap {
            words.push(format!("overlap={}", overlap_name(d.overlap)));
        }
        words
    };
    let (before, after) = (words(from), words(to));
    let only = |these: &[String], those: &[String]| {
        let these = these.iter().filter(|word| !those.contains(word));
        these.cloned().collect::<Vec<_>>().join(" ")
    };
    let (gone, new) = (only(&before, &after), only(&after, &before));
    match (gone.is_empty(), new.is_empty()) {
        (true, _) => format!("add {new}"),
        (_, true) => format!("drop {gone}"),
        _ => format!("{gone} → {new}"),
    }
}

/// Name of a recompute choice.
#[must_use]
pub fn recompute_name(recompute: Recompute) -> String {
    match recompute {
        Recompute::None => "none".into(),
        Recompute::Selective => "selective".into(),
        Recompute::Modules(selection) => format!("selective:{}", selection.name()),
        Recompute::Full => "full".into(),
        Recompute::Layers(n) => format!("layers:{n}"),
        Recompute::Falling(n) => format!("falling:{n}"),
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

/// The value of the key `overlap` that [`read_overlap`] reads back.
#[must_use]
pub fn overlap_name(o: Overlap) -> String {
    let parts: Vec<&str> = [
        (o.grad_reduce, "grad"),
        (o.param_gather, "param"),
        (o.tensor_parallel, "tp"),
        (o.expert_parallel, "ep"),
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

/// The values that the key `overlap` takes, in words for error messages.
pub const OVERLAPS: &str = "none, or some of grad+param+tp+ep+pp";

/// Reads a value of the key `overlap`, such as `grad+param`; `None` if it is not of the form that [`OVERLAPS`] describes.
#[must_use]
pub fn read_overlap(text: &str) -> Option<Overlap> {
    let mut overlap = Overlap::NONE;
    if text == "none" {
        return Some(overlap);
    }
    for part in text.split('+') {
        match part {
            "grad" => overlap.grad_reduce = true,
            "param" => overlap.param_gather = true,
            "tp" => overlap.tensor_parallel = true,
            "ep" => overlap.expert_parallel = true,
            "pp" => overlap.pipeline = true,
            _ => return None,
        }
    }
    Some(overlap)
}

/// Whether a text has the form of a strategy: words that are keys with values.
#[must_use]
pub fn is_strategy(text: &str) -> bool {
    Words::read(text).is_ok()
}

/// The keys that a strategy's text sets.
///
/// # Errors
/// If a word is not a key with a value.
pub fn keys(text: &str) -> Result<Vec<&'static str>, StrategyError> {
    Ok(Words::read(text)?.keys().collect())
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
    let decisions = Fields(Words::read(text)?).fill(model, workload, runtime)?;
    Strategy::new(decisions, model, workload)
}

/// A strategy's text with some keys changed. Keys that depend on these are left out, to be filled
/// in again: stages depend on VPP, VPP on the schedule, and all three on having a pipeline.
#[must_use]
pub fn with(text: &str, changes: &[(&str, String)]) -> String {
    let changed = |key: &str| changes.iter().rev().find(|(k, _)| *k == key);
    let schedule = changed("schedule").map(|(_, value)| value.as_str());
    let pipelined = schedule.is_some() || changed("vpp").is_some() || changed("pp").is_some();
    let alone = changed("pp").is_some_and(|(_, value)| value == "1");
    let mut parts: Vec<String> = Vec::new();
    let pair = |part| str::split_once(part, '=').map(|(key, value)| (part, key, value));
    for (part, key, value) in text.split(',').filter_map(pair) {
        match (changed(key), key) {
            (Some((_, value)), _) => parts.push(format!("{key}={value}")),
            (None, "stages") if pipelined => {}
            (None, "schedule" | "vpp") if alone => {}
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

/// Reads the words of a strategy as values of decisions.
struct Fields(Words);

impl Fields {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)
    }

    /// A size, which is at least 1.
    fn size(&self, key: &str) -> Result<Option<u64>, StrategyError> {
        self.number(key, 1)
    }

    /// A number that may be 0.
    fn count(&self, key: &str) -> Result<Option<u64>, StrategyError> {
        self.number(key, 0)
    }

    fn number(&self, key: &str, least: u64) -> Result<Option<u64>, StrategyError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.parse::<u64>() {
            Ok(number) if (least..=1 << 24).contains(&number) => Ok(Some(number)),
            _ => Err(syntax(
                key,
                value,
                format!("a whole number from {least} to {}", 1 << 24),
            )),
        }
    }

    fn switch(&self, key: &str) -> Result<Option<bool>, StrategyError> {
        match self.get(key) {
            None => Ok(None),
            Some("on" | "true") => Ok(Some(true)),
            Some("off" | "false") => Ok(Some(false)),
            Some(value) => Err(syntax(key, value, "on or off")),
        }
    }

    /// `(dp_shard, dp_replicate)`; their product is `dp` if the text does not say otherwise.
    fn replicas(&self, zero: Zero, dp: u64) -> Result<(u64, u64), StrategyError> {
        let dp = self.size("dp")?.unwrap_or(dp);
        let named = (self.size("dp_shard")?, self.size("dp_replicate")?);
        Ok(match named {
            (Some(shard), Some(replicate)) => (shard, replicate),
            (Some(shard), None) => (shard, (dp / shard).max(1)),
            (None, Some(replicate)) if zero == Zero::Z0 => (1, replicate),
            (None, Some(replicate)) => ((dp / replicate).max(1), replicate),
            (None, None) if zero == Zero::Z0 => (1, dp),
            (None, None) => (dp, 1),
        })
    }

    /// Whether parameters are freed after forward. Asking for `prefetch` implies that they are.
    fn reshards(&self, zero: Zero, pp: u64, runtime: &Runtime) -> Result<bool, StrategyError> {
        let by_default = runtime.zero3_once.reshards_by_default(pp);
        let usual = zero == Zero::Z3 && (by_default || self.count("prefetch")?.is_some());
        Ok(self.switch("reshard")?.unwrap_or(usual))
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
        let ep = self.size("ep")?.unwrap_or(1);
        let split = (runtime.space.expert_split.sizes(ep, tp)).filter(|_| model.moe.is_some());
        let usual_split = split.and_then(|sizes| sizes.first().copied());
        let etp = self.size("etp")?.or(usual_split).unwrap_or(1);
        let zero = self.zero(runtime, pp, alone([rest, cp, tp], [ep, etp], model))?;
        let (dp_shard, dp_replicate) = self.replicas(zero, rest)?;
        let micro_batch = self.size("mbs")?.unwrap_or(1);
        let replicas = dp_shard.saturating_mul(dp_replicate);
        let per_rank = replicas.saturating_mul(micro_batch).max(1);
        let num_micro_batches = self
            .size("m")?
            .unwrap_or((workload.global_batch / per_rank).max(1));
        let sequence_parallel = self
            .switch("sp")?
            .unwrap_or(tp > 1 && runtime.space.sequence_parallel != SequenceParallelUse::Never);
        let decisions = Decisions {
            tp,
            pp,
            vpp,
            cp,
            cp_kind: self.cp_kind(runtime)?,
            ep,
            etp,
            dp_shard,
            dp_replicate,
            zero,
            reshard_after_forward: self.reshards(zero, pp, runtime)?,
            sequence_parallel,
            micro_batch,
            num_micro_batches,
            recompute: self.recompute()?,
            schedule: self.schedule(vpp)?,
            axis_order: self.order(runtime)?,
            stages: self.stages(model, pp.saturating_mul(vpp))?,
            overlap: self.overlap(runtime)?,
            gradients: self.gradients()?,
            optimizer_states: self.optimizer_states()?,
            offload: self.offload()?,
            prefetch: self.count("prefetch")?,
            offload_layers: self.count("offload_layers")?.unwrap_or(0),
            dispatcher: self.named("dispatcher", Dispatcher::ALL, Dispatcher::name)?,
            graphs: self.named("graphs", CudaGraphs::ALL, CudaGraphs::name)?,
            fp8_recipe: self.named("fp8_recipe", Fp8Recipe::ALL, Fp8Recipe::name)?,
        };
        Ok(decisions.under(runtime, workload.precision))
    }

    fn zero(&self, runtime: &Runtime, pp: u64, alone: bool) -> Result<Zero, StrategyError> {
        let Some(value) = self.get("zero") else {
            let best = runtime.space.zero_levels(pp).max().unwrap_or(Zero::Z0);
            return Ok(if alone { Zero::Z0 } else { best });
        };
        value
            .parse::<u8>()
            .ok()
            .and_then(|level| Zero::try_from(level).ok())
            .ok_or_else(|| syntax("zero", value, "0, 1, 2 or 3"))
    }

    /// One of the values of a choice, by its name.
    fn named<T: Copy>(
        &self,
        key: &str,
        all: &[T],
        name: fn(T) -> &'static str,
    ) -> Result<Option<T>, StrategyError> {
        let value = self.get(key);
        value.map(|value| one_of(key, value, all, name)).transpose()
    }

    fn cp_kind(&self, runtime: &Runtime) -> Result<CpKind, StrategyError> {
        let named = self.named("cp_kind", CpKind::ALL, CpKind::name)?;
        Ok(named.unwrap_or_else(|| runtime.space.usual_cp_kind()))
    }

    fn schedule(&self, vpp: u64) -> Result<ScheduleKind, StrategyError> {
        let usual = match vpp > 1 {
            true => ScheduleKind::Interleaved,
            false => ScheduleKind::OneFOneB,
        };
        let named = self.named("schedule", &ScheduleKind::ALL, ScheduleKind::name)?;
        Ok(named.unwrap_or(usual))
    }

    fn recompute(&self) -> Result<Recompute, StrategyError> {
        match self.get("recompute") {
            None | Some("none") => Ok(Recompute::None),
            Some("selective") => Ok(Recompute::Selective),
            Some("full") => Ok(Recompute::Full),
            Some("selective_ops") => Ok(Recompute::SelectiveOps),
            Some(value) => (number_after(value, "layers:").map(Recompute::Layers))
                .or_else(|| number_after(value, "falling:").map(Recompute::Falling))
                .or_else(|| {
                    let selection = Selection::read(value.strip_prefix("selective:")?)?;
                    Some(Recompute::Modules(selection))
                })
                .ok_or_else(|| {
                    syntax("recompute", value,
                        format!(
                            "none, selective, full, selective_ops, layers:N, falling:N, or selective: with parts of {}",
                            Selection::from_iter(RecomputeModule::ALL.iter().copied()).name()
                        ),
                    )
                }),
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
        let order: [Axis; 5] = found
            .try_into()
            .map_err(|_| syntax("order", value, "five axes, innermost first"))?;
        if axes.iter().all(|axis| order.contains(axis)) {
            Ok(AxisOrder(order))
        } else {
            Err(syntax("order", value, "every axis once"))
        }
    }

    fn stages(&self, model: &ModelConfig, count: u64) -> Result<StagePartition, StrategyError> {
        let Some(value) = self.get("stages") else {
            return Ok(StagePartition::even(model.layers, count));
        };
        StagePartition::read(value).ok_or_else(|| {
            syntax(
                "stages",
                value,
                format!("layers of each of at most {MAX_STAGES} stages, as 20/20/20/20 or 4x20"),
            )
        })
    }

    fn gradients(&self) -> Result<Option<GradientTypes>, StrategyError> {
        let Some(value) = self.get("grad_dtype") else {
            return Ok(None);
        };
        let types = GradientTypes::read(value).ok_or_else(|| {
            syntax("grad_dtype", value,
                "fp32, bf16 or fp16, or two of them as fp32/bf16: held in the first, reduced in the second",
            )
        })?;
        Ok(Some(types))
    }

    fn optimizer_states(&self) -> Result<Option<OptimizerStates>, StrategyError> {
        match self.get("optim_states") {
            Some(OptimizerStates::OWN) => Ok(None),
            _ => self.named("optim_states", OptimizerStates::ALL, OptimizerStates::name),
        }
    }

    fn offload(&self) -> Result<Option<Offload>, StrategyError> {
        let Some(value) = self.get("offload").filter(|value| *value != Offload::NONE) else {
            return Ok(None);
        };
        let wrong = || {
            let expected =
                "none, optimizer, optimizer:N for N percent of the weights, or parameters";
            syntax("offload", value, expected)
        };
        Offload::read(value).map(Some).ok_or_else(wrong)
    }

    fn overlap(&self, runtime: &Runtime) -> Result<Overlap, StrategyError> {
        let Some(value) = self.get("overlap") else {
            return Ok(runtime.overlap);
        };
        read_overlap(value).ok_or_else(|| syntax("overlap", value, OVERLAPS))
    }
}

/// The number after a prefix.
fn number_after(value: &str, prefix: &str) -> Option<u64> {
    value.strip_prefix(prefix)?.parse().ok()
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
            let nearest = catalog::suggest::nearest(value, &names);
            StrategyError::Syntax(
                Mistake::new(format!("`{value}` is not a value of `{key}`"))
                    .expected(format!("one of {}", names.join(", ")))
                    .example(nearest.as_ref().map_or_else(
                        || format!("--strategy {key}={}", names[0]),
                        |near| format!("--strategy {key}={near}"),
                    ))
                    .nearest(nearest),
            )
        })
}
