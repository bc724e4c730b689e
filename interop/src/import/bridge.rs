//! Import of a Megatron Bridge recipe: its fields are those of Megatron-LM's options, so it is read as a script with
//! these options.

use catalog::Fp8Recipe;

use super::document::Document;
use super::error::ImportError;
use super::imported::{Given, Imported};
use super::megatron;
use crate::config::{Node, Value};
use crate::export::Dialect;
use crate::export::bridge::{GRADIENTS, MIXED_FP8, TORCH, recipe_is_wide};
use crate::export::core_precision::RECIPE;
use crate::export::megatron::{
    DISPATCHER, MOMENTS, OFFLOAD, OFFLOAD_FRACTION, OFFLOAD_LAYERS, PRECISION_AWARE,
};

/// What `_pretrain_common` (`megatron/bridge/recipes/common.py`) sets unless a recipe does: field, Megatron-LM's
/// option, value.
const COMMON: [(&str, &str, Usual); 8] = [
    (
        "train.global_batch_size",
        "--global-batch-size",
        Usual::Size(32),
    ),
    (
        "train.micro_batch_size",
        "--micro-batch-size",
        Usual::Size(2),
    ),
    ("dataset.seq_length", "--seq-length", Usual::Size(4096)),
    (
        "ddp.overlap_grad_reduce",
        "--overlap-grad-reduce",
        Usual::On(true),
    ),
    (
        "ddp.overlap_param_gather",
        "--overlap-param-gather",
        Usual::On(true),
    ),
    (
        "ddp.use_distributed_optimizer",
        "--use-distributed-optimizer",
        Usual::On(true),
    ),
    (
        "ddp.use_megatron_fsdp",
        "--use-megatron-fsdp",
        Usual::On(false),
    ),
    (
        "dist.use_tp_pp_dp_mapping",
        "--use-tp-pp-dp-mapping",
        Usual::On(false),
    ),
];

/// The value of a field that a recipe leaves out.
#[derive(Clone, Copy, Debug)]
enum Usual {
    Size(u64),
    On(bool),
}

/// Fields in [`DECISIONS`] whose option in Megatron-LM has another name; for the others the names are alike.
const RENAMED: [(&str, &str); 3] = [
    (
        "virtual_pipeline_model_parallel_size",
        "--num-virtual-stages-per-pipeline-rank",
    ),
    (
        "num_layers_in_first_pipeline_stage",
        "--decoder-first-pipeline-num-layers",
    ),
    (
        "num_layers_in_last_pipeline_stage",
        "--decoder-last-pipeline-num-layers",
    ),
];

/// Fields that hold element types, and their options in Megatron-LM.
const TYPES: [(&str, &str); 3] = [
    (
        "ddp.megatron_fsdp_main_grads_dtype",
        "--megatron-fsdp-main-grads-dtype",
    ),
    ("optimizer.exp_avg_dtype", MOMENTS[0]),
    ("optimizer.exp_avg_sq_dtype", MOMENTS[1]),
];

/// Fields of the model's configuration that hold decisions of a strategy.
const DECISIONS: [&str; 20] = [
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "context_parallel_size",
    "cp_comm_type",
    "sequence_parallel",
    "tp_comm_overlap",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "moe_flex_dispatcher_backend",
    "overlap_moe_expert_parallel_comm",
    "cuda_graph_impl",
    "cuda_graph_modules",
    "cuda_graph_scope",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
];

pub(super) fn import(doc: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    sizes(doc, given)?;
    let script = Document {
        path: doc.path.clone(),
        dialect: Dialect::MegatronLm,
        root: Node {
            line: 1,
            value: Value::Table(options(doc)?),
        },
        launch: doc.launch.clone(),
        python: Default::default(),
        others: Vec::new(),
    };
    let mut imported = megatron::import(&script, given)?;
    imported.dialect = doc.dialect;
    Ok(imported)
}

/// The recipe written as options of Megatron-LM.
fn options(doc: &Document) -> Result<Vec<(String, Node)>, ImportError> {
    let mut options: Vec<(String, Node)> = Vec::new();
    let mut put = |option: &str, line: usize, value: Value| {
        let absent = matches!(value, Value::Null | Value::Bool(false));
        if !absent {
            options.push((option.to_owned(), Node { line, value }));
        }
    };
    for (field, option, usual) in COMMON {
        match (doc.find(field), usual) {
            (Some(node), _) => put(option, node.line, node.value.clone()),
            (None, Usual::Size(size)) => put(option, 0, size.into()),
            (None, Usual::On(on)) => put(option, 0, on.into()),
        }
    }
    let named = DECISIONS.map(|field| (field, format!("--{}", field.replace('_', "-"))));
    let renamed = RENAMED.map(|(field, option)| (field, option.to_owned()));
    for (field, option) in named.into_iter().chain(renamed) {
        if let Some(node) = doc.find(&format!("model.{field}")) {
            put(&option, node.line, node.value.clone());
        }
    }
    let interleaved = doc.size("model.virtual_pipeline_model_parallel_size")?;
    let overlaps = doc.flag("model.overlap_p2p_comm")? != Some(false);
    if interleaved.is_some_and(|chunks| chunks > 1) && !overlaps {
        put("--no-overlap-p2p-communication", 0, true.into());
    }
    for (field, option) in [
        (
            "ddp.data_parallel_sharding_strategy",
            "--data-parallel-sharding-strategy",
        ),
        (
            "ddp.num_distributed_optimizer_instances",
            "--num-distributed-optimizer-instances",
        ),
    ] {
        if let Some(node) = doc.find(field) {
            put(option, node.line, node.value.clone());
        }
    }
    // Recipes of models with experts send tokens by all-to-all unless they say otherwise.
    let dispatcher = doc.find("model.moe_token_dispatcher_type");
    match dispatcher {
        Some(node) => put(DISPATCHER, node.line, node.value.clone()),
        None => put(DISPATCHER, 0, "alltoall".into()),
    }
    types(doc, &mut put)?;
    for option in precision(doc)? {
        let value = match option {
            "--fp8-format" => Value::from("hybrid"),
            _ => true.into(),
        };
        put(option, 0, value);
    }
    if let Some(recipe) = fp8_recipe(doc) {
        put(RECIPE, 0, recipe.into());
    }
    Ok(options)
}

/// Adds Megatron-LM's options for the types of gradients and of optimizer states.
fn types(doc: &Document, put: &mut impl FnMut(&str, usize, Value)) -> Result<(), ImportError> {
    let recipe = doc.find("mixed_precision");
    let recipe = recipe.map_or_else(String::new, |node| node.value.shown());
    // The recipe of mixed precision sets the type over what `ddp` says.
    let wide = doc.flag(GRADIENTS)?;
    put(
        match wide.unwrap_or(recipe_is_wide(&recipe)) {
            true => "--accumulate-allreduce-grads-in-fp32",
            false => "--grad-reduce-in-bf16",
        },
        0,
        true.into(),
    );
    for (field, option) in TYPES {
        if let Some(node) = doc.find(field) {
            let shown = node.value.shown();
            let known = TORCH.iter().find(|(_, torch)| *torch == shown);
            put(
                option,
                node.line,
                known.map_or("auto", |(name, _)| name).into(),
            );
        }
    }
    if doc.flag("optimizer.optimizer_cpu_offload")? == Some(true) {
        put(OFFLOAD, 0, true.into());
    }
    if let Some(layers) = doc.size("model.cpu_offloading_num_layers")? {
        put(OFFLOAD_LAYERS, 0, layers.into());
    }
    if let Some(node) = doc.find("optimizer.optimizer_offload_fraction") {
        put(OFFLOAD_FRACTION, node.line, node.value.clone());
    }
    if doc.flag("optimizer.use_precision_aware_optimizer")? == Some(true) {
        put(PRECISION_AWARE, 0, true.into());
    }
    Ok(())
}

/// Refuses a file that states other sizes than the given model has.
fn sizes(doc: &Document, given: &Given<'_>) -> Result<(), ImportError> {
    let model = given.model;
    let ours = [
        ("num_layers", model.layers),
        ("hidden_size", model.hidden),
        ("num_attention_heads", model.attention.heads),
        ("num_moe_experts", model.moe.map_or(0, |moe| moe.experts)),
    ];
    for (field, ours) in ours {
        let key = format!("model.{field}");
        if let Some(theirs) = doc.size(&key)?.filter(|theirs| *theirs != ours) {
            let message = format!(
                "{theirs}, but model {} has {ours}; give the right --model",
                model.name
            );
            return Err(doc.unsupported(&key, &message));
        }
    }
    Ok(())
}

/// The recipe of 8-bit products by Megatron-LM's name: that of the recipe of mixed precision.
fn fp8_recipe(doc: &Document) -> Option<&str> {
    let mixed = doc.find("mixed_precision")?;
    if let Value::Table(fields) = &mixed.value {
        // The default of `MixedPrecisionConfig`.
        let own = Some(Fp8Recipe::Tensorwise.name());
        let named = fields.iter().find(|(name, _)| name == "fp8_recipe");
        let eight_bits = fields.iter().any(|(name, _)| name == "fp8");
        return named
            .map_or(own, |(_, node)| node.text())
            .filter(|_| eight_bits);
    }
    let shown = mixed.value.shown();
    let named = |(_, name): &&(Fp8Recipe, &str)| {
        // The same recipes are there for fp16.
        let name = name.trim_start_matches("bf16_");
        shown.contains(name)
    };
    let found = MIXED_FP8.iter().find(named);
    found.map(|(recipe, _)| recipe.name())
}

/// Megatron-LM's options for the file's mixed precision.
fn precision(doc: &Document) -> Result<Vec<&'static str>, ImportError> {
    let key = "mixed_precision";
    let recipe = match doc.find(key).map(|node| &node.value) {
        None => "bf16_mixed".to_owned(),
        Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Str(name)) => name.clone(),
        // `MixedPrecisionConfig(bf16=True, …)`.
        Some(Value::Table(fields)) => {
            let on = |(name, node): &&(String, Node)| {
                ["fp16", "bf16", "fp8"].contains(&name.as_str())
                    && !matches!(node.value, Value::Bool(false) | Value::Null)
            };
            let on = fields.iter().filter(on).map(|(name, _)| name.as_str());
            on.collect::<Vec<_>>().join("_")
        }
        Some(other) => other.shown(),
    };
    if !["fp16", "bf16", "fp8"]
        .iter()
        .any(|word| recipe.contains(word))
    {
        return Err(doc.wrong(key, "a recipe of fp16, bf16 or fp8 by name"));
    }
    let mut options = Vec::new();
    if recipe.contains("fp16") && !recipe.contains("bf16") {
        options.push("--fp16");
    } else if recipe.contains("bf16") || recipe.contains("fp8") {
        options.push("--bf16");
    }
    if recipe.contains("fp8") {
        options.push("--fp8-format");
    }
    Ok(options)
}
