//! Export to Megatron Bridge: a Python function over `ConfigContainer`, generated from Megatron-LM's options.

mod own;

use catalog::{DType, Fp8Recipe, Precision};

pub(crate) use self::own::from_hub;

use super::core_model::{self, Field, Reach};
use super::core_precision;
use super::core_rewrites;
use super::documents;
use super::flag::{self, Flag};
use super::inputs::Input;
use super::job::{Draft, Heading, Job};
use super::launch::Program;
use super::megatron;
use super::refusal::Limits;
use crate::config::escape::quoted;
use crate::config::yaml::number;
use crate::config::{Node, Value, write};

const FILE: &str = "vescale_plan_bridge.py";
/// Element types by their names in Megatron-LM's options and in PyTorch.
pub(crate) const TORCH: [(&str, &str); 3] = [
    ("fp32", "torch.float32"),
    ("bf16", "torch.bfloat16"),
    ("fp16", "torch.float16"),
];
/// Bridge's module of recipes of mixed precision.
const MIXED_PRECISION: &str = "mixed_precision";
/// The field of such a recipe that says whether gradients are held and reduced in 32 bits.
pub(crate) const GRADIENTS: &str = "mixed_precision.grad_reduce_in_fp32";
/// The fields that switch the checks of losses and of gradients for NaN and Inf.
pub(crate) const CHECKS: [&str; 2] = [
    "rerun_state_machine.check_for_nan_in_loss",
    "ddp.check_for_nan_in_grad",
];

pub(crate) fn program(job: &Job<'_>) -> Program {
    let recipe = ": \"${RECIPE:?set RECIPE to the recipe of your model, as module:function}\"";
    let mut setup = vec![recipe.to_owned()];
    setup.extend(megatron::environment(job));
    Program::torchrun(setup, format!("\"$HERE/{FILE}\" \"$RECIPE\" \"$@\""))
}

pub(crate) fn files(job: &Job<'_>, limits: &mut Limits) -> Vec<Draft> {
    // A recipe has its own choices; all decisions are set, including those that are off.
    let mut settings: Vec<(String, Value)> = off(job);
    let mut lacks = Limits::default();
    let mut fields =
        core_model::fields(job.model, job.workload.seq_len, Reach::Provider, &mut lacks);
    let whole = lacks.refusals.is_empty() && job.model.hybrid.is_none();
    own::refuse(job, lacks.refusals, limits);
    if !whole && from_hub(job) {
        // Bridge's class of the model has all else; a field of ours could contradict it.
        fields.retain(|(name, _)| ["vocab_size", "mtp_num_layers"].contains(name));
    }
    fields.extend(core_rewrites::fields(job, Reach::Provider, limits));
    let set = |settings: &mut Vec<(String, Value)>, path: String, value: Value| {
        settings.retain(|(known, _)| *known != path);
        settings.push((path, value));
    };
    for (path, value) in fields.into_iter().flat_map(|field| provider(field, job)) {
        set(&mut settings, path, value);
    }
    let flags = megatron::decisions(job, limits);
    for flag in flags.into_iter().flat_map(|(_, flags)| flags) {
        for (path, value) in setting(&flag, job) {
            set(&mut settings, path, value);
        }
    }
    let precision = match job.workload.precision {
        Precision::Fp32 => None,
        Precision::Fp16 => Some("fp16_mixed"),
        Precision::Bf16 => Some("bf16_mixed"),
        Precision::Fp8 => fp8(job.fp8_recipe()),
    };
    settings.extend(mixed(precision, wide(job), job));
    settings.push(("dataset.seq_length".to_owned(), job.workload.seq_len.into()));
    settings.extend(inputs(job, limits));
    let sizes = match whole {
        true => Vec::new(),
        false => own::sizes(job.model),
    };
    let text = text(job, settings, sizes);
    vec![Draft::new(FILE, Heading::Docstring, text)]
}

/// Whether gradients are held and reduced in 32 bits.
fn wide(job: &Job<'_>) -> bool {
    job.state_types().reduce == DType::F32
}

/// Whether a recipe of mixed precision has gradients in 32 bits by itself (`training/mixed_precision.py`).
pub(crate) fn recipe_is_wide(recipe: &str) -> bool {
    !recipe.contains("fp16_mixed")
}

/// Bridge's mixed-precision recipe for an FP8 recipe; `None` if there is none.
fn fp8(recipe: Fp8Recipe) -> Option<&'static str> {
    let found = MIXED_FP8.iter().find(|(of, _)| *of == recipe);
    found.map(|(_, name)| *name)
}

/// Megatron Bridge's mixed-precision recipe for each way to scale 8-bit products.
pub(crate) const MIXED_FP8: [(Fp8Recipe, &str); 4] = [
    (Fp8Recipe::Delayed, "bf16_with_fp8_delayed_scaling_mixed"),
    (Fp8Recipe::Tensorwise, "bf16_with_fp8_current_scaling_mixed"),
    (
        Fp8Recipe::Blockwise,
        "bf16_with_fp8_subchannel_scaling_mixed",
    ),
    (Fp8Recipe::Mxfp8, "bf16_with_mxfp8_mixed"),
];

/// Settings of Megatron Bridge's 8-bit recipes, each with the value that makes the run match the prediction:
///
/// - `fp8_param_gather` stores weights in 8 bits and gathers them so.
/// - `reuse_grad_buf_for_mxfp8_param_ag` gathers weights into the buffer of the gradients. Under MXFP8, weights can be stored in
///   8 bits only with this setting.
/// - `first_last_layers_bf16` keeps the first and last layers in 16 bits. It is always off, because no prediction assumes it.
fn beside_fp8(job: &Job<'_>) -> [(&'static str, bool); 3] {
    let narrow = core_precision::holds_eight_bits(job);
    let microscaled = job.fp8_recipe() == Fp8Recipe::Mxfp8;
    [
        ("mixed_precision.fp8_param_gather", narrow),
        (
            "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag",
            narrow && microscaled,
        ),
        ("mixed_precision.first_last_layers_bf16", false),
    ]
}

/// Settings for the mixed-precision recipe, whose type of gradients overrides that of `ddp`.
fn mixed(recipe: Option<&str>, wide: bool, job: &Job<'_>) -> Vec<(String, Value)> {
    let path = "mixed_precision".to_owned();
    let called = |name: &str| Value::Call(format!("{MIXED_PRECISION}.{name}"), Vec::new());
    match recipe {
        Some(name) if job.workload.precision == Precision::Fp8 => {
            let beside = beside_fp8(job).map(|(field, value)| (field.to_owned(), value.into()));
            let gradients = (GRADIENTS.to_owned(), wide.into());
            [(path, called(name)), gradients]
                .into_iter()
                .chain(beside)
                .collect()
        }
        None => vec![(path, Value::Null)],
        Some(name) if wide == recipe_is_wide(name) => vec![(path, name.into())],
        Some(name) => vec![(path, called(name)), (GRADIENTS.to_owned(), wide.into())],
    }
}

/// The tokenizer, the data, and the recipe that supplies all other settings.
fn inputs(job: &Job<'_>, limits: &mut Limits) -> Vec<(String, Value)> {
    limits.variable(
        "RECIPE",
        "the recipe of your model, as megatron.bridge.recipes.…:function",
    );
    let tokenizer = "folder or hub name of the tokenizer";
    let tokenizer = limits.input_or_placeholder(&job.inputs, Input::Tokenizer, tokenizer);
    let kind = Value::from("HuggingFaceTokenizer");
    let mut settings = vec![
        ("tokenizer.tokenizer_type".to_owned(), kind),
        ("tokenizer.tokenizer_model".to_owned(), tokenizer.into()),
    ];
    if documents::within(job) {
        // The recipe has a dataset for fine-tuning; it names the data.
        settings.push(("dataset.enable_offline_packing".to_owned(), true.into()));
        let size = "dataset.offline_packing_specs.packed_sequence_size".to_owned();
        settings.push((size, job.workload.seq_len.into()));
    } else {
        let data = "prefix of the preprocessed dataset";
        let data = limits.input_or_placeholder(&job.inputs, Input::Data, data);
        settings.push((
            "dataset.blend".to_owned(),
            Value::Expression(format!("([{}], None)", quoted(&data))),
        ));
    }
    settings
}

/// The file: settings of the configuration, and `sizes` that the model from the hub must have.
fn text(
    job: &Job<'_>,
    settings: Vec<(String, Value)>,
    sizes: Vec<(&'static str, Value)>,
) -> String {
    let mut text = "import dataclasses\nimport importlib\nimport sys\n\n\
         import torch\n\
         from megatron.bridge.training.config import ConfigContainer\n\
         from megatron.core.activations import squared_relu\n\
         from megatron.core.fusions.fused_bias_geglu import quick_gelu\n\
         from megatron.core.transformer.enums import AttnBackend\n"
        .to_owned();
    if settings.iter().any(|(path, _)| path == GRADIENTS) {
        text.push_str(&format!(
            "from megatron.bridge.training import {MIXED_PRECISION}\n"
        ));
    }
    text.push_str(
        "\n\ndef apply(cfg: ConfigContainer) -> ConfigContainer:\n    \
         \"\"\"Sets what the plan and its model say.\"\"\"\n",
    );
    if let Some(id) = job.inputs.hf_id {
        text.push_str(&format!(
            "    from megatron.bridge import AutoBridge\n\n    \
             cfg.model = AutoBridge.from_hf_pretrained({}).to_megatron_provider(load_weights=False)\n",
            quoted(id)
        ));
        for (name, size) in sizes {
            let size = write::python(&Node::made(size));
            text.push_str(&format!(
                "    if cfg.model.{name} != {size}:\n        \
                 raise SystemExit(f\"{name}: the hub's model has {{cfg.model.{name}}}, the plan's {size}\")\n"
            ));
        }
    }
    // Python creates any attribute that is set: one that the recipe's class lacks would be ignored.
    text.push_str(
        "    parts = {name: part for name, part in vars(cfg).items() if dataclasses.is_dataclass(part)}\n    \
         before = {name: set(vars(part)) for name, part in parts.items()}\n",
    );
    for (path, value) in settings {
        if path == CHECKS[0] {
            text.push_str(&format!("    # {}.\n", megatron::UNCHECKED));
        }
        let value = write::python(&Node::made(value));
        text.push_str(&format!("    cfg.{path} = {value}\n"));
    }
    text.push_str(
        "    lost = [f\"{name}.{field}\" for name, part in parts.items() for field in vars(part) if field not in before[name]]\n    \
         if lost:\n        \
         raise SystemExit(f\"the recipe has no {', '.join(lost)}: give the recipe of the plan's model\")\n    \
         return cfg\n\n\n\
         if __name__ == \"__main__\":\n    \
         from megatron.bridge.training.gpt_step import forward_step\n    \
         from megatron.bridge.training.pretrain import pretrain\n\n    \
         module, function = sys.argv[1].split(\":\")\n    \
         pretrain(apply(getattr(importlib.import_module(module), function)()), forward_step)\n",
    );
    text
}

/// The provider's fields that correspond to a field of the configuration.
fn provider((name, value): Field, job: &Job<'_>) -> Vec<(String, Value)> {
    let set = |name: &str, value: Value| (format!("model.{name}"), value);
    let call = |code: &str| Value::Expression(code.to_owned());
    match (name, &value) {
        ("vocab_size", _) => {
            let padded = !job.model.vocab.is_multiple_of(job.decisions.tp);
            vec![
                set("vocab_size", value),
                set("should_pad_vocab", padded.into()),
                set("make_vocab_size_divisible_by", 1.into()),
            ]
        }
        // A provider's position table is as long as its sequence.
        ("max_position_embeddings", _) => Vec::new(),
        ("activation_func", Value::Str(activation)) => vec![set(
            name,
            call(match activation.as_str() {
                "silu" => "torch.nn.functional.silu",
                "squared_relu" => "squared_relu",
                "quick_gelu" => "quick_gelu",
                "relu" => "torch.nn.functional.relu",
                _ => "torch.nn.functional.gelu",
            }),
        )],
        ("attention_backend", Value::Str(backend)) => {
            vec![set(name, call(&format!("AttnBackend.{backend}")))]
        }
        ("window_size", Value::List(sides)) => {
            let sides: Vec<String> = sides.iter().map(|side| side.value.shown()).collect();
            vec![set(name, call(&format!("({})", sides.join(", "))))]
        }
        _ => vec![set(name, value)],
    }
}

/// Settings that switch every decision off; those that are on are set after them.
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
        // The hub's model may have layers that predict later tokens where the plan's has none.
        "mtp_num_layers",
    ];
    let mut settings: Vec<(String, Value)> = none
        .into_iter()
        .map(|field| (format!("model.{field}"), Value::Null))
        .collect();
    let mut set = |path: &str, value: Value| settings.push((path.to_owned(), value));
    set("model.sequence_parallel", false.into());
    set("model.overlap_p2p_comm", (job.decisions.vpp > 1).into());
    set("dist.use_tp_pp_dp_mapping", false.into());
    for section in BOTH {
        for field in ["use_distributed_optimizer", "overlap_param_gather"] {
            set(&format!("{section}.{field}"), false.into());
        }
    }
    set("ddp.use_megatron_fsdp", false.into());
    set("ddp.num_distributed_optimizer_instances", 1.into());
    set("ddp.overlap_grad_reduce", false.into());
    set("ddp.average_in_collective", false.into());
    if job.model.moe.is_some() {
        set("model.overlap_moe_expert_parallel_comm", false.into());
        set("model.moe_shared_expert_overlap", false.into());
    }
    set("model.cuda_graph_impl", "none".into());
    set("model.cuda_graph_modules", Vec::<String>::new().into());
    // If it were set, it would override the fields above.
    set("comm_overlap", Value::Null);
    settings
}

/// Sections that share some settings: Bridge switches such a setting on in both if either sets it
/// (`_validate_and_sync_distributed_optimizer_settings` in training/config.py).
const BOTH: [&str; 2] = ["ddp", "optimizer"];

/// A shared setting, in both sections.
fn in_both(field: &str, value: &Value) -> Vec<(String, Value)> {
    let of = |section| (format!("{section}.{field}"), value.clone());
    BOTH.map(of).to_vec()
}

/// The element type that a Megatron-LM option names, as PyTorch has it.
fn torch(flag: &Flag) -> Value {
    let named = flag.values.first().map_or("", String::as_str);
    let known = TORCH.iter().find(|(name, _)| *name == named);
    Value::Expression(known.map_or("None", |(_, torch)| torch).to_owned())
}

/// Megatron-LM options that Bridge has no field for, because its mixed-precision recipe (`cfg.mixed_precision`) sets them.
const BY_RECIPE: [&str; 6] = [
    "bf16",
    "fp16",
    "fp8_format",
    "fp8_recipe",
    "fp8_param_gather",
    "reuse_grad_buf_for_mxfp8_param_ag",
];

/// The fields of a Bridge recipe that correspond to an option of Megatron-LM, as paths with values.
fn setting(flag: &Flag, job: &Job<'_>) -> Vec<(String, Value)> {
    let field = flag::field(&flag.name);
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
        "cpu_offloading_num_layers" => {
            return vec![
                ("model.cpu_offloading".to_owned(), true.into()),
                ("model.cpu_offloading_weights".to_owned(), false.into()),
                (format!("model.{field}"), value),
            ];
        }
        "recompute_modules" | "cuda_graph_modules" => {
            return vec![(format!("model.{field}"), flag.values.clone().into())];
        }
        "no_overlap_p2p_communication" => {
            return vec![("model.overlap_p2p_comm".to_owned(), false.into())];
        }
        "te_rng_tracker" => "model.use_te_rng_tracker".to_owned(),
        "no_check_for_nan_in_loss_and_grad" => {
            return CHECKS.map(|path| (path.to_owned(), false.into())).to_vec();
        }
        "megatron_fsdp_main_grads_dtype" => return vec![(format!("ddp.{field}"), torch(flag))],
        "exp_avg_dtype" | "exp_avg_sq_dtype" | "main_grads_dtype" => {
            return vec![(format!("optimizer.{field}"), torch(flag))];
        }
        "use_precision_aware_optimizer"
        | "optimizer_cpu_offload"
        | "optimizer_offload_fraction" => format!("optimizer.{field}"),
        "overlap_param_gather" | "use_distributed_optimizer" => return in_both(&field, &value),
        "overlap_grad_reduce"
        | "use_megatron_fsdp"
        | "data_parallel_sharding_strategy"
        | "num_distributed_optimizer_instances" => format!("ddp.{field}"),
        "use_tp_pp_dp_mapping" => format!("dist.{field}"),
        "ckpt_format" => format!("checkpoint.{field}"),
        "ddp_average_in_collective" => "ddp.average_in_collective".to_owned(),
        "accumulate_allreduce_grads_in_fp32" => {
            return vec![("ddp.grad_reduce_in_fp32".to_owned(), true.into())];
        }
        "grad_reduce_in_bf16" => return vec![("ddp.grad_reduce_in_fp32".to_owned(), false.into())],
        of_precision if BY_RECIPE.contains(&of_precision) => return Vec::new(),
        "micro_batch_size" | "global_batch_size" => format!("train.{field}"),
        _ => format!("model.{field}"),
    };
    vec![(path, value)]
}
