//! What XLA and MaxText's code make of a step: gathers of 8-bit weights, products that stay in 16 bits, embeddings by products, and
//! data of one token.

use catalog::runtime::Rewrite;
use catalog::{Precision, Workload, WorkloadSizes};
use costmodel::{CostModel, Scenario};
use plans::Prediction;

/// Llama 2 70B over 4,096 tokens on 64 GPUs under MaxText.
fn scenario(cluster: &str, precision: Precision, rewrites: &[Rewrite]) -> Scenario {
    let mut runtime = catalog::load::runtime("maxtext").expect("a preset");
    runtime.rewrites.remove(&Rewrite::GatherNarrowWeights);
    runtime.rewrites.extend(rewrites.iter().copied());
    Scenario {
        model: catalog::load::model("llama2-70b").expect("a preset"),
        cluster: catalog::load::cluster(cluster).expect("a preset"),
        runtime,
        workload: Workload::new(WorkloadSizes {
            gpus: 64,
            seq_len: 4096,
            global_batch: 128,
            precision,
        })
        .expect("a workload"),
        headroom: 0.0,
    }
}

fn predicted(scenario: Scenario) -> Prediction {
    let text = "zero=3,mbs=2,recompute=selective_ops";
    let (model, workload) = (&scenario.model, &scenario.workload);
    let strategy = plans::grammar::parse(text, model, workload, &scenario.runtime);
    let strategy = strategy.unwrap_or_else(|e| panic!("{text}: {e}"));
    let costs = CostModel::new(scenario).expect("priced");
    costs.predict(&strategy).expect("predicted")
}

/// Seconds of the kernels whose names begin and end so.
fn seconds(of: &Prediction, [start, end]: [&str; 2]) -> f64 {
    let named = |name: &str| name.starts_with(start) && name.ends_with(end);
    let kernels = of.kernels.iter().filter(|kernel| named(&kernel.name));
    kernels.map(|kernel| kernel.seconds).sum()
}

#[test]
fn weights_of_8_bit_products_take_half_the_time_and_memory_of_a_gather() {
    for (precision, narrows) in [(Precision::Fp8, true), (Precision::Bf16, false)] {
        let of = |rewrites: &[Rewrite]| predicted(scenario("dgx-h100", precision, rewrites));
        let [wide, narrow] = [of(&[]), of(&[Rewrite::GatherNarrowWeights])];
        assert_eq!(narrow.step_time < wide.step_time, narrows, "{precision:?}");
        assert_eq!(
            narrow.peak_memory < wide.peak_memory,
            narrows,
            "{precision:?}"
        );
    }
}

#[test]
fn forward_products_stay_in_16_bits_where_their_casts_left_the_loop() {
    let of = |rewrites: &[Rewrite]| predicted(scenario("dgx-h100", Precision::Fp8, rewrites));
    let [narrow, wide] = [of(&[]), of(&[Rewrite::WideForwardProducts])];
    for (name, slower) in [
        (["mlp.up_proj matmul", "(forward)"], 1.5..2.2),
        (["mlp.up_proj matmul", "(recomputed)"], 1.0..1.0 + 1e-9),
        (["mlp.up_proj matmul", "(backward)"], 1.0..1.0 + 1e-9),
        (["mlp.up_proj matmul", "(weight gradient)"], 1.0..1.0 + 1e-9),
        (["lm_head matmul", "(forward)"], 1.0..1.0 + 1e-9),
    ] {
        let ratio = seconds(&wide, name) / seconds(&narrow, name);
        assert!(slower.contains(&ratio), "{name:?}: {ratio}");
    }
}

/// The head multiplies as many numbers as the embedding does by its product.
#[test]
fn an_embedding_by_a_product_takes_as_long_as_the_head() {
    let of = |rewrites: &[Rewrite]| predicted(scenario("dgx-h100", Precision::Bf16, rewrites));
    let [looked_up, multiplied] = [of(&[]), of(&[Rewrite::EmbedByProduct])];
    for end in ["(forward)", "(weight gradient)"] {
        let of_head = seconds(&multiplied, ["lm_head matmul", end]);
        let [before, after] =
            [&looked_up, &multiplied].map(|of| seconds(of, ["model.embed_tokens", end]));
        let ratio = after / of_head;
        assert!((0.9..1.1).contains(&ratio), "{end}: {ratio}");
        assert!(before < 0.1 * after, "{end}: {before} of {after}");
    }
}

#[test]
fn products_of_alike_rows_are_not_throttled_where_power_limits_them() {
    for (cluster, throttled) in [("dgx-h100", true), ("dgx-a100", false)] {
        let scenario = scenario(cluster, Precision::Bf16, &[]);
        let alike = Scenario {
            workload: scenario.workload.clone().of_alike_tokens(),
            ..scenario.clone()
        };
        let [usual, alike] = [scenario, alike].map(|of| predicted(of).step_time.0);
        assert_eq!(
            alike < 0.95 * usual,
            throttled,
            "{cluster}: {alike} of {usual}"
        );
        assert!(alike <= usual, "{cluster}: {alike} of {usual}");
    }
}
