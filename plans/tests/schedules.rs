//! Every schedule is complete and free of deadlock, and has its published bubble.

use std::collections::BTreeSet;

use catalog::{Precision, ScheduleKind, Workload};
use plans::schedule::{self, ActionKind, Schedule};

/// Times of the four kinds of pass, in units.
#[derive(Clone, Copy)]
struct Units {
    f: u64,
    b: u64,
    i: u64,
    w: u64,
}

/// Runs a schedule with fixed times and free transfers; returns the end and the work per rank.
fn run(schedule: &Schedule, m: u64, units: Units) -> (u64, u64) {
    let stages = schedule.rank_of_stage.len();
    let slot = |s: u32, b: u32| s as usize * m as usize + b as usize;
    let mut forward = vec![None; stages * m as usize];
    let mut backward = vec![None; stages * m as usize];
    let mut clock = vec![0u64; schedule.ranks.len()];
    let mut next = vec![0usize; schedule.ranks.len()];
    let mut work = 0;
    loop {
        let mut moved = false;
        for (rank, actions) in schedule.ranks.iter().enumerate() {
            while let Some(a) = actions.get(next[rank]) {
                let (s, b) = (a.stage, a.micro_batch);
                let last = s as usize + 1 == stages;
                let (ready, length) = match a.kind {
                    ActionKind::F if s == 0 => (Some(0), units.f),
                    ActionKind::F => (forward[slot(s - 1, b)], units.f),
                    ActionKind::B if last => (forward[slot(s, b)], units.b),
                    ActionKind::B => (backward[slot(s + 1, b)], units.b),
                    ActionKind::I if last => (forward[slot(s, b)], units.i),
                    ActionKind::I => (backward[slot(s + 1, b)], units.i),
                    _ => (Some(0), units.w),
                };
                let Some(ready) = ready else { break };
                clock[rank] = clock[rank].max(ready) + length;
                match a.kind {
                    ActionKind::F => forward[slot(s, b)] = Some(clock[rank]),
                    ActionKind::B | ActionKind::I => backward[slot(s, b)] = Some(clock[rank]),
                    _ => {}
                }
                if rank == 0 {
                    work += length;
                }
                next[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    (clock.into_iter().max().expect("there are ranks"), work)
}

/// What is wrong with a schedule; `None` if it is right. A right schedule runs every micro-batch forward once and then backward once in
/// every stage (backward whole, or its input half before its weight half), and no rank waits for ever.
fn mistake(schedule: &Schedule, m: u64) -> Option<String> {
    let (stages, m) = (schedule.rank_of_stage.len(), m as usize);
    // State of a stage's micro-batch: 0 nothing done, 1 forward, 2 input half, 3 all.
    let mut state = vec![0u8; stages * m];
    let mut next = vec![0usize; schedule.ranks.len()];
    let mut moved = true;
    while moved {
        moved = false;
        for (rank, actions) in schedule.ranks.iter().enumerate() {
            while let Some(action) = actions.get(next[rank]) {
                let (s, b) = (action.stage as usize, action.micro_batch as usize);
                let at = |stage: usize| stage * m + b;
                let (needs, becomes) = match action.kind {
                    ActionKind::F => (0, 1),
                    ActionKind::B => (1, 3),
                    ActionKind::I => (1, 2),
                    _ => (2, 3),
                };
                let own = s < stages && b < m && schedule.rank_of_stage[s] as usize == rank;
                if !own || state[at(s)] != needs {
                    return Some(format!("rank {rank}: {action:?} is out of place"));
                }
                let ready = match needs {
                    0 => s == 0 || state[at(s - 1)] >= 1,
                    1 => s + 1 == stages || state[at(s + 1)] >= 2,
                    _ => true,
                };
                if !ready {
                    break;
                }
                state[at(s)] = becomes;
                next[rank] += 1;
                moved = true;
            }
        }
    }
    let unfinished = state.iter().position(|&state| state != 3)?;
    Some(format!("stage {} does not run all passes", unfinished / m))
}

#[test]
fn every_legal_schedule_is_complete_and_free_of_deadlock() {
    let mut built = 0;
    for kind in ScheduleKind::ALL {
        for p in 1..=8 {
            for m in 1..=32 {
                for v in 1..=4 {
                    if let Ok(schedule) = schedule::build(kind, p, v, m) {
                        let mistake = mistake(&schedule, m);
                        assert_eq!(mistake, None, "{kind} p={p} v={v} m={m}");
                        built += 1;
                    }
                }
            }
        }
    }
    assert!(built > 1000, "{built}");
}

/// A schedule that no runtime has could be planned by nobody.
#[test]
fn every_schedule_has_one_name_and_a_runtime() {
    let runtimes = catalog::load::runtime_names().into_iter();
    let offered: Vec<ScheduleKind> = runtimes
        .flat_map(|info| {
            let runtime = catalog::load::runtime(&info.name).expect("listed");
            runtime.space.schedules
        })
        .collect();
    for kind in ScheduleKind::ALL {
        let in_files = serde_json::to_value(kind).expect("a word");
        assert_eq!(
            in_files,
            kind.name(),
            "{kind:?}: in files and in strategies"
        );
        assert!(
            offered.contains(&kind),
            "{kind}: no file in catalog/presets/runtimes has it in `space.schedules`"
        );
    }
}

#[test]
fn illegal_sizes_have_a_reason() {
    let check = |kind, p, v, m, expected: &str| {
        let error = schedule::build(kind, p, v, m).expect_err("illegal");
        assert_eq!(error.to_string(), expected);
    };
    check(
        ScheduleKind::OneFOneB,
        4,
        2,
        8,
        "1f1b has one stage per rank; vpp=2 needs interleaved, zb-v or dualpipe-v",
    );
    check(
        ScheduleKind::Interleaved,
        4,
        1,
        8,
        "interleaved needs vpp of at least 2, not 1",
    );
    check(
        ScheduleKind::Interleaved,
        4,
        2,
        6,
        "interleaved needs micro-batches in multiples of pp=4, not 6",
    );
    check(
        ScheduleKind::ZbV,
        4,
        3,
        8,
        "zb-v places two stages per rank in a V; vpp must be 2, not 3",
    );
    check(
        ScheduleKind::DualPipeV,
        4,
        2,
        7,
        "dualpipe-v needs at least 8 micro-batches on 4 ranks, not 7",
    );
}

#[test]
fn bubbles_of_unsplit_schedules_equal_the_closed_forms() {
    let units = Units {
        f: 10,
        b: 20,
        i: 10,
        w: 10,
    };
    for p in [2u64, 4, 8] {
        for m in [8u64, 16, 32] {
            for kind in [ScheduleKind::GPipe, ScheduleKind::OneFOneB] {
                let (end, work) = run(&schedule::build(kind, p, 1, m).expect("legal"), m, units);
                // (p − 1)/(m + p − 1) of the time is bubble.
                assert_eq!(end - work, (p - 1) * 30, "{kind} p={p} m={m}");
            }
            for v in [2u64, 4] {
                let built = schedule::build(ScheduleKind::Interleaved, p, v, m).expect("legal");
                let (end, work) = run(&built, m, units);
                // Chunks are 1/v of a stage: the bubble in chunk times is that of one micro-batch.
                assert_eq!(end - work, (p - 1) * 30, "interleaved p={p} m={m} v={v}");
            }
        }
    }
}

#[test]
fn zero_bubble_schedules_have_the_published_bubble() {
    // ZB-H1: (p − 1)(F + I − W), Qi et al. 2023, table 1.
    for units in [
        Units {
            f: 10,
            b: 20,
            i: 10,
            w: 10,
        },
        Units {
            f: 10,
            b: 22,
            i: 12,
            w: 10,
        },
    ] {
        for p in [2u64, 4, 8] {
            let m = 4 * p;
            let built = schedule::build(ScheduleKind::ZbH1, p, 1, m).expect("legal");
            let (end, work) = run(&built, m, units);
            assert_eq!(
                end - work,
                (p - 1) * (units.f + units.i - units.w),
                "zb-h1 p={p}"
            );
        }
    }
    // ZB-V: what a rank waits is its fill, p − 1 forwards, when F = I = W (Qi et al. 2024, §4).
    let units = Units {
        f: 10,
        b: 20,
        i: 10,
        w: 10,
    };
    for p in [2u64, 4, 8] {
        let m = 4 * p;
        let built = schedule::build(ScheduleKind::ZbV, p, 2, m).expect("legal");
        let (end, work) = run(&built, m, units);
        assert_eq!(end - work, (p - 1) * units.f, "zb-v p={p}");
    }
    // DualPipe-V: (p − 1)(F&B + B − 3W), its authors' table, where F&B is a forward beside a
    // backward. Without running the two at once F&B = F + B. It is a bound: the halves at the
    // ramps' ends do better.
    for (p, bubble) in [(2u64, 10), (4, 30), (8, 70)] {
        let m = 4 * p;
        let built = schedule::build(ScheduleKind::DualPipeV, p, 2, m).expect("legal");
        let (end, work) = run(&built, m, units);
        assert_eq!(end - work, bubble, "dualpipe-v p={p}");
        assert!(bubble <= (p - 1) * (units.f + 2 * units.b - 3 * units.w));
    }
}

#[test]
fn activations_in_flight_are_those_of_the_papers() {
    let held = |kind, p, v, m| -> Vec<i64> {
        let built = schedule::build(kind, p, v, m).expect("legal");
        built
            .ranks
            .iter()
            .map(|actions| {
                let mut now = 0i64;
                let mut most = 0;
                for a in actions {
                    match a.kind {
                        ActionKind::F => now += 1,
                        ActionKind::B | ActionKind::W => now -= 1,
                        _ => {}
                    }
                    most = most.max(now);
                }
                most
            })
            .collect()
    };
    assert_eq!(held(ScheduleKind::OneFOneB, 4, 1, 16), [4, 3, 2, 1]);
    assert_eq!(held(ScheduleKind::GPipe, 4, 1, 16), [16, 16, 16, 16]);
    // Korthikanti et al. 2022: L(1 + (p − 1)/(p·v)) layers on the first rank: p·v + p − 1 chunks.
    assert_eq!(held(ScheduleKind::Interleaved, 4, 2, 16)[0], 4 * 2 + 4 - 1);
    // ZB-V: 1F1B's memory, 2p chunks of half a stage, held until the weight half.
    assert!(
        held(ScheduleKind::ZbV, 4, 2, 16)
            .iter()
            .all(|&chunks| chunks <= 8)
    );
    // DualPipe-V: one chunk more, its authors' 2p + 1.
    assert!(
        held(ScheduleKind::DualPipeV, 4, 2, 16)
            .iter()
            .all(|&chunks| chunks <= 9)
    );
}

/// The messages that a stage holds do not grow with the number of micro-batches.
#[test]
fn messages_on_their_way_do_not_grow_with_the_number_of_micro_batches() {
    let model = catalog::load::model("llama3-8b").expect("preset");
    let runtime = catalog::load::runtime("vescale").expect("preset");
    let most = |schedule: &str, sequences: u64| -> Vec<usize> {
        let workload = Workload::new(catalog::WorkloadSizes {
            gpus: 4,
            seq_len: 1024,
            global_batch: sequences,
            precision: Precision::Bf16,
        })
        .expect("a workload");
        let text = format!("pp=4,mbs=1,{schedule}");
        let strategy = plans::grammar::parse(&text, &model, &workload, &runtime);
        let strategy = strategy.unwrap_or_else(|e| panic!("{text}: {e}"));
        let kind = strategy.schedule;
        let schedule = schedule::build(kind, 4, strategy.vpp, sequences).expect("legal");
        let program =
            plans::program::lower(&schedule, strategy.zero, strategy.reshard_after_forward);
        let arrived = program.arrived(&schedule.rank_of_stage);
        let ranks = program.ranks.iter().zip(&arrived);
        ranks
            .map(|(actions, arrived)| {
                let mut sending = BTreeSet::new();
                let mut most = 0;
                for a in actions {
                    if matches!(a.kind, ActionKind::SendF | ActionKind::SendB) {
                        sending.insert(*a);
                    }
                    for send in arrived.get(a).into_iter().flatten() {
                        assert!(sending.remove(send), "{text}: {send} was sent before {a}");
                    }
                    most = most.max(sending.len());
                }
                most
            })
            .collect()
    };
    for schedule in [
        "schedule=1f1b",
        "vpp=2,schedule=interleaved",
        "schedule=zb-h1",
        "vpp=2,schedule=zb-v",
    ] {
        let few = most(schedule, 16);
        assert_eq!(few, most(schedule, 32), "{schedule}");
        assert!(
            few.iter().all(|&count| (1..=16).contains(&count)),
            "{schedule}: {few:?}"
        );
    }
}

/// Forward passes without their backward at the fullest moment of every rank.
fn held(schedule: &Schedule) -> Vec<u64> {
    let of_rank = |actions: &Vec<plans::Action>| {
        let (mut now, mut most) = (0u64, 0);
        for action in actions {
            match action.kind {
                ActionKind::F => now += 1,
                ActionKind::B | ActionKind::I => now -= 1,
                _ => {}
            }
            most = most.max(now);
        }
        most
    };
    schedule.ranks.iter().map(of_rank).collect()
}

#[test]
fn passes_in_flight_are_counted_without_the_schedule() {
    for kind in ScheduleKind::ALL {
        for (pp, vpp) in [(2, 1), (3, 1), (8, 1), (2, 2), (4, 2), (7, 2), (4, 5)] {
            for m in 1..=5 * pp {
                let Ok(schedule) = schedule::build(kind, pp, vpp, m) else {
                    continue;
                };
                let counted = (0..pp).map(|rank| schedule::in_flight(kind, pp, vpp, m, rank));
                if let Some(counted) = counted.collect::<Option<Vec<u64>>>() {
                    assert_eq!(counted, held(&schedule), "{kind} {pp} {vpp} {m}");
                }
            }
        }
    }
}

/// Layers that each stage of llama3-8b recomputes.
fn recomputed(pipeline: &str) -> Result<String, String> {
    let model = catalog::load::model("llama3-8b").expect("preset");
    let runtime = catalog::load::runtime("vescale").expect("preset");
    let workload = Workload::new(catalog::WorkloadSizes {
        gpus: 4,
        seq_len: 4096,
        global_batch: 16,
        precision: Precision::Bf16,
    })
    .expect("a workload");
    let strategy = plans::grammar::parse(&format!("{pipeline},mbs=1"), &model, &workload, &runtime)
        .map_err(|e| e.to_string())?;
    Ok(plans::StagePartition(strategy.recomputed_layers()).runs())
}

#[test]
fn later_ranks_recompute_fewer_layers() {
    let rows = [
        // As many everywhere.
        ("pp=4,recompute=layers:6", "4x6"),
        // Ranks have 4, 3, 2 and 1 micro-batches in flight; the first keeps 2 layers of 4, so each keeps 8 at most.
        ("pp=4,recompute=falling:6", "2x6/4/0"),
        ("pp=4,recompute=falling:1", "1/3x0"),
        // The same with fewer layers at the ends: 5 of 7 layers, so each keeps 8 at most.
        ("pp=4,stages=7/9/9/7,recompute=falling:5", "5/7/5/0"),
        // 11, 9, 7 and 5 passes of stages of 4 layers; each keeps 11 layers at most.
        (
            "pp=4,schedule=interleaved,vpp=2,recompute=falling:3",
            "3x3/2/3x3/2",
        ),
        // Without a pipeline, or where every rank has as many micro-batches in flight, there is nothing to tell apart.
        ("dp=4,recompute=falling:6", "needs pp of at least 2"),
        (
            "pp=4,schedule=gpipe,recompute=falling:6",
            "needs pp of at least 2",
        ),
        (
            "pp=4,recompute=falling:8",
            "below the layers of the first stage",
        ),
        ("pp=4,recompute=falling:0", "N of at least 1"),
    ];
    for (pipeline, expected) in rows {
        match recomputed(pipeline) {
            Ok(counts) => assert_eq!(counts, expected, "{pipeline}"),
            Err(why) => assert!(why.contains(expected), "{pipeline}: {why}"),
        }
    }
}
