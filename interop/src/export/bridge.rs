//! Megatron Bridge: a Python function over `ConfigContainer`, made of Megatron-LM's options.

use catalog::Precision;

use super::flag::Flag;
use super::job::{ExportedFile, Job, python_heading};
use super::launch::{Program, Starter};
use super::megatron;
use super::refusal::Limits;
use crate::config::yaml::number;
use crate::config::{Node, Value, write};

const FILE: &str = "vescale_plan_bridge.py";

pub(crate) fn program() -> Program {
    Program {
        setup: vec![
            ": \"${RECIPE:?set RECIPE to the recipe of your model, as module:function}\""
                .to_owned(),
            "export CUDA_DEVICE_MAX_CONNECTIONS=1".to_owned(),
        ],
        starter: Starter::Torchrun,
        arguments: format!("\"$HERE/{FILE}\" \"$RECIPE\" \"$@\""),
    }
}

pub(crate) fn files(job: &Job<'_>, limits: &mut Limits) -> Vec<ExportedFile> {
    // A recipe has its own choices; all of them are set, also the ones that are off.
    let mut settings: Vec<(String, Value)> = off(job);
    for flag in megatron::decisions(job, limits) {
        for (path, value) in setting(&flag, job) {
            settings.retain(|(known, _)| *known != path);
            settings.push((path, value));
        }
    }
    let precision = match job.workload.precision {
        Precision::Fp32 => None,
        Precision::Fp16 => Some("fp16_mixed"),
        Precision::Bf16 => Some("bf16_mixed"),
        Precision::Fp8 => Some("bf16_with_fp8_current_scaling_mixed"),
    };
    let precision = precision.map_or(Value::Null, Value::from);
    settings.push(("mixed_precision".to_owned(), precision));
    settings.push(("dataset.seq_length".to_owned(), job.workload.seq_len.into()));
    let mut text = format!(
        "{}import importlib\nimport sys\n\n\
         from megatron.bridge.training.config import ConfigContainer\n\n\n\
         def apply(cfg: ConfigContainer) -> ConfigContainer:\n    \"\"\"Sets what the plan decides.\"\"\"\n",
        python_heading(job)
    );
    for (path, value) in settings {
        let value = write::python(&Node::made(value));
        text.push_str(&format!("    cfg.{path} = {value}\n"));
    }
    text.push_str(
        "    return cfg\n\n\n\
         if __name__ == \"__main__\":\n    \
         from megatron.bridge.training.gpt_step import forward_step\n    \
         from megatron.bridge.training.pretrain import pretrain\n\n    \
         module, function = sys.argv[1].split(\":\")\n    \
         pretrain(apply(getattr(importlib.import_module(module), function)()), forward_step)\n",
    );
    limits.note(
        true,
        "start from the recipe of your model: RECIPE=megatron.bridge.recipes.…:function",
    );
    vec![ExportedFile {
        name: FILE.to_owned(),
        text,
        executable: false,
    }]
}

/// Every decision at its least.
fn off(job: &Job<'_>) -> Vec<(String, Value)> {
    let none = [
        "virtual_pipeline_model_parallel_size",
        "pipeline_model_parallel_layout",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
    ];
    let mut settings: Vec<(String, Value)> = none
        .into_iter()
        .map(|field| (format!("model.{field}"), Value::Null))
        .collect();
    let mut set = |path: &str, value: Value| settings.push((path.to_owned(), value));
    set("model.sequence_parallel", false.into());
    set("model.overlap_p2p_comm", (job.decisions.vpp > 1).into());
    set("dist.use_tp_pp_dp_mapping", false.into());
    set("ddp.use_distributed_optimizer", false.into());
    set("ddp.use_megatron_fsdp", false.into());
    set("ddp.num_distributed_optimizer_instances", 1.into());
    set("ddp.overlap_grad_reduce", false.into());
    set("ddp.overlap_param_gather", false.into());
    // Where it is set, it overrides the fields above.
    set("comm_overlap", Value::Null);
    settings
}

/// The field that an option is generated from.
fn setting(flag: &Flag, job: &Job<'_>) -> Vec<(String, Value)> {
    let field = flag.name.trim_start_matches("--").replace('-', "_");
    let value = match flag.values.as_slice() {
        [] => Value::Bool(true),
        [one] => number(one).unwrap_or_else(|| Value::Str(one.clone())),
        many => many.to_vec().into(),
    };
    let path = match field.as_str() {
        "num_layers_per_virtual_pipeline_stage" => {
            let path = "model.virtual_pipeline_model_parallel_size".to_owned();
            return vec![(path, job.decisions.vpp.into())];
        }
        "recompute_modules" => {
            return vec![(format!("model.{field}"), flag.values.clone().into())];
        }
        "no_overlap_p2p_communication" => {
            return vec![("model.overlap_p2p_comm".to_owned(), false.into())];
        }
        "overlap_grad_reduce"
        | "overlap_param_gather"
        | "use_distributed_optimizer"
        | "use_megatron_fsdp"
        | "data_parallel_sharding_strategy"
        | "num_distributed_optimizer_instances" => format!("ddp.{field}"),
        "use_tp_pp_dp_mapping" => format!("dist.{field}"),
        "ckpt_format" => format!("checkpoint.{field}"),
        "micro_batch_size" | "global_batch_size" => format!("train.{field}"),
        "max_position_embeddings" => return Vec::new(),
        _ => format!("model.{field}"),
    };
    vec![(path, value)]
}
