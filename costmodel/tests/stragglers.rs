//! Slow GPUs, and ranks that happen to be slow: what a step waits for them, beside steps whose passes are drawn.

use std::collections::BTreeMap;

use catalog::{Precision, ScheduleKind, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use plans::{ActionKind, Prediction};

const SEQ: u64 = 4096;

fn predicted(cluster: &str, gpus: u64, batch: u64, strategy: &str) -> Prediction {
    let sizes = WorkloadSizes {
        gpus,
        seq_len: SEQ,
        global_batch: batch,
        precision: Precision::Bf16,
    };
    let s = Scenario {
        model: catalog::load::model("llama3-8b").expect("preset"),
        cluster: catalog::load::cluster(cluster).expect("cluster"),
        runtime: catalog::load::runtime("megatron-core").expect("preset"),
        workload: Workload::new(sizes).expect("a workload"),
        headroom: 0.0,
    };
    let costs = CostModel::new(s.clone()).expect("priced");
    let parsed = plans::grammar::parse(strategy, &s.model, &s.workload, &s.runtime);
    costs.predict(&parsed.expect(strategy)).expect("priced")
}

fn stragglers(jitter: &str, gpus: u64, batch: u64, strategy: &str) -> f64 {
    let cluster = format!("dgx-h100 with {jitter} jitter");
    predicted(&cluster, gpus, batch, strategy)
        .breakdown
        .stragglers_s
}

#[test]
fn waiting_is_a_part_of_the_step_and_grows_with_jitter_and_ranks() {
    for strategy in ["tp4 mbs1", "tp2 pp4 mbs1", "zero3 mbs1", "tp2 pp2 cp2 mbs1"] {
        let still = predicted("dgx-h100", 64, 256, strategy);
        assert_eq!(still.breakdown.stragglers_s, 0.0);
        let none = predicted("dgx-h100 with 0% jitter", 64, 256, strategy);
        assert_eq!(still.step_time, none.step_time);
        let [two, four] = ["2%", "4%"].map(|jitter| stragglers(jitter, 64, 256, strategy));
        assert!(two > 0.0 && (four / two - 2.0).abs() < 1e-9, "{two} {four}");
        let slow = predicted("dgx-h100 with 2% jitter", 64, 256, strategy);
        let longer = slow.step_time.0 - still.step_time.0;
        assert!((longer - slow.breakdown.stragglers_s).abs() < 1e-9 * longer);
        assert_eq!(slow.peak_memory, still.peak_memory);
        // As much work on each rank, and more of them.
        let more = stragglers("2%", 512, 2048, strategy);
        assert!(more > two, "{strategy}: {more} on more ranks, {two}");
    }
    // One rank waits for none.
    assert_eq!(stragglers("2%", 1, 4, "mbs1 recompute=full"), 0.0);
}

#[test]
fn slow_gpus_compute_longer_and_send_as_fast() {
    for strategy in ["tp4 mbs1", "tp2 pp4 mbs1", "zero3 mbs1"] {
        let at = |speed: f64| predicted(&format!("dgx-h100 at {speed}"), 64, 256, strategy);
        let usual = predicted("dgx-h100", 64, 256, strategy);
        let [full, less, half] = [1.0, 0.8, 0.5].map(at);
        assert_eq!(full.step_time, usual.step_time);
        assert!(full.step_time < less.step_time && less.step_time < half.step_time);
        // Kernels take twice as long, but for what the host takes to launch them.
        let ratio = half.breakdown.compute_s / full.breakdown.compute_s;
        assert!((ratio - 2.0).abs() < 0.02, "{strategy}: {ratio}");
        let [slow, fast] = [&half, &full].map(|p| p.breakdown.tp_exposed_s);
        // Longer kernels hide a little more of messages that take as long.
        assert!(slow <= fast && slow >= 0.98 * fast, "{slow} {fast}");
        assert_eq!(half.peak_memory, full.peak_memory);
    }
}

/// Draws that follow a normal distribution: sums of twelve uniform ones.
struct Draws(u64);

impl Draws {
    fn normal(&mut self) -> f64 {
        let mut uniform = || {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (self.0 >> 33) as f64 / (1u64 << 31) as f64
        };
        (0..12).map(|_| uniform()).sum::<f64>() - 6.0
    }
}

/// The end of a 1F1B pipeline whose forward takes a third of a micro-batch's time, each pass being the longest of
/// `in_pass` drawn ones.
fn drawn_step(pp: u64, micro_batches: u64, in_pass: u64, jitter: f64, draws: &mut Draws) -> f64 {
    let schedule = plans::schedule::build(ScheduleKind::OneFOneB, pp, 1, micro_batches);
    let schedule = schedule.expect("a schedule");
    let last = pp as u32 - 1;
    let mut done = BTreeMap::new();
    let mut free = vec![0.0f64; pp as usize];
    let mut next = vec![0; pp as usize];
    let passes: usize = schedule.ranks.iter().map(Vec::len).sum();
    while done.len() < passes {
        for (rank, actions) in schedule.ranks.iter().enumerate() {
            while let Some(action) = actions.get(next[rank]) {
                let needs = match (action.kind, action.stage) {
                    (ActionKind::F, 0) => None,
                    (ActionKind::F, stage) => Some((ActionKind::F, stage - 1)),
                    (_, stage) if stage == last => Some((ActionKind::F, stage)),
                    (_, stage) => Some((ActionKind::B, stage + 1)),
                };
                let ready = match needs {
                    None => Some(0.0),
                    Some((kind, stage)) => done.get(&(kind, stage, action.micro_batch)).copied(),
                };
                let Some(ready) = ready else { break };
                let usual = if action.kind == ActionKind::F {
                    1.0
                } else {
                    2.0
                } / 3.0;
                let slowest = (0..in_pass)
                    .map(|_| draws.normal())
                    .fold(f64::MIN, f64::max);
                free[rank] = free[rank].max(ready) + usual * (1.0 + jitter * slowest);
                done.insert((action.kind, action.stage, action.micro_batch), free[rank]);
                next[rank] += 1;
            }
        }
    }
    free.into_iter().fold(0.0, f64::max)
}

/// The expected wait is above what simulated random steps lose, but not far above.
#[test]
fn drawn_steps_lose_about_what_is_expected() {
    let jitter = 0.02;
    let mut draws = Draws(1);
    for (tp, pp, dp, micro_batches, least) in [
        (8, 1, 8, 16, 0.9),
        (8, 4, 1, 16, 0.85),
        (8, 8, 1, 32, 0.85),
        (1, 4, 1, 32, 0.6),
        (1, 16, 1, 64, 0.55),
        (1, 4, 16, 16, 0.7),
        (8, 8, 4, 32, 0.85),
    ] {
        let (gpus, batch) = (tp * pp * dp, dp * micro_batches);
        let strategy = format!("tp{tp} pp{pp} mbs1");
        let p = predicted("dgx-h100 with 2% jitter", gpus, batch, &strategy);
        let b = &p.breakdown;
        // The passes of a micro-batch on the slowest rank.
        let passes = (p.step_time.0
            - b.stragglers_s
            - b.bubble_s
            - b.optimizer_s
            - b.dp_exposed_s
            - b.pp_exposed_s)
            / micro_batches as f64;
        let expected = b.stragglers_s / passes;
        let still = drawn_step(pp, micro_batches, 1, 0.0, &mut draws);
        let replicas: Vec<f64> = (0..dp.max(4))
            .map(|_| drawn_step(pp, micro_batches, tp, jitter, &mut draws) - still)
            .collect();
        let drawn = match dp {
            1 => replicas.iter().sum::<f64>() / replicas.len() as f64,
            _ => replicas.iter().copied().fold(0.0, f64::max),
        };
        let ratio = drawn / expected;
        assert!(
            (least..1.12).contains(&ratio),
            "{strategy} dp{dp}: {drawn} drawn, {expected} expected"
        );
    }
}
