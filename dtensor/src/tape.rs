//! The tape: runs operators on meta tensors, records them, and derives the backward pass.

use catalog::{Axis, DType};

use crate::error::DTensorError;
use crate::placement::{BlockMesh, Placement, Placements};
use crate::plan::ShardingPlan;
use crate::trace::{
    Collective, CollectiveKind, Columns, Detail, Op, OpKind, ParameterInfo, Pass, TensorId,
    TensorInfo, TensorRole, Trace, View, ViewKind,
};

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

/// What the backward of a recorded operator needs to know beyond the operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rule {
    /// The operator's own kind says it.
    Own,
    /// A redistribution on one axis between two placements.
    Redistribute {
        axis: Axis,
        from: Placement,
        to: Placement,
    },
    /// Keys and values went round the ring; their gradients do too.
    Ring,
    /// A part of a tensor: gradients of the parts are written into one tensor.
    Slice(Columns),
}

/// A recorded forward operator with its backward rule.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) op: usize,
    pub(crate) inputs: Vec<DTensor>,
    pub(crate) outputs: Vec<DTensor>,
    pub(crate) rule: Rule,
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

    /// A new local tensor.
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

    /// Says where a local tensor's shards lie.
    pub(crate) fn place(&mut self, id: TensorId, global: &[u64], placements: Placements) {
        let info = &mut self.trace.tensors[id.0 as usize];
        info.global = global.to_vec();
        info.placements = placements;
    }

    /// Gives the operator recorded last its detail.
    pub(crate) fn detail(&mut self, detail: Detail) {
        if let Some(op) = self.trace.forward.last_mut() {
            op.detail = detail;
        }
    }

    /// The same storage under another shape.
    pub fn view(&mut self, x: &DTensor, shape: &[u64], placements: Placements) -> DTensor {
        let info = self.trace.tensor(x.id);
        let (name, role, storage) = (info.name.clone(), info.role, info.storage);
        let local = placements.local(shape, &self.plan.mesh);
        let id = TensorId(self.trace.tensors.len() as u32);
        self.trace.tensors.push(TensorInfo {
            name,
            shape: local,
            dtype: x.dtype,
            role,
            storage,
            global: shape.to_vec(),
            placements,
        });
        let out = DTensor {
            id,
            shape: shape.to_vec(),
            placements,
            dtype: x.dtype,
        };
        self.records.push(Record {
            op: usize::MAX,
            inputs: vec![x.clone()],
            outputs: vec![out.clone()],
            rule: Rule::Own,
        });
        out
    }

    /// How attention exchanges keys and values over the sharded sequence.
    #[must_use]
    pub fn attention_exchange(&self) -> catalog::CpKind {
        self.plan.attention_exchange
    }

    /// Of every `period` columns of `x`, `width` from `offset` on, in place: the result owns its size but
    /// writes nothing. A dim of interleaved parts is cut along its parts, so each part is a plain
    /// shard.
    pub fn slice(&mut self, x: &DTensor, [offset, width, period]: [u64; 3]) -> DTensor {
        let mut placements = x.placements;
        for axis in crate::placement::BLOCK_AXES {
            if let Placement::Interleaved(dim, _) = placements.on(axis) {
                placements = placements.with(axis, Placement::Shard(dim));
            }
        }
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
        let out = self.tensor(&name, &shape, placements, x.dtype, role);
        self.trace.forward_views.push(View {
            before: self.trace.forward.len(),
            from: x.id,
            to: out.id,
            kind: ViewKind::Columns(columns),
        });
        self.records.push(Record {
            op: usize::MAX,
            inputs: vec![x.clone()],
            outputs: vec![out.clone()],
            rule: Rule::Slice(columns),
        });
        out
    }

    /// A wider copy of `x`, joined with another tensor that is not traced.
    pub fn widened(&mut self, scope: &str, x: &DTensor, shape: &[u64]) -> DTensor {
        let name = format!("{scope}.output");
        let out = self.tensor(&name, shape, x.placements, x.dtype, TensorRole::Activation);
        self.record(scope, OpKind::Copy, &[x], &[&out], &[], Rule::Own);
        out
    }

    /// `parts` tensors like `x` joined along the last dim.
    pub fn concatenated(&mut self, scope: &str, x: &DTensor, parts: u64) -> DTensor {
        let mut shape = x.shape.clone();
        let last = shape.len() - 1;
        shape[last] *= parts;
        self.widened(&format!("{scope}.join"), x, &shape)
    }

    /// Records a forward operator.
    pub(crate) fn record(
        &mut self,
        scope: &str,
        kind: OpKind,
        inputs: &[&DTensor],
        outputs: &[&DTensor],
        saved: &[TensorId],
        rule: Rule,
    ) {
        self.trace.forward.push(Op {
            scope: scope.to_owned(),
            kind,
            pass: Pass::Forward,
            inputs: inputs.iter().map(|t| t.id).collect(),
            outputs: outputs.iter().map(|t| t.id).collect(),
            saved: saved.to_vec(),
            detail: Detail::None,
        });
        self.records.push(Record {
            op: self.trace.forward.len() - 1,
            inputs: inputs.iter().map(|&t| t.clone()).collect(),
            outputs: outputs.iter().map(|&t| t.clone()).collect(),
            rule,
        });
    }

    /// Redistributes a module's input or output as the plan says; `name` is `module.input` or
    /// `module.output`. Without an entry the tensor passes as it is.
    ///
    /// # Errors
    /// When the plan asks for a redistribution that does not exist.
    pub fn at(&mut self, name: &str, x: DTensor) -> Result<DTensor, DTensorError> {
        let Some(targets) = self.plan.forward(name) else {
            return Ok(x);
        };
        let targets = targets.to_vec();
        let mut x = x;
        for (axis, to) in targets {
            if self.plan.mesh.size(axis) > 1 {
                x = self.redistribute(name, &x, axis, to)?;
            }
        }
        Ok(x)
    }

    /// One redistribution on one axis. Also recorded when nothing moves forward, because its
    /// transpose may reduce gradients.
    ///
    /// # Errors
    /// When no such redistribution exists.
    pub fn redistribute(
        &mut self,
        name: &str,
        x: &DTensor,
        axis: Axis,
        to: Placement,
    ) -> Result<DTensor, DTensorError> {
        let from = x.placements.on(axis);
        let scope = name.rsplit_once('.').map_or(name, |(scope, _)| scope);
        let placements = x.placements.with(axis, to);
        let rule = Rule::Redistribute { axis, from, to };
        let kind = transfer(from, to).ok_or_else(|| DTensorError::NoRedistribution {
            name: name.to_owned(),
            axis,
            from,
            to,
        })?;
        let Some(kind) = kind else {
            let mut same = x.clone();
            same.placements = placements;
            let out = self.alias(&same);
            if from == Placement::Replicate && to != Placement::Replicate {
                self.trace.forward_views.push(View {
                    before: self.trace.forward.len(),
                    from: x.id,
                    to: out.id,
                    kind: ViewKind::Shard,
                });
            }
            self.records.push(Record {
                op: usize::MAX,
                inputs: vec![x.clone()],
                outputs: vec![out.clone()],
                rule,
            });
            return Ok(out);
        };
        let label = format!("{name} redistributed");
        let out = self.tensor(
            &label,
            &x.shape,
            placements,
            x.dtype,
            TensorRole::Activation,
        );
        let collective = self.collective(kind, axis, x.id, out.id);
        self.record(
            scope,
            OpKind::Collective(collective),
            &[x],
            &[&out],
            &[],
            rule,
        );
        self.detail(Detail::Redistribute { axis, from, to });
        Ok(out)
    }

    fn alias(&mut self, x: &DTensor) -> DTensor {
        let info = self.trace.tensor(x.id);
        let copy = TensorInfo {
            name: info.name.clone(),
            shape: x.placements.local(&x.shape, &self.plan.mesh),
            dtype: info.dtype,
            role: info.role,
            storage: info.storage,
            global: x.shape.clone(),
            placements: x.placements,
        };
        let id = TensorId(self.trace.tensors.len() as u32);
        self.trace.tensors.push(copy);
        DTensor { id, ..x.clone() }
    }

    /// A collective between two local tensors, with bytes by its convention.
    pub(crate) fn collective(
        &self,
        kind: CollectiveKind,
        axis: Axis,
        from: TensorId,
        to: TensorId,
    ) -> Collective {
        let from = self.trace.tensor(from).bytes().0;
        let to = self.trace.tensor(to).bytes().0;
        let bytes = match kind {
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter => from.max(to),
            _ => from,
        };
        Collective { kind, axis, bytes }
    }

    /// Ends the block at `output` and derives its backward pass.
    ///
    /// # Errors
    /// When a gradient cannot be redistributed as the forward's transpose asks.
    pub fn finish(mut self, output: &DTensor) -> Result<Trace, DTensorError> {
        self.trace.output = Some(output.id);
        self.backward(output)?;
        Ok(self.trace)
    }
}

/// Which collective a redistribution needs: `None` if there is no such redistribution,
/// `Some(None)` if nothing moves.
pub(crate) fn transfer(from: Placement, to: Placement) -> Option<Option<CollectiveKind>> {
    use Placement::{Interleaved, Partial, Replicate, Shard};
    match (from, to) {
        (Replicate, Replicate | Shard(_) | Interleaved(..)) => Some(None),
        (Partial, Partial) => Some(None),
        (Shard(a), Shard(b)) if a == b => Some(None),
        (Shard(_) | Interleaved(..), Replicate) => Some(Some(CollectiveKind::AllGather)),
        (Partial, Replicate) => Some(Some(CollectiveKind::AllReduce)),
        (Partial, Shard(_)) => Some(Some(CollectiveKind::ReduceScatter)),
        (Shard(_), Shard(_)) => Some(Some(CollectiveKind::AllToAll)),
        (Interleaved(a, p), Interleaved(b, q)) if (a, p) == (b, q) => Some(None),
        (Replicate | Shard(_) | Interleaved(..), Partial)
        | (Partial | Shard(_) | Interleaved(..), Interleaved(..))
        | (Interleaved(..), Shard(_)) => None,
    }
}
