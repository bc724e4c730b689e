//! Every file under `presets` is one that the program carries: a file that no list names would be data that
//! nobody can use.

use std::fs;
use std::path::Path;

#[test]
fn every_preset_is_registered() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = |name: &str| fs::read_to_string(root.join("src").join(name)).expect(name);
    let lists = [
        ("devices", source("cluster_presets.rs")),
        ("clusters", source("cluster_presets.rs")),
        ("models", source("model_presets.rs")),
        ("runtimes", source("runtime_presets.rs")),
        (
            "kernels",
            source("tables.rs") + &source("attention_charts.rs"),
        ),
    ];
    let mut missing = Vec::new();
    for (folder, list) in lists {
        let files = fs::read_dir(root.join("presets").join(folder)).expect(folder);
        for file in files {
            let name = file.expect("an entry").file_name();
            let name = name.to_string_lossy();
            let path = format!("presets/{folder}/{name}");
            let stem = name.trim_end_matches(".yaml").trim_end_matches(".json");
            let listed = ["embedded!(", "models! {"].map(|list_of| list.contains(list_of));
            let by_name = listed[0] && list.contains(&format!("\"{stem}\","))
                || listed[1] && list.contains(&format!("\"{stem}\" =>"));
            if !by_name && !list.contains(&format!("include_str!(\"../{path}\")")) {
                missing.push(path);
            }
        }
    }
    assert!(missing.is_empty(), "not registered: {}", missing.join(", "));
}

#[test]
fn every_preset_is_read() {
    let names = catalog::load::model_names()
        .into_iter()
        .map(|info| info.name);
    for name in names {
        catalog::load::model(&name).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    for info in catalog::load::cluster_names().expect("clusters") {
        catalog::load::cluster(&info.name).unwrap_or_else(|e| panic!("{}: {e}", info.name));
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
