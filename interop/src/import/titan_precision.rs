//! The precision of a torchtitan configuration: its mixed precision, and what converters change.

use catalog::{Fp8Recipe, Precision};

use super::document::Document;
use super::error::ImportError;
use super::unplanned::in_16_bits;
use crate::config::{Node, Value, place};
use crate::export::Dialect;
use crate::export::torchtitan::RECIPE;

/// What a converter changes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Converter {
    /// Products of 8-bit numbers with a scale for a tensor or for each row.
    Float8,
    /// Products of microscaled 8-bit numbers.
    Mx,
    /// Products of 4-bit numbers.
    Nvfp4,
    /// Which weights are trained.
    Lora,
    /// Something else.
    Other,
}

impl Converter {
    /// The converter of a name in a TOML file, or of a class in Python.
    fn named(name: &str) -> Self {
        let name = name.to_lowercase();
        let has = |part: &str| name.contains(part);
        match () {
            () if has("nvfp4") => Self::Nvfp4,
            () if has("float8") => Self::Float8,
            () if has("mxfp8") || name.starts_with("quantize.") && name.ends_with(".mx") => {
                Self::Mx
            }
            () if has("lora") => Self::Lora,
            () => Self::Other,
        }
    }
}

/// The converters of a file, each with its line and name. In Python they are an argument of the model, or a list by name.
fn converters(doc: &Document) -> Vec<(usize, &str, Converter)> {
    let keys = ["model_spec.converters", "model.converters", "converters"];
    let found = keys.into_iter().find_map(|key| doc.find(key));
    let list = match found.map(|node| &node.value) {
        Some(Value::Expression(name)) => doc.root.get(name.trim()),
        _ => found,
    };
    let mut all = Vec::new();
    for node in list.and_then(Node::list).unwrap_or_default() {
        if let Value::Str(name) | Value::Call(name, _) = &node.value {
            all.push((node.line, name.as_str(), Converter::named(name)));
        }
    }
    all
}

/// Notes on what no plan expresses: 16-bit weights, an optimizer that updates weights within backward, and converters other than
/// those to FP8.
///
/// # Errors
/// For adapters, with which only a part of the weights is trained.
pub(super) fn unplanned(doc: &Document) -> Result<Vec<String>, ImportError> {
    let dtype = "training.dtype";
    let mut notes = Vec::new();
    if doc.text(dtype)? == Some("bfloat16") {
        notes.push(in_16_bits(doc, dtype, "bfloat16"));
    }
    let in_backward = "optimizer.early_step_in_backward";
    if doc.on(in_backward)? {
        notes.push(doc.note(
            in_backward,
            format!(
                "{in_backward} = true: not planned for; the prediction shows more memory, with the gradients of all weights held until the \
                 optimizer's step"
            ),
        ));
    }
    for (line, name, converter) in converters(doc) {
        let place = place(&doc.path, line);
        match converter {
            Converter::Float8 | Converter::Mx => {}
            Converter::Nvfp4 => notes.push(format!(
                "{place}: {name}: not planned for; the prediction shows more time, with products in 16 bits"
            )),
            Converter::Lora => {
                let why =
                    "adapters are not read from torchtitan's files; import a file without them";
                return Err(ImportError::value(place, name, why));
            }
            Converter::Other => notes.push(format!(
                "{place}: {name}: not planned for; the prediction is for the model without it"
            )),
        }
    }
    Ok(notes)
}

/// The FP8 recipe; `None` if the job does not train in FP8. 0.2 scales by tensor unless the file
/// says otherwise, later editions by row.
pub(super) fn fp8_recipe(doc: &Document) -> Result<Option<Fp8Recipe>, ImportError> {
    if precision(doc)? != Precision::Fp8 {
        return Ok(None);
    }
    if converters(doc)
        .iter()
        .any(|(_, _, of)| *of == Converter::Mx)
    {
        return Ok(Some(Fp8Recipe::Mxfp8));
    }
    if doc.dialect != Dialect::Torchtitan02 {
        return Ok(Some(Fp8Recipe::Rowwise));
    }
    match doc.text(RECIPE)? {
        None | Some("tensorwise") => Ok(Some(Fp8Recipe::Tensorwise)),
        Some("rowwise") => Ok(Some(Fp8Recipe::Rowwise)),
        Some("rowwise_with_gw_hp") => Err(doc.unsupported(
            RECIPE,
            "gradients of weights in 16 bits beside 8-bit products are not planned",
        )),
        Some(_) => Err(doc.wrong(RECIPE, "tensorwise or rowwise")),
    }
}

/// The precision of linear layers.
pub(super) fn precision(doc: &Document) -> Result<Precision, ImportError> {
    let eight =
        |(_, _, of): &(usize, &str, Converter)| matches!(of, Converter::Float8 | Converter::Mx);
    // Before February 2025, FP8 had a switch of its own.
    let switched = doc.on("float8.enable_float8_linear")?;
    if switched || converters(doc).iter().any(eight) {
        return Ok(Precision::Fp8);
    }
    let compute = doc
        .text("training.mixed_precision_param")?
        .unwrap_or("bfloat16");
    Ok(if compute == "float32" {
        Precision::Fp32
    } else {
        Precision::Bf16
    })
}
