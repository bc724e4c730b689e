//! Compares the model that a Megatron-LM script describes with a known one, option by option; an absent option has
//! Megatron-LM's default.

use catalog::model::ModelConfig;

use super::document::Document;
use super::error::ImportError;
use super::megatron_config::{DIVISIBLE_BY, WINDOW_LAYERS, implied_vocabulary, listed};
use crate::config::{Node, Value, place};
use crate::export::megatron_options;

/// What a difference in an option means for the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weight {
    /// The script is for another model.
    Another,
    /// The same model with another constant: its cost is the same, its training differs.
    Nearly,
}

/// Megatron-LM's value for an absent option.
#[derive(Clone, Copy, Debug)]
enum Silent {
    /// The option is off, or has no value.
    Absent,
    Is(&'static str),
    /// The same value as this other option has.
    As(&'static str),
    /// The hidden size divided by the number of heads.
    HeadWidth,
    /// Four times the hidden size, or under SwiGLU two thirds of that in multiples of 64.
    FourTimes,
}

use Silent::{Absent, As, FourTimes, HeadWidth, Is};
use Weight::{Another, Nearly};

const OPTIONS: &[(&str, Silent, Weight)] = &[
    ("--num-layers", Absent, Another),
    ("--hidden-size", Absent, Another),
    ("--num-attention-heads", Absent, Another),
    ("--swiglu", Absent, Another),
    ("--squared-relu", Absent, Another),
    ("--quick-geglu", Absent, Another),
    ("--ffn-hidden-size", FourTimes, Another),
    ("--normalization", Is("LayerNorm"), Another),
    ("--position-embedding-type", Is("learned_absolute"), Another),
    ("--untie-embeddings-and-output-weights", Absent, Another),
    ("--qk-layernorm", Absent, Another),
    ("--multi-latent-attention", Absent, Another),
    ("--num-experts", Absent, Another),
    ("--mtp-num-layers", Absent, Another),
    ("--disable-bias-linear", Absent, Another),
    ("--window-size", Absent, Another),
    ("--mtp-use-repeated-layer", Absent, Another),
    ("--enable-mhc-connections", Absent, Another),
    ("--heterogeneous-layers-config-path", Absent, Another),
    (
        "--heterogeneous-layers-config-encoded-json",
        Absent,
        Another,
    ),
    ("--apply-layernorm-1p", Absent, Nearly),
    ("--norm-epsilon", Is("0.00001"), Nearly),
    ("--use-rope-scaling", Absent, Nearly),
    ("--softmax-type", Is("vanilla"), Nearly),
    ("--hidden-dropout", Is("0.1"), Nearly),
    ("--attention-dropout", Is("0.1"), Nearly),
];

/// Options of rotary embedding, latent attention and experts: they have no effect unless the model uses those.
const ROTARY: &[(&str, Silent, Weight)] = &[
    ("--rotary-base", Is("10000"), Nearly),
    ("--rotary-percent", Is("1"), Nearly),
    ("--rotary-scaling-factor", Is("1"), Nearly),
];
const GROUPED: &[(&str, Silent, Weight)] = &[
    ("--num-query-groups", As("--num-attention-heads"), Another),
    ("--kv-channels", HeadWidth, Another),
];
const LATENT: &[(&str, Silent, Weight)] = &[
    ("--q-lora-rank", Absent, Another),
    ("--kv-lora-rank", Is("32"), Another),
    ("--qk-head-dim", Is("128"), Another),
    ("--qk-pos-emb-head-dim", Is("64"), Another),
    ("--v-head-dim", Is("128"), Another),
];
const EXPERTS: &[(&str, Silent, Weight)] = &[
    ("--moe-router-topk", Is("2"), Another),
    ("--moe-ffn-hidden-size", As("--ffn-hidden-size"), Another),
    ("--moe-shared-expert-intermediate-size", Absent, Another),
    ("--moe-shared-expert-gate", Absent, Another),
    ("--moe-latent-size", Absent, Another),
    ("--moe-router-score-function", Is("softmax"), Nearly),
    ("--moe-router-pre-softmax", Absent, Nearly),
    ("--moe-router-topk-scaling-factor", Absent, Nearly),
    ("--moe-router-num-groups", Absent, Nearly),
    ("--moe-router-group-topk", Absent, Nearly),
    ("--moe-router-enable-expert-bias", Absent, Nearly),
];

/// Words in the names of programs of Megatron-LM and its descendants that train encoders, retrievers, state-space models or models of
/// images.
const NO_DECODERS: [&str; 11] = [
    "bert",
    "biencoder",
    "hybrid",
    "ict",
    "mamba",
    "mimo",
    "realm",
    "retro",
    "t5",
    "vision",
    "vlm",
];

/// Options in which two models differ, with messages; those in `nearly` do not change the cost.
#[derive(Clone, Debug, Default)]
pub(super) struct Compared {
    pub(super) another: Vec<(&'static str, String)>,
    pub(super) nearly: Vec<(&'static str, String)>,
}

/// Whether the script describes its model.
pub(super) fn describes(doc: &Document) -> bool {
    // Megatron-LM does not start without any of these; a partial script may lack the last.
    let needed = [
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--max-position-embeddings",
    ];
    needed.iter().all(|key| doc.root.get(key).is_some())
}

/// Refuses a script whose model is not a decoder-only transformer.
pub(super) fn decodes(doc: &Document) -> Result<(), ImportError> {
    let message = "makes a model that is no decoder-only transformer of attention layers";
    for key in ["--hybrid-layer-pattern", "--spec"] {
        if doc.root.get(key).is_some() {
            return Err(doc.unsupported(key, message));
        }
    }
    let program = doc.launch.program.as_ref();
    match program.filter(|program| makes_another(&program.text)) {
        Some(program) => {
            let place = place(&doc.path, program.line);
            Err(ImportError::value(place, &program.text, message))
        }
        None => Ok(()),
    }
}

/// Compares the script's model with `model`.
///
/// # Errors
/// When the script's model is not a decoder-only transformer.
pub(super) fn compare(doc: &Document, model: &ModelConfig) -> Result<Compared, ImportError> {
    decodes(doc)?;
    let ours = megatron_options(model);
    let mut compared = Compared::default();
    let whole = describes(doc);
    let rotary = ours.iter().any(|(name, _)| name == "--rotary-base");
    let latent = doc.root.get("--multi-latent-attention").is_some();
    let lists = [
        (OPTIONS, true),
        (ROTARY, rotary),
        (GROUPED, !latent),
        (LATENT, latent),
        (
            EXPERTS,
            doc.root.get("--num-experts").is_some() && model.moe.is_some(),
        ),
    ];
    for (options, counts) in lists {
        for &(key, default, weight) in options.iter().filter(|_| counts) {
            // A partial description is compared only in the options that it has.
            if !whole && doc.root.get(key).is_none() {
                continue;
            }
            let said = value_or_default(doc, key, default);
            // The value of an environment variable is unknown here.
            if said.contains('$') {
                continue;
            }
            let of_model = of_model(&ours, key, default);
            if same(&said, &of_model) {
                continue;
            }
            let message = format!(
                "{}, but model {} has {}",
                shown(&said),
                model.name,
                shown(&of_model)
            );
            match weight {
                Another => compared.another.push((key, message)),
                Nearly => compared.nearly.push((key, message)),
            }
        }
    }
    compared.another.extend(other_vocabulary(doc, model));
    compared.another.extend(other_windows(doc, model, whole)?);
    Ok(compared)
}

/// Whether a program of Megatron-LM trains models other than decoders, by the words of its name.
fn makes_another(program: &str) -> bool {
    let stem = program.trim_end_matches(".py");
    let kind = stem.strip_prefix("pretrain_").unwrap_or_default();
    kind.split('_').any(|word| NO_DECODERS.contains(&word))
}

/// The difference, if the script has windows in other layers than the model: option and message.
fn other_windows(
    doc: &Document,
    model: &ModelConfig,
    whole: bool,
) -> Result<Option<(&'static str, String)>, ImportError> {
    if doc.root.get("--window-size").is_none() || !whole && doc.root.get(WINDOW_LAYERS).is_none() {
        return Ok(None);
    }
    let layers = 0..model.layers;
    let window = |layer| u64::from(model.layer_class(layer).window.is_some());
    let theirs: Vec<u64> = layers.clone().map(window).collect();
    let every_layer = || layers.map(|_| 1).collect();
    let ours: Vec<u64> = listed(doc, WINDOW_LAYERS, 0)?.unwrap_or_else(every_layer);
    // A partial script with a number does not say how many layers there are.
    let other = ours != theirs && (whole || !ours.is_empty());
    let said = value_or_default(doc, WINDOW_LAYERS, Absent);
    let message = || {
        let name = &model.name;
        format!(
            "{}, but windows are in other layers of model {name}",
            shown(&said)
        )
    };
    Ok(other.then(|| (WINDOW_LAYERS, message())))
}

/// Option and message if the vocabularies differ; both may be rounded up for tensor parallelism.
fn other_vocabulary(doc: &Document, model: &ModelConfig) -> Option<(&'static str, String)> {
    let size = |key: &str| doc.find(key)?.int().and_then(|n| u64::try_from(n).ok());
    let options = ["--padded-vocab-size", "--vocab-size"];
    let (key, said) = options
        .into_iter()
        .find_map(|key| Some((key, size(key)?)))?;
    let tp = size("--tensor-model-parallel-size").unwrap_or(1);
    let unit = size("--make-vocab-size-divisible-by").unwrap_or(DIVISIBLE_BY);
    let rounded = |rows: u64| {
        let units = [1, tp, unit.saturating_mul(tp)];
        units.map(|unit| rows.div_ceil(unit.max(1)).saturating_mul(unit.max(1)))
    };
    let theirs = rounded(model.vocab);
    // `NullTokenizer` adds a row for the end of a document.
    let ours = [rounded(said), rounded(said.saturating_add(1))].concat();
    let message = || format!("{said}, but model {} has {}", model.name, model.vocab);
    (!ours.iter().any(|rows| theirs.contains(rows))).then(|| (key, message()))
}

/// Whether the vocabulary that the script's tokenizer implies, and the script's number of positions, differ from the model's.
pub(super) fn unlike(doc: &Document, model: &ModelConfig) -> Result<[bool; 2], ImportError> {
    let rows = implied_vocabulary(doc)?;
    let other = |said: Option<u64>, theirs: u64| said.is_some_and(|n| n != theirs);
    // The value of an environment variable is unknown here.
    let positions = doc.size("--max-position-embeddings").ok().flatten();
    Ok([
        other(rows, model.vocab),
        other(positions, model.max_position),
    ])
}

fn shown(value: &str) -> &str {
    if value.is_empty() { "none" } else { value }
}

fn same(a: &str, b: &str) -> bool {
    let number = |text: &str| text.parse::<f64>().ok();
    let plain = |text: &str| text.trim_matches(['(', ')']).replace(' ', "");
    match (number(a), number(b)) {
        (Some(a), Some(b)) => (a - b).abs() <= 1e-9 * b.abs(),
        // A window may stand in parentheses.
        _ => plain(a) == plain(b),
    }
}

/// The script's value of an option, or Megatron-LM's default; empty for none.
fn value_or_default(doc: &Document, key: &str, default: Silent) -> String {
    let written = |key: &str| doc.root.get(key).map(word);
    // The number of groups takes effect only with its switch.
    let used = key != "--num-query-groups" || doc.root.get("--group-query-attention").is_some();
    if let Some(value) = written(key).filter(|_| used) {
        return value;
    }
    let size = |key: &str| written(key).and_then(|text| text.parse::<u64>().ok());
    let hidden = size("--hidden-size").unwrap_or(0);
    match default {
        Absent => String::new(),
        Is(value) => value.to_owned(),
        As("--ffn-hidden-size") => value_or_default(doc, "--ffn-hidden-size", FourTimes),
        As(other) => written(other).unwrap_or_default(),
        HeadWidth => match size("--num-attention-heads") {
            Some(heads) if heads > 0 => (hidden / heads).to_string(),
            _ => String::new(),
        },
        FourTimes if doc.root.get("--swiglu").is_some() => {
            (hidden.saturating_mul(8) / 3 / 64 * 64).to_string()
        }
        FourTimes => hidden.saturating_mul(4).to_string(),
    }
}

/// The value of an option in the known model's export, or Megatron-LM's default; empty for none.
fn of_model(ours: &[(String, String)], key: &str, default: Silent) -> String {
    let find = |key: &str| ours.iter().find(|(name, _)| name == key);
    match (find(key), default) {
        (Some((_, value)), _) => value.clone(),
        (None, Is(value)) => value.to_owned(),
        (None, As(other)) => find(other).map_or_else(String::new, |(_, value)| value.clone()),
        (None, Absent | HeadWidth | FourTimes) => String::new(),
    }
}

fn word(node: &Node) -> String {
    match &node.value {
        Value::Bool(true) => "on".to_owned(),
        other => other.plain(),
    }
}
