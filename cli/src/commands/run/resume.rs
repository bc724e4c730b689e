//! The checkpoint that a run resumes from.

use executor::Job;
use executor::checkpoint::Checkpoint;

use crate::args::RunArgs;
use crate::error::CliError;
use crate::output;

/// The checkpoint to resume from, if one was asked for. It must be complete, and of this run unless `--force-resume` is
/// given.
pub(super) fn checkpoint(args: &RunArgs, job: &Job) -> Result<Option<Checkpoint>, CliError> {
    let path = match (args.resume.as_deref(), &args.checkpoints) {
        (None, _) => return Ok(None),
        (Some([path, ..]), _) | (Some([]), Some(path)) => path,
        (Some([]), None) => {
            let what = "it is not said where to resume from";
            let expected = "a checkpoint after it, or their folder with --checkpoints";
            return Err(CliError::unexpected("--resume", what, expected));
        }
    };
    let (checkpoint, damaged) = Checkpoint::open_whole(path)?;
    let folder = checkpoint.folder().display();
    for error in damaged {
        output::warning(&format!("damaged: {error}; going on from {folder}"));
    }
    let manifest = &checkpoint.manifest;
    let different: Vec<String> = manifest
        .differences(job)
        .iter()
        .map(|[what, there, here]| format!("{what} is {there} there and {here} here"))
        .collect();
    let different = different.join("; ");
    if !different.is_empty() && !args.force_resume {
        let what = format!("the checkpoint is of another run: {different}");
        let expected = "a checkpoint of this run, or --force-resume to go on all the same";
        return Err(CliError::unexpected(folder, what, expected));
    }
    if !different.is_empty() {
        output::warning(&format!(
            "{folder} is of another run: {different}. The steps before and after are not one run that could be \
             repeated: the optimizer's moments, the place in the data and the learning rate are those of step {}",
            manifest.step
        ));
    } else if manifest.run.is_none() {
        output::note(
            args.output.quiet,
            &format!(
                "{folder} does not say of which data, batch, optimizer and learning rate it is: not compared"
            ),
        );
    }
    if manifest.step >= job.settings.steps {
        let seen = manifest.step;
        let what = format!("the checkpoint has seen {seen} steps already");
        let expected = format!("--steps above {seen}");
        return Err(CliError::unexpected(folder, what, expected));
    }
    Ok(Some(checkpoint))
}
