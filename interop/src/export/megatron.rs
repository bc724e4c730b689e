//! Export to Megatron-LM: a bash file that sets the array `MEGATRON_ARGS`.

use catalog::runtime::Rewrite;
use catalog::{
    AxisOrder, CpKind, DType, Dispatcher, GradientTypes, OffloadKind, OptimizerStates, Overlap,
    Precision, RecomputeModule, ScheduleKind, Selection, Zero,
};

use super::core_model::{self, Reach};
use super::core_options::options;
use super::core_precision;
use super::core_rewrites;
use super::dialect::Dialect;
use super::documents;
use super::flag::Flag;
use super::graphs;
use super::inputs::Input;
use super::job::{Draft, Heading, Job};
use super::launch::Program;
use super::refusal::Limits;
use crate::config::escape;
use plans::decisions::{Decisions, Recompute};
use plans::divided::unfit_context;
use plans::grammar::{order_name, recompute_name};
use plans::support::{MAX_OVERLAPPED_MTP, equal_expert_dp, experts_cannot_overlap};

/// Keeps optimizer states in host memory.
pub(crate) const OFFLOAD: &str = "--optimizer-cpu-offload";
/// The share of weights that the host updates.
pub(crate) const OFFLOAD_FRACTION: &str = "--optimizer-offload-fraction";
/// Keeps what the first layers save for backward in host memory.
pub(crate) const OFFLOAD_LAYERS: &str = "--cpu-offloading-num-layers";
/// Lets optimizer states be held in 16 bits.
pub(crate) const PRECISION_AWARE: &str = "--use-precision-aware-optimizer";
/// Types of the moments.
pub(crate) const MOMENTS: [&str; 2] = ["--exp-avg-dtype", "--exp-avg-sq-dtype"];
/// Kind of dispatcher that carries tokens to experts.
pub(crate) const DISPATCHER: &str = "--moe-token-dispatcher-type";
/// Library of the `flex` dispatcher.
pub(crate) const FLEX_BACKEND: &str = "--moe-flex-dispatcher-backend";
/// Runs messages to experts beside the passes of another micro-batch.
pub(crate) const EXPERT_OVERLAP: &str = "--overlap-moe-expert-parallel-comm";
/// The option that switches off the checks of losses and gradients for NaN and Inf.
pub(crate) const NO_CHECKS: &str = "--no-check-for-nan-in-loss-and-grad";
/// A comment in the exported file that says what follows from switching these checks off. Predictions do not count the checks.
pub(crate) const UNCHECKED: &str = "No checks for NaN and Inf, as the prediction assumed: training does not stop at the first one; losses are still logged";
/// Name of the file written.
pub(crate) const FILE: &str = "megatron_args.sh";

/// How Megatron-LM is started with the file.
pub(crate) fn program(job: &Job<'_>) -> Program {
    let read = format!("source \"$HERE/{FILE}\"");
    let mut setup = vec![read];
    setup.extend(environment(job));
    let script = "\"${MEGATRON_LM:-.}/pretrain_gpt.py\"";
    Program::torchrun(setup, format!("{script} \"${{MEGATRON_ARGS[@]}}\" \"$@\""))
}

/// Shell lines that set the environment variables which the plan needs.
pub(crate) fn environment(job: &Job<'_>) -> Vec<String> {
    let lines = [connections(job.decisions)].into_iter();
    let lines = lines.chain(without_multicast(job));
    let lines = lines.chain(graphs::environment(job));
    lines.map(str::to_owned).collect()
}

/// Lets Transformer Engine overlap tensor-parallel messages where GPUs have no multicast; it stops otherwise
/// (NVIDIA/TransformerEngine@d0067d0, pytorch/module/base.py).
fn without_multicast(job: &Job<'_>) -> Option<&'static str> {
    let d = job.decisions;
    let needed = d.overlap.tensor_parallel && d.tp > 1 && !job.cluster.has_multicast();
    needed.then_some("export UB_SKIPMC=1")
}

/// Sets the number of queues in which a GPU takes work. With one, communication starts before compute, which Megatron-LM
/// requires; its FSDP requires the opposite, and messages to experts beside other passes need several (core/transformer/moe,
/// README.md; arguments.py proposes 32).
fn connections(d: &Decisions) -> &'static str {
    match d.zero {
        Zero::Z2 | Zero::Z3 => "unset CUDA_DEVICE_MAX_CONNECTIONS",
        Zero::Z0 | Zero::Z1 if d.overlap.expert_parallel && d.ep > 1 => {
            "export CUDA_DEVICE_MAX_CONNECTIONS=32"
        }
        Zero::Z0 | Zero::Z1 => "export CUDA_DEVICE_MAX_CONNECTIONS=1",
    }
}

pub(crate) fn files(job: &Job<'_>, limits: &mut Limits) -> Vec<Draft> {
    let model = core_model::fields(job.model, job.workload.seq_len, Reach::Options, limits);
    let kernels = core_rewrites::fields(job, Reach::Options, limits);
    let tp = job.decisions.tp;
    let mut sections = vec![
        ("Model", options(&model, &model, tp)),
        (
            "Kernels, as the prediction assumed them",
            options(&kernels, &model, tp),
        ),
    ];
    sections.extend(decisions(job, limits));
    sections.push(("Tokenizer and data", inputs(job, limits)));
    let mut text = format!("GPUS={}\nMEGATRON_ARGS=(\n", job.workload.gpus);
    for (title, flags) in sections {
        if !flags.is_empty() {
            text.push_str(&format!("  # {title}\n"));
        }
        for flag in flags {
            text.push_str("  ");
            text.push_str(&flag.name);
            for value in &flag.values {
                text.push(' ');
                text.push_str(&escape::shell(value));
            }
            text.push('\n');
        }
    }
    text.push_str(")\n");
    limits.note(
        true,
        "optimizer, learning rate and number of steps are yours: give them to the launch script (--lr, --train-iters …)",
    );
    limits.note(
        job.model.moe.is_some(),
        "no auxiliary loss balances the experts: give --moe-aux-loss-coeff where you want one",
    );
    vec![Draft::new(FILE, Heading::Hash, text)]
}

fn inputs(job: &Job<'_>, limits: &mut Limits) -> Vec<Flag> {
    let tokenizer = limits.input_or_placeholder(
        &job.inputs,
        Input::Tokenizer,
        "folder or hub name of the tokenizer",
    );
    let data = limits.input_or_placeholder(
        &job.inputs,
        Input::Data,
        "prefix of the preprocessed dataset (tools/preprocess_data.py)",
    );
    let mut flags = vec![
        Flag::value("--tokenizer-type", "HuggingFaceTokenizer"),
        Flag::value("--tokenizer-model", tokenizer),
        Flag::value("--data-path", data),
    ];
    if documents::within(job) {
        flags.push(Flag::switch("--dataloader-inter-document-masking"));
    }
    flags
}

/// The options of every decision, by section; the model's options are not included.
pub(crate) fn decisions(job: &Job<'_>, limits: &mut Limits) -> Vec<(&'static str, Vec<Flag>)> {
    let Decisions {
        tp,
        pp,
        cp,
        cp_kind,
        // Follow from the other axes, and from the batches.
        dp_shard: _,
        num_micro_batches: _,
        sequence_parallel,
        micro_batch,
        recompute: recomputed,
        overlap: overlapped,
        // Written with the pipeline, the states, the experts and the precision and as graphs, or refused (`prefetch`).
        vpp: _,
        schedule: _,
        stages: _,
        axis_order: _,
        ep: _,
        etp: _,
        dp_replicate: _,
        zero: _,
        reshard_after_forward: _,
        gradients: _,
        optimizer_states: _,
        offload: _,
        offload_layers,
        prefetch: _,
        dispatcher: _,
        graphs: _,
        fp8_recipe: _,
    } = job.decisions;
    let mut parallel = vec![
        Flag::value("--tensor-model-parallel-size", tp),
        Flag::value("--pipeline-model-parallel-size", pp),
        Flag::value("--context-parallel-size", cp),
    ];
    parallel.extend(sequence_parallel.then(|| Flag::switch("--sequence-parallel")));
    if *cp > 1 {
        attention(job, limits);
        parallel.push(Flag::value("--cp-comm-type", context(*cp_kind)));
    }
    parallel.extend(experts(job, limits));
    order(job, limits, &mut parallel);
    if *pp > 1 {
        pipeline(job, limits, &mut parallel);
    }
    vec![
        ("Parallelism", parallel),
        ("Batch and sequence", batch(job, *micro_batch)),
        ("Precision", core_precision::flags(job, limits)),
        ("States", states(job, limits)),
        ("Recomputation", recompute(*recomputed, limits)),
        ("Activations in host memory", activations(*offload_layers)),
        ("Overlap", overlap(job, *overlapped, limits)),
        ("CUDA graphs", graphs::flags(job, limits)),
        (UNCHECKED, vec![Flag::switch(NO_CHECKS)]),
    ]
}

/// Refuses kinds of context parallelism with which Transformer Engine does not run the model's attention
/// (`attn_forward_func_with_cp` in its pytorch/attention/dot_product_attention/context_parallel.py).
fn attention(job: &Job<'_>, limits: &mut Limits) {
    // Its preset, also where the plan was predicted for another runtime.
    let Ok(own) = catalog::load::runtime(Dialect::MegatronLm.runtime()) else {
        return;
    };
    let unfit = unfit_context(job.decisions, job.model, &own.space);
    let Some((what, kinds)) = unfit else { return };
    let names: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
    limits.refuse_as(
        true,
        format!("cp_kind={}", job.decisions.cp_kind.name()),
        format!(
            "Transformer Engine runs attention with {what} under {} alone",
            names.join(" and ")
        ),
        kinds
            .first()
            .map(|kind| ("cp_kind", kind.name().to_owned())),
    );
}

fn context(kind: CpKind) -> &'static str {
    match kind {
        CpKind::Ring => "p2p",
        CpKind::AllGather => "all_gather",
        CpKind::AllToAll => "a2a",
    }
}

fn experts(job: &Job<'_>, limits: &mut Limits) -> Vec<Flag> {
    let (ep, etp) = (job.decisions.ep, job.decisions.etp);
    let Some(moe) = job.model.moe else {
        return Vec::new();
    };
    limits.refuse(
        moe.bias && etp > 1,
        "etp=1",
        "experts with biases are not split",
    );
    let mut flags = vec![
        Flag::value("--expert-model-parallel-size", ep),
        Flag::value("--expert-tensor-parallel-size", etp),
    ];
    let (kind, backend) = match job.decisions.dispatcher.unwrap_or(job.runtime.dispatcher) {
        Dispatcher::AllToAll => ("alltoall", None),
        Dispatcher::AllGather => ("allgather", None),
        Dispatcher::DeepEp => ("flex", Some("deepep")),
        Dispatcher::HybridEp => ("flex", Some("hybridep")),
    };
    flags.push(Flag::value(DISPATCHER, kind));
    flags.extend(backend.map(|backend| Flag::value(FLEX_BACKEND, backend)));
    flags
}

fn order(job: &Job<'_>, limits: &mut Limits, flags: &mut Vec<Flag>) {
    let d = job.decisions;
    let order = d.axis_order;
    if d.pp == 1 || d.dp() == 1 || order == AxisOrder::TP_CP_DP_PP {
        return;
    }
    let alike = equal_expert_dp(job.model.moe.map(|_| d.etp * d.ep), d.tp, d.cp);
    if order == AxisOrder::TP_CP_PP_DP && matches!(d.zero, Zero::Z0 | Zero::Z1) && alike {
        flags.push(Flag::switch("--use-tp-pp-dp-mapping"));
        return;
    }
    limits.refuse_as(
        true,
        format!("order={}", order_name(order)),
        "ranks are laid out tp-cp-ep-dp-pp or, with --use-tp-pp-dp-mapping, without Megatron-FSDP and with experts replicated as often as attention (etp·ep = tp·cp), tp-cp-ep-pp-dp",
        Some(("order", order_name(AxisOrder::TP_CP_DP_PP))),
    );
}

fn pipeline(job: &Job<'_>, limits: &mut Limits, flags: &mut Vec<Flag>) {
    let d = job.decisions;
    match d.schedule {
        ScheduleKind::OneFOneB | ScheduleKind::Interleaved => {}
        ScheduleKind::GPipe | ScheduleKind::ZbH1 => limits.refuse(
            true,
            "schedule=1f1b",
            "it has 1F1B and interleaved schedules only",
        ),
        ScheduleKind::ZbV | ScheduleKind::DualPipeV => limits.refuse(
            true,
            "schedule=interleaved",
            "it has 1F1B and interleaved schedules only",
        ),
    }
    if d.stages.is_uniform() && job.model.mtp_layers == 0 {
        if d.vpp > 1 {
            let layers = job.model.layers / (d.pp * d.vpp);
            flags.push(Flag::value(
                "--num-layers-per-virtual-pipeline-stage",
                layers,
            ));
        }
    } else {
        let layout = layout(&d.stages.0, job.model.mtp_layers);
        flags.push(Flag::value("--pipeline-model-parallel-layout", layout));
    }
}

/// Pipeline layout such as `Et*9|t*10|t*11L`: embedding, decoder layers, MTP layers and loss of every virtual stage.
pub(crate) fn layout(stages: &[u64], mtp: u64) -> String {
    let last = stages.len() - 1;
    let stage = |(index, &layers): (usize, &u64)| {
        let mut text = String::new();
        if index == 0 {
            text.push('E');
        }
        text.push_str(&repeated('t', layers));
        if index == last {
            text.push_str(&repeated('m', mtp));
            text.push('L');
        }
        text
    };
    let parts: Vec<String> = stages.iter().enumerate().map(stage).collect();
    parts.join("|")
}

fn repeated(letter: char, count: u64) -> String {
    match count {
        0 => String::new(),
        1 => letter.to_string(),
        n => format!("{letter}*{n}"),
    }
}

fn batch(job: &Job<'_>, micro_batch: u64) -> Vec<Flag> {
    vec![
        Flag::value("--micro-batch-size", micro_batch),
        Flag::value("--global-batch-size", job.workload.global_batch),
        Flag::value("--seq-length", job.workload.seq_len),
    ]
}

fn states(job: &Job<'_>, limits: &mut Limits) -> Vec<Flag> {
    let d = job.decisions;
    let narrow = (d.optimizer_states).filter(|states| !states.completes_parameters());
    limits.refuse(
        narrow.is_some(),
        "optim_states=own",
        "its optimizer holds moments in 32 or 16 bits",
    );
    let mut flags = gradients(job, limits);
    let sharding = match d.zero {
        Zero::Z0 => return flags,
        Zero::Z1 => None,
        Zero::Z2 => Some("optim_grads"),
        Zero::Z3 => Some("optim_grads_params"),
    };
    flags.push(Flag::switch("--use-distributed-optimizer"));
    flags.extend(optimizer(job, limits));
    if d.dp_replicate > 1 {
        let flag = "--num-distributed-optimizer-instances";
        flags.push(Flag::value(flag, d.dp_replicate));
    }
    if let Some(sharding) = sharding {
        flags.push(Flag::switch("--use-megatron-fsdp"));
        flags.push(Flag::value("--data-parallel-sharding-strategy", sharding));
        flags.push(Flag::value("--ckpt-format", "fsdp_dtensor"));
    }
    limits.refuse(
        d.zero == Zero::Z3 && !d.reshard_after_forward,
        "reshard=on",
        "Megatron-FSDP frees parameters after forward; keeping them is ZeRO-2",
    );
    flags
}

/// Options for how the optimizer holds its states. Megatron's precision-aware Adam itself keeps
/// the 16 bits of master weights that parameters lack.
fn optimizer(job: &Job<'_>, limits: &mut Limits) -> Vec<Flag> {
    let Some(states) = job.decisions.optimizer_states else {
        return on_host(job, limits);
    };
    limits.refuse(
        job.decisions.zero >= Zero::Z2,
        "optim_states=own",
        "Megatron-FSDP holds master weights whole",
    );
    limits.refuse(
        states == OptimizerStates::SplitMaster && job.workload.precision == Precision::Fp8,
        "optim_states=own",
        "Megatron-LM holds master weights whole in 8-bit jobs",
    );
    let mut flags = vec![Flag::switch(PRECISION_AWARE)];
    if states == OptimizerStates::Bf16Moments {
        flags.extend(MOMENTS.map(|flag| Flag::value(flag, "bf16")));
    }
    // Gradients that are held in 16 bits are read as they are.
    if job.gradient_types().reduced != DType::F32 {
        flags.push(Flag::value("--main-grads-dtype", "bf16"));
    }
    flags
}

/// Options for optimizer states in host memory, which need the precision-aware optimizer.
fn on_host(job: &Job<'_>, limits: &mut Limits) -> Vec<Flag> {
    let d = job.decisions;
    let has = (d.zero == Zero::Z1).then_some(OffloadKind::Optimizer);
    limits.refuse_offload(d, has);
    limits.refuse_prefetch(d);
    let Some(offload) = d.offload else {
        return Vec::new();
    };
    vec![
        Flag::switch(OFFLOAD),
        Flag::value(OFFLOAD_FRACTION, offload.percent() as f64 / 100.0),
        Flag::switch(PRECISION_AWARE),
    ]
}

/// Layers whose saved activations lie in host memory.
fn activations(offload_layers: u64) -> Vec<Flag> {
    let layers = Some(offload_layers).filter(|&layers| layers > 0);
    layers
        .map(|layers| Flag::value(OFFLOAD_LAYERS, layers))
        .into_iter()
        .collect()
}

/// The types in which gradients are held and reduced.
fn gradients(job: &Job<'_>, limits: &mut Limits) -> Vec<Flag> {
    let precision = job.workload.precision;
    if precision == Precision::Fp32 {
        return Vec::new();
    }
    let types = GradientTypes::all(job.gradient_types().reduced);
    let why = "gradients are reduced in the type that they are held in";
    limits.gradient_types(job, types, why);
    let wide = types.held == DType::F32;
    let mut flags = Vec::new();
    if wide {
        flags.push(Flag::switch("--accumulate-allreduce-grads-in-fp32"));
    } else if precision != Precision::Fp16 {
        flags.push(Flag::switch("--grad-reduce-in-bf16"));
    }
    if matches!(job.decisions.zero, Zero::Z2 | Zero::Z3) {
        let flag = "--megatron-fsdp-main-grads-dtype";
        flags.push(Flag::value(flag, types.name()));
    }
    flags
}

/// Recomputation of parts of every layer.
fn selective(selection: Selection) -> Vec<Flag> {
    vec![
        Flag::value("--recompute-granularity", "selective"),
        Flag {
            name: "--recompute-modules".to_owned(),
            values: (selection.modules())
                .map(|of| of.megatron_name().to_owned())
                .collect(),
        },
    ]
}

fn recompute(recompute: Recompute, limits: &mut Limits) -> Vec<Flag> {
    let mut refused = |why: &str, instead: String| {
        let what = format!("recompute={}", recompute_name(recompute));
        limits.refuse_as(true, what, why, Some(("recompute", instead)));
        Vec::new()
    };
    let full = |method: &'static str, layers: u64| {
        vec![
            Flag::value("--recompute-granularity", "full"),
            Flag::value("--recompute-method", method),
            Flag::value("--recompute-num-layers", layers),
        ]
    };
    match recompute {
        Recompute::None | Recompute::Layers(0) => Vec::new(),
        Recompute::Selective => selective([RecomputeModule::CoreAttention].into_iter().collect()),
        Recompute::Modules(selection) => selective(selection),
        Recompute::Full => full("uniform", 1),
        Recompute::Layers(n) => full("block", n),
        Recompute::Falling(n) => refused(
            "it recomputes the same number of layers in every stage",
            format!("layers:{n}"),
        ),
        Recompute::SelectiveOps => refused(
            "it selects modules to recompute, not operators to keep",
            "selective".to_owned(),
        ),
    }
}

fn overlap(job: &Job<'_>, overlap: Overlap, limits: &mut Limits) -> Vec<Flag> {
    let d = job.decisions;
    let Overlap {
        grad_reduce,
        param_gather,
        tensor_parallel,
        pipeline,
        expert_parallel,
    } = overlap;
    let mut flags = Vec::new();
    // Where experts alone have replicas, their messages are predicted to overlap, whatever the plan says.
    let alone = d.dp() * d.cp == 1;
    let sends = !alone || job.model.moe.is_some() && d.edp() > 1;
    if sends && (grad_reduce || alone) {
        flags.push(Flag::switch("--overlap-grad-reduce"));
    }
    // Megatron-FSDP scales gradients as it sends them.
    if sends && d.zero <= Zero::Z1 && !job.assumes(Rewrite::ScaleGradients) {
        flags.push(Flag::switch("--ddp-average-in-collective"));
    }
    if sends && (param_gather || alone) && d.zero != Zero::Z0 {
        flags.push(Flag::switch("--overlap-param-gather"));
        let why = "--overlap-param-gather needs --overlap-grad-reduce";
        limits.refuse_overlap(!grad_reduce && !alone, "overlap=param", why);
    }
    if tensor_parallel && d.tp > 1 {
        flags.push(Flag::switch("--tp-comm-overlap"));
        limits.refuse_as(
            !d.sequence_parallel,
            "overlap=tp with sp=off",
            "--tp-comm-overlap needs --sequence-parallel",
            Some(("sp", "on".to_owned())),
        );
    }
    if d.pp > 1 && !pipeline {
        flags.push(Flag::switch("--no-overlap-p2p-communication"));
        limits.refuse_overlap(
            d.pp == 2 && d.vpp > 1,
            "overlap without pp, vpp above 1 and pp=2",
            "interleaving two ranks needs overlapped sends and receives",
        );
    }
    if expert_parallel && d.ep > 1 {
        flags.push(Flag::switch(EXPERT_OVERLAP));
        let lacks = experts_cannot_overlap(d.schedule, d.pp, d.recompute, d.offload_layers);
        let why = format!("{EXPERT_OVERLAP} needs {}", lacks.unwrap_or_default());
        limits.refuse_overlap(lacks.is_some(), "overlap=ep", why);
        let gathers = d.dispatcher.unwrap_or(job.runtime.dispatcher) == Dispatcher::AllGather;
        limits.refuse_as(
            gathers,
            "overlap=ep with dispatcher=all_gather",
            format!("{EXPERT_OVERLAP} needs {DISPATCHER} alltoall or flex"),
            Some(("dispatcher", Dispatcher::AllToAll.name().to_owned())),
        );
        let wide = job.workload.precision == Precision::Fp32;
        limits.refuse_overlap(
            wide || job.model.mtp_layers > MAX_OVERLAPPED_MTP,
            "overlap=ep",
            match wide {
                true => format!("{EXPERT_OVERLAP} needs --bf16 or --fp16"),
                false => format!("{EXPERT_OVERLAP} takes at most one multi-token prediction layer"),
            },
        );
    }
    limits.note(
        d.pp > 1 && pipeline && d.vpp == 1 && job.runtime.space.blocking_schedules.is_empty(),
        "Megatron-LM's 1F1B does not overlap sends and receives, whatever --overlap-p2p says",
    );
    flags
}
