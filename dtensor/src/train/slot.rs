//! A parameter of a virtual stage on one rank: which elements of the model it holds, and their initial values.

use std::sync::Arc;

use rayon::prelude::*;

use crate::layout::consecutive;
use crate::philox::Stream;
use crate::tensor::TensorId;

/// The data-parallel mesh that a parameter belongs to: its ranks share the parameter's states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The mesh of dense parameters.
    Dense,
    /// The mesh of expert parameters.
    Expert,
}

/// How a parameter is initialised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Start {
    /// All elements are 1.
    Ones,
    /// All elements are 0.
    Zeros,
    /// Drawn from a normal distribution with mean 0 and this standard deviation.
    Normal(f64),
}

/// A parameter of a virtual stage, as held on one rank.
#[derive(Clone, Debug)]
pub struct Slot {
    /// Name in the model's `state_dict`; `{expert}` stands for the expert's number.
    pub name: String,
    /// Which data-parallel mesh shares its states.
    pub kind: Kind,
    /// Global numbers of the experts held here; a single `None` for dense parameters.
    pub experts: Vec<Option<u64>>,
    /// Global shape (of one expert).
    pub global: Vec<u64>,
    /// Global indices held here, for each dim.
    pub indices: Arc<Vec<Vec<u64>>>,
    /// First element in the stage's flat partition of its kind.
    pub offset: usize,
    /// Number of elements held here.
    pub len: usize,
    /// Whether each tensor-parallel rank has the gradient of its own tokens only, so that it must be summed over them.
    pub partial_over_tp: bool,
    /// Whether all tensor-parallel ranks hold the same elements.
    pub replicated_over_tp: bool,
    /// Whether weight decay applies: to matrices, not to vectors.
    pub decay: bool,
    /// Each use of it: block index and tensor; tied weights have two.
    pub uses: Vec<(usize, TensorId)>,
    /// How it is initialised.
    pub start: Start,
}

impl Slot {
    /// Local shape: experts first.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        let experts = (self.kind == Kind::Expert).then_some(self.experts.len());
        experts
            .into_iter()
            .chain(self.indices.iter().map(Vec::len))
            .collect()
    }

    /// The parameter's name for one expert.
    #[must_use]
    pub fn name_of(&self, expert: Option<u64>) -> String {
        match expert {
            Some(e) => self.name.replace("{expert}", &e.to_string()),
            None => self.name.clone(),
        }
    }

    /// Calls `run(expert, first global index, local range)` for every run of elements in `range` of the slot that are
    /// consecutive in the global tensor.
    pub fn runs(
        &self,
        range: &std::ops::Range<usize>,
        mut run: impl FnMut(Option<u64>, u64, std::ops::Range<usize>),
    ) {
        let Some((columns, leading)) = self.indices.split_last() else {
            return;
        };
        let pieces = consecutive(columns);
        let rows: usize = leading.iter().map(Vec::len).product();
        for (e, &expert) in self.experts.iter().enumerate() {
            for row in 0..rows {
                let base = (e * rows + row) * columns.len();
                if base >= range.end || base + columns.len() <= range.start {
                    continue;
                }
                let first = self.first_of_row(row, leading);
                for piece in &pieces {
                    let start = (base + piece.start).max(range.start);
                    let end = (base + piece.end).min(range.end);
                    if start < end {
                        let column = columns[piece.start] + (start - base - piece.start) as u64;
                        run(expert, first + column, start..end);
                    }
                }
            }
        }
    }

    /// Global linear index of the first column of a local row.
    fn first_of_row(&self, mut row: usize, leading: &[Vec<u64>]) -> u64 {
        let mut stride = self.global[leading.len()];
        let mut first = 0;
        for (dim, list) in leading.iter().enumerate().rev() {
            first += list[row % list.len()] * stride;
            row /= list.len();
            stride *= self.global[dim];
        }
        first
    }

    /// Initial values of `range` of the slot: drawn by global index, so a rank makes only its own.
    #[must_use]
    pub fn initial(&self, seed: u64, range: std::ops::Range<usize>) -> Vec<f32> {
        let fill = match self.start {
            Start::Ones => 1.0,
            _ => 0.0,
        };
        let mut values = vec![fill; range.len()];
        if let Start::Normal(deviation) = self.start {
            // Several parts per core. Numbers are drawn by index, so splitting changes none.
            let part = values
                .len()
                .div_ceil(4 * rayon::current_num_threads())
                .max(1 << 14);
            let parts = values.par_chunks_mut(part).enumerate();
            parts.for_each(|(index, part_values)| {
                let from = range.start + index * part;
                self.runs(&(from..from + part_values.len()), |expert, first, at| {
                    let stream = Stream::new(seed, 0, &self.name_of(expert));
                    let out = &mut part_values[at.start - from..at.end - from];
                    stream.normals(first, out);
                    for x in out {
                        *x *= deviation as f32;
                    }
                });
            });
        }
        values
    }
}
