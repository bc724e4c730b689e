//! Weights in the Hugging Face hub's format: `.safetensors` files whose tensors have `state_dict` names.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::files::read_bounded;
use super::open::{Checkpoint, ParameterEntry};
use super::piece::Source;
use super::problem::{Problem, wrong};
use crate::error::ExecutorError;

/// Weights of a downloaded model; as a source its optimizer moments are zero.
pub struct HubWeights {
    path: PathBuf,
    tensors: BTreeMap<String, Held>,
}

/// A tensor as the file stores it.
struct Held {
    shape: Vec<u64>,
    dtype: Dtype,
    bytes: Vec<u8>,
}

/// Where a parameter's elements lie in the files.
struct Place {
    /// Name of the tensor in the files.
    tensor: String,
    /// The tensor's shape; for a tensor of all experts, the shape of one expert.
    shape: Vec<u64>,
    /// Index of the expert within the tensor; `None` if the tensor does not hold all experts.
    expert: Option<u64>,
    /// Index of the parameter's first element within that shape.
    first: u64,
    /// Strides of the parameter's dims within that shape.
    strides: Vec<u64>,
}

impl Place {
    /// GPT-2's projections are stored as `[in, out]`, every other model's as `[out, in]`. gpt-oss and Llama 4 have one
    /// tensor for all experts, `[experts, in, out]`: gate and up columns alternate in gpt-oss's, the up columns follow
    /// all gate columns in Llama 4's.
    fn of(name: &str, global: &[u64]) -> Self {
        if let Some(place) = Self::among_experts(name, global) {
            return place;
        }
        let turned = models::names::is_stored_turned(name);
        let (shape, strides) = match *global {
            [rows, columns] if turned => (vec![columns, rows], vec![1, rows]),
            [rows, columns] => (vec![rows, columns], vec![columns, 1]),
            [columns] if models::names::is_stored_as_row(name) => (vec![1, columns], vec![1]),
            _ => (global.to_vec(), vec![1]),
        };
        Self {
            tensor: name.to_owned(),
            shape,
            expert: None,
            first: 0,
            strides,
        }
    }

    fn among_experts(name: &str, global: &[u64]) -> Option<Self> {
        let (module, rest) = name.split_once(".experts.")?;
        let mut parts = rest.split('.');
        let tensor = parts.next()?;
        let expert = parts.next()?.parse().ok()?;
        let own = *global.first()?;
        // Distance from one of the parameter's columns to the next, the first of them, and all columns.
        let (every, first, out) = match (tensor, parts.clone().next()?) {
            ("gate_up_proj", "gate") => (2, 0, 2 * own),
            ("gate_up_proj", "up") => (2, 1, 2 * own),
            ("gate_up_proj", "gate_half") => (1, 0, 2 * own),
            ("gate_up_proj", "up_half") => (1, own, 2 * own),
            ("down_proj", _) => (1, 0, own),
            _ => return None,
        };
        if tensor == "gate_up_proj" {
            parts.next();
        }
        let (shape, strides, bias) = match (parts.next()?, global) {
            ("weight", &[_, inner]) => (vec![inner, out], vec![every, out], ""),
            ("bias", &[_]) => (vec![out], vec![every], "_bias"),
            _ => return None,
        };
        Some(Self {
            tensor: format!("{module}.experts.{tensor}{bias}"),
            shape,
            expert: Some(expert),
            first,
            strides,
        })
    }

    /// Index in the tensor of a parameter's element `index`.
    fn at(&self, index: u64, global: &[u64]) -> u64 {
        let before = self.expert.unwrap_or(0) * self.shape.iter().product::<u64>();
        let inside = match (global, &self.strides[..]) {
            (&[_, columns], &[row, column]) => index / columns * row + index % columns * column,
            (_, strides) => index * strides[0],
        };
        before + self.first + inside
    }
}

impl HubWeights {
    /// Opens a `.safetensors` file, or all of them in a folder.
    ///
    /// # Errors
    /// When there is none, or one is malformed.
    pub fn open(path: &Path) -> Result<Self, ExecutorError> {
        let files: Vec<PathBuf> = if path.is_dir() {
            let entries = std::fs::read_dir(path).map_err(|e| wrong(path, e.to_string()))?;
            entries
                .filter_map(|e| Some(e.ok()?.path()))
                .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
                .collect()
        } else {
            vec![path.to_owned()]
        };
        if files.is_empty() {
            return Err(wrong(path, "holds no .safetensors file".to_owned()));
        }
        let mut tensors = BTreeMap::new();
        for file in files {
            let bytes = read_bounded(&file, u64::MAX)?;
            let parsed =
                SafeTensors::deserialize(&bytes).map_err(|e| wrong(&file, e.to_string()))?;
            for (name, view) in parsed.tensors() {
                tensors.insert(name, Held::new(&view));
            }
        }
        Ok(Self {
            path: path.to_owned(),
            tensors,
        })
    }

    /// A tensor by name. Files of a model without its head (GPT-2's, BLOOM's, OPT's) leave out the first part of
    /// names, such as `transformer.`; those of a multimodal model (Llama 4's) have one more; tied heads are not stored.
    fn find(&self, name: &str) -> Option<&Held> {
        let bare = name.split_once('.').map_or(name, |(_, bare)| bare);
        let of_text = format!("language_model.{name}");
        let names = [name, bare, &of_text];
        names.iter().find_map(|&name| self.tensors.get(name))
    }
}

impl Held {
    fn new(view: &TensorView<'_>) -> Self {
        Self {
            shape: view.shape().iter().map(|&d| d as u64).collect(),
            dtype: view.dtype(),
            bytes: view.data().to_vec(),
        }
    }

    fn at(&self, index: u64) -> Option<f32> {
        let i = index as usize;
        let two = || Some([*self.bytes.get(2 * i)?, *self.bytes.get(2 * i + 1)?]);
        match self.dtype {
            Dtype::F32 => {
                let bytes = self.bytes.get(4 * i..4 * i + 4)?;
                Some(f32::from_le_bytes(bytes.try_into().ok()?))
            }
            Dtype::BF16 => two().map(|b| bf16::from_le_bytes(b).to_f32()),
            Dtype::F16 => two().map(|b| f16::from_le_bytes(b).to_f32()),
            _ => None,
        }
    }
}

impl Source for HubWeights {
    fn read(
        &self,
        name: &str,
        global: &[u64],
        first: u64,
        [weights, momentum, variance]: [&mut [f32]; 3],
    ) -> Result<(), ExecutorError> {
        let place = Place::of(name, global);
        let held = self
            .find(&place.tensor)
            .ok_or_else(|| wrong(&self.path, format!("{} is not there", place.tensor)))?;
        let skip = usize::from(place.expert.is_some());
        if held.shape.len() < skip || held.shape[skip..] != place.shape {
            let reason = format!(
                "{} has shape {:?}, the model wants {:?}",
                place.tensor, held.shape, place.shape
            );
            return Err(wrong(&self.path, reason));
        }
        for (index, weight) in (first..).zip(weights) {
            *weight = held.at(place.at(index, global)).ok_or_else(|| {
                let reason = format!(
                    "{}: {:?} is not f32, bf16 or f16, or has no such expert",
                    place.tensor, held.dtype
                );
                wrong(&self.path, reason)
            })?;
        }
        momentum.fill(0.0);
        variance.fill(0.0);
        Ok(())
    }
}

impl Checkpoint {
    /// The content of one fp32 `.safetensors` file that holds the weights under the hub's tensor names.
    ///
    /// # Errors
    /// When a piece is damaged, or parameters do not fill the hub's tensors.
    pub fn safetensors(&self) -> Result<Vec<u8>, ExecutorError> {
        let here = |reason| wrong(self.folder(), reason);
        let mut data: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
        let parameters = self.parameters();
        let tensors = tensors(&parameters).map_err(here)?;
        for (name, parts) in tensors {
            let mut shape: Vec<usize> = parts[0].1.shape.iter().map(|&d| d as usize).collect();
            let experts = parts.iter().filter_map(|(_, place)| place.expert).max();
            if let Some(last) = experts {
                shape.insert(0, last as usize + 1);
            }
            let mut values = vec![0.0; shape.iter().product()];
            for (parameter, place) in parts {
                let weights = self.weights(parameter)?;
                for (index, weight) in (0..).zip(weights) {
                    values[place.at(index, &parameter.shape) as usize] = weight;
                }
            }
            data.insert(name, (shape, values));
        }
        let views = data
            .iter()
            .map(|(name, (shape, values))| {
                let bytes = bytemuck::cast_slice(values);
                let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
                Ok((name, view.map_err(|e| here(e.to_string()))?))
            })
            .collect::<Result<Vec<_>, ExecutorError>>()?;
        safetensors::serialize(views, None).map_err(|e| here(e.to_string()))
    }

    /// A parameter's weights without its moments.
    fn weights(&self, parameter: &ParameterEntry) -> Result<Vec<f32>, ExecutorError> {
        let elements = parameter.shape.iter().product::<u64>() as usize;
        let mut states = [(); 3].map(|()| vec![0.0; elements]);
        let into = states.each_mut().map(Vec::as_mut_slice);
        self.read(&parameter.name, &parameter.shape, 0, into)?;
        let [weights, ..] = states;
        Ok(weights)
    }
}

/// Tensors of the hub's files by name: the parameters that fill each one, and where they lie in it.
type Tensors<'p> = BTreeMap<String, Vec<(&'p ParameterEntry, Place)>>;

/// Groups parameters by the tensor they fill, and checks that they have as many elements as the tensor.
fn tensors(parameters: &[ParameterEntry]) -> Result<Tensors<'_>, Problem> {
    let mut tensors = Tensors::new();
    for parameter in parameters {
        let place = Place::of(&parameter.name, &parameter.shape);
        let parts = tensors.entry(place.tensor.clone()).or_default();
        parts.push((parameter, place));
    }
    for (name, parts) in &tensors {
        let shape = &parts[0].1.shape;
        if parts.iter().any(|(_, place)| place.shape != *shape) {
            return Err(format!(
                "the parameters that fill tensor {name} give it different shapes"
            ));
        }
        let elements: u64 = parts
            .iter()
            .map(|(p, _)| p.shape.iter().product::<u64>())
            .sum();
        let of_one: u64 = shape.iter().product();
        let firsts: BTreeSet<_> = parts.iter().map(|(_, p)| (p.expert, p.first)).collect();
        let experts: BTreeSet<_> = parts.iter().map(|(_, p)| p.expert).collect();
        // Either one dense parameter, or experts numbered from 0 without a gap, each with all of its parts.
        let numbered = (0..)
            .zip(&experts)
            .all(|(number, &expert)| expert == Some(number));
        let known = experts.len() == 1 && experts.contains(&None) || numbered;
        if !known || firsts.len() < parts.len() || elements != experts.len() as u64 * of_one {
            return Err(format!(
                "the {} parameters of tensor {name} do not fill it",
                parts.len()
            ));
        }
    }
    Ok(tensors)
}

#[cfg(test)]
mod tests {
    use super::Place;
    use std::collections::BTreeSet;

    /// Parameters of one tensor fill it, each element once.
    #[test]
    fn parameters_fill_their_tensors() {
        let experts = |name: &str| -> Vec<String> {
            (0..3)
                .map(|e| name.replace("{e}", &e.to_string()))
                .collect()
        };
        let gate_up = "layers.0.mlp.experts.gate_up_proj.{e}";
        let both = |last: &str| {
            let parts = ["gate", "up"].map(|part| experts(&format!("{gate_up}.{part}.{last}")));
            parts.concat()
        };
        let halves = ["gate_half", "up_half"]
            .map(|part| experts(&format!("{gate_up}.{part}.weight")))
            .concat();
        let down = "layers.0.mlp.experts.down_proj.{e}";
        /// Names of parameters, their shape, their tensor and its (or one expert's) shape.
        type Case<'c> = (Vec<String>, &'c [u64], &'c str, &'c [u64]);
        // Both are called `c_fc`; GPT-2's alone are turned.
        let gpt2 = "transformer.h.0.mlp.c_fc.weight";
        let starcoder2 = "model.layers.0.mlp.c_fc.weight";
        #[rustfmt::skip]
        let tensors: [Case<'_>; 8] = [
            (vec!["x.q_proj.weight".into()], &[4, 5], "x.q_proj.weight", &[4, 5]),
            (vec![gpt2.into()], &[4, 5], gpt2, &[5, 4]),
            (vec![starcoder2.into()], &[4, 5], starcoder2, &[4, 5]),
            (both("weight"), &[4, 5], "layers.0.mlp.experts.gate_up_proj", &[5, 8]),
            (halves, &[4, 5], "layers.0.mlp.experts.gate_up_proj", &[5, 8]),
            (both("bias"), &[4], "layers.0.mlp.experts.gate_up_proj_bias", &[8]),
            (experts(&format!("{down}.weight")), &[4, 5], "layers.0.mlp.experts.down_proj", &[5, 4]),
            (experts(&format!("{down}.bias")), &[4], "layers.0.mlp.experts.down_proj_bias", &[4]),
        ];
        for (names, global, tensor, shape) in tensors {
            let mut seen = BTreeSet::new();
            let elements: u64 = global.iter().product();
            for name in &names {
                let place = Place::of(name, global);
                assert_eq!((&place.tensor[..], &place.shape[..]), (tensor, shape));
                seen.extend((0..elements).map(|i| place.at(i, global)));
            }
            let all: BTreeSet<u64> = (0..elements * names.len() as u64).collect();
            assert_eq!(seen, all, "{tensor}");
        }
    }
}
