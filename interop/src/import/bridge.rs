//! Import of a Megatron Bridge recipe: its fields are those of Megatron-LM's options, so it is read as a script with
//! these options.

use std::collections::BTreeMap;

use catalog::Fp8Recipe;

use super::bridge_recipe::{Base, adapters, base, packing, value};
use super::document::Document;
use super::error::ImportError;
use super::imported::{Given, Imported};
use super::megatron;
use super::megatron_notes::is_noted;
use super::nan_checks;
use crate::config::{Node, Value};
use crate::export::Dialect;
use crate::export::bridge::{GRADIENTS, MIXED_FP8, TORCH, recipe_is_wide};
use crate::export::core_precision::RECIPE;
use crate::export::flag;
use crate::export::megatron::{
    DISPATCHER, EXPERT_OVERLAP, MOMENTS, OFFLOAD, OFFLOAD_FRACTION, OFFLOAD_LAYERS, PRECISION_AWARE,
};
use crate::export::schema::Schema;

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
const DECISIONS: [&str; 18] = [
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "context_parallel_size",
    "cp_comm_type",
    "sequence_parallel",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "moe_flex_dispatcher_backend",
    "cuda_graph_impl",
    "cuda_graph_modules",
    "cuda_graph_scope",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
];

/// Other fields that hold decisions, and their options in Megatron-LM.
const BESIDE_MODEL: [(&str, &str); 4] = [
    ("ddp.use_megatron_fsdp", "--use-megatron-fsdp"),
    ("dist.use_tp_pp_dp_mapping", "--use-tp-pp-dp-mapping"),
    (
        "ddp.num_distributed_optimizer_instances",
        "--num-distributed-optimizer-instances",
    ),
    ("optimizer.optimizer_offload_fraction", OFFLOAD_FRACTION),
];

/// A file's settings as options of Megatron-LM. An option that is added twice keeps its first value.
#[derive(Default)]
pub(super) struct Options {
    all: Vec<(String, Node)>,
    /// For each option: the setting of the file that it was made from, as `field = value`.
    own_words: BTreeMap<String, String>,
}

impl Options {
    /// Adds an option; one that is off is left out.
    pub(super) fn put(&mut self, option: &str, line: usize, value: impl Into<Value>) {
        let value = value.into();
        let absent = matches!(value, Value::Null | Value::Bool(false));
        if !absent && !self.has(option) {
            self.all.push((option.to_owned(), Node { line, value }));
        }
    }

    /// Adds the option with the value of a field, if the file sets it.
    pub(super) fn copy(&mut self, doc: &Document, field: &str, option: &str) {
        if let Some(node) = value(doc, field) {
            self.put_as(option, field, node, node.value.clone());
        }
    }

    /// Adds an option made of a field and its value.
    fn put_as(&mut self, option: &str, field: &str, node: &Node, value: impl Into<Value>) {
        if !self.has(option) {
            let shown = match &node.value {
                Value::Bool(true) => "True".to_owned(),
                Value::Bool(false) => "False".to_owned(),
                other => other.plain(),
            };
            let words = format!("{field} = {shown}");
            self.own_words.insert(option.to_owned(), words);
        }
        self.put(option, node.line, value);
    }

    fn has(&self, option: &str) -> bool {
        self.all.iter().any(|(known, _)| known == option)
    }

    /// A script of Megatron-LM with these options in place of the file.
    pub(super) fn script(self, doc: &Document) -> Document {
        let root = Node {
            line: 1,
            value: Value::Table(self.all),
        };
        Document {
            own_words: self.own_words,
            ..doc.rewritten(Dialect::MegatronLm, root)
        }
    }
}

pub(super) fn import(doc: &Document, given: &Given<'_>) -> Result<Imported, ImportError> {
    sizes(doc, given)?;
    let base = base(doc)?;
    let mut notes = Vec::from_iter(packing(doc, base));
    let adapters = adapters(doc, base, &mut notes)?;
    let script = options(doc, base)?.script(doc);
    let imported = megatron::of_options(&script, given)?;
    notes.extend(imported.notes);
    notes.extend(nan_checks::of_recipe(doc)?);
    // Megatron-LM has no such option, so its notes do not know it.
    if value(doc, NARROW_ATTENTION).is_some_and(|node| node.value == Value::Bool(true)) {
        let place = doc.place(NARROW_ATTENTION);
        notes.push(format!(
            "{place}: {NARROW_ATTENTION} = True is planned as attention in 16 bits"
        ));
    }
    Ok(Imported {
        dialect: doc.dialect,
        adapters,
        notes,
        ..imported
    })
}

/// The recipe written as options of Megatron-LM.
fn options(doc: &Document, base: &Base) -> Result<Options, ImportError> {
    let mut all = Options::default();
    let named = DECISIONS.map(|field| (field, flag::option(field)));
    let renamed = RENAMED.map(|(field, option)| (field, option.to_owned()));
    for (field, option) in named.into_iter().chain(renamed) {
        all.copy(doc, &format!("model.{field}"), &option);
    }
    for (field, option) in BESIDE_MODEL {
        all.copy(doc, field, option);
    }
    let sharding = "--data-parallel-sharding-strategy";
    all.copy(doc, "ddp.data_parallel_sharding_strategy", sharding);
    all.put(sharding, 0, base.sharding);
    lengths(doc, base, &mut all);
    // Bridge switches it on in `ddp` and `optimizer` if either sets it (`_validate_and_sync_distributed_optimizer_settings` in
    // training/config.py).
    let of_gradients = doc.flag("ddp.use_distributed_optimizer")?;
    let of_states = doc.flag("optimizer.use_distributed_optimizer")?;
    let distributed = of_gradients.unwrap_or(base.distributed) || of_states.unwrap_or(true);
    all.put("--use-distributed-optimizer", 0, distributed);
    overlaps(doc, base, distributed, &mut all)?;
    // Recipes of models with experts send tokens by all-to-all, multiply in groups and sort by one kernel unless they say
    // otherwise.
    all.copy(doc, "model.moe_token_dispatcher_type", DISPATCHER);
    all.put(DISPATCHER, 0, "alltoall");
    for (field, option) in [
        ("model.moe_grouped_gemm", "--moe-grouped-gemm"),
        ("model.moe_permute_fusion", "--moe-permute-fusion"),
    ] {
        all.put(option, 0, doc.flag(field)?.unwrap_or(true));
    }
    types(doc, &mut all)?;
    for option in precision(doc)? {
        let value = match option {
            "--fp8-format" => Value::from("hybrid"),
            _ => true.into(),
        };
        all.put(option, 0, value);
    }
    if let Some(recipe) = fp8_recipe(doc) {
        all.put(RECIPE, 0, recipe);
    }
    noted(doc, &mut all)?;
    Ok(all)
}

/// Adds batches and the length of sequences.
fn lengths(doc: &Document, base: &Base, all: &mut Options) {
    // A recipe's sequences are as long for its model as for its data.
    for (fields, option, usual) in [
        (
            &["train.global_batch_size"][..],
            "--global-batch-size",
            base.global_batch,
        ),
        (
            &["train.micro_batch_size"],
            "--micro-batch-size",
            base.micro_batch,
        ),
        (
            &["dataset.seq_length", "model.seq_length"],
            "--seq-length",
            base.seq_len,
        ),
    ] {
        for field in fields {
            all.copy(doc, field, option);
        }
        all.put(option, 0, usual);
    }
}

/// Adds options for overlaps. `comm_overlap`, if a recipe has it, overrides the fields of the model
/// and of gradients (training/comm_overlap.py, `CommOverlapConfig.setup`).
fn overlaps(
    doc: &Document,
    base: &Base,
    distributed: bool,
    all: &mut Options,
) -> Result<(), ImportError> {
    let said = |section: &str, field: &str| doc.flag(&format!("{section}.{field}"));
    let found = doc.find("comm_overlap").map(|node| &node.value);
    let section = match found {
        Some(Value::Expression(variable)) => variable.trim(),
        _ => "comm_overlap",
    };
    let governs = found.is_some_and(|value| *value != Value::Null);
    let of = |other: &str, field: &str, usual: bool, governs: bool| {
        let (section, usual) = match governs {
            true => (section, usual),
            false => (other, base.overlaps),
        };
        Ok::<_, ImportError>(said(section, field)?.unwrap_or(usual))
    };
    for (field, option) in [
        ("overlap_grad_reduce", "--overlap-grad-reduce"),
        ("overlap_param_gather", "--overlap-param-gather"),
    ] {
        all.put(option, 0, of("ddp", field, true, governs && distributed)?);
    }
    // `optimizer.overlap_param_gather` switches it on as well.
    let gathers = said("optimizer", "overlap_param_gather")? == Some(true);
    all.put("--overlap-param-gather", 0, gathers);
    let of_model = match governs {
        true => section,
        false => "model",
    };
    let expert = said(of_model, "overlap_moe_expert_parallel_comm")?;
    all.put(EXPERT_OVERLAP, 0, expert == Some(true));
    let divided = doc.size("model.tensor_model_parallel_size")? > Some(1)
        && said("model", "sequence_parallel")? == Some(true);
    let tensor = said(of_model, "tp_comm_overlap")? == Some(true);
    all.put("--tp-comm-overlap", 0, tensor && (divided || !governs));
    let chunks = doc.size("model.virtual_pipeline_model_parallel_size")?;
    let sends = said(of_model, "overlap_p2p_comm")?.unwrap_or(true);
    let waits = chunks > Some(1) && !sends;
    all.put("--no-overlap-p2p-communication", 0, waits);
    Ok(())
}

/// Sections whose fields Megatron-LM has as options too.
const SECTIONS: [&str; 7] = [
    "model",
    "ddp",
    "optimizer",
    "comm_overlap",
    "mixed_precision",
    "dist",
    "train",
];

/// The field of a recipe that has the name of an option of Megatron-LM, and its value; `None` if the recipe sets no such field.
/// Where several sections have the field, one that is on counts.
pub(crate) fn field<'a>(doc: &'a Document, option: &str) -> Option<(String, &'a Node)> {
    let renamed = RENAMED.iter().find(|(_, known)| *known == option);
    let name = renamed.map_or_else(|| flag::field(option), |(name, _)| (*name).to_owned());
    let set = |section: &&str| {
        let path = format!("{section}.{name}");
        value(doc, &path).map(|node| (path, node))
    };
    let found: Vec<(String, &Node)> = SECTIONS.iter().filter_map(set).collect();
    let on = |(_, node): &&(String, &Node)| !matches!(node.value, Value::Null | Value::Bool(false));
    found.iter().find(on).or(found.first()).cloned()
}

/// The field that lets attention compute in 8 bits.
const NARROW_ATTENTION: &str = "model.fp8_dot_product_attention";

/// Fields that stand for an option of Megatron-LM when they are `False`, where that option has
/// another name.
const OFF: [(&str, &str); 3] = [
    ("apply_rope_fusion", "--no-rope-fusion"),
    ("bias_activation_fusion", "--no-bias-swiglu-fusion"),
    ("bias_activation_fusion", "--no-bias-gelu-fusion"),
];

/// Adds options that no strategy expresses, so that notes mention them.
fn noted(doc: &Document, all: &mut Options) -> Result<(), ImportError> {
    let schema = Schema::of(Dialect::MegatronLm)?;
    let counts = |option: &&String| is_noted(option) && schema.kind(option).is_some();
    for section in SECTIONS {
        let fields = doc.root.get(section).map_or(&[][..], Node::entries);
        for (field, _) in fields {
            let Some(node) = value(doc, &format!("{section}.{field}")) else {
                continue;
            };
            let name = field.replace('_', "-");
            let names = match node.value {
                Value::Bool(false) => {
                    let renamed = OFF.iter().filter(|(on, _)| on == field);
                    let renamed = renamed.map(|(_, option)| (*option).to_owned());
                    let plain = ["no", "disable"].map(|off| format!("--{off}-{name}"));
                    plain.into_iter().chain(renamed).collect()
                }
                _ => vec![
                    format!("--{name}"),
                    format!("--{section}-{name}"),
                    format!("--use-{name}"),
                ],
            };
            let value = match &node.value {
                Value::Bool(false) => true.into(),
                // `AttnBackend.unfused`, `torch.bfloat16`.
                Value::Expression(path) => {
                    let known = TORCH.iter().find(|(_, torch)| torch == path);
                    let last = path.rsplit('.').next().unwrap_or_default();
                    known.map_or(last, |(name, _)| name).into()
                }
                other => other.clone(),
            };
            for option in names.iter().filter(counts) {
                all.put_as(option, &format!("{section}.{field}"), node, value.clone());
            }
        }
    }
    Ok(())
}

/// Adds Megatron-LM's options for the types of gradients and of optimizer states.
fn types(doc: &Document, all: &mut Options) -> Result<(), ImportError> {
    let recipe = doc.find("mixed_precision");
    let recipe = recipe.map_or_else(String::new, |node| node.value.shown());
    // The recipe of mixed precision sets the type over what `ddp` says.
    let wide = doc.flag(GRADIENTS)?;
    all.put(
        match wide.unwrap_or(recipe_is_wide(&recipe)) {
            true => "--accumulate-allreduce-grads-in-fp32",
            false => "--grad-reduce-in-bf16",
        },
        0,
        true,
    );
    for (field, option) in TYPES {
        if let Some(node) = doc.find(field) {
            let shown = node.value.shown();
            let known = TORCH.iter().find(|(_, torch)| *torch == shown);
            all.put(option, node.line, known.map_or("auto", |(name, _)| *name));
        }
    }
    all.put(OFFLOAD, 0, doc.on("optimizer.optimizer_cpu_offload")?);
    if let Some(layers) = doc.size("model.cpu_offloading_num_layers")? {
        all.put(OFFLOAD_LAYERS, 0, layers);
    }
    let aware = doc.on("optimizer.use_precision_aware_optimizer")?;
    all.put(PRECISION_AWARE, 0, aware);
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

/// Megatron-LM's name of the FP8 recipe that the mixed-precision recipe has; `None` without one.
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
        // The same recipes exist for fp16.
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
                ["fp16", "bf16", "fp8", "fp4"].contains(&name.as_str())
                    && !matches!(node.value, Value::Bool(false) | Value::Null)
            };
            let on = fields.iter().filter(on).map(|(name, _)| name.as_str());
            on.collect::<Vec<_>>().join("_")
        }
        Some(other) => other.shown(),
    };
    // `bf16_with_nvfp4_mixed`.
    if recipe.contains("fp4") {
        return Err(doc.unsupported(key, "fp4 training is not planned"));
    }
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
