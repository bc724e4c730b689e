//! Launch scripts of other plans in an export's folder: they would start the new files with the old
//! plan's nodes.

use std::path::Path;

use catalog::files::{FolderDestination, shown};
use interop::export::{ExportedFile, Launcher, plan_of};

use crate::error::CliError;

/// A launch script of another plan.
struct Stale {
    name: &'static str,
    plan: String,
}

/// Removes the launch scripts of plans other than `id` if `force` is set; returns a note on each
/// script. Files that are not launch scripts of ours stay. `written` are the files of this export.
pub(crate) fn cleared(
    to: &FolderDestination,
    id: &str,
    written: &[ExportedFile],
    force: bool,
) -> Result<Vec<String>, CliError> {
    let mut notes = Vec::new();
    for Stale { name, plan } in found(to.path(), id, written) {
        let path = shown(&to.path().join(name));
        if force {
            to.remove(name)?;
            notes.push(format!("removed {path}, which started plan {plan}"));
        } else {
            notes.push(format!(
                "{path} starts plan {plan}, not this one; --force removes it"
            ));
        }
    }
    Ok(notes)
}

fn found(folder: &Path, id: &str, written: &[ExportedFile]) -> Vec<Stale> {
    let stale = |launcher: Launcher| {
        let name = launcher.file();
        let is_new = written.iter().any(|file| file.name == name);
        let path = folder.join(name);
        let is_file = std::fs::symlink_metadata(&path).is_ok_and(|found| found.is_file());
        if is_new || !is_file {
            return None;
        }
        let text = catalog::text::read(&path).ok()?;
        let plan = plan_of(&text).filter(|plan| *plan != id)?.to_owned();
        Some(Stale { name, plan })
    };
    Launcher::ALL.into_iter().filter_map(stale).collect()
}
