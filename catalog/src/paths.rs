//! Where the models, clusters and files lie that other files name, and how a cluster is named so that it is found from every folder.

use std::path::{Path, PathBuf};

use crate::cluster_presets;
use crate::condition::Condition;
use crate::extension::{ExtensionFile, MAX_EXTENDS};
use crate::files;
use crate::model_presets;
use crate::text;

/// The model or cluster that a file names: a preset stays a preset, also where a file of its name is there; a path is relative to the
/// file that names it. A name that is neither stays as it is.
#[must_use]
pub fn beside(file: &Path, name: &str) -> String {
    match is_preset(name) {
        true => name.to_owned(),
        false => files::beside(file, name),
    }
}

/// The cluster `arg` as it is named from every folder: a preset by its name, a file by its full path. What says the condition of its
/// nodes stays behind the name.
#[must_use]
pub fn from_everywhere(arg: &str) -> String {
    let path = Path::new(arg);
    if is_preset(arg) {
        return arg.to_owned();
    }
    if path.exists() {
        let full = files::full(path);
        return full.map_or_else(|| arg.to_owned(), |full| full.display().to_string());
    }
    match Condition::split(arg) {
        Ok((base, condition)) if !condition.is_usual() => condition.after(&from_everywhere(base)),
        _ => arg.to_owned(),
    }
}

/// The full paths of the files that the cluster `arg` is read from: its own, then those that it extends. Empty for a preset.
#[must_use]
pub fn files_of_cluster(arg: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut arg = arg.to_owned();
    while found.len() <= MAX_EXTENDS && !is_preset(&arg) {
        let named = match Condition::split(&arg) {
            Ok((base, _)) if !Path::new(&arg).exists() => base,
            _ => &arg,
        };
        let Some(path) = files::full(Path::new(named)) else {
            break;
        };
        let text = text::read(&path).unwrap_or_default();
        let extension = (ExtensionFile::is(&text))
            .then(|| ExtensionFile::from_yaml(&text, &arg).ok())
            .flatten();
        let extends = extension.map(|file| beside(&path, &file.extends));
        found.push(path);
        match extends {
            Some(next) => arg = next,
            None => break,
        }
    }
    found
}

fn is_preset(name: &str) -> bool {
    model_presets::is_preset(name) || cluster_presets::named(name).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_come_before_files_of_their_name() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let file = folder.path().join("a.plan.yaml");
        let at = |name: &str| folder.path().join(name);
        for name in ["dgx-h100", "llama3-8b", "ours.yaml"] {
            std::fs::write(at(name), "").expect("written");
        }
        let ours = at("ours.yaml").display().to_string();
        for (name, found) in [
            ("dgx-h100", "dgx-h100"),
            ("DGX-H100", "DGX-H100"),
            ("llama3-8b", "llama3-8b"),
            ("ours.yaml", ours.as_str()),
            ("absent.yaml", "absent.yaml"),
        ] {
            assert_eq!(beside(&file, name), found);
        }
    }

    #[test]
    fn clusters_are_named_from_every_folder() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("ours.yaml");
        std::fs::write(&path, "").expect("written");
        let full = std::fs::canonicalize(&path)
            .expect("there")
            .display()
            .to_string();
        let roundabout = folder
            .path()
            .join(".")
            .join("ours.yaml")
            .display()
            .to_string();
        for (arg, found) in [
            (roundabout.clone(), full.clone()),
            (format!("{roundabout} at 0.8"), format!("{full} at 0.8")),
            ("dgx-h100 at 0.8".to_owned(), "dgx-h100 at 0.8".to_owned()),
            ("dgx-h100".to_owned(), "dgx-h100".to_owned()),
        ] {
            assert_eq!(from_everywhere(&arg), found);
        }
    }
}
