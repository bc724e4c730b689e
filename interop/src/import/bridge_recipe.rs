//! The function from which a Megatron Bridge recipe takes its configuration (`megatron/bridge/recipes/common.py`), and the defaults
//! that this function sets: sizes, overlaps and adapters.

use catalog::{AdaptedModules, Adapters};

use super::document::Document;
use super::error::ImportError;
use super::unplanned::LENGTHS;
use crate::config::{Node, Value, place};

/// Values that hold unless a recipe sets others.
pub(super) struct Base {
    function: &'static str,
    pub(super) global_batch: u64,
    pub(super) micro_batch: u64,
    pub(super) seq_len: u64,
    /// Whether gradients are reduced and parameters gathered beside computation.
    pub(super) overlaps: bool,
    /// The base's `ddp.use_distributed_optimizer`. The field of the same name in `optimizer` is on in every base
    /// (`distributed_fused_adam_with_cosine_annealing`).
    pub(super) distributed: bool,
    /// How Megatron's FSDP shards.
    pub(super) sharding: &'static str,
    /// Whether short sequences are packed into one.
    packs: bool,
    /// Whether adapters are trained in place of the weights.
    adapters: bool,
}

const PRETRAINING: Base = Base {
    function: "_pretrain_common",
    global_batch: 32,
    micro_batch: 2,
    seq_len: 4096,
    overlaps: true,
    distributed: true,
    sharding: "optim_grads_params",
    packs: false,
    adapters: false,
};
const TUNING: Base = Base {
    function: "_sft_common",
    global_batch: 128,
    micro_batch: 1,
    seq_len: 2048,
    overlaps: false,
    distributed: false,
    sharding: "no_shard",
    packs: true,
    adapters: false,
};
const TUNING_WITH_IMAGES: Base = Base {
    function: "_sft_common_vlm",
    packs: true,
    overlaps: false,
    ..PRETRAINING
};
const BASES: [Base; 5] = [
    PRETRAINING,
    TUNING,
    Base {
        function: "_peft_common",
        adapters: true,
        ..TUNING
    },
    TUNING_WITH_IMAGES,
    Base {
        function: "_peft_common_vlm",
        adapters: true,
        ..TUNING_WITH_IMAGES
    },
];

/// The function whose configuration the recipe changes. A recipe that is given its configuration is taken to be given one for
/// pre-training.
pub(super) fn base(doc: &Document) -> Result<&'static Base, ImportError> {
    let known = |function: &str| BASES.iter().find(|base| base.function == function);
    let mut made = doc.python.made.iter().rev();
    if let Some(base) = made.clone().find_map(|made| known(&made.function)) {
        return Ok(base);
    }
    match made.find(|made| made.imported) {
        None => Ok(&BASES[0]),
        Some(made) => {
            let names = BASES.map(|base| base.function).join(", ");
            let message = format!(
                "its settings are in another file; import that file's recipe, or write a recipe that starts from one of {names}"
            );
            let place = place(&doc.path, made.line);
            Err(ImportError::value(place, &made.function, message))
        }
    }
}

/// The value of a field, or of the recipe's variable that the field is set to.
pub(super) fn value<'a>(doc: &'a Document, field: &str) -> Option<&'a Node> {
    let node = doc.find(field)?;
    Some(variable(doc, node).unwrap_or(node))
}

/// The value of the variable that a node names; `None` if the recipe sets no such variable.
fn variable<'a>(doc: &'a Document, node: &Node) -> Option<&'a Node> {
    match &node.value {
        Value::Expression(name) => doc.root.get(name.trim()),
        _ => None,
    }
}

/// A note on sequences that are packed from shorter ones, if they are.
pub(super) fn packing(doc: &Document, base: &Base) -> Option<String> {
    let said = |field: &str| match value(doc, field)?.value {
        Value::Bool(on) => Some(on),
        _ => None,
    };
    let packs = said("dataset.enable_offline_packing");
    let packs = packs.or_else(|| said("dataset.enable_in_batch_packing"));
    let path = &doc.path;
    packs.unwrap_or(base.packs).then(|| {
        format!(
            "{path}: sequences packed from documents are planned as attention over whole sequences; {LENGTHS}"
        )
    })
}

const ONLY_LORA: &str = "only adapters of LoRA are planned";

/// The adapters that a recipe trains; `None` if it trains all weights. Unless set, they are those of Bridge's `LoRA` (peft/lora.py).
pub(super) fn adapters(
    doc: &Document,
    base: &Base,
    notes: &mut Vec<String>,
) -> Result<Option<Adapters>, ImportError> {
    let makes = |node: &&Node| matches!(&node.value, Value::Call(name, _) if is_lora(name) || name.ends_with(DEFAULT));
    let said = doc.find("peft");
    // The recipe's own call that makes adapters, for a `peft` whose variable it does not set.
    let made = || {
        let mut nodes = doc.root.entries().iter().map(|(_, node)| node);
        nodes.find(makes)
    };
    let (node, by_variable) = match said.map(|node| &node.value) {
        None if base.adapters => (None, false),
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Expression(_)) => {
            let node = said.and_then(|node| variable(doc, node)).or_else(made);
            (node, true)
        }
        Some(_) => (said, false),
    };
    if let Some(Value::Call(name, arguments)) = node.map(|node| &node.value) {
        let scheme = arguments.iter().find(|(name, _)| name == "#0");
        match scheme.and_then(|(_, scheme)| scheme.text()) {
            _ if is_lora(name) => {}
            Some("none") => return Ok(None),
            None | Some("lora") if name.ends_with(DEFAULT) => {}
            _ => return Err(doc.unsupported("peft", ONLY_LORA)),
        }
    }
    if let Some(Value::Expression(scheme)) = said.map(|node| &node.value).filter(|_| node.is_none())
    {
        let place = doc.place("peft");
        notes.push(format!(
            "{place}: peft `{scheme}` is planned as Bridge's usual LoRA"
        ));
    }
    // `adapters.dim = 8` sets a field of a variable, which is read as `dim` at the root.
    let field = |name: &str| {
        let of_variable = || doc.root.get(name).filter(|_| by_variable);
        of_variable().or_else(|| node.and_then(|node| node.get(name)))
    };
    lora(doc, field).map(Some)
}

/// The function with which recipes make the adapters of a scheme.
const DEFAULT: &str = "default_peft_config";

fn is_lora(class: &str) -> bool {
    class.rsplit('.').next() == Some("LoRA")
}

/// Adapters of `LoRA` with these fields.
fn lora<'a>(
    doc: &Document,
    field: impl Fn(&str) -> Option<&'a Node>,
) -> Result<Adapters, ImportError> {
    let wrong = |name: &str, expected: &str| doc.unsupported(&format!("peft.{name}"), expected);
    if field("normalize_moe_lora").is_some_and(|node| node.value == Value::Bool(true)) {
        let why = "adapters of another rank in experts are not planned";
        return Err(wrong("normalize_moe_lora", why));
    }
    let size = |name: &str| match field(name).map(|node| node.int().map(u64::try_from)) {
        None => Ok(32),
        Some(Some(Ok(size))) => Ok(size),
        Some(_) => Err(wrong(name, "a whole number is expected")),
    };
    let share = field("dropout").map_or(Some(0.0), Node::float);
    let dropout = share.ok_or_else(|| wrong("dropout", "a number from 0 to 1 is expected"))?;
    let modules = match field("target_modules") {
        None => AdaptedModules::all(),
        Some(node) => {
            let node = variable(doc, node).unwrap_or(node);
            let names = node.list().unwrap_or_default();
            let known = |node: &Node| AdaptedModules::named(node.text()?);
            let known: Option<Vec<AdaptedModules>> = names.iter().map(known).collect();
            let known = known.filter(|known| !known.is_empty()).ok_or_else(|| {
                let why = "adapters are planned of linear_qkv, linear_proj, linear_fc1 and linear_fc2, in all layers";
                wrong("target_modules", why)
            })?;
            known.iter().flat_map(|of| of.modules()).collect()
        }
    };
    Ok(Adapters {
        rank: size("dim")?,
        alpha: size("alpha")?,
        modules,
        dropout,
    })
}
