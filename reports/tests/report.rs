//! The HTML report of a made-up prediction: its statements, that it is self-contained, and that it
//! stays small however long the timeline is.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use catalog::{
    Bytes, Domain, FlopRate, Origin, Overlap, Precision, Runtime, Seconds, Workload, WorkloadSizes,
};
use plans::{
    Action, ActionKind, Breakdown, Decisions, Event, Fit, MemoryItem, NamedTime, Prediction,
    SpaceReport, Strategy, Stream, Timeline, UsedConstant,
};
use reports::{Alternative, Budget, InputFact, Launch, Point, ReportInput};

const GIB: u64 = 1 << 30;

fn prediction(fit: Fit) -> Prediction {
    Prediction {
        step_time: Seconds(8.0),
        step_time_interval: (Seconds(7.4), Seconds(8.7)),
        ratio_error: 0.03,
        tokens_per_s_per_gpu: 1024.0,
        mfu: 0.462,
        mfu_palm: 0.481,
        p_fits: 0.9,
        host_memory: plans::HostMemory::default(),
        evidence: "covered: 20 published runs".to_owned(),
        peak_flop_rate: FlopRate(989e12),
        peak_memory: Bytes(66 * GIB),
        peak_memory_interval: (Bytes(62 * GIB), Bytes(70 * GIB)),
        peak_rank: 0,
        peak_moment: "F s0 m3".into(),
        memory_by_rank: (0..4).map(|rank| Bytes((66 - rank * 5) * GIB)).collect(),
        usable_by_rank: vec![Bytes(72 * GIB); 4],
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
            let passes = [
                (ActionKind::F, forward, 1.0),
                (ActionKind::B, backward, 2.0),
            ];
            for (kind, start, length) in passes {
                events.push(Event {
                    rank,
                    stream: Stream::Compute,
                    action: Action {
                        kind,
                        stage: rank,
                        micro_batch: m,
                    },
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
        fits: gib <= 72,
        why_not_first: why.into(),
    };
    vec![
        row("tp4 pp4 dp32 zero1 mbs1 recompute none", 8.0, 66, ""),
        row(
            "tp8 pp4 dp16 zero1 mbs2 recompute none",
            8.4,
            58,
            "TP communication is exposed for 0.6 s more",
        ),
        row(
            "tp4 pp8 dp16 zero1 mbs1 recompute none",
            8.9,
            49,
            "the bubble is 0.9 s longer",
        ),
        row(
            "tp8 pp8 dp8 zero1 mbs1 recompute selective",
            9.6,
            51,
            "both <bubble> and TP communication grow",
        ),
    ]
}

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| catalog::load::runtime("megatron-core").expect("a preset"))
}

/// A strategy for this number of GPUs.
fn strategy(gpus: u64, text: &str) -> Strategy {
    let model = catalog::load::model("llama3-70b").expect("a preset");
    let workload = Workload::new(WorkloadSizes {
        gpus,
        seq_len: 8192,
        global_batch: 512,
        precision: Precision::Bf16,
    });
    let workload = workload.expect("a workload");
    plans::grammar::parse(text, &model, &workload, runtime()).expect("legal")
}

/// Decisions of a plan of 512 GPUs.
fn decisions() -> &'static Decisions {
    static DECISIONS: OnceLock<Strategy> = OnceLock::new();
    DECISIONS.get_or_init(|| strategy(512, "tp=4,pp=4,dp=32,zero=1"))
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
        runtime: runtime(),
        strategy: "tp4 pp4 dp32 zero1 mbs1 recompute=none".into(),
        strategy_in_full: "tp=4,pp=4,dp_shard=32,micro_batch=1".into(),
        decisions: decisions(),
        gpus_per_node: 8,
        domain: Domain {
            gpus: 8,
            is_whole_job: false,
        },
        pools: None,
        launches: vec![Launch {
            target: "megatron-lm".into(),
            commands: vec![
                "vescale-plan export x.plan.yaml --to megatron-lm -o launch".into(),
                "sbatch launch/launch.sbatch".into(),
            ],
        }],
        present: None,
        next_change: Some("Overlap: +9.9 % tokens/s".into()),
        plan_id: "3f9a0c12".into(),
        command: "vescale-plan estimate --model llama3-70b --gpus 512".into(),
        prediction,
        timeline,
        capacity: Bytes(80 * GIB),
        headroom: 0.1,
        budget: Some(Budget {
            tokens: 15e12,
            time: Seconds(15e12 / (1024.0 * 512.0)),
            price: Some(2.5),
            dollars: Some(2.5 * 512.0 * 15e12 / (1024.0 * 512.0) / 3600.0),
            goodput: None,
        }),
        alternatives: space.map(|_| alternatives()).unwrap_or_default(),
        wishes: wishes().into_iter().filter(|_| space.is_some()).collect(),
        points: space.map(|_| points()).unwrap_or_default(),
        space,
        ways: &[],
        inputs: vec![InputFact {
            name: "seq",
            value: "8192".into(),
            origin: "default".into(),
        }],
        version: "0.1.0".into(),
    }
}

/// A strategy that is the best for two wishes.
fn wishes() -> Option<(String, Alternative)> {
    let lightest = alternatives().into_iter().nth(2)?;
    Some(("least memory of these; no virtual stages".into(), lightest))
}

/// The plan, and two others: one that it beats, and one that needs less memory.
fn points() -> Vec<Point> {
    let point = |seconds, gib, found| Point {
        decisions: Decisions {
            overlap: if found {
                decisions().overlap
            } else {
                Overlap::NONE
            },
            ..decisions().clone()
        },
        step_time: Seconds(seconds),
        peak_memory: Bytes(gib * GIB),
        found,
    };
    vec![
        point(9.5, 70, false),
        point(9.9, 40, false),
        point(8.4, 66, true),
    ]
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
        "launch",
        "time",
        "memory",
        "top",
        "pareto",
        "gantt",
        "memory-time",
        "ranks",
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
        "It fits with probability <b>0.90</b>",
        "in the forward of micro-batch 3, stage 0",
        "<li>4 GPUs of a node share each layer (TP 4).</li>",
        "<li>4 pipeline stages of 20 layers (PP 4).</li>",
        "Best next change: </b>Overlap: +9.9 % tokens/s",
        "80 % intervals, covered: 20 published runs",
        "least memory of these; no virtual stages",
        "sbatch launch/launch.sbatch",
        "links inside a node",
        "the network: every rank is in a node of its own (4 nodes)",
        "recompute=none overlap=none</code>",
        "\"overlap=none\"",
        "Runner-up: ",
        "Why not first",
        "<b>63</b>",
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
    assert!(page.contains("hero too-large"));
    assert!(page.contains("by 9.00 GiB; the largest part is optimizer states"));
    // A plan that cannot run has no price.
    for absent in ["Training time", "$ ", "331 days"] {
        assert!(!page.contains(absent), "{absent}");
    }
    // The mark of usable memory lies within the bar, and differs in colour from a bar that exceeds it.
    let mark = page.split("<u style=\"left:").nth(1).expect("a mark");
    let percent = mark.split('%').next().expect("percent");
    assert!((0.0..100.0).contains(&percent.parse::<f64>().expect("a number")));
    let colour = page.split(".rank .track u {").nth(1).expect("a rule");
    let colour = colour.split('}').next().expect("its end");
    assert!(
        !colour.contains("--mark") && !colour.contains("--bad"),
        "{colour}"
    );
}

/// Bold marks the parts that the first strategy does not have.
#[test]
fn what_differs_is_bold() {
    let prediction = prediction(Fit::Fits { spare: Bytes(1) });
    let space = space();
    let page = reports::html::report(&input(&prediction, None, Some(&space)));
    let rows: Vec<&str> = page.split("<td><code>").skip(1).collect();
    let row = |index: usize| rows[index].split("</code>").next().expect("its end");
    assert_eq!(row(0), "tp4 pp4 dp32 zero1 mbs1 recompute none");
    assert_eq!(
        row(1),
        "<b>tp8</b> pp4 <b>dp16</b> zero1 <b>mbs2</b> recompute none"
    );
    assert_eq!(
        row(2),
        "tp4 <b>pp8</b> <b>dp16</b> zero1 mbs1 recompute none"
    );
    assert_eq!(
        row(3),
        "<b>tp8</b> <b>pp8</b> <b>dp8</b> zero1 mbs1 recompute <b>selective</b>"
    );
}

/// A bar's length is its number; a sum of many parts, which may exceed the largest, has no bar.
#[test]
fn bars_are_as_long_as_their_numbers() {
    let mut prediction = prediction(Fit::Fits { spare: Bytes(1) });
    prediction.kernels = vec![
        NamedTime {
            name: "k".into(),
            seconds: 1.0,
        };
        50
    ];
    let page = reports::html::report(&input(&prediction, None, None));
    let others = page.split("<td>38 others</td>").nth(1).expect("a sum");
    assert!(
        others.starts_with("<td class=\"track\"></td>"),
        "{}",
        &others[..60]
    );
    let section = page.split("id=\"kernels\"").nth(1).expect("the section");
    let section = section.split("</section>").next().expect("its end");
    assert_eq!(section.matches("width:100.00%").count(), 12);
}

/// Names from outside are escaped wherever the page shows them: a page of hostile names has the same markup as one of
/// benign names.
#[test]
fn names_are_text_in_the_page() {
    let page = |name: &'static str| {
        let mut prediction = prediction(Fit::TooLarge {
            over: Bytes(1),
            largest: name.into(),
        });
        prediction.peak_moment = name.into();
        for part in &mut prediction.memory {
            part.name = name.into();
            part.moment = name.into();
        }
        for kernel in &mut prediction.kernels {
            kernel.name = name.into();
        }
        for constant in &mut prediction.provenance {
            constant.name = name.into();
            constant.value = name.into();
            constant.source = name.into();
        }
        let timeline = timeline(2, 4);
        let mut space = space();
        space.pruned = BTreeMap::from([(name.to_owned(), 1)]);
        space.illegal = BTreeMap::from([(name.to_owned(), 1)]);
        let runtime = Runtime {
            name: name.into(),
            ..runtime().clone()
        };
        let mut input = input(&prediction, Some(&timeline), Some(&space));
        input.runtime = &runtime;
        for text in [
            &mut input.model,
            &mut input.devices,
            &mut input.cluster,
            &mut input.strategy,
            &mut input.plan_id,
            &mut input.command,
            &mut input.version,
        ] {
            *text = name.into();
        }
        for other in &mut input.alternatives {
            other.why_not_first = name.into();
        }
        for fact in &mut input.inputs {
            fact.name = name;
            fact.value = name.into();
            fact.origin = name.into();
        }
        // Where a name may break follows from its dots and underscores.
        reports::html::report(&input).replace("<wbr>", "")
    };
    let benign = page("benignname");
    for name in [
        "<script>x()</script>",
        "</script><script>x()</script>",
        "</style><b>",
        "\" onmouseover=\"x()",
        "' onmouseover='x()",
        "<!--",
        "&lt;b&gt;",
        "$(touch PWNED)`x`",
        "../../etc/passwd",
    ] {
        let escaped = name
            .replace('&', "&amp;")
            .replace('<', "&lt;")
            .replace('>', "&gt;")
            .replace('"', "&quot;");
        let json = serde_json::to_string(name).expect("JSON");
        let json = json.trim_matches('"').replace('<', "\\u003c");
        let page = page(name).replace(&json, "benignname");
        assert_eq!(page.replace(&escaped, "benignname"), benign, "{name}");
    }
}

/// Places of groups of ranks on nodes of four GPUs, where NVLink joins 72 GPUs.
#[test]
fn domains_are_not_nodes() {
    let prediction = prediction(Fit::Fits { spare: Bytes(1) });
    let cluster = catalog::load::cluster("gb200-nvl72").expect("a preset");
    for (gpus, text, says) in [
        (16, "tp=4", "links inside a node"),
        (16, "tp=8", "fast links among 2 nodes of a domain"),
        (64, "tp=8,zero=1", "fast links among 8 nodes of a domain"),
        (
            256,
            "tp=8,cp=2,zero=1",
            "links inside a domain for 4 of 16, then the network among 4 domains",
        ),
        (
            256,
            "tp=2,zero=1",
            "links inside a domain for 32 of 128, then the network among 4 domains",
        ),
        (
            256,
            "tp=8,pp=4",
            "the network: every rank is in a domain of its own (4 domains)",
        ),
        (256, "tp=8,pp=4", "uses 64 GPUs of each"),
        // Stages 32 GPUs apart in domains of 40: the first two share a domain.
        (
            160,
            "tp=4,pp=5",
            "the network among 4 domains; some of the 5 ranks share a domain",
        ),
        // Eight ranks 4 apart lie in one domain, or in two.
        (
            160,
            "tp=4,pp=5,zero=1",
            "links inside a domain for at least 2 of 8, then the network among 2 domains",
        ),
    ] {
        let strategy = strategy(gpus, text);
        let page = reports::html::report(&ReportInput {
            gpus,
            decisions: &strategy,
            gpus_per_node: cluster.gpus_per_node,
            domain: cluster.domain(gpus),
            ..input(&prediction, None, None)
        });
        assert!(page.contains(says), "{gpus} {text}: {says}");
    }
}

/// Without a search there is no runner-up: strategies beside the plan differ from it in one decision, and may be faster.
#[test]
fn neighbours_are_no_runners_up() {
    let prediction = prediction(Fit::Fits { spare: Bytes(1) });
    let page = reports::html::report(&ReportInput {
        alternatives: alternatives(),
        ..input(&prediction, None, None)
    });
    for said in ["Fastest change of one decision: ", "Against this plan"] {
        assert!(page.contains(said), "{said}");
    }
    for absent in ["Runner-up", "Why not first"] {
        assert!(!page.contains(absent), "{absent}");
    }
}

/// Where no script runs a page says which charts are missing, and the legend of the pipeline is no button, which paper hides.
/// Names of commands are set as code.
#[test]
fn what_no_script_draws_is_said() {
    let mut prediction = prediction(Fit::Fits { spare: Bytes(1) });
    prediction.host_memory.used = Bytes(GIB);
    let (timeline, space) = (timeline(64, 2048), space());
    let page = reports::html::report(&input(&prediction, Some(&timeline), Some(&space)));
    assert_eq!(page.matches("<noscript>").count(), 3);
    let legend = page.find("id=\"gantt-legend\"").expect("a legend");
    let tools = page.find("class=\"tools\"").expect("buttons");
    assert!(page[tools..legend].contains("</div>"));
    let parts = page.split("<script");
    for text in parts.filter_map(|part| part.rsplit("</script>").next()) {
        assert!(!text.contains('`'), "{text}");
    }
    for said in [
        "It takes 1.00 GiB of each node's host memory.",
        "(<code>memory</code> under <code>host</code> in a",
        "<code>vescale-plan trace</code> writes every event",
    ] {
        assert!(page.contains(said), "{said}");
    }
}

#[test]
fn a_huge_timeline_stays_below_three_megabytes() {
    let prediction = prediction(Fit::Fits { spare: Bytes(1) });
    let timeline = timeline(64, 2048);
    let page = reports::html::report(&input(&prediction, Some(&timeline), None));
    assert!(page.len() < 3_000_000, "{} bytes", page.len());
    assert!(page.contains("of 64 ranks"));
}

/// Sources in device and cluster files are free text: their control characters are shown, not sent.
#[test]
fn sources_are_printable() {
    let mut prediction = prediction(Fit::Fits { spare: Bytes(1) });
    prediction.provenance[0].source = "a\u{1b}[2J\u{202e}b\n".into();
    let page = reports::html::report(&input(&prediction, None, None));
    assert!(page.contains("a\\u{1b}[2J\\u{202e}b<"));
    assert!(!page.contains(['\u{1b}', '\u{202e}']));
}
