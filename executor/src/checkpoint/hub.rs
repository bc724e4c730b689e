//! Weights as the Hugging Face hub has them: `.safetensors` files by `state_dict` name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::{Checkpoint, Source};
use crate::error::ExecutorError;

/// Weights of a downloaded model; moments are zero.
pub struct HubWeights {
    path: PathBuf,
    tensors: BTreeMap<String, Held>,
}

/// A tensor as the file has it.
struct Held {
    shape: Vec<u64>,
    dtype: Dtype,
    bytes: Vec<u8>,
}

/// Where a parameter's elements lie in files.
struct Place {
    /// Name of the tensor.
    tensor: String,
    /// Its shape; of one expert, where it holds all of them.
    shape: Vec<u64>,
    /// Which expert of the tensor's, if it holds all.
    expert: Option<u64>,
    /// First element in that shape.
    first: u64,
    /// Strides of the parameter's dims in it.
    strides: Vec<u64>,
}

impl Place {
    /// GPT-2's projections are stored as `[in, out]`, every other model's as `[out, in]`. gpt-oss has one
    /// tensor for all experts, `[experts, in, out]`, with gates and ups in turn.
    fn of(name: &str, global: &[u64]) -> Self {
        if let Some(place) = Self::among_experts(name, global) {
            return place;
        }
        const TURNED: [&str; 4] = [
            "attn.c_attn.weight",
            "attn.c_proj.weight",
            "mlp.c_fc.weight",
            "mlp.c_proj.weight",
        ];
        let turned = TURNED.iter().any(|end| name.ends_with(end));
        let (shape, strides) = match *global {
            [rows, columns] if turned => (vec![columns, rows], vec![1, rows]),
            [rows, columns] => (vec![rows, columns], vec![columns, 1]),
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
        // Gates and ups are columns in turn.
        let (every, first) = match tensor {
            "gate_up_proj" => (2, u64::from(parts.next()? == "up")),
            "down_proj" => (1, 0),
            _ => return None,
        };
        let out = every * global[0];
        let (shape, strides, bias) = match (parts.next()?, global) {
            ("weight", &[_, inner]) => (vec![inner, out], vec![every, out], ""),
            ("bias", _) => (vec![out], vec![every], "_bias"),
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

    /// Where an element of the parameter lies in the tensor.
    fn at(&self, index: u64, global: &[u64]) -> u64 {
        let before = self.expert.unwrap_or(0) * self.shape.iter().product::<u64>();
        let inside = match (global, &self.strides[..]) {
            (&[_, columns], &[row, column]) => index / columns * row + index % columns * column,
            (_, strides) => index * strides[0],
        };
        before + self.first + inside
    }
}

fn wrong(path: &Path, reason: String) -> ExecutorError {
    ExecutorError::Checkpoint {
        path: path.display().to_string(),
        reason,
    }
}

impl HubWeights {
    /// Opens a `.safetensors` file, or every one in a folder.
    ///
    /// # Errors
    /// When there is none or one is malformed.
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
            let bytes = std::fs::read(&file).map_err(|e| wrong(&file, e.to_string()))?;
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

    /// A tensor by name; files of a model without its head (GPT-2's, BLOOM's, OPT's) leave the first part of
    /// names out, such as `transformer.`, and tied heads are not stored.
    fn find(&self, name: &str) -> Option<&Held> {
        let bare = name.split_once('.').map_or(name, |(_, bare)| bare);
        self.tensors.get(name).or_else(|| self.tensors.get(bare))
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
    /// Writes the weights as one `.safetensors` file in 32 bits, under the hub's names.
    ///
    /// # Errors
    /// When a piece is damaged or the file cannot be written.
    pub fn export(&self, path: &Path) -> Result<(), ExecutorError> {
        let mut data: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
        let parameters = self.parameters();
        for parameter in &parameters {
            let elements = parameter.shape.iter().product::<u64>() as usize;
            let mut states = [
                vec![0.0; elements],
                vec![0.0; elements],
                vec![0.0; elements],
            ];
            let [weights, momentum, variance] = &mut states;
            self.read(
                &parameter.name,
                &parameter.shape,
                0,
                [weights, momentum, variance],
            )?;
            let place = Place::of(&parameter.name, &parameter.shape);
            let of_tensor = place.shape.iter().product::<u64>() as usize;
            let dims = place.shape.iter().map(|&d| d as usize);
            let (shape, values) = data
                .entry(place.tensor.clone())
                .or_insert_with(|| (dims.collect(), Vec::new()));
            let experts = place.expert.map_or(1, |e| e as usize + 1);
            if values.len() < experts * of_tensor {
                values.resize(experts * of_tensor, 0.0);
                if place.expert.is_some() {
                    let dims = place.shape.iter().map(|&d| d as usize);
                    *shape = std::iter::once(experts).chain(dims).collect();
                }
            }
            for (index, weight) in (0..).zip(weights.iter()) {
                values[place.at(index, &parameter.shape) as usize] = *weight;
            }
        }
        let views = data
            .iter()
            .map(|(name, (shape, values))| {
                let bytes = bytemuck::cast_slice(values);
                let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
                Ok((name, view.map_err(|e| wrong(path, e.to_string()))?))
            })
            .collect::<Result<Vec<_>, ExecutorError>>()?;
        let bytes = safetensors::serialize(views, None).map_err(|e| wrong(path, e.to_string()))?;
        let partial = path.with_extension("partial");
        std::fs::write(&partial, bytes)
            .and_then(|()| std::fs::rename(&partial, path))
            .map_err(|e| {
                // What was begun must not look like a file.
                let _ = std::fs::remove_file(&partial);
                wrong(path, e.to_string())
            })
    }
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
        let down = "layers.0.mlp.experts.down_proj.{e}";
        /// Names of parameters, their shape, their tensor and its (or one expert's) shape.
        type Case<'c> = (Vec<String>, &'c [u64], &'c str, &'c [u64]);
        let tensors: [Case<'_>; 6] = [
            (
                vec!["x.q_proj.weight".into()],
                &[4, 5],
                "x.q_proj.weight",
                &[4, 5],
            ),
            (
                vec!["h.0.attn.c_attn.weight".into()],
                &[4, 5],
                "h.0.attn.c_attn.weight",
                &[5, 4],
            ),
            (
                both("weight"),
                &[4, 5],
                "layers.0.mlp.experts.gate_up_proj",
                &[5, 8],
            ),
            (
                both("bias"),
                &[4],
                "layers.0.mlp.experts.gate_up_proj_bias",
                &[8],
            ),
            (
                experts(&format!("{down}.weight")),
                &[4, 5],
                "layers.0.mlp.experts.down_proj",
                &[5, 4],
            ),
            (
                experts(&format!("{down}.bias")),
                &[4],
                "layers.0.mlp.experts.down_proj_bias",
                &[4],
            ),
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
