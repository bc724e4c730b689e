//! Pieces of a checkpoint: the parts of its states that a rank saves, and the sources it loads them from.

use std::ops::Range;

use dtensor::train::{Slot, States};

use crate::device::Device;
use crate::error::ExecutorError;

/// Master weights, first moments and second moments of the same elements.
pub type Triple = [Vec<f32>; 3];

/// The elements of one parameter that one rank owns, with their states.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// Name in the model's `state_dict`.
    pub name: String,
    /// Global shape.
    pub global: Vec<u64>,
    /// First global linear index and length of every run of elements, in the order of `data`.
    pub runs: Vec<[u64; 2]>,
    /// Weights and moments of the elements.
    pub data: Triple,
}

/// Where states are loaded from.
pub trait Source: Sync {
    /// Fills `into` with the master weights and moments of `into[0].len()` elements of a parameter, from global index
    /// `first` on.
    ///
    /// # Errors
    /// When the parameter is missing, has another shape, or is damaged.
    fn read(
        &self,
        name: &str,
        global: &[u64],
        first: u64,
        into: [&mut [f32]; 3],
    ) -> Result<(), ExecutorError>;
}

/// The pieces of a stage that this rank must save, each saved by one rank only. A tied weight is saved by the first
/// stage; `skip` names it in the last.
pub(crate) fn pieces<D: Device>(
    device: &D,
    states: &States<D>,
    tp: u64,
    skip: Option<&str>,
) -> Result<Vec<Piece>, ExecutorError> {
    let mut pieces: Vec<Piece> = Vec::new();
    for slot in &states.slots {
        let Some((in_slot, here)) = states.own_part(slot) else {
            continue;
        };
        if !states.speaks_for(slot, tp) {
            continue;
        }
        let [master, momentum, variance] = states.own_states(slot.kind);
        let own = [
            device.read(master, here.clone())?,
            device.read(momentum, here.clone())?,
            device.read(variance, here)?,
        ];
        slot.runs(&in_slot, |expert, first, at| {
            let name = slot.name_of(expert);
            if skip == Some(name.as_str()) {
                return;
            }
            let place = at.start - in_slot.start..at.end - in_slot.start;
            let data = own.each_ref().map(|own| &own[place.clone()]);
            let run = [first, place.len() as u64];
            match pieces.last_mut().filter(|p| p.name == name) {
                Some(piece) => {
                    piece.runs.push(run);
                    for (all, more) in piece.data.iter_mut().zip(data) {
                        all.extend_from_slice(more);
                    }
                }
                None => pieces.push(Piece {
                    name,
                    global: slot.global.clone(),
                    runs: vec![run],
                    data: data.map(<[f32]>::to_vec),
                }),
            }
        });
    }
    Ok(pieces)
}

/// Loads a stage's states from a source.
pub(crate) fn load<D: Device>(
    device: &D,
    states: &mut States<D>,
    source: &dyn Source,
) -> Result<(), ExecutorError> {
    for at in 0..states.slots.len() {
        let slot = &states.slots[at];
        let Some((in_slot, here)) = states.own_part(slot) else {
            continue;
        };
        let kind = slot.kind;
        let read = read(slot, &in_slot, source)?;
        let own = states.own_states_mut(kind);
        for (own, read) in own.into_iter().zip(&read) {
            device.write(own, here.start, read)?;
        }
    }
    states.take_master(device)
}

/// Reads the master weights and moments of a range of a slot.
fn read(
    slot: &Slot,
    elements: &Range<usize>,
    source: &dyn Source,
) -> Result<Triple, ExecutorError> {
    let mut states = [(); 3].map(|()| vec![0.0; elements.len()]);
    let mut outcome = Ok(());
    slot.runs(elements, |expert, first, at| {
        let place = at.start - elements.start..at.end - elements.start;
        let into = states.each_mut().map(|all| &mut all[place.clone()]);
        if outcome.is_ok() {
            outcome = source.read(&slot.name_of(expert), &slot.global, first, into);
        }
    });
    outcome.map(|()| states)
}

/// Copies the elements that a piece's runs share with the wanted range; returns how many.
pub(super) fn copy_common(
    runs: &[[u64; 2]],
    data: [&[f32]; 3],
    first: u64,
    into: &mut [&mut [f32]; 3],
) -> usize {
    let end = first + into[0].len() as u64;
    let mut at = 0;
    let mut copied = 0;
    for &[start, length] in runs {
        let from = start.max(first);
        let to = (start + length).min(end);
        if from < to {
            let count = (to - from) as usize;
            let source = at + (from - start) as usize;
            let target = (from - first) as usize;
            for (into, data) in into.iter_mut().zip(data) {
                into[target..target + count].copy_from_slice(&data[source..source + count]);
            }
            copied += count;
        }
        at += length as usize;
    }
    copied
}
