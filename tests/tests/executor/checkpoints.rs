//! Checkpoints load under any layout, and training goes on as if nothing had happened.

use std::path::Path;

use catalog::Model;
use catalog::Precision;
use cpu_device::Numerics;
use executor::checkpoint::Checkpoint;
use executor::{Checkpoints, Job, Outcome, Session};

use super::jobs::{job, llama, mixtral, nanogpt, session, train};

const STEPS: u64 = 4;

fn exact(model: &Model, layout: &str) -> Job {
    job(model, layout, Numerics::Exact, Precision::Fp32, STEPS)
}

/// Trains half way under `job`, saving into `dir`.
fn half(job: &Job, dir: &Path) -> Outcome {
    let half = Job {
        stop_after: Some(STEPS / 2),
        ..job.clone()
    };
    let checkpoints = Checkpoints::of(&half, dir, 1);
    let run = Session {
        checkpoints: Some(&checkpoints),
        ..session(&half)
    };
    executor::train(&run).unwrap_or_else(|e| panic!("{}: {e}", job.strategy))
}

/// Resumes from `dir` under every layout; weights, moments and losses must be those of one run.
fn check(model: &Model, saved_under: &str, loaded_under: &[&str]) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    half(&exact(model, saved_under), dir.path());
    let whole = train(&exact(model, "tp=1,mbs=4"));
    for layout in loaded_under {
        let checkpoint = Checkpoint::open(dir.path()).expect("a complete checkpoint");
        assert_eq!(checkpoint.manifest.step, STEPS / 2);
        assert_eq!(checkpoint.verify(), []);
        let job = exact(model, layout);
        let resumed = executor::train(&Session {
            start: Some((&checkpoint, checkpoint.manifest.step)),
            ..session(&job)
        })
        .unwrap_or_else(|e| panic!("{layout}: {e}"));
        assert_eq!(
            resumed.losses,
            whole.losses[(STEPS / 2) as usize..],
            "{saved_under} → {layout}"
        );
        assert_eq!(
            resumed.weights_sha256(),
            whole.weights_sha256(),
            "{saved_under} → {layout}"
        );
    }
}

#[test]
fn of_dense_layouts_load_under_others() {
    check(
        &llama(),
        "dp=2,tp=2,sp=on,zero=1,mbs=2",
        &[
            "pp=4,mbs=2,schedule=1f1b",
            "dp=4,zero=0,mbs=2",
            "dp=4,zero=2,mbs=2",
            "dp=4,zero=3,mbs=2",
            "tp=4,sp=on,mbs=2",
        ],
    );
    check(
        &nanogpt(0.1),
        "pp=2,vpp=2,dp=2,zero=3,mbs=2,schedule=zb-v",
        &["tp=2,sp=on,cp=2,cp_kind=ring,mbs=2", "tp=1,mbs=1"],
    );
}

#[test]
fn of_expert_layouts_load_under_others() {
    check(
        &mixtral(),
        "dp=4,ep=4,zero=1,mbs=2",
        &[
            "dp=2,ep=2,zero=3,mbs=2",
            "tp=2,sp=on,ep=1,etp=2,mbs=2",
            "pp=2,mbs=2,schedule=1f1b",
        ],
    );
}

#[test]
fn a_running_job_is_replanned_in_memory() {
    let model = llama();
    let whole = train(&exact(&model, "tp=1,mbs=4"));
    let first = train(&Job {
        stop_after: Some(2),
        ..exact(&model, "dp=2,zero=3,mbs=2")
    });
    let job = exact(&model, "tp=2,sp=on,pp=2,mbs=2,schedule=zb-h1");
    let second = executor::train(&Session {
        start: Some((&first.states, 2)),
        ..session(&job)
    })
    .expect("trains");
    assert_eq!(second.losses, whole.losses[2..]);
    assert_eq!(second.weights_sha256(), whole.weights_sha256());
}

#[test]
fn damage_is_named() {
    let model = llama();
    let dir = tempfile::tempdir().expect("a temporary folder");
    half(&exact(&model, "dp=2,zero=1,mbs=2"), dir.path());
    let newest = executor::checkpoint::latest(dir.path())
        .expect("readable")
        .expect("saved");
    let path = newest.join("rank-00001.bin");
    let mut bytes = std::fs::read(&path).expect("readable");
    let last = bytes.len() - 5;
    bytes[last] ^= 0x10;
    std::fs::write(&path, bytes).expect("writable");
    let checkpoint = Checkpoint::open(dir.path()).expect("its headers are whole");
    let found = checkpoint.verify();
    assert_eq!(found.len(), 1);
    let message = found[0].to_string();
    assert!(
        message.contains("rank-00001.bin") && message.contains("lm_head.weight"),
        "{message}"
    );
    let job = exact(&model, "tp=2,sp=on,mbs=2");
    let error = executor::train(&Session {
        start: Some((&checkpoint, 2)),
        ..session(&job)
    })
    .expect_err("damaged");
    assert_eq!(error, found[0]);
}
