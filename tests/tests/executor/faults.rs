//! Every rank reports what went wrong, and nothing that was saved is lost.

use std::time::Duration;

use catalog::Precision;
use comm::{CommError, Communicator, Group, Message, local};
use cpu_device::Numerics;
use cpu_device::WatchError;
use executor::device::Cores;
use executor::{Checkpoints, Session};

use super::jobs::{job, llama, nanogpt, session, train};

/// One CPU thread for each rank.
const ONE: Cores = Cores { threads: 1 };

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
    let checkpoints = Checkpoints::of(&broken, dir.path(), 1);
    let error = executor::train(&Session {
        checkpoints: Some(&checkpoints),
        ..session(&broken)
    })
    .expect_err("it diverges");
    let Some(WatchError::NotFinite {
        operator,
        tensor,
        value,
        ..
    }) = error.watched()
    else {
        panic!("{error}");
    };
    assert!(operator.contains('.') && !tensor.is_empty() && !value.is_finite());
    assert!(error.to_string().contains("tp: "), "{error}");
    let kept = executor::checkpoint::Checkpoint::open(dir.path()).expect("the step before");
    assert_eq!(kept.verify(), []);
}

/// Plants a symbolic link in place of the first file of the second checkpoint.
#[cfg(target_os = "linux")]
struct Planted(std::path::PathBuf);

#[cfg(target_os = "linux")]
impl executor::Observer for Planted {
    fn step(&self, report: &executor::StepReport) {
        if report.step == 1 {
            let folder = self.0.join(".step-00000002.partial");
            std::fs::create_dir_all(&folder).expect("writable");
            let file = folder.join("rank-00000.bin");
            std::os::unix::fs::symlink(self.0.join("victim"), file).expect("writable");
        }
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_save_that_fails_leaves_the_checkpoint_before_and_nothing_else() {
    let model = llama();
    let trained = job(
        &model,
        "dp=2,zero=1,mbs=2",
        Numerics::Fast,
        Precision::Fp32,
        3,
    );
    let dir = tempfile::tempdir().expect("a temporary folder");
    let checkpoints = Checkpoints::of(&trained, dir.path(), 1);
    let planted = Planted(dir.path().to_owned());
    let error = executor::train(&Session {
        checkpoints: Some(&checkpoints),
        observer: &planted,
        ..session(&trained)
    })
    .expect_err("a link is not followed");
    let text = error.to_string();
    assert!(
        text.contains("rank-00000") && text.contains("File exists"),
        "{text}"
    );
    let kept = executor::checkpoint::Checkpoint::open(dir.path()).expect("the step before");
    assert_eq!((kept.manifest.step, kept.verify()), (1, vec![]));
    let entries = std::fs::read_dir(dir.path()).expect("a folder");
    assert_eq!(entries.count(), 1);
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
    // Which rank finds its first split leaf first is a race. All errors differ only in the place.
    let text = error.to_string();
    assert!(
        text.starts_with(
            "exact mode reduces tokens of a sequence in blocks of 4; this layout cuts the 32 of them at "
        ) && text.contains(", inside a block; expected shards of a multiple of 4"),
        "{text}"
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

/// Runs a world of ranks, each with its own job; returns their errors.
fn processes(jobs: &[executor::Job]) -> Vec<String> {
    let world = local::world(jobs.len(), Duration::from_secs(30));
    std::thread::scope(|scope| {
        let ranks: Vec<_> = world
            .iter()
            .zip(jobs)
            .map(|(comm, job)| scope.spawn(|| executor::train_rank(&ONE, &session(job), comm)))
            .collect();
        ranks
            .into_iter()
            .map(|rank| match rank.join().expect("no panic") {
                Ok(_) => "trained".to_owned(),
                Err(error) => error.to_string(),
            })
            .collect()
    })
}

#[test]
fn ranks_with_different_jobs_are_named_on_every_rank() {
    let model = llama();
    let of = |steps| {
        job(
            &model,
            "dp=2,zero=1,mbs=2",
            Numerics::Fast,
            Precision::Fp32,
            steps,
        )
    };
    let said = processes(&[of(2), of(3)]);
    for (rank, text) in said.iter().enumerate() {
        let peer = 1 - rank;
        // The rank that notices later may report the other's error.
        let own = format!("rank {rank} has another settings than rank {peer}");
        let heard = format!("because rank {peer} failed: rank {peer} has another settings");
        assert!(text.contains(&own) || text.contains(&heard), "{text}");
    }
    let other = job(
        &model,
        "tp=2,sp=on,mbs=2",
        Numerics::Fast,
        Precision::Fp32,
        2,
    );
    let said = processes(&[of(2), other]);
    assert!(
        said.iter().all(|text| text.contains("another strategy")),
        "{said:?}"
    );
}

#[test]
fn another_number_of_ranks_than_planned_is_said_on_every_rank() {
    let model = llama();
    let of = || {
        job(
            &model,
            "dp=4,zero=1,mbs=2",
            Numerics::Fast,
            Precision::Fp32,
            2,
        )
    };
    for text in processes(&[of(), of()]) {
        assert_eq!(text, "the plan has 4 ranks, 2 were started");
    }
}

#[test]
fn processes_train_what_threads_do() {
    let model = nanogpt(0.1);
    let of = || {
        job(
            &model,
            "dp=2,zero=2,tp=2,sp=on,mbs=2",
            Numerics::Exact,
            Precision::Fp32,
            3,
        )
    };
    let world = local::world(4, Duration::from_secs(30));
    let of = &of;
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let ranks: Vec<_> = world
            .iter()
            .map(|comm| scope.spawn(move || executor::train_rank(&ONE, &session(&of()), comm)))
            .collect();
        ranks
            .into_iter()
            .filter_map(|rank| rank.join().expect("no panic").expect("trains"))
            .collect()
    });
    let threads = train(&of());
    assert_eq!(outcomes.len(), 1);
    assert_eq!(outcomes[0].weights_sha256(), threads.weights_sha256());
    assert_eq!(outcomes[0].losses, threads.losses);
}
