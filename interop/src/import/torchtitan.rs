//! Import of torchtitan configurations as strategies: TOML of 0.2 and before, Python of 0.3 and main.

use catalog::{
    CpKind, CudaGraphs, Dispatcher, Offload, Overlap, Precision, ScheduleKind, WorkloadSizes, Zero,
};

use super::document::Document;
use super::error::ImportError;
use super::imported::{Given, Imported};
use super::sizes::{data_parallel, micro_batches};
use super::titan_keys;
use super::titan_precision::{fp8_recipe, precision, unplanned};
use crate::config::{Node, Value};
use crate::export::Dialect;
use plans::decisions::{Decisions, Recompute, alone};
use plans::partition::StagePartition;

/// torchtitan's defaults for keys that a file leaves out (`TrainingConfig` and `ParallelismConfig`).
const LOCAL_BATCH: u64 = 8;
const SEQ_LEN: u64 = 2048;

pub(super) fn import(doc: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    refuse_replaced(doc)?;
    refuse_unseen_base(doc)?;
    let size = |key: &str| doc.degree(&format!("parallelism.{key}"));
    let tp = size("tensor_parallel_degree")?;
    let cp = size("context_parallel_degree")?;
    let pp = size("pipeline_parallel_degree")?;
    let dp_replicate = size("data_parallel_replicate_degree")?;
    let ranks = |dp: u64| dp.saturating_mul(tp).saturating_mul(cp).saturating_mul(pp);
    let dp_shard = sharded(doc, given, ranks(dp_replicate))?;
    let dp = dp_shard.saturating_mul(dp_replicate);
    let mut notes = unplanned(doc)?;
    let schedule = schedule(doc, pp)?;
    let (stages, vpp) = stages(doc, given, pp, schedule)?;
    let batch = batch(doc, dp, pp, vpp)?;
    let offload = doc.on("training.enable_cpu_offload")?;
    let offload = offload.then_some(Offload::Parameters);
    let ep = size("expert_parallel_degree")?;
    let sharded_sequence = doc.flag("parallelism.enable_sequence_parallel")? != Some(false);
    let etp = expert_tensor_parallel(doc, given, tp, ep)?;
    let alone = alone([dp_shard, cp, tp], [ep, etp], given.model);
    let zero = match alone && offload.is_none() {
        true => Zero::Z0,
        false => Zero::Z3,
    };
    let decisions = Decisions {
        tp,
        pp,
        vpp,
        cp,
        cp_kind: CpKind::AllGather,
        ep,
        etp,
        dp_shard,
        dp_replicate,
        zero,
        reshard_after_forward: zero == Zero::Z3 && reshard(doc, pp)?,
        sequence_parallel: tp > 1 && sharded_sequence,
        micro_batch: batch.micro,
        num_micro_batches: batch.count,
        recompute: recompute(doc, &stages, &mut notes)?,
        schedule,
        stages,
        offload,
        dispatcher: dispatcher(doc, ep)?,
        graphs: graphs(doc, pp, ep, offload)?,
        fp8_recipe: fp8_recipe(doc)?,
        ..Decisions::on_one_gpu(
            given.model.layers,
            overlap(doc, zero, tp, dp.saturating_mul(cp))?,
        )
    };
    let sizes = batch.sizes(ranks(dp), precision(doc)?);
    Imported::new(doc, decisions, sizes, notes)
}

/// Keys that decide the plan and that 0.2 no longer has, each with what replaces it.
const REPLACED: [(&str, &str); 3] = [
    (
        "training.data_parallel_degree",
        "parallelism.data_parallel_shard_degree (FSDP) or parallelism.data_parallel_replicate_degree (DDP)",
    ),
    ("experimental.pipeline_parallel_split_points", PARTS),
    ("parallelism.pipeline_parallel_split_points", PARTS),
];
const PARTS: &str = "parallelism.module_fqns_per_model_part, the modules of each stage";

/// Refuses a file whose plan depends on a key that 0.2 does not have.
fn refuse_replaced(doc: &Document) -> Result<(), ImportError> {
    let used = |key: &str| {
        let node = doc.root.at(key);
        node.is_some_and(|node| node.list().is_none_or(|items| !items.is_empty()))
    };
    match REPLACED.into_iter().find(|(key, _)| used(key)) {
        Some((key, now)) => {
            let why = format!("torchtitan 0.2 no longer has this key; in its place write {now}");
            Err(doc.unsupported(key, &why))
        }
        None => Ok(()),
    }
}

/// Refuses a Python file that changes a configuration made elsewhere, unless it sets all that decides the plan.
fn refuse_unseen_base(doc: &Document) -> Result<(), ImportError> {
    let batch = match doc.dialect {
        Dialect::Torchtitan02 => return Ok(()),
        Dialect::TorchtitanMain => [
            "training.num_tokens_per_microbatch_per_dp_rank",
            "training.max_context_length",
        ],
        _ => ["training.local_batch_size", "training.seq_len"],
    };
    let sections = ["parallelism", "activation_checkpoint", "compile"];
    let keys = batch.into_iter().chain(sections);
    let open: Vec<&str> = keys.filter(|key| doc.find(key).is_none()).collect();
    if doc.python.makes_trainer || open.is_empty() {
        return Ok(());
    }
    let how = format!(
        "the file makes no `Trainer.Config(…)`; copy the function that does so into it, or set here what the base decides: {}",
        open.join(", ")
    );
    Err(doc.missing("the base of the configuration", how))
}

/// Expert-tensor-parallel degree: without expert parallelism, experts are sharded as the dense layers are.
fn expert_tensor_parallel(
    doc: &Document,
    given: &Given<'_>,
    tp: u64,
    ep: u64,
) -> Result<u64, ImportError> {
    let toml = doc.dialect == Dialect::Torchtitan02;
    match (given.model.moe.is_some(), toml, ep) {
        (true, _, 1) => Ok(tp),
        (true, true, _) => doc.degree("parallelism.expert_tensor_parallel_degree"),
        (false, ..) | (true, false, _) => Ok(1),
    }
}

fn sharded(doc: &Document, given: &Given<'_>, rest: u64) -> Result<u64, ImportError> {
    let key = "parallelism.data_parallel_shard_degree";
    match (stated(doc, key)?, given.gpus) {
        (Some(_), _) => doc.degree(key),
        (None, Some(gpus)) => data_parallel(doc, gpus, rest),
        (None, None) => {
            Err(doc.missing(format!("{key} (-1: the rest of the ranks)"), "give --gpus"))
        }
    }
}

/// The number that a key has, which is at least 1; `None` if it follows from other sizes: the key is absent or -1.
fn stated(doc: &Document, key: &str) -> Result<Option<u64>, ImportError> {
    match doc.find(key).and_then(Node::int) {
        None | Some(-1) => Ok(None),
        Some(n) if n >= 1 => Ok(Some(n.unsigned_abs())),
        Some(_) => Err(doc.wrong(key, "-1 or at least 1")),
    }
}

struct Batch {
    micro: u64,
    count: u64,
    global: u64,
    seq_len: u64,
}

impl Batch {
    /// The sizes of a job with this batch.
    fn sizes(&self, gpus: u64, precision: Precision) -> WorkloadSizes {
        WorkloadSizes {
            gpus,
            seq_len: self.seq_len,
            global_batch: self.global,
            precision,
        }
    }
}

fn batch(doc: &Document, dp: u64, pp: u64, vpp: u64) -> Result<Batch, ImportError> {
    let training = |key: &str| doc.size(&format!("training.{key}"));
    if doc.dialect == Dialect::TorchtitanMain {
        return tokens(doc, dp, pp);
    }
    let seq_len = training("seq_len")?.unwrap_or(SEQ_LEN);
    let before = titan_keys::without_parallelism(&doc.root);
    let named = match before || doc.root.at("training.batch_size").is_some() {
        true => "training.batch_size",
        false => "training.local_batch_size",
    };
    let local = training("local_batch_size")?.unwrap_or(LOCAL_BATCH);
    let micro = match pp {
        1 => local,
        // Such files gave the number of micro-batches, by default one per stage (49c6d6f).
        _ if before => {
            let count = doc.size("parallelism.pipeline_parallel_microbatches")?;
            let count = count.unwrap_or(pp.saturating_mul(vpp));
            if count == 0 || !local.is_multiple_of(count) {
                let message = format!("{local} sequences do not make {count} micro-batches");
                return Err(doc.unsupported(named, &message));
            }
            local / count
        }
        _ => doc
            .size("parallelism.pipeline_parallel_microbatch_size")?
            .unwrap_or(1),
    };
    let key = "training.global_batch_size";
    let per_rank = local.saturating_mul(dp);
    let global = stated(doc, key)?.unwrap_or(per_rank);
    let accumulate = micro_batches(doc, key, global, per_rank)?;
    let within = micro_batches(doc, named, local, micro)?;
    let count = accumulate.saturating_mul(within);
    Ok(Batch {
        micro,
        count,
        global,
        seq_len,
    })
}

/// The batch of main, which counts it in tokens.
fn tokens(doc: &Document, dp: u64, pp: u64) -> Result<Batch, ImportError> {
    let training = |key: &str| doc.size(&format!("training.{key}"));
    let seq_len = training("max_context_length")?.unwrap_or(SEQ_LEN);
    let key = "training.num_tokens_per_microbatch_per_dp_rank";
    let micro_tokens = doc.size(key)?.unwrap_or(LOCAL_BATCH * SEQ_LEN);
    let micro = micro_batches(doc, key, micro_tokens, seq_len)?;
    let within = if pp > 1 {
        doc.size("parallelism.num_pp_microbatches")?.unwrap_or(1)
    } else {
        1
    };
    let per_iteration = micro.saturating_mul(within).saturating_mul(dp);
    let key = "training.num_tokens_per_train_step";
    let global = match stated(doc, key)? {
        None => per_iteration,
        Some(tokens) => micro_batches(doc, key, tokens, seq_len)?,
    };
    let count = micro_batches(doc, key, global, per_iteration)?.saturating_mul(within);
    Ok(Batch {
        micro,
        count,
        global,
        seq_len,
    })
}

fn schedule(doc: &Document, pp: u64) -> Result<ScheduleKind, ImportError> {
    let key = "parallelism.pipeline_parallel_schedule";
    if pp == 1 {
        return Ok(ScheduleKind::OneFOneB);
    }
    if doc
        .text("parallelism.pipeline_parallel_schedule_csv")?
        .is_some_and(|csv| !csv.is_empty())
    {
        return Err(doc.unsupported(
            "parallelism.pipeline_parallel_schedule_csv",
            "schedules from a file are not planned",
        ));
    }
    match doc.text(key)?.unwrap_or("1F1B").to_lowercase().as_str() {
        "1f1b" => Ok(ScheduleKind::OneFOneB),
        "interleaved1f1b" => Ok(ScheduleKind::Interleaved),
        "gpipe" => Ok(ScheduleKind::GPipe),
        "zbvzerobubble" => Ok(ScheduleKind::ZbV),
        "dualpipev" => Ok(ScheduleKind::DualPipeV),
        "loopedbfs" | "interleavedzerobubble" => Err(doc.unsupported(key, "this schedule is not planned; planned: 1F1B, Interleaved1F1B, GPipe, ZBVZeroBubble, DualPipeV")),
        _ => Err(doc.wrong(key, "one of 1F1B, Interleaved1F1B, GPipe, ZBVZeroBubble, DualPipeV")),
    }
}

fn stages(
    doc: &Document,
    given: &Given<'_>,
    pp: u64,
    schedule: ScheduleKind,
) -> Result<(StagePartition, u64), ImportError> {
    let layers = given.model.layers;
    if pp == 1 {
        return Ok((StagePartition(vec![layers]), 1));
    }
    let key = "parallelism.module_fqns_per_model_part";
    if let Some(parts) = doc.find(key).and_then(Node::list) {
        let stages: Vec<u64> = parts.iter().map(part_layers).collect();
        let count = stages.len() as u64;
        if stages.iter().sum::<u64>() != layers || !count.is_multiple_of(pp) {
            let message = format!(
                "{} layers in {count} parts; model {} has {layers}, and parts must be a multiple of {pp}",
                stages.iter().sum::<u64>(),
                given.model.name
            );
            return Err(doc.unsupported(key, &message));
        }
        return Ok((StagePartition(stages), count / pp));
    }
    default_stages(doc, layers, pp, schedule)
}

fn part_layers(part: &Node) -> u64 {
    let names = part.list().unwrap_or_default();
    let layers = names
        .iter()
        .filter(|n| n.text().is_some_and(|t| t.starts_with("layers.")));
    layers.count() as u64
}

/// torchtitan's default split (`generate_llm_fqn_per_model_part`): embedding and output count as layers. Before April 2025 they
/// did not, and the layers left over went to the stages after the first (`generate_split_points` in 49c6d6f).
fn default_stages(
    doc: &Document,
    layers: u64,
    pp: u64,
    schedule: ScheduleKind,
) -> Result<(StagePartition, u64), ImportError> {
    let before = titan_keys::without_parallelism(&doc.root);
    let less = |which: &str| {
        let key = format!("parallelism.pipeline_parallel_{which}_stage_less_layers");
        doc.size(&key).map(|n| n.unwrap_or(u64::from(!before)))
    };
    let (first, last) = (less("first")?, less("last")?);
    let total = layers.saturating_add(first).saturating_add(last);
    let key = "parallelism.pipeline_parallel_layers_per_stage";
    let single = matches!(schedule, ScheduleKind::OneFOneB | ScheduleKind::GPipe);
    let count = match doc.size(key)? {
        Some(0) => return Err(doc.wrong(key, "at least 1")),
        Some(each) => total.div_ceil(each),
        None if single => pp,
        None => 2 * pp,
    };
    let fits = count <= 1 << 16
        && count.is_multiple_of(pp)
        && count <= total
        && first <= total / count
        && last <= total / count;
    if !fits {
        let message = format!(
            "{total} layers, embedding and output included, do not make {count} stages on {pp} ranks"
        );
        return Err(doc.unsupported(key, &message));
    }
    let larger = u64::from(before)..u64::from(before) + total % count;
    let stages = (0..count).map(|stage| {
        let held = total / count + u64::from(larger.contains(&stage));
        held - if stage == 0 { first } else { 0 } - if stage + 1 == count { last } else { 0 }
    });
    Ok((StagePartition(stages.collect()), count / pp))
}

fn reshard(doc: &Document, pp: u64) -> Result<bool, ImportError> {
    let key = "parallelism.fsdp_reshard_after_forward";
    match doc.text(key)? {
        Some("always") => Ok(true),
        Some("never") => Ok(false),
        // Under pipeline parallelism torchtitan keeps parameters gathered, because every micro-batch would gather them
        // again.
        None | Some("default") => Ok(pp == 1),
        Some(_) => Err(doc.wrong(key, "default, always or never")),
    }
}

fn overlap(doc: &Document, zero: Zero, tp: u64, ranks: u64) -> Result<Overlap, ImportError> {
    Ok(Overlap {
        grad_reduce: ranks > 1,
        param_gather: zero == Zero::Z3,
        tensor_parallel: tp > 1 && async_tp(doc)?,
        pipeline: true,
        expert_parallel: false,
    })
}

/// What carries tokens to their experts; `None` if not said, or without expert parallelism.
fn dispatcher(doc: &Document, ep: u64) -> Result<Option<Dispatcher>, ImportError> {
    let key = match doc.dialect {
        Dialect::Torchtitan02 => "parallelism.expert_parallel_comm_backend",
        _ => "comm_backend",
    };
    let named = match doc.dialect {
        Dialect::Torchtitan02 => doc.text(key)?,
        _ => doc.python.comm_backend.as_deref(),
    };
    let found = match named.filter(|_| ep > 1) {
        None => return Ok(None),
        Some("standard") => Dispatcher::AllToAll,
        Some("deepep") => Dispatcher::DeepEp,
        Some("hybridep") => Dispatcher::HybridEp,
        Some(other) => {
            let why = format!("{other} is not planned; planned: standard, deepep, hybridep");
            return Err(doc.unsupported(key, &why));
        }
    };
    Ok(Some(found))
}

/// What is captured in CUDA graphs: `None` for 0.2, else passes, unless disabled or impossible.
/// Expert parallelism needs HybridEP with a fixed capacity (trainer.py, `_validate_cuda_graphs`).
fn graphs(
    doc: &Document,
    pp: u64,
    ep: u64,
    offload: Option<Offload>,
) -> Result<Option<CudaGraphs>, ImportError> {
    if doc.dialect == Dialect::Torchtitan02 {
        return Ok(None);
    }
    let disabled = doc.on("training.disable_cuda_graphs")?;
    let hybrid = doc.python.comm_backend.as_deref() == Some("hybridep");
    let fixed = ep == 1 || hybrid && doc.python.bounds_experts;
    let captures = !disabled && pp == 1 && fixed && offload.is_none();
    Ok(Some(match captures {
        true => CudaGraphs::Step,
        false => CudaGraphs::None,
    }))
}

fn async_tp(doc: &Document) -> Result<bool, ImportError> {
    let section = if doc.dialect == Dialect::Torchtitan02 {
        "parallelism"
    } else {
        "compile"
    };
    doc.on(&format!("{section}.enable_async_tensor_parallel"))
}

fn recompute(
    doc: &Document,
    stages: &StagePartition,
    notes: &mut Vec<String>,
) -> Result<Recompute, ImportError> {
    if doc.dialect != Dialect::Torchtitan02 {
        let key = "activation_checkpoint";
        return match doc.find(key).map(|node| &node.value) {
            Some(Value::Null) => Ok(Recompute::None),
            Some(Value::Call(name, _)) if name.contains("FullAC") => Ok(Recompute::Full),
            Some(Value::Call(name, _)) if name.contains("SelectiveAC") => {
                Ok(Recompute::SelectiveOps)
            }
            // `Trainer.Config`'s default.
            None => Ok(Recompute::SelectiveOps),
            Some(_) => {
                Err(doc.unsupported(key, "planned: None, FullAC.Config(), SelectiveAC.Config()"))
            }
        };
    }
    let key = "activation_checkpoint.mode";
    match doc.text(key)?.unwrap_or("selective") {
        "none" => Ok(Recompute::None),
        "full" => Ok(Recompute::Full),
        "selective" => {
            let option = "activation_checkpoint.selective_ac_option";
            let chosen = doc.text(option)?.unwrap_or("2");
            if chosen == "op" {
                return Ok(Recompute::SelectiveOps);
            }
            let every: u64 = chosen
                .parse()
                .map_err(|_| doc.wrong(option, "op or a whole number"))?;
            let most = stages.0.iter().max().copied().unwrap_or(0);
            let layers = most / every.max(1);
            let note = format!(
                "every {every}th layer is recomputed; planned as {layers} layers of each stage"
            );
            notes.push(doc.note(option, note));
            Ok(Recompute::Layers(layers))
        }
        "memory_budget" => Err(doc.unsupported(
            key,
            "the compiler decides what it recomputes; planned: none, full, selective",
        )),
        _ => Err(doc.wrong(key, "none, full or selective")),
    }
}
