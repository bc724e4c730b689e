//! Exact mode: every layout gives the bits of one device.

use catalog::Model;
use catalog::Precision;
use cpu_device::Numerics;
use executor::{Execution, Outcome};

use super::jobs::{changed, families, family_layouts, job, llama, mixtral, nanogpt, qwen3, train};

/// Trains `model` for 20 steps under every layout and compares with one device, bit by bit.
fn check(model: &Model, precision: Precision, layouts: &[&str]) {
    check_steps(model, precision, layouts, 20);
}

fn check_steps(model: &Model, precision: Precision, layouts: &[&str], steps: u64) {
    let single = train(&job(model, "tp=1,mbs=4", Numerics::Exact, precision, steps));
    let last = single.losses[single.losses.len() - 1];
    assert!(last < single.losses[0], "{:?}", single.losses);
    let mut wrong = Vec::new();
    for layout in layouts {
        let other = train(&job(model, layout, Numerics::Exact, precision, steps));
        let bits = |losses: &[f64]| losses.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
        if bits(&other.losses) != bits(&single.losses)
            || bits(&other.gradient_norms) != bits(&single.gradient_norms)
            || other.weights_sha256() != single.weights_sha256()
        {
            wrong.push(format!(
                "{} {layout}: {:?} for {:?}",
                model.name, other.losses, single.losses
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Every axis alone, every ZeRO level, every kind of context parallelism, every recompute mode.
pub const ALONE: &[&str] = &[
    "tp=1,mbs=2",
    "tp=2,sp=off,mbs=2",
    "tp=2,sp=on,mbs=2",
    "tp=4,sp=on,mbs=2",
    "dp=2,zero=0,mbs=2",
    "dp=2,zero=1,mbs=2",
    "dp=2,zero=2,mbs=2",
    "dp=2,zero=3,mbs=2",
    "dp=4,zero=3,reshard=off,mbs=2",
    "dp_shard=2,dp_replicate=2,zero=3,mbs=2",
    "dp_shard=2,dp_replicate=2,zero=2,mbs=2",
    "cp=2,cp_kind=ring,mbs=2",
    "cp=4,cp_kind=ring,mbs=2",
    "cp=2,cp_kind=all_gather,mbs=2",
    "cp=2,cp_kind=all_to_all,mbs=2",
    "tp=1,mbs=2,recompute=full",
    "tp=1,mbs=2,recompute=selective",
    "tp=1,mbs=2,recompute=layers:2",
    "tp=1,mbs=1",
];

/// Every schedule, split backward passes included.
pub const SCHEDULES: &[&str] = &[
    "pp=2,mbs=2,schedule=gpipe",
    "pp=2,mbs=2,schedule=1f1b",
    "pp=4,mbs=2,schedule=1f1b",
    "pp=2,vpp=2,mbs=2,schedule=interleaved",
    "pp=2,mbs=2,schedule=zb-h1",
    "pp=2,vpp=2,mbs=2,schedule=zb-v",
    "pp=2,vpp=2,mbs=2,schedule=dualpipe-v",
    "pp=2,mbs=2,schedule=1f1b,stages=1/3",
    "pp=2,mbs=1,schedule=1f1b,recompute=falling:1",
    "pp=2,mbs=1,schedule=zb-h1,stages=3/1,recompute=falling:2",
];

/// Every pair of axes, and mixes of four and five.
pub const MIXES: &[&str] = &[
    "tp=2,sp=on,dp=2,zero=1,mbs=2",
    "tp=2,sp=on,dp=2,zero=3,mbs=2",
    "tp=2,sp=off,dp=2,zero=2,mbs=2",
    "tp=2,sp=on,cp=2,cp_kind=ring,mbs=2",
    "tp=2,sp=on,cp=2,cp_kind=all_to_all,mbs=2",
    "tp=2,sp=on,pp=2,mbs=2,schedule=1f1b",
    "cp=2,cp_kind=all_gather,dp=2,zero=3,mbs=2",
    "cp=2,cp_kind=ring,pp=2,mbs=2,schedule=zb-h1",
    "dp=2,zero=2,pp=2,mbs=2,schedule=zb-v,vpp=2",
    "dp=2,zero=3,pp=2,mbs=1,schedule=interleaved,vpp=2,recompute=full",
    "tp=2,sp=on,dp=2,pp=2,zero=1,mbs=2,schedule=1f1b,recompute=selective",
    "tp=2,sp=on,cp=2,dp=2,zero=2,mbs=2,cp_kind=ring",
    "tp=2,sp=on,cp=2,dp=2,pp=2,zero=1,mbs=2,schedule=1f1b,cp_kind=all_gather",
    "tp=2,sp=on,cp=2,dp_shard=2,dp_replicate=2,pp=2,zero=3,mbs=1,schedule=zb-h1,cp_kind=ring",
];

/// Experts over their own mesh, with every other axis.
pub const EXPERTS: &[&str] = &[
    "dp=2,ep=2,zero=1,mbs=2",
    "dp=4,ep=2,zero=3,mbs=2",
    "dp=4,ep=4,zero=0,mbs=2",
    "dp=2,ep=1,zero=2,mbs=2",
    "tp=2,sp=on,ep=1,etp=2,mbs=2",
    "tp=2,sp=on,ep=2,etp=1,mbs=2",
    "tp=2,sp=on,dp=2,ep=2,etp=2,zero=1,mbs=2",
    "cp=2,cp_kind=ring,ep=2,mbs=2,recompute=full",
    "pp=2,dp=2,ep=2,zero=2,mbs=2,schedule=zb-v,vpp=2",
    "tp=2,sp=on,cp=2,dp=2,pp=2,ep=4,etp=1,zero=1,mbs=2,schedule=1f1b,cp_kind=all_to_all",
];

#[test]
fn llama_under_every_layout() {
    check(
        &llama(),
        Precision::Fp32,
        &[ALONE, SCHEDULES, MIXES].concat(),
    );
}

#[test]
fn gpt_with_dropout_and_tied_embeddings_under_every_layout() {
    let all = [ALONE, SCHEDULES, MIXES].concat();
    check(&nanogpt(0.1), Precision::Fp32, &all);
}

#[test]
fn gpt_with_heavy_dropout() {
    let some = [&ALONE[..10], SCHEDULES, &MIXES[..6]].concat();
    check_steps(&nanogpt(0.9), Precision::Fp32, &some, 5);
}

#[test]
fn mixtral_under_every_layout() {
    let all = [&ALONE[1..14], &SCHEDULES[3..], EXPERTS].concat();
    let dense = |layout: &&str| !layout.contains("sp=off");
    let all: Vec<&str> = all.into_iter().filter(dense).collect();
    check(&mixtral(), Precision::Fp32, &all);
}

/// Vocabularies that do not divide: the last ranks hold fewer rows, or none.
pub const UNEVEN: &[&str] = &[
    "tp=2,sp=on,mbs=2",
    "tp=4,sp=off,mbs=2",
    "tp=4,sp=on,mbs=2",
    "tp=4,sp=on,dp=2,zero=3,mbs=2",
    "tp=2,sp=on,pp=2,mbs=2,schedule=zb-h1,recompute=full",
];

#[test]
fn uneven_vocabularies() {
    let gpt = changed(&nanogpt(0.1), |m| m.vocab = 67);
    check_steps(&gpt, Precision::Fp32, UNEVEN, 5);
    let llama = changed(&llama(), |m| m.vocab = 101);
    check_steps(&llama, Precision::Fp32, &UNEVEN[..3], 5);
}

/// Schedules whose ranks have several stages, of layers that do not divide: a rank's stages differ in their weights.
pub const UNEVEN_STAGES: &[&str] = &[
    "pp=2,vpp=2,mbs=2,schedule=interleaved",
    "pp=2,vpp=2,mbs=2,schedule=zb-v",
    "dp=2,zero=2,pp=2,vpp=2,mbs=2,schedule=interleaved",
];

#[test]
fn uneven_stages() {
    for model in [nanogpt(0.1), llama()] {
        for layers in [5, 7] {
            let uneven = changed(&model, |m| m.layers = layers);
            check_steps(&uneven, Precision::Fp32, UNEVEN_STAGES, 3);
        }
    }
}

#[test]
fn mixed_precision_is_exact_too() {
    check_steps(&llama(), Precision::Bf16, MIXES, 5);
    check_steps(&mixtral(), Precision::Bf16, &EXPERTS[..6], 5);
}

/// Norms of each head's queries and keys, whose weights sum over heads that ranks share out.
#[test]
fn qwen3_under_layouts() {
    let layouts = [
        "tp=2,sp=on,mbs=2",
        "tp=4,sp=off,dp=2,zero=2,mbs=2",
        "cp=2,cp_kind=all_to_all,mbs=2,recompute=selective",
        "tp=2,sp=on,cp=2,cp_kind=ring,pp=2,mbs=2,schedule=zb-h1",
    ];
    check_steps(&qwen3(), Precision::Fp32, &layouts, 5);
    check_steps(&qwen3(), Precision::Bf16, &layouts[..1], 5);
}

/// Eager execution, which traces every micro-batch anew, gives the same bits as replay.
#[test]
fn eager_is_replayed() {
    let layouts = [
        "tp=1,mbs=1,recompute=selective",
        "tp=2,sp=on,cp=2,cp_kind=ring,mbs=2,recompute=full",
        "pp=2,vpp=2,dp=2,zero=2,mbs=1,schedule=zb-v",
    ];
    for (model, layouts) in [
        (nanogpt(0.1), layouts.as_slice()),
        (mixtral(), &EXPERTS[6..]),
    ] {
        for layout in layouts {
            for numerics in [Numerics::Exact, Numerics::Fast] {
                let mut job = job(&model, layout, numerics, Precision::Fp32, 3);
                let replayed = train(&job);
                job.settings.execution = Execution::Eager;
                let eager = train(&job);
                assert_eq!(eager.losses, replayed.losses, "{layout}");
                assert_eq!(
                    eager.weights_sha256(),
                    replayed.weights_sha256(),
                    "{layout}"
                );
                let kept = |outcome: &Outcome| -> Vec<u64> {
                    outcome.ranks.iter().map(|r| r.peak_saved).collect()
                };
                assert_eq!(kept(&eager), kept(&replayed), "{layout}");
            }
        }
    }
}

#[test]
fn families_under_layouts() {
    for (_, model) in families() {
        check_steps(&model, Precision::Fp32, &family_layouts(&model), 5);
    }
}
