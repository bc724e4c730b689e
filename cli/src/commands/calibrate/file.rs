//! The cluster file that `calibrate` writes: it extends the cluster of the plans, wherever it is written.

use std::path::{Path, PathBuf};

use catalog::extension::ExtensionFile;
use catalog::paths::{beside, files_of_cluster, from_everywhere};
use catalog::{Mistake, names};

use crate::error::CliError;

/// The file to write to `path`, still without what was learned. `cluster` names the cluster of the plans. If that is a calibrated
/// file, the new file is the same with another calibration; if not, it extends the cluster.
///
/// # Errors
/// When the file would extend itself.
pub(super) fn extension(path: &Path, cluster: &str) -> Result<ExtensionFile, CliError> {
    let shown = path.display().to_string();
    let stem = path.file_stem().map(|stem| stem.to_string_lossy());
    let stem = stem.unwrap_or("calibrated".into());
    let name = names::checked(&stem, &shown, "name")?.to_owned();
    let target = full(path);
    let file = Path::new(cluster);
    let in_place = file.exists() && full(file) == target;
    let older = catalog::text::read(file)
        .ok()
        .filter(|text| ExtensionFile::is(text))
        .and_then(|text| ExtensionFile::from_yaml(&text, cluster).ok());
    let kept = older.filter(|older| in_place || older.calibration.is_some());
    let extends = match &kept {
        Some(older) => from_everywhere(&beside(file, &older.extends)),
        None => from_everywhere(cluster),
    };
    if files_of_cluster(&extends).contains(&target) {
        let wrong = Mistake::new(format!(
            "{shown} is part of the cluster {cluster} of the plans, and would extend itself"
        ));
        return Err(CliError::Input(
            wrong.at(format!("-o {shown}")).expected("another file"),
        ));
    }
    Ok(match kept {
        Some(older) if in_place => ExtensionFile { name, ..older },
        Some(older) => ExtensionFile {
            name,
            extends,
            profile: (older.profile.as_deref())
                .map(|profile| from_everywhere(&catalog::files::beside(file, profile))),
            ..older
        },
        None => ExtensionFile {
            schema_version: 1,
            name,
            extends,
            profile: None,
            calibration: None,
            speed: None,
            jitter: None,
        },
    })
}

/// The path with all links and dots resolved, as far as it is there.
fn full(path: &Path) -> PathBuf {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let folder = std::fs::canonicalize(folder.unwrap_or(Path::new(".")));
    std::fs::canonicalize(path).unwrap_or_else(|_| match (folder, path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path.to_owned(),
    })
}
