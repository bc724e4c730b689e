//! Checks whether a strategy is legal for any training system; `support` checks a given runtime.

use catalog::hybrid::Recurrence;
use catalog::model::ModelConfig;
use catalog::{
    CpKind, CudaGraphs, DType, Mistake, Offload, OptimizerStates, ScheduleKind, Workload, Zero,
};

use crate::decisions::{Decisions, Recompute};
use crate::schedule::{self, ScheduleError};

/// The rule that a strategy breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StrategyError {
    /// A size is zero.
    #[error("{field} is 0; sizes start at 1")]
    Zero {
        /// Name of the size.
        field: &'static str,
    },
    /// The sizes do not multiply to the number of devices.
    #[error(
        "tp·cp·pp·dp = {tp}·{cp}·{pp}·{dp} = {product}, but there are {gpus} GPUs; \
         the sizes must multiply to the number of GPUs"
    )]
    World {
        /// Tensor-parallel size.
        tp: u64,
        /// Context-parallel size.
        cp: u64,
        /// Pipeline-parallel size.
        pp: u64,
        /// Data-parallel size.
        dp: u64,
        /// Their product.
        product: u64,
        /// Number of devices.
        gpus: u64,
    },
    /// A size is not divisible by another.
    #[error("{what} = {value} is not divisible by {by} = {divisor}; valid: {}", divisors_listed(*.value))]
    Divides {
        /// Name of the size that must be divisible.
        what: &'static str,
        /// Its value.
        value: u64,
        /// Name of the divisor.
        by: &'static str,
        /// Value of the divisor.
        divisor: u64,
    },
    /// Data-parallel ranks, micro-batch and number of micro-batches do not multiply to the global batch.
    #[error(
        "global batch {global_batch} ≠ dp {dp} · micro-batch {micro_batch} · micro-batches {count}"
    )]
    Batch {
        /// Sequences per step.
        global_batch: u64,
        /// Number of data-parallel ranks.
        dp: u64,
        /// Sequences per micro-batch.
        micro_batch: u64,
        /// Number of micro-batches per step.
        count: u64,
    },
    /// The number of stages, or of layers in them, does not match the strategy and the model.
    #[error("{stages} stages hold {held} layers; pp·vpp = {wanted_stages} must hold {layers}")]
    Stages {
        /// Number of stages given.
        stages: u64,
        /// Total number of layers in the stages that were given.
        held: u64,
        /// Number of stages that the strategy has.
        wanted_stages: u64,
        /// Number of decoder layers of the model.
        layers: u64,
    },
    /// The step has more passes of micro-batches through stages than one simulation takes.
    #[error(
        "{micro_batches} micro-batches through {stages} stages are {passes} passes; up to {most} are \
         simulated: choose a larger micro-batch or a smaller global batch"
    )]
    Passes {
        /// Number of micro-batches per step.
        micro_batches: u64,
        /// Virtual stages of the pipeline.
        stages: u64,
        /// Their product.
        passes: u64,
        /// The largest number of passes that the simulator accepts.
        most: u64,
    },
    /// A tensor of the micro-batch has more elements than can be counted in bytes.
    #[error(
        "a micro-batch of {micro_batch} sequences of {seq_len} tokens has a tensor of more than 2^{bits} \
         elements; choose a smaller micro-batch"
    )]
    Elements {
        /// Sequences per micro-batch.
        micro_batch: u64,
        /// Tokens per sequence.
        seq_len: u64,
        /// Binary logarithm of the largest number of elements.
        bits: u32,
    },
    /// The schedule does not exist for these sizes.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// Two choices exclude each other.
    #[error("{0}")]
    Conflict(&'static str),
    /// The runtime does not support a decision.
    #[error("runtime {runtime} has no {what}; it has {has}")]
    Runtime {
        /// Name of the runtime.
        runtime: String,
        /// The decision that it does not support.
        what: String,
        /// What it supports instead.
        has: String,
    },
    /// The text is not a strategy.
    #[error("strategy: {0}")]
    Syntax(Mistake),
}

fn divides(
    what: &'static str,
    value: u64,
    by: &'static str,
    divisor: u64,
) -> Result<(), StrategyError> {
    if value.is_multiple_of(divisor) {
        return Ok(());
    }
    Err(StrategyError::Divides {
        what,
        value,
        by,
        divisor,
    })
}

/// Fails with the first sentence whose condition holds.
fn conflict<const N: usize>(rules: [(bool, &'static str); N]) -> Result<(), StrategyError> {
    let broken = rules.into_iter().find(|(broken, _)| *broken);
    broken.map_or(Ok(()), |(_, why)| Err(StrategyError::Conflict(why)))
}

/// Divisors of a size, up to 256.
pub(crate) fn divisors(value: u64) -> impl Iterator<Item = u64> {
    (1..=value.min(256)).filter(move |&d| value.is_multiple_of(d))
}

/// Divisors of a size, up to 256, as text for messages.
pub(crate) fn divisors_listed(value: u64) -> String {
    let divisors: Vec<String> = divisors(value).map(|d| d.to_string()).collect();
    divisors.join(", ")
}

/// Checks the rules that hold for every training system.
///
/// # Errors
/// The first rule broken.
pub fn check(d: &Decisions, model: &ModelConfig, workload: &Workload) -> Result<(), StrategyError> {
    check_layout(d, model, workload)?;
    activations(d, model)?;
    check_pipeline(d, model, workload)
}

/// Checks what does not depend on the pipeline: sizes, and how tensors, sequences, experts and states are divided.
///
/// # Errors
/// The first rule broken.
pub fn check_layout(
    d: &Decisions,
    model: &ModelConfig,
    workload: &Workload,
) -> Result<(), StrategyError> {
    let sizes = [
        ("tp", d.tp),
        ("pp", d.pp),
        ("vpp", d.vpp),
        ("cp", d.cp),
        ("ep", d.ep),
        ("etp", d.etp),
        ("dp_shard", d.dp_shard),
        ("dp_replicate", d.dp_replicate),
        ("micro_batch", d.micro_batch),
        ("num_micro_batches", d.num_micro_batches),
    ];
    if let Some(&(field, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        return Err(StrategyError::Zero { field });
    }
    let product = [d.tp, d.cp, d.pp, d.dp_shard, d.dp_replicate]
        .into_iter()
        .try_fold(1u64, u64::checked_mul)
        .unwrap_or(u64::MAX);
    if product != workload.gpus {
        let (tp, cp, pp, dp) = (d.tp, d.cp, d.pp, d.dp_shard.saturating_mul(d.dp_replicate));
        return Err(StrategyError::World {
            tp,
            cp,
            pp,
            dp,
            product,
            gpus: workload.gpus,
        });
    }
    tensor(d, model)?;
    context(d, model, workload)?;
    experts(d, model)?;
    data(d)?;
    gradients(d, workload)?;
    graphs(d, workload)?;
    elements(d, model, workload)
}

/// Binary logarithm of the largest number of elements of a tensor: in 64 bits each, their bytes stay below 2^63.
const ELEMENT_BITS: u32 = 58;
/// Largest number of blocks ahead of their use that parameters are gathered.
pub const MAX_AHEAD: u64 = 8;
/// Largest number of passes of micro-batches through stages in one simulation.
pub const MAX_PASSES: u64 = 1 << 20;

/// Checks that no tensor of a micro-batch has more elements than sums of bytes can hold.
fn elements(d: &Decisions, model: &ModelConfig, workload: &Workload) -> Result<(), StrategyError> {
    let (qk, v) = model.attention.head_dims();
    let heads = u128::from(model.attention.heads);
    let moe = model
        .moe
        .map_or(1, |m| m.top_k * m.expert_ffn.max(model.hidden));
    let widths = [
        u128::from(model.hidden),
        u128::from(model.vocab),
        u128::from(model.mlp.ffn),
        heads * u128::from(qk.max(v)),
        u128::from(moe),
        model
            .hybrid
            .as_ref()
            .map_or(1, |of| of.recurrence.widest().into()),
        // Attention scores, if the kernel is not fused.
        heads * u128::from(workload.seq_len),
    ];
    let widest = widths.into_iter().max().unwrap_or(1);
    let tokens = u128::from(d.micro_batch) * u128::from(workload.seq_len);
    match tokens.checked_mul(widest) {
        Some(count) if count <= 1 << ELEMENT_BITS => Ok(()),
        _ => Err(StrategyError::Elements {
            micro_batch: d.micro_batch,
            seq_len: workload.seq_len,
            bits: ELEMENT_BITS,
        }),
    }
}

fn tensor(d: &Decisions, model: &ModelConfig) -> Result<(), StrategyError> {
    divides("attention heads", model.attention.heads, "tp", d.tp)?;
    if model.attention.kv_heads() >= d.tp {
        divides("key/value heads", model.attention.kv_heads(), "tp", d.tp)?;
    } else {
        divides("tp", d.tp, "key/value heads", model.attention.kv_heads())?;
    }
    if model.has_dense_feed_forward() {
        divides("ffn", model.mlp.ffn, "tp", d.tp)?;
    }
    if let Some(hybrid) = &model.hybrid {
        let what = match hybrid.recurrence {
            Recurrence::StateSpace(_) => "groups of state-space heads",
            Recurrence::GatedDelta(_) => "key heads of the delta rule",
        };
        divides(what, hybrid.recurrence.parts(), "tp", d.tp)?;
    }
    let alone = d.sequence_parallel && d.tp == 1;
    conflict([(alone, "sequence parallelism needs tp of at least 2")])
}

fn context(d: &Decisions, model: &ModelConfig, workload: &Workload) -> Result<(), StrategyError> {
    if d.sequence_parallel {
        divides(
            "sequence per context rank",
            workload.seq_len / d.cp,
            "tp",
            d.tp,
        )?;
    }
    if d.cp == 1 {
        return Ok(());
    }
    conflict([(
        model.hybrid.is_some(),
        "context parallelism of recurrent layers, which carry a state along the sequence, is not modelled: cp must be 1",
    )])?;
    // To balance causal attention every rank holds one early and one late chunk of the sequence. Megatron-LM cuts them like that for an
    // all-to-all too (`arguments.py`); DeepSpeed, which would take any multiple of `cp`, is held to the same.
    divides("sequence", workload.seq_len, "2·cp (zig-zag)", 2 * d.cp)?;
    match d.cp_kind {
        CpKind::AllToAll => {
            divides(
                "heads per tensor rank",
                model.attention.heads / d.tp,
                "cp",
                d.cp,
            )?;
            let kv = model.attention.kv_heads().div_ceil(d.tp);
            divides("key/value heads per tensor rank", kv, "cp", d.cp)
        }
        CpKind::Ring | CpKind::AllGather => Ok(()),
    }
}

fn experts(d: &Decisions, model: &ModelConfig) -> Result<(), StrategyError> {
    let Some(moe) = model.moe else {
        let asked = d.ep > 1 || d.etp > 1 || d.dispatcher.is_some();
        return conflict([(asked, "ep, etp and dispatcher need a model with experts")]);
    };
    divides("experts", moe.experts, "ep", d.ep)?;
    divides("expert ffn", moe.expert_ffn, "etp", d.etp)?;
    let spread = d.ep.saturating_mul(d.etp);
    divides("tp·cp·dp", d.tp * d.cp * d.dp(), "ep·etp", spread)?;
    if d.zero != Zero::Z0 {
        let replicas = d.tp * d.cp * d.dp() / spread;
        divides(
            "replicas of experts",
            replicas,
            "dp_replicate",
            d.dp_replicate,
        )?;
    }
    conflict([
        (
            d.dispatcher.is_some() && d.ep == 1,
            "dispatcher needs ep of at least 2: without expert parallelism no token leaves its rank",
        ),
        (
            moe.bias && d.etp > 1,
            "experts with biases need etp=1: biases are added once, and its ranks hold parts of sums",
        ),
        (
            d.tp > 1 && !d.sequence_parallel,
            "experts with tp need sequence parallelism, or every tensor rank routes the same tokens",
        ),
    ])
}

fn data(d: &Decisions) -> Result<(), StrategyError> {
    let none = d.zero == Zero::Z0;
    let completes = OptimizerStates::completes_parameters;
    conflict([
        (
            none && d.dp_shard > 1,
            "zero=0 shards nothing: dp_shard must be 1, use dp_replicate",
        ),
        (
            none && d.optimizer_states.is_some_and(completes),
            "these optim_states need a ZeRO level of at least 1: the optimizer updates its own share",
        ),
        (
            none && d.offload.is_some(),
            "offload needs a ZeRO level of at least 1: each rank updates its own share on its host",
        ),
        (
            d.zero != Zero::Z3 && d.offload == Some(Offload::Parameters),
            "offload=parameters needs zero=3: a rank's own share of parameters lies on its host",
        ),
        (
            d.offload.is_some() && d.optimizer_states.is_some(),
            "offload needs optim_states=own: the host's optimizer holds states in 32 bits",
        ),
        (
            d.prefetch.is_some() && !d.gathers_in_every_pass(),
            "prefetch is of parameters that every pass gathers: it needs zero=3 and reshard=on",
        ),
        (
            d.prefetch.is_some_and(|ahead| ahead > MAX_AHEAD),
            "prefetch reaches at most 8 blocks ahead",
        ),
    ])
}

/// Checks that layers with activations in host memory have no pipeline and are not recomputed.
fn activations(d: &Decisions, model: &ModelConfig) -> Result<(), StrategyError> {
    let some = d.offload_layers > 0;
    conflict([
        (
            some && d.offload_layers >= model.layers,
            "offload_layers is below the number of layers: the last is used at once",
        ),
        (
            some && (d.pp > 1 || d.recompute != Recompute::None),
            "offload_layers needs pp=1 and recompute=none: copies are spread over the layers of one pass",
        ),
    ])
}

/// Checks that what is captured in CUDA graphs has the same shapes in every step.
fn graphs(d: &Decisions, workload: &Workload) -> Result<(), StrategyError> {
    let captures = d.graphs.is_some_and(|graphs| graphs != CudaGraphs::None);
    conflict([(
        captures && workload.documents_apart().is_some(),
        "CUDA graphs need attention over whole sequences: where documents end differs from step to step",
    )])
}

/// Checks that gradients have 32 bits, or the type in which the job computes them.
fn gradients(d: &Decisions, workload: &Workload) -> Result<(), StrategyError> {
    let computed = workload.precision.activation();
    let possible = |dtype: DType| dtype == DType::F32 || dtype == computed;
    let types = d.gradients.map(|types| [types.held, types.reduced]);
    conflict([(
        types.is_some_and(|types| !types.into_iter().all(possible)),
        "grad_dtype is fp32, or the 16-bit type that the job's precision computes gradients in",
    )])
}

/// Checks that a pipeline's stages can recompute what the decisions say.
///
/// # Errors
/// What `layers:N` or `falling:N` would need, if the decisions lack it.
pub fn check_recompute(d: &Decisions) -> Result<(), StrategyError> {
    if let Recompute::Layers(n) = d.recompute {
        return conflict([(
            n > d.stages.largest(),
            "recompute=layers:N has more layers than any stage: use recompute=full",
        )]);
    }
    let Recompute::Falling(of_first) = d.recompute else {
        return Ok(());
    };
    conflict([
        (
            d.passes_in_flight(0).is_none(),
            "recompute=falling:N needs pp of at least 2 and a schedule whose later ranks have fewer micro-batches in \
             flight (1f1b, interleaved or zb-h1); use recompute=layers:N",
        ),
        (
            of_first == 0 || of_first >= d.stages.0[0],
            "recompute=falling:N needs N of at least 1 and below the layers of the first stage; use recompute=none or full",
        ),
    ])
}

/// Checks micro-batches, stages and schedule.
///
/// # Errors
/// The first rule broken.
pub fn check_pipeline(
    d: &Decisions,
    model: &ModelConfig,
    workload: &Workload,
) -> Result<(), StrategyError> {
    let sequences = d
        .dp()
        .checked_mul(d.micro_batch)
        .and_then(|n| n.checked_mul(d.num_micro_batches));
    if sequences != Some(workload.global_batch) {
        return Err(StrategyError::Batch {
            global_batch: workload.global_batch,
            dp: d.dp(),
            micro_batch: d.micro_batch,
            count: d.num_micro_batches,
        });
    }
    let (stages, wanted_stages) = (d.stages.0.len() as u64, d.pp.saturating_mul(d.vpp));
    if stages != wanted_stages || d.stages.layers() != model.layers {
        let (held, layers) = (d.stages.layers(), model.layers);
        return Err(StrategyError::Stages {
            stages,
            held,
            wanted_stages,
            layers,
        });
    }
    let passes = d.num_micro_batches.saturating_mul(wanted_stages);
    if passes > MAX_PASSES {
        return Err(StrategyError::Passes {
            micro_batches: d.num_micro_batches,
            stages,
            passes,
            most: MAX_PASSES,
        });
    }
    let alone = d.pp == 1;
    conflict([
        (alone && d.vpp > 1, "virtual stages need pp of at least 2"),
        (
            alone && d.schedule != ScheduleKind::OneFOneB,
            "a pipeline schedule other than 1f1b needs pp of at least 2",
        ),
    ])?;
    if d.pp > 1 {
        schedule::check(d.schedule, d.pp, d.vpp, d.num_micro_batches)?;
    }
    check_recompute(d)
}
