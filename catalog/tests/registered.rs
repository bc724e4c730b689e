//! Every file under `presets` is one that the program carries: a file that no list names would be data that
//! nobody can use.

use std::fs;
use std::path::Path;

/// Reads a preset by the name of its file and returns the name that it gives itself.
type Read = fn(&str) -> Result<String, catalog::SpecError>;

/// Folders of presets, each with the list that must name its files and with what reads one.
const FOLDERS: [(&str, &str, Read); 4] = [
    (
        "devices",
        "DEVICES in catalog/src/cluster_presets.rs",
        |name| Ok(catalog::load::device(name)?.name),
    ),
    (
        "clusters",
        "CLUSTERS in catalog/src/cluster_presets.rs",
        |name| Ok(catalog::load::cluster(name)?.name.clone()),
    ),
    ("models", "MODELS in catalog/src/model_presets.rs", |name| {
        Ok(catalog::load::model(name)?.name.clone())
    }),
    (
        "runtimes",
        "FILES in catalog/src/runtime_presets.rs",
        |name| Ok(catalog::load::runtime(name)?.name),
    ),
];

fn presets(folder: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = fs::read_dir(path.join("presets").join(folder)).expect(folder);
    let names = files.map(|file| file.expect("an entry").file_name());
    let mut names: Vec<String> = names.map(|n| n.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Every file can be read under its name, which is also the name in it.
#[test]
fn every_preset_is_registered() {
    let mut wrong = Vec::new();
    for (folder, list, read) in FOLDERS {
        for file in presets(folder) {
            let path = format!("catalog/presets/{folder}/{file}");
            let name = file.trim_end_matches(".yaml").trim_end_matches(".json");
            match read(name) {
                Ok(found) if found == name => {}
                Err(error) if !matches!(error, catalog::SpecError::Unknown { .. }) => {
                    wrong.push(format!("{path}: {error}"));
                }
                Ok(_) | Err(_) => wrong.push(format!(
                    "{path}: no preset is called {name}; add it to {list}, and call it so in the file"
                )),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Jobs name clusters: no job could use a device that no cluster has.
#[test]
fn every_registered_device_has_a_cluster() {
    let clusters = catalog::load::cluster_names().expect("clusters");
    let of = |name: &str| {
        catalog::load::cluster(name)
            .expect(name)
            .device
            .name
            .clone()
    };
    let used: Vec<String> = clusters.iter().map(|cluster| of(&cluster.name)).collect();
    for file in presets("devices") {
        let name = file.trim_end_matches(".yaml");
        assert!(
            used.iter().any(|device| device == name),
            "no file in catalog/presets/clusters has `device: {name}`"
        );
    }
}

#[test]
fn every_registered_table_is_embedded() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = |name: &str| fs::read_to_string(root.join("src").join(name)).expect(name);
    let sources = source("tables.rs") + &source("attention_charts.rs");
    for folder in ["kernels", "collectives"] {
        for file in presets(folder) {
            let included = format!("include_str!(\"../presets/{folder}/{file}\")");
            assert!(
                sources.contains(&included),
                "catalog/presets/{folder}/{file}: no list names it; add it to catalog/src/tables.rs"
            );
        }
    }
}

/// A cluster file may name a device file beside it, which may leave its kernels to the nearest architecture.
#[test]
fn a_device_may_be_a_file_beside_its_cluster() {
    let presets = Path::new(env!("CARGO_MANIFEST_DIR")).join("presets");
    let folder = tempfile::tempdir().expect("a folder");
    let device = fs::read_to_string(presets.join("devices/h20.yaml")).expect("a preset");
    fs::write(folder.path().join("mine.yaml"), device).expect("written");
    let cluster = fs::read_to_string(presets.join("clusters/h20.yaml")).expect("a preset");
    let path = folder.path().join("c.yaml");
    fs::write(&path, cluster.replace("device: h20", "device: mine.yaml")).expect("written");
    let path = path.display().to_string();
    let read = catalog::load::cluster(&path).expect("a cluster");
    assert_eq!(
        read.device,
        catalog::load::cluster("h20").expect("a preset").device
    );
    assert_eq!(read.device.kernels, "h100_sxm");
    fs::remove_file(folder.path().join("mine.yaml")).expect("removed");
    let gone = catalog::load::cluster(&path)
        .expect_err("no device")
        .to_string();
    assert!(gone.contains("mine.yaml"), "{gone}");
}
