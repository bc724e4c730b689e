//! Model families, written once as single-device code over global tensors.

mod attention;
pub mod block;
mod decoder;
pub mod error;
mod modules;
pub mod names;
mod plan_section;
mod recurrent;
pub mod sharding;
pub mod stage;

use catalog::DType;
use catalog::model::ModelConfig;
use dtensor::{ParameterInfo, Tape, Trace};

pub use block::{BlockClass, BlockLayout};
pub use error::ModelError;
pub use plan_section::sharding_section;
pub use sharding::sharding_plan;

use modules::Block;

/// Traces one block on the meta device under a layout.
///
/// # Errors
/// When an operator has no rule for the placements that the layout leads to.
pub fn trace_block(
    model: &ModelConfig,
    class: BlockClass,
    layout: &BlockLayout,
) -> Result<Trace, ModelError> {
    let plan = sharding_plan(model, layout)?;
    let names = names::names(model);
    let mut tape = Tape::new(&plan, names.layer).freezing(model.adapters.is_some());
    let tokens = [layout.micro_batch, layout.seq_len, model.hidden];
    let mut block = Block {
        tape: &mut tape,
        model,
        names,
        dtype: layout.dtype,
    };
    let output = match class {
        BlockClass::Embedding => block.embedding(layout.micro_batch, layout.seq_len)?,
        BlockClass::Layer(class) => {
            let x = block.tape.input("input", &tokens, layout.dtype);
            block.layer(class, x)?
        }
        BlockClass::Head => {
            let x = block.tape.input("input", &tokens, layout.dtype);
            block.head(x)?
        }
        BlockClass::Mtp => {
            let x = block.tape.input("input", &tokens, layout.dtype);
            let last = model.layer_class(model.layers - 1);
            block.prediction_module(last, x)?
        }
    };
    let mut trace = tape.finish(&output)?;
    // Embedding and head stay in 16 bits, as with torchao's module filters for training.
    trace.eight_bits = layout.eight_bits && matches!(class, BlockClass::Layer(_) | BlockClass::Mtp);
    Ok(trace)
}

/// The blocks of a model in order; prediction modules come before the head.
#[must_use]
pub fn blocks(model: &ModelConfig) -> Vec<BlockClass> {
    let mut blocks = vec![BlockClass::Embedding];
    blocks.extend((0..model.layers).map(|i| BlockClass::Layer(model.layer_class(i))));
    blocks.extend((0..model.mtp_layers).map(|_| BlockClass::Mtp));
    blocks.push(BlockClass::Head);
    blocks
}

/// Every parameter of a model on one device. Names of repeated layers contain the layer's number; an expert parameter
/// is listed once, with the elements of all experts.
///
/// # Errors
/// When the model cannot run even on one device.
pub fn parameters(model: &ModelConfig) -> Result<Vec<ParameterInfo>, ModelError> {
    let mut all: Vec<ParameterInfo> = Vec::new();
    let mut layer = 0u64;
    for class in blocks(model) {
        let trace = trace_block(model, class, &BlockLayout::alone(1, 16, DType::Bf16))?;
        let numbered = matches!(class, BlockClass::Layer(_) | BlockClass::Mtp);
        for mut parameter in trace.parameters {
            parameter.name = parameter.name.replace("{layer}", &layer.to_string());
            // Tied weights, and the head that prediction modules share, are counted once.
            if !all
                .iter()
                .rev()
                .take(64)
                .chain(all.iter().take(8))
                .any(|p| p.name == parameter.name)
            {
                all.push(parameter);
            }
        }
        layer += u64::from(numbered);
    }
    Ok(all)
}

/// Number of a model's parameters as its publishers count them, with those of adapters; shared ones count once, prediction
/// modules do not count.
///
/// # Errors
/// When the model cannot run even on one device.
pub fn parameter_count(model: &ModelConfig) -> Result<u64, ModelError> {
    let main = ModelConfig {
        mtp_layers: 0,
        ..model.clone()
    };
    Ok(trained_and_frozen(&main)?.iter().sum())
}

/// Numbers of parameters, `[trained, frozen]`, that training holds: with those of adapters and of prediction modules; shared
/// ones count once.
///
/// # Errors
/// When the model cannot run even on one device.
pub fn trained_and_frozen(model: &ModelConfig) -> Result<[u64; 2], ModelError> {
    let mut counts = [0; 2];
    for parameter in parameters(model)? {
        counts[usize::from(!parameter.trained)] += parameter.global_elements;
    }
    Ok(counts)
}
