//! A decoder, written once for one device. It never mentions the mesh: the sharding plan gives placements at module
//! inputs and outputs.

use catalog::model::{AttentionKind, Family, Moe, Position, Residual};
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
        let (residual, mixer) = match class.kind {
            LayerKind::AttentionThenFeedForward => (self.model.residual, n.attention),
            LayerKind::RecurrenceThenFeedForward => (Residual::Sequential, n.recurrence),
            LayerKind::Attention
            | LayerKind::Recurrence
            | LayerKind::FeedForward
            | LayerKind::Experts => {
                let norms = [Some(n.norm1), None];
                return self.sublayer(&x, norms, n.mlp, |block, x| match class.kind.feeds() {
                    true => block.feed_forward(class, x),
                    false => block.mixed(class, x),
                });
            }
        };
        let [before, after] = ["pre_feedforward_layernorm", "post_feedforward_layernorm"];
        let [first, second] = match residual {
            Residual::Parallel { shared_norm } => return self.parallel(class, &x, shared_norm),
            Residual::Sequential => [[Some(n.norm1), None], [Some(n.norm2), None]],
            Residual::Sandwich => [[Some(n.norm1), Some(n.norm2)], [Some(before), Some(after)]],
            Residual::After => [[None, Some(n.norm2)], [None, Some(after)]],
        };
        let x = self.sublayer(&x, first, mixer, |block, x| block.mixed(class, x))?;
        self.sublayer(&x, second, n.mlp, |block, x| block.feed_forward(class, x))
    }

    /// A sublayer beside the residual stream, with a norm before and one after it where they have names.
    fn sublayer(
        &mut self,
        x: &DTensor,
        [before, after]: [Option<&str>; 2],
        scope: &str,
        made: impl FnOnce(&mut Self, DTensor) -> Result<DTensor, ModelError>,
    ) -> Result<DTensor, ModelError> {
        let input = match before {
            Some(norm) => self.norm(norm, x),
            None => self.tape.branch(x),
        };
        let mut y = made(self, input)?;
        if let Some(norm) = after {
            y = self.norm(norm, &y);
        }
        self.join(scope, x, y)
    }

    /// A layer whose attention and feed-forward block run beside each other.
    fn parallel(
        &mut self,
        class: LayerClass,
        x: &DTensor,
        shared_norm: bool,
    ) -> Result<DTensor, ModelError> {
        let n = self.names;
        let first = self.norm(n.norm1, x);
        let second = match shared_norm {
            true => first.clone(),
            false => self.norm(n.norm2, x),
        };
        let attended = self.mixed(class, first)?;
        let fed = self.feed_forward(class, second)?;
        let both = self.tape.add("residual", &attended, &fed)?;
        self.join("residual", x, both)
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

    /// What mixes the tokens of a sequence: attention, or a recurrence.
    fn mixed(&mut self, class: LayerClass, x: DTensor) -> Result<DTensor, ModelError> {
        match self.model.attention.kind {
            _ if class.kind.recurs() => recurrent::mixed(self, x),
            AttentionKind::Grouped { .. } => grouped(self, class, x),
            AttentionKind::Latent { .. } => latent(self, class, x),
        }
    }

    fn feed_forward(&mut self, class: LayerClass, x: DTensor) -> Result<DTensor, ModelError> {
        match (self.model.moe, class.moe) {
            (Some(moe), true) => self.experts(&moe, x),
            _ => self.mlp(self.names.mlp, self.model.mlp.ffn, x),
        }
    }

    /// A feed-forward block with inner width `ffn`.
    fn mlp(&mut self, module: &str, ffn: u64, x: DTensor) -> Result<DTensor, ModelError> {
        let n = self.names;
        let (hidden, bias) = (self.model.hidden, self.model.mlp.bias);
        let flat = self.model.family == Family::Opt;
        let scope = |name: &str| match flat {
            true => name.to_owned(),
            false => format!("{module}.{name}"),
        };
        let x = self.tape.at(&format!("{module}.input"), x)?;
        let activation = format!("{module}.act_fn");
        let names = [n.gate_up, n.gate, n.up];
        let inner = self.activated(&activation, names, ffn, |block, name, width| {
            let site = Site::FeedForwardInput;
            let y = block.linear(site, &scope(name), &x, width, hidden, bias)?;
            block.adapted(&[AdaptedModule::Fc1], &scope(name), &x, y)
        })?;
        let (out, down) = (Site::FeedForwardOutput, scope(n.down));
        let y = self.linear(out, &down, &inner, hidden, ffn, bias)?;
        self.adapted(&[AdaptedModule::Fc2], &down, &inner, y)
    }

    /// The activation of a feed-forward block of inner width `ffn`, after projections by `into`, whose names are of gate and up
    /// in one, of the gate, and of up.
    fn activated(
        &mut self,
        scope: &str,
        [both, gate, up]: [&str; 3],
        ffn: u64,
        into: impl Fn(&mut Self, &str, u64) -> Result<DTensor, ModelError>,
    ) -> Result<DTensor, ModelError> {
        let mlp = &self.model.mlp;
        if mlp.gated && mlp.fused_gate_up {
            let (both, unit) = (into(self, both, 2 * ffn)?, self.gated_unit());
            return Ok(self.tape.fused_gated_activation(scope, unit, &both));
        }
        if mlp.gated {
            let (gate, up) = (into(self, gate, ffn)?, into(self, up, ffn)?);
            let unit = self.gated_unit();
            return Ok(self.tape.gated_activation(scope, unit, &gate, &up));
        }
        let (up, function) = (into(self, up, ffn)?, self.nonlinearity());
        Ok(self.tape.activation(scope, function, &up))
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
        let x = self.tape.at(&format!("{}.tokens", n.moe), x)?;
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
        let shared_rows = self
            .tape
            .at(&format!("{}.rows", n.moe), chosen_rows.clone())?;
        let sent = self.tape.dispatch(&scope, &shared_rows, None);
        // Ranks that have all tokens have all rows that their shares of the experts' weights multiply.
        let shares = self.tape.shares_rows();
        let rows = match shares {
            true => sent.clone(),
            false => self.tape.expert_tensor_exchange(&scope, &sent, None),
        };
        let mut rows = self.expert_mlp(moe, &rows)?;
        if !shares {
            rows = self.tape.expert_tensor_exchange(&scope, &rows, Some(&sent));
        }
        let rows = self.tape.dispatch(&scope, &rows, Some(&chosen_rows));
        let routed = match weighs_inputs {
            true => self.tape.unpermute_plain(&scope, &rows, &x),
            false => self.tape.unpermute(&scope, &rows, &chosen, &x),
        };
        let y = match moe.shared_ffn {
            0 => routed,
            _ => self.with_shared_expert(moe, x, &routed)?,
        };
        Ok(self.tape.at(&format!("{}.sum", n.moe), y)?)
    }

    /// What the routed experts computed, plus what the shared expert computes of the same tokens.
    fn with_shared_expert(
        &mut self,
        moe: &Moe,
        x: DTensor,
        routed: &DTensor,
    ) -> Result<DTensor, ModelError> {
        let (n, hidden) = (self.names, self.model.hidden);
        // Runs before the shared expert, so that its input's gradients are always summed in the same order.
        let gate = format!("{}.shared_expert_gate", n.moe);
        let weight = match moe.shared_gate {
            true => Some(self.linear(Site::Other, &gate, &x, 1, hidden, false)?),
            false => None,
        };
        let module = format!("{}.{}", n.moe, n.shared);
        let input = self.tape.at(&format!("{}.input", n.shared), x)?;
        let mut shared = self.mlp(&module, moe.shared_ffn, input)?;
        shared = self
            .tape
            .at(&format!("{}.{}.output", n.shared, n.down), shared)?;
        if let Some(weight) = weight {
            shared = self.tape.gate(&gate, &shared, &weight)?;
        }
        let scope = format!("{}.experts", n.moe);
        Ok(self.tape.add(&scope, routed, &shared)?)
    }

    fn expert_mlp(&mut self, moe: &Moe, rows: &DTensor) -> Result<DTensor, ModelError> {
        let hidden = self.model.hidden;
        let activation = format!("{}.experts.act_fn", self.names.moe);
        let n = self.names;
        let names = [n.expert_gate_up, n.expert[0], n.expert[1]];
        let inner = self.activated(&activation, names, moe.expert_ffn, |block, name, width| {
            block.expert_linear(moe, rows, name, [width, hidden])
        })?;
        self.expert_linear(moe, &inner, n.expert[2], [hidden, moe.expert_ffn])
    }

    /// One linear layer of all experts, with its bias if experts have biases. `name` is from
    /// [`Names::expert`](crate::names::Names::expert) or is the fused gate and up.
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

    /// Token embedding, with the positions, norm and dropout that the model has.
    pub(crate) fn embedding(&mut self, batch: u64, sequence: u64) -> Result<DTensor, ModelError> {
        let n = self.names;
        let model = self.model;
        let table = format!("/{}", n.embedding);
        let shape = [model.vocab, model.hidden];
        let weight = self.weight(&format!("{table}.weight"), &shape);
        let ids = self.token_ids(batch, sequence);
        let x = self.tape.embedding(n.embedding, &ids, &weight, self.dtype);
        let mut x = self.tape.at(&format!("{}.output", n.embedding), x)?;
        if model.constants.embedding_scale != 1.0 {
            let factor = model.constants.embedding_scale;
            x = self.tape.scale(n.embedding, &x, factor);
        }
        if let Position::Learned { rows } = model.position {
            let name = format!("/{}.weight", n.positions);
            let table = self.weight(&name, &[rows, model.hidden]);
            // The first rows of OPT's table belong to no position.
            let first = rows - model.max_position.min(rows);
            x = self.tape.positions(n.positions, &x, &table, first);
        }
        if model.embedding_norm {
            x = self.norm(&format!("/{}", n.embedding_norm), &x);
        }
        if model.hidden_dropout > 0.0 {
            x = self.tape.dropout(n.embedding, &x, model.hidden_dropout);
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
        let x = self.norm(&format!("/{}", self.names.final_norm), &x);
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
        let w = self.weight(&format!("/{name}.weight"), &shape);
        let logits = self.tape.linear(n.head, &x, &w, Site::Vocabulary)?;
        let logits = if model.head_bias {
            let b = self.weight(&format!("/{}.bias", n.head), &[model.vocab]);
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

    /// DeepSeek-V3's multi-token-prediction module: two norms, their projection, a layer and the
    /// shared head. The hidden state stands in for the next token's embedding (same shape).
    pub(crate) fn prediction_module(
        &mut self,
        class: LayerClass,
        x: DTensor,
    ) -> Result<DTensor, ModelError> {
        let hidden = self.model.hidden;
        let h = self.norm("hnorm", &x);
        let e = self.norm("enorm", &x);
        let both = self.tape.join("eh_proj.join", &h, &e, 1);
        let both = self.tape.at("eh_proj.input", both)?;
        let projected = self.linear(Site::Other, "eh_proj", &both, hidden, 2 * hidden, false)?;
        let projected = self.tape.at("eh_proj.tokens", projected)?;
        let x = self.layer(class, projected)?;
        let x = self.norm("shared_head.norm", &x);
        self.logits_and_loss(x)
    }
}
