//! Launch scripts: each scheduler's form, and the files that they source.

use catalog::files::Kind;
use catalog::model::ModelConfig;
use catalog::{Precision, Workload, WorkloadSizes};
use interop::export::{Dialect, ExportedFile, Launcher, plan_of};
use interop::import::{Document, Given, Imported, import};

use super::{exported, exported_on, parse, scene};

/// Calls `check` with every target and the files that it exports for every launcher.
fn each_launcher(check: impl Fn(Dialect, Launcher, &[ExportedFile])) {
    for &dialect in Dialect::ALL {
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
            check(dialect, launcher, &exported.files);
        }
    }
}

/// Launch scripts are shell that a shell takes, and manifests are YAML.
#[test]
fn launchers_are_well_formed() {
    each_launcher(|_, launcher, files| {
        let script = files.last().expect("a script");
        if launcher == Launcher::Kubernetes {
            for document in script.text.split("---\n") {
                interop::config::yaml::parse(document, "job.yaml").expect("YAML");
            }
            return;
        }
        let status = std::process::Command::new("bash")
            .args(["-n", "-c", &script.text])
            .status()
            .expect("bash");
        assert!(status.success(), "{}", script.text);
        assert!(
            script.text.contains("8 --nproc-per-node 8")
                || script.text.contains("--num_machines 8")
        );
    });
}

/// A launch script is read with the file that it sources, or names the file with the settings.
#[test]
fn launchers_lead_to_the_settings() {
    each_launcher(|dialect, launcher, files| {
        let (script, others) = files.split_last().expect("a script");
        let beside = |name: &str| {
            let file = others.iter().find(|file| file.name == name);
            file.map(|file| file.text.clone())
        };
        let about = format!("{} {}", dialect.name(), script.name);
        // The user's own script of veScale imports its settings, so its launcher does not name them.
        let named = |said: &str| {
            dialect == Dialect::VeScale || others.iter().any(|file| said.contains(&file.name))
        };
        let alone = Document::read(&script.text, &script.name, None, &|_| None);
        let said = alone.err().map(|refused| refused.to_string());
        assert!(said.as_deref().is_none_or(named), "{about}: {said:?}");
        let is_read = dialect == Dialect::MegatronLm && launcher != Launcher::Kubernetes;
        match Document::read(&script.text, &script.name, None, &beside) {
            Ok(read) => assert_eq!(read.launch.gpus, Some(64), "{about}"),
            Err(refused) => {
                assert!(!is_read, "{about}: {refused}");
                assert!(named(&refused.to_string()), "{about}: {refused}");
            }
        }
    });
}

/// Where domains join nodes, Slurm is asked for as many nodes of one NVLink domain as the
/// prediction assumes.
#[test]
fn slurm_is_asked_for_nodes_that_share_a_domain() {
    for (cluster, gpus, asked) in [
        ("gb200-nvl72", 144, Some("--segment=18")),
        ("gb200-nvl72", 128, Some("--segment=16")),
        ("gb200-nvl72", 64, Some("--segment=16")),
        // Of 19 nodes 18 fill a domain, which does not divide them.
        ("gb200-nvl72", 76, None),
        ("gb200-nvl72", 4, None),
        ("dgx-h100", 64, None),
        ("8 x gb200-nvl72 + 8 x gb300-nvl72", 64, None),
    ] {
        let model = catalog::load::model("llama3-8b").expect("preset");
        let workload = Workload::new(WorkloadSizes {
            gpus,
            seq_len: 4096,
            global_batch: gpus,
            precision: Precision::Bf16,
        });
        let workload = workload.expect("a workload");
        let strategy = parse("zero=1", &model, &workload).expect("legal");
        for dialect in [Dialect::MegatronLm, Dialect::VeScale] {
            let launcher = Some(Launcher::Slurm);
            let exported = exported_on(
                cluster, "vescale", &strategy, &model, &workload, dialect, launcher,
            );
            let exported = exported.expect("expressible");
            let script = &exported.files.last().expect("a script").text;
            let line = script.lines().find(|line| line.contains("--segment"));
            let asked = asked.map(|option| format!("#SBATCH {option}"));
            assert_eq!(line, asked.as_deref(), "{cluster}, {gpus} GPUs");
        }
    }
}

/// Transformer Engine stops where GPUs have no multicast, unless the environment says to do without.
#[test]
fn overlap_without_multicast_is_asked_for() {
    let (model, workload) = scene("llama3-8b", 16, Precision::Bf16);
    for (cluster, text, said) in [
        ("dgx-a100", "tp=2,zero=1,sp,overlap=grad+param+tp", true),
        ("dgx-a100", "tp=2,zero=1,sp,overlap=grad+param", false),
        ("l40s-node", "tp=2,zero=1,sp,overlap=grad+param+tp", true),
        ("dgx-h100", "tp=2,zero=1,sp,overlap=grad+param+tp", false),
    ] {
        let strategy = parse(text, &model, &workload).expect("legal");
        for dialect in [Dialect::MegatronLm, Dialect::MegatronBridge] {
            let launcher = Some(Launcher::Torchrun);
            let exported = exported_on(
                cluster,
                "megatron-core",
                &strategy,
                &model,
                &workload,
                dialect,
                launcher,
            );
            let exported = exported.expect("expressible");
            let script = &exported.files.last().expect("a script").text;
            let found = script.contains("export UB_SKIPMC=1");
            assert_eq!(found, said, "{cluster}: {text}");
        }
    }
}

/// An exported launch script, read with the files beside it, and what it is imported as.
fn from_script(files: &[ExportedFile], model: &ModelConfig) -> (Document, Imported) {
    let include = |name: &str| {
        let name = name.rsplit('/').next()?;
        let file = files.iter().find(|file| file.name == name)?;
        Some(file.text.clone())
    };
    let script = files.iter().find(|file| file.name == "launch.sh");
    let text = &script.expect("a script").text;
    let document = Document::read(text, "launch.sh", None, &include).expect("shell");
    let given = Given {
        model,
        gpus: None,
        seq_len: None,
        gpus_per_node: 8,
    };
    let imported = import(&document, &given).expect("imports");
    (document, imported)
}

/// A launch script that sources its arguments imports like the arguments themselves, devices included.
#[test]
fn a_launch_script_imports_with_the_file_it_sources() {
    let (model, workload) = scene("llama3-8b", 64, Precision::Bf16);
    let strategy = parse("tp=4,pp=4,zero=1", &model, &workload).expect("legal");
    let launcher = Some(Launcher::Torchrun);
    let exported =
        exported(&strategy, &model, &workload, Dialect::MegatronLm, launcher).expect("expressible");
    let (document, imported) = from_script(&exported.files, &model);
    assert_eq!(document.launch.gpus, Some(64));
    let vescale = catalog::load::runtime("vescale").expect("preset");
    let read = imported.decisions.under(&vescale, workload.precision);
    assert_eq!(read.canonical(&model), strategy.canonical(&model));
    assert_eq!(imported.workload, workload);
}

/// A launch script that leaves the name of the training program to its user is read with the options behind the variable, and what
/// accelerate's file switches on counts for the Trainer.
#[test]
fn launch_scripts_import_before_their_program_is_named() {
    let (model, workload) = scene("llama3-8b", 16, Precision::Bf16);
    for strategy in [
        "zero=3,mbs=2",
        "zero=3,cp=2,cp_kind=all_gather",
        "zero=3,cp=2,cp_kind=ring",
    ] {
        let plan = parse(strategy, &model, &workload).expect("legal");
        let dialect = Dialect::Accelerate;
        let launcher = Some(Launcher::Torchrun);
        let exported = exported(&plan, &model, &workload, dialect, launcher);
        let files = exported.expect("expressible").files;
        let (document, imported) = from_script(&files, &model);
        let runtime = catalog::load::runtime("fsdp2").expect("preset");
        let read = imported.decisions.under(&runtime, workload.precision);
        let [read, planned] = [&read, plan.decisions()].map(|of| of.canonical(&model));
        assert_eq!(
            (read.zero, read.micro_batch, read.cp, read.cp_kind),
            (
                planned.zero,
                planned.micro_batch,
                planned.cp,
                planned.cp_kind
            ),
            "{strategy}"
        );
        assert_eq!(imported.workload, workload, "{strategy}");
        let findings = interop::check::contradictions(&document, &model);
        assert_eq!(findings, [], "{strategy}");
    }
}

/// A script or manifest says which plan it was made of; text of another origin does not.
#[test]
fn launch_scripts_name_their_plan() {
    let (model, workload) = scene("llama3-8b", 16, Precision::Bf16);
    let plan = parse("zero=1", &model, &workload).expect("legal");
    for launcher in Launcher::ALL {
        let exported = exported(
            &plan,
            &model,
            &workload,
            Dialect::MegatronLm,
            Some(launcher),
        );
        let files = exported.expect("expressible").files;
        let script = files.last().expect("a script");
        assert_eq!(script.name, launcher.file());
        assert_eq!(plan_of(&script.text), Some("0123456789abcdef"));
        assert!(
            Kind::Exported.recognises(script.text.as_bytes()),
            "{}",
            script.text
        );
    }
    for text in [
        "#!/bin/bash\ntorchrun train.py\n",
        "",
        "#!/bin/bash\nset -e\n# vescale-plan 01 · x\n",
    ] {
        assert_eq!(plan_of(text), None, "{text}");
    }
}

/// With one data-parallel rank, Megatron's distributed optimizer shards the states of experts if these are spread over fewer ranks than
/// tensor parallelism has; elsewhere nothing is written of it.
#[test]
fn the_optimizer_of_experts_is_distributed_without_data_parallelism() {
    for (name, text, distributed) in [
        ("mixtral-8x7b", "tp=8,pp=8,ep=2,zero=1", true),
        ("mixtral-8x7b", "tp=8,pp=8,ep=8,zero=1", false),
        ("mixtral-8x7b", "tp=8,pp=8,ep=2,zero=0", false),
        ("llama3-70b", "tp=8,pp=8,zero=1", false),
    ] {
        let (model, workload) = scene(name, 64, Precision::Bf16);
        let plan = parse(text, &model, &workload).expect("legal");
        let written = exported(&plan, &model, &workload, Dialect::MegatronLm, None);
        let file = &written.expect("expressible").files[0].text;
        let found = file.contains("--use-distributed-optimizer");
        assert_eq!(found, distributed, "{name} {text}");
        assert!(crate::round_trip(
            &plan,
            &model,
            &workload,
            Dialect::MegatronBridge
        ));
    }
}

/// What the file of accelerate cannot hold is among the arguments of its launch script: recomputation too, where there is no FSDP.
#[test]
fn accelerate_without_fsdp_recomputes() {
    for (text, passed) in [
        ("zero=0,recompute=full", true),
        ("zero=0,recompute=none", false),
        ("zero=3,recompute=full", false),
    ] {
        let (model, workload) = scene("llama3-8b", 64, Precision::Bf16);
        let plan = parse(text, &model, &workload).expect("legal");
        let launcher = Some(Launcher::Torchrun);
        let exported = exported(&plan, &model, &workload, Dialect::Accelerate, launcher);
        let exported = exported.expect("expressible");
        let script = &exported.files.last().expect("a script").text;
        let found = script.contains("--gradient_checkpointing true");
        assert_eq!(found, passed, "{text}\n{script}");
    }
}
