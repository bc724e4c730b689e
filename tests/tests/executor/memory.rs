//! Predicted bytes are the bytes that training holds, exactly.

use catalog::Model;
use catalog::Precision;
use costmodel::Member;
use cpu_device::Numerics;

use super::exact::{ALONE, EXPERTS, MIXES, SCHEDULES, UNEVEN};
use super::jobs::{
    changed, costs, families, family_layouts, job, llama, mixtral, nanogpt, qwen3, train,
};

fn check(model: &Model, precision: Precision, layouts: &[&str]) {
    let mut wrong = Vec::new();
    for layout in layouts {
        let job = job(model, layout, Numerics::Fast, precision, 1);
        let outcome = train(&job);
        let costs = costs(&job, "vescale");
        let held = costs.held(&job.strategy).expect("traced");
        // Experts keep what the tokens' choices brought them: every rank its own amount.
        for rank in &outcome.ranks {
            let member = Member {
                pp: rank.pp,
                tp: rank.tp,
                rows: rank.routed_rows(),
            };
            let predicted = costs.held_by(&job.strategy, &member).expect("traced");
            let (predicted, measured) = (predicted.peak_saved.0, rank.peak_saved);
            if predicted != measured {
                wrong.push(format!(
                    "{layout} rank {} saved: predicted {predicted}, measured {measured}",
                    rank.rank
                ));
            }
        }
        for (pp, held) in held.iter().enumerate() {
            let ranks = || outcome.ranks.iter().filter(|r| r.pp == pp as u64);
            let most = |f: &dyn Fn(&executor::RankReport) -> u64| ranks().map(f).max().unwrap_or(0);
            let mut pairs = vec![
                (
                    "parameters",
                    held.states.parameters,
                    most(&|r| r.states.parameters),
                ),
                (
                    "gradients",
                    held.states.gradients,
                    most(&|r| r.states.gradients),
                ),
                ("master", held.states.master, most(&|r| r.states.master)),
                ("moments", held.states.moments, most(&|r| r.states.moments)),
            ];
            if ranks().all(|r| r.routed.is_empty()) {
                pairs.push(("saved", held.peak_saved.0, most(&|r| r.peak_saved)));
            }
            for (name, predicted, measured) in pairs {
                if predicted != measured {
                    wrong.push(format!(
                        "{} {layout} pp={pp} {name}: predicted {predicted}, measured {measured}",
                        model.name
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn of_llama() {
    check(
        &llama(),
        Precision::Fp32,
        &[ALONE, SCHEDULES, MIXES].concat(),
    );
    check(
        &llama(),
        Precision::Bf16,
        &[ALONE, SCHEDULES, MIXES].concat(),
    );
}

#[test]
fn of_gpt() {
    check(
        &nanogpt(0.1),
        Precision::Fp32,
        &[ALONE, SCHEDULES, MIXES].concat(),
    );
}

#[test]
fn of_uneven_vocabularies() {
    let gpt = changed(&nanogpt(0.1), |m| m.vocab = 67);
    check(&gpt, Precision::Fp32, UNEVEN);
}

/// The rank whose experts receive the most tokens need not be the rank with the largest shard of the vocabulary.
#[test]
fn of_uneven_vocabularies_with_experts() {
    for vocab in [67, 101] {
        let model = changed(&mixtral(), |m| m.vocab = vocab);
        check(
            &model,
            Precision::Fp32,
            &[
                "tp=4,sp=on,ep=2,etp=2,mbs=2",
                "tp=4,sp=on,dp_shard=2,ep=8,etp=1,zero=3,mbs=2",
                "tp=2,sp=on,pp=2,ep=2,etp=1,mbs=2,schedule=zb-h1",
            ],
        );
    }
}

#[test]
fn of_mixtral() {
    check(&mixtral(), Precision::Fp32, EXPERTS);
    check(&mixtral(), Precision::Bf16, EXPERTS);
}

#[test]
fn of_qwen3() {
    check(
        &qwen3(),
        Precision::Fp32,
        &["tp=2,sp=on,mbs=2", "cp=2,tp=2,mbs=2,cp_kind=ring"],
    );
}

#[test]
fn of_families() {
    for (_, model) in families() {
        for precision in [Precision::Fp32, Precision::Bf16] {
            check(&model, precision, &family_layouts(&model));
        }
    }
}
