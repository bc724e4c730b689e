//! One rank's part of a training step, on any device: when which buffers of parameters, gradients, optimizer states,
//! activations and messages exist. An executor runs it on data; [`Counting`] runs it on sizes, which is how memory is
//! predicted.

mod block;
mod buckets;
mod counting;
mod device;
mod partition;
mod reduce;
mod slot;
mod stage;
mod stages;
mod states;

pub use counting::{Counting, Tokens};
pub use device::{Device, FlatStates, Gradients, Passing, Run};
pub use partition::{Sharing, StatesPlan};
pub use slot::{Kind, Slot, Start};
pub use stage::{Backward, Made, Routed, Stage};
pub use stages::{Plan, Stages};
pub use states::{OwnPart, StateBytes, States};
