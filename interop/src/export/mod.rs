//! Writes plans as configurations of training systems: every decision is written in the system's own keys, or the
//! export is refused with the reason and a choice that the system can express.

mod adapters;
mod assumptions;
pub(crate) mod bridge;
mod core_model;
mod core_options;
pub(crate) mod core_precision;
mod core_rewrites;
pub(crate) mod deepspeed;
mod dialect;
mod documents;
pub(crate) mod flag;
pub(crate) mod graphs;
mod hf;
mod inputs;
mod job;
mod launch;
pub(crate) mod megatron;
pub(crate) mod nanotron;
mod refusal;
pub mod schema;
mod script;
mod script_rewrites;
mod stance;
pub(crate) mod torchtitan;
mod trainer;
mod vescale;

pub use self::assumptions::{Assumption, Differs};
pub use self::dialect::Dialect;
pub use self::documents::packing_instead;
pub use self::inputs::{Inputs, Unfilled};
pub use self::job::{Exported, ExportedFile, Job, Launcher, plan_of};
pub use self::refusal::{ExportError, Refusal};

pub(crate) use self::inputs::PLACEHOLDER;

use catalog::PredictionModules;
use catalog::model::Family;
use plans::divided::beside_predictions;

use self::job::Draft;
use self::launch::Program;
use self::refusal::Limits;
use self::torchtitan::Edition;

/// Writes a plan for a training system, with a script that starts it if one is asked for.
///
/// # Errors
/// When the system cannot express the plan.
pub fn export(
    job: &Job<'_>,
    dialect: Dialect,
    launcher: Option<Launcher>,
) -> Result<Exported, ExportError> {
    // A decision without effect must neither be refused nor set a switch that requires another.
    let decisions = job.decisions.canonical(job.model);
    let job = &Job {
        decisions: &decisions,
        ..*job
    };
    let mut limits = Limits::of(job.decisions);
    let (drafts, program) = drafts(job, dialect, &mut limits);
    if !limits.refusals.is_empty() {
        name_a_taker(job, dialect, &mut limits.refusals);
        return Err(ExportError::Inexpressible {
            target: dialect.name(),
            refusals: limits.refusals,
        });
    }
    let Limits {
        notes,
        unfilled,
        unmet,
        ..
    } = limits;
    let drafts = drafts.into_iter();
    let mut files: Vec<ExportedFile> = drafts.map(|draft| draft.file(job, &unfilled)).collect();
    if let Some(launcher) = launcher {
        let script = launch::script(job, launcher, program, &files, &unfilled);
        files.push(script);
    }
    Ok(Exported {
        files,
        notes,
        unfilled,
        unmet,
    })
}

fn drafts(job: &Job<'_>, dialect: Dialect, limits: &mut Limits) -> (Vec<Draft>, Program) {
    limits.refuse_model(
        job.model.adapters.is_some() && !dialect.writes_adapters(),
        "adapters",
        "configurations of this target train all weights",
    );
    documents::collect(job, dialect, limits);
    let hybrid = job.model.hybrid.is_some();
    let own = dialect == Dialect::MegatronBridge && bridge::from_hub(job);
    let named = dialect.names_the_model() || own;
    limits.refuse_model(
        hybrid && !named,
        "hybrid",
        "configurations of this target have attention and a feed-forward block in every layer",
    );
    limits.refuse(
        hybrid && named && job.decisions.tp > 1,
        "tp=1",
        "this target does not split recurrent layers over ranks",
    );
    limits.note(
        job.model.family == Family::GptOss && dialect.loads_in_script(),
        "the hub holds gpt-oss in MXFP4, in which it cannot be trained: load it with \
         quantization_config=Mxfp4Config(dequantize=True)",
    );
    predictions(job, dialect, limits);
    match dialect {
        Dialect::MegatronLm => (megatron::files(job, limits), megatron::program(job)),
        Dialect::MegatronBridge => (bridge::files(job, limits), bridge::program(job)),
        Dialect::Torchtitan02 => titan(job, Edition::Toml02, limits),
        Dialect::Torchtitan03 => titan(job, Edition::Python03, limits),
        Dialect::TorchtitanMain => titan(job, Edition::PythonMain, limits),
        Dialect::DeepSpeed => (deepspeed::files(job, limits), deepspeed::program(job)),
        Dialect::Accelerate => (hf::accelerate(job, limits), hf::accelerate_program(job)),
        Dialect::Axolotl => (hf::axolotl(job, limits), hf::axolotl_program()),
        Dialect::Transformers => (trainer::transformers(job, limits), trainer::program(job)),
        Dialect::TransformersDeepSpeed => {
            (trainer::with_deepspeed(job, limits), trainer::program(job))
        }
        Dialect::LlamaFactory => (
            trainer::llama_factory(job, limits),
            trainer::llama_factory_program(),
        ),
        Dialect::Nanotron => (nanotron::files(job, limits), nanotron::program()),
        Dialect::VeScale => (vescale::files(job, limits), vescale::program(job)),
    }
}

/// Refuses layouts that a target does not have beside prediction modules, and says where it leaves the modules out: its runtime's
/// preset tells both. Hugging Face's library, which loads models by name, leaves them out.
fn predictions(job: &Job<'_>, dialect: Dialect, limits: &mut Limits) {
    let Ok(own) = catalog::load::runtime(dialect.runtime()) else {
        return;
    };
    if let Some((what, instead)) = beside_predictions(job.decisions, job.model, &own.space) {
        let why = format!("it has no {what} beside multi-token-prediction modules");
        limits.refuse(true, instead, why);
    }
    let left_out = own.space.prediction_modules == PredictionModules::LeftOut;
    limits.note(
        job.model.mtp_layers > 0 && (left_out || dialect.names_the_model()),
        "it does not train the model's multi-token-prediction modules, which the prediction counts",
    );
}

/// If the model is refused, names the nearest target that can express it: one of the same runtime, else the first.
fn name_a_taker(job: &Job<'_>, dialect: Dialect, refusals: &mut [Refusal]) {
    if !refusals.iter().any(|refusal| refusal.of_model) {
        return;
    }
    let takes = |other: &&Dialect| {
        let mut limits = Limits::of(job.decisions);
        drafts(job, **other, &mut limits);
        !limits.refusals.iter().any(|refusal| refusal.of_model)
    };
    let others = Dialect::ALL
        .iter()
        .filter(|other| other.target() != dialect.target());
    let takers: Vec<&Dialect> = others.filter(takes).collect();
    let near = takers
        .iter()
        .find(|other| other.runtime() == dialect.runtime());
    let taker = near.or(takers.first()).map(|other| other.target());
    for refusal in refusals.iter_mut().filter(|refusal| refusal.of_model) {
        refusal.taken_by = taker;
    }
}

/// The options with which Megatron-LM builds a model, each with its value or `on`; what it cannot build is left out.
pub(crate) fn megatron_options(model: &catalog::ModelConfig) -> Vec<(String, String)> {
    let mut limits = Limits::default();
    let longest = model.max_position;
    let fields = core_model::fields(model, longest, core_model::Reach::Options, &mut limits);
    let flags = core_options::options(&fields, &fields, 1);
    let said = |values: Vec<String>| match values.as_slice() {
        [] => "on".to_owned(),
        _ => values.join(" "),
    };
    flags
        .into_iter()
        .map(|flag| (flag.name, said(flag.values)))
        .collect()
}

fn titan(job: &Job<'_>, edition: Edition, limits: &mut Limits) -> (Vec<Draft>, Program) {
    let files = torchtitan::files(job, edition, limits);
    (files, torchtitan::program(edition))
}
