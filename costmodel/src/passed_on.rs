//! What pipeline stages hold of the tensors that they receive and pass on.
//!
//! PyTorch's stages (`torch/distributed/pipelining/stage.py`) receive into buffers that they make for all micro-batches at once. A
//! stage's input is then no memory of its own: what backward needs of it lies in the buffer.

use catalog::Bytes;
use catalog::runtime::Rewrite;
use models::BlockClass;
use plans::Decisions;

use crate::Scenario;
use crate::stage::{PassedOn, Run, StageWork};

/// Adds what a stage holds of its inputs and outputs to its memory. It is the first stage, the last one, or both, as `ends` says; an
/// activation that stages send has `sent` bytes.
pub(crate) fn hold(
    scenario: &Scenario,
    d: &Decisions,
    ends: [bool; 2],
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
    let until_end = does(Rewrite::KeepPassedOn);
    if until_end || does(Rewrite::BufferMicroBatches) && d.vpp > 1 {
        let returned = match until_end && ends[1] {
            true => logits(scenario, d, runs),
            false => Bytes(0),
        };
        work.passed_on.after_forward = output + returned;
        work.passed_on.after_backward = input;
    } else if does(Rewrite::KeepStageOutput) {
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
