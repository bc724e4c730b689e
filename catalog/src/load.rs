//! Loads models, clusters and runtimes by preset name or from files.

use std::path::Path;

use serde::Serialize;

use crate::checked::Model;
use crate::cluster::Cluster;
use crate::cluster_file::{ClusterFile, DeviceFile};
use crate::cluster_line;
use crate::cluster_presets::{self, CLUSTERS, DEVICES};
use crate::condition::Condition;
use crate::device::Device;
use crate::error::SpecError;
use crate::extension::{ExtensionFile, MAX_EXTENDS};
use crate::hf;
use crate::mistake::Mistake;
use crate::model::ModelConfig;
use crate::model_presets::MODELS;
use crate::names::{self, same};
use crate::paths::beside;
use crate::pools;
use crate::profile::{self, Profile};
use crate::runtime::Runtime;
use crate::runtime_presets;
use crate::suggest::nearest;
use crate::text;

pub use crate::model_presets::preset_of_hub_name;

/// A preset's entry in a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PresetInfo {
    /// Name of the preset.
    pub name: String,
    /// Other names of the preset.
    pub aliases: Vec<String>,
    /// A description in one line.
    pub summary: String,
}

/// Loads a model: a preset (by its own or its hub name), a `config.json`, or a folder with one.
///
/// # Errors
/// Unknown names with the nearest known one; malformed files.
pub fn model(arg: &str) -> Result<Model, SpecError> {
    names::checked(arg, "the model", "model")?;
    if let Some(model) = preset(arg) {
        return Ok(model?.of_library());
    }
    let path = Path::new(arg);
    let of_hub = arg.split('/').count() <= 2 && !arg.starts_with(['.', '/', '~']);
    if of_hub
        && !path.exists()
        && let Some(model) = preset_of_hub_name(arg).and_then(preset)
    {
        return model;
    }
    let file = if path.is_dir() {
        path.join("config.json")
    } else {
        path.to_path_buf()
    };
    if !file.exists() && !looks_like_path(arg) {
        let names = MODELS
            .iter()
            .flat_map(|(name, aliases, _)| aliases.iter().chain([name]));
        return Err(unknown("model", arg, names));
    }
    let of_a_hub = arg.split('/').count() == 2 && !arg.starts_with(['.', '/', '~']);
    if !file.exists() && of_a_hub && !arg.ends_with(".json") {
        return Err(SpecError::Wrong(not_downloaded(arg)));
    }
    let (text, path) = (text::read(&file)?, file.display().to_string());
    hf::decode(&text, &path, &name_of(arg))
}

/// Reads a model from the text of a `config.json`; `path` names the model and is for messages.
///
/// # Errors
/// When the text defines no model.
pub fn model_from(config: &str, path: &str) -> Result<Model, SpecError> {
    names::checked(path, "the model", "model")?;
    hf::decode(config, path, &name_of(path))
}

/// Reads the model that a plan file carries. `definition` holds its `config.json` fields, `arg` is the preset or path that
/// the plan was made for, and `path` is the plan file, for messages.
///
/// # Errors
/// When the fields define no model.
pub fn model_defined(
    definition: &serde_json::Value,
    arg: &str,
    path: &str,
) -> Result<Model, SpecError> {
    names::checked(arg, path, "model")?;
    hf::decode(&definition.to_string(), path, &name_of(arg))
}

/// The name of a model that is given by a path: the stem of its `.json`, or the name of the folder with its
/// `config.json`.
fn name_of(arg: &str) -> String {
    let path = Path::new(arg);
    let folder = match path.file_name() {
        Some(name) if name == "config.json" => path.parent().unwrap_or(path),
        _ => path,
    };
    let stem = folder
        .file_stem()
        .filter(|_| arg.ends_with(".json") && folder == path);
    let name = stem.or(folder.file_name());
    name.map_or_else(|| "model".to_owned(), |n| n.to_string_lossy().into_owned())
}

/// The model of the preset with this name or alias; `None` if there is none.
fn preset(arg: &str) -> Option<Result<Model, SpecError>> {
    let mut presets = MODELS.iter();
    let (name, _, json) = presets.find(|(name, aliases, _)| same(name, aliases, arg))?;
    Some(hf::decode(json, &format!("preset {name}"), name))
}

/// The error for a model of a hub that is no preset.
fn not_downloaded(arg: &str) -> Mistake {
    let name = arg.rsplit('/').next().unwrap_or(arg);
    let names = MODELS
        .iter()
        .flat_map(|(name, aliases, _)| aliases.iter().chain([name]));
    let wrong = Mistake::new("no preset is that model, and models are not downloaded")
        .at(format!("--model {arg}"))
        .expected("a preset (`vescale-plan models`) or the path of its config.json")
        .nearest(nearest(name, names));
    let safe = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    if !arg.chars().all(safe) {
        return wrong;
    }
    wrong.example(format!(
        "hf download {arg} config.json --local-dir {name} && vescale-plan search --model {name} --gpus 64"
    ))
}

/// Loads a cluster: a preset, a cluster file, a profile of this machine (`local` is the one in the
/// current folder), a description in one line, or a list of pools.
///
/// # Errors
/// Unknown names with the nearest known one; malformed files; no profile.
pub fn cluster(arg: &str) -> Result<Cluster, SpecError> {
    cluster_below(arg, 0)
}

fn cluster_below(arg: &str, depth: usize) -> Result<Cluster, SpecError> {
    names::checked(arg, "the cluster", "cluster")?;
    if arg == LOCAL {
        return local();
    }
    if let Some((path, file)) = cluster_presets::named(arg) {
        return file.resolve(path, device);
    }
    let path = Path::new(arg);
    if pools::lists_pools(arg) && !path.exists() {
        return pools::read(arg, |name| cluster_below(name, depth));
    }
    let (base, condition) = match path.exists() {
        true => (arg, Condition::default()),
        false => Condition::split(arg)?,
    };
    if !condition.is_usual() {
        return condition.of(arg, cluster_below(base, depth)?);
    }
    if cluster_line::describes_cluster(arg) && !path.exists() {
        return cluster_line::read(arg, |name| cluster_below(&cluster_of_device(name)?, depth));
    }
    if !path.exists() && !looks_like_path(arg) {
        let names = cluster_names()?
            .into_iter()
            .flat_map(|p| p.aliases.into_iter().chain([p.name]));
        return Err(unknown("cluster", arg, names));
    }
    let yaml = text::read(path)?;
    if yaml.lines().any(|line| line.starts_with("measured:")) {
        return Profile::from_yaml(&yaml, arg)?.cluster(arg);
    }
    if ExtensionFile::is(&yaml) {
        return extended(ExtensionFile::from_yaml(&yaml, arg)?, path, depth);
    }
    let file: ClusterFile = text::yaml(&yaml, arg)?;
    file.resolve(arg, |device| device_beside(device, path))
}

/// Name of the cluster preset for a device: the one that also has this name or alias, otherwise the
/// first preset with this device.
///
/// # Errors
/// Unknown devices; devices that no preset is made of.
pub fn cluster_of_device(name: &str) -> Result<String, SpecError> {
    let asked = device(name)?;
    let mut made_of_it = None;
    for (path, yaml) in CLUSTERS {
        let file: ClusterFile = text::yaml(yaml, path)?;
        let cluster = file.clone().resolve(path, device)?;
        if cluster.device.name != asked.name {
            continue;
        }
        if same(&file.name, &file.aliases, name) {
            return Ok(file.name);
        }
        made_of_it.get_or_insert(file.name);
    }
    made_of_it.ok_or_else(|| {
        unknown(
            "cluster",
            name,
            cluster_names()
                .unwrap_or_default()
                .into_iter()
                .map(|p| p.name),
        )
    })
}

fn extended(file: ExtensionFile, path: &Path, depth: usize) -> Result<Cluster, SpecError> {
    if depth == MAX_EXTENDS {
        let message = format!("{} extends itself, or too many others", file.name);
        return Err(file.wrong(path, "extends", message));
    }
    let shown = path.display().to_string();
    names::checked(&file.extends, &shown, "extends")?;
    let cluster = cluster_below(&beside(path, &file.extends), depth + 1)
        .map_err(|wrong| wrong.in_field(shown, "extends", "dgx-h100"))?;
    file.extend(cluster, path)
}

/// Name of the cluster that is this machine.
const LOCAL: &str = "local";

fn local() -> Result<Cluster, SpecError> {
    let path = Path::new(profile::DEFAULT_PATH);
    if !path.exists() {
        let message = format!(
            "there is no {} here; expected the file in which `vescale-plan profile` writes what it measures on this machine",
            profile::DEFAULT_PATH
        );
        return Err(SpecError::field(LOCAL, "cluster", message));
    }
    Profile::from_yaml(&text::read(path)?, profile::DEFAULT_PATH)?.cluster(profile::DEFAULT_PATH)
}

/// Loads a device preset.
///
/// # Errors
/// Unknown names with the nearest known one.
pub fn device(arg: &str) -> Result<Device, SpecError> {
    let mut names = Vec::new();
    for (path, yaml) in DEVICES {
        let file: DeviceFile = text::yaml(yaml, path)?;
        if same(&file.name, &file.aliases, arg) {
            return file.resolve(path);
        }
        names.push(file.name);
    }
    Err(unknown("device", arg, names))
}

/// Loads a device preset, or a device file at a path relative to the cluster file that names it.
fn device_beside(arg: &str, cluster: &Path) -> Result<Device, SpecError> {
    if !looks_like_path(arg) {
        return device(arg);
    }
    names::checked(arg, &cluster.display().to_string(), "device")?;
    let path = cluster.with_file_name(arg);
    let of_field = |unreadable: SpecError| {
        let field = format!("field `device` of {}", cluster.display());
        let place = format!("{}, named by {field}", path.display());
        let expected = "the path of a device file, from the folder of the cluster's file";
        SpecError::Wrong(unreadable.mistake().at(place).expected(expected))
    };
    let text = text::read(&path).map_err(of_field)?;
    let file: DeviceFile = text::yaml(&text, &path.display().to_string())?;
    file.resolve(&path.display().to_string())
}

/// Loads a runtime preset.
///
/// # Errors
/// Unknown names with the nearest known one.
pub fn runtime(arg: &str) -> Result<Runtime, SpecError> {
    let presets = runtime_presets::presets();
    let found = (presets.iter()).find(|p| same(&p.runtime.name, &p.aliases, arg));
    match found {
        Some(preset) => Ok(preset.runtime.clone()),
        None => {
            let names = presets
                .into_iter()
                .flat_map(|p| p.aliases.into_iter().chain([p.runtime.name]));
            Err(unknown("runtime", arg, names))
        }
    }
}

/// Lists the model presets.
#[must_use]
pub fn model_names() -> Vec<PresetInfo> {
    MODELS
        .iter()
        .map(|(name, aliases, json)| PresetInfo {
            name: (*name).to_owned(),
            aliases: aliases.iter().map(|a| (*a).to_owned()).collect(),
            summary: hf::decode(json, name, name).map_or_else(|e| e.to_string(), |m| summary(&m)),
        })
        .collect()
}

fn summary(m: &ModelConfig) -> String {
    let experts = m.moe.map_or_else(String::new, |e| {
        format!(", {} experts, {} per token", e.experts, e.top_k)
    });
    format!(
        "{} layers, hidden {}, {} heads{experts}",
        m.layers, m.hidden, m.attention.heads
    )
}

/// Lists the cluster presets.
///
/// # Errors
/// Never for the embedded presets; a test reads them all.
pub fn cluster_names() -> Result<Vec<PresetInfo>, SpecError> {
    CLUSTERS
        .iter()
        .map(|(path, yaml)| {
            let file: ClusterFile = text::yaml(yaml, path)?;
            let aliases = file.aliases.clone();
            let cluster = file.resolve(path, device)?;
            let summary = format!(
                "{} × {} per node, {} inside, {} between",
                cluster.gpus_per_node,
                cluster.device.name,
                cluster.scale_up.bandwidth.value,
                cluster.scale_out.bandwidth.value,
            );
            Ok(PresetInfo {
                name: cluster.name,
                aliases,
                summary,
            })
        })
        .collect()
}

/// Lists the runtime presets.
#[must_use]
pub fn runtime_names() -> Vec<PresetInfo> {
    runtime_presets::presets()
        .into_iter()
        .map(|p| PresetInfo {
            name: p.runtime.name,
            aliases: p.aliases,
            summary: p.runtime.description,
        })
        .collect()
}

fn looks_like_path(arg: &str) -> bool {
    arg.contains('/') || arg.ends_with(".json") || arg.ends_with(".yaml") || arg.ends_with(".yml")
}

fn unknown<S: AsRef<str>>(
    kind: &'static str,
    arg: &str,
    names: impl IntoIterator<Item = S>,
) -> SpecError {
    let name: String = arg.chars().take(80).collect();
    SpecError::Unknown {
        kind,
        nearest: nearest(&name, names),
        name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_loads_under_every_name() {
        for info in model_names() {
            for name in info.aliases.iter().chain([&info.name]) {
                model(name).expect(name);
            }
        }
        for info in cluster_names().expect("clusters read") {
            for name in info.aliases.iter().chain([&info.name]) {
                cluster(name).expect(name);
            }
        }
        for info in runtime_names() {
            runtime(&info.name).expect("listed");
        }
    }

    #[test]
    fn names_are_unique() {
        let lists = [
            model_names(),
            cluster_names().expect("clusters read"),
            runtime_names(),
        ];
        for list in lists {
            let mut names: Vec<String> = list
                .into_iter()
                .flat_map(|p| p.aliases.into_iter().chain([p.name]))
                .collect();
            names.sort();
            let before = names.len();
            names.dedup();
            assert_eq!(names.len(), before);
        }
    }

    #[test]
    fn names_of_a_hub_are_told_what_to_give() {
        let error = model("Qwen/Qwen9-8B").expect_err("no file");
        let message = error.to_string();
        assert!(message.contains("are not downloaded"), "{message}");
        assert!(message.contains("did you mean `qwen"), "{message}");
        let example = error.mistake().example.expect("an example");
        assert!(
            example.starts_with("hf download Qwen/Qwen9-8B config.json"),
            "{example}"
        );
        let error = model("a b/`x`").expect_err("no file").mistake();
        assert_eq!(error.example, None);
    }

    #[test]
    fn published_names_are_their_presets() {
        for (id, preset) in [
            ("meta-llama/Llama-3.1-8B-Instruct", "llama3-8b"),
            ("meta-llama/Llama-3.1-70B", "llama3-70b"),
            ("meta-llama/Meta-Llama-3-8B", "meta-llama-3-8b"),
            ("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama-3-8b"),
            ("meta-llama/Meta-Llama-3-70B", "meta-llama-3-70b"),
            ("meta-llama/Meta-Llama-3.1-8B", "llama3-8b"),
            ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
            ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
            ("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b"),
            ("Qwen/Qwen2-1.5B-Instruct", "qwen2.5-1.5b"),
            ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
            ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b-2507"),
            ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
            ("google/gemma-2-9b-it", "gemma2-9b"),
            ("openai-community/gpt2", "gpt2"),
            (
                "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
                "tinyllama-1.1b",
            ),
            ("microsoft/Phi-3-mini-4k-instruct", "phi3-mini"),
            ("Llama-3.1-405B", "llama3.1-405b"),
            ("llama3-8b", "llama3-8b"),
        ] {
            assert_eq!(preset_of_hub_name(id), Some(preset), "{id}");
            assert_eq!(model(id).expect(id).name, preset);
        }
        // A folder may be named after a model, but holds a `config.json` of its own.
        assert_eq!(preset_of_hub_name("~/weights/llama-7b"), Some("llama-7b"));
        assert!(model("~/weights/llama-7b").is_err());
        assert_eq!(preset_of_hub_name("Qwen/Qwen3-4B-Thinking-2507"), None);
        assert_eq!(preset_of_hub_name(""), None);
    }

    #[test]
    fn a_cluster_is_described_in_one_line() {
        let line = "h100-sxm x 4 per node, 200 Gb/s x 2, nvlink 400 GB/s, $2.5/h";
        let cluster = super::cluster(line).expect("a cluster");
        assert_eq!((cluster.gpus_per_node, cluster.scale_up_domain), (4, 4));
        assert_eq!(cluster.scale_out.bandwidth.value.0, 200e9 / 8.0 * 2.0 / 4.0);
        assert_eq!(cluster.scale_up.bandwidth.value.0, 400e9);
        for (link, pci_express) in [("nvlink", false), ("pcie", true)] {
            let line = format!("a100-pcie x 8 per node, {link} 50 GB/s");
            assert_eq!(
                super::cluster(&line).expect("a cluster").pci_express,
                pci_express
            );
        }
        assert_eq!(cluster.dollars_per_gpu_hour.map(|p| p.value), Some(2.5));
        for (line, domain) in [
            ("gb200 x 4 per node", 72),
            ("gb200 x 8 per node", 8),
            ("gb200 x 4 per node, domain 36", 36),
        ] {
            let cluster = super::cluster(line).expect("a cluster");
            assert_eq!(cluster.scale_up_domain, domain, "{line}");
        }
        let usual = super::cluster("dgx-h100").expect("a preset");
        let same = super::cluster("8 x h100 per node, 400 Gb/s x 8").expect("a cluster");
        assert_eq!(
            same.scale_out.bandwidth.value,
            usual.scale_out.bandwidth.value
        );
        assert_eq!(cluster_of_device("h100").expect("known"), "dgx-h100");
        for (line, says) in [
            ("h100-sxm x 8 per node, fast", "`fast` is not understood"),
            ("h100-sxm x many per node", "is not understood"),
            ("h1000 x 8 per node", "unknown device `h1000`"),
            ("h100 x 0 per node", "0 is out of range; expected 1"),
            ("h100 x 8 per node, $x", "`$x` is not understood"),
        ] {
            let error = super::cluster(line).expect_err(line).to_string();
            assert!(error.contains(says), "{line}: {error}");
        }
    }

    #[test]
    fn wrong_names_suggest_the_nearest() {
        let check = |result: Result<(), SpecError>, expected: &str| {
            assert_eq!(result.expect_err("unknown").to_string(), expected);
        };
        check(
            model("lama70b").map(drop),
            "unknown model `lama70b`; did you mean `llama70b`?",
        );
        check(
            cluster("dgx-h10").map(drop),
            "unknown cluster `dgx-h10`; did you mean `dgx-h100`?",
        );
        check(
            runtime("megatorn").map(drop),
            "unknown runtime `megatorn`; did you mean `megatron`?",
        );
        check(model("§").map(drop), "unknown model `§`");
    }
}
