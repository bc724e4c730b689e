//! Refusals of what torchtitan cannot express.

use catalog::model::{Family, ModelConfig};
use catalog::{
    CpKind, CudaGraphs, Dispatcher, Fp8Recipe, OffloadKind, Precision, RopeScaling, ScheduleKind,
    Zero,
};

use super::edition::Edition;
use crate::export::graphs;
use crate::export::job::Job;
use crate::export::refusal::Limits;
use plans::decisions::{Decisions, Recompute, alone};
use plans::grammar::recompute_name;

/// Number of chunks of a loss (`ChunkedLossWrapper.Config.num_chunks`).
const CHUNKS: u64 = 8;

/// Refuses what no edition, or not this one, can express.
pub(super) fn refuse(job: &Job<'_>, edition: Edition, limits: &mut Limits) {
    let d = job.decisions;
    states(job, edition, limits);
    limits.refuse_states(job, Some(OffloadKind::Parameters));
    overlap(d, limits);
    limits.refuse_expert_overlap(d);
    let dispatchers: &[Dispatcher] = match edition {
        Edition::Toml02 => &[Dispatcher::AllToAll, Dispatcher::DeepEp],
        Edition::Python03 | Edition::PythonMain => &[
            Dispatcher::AllToAll,
            Dispatcher::DeepEp,
            Dispatcher::HybridEp,
        ],
    };
    limits.refuse_dispatcher(d, job.runtime, dispatchers);
    captures(job, edition, limits);
    pipeline(d, limits);
    let kv = job.model.attention.kv_heads();
    limits.refuse_as(
        !kv.is_multiple_of(d.tp),
        format!("tp={}", d.tp),
        format!("tp must divide the {kv} key/value heads"),
        Some(("tp", common_divisor(kv, d.tp).to_string())),
    );
    limits.refuse(
        d.cp > 1 && d.cp_kind != CpKind::AllGather,
        "cp_kind=all_gather",
        "training gathers keys and values, whatever context_parallel_rotate_method says",
    );
    limits.refuse(
        d.tp > 1 && !d.sequence_parallel && edition == Edition::Toml02,
        "sp=on",
        "tensor parallelism always comes with sequence parallelism",
    );
    let why = "its mesh is pp, dp_replicate, dp_shard, cp, tp, outermost first";
    limits.refuse_order(d, why);
    recomputation(d.recompute, limits);
    limits.refuse_as(
        job.workload.precision == Precision::Fp16,
        "precision fp16",
        "it trains in bfloat16, float32 and float8",
        None,
    );
    chunks(job, edition, limits);
    by_model(job, edition, limits);
    experts(job, edition, limits);
}

/// Refuses sequences that the loss cannot divide into chunks of equal length (`ChunkedLossWrapper` in its components/loss.py).
fn chunks(job: &Job<'_>, edition: Edition, limits: &mut Limits) {
    let length = job.workload.seq_len;
    let of_sequence = length / job.decisions.cp;
    let tokens = match edition {
        Edition::Toml02 => return,
        Edition::Python03 => of_sequence,
        Edition::PythonMain => of_sequence * job.decisions.micro_batch,
    };
    limits.refuse_as(
        job.model.mtp_layers == 0 && !tokens.is_multiple_of(CHUNKS),
        format!("seq={length}"),
        format!("its loss divides {tokens} tokens of a rank into {CHUNKS} equal chunks"),
        None,
    );
}

/// Refuses what an edition cannot do with this model, or in 8 bits.
fn by_model(job: &Job<'_>, edition: Edition, limits: &mut Limits) {
    let d = job.decisions;
    // After 0.2, its Float8LinearConverter scales rows alone (components/quantization/float8.py).
    let recipes: &[Fp8Recipe] = match edition {
        Edition::Toml02 => &[Fp8Recipe::Tensorwise, Fp8Recipe::Rowwise],
        Edition::Python03 | Edition::PythonMain => &[Fp8Recipe::Rowwise],
    };
    limits.refuse_recipe(job, recipes);
    limits.refuse(
        job.model.tied_embeddings && d.pp > 1,
        "pp=1",
        "its pipeline takes no model whose embeddings are tied to its head",
    );
    limits.refuse(
        edition == Edition::Toml02 && d.cp > 1 && flexible(job.model),
        "cp=1",
        "its attention of this model has no context parallelism in 0.2",
    );
    limits.refuse(
        edition == Edition::Toml02 && d.pp > 1 && job.model.family == Family::GptOss,
        "pp=1",
        "gpt-oss has no pipeline in 0.2",
    );
    let rescaled = matches!(job.model.constants.rope_scaling, RopeScaling::Yarn { .. });
    let short = rescaled && job.workload.seq_len <= 4096;
    limits.refuse_model(
        edition == Edition::Toml02 && job.model.family == Family::DeepSeek && short,
        "rope_scaling yarn",
        "0.2 rescales rotations of sequences above 4096 tokens only",
    );
}

/// Whether 0.2's model uses flex attention, which it cannot run under context parallelism.
fn flexible(model: &ModelConfig) -> bool {
    matches!(model.family, Family::DeepSeek | Family::GptOss)
}

fn states(job: &Job<'_>, edition: Edition, limits: &mut Limits) {
    let d = job.decisions;
    let sharing = d.dp_shard * d.cp;
    let alone = alone([d.dp_shard, d.cp, d.tp], [d.ep, d.etp], job.model);
    let zero = format!("zero={}", u8::from(d.zero));
    limits.refuse_as(
        matches!(d.zero, Zero::Z1 | Zero::Z2) && !alone,
        &zero,
        "fully_shard shards parameters, gradients and states together; its ZeRO-2 is zero=3 with reshard=off",
        Some(("zero", "3".to_owned())),
    );
    limits.refuse_as(
        d.zero == Zero::Z0 && d.cp > 1,
        &zero,
        "context-parallel ranks always shard the states",
        Some(("zero", "3".to_owned())),
    );
    limits.refuse_as(
        d.zero == Zero::Z0 && d.ep > 1 && !alone,
        &zero,
        "with expert parallelism, ranks that hold the same experts always shard their states",
        Some(("zero", "3".to_owned())),
    );
    let several = d.tp * d.pp > 1;
    limits.refuse_as(
        edition == Edition::Toml02 && sharing == 1 && d.dp_replicate > 1 && several,
        format!("{zero} with tp={}, pp={}", d.tp, d.pp),
        "in 0.2 replicated data parallelism cannot be combined with tensor or pipeline parallelism",
        Some(("zero", "3".to_owned())),
    );
}

fn overlap(d: &Decisions, limits: &mut Limits) {
    let o = d.overlap;
    let all = if o.tensor_parallel {
        "grad+param+tp+pp"
    } else {
        "grad+param+pp"
    };
    let several = d.dp() * d.cp > 1;
    let lacks = [
        (!o.grad_reduce && several, "grad", "gradient reduction"),
        (
            !o.param_gather && several && d.zero != Zero::Z0,
            "param",
            "parameter gathering",
        ),
        (!o.pipeline && d.pp > 1, "pp", "sending and receiving"),
    ];
    for (lacks, name, what) in lacks {
        limits.refuse_as(
            lacks,
            format!("overlap without {name}"),
            format!("{what} beside compute cannot be switched off"),
            Some(("overlap", all.to_owned())),
        );
    }
}

/// Refuses to recompute parts of layers that torchtitan cannot recompute.
fn recomputation(recompute: Recompute, limits: &mut Limits) {
    let instead = match recompute {
        Recompute::None | Recompute::Full | Recompute::SelectiveOps | Recompute::Layers(0) => None,
        Recompute::Selective | Recompute::Modules(_) => Some("selective_ops"),
        Recompute::Layers(_) | Recompute::Falling(_) => Some("full"),
    };
    limits.refuse_as(
        instead.is_some(),
        format!("recompute={}", recompute_name(recompute)),
        "it recomputes whole layers, or all but chosen operators",
        instead.map(|mode| ("recompute", mode.to_owned())),
    );
}

/// Refuses CUDA graphs of what it does not capture (`disable_cuda_graphs` in its config/configs.py).
fn captures(job: &Job<'_>, edition: Edition, limits: &mut Limits) {
    let (d, graphs) = (job.decisions, graphs::asked(job));
    let why = match graphs {
        CudaGraphs::None => return,
        _ if edition == Edition::Toml02 => "0.2 has no switch for CUDA graphs",
        CudaGraphs::Layers => "it captures passes whole",
        CudaGraphs::Step if d.pp > 1 => "it captures no pipelines",
        CudaGraphs::Step if d.ep > 1 => "its dispatchers wait for the host",
        CudaGraphs::Step if d.offload.is_some() => {
            "the optimizer's parameters must stay on the device"
        }
        CudaGraphs::Step => return,
    };
    limits.refuse_graphs(true, graphs, why);
}

fn pipeline(d: &Decisions, limits: &mut Limits) {
    limits.refuse(
        d.pp > 1 && d.schedule == ScheduleKind::ZbH1,
        "schedule=1f1b",
        "its zero-bubble schedules have two stages per rank or more",
    );
    let inner = d.stages.0.get(1..d.stages.0.len().saturating_sub(1));
    limits.refuse_as(
        inner.is_some_and(|stages| stages.contains(&0)),
        "stages",
        "a stage without layers would be an empty module",
        Some(("vpp", d.vpp.to_string())),
    );
}

fn experts(job: &Job<'_>, edition: Edition, limits: &mut Limits) {
    let d = job.decisions;
    if job.model.moe.is_none() {
        return;
    }
    // Without expert parallelism, experts are sharded as the dense layers are.
    let ok = match (edition, d.ep) {
        (_, 1) => d.etp == d.tp,
        (Edition::Toml02, _) => d.etp == d.tp || d.etp == 1,
        (Edition::Python03 | Edition::PythonMain, _) => d.etp == 1,
    };
    let instead = if d.ep == 1 { d.tp } else { 1 };
    limits.refuse_as(
        !ok,
        format!("etp={}", d.etp),
        if d.ep == 1 {
            "without expert parallelism experts are split over tp"
        } else {
            "expert parallelism takes the tensor-parallel ranks"
        },
        Some(("etp", instead.to_string())),
    );
    let ranks = d.dp_shard * d.cp * d.tp;
    limits.refuse_as(
        !ranks.is_multiple_of(d.ep * d.etp),
        format!("ep={}", d.ep),
        format!("ep·etp must divide dp_shard·cp·tp = {ranks}"),
        Some(("ep", common_divisor(ranks, d.ep).to_string())),
    );
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}
