//! Exported jobs whose matrix products have 8 bits: whether their weights and their attention have 8 bits too, or 16.

use catalog::Precision;
use catalog::runtime::{AttentionKernel, Rewrite};
use interop::check::check;
use interop::export::{Dialect, Differs, Job, export};
use interop::import::{Given, import};

use super::{GIVEN, exported_for, parse, read, scene, sharding};

const GATHER: &str = "--fp8-param-gather";
const REUSE: &str = "--reuse-grad-buf-for-mxfp8-param-ag";

/// If the prediction counts 16-bit weights with 8-bit copies, the exported job stores weights in 16 bits, else in 8. Where
/// Megatron-LM does not allow 8, the export reports that the job keeps copies that the prediction lacks.
#[test]
fn weights_are_held_as_the_prediction_counts_them() {
    let rows: [(&str, &str, &[&str], bool); 6] = [
        ("megatron-core", "tp=2,zero=1", &[], false),
        ("nemo", "tp=2,zero=1", &[GATHER], false),
        (
            "nemo",
            "tp=2,zero=1,fp8_recipe=mxfp8",
            &[GATHER, REUSE],
            false,
        ),
        ("nemo", "tp=2,zero=0", &[], true),
        ("nemo", "tp=2,zero=1,offload=optimizer", &[GATHER], false),
        (
            "nemo",
            "tp=2,zero=1,offload=optimizer,fp8_recipe=blockwise",
            &[],
            true,
        ),
    ];
    for (runtime, text, want, warned) in rows {
        let (model, workload) = scene("llama3-8b", 16, Precision::Fp8);
        let strategy = parse(text, &model, &workload).expect("legal");
        let of = |dialect| {
            let taken = exported_for(runtime, &strategy, &model, &workload, dialect, None);
            taken.unwrap_or_else(|e| panic!("{runtime} {text}: {e}"))
        };
        let megatron = of(Dialect::MegatronLm);
        let written = |flag: &&str| megatron.files[0].text.contains(*flag);
        let found: Vec<&str> = [GATHER, REUSE].into_iter().filter(written).collect();
        assert_eq!(found, want, "{runtime} {text}");
        let bridge = of(Dialect::MegatronBridge);
        for (flag, field) in [
            (GATHER, "fp8_param_gather"),
            (REUSE, "reuse_grad_buf_for_mxfp8_param_ag"),
        ] {
            let value = if want.contains(&flag) {
                "True"
            } else {
                "False"
            };
            let line = format!("cfg.mixed_precision.{field} = {value}");
            assert!(
                bridge.files[0].text.contains(&line),
                "{runtime} {text}: {line}"
            );
        }
        for (exported, dialect) in [
            (&megatron, Dialect::MegatronLm),
            (&bridge, Dialect::MegatronBridge),
        ] {
            let mut differences = exported.unmet.iter().map(|unmet| unmet.differs);
            let differs = differences.any(|of| {
                let kept = Rewrite::KeepQuantisedWeights;
                of == Differs::Performed(kept) || of == Differs::NotPerformed(kept)
            });
            assert_eq!(differs, warned, "{runtime} {text} {}", dialect.name());
            let file = &exported.files[0];
            let document = read(&file.text, &file.name, Some(dialect));
            let findings = check(&document, Some(&model)).expect("schema");
            assert!(findings.is_empty(), "{runtime} {text}: {findings:?}");
            // A file without the option has the copies, whatever the plan was predicted for.
            let read_as = if want.is_empty() {
                "megatron-core"
            } else {
                "nemo"
            };
            let given = Given {
                model: &model,
                gpus: Some(16),
                seq_len: None,
                gpus_per_node: 8,
            };
            let imported = import(&document, &given).expect("a strategy");
            assert_eq!(imported.runtime(&document), read_as, "{runtime} {text}");
        }
    }
}

/// Megatron Bridge attends in 8 bits if the prediction does.
#[test]
fn attention_in_eight_bits_is_switched_on() {
    let (model, workload) = scene("llama3-8b", 16, Precision::Fp8);
    let strategy = parse("tp=2,zero=1", &model, &workload).expect("legal");
    let cluster = catalog::load::cluster("dgx-h100").expect("preset");
    let mut runtime = catalog::load::runtime("nemo").expect("preset");
    for (attention, on) in [
        (AttentionKernel::CudnnFp8, true),
        (AttentionKernel::CudnnOrFlash3, false),
    ] {
        runtime.attention = attention;
        let job = Job {
            model: &model,
            decisions: strategy.decisions(),
            workload: &workload,
            runtime: &runtime,
            sharding: &sharding(),
            id: "0123456789abcdef",
            cluster: &cluster,
            inputs: GIVEN,
        };
        let exported = export(&job, Dialect::MegatronBridge, None).expect("a job");
        let file = &exported.files[0];
        let line = "cfg.model.fp8_dot_product_attention = True";
        assert_eq!(file.text.contains(line), on, "{attention:?}");
        let document = read(&file.text, &file.name, Some(Dialect::MegatronBridge));
        let findings = check(&document, Some(&model)).expect("schema");
        assert!(findings.is_empty(), "{attention:?}: {findings:?}");
    }
}

/// `export --check` reports a Megatron-LM configuration that has `--fp8-param-gather` but lacks an option which that requires.
#[test]
fn weights_in_eight_bits_have_their_conditions() {
    let sharded = "--fp8-param-gather --use-distributed-optimizer";
    let offloaded = format!("{sharded} --optimizer-cpu-offload --use-precision-aware-optimizer");
    let rows = [
        (
            "--fp8-param-gather".to_owned(),
            Some("needs --use-distributed-optimizer or --use-torch-fsdp2"),
        ),
        (sharded.to_owned(), None),
        (offloaded.clone(), None),
        (
            format!("{offloaded} --fp8-recipe tensorwise"),
            Some("needs --fp8-recipe delayed"),
        ),
    ];
    for (options, want) in rows {
        let text = format!("torchrun pretrain_gpt.py --bf16 --fp8-format hybrid {options}");
        let document = read(&text, "run.sh", Some(Dialect::MegatronLm));
        let found = check(&document, None).expect("schema");
        let mut found = found.iter().map(ToString::to_string);
        let about = found.find(|finding| finding.contains(GATHER));
        let holds = match (want, &about) {
            (Some(want), Some(about)) => about.contains(want),
            (want, about) => want.is_none() == about.is_none(),
        };
        assert!(holds, "{options}: {about:?}");
    }
}
