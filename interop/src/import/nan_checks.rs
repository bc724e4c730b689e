//! Checks of losses and gradients for NaN and Inf, which Megatron-LM and Megatron Bridge make unless a file switches them off.
//! No prediction counts them, so a note says what they cost.

use super::bridge_recipe::value;
use super::document::Document;
use super::error::ImportError;
use crate::config::Value;
use crate::export::bridge::CHECKS;
use crate::export::megatron::NO_CHECKS;

/// What a check of losses costs (`loss_func` in Megatron-LM's pretrain_gpt.py).
const OF_LOSS: &str = "the host waits for the loss of every micro-batch";
/// What a check of gradients costs (`check_grads` in Megatron-Core's distributed/param_and_grad_buffer.py). The time is that of
/// reading 32 GB at nine tenths of an H100's 3.35 TB/s.
const OF_GRADIENTS: &str = "every step reads all gradients once more, about 11 ms for 8 billion parameters on an H100, and the host waits for every \
     bucket of them";

/// The note on checks that a script of Megatron-LM leaves on; `None` if there are none.
pub(super) fn of_script(doc: &Document) -> Result<Option<String>, ImportError> {
    // Where Megatron-LM adapts the scale of losses, they overflow now and then: it makes no checks (arguments.py:1201).
    let adapts = doc.on("--fp16")? && doc.find("--loss-scale").is_none();
    // It refuses to capture whole steps together with the checks (arguments.py:1235), which another note says.
    let refuses = doc
        .text("--cuda-graph-impl")?
        .is_some_and(|of| of == "full_iteration");
    if doc.on(NO_CHECKS)? || adapts || refuses {
        return Ok(None);
    }
    // FSDP checks no gradients that are sharded or reduced beside backward (`start_grad_sync` in Megatron-Core's
    // distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py).
    let fsdp = doc.on("--use-megatron-fsdp")? || doc.on("--use-torch-fsdp2")?;
    let costs = [Some(OF_LOSS), (!fsdp).then_some(OF_GRADIENTS)];
    let costs: Vec<&str> = costs.into_iter().flatten().collect();
    Ok(Some(note(doc, NO_CHECKS, &costs)))
}

/// The note on checks that a recipe of Megatron Bridge leaves on; `None` if there are none.
pub(super) fn of_recipe(doc: &Document) -> Result<Option<String>, ImportError> {
    let fsdp = doc.on("ddp.use_megatron_fsdp")?;
    let [loss, gradients] = CHECKS;
    let checks = [(loss, OF_LOSS, true), (gradients, OF_GRADIENTS, !fsdp)];
    // Every base of recipes has both on (recipes/common.py, `RerunStateMachineConfig`).
    let on = |field| value(doc, field).is_none_or(|node| node.value != Value::Bool(false));
    let on = checks.iter().filter(|(field, _, made)| *made && on(field));
    let (off, costs): (Vec<String>, Vec<&str>) = on
        .map(|(field, cost, _)| (format!("{field} = False"), *cost))
        .unzip();
    Ok((!off.is_empty()).then(|| note(doc, &off.join(" and "), &costs)))
}

/// A note on checks that are on, which `off` would switch off.
fn note(doc: &Document, off: &str, costs: &[&str]) -> String {
    let (path, costs) = (&doc.path, costs.join(", and "));
    format!(
        "{path}: the plan assumes {off}, which the file does not set: training then checks for NaN and Inf, which takes longer: {costs}"
    )
}
