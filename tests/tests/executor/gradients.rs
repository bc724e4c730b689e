//! Gradients agree with finite differences of the loss, parameter by parameter.

use catalog::Model;
use catalog::Precision;
use cpu_device::Numerics;
use executor::checkpoint::{Memory, Piece};
use executor::{AdamW, Job, Session};

use super::jobs::{changed, job, llama, mixtral, nanogpt, session};

/// A job of one step on one rank whose first moment is a tenth of the gradient.
fn one_step(model: &Model) -> Job {
    let mut job = job(model, "tp=1,mbs=4", Numerics::Exact, Precision::Fp32, 1);
    job.settings.optimizer = AdamW {
        clip_norm: None,
        ..job.settings.optimizer
    };
    job
}

fn loss(job: &Job, start: &Memory) -> f64 {
    let run = Session {
        start: Some((start, 0)),
        ..session(job)
    };
    executor::train(&run).expect("trains").losses[0]
}

fn memory(weights: &[(String, Vec<u64>, Vec<f32>)]) -> Memory {
    let pieces = weights.iter().map(|(name, global, values)| Piece {
        name: name.clone(),
        global: global.clone(),
        runs: vec![[0, values.len() as u64]],
        data: [
            values.clone(),
            vec![0.0; values.len()],
            vec![0.0; values.len()],
        ],
    });
    let mut memory = Memory::default();
    memory.add(pieces.collect());
    memory
}

/// Moves every parameter along its own gradient and compares the change of the loss with the
/// gradient's length.
fn check(model: &Model, tried: impl Fn(&str) -> bool) {
    let job = one_step(model);
    // Random biases and norm weights, so that their gradients are no special case.
    let start: Vec<_> = {
        let initial = executor::train(&session(&Job {
            stop_after: Some(0),
            ..job.clone()
        }));
        let weights = initial.expect("makes states").states.weights();
        let spread = |(name, (global, mut values)): (String, (Vec<u64>, Vec<f32>))| {
            for (i, x) in values.iter_mut().enumerate() {
                *x = *x * 3.0 + 0.02 * ((i % 7) as f32 - 3.0);
            }
            (name, global, values)
        };
        weights.into_iter().map(spread).collect()
    };
    let trained = executor::train(&Session {
        start: Some((&memory(&start), 0)),
        ..session(&job)
    })
    .expect("trains");
    let gradients = trained.states.moments();
    let beta = 1.0 - job.settings.optimizer.beta1;
    let all = start.iter().enumerate();
    for (index, (name, ..)) in all.filter(|(_, (name, ..))| tried(name)) {
        let gradient: Vec<f64> = gradients[name]
            .iter()
            .map(|&m| f64::from(m) / beta)
            .collect();
        let length = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
        if length < 1e-7 {
            // An expert that no token chose.
            continue;
        }
        // Changes the loss by about 2e-3, or weights by little.
        let step = (1e-3 / length).min(0.05);
        let moved = |sign: f64| {
            let mut weights = start.clone();
            for (w, g) in weights[index].2.iter_mut().zip(&gradient) {
                *w += (sign * step * g / length) as f32;
            }
            loss(&job, &memory(&weights))
        };
        let slope = (moved(1.0) - moved(-1.0)) / (2.0 * step);
        let error = (slope - length).abs() / length;
        assert!(error < 0.02, "{name}: slope {slope}, gradient {length}");
    }
}

#[test]
fn of_gpt() {
    check(&nanogpt(0.1), |_| true);
}

#[test]
fn of_llama() {
    check(&llama(), |_| true);
}

#[test]
fn of_mixtral_with_every_expert_chosen() {
    // Otherwise the loss jumps where a token changes its expert.
    let model = changed(&mixtral(), |m| {
        if let Some(moe) = &mut m.moe {
            moe.top_k = moe.experts;
        }
    });
    check(&model, |name| {
        !name.contains("layers.1") && !name.contains("layers.2")
    });
}

#[test]
fn of_mixtral_after_its_last_choice() {
    check(&mixtral(), |name| {
        name.contains("layers.3.block_sparse_moe.experts")
            || name == "model.norm.weight"
            || name == "lm_head.weight"
    });
}
