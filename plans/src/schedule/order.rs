//! The order of actions on every rank.

use super::action::Action;

/// The passes of every rank, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Pipeline rank of every virtual stage, in model order.
    pub rank_of_stage: Vec<u32>,
    /// Actions of every pipeline rank, in order.
    pub ranks: Vec<Vec<Action>>,
}
