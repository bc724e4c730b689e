//! Plans as the configuration of a training system: every decision arrives in the system's own
//! keys, or the export is refused with the reason and the choice that the system can express.

mod bridge;
mod deepspeed;
mod dialect;
mod flag;
mod hf;
mod job;
mod launch;
pub(crate) mod megatron;
mod model;
mod nanotron;
mod refusal;
pub mod schema;
pub(crate) mod torchtitan;
mod vescale;

pub use self::dialect::Dialect;
pub use self::job::{Exported, ExportedFile, Job, Launcher};
pub use self::refusal::{ExportError, Refusal};

use self::launch::Program;
use self::refusal::Limits;
use self::torchtitan::Edition;

/// Writes a plan for a training system, with the script that starts it if one is asked for.
///
/// # Errors
/// When the system cannot express the plan.
pub fn export(
    job: &Job<'_>,
    dialect: Dialect,
    launcher: Option<Launcher>,
) -> Result<Exported, ExportError> {
    // What has no effect must not be refused, nor set a switch that needs another.
    let decisions = job.decisions.canonical();
    let job = &Job {
        decisions: &decisions,
        ..*job
    };
    let mut limits = Limits::default();
    let (mut files, program) = match dialect {
        Dialect::MegatronLm => (megatron::files(job, &mut limits), megatron::program(job)),
        Dialect::MegatronBridge => (bridge::files(job, &mut limits), bridge::program()),
        Dialect::Torchtitan02 => titan(job, Edition::Toml02, &mut limits),
        Dialect::Torchtitan03 => titan(job, Edition::Python03, &mut limits),
        Dialect::TorchtitanMain => titan(job, Edition::PythonMain, &mut limits),
        Dialect::DeepSpeed => (deepspeed::files(job, &mut limits), deepspeed::program()),
        Dialect::Accelerate => (
            hf::accelerate(job, &mut limits),
            hf::accelerate_program(job),
        ),
        Dialect::Axolotl => (hf::axolotl(job, &mut limits), hf::axolotl_program()),
        Dialect::Nanotron => (nanotron::files(job, &mut limits), nanotron::program()),
        Dialect::VeScale => (vescale::files(job, &mut limits), vescale::program()),
    };
    if let Some(launcher) = launcher {
        let script = launch::script(job, launcher, &program, &files);
        files.push(script);
    }
    if limits.refusals.is_empty() {
        let notes = limits.notes;
        return Ok(Exported { files, notes });
    }
    Err(ExportError::Inexpressible {
        target: dialect.name(),
        refusals: limits.refusals,
    })
}

fn titan(job: &Job<'_>, edition: Edition, limits: &mut Limits) -> (Vec<ExportedFile>, Program) {
    let files = torchtitan::files(job, edition, limits);
    (files, torchtitan::program(edition))
}
