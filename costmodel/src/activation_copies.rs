//! When activations are copied to host memory and back, in a pass over the layers of a stage.
//!
//! Transformer Engine (`cpu_offload.py`, `AsyncDoubleBufferGroupOffloadHandler`) offloads what the first layers save for
//! backward. The copies are spread over all layers: each has a window of so many layers, at whose end compute waits for it, its
//! memory is freed, and the next copy starts. Backward goes through the windows in reverse.

use catalog::Seconds;

use crate::picoseconds::Picoseconds;
use crate::streams::{Stream, Streams};

/// The layers of a stage whose saved activations are copied.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ActivationCopies {
    /// Number of layers of the stage.
    pub layers: u64,
    /// How many of them, the first, are copied.
    pub copied: u64,
    /// Time of one layer's copy, in either direction.
    pub time: Seconds,
}

/// A pass, with the copies that are done so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copying {
    of: ActivationCopies,
    done: u64,
}

impl ActivationCopies {
    /// Whether there are none.
    pub(crate) fn is_none(&self) -> bool {
        self.copied == 0
    }

    /// The copies of a pass that begins.
    pub(crate) fn begin(self) -> Copying {
        Copying { of: self, done: 0 }
    }

    /// The last layer of the window of a layer's copy.
    fn window_end(&self, layer: u64) -> u64 {
        let (width, rest) = (self.layers / self.copied, self.layers % self.copied);
        width * (layer + 1) - 1 + rest.min(layer + 1)
    }
}

impl Copying {
    /// After the forward of a layer.
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

    /// Before the backward of a layer.
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
