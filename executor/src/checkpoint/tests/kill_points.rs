//! Wherever a save, a replacement or a recovery dies, a complete checkpoint can be found afterwards.

use std::fs;
use std::path::Path;

use super::dying::{Dying, Fault};
use super::{last, names, save};
use crate::checkpoint::{Checkpoint, Store, latest};
use crate::error::ExecutorError;

/// The work of a process until it dies.
type Work = fn(&Store<'_>) -> Result<(), ExecutorError>;

/// Initial state, work, and the possible last checkpoints afterwards, as step and value.
struct Scenario {
    name: &'static str,
    before: Work,
    work: Work,
    may_be: &'static [(u64, f32)],
}

fn starts_and_saves(store: &Store<'_>) -> Result<(), ExecutorError> {
    store.recover()?;
    save(store, 4, 2.0)
}

const SCENARIOS: [Scenario; 5] = [
    Scenario {
        name: "the next step is saved",
        before: |store| save(store, 2, 1.0),
        work: starts_and_saves,
        may_be: &[(2, 1.0), (4, 2.0)],
    },
    Scenario {
        name: "a step is saved again",
        before: |store| {
            save(store, 2, 1.0)?;
            save(store, 4, 1.0)
        },
        work: starts_and_saves,
        may_be: &[(4, 1.0), (4, 2.0)],
    },
    Scenario {
        name: "the only step is saved again",
        before: |store| save(store, 4, 1.0),
        work: starts_and_saves,
        may_be: &[(4, 1.0), (4, 2.0)],
    },
    Scenario {
        name: "a step is saved beside what an interrupted save left",
        before: |store| {
            save(store, 2, 1.0)?;
            store.write_rank(4, 0, &super::half(0, 9.0)).map(drop)
        },
        work: starts_and_saves,
        may_be: &[(2, 1.0), (4, 2.0)],
    },
    Scenario {
        name: "a run starts after a kill between the two renames",
        before: |store| {
            save(store, 4, 1.0)?;
            store.set_aside(4);
            store.write_rank(4, 0, &super::half(0, 9.0)).map(drop)
        },
        work: |store| store.recover(),
        may_be: &[(4, 1.0)],
    },
];

/// Runs a scenario's work with a fault at one call; returns whether that call was reached.
fn dies(scenario: &Scenario, dir: &Path, fault: Fault, at: usize) -> bool {
    (scenario.before)(&Store::with(dir, &Dying::never())).expect("nothing fails");
    let files = Dying::new(dir, fault, at);
    let result = (scenario.work)(&Store::with(dir, &files));
    if !files.died() {
        result.expect("nothing failed");
        return false;
    }
    files.restart();
    true
}

fn check(scenario: &Scenario, dir: &Path, context: &str) {
    let name = scenario.name;
    let newest = latest(dir).expect("readable");
    assert!(newest.is_some(), "{name}, {context}: nothing is there");
    let found = last(dir);
    assert!(
        scenario.may_be.contains(&found),
        "{name}, {context}: {found:?}"
    );
}

/// Injects the fault at every call of a scenario in turn; returns how many calls there are.
fn every_call(scenario: &Scenario, fault: Fault) -> usize {
    for at in 0.. {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = folder.path();
        let context = format!("{fault:?} at call {at}");
        if !dies(scenario, dir, fault, at) {
            return at;
        }
        check(scenario, dir, &context);
        // The next run cleans up, and may be killed as well.
        for again in 0.. {
            let copy = tempfile::tempdir().expect("a temporary folder");
            copy_of(dir, copy.path());
            let files = Dying::new(copy.path(), Fault::Kill, again);
            let recovered = Store::with(copy.path(), &files).recover();
            check(
                scenario,
                copy.path(),
                &format!("{context}, then at {again}"),
            );
            if !files.died() {
                recovered.expect("in order");
                let names = names(copy.path());
                assert!(names.iter().all(|n| n.starts_with("step-")), "{names:?}");
                break;
            }
        }
    }
    unreachable!("a scenario ends")
}

fn copy_of(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).expect("a folder") {
        let path = entry.expect("an entry").path();
        let target = to.join(path.file_name().expect("a name"));
        if path.is_dir() {
            fs::create_dir(&target).expect("made");
            copy_of(&path, &target);
        } else {
            fs::copy(&path, &target).expect("copied");
        }
    }
}

#[test]
fn a_kill_at_any_call_loses_nothing() {
    for scenario in &SCENARIOS {
        let calls = every_call(scenario, Fault::Kill);
        // Five calls for each of two files and the manifest would be the least for a save.
        let least = if scenario.may_be.len() > 1 { 15 } else { 3 };
        assert!(calls >= least, "{}: {calls} calls", scenario.name);
    }
}

#[test]
fn a_power_cut_at_any_call_loses_nothing() {
    for scenario in &SCENARIOS {
        every_call(scenario, Fault::PowerCut);
    }
}

#[test]
fn a_disk_that_fills_up_at_any_call_loses_nothing_and_leaves_nothing() {
    for fault in [Fault::FullDisk, Fault::Once] {
        for scenario in &SCENARIOS {
            for at in 0.. {
                let folder = tempfile::tempdir().expect("a temporary folder");
                let dir = folder.path();
                if !dies(scenario, dir, fault, at) {
                    break;
                }
                check(scenario, dir, &format!("{fault:?} at call {at}"));
                let left = names(dir);
                if fault == Fault::FullDisk && scenario.may_be.len() > 1 {
                    let hidden = left.iter().any(|name| name.starts_with('.'));
                    assert!(!hidden, "{}, at {at}: {left:?}", scenario.name);
                }
            }
        }
    }
}

#[test]
fn a_rank_that_gives_up_while_another_completes_the_checkpoint_leaves_it_whole_or_unmade() {
    let (mut whole, mut unmade) = (0, 0);
    for at in 0.. {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dir = folder.path();
        save(&Store::new(dir), 2, 1.0).expect("saved");
        let files = Dying::new(dir, Fault::RankGivesUp { step: 4 }, at);
        let saved = save(&Store::with(dir, &files), 4, 2.0);
        assert_eq!(last(dir).0, if saved.is_ok() { 4 } else { 2 }, "call {at}");
        assert!(names(dir).iter().all(|name| !name.starts_with('.')));
        match saved {
            Ok(()) => whole += 1,
            Err(_) => unmade += 1,
        }
        if !files.died() {
            break;
        }
    }
    assert!(whole > 5 && unmade > 0, "{whole} whole, {unmade} unmade");
}

#[test]
fn a_checkpoint_that_was_set_aside_is_read_while_it_gets_its_name_back() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = Store::new(folder.path());
    save(&store, 4, 1.0).expect("saved");
    store.set_aside(4);
    let (checkpoint, _) = Checkpoint::open_whole(folder.path()).expect("whole");
    store.recover().expect("in order");
    assert_eq!(names(folder.path()), ["step-00000004"]);
    assert_eq!(checkpoint.verify(), []);
}

#[test]
fn a_link_in_the_way_is_not_followed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let dir = folder.path();
    let store = Store::new(dir);
    save(&store, 2, 1.0).expect("saved");
    let victim = dir.join("victim");
    fs::create_dir(&victim).expect("made");
    fs::write(victim.join("file"), "mine").expect("written");
    for end in ["partial", "sealed", "replaced"] {
        let planted = format!(".step-00000004.{end}");
        let link = dir.join(&planted);
        std::os::unix::fs::symlink(&victim, &link).expect("linked");
        store.recover().expect("in order");
        assert!(fs::symlink_metadata(&link).is_err(), "{planted} is removed");
        assert_eq!(names(&victim), ["file"]);
    }
    // One that comes after the run has started.
    let partial = dir.join(".step-00000004.partial");
    fs::create_dir(&partial).expect("made");
    let link = partial.join("rank-00000.bin");
    std::os::unix::fs::symlink(victim.join("file"), link).expect("linked");
    let error = save(&store, 4, 2.0).expect_err("something has the name");
    assert!(
        error.to_string().contains("rank-00000.bin: File exists"),
        "{error}"
    );
    assert_eq!(
        fs::read_to_string(victim.join("file")).expect("there"),
        "mine"
    );
    assert_eq!(last(dir), (2, 1.0));
    assert_eq!(names(dir), ["step-00000002", "victim"]);
}
