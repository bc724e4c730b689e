//! torchtitan: the TOML of 0.2, and the Python configuration functions of 0.3 and of main, which
//! counts the batch in tokens.

mod edition;
mod limits;
mod registry;

use catalog::{Precision, ScheduleKind, Zero};

pub(crate) use self::edition::Edition;

use self::limits::refuse;
use self::registry::{Registered, family_module, registered};
use super::job::{ExportedFile, Job, heading, python_heading};
use super::launch::{Program, Starter};
use super::refusal::Limits;
use crate::config::{Node, Value, escape, write};
use plans::decisions::{Decisions, Recompute};

/// Name of the 0.2 file.
const TOML: &str = "train.toml";
/// Module of the Python dialects.
const MODULE: &str = "vescale_plan_config";

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
        // Without any the export is refused.
        None => (
            family_module(job.model).unwrap_or_default(),
            job.model.name.clone(),
        ),
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
    let mut text = python_heading(job);
    text.push_str(&imports(job, entry));
    text.push_str("def apply(config: Trainer.Config) -> Trainer.Config:\n");
    text.push_str("    \"\"\"Sets what the plan decides.\"\"\"\n");
    if job.workload.precision == Precision::Fp8 {
        let flavor = entry.map_or(job.model.name.as_str(), |e| e.flavor);
        text.push_str(&format!(
            "    converters = [Float8LinearConverter.Config(model_compile_enabled={})]\n    \
             config.model_spec = model_registry({}, converters=converters)\n",
            boolean(compiles(job)),
            escape::quoted(flavor)
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
    text.push_str(&format!(
        "    config.activation_checkpoint = {recompute}\n    \
         config.compile = CompileConfig(enable={}, enable_async_tensor_parallel={})\n    \
         return config\n",
        boolean(compiles(job)),
        boolean(async_tp(job.decisions)),
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

/// The import statements of the Python file; `entry` is the model's, if torchtitan configures it.
fn imports(job: &Job<'_>, entry: Option<Registered>) -> String {
    let module = entry.map_or_else(
        || family_module(job.model).unwrap_or_default(),
        |e| e.module,
    );
    let fp8 = job.workload.precision == Precision::Fp8;
    let mut text = String::new();
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
    if let Some(function) = entry.and_then(|e| e.function) {
        text.push_str(&format!(
            "from torchtitan.models.{module}.config_registry import {function}\n"
        ));
    }
    text.push_str("from torchtitan.trainer import Trainer\n\n\n");
    text
}

fn boolean(on: bool) -> &'static str {
    if on { "True" } else { "False" }
}
