//! What the page asks: its fields as the user filled them in.

use std::collections::{BTreeMap, BTreeSet};

use answers::origins;
use answers::values;
use answers::{AnswerError, Question, Training};
use catalog::load::PresetInfo;
use catalog::{Cluster, Mistake, Precision};
use serde::{Deserialize, Serialize};

/// Name of a pasted `config.json`: that of its file, as on the command line.
const PASTED: &str = "config.json";

/// The fields of the page; an empty one leaves the default.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Asked {
    /// Model preset.
    model: String,
    /// Text of a `config.json`, which goes before the preset.
    config: String,
    /// Cluster preset.
    cluster: String,
    /// A cluster described in one line, which goes before the preset.
    line: String,
    gpus: String,
    runtime: String,
    seq: String,
    global_batch: String,
    precision: String,
    headroom: String,
    tokens: String,
}

impl Asked {
    /// The question that the fields make.
    pub(crate) fn question(&self) -> Result<Question, AnswerError> {
        let pasted = given(&self.config).map(str::to_owned);
        let model = match &pasted {
            Some(_) => PASTED.to_owned(),
            None => self.model.trim().to_owned(),
        };
        let cluster = given(&self.line).or(given(&self.cluster));
        Ok(Question {
            model,
            config: pasted,
            cluster: cluster.map(str::to_owned),
            gpus: values::gpus(&self.gpus)?,
            runtime: given(&self.runtime).map(str::to_owned),
            seq: read(&self.seq, values::count)?,
            global_batch: read(&self.global_batch, values::count)?,
            precision: read(&self.precision, values::precision)?.unwrap_or(Precision::Bf16),
            headroom: read(&self.headroom, values::share)?
                .unwrap_or(answers::inputs::DEFAULT_HEADROOM),
            documents: None,
            adapters: None,
            jitter: None,
        })
    }

    /// The training whose days and dollars are asked for.
    pub(crate) fn training(&self, cluster: &Cluster) -> Result<Training, AnswerError> {
        Ok(Training::on(
            cluster,
            read(&self.tokens, values::tokens)?,
            None,
        ))
    }

    /// Which values were given; the others are defaults.
    pub(crate) fn given(&self) -> origins::Asked {
        let fields = [
            ("model", given(&self.model).or(given(&self.config))),
            ("cluster", given(&self.cluster).or(given(&self.line))),
            ("gpus", given(&self.gpus)),
            ("runtime", given(&self.runtime)),
            ("seq", given(&self.seq)),
            ("global_batch", given(&self.global_batch)),
            ("precision", given(&self.precision)),
            ("headroom", given(&self.headroom)),
        ];
        let flags = fields
            .into_iter()
            .filter(|(_, value)| value.is_some())
            .map(|(flag, _)| flag.to_owned());
        origins::Asked::these(flags.collect::<BTreeSet<_>>(), BTreeMap::new())
    }
}

/// The text of a field that is not empty.
fn given(field: &str) -> Option<&str> {
    Some(field.trim()).filter(|text| !text.is_empty())
}

/// The value of a field that is not empty.
fn read<T>(
    field: &str,
    read: impl Fn(&str) -> Result<T, Mistake>,
) -> Result<Option<T>, AnswerError> {
    Ok(given(field).map(read).transpose()?)
}

/// What a question may name.
#[derive(Serialize)]
pub(crate) struct Presets {
    models: Vec<Preset>,
    clusters: Vec<Preset>,
    runtimes: Vec<Preset>,
}

/// One preset.
#[derive(Serialize)]
struct Preset {
    name: String,
    aliases: Vec<String>,
    summary: String,
}

/// All presets.
pub(crate) fn presets() -> Presets {
    let of = |presets: Vec<PresetInfo>| {
        let of = |info: PresetInfo| Preset {
            name: info.name,
            aliases: info.aliases,
            summary: info.summary,
        };
        presets.into_iter().map(of).collect()
    };
    Presets {
        models: of(catalog::load::model_names()),
        // Never fails for presets; a test reads them all.
        clusters: of(catalog::load::cluster_names().unwrap_or_default()),
        runtimes: of(catalog::load::runtime_names()),
    }
}
