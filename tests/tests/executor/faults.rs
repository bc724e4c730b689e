//! What goes wrong is said on every rank, and nothing is lost.

use std::time::Duration;

use dtensor::comm::{CommError, Communicator, Group, Message, local};
use dtensor::cpu::{CpuError, Numerics};
use executor::{Checkpoints, ExecutorError, Session};
use spec::Precision;

use super::jobs::{job, llama, nanogpt, session, train};

#[test]
fn a_rank_that_hangs_is_named() {
    let world = local::world(2, Duration::from_millis(50));
    let group = |index| Group {
        ranks: vec![0, 1],
        index,
        channel: 7,
    };
    let waiting = group(0);
    let pending = waiting
        .all_gather(&world[0], "gradients", Message::default())
        .expect("sending does not wait");
    let error = pending.wait(&world[0]).expect_err("rank 1 never comes");
    assert_eq!(
        error.to_string(),
        "rank 0 waited 0.05 s for rank 1 in gradients"
    );
}

#[test]
fn a_rank_that_fails_stops_the_others() {
    let world = local::world(3, Duration::from_secs(30));
    world[2].fail("its disk is gone");
    for (rank, comm) in world.iter().enumerate().take(2) {
        let error = comm
            .receive(1 - rank, 7, "parameters")
            .expect_err("a peer failed");
        assert!(matches!(error, CommError::PeerFailed { failed: 2, .. }));
        assert_eq!(
            error.to_string(),
            format!("rank {rank} stopped in parameters because rank 2 failed: its disk is gone")
        );
    }
}

#[test]
fn a_loss_that_is_no_number_stops_training_and_keeps_the_checkpoint() {
    let model = llama();
    let mut broken = job(
        &model,
        "dp=2,zero=1,mbs=2",
        Numerics::Fast,
        Precision::Fp32,
        20,
    );
    broken.settings.optimizer.learning_rate = 1e30;
    let dir = tempfile::tempdir().expect("a temporary folder");
    let checkpoints = Checkpoints {
        dir: dir.path().to_owned(),
        every: 1,
    };
    let error = executor::train(&Session {
        checkpoints: Some(&checkpoints),
        ..session(&broken)
    })
    .expect_err("it diverges");
    let ExecutorError::Cpu(CpuError::NotFinite {
        operator,
        tensor,
        value,
        ..
    }) = &error
    else {
        panic!("{error}");
    };
    assert!(operator.contains('.') && !tensor.is_empty() && !value.is_finite());
    assert!(error.to_string().contains("tp: "), "{error}");
    let kept = executor::checkpoint::Checkpoint::open(dir.path()).expect("the step before");
    assert_eq!(kept.verify(), []);
}

#[test]
fn exact_mode_refuses_layouts_that_split_its_leaves() {
    // 32 tokens over 16 chunks leave 2 in each, half a leaf.
    let model = llama();
    let job = job(
        &model,
        "cp=8,cp_kind=ring,mbs=2",
        Numerics::Exact,
        Precision::Fp32,
        1,
    );
    let error = executor::train(&session(&job)).expect_err("misaligned");
    assert_eq!(
        error.to_string(),
        "exact mode reduces tokens of a sequence in blocks of 4; this layout splits the block at \
         index 0: use shards of a multiple of 4"
    );
}

#[test]
fn dropout_drawn_by_rank_is_not_that_of_one_device() {
    let model = nanogpt(0.1);
    let single = train(&job(&model, "mbs=4", Numerics::Exact, Precision::Fp32, 2));
    let mut by_rank = job(
        &model,
        "tp=2,sp=on,mbs=2",
        Numerics::Exact,
        Precision::Fp32,
        2,
    );
    assert_eq!(train(&by_rank).losses, single.losses);
    by_rank.settings.dropout_by_rank = true;
    assert_ne!(train(&by_rank).losses, single.losses);
}
