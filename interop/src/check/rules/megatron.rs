//! Rules on sizes for Megatron-LM, most citing its line of code that checks them, and for Bridge.

use catalog::model::ModelConfig;

use super::collector::{Rules, times};
use super::megatron_options::options;
use crate::check::finding::Severity;
use crate::config::Node;

const TP: &str = "--tensor-model-parallel-size";
const PP: &str = "--pipeline-model-parallel-size";
const EP: &str = "--expert-model-parallel-size";
const LAYOUT: &str = "--pipeline-model-parallel-layout";
const LAYERS_PER_STAGE: &str = "--num-layers-per-virtual-pipeline-stage";
const STAGES_PER_RANK: &str = "--num-virtual-stages-per-pipeline-rank";

/// Parallel sizes of the file, or Megatron-LM's defaults where it gives none.
struct Degrees {
    tp: u64,
    pp: u64,
    cp: u64,
    ep: u64,
    etp: u64,
}

pub(super) fn megatron(r: &mut Rules<'_>, model: Option<&ModelConfig>) {
    let tp = r.size_or_one(TP);
    let d = Degrees {
        tp,
        pp: r.size_or_one(PP),
        cp: r.size_or_one("--context-parallel-size"),
        ep: r.size_or_one(EP),
        etp: r.size("--expert-tensor-parallel-size").unwrap_or(tp).max(1),
    };
    options(r);
    heads(r, &d, model);
    experts(r, &d);
    let layers = r.size("--num-layers").or(model.map(|m| m.layers));
    let vpp = virtual_stages(r, d.pp, layers);
    if let Some(layers) = layers {
        stages(r, d.pp, vpp, layers);
    }
    sequence(r, d.cp);
    batch(r, &d, vpp.is_some_and(|stages| stages > 1));
}

/// Checks virtual stages, and returns how many a rank has; `None` if the file leaves that open.
fn virtual_stages(r: &mut Rules<'_>, pp: u64, layers: Option<u64>) -> Option<u64> {
    let given = [LAYERS_PER_STAGE, STAGES_PER_RANK, LAYOUT];
    let key = given.into_iter().find(|key| r.has(key));
    let vpp = match (key, layers, key.and_then(|key| r.size(key))) {
        (None, ..) => Some(1),
        (Some(STAGES_PER_RANK), _, stages) => stages,
        (Some(LAYERS_PER_STAGE), Some(layers), Some(each)) => {
            let of_rank = (layers + ends(r)) / pp;
            let fits = each > 0 && of_rank.is_multiple_of(each);
            let message =
                format!("{each} does not divide the {of_rank} layers of a rank (arguments.py:972)");
            r.require(fits, LAYERS_PER_STAGE, message);
            fits.then(|| of_rank / each)
        }
        _ => {
            let layout = r.text(LAYOUT).and_then(crate::import::parse_layout);
            layout.map(|stages| stages.len() as u64 / pp)
        }
    };
    if let Some(key) = key {
        r.require(pp > 1, key, format!("needs {PP} of at least 2"));
    }
    let overlapped = "--overlap-moe-expert-parallel-comm";
    let message = format!(
        "with {pp} pipeline ranks needs several stages per rank; set {STAGES_PER_RANK} (transformer_config.py:3007)"
    );
    r.require(
        pp == 1 || vpp != Some(1) || !r.on(overlapped),
        overlapped,
        message,
    );
    let waits = "--no-overlap-p2p-communication";
    r.require(
        pp != 2 || vpp.is_none_or(|stages| stages == 1) || !r.on(waits),
        waits,
        "interleaving over 2 ranks needs overlapped sends and receives (arguments.py:1006)",
    );
    vpp
}

/// Number of layers that the embedding and the loss together count as: 0 to 2.
fn ends(r: &Rules<'_>) -> u64 {
    let count = |end: &str| u64::from(r.on(&format!("--account-for-{end}-in-pipeline-split")));
    count("embedding") + count("loss")
}

/// Checks that layers divide evenly over stages, unless a layout or a hybrid pattern places them.
fn stages(r: &mut Rules<'_>, pp: u64, vpp: Option<u64>, layers: u64) {
    let kept = "--cpu-offloading-num-layers";
    let fewer = r.size(kept).is_none_or(|n| n < layers);
    let message = format!("has to be below the {layers} layers (transformer_config.py:1884)");
    r.require(fewer, kept, message);
    if let Some(layout) = r.text(LAYOUT).map(str::to_owned) {
        return layout_rules(r, &layout, layers, pp);
    }
    if r.has("--hybrid-layer-pattern") {
        return;
    }
    let own = ["first", "last"].map(|end| format!("--decoder-{end}-pipeline-num-layers"));
    let key = own.iter().find(|key| r.has(key)).cloned();
    let own: Vec<u64> = own.iter().filter_map(|key| r.size(key)).collect();
    if !own.is_empty() && ends(r) > 0 {
        return;
    }
    let held = own
        .iter()
        .fold(0, |sum: u64, size| sum.saturating_add(*size));
    let ranks = pp.saturating_sub(own.len() as u64);
    if let Some(key) = key.filter(|_| held > layers || ranks == 0 && held != layers) {
        let message =
            format!("the ends of the pipeline have {held} layers; the model has {layers}");
        return r.find(Severity::Error, &key, message);
    }
    let rest = (layers + ends(r)).saturating_sub(held);
    let fits = match ranks {
        0 => held == layers,
        ranks => rest > 0 && rest.is_multiple_of(ranks),
    };
    let counted = match (own.is_empty(), rest == layers) {
        (false, _) => " beside those of the first and last stage",
        (true, false) => " with the embedding and the loss counted as layers",
        (true, true) => "",
    };
    let message =
        format!("{rest} layers{counted} do not divide into {ranks} stages; give {LAYOUT}");
    r.require(fits, PP, message);
    let mut parts = own.into_iter().chain(rest.checked_div(ranks));
    if let Some(vpp) = vpp.filter(|_| fits && r.has(STAGES_PER_RANK))
        && let Some(of_rank) = parts.find(|of_rank| of_rank % vpp.max(1) != 0)
    {
        let message = format!("{vpp} does not divide the {of_rank} layers of a rank");
        r.find(Severity::Error, STAGES_PER_RANK, message);
    }
}

fn sequence(r: &mut Rules<'_>, cp: u64) {
    let key = "--seq-length";
    let sizes = "--hierarchical-context-parallel-sizes";
    if let Some(list) = r.doc.find(sizes).and_then(Node::list) {
        let list = list.iter().map(|node| u64::try_from(node.int()?).ok());
        let list: Option<Vec<u64>> = list.collect();
        let message = format!("do not multiply to --context-parallel-size {cp} (arguments.py:582)");
        r.require(list.is_none_or(|list| times(&list) == cp), sizes, message);
    }
    let Some(sequence) = r.size(key) else { return };
    let parts = times(&[2, cp]);
    r.require(
        cp <= 1 || sequence.is_multiple_of(parts),
        key,
        format!("{sequence} is not a multiple of 2·cp = {parts} (arguments.py:1336)"),
    );
    if let Some(most) = r.size("--max-position-embeddings") {
        let message =
            format!("{sequence} is above --max-position-embeddings {most} (arguments.py:1354)");
        r.require(sequence <= most, key, message);
    }
}

fn batch(r: &mut Rules<'_>, d: &Degrees, interleaved: bool) {
    let (micro, global) = (r.size("--micro-batch-size"), r.size("--global-batch-size"));
    let Some(gpus) = r.doc.launch.gpus else {
        return;
    };
    let model = times(&[d.tp, d.pp, d.cp]);
    r.require(
        gpus.is_multiple_of(model),
        TP,
        format!("tp·pp·cp = {model} does not divide the {gpus} GPUs"),
    );
    let (Some(micro), Some(global)) = (micro, global) else {
        return;
    };
    let key = "--global-batch-size";
    let each = times(&[micro, (gpus / model).max(1)]);
    if each == 0 || !global.is_multiple_of(each) {
        let message = format!("{global} is not a multiple of micro-batch · dp = {each}");
        return r.find(Severity::Error, key, message);
    }
    // Micro-batches run in groups, whose default size is the number of pipeline ranks.
    let (count, pp) = (global / each, d.pp);
    let group = r.size("--microbatch-group-size-per-virtual-pipeline-stage");
    let group = group.unwrap_or(pp);
    let fits = (pp..=count).contains(&group) && (count % group == 0 || count % group >= pp);
    let message = format!(
        "makes {count} micro-batches, which interleaving over {pp} ranks cannot run in groups of {group} (schedules.py:1161)"
    );
    r.require(!interleaved || pp == 1 || fits, key, message);
}

fn heads(r: &mut Rules<'_>, d: &Degrees, model: Option<&ModelConfig>) {
    let of_model = |size: fn(&ModelConfig) -> u64| model.map(size);
    let heads = r.size("--num-attention-heads");
    let Some(heads) = heads.or(of_model(|m| m.attention.heads)) else {
        return;
    };
    let (tp, cp) = (d.tp, d.cp);
    r.divides(tp, TP, heads, "attention");
    let key = "--num-query-groups";
    let groups = r.size(key).filter(|_| r.on("--group-query-attention"));
    let kv = groups.or(of_model(|m| m.attention.kv_heads()));
    let kv = kv.unwrap_or(heads).max(1);
    let message =
        format!("{kv} and {TP} {tp} do not divide one another (transformer_config.py:1462)");
    r.require(kv.is_multiple_of(tp) || tp.is_multiple_of(kv), key, message);
    let comm = "--cp-comm-type";
    let of_rank = [heads, kv].map(|heads| (heads / tp).max(1));
    let shared = of_rank.iter().all(|heads| heads.is_multiple_of(cp));
    let message = format!(
        "a2a needs a context-parallel size that divides a rank's {} query and {} key heads, which {cp} does not (context_parallel.py of Transformer Engine)",
        of_rank[0], of_rank[1]
    );
    r.require(
        cp == 1 || shared || !r.doc.words(comm).contains(&"a2a"),
        comm,
        message,
    );
}

fn experts(r: &mut Rules<'_>, d: &Degrees) {
    let ep = d.ep;
    let ranks = times(&[d.etp, ep, d.pp]);
    let why = match (r.size("--num-experts"), r.doc.launch.gpus) {
        (Some(experts), _) if !experts.is_multiple_of(ep) => {
            format!("{ep} does not divide the {experts} experts (arguments.py:1657)")
        }
        (_, Some(gpus)) if r.has(EP) && !gpus.is_multiple_of(ranks) => {
            format!("etp·ep·pp = {ranks} does not divide the {gpus} GPUs (parallel_state.py:881)")
        }
        _ => String::new(),
    };
    r.require(why.is_empty(), EP, why);
    let order = "--use-tp-pp-dp-mapping";
    let (attention, experts) = (times(&[d.tp, d.cp]), times(&[d.etp, ep]));
    let message = match r.has("--num-experts") {
        false => {
            "with pipeline stages and no experts needs cp = 1 (parallel_state.py:898)".to_owned()
        }
        true => format!(
            "with pipeline stages needs experts to be replicated as often as attention: etp·ep = {experts} is not tp·cp = {attention} (parallel_state.py:898)"
        ),
    };
    r.require(
        !r.on(order) || d.pp == 1 || attention == experts,
        order,
        message,
    );
}

fn layout_rules(r: &mut Rules<'_>, layout: &str, layers: u64, pp: u64) {
    let Some(stages) = crate::import::parse_layout(layout) else {
        let message = "is not a layout such as Et*9|t*10|t*11L";
        return r.find(Severity::Error, LAYOUT, message.to_owned());
    };
    let held: u64 = stages.iter().sum();
    r.require(
        held == layers,
        LAYOUT,
        format!("holds {held} decoder layers; the model has {layers}"),
    );
    let count = stages.len() as u64;
    r.require(
        count.is_multiple_of(pp),
        LAYOUT,
        format!("has {count} stages, not a multiple of {pp} ranks"),
    );
    let ends = layout.trim().starts_with('E') && layout.trim().ends_with('L');
    r.require(
        ends,
        LAYOUT,
        "must begin with the embedding E and end with the loss L",
    );
}

pub(super) fn bridge(r: &mut Rules<'_>, model: Option<&ModelConfig>) {
    options(r);
    let key = "model.tensor_model_parallel_size";
    let tp = r.size_or_one(key);
    let sp = "model.sequence_parallel";
    r.require(
        !r.on(sp) || tp > 1,
        sp,
        "needs tensor_model_parallel_size of at least 2",
    );
    let (sequence, data) = ("model.seq_length", "dataset.seq_length");
    if let (Some(a), Some(b)) = (r.size(sequence), r.size(data)) {
        r.require(a == b, data, format!("{b} is not {sequence} {a}"));
    }
    let gather = "ddp.overlap_param_gather";
    r.require(
        !r.on(gather) || r.on("ddp.use_distributed_optimizer"),
        gather,
        "needs ddp.use_distributed_optimizer",
    );
    let both = r.has("model.virtual_pipeline_model_parallel_size")
        && r.has("model.pipeline_model_parallel_layout");
    r.require(
        !both,
        "model.virtual_pipeline_model_parallel_size",
        "cannot be combined with model.pipeline_model_parallel_layout",
    );
    if let Some(heads) = model.map(|m| m.attention.heads) {
        r.divides(tp, key, heads, "attention");
    }
}
