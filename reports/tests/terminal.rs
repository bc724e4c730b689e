//! What a terminal shows of a made-up prediction, at several widths.

use catalog::{Bytes, FlopRate, Origin, Precision, Seconds, Workload, WorkloadSizes};
use plans::{
    Breakdown, Candidate, Change, Fit, MemoryItem, Prediction, Present, SearchOutcome, SpaceReport,
    Strategy, UsedConstant,
};
use reports::present::{Shown, section};
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
        host_memory: plans::HostMemory::default(),
        evidence: "extrapolated: fewer than 8 published runs of dense models in bf16 on Hopper"
            .to_owned(),
        peak_rank: 0,
        peak_moment: "B s3 m0".to_owned(),
        memory_by_rank: vec![Bytes(69 * GIB)],
        usable_by_rank: vec![Bytes(75 * GIB)],
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
    answer_of(width, colour, false)
}

fn answer_of(width: usize, colour: bool, interrupted: bool) -> String {
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
        interrupted,
    };
    let ground = Ground {
        runtime: &runtime,
        gpus_per_node: 8,
        adapters: None,
        pools: None,
        documents: None,
        groups: &[],
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
fn an_interrupted_search_says_so() {
    let shown = answer_of(80, false, true);
    assert!(shown.starts_with("Interrupted: the best plan"), "{shown}");
    assert!(!answer(80, false).contains("Interrupted"));
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

/// A strategy in use whose only change is on the way to the best plan.
fn in_use(fits: bool, width: usize) -> String {
    let runtime = catalog::load::runtime("megatron-core").expect("a preset");
    let change = |decision, words: &str, text: &str, step, fits| Change {
        decision,
        words: words.to_owned(),
        strategy: strategy(text),
        step_time: Seconds(step),
        peak_memory: Bytes(61 * GIB),
        p_fits: 0.97,
        fits,
        changes_results: false,
    };
    let candidate = |text: &str, step| Candidate {
        strategy: strategy(text),
        prediction: prediction(step),
        why_not_first: String::new(),
    };
    let best = "tp=4,pp=4,mbs=2,zero=1";
    let recompute = "tp=8,pp=4,zero=1,recompute=selective";
    let recomputed = change(
        "recompute",
        "recompute=full → recompute=selective",
        recompute,
        8.6,
        true,
    );
    let present = Present {
        candidate: candidate("tp=8,pp=4,zero=1,recompute=full", 10.0),
        fits,
        error: 0.065,
        changes: vec![
            recomputed.clone(),
            change("mbs", "mbs1 → mbs2", "tp=8,pp=4,mbs=2,zero=1", 9.8, true),
            change("pp", "pp4 dp16 → pp8 dp8", "tp=8,pp=8,zero=1", 10.9, true),
            change("zero", "zero1 → zero0", "tp=8,pp=4,zero=0", 9.1, false),
        ],
        path: vec![
            recomputed,
            change("tp", "tp8 dp16 → tp4 dp32", "tp=4,pp=4,zero=1", 8.1, true),
            change("mbs", "mbs1 → mbs2", best, 7.9, true),
        ],
        on_pools: None,
    };
    let shown = Shown {
        present: &present,
        best: Some(&candidate(best, 7.9)),
        kept: &["ep".to_owned(), "pp".to_owned()],
        runtime: &runtime,
    };
    let style = Style {
        width,
        colour: false,
    };
    section(shown, style)
}

#[test]
fn a_strategy_in_use() {
    insta::assert_snapshot!([in_use(true, 80), in_use(false, 60)].join("\n"));
    for (fits, width) in [(true, 60), (false, 60), (true, 120)] {
        let text = in_use(fits, width);
        assert!(
            text.lines().all(|line| line.chars().count() <= width),
            "{text}"
        );
    }
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
