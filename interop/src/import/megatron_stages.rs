//! Reads from a Megatron-LM script how many layers each pipeline stage has, and how many micro-batches a stage runs in a row.

use super::document::Document;
use super::error::ImportError;
use super::imported::Given;
use super::layout::{parse_layout, prediction_layers_apart};
use plans::decisions::Decisions;
use plans::partition::StagePartition;

const PIPELINE: &str = "--pipeline-model-parallel-size";
const LAYOUT: &str = "--pipeline-model-parallel-layout";
/// Layers of the first and last pipeline rank.
const ENDS: [&str; 2] = [
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
];
/// Count embedding and loss as one layer each.
const COUNTED: [&str; 2] = [
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
];

/// The number of layers of each virtual stage, and the number of virtual stages on each pipeline rank.
pub(super) fn stages(
    doc: &Document,
    given: &Given<'_>,
    pp: u64,
    notes: &mut Vec<String>,
) -> Result<(StagePartition, u64), ImportError> {
    let layers = given.model.layers;
    if let Some(text) = doc.text(LAYOUT)? {
        return stages_of_layout(doc, text, (layers, pp), notes);
    }
    let counted = |key: &str| doc.flag(key).map(|on| u64::from(on == Some(true)));
    let (embedding, loss) = (counted(COUNTED[0])?, counted(COUNTED[1])?);
    let vpp = virtual_stages(doc, layers, embedding + loss, pp)?;
    let count = pp.saturating_mul(vpp);
    if count > 1 << 16 {
        return Err(doc.wrong(PIPELINE, "below 65537 stages in all"));
    }
    if let Some(key) = ENDS.into_iter().find(|key| doc.find(key).is_some()) {
        let [first, last] = ENDS.map(|key| doc.size(key));
        let ends = ends(layers, pp, vpp, first?, last?);
        let why = "the rest of the layers does not divide evenly";
        return Ok((ends.ok_or_else(|| doc.unsupported(key, why))?, vpp));
    }
    if embedding + loss > 0 && count > 1 {
        let key = COUNTED[usize::from(embedding == 0)];
        let ends = StagePartition::lighter_ends(layers, count, embedding, loss);
        let why = "the layers do not divide evenly";
        return Ok((ends.ok_or_else(|| doc.unsupported(key, why))?, vpp));
    }
    if !layers.is_multiple_of(count) {
        let message = format!("{layers} layers do not divide into {count} stages; give {LAYOUT}");
        return Err(doc.unsupported(PIPELINE, &message));
    }
    Ok((StagePartition(vec![layers / count; count as usize]), vpp))
}

/// The result of [`stages`], read from a `--pipeline-model-parallel-layout`.
fn stages_of_layout(
    doc: &Document,
    text: &str,
    (layers, pp): (u64, u64),
    notes: &mut Vec<String>,
) -> Result<(StagePartition, u64), ImportError> {
    let stages =
        parse_layout(text).ok_or_else(|| doc.wrong(LAYOUT, "a layout such as Et*9|t*10|t*11L"))?;
    let (held, count) = (stages.iter().sum::<u64>(), stages.len() as u64);
    if held != layers || !count.is_multiple_of(pp) {
        let message = format!(
            "{held} layers in {count} stages; {layers} layers in a multiple of {pp} stages are needed"
        );
        return Err(doc.unsupported(LAYOUT, &message));
    }
    if prediction_layers_apart(text) {
        let place = doc.place(LAYOUT);
        let what = "layers of multi-token prediction (m) are planned on the last stage, beside the head (L)";
        notes.push(format!("{place}: {what}"));
    }
    Ok((StagePartition(stages), count / pp))
}

/// Number of virtual stages per rank. `counted` is how many of embedding and loss count as layers.
fn virtual_stages(doc: &Document, layers: u64, counted: u64, pp: u64) -> Result<u64, ImportError> {
    let count = "--num-virtual-stages-per-pipeline-rank";
    let each = "--num-layers-per-virtual-pipeline-stage";
    let layers = layers + counted;
    match (doc.size(count)?, doc.size(each)?) {
        (Some(_), _) => doc.degree(count),
        (None, Some(n))
            if n > 0 && layers.is_multiple_of(pp) && (layers / pp).is_multiple_of(n) =>
        {
            Ok(layers / pp / n)
        }
        (None, Some(_)) => {
            let with = match counted {
                0 => String::new(),
                _ => format!(" ({counted} of them for embedding or loss)"),
            };
            let message = format!("does not divide the {layers} layers{with} over {pp} stages");
            Err(doc.unsupported(each, &message))
        }
        (None, None) => Ok(1),
    }
}

/// Layers of each stage; `first` and `last` are for whole *ranks*. `None` if they do not divide.
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

/// A note on how many micro-batches run through a virtual stage before the rank's next stage
/// begins, if that is not the number of ranks, which is the default and what plans assume.
pub(super) fn grouped(doc: &Document, d: &Decisions) -> Result<Option<String>, ImportError> {
    let key = "--microbatch-group-size-per-virtual-pipeline-stage";
    let (pp, count) = (d.pp, d.num_micro_batches);
    let size = doc.size(key)?.filter(|&size| d.vpp > 1 && size != pp);
    let Some(size) = size else { return Ok(None) };
    if !count.is_multiple_of(pp) {
        let message = format!(
            "plans have groups of {pp}, the number of pipeline ranks, which do not divide the {count} micro-batches of a step"
        );
        return Err(doc.unsupported(key, &message));
    }
    if !(pp..=count).contains(&size) {
        let message = format!("from {pp} (pipeline ranks) to {count} (micro-batches of a step)");
        return Err(doc.wrong(key, &message));
    }
    // Megatron-Core, pipeline_parallel/schedules.py: `get_pp_rank_microbatches`.
    let more = (d.vpp - 1).saturating_mul(size - pp);
    let place = doc.place(key);
    Ok(Some(format!(
        "{place}: {key} {size} is planned as {pp}, the number of pipeline ranks: Megatron-LM keeps activations of up to \
         {more} more micro-batches of a virtual stage on every rank"
    )))
}
