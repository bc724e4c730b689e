//! Import of Megatron-LM options as a strategy.

use catalog::model::ModelConfig;
use catalog::{
    AxisOrder, CpKind, DType, Dispatcher, Fp8Recipe, GradientTypes, Offload, OptimizerStates,
    Overlap, Precision, RecomputeModule, ScheduleKind, Selection, WorkloadSizes, Zero,
};

use super::document::Document;
use super::error::ImportError;
use super::graphs::graphs;
use super::imported::{Given, Imported};
use super::kernels;
use super::megatron_notes::{planned_otherwise, unknown};
use super::megatron_stages::{grouped, stages};
use super::nan_checks;
use super::sizes::{data_parallel, micro_batches, said_devices};
use crate::config::Node;
use crate::export::core_precision::{RECIPE, RECIPES};
use crate::export::megatron::{
    DISPATCHER, EXPERT_OVERLAP, FLEX_BACKEND, MOMENTS, OFFLOAD, OFFLOAD_FRACTION, OFFLOAD_LAYERS,
    PRECISION_AWARE,
};
use plans::decisions::{Decisions, Recompute};

pub(super) fn import(doc: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    refuse_two_lengths(doc)?;
    let mut imported = of_options(doc, given)?;
    imported.notes.extend(nan_checks::of_script(doc)?);
    Ok(imported)
}

/// Refuses a model with an encoder, of images or of text: `--seq-length` is then the encoder's (Megatron-LM,
/// examples/multimodal/model.py, `model_provider`), and no plan holds two models.
fn refuse_two_lengths(doc: &Document) -> Result<(), ImportError> {
    let key = "--decoder-seq-length";
    match doc.root.get(key) {
        Some(_) => {
            let why = "the script trains a model with an encoder, whose sequences are those of --seq-length; only decoders of text are planned: \
                       give `search` the decoder's model and this length";
            Err(doc.unsupported(key, why))
        }
        None => Ok(()),
    }
}

/// What options say, whichever system's file they were made of.
pub(super) fn of_options(doc: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    let mut notes = Vec::from_iter(unknown(doc)?);
    let size = |key: &str| doc.degree(key);
    let tp = size("--tensor-model-parallel-size")?;
    let pp = size("--pipeline-model-parallel-size")?;
    let cp = size("--context-parallel-size")?;
    let gpus = said_devices(doc, given.gpus)?;
    let dp = data_parallel(doc, gpus, tp.saturating_mul(pp).saturating_mul(cp))?;
    let zero = zero(doc)?;
    let (dp_shard, dp_replicate) = shards_and_replicas(doc, zero, dp)?;
    let (stages, vpp) = stages(doc, given, pp, &mut notes)?;
    let micro_batch = size("--micro-batch-size")?;
    let per_step = micro_batch.saturating_mul(dp);
    let (batch_key, global_batch) = global_batch(doc, per_step, &mut notes)?;
    let offload = offload(doc, zero, &mut notes)?;
    let ep = size("--expert-model-parallel-size")?;
    let decisions = Decisions {
        tp,
        pp,
        vpp,
        cp,
        cp_kind: cp_kind(doc)?,
        ep,
        etp: expert_tensor_parallel(doc, given, tp)?,
        dp_shard,
        dp_replicate,
        zero,
        reshard_after_forward: zero == Zero::Z3
            && !doc.on("--torch-fsdp2-no-reshard-after-forward")?,
        sequence_parallel: doc.on("--sequence-parallel")? && tp > 1,
        micro_batch,
        num_micro_batches: micro_batches(doc, batch_key, global_batch, per_step)?,
        recompute: recompute(doc, given.model, &mut notes)?,
        schedule: ScheduleKind::one_f_one_b(vpp),
        axis_order: match doc.on("--use-tp-pp-dp-mapping")? {
            true => AxisOrder::TP_CP_PP_DP,
            false => AxisOrder::TP_CP_DP_PP,
        },
        stages,
        overlap: overlap(doc)?,
        gradients: gradients(doc, zero)?,
        optimizer_states: match offload {
            None => optimizer_states(doc, zero, &mut notes)?,
            Some(_) => None,
        },
        offload,
        offload_layers: doc.size(OFFLOAD_LAYERS)?.unwrap_or(0),
        prefetch: None,
        dispatcher: dispatcher(doc, ep)?,
        graphs: graphs(doc, &mut notes)?,
        fp8_recipe: fp8_recipe(doc)?,
    };
    notes.extend(grouped(doc, &decisions)?);
    notes.extend(planned_otherwise(doc, given.model, &decisions));
    let seq_len = doc.size("--seq-length")?.or(given.seq_len);
    let seq_len = seq_len.ok_or_else(|| doc.missing("the sequence length", "give --seq"))?;
    let sizes = WorkloadSizes {
        gpus,
        seq_len,
        global_batch,
        precision: precision(doc)?,
    };
    let kernels = kernels::said(doc, given.model, &decisions);
    Ok(Imported {
        kernels,
        ..Imported::new(doc, decisions, sizes, notes)?
    })
}

/// The global batch, with the option that gives it. Of a schedule such as `0:384 200B:768`, which
/// excludes the other option, the last batch is taken, with a note.
fn global_batch(
    doc: &Document,
    per_step: u64,
    notes: &mut Vec<String>,
) -> Result<(&'static str, u64), ImportError> {
    let (one, schedule) = ("--global-batch-size", "--step-batch-size-schedule");
    let words = doc.words(schedule).join(" ");
    let Some(last) = words.split_whitespace().last() else {
        return Ok((one, doc.size(one)?.unwrap_or(per_step)));
    };
    let batch = last.rsplit_once(':').map(|(_, batch)| batch.parse());
    let Some(Ok(batch)) = batch else {
        return Err(doc.wrong(schedule, "batches by tokens, such as \"0:384 200B:768\""));
    };
    let note = format!("{schedule}: the plan uses the schedule's last batch, {batch}");
    notes.push(doc.note(schedule, note));
    Ok((schedule, batch))
}

/// Expert-tensor-parallel size; by default that of dense layers, or 1 without experts.
fn expert_tensor_parallel(doc: &Document, given: &Given<'_>, tp: u64) -> Result<u64, ImportError> {
    let key = "--expert-tensor-parallel-size";
    match doc.size(key)? {
        Some(_) => doc.degree(key),
        None => Ok(given.model.moe.map_or(1, |_| tp)),
    }
}

/// Types in which gradients are held and reduced, by Megatron-LM's `arguments.py` at d98e8a6. The
/// default is 32 bits in bf16, and the parameters' type in fp16 and under its FSDP.
fn gradients(doc: &Document, zero: Zero) -> Result<Option<GradientTypes>, ImportError> {
    let computed = match precision(doc)? {
        Precision::Fp32 => return Ok(None),
        precision => precision.activation(),
    };
    let dtype = |key: &str| match doc.text(key)? {
        None | Some("auto") => Ok(None),
        Some(name) => match GradientTypes::read(name) {
            Some(types) => Ok(Some(types.held)),
            None => Err(doc.wrong(key, "fp32, bf16, fp16 or auto")),
        },
    };
    if zero >= Zero::Z2 && doc.on("--use-megatron-fsdp")? {
        let held = dtype("--megatron-fsdp-main-grads-dtype")?.unwrap_or(computed);
        let reduced = dtype("--megatron-fsdp-grad-comm-dtype")?.unwrap_or(held);
        return Ok(Some(GradientTypes { held, reduced }));
    }
    let wide = doc.on("--accumulate-allreduce-grads-in-fp32")?;
    let narrow = match computed {
        DType::F16 => !wide,
        _ => {
            let main = doc.text("--main-grads-dtype")? == Some("bf16");
            doc.on("--grad-reduce-in-bf16")? || main && !wide
        }
    };
    Ok(Some(GradientTypes::all(match narrow {
        true => computed,
        false => DType::F32,
    })))
}

/// How optimizer states are held; `None` for the runtime's way. Notes moments taken as fp32.
fn optimizer_states(
    doc: &Document,
    zero: Zero,
    notes: &mut Vec<String>,
) -> Result<Option<OptimizerStates>, ImportError> {
    if doc.flag(PRECISION_AWARE)? != Some(true) || zero != Zero::Z1 {
        return Ok(None);
    }
    let [first, second] = MOMENTS.map(|key| doc.text(key));
    match [first?.unwrap_or("fp32"), second?.unwrap_or("fp32")] {
        ["fp32", "fp32"] if doc.text("--fp8-format")?.is_some() => return Ok(None),
        ["fp32", "fp32"] => {}
        ["bf16", "bf16"] => return Ok(Some(OptimizerStates::Bf16Moments)),
        _ => {
            let note = "moments are planned both in fp32 or both in bf16; taken as fp32";
            notes.push(doc.note(PRECISION_AWARE, note));
        }
    }
    Ok(Some(OptimizerStates::SplitMaster))
}

/// The share of weights whose optimizer states are in host memory, in whole percent; `None` for 0.
fn offload(
    doc: &Document,
    zero: Zero,
    notes: &mut Vec<String>,
) -> Result<Option<Offload>, ImportError> {
    if doc.flag(OFFLOAD)? != Some(true) {
        return Ok(None);
    }
    if zero != Zero::Z1 {
        let note = "planned with the distributed optimizer alone, and left out";
        notes.push(doc.note(OFFLOAD, note));
        return Ok(None);
    }
    let share = match doc.find(OFFLOAD_FRACTION) {
        None => 1.0,
        Some(node) => {
            let share: Option<f64> = node.value.shown().parse().ok();
            let share = share.filter(|share| (0.0..=1.0).contains(share));
            share.ok_or_else(|| doc.wrong(OFFLOAD_FRACTION, "a number from 0 to 1"))?
        }
    };
    let percent = (share * 100.0).round() as u8;
    Ok((percent > 0).then_some(Offload::Optimizer(percent)))
}

fn overlap(doc: &Document) -> Result<Overlap, ImportError> {
    Ok(Overlap {
        grad_reduce: doc.on("--overlap-grad-reduce")?,
        param_gather: doc.on("--overlap-param-gather")?,
        tensor_parallel: doc.on("--tp-comm-overlap")?,
        pipeline: !doc.on("--no-overlap-p2p-communication")?,
        expert_parallel: doc.on(EXPERT_OVERLAP)?,
    })
}

/// What carries tokens to their experts; `None` without expert parallelism.
fn dispatcher(doc: &Document, ep: u64) -> Result<Option<Dispatcher>, ImportError> {
    if ep == 1 {
        return Ok(None);
    }
    let of_flex = || match doc.text(FLEX_BACKEND)? {
        None | Some("deepep") => Ok(Dispatcher::DeepEp),
        Some("hybridep") => Ok(Dispatcher::HybridEp),
        Some("ncclep") => Err(doc.unsupported(
            FLEX_BACKEND,
            "NCCL's own library is not planned; use deepep or hybridep",
        )),
        Some(_) => Err(doc.wrong(FLEX_BACKEND, "deepep or hybridep")),
    };
    let found = match doc.text(DISPATCHER)? {
        // Megatron-LM's default of the option.
        None | Some("allgather") => Dispatcher::AllGather,
        Some("alltoall") => Dispatcher::AllToAll,
        Some("flex") => of_flex()?,
        Some(_) => return Err(doc.wrong(DISPATCHER, "allgather, alltoall or flex")),
    };
    Ok(Some(found))
}

fn zero(doc: &Document) -> Result<Zero, ImportError> {
    let key = "--data-parallel-sharding-strategy";
    if doc.on("--use-megatron-fsdp")? {
        return match doc.text(key)? {
            Some("optim_grads") => Ok(Zero::Z2),
            // Megatron-LM's default of the option.
            None | Some("optim_grads_params") => Ok(Zero::Z3),
            Some("optim") => Ok(Zero::Z1),
            Some("no_shard") => Ok(Zero::Z0),
            Some(_) => Err(doc.wrong(key, "no_shard, optim, optim_grads or optim_grads_params")),
        };
    }
    if doc.on("--use-torch-fsdp2")? {
        return Ok(Zero::Z3);
    }
    Ok(if doc.on("--use-distributed-optimizer")? {
        Zero::Z1
    } else {
        Zero::Z0
    })
}

fn shards_and_replicas(doc: &Document, zero: Zero, dp: u64) -> Result<(u64, u64), ImportError> {
    if zero == Zero::Z0 {
        return Ok((1, dp));
    }
    let key = "--num-distributed-optimizer-instances";
    let replicas = doc.degree(key)?;
    if !dp.is_multiple_of(replicas) {
        let message = format!("{replicas} does not divide the {dp} data-parallel ranks");
        return Err(doc.unsupported(key, &message));
    }
    Ok((dp / replicas, replicas))
}

fn cp_kind(doc: &Document) -> Result<CpKind, ImportError> {
    let key = "--cp-comm-type";
    let kinds = doc.words(key);
    if kinds.iter().any(|kind| *kind != kinds[0]) {
        let why = "kinds that differ from layer to layer are not planned; give one for all layers";
        return Err(doc.unsupported(key, why));
    }
    let kind = match kinds.first() {
        Some(kind) => Some(*kind),
        None => doc.text(key)?,
    };
    match kind {
        None | Some("p2p") => Ok(CpKind::Ring),
        Some("all_gather") => Ok(CpKind::AllGather),
        Some("a2a") => Ok(CpKind::AllToAll),
        Some("a2a+p2p") => Err(doc.unsupported(
            key,
            "hierarchical context parallelism is not planned; use p2p or a2a",
        )),
        Some(_) => Err(doc.wrong(key, "p2p, all_gather, a2a or a2a+p2p")),
    }
}

fn recompute(
    doc: &Document,
    model: &ModelConfig,
    notes: &mut Vec<String>,
) -> Result<Recompute, ImportError> {
    let key = "--recompute-granularity";
    let known = RecomputeModule::ALL.iter().map(|of| of.megatron_name());
    let planned = format!("plans recompute {}", known.collect::<Vec<_>>().join(", "));
    let moe = "--moe-layer-recompute";
    if doc.on(moe)? {
        let why = format!("whole blocks of experts are not planned to be recomputed; {planned}");
        return Err(doc.unsupported(moe, &why));
    }
    let short = doc.on("--recompute-activations")?;
    let given = doc.text(key)?;
    // Megatron-LM lets the short option win.
    match short.then_some("selective").or(given) {
        None => Ok(Recompute::None),
        Some("selective") => match doc.find("--recompute-modules").and_then(|n| n.list()) {
            None => Ok(Recompute::Selective),
            Some([one]) if one.text() == Some("core_attn") => Ok(Recompute::Selective),
            Some(list) => {
                let option = "--recompute-modules";
                let module = |one: &Node| RecomputeModule::of_megatron(one.text()?);
                let selection: Option<Selection> = list.iter().map(module).collect();
                let selection = selection.ok_or_else(|| doc.unsupported(option, &planned))?;
                Ok(of_parts(selection, model, &doc.place(option), notes))
            }
        },
        Some("full") => whole_layers(doc, notes),
        Some(_) => Err(doc.wrong(key, "full or selective")),
    }
}

/// The recomputation of parts of layers. Megatron-LM recomputes nothing, and says nothing, where a model has none of the parts.
fn of_parts(
    selection: Selection,
    model: &ModelConfig,
    place: &str,
    notes: &mut Vec<String>,
) -> Recompute {
    if !selection.of_model(model).is_empty() {
        return Recompute::Modules(selection);
    }
    let names = selection.modules().map(RecomputeModule::megatron_name);
    notes.push(format!(
        "{place}: --recompute-modules {} is planned as no recomputation: no layer of this model has a module that this names",
        names.collect::<Vec<_>>().join(" ")
    ));
    Recompute::None
}

/// Which layers are recomputed whole.
fn whole_layers(doc: &Document, notes: &mut Vec<String>) -> Result<Recompute, ImportError> {
    let (method, count) = ("--recompute-method", "--recompute-num-layers");
    match (doc.text(method)?, doc.size(count)?) {
        (Some("block"), Some(n)) => Ok(Recompute::Layers(n)),
        (Some("block"), None) => Err(doc.missing(count, format!("{method} block needs it"))),
        (Some("uniform") | None, layers) => {
            if let Some(n) = layers.filter(|&n| n > 1) {
                let place = doc.place(count);
                notes.push(format!(
                    "{place}: {count} {n} is planned as 1: Megatron-LM keeps only one layer input in {n}, and holds \
                     what {n} layers save at once in backward"
                ));
            }
            Ok(Recompute::Full)
        }
        (Some(_), _) => Err(doc.wrong(method, "uniform or block")),
    }
}

/// The FP8 recipe, by default delayed scaling; `None` if the job does not train in FP8.
fn fp8_recipe(doc: &Document) -> Result<Option<Fp8Recipe>, ImportError> {
    if doc.find("--fp8-format").is_none() {
        return Ok(None);
    }
    let Some(name) = doc.text(RECIPE)? else {
        return Ok(Some(Fp8Recipe::Delayed));
    };
    let known = RECIPES.into_iter().find(|recipe| recipe.name() == name);
    let names = RECIPES.map(Fp8Recipe::name).join(", ");
    known.map(Some).ok_or_else(|| doc.wrong(RECIPE, &names))
}

fn precision(doc: &Document) -> Result<Precision, ImportError> {
    if doc.find("--fp8-format").is_some() {
        return Ok(Precision::Fp8);
    }
    if let Some(key) = Some("--fp4-format").filter(|key| doc.find(key).is_some()) {
        return Err(doc.unsupported(key, "fp4 training is not planned"));
    }
    if doc.on("--bf16")? {
        return Ok(Precision::Bf16);
    }
    Ok(if doc.on("--fp16")? {
        Precision::Fp16
    } else {
        Precision::Fp32
    })
}
