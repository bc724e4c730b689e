//! Tests of saving, replacing and recovering with a kill or a full disk at every call.

mod dying;
mod kill_points;

use std::path::Path;

use super::{Checkpoint, Manifest, Piece, Source, Store};
use crate::error::ExecutorError;

/// Elements of the one parameter.
const ELEMENTS: u64 = 40;
/// Ranks that hold a half each.
const RANKS: u64 = 2;

/// A rank's half of the parameter, all of one value.
fn half(rank: u64, value: f32) -> Vec<Piece> {
    let own = ELEMENTS / RANKS;
    vec![Piece {
        name: "weight".to_owned(),
        global: vec![ELEMENTS],
        runs: vec![[rank * own, own]],
        data: [(); 3].map(|()| vec![value; own as usize]),
    }]
}

/// Saves as ranks do.
fn save(store: &Store<'_>, step: u64, value: f32) -> Result<(), ExecutorError> {
    let written = (0..RANKS)
        .map(|rank| store.write_rank(step, rank as usize, &half(rank, value)))
        .collect::<Result<Vec<_>, _>>();
    let finished = written.and_then(|written| {
        let parameters = written.iter().flat_map(|w| w.parameters.clone()).collect();
        let files = written.into_iter().map(|w| w.file).collect();
        let names = ("model".to_owned(), "dp=2".to_owned());
        store.finish(&Manifest::new((step, 1), names, None, (files, parameters)))
    });
    if finished.is_err() {
        store.abandon(step, None);
    }
    finished.map(drop)
}

/// The step and the value of the last checkpoint, which must be whole.
fn last(dir: &Path) -> (u64, f32) {
    let (checkpoint, damaged) = Checkpoint::open_whole(dir).expect("a whole checkpoint");
    assert_eq!(damaged, []);
    let mut states = [(); 3].map(|()| vec![f32::NAN; ELEMENTS as usize]);
    let into = states.each_mut().map(Vec::as_mut_slice);
    let read = checkpoint.read("weight", &[ELEMENTS], 0, into);
    read.expect("all of the parameter");
    let value = states[0][0];
    assert!(states.iter().flatten().all(|&v| v == value), "{states:?}");
    (checkpoint.manifest.step, value)
}

/// Names in a folder.
fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("a folder");
    let name = |e: std::io::Result<std::fs::DirEntry>| e.expect("an entry").file_name();
    let mut names: Vec<_> = entries
        .map(|e| name(e).to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
