//! The tape: makes meta tensors and records what runs on them. Operators add themselves to it (`operators`).

use catalog::{Axis, DType};

use crate::error::DTensorError;
use crate::operator::{Collective, Moves, Operator};
use crate::placement::{BLOCK_AXES, BlockMesh, Placement, Placements};
use crate::plan::ShardingPlan;
use crate::tensor::{Columns, TensorId, TensorInfo, TensorRole, View, ViewKind};
use crate::trace::{Op, ParameterInfo, Pass, Trace};

/// A global tensor: its local shard is [`TensorId`] in the trace.
#[derive(Clone, Debug, PartialEq)]
pub struct DTensor {
    /// The local tensor.
    pub id: TensorId,
    /// Global shape.
    pub shape: Vec<u64>,
    /// Where its shards lie.
    pub placements: Placements,
    /// Element type.
    pub dtype: DType,
}

/// What ran in forward, for backward to undo.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Recorded {
    /// The operator of forward at this place.
    Operator(usize),
    /// The operator at this place, which makes no tensor: keys and values went round the ring.
    Ring(usize, Collective),
    /// A redistribution.
    Redistribute(Redistribution),
    /// A part of a tensor: gradients of the parts are written into one tensor.
    Slice(Columns),
}

/// A redistribution on one axis.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Redistribution {
    pub(crate) axis: Axis,
    pub(crate) from: Placement,
    pub(crate) to: Placement,
    /// The operator of forward that it took, if it took one.
    pub(crate) by: Option<(usize, Moves)>,
}

/// What ran in forward, with its tensors.
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
    /// Replaces `{layer}` free scopes in parameter names.
    prefix: String,
}

impl<'p> Tape<'p> {
    /// An empty tape. `prefix` is put before parameter names, such as `model.layers.{layer}.`.
    #[must_use]
    pub fn new(plan: &'p ShardingPlan, prefix: &str) -> Self {
        Self {
            plan,
            trace: Trace::default(),
            records: Vec::new(),
            prefix: prefix.to_owned(),
        }
    }

    /// Sizes of the axes.
    #[must_use]
    pub fn mesh(&self) -> &BlockMesh {
        &self.plan.mesh
    }

    /// How attention exchanges keys and values over the sharded sequence.
    #[must_use]
    pub fn attention_exchange(&self) -> catalog::CpKind {
        self.plan.attention_exchange
    }

    /// The tensor that enters the block.
    pub fn input(&mut self, name: &str, shape: &[u64], dtype: DType) -> DTensor {
        self.tensor(name, shape, self.plan.input, dtype, TensorRole::Input)
    }

    /// A tensor made once and not trained.
    pub fn constant(
        &mut self,
        name: &str,
        shape: &[u64],
        placements: Placements,
        dtype: DType,
    ) -> DTensor {
        self.tensor(name, shape, placements, dtype, TensorRole::Constant)
    }

    /// A parameter, placed as the plan says for `name`. `experts` is how many copies of the shape
    /// the layer holds in all (1 for dense parameters); they are shared out over `ep`.
    pub fn parameter(&mut self, name: &str, shape: &[u64], dtype: DType, experts: u64) -> DTensor {
        let placements = self.plan.parameter(name);
        let tensor = self.tensor(name, shape, placements, dtype, TensorRole::Parameter);
        let one: u64 = self.trace.tensor(tensor.id).elements();
        let expert = experts > 1;
        let held = if expert {
            experts.div_ceil(self.plan.mesh.ep)
        } else {
            1
        };
        let name = if name.starts_with('/') {
            name.trim_start_matches('/').to_owned()
        } else {
            format!("{}{name}", self.prefix)
        };
        self.trace.parameters.push(ParameterInfo {
            name,
            global_shape: shape.to_vec(),
            global_elements: shape.iter().product::<u64>() * experts,
            local_elements: one * held,
            expert,
            experts,
            tensor: tensor.id,
        });
        tensor
    }

    /// A new tensor.
    pub(crate) fn tensor(
        &mut self,
        name: &str,
        shape: &[u64],
        placements: Placements,
        dtype: DType,
        role: TensorRole,
    ) -> DTensor {
        let local = placements.local(shape, &self.plan.mesh);
        let id = self.local_tensor(name, local, dtype, role);
        self.place(id, shape, placements);
        DTensor {
            id,
            shape: shape.to_vec(),
            placements,
            dtype,
        }
    }

    /// What an operator makes, named after its scope.
    pub(crate) fn output(
        &mut self,
        scope: &str,
        shape: &[u64],
        placements: Placements,
        dtype: DType,
    ) -> DTensor {
        let name = format!("{scope}.output");
        self.tensor(&name, shape, placements, dtype, TensorRole::Activation)
    }

    /// What an operator makes that keeps its input's shape and placement.
    pub(crate) fn like(&mut self, scope: &str, x: &DTensor, dtype: DType) -> DTensor {
        let name = format!("{scope}.output");
        let id = self.local_like(&name, x, dtype, TensorRole::Activation);
        DTensor {
            id,
            dtype,
            ..x.clone()
        }
    }

    /// A local tensor with the shape and placement of the one behind `x`.
    pub(crate) fn local_like(
        &mut self,
        name: &str,
        x: &DTensor,
        dtype: DType,
        role: TensorRole,
    ) -> TensorId {
        let info = self.trace.tensor(x.id);
        let (shape, global, placements) =
            (info.shape.clone(), info.global.clone(), info.placements);
        let id = self.local_tensor(name, shape, dtype, role);
        self.place(id, &global, placements);
        id
    }

    /// A local tensor that is not placed.
    pub(crate) fn local_tensor(
        &mut self,
        name: &str,
        shape: Vec<u64>,
        dtype: DType,
        role: TensorRole,
    ) -> TensorId {
        let id = TensorId(self.trace.tensors.len() as u32);
        self.trace.tensors.push(TensorInfo {
            name: name.to_owned(),
            global: shape.clone(),
            placements: Placements::REPLICATE,
            shape,
            dtype,
            role,
            storage: id,
        });
        id
    }

    /// A local activation that is not placed, as a tensor that every rank holds whole.
    pub(crate) fn rows(&mut self, name: &str, shape: Vec<u64>, dtype: DType) -> DTensor {
        let id = self.local_tensor(name, shape.clone(), dtype, TensorRole::Activation);
        DTensor {
            id,
            shape,
            placements: Placements::REPLICATE,
            dtype,
        }
    }

    /// Says where a local tensor's shards lie.
    pub(crate) fn place(&mut self, id: TensorId, global: &[u64], placements: Placements) {
        let info = &mut self.trace.tensors[id.0 as usize];
        info.global = global.to_vec();
        info.placements = placements;
    }

    /// The same storage with other placements.
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

    /// Of every `period` columns of `x`, `width` from `offset` on, in place: the result owns its size but
    /// writes nothing. A dim of interleaved parts is cut along its parts, so each part is a plain
    /// shard.
    pub fn slice(&mut self, x: &DTensor, [offset, width, period]: [u64; 3]) -> DTensor {
        let info = self.trace.tensor(x.id);
        let (name, role) = (format!("{} part", info.name), info.role);
        let mut shape = x.shape.clone();
        let last = shape.last_mut().expect("sliced tensors have a last dim");
        let columns = Columns {
            offset,
            width,
            period,
            whole: *last,
        };
        *last = *last / period * width;
        let out = self.tensor(&name, &shape, x.placements.of_a_part(), x.dtype, role);
        self.seen(x, &out, ViewKind::Columns(columns));
        self.remember(Recorded::Slice(columns), &[x], Some(&out));
        out
    }

    /// Says that a tensor is a view of another.
    pub(crate) fn seen(&mut self, from: &DTensor, to: &DTensor, kind: ViewKind) {
        self.trace.forward_views.push(View {
            before: self.trace.forward.len(),
            from: from.id,
            to: to.id,
            kind,
        });
    }

    /// Records an operator that makes one tensor, and what it keeps for its backward.
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

    /// Appends an operator to forward, with what it reads, makes and keeps; returns its place.
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

    /// Remembers for backward what ran.
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

    /// Says that the operator recorded last makes another tensor too.
    pub(crate) fn also_makes(&mut self, id: TensorId) {
        let op = self.trace.forward.last_mut();
        op.expect("just recorded").outputs.push(id);
    }

    /// Whether two tensors lie alike on every axis of several ranks.
    pub(crate) fn lie_alike(&self, a: &DTensor, b: &DTensor) -> bool {
        let alike = |&axis: &Axis| {
            self.mesh().size(axis) == 1 || a.placements.on(axis) == b.placements.on(axis)
        };
        BLOCK_AXES.iter().all(alike)
    }
}

/// An operator met placements that it has no rule for.
pub(crate) fn no_rule(operator: &'static str, scope: &str, inputs: &[&DTensor]) -> DTensorError {
    DTensorError::NoRule {
        operator,
        scope: scope.to_owned(),
        placements: inputs.iter().map(|t| t.placements).collect(),
    }
}
