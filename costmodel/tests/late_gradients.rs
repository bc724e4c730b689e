//! Gradients that are freed after every step take no memory until a rank runs backward, and only its later passes add to them.

use catalog::runtime::Rewrite;
use catalog::{Precision, Runtime, Workload};
use costmodel::{CostModel, Scenario};
use plans::Prediction;

fn predict(runtime: &str, gpus: u64, seq_len: u64, text: &str) -> Prediction {
    let runtime = catalog::load::runtime(runtime).expect("preset");
    predict_under(runtime, gpus, seq_len, text)
}

fn predict_under(runtime: Runtime, gpus: u64, seq_len: u64, text: &str) -> Prediction {
    let name = runtime.name.clone();
    let s = Scenario {
        model: catalog::load::model("llama3.2-1b").expect("preset"),
        cluster: catalog::load::cluster("dgx-h100").expect("preset"),
        runtime,
        workload: Workload::new(catalog::WorkloadSizes {
            gpus,
            seq_len,
            global_batch: 4 * gpus,
            precision: Precision::Bf16,
        })
        .expect("a workload"),
        headroom: 0.0,
    };
    let strategy = plans::grammar::parse(text, &s.model, &s.workload, &s.runtime).expect(text);
    let costs = CostModel::new(s).expect("priced");
    let floors = costs.floors(&strategy, None, None).expect("priced");
    let prediction = costs.predict(&strategy).expect("priced");
    assert!(floors.memory <= prediction.peak_memory, "{name} {text}");
    let sum: u64 = prediction.memory.iter().map(|part| part.bytes).sum();
    assert_eq!(sum, prediction.peak_memory.0, "{name} {text}");
    prediction
}

#[test]
fn the_loss_is_computed_before_gradients_exist() {
    // Runtime, devices, strategy, and whether gradients are there at the peak.
    let cases = [
        ("hf-trainer", 1, "mbs4", false),
        // The second micro-batch finds the gradients of the first.
        ("hf-trainer", 1, "mbs2", true),
        ("hf-trainer", 8, "dp8 zero3 mbs4", false),
        ("hf-trainer", 8, "dp8 zero0 mbs4", false),
        // These never free gradients.
        ("hf-trainer-2021", 1, "mbs4", true),
        ("hf-deepspeed", 8, "dp8 zero2 mbs4", true),
        ("hf-deepspeed", 8, "dp8 zero3 mbs4", true),
        // Reduced after backward, and freed by the step.
        ("hf-deepspeed", 8, "dp8 zero1 mbs4 overlap=param", false),
        ("hf-deepspeed", 8, "dp8 zero1 mbs2 overlap=param", true),
        ("hf-deepspeed", 8, "dp8 zero0 mbs4", false),
        ("megatron-core", 1, "mbs4", true),
    ];
    for (runtime, gpus, text, there) in cases {
        let p = predict(runtime, gpus, 4096, text);
        let gradients = p.memory_of("gradients").0;
        assert_eq!(gradients > 0, there, "{runtime} {text}: {}", p.peak_moment);
    }
}

/// Plain data parallelism keeps buckets with copies of gradients; the rest is as on one device.
#[test]
fn buckets_of_gradients_stay() {
    let buckets = |p: &Prediction| p.memory_of("gathered parameters and gradients in flight").0;
    let (one, eight) = (
        predict("hf-trainer", 1, 4096, "mbs4"),
        predict("hf-trainer", 8, 4096, "dp8 zero0 mbs4"),
    );
    let weights = one.memory_of("parameters").0 / 4;
    assert_eq!(buckets(&one), 0);
    assert_eq!(buckets(&eight), 4 * weights);
    let sharded = predict("hf-trainer", 8, 4096, "dp8 zero3 mbs4");
    assert!(buckets(&sharded) < 4 * weights);
    // nanotron's parameters, and so its gradients and their copies, have 16 bits.
    let narrow = predict("nanotron", 8, 4096, "dp8 zero0 mbs4");
    assert_eq!(buckets(&narrow), narrow.memory_of("parameters").0);
}

/// FSDP allocates gradients on a stream of its own, which keeps their memory when they are freed.
#[test]
fn freed_gradients_of_fsdp_stay_reserved() {
    let kept = |runtime, text| {
        let p = predict(runtime, 8, 4096, text);
        let weights = p.memory_of("optimizer: moments").0 / 8;
        (
            p.memory_of("freed gradients, held by the allocator").0,
            weights,
        )
    };
    for (runtime, text, there) in [
        ("hf-trainer", "dp8 zero3 mbs4", true),
        ("torchtitan", "dp8 zero3 mbs4", true),
        ("hf-trainer", "dp8 zero0 mbs4", false),
        // XLA plans memory for the whole step.
        ("maxtext", "dp8 zero3 mbs4", false),
    ] {
        let (bytes, weights) = kept(runtime, text);
        assert_eq!(
            bytes,
            if there { 4 * weights } else { 0 },
            "{runtime} {text}"
        );
    }
}

#[test]
fn an_update_needs_the_gradients() {
    // Passes over so few tokens keep less than gradients take, so the peak is the update.
    let p = predict("hf-trainer", 1, 16, "mbs4");
    let weights = p.memory_of("parameters").0 / 4;
    assert_eq!(p.memory_of("gradients").0, 4 * weights, "{}", p.peak_moment);
}

/// With `overlap_comm` DeepSpeed's ZeRO-1 frees gradients of other ranks as soon as a bucket is
/// reduced, unless a later micro-batch adds to them. It then holds the same shard as ZeRO-2.
#[test]
fn only_a_shard_of_gradients_outlives_its_bucket() {
    let gradients = |text: &str| {
        let p = predict("deepspeed", 8, 4096, text);
        p.memory_of("gradients").0
    };
    let shard = gradients("dp8 zero2 mbs4");
    assert!(shard > 0);
    assert_eq!(gradients("dp8 zero1 mbs4"), shard);
    let whole = gradients("dp8 zero1 mbs2");
    assert!(whole.abs_diff(8 * shard) <= 16, "{whole} {shard}");
}

/// DeepSpeed allocates its buckets whole, however small the model is, and a second one where it reduces beside backward.
#[test]
fn buckets_of_deepspeed_have_a_size_of_their_own() {
    let bucket = 2 * catalog::runtime::BUCKET_ELEMENTS;
    let in_flight = |runtime, text| {
        let p = predict(runtime, 8, 4096, text);
        p.memory_of("gathered parameters and gradients in flight").0
    };
    let cases = [
        ("dp8 zero0 mbs2", 0),
        ("dp8 zero1 mbs2 overlap=param", bucket),
        ("dp8 zero1 mbs2", 2 * bucket),
    ];
    for (text, bytes) in cases {
        assert_eq!(in_flight("deepspeed", text), bytes, "{text}");
    }
    let beside = in_flight("deepspeed", "dp8 zero2 mbs2");
    let after = in_flight("deepspeed", "dp8 zero2 mbs2 overlap=param");
    assert_eq!(beside - after, bucket);
    assert!(after > bucket, "and the gradients of a block");
}

/// Autograd adds whole gradients from the second of four micro-batches on, ZeRO-2 and 3 a rank's shard. Clipping reads and writes the
/// gradients of a rank beside reading them for their norm. The same system without `ReleaseGradients` is priced with neither.
#[test]
fn later_micro_batches_add_to_gradients() {
    let more = |runtime: &str, text: &str| {
        let mut kept = catalog::load::runtime(runtime).expect("preset");
        assert!(
            kept.rewrites.remove(&Rewrite::ReleaseGradients),
            "{runtime}"
        );
        let [frees, keeps] = [
            predict(runtime, 8, 4096, text),
            predict_under(kept, 8, 4096, text),
        ];
        let [a, b] = [frees.breakdown, keeps.breakdown];
        (a.compute_s - b.compute_s, a.optimizer_s - b.optimizer_s)
    };
    // Bytes for each weight: of the three sums, and of the multiplication.
    let cases = [
        ("hf-trainer", "dp8 zero0 mbs1", 3.0 * 12.0, 8.0),
        ("deepspeed", "dp8 zero0 mbs1", 3.0 * 6.0, 4.0),
        ("deepspeed", "dp8 zero1 mbs1", 3.0 * 6.0, 4.0 / 8.0),
        ("hf-deepspeed", "dp8 zero2 mbs1", 3.0 * 6.0 / 8.0, 4.0 / 8.0),
        ("hf-deepspeed", "dp8 zero3 mbs1", 3.0 * 6.0 / 8.0, 4.0 / 8.0),
        ("hf-deepspeed", "dp8 zero2 mbs4", 0.0, 4.0 / 8.0),
    ];
    let (_, first) = more("hf-trainer", "dp8 zero0 mbs1");
    for (runtime, text, added, clipped) in cases {
        let (compute, optimizer) = more(runtime, text);
        for (found, bytes) in [(compute, added), (optimizer, clipped)] {
            let of_bytes = found / first * 8.0;
            let close = (of_bytes - bytes).abs() <= 0.05 * bytes.max(0.1);
            assert!(close, "{runtime} {text}: {of_bytes} of {bytes}");
        }
    }
}

/// Gradient buffers that stay from step to step are cleared once per step, 4 bytes written for each gradient. Megatron-LM also reads and
/// writes all of them to divide by the number of ranks. NeMo leaves the division to the collective, and FSDP has no such buffers.
#[test]
fn gradient_buffers_are_cleared_and_scaled_once_per_step() {
    let less = |runtime: &str, text: &str, without: Rewrite| {
        let own = catalog::load::runtime(runtime).expect("preset");
        let mut other = own.clone();
        other.rewrites.remove(&without);
        let [own, other] = [own, other].map(|runtime| predict_under(runtime, 8, 4096, text));
        let read_once = own.memory_of("gradients").0 as f64 / 3.35e12;
        (own.breakdown.optimizer_s - other.breakdown.optimizer_s) / read_once
    };
    let (cleared, scaled) = (Rewrite::FuseGradientAccumulation, Rewrite::ScaleGradients);
    let cases = [
        ("megatron-core", "dp8 zero1 mbs1", cleared, 1.0),
        ("megatron-core", "dp8 zero1 mbs1", scaled, 2.0),
        ("megatron-core", "dp8 zero0 mbs1", scaled, 2.0),
        ("megatron-core", "tp8 mbs1", scaled, 0.0),
        ("nemo", "dp8 zero1 mbs1", scaled, 0.0),
        ("fsdp2", "dp8 zero3 mbs1", cleared, 0.0),
    ];
    for (runtime, text, without, passes) in cases {
        let found = less(runtime, text, without);
        // Kernels reach some nine tenths of the memory's peak rate.
        let expected = passes..=passes * 1.25;
        assert!(
            expected.contains(&found),
            "{runtime} {text} {without:?}: {found}"
        );
    }
}

/// DeepSpeed's engine joins the gradients that a rank updates to one tensor and casts that to 32 bits, while the gradients are still there.
/// Megatron-LM only casts them. The passes over so few tokens keep less than that.
#[test]
fn gradients_are_copied_for_the_step() {
    let cases = [
        ("deepspeed", "dp2 zero2 mbs4", 2 + 2 + 4),
        ("hf-deepspeed", "dp2 zero2 mbs2", 2 + 2 + 4),
        ("deepspeed", "dp2 zero2 mbs4 grad_dtype=fp32", 4 + 4),
        ("megatron-core", "dp2 zero1 mbs4 grad_dtype=bf16", 2 * 2 + 4),
    ];
    for (runtime, text, bytes) in cases {
        let p = predict(runtime, 2, 16, text);
        assert!(p.peak_moment == "optimizer", "{text}: {}", p.peak_moment);
        let shard = p.memory_of("optimizer: moments").0 / 8;
        let held = p.memory_of("gradients").0 + p.memory_of("temporaries").0;
        assert!(
            held.abs_diff(bytes * shard) <= 64,
            "{runtime} {text}: {held} of {shard}"
        );
    }
}

/// DeepSpeed's step computes the norm of a rank's part of one tensor after the other in 64 bits, while all gradients are there. Then
/// ZeRO-1 frees those of other ranks and copies the rest. The table of 128256 x 2048 is the largest tensor.
#[test]
fn the_step_of_deepspeed_frees_gradients_before_it_copies_them() {
    let table = 128_256 * 2048;
    // GPUs, strategy, bytes of gradients for each weight and for each weight of the shard, elements whose norm is computed.
    let cases = [
        (2, "dp2 zero1 mbs4 overlap=param", [0, 8], 0),
        (2, "dp2 zero1 mbs2", [0, 8], 0),
        (4, "dp4 zero1 mbs4 overlap=param", [2, 0], table),
        (4, "dp4 zero1 mbs2", [2, 0], table),
        (4, "dp4 zero2 mbs2", [0, 2], table),
        (2, "dp2 zero2 mbs2", [0, 8], 0),
    ];
    for (gpus, text, [whole, own], normed) in cases {
        let p = predict("deepspeed", gpus, 16, text);
        let shard = p.memory_of("optimizer: moments").0 / 8;
        let held = p.memory_of("gradients").0 + p.memory_of("temporaries").0;
        let want = (whole * gpus + own) * shard + 8 * normed;
        assert!(held.abs_diff(want) <= 64, "{text}: {held}, not {want}");
    }
}
