//! The optimizer: one launch over many runs of weights.

use std::slice::from_ref;

use catalog::DType;
use cpu_device::AdamWStep;
use cuda_device::{Device, Optimizer, Tensor, Weights};

use super::{close, random, within};
use crate::emulator;

/// Weights, momentum, variance and gradient, on the device and in 64 bits.
type States = ([Tensor; 4], [Vec<f64>; 4]);

fn states(device: &Device, n: usize, seed: u64) -> States {
    let all = [0, 1, 2, 3].map(|k| random(device, &[n], DType::F32, seed + k));
    let [(w, ww), (m, wm), (_, wv), (g, wg)] = all;
    // Second moments are not negative.
    let positive: Vec<f32> = wv.iter().map(|v| v.abs() as f32).collect();
    let (v, wv) = super::upload(device, &[n], positive, DType::F32);
    ([w, m, v, g], [ww, wm, wv, wg])
}

const STEP: AdamWStep = AdamWStep {
    rate: 1e-2,
    betas: [0.9, 0.95],
    corrections: [0.1, 0.05],
    epsilon: 1e-8,
    keep: 0.999,
};

/// Weights and moments after a step.
fn stepped([w, m, v, g]: &[Vec<f64>; 4], scale: f64, decays: bool) -> [Vec<f64>; 3] {
    let [b1, b2] = STEP.betas.map(f64::from);
    let [c1, c2] = STEP.corrections.map(f64::from);
    let keep = if decays { f64::from(STEP.keep) } else { 1.0 };
    let mut want = [Vec::new(), Vec::new(), Vec::new()];
    for i in 0..w.len() {
        let g = g[i] * scale;
        let first = b1 * m[i] + (1.0 - b1) * g;
        let second = b2 * v[i] + (1.0 - b2) * g * g;
        let root = (second / c2).sqrt() + f64::from(STEP.epsilon);
        want[0].push(w[i] * keep - f64::from(STEP.rate) * (first / c1) / root);
        want[1].push(first);
        want[2].push(second);
    }
    want
}

#[test]
fn one_launch_of_the_optimizer_takes_many_runs() {
    // Runs that end inside a chunk, at its end, and behind it; empty ones.
    let runs = [1, 77, 0, 2048, 5000, 4096, 3];
    for device in emulator::devices() {
        let optimizer = Optimizer::new(&device).expect("memory");
        optimizer.set_numbers(&STEP).expect("writes");
        let all: Vec<States> = (0..)
            .zip(runs)
            .map(|(k, n)| states(&device, n, 4 * k))
            .collect();
        // Values in bf16, in 32 bits, or none.
        let values: Vec<Option<Tensor>> = (0..)
            .zip(runs)
            .map(|(k, n)| {
                let dtype = [Some(DType::Bf16), Some(DType::F32), None][k % 3]?;
                Some(device.tensor(vec![n], dtype).expect("memory"))
            })
            .collect();
        let gradients: Vec<Tensor> = all.iter().map(|(here, _)| here[3].clone()).collect();
        let squares: f64 = all
            .iter()
            .flat_map(|(_, host)| &host[3])
            .map(|g| g * g)
            .sum();
        let limit = 0.5 * squares.sqrt();
        let (losses, _) = random(&device, &[9], DType::F32, 99);
        optimizer
            .measure_and_clip(&gradients, from_ref(&losses), Some(limit))
            .expect("runs");
        let measured = optimizer.squares().expect("reads");
        assert!(
            (measured - squares).abs() <= 1e-6 * squares,
            "{measured} {squares}"
        );
        let weights: Vec<Weights> = (0..)
            .zip(all.iter().zip(&values))
            .map(|(k, ((here, _), value))| Weights {
                states: here.clone(),
                rounded: value.clone(),
                decays: k % 2 == 0,
            })
            .collect();
        optimizer.step(&weights).expect("runs");
        for (k, ((here, host), value)) in all.iter().zip(&values).enumerate() {
            let want = stepped(host, limit / (squares.sqrt() + 1e-6), k % 2 == 0);
            for ((what, got), want) in ["weights", "momentum", "variance"]
                .iter()
                .zip(here)
                .zip(&want)
            {
                within(&device, &format!("{what} {k}"), got, want, 2e-6);
            }
            if let Some(value) = value {
                close(&device, "rounded", value, &want[0]);
            }
        }
    }
}

#[test]
fn a_step_without_a_norm_changes_nothing() {
    for device in emulator::devices() {
        let optimizer = Optimizer::new(&device).expect("memory");
        optimizer.set_numbers(&STEP).expect("writes");
        let (here, _) = states(&device, 300, 1);
        let weights = [Weights {
            states: here.clone(),
            rounded: None,
            decays: false,
        }];
        let before = device.download(&here[0]).expect("reads");
        let after = || device.download(&here[0]).expect("reads");
        let (losses, _) = random(&device, &[9], DType::F32, 99);
        let numbers = vec![1.0, f32::INFINITY];
        let (broken, _) = super::upload(&device, &[2], numbers, DType::F32);
        for (gradients, finite, limit) in [
            (&broken, &losses, None),
            (&broken, &losses, Some(1.0)),
            (&here[3], &broken, None),
        ] {
            let (gradients, finite) = (from_ref(gradients), from_ref(finite));
            optimizer
                .measure_and_clip(gradients, finite, limit)
                .expect("runs");
            assert!(!optimizer.squares().expect("reads").is_finite());
            optimizer.step(&weights).expect("runs");
            assert_eq!(after().f32(), before.f32());
        }
        // With a factor of all ranks, moments move weights even where the gradient counts nothing.
        optimizer.set_scale(0.0).expect("writes");
        optimizer.step(&weights).expect("runs");
        assert_ne!(after().f32(), before.f32());
    }
}
