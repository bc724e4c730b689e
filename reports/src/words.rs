//! Plans and predictions as a person says them: the layout, the moment of the peak, what to be careful about, and what
//! abbreviations mean.

use catalog::{
    Adapters, CudaGraphs, DType, Dispatcher, Documents, Fp8Recipe, GradientTypes, Offload,
    OptimizerStates, Origin, Packing, Pools,
};
use plans::{Decisions, Fit, HostMemory, Prediction, Recompute, StagePartition, Zero};

use crate::format;

/// Memory is called tight if a plan fits with a lower probability than this.
const SAFE: f64 = 0.9;

/// Abbreviations in strategies and tables, each with its meaning.
pub const TERMS: [(&str, &str); 42] = [
    ("tp8", "tensor parallel: 8 GPUs share each layer"),
    (
        "pp4",
        "pipeline parallel: 4 stages, each with a share of the layers",
    ),
    (
        "vpp2",
        "virtual stages: each pipeline rank holds 2 parts of the model, not one",
    ),
    (
        "cp2(ring)",
        "context parallel: 2 GPUs share each sequence; attention goes by ring, all_gather or all_to_all",
    ),
    ("ep8", "expert parallel: experts are spread over 8 GPUs"),
    ("etp2", "2 GPUs share each expert"),
    (
        "dp16",
        "data parallel: 16 replicas, each with its share of the batch",
    ),
    (
        "dp8x2",
        "8 GPUs share the states of a replica, and there are 2 such groups",
    ),
    (
        "zero1",
        "data-parallel ranks share optimizer states (1), gradients too (2), parameters too (3); 0: nothing",
    ),
    (
        "sp",
        "sequence parallel: between tensor-parallel layers activations are split along the sequence",
    ),
    ("mbs2", "micro-batch: sequences that a replica runs at once"),
    (
        "1f1b",
        "pipeline schedule: one forward, one backward in turn",
    ),
    (
        "interleaved",
        "the same over virtual stages: less waiting, more messages",
    ),
    (
        "gpipe",
        "pipeline schedule: all forwards, then all backwards",
    ),
    (
        "zb-h1, zb-v, dualpipe-v",
        "schedules that fill waiting with gradients of weights",
    ),
    (
        "recompute=selective",
        "attention's inner values are computed again in the backward, not kept",
    ),
    (
        "recompute=selective:norms+mlp",
        "these parts of each layer are computed again: core_attention, norms, latent_projections, expert_activation, mlp",
    ),
    (
        "recompute=full",
        "every layer is computed again in the backward from its input",
    ),
    (
        "recompute=selective_ops",
        "results of every second matrix product are kept, and those of attention and of messages; the rest is computed again (torchtitan)",
    ),
    (
        "recompute=layers:4",
        "the first 4 layers of each stage are computed again in the backward",
    ),
    (
        "recompute=falling:4",
        "the first 4 layers of the first stage are computed again, and fewer on later ranks, which have fewer micro-batches in flight",
    ),
    (
        "grad_dtype=bf16",
        "gradients are added up and reduced in 16 bits instead of the system's default of 32; fp32/bf16: added up in 32, reduced in 16",
    ),
    (
        "optim_states=…",
        "split_master: master weights are the 16 bits that parameters lack, without effect on results; bf16_moments: moments in 16 bits, and in bf16 jobs master weights as split_master; 8bit_moments: moments in 8 bits",
    ),
    (
        "offload=…",
        "optimizer: optimizer states lie in host memory, whose processors update the weights; optimizer:50: of half the weights; parameters: parameters and gradients lie there too",
    ),
    (
        "offload_layers=8",
        "what the first 8 layers save for the backward is copied to host memory and back",
    ),
    (
        "prefetch=2",
        "the parameters of the next two blocks are gathered while a block runs, instead of the next one's; 0: none ahead",
    ),
    (
        "overlap=…",
        "which messages run beside compute: of gradients, parameters, tensor parallelism (tp), experts (ep), the pipeline (pp)",
    ),
    (
        "dispatcher=…",
        "what carries tokens to their experts: all_to_all, all_gather, or a library that sends a token to each rank once (deepep, hybridep)",
    ),
    (
        "graphs=…",
        "what a GPU replays as CUDA graphs, so that the host need not issue each kernel: layers, or the passes of a step",
    ),
    (
        "fp8_recipe=…",
        "how operands of 8-bit products are scaled: by a scale of earlier steps (delayed) or of now (tensorwise), for each row, or for blocks of numbers (blockwise, mxfp8)",
    ),
    (
        "order=…",
        "which axis has neighbouring ranks, innermost first",
    ),
    (
        "stages=4x20/18",
        "layers of each stage: four of 20, then one of 18",
    ),
    ("exposed", "communication that no computation hides"),
    (
        "longer sequences",
        "waiting for micro-batches and replicas whose sequences hold longer documents, so that attention takes longer",
    ),
    (
        "slow ranks",
        "waiting for ranks that happen to take longer for a pass (jitter of the cluster)",
    ),
    (
        "gradients between pools",
        "groups of replicas on different pools add up their gradients; nothing hides it",
    ),
    ("bubble", "time in which a pipeline rank has nothing to do"),
    (
        "MFU",
        "the FLOPs that the model needs over what the GPUs' dense peak does in a step",
    ),
    (
        "PaLM convention",
        "MFU with attention counted as if nothing were masked, as most publications count",
    ),
    ("headroom", "memory left free on purpose"),
    (
        "80% interval",
        "the measured value lies in it four times of five",
    ),
    ("floor", "a proven lower bound of time or memory"),
];

/// A phrase on what is trained with adapters, and how that changes what MFU counts.
pub fn adapters(adapters: &Adapters) -> String {
    format!(
        "adapters of rank {} are trained, the weights are frozen; MFU counts 4 FLOPs per frozen weight and token, \
         and 6 per trained one",
        adapters.rank
    )
}

/// Which pools hold which pipeline ranks, with their layers: `pipeline ranks 0 to 3 on 32 × A100, 40 layers`.
#[must_use]
pub fn pools(pools: &Pools, d: &Decisions) -> String {
    let owners = pools.of_pipeline(d.pp).unwrap_or_default();
    let layers = layers_of_ranks(d);
    let mut first = 0;
    let mut said = Vec::new();
    for held in owners.chunk_by(|a, b| a == b) {
        let last = first + held.len() - 1;
        let pool = &pools.parts[held[0]];
        let ranks = match held.len() {
            1 => format!("pipeline rank {first}"),
            _ => format!("pipeline ranks {first} to {last}"),
        };
        said.push(format!(
            "{ranks} on {}, {}",
            pool.cluster.devices(pool.gpus),
            format::counted(layers[first..=last].iter().sum(), "layer")
        ));
        first = last + 1;
    }
    said.join("; ")
}

/// A phrase on what sequences are made of, and how that changes what is counted.
#[must_use]
pub fn documents(documents: &Documents) -> String {
    let mean = format::count(documents.mean().round() as u64);
    let counted = match documents.packing() {
        Packing::Within => {
            "packed, attention stays within each; MFU counts its FLOPs, not those of whole sequences"
        }
        Packing::Across => "packed, attention goes across them",
        Packing::Padded => "each padded to a sequence; throughput and MFU count real tokens alone",
    };
    format!("documents of {mean} tokens on average, {counted}")
}

/// The layout in phrases, without capital letters and final stops.
#[must_use]
pub fn plan(d: &Decisions, gpus_per_node: u64) -> Vec<String> {
    let mut said = Vec::new();
    if d.tp > 1 {
        let (gpus, nodes) = (d.tp, d.tp.div_ceil(gpus_per_node.max(1)));
        let whole = d.world() <= gpus_per_node || gpus_per_node.is_multiple_of(gpus);
        said.push(match nodes {
            1 if whole => format!("{gpus} GPUs of a node share each layer (TP {gpus})"),
            1 => format!("{gpus} GPUs, not always of one node, share each layer (TP {gpus})"),
            _ => format!("{gpus} GPUs of {nodes} nodes share each layer (TP {gpus})"),
        });
    }
    if d.tp > 1 && d.overlap.tensor_parallel {
        said.push("tensor-parallel messages overlap with matrix products".to_owned());
    }
    if d.ep > 1 && d.overlap.expert_parallel {
        said.push("messages to experts overlap with the passes of another micro-batch".to_owned());
    }
    if d.cp > 1 {
        let kind = d.cp_kind.name().replace('_', "-");
        said.push(format!(
            "{} GPUs share each sequence (CP {}, {kind})",
            d.cp, d.cp
        ));
    }
    if d.ep > 1 {
        said.push(match d.etp {
            1 => format!("experts are spread over {} GPUs (EP {})", d.ep, d.ep),
            etp => format!(
                "experts are spread over {} groups of {etp} GPUs (EP {}, ETP {etp})",
                d.ep, d.ep
            ),
        });
    }
    if d.pp > 1 {
        said.push(stages(d));
    }
    said.push(replicas(d));
    said.push(recomputed(d));
    said.extend(d.dispatcher.map(dispatcher));
    said.extend(d.graphs.map(graphs));
    said.extend(d.fp8_recipe.map(fp8_recipe));
    said.extend(d.gradients.map(gradients));
    said.extend(d.optimizer_states.map(optimizer_states));
    said.extend(d.offload.map(offload));
    said.extend(d.prefetch.map(prefetch));
    if d.offload_layers > 0 {
        let saved = match d.offload_layers {
            1 => "the first layer saves".to_owned(),
            many => format!("the first {many} layers save"),
        };
        said.push(format!("what {saved} for the backward lies in host memory"));
    }
    said
}

/// A phrase on what backward computes again.
fn recomputed(d: &Decisions) -> String {
    match d.recompute {
        Recompute::None => "nothing is computed twice".to_owned(),
        Recompute::Selective => "attention is computed again in the backward".to_owned(),
        Recompute::Modules(selection) => {
            let names = selection.name().replace('_', " ").replace('+', ", ");
            format!("parts of each layer are computed again in the backward ({names})")
        }
        Recompute::Full => "every layer is computed again in the backward".to_owned(),
        Recompute::Layers(1) => {
            "1 layer of each stage is computed again in the backward".to_owned()
        }
        Recompute::Layers(n) => {
            format!("{n} layers of each stage are computed again in the backward")
        }
        Recompute::Falling(n) => {
            let counts = StagePartition(d.recomputed_layers()).runs();
            let layers = match n {
                1 => "1 layer of the first stage is".to_owned(),
                n => format!("{n} layers of the first stage are"),
            };
            format!("{layers} computed again in the backward, fewer on later ranks ({counts})")
        }
        Recompute::SelectiveOps => "chosen operators are computed again in the backward".to_owned(),
    }
}

/// A phrase for a dispatcher that is not the system's own.
fn dispatcher(dispatcher: Dispatcher) -> String {
    match dispatcher {
        Dispatcher::AllToAll => "tokens go to their experts by all-to-all".to_owned(),
        Dispatcher::AllGather => "all ranks gather all tokens for their experts".to_owned(),
        Dispatcher::DeepEp => "DeepEP sends tokens to their experts".to_owned(),
        Dispatcher::HybridEp => "HybridEP sends tokens to their experts".to_owned(),
    }
}

/// A phrase for CUDA graphs other than the system captures by itself.
fn graphs(graphs: CudaGraphs) -> String {
    match graphs {
        CudaGraphs::None => "the host issues every kernel, without CUDA graphs".to_owned(),
        CudaGraphs::Layers => {
            "layers, but for their experts, are replayed as CUDA graphs".to_owned()
        }
        CudaGraphs::Step => "the passes of a step are replayed as CUDA graphs".to_owned(),
    }
}

/// A phrase for a scaling of 8-bit products that is not the system's own.
fn fp8_recipe(recipe: Fp8Recipe) -> String {
    let each = match recipe {
        Fp8Recipe::Delayed => "tensor, from the magnitudes of earlier steps",
        Fp8Recipe::Tensorwise => "tensor, from its own magnitudes",
        Fp8Recipe::Rowwise => "row",
        Fp8Recipe::Blockwise => "block of 128 numbers",
        Fp8Recipe::Mxfp8 => "32 numbers",
    };
    format!("operands of 8-bit products have a scale for each {each}")
}

/// A phrase for types of gradients that are not the system's own.
fn gradients(types: GradientTypes) -> String {
    let bits = |dtype: DType| 8 * dtype.size();
    let (held, reduced) = (bits(types.held), bits(types.reduced));
    let how = match held == reduced {
        true => format!("added up and reduced in {held} bits"),
        false => format!("added up in {held} bits and reduced in {reduced}"),
    };
    format!(
        "gradients are {how} ({}), not as the system does by default, which changes results",
        types.name()
    )
}

/// A phrase for a way to hold optimizer states that is not the system's own.
fn optimizer_states(states: OptimizerStates) -> String {
    let held = match states {
        OptimizerStates::SplitMaster => {
            "only the 16 bits of master weights that parameters lack, which changes no result"
        }
        OptimizerStates::Bf16Moments => "its moments in 16 bits (bf16), which changes results",
        OptimizerStates::EightBitMoments => "its moments in 8 bits, which changes results",
    };
    format!("the optimizer holds {held}")
}

/// A phrase for a depth of prefetching, in blocks.
fn prefetch(ahead: u64) -> String {
    match ahead {
        0 => "each block's parameters are gathered when the block before has ended".to_owned(),
        1 => "parameters are gathered one block ahead".to_owned(),
        _ => format!("parameters are gathered {ahead} blocks ahead"),
    }
}

/// A phrase for states in host memory.
fn offload(offload: Offload) -> String {
    let of = match offload {
        Offload::Optimizer(100) => "optimizer states lie".to_owned(),
        Offload::Optimizer(percent) => {
            format!("optimizer states of {percent}% of the weights lie")
        }
        Offload::Parameters => "parameters, gradients and optimizer states lie".to_owned(),
    };
    format!("{of} in host memory, and its processors update the weights")
}

/// The layers of every pipeline rank: those of all its virtual stages.
fn layers_of_ranks(d: &Decisions) -> Vec<u64> {
    let ranks = plans::schedule::rank_of_stage(d.schedule, d.pp, d.vpp);
    let mut layers = vec![0; d.pp as usize];
    for (&rank, size) in ranks.iter().zip(&d.stages.0) {
        layers[rank as usize] += size;
    }
    layers
}

fn stages(d: &Decisions) -> String {
    let parts = d.vpp.max(1);
    let layers = layers_of_ranks(d);
    let least = layers.iter().min().copied().unwrap_or(0);
    let most = layers.iter().max().copied().unwrap_or(0);
    let size = match least == most {
        true => format::counted(most, "layer"),
        false => format!("{least} to {most} layers"),
    };
    let virtual_stages = match parts {
        1 => String::new(),
        n => format!(" in {n} parts"),
    };
    format!(
        "{} pipeline stages of {size}{virtual_stages} ({}PP {})",
        d.pp,
        match parts {
            1 => String::new(),
            n => format!("VPP {n}, "),
        },
        d.pp
    )
}

fn replicas(d: &Decisions) -> String {
    let shared = match d.zero {
        Zero::Z0 => "",
        _ if d.dp_shard * d.cp == 1 => ", none of which shares its states",
        Zero::Z1 => ", which share the optimizer's states (ZeRO-1)",
        Zero::Z2 => ", which share the optimizer's states and gradients (ZeRO-2)",
        Zero::Z3 => ", which share parameters, gradients and the optimizer's states (ZeRO-3)",
    };
    match (d.dp(), d.dp_shard, d.dp_replicate) {
        (1, _, _) => "one replica".to_owned(),
        (n, shard, groups) if shard > 1 && groups > 1 => {
            format!("{n} replicas in {groups} groups of {shard} (DP {shard}x{groups}){shared}")
        }
        (n, _, _) => format!("{n} replicas (DP {n}){shared}"),
    }
}

/// A moment such as `B s36 m0` in words: `in the backward of micro-batch 0, stage 36`.
#[must_use]
pub fn moment(text: &str) -> String {
    let words: Vec<&str> = text.split(' ').collect();
    let number = |word: &str, letter: char| word.strip_prefix(letter)?.parse::<u64>().ok();
    let placed = match words.as_slice() {
        [kind @ .., stage, micro_batch] => number(stage, 's')
            .zip(number(micro_batch, 'm'))
            .map(|(stage, micro_batch)| (kind.join(" "), stage, micro_batch)),
        _ => None,
    };
    let Some((kind, stage, micro_batch)) = placed else {
        return match text {
            "whole step" => "during the whole step".to_owned(),
            "optimizer" => "in the optimizer".to_owned(),
            other => format!("at {other}"),
        };
    };
    match kind.as_str() {
        "F" | "B" | "I" | "W" => {
            let pass = match kind.as_str() {
                "F" => "forward",
                "B" => "backward",
                "I" => "backward for inputs",
                _ => "backward for weights",
            };
            format!("in the {pass} of micro-batch {micro_batch}, stage {stage}")
        }
        "gather parameters" => format!("while parameters of stage {stage} are gathered"),
        "free parameters" => format!("while parameters of stage {stage} are freed"),
        "reduce gradients" => format!("while gradients of stage {stage} are reduced"),
        message => format!("at {message} of micro-batch {micro_batch}, stage {stage}"),
    }
}

/// A phrase on a node's host memory in use, if any; unless all are `alike`, on the fullest node's.
#[must_use]
pub fn host_memory(memory: HostMemory, alike: bool) -> Option<String> {
    let used = Some(memory.used).filter(|used| used.0 > 0)?;
    let of = memory.there.map_or(String::new(), |there| {
        format!(" of {}", format::bytes(there))
    });
    let node = if alike { "each" } else { "the fullest" };
    Some(format!(
        "{}{of} of {node} node's host memory",
        format::bytes(used)
    ))
}

/// A warning that memory may not be enough for a plan that is predicted to fit. `None` if the plan has enough to spare, or does not
/// fit.
fn tight_memory(p: &Prediction) -> Option<String> {
    let (_, most) = p.peak_memory_interval;
    let fits = format::probability(p.p_fits);
    let reaches = format!(
        "the 80% interval reaches {} of {}",
        format::bytes(most),
        format::bytes(p.usable())
    );
    match p.fit.fits() {
        true if p.p_fits < SAFE => Some(format!(
            "memory is tight: it fits with probability {fits}, and {reaches}"
        )),
        true if most > p.usable() => Some(format!(
            "memory may be full: {reaches}, but the allocator can give back what it caches, so it fits with probability {fits}"
        )),
        _ => None,
    }
}

/// What to be careful about before trusting a prediction, one phrase each; empty if there is nothing.
#[must_use]
pub fn warnings(p: &Prediction) -> Vec<String> {
    let mut said = Vec::new();
    said.extend(tight_memory(p));
    if let Fit::TooLarge { .. } = p.fit
        && p.p_fits > 1.0 - SAFE
    {
        said.push(format!(
            "it is close: it runs with probability {} if the allocator caches less, but its steps take longer",
            format::probability(p.p_fits)
        ));
    }
    if p.host_memory.used.0 > 0 && p.host_memory.there.is_none() {
        said.push(format!(
            "how much memory the hosts have is not known: {} in each are taken to be there (`memory` under `host` in a \
             cluster file says how much there is)",
            format::bytes(p.host_memory.used)
        ));
    }
    if p.evidence.starts_with("extrapolated") {
        said.push(
            "few published runs resemble this one: the intervals come from runs of other kinds"
                .to_owned(),
        );
    }
    let assumed = p.provenance.iter().filter(|c| c.origin == Origin::Assumed);
    let assumed: Vec<&str> = assumed.map(|c| c.name.as_str()).collect();
    if !assumed.is_empty() {
        said.push(format!(
            "{} of {} constants {} assumed, not measured: {}{}",
            assumed.len(),
            p.provenance.len(),
            if assumed.len() == 1 { "is" } else { "are" },
            assumed[..assumed.len().min(2)].join(", "),
            if assumed.len() > 2 {
                " and others (the report lists them under Provenance)"
            } else {
                ""
            }
        ));
    }
    said
}

#[cfg(test)]
mod tests {
    use catalog::Bytes;
    use plans::{Decisions, HostMemory, Zero};

    use super::{host_memory, moment, replicas};

    #[test]
    fn nodes_that_differ_are_not_each_node() {
        let memory = HostMemory {
            used: Bytes(1 << 30),
            there: Some(Bytes(4 << 30)),
        };
        for (alike, node) in [(true, "each"), (false, "the fullest")] {
            let said = format!("1.00 GiB of 4.00 GiB of {node} node's host memory");
            assert_eq!(host_memory(memory, alike), Some(said));
        }
    }

    #[test]
    fn replicas_share_states_only_where_they_are_divided() {
        for (dp_shard, dp_replicate, shared) in [
            (8, 1, "which share the optimizer's states (ZeRO-1)"),
            (1, 8, "none of which shares its states"),
        ] {
            let mut d = Decisions::on_one_gpu(2, catalog::Overlap::NONE);
            (d.dp_shard, d.dp_replicate, d.zero) = (dp_shard, dp_replicate, Zero::Z1);
            assert_eq!(replicas(&d), format!("8 replicas (DP 8), {shared}"));
        }
    }

    #[test]
    fn moments_are_words() {
        for (text, words) in [
            ("B s36 m0", "in the backward of micro-batch 0, stage 36"),
            ("F s0 m3", "in the forward of micro-batch 3, stage 0"),
            (
                "W s2 m1",
                "in the backward for weights of micro-batch 1, stage 2",
            ),
            ("recv F s2 m1", "at recv F of micro-batch 1, stage 2"),
            (
                "gather parameters s2 m1",
                "while parameters of stage 2 are gathered",
            ),
            ("optimizer", "in the optimizer"),
            ("whole step", "during the whole step"),
            ("something else", "at something else"),
        ] {
            assert_eq!(moment(text), words);
        }
    }
}
