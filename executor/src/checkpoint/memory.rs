//! A job's states held in memory, from which a replanned job starts.

use std::collections::BTreeMap;

use super::piece::{Piece, Source, copy_common};
use crate::error::ExecutorError;

/// The pieces of all ranks, by parameter name.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    by_name: BTreeMap<String, Vec<Piece>>,
}

impl Memory {
    /// Adds a rank's pieces.
    pub fn add(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            self.by_name
                .entry(piece.name.clone())
                .or_default()
                .push(piece);
        }
    }

    /// Every parameter's global shape and full weights.
    #[must_use]
    pub fn weights(&self) -> BTreeMap<String, (Vec<u64>, Vec<f32>)> {
        self.whole(0)
    }

    /// Every parameter's full first moment.
    #[must_use]
    pub fn moments(&self) -> BTreeMap<String, Vec<f32>> {
        let whole = self.whole(1).into_iter();
        whole.map(|(name, (_, moment))| (name, moment)).collect()
    }

    fn whole(&self, which: usize) -> BTreeMap<String, (Vec<u64>, Vec<f32>)> {
        self.by_name
            .iter()
            .map(|(name, pieces)| {
                let global = pieces[0].global.clone();
                let mut whole = vec![0.0; global.iter().product::<u64>() as usize];
                for piece in pieces {
                    let mut at = 0;
                    for &[first, length] in &piece.runs {
                        let (first, length) = (first as usize, length as usize);
                        whole[first..first + length]
                            .copy_from_slice(&piece.data[which][at..at + length]);
                        at += length;
                    }
                }
                (name.clone(), (global, whole))
            })
            .collect()
    }
}

impl Source for Memory {
    fn read(
        &self,
        name: &str,
        _global: &[u64],
        first: u64,
        mut into: [&mut [f32]; 3],
    ) -> Result<(), ExecutorError> {
        let wanted = into[0].len();
        let mut copied = 0;
        for piece in self.by_name.get(name).into_iter().flatten() {
            let [a, b, c] = &piece.data;
            copied += copy_common(&piece.runs, [a, b, c], first, &mut into);
        }
        if copied < wanted {
            return Err(ExecutorError::Checkpoint {
                path: "memory".to_owned(),
                reason: format!("{name}: {copied} of {wanted} elements from {first} on"),
            });
        }
        Ok(())
    }
}
