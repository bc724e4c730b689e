//! The tape: makes meta tensors and records the operators that run on them. Operators are methods in `operators`.

use catalog::{Axis, DType};

use crate::error::DTensorError;
use crate::operator::{Collective, Moves, Operator};
use crate::placement::{BLOCK_AXES, BlockMesh, Placement, Placements};
use crate::plan::ShardingPlan;
use crate::tensor::{Columns, TensorId, TensorInfo, TensorRole, View, ViewKind};
use crate::trace::{OPERATORS, Op, ParameterInfo, Pass, Trace};

/// A global tensor; its local shard is the tensor `id` of the trace.
#[derive(Clone, Debug, PartialEq)]
pub struct DTensor {
    /// The local shard in the trace.
    pub id: TensorId,
    /// Global shape.
    pub shape: Vec<u64>,
    /// Placement on every axis.
    pub placements: Placements,
    /// Element type.
    pub dtype: DType,
}

/// One step of forward as it was recorded; backward is derived from these records.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Recorded {
    /// The forward operator at this index.
    Operator(usize),
    /// The ring exchange of keys and values at this index, which makes no new tensor.
    Ring(usize, Collective),
    /// A redistribution on one axis.
    Redistribute(Redistribution),
    /// A slice of a tensor: the gradients of the slices are written into one tensor.
    Slice(Columns),
}

/// A redistribution on one axis.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Redistribution {
    pub(crate) axis: Axis,
    pub(crate) from: Placement,
    pub(crate) to: Placement,
    /// Index of the forward operator that performed it, if it needed a message.
    pub(crate) by: Option<(usize, Moves)>,
}

/// One step of forward, with its tensors.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) what: Recorded,
    pub(crate) inputs: Vec<DTensor>,
    pub(crate) output: Option<DTensor>,
}

/// Records a block while its model code runs.
#[derive(Debug)]
pub struct Tape<'p> {
    pub(crate) plan: &'p ShardingPlan,
    pub(crate) trace: Trace,
    pub(crate) records: Vec<Record>,
    /// Prefix of parameter names; a name that begins with `/` is absolute and gets none.
    prefix: String,
    /// Whether the model's own weights are frozen, so that only adapters are trained.
    freezes: bool,
}

impl<'p> Tape<'p> {
    /// An empty tape. `prefix` is prepended to parameter names, such as `model.layers.{layer}.`.
    #[must_use]
    pub fn new(plan: &'p ShardingPlan, prefix: &str) -> Self {
        Self {
            plan,
            trace: Trace::for_a_layer(),
            records: Vec::with_capacity(OPERATORS),
            prefix: prefix.to_owned(),
            freezes: false,
        }
    }

    /// The tape with the model's own weights frozen, if `freezes` is set; then only adapters are trained.
    #[must_use]
    pub fn freezing(self, freezes: bool) -> Self {
        Self { freezes, ..self }
    }

    /// Sizes of the mesh axes.
    #[must_use]
    pub fn mesh(&self) -> &BlockMesh {
        &self.plan.mesh
    }

    /// How attention exchanges keys and values when context parallelism shards the sequence.
    #[must_use]
    pub fn attention_exchange(&self) -> catalog::CpKind {
        self.plan.attention_exchange
    }

    /// The tensor that enters the block.
    pub fn input(&mut self, name: &str, shape: &[u64], dtype: DType) -> DTensor {
        self.tensor(name, shape, self.plan.input, dtype, TensorRole::Input)
    }

    /// A tensor that is made once and not trained, such as a rotary table.
    pub fn constant(
        &mut self,
        name: &str,
        shape: &[u64],
        placements: Placements,
        dtype: DType,
    ) -> DTensor {
        self.tensor(name, shape, placements, dtype, TensorRole::Constant)
    }

    /// One of the model's own weights, with the placements that the plan gives `name`. `experts` is the number of experts in the layer
    /// that have such a parameter (1 for dense ones); they are sharded over `ep`.
    pub fn parameter(&mut self, name: &str, shape: &[u64], dtype: DType, experts: u64) -> DTensor {
        self.weight(name, shape, dtype, experts, !self.freezes)
    }

    /// A weight of a LoRA adapter. It is trained even if the model's own weights are frozen.
    pub fn adapter(&mut self, name: &str, shape: &[u64], dtype: DType) -> DTensor {
        self.weight(name, shape, dtype, 1, true)
    }

    fn weight(
        &mut self,
        name: &str,
        shape: &[u64],
        dtype: DType,
        experts: u64,
        trained: bool,
    ) -> DTensor {
        let placements = self.plan.parameter(name);
        let role = if trained {
            TensorRole::Parameter
        } else {
            TensorRole::Frozen
        };
        let tensor = self.tensor(name, shape, placements, dtype, role);
        let one: u64 = self.trace.tensor(tensor.id).elements();
        let held = experts.div_ceil(self.plan.mesh.ep);
        let name = if name.starts_with('/') {
            name.trim_start_matches('/').to_owned()
        } else {
            [&self.prefix, name].concat()
        };
        self.trace.parameters.push(ParameterInfo {
            name,
            global_shape: shape.to_vec(),
            global_elements: shape.iter().product::<u64>() * experts,
            local_elements: one * held,
            expert: experts > 1,
            experts,
            trained,
            tensor: tensor.id,
        });
        tensor
    }

    /// A new tensor.
    pub(crate) fn tensor(
        &mut self,
        name: impl Into<String>,
        shape: &[u64],
        placements: Placements,
        dtype: DType,
        role: TensorRole,
    ) -> DTensor {
        let id = self.append(TensorInfo {
            name: name.into(),
            shape: placements.local(shape, &self.plan.mesh),
            dtype,
            role,
            storage: TensorId(0),
            global: shape.to_vec(),
            placements,
        });
        DTensor {
            id,
            shape: shape.to_vec(),
            placements,
            dtype,
        }
    }

    /// An operator's output tensor, named after its scope.
    pub(crate) fn output(
        &mut self,
        scope: &str,
        shape: &[u64],
        placements: Placements,
        dtype: DType,
    ) -> DTensor {
        let name = [scope, ".output"].concat();
        self.tensor(name, shape, placements, dtype, TensorRole::Activation)
    }

    /// An operator's output tensor with the shape and placements of its input.
    pub(crate) fn like(&mut self, scope: &str, x: &DTensor, dtype: DType) -> DTensor {
        let name = [scope, ".output"].concat();
        let id = self.local_like(name, x, dtype, TensorRole::Activation);
        DTensor {
            id,
            dtype,
            ..x.clone()
        }
    }

    /// A local tensor with the shape and placement of the one behind `x`.
    pub(crate) fn local_like(
        &mut self,
        name: impl Into<String>,
        x: &DTensor,
        dtype: DType,
        role: TensorRole,
    ) -> TensorId {
        let info = self.trace.tensor(x.id);
        let alike = TensorInfo {
            name: name.into(),
            shape: info.shape.clone(),
            dtype,
            role,
            storage: TensorId(0),
            global: info.global.clone(),
            placements: info.placements,
        };
        self.append(alike)
    }

    /// A local tensor without placements.
    pub(crate) fn local_tensor(
        &mut self,
        name: &str,
        shape: Vec<u64>,
        dtype: DType,
        role: TensorRole,
    ) -> TensorId {
        self.append(TensorInfo {
            name: name.to_owned(),
            global: shape.clone(),
            placements: Placements::REPLICATE,
            shape,
            dtype,
            role,
            storage: TensorId(0),
        })
    }

    /// Whether a tensor is a weight that is not trained.
    pub(crate) fn is_frozen(&self, id: TensorId) -> bool {
        self.trace.tensor(id).role == TensorRole::Frozen
    }

    /// Appends a tensor that owns its storage.
    fn append(&mut self, info: TensorInfo) -> TensorId {
        let id = TensorId(self.trace.tensors.len() as u32);
        self.trace.tensors.push(TensorInfo {
            storage: id,
            ..info
        });
        id
    }

    /// A local activation without placements, treated as replicated.
    pub(crate) fn rows(&mut self, name: &str, shape: Vec<u64>, dtype: DType) -> DTensor {
        let id = self.local_tensor(name, shape.clone(), dtype, TensorRole::Activation);
        DTensor {
            id,
            shape,
            placements: Placements::REPLICATE,
            dtype,
        }
    }

    /// Sets a local tensor's global shape and placements.
    pub(crate) fn place(&mut self, id: TensorId, global: &[u64], placements: Placements) {
        let info = &mut self.trace.tensors[id.0 as usize];
        info.global = global.to_vec();
        info.placements = placements;
    }

    /// A tensor that shares the storage of `x` but has other placements.
    pub(crate) fn alias(&mut self, x: &DTensor, placements: Placements) -> DTensor {
        let mut info = self.trace.tensor(x.id).clone();
        info.shape = placements.local(&x.shape, &self.plan.mesh);
        info.global.clone_from(&x.shape);
        info.placements = placements;
        let id = TensorId(self.trace.tensors.len() as u32);
        self.trace.tensors.push(info);
        DTensor {
            id,
            placements,
            ..x.clone()
        }
    }

    /// A slice of `x`: of every `period` columns, the `width` columns from `offset` on; a tensor
    /// that no kernel writes. A slice of one part of an interleaved dim is a plain shard.
    pub fn slice(&mut self, x: &DTensor, [offset, width, period]: [u64; 3]) -> DTensor {
        let info = self.trace.tensor(x.id);
        let (name, role) = ([&info.name, " part"].concat(), info.role);
        let mut shape = x.shape.clone();
        let last = shape.last_mut().expect("sliced tensors have a last dim");
        let columns = Columns {
            offset,
            width,
            period,
            whole: *last,
        };
        *last = *last / period * width;
        let placements = x
            .placements
            .of_columns(offset..offset + width, columns.whole);
        let out = self.tensor(name, &shape, placements, x.dtype, role);
        self.seen(x, &out, ViewKind::Columns(columns));
        self.remember(Recorded::Slice(columns), &[x], Some(&out));
        out
    }

    /// Records that `to` is a view of `from`.
    pub(crate) fn seen(&mut self, from: &DTensor, to: &DTensor, kind: ViewKind) {
        self.trace.forward_views.push(View {
            before: self.trace.forward.len(),
            from: from.id,
            to: to.id,
            kind,
        });
    }

    /// Records an operator with one output, and what it saves for backward.
    pub(crate) fn record(
        &mut self,
        scope: &str,
        operator: Operator,
        inputs: &[&DTensor],
        output: &DTensor,
        saved: &[TensorId],
    ) {
        let ids: Vec<TensorId> = inputs.iter().map(|x| x.id).collect();
        let op = self.push(scope, operator, [&ids, &[output.id], saved]);
        self.remember(Recorded::Operator(op), inputs, Some(output));
    }

    /// Appends an operator to forward with its inputs, outputs and saved tensors; returns its index.
    pub(crate) fn push(
        &mut self,
        scope: &str,
        operator: Operator,
        [inputs, outputs, saved]: [&[TensorId]; 3],
    ) -> usize {
        self.trace.forward.push(Op {
            scope: scope.to_owned(),
            pass: Pass::Forward,
            inputs: inputs.to_vec(),
            outputs: outputs.to_vec(),
            saved: saved.to_vec(),
            operator,
        });
        self.trace.forward.len() - 1
    }

    /// Appends a record from which backward is derived.
    pub(crate) fn remember(
        &mut self,
        what: Recorded,
        inputs: &[&DTensor],
        output: Option<&DTensor>,
    ) {
        self.records.push(Record {
            what,
            inputs: inputs.iter().map(|&x| x.clone()).collect(),
            output: output.cloned(),
        });
    }

    /// Adds an output to the operator recorded last.
    pub(crate) fn also_makes(&mut self, id: TensorId) {
        let op = self.trace.forward.last_mut();
        op.expect("just recorded").outputs.push(id);
    }

    /// Whether two tensors have the same placement on every axis with more than one rank.
    pub(crate) fn lie_alike(&self, a: &DTensor, b: &DTensor) -> bool {
        let alike = |&axis: &Axis| {
            self.mesh().size(axis) == 1 || a.placements.on(axis) == b.placements.on(axis)
        };
        BLOCK_AXES.iter().all(alike)
    }
}

/// The error of an operator that has no rule for its inputs' placements.
pub(crate) fn no_rule(operator: &'static str, scope: &str, inputs: &[&DTensor]) -> DTensorError {
    DTensorError::NoRule {
        operator,
        scope: scope.to_owned(),
        placements: inputs.iter().map(|t| t.placements).collect(),
    }
}
