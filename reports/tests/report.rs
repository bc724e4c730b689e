//! The HTML report of a made-up prediction: what it says, that it is self-contained, and that it
//! stays small however long the timeline is.

use std::collections::BTreeMap;

use plans::{
    Breakdown, Event, Fit, MemoryItem, NamedTime, Prediction, SpaceReport, Stream, Timeline,
    UsedConstant,
};
use reports::{Alternative, Budget, InputFact, ReportInput};
use spec::{Bytes, FlopRate, Origin, Seconds};

const GIB: u64 = 1 << 30;

fn prediction(fit: Fit) -> Prediction {
    Prediction {
        step_time: Seconds(8.0),
        step_time_interval: (Seconds(7.4), Seconds(8.7)),
        ratio_error: 0.03,
        tokens_per_s_per_gpu: 1024.0,
        mfu: 0.462,
        mfu_palm: 0.481,
        peak_flop_rate: FlopRate(989e12),
        peak_memory: Bytes(66 * GIB),
        peak_memory_interval: (Bytes(62 * GIB), Bytes(70 * GIB)),
        peak_rank: 0,
        peak_moment: "F s0 m3".into(),
        memory_by_rank: (0..4).map(|rank| Bytes((66 - rank * 5) * GIB)).collect(),
        memory: [
            "optimizer states",
            "saved activations",
            "parameters",
            "gradients",
        ]
        .iter()
        .zip([26, 20, 12, 8])
        .map(|(name, gib)| MemoryItem {
            name: (*name).into(),
            bytes: gib * GIB,
            rank: 0,
            moment: "F s0 m3".into(),
        })
        .collect(),
        breakdown: Breakdown {
            compute_s: 5.6,
            recompute_s: 0.3,
            tp_exposed_s: 0.7,
            dp_exposed_s: 0.2,
            pp_exposed_s: 0.1,
            bubble_s: 0.8,
            optimizer_s: 0.25,
            host_s: 0.05,
            ..Breakdown::default()
        },
        kernels: (0..20)
            .map(|i| NamedTime {
                name: format!("mlp.linear_{i} <fc>"),
                seconds: 2.0 / f64::from(i + 1),
            })
            .collect(),
        fit,
        provenance: vec![UsedConstant {
            name: "dense bf16 peak".into(),
            value: "989 TFLOP/s".into(),
            origin: Origin::Datasheet,
            source: "vendor's datasheet".into(),
        }],
    }
}

/// A 1F1B-like timeline: enough shape to look at.
fn timeline(ranks: u32, micro_batches: u32) -> Timeline {
    let mut events = Vec::new();
    let mut memory = Vec::new();
    let scale = 8.0 / (3.0 * f64::from(micro_batches + ranks));
    for rank in 0..ranks {
        for m in 0..micro_batches {
            let forward = f64::from(m + rank) + 2.0 * f64::from(m);
            let backward = f64::from(m) * 3.0 + f64::from(2 * ranks - rank);
            for (kind, start, length) in [("F", forward, 1.0), ("B", backward, 2.0)] {
                events.push(Event {
                    rank,
                    stream: Stream::Compute,
                    name: format!("{kind} s{rank} m{m}"),
                    stage: Some(rank),
                    micro_batch: Some(m),
                    start: Seconds(start * scale),
                    end: Seconds((start + length) * scale),
                });
            }
            let bytes = Bytes((40 + u64::from(m.min(ranks - rank)) * 6) * GIB);
            memory.push((rank, Seconds(forward * scale), bytes));
        }
    }
    Timeline {
        ranks,
        events,
        memory,
    }
}

fn alternatives() -> Vec<Alternative> {
    let row = |strategy: &str, time, gib, why: &str| Alternative {
        strategy: strategy.into(),
        step_time: Seconds(time),
        tokens_per_s_per_gpu: 8192.0 / time,
        mfu: 3.7 / time,
        peak_memory: Bytes(gib * GIB),
        why_not_first: why.into(),
    };
    vec![
        row("tp=4,pp=4,dp_shard=32,micro_batch=1", 8.0, 66, ""),
        row(
            "tp=8,pp=4,dp_shard=16,micro_batch=2",
            8.4,
            58,
            "TP communication is exposed for 0.6 s more",
        ),
        row(
            "tp=4,pp=8,dp_shard=16,micro_batch=1",
            8.9,
            49,
            "the bubble is 0.9 s longer",
        ),
        row(
            "tp=8,pp=8,dp_shard=8,micro_batch=1",
            9.6,
            51,
            "both <bubble> and TP communication grow",
        ),
    ]
}

fn input<'a>(
    prediction: &'a Prediction,
    timeline: Option<&'a Timeline>,
    space: Option<&'a SpaceReport>,
) -> ReportInput<'a> {
    ReportInput {
        model: "llama3-70b".into(),
        devices: "512 × h100-sxm".into(),
        gpus: 512,
        cluster: "dgx-h100".into(),
        runtime: "megatron-core".into(),
        strategy: "tp=4,pp=4,dp_shard=32,micro_batch=1".into(),
        plan_id: "3f9a0c12".into(),
        command: "vescale-plan estimate --model llama3-70b --gpus 512".into(),
        prediction,
        timeline,
        capacity: Bytes(80 * GIB),
        headroom: 0.1,
        budget: Some(Budget::new(15e12, Some(2.5), 1024.0, 512)),
        alternatives: space.map(|_| alternatives()).unwrap_or_default(),
        space,
        inputs: vec![InputFact {
            name: "seq".into(),
            value: "8192".into(),
            origin: "default".into(),
        }],
        version: "0.1.0".into(),
    }
}

fn space() -> SpaceReport {
    SpaceReport {
        strategies: 12_345,
        simulated: 321,
        too_large: 12,
        pruned: BTreeMap::from([("memory floor above capacity".into(), 12_000)]),
        illegal: BTreeMap::from([("layers not divisible by pp".into(), 99)]),
    }
}

#[test]
fn a_report_says_the_verdict_first_and_escapes_what_it_shows() {
    let prediction = prediction(Fit::Fits {
        spare: Bytes(6 * GIB),
    });
    let (timeline, space) = (timeline(4, 32), space());
    let page = reports::html::report(&input(&prediction, Some(&timeline), Some(&space)));
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("sample.report.html");
    std::fs::write(path, &page).expect("the target folder is writable");

    let sections = [
        "verdict",
        "time",
        "memory",
        "top",
        "pareto",
        "gantt",
        "memory-time",
        "space",
    ];
    let places: Vec<usize> = sections
        .iter()
        .map(|id| page.find(&format!("id=\"{id}\"")).expect(id))
        .collect();
    assert!(places.is_sorted(), "sections stand in order: {places:?}");
    for said in [
        "Fits",
        "66.0 of 72.0 GiB",
        "8.00 s",
        "46.2 %",
        "causal attention counted once (48.1 % by the PaLM convention)",
        "331 days",
        "$ 10,172,526",
    ] {
        assert!(page.contains(said), "{said} is missing");
    }
    assert!(page.contains("&lt;bubble&gt;") && !page.contains("<bubble>"));
}

#[test]
fn a_report_is_self_contained() {
    let prediction = prediction(Fit::Fits { spare: Bytes(1) });
    let page = reports::html::report(&input(&prediction, None, None));
    for forbidden in ["http://", "https://", "src=", "@import", "url("] {
        assert!(!page.contains(forbidden), "{forbidden} fetches something");
    }
    for absent in ["id=\"top\"", "id=\"gantt\"", "id=\"space\""] {
        assert!(!page.contains(absent), "{absent} has nothing to show");
    }
}

#[test]
fn what_does_not_fit_says_by_how_much_and_what_is_largest() {
    let prediction = prediction(Fit::TooLarge {
        over: Bytes(9 * GIB),
        largest: "optimizer states".into(),
    });
    let page = reports::html::report(&input(&prediction, None, None));
    assert!(page.contains("Too large"));
    assert!(page.contains("by 9.00 GiB; the largest part is optimizer states"));
}

#[test]
fn a_huge_timeline_stays_below_three_megabytes() {
    let prediction = prediction(Fit::Fits { spare: Bytes(1) });
    let timeline = timeline(64, 2048);
    let page = reports::html::report(&input(&prediction, Some(&timeline), None));
    assert!(page.len() < 3_000_000, "{} bytes", page.len());
    assert!(page.contains("of 64 ranks"));
}
