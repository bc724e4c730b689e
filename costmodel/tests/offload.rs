//! States in host memory: bytes and times by hand.

use catalog::runtime::Rewrite;
use catalog::{Bytes, Origin, Precision, Sourced, Workload};
use costmodel::{CostError, CostModel, Scenario};
use plans::{Prediction, Strategy};

/// Parameters of GPT-2 XL with tied embeddings: 1.5575 billion and norms (Radford et al. 2019).
const MODEL: &str = "gpt2-xl";

fn scenario(gpus: u64, runtime: &str) -> Scenario {
    Scenario {
        model: catalog::load::model(MODEL).expect("preset"),
        cluster: catalog::load::cluster("dgx-a100").expect("preset"),
        runtime: catalog::load::runtime(runtime).expect("preset"),
        workload: Workload::new(catalog::WorkloadSizes {
            gpus,
            seq_len: 1024,
            global_batch: 4 * gpus,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    }
}

fn strategy(s: &Scenario, text: &str) -> Strategy {
    plans::grammar::parse(text, &s.model, &s.workload, &s.runtime).expect(text)
}

fn predict(s: &Scenario, text: &str) -> Prediction {
    let costs = CostModel::new(s.clone()).expect("priced");
    costs.predict(&strategy(s, text)).expect("priced")
}

/// ZeRO-2 of DeepSpeed on 8 GPUs: each holds 16-bit parameters, its host 16 bytes for every eighth weight, 2 for the sum of gradients and 2
/// for the parameter in 16 bits. In the step the host reads and writes 8 bytes for each to clip its gradient, 28 to update it and 6 to
/// cast it; then 2 bytes come back.
#[test]
fn an_optimizer_on_the_host() {
    let s = scenario(8, "deepspeed");
    let on_device = predict(&s, "dp8 zero2");
    let on_host = predict(&s, "dp8 zero2 offload=optimizer");
    let weights = on_device.memory_of("parameters").0 / 2;
    let share = weights.div_ceil(8);
    let states =
        ["optimizer: master", "optimizer: moments"].map(|name| on_device.memory_of(name).0);
    assert_eq!(states.iter().sum::<u64>(), 12 * share);
    assert_eq!(
        on_host.memory_of("optimizer").0 + on_host.memory_of("gradients").0,
        0
    );
    assert_eq!(on_host.memory_of("parameters").0, 2 * weights);
    assert_eq!(on_host.host_memory.used, Bytes(8 * 20 * share));
    assert_eq!(on_host.host_memory.there, Some(Bytes(2_000_000_000_000)));
    // 409.6 GB/s of the node, 0.43 of it for the optimizer; PCI Express 4.0 at 0.85.
    let update = (28.0 / 0.43 + 8.0 + 6.0) * share as f64 / (409.6e9 / 8.0);
    let back = 2.0 * share as f64 / (31.5e9 * 0.85);
    let exposed = on_host.breakdown.offload_exposed_s;
    assert!(exposed >= update + back, "{exposed}");
    // Gradients leave beside backward; the last block's copy is exposed at most.
    let gradients = 4.0 * share as f64 / (31.5e9 * 0.85);
    assert!(exposed < update + back + gradients / 10.0, "{exposed}");
    assert_eq!(on_device.breakdown.offload_exposed_s, 0.0);
}

/// Megatron-Core keeps half the optimizer states on the host: gradients go there when the step begins, in 32 bits both
/// ways, beside the device's own half.
#[test]
fn half_an_optimizer_on_the_host() {
    let s = scenario(8, "megatron-core");
    let on_device = predict(&s, "dp8 zero1");
    let half = predict(&s, "dp8 zero1 offload=optimizer:50");
    let states = on_device.memory_of("optimizer").0;
    assert!(half.memory_of("optimizer").0.abs_diff(states / 2) <= 2);
    assert_eq!(
        half.memory_of("gradients").0,
        on_device.memory_of("gradients").0
    );
    let moved = (states / 12 / 2) as f64;
    let copies = 2.0 * 4.0 * moved / (31.5e9 * 0.85);
    let update = 28.0 * moved / (409.6e9 / 8.0 * 0.43);
    let own = half.breakdown.optimizer_s;
    let exposed = half.breakdown.offload_exposed_s;
    assert!(
        (own + exposed - copies - update).abs() < 1e-4 * exposed,
        "{exposed}"
    );
    assert!(own < on_device.breakdown.optimizer_s);
}

/// With `offload=parameters` FSDP2 keeps its shards in host memory, and copies them to the device in 32 bits before every
/// all-gather.
#[test]
fn parameters_on_the_host() {
    let s = scenario(8, "fsdp2");
    let on_device = predict(&s, "dp8 zero3");
    let on_host = predict(&s, "dp8 zero3 offload=parameters");
    for name in ["parameters", "gradients", "optimizer"] {
        assert_eq!(on_host.memory_of(name).0, 0, "{name}");
    }
    let states: u64 = ["parameters", "gradients", "optimizer"]
        .iter()
        .map(|name| on_device.memory_of(name).0)
        .sum();
    assert_eq!(on_host.host_memory.used, Bytes(8 * states));
    let sum: f64 = on_host.step_time.0;
    assert!(sum > on_device.step_time.0);
    // A device alone holds all states, and the same holds.
    let alone = predict(&scenario(1, "fsdp2"), "dp1 zero3 offload=parameters");
    assert_eq!(alone.memory_of("parameters").0, 0);
}

/// Where the host's update takes longer than the device's, so does the step, and with more on the host still longer; and what
/// bounds a strategy together with those that keep more there is below the times of all. A host that is faster than the device
/// shortens the step.
#[test]
fn more_on_the_host_takes_longer() {
    let cases: [(u64, &str, &str, &[&str]); 4] = [
        (
            8,
            "megatron-core",
            "dp8 zero1 mbs1",
            &["25", "50", "75", "100"],
        ),
        (
            8,
            "megatron-core",
            "pp2 dp4 zero1 mbs1 optim_states=split_master",
            &["25", "60", "100"],
        ),
        (
            8,
            "megatron-core",
            "pp4 dp2 zero1 mbs1 grad_dtype=bf16",
            &["1", "25"],
        ),
        (8, "deepspeed", "dp8 zero2 mbs1", &["100"]),
    ];
    for (fast, (gpus, runtime, text, shares)) in [false, true]
        .into_iter()
        .flat_map(|fast| cases.map(|case| (fast, case)))
    {
        let mut s = scenario(gpus, runtime);
        if fast {
            let host = s.cluster.host.as_mut().expect("a host");
            (host.link.value.0, host.memory_bandwidth.value.0) = (1e14, 1e15);
        }
        let costs = CostModel::new(s.clone()).expect("priced");
        let time = |strategy: &Strategy| costs.score(strategy).expect("priced").step_time;
        let mut before = strategy(&s, text);
        for share in shares {
            let base = text.split(" optim_states").next().expect(text);
            let later = strategy(&s, &format!("{base} offload=optimizer:{share}"));
            let offload = later.offload.expect("given");
            let slower = costs.updates_before(&before, offload).expect("priced");
            let what = format!("{text}, {share}, fast: {fast}");
            assert_eq!(slower, time(&before) < time(&later), "{what}");
            // The host is done with a hundredth of the weights before the device is with the others.
            assert_eq!(slower, !fast && *share != "1", "{what}");
            let floors = costs.floors(&before, None, Some(offload)).expect("priced");
            assert!(
                floors.time <= time(&before) && floors.time <= time(&later),
                "{what}"
            );
            before = later;
        }
    }
}

/// Where the host adds gradients up, the device waits for it in every micro-batch but the first, whether gradients are reduced
/// beside backward or after it.
#[test]
fn gradients_that_the_host_adds_up_are_waited_for() {
    let s = scenario(8, "fsdp2");
    let of = |text: &str| predict(&s, text).breakdown.offload_exposed_s;
    for overlap in ["grad+param+pp", "param+pp"] {
        let [few, many] = ["mbs4", "mbs1"].map(|batch| {
            of(&format!(
                "dp8 zero3 {batch} offload=parameters overlap={overlap}"
            ))
        });
        // With the whole batch in one micro-batch the host adds nothing up.
        assert!(many > few + 0.1, "{overlap}: {few} and {many}");
    }
}

/// DeepSpeed adds gradients on the device: after the first of several micro-batches it copies their sum of 2 bytes each to the host, before
/// each later one back, and after the last a copy of 4 bytes to the host. ZeRO-3 reads the first sum back too, and ZeRO-1 reduces
/// once. Without `overlap_comm` kernels wait for all of these copies. Below ZeRO-3 the host also holds parameters of 2 bytes.
#[test]
fn deepspeed_copies_sums_of_gradients_both_ways() {
    let s = scenario(8, "deepspeed");
    let weights = predict(&s, "dp8 zero2 mbs4").memory_of("parameters").0 / 2;
    let share = weights.div_ceil(8) as f64;
    // Level, micro-batches, bytes per weight that are copied in the step, and bytes that the host holds.
    let cases: [(u8, u64, f64, u64); 6] = [
        (1, 1, 4.0, 18),
        (1, 4, 2.0 + 2.0 + 4.0, 20),
        (2, 1, 4.0, 18),
        (2, 4, 4.0 * 2.0 + 3.0 * 2.0 + 4.0, 20),
        (3, 1, 2.0 + 2.0 + 4.0, 18),
        (3, 4, 4.0 * 4.0 + 4.0, 18),
    ];
    // A link that is faster than the host's memory leaves only the time of the copies in this.
    let mut fast = s.clone();
    fast.cluster.host.as_mut().expect("a host").link.value.0 = 1e14;
    let slower = 1.0 / (31.5e9 * 0.85) - 1.0 / (409.6e9 / 8.0);
    for (zero, micro_batches, copied, held) in cases {
        let batch = 4 / micro_batches;
        let text = format!("dp8 zero{zero} mbs{batch} offload=optimizer overlap=param");
        let [found, least] = [&s, &fast].map(|s| predict(s, &text));
        let used = found.host_memory.used.0 / 8;
        assert!(used.abs_diff(held * share as u64) < 1000, "{text}: {used}");
        let exposed = [&found, &least].map(|p| p.breakdown.offload_exposed_s);
        // Parameters come back in 2 bytes.
        let bytes = (exposed[0] - exposed[1]) / slower / share - 2.0;
        assert!((bytes - copied).abs() < 0.01, "{text}: {bytes}");
        // With `overlap_comm`, copies run beside backward. (Under ZeRO-1 the device's part of the step then fills no buckets.)
        let beside = predict(&s, &text.replace("overlap=param", "overlap=grad+param"));
        let [after, beside] = [&found, &beside].map(|p| &p.breakdown);
        let of_step = |b: &plans::prediction::Breakdown| b.offload_exposed_s + b.optimizer_s;
        let hidden = of_step(after) - of_step(beside);
        let most = copied * share / (31.5e9 * 0.85);
        assert!(
            hidden > 0.5 * most && hidden < 1.01 * most,
            "{text}: {hidden}"
        );
    }
}

/// The host's memory is a limit too, and a cluster that does not say what its host is has no price.
#[test]
fn hosts_have_limits() {
    let mut s = scenario(8, "deepspeed");
    let text = "dp8 zero2 offload=optimizer";
    let host = s.cluster.host.as_mut().expect("a host");
    host.memory = Some(Sourced {
        value: Bytes(16 << 30),
        origin: Origin::Assumed,
        source: "this test".to_owned(),
    });
    let small = predict(&s, text);
    assert!(!small.fit.fits() && !small.host_memory.fits() && small.p_fits == 0.0);
    assert!(predict(&s, "dp8 zero2").fit.fits());
    s.cluster.host = None;
    let costs = CostModel::new(s.clone()).expect("priced");
    let error = costs.predict(&strategy(&s, text)).expect_err("no host");
    assert!(matches!(error, CostError::NoHost { .. }), "{error}");
}

/// A runtime refuses, by name, states that it cannot keep in host memory.
#[test]
fn runtimes_say_what_they_keep_there() {
    let refused = |runtime: &str, text: &str| {
        let s = scenario(8, runtime);
        let parsed = plans::grammar::parse(text, &s.model, &s.workload, &s.runtime);
        let legal = parsed.and_then(|d| {
            plans::support::allowed_by(&d, &s.model, &s.runtime, s.workload.precision)
        });
        legal.expect_err(text).to_string()
    };
    assert!(refused("megatron-core", "dp8 zero0 offload=optimizer").contains("ZeRO level"));
    assert!(refused("deepspeed", "dp8 zero2 offload=parameters").contains("zero=3"));
    assert!(refused("deepspeed", "dp8 zero2 offload=optimizer:50").contains("from zero=1"));
    assert!(refused("vescale", "dp8 zero1 offload=optimizer").contains("no offload"));
    assert!(
        refused("deepspeed", "dp8 zero2 offload=nvme")
            .contains("`nvme` is not a value of `offload`")
    );
    let both = "dp8 zero1 offload=optimizer optim_states=split_master";
    assert!(refused("megatron-core", both).contains("optim_states=own"));
}

/// Moments of bitsandbytes' AdamW: a byte each and 4 for every 256, but 8 bytes for each weight of the embedding table. The
/// step moves 16 bytes for each weight (gradient, weights and moments read, weights and moments written) and the scales.
#[test]
fn moments_in_eight_bits() {
    let mut s = scenario(1, "hf-trainer");
    s.runtime.rewrites.remove(&Rewrite::FusedOptimizer);
    let wide = predict(&s, "dp1");
    let narrow = predict(&s, "dp1 optim_states=8bit_moments");
    let weights = wide.memory_of("parameters").0 / 4;
    assert_eq!(wide.memory_of("optimizer").0, 8 * weights);
    let table = (50257 + 1024) * 1600;
    let rest = weights - table;
    let moments = 2 * (rest + rest.div_ceil(256) * 4) + 8 * table;
    assert!(narrow.memory_of("optimizer").0.abs_diff(moments) <= 16);
    // 2039 GB/s of the device, 0.38 of it; the gradient norm is the same in both.
    let step = |bytes: f64, share: f64| bytes * weights as f64 / (2039e9 * share);
    let difference = step(28.0, 0.27) - step(16.0 + 4.0 * 4.0 / 256.0, 0.38);
    let found = wide.breakdown.optimizer_s - narrow.breakdown.optimizer_s;
    assert!(
        (found / difference - 1.0).abs() < 1e-3,
        "{found} {difference}"
    );
}

/// Moments of torchao's AdamW, which updates FSDP2's shards, have 8 bits for the embedding table too.
#[test]
fn moments_of_shards_in_eight_bits() {
    let s = scenario(8, "hf-trainer");
    let [wide, narrow] = ["", " optim_states=8bit_moments"].map(|states| {
        predict(&s, &format!("dp8 zero3{states}"))
            .memory_of("optimizer")
            .0
    });
    let shard = wide / 8;
    let moments = 2 * (shard + shard.div_ceil(256) * 4);
    assert!(narrow.abs_diff(moments) <= 16, "{narrow}, not {moments}");
}

/// Half the layers' activations on the host: half the bytes stay, and one layer's while layers run, and copies that take less than two layers'
/// passes cost nothing; over a slow link compute waits for them.
#[test]
fn activations_on_the_host() {
    let mut s = scenario(1, "megatron-core");
    let saved = |p: &Prediction| p.memory_of("saved activations").0;
    let all = predict(&s, "dp1 recompute=none");
    let half = predict(&s, "dp1 recompute=none offload_layers=24");
    let layer = half.host_memory.used.0 / 24;
    assert_eq!(saved(&all) - saved(&half), 24 * layer);
    let less = all.peak_memory.0 - half.peak_memory.0;
    assert!(less >= 23 * layer && less < 26 * layer, "{less}");
    // 48 layers, 4 micro-batches, and a link of one byte in so many: each copy outlasts its window.
    let link = s.cluster.host.as_mut().expect("a host");
    link.link.value.0 = 1e9;
    let slow = predict(&s, "dp1 recompute=none offload_layers=24");
    let copies = 4.0 * 2.0 * 24.0 * layer as f64 / (1e9 * 0.85);
    let exposed = slow.breakdown.offload_exposed_s;
    assert!(
        exposed < copies && exposed > 0.5 * copies,
        "{exposed} of {copies}"
    );
    let sum = slow.breakdown.offload_exposed_s - half.breakdown.offload_exposed_s;
    assert!((slow.step_time.0 - half.step_time.0 - sum).abs() < 1e-6);
}

/// Decisions that exclude activations in host memory are refused by name.
#[test]
fn activations_have_limits() {
    let s = scenario(8, "megatron-core");
    for (text, why) in [
        ("pp2 dp4 offload_layers=4", "pp=1"),
        ("dp8 recompute=full offload_layers=4", "recompute=none"),
        (
            "dp8 recompute=none offload_layers=48",
            "below the number of layers",
        ),
    ] {
        let refused = plans::grammar::parse(text, &s.model, &s.workload, &s.runtime);
        let refused = refused.expect_err(text).to_string();
        assert!(refused.contains(why), "{text}: {refused}");
    }
}
