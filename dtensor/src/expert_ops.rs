//! Forward operators of mixtures of experts: choice, dispatch, grouped products, combination.

use catalog::model::Router;
use catalog::{Axis, DType};

use crate::error::DTensorError;
use crate::ops::{no_rule, shards};
use crate::placement::{Placement, Placements};
use crate::plan::Routing;
use crate::tape::{DTensor, Rule, Tape};
use crate::trace::{CollectiveKind, Detail, OpKind, TensorRole};

impl Tape<'_> {
    /// Router choice over `logits: […, experts]`, with a bias per expert for the choice alone: keeps
    /// probabilities and chosen indices. Returns the weights of the chosen.
    pub fn top_k(
        &mut self,
        scope: &str,
        logits: &DTensor,
        k: u64,
        (router, bias): (Router, Option<&DTensor>),
    ) -> DTensor {
        let mut shape = logits.shape.clone();
        let last = shape.len() - 1;
        shape[last] = k;
        let name = format!("{scope}.probabilities");
        let chosen = self.tensor(
            &name,
            &shape,
            logits.placements,
            DType::F32,
            TensorRole::Activation,
        );
        let local = self.trace.tensor(chosen.id).shape.clone();
        let indices = self.local_tensor(
            &format!("{scope}.indices"),
            local,
            DType::I64,
            TensorRole::Activation,
        );
        let saved = [logits.id, chosen.id, indices];
        self.record(
            scope,
            OpKind::TopK,
            &[logits],
            &[&chosen],
            &saved,
            Rule::Own,
        );
        let bias = bias.map(|b| b.id);
        self.detail(Detail::Route { router, bias });
        chosen
    }

    /// Adds every expert's bias to its rows.
    ///
    /// # Errors
    /// When rows are terms of a sum: the bias would be added once for each.
    pub fn expert_bias(
        &mut self,
        scope: &str,
        rows: &DTensor,
        b: &DTensor,
    ) -> Result<DTensor, DTensorError> {
        if self.mesh().etp > 1 && rows.placements.on(Axis::Etp) == Placement::Partial {
            return Err(no_rule("expert bias", scope, &[rows, b]));
        }
        let out = self.bias(scope, rows, b);
        self.detail(Detail::ExpertBias);
        Ok(out)
    }

    /// Tokens copied to one row per choice, ordered by expert: `[b, s, h]` → `[b·s·k, h]`.
    pub fn permute(&mut self, scope: &str, x: &DTensor, k: u64) -> DTensor {
        let local = self.trace.tensor(x.id).shape.clone();
        let h = *local.last().expect("tokens have a width");
        let rows = local.iter().product::<u64>() / h * k;
        let name = format!("{scope}.permuted");
        let id = self.local_tensor(&name, vec![rows, h], x.dtype, TensorRole::Activation);
        let shape = vec![rows, h];
        let out = DTensor {
            id,
            shape,
            placements: Placements::REPLICATE,
            dtype: x.dtype,
        };
        self.record(scope, OpKind::Permute, &[x], &[&out], &[], Rule::Own);
        out
    }

    /// Rows back to tokens, weighted by the router: keeps the rows for the router's gradient.
    pub fn unpermute(
        &mut self,
        scope: &str,
        rows: &DTensor,
        probabilities: &DTensor,
        like: &DTensor,
    ) -> DTensor {
        let out = self.like(scope, like, like.dtype);
        let saved = [rows.id];
        self.record(
            scope,
            OpKind::Unpermute,
            &[rows, probabilities],
            &[&out],
            &saved,
            Rule::Own,
        );
        out
    }

    /// Rows exchanged between expert ranks, or back to where they were as `home`.
    pub fn dispatch(&mut self, scope: &str, rows: &DTensor, home: Option<&DTensor>) -> DTensor {
        if self.mesh().ep == 1 {
            return rows.clone();
        }
        let mut shape = self.trace.tensor(rows.id).shape.clone();
        shape[0] = match (home, self.plan.routing) {
            (Some(home), _) => home.shape[0],
            (None, Routing::Balanced) => shape[0],
            (None, Routing::Recorded(rows)) => rows.dispatched,
        };
        let name = format!("{scope}.exchanged");
        let id = self.local_tensor(&name, shape.clone(), rows.dtype, TensorRole::Activation);
        let out = DTensor {
            id,
            shape,
            ..rows.clone()
        };
        let collective = self.collective(CollectiveKind::AllToAll, Axis::Ep, rows.id, out.id);
        let to = Placement::Shard(0);
        let rule = Rule::Redistribute {
            axis: Axis::Ep,
            from: to,
            to,
        };
        self.record(
            scope,
            OpKind::Collective(collective),
            &[rows],
            &[&out],
            &[],
            rule,
        );
        let back = home.is_some();
        self.detail(Detail::Dispatch { back });
        out
    }

    /// Rows of all expert-tensor-parallel peers together, or summed and shared out as they were as
    /// `home`.
    pub fn expert_tensor_exchange(
        &mut self,
        scope: &str,
        rows: &DTensor,
        home: Option<&DTensor>,
    ) -> DTensor {
        let etp = self.mesh().etp;
        if etp == 1 {
            return rows.clone();
        }
        let mut shape = self.trace.tensor(rows.id).shape.clone();
        shape[0] = match (home, self.plan.routing) {
            (Some(home), _) => home.shape[0],
            (None, Routing::Balanced) => shape[0] * etp,
            (None, Routing::Recorded(rows)) => rows.gathered,
        };
        let gather = home.is_none();
        let name = format!("{scope}.gathered");
        let id = self.local_tensor(&name, shape.clone(), rows.dtype, TensorRole::Activation);
        let (kind, from, to) = if gather {
            (
                CollectiveKind::AllGather,
                Placement::Shard(0),
                Placement::Replicate,
            )
        } else {
            (
                CollectiveKind::ReduceScatter,
                Placement::Partial,
                Placement::Shard(0),
            )
        };
        let placements =
            Placements::REPLICATE.with(Axis::Etp, if gather { to } else { Placement::Replicate });
        let out = DTensor {
            id,
            shape,
            placements,
            dtype: rows.dtype,
        };
        let collective = self.collective(kind, Axis::Etp, rows.id, out.id);
        let rule = Rule::Redistribute {
            axis: Axis::Etp,
            from,
            to,
        };
        self.record(
            scope,
            OpKind::Collective(collective),
            &[rows],
            &[&out],
            &[],
            rule,
        );
        self.detail(Detail::ExpertTensor { gather });
        out
    }

    /// One product per local expert: `x: [rows, k]` ordered by expert, `w: [n, k]` each.
    ///
    /// # Errors
    /// When the experts' shards do not match.
    pub fn grouped_linear(
        &mut self,
        scope: &str,
        x: &DTensor,
        w: &DTensor,
        groups: u64,
    ) -> Result<DTensor, DTensorError> {
        let etp = self.mesh().etp;
        let placement = match (x.placements.on(Axis::Etp), w.placements.on(Axis::Etp)) {
            _ if etp == 1 => Placement::Replicate,
            (Placement::Replicate, Placement::Shard(0)) => Placement::Shard(1),
            (Placement::Replicate, Placement::Interleaved(0, g)) => Placement::Interleaved(1, g),
            (p, Placement::Shard(1)) if shards(p, 1) => Placement::Partial,
            _ => return Err(no_rule("grouped_linear", scope, &[x, w])),
        };
        let shape = [x.shape[0], w.shape[0]];
        let placements = x.placements.with(Axis::Etp, placement);
        let out = self.tensor(
            &format!("{scope}.output"),
            &shape,
            placements,
            x.dtype,
            TensorRole::Activation,
        );
        let input = self.trace.tensor(x.id).shape.clone();
        let n = self.trace.tensor(w.id).shape[0];
        let kind = OpKind::GroupedMatmul {
            groups,
            m: input[0],
            n,
            k: input[1],
        };
        self.record(scope, kind, &[x, w], &[&out], &[x.id], Rule::Own);
        Ok(out)
    }
}
