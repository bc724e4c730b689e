//! Megatron-LM options as a strategy.

use catalog::{AxisOrder, CpKind, Overlap, Precision, ScheduleKind, WorkloadSizes, Zero};

use super::{Document, Given, ImportError, Imported, data_parallel, micro_batches, workload};
use crate::export::Dialect;
use plans::partition::StagePartition;
use plans::strategy::{Decisions, Recompute};

pub(super) fn import(doc: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    same_model(doc, given)?;
    let size = |key: &str| doc.degree(key);
    let on = |key: &str| doc.flag(key).map(|f| f == Some(true));
    let tp = size("--tensor-model-parallel-size")?;
    let pp = size("--pipeline-model-parallel-size")?;
    let cp = size("--context-parallel-size")?;
    let gpus = given
        .gpus
        .or(doc.gpus)
        .ok_or_else(|| ImportError::Missing {
            path: doc.path.clone(),
            what: "the number of GPUs".to_owned(),
            how: "give --gpus".to_owned(),
        })?;
    let dp = data_parallel(doc, gpus, tp.saturating_mul(pp).saturating_mul(cp))?;
    let zero = zero(doc)?;
    let (dp_shard, dp_replicate) = match zero {
        Zero::Z0 => (1, dp),
        Zero::Z1 | Zero::Z2 | Zero::Z3 => {
            let replicas = size("--num-distributed-optimizer-instances")?;
            (data_parallel(doc, dp, replicas)?, replicas)
        }
    };
    let (stages, vpp) = stages(doc, given, pp)?;
    let micro_batch = size("--micro-batch-size")?;
    let global = "--global-batch-size";
    let per_step = micro_batch.saturating_mul(dp);
    let global_batch = doc.size(global)?.unwrap_or(per_step);
    let moe = given.model.moe.is_some();
    let mut notes = Vec::new();
    for key in [
        "--rampup-batch-size",
        "--use-torch-fsdp2",
        "--tensor-parallel-num-weight-shards",
    ] {
        if doc.find(key).is_some() {
            notes.push(format!(
                "{}: {key} has no part in a strategy and is left out",
                doc.place(key)
            ));
        }
    }
    let decisions = Decisions {
        tp,
        pp,
        vpp,
        cp,
        cp_kind: cp_kind(doc)?,
        ep: size("--expert-model-parallel-size")?,
        etp: match doc.size("--expert-tensor-parallel-size")? {
            Some(_) => size("--expert-tensor-parallel-size")?,
            // Megatron-LM's default.
            None if moe => tp,
            None => 1,
        },
        dp_shard,
        dp_replicate,
        zero,
        reshard_after_forward: zero == Zero::Z3,
        sequence_parallel: on("--sequence-parallel")? && tp > 1,
        micro_batch,
        num_micro_batches: micro_batches(doc, global, global_batch, per_step)?,
        recompute: recompute(doc)?,
        schedule: if vpp > 1 {
            ScheduleKind::Interleaved
        } else {
            ScheduleKind::OneFOneB
        },
        axis_order: if on("--use-tp-pp-dp-mapping")? {
            AxisOrder::TP_CP_PP_DP
        } else {
            AxisOrder::TP_CP_DP_PP
        },
        stages,
        overlap: Overlap {
            grad_reduce: on("--overlap-grad-reduce")?,
            param_gather: on("--overlap-param-gather")?,
            tensor_parallel: on("--tp-comm-overlap")?,
            pipeline: !on("--no-overlap-p2p-communication")?,
        },
    };
    let seq_len = doc.size("--seq-length")?.or(given.seq_len);
    let seq_len = seq_len.ok_or_else(|| ImportError::Missing {
        path: doc.path.clone(),
        what: "the sequence length".to_owned(),
        how: "give --seq".to_owned(),
    })?;
    Ok(Imported {
        dialect: Dialect::MegatronLm,
        decisions,
        workload: workload(
            doc,
            WorkloadSizes {
                gpus,
                seq_len,
                global_batch,
                precision: precision(doc)?,
            },
        )?,
        notes,
    })
}

/// The file's sizes must be the model's: a plan for another model helps nobody.
fn same_model(doc: &Document, given: &Given<'_>) -> Result<(), ImportError> {
    let m = given.model;
    let sizes = [
        ("--num-layers", m.layers),
        ("--hidden-size", m.hidden),
        ("--num-attention-heads", m.attention.heads),
        ("--num-query-groups", m.attention.kv_heads()),
        ("--ffn-hidden-size", m.mlp.ffn),
        ("--num-experts", m.moe.map_or(0, |moe| moe.experts)),
    ];
    for (key, of_model) in sizes {
        if let Some(said) = doc.size(key)?
            && said != of_model
        {
            let message = format!(
                "{said}, but model {} has {of_model}; give the right --model",
                m.name
            );
            return Err(doc.unsupported(key, &message));
        }
    }
    Ok(())
}

fn zero(doc: &Document) -> Result<Zero, ImportError> {
    let on = |key: &str| doc.flag(key).map(|f| f == Some(true));
    let key = "--data-parallel-sharding-strategy";
    if on("--use-megatron-fsdp")? {
        return match doc.text(key)? {
            Some("optim_grads") => Ok(Zero::Z2),
            Some("optim_grads_params") => Ok(Zero::Z3),
            Some("optim") => Ok(Zero::Z1),
            // The flag's default in Megatron-LM.
            None | Some("no_shard") => Ok(Zero::Z0),
            Some(_) => Err(doc.wrong(key, "no_shard, optim, optim_grads or optim_grads_params")),
        };
    }
    if on("--use-torch-fsdp2")? {
        return Ok(Zero::Z3);
    }
    Ok(if on("--use-distributed-optimizer")? {
        Zero::Z1
    } else {
        Zero::Z0
    })
}

fn cp_kind(doc: &Document) -> Result<CpKind, ImportError> {
    let key = "--cp-comm-type";
    match doc.text(key)? {
        None | Some("p2p") => Ok(CpKind::Ring),
        Some("all_gather") => Ok(CpKind::AllGather),
        Some("a2a") => Ok(CpKind::AllToAll),
        Some("a2a+p2p") => Err(doc.unsupported(
            key,
            "hierarchical context parallelism is not planned; use p2p or a2a",
        )),
        Some(_) => Err(doc.wrong(
            key,
            "p2p, all_gather, a2a or a2a+p2p, the same for all layers",
        )),
    }
}

fn recompute(doc: &Document) -> Result<Recompute, ImportError> {
    let key = "--recompute-granularity";
    let short = doc.flag("--recompute-activations")? == Some(true);
    match doc.text(key)? {
        None if short => Ok(Recompute::Selective),
        None => Ok(Recompute::None),
        Some("selective") => match doc.find("--recompute-modules").and_then(|n| n.list()) {
            None => Ok(Recompute::Selective),
            Some([one]) if one.text() == Some("core_attn") => Ok(Recompute::Selective),
            Some(_) => Err(doc.unsupported("--recompute-modules", "only core_attn is planned")),
        },
        Some("full") => {
            let layers = doc.size("--recompute-num-layers")?;
            match (doc.text("--recompute-method")?, layers) {
                (Some("block"), Some(n)) => Ok(Recompute::Layers(n)),
                (Some("uniform") | None, _) => Ok(Recompute::Full),
                (Some("block"), None) => Err(ImportError::Missing {
                    path: doc.path.clone(),
                    what: "--recompute-num-layers".to_owned(),
                    how: "--recompute-method block needs it".to_owned(),
                }),
                (Some(_), _) => Err(doc.wrong("--recompute-method", "uniform or block")),
            }
        }
        Some(_) => Err(doc.wrong(key, "full or selective")),
    }
}

fn precision(doc: &Document) -> Result<Precision, ImportError> {
    if doc.find("--fp8-format").is_some() {
        return Ok(Precision::Fp8);
    }
    if let Some(key) = Some("--fp4-format").filter(|key| doc.find(key).is_some()) {
        return Err(doc.unsupported(key, "fp4 training is not planned"));
    }
    let on = |key: &str| doc.flag(key).map(|f| f == Some(true));
    if on("--bf16")? {
        return Ok(Precision::Bf16);
    }
    Ok(if on("--fp16")? {
        Precision::Fp16
    } else {
        Precision::Fp32
    })
}

/// Layers of every virtual stage, and virtual stages per rank.
fn stages(
    doc: &Document,
    given: &Given<'_>,
    pp: u64,
) -> Result<(StagePartition, u64), ImportError> {
    let layers = given.model.layers;
    let layout = "--pipeline-model-parallel-layout";
    if let Some(text) = doc.text(layout)? {
        let stages = parse_layout(text)
            .ok_or_else(|| doc.wrong(layout, "a layout such as Et*9|t*10|t*11L"))?;
        let count = stages.len() as u64;
        if stages.iter().sum::<u64>() != layers || !count.is_multiple_of(pp) {
            let message = format!(
                "{} layers in {count} stages; {layers} layers in a multiple of {pp} stages are needed",
                stages.iter().sum::<u64>()
            );
            return Err(doc.unsupported(layout, &message));
        }
        return Ok((StagePartition(stages), count / pp));
    }
    let each = "--num-layers-per-virtual-pipeline-stage";
    let vpp = match (
        doc.size("--num-virtual-stages-per-pipeline-rank")?,
        doc.size(each)?,
    ) {
        (Some(_), _) => doc.degree("--num-virtual-stages-per-pipeline-rank")?,
        (None, Some(n))
            if n > 0 && (layers / pp).is_multiple_of(n) && layers.is_multiple_of(pp) =>
        {
            layers / pp / n
        }
        (None, Some(_)) => {
            let message = format!("does not divide the {layers} layers over {pp} stages");
            return Err(doc.unsupported(each, &message));
        }
        (None, None) => 1,
    };
    let count = pp.saturating_mul(vpp);
    if count > 1 << 16 {
        return Err(doc.wrong(
            "--pipeline-model-parallel-size",
            "below 65537 stages in all",
        ));
    }
    let (first, last) = (
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
    );
    if doc.find(first).is_some() || doc.find(last).is_some() {
        let ends = ends(layers, pp, vpp, doc.size(first)?, doc.size(last)?);
        let ends = ends.ok_or_else(|| {
            doc.unsupported(first, "the rest of the layers does not divide evenly")
        })?;
        return Ok((ends, vpp));
    }
    let on = |key: &str| doc.flag(key).map(|f| f == Some(true));
    let embedding = on("--account-for-embedding-in-pipeline-split")?;
    let loss = on("--account-for-loss-in-pipeline-split")?;
    if (embedding || loss) && count > 1 {
        let ends =
            StagePartition::lighter_ends(layers, count, u64::from(embedding), u64::from(loss));
        let key = "--account-for-embedding-in-pipeline-split";
        let ends = ends.ok_or_else(|| doc.unsupported(key, "the layers do not divide evenly"))?;
        return Ok((ends, vpp));
    }
    if !layers.is_multiple_of(count) {
        let message = format!("{layers} layers do not divide into {count} stages; give {layout}");
        return Err(doc.unsupported("--pipeline-model-parallel-size", &message));
    }
    Ok((StagePartition(vec![layers / count; count as usize]), vpp))
}

/// Megatron-LM splits the first and last *rank's* layers over its virtual stages.
fn ends(
    layers: u64,
    pp: u64,
    vpp: u64,
    first: Option<u64>,
    last: Option<u64>,
) -> Option<StagePartition> {
    let chosen = first.unwrap_or(0).checked_add(last.unwrap_or(0))?;
    let ranks = pp.checked_sub(u64::from(first.is_some()) + u64::from(last.is_some()))?;
    let rest = layers.checked_sub(chosen)?;
    let each = if ranks == 0 {
        (rest == 0).then_some(0)?
    } else {
        rest.is_multiple_of(ranks).then_some(rest / ranks)?
    };
    let of_rank = |rank: u64| match rank {
        0 if first.is_some() => first,
        r if r + 1 == pp && last.is_some() => last,
        _ => Some(each),
    };
    let mut stages = Vec::new();
    for _ in 0..vpp {
        for rank in 0..pp {
            let of_rank = of_rank(rank)?;
            stages.push(of_rank.is_multiple_of(vpp).then_some(of_rank / vpp)?);
        }
    }
    Some(StagePartition(stages))
}

/// Decoder layers of each stage of a layout: `|` separates stages, `*n` repeats a letter or a group.
pub(crate) fn parse_layout(text: &str) -> Option<Vec<u64>> {
    let flat = unrolled(
        &mut text
            .chars()
            .filter(|c| !c.is_whitespace() && *c != ',')
            .peekable(),
        0,
    )?;
    if flat.len() > 1 << 20 {
        return None;
    }
    let stages = flat.split('|');
    stages
        .map(|stage| {
            let known = stage.chars().all(|c| "EtmL".contains(c));
            known.then(|| stage.matches('t').count() as u64)
        })
        .collect()
}

fn unrolled(
    chars: &mut std::iter::Peekable<impl Iterator<Item = char>>,
    depth: usize,
) -> Option<String> {
    let mut flat = String::new();
    while let Some(c) = chars.next() {
        let unit = match c {
            ')' if depth > 0 => return Some(flat),
            '(' if depth < 8 => unrolled(chars, depth + 1)?,
            ')' | '(' => return None,
            c => c.to_string(),
        };
        let mut times = 1usize;
        if chars.next_if_eq(&'*').is_some() {
            let mut digits = String::new();
            while let Some(d) = chars.next_if(char::is_ascii_digit) {
                digits.push(d);
            }
            times = digits.parse().ok()?;
        }
        if unit.len().checked_mul(times)? > 1 << 20 || flat.len() > 1 << 20 {
            return None;
        }
        flat.push_str(&unit.repeat(times));
    }
    (depth == 0).then_some(flat)
}
