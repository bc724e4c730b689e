//! Launch scripts: each scheduler's form, and the files that they source.

use catalog::Precision;
use interop::export::{Dialect, Launcher};
use interop::import::{Document, Given, import};

use super::{exported, parse, scene};

/// Launch scripts are shell that a shell takes, and manifests are YAML.
#[test]
fn launchers_are_well_formed() {
    for dialect in Dialect::ALL {
        let name = if dialect == Dialect::Nanotron {
            "llama2-7b"
        } else {
            "llama3-8b"
        };
        let (model, workload) = scene(name, 64, Precision::Bf16);
        let strategy = parse("zero=0", &model, &workload).expect("legal");
        for launcher in [Launcher::Torchrun, Launcher::Slurm, Launcher::Kubernetes] {
            let exported = exported(&strategy, &model, &workload, dialect, Some(launcher))
                .expect("expressible");
            let script = exported.files.last().expect("a script");
            if launcher == Launcher::Kubernetes {
                for document in script.text.split("---\n") {
                    interop::config::yaml::parse(document, "job.yaml").expect("YAML");
                }
            } else {
                let status = std::process::Command::new("bash")
                    .args(["-n", "-c", &script.text])
                    .status()
                    .expect("bash");
                assert!(status.success(), "{}", script.text);
                assert!(
                    script.text.contains("8 --nproc-per-node 8")
                        || script.text.contains("--num_machines 8")
                );
            }
        }
    }
}

/// A launch script that sources its arguments imports like the arguments themselves, devices included.
#[test]
fn a_launch_script_imports_with_the_file_it_sources() {
    let (model, workload) = scene("llama3-8b", 64, Precision::Bf16);
    let strategy = parse("tp=4,pp=4,zero=1", &model, &workload).expect("legal");
    let launcher = Some(Launcher::Torchrun);
    let exported =
        exported(&strategy, &model, &workload, Dialect::MegatronLm, launcher).expect("expressible");
    let arguments = exported.files[0].text.clone();
    let include = |name: &str| (name == "megatron_args.sh").then(|| arguments.clone());
    let document =
        Document::read(&exported.files[1].text, "launch.sh", None, &include).expect("shell");
    assert_eq!(document.launch.gpus, Some(64));
    let given = Given {
        model: &model,
        gpus: None,
        seq_len: None,
        gpus_per_node: 8,
    };
    let imported = import(&document, &given).expect("imports");
    let vescale = catalog::load::runtime("vescale").expect("preset");
    let read = imported.decisions.under(&vescale, workload.precision);
    assert_eq!(read.canonical(), strategy.canonical());
    assert_eq!(imported.workload, workload);
}
