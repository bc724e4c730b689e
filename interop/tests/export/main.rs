//! Every exporter over many plans: what is written passes its own strict check, reads back as the
//! same plan, or is refused with a reason and a choice that the target takes.

mod accounts;
mod eight_bits;
mod graphs;
mod keyless;
mod launchers;
mod runtimes;
mod snapshots;
mod switches;
mod workloads;

use catalog::Model;
use catalog::{Precision, Workload};
use interop::check::check;
use interop::config::Node;
use interop::export::{Dialect, ExportError, Exported, Inputs, Job, Launcher, export};
use interop::import::{Document, Given, import};
use plans::Strategy as Plan;
use plans::plan_file::ShardingFile;
use proptest::prelude::*;

/// All inputs of a user, so that nothing is left to fill in.
const GIVEN: Inputs<'static> = Inputs {
    tokenizer: Some("org/tokenizer"),
    data: Some("/data/text"),
    hf_id: Some("org/model"),
};

/// A model with the workload that its plans are for.
fn scene(name: &str, gpus: u64, precision: Precision) -> (Model, Workload) {
    let workload = Workload::new(catalog::WorkloadSizes {
        gpus,
        seq_len: 4096,
        global_batch: 256,
        precision,
    })
    .expect("a workload");
    (catalog::load::model(name).expect("preset"), workload)
}

fn parse(text: &str, model: &Model, workload: &Workload) -> Result<Plan, plans::StrategyError> {
    let runtime = catalog::load::runtime("vescale").expect("preset");
    plans::grammar::parse(text, model, workload, &runtime)
}

fn sharding() -> ShardingFile {
    let mut sharding = ShardingFile::default();
    let mut put = |pattern: &str, placement: &str| {
        sharding
            .parameter
            .insert(pattern.to_owned(), vec![placement.to_owned()]);
    };
    put(r"self_attn\.(q_proj|k_proj|v_proj)\.weight", "tp: Shard(0)");
    put(r"self_attn\.o_proj\.weight", "tp: Shard(1)");
    let forward = vec!["tp: Replicate".to_owned()];
    sharding
        .forward
        .insert(r"lm_head\.input".to_owned(), forward);
    sharding
}

fn exported(
    strategy: &Plan,
    model: &Model,
    workload: &Workload,
    dialect: Dialect,
    launcher: Option<Launcher>,
) -> Result<Exported, ExportError> {
    exported_for("vescale", strategy, model, workload, dialect, launcher)
}

/// As `exported`, for a plan that was predicted for another runtime.
fn exported_for(
    runtime: &str,
    strategy: &Plan,
    model: &Model,
    workload: &Workload,
    dialect: Dialect,
    launcher: Option<Launcher>,
) -> Result<Exported, ExportError> {
    exported_on(
        "dgx-h100", runtime, strategy, model, workload, dialect, launcher,
    )
}

/// As `exported_for`, on another cluster.
fn exported_on(
    cluster: &str,
    runtime: &str,
    strategy: &Plan,
    model: &Model,
    workload: &Workload,
    dialect: Dialect,
    launcher: Option<Launcher>,
) -> Result<Exported, ExportError> {
    let sharding = sharding();
    let runtime = catalog::load::runtime(runtime).expect("preset");
    let job = Job {
        model,
        decisions: strategy.decisions(),
        workload,
        runtime: &runtime,
        sharding: &sharding,
        id: "0123456789abcdef",
        cluster: &catalog::load::cluster(cluster).expect("preset"),
        inputs: GIVEN,
    };
    export(&job, dialect, launcher)
}

fn read(text: &str, name: &str, dialect: Option<Dialect>) -> Document {
    // No option gives axolotl's learning rate.
    let text = text.replace("FILL_IN_LEARNING_RATE", "1e-5");
    Document::read(&text, name, dialect, &|_| None).expect("our own files are well-formed")
}

/// Exports, checks what came out strictly, and imports it again where that is possible.
fn round_trip(strategy: &Plan, model: &Model, workload: &Workload, dialect: Dialect) -> bool {
    let exported = match exported(strategy, model, workload, dialect, None) {
        Ok(exported) => exported,
        Err(ExportError::Inexpressible { refusals, .. }) => {
            assert!(!refusals.is_empty());
            return false;
        }
        Err(error) => panic!("{error}"),
    };
    let file = &exported.files[0];
    let document = read(&file.text, &file.name, None);
    // The header, where a file has one, says the whole strategy.
    if let Some((_, said)) = file.text.split_once(" on 64 GPUs: ") {
        let line = said.lines().next().unwrap_or_default();
        let said = parse(line.trim_end_matches(['.', '"']), model, workload);
        let said = said.map(|said| said.canonical(model));
        assert_eq!(said, Ok(strategy.canonical(model)), "{strategy}");
    }
    assert_eq!(document.dialect, dialect, "detected from:\n{}", file.text);
    let findings = check(&document, Some(model)).expect("schema");
    assert!(
        findings.is_empty(),
        "{strategy}\n{findings:?}\n{}",
        file.text
    );
    let importable = !matches!(dialect, Dialect::Accelerate | Dialect::VeScale);
    if importable {
        let given = Given {
            model,
            gpus: Some(workload.gpus),
            seq_len: (!dialect.has_sequence_length()).then_some(workload.seq_len),
            gpus_per_node: 8,
        };
        let imported = import(&document, &given).unwrap_or_else(|e| panic!("{e}\n{}", file.text));
        let expected = keyless::as_the_file_says(strategy, dialect, &imported.decisions);
        let vescale = catalog::load::runtime("vescale").expect("preset");
        let same = imported.decisions_under(model, &vescale) == expected.canonical(model);
        assert!(same, "{strategy}\n{:?}\n{}", imported.decisions, file.text);
        assert_eq!(imported.workload, *workload, "{}", file.text);
    }
    true
}

fn text() -> impl proptest::strategy::Strategy<Value = String> {
    let sizes = (0u32..4, 0u32..4, 0u32..3, 0u32..4, 0u32..3, 0u32..3);
    let choices = (
        0usize..3,
        0u8..4,
        0usize..6,
        0usize..6,
        0usize..2,
        0usize..8,
        0usize..12,
    );
    let switches = (
        any::<bool>(),
        any::<bool>(),
        0usize..3,
        0usize..15,
        0usize..9,
    );
    (sizes, choices, switches, 0usize..6).prop_map(|(sizes, choices, switches, recipe)| {
        let (tp, pp, cp, ep, etp, mbs) = sizes;
        let (kind, zero, re, sched, order, overlap, dispatcher) = choices;
        let (sp, reshard, replicate, types, offload) = switches;
        // One that the precision does not have is dropped with the strategy.
        let states = ["own", "own", "split_master", "bf16_moments", "8bit_moments"][types / 3];
        let types = ["fp32", "bf16", "fp32/bf16"][types % 3];
        let layers = if re == 0 && pp == 0 && offload % 2 == 1 { ",offload_layers=5" } else { "" };
        let ahead = if zero == 3 && reshard && offload % 3 == 2 { format!(",prefetch={}", offload / 3) } else { String::new() };
        let offload = ["optimizer", "optimizer:50", "parameters"].get(offload).copied().unwrap_or("none");
        let kind = ["ring", "all_gather", "all_to_all"][kind];
        let re = [
            "none",
            "selective",
            "full",
            "layers:3",
            "selective_ops",
            "selective:norms+mlp",
        ][re];
        let sched = ["1f1b", "interleaved,vpp=2", "gpipe", "zb-h1", "zb-v,vpp=2", "dualpipe-v,vpp=2"][sched];
        let order = ["tp-cp-dp_shard-dp_replicate-pp", "tp-cp-pp-dp_shard-dp_replicate"][order];
        let overlap = [
            "none",
            "grad",
            "grad+param",
            "grad+param+pp",
            "grad+param+tp+pp",
            "pp",
            "grad+param+ep+pp",
            "grad+param+tp+ep+pp",
        ][overlap];
        let graphs = ["none", "layers", "step"][dispatcher / 4];
        let dispatcher = ["all_to_all", "all_gather", "deepep", "hybridep"][dispatcher % 4];
        // Other precisions drop it.
        let recipe = ["", ",fp8_recipe=delayed", ",fp8_recipe=tensorwise", ",fp8_recipe=rowwise", ",fp8_recipe=blockwise", ",fp8_recipe=mxfp8"][recipe];
        let on = |on: bool| if on { "on" } else { "off" };
        let replicate = if zero == 0 { String::new() } else { format!(",dp_replicate={}", 1 << replicate) };
        format!(
            "tp={},pp={},cp={},ep={},etp={},mbs={},cp_kind={kind},zero={zero}{replicate},reshard={},sp={},recompute={re},schedule={sched},order={order},overlap={overlap},grad_dtype={types},optim_states={states},offload={offload}{layers}{ahead},dispatcher={dispatcher},graphs={graphs}{recipe}",
            1 << tp, 1 << pp, 1 << cp, 1 << ep, 1 << etp, 1 << mbs, on(reshard && zero == 3), on(sp && tp > 0),
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_exported_is_checked_and_reads_back(text in text(), dense in any::<bool>(), precision in 0usize..4) {
        let name = if dense { "llama3-8b" } else { "qwen3-30b-a3b" };
        let precision = [Precision::Fp32, Precision::Fp16, Precision::Bf16, Precision::Fp8][precision];
        let recipe = text.find(",fp8_recipe").filter(|_| precision != Precision::Fp8);
        let text = recipe.map_or(text.as_str(), |at| &text[..at]).to_owned();
        let (model, workload) = scene(name, 64, precision);
        let text = if dense {
            let parts = text.split(',').filter(|p| !p.starts_with("ep=") && !p.starts_with("etp="));
            parts.collect::<Vec<_>>().join(",")
        } else {
            text
        };
        if let Ok(strategy) = parse(&text, &model, &workload) {
            for &dialect in Dialect::ALL {
                round_trip(&strategy, &model, &workload, dialect);
            }
        }
    }
}

/// Plans that must come out of each target: a refusal of one of these is a loss.
#[test]
fn each_target_takes_the_plans_it_is_made_for() {
    use Dialect::*;
    let titan = [Torchtitan02, Torchtitan03, TorchtitanMain];
    let all_but_hf = [MegatronLm, MegatronBridge, VeScale];
    let all_but_nanotron: Vec<Dialect> = Dialect::ALL
        .iter()
        .copied()
        .filter(|&d| d != Nanotron)
        .collect();
    let sharded = [
        MegatronLm,
        Torchtitan02,
        Torchtitan03,
        TorchtitanMain,
        DeepSpeed,
        Accelerate,
        Axolotl,
    ];
    let cases: [(&str, &str, &[Dialect]); 35] = [
        (
            "llama3-8b",
            "tp=8,pp=8,zero=1,offload=optimizer:50",
            &[MegatronLm, MegatronBridge],
        ),
        (
            "mixtral-8x7b",
            "tp=8,pp=8,ep=4,zero=1,offload=optimizer",
            &[MegatronLm, MegatronBridge],
        ),
        ("llama3-8b", "tp=1,zero=0", &all_but_nanotron),
        ("llama2-7b", "tp=4,pp=4,zero=0", &[Nanotron]),
        (
            "llama2-7b",
            "tp=2,cp=4,cp_kind=all_gather,zero=0",
            &[Nanotron],
        ),
        (
            "gpt-oss-20b",
            "ep=8,zero=3,recompute=full",
            &[Torchtitan03, TorchtitanMain],
        ),
        ("llama3-8b", "zero=3", &sharded),
        ("llama3-8b", "tp=4,pp=4,zero=1", &all_but_hf),
        (
            "llama3-8b",
            "tp=8,pp=2,vpp=4,zero=1,schedule=interleaved",
            &[MegatronLm, MegatronBridge, VeScale],
        ),
        (
            "llama3-8b",
            "tp=2,pp=4,zero=1,stages=7/9/9/7",
            &[MegatronLm, MegatronBridge, VeScale],
        ),
        ("llama3-8b", "tp=2,pp=4,zero=3,stages=7/9/9/7", &titan),
        (
            "llama3-8b",
            "tp=2,cp=4,cp_kind=all_gather,zero=3,recompute=selective_ops",
            &titan,
        ),
        ("llama3-8b", "pp=4,vpp=2,schedule=zb-v,zero=3", &titan),
        ("llama3-8b", "pp=4,vpp=2,schedule=dualpipe-v,zero=3", &titan),
        ("llama3-8b", "pp=4,schedule=gpipe,zero=3", &titan),
        ("llama3-8b", "tp=2,sp=off,zero=2", &[DeepSpeed]),
        ("llama3-8b", "zero=3,prefetch=0", &[DeepSpeed]),
        ("llama3-8b", "tp=2,sp=off,zero=3,prefetch=2", &[DeepSpeed]),
        (
            "qwen3-30b-a3b",
            "ep=8,zero=3,recompute=full,prefetch=2",
            &[DeepSpeed],
        ),
        ("llama3-8b", "zero=2,offload=optimizer", &[DeepSpeed]),
        (
            "llama3-8b",
            "zero=1,recompute=none,offload_layers=16",
            &[MegatronLm, MegatronBridge],
        ),
        (
            "llama3-8b",
            "zero=3,optim_states=8bit_moments",
            &[Axolotl, Transformers],
        ),
        (
            "llama3-8b",
            "tp=4,zero=1,offload=optimizer:50",
            &[MegatronLm, MegatronBridge],
        ),
        (
            "llama3-8b",
            "zero=3,offload=parameters",
            &[
                Torchtitan02,
                Torchtitan03,
                TorchtitanMain,
                DeepSpeed,
                Accelerate,
                Axolotl,
                Transformers,
            ],
        ),
        ("llama3-8b", "cp=4,cp_kind=all_to_all,zero=3", &[DeepSpeed]),
        (
            "mixtral-8x7b",
            "tp=2,pp=4,ep=8,zero=1",
            &[MegatronLm, MegatronBridge],
        ),
        (
            "qwen3-30b-a3b",
            "ep=8,zero=3,recompute=full",
            &[Torchtitan02, Torchtitan03, TorchtitanMain, DeepSpeed],
        ),
        (
            "qwen3-30b-a3b",
            "ep=8,zero=1,dispatcher=all_gather",
            &[MegatronLm, MegatronBridge],
        ),
        (
            "qwen3-30b-a3b",
            "ep=8,zero=1,dispatcher=deepep,overlap=grad+param+ep+pp",
            &[MegatronLm, MegatronBridge],
        ),
        (
            "qwen3-30b-a3b",
            "pp=2,vpp=4,ep=8,zero=1,dispatcher=hybridep,overlap=grad+param+ep+pp",
            &[MegatronLm, MegatronBridge],
        ),
        (
            "qwen3-30b-a3b",
            "ep=8,zero=3,recompute=full,dispatcher=deepep",
            &titan,
        ),
        (
            "qwen3-30b-a3b",
            "ep=8,zero=3,recompute=full,dispatcher=hybridep",
            &[Torchtitan03, TorchtitanMain],
        ),
        (
            "qwen3-30b-a3b",
            "ep=8,zero=1,recompute=selective:norms,graphs=layers",
            &[MegatronLm, MegatronBridge],
        ),
        (
            "llama3-8b",
            "tp=2,pp=4,zero=1,graphs=step",
            &[MegatronLm, MegatronBridge],
        ),
        (
            "llama3-8b",
            "tp=2,zero=3,graphs=step",
            &[Torchtitan03, TorchtitanMain],
        ),
    ];
    for (name, text, targets) in cases {
        let (model, workload) = scene(name, 64, Precision::Bf16);
        let strategy = parse(text, &model, &workload).unwrap_or_else(|e| panic!("{text}: {e}"));
        for &dialect in targets {
            let taken = round_trip(&strategy, &model, &workload, dialect);
            assert!(
                taken,
                "{} refuses {name} {text}: {:?}",
                dialect.name(),
                exported(&strategy, &model, &workload, dialect, None)
            );
        }
    }
}

/// Every model of the library: the exported file has its sizes, or a refusal names what the target
/// lacks.
#[test]
fn every_model_is_exported_or_refused_by_name() {
    let mut taken = 0;
    for preset in catalog::load::model_names() {
        let (model, workload) = scene(&preset.name, 1, Precision::Bf16);
        let strategy = parse("tp=1", &model, &workload).expect("legal");
        for &dialect in Dialect::ALL {
            let is_taken = round_trip(&strategy, &model, &workload, dialect);
            taken += usize::from(is_taken);
        }
    }
    assert!(taken > 300, "{taken}");
}

/// The replacement that a refusal offers is taken, where it leads to a legal plan.
#[test]
fn refusals_name_a_choice_that_is_taken() {
    let cases = [
        (
            Dialect::MegatronLm,
            "pp=4,schedule=gpipe,zero=1",
            "schedule=1f1b",
        ),
        (
            Dialect::MegatronLm,
            "recompute=selective_ops,zero=1",
            "recompute=selective",
        ),
        (Dialect::Torchtitan03, "zero=1", "zero=3"),
        (Dialect::Torchtitan03, "tp=16,zero=3", "tp=8"),
        (
            Dialect::Torchtitan03,
            "pp=2,zero=3,order=tp-cp-pp-dp_shard-dp_replicate",
            "order=tp-cp-dp_shard-dp_replicate-pp",
        ),
        (
            Dialect::Torchtitan02,
            "cp=2,cp_kind=ring,zero=3",
            "cp_kind=all_gather",
        ),
        (
            Dialect::Torchtitan02,
            "pp=4,schedule=zb-h1,zero=3",
            "schedule=1f1b",
        ),
        (Dialect::DeepSpeed, "pp=2,zero=1", "pp=1"),
        (
            Dialect::DeepSpeed,
            "zero=2,recompute=layers:4",
            "recompute=full",
        ),
        (Dialect::Accelerate, "pp=2,zero=3", "pp=1"),
        (Dialect::Axolotl, "zero=1", "zero=3"),
        (
            Dialect::Axolotl,
            "cp=2,cp_kind=all_gather,zero=3",
            "cp_kind=ring",
        ),
        (Dialect::Transformers, "zero=2", "zero=3"),
        (Dialect::Nanotron, "zero=3", "zero=0"),
        (Dialect::Nanotron, "zero=1", "zero=0"),
        (Dialect::VeScale, "cp=2,zero=1", "cp=1"),
        (
            Dialect::MegatronLm,
            "zero=1,grad_dtype=fp32/bf16",
            "grad_dtype=bf16",
        ),
        (
            Dialect::Torchtitan03,
            "zero=3,grad_dtype=bf16",
            "grad_dtype=fp32",
        ),
    ];
    for (dialect, text, instead) in cases {
        // nanotron has no model with the rotation of Llama 3.1.
        let name = if dialect == Dialect::Nanotron {
            "llama2-7b"
        } else {
            "llama3-8b"
        };
        let (model, workload) = scene(name, 64, Precision::Bf16);
        let strategy = parse(text, &model, &workload).expect("legal");
        let Err(ExportError::Inexpressible { refusals, .. }) =
            exported(&strategy, &model, &workload, dialect, None)
        else {
            panic!("{} takes {text}", dialect.name());
        };
        let offered: Vec<String> = refusals
            .iter()
            .filter_map(|r| {
                r.instead
                    .as_ref()
                    .map(|(key, value)| format!("{key}={value}"))
            })
            .collect();
        assert!(offered.contains(&instead.to_owned()), "{text}: {offered:?}");
        let changes: Vec<_> = refusals.iter().filter_map(|r| r.instead.clone()).collect();
        let nearest = plans::grammar::with(&strategy.to_string(), &changes);
        if !instead.starts_with("tp=") && !instead.starts_with("pp=") && !instead.starts_with("cp=")
        {
            let nearest =
                parse(&nearest, &model, &workload).unwrap_or_else(|e| panic!("{nearest}: {e}"));
            exported(&nearest, &model, &workload, dialect, None)
                .expect("the nearest plan is taken");
        }
    }
}

#[test]
fn unknown_targets_and_versions_list_the_known_ones() {
    let check = |text: &str, expected: &str| {
        assert_eq!(
            Dialect::parse(text).expect_err("unknown").to_string(),
            expected
        );
    };
    check(
        "torchtitn",
        "unknown target `torchtitn`; did you mean `torchtitan`? targets: megatron-lm, megatron-bridge, torchtitan, deepspeed, accelerate, axolotl, transformers, transformers-deepspeed, llama-factory, nanotron, vescale",
    );
    check(
        "torchtitan@0.4",
        "torchtitan has no version `0.4`; versions: 0.3, 0.2, main",
    );
    assert_eq!(
        Dialect::parse("torchtitan").expect("default"),
        Dialect::Torchtitan03
    );
    for &dialect in Dialect::ALL {
        assert_eq!(Dialect::parse(&dialect.name()).expect("own name"), dialect);
        let schema = interop::export::schema::Schema::of(dialect).expect("schema");
        // The Trainer's arguments are the same with DeepSpeed's settings in them.
        assert!(dialect.target().starts_with(&schema.target), "{dialect:?}");
        assert_eq!(schema.version, dialect.version());
    }
}

#[test]
fn made_trees_hold_what_was_set() {
    let mut node = Node::table();
    node.set("a.b.c", 3);
    node.set("a.b.c", 4);
    node.set("a.d", "x");
    assert_eq!(node.at("a.b.c").and_then(Node::int), Some(4));
    assert_eq!(node.at("a.d").and_then(Node::text), Some("x"));
}
