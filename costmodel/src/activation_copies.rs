//! When activations are copied to host memory and back, in a pass over the layers of a stage.
//!
//! Transformer Engine (`cpu_offload.py`, `AsyncDoubleBufferGroupOffloadHandler`) offloads what the
//! first layers save. Each copy has a window of several layers, at whose end compute waits for it,
//! its memory is freed and the next copy starts. Backward goes through the windows in reverse.

use catalog::Seconds;

use crate::picoseconds::Picoseconds;
use crate::streams::{Stream, Streams};

/// The layers of a stage whose saved activations are copied.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ActivationCopies {
    /// Number of layers of the stage.
    pub layers: u64,
    /// Number of layers that are copied: the first ones of the stage.
    pub copied: u64,
    /// Time of one layer's copy, in either direction.
    pub time: Seconds,
}

/// A pass that copies activations, and how many of its copies are done so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copying {
    of: ActivationCopies,
    done: u64,
}

impl ActivationCopies {
    /// Whether no layer is copied.
    pub(crate) fn is_none(&self) -> bool {
        self.copied == 0
    }

    /// Starts a pass, with none of its copies done.
    pub(crate) fn begin(self) -> Copying {
        Copying { of: self, done: 0 }
    }

    /// The last layer of the window in which the activations of `layer` are copied.
    fn window_end(&self, layer: u64) -> u64 {
        let (width, rest) = (self.layers / self.copied, self.layers % self.copied);
        width * (layer + 1) - 1 + rest.min(layer + 1)
    }
}

impl Copying {
    /// After a layer's forward: waits for the copy whose window ends here, and starts the next.
    pub(crate) fn after_forward(&mut self, layer: u64, streams: &mut Streams) {
        if layer == 0 {
            self.copy(Stream::ToHost, streams);
        }
        if self.done < self.of.copied && self.of.window_end(self.done) == layer {
            streams.join(Stream::ToHost);
            self.done += 1;
            if self.done < self.of.copied {
                self.copy(Stream::ToHost, streams);
            }
        }
    }

    /// Before the backward of a layer: if a window ends here, waits for a copy and starts the next.
    pub(crate) fn before_backward(&mut self, layer: u64, streams: &mut Streams) {
        let left = self.of.copied - self.done;
        if left > 0 && self.of.window_end(left - 1) == layer {
            streams.join(Stream::FromHost);
            self.copy(Stream::FromHost, streams);
            self.done += 1;
            if left - 1 == layer {
                streams.join(Stream::FromHost);
            }
        }
        if layer == 0 {
            streams.join(Stream::FromHost);
        }
    }

    fn copy(&self, stream: Stream, streams: &mut Streams) {
        let ready = streams.end(Stream::Compute);
        streams.issue(stream, Picoseconds::from(self.of.time), Some(ready));
    }
}
