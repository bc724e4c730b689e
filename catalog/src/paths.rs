//! Where the models, clusters and files lie that other files name, and how a cluster is named so that it is found from every folder.

use std::path::{Path, PathBuf};

use crate::cluster_presets;
use crate::condition::Condition;
use crate::extension::{ExtensionFile, MAX_EXTENDS};
use crate::files;
use crate::model_presets;
use crate::pools;
use crate::text;

/// The model or cluster that a file names: a preset stays a preset, also where a file of its name is there; a path is relative to the
/// file that names it, whether or not a file is there. A name that is neither stays as it is.
#[must_use]
pub fn beside(file: &Path, name: &str) -> String {
    with_paths(name, &|name| {
        let near = file.parent().unwrap_or(Path::new("")).join(name);
        (is_file_name(name) || near.exists()).then_some(near)
    })
}

/// The cluster `arg` as it is named from every folder: a preset by its name, a file by its full path. What says the condition of its
/// nodes, or their number in a pool, stays beside the name.
#[must_use]
pub fn from_everywhere(arg: &str) -> String {
    with_paths(arg, &|name| files::full(Path::new(name)))
}

/// The model or cluster `arg` with other paths for the files that it names; `path_of` gives the path of a name that is no preset, or
/// `None` to leave it.
fn with_paths(arg: &str, path_of: &dyn Fn(&str) -> Option<PathBuf>) -> String {
    if is_preset(arg) {
        return arg.to_owned();
    }
    // A file may have the name of a pool or of a condition.
    let whole = path_of(arg).filter(|path| path.exists());
    if let Some(path) = whole {
        return path.display().to_string();
    }
    if pools::lists_pools(arg) {
        return pools::with_names(arg, |name| with_paths(name, path_of));
    }
    match Condition::split(arg) {
        Ok((base, condition)) if !condition.is_usual() => {
            condition.after(&with_paths(base, path_of))
        }
        _ => path_of(arg).map_or_else(|| arg.to_owned(), |path| path.display().to_string()),
    }
}

/// Whether a name can only be a file's: it ends or begins as a path does.
fn is_file_name(name: &str) -> bool {
    let ends = [".json", ".yaml", ".yml"];
    let begins = ["/", "./", "../"];
    ends.iter().any(|end| name.ends_with(end)) || begins.iter().any(|begin| name.starts_with(begin))
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
            ("ours.yaml at 0.8", &format!("{ours} at 0.8")),
            (
                "8 x ours.yaml + 8 x dgx-a100",
                &format!("8 x {ours} + 8 x dgx-a100"),
            ),
            ("absent.yaml", &at("absent.yaml").display().to_string()),
            ("../absent", &at("../absent").display().to_string()),
            ("absent", "absent"),
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
            (
                format!("8 x {roundabout} at 0.8 + 2 nodes x dgx-a100, 100 Gb/s between"),
                format!("8 x {full} at 0.8 + 2 nodes x dgx-a100, 100 Gb/s between"),
            ),
            ("dgx-h100 at 0.8".to_owned(), "dgx-h100 at 0.8".to_owned()),
            ("dgx-h100".to_owned(), "dgx-h100".to_owned()),
        ] {
            assert_eq!(from_everywhere(&arg), found);
        }
    }
}
