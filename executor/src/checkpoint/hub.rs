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

/// GPT-2's projections are stored as `[in, out]`, every other model's as `[out, in]`.
fn is_transposed(name: &str) -> bool {
    [
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    ]
    .iter()
    .any(|end| name.ends_with(end))
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
        let held = self
            .find(name)
            .ok_or_else(|| wrong(&self.path, format!("{name} is not there")))?;
        let transposed = is_transposed(name) && global.len() == 2;
        let mut shape = held.shape.clone();
        if transposed {
            shape.reverse();
        }
        if shape != global {
            let reason = format!("{name} has shape {shape:?}, the model wants {global:?}");
            return Err(wrong(&self.path, reason));
        }
        for (index, weight) in (first..).zip(weights) {
            let place = if transposed {
                index % global[1] * global[0] + index / global[1]
            } else {
                index
            };
            *weight = held.at(place).ok_or_else(|| {
                let reason = format!("{name}: {:?} is not f32, bf16 or f16", held.dtype);
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
        let mut data: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
        for parameter in self.parameters() {
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
            let mut shape: Vec<usize> = parameter.shape.iter().map(|&d| d as usize).collect();
            let mut weights = std::mem::take(weights);
            if is_transposed(&parameter.name) && shape.len() == 2 {
                let (rows, columns) = (shape[0], shape[1]);
                let turned = (0..columns)
                    .flat_map(|j| (0..rows).map(move |i| (i, j)))
                    .map(|(i, j)| weights[i * columns + j]);
                weights = turned.collect();
                shape.reverse();
            }
            let bytes = bytemuck::cast_slice(&weights).to_vec();
            data.insert(parameter.name, (shape, bytes));
        }
        let views = data
            .iter()
            .map(|(name, (shape, bytes))| {
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
