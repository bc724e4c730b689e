//! Export to torchtitan: the TOML of 0.2, and the Python configuration functions of 0.3 and of main, which counts the
//! batch in tokens.

mod edition;
mod limits;
mod model;
mod parts;
mod registry;
mod rewrites;

use catalog::model::{Family, ModelConfig};
use catalog::runtime::Rewrite;
use catalog::{CudaGraphs, Dispatcher, Overlap, Precision, ScheduleKind, Zero};

pub(crate) use self::edition::Edition;

use self::limits::refuse;
use self::model::{Chosen, choose};
use super::graphs;
use super::inputs::Input;
use super::job::{Draft, Heading, Job};
use super::launch::Program;
use super::refusal::Limits;
use super::stance::unmet;
use crate::config::{Node, Value, escape, write};
use plans::decisions::{Decisions, Recompute};

/// Models with this name in an edition's registries, of one module if it is given.
pub(crate) fn flavors(edition: Edition, module: Option<&str>, name: &str) -> Vec<ModelConfig> {
    let all = registry::flavors(edition).into_iter();
    all.filter(|flavor| flavor.name == Some(name) && module.is_none_or(|m| m == flavor.module))
        .map(|flavor| flavor.model)
        .collect()
}

/// torchtitan's modules with text decoders that this program knows.
pub(crate) const DECODERS: [&str; 4] = ["llama3", "qwen3", "deepseek_v3", "gpt_oss"];

/// Name of the 0.2 file.
const TOML: &str = "train.toml";
/// Name of the Python module that is written.
const MODULE: &str = "vescale_plan_config";

/// How torchtitan is started with the file.
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
    Program::torchrun(setup, arguments)
}

pub(crate) fn files(job: &Job<'_>, edition: Edition, limits: &mut Limits) -> Vec<Draft> {
    refuse(job, edition, limits);
    limits.differs(unmet(
        |rewrite| rewrites::stance(edition, rewrite, job),
        job,
    ));
    limits.note(
        job.model.moe.is_some_and(|moe| !moe.router_correction_bias),
        "torchtitan balances experts by a bias of the router (load_balance_coeff 0.001), which the model does not have",
    );
    // If there is none, the export is refused.
    let Some(chosen) = choose(job.model, edition, limits) else {
        return Vec::new();
    };
    // Its readers of the hub's weights know Llama's and Qwen3's names.
    let named = matches!(job.model.family, Family::Llama | Family::QwenMoe);
    let unread = job.model.attention.qkv_bias || !named;
    limits.note(
        chosen.flavor.name.is_none() && unread,
        "torchtitan trains this model from new weights: it has no reader of the hub's weights for it",
    );
    let (name, heading, text) = match edition {
        Edition::Toml02 => (TOML.to_owned(), Heading::Hash, toml(job, &chosen, limits)),
        Edition::Python03 | Edition::PythonMain => (
            format!("{MODULE}.py"),
            Heading::Docstring,
            python(job, &chosen, edition, limits),
        ),
    };
    vec![Draft::new(&name, heading, text)]
}

/// The `parallelism` section, with names that are the same in all editions.
fn parallelism(job: &Job<'_>, edition: Edition) -> Vec<(&'static str, Value)> {
    let Decisions {
        tp,
        pp,
        cp,
        // Refused but for one value.
        cp_kind: _,
        axis_order: _,
        ep,
        dp_shard,
        dp_replicate,
        // Written with sharding, with tensor parallelism, with the pipeline and with training.
        zero: _,
        reshard_after_forward: _,
        sequence_parallel: _,
        etp: _,
        vpp: _,
        micro_batch: _,
        num_micro_batches: _,
        schedule: _,
        stages: _,
        // Written with activation checkpointing.
        recompute: _,
        overlap:
            Overlap {
                // FSDP's overlaps, which are always on: refused where the plan has them off.
                grad_reduce: _,
                param_gather: _,
                pipeline: _,
                // In 0.3 and main, written with compilation.
                tensor_parallel: _,
                // Refused.
                expert_parallel: _,
            },
        // Refused.
        gradients: _,
        optimizer_states: _,
        offload_layers: _,
        prefetch: _,
        // In `training`, or the model.
        offload: _,
        graphs: _,
        fp8_recipe: _,
        dispatcher: _,
    } = job.decisions;
    let mut keys: Vec<(&str, Value)> = vec![
        ("data_parallel_replicate_degree", (*dp_replicate).into()),
        ("data_parallel_shard_degree", (*dp_shard).into()),
        ("tensor_parallel_degree", (*tp).into()),
        ("context_parallel_degree", (*cp).into()),
        ("pipeline_parallel_degree", (*pp).into()),
        ("expert_parallel_degree", (*ep).into()),
    ];
    keys.extend(sharding(job.decisions));
    keys.extend(tensor(job.decisions, edition));
    let backend = edition == Edition::Toml02 && *ep > 1;
    keys.extend(backend.then(|| ("expert_parallel_comm_backend", comm_backend(job).into())));
    keys.extend(pipeline(job.decisions, edition));
    keys
}

/// The schedule, the micro-batches and the parts of a pipeline.
fn pipeline(d: &Decisions, edition: Edition) -> Vec<(&'static str, Value)> {
    if d.pp == 1 {
        return Vec::new();
    }
    let (key, size) = match edition {
        Edition::Toml02 | Edition::Python03 => ("pipeline_parallel_microbatch_size", d.micro_batch),
        Edition::PythonMain => ("num_pp_microbatches", d.num_micro_batches),
    };
    let parts = stage_modules(&d.stages.0, edition);
    let schedule = schedule_name(d.schedule);
    vec![
        ("pipeline_parallel_schedule", schedule.into()),
        (key, size.into()),
        ("module_fqns_per_model_part", parts.into()),
    ]
}

fn sharding(d: &Decisions) -> Option<(&'static str, Value)> {
    let policy = ["never", "always"][usize::from(d.reshard_after_forward)];
    (d.zero == Zero::Z3).then(|| ("fsdp_reshard_after_forward", policy.into()))
}

/// Tensor-parallel settings, which differ between editions.
fn tensor(d: &Decisions, edition: Edition) -> Vec<(&'static str, Value)> {
    match edition {
        Edition::Toml02 => vec![
            ("enable_async_tensor_parallel", async_tp(d).into()),
            ("expert_tensor_parallel_degree", d.etp.into()),
        ],
        Edition::Python03 | Edition::PythonMain => {
            let sharded = d.sequence_parallel || d.tp == 1;
            vec![("enable_sequence_parallel", sharded.into())]
        }
    }
}

/// The name of a schedule in torchtitan and PyTorch.
pub(crate) fn schedule_name(schedule: ScheduleKind) -> &'static str {
    match schedule {
        ScheduleKind::OneFOneB | ScheduleKind::ZbH1 => "1F1B",
        ScheduleKind::Interleaved => "Interleaved1F1B",
        ScheduleKind::GPipe => "GPipe",
        ScheduleKind::ZbV => "ZBVZeroBubble",
        ScheduleKind::DualPipeV => "DualPipeV",
    }
}

/// Module names of every virtual stage, the one form that can describe any partition.
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

/// What torchtitan calls the plan's dispatcher of tokens.
pub(crate) fn comm_backend(job: &Job<'_>) -> &'static str {
    match job.decisions.dispatcher.unwrap_or(job.runtime.dispatcher) {
        Dispatcher::DeepEp => "deepep",
        Dispatcher::HybridEp => "hybridep",
        // All-gather is refused.
        Dispatcher::AllToAll | Dispatcher::AllGather => "standard",
    }
}

/// The `training` section: batch, sequence and precision.
fn training(job: &Job<'_>, edition: Edition) -> Vec<(&'static str, Value)> {
    let (d, w) = (job.decisions, job.workload);
    // Under pipeline parallelism the local batch includes all micro-batches; otherwise they accumulate.
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
    if d.offload.is_some() {
        keys.push(("enable_cpu_offload", true.into()));
    }
    keys.push(("dtype", "float32".into()));
    keys.push(("mixed_precision_param", job.dtype().into()));
    // The only value that it takes.
    keys.push(("mixed_precision_reduce", "float32".into()));
    if edition != Edition::Toml02 {
        let captures = graphs::asked(job) == CudaGraphs::Step;
        keys.push(("disable_cuda_graphs", (!captures).into()));
    }
    keys
}

fn toml(job: &Job<'_>, chosen: &Chosen, limits: &mut Limits) -> String {
    let mut root = Node::table();
    root.set("model.name", chosen.flavor.module);
    // Every model that 0.2 takes is in a registry.
    root.set("model.flavor", chosen.flavor.name.unwrap_or_default());
    let (tokenizer, data) = inputs(job, limits);
    root.set("model.hf_assets_path", tokenizer);
    if job.workload.precision == Precision::Fp8 {
        root.set("model.converters", vec!["quantize.linear.float8"]);
        let filter: Vec<String> = vec!["output".to_owned()];
        root.set(RECIPE, job.fp8_recipe().name());
        root.set("quantize.linear.float8.filter_fqns", filter);
    }
    root.set("training.dataset", data);
    for (key, value) in training(job, Edition::Toml02) {
        root.set(&format!("training.{key}"), value);
    }
    for (key, value) in parallelism(job, Edition::Toml02) {
        root.set(&format!("parallelism.{key}"), value);
    }
    let (mode, _) = checkpoints(job.decisions.recompute);
    root.set("activation_checkpoint.mode", mode);
    if job.decisions.recompute == Recompute::SelectiveOps {
        root.set("activation_checkpoint.selective_ac_option", "op");
    }
    root.set("compile.enable", compiles(job));
    root.set("compile.components", compiled(job));
    write::toml(&root)
}

/// What is recomputed: its name in 0.2, and its configuration in Python.
fn checkpoints(recompute: Recompute) -> (&'static str, &'static str) {
    match recompute {
        Recompute::None | Recompute::Layers(0) => ("none", "None"),
        Recompute::SelectiveOps => ("selective", "SelectiveAC.Config()"),
        Recompute::Full
        | Recompute::Selective
        | Recompute::Modules(_)
        | Recompute::Layers(_)
        | Recompute::Falling(_) => ("full", "FullAC.Config()"),
    }
}

/// Tokenizer and dataset.
fn inputs(job: &Job<'_>, limits: &mut Limits) -> (String, String) {
    let tokenizer = "folder of the tokenizer (scripts/download_hf_assets.py)";
    let data = "dataset, by its name in torchtitan/hf_datasets/text_datasets.py";
    (
        limits.input_or_placeholder(&job.inputs, Input::Tokenizer, tokenizer),
        limits.input_or_placeholder(&job.inputs, Input::Data, data),
    )
}

/// The components to compile: the model, and the loss if the prediction assumed it fused.
fn compiled(job: &Job<'_>) -> Vec<&'static str> {
    if job.assumes(Rewrite::FuseCrossEntropy) {
        vec!["model", "loss"]
    } else {
        vec!["model"]
    }
}

fn compiles(job: &Job<'_>) -> bool {
    job.assumes(Rewrite::FusePointwise) || async_tp(job.decisions)
}

fn python(job: &Job<'_>, chosen: &Chosen, edition: Edition, limits: &mut Limits) -> String {
    let mut text = imports(job, chosen);
    text.push_str("def apply(config: Trainer.Config) -> Trainer.Config:\n");
    text.push_str("    \"\"\"Sets what the plan decides.\"\"\"\n");
    let (tokenizer, data) = inputs(job, limits);
    text.push_str(&format!(
        "    config.hf_assets_path = {}\n    config.dataloader.dataset = {}\n",
        escape::quoted(&tokenizer),
        escape::quoted(&data)
    ));
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
    let (_, recompute) = checkpoints(job.decisions.recompute);
    text.push_str(&format!(
        "    config.activation_checkpoint = {recompute}\n    \
         config.compile = CompileConfig(enable={}, enable_async_tensor_parallel={}, components={})\n    \
         return config\n\n\n",
        boolean(compiles(job)),
        boolean(async_tp(job.decisions)),
        write::python(&Node::made(compiled(job))),
    ));
    if chosen.flavor.name.is_none() {
        let length = job.workload.seq_len.max(job.model.max_position);
        text.push_str(&parts::source(
            &job.model.name,
            &chosen.flavor,
            edition,
            length,
            comm_backend(job),
        ));
    }
    text.push_str(&plan(job, chosen));
    text
}

/// The key of 0.2 that names the recipe of 8-bit products.
pub(crate) const RECIPE: &str = "quantize.linear.float8.recipe_name";

/// Python source of the function `plan()`, which torchtitan calls for the configuration of the run.
fn plan(job: &Job<'_>, chosen: &Chosen) -> String {
    let flavor = &chosen.flavor;
    let fp8 = job.workload.precision == Precision::Fp8;
    let mut text = String::new();
    if !chosen.set.is_empty() {
        text.push_str(EVERY);
    }
    text.push_str(&format!(
        "def plan() -> Trainer.Config:\n    \"\"\"The model's configuration under the plan.\"\"\"\n    config = {}()\n",
        flavor.function
    ));
    if fp8 {
        let compiled = boolean(compiles(job));
        text.push_str(&format!(
            "    converters = [Float8LinearConverter.Config(model_compile_enabled={compiled})]\n"
        ));
    }
    match flavor.name {
        Some(name) => {
            let mut arguments = escape::quoted(name);
            if chosen.mtp_layers > 0 {
                arguments.push_str(&format!(", num_mtp_layers={}", chosen.mtp_layers));
            }
            if job.decisions.ep > 1 {
                arguments.push_str(&format!(", moe_comm_backend=\"{}\"", comm_backend(job)));
            }
            if fp8 {
                arguments.push_str(", converters=converters");
            }
            text.push_str(&format!(
                "    config.model_spec = model_registry({arguments})\n"
            ));
        }
        None => {
            let name = escape::quoted(&job.model.name);
            text.push_str("    model = _decoder()\n");
            if fp8 {
                text.push_str(
                    "    for converter in converters:\n        model = converter.build().convert(model)\n",
                );
            }
            text.push_str(&format!(
                "    config.model_spec = dataclasses.replace(config.model_spec, flavor={name}, model=model)\n"
            ));
        }
    }
    if chosen.mtp_layers > 0 {
        text.push_str(
            "    config.loss = MTPLoss.Config(global_vocab_size=config.model_spec.model.vocab_size)\n",
        );
    }
    for (kind, field, value) in &chosen.set {
        let value = write::python(&Node::made(*value));
        text.push_str(&format!(
            "    for part in every({kind}, config.model_spec.model):\n        part.{field} = {value}\n"
        ));
    }
    text.push_str("    return apply(config)\n");
    text
}

/// Python helper that finds configurations of one class within another.
const EVERY: &str = "def every(kind, config):\n    \
     \"\"\"Every configuration of one kind within another.\"\"\"\n    \
     if isinstance(config, kind):\n        yield config\n    \
     if dataclasses.is_dataclass(config):\n        \
     for field in dataclasses.fields(config):\n            \
     yield from every(kind, getattr(config, field.name))\n    \
     elif isinstance(config, (list, tuple)):\n        \
     for item in config:\n            yield from every(kind, item)\n\n\n";

/// The import statements of the Python file.
fn imports(job: &Job<'_>, chosen: &Chosen) -> String {
    let module = chosen.flavor.module;
    let mut text = String::new();
    if chosen.flavor.name.is_none() {
        text.push_str("import dataclasses\nimport functools\n\nfrom torch import nn\n");
    } else if !chosen.set.is_empty() {
        text.push_str("import dataclasses\n\n");
    }
    if job.workload.precision == Precision::Fp8 {
        text.push_str("from torchtitan.components.quantization import Float8LinearConverter\n");
    }
    text.push_str("from torchtitan.config import CompileConfig, ParallelismConfig\n");
    text.push_str("from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC\n");
    let kinds: Vec<&str> = chosen.set.iter().map(|(kind, ..)| *kind).collect();
    for (kind, from) in [
        ("RMSNorm.Config", "torchtitan.models.common import RMSNorm"),
        ("RoPE.Config", "torchtitan.models.common import RoPE"),
        (
            "Attention.Config",
            "torchtitan.models.deepseek_v3.model import Attention",
        ),
    ] {
        if kinds.contains(&kind) {
            text.push_str(&format!("from {from}\n"));
        }
    }
    match chosen.flavor.name {
        Some(_) => text.push_str(&format!(
            "from torchtitan.models.{module} import model_registry\n"
        )),
        None => text.push_str(&parts::imports(&chosen.flavor)),
    }
    text.push_str(&format!(
        "from torchtitan.models.{module}.config_registry import {}\n",
        chosen.flavor.function
    ));
    if chosen.mtp_layers > 0 {
        text.push_str("from torchtitan.models.deepseek_v3.mtp import MTPLoss\n");
    }
    text.push_str("from torchtitan.trainer import Trainer\n\n\n");
    text
}

fn boolean(on: bool) -> &'static str {
    if on { "True" } else { "False" }
}
