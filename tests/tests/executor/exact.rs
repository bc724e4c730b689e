//! Exact mode: every layout gives the bits of one device.

use dtensor::cpu::Numerics;
use spec::Precision;
use spec::model::ModelConfig;

use super::jobs::{job, llama, mixtral, nanogpt, train};

/// Trains `model` under every layout and compares with one device, bit by bit.
fn check(model: &ModelConfig, precision: Precision, layouts: &[&str]) {
    const STEPS: u64 = 3;
    let single = train(&job(model, "tp=1,mbs=4", Numerics::Exact, precision, STEPS));
    assert!(single.losses[2] < single.losses[0], "{:?}", single.losses);
    let mut wrong = Vec::new();
    for layout in layouts {
        let other = train(&job(model, layout, Numerics::Exact, precision, STEPS));
        let bits = |losses: &[f64]| losses.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
        if bits(&other.losses) != bits(&single.losses)
            || other.weights_sha256 != single.weights_sha256
        {
            wrong.push(format!(
                "{layout}: {:?} for {:?}",
                other.losses, single.losses
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn llama_by_every_axis_alone() {
    check(
        &llama(),
        Precision::Fp32,
        &[
            "tp=1,mbs=2",
            "tp=2,sp=off,mbs=2",
            "tp=2,sp=on,mbs=2",
            "tp=4,sp=on,mbs=2",
            "dp=2,zero=0,mbs=2",
            "dp=2,zero=1,mbs=2",
            "dp=2,zero=2,mbs=2",
            "dp=2,zero=3,mbs=2",
            "dp_shard=2,dp_replicate=2,zero=3,mbs=2",
            "cp=2,cp_kind=ring,mbs=2",
            "cp=2,cp_kind=all_gather,mbs=2",
            "cp=2,cp_kind=all_to_all,mbs=2",
            "pp=2,mbs=2,schedule=1f1b",
            "tp=1,mbs=2,recompute=full",
            "tp=1,mbs=2,recompute=selective",
        ],
    );
}

#[test]
fn gpt_with_dropout() {
    check(
        &nanogpt(0.1),
        Precision::Fp32,
        &["tp=2,sp=on,mbs=2", "cp=2,mbs=2,cp_kind=ring,recompute=full"],
    );
}

#[test]
fn mixtral_by_expert_axes() {
    check(
        &mixtral(),
        Precision::Fp32,
        &["dp=2,ep=2,zero=1,mbs=2", "tp=2,sp=on,ep=1,etp=2,mbs=2"],
    );
}
