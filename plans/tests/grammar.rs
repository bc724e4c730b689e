//! Strategies round-trip through text, ranks partition into groups, and plans through files.

use std::collections::BTreeSet;

use catalog::{Packing, Precision, Workload};
use plans::json::{PredictedJson, StrategyJson};
use plans::plan_file::{SCHEMA_VERSION, ShardingFile, TrainFile, WorkloadFile};
use plans::{Axis, Breakdown, PlanFile, Strategy as Plan};
use proptest::prelude::*;

fn parsed(text: &str) -> Result<Plan, plans::StrategyError> {
    let model = catalog::load::model("mixtral-8x7b").expect("preset");
    let runtime = catalog::load::runtime("vescale").expect("preset");
    plans::grammar::parse(text, &model, &workload(), &runtime)
}

fn workload() -> Workload {
    let sizes = catalog::WorkloadSizes {
        gpus: 64,
        seq_len: 4096,
        global_batch: 128,
        precision: Precision::Bf16,
    };
    Workload::new(sizes).expect("a workload")
}

fn legal() -> impl proptest::strategy::Strategy<Value = Plan> {
    let sizes = (0u32..4, 0u32..3, 0u32..3, 0u32..4, 0u32..2);
    let choices = (
        0usize..3,
        0u8..4,
        0usize..6,
        0usize..6,
        0usize..2,
        0usize..9,
        0usize..8,
    );
    (sizes, choices).prop_filter_map("legal", |((tp, pp, cp, ep, mbs), (kind, zero, re, sched, order, types, run))| {
        let kind = ["ring", "all_gather", "all_to_all"][kind];
        let re = ["none", "selective", "full", "layers:3", "falling:3", "selective:mlp+norms"][re];
        let sched = ["1f1b", "interleaved,vpp=2", "gpipe", "zb-h1", "zb-v,vpp=2", "dualpipe-v,vpp=2"][sched];
        let order = ["tp-cp-dp_shard-dp_replicate-pp", "tp-cp-pp-dp_shard-dp_replicate"][order];
        let states = ["own", "split_master", "8bit_moments"][types / 3];
        let offload = if states == "own" { ["none", "optimizer:50", "parameters"][types % 3] } else { "none" };
        let ahead = if zero == 3 { format!(",prefetch={}", types % 3) } else { String::new() };
        let types = ["fp32", "bf16", "fp32/bf16"][types % 3];
        let overlap = ["grad+param+pp", "grad+ep"][run % 2];
        let dispatcher = ["all_to_all", "all_gather", "deepep", "hybridep"][run / 2];
        let text = format!(
            "tp={},pp={},cp={},ep={},mbs={},cp_kind={kind},zero={zero},recompute={re},schedule={sched},order={order},grad_dtype={types},optim_states={states},offload={offload}{ahead},overlap={overlap},dispatcher={dispatcher}",
            1 << tp, 1 << pp, 1 << cp, 1 << ep, 1 << mbs
        );
        parsed(&text).ok()
    })
}

fn plan(strategy: &Plan) -> PlanFile {
    let prediction = PredictedJson {
        step_time_s: 1.25,
        p_fits: Some(0.9),
        evidence: None,
        step_time_interval_s: [1.0, 1.5],
        tokens_per_s_per_gpu: 1000.5,
        mfu: 0.5,
        mfu_palm: Some(0.52),
        peak_flops_per_s: 989e12,
        peak_memory_bytes: 1 << 36,
        peak_memory_interval_bytes: [1 << 35, 1 << 37],
        peak_rank: 0,
        peak_moment: "F s0 m1".to_owned(),
        memory_by_rank_bytes: vec![1 << 36],
        usable_by_rank_bytes: Vec::new(),
        fits: true,
        spare_bytes: 17,
        host_memory_bytes: None,
        breakdown: Breakdown {
            compute_s: 0.0001,
            ..Breakdown::default()
        },
    };
    PlanFile {
        schema_version: SCHEMA_VERSION,
        id: String::new(),
        tool_version: "0.1.0".to_owned(),
        model: "mixtral-8x7b".to_owned(),
        model_config: None,
        adapters: None,
        cluster: "dgx-h100".to_owned(),
        runtime: "no".to_owned(),
        workload: WorkloadFile {
            gpus: 64,
            seq_len: 4096,
            global_batch: 128,
            precision: Precision::Bf16,
            lengths: None,
            packing: None,
        },
        headroom: None,
        strategy: StrategyJson::new(strategy.decisions(), Precision::Bf16),
        strategy_text: strategy.to_string(),
        sharding: ShardingFile::default(),
        groups: Vec::new(),
        train: None,
        prediction,
    }
    .with_id()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn printing_and_parsing_are_inverse(strategy in legal()) {
        let model = catalog::load::model("mixtral-8x7b").expect("preset");
        prop_assert_eq!(parsed(&strategy.to_string()), Ok(strategy.clone()));
        let runtime = catalog::load::runtime("vescale").expect("preset");
        let written = plans::grammar::written(&strategy, &runtime);
        let read = parsed(&written).map(|read| read.canonical(&model));
        prop_assert_eq!(read, Ok(strategy.canonical(&model)), "{}", written);
    }

    #[test]
    fn groups_of_every_axis_partition_the_ranks(strategy in legal()) {
        for axes in [
            vec![Axis::Tp, Axis::Cp, Axis::DpShard, Axis::DpReplicate, Axis::Pp],
            vec![Axis::Etp, Axis::Ep, Axis::Edp],
        ] {
            let world: u64 = axes.iter().map(|&a| strategy.size(a)).product();
            let mut ranks = BTreeSet::new();
            for index in 0..world {
                let mut rest = index;
                let mut rank = 0;
                for &axis in &axes {
                    let group = strategy.group(axis);
                    rank += rest % group.size * group.stride;
                    rest /= group.size;
                }
                ranks.insert(rank);
            }
            prop_assert_eq!(ranks.len() as u64, world);
            prop_assert_eq!(ranks.last().copied(), Some(world - 1));
        }
    }

    #[test]
    fn plan_files_round_trip(strategy in legal()) {
        let written = plan(&strategy);
        let text = written.to_yaml().expect("writes");
        prop_assert_eq!(&text, &written.to_yaml().expect("writes"));
        let read = PlanFile::from_yaml(&text, "test").expect("reads");
        prop_assert_eq!(read, written);
    }
}

/// Files of version 0.1 know one convention of MFU.
#[test]
fn a_plan_file_without_the_second_mfu_opens_with_its_id() {
    let written = plan(&parsed("tp=2,ep=4").expect("legal"));
    let text = written.to_yaml().expect("writes");
    let old: String = text
        .lines()
        .filter(|line| !line.contains("mfu_palm"))
        .map(|line| format!("{line}\n"))
        .collect();
    assert_ne!(old, text);
    let read = PlanFile::from_yaml(&old, "test").expect("reads");
    assert_eq!((&read.id, read.prediction.mfu_palm), (&written.id, None));
    assert_eq!(read.to_yaml().expect("writes"), old);
}

#[test]
fn the_id_hashes_decisions_only() {
    let strategy = parsed("tp=2,ep=4").expect("legal");
    let one = plan(&strategy);
    let mut other = one.clone();
    other.prediction.step_time_s = 9.0;
    other.tool_version = "9.9.9".to_owned();
    assert_eq!(one.content_id(), other.content_id());
    other.workload.seq_len = 8192;
    assert_ne!(one.content_id(), other.content_id());
}

/// Numbers with which nothing can be trained are refused when a plan is opened.
#[test]
fn train_sections_are_checked() {
    let usual = || TrainFile {
        data: "a.txt".to_owned(),
        steps: 10,
        seed: 1,
        learning_rate: 1e-3,
        min_learning_rate: Some(0.0),
        warmup_steps: 0,
        weight_decay: 0.1,
        betas: [0.0, 0.95],
        clip_norm: None,
        gradient_bucket_mib: 25,
    };
    type Case = (fn(&mut TrainFile), &'static str);
    let cases: [Case; 14] = [
        (|_| {}, ""),
        (|train| train.clip_norm = Some(1e-9), ""),
        (|train| train.steps = 0, "train.steps"),
        (|train| train.learning_rate = -1.0, "train.learning_rate"),
        (
            |train| train.min_learning_rate = Some(f64::NAN),
            "train.min_learning_rate",
        ),
        (
            |train| train.min_learning_rate = Some(2e-3),
            "train.min_learning_rate",
        ),
        (
            |train| (train.learning_rate, train.min_learning_rate) = (0.0, None),
            "",
        ),
        (
            |train| (train.learning_rate, train.min_learning_rate) = (1e-5, None),
            "",
        ),
        (|train| train.min_learning_rate = Some(1e-3), ""),
        (
            |train| train.weight_decay = f64::INFINITY,
            "train.weight_decay",
        ),
        (|train| train.betas = [2.0, 0.95], "train.betas"),
        (|train| train.betas[1] = 1.0, "train.betas"),
        (|train| train.clip_norm = Some(-1.0), "train.clip_norm"),
        (|train| train.clip_norm = Some(f64::NAN), "train.clip_norm"),
    ];
    let mut plan = plan(&parsed("tp=1,zero=1").expect("legal"));
    for (number, (change, field)) in cases.into_iter().enumerate() {
        let mut train = usual();
        change(&mut train);
        plan.train = Some(train);
        let text = plan.to_yaml().expect("YAML");
        match PlanFile::from_yaml(&text, "p.yaml") {
            Ok(read) => assert!(field.is_empty() && read == plan, "{number}"),
            Err(error) => {
                let said = error.to_string();
                assert!(
                    !field.is_empty() && said.contains(field),
                    "{number}: {said}"
                );
            }
        }
    }
}

#[test]
fn every_form_of_a_strategy_is_read() {
    let same = "tp=2,pp=2,cp=2,cp_kind=ring,ep=4,zero=1,mbs=2,recompute=full,schedule=1f1b";
    let meant = parsed(same).expect("legal");
    for text in [
        "tp2 pp2 cp2(ring) ep4 zero1 mbs2 recompute full 1f1b",
        "TP=2 PP=2 CP=2 cp_kind=ring EP=4, zero1, MBS2, recompute=full",
        "tp2 pp2 cp2(ring) ep4·etp1 dp8 zero1 sp mbs2 1f1b recompute=full",
        "tp2,pp2,cp2(ring),ep4,zero1,dp8x1,mbs2,schedule 1f1b,recompute full,stages 2x16",
    ] {
        assert_eq!(parsed(text), Ok(meant.clone()), "{text}");
    }
    let uneven = parsed("tp2 pp4 dp8 stages=7/2x9/7").expect("legal");
    assert_eq!(uneven.stages.0, [7, 9, 9, 7]);
    assert!(plans::grammar::short(&uneven).ends_with("stages=7/2x9/7"));
    for (text, says) in [
        ("tp=2,foo", "`foo` is not of the form key=value"),
        ("ttp4", "unknown key `ttp`"),
        ("tp2 tp4", "key `tp` is given twice"),
        ("recompute", "`recompute` has no value"),
        ("tp2 recompute=selctive", "expected none, selective"),
        ("schedule=zbv", "did you mean `zb-v`?"),
        ("stages=99999x1", "at most 65536 stages"),
        ("stages=99999999999999999999x1", "at most 65536 stages"),
        ("tp2x4", "expected a whole number"),
        ("schedule=gpipe", "other than 1f1b needs pp of at least 2"),
        ("schedule=zb-h1", "other than 1f1b needs pp of at least 2"),
    ] {
        let error = parsed(text).expect_err(text).to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
}

/// An axis order is written if it places ranks otherwise than the usual one, and two orders that place them alike are one.
#[test]
fn an_axis_order_is_where_it_places_ranks() {
    let model = catalog::load::model("mixtral-8x7b").expect("preset");
    let runtime = catalog::load::runtime("vescale").expect("preset");
    let usual = "tp-cp-dp_shard-dp_replicate-pp";
    let inner = "tp-cp-pp-dp_shard-dp_replicate";
    for (sizes, order, same_as) in [
        ("tp2 dp32 mbs1", "dp_shard-tp-cp-dp_replicate-pp", None),
        ("tp2 dp32 mbs1", inner, Some(usual)),
        (
            "tp2 dp32 mbs1",
            "cp-tp-pp-dp_replicate-dp_shard",
            Some(usual),
        ),
        ("tp8 pp8 dp1 mbs1", "pp-tp-cp-dp_shard-dp_replicate", None),
        ("tp8 pp8 dp1 mbs1", inner, Some(usual)),
        ("tp2 pp4 dp8 mbs1", inner, None),
        (
            "tp2 pp4 dp8 mbs1",
            "cp-tp-pp-dp_shard-dp_replicate",
            Some(inner),
        ),
    ] {
        let of = |order: &str| parsed(&format!("{sizes} order={order}")).expect(order);
        let one = of(order);
        let written = plans::grammar::written(&one, &runtime);
        let read = parsed(&written).map(|read| read.canonical(&model));
        assert_eq!(read, Ok(one.canonical(&model)), "{written}");
        for other in [usual, inner] {
            let alike = of(other).canonical(&model) == one.canonical(&model);
            let same = same_as.map(|same| of(same).canonical(&model));
            let wanted = same == Some(of(other).canonical(&model)) || other == order;
            assert_eq!(alike, wanted, "{sizes}: {order}, {other}");
        }
    }
}

/// A plan file records the documents of its sequences, and refuses impossible ones.
#[test]
fn documents_are_written_and_read() {
    let plain = workload();
    for (lengths, packing) in [
        ("lognormal:mean=700,sigma=0.9", Packing::Within),
        ("512:0.7,4k:0.3", Packing::Padded),
        ("100:3,2k:1", Packing::Across),
    ] {
        let lengths = lengths.parse().expect(lengths);
        let workload = plain.of_documents(lengths, packing).expect("documents");
        assert_eq!(WorkloadFile::of(&workload).read(), Ok(workload));
    }
    let file = WorkloadFile::of(&plain);
    for (lengths, packing, wanted) in [
        (Some("512:1"), None, "given together"),
        (None, Some(Packing::Within), "given together"),
        (
            Some("8k:1"),
            Some(Packing::Within),
            "longer than a sequence",
        ),
        (Some("512:0.5"), Some(Packing::Within), "add up to 0.5"),
    ] {
        let wrong = WorkloadFile {
            lengths: lengths.map(str::to_owned),
            packing,
            ..file.clone()
        };
        let said = wrong.read().expect_err("refused");
        assert!(said.contains(wanted), "{said}");
    }
}

/// A ZeRO level counts where some ranks hold the same states: with one data-parallel rank those of experts, which are spread over
/// fewer ranks than tensor parallelism has. There it is the runtime's usual level.
#[test]
fn zero_counts_where_states_have_several_owners() {
    use catalog::Zero::{Z0, Z1, Z3};
    let runtime = catalog::load::runtime("megatron-core").expect("preset");
    for (model, text, usual, at_level_1) in [
        ("mixtral-8x7b", "tp8 pp8 ep2 etp1", Z1, Z1),
        ("mixtral-8x7b", "tp8 pp8 ep8 etp1", Z0, Z0),
        ("mixtral-8x7b", "tp8 pp8 ep4 etp2", Z0, Z0),
        ("mixtral-8x7b", "tp4 pp8 dp2 ep8", Z1, Z1),
        ("llama3-70b", "tp8 pp8", Z0, Z0),
    ] {
        let model = catalog::load::model(model).expect("preset");
        let zero = |text: &str| {
            let read = plans::grammar::parse(text, &model, &workload(), &runtime);
            read.expect(text).canonical(&model).zero
        };
        assert_eq!(zero(text), usual, "{text}");
        assert_eq!(zero(&format!("{text} zero1")), at_level_1, "{text}");
        assert_eq!(zero(&format!("{text} zero0")), Z0, "{text}");
        let offloaded = plans::grammar::parse(
            &format!("{text} zero3 offload=parameters"),
            &model,
            &workload(),
            &runtime,
        );
        assert_eq!(offloaded.expect(text).canonical(&model).zero, Z3, "{text}");
    }
}
