//! What a terminal shows of a made-up prediction, at several widths.

use catalog::{Bytes, FlopRate, Origin, Precision, Seconds, Workload, WorkloadSizes};
use plans::{
    Breakdown, Candidate, Fit, MemoryItem, Prediction, SearchOutcome, SpaceReport, Strategy,
    UsedConstant,
};
use reports::terminal::{Ground, Style, next, search, terms};

const GIB: u64 = 1 << 30;

fn strategy(text: &str) -> Strategy {
    let model = catalog::load::model("llama3-70b").expect("a preset");
    let runtime = catalog::load::runtime("megatron-core").expect("a preset");
    let workload = Workload::new(WorkloadSizes {
        gpus: 512,
        seq_len: 8192,
        global_batch: 512,
        precision: Precision::Bf16,
    });
    let workload = workload.expect("a workload");
    plans::grammar::parse(text, &model, &workload, &runtime).expect("legal")
}

fn prediction(step: f64) -> Prediction {
    let item = |name: &str, gib: u64| MemoryItem {
        name: name.to_owned(),
        bytes: gib * GIB,
        rank: 0,
        moment: "B s3 m0".to_owned(),
    };
    Prediction {
        step_time: Seconds(step),
        step_time_interval: (Seconds(step * 0.93), Seconds(step * 1.21)),
        ratio_error: 0.03,
        tokens_per_s_per_gpu: 8192.0 / step,
        mfu: 0.449,
        mfu_palm: 0.481,
        peak_flop_rate: FlopRate(989e12),
        peak_memory: Bytes(69 * GIB),
        peak_memory_interval: (Bytes(64 * GIB), Bytes(78 * GIB)),
        p_fits: 0.81,
        evidence: "extrapolated: fewer than 8 published runs of dense models in bf16 on Hopper"
            .to_owned(),
        peak_rank: 0,
        peak_moment: "B s3 m0".to_owned(),
        memory_by_rank: vec![Bytes(69 * GIB)],
        memory: vec![
            item("saved activations: mlp", 40),
            item("allocator rounding and fragmentation", 17),
            item("optimizer: master parameters", 12),
        ],
        breakdown: Breakdown {
            compute_s: step * 0.9,
            tp_exposed_s: step * 0.09,
            bubble_s: step * 0.01,
            ..Breakdown::default()
        },
        kernels: Vec::new(),
        fit: Fit::Fits {
            spare: Bytes(6 * GIB),
        },
        provenance: vec![UsedConstant {
            name: "host time per step".to_owned(),
            value: "5 ms".to_owned(),
            origin: Origin::Assumed,
            source: "assumed".to_owned(),
        }],
    }
}

fn answer(width: usize, colour: bool) -> String {
    let runtime = catalog::load::runtime("megatron-core").expect("a preset");
    let candidate = |text: &str, step, why: &str| Candidate {
        strategy: strategy(text),
        prediction: prediction(step),
        why_not_first: why.to_owned(),
    };
    let outcome = SearchOutcome {
        wishes: Vec::new(),
        top: vec![
            candidate("tp=4,pp=4,vpp=5,cp=2,zero=1", 8.28, ""),
            candidate(
                "tp=8,pp=4,zero=1,recompute=full",
                9.1,
                "+9.9% step time: recomputation +702 ms",
            ),
        ],
        space: SpaceReport {
            strategies: 120_456,
            simulated: 101,
            too_large: 8,
            ..SpaceReport::default()
        },
        relax: Vec::new(),
        interrupted: false,
    };
    let ground = Ground {
        runtime: &runtime,
        gpus_per_node: 8,
        usable: Bytes(75 * GIB),
    };
    let style = Style { width, colour };
    let steps = [(
        "launch it",
        vec![
            "vescale-plan export llama3-70b.plan.yaml --to megatron-lm --launcher slurm -o launch"
                .to_owned(),
            "sbatch launch/launch.sbatch".to_owned(),
        ],
    )];
    search(&outcome, ground, style) + &next(&steps, style)
}

#[test]
fn an_answer_on_60_columns() {
    insta::assert_snapshot!(answer(60, false));
}

#[test]
fn an_answer_on_80_columns() {
    insta::assert_snapshot!(answer(80, false));
}

#[test]
fn an_answer_on_120_columns() {
    insta::assert_snapshot!(answer(120, false));
}

#[test]
fn an_answer_in_colours() {
    insta::assert_snapshot!(answer(80, true));
}

#[test]
fn what_abbreviations_mean() {
    let style = Style {
        width: 80,
        colour: false,
    };
    insta::assert_snapshot!(terms(style));
}

#[test]
fn every_line_fits() {
    for width in [60, 80, 120, 200] {
        for line in answer(width, false).lines() {
            assert!(line.chars().count() <= width, "{width}: {line}");
        }
    }
}
