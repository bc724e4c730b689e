//! A decoder, written once for one device. It never mentions the mesh: the sharding plan gives placements at module
//! inputs and outputs.

use catalog::model::{Mlp, Moe, Position, Residual};
use catalog::{AdaptedModule, DType, LayerClass, LayerKind};
use dtensor::{DTensor, GatedUnit, Nonlinearity, Placement, Placements, Route, Site};

use crate::attention::{grouped, latent};
use crate::error::ModelError;
use crate::modules::Block;
use crate::recurrent;

impl Block<'_, '_, '_> {
    /// A decoder layer.
    pub(crate) fn layer(&mut self, class: LayerClass, x: DTensor) -> Result<DTensor, ModelError> {
        let n = self.names;
        match class.kind {
            LayerKind::AttentionThenFeedForward => {}
            LayerKind::RecurrenceThenFeedForward => {
                let normed = self.norm(n.norm1, &x);
                let mixed = recurrent::mixed(self, normed)?;
                let x = self.join(n.recurrence, &x, mixed)?;
                let normed = self.norm(n.norm2, &x);
                let fed = self.feed_forward(class, normed)?;
                return self.join(n.mlp, &x, fed);
            }
            LayerKind::Attention
            | LayerKind::Recurrence
            | LayerKind::FeedForward
            | LayerKind::Experts => {
                let normed = self.norm(n.norm1, &x);
                let made = self.alone(class, normed)?;
                return self.join(n.mlp, &x, made);
            }
        }
        match self.model.residual {
            Residual::Sequential => {
                let normed = self.norm(n.norm1, &x);
                let attended = self.attention(class, normed)?;
                let x = self.join(n.attention, &x, attended)?;
                let normed = self.norm(n.norm2, &x);
                let fed = self.feed_forward(class, normed)?;
                self.join(n.mlp, &x, fed)
            }
            Residual::Parallel { shared_norm } => {
                let first = self.norm(n.norm1, &x);
                let second = if shared_norm {
                    first.clone()
                } else {
                    self.norm(n.norm2, &x)
                };
                let attended = self.attention(class, first)?;
                let fed = self.feed_forward(class, second)?;
                let both = self.tape.add("residual", &attended, &fed)?;
                self.join("residual", &x, both)
            }
            Residual::Sandwich => {
                let normed = self.norm(n.norm1, &x);
                let attended = self.attention(class, normed)?;
                let attended = self.norm(n.norm2, &attended);
                let x = self.join(n.attention, &x, attended)?;
                let normed = self.norm("pre_feedforward_layernorm", &x);
                let fed = self.feed_forward(class, normed)?;
                let fed = self.norm("post_feedforward_layernorm", &fed);
                self.join(n.mlp, &x, fed)
            }
            Residual::After => self.normed_after(class, &x),
        }
    }

    /// A layer with norms after attention and feed-forward only.
    fn normed_after(&mut self, class: LayerClass, x: &DTensor) -> Result<DTensor, ModelError> {
        let n = self.names;
        let branch = self.tape.branch(x);
        let attended = self.attention(class, branch)?;
        let attended = self.norm(n.norm2, &attended);
        let x = self.join(n.attention, x, attended)?;
        let branch = self.tape.branch(&x);
        let fed = self.feed_forward(class, branch)?;
        let fed = self.norm("post_feedforward_layernorm", &fed);
        self.join(n.mlp, &x, fed)
    }

    /// The sublayer of a layer that has only one.
    fn alone(&mut self, class: LayerClass, x: DTensor) -> Result<DTensor, ModelError> {
        if class.kind.attends() {
            self.attention(class, x)
        } else if class.kind.recurs() {
            recurrent::mixed(self, x)
        } else {
            self.feed_forward(class, x)
        }
    }

    /// Adds a sublayer's output to the residual stream, after dropout if the model has any.
    fn join(&mut self, scope: &str, x: &DTensor, y: DTensor) -> Result<DTensor, ModelError> {
        let y = if self.model.hidden_dropout > 0.0 {
            self.tape.dropout(scope, &y, self.model.hidden_dropout)
        } else {
            y
        };
        Ok(self.tape.add(&format!("{scope}.residual"), x, &y)?)
    }

    fn attention(&mut self, class: LayerClass, x: DTensor) -> Result<DTensor, ModelError> {
        match self.model.attention.kind {
            catalog::model::AttentionKind::Grouped { .. } => grouped(self, class, x),
            catalog::model::AttentionKind::Latent { .. } => latent(self, class, x),
        }
    }

    fn feed_forward(&mut self, class: LayerClass, x: DTensor) -> Result<DTensor, ModelError> {
        match (self.model.moe, class.moe) {
            (Some(moe), true) => self.experts(&moe, x),
            _ => self.mlp(self.names.mlp, &self.model.mlp, self.model.mlp.ffn, x),
        }
    }

    /// A feed-forward block with inner width `ffn`.
    fn mlp(
        &mut self,
        module: &str,
        mlp: &Mlp,
        ffn: u64,
        x: DTensor,
    ) -> Result<DTensor, ModelError> {
        let n = self.names;
        let hidden = self.model.hidden;
        let flat = self.model.family == catalog::model::Family::Opt;
        let scope = |name: &str| {
            if flat {
                name.to_owned()
            } else {
                format!("{module}.{name}")
            }
        };
        let x = self.tape.at(&format!("{module}.input"), x)?;
        let activation = format!("{module}.act_fn");
        let mut into = |name: &str, width: u64| {
            let site = Site::FeedForwardInput;
            let y = self.linear(site, &scope(name), &x, width, hidden, mlp.bias)?;
            self.adapted(&[AdaptedModule::Fc1], &scope(name), &x, y)
        };
        let inner = if mlp.gated && mlp.fused_gate_up {
            let both = into(n.gate_up, 2 * ffn)?;
            self.tape
                .fused_gated_activation(&activation, self.gated_unit(), &both)
        } else if mlp.gated {
            let (gate, up) = (into(n.gate, ffn)?, into(n.up, ffn)?);
            self.tape
                .gated_activation(&activation, self.gated_unit(), &gate, &up)
        } else {
            let up = into(n.up, ffn)?;
            self.tape.activation(&activation, self.nonlinearity(), &up)
        };
        let (out, down) = (Site::FeedForwardOutput, scope(n.down));
        let y = self.linear(out, &down, &inner, hidden, ffn, mlp.bias)?;
        self.adapted(&[AdaptedModule::Fc2], &down, &inner, y)
    }

    fn nonlinearity(&self) -> Nonlinearity {
        Nonlinearity {
            function: self.model.mlp.activation,
            tanh: self.model.constants.gelu_tanh,
        }
    }

    fn gated_unit(&self) -> GatedUnit {
        match self.model.constants.bounded_glu {
            Some(limit) => GatedUnit::Bounded(limit),
            None => GatedUnit::Plain(self.nonlinearity()),
        }
    }

    /// Routed experts, plus the shared expert if the model has one.
    fn experts(&mut self, moe: &Moe, x: DTensor) -> Result<DTensor, ModelError> {
        let n = self.names;
        let router = format!("{}.{}", n.moe, n.router);
        let hidden = self.model.hidden;
        let logits = self.linear(Site::Router, &router, &x, moe.experts, hidden, moe.bias)?;
        let bias = moe.router_correction_bias.then(|| {
            let name = format!("{}.{}", n.moe, n.correction);
            self.tape.parameter(&name, &[moe.experts], DType::F32, 1)
        });
        let route = Route {
            router: self.model.constants.router,
            bias: bias.map(|b| b.id),
        };
        let chosen = self.tape.top_k(&router, &logits, moe.top_k, route);
        let scope = format!("{}.experts", n.moe);
        let weighs_inputs = route.router.weighs_inputs;
        let chosen_rows = match weighs_inputs {
            true => self.tape.permute_weighted(&scope, &x, &chosen),
            false => self.tape.permute(&scope, &x, moe.top_k),
        };
        let sent = self.tape.dispatch(&scope, &chosen_rows, None);
        let rows = self.tape.expert_tensor_exchange(&scope, &sent, None);
        let rows = self.expert_mlp(moe, &rows)?;
        let rows = self.tape.expert_tensor_exchange(&scope, &rows, Some(&sent));
        let rows = self.tape.dispatch(&scope, &rows, Some(&chosen_rows));
        let routed = match weighs_inputs {
            true => self.tape.unpermute_plain(&scope, &rows, &x),
            false => self.tape.unpermute(&scope, &rows, &chosen, &x),
        };
        if moe.shared_ffn == 0 {
            return Ok(routed);
        }
        // Runs before the shared expert, so that its input's gradients are always summed in the same order.
        let gate = format!("{}.shared_expert_gate", n.moe);
        let weight = match moe.shared_gate {
            true => Some(self.linear(Site::Other, &gate, &x, 1, hidden, false)?),
            false => None,
        };
        let module = format!("{}.{}", n.moe, n.shared);
        let input = self.tape.at(&format!("{}.input", n.shared), x.clone())?;
        let mut shared = self.mlp(&module, &self.model.mlp, moe.shared_ffn, input)?;
        shared = self
            .tape
            .at(&format!("{}.{}.output", n.shared, n.down), shared)?;
        if let Some(weight) = weight {
            shared = self.tape.gate(&gate, &shared, &weight)?;
        }
        Ok(self.tape.add(&scope, &routed, &shared)?)
    }

    fn expert_mlp(&mut self, moe: &Moe, rows: &DTensor) -> Result<DTensor, ModelError> {
        let hidden = self.model.hidden;
        let activation = format!("{}.experts.act_fn", self.names.moe);
        let (mlp, names) = (&self.model.mlp, self.names);
        let mut into =
            |name: &str, width: u64| self.expert_linear(moe, rows, name, [width, hidden]);
        let inner = if mlp.gated && mlp.fused_gate_up {
            let both = into(names.expert_gate_up, 2 * moe.expert_ffn)?;
            self.tape
                .fused_gated_activation(&activation, self.gated_unit(), &both)
        } else if mlp.gated {
            let gate = into(names.expert[0], moe.expert_ffn)?;
            let up = into(names.expert[1], moe.expert_ffn)?;
            self.tape
                .gated_activation(&activation, self.gated_unit(), &gate, &up)
        } else {
            let up = into(names.expert[1], moe.expert_ffn)?;
            self.tape.activation(&activation, self.nonlinearity(), &up)
        };
        self.expert_linear(moe, &inner, names.expert[2], [hidden, moe.expert_ffn])
    }

    /// One projection of all experts, given its index in [`Names::expert`](crate::names::Names::expert), with its
    /// bias.
    fn expert_linear(
        &mut self,
        moe: &Moe,
        x: &DTensor,
        name: &str,
        [out, inner]: [u64; 2],
    ) -> Result<DTensor, ModelError> {
        let groups = moe.experts.div_ceil(self.tape.mesh().ep);
        let scope = format!("{}.{}", self.names.moe, name);
        let (experts, dtype) = (moe.experts, self.dtype);
        let mut own = |name: &str, shape: &[u64]| {
            self.tape
                .parameter(&format!("{scope}.{name}"), shape, dtype, experts)
        };
        let w = own("weight", &[out, inner]);
        let b = moe.bias.then(|| own("bias", &[out]));
        let y = self.tape.grouped_linear(&scope, x, &w, groups)?;
        match b {
            Some(b) => Ok(self.tape.expert_bias(&scope, &y, &b)?),
            None => Ok(y),
        }
    }

    /// Token embedding with positions, norm and dropout, as far as the model has them.
    pub(crate) fn embedding(&mut self, batch: u64, sequence: u64) -> Result<DTensor, ModelError> {
        let n = self.names;
        let model = self.model;
        let table = format!("/{}", n.embedding);
        let shape = [model.vocab, model.hidden];
        let weight = self
            .tape
            .parameter(&format!("{table}.weight"), &shape, self.dtype, 1);
        let ids = self.token_ids(batch, sequence);
        let x = self.tape.embedding(n.embedding, &ids, &weight, self.dtype);
        let mut x = self.tape.at(&format!("{}.output", n.embedding), x)?;
        if model.constants.embedding_scale != 1.0 {
            let factor = model.constants.embedding_scale;
            x = self.tape.scale(n.embedding, &x, factor);
        }
        if let Position::Learned { rows } = model.position {
            let name = format!("/{}.weight", n.positions);
            let table = self
                .tape
                .parameter(&name, &[rows, model.hidden], self.dtype, 1);
            // The first rows of OPT's table belong to no position.
            let first = rows - model.max_position.min(rows);
            x = self.tape.positions(n.positions, &x, &table, first);
        }
        if model.embedding_norm {
            x = self.norm(&format!("/{}", n.embedding_norm), &x);
        }
        if model.hidden_dropout > 0.0 {
            x = self
                .tape
                .dropout(n.embedding, &x, self.model.hidden_dropout);
        }
        Ok(x)
    }

    /// Token ids: replicated over tensor parallelism, sharded by sequence over context parallelism.
    fn token_ids(&mut self, batch: u64, sequence: u64) -> DTensor {
        let placements = if self.tape.mesh().cp > 1 {
            Placements::REPLICATE.with(catalog::Axis::Cp, Placement::Shard(1))
        } else {
            Placements::REPLICATE
        };
        let shape = [batch, sequence];
        self.tape
            .constant("input_ids", &shape, placements, DType::I64)
    }

    /// Final norm, head and loss.
    pub(crate) fn head(&mut self, x: DTensor) -> Result<DTensor, ModelError> {
        let n = self.names;
        let x = self.norm(&format!("/{}", n.final_norm), &x);
        self.logits_and_loss(x)
    }

    fn logits_and_loss(&mut self, x: DTensor) -> Result<DTensor, ModelError> {
        let n = self.names;
        let model = self.model;
        let x = self.tape.at(&format!("{}.input", n.head), x)?;
        let name = if model.tied_embeddings {
            n.embedding
        } else {
            n.head
        };
        let shape = [model.vocab, model.hidden];
        let w = self
            .tape
            .parameter(&format!("/{name}.weight"), &shape, self.dtype, 1);
        let logits = self.tape.linear(n.head, &x, &w, Site::Other)?;
        let logits = if model.head_bias {
            let b =
                self.tape
                    .parameter(&format!("/{}.bias", n.head), &[model.vocab], self.dtype, 1);
            self.tape.bias(n.head, &logits, &b)
        } else {
            logits
        };
        let logits = match model.constants.logit_cap {
            Some(bound) => self.tape.cap(n.head, &logits, bound),
            None => logits,
        };
        let wide = self.tape.cast(n.head, &logits, DType::F32);
        Ok(self.tape.cross_entropy("loss", &wide))
    }

    /// DeepSeek-V3's multi-token-prediction module: norms of the hidden state and of the next token's embedding, their
    /// projection, a layer, and the shared head.
    pub(crate) fn prediction_module(
        &mut self,
        class: LayerClass,
        x: DTensor,
    ) -> Result<DTensor, ModelError> {
        let hidden = self.model.hidden;
        let h = self.norm("hnorm", &x);
        let e = self.norm("enorm", &x);
        let both = self.tape.add("eh_proj", &h, &e)?;
        let both = self.tape.at("eh_proj.input", both)?;
        let wide = self.tape.concatenated("eh_proj", &both, 2);
        let projected = self.linear(Site::Other, "eh_proj", &wide, hidden, 2 * hidden, false)?;
        let x = self.layer(class, projected)?;
        let x = self.norm("shared_head.norm", &x);
        self.logits_and_loss(x)
    }
}
