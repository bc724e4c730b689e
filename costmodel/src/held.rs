//! Memory held between actions, without prices: states, and activations from forward to backward.

use plans::ActionKind;
use plans::program::Program;
use spec::Bytes;

use crate::assemble::Assembled;
use crate::states::StateBytes;

/// What a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// For the whole step.
    pub states: StateBytes,
    /// Kept for backward: the most at the end of any action.
    pub peak_saved: Bytes,
}

/// What every pipeline rank holds over a program.
pub(crate) fn held(assembled: &Assembled, program: &Program) -> Vec<Held> {
    let peak = |actions: &[plans::Action]| {
        let mut now = Bytes(0);
        let mut most = Bytes(0);
        for action in actions {
            let stage = &assembled.stages[action.stage as usize];
            match action.kind {
                ActionKind::F => now += stage.saved,
                ActionKind::B => now -= stage.saved,
                ActionKind::I => {
                    now += stage.saved_for_weight;
                    now -= stage.saved;
                }
                ActionKind::W => now -= stage.saved_for_weight,
                _ => {}
            }
            most = most.max(now);
        }
        most
    };
    program
        .ranks
        .iter()
        .zip(&assembled.states)
        .map(|(actions, &states)| Held {
            states,
            peak_saved: peak(actions),
        })
        .collect()
}
