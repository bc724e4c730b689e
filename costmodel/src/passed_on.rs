//! What pipeline stages hold of the tensors that they receive and pass on.
//!
//! PyTorch's stages (`torch/distributed/pipelining/stage.py`) allocate one buffer for the input of every micro-batch, all before the first
//! step. A stage that keeps its input for backward then needs no more memory for it: the input stays in its buffer.

use catalog::Bytes;
use catalog::runtime::Rewrite;
use models::BlockClass;
use plans::Decisions;

use crate::Scenario;
use crate::stage::{PassedOn, Run, StageWork};

/// Where a stage lies in the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    /// Whether it is the first stage, and whether it is the last.
    pub(crate) ends: [bool; 2],
    /// Whether the stage before it is on the same rank, and whether the stage after it is. Stages on one rank send each other nothing: the
    /// tensor itself takes the place of the receiver's buffer (PyTorch 2.15, `stage.py`, `set_local_fwd_input`, `set_local_bwd_input`).
    pub(crate) on_one_rank: [bool; 2],
}

/// Whether stages hold the tensors that they have sent until the step ends.
fn until_end(scenario: &Scenario, d: &Decisions) -> bool {
    let does = |rewrite| scenario.runtime.rewrites.contains(&rewrite);
    does(Rewrite::KeepPassedOn) || does(Rewrite::BufferMicroBatches) && d.vpp > 1
}

/// Whether a stage holds its output from forward to backward, and not longer.
pub(crate) fn keeps_output(scenario: &Scenario, d: &Decisions) -> bool {
    let keeps = (scenario.runtime.rewrites).contains(&Rewrite::KeepStageOutput);
    d.pp > 1 && keeps && !until_end(scenario, d)
}

/// Adds to a stage's memory the buffers that it receives into, and the tensors that it holds after it has sent them. A tensor that stages
/// send each other has `sent` bytes.
pub(crate) fn hold(
    scenario: &Scenario,
    d: &Decisions,
    Position { ends, on_one_rank }: Position,
    sent: Bytes,
    runs: &[Run],
    work: &mut StageWork,
) {
    if d.pp == 1 {
        return;
    }
    let does = |rewrite| scenario.runtime.rewrites.contains(&rewrite);
    let [input, output] = ends.map(|is_end| if is_end { Bytes(0) } else { sent });
    if does(Rewrite::BufferMicroBatches) {
        work.passed_on = PassedOn {
            buffers: (input + output) * d.num_micro_batches,
            input,
            ..PassedOn::default()
        };
    }
    if until_end(scenario, d) {
        let returned = match does(Rewrite::KeepPassedOn) && ends[1] {
            true => logits(scenario, d, runs),
            false => Bytes(0),
        };
        let of_sent = |bytes, local| if local { Bytes(0) } else { bytes };
        work.passed_on.after_forward = of_sent(output, on_one_rank[1]) + returned;
        work.passed_on.after_backward = of_sent(input, on_one_rank[0]);
    } else if keeps_output(scenario, d) {
        work.saved += runs.last().map_or(Bytes(0), |run| run.cost.output);
    }
}

/// Bytes of a rank's part of a micro-batch's logits.
fn logits(scenario: &Scenario, d: &Decisions, runs: &[Run]) -> Bytes {
    let is_head = |run: &Run| run.cost.key.class == BlockClass::Head;
    if !runs.iter().any(is_head) {
        return Bytes(0);
    }
    let whole = scenario
        .runtime
        .rewrites
        .contains(&Rewrite::WholeVocabulary);
    let ranks = if whole { 1 } else { d.tp };
    let vocabulary = dtensor::placement::chunk_size(scenario.model.vocab, ranks);
    let workload = &scenario.workload;
    let tokens = d.micro_batch * workload.seq_len / d.cp;
    Bytes(tokens * vocabulary * workload.precision.activation().size())
}
