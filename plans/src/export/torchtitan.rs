//! torchtitan: the TOML of 0.2, and the Python configuration functions of 0.3 and of main, which
//! counts the batch in tokens.

use spec::model::{Family, ModelConfig};
use spec::{AxisOrder, CpKind, Precision, ScheduleKind, Zero};

use super::launch::{Program, Starter};
use super::{ExportedFile, Job, Limits, heading};
use crate::config::{Node, Value, write};
use crate::grammar::{order_name, recompute_name};
use crate::strategy::{Decisions, Recompute};

/// Name of the 0.2 file.
const TOML: &str = "train.toml";
/// Module of the Python dialects.
const MODULE: &str = "vescale_plan_config";

/// The three dialects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edition {
    Toml02,
    Python03,
    PythonMain,
}

/// What starts torchtitan with the file.
pub(crate) fn program(edition: Edition) -> Program {
    let (setup, arguments) = match edition {
        Edition::Toml02 => (
            Vec::new(),
            format!("-m torchtitan.train --job.config_file \"$HERE/{TOML}\" \"$@\""),
        ),
        Edition::Python03 | Edition::PythonMain => (
            vec!["export PYTHONPATH=\"$HERE${PYTHONPATH:+:$PYTHONPATH}\"".to_owned()],
            format!("-m torchtitan.train --module {MODULE} --config plan \"$@\""),
        ),
    };
    Program {
        setup,
        starter: Starter::Torchrun,
        arguments,
    }
}

pub(crate) fn files(job: &Job<'_>, edition: Edition, limits: &mut Limits) -> Vec<ExportedFile> {
    refuse(job, edition, limits);
    let (name, text) = match edition {
        Edition::Toml02 => (TOML.to_owned(), toml(job, limits)),
        Edition::Python03 | Edition::PythonMain => {
            (format!("{MODULE}.py"), python(job, edition, limits))
        }
    };
    vec![ExportedFile {
        name,
        text,
        executable: false,
    }]
}

/// What no edition, or not this one, can express.
fn refuse(job: &Job<'_>, edition: Edition, limits: &mut Limits) {
    let d = job.decisions;
    states(d, edition, limits);
    overlap(d, limits);
    pipeline(d, limits);
    let kv = job.model.attention.kv_heads();
    limits.refuse(
        !kv.is_multiple_of(d.tp),
        format!("tp={}", d.tp),
        format!("tp must divide the {kv} key/value heads"),
        Some(("tp", common_divisor(kv, d.tp).to_string())),
    );
    limits.refuse(
        d.cp > 1 && d.cp_kind != CpKind::AllGather,
        format!("cp_kind={}", d.cp_kind.name()),
        "training gathers keys and values, whatever context_parallel_rotate_method says",
        Some(("cp_kind", CpKind::AllGather.name().to_owned())),
    );
    limits.refuse(
        d.tp > 1 && !d.sequence_parallel && edition == Edition::Toml02,
        "sp=off",
        "tensor parallelism always comes with sequence parallelism",
        Some(("sp", "on".to_owned())),
    );
    limits.refuse(
        d.pp > 1 && d.dp() > 1 && d.axis_order != AxisOrder::TP_CP_DP_PP,
        format!("order={}", order_name(d.axis_order)),
        "its mesh is pp, dp_replicate, dp_shard, cp, tp, outermost first",
        Some(("order", order_name(AxisOrder::TP_CP_DP_PP))),
    );
    let instead = match d.recompute {
        Recompute::None | Recompute::Full | Recompute::SelectiveOps | Recompute::Layers(0) => None,
        Recompute::Selective => Some("selective_ops"),
        Recompute::Layers(_) => Some("full"),
    };
    limits.refuse(
        instead.is_some(),
        format!("recompute={}", recompute_name(d.recompute)),
        "it recomputes whole layers, or all but chosen operators",
        instead.map(|mode| ("recompute", mode.to_owned())),
    );
    limits.refuse(
        job.workload.precision == Precision::Fp16,
        "precision fp16",
        "it trains in bfloat16, float32 and float8",
        None,
    );
    limits.refuse(
        job.model.mtp_layers > 0 && (d.pp > 1 || edition == Edition::Toml02),
        format!("model {}", job.model.name),
        "its pipeline does not place multi-token-prediction layers",
        None,
    );
    experts(job, edition, limits);
}

fn states(d: &Decisions, edition: Edition, limits: &mut Limits) {
    let sharing = d.dp_shard * d.cp;
    let zero = format!("zero={}", u8::from(d.zero));
    limits.refuse(
        matches!(d.zero, Zero::Z1 | Zero::Z2) && sharing > 1,
        &zero,
        "fully_shard shards parameters, gradients and states together",
        Some(("zero", "3".to_owned())),
    );
    limits.refuse(
        d.zero == Zero::Z0 && d.cp > 1,
        &zero,
        "context-parallel ranks always shard the states",
        Some(("zero", "3".to_owned())),
    );
    let several = d.tp * d.pp > 1;
    limits.refuse(
        edition == Edition::Toml02 && sharing == 1 && d.dp_replicate > 1 && several,
        format!("{zero} with tp={}, pp={}", d.tp, d.pp),
        "replicated data parallelism stands alone in 0.2",
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
    let lacks = [
        (
            !o.grad_reduce && d.dp() * d.cp > 1,
            "grad",
            "gradient reduction",
        ),
        (
            !o.param_gather && d.zero != Zero::Z0,
            "param",
            "parameter gathering",
        ),
        (!o.pipeline && d.pp > 1, "pp", "sending and receiving"),
    ];
    for (lacks, name, what) in lacks {
        limits.refuse(
            lacks,
            format!("overlap without {name}"),
            format!("{what} beside compute cannot be switched off"),
            Some(("overlap", all.to_owned())),
        );
    }
}

fn pipeline(d: &Decisions, limits: &mut Limits) {
    limits.refuse(
        d.pp > 1 && d.schedule == ScheduleKind::ZbH1,
        "schedule=zb-h1",
        "its zero-bubble schedules have two stages per rank or more",
        Some(("schedule", "1f1b".to_owned())),
    );
    let inner = d.stages.0.get(1..d.stages.0.len().saturating_sub(1));
    limits.refuse(
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
    // Without expert parallelism the experts are split as the dense layers are.
    let ok = match (edition, d.ep) {
        (_, 1) => d.etp == d.tp,
        (Edition::Toml02, _) => d.etp == d.tp || d.etp == 1,
        (Edition::Python03 | Edition::PythonMain, _) => d.etp == 1,
    };
    let instead = if d.ep == 1 { d.tp } else { 1 };
    limits.refuse(
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
    limits.refuse(
        !ranks.is_multiple_of(d.ep * d.etp),
        format!("ep={}", d.ep),
        format!("ep·etp must divide dp_shard·cp·tp = {ranks}"),
        Some(("ep", common_divisor(ranks, d.ep).to_string())),
    );
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// The `parallelism` section; only the names that editions share differ in presence.
fn parallelism(job: &Job<'_>, edition: Edition) -> Vec<(&'static str, Value)> {
    let d = job.decisions;
    let mut keys: Vec<(&str, Value)> = vec![
        ("data_parallel_replicate_degree", d.dp_replicate.into()),
        ("data_parallel_shard_degree", d.dp_shard.into()),
        ("tensor_parallel_degree", d.tp.into()),
        ("context_parallel_degree", d.cp.into()),
        ("pipeline_parallel_degree", d.pp.into()),
        ("expert_parallel_degree", d.ep.into()),
    ];
    if d.zero == Zero::Z3 {
        let policy = if d.reshard_after_forward {
            "always"
        } else {
            "never"
        };
        keys.push(("fsdp_reshard_after_forward", policy.into()));
    }
    match edition {
        Edition::Toml02 => {
            keys.push(("enable_async_tensor_parallel", async_tp(d).into()));
            keys.push(("expert_tensor_parallel_degree", d.etp.into()));
        }
        Edition::Python03 | Edition::PythonMain => {
            keys.push((
                "enable_sequence_parallel",
                (d.sequence_parallel || d.tp == 1).into(),
            ));
        }
    }
    if d.pp > 1 {
        let schedule = schedule_name(d.schedule);
        keys.push(("pipeline_parallel_schedule", schedule.into()));
        match edition {
            Edition::Toml02 | Edition::Python03 => {
                keys.push(("pipeline_parallel_microbatch_size", d.micro_batch.into()));
            }
            Edition::PythonMain => {
                keys.push(("num_pp_microbatches", d.num_micro_batches.into()));
            }
        }
        let parts = stage_modules(&d.stages.0, edition);
        keys.push(("module_fqns_per_model_part", parts.into()));
    }
    keys
}

/// torchtitan's (PyTorch's) name of a schedule.
pub(crate) fn schedule_name(schedule: ScheduleKind) -> &'static str {
    match schedule {
        ScheduleKind::OneFOneB | ScheduleKind::ZbH1 => "1F1B",
        ScheduleKind::Interleaved => "Interleaved1F1B",
        ScheduleKind::GPipe => "GPipe",
        ScheduleKind::ZbV => "ZBVZeroBubble",
        ScheduleKind::DualPipeV => "DualPipeV",
    }
}

/// Modules of every virtual stage: the one form that says any partition.
fn stage_modules(stages: &[u64], edition: Edition) -> Vec<Vec<String>> {
    let head = match edition {
        Edition::Toml02 => "output",
        Edition::Python03 | Edition::PythonMain => "lm_head",
    };
    let mut first = 0;
    let mut parts: Vec<Vec<String>> = Vec::new();
    for &layers in stages {
        let names = (first..first + layers).map(|layer| format!("layers.{layer}"));
        parts.push(names.collect());
        first += layers;
    }
    if let Some(part) = parts.first_mut() {
        part.insert(0, "tok_embeddings".to_owned());
    }
    if let Some(part) = parts.last_mut() {
        part.extend(["norm".to_owned(), head.to_owned()]);
    }
    parts
}

fn async_tp(d: &Decisions) -> bool {
    d.overlap.tensor_parallel && d.tp > 1
}

/// Batch, sequence and precision.
fn training(job: &Job<'_>, edition: Edition) -> Vec<(&'static str, Value)> {
    let (d, w) = (job.decisions, job.workload);
    // Under pipeline parallelism a rank's batch is all its micro-batches; else they accumulate.
    let local = if d.pp > 1 {
        d.micro_batch * d.num_micro_batches
    } else {
        d.micro_batch
    };
    let mut keys: Vec<(&str, Value)> = match edition {
        Edition::Toml02 | Edition::Python03 => vec![
            ("local_batch_size", local.into()),
            ("global_batch_size", w.global_batch.into()),
            ("seq_len", w.seq_len.into()),
        ],
        Edition::PythonMain => vec![
            (
                "num_tokens_per_microbatch_per_dp_rank",
                (d.micro_batch * w.seq_len).into(),
            ),
            ("num_tokens_per_train_step", w.tokens_per_step().into()),
            ("max_context_length", w.seq_len.into()),
        ],
    };
    let compute = match w.precision {
        Precision::Fp32 => "float32",
        Precision::Bf16 | Precision::Fp8 | Precision::Fp16 => "bfloat16",
    };
    keys.push(("dtype", "float32".into()));
    keys.push(("mixed_precision_param", compute.into()));
    keys.push(("mixed_precision_reduce", "float32".into()));
    if edition != Edition::Toml02 {
        // CUDA graphs exclude pipeline parallelism and most dispatchers of expert parallelism.
        keys.push(("disable_cuda_graphs", (d.pp > 1 || d.ep > 1).into()));
    }
    keys
}

fn toml(job: &Job<'_>, limits: &mut Limits) -> String {
    let mut root = Node::table();
    let (module, flavor) = match registered(job.model) {
        Some(entry) => (entry.module, entry.flavor.to_owned()),
        None => (family_module(job.model), job.model.name.clone()),
    };
    limits.note(
        registered(job.model).is_none_or(|e| !e.in_02),
        format!("register the model as flavor `{flavor}` of torchtitan's `{module}`"),
    );
    root.set("model.name", module);
    root.set("model.flavor", flavor);
    if job.workload.precision == Precision::Fp8 {
        root.set("model.converters", vec!["quantize.linear.float8"]);
        let filter: Vec<String> = vec!["output".to_owned()];
        root.set("quantize.linear.float8.recipe_name", "tensorwise");
        root.set("quantize.linear.float8.filter_fqns", filter);
    }
    for (key, value) in training(job, Edition::Toml02) {
        root.set(&format!("training.{key}"), value);
    }
    for (key, value) in parallelism(job, Edition::Toml02) {
        root.set(&format!("parallelism.{key}"), value);
    }
    let mode = match job.decisions.recompute {
        Recompute::None | Recompute::Layers(0) => "none",
        Recompute::SelectiveOps => "selective",
        Recompute::Full | Recompute::Selective | Recompute::Layers(_) => "full",
    };
    root.set("activation_checkpoint.mode", mode);
    if job.decisions.recompute == Recompute::SelectiveOps {
        root.set("activation_checkpoint.selective_ac_option", "op");
    }
    root.set("compile.enable", compiles(job));
    format!("# {}\n{}", heading(job), write::toml(&root))
}

fn compiles(job: &Job<'_>) -> bool {
    job.runtime.contains("compile") || async_tp(job.decisions)
}

fn python(job: &Job<'_>, edition: Edition, limits: &mut Limits) -> String {
    let entry = registered(job.model).filter(|e| e.function.is_some());
    let function = entry.and_then(|e| e.function);
    let module = entry.map_or_else(|| family_module(job.model), |e| e.module);
    let fp8 = job.workload.precision == Precision::Fp8;
    let mut text = format!("\"\"\"{}.\"\"\"\n\n", heading(job));
    if fp8 {
        text.push_str("from torchtitan.components.quantization import Float8LinearConverter\n");
    }
    text.push_str("from torchtitan.config import CompileConfig, ParallelismConfig\n");
    text.push_str("from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC\n");
    if fp8 {
        text.push_str(&format!(
            "from torchtitan.models.{module} import model_registry\n"
        ));
    }
    if let Some(function) = function {
        text.push_str(&format!(
            "from torchtitan.models.{module}.config_registry import {function}\n"
        ));
    }
    text.push_str("from torchtitan.trainer import Trainer\n\n\n");
    text.push_str("def apply(config: Trainer.Config) -> Trainer.Config:\n");
    text.push_str("    \"\"\"Sets what the plan decides.\"\"\"\n");
    if fp8 {
        let flavor = entry.map_or(job.model.name.as_str(), |e| e.flavor);
        text.push_str(&format!(
            "    converters = [Float8LinearConverter.Config(model_compile_enabled={})]\n    \
             config.model_spec = model_registry(\"{flavor}\", converters=converters)\n",
            if compiles(job) { "True" } else { "False" }
        ));
    }
    for (key, value) in training(job, edition) {
        let value = write::python(&Node::made(value));
        text.push_str(&format!("    config.training.{key} = {value}\n"));
    }
    text.push_str("    config.parallelism = ParallelismConfig(\n");
    for (key, value) in parallelism(job, edition) {
        let value = write::python(&Node::made(value)).replace('\n', "\n        ");
        text.push_str(&format!("        {key}={value},\n"));
    }
    text.push_str("    )\n");
    let recompute = match job.decisions.recompute {
        Recompute::None | Recompute::Layers(0) => "None",
        Recompute::SelectiveOps => "SelectiveAC.Config()",
        Recompute::Full | Recompute::Selective | Recompute::Layers(_) => "FullAC.Config()",
    };
    text.push_str(&format!("    config.activation_checkpoint = {recompute}\n"));
    let flag = |on: bool| if on { "True" } else { "False" };
    text.push_str(&format!(
        "    config.compile = CompileConfig(enable={}, enable_async_tensor_parallel={})\n    \
         return config\n",
        flag(compiles(job)),
        flag(async_tp(job.decisions)),
    ));
    match function {
        Some(function) => text.push_str(&format!(
            "\n\ndef plan() -> Trainer.Config:\n    \"\"\"The model's configuration under the plan.\"\"\"\n    \
             return apply({function}())\n"
        )),
        None => limits.note(
            true,
            format!(
                "torchtitan has no configuration of {}: add to {MODULE}.py a function `plan` that returns yours, passed through `apply`",
                job.model.name
            ),
        ),
    }
    text
}

/// A model that torchtitan's registries hold.
#[derive(Clone, Copy)]
struct Registered {
    module: &'static str,
    flavor: &'static str,
    /// Whether 0.2 has the flavor.
    in_02: bool,
    /// The configuration function of 0.3 and main.
    function: Option<&'static str>,
}

/// Registries of torchtitan 0.2.2 (`models/*/__init__.py`) and 0.3.0 (`models/*/config_registry.py`),
/// by family, layers and width.
fn registered(model: &ModelConfig) -> Option<Registered> {
    let entry = |module, flavor, function| Registered {
        module,
        flavor,
        in_02: true,
        function,
    };
    Some(match (model.family, model.layers, model.hidden) {
        (Family::Llama, 32, 4096) if model.vocab == 128_256 => {
            entry("llama3", "8B", Some("llama3_8b"))
        }
        (Family::Llama, 80, 8192) if model.vocab == 128_256 => {
            entry("llama3", "70B", Some("llama3_70b"))
        }
        (Family::Llama, 126, 16384) => entry("llama3", "405B", Some("llama3_405b")),
        (Family::Llama, 36, 4096) if model.vocab == 151_936 => entry("qwen3", "8B", None),
        (Family::Llama, 64, 5120) if model.vocab == 151_936 && model.attention.kv_heads() == 8 => {
            entry("qwen3", "32B", Some("qwen3_32b"))
        }
        (Family::QwenMoe, 48, 2048) => entry("qwen3", "30B-A3B", Some("qwen3_30b_a3b")),
        (Family::QwenMoe, 94, 4096) => entry("qwen3", "235B-A22B", None),
        (Family::DeepSeek, 27, 2048) => entry("deepseek_v3", "16B", Some("deepseek_v3_16b")),
        (Family::DeepSeek, 60, 5120) => entry("deepseek_v3", "236B", None),
        (Family::DeepSeek, 61, 7168) => entry("deepseek_v3", "671B", Some("deepseek_v3_671b")),
        (Family::GptOss, 24, _) => entry("gpt_oss", "20b", Some("gpt_oss_20b")),
        (Family::GptOss, 36, _) => entry("gpt_oss", "120b", Some("gpt_oss_120b")),
        _ => return None,
    })
}

/// The torchtitan model nearest to a family.
fn family_module(model: &ModelConfig) -> &'static str {
    match model.family {
        Family::QwenMoe => "qwen3",
        Family::DeepSeek => "deepseek_v3",
        Family::GptOss => "gpt_oss",
        _ => "llama3",
    }
}
