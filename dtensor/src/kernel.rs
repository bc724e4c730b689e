//! What an operator is called in profiles, with the local sizes that decide its time.

use catalog::Axis;
use catalog::model::NormKind;
use catalog::profile::Kernel;

use crate::epilogues::Epilogues;
use crate::placement::Placement;
use crate::trace::{Detail, Op, OpKind, Pass, SoftmaxRule, TensorRole, Trace};

impl Trace {
    /// The kernel that an operator runs unfused; `ranks` gives the ranks of a mesh axis.
    #[must_use]
    pub fn kernel(&self, op: &Op, ranks: impl Fn(Axis) -> u64) -> Kernel {
        self.named(self.operator(op), op, ranks)
    }

    /// The kernel that an operator runs on a GPU. A product that takes a GELU is another than one that does not, and
    /// that GELU is none: it takes no time. A fused attention is another with every mask and every number it draws.
    #[must_use]
    pub fn kernel_on_gpu(
        &self,
        op: &Op,
        epilogues: &Epilogues,
        ranks: impl Fn(Axis) -> u64,
    ) -> Kernel {
        let name = self.operator(op);
        let forward = op.pass == Pass::Forward;
        let ops = if forward {
            &self.forward
        } else {
            &self.backward
        };
        let known = matches!(op.kind, OpKind::Matmul { .. } | OpKind::Activation { .. });
        let at = ops.iter().position(|other| known && other == op);
        let name = match (at, forward) {
            (Some(at), true) if epilogues.gelu(at).is_some() => format!("gelu of {name}"),
            (Some(at), true) if epilogues.is_gelu(at) => format!("{name} in matmul"),
            (Some(at), false) if epilogues.gelu_gradient(at).is_some() => format!("gelu of {name}"),
            (Some(at), false) if epilogues.is_gelu_gradient(at) => format!("{name} in matmul"),
            _ => name + &self.fused_with(op),
        };
        self.named(name, op, ranks)
    }

    /// What core attention does beside its products, where they are all of one kernel.
    fn fused_with(&self, op: &Op) -> String {
        let op = match op.detail {
            Detail::Gradient { of, .. } => &self.forward[of],
            _ => op,
        };
        let (OpKind::AttentionScores(shape) | OpKind::AttentionContext(shape)) = op.kind else {
            return String::new();
        };
        let Some(pieces) = self.attention_pieces(&op.scope) else {
            return String::new();
        };
        let drops = |at: usize| matches!(self.forward[at].detail, Detail::Dropout { probability } if probability > 0.0);
        let rule = self.softmax_rule(pieces.scores);
        let ruled = |by: fn(SoftmaxRule) -> bool| rule.is_some_and(by);
        let has = [
            (!shape.causal, " both ways"),
            (pieces.dropout.is_some_and(drops), " dropout"),
            (ruled(|rule| rule.cap.is_some()), " bounded"),
            (ruled(|rule| rule.sinks.is_some()), " sinks"),
            (ruled(|rule| rule.alibi.is_some()), " alibi"),
        ];
        let named = has.iter().filter(|(has, _)| *has).map(|(_, name)| *name);
        let window = shape.window.filter(|&window| window < shape.kv_len);
        let window = window.map(|window| format!(" window {window}"));
        named.map(str::to_owned).chain(window).collect()
    }

    fn named(&self, name: String, op: &Op, ranks: impl Fn(Axis) -> u64) -> Kernel {
        let pass = match op.pass {
            Pass::Forward => "forward",
            Pass::BackwardInput => "backward",
            Pass::BackwardWeight => "weight gradient",
        };
        let name = format!("{name} {pass} {}", self.element_type(op));
        Kernel::new(name, self.sizes(op, ranks))
    }

    /// Operator and variant.
    fn operator(&self, op: &Op) -> String {
        let (forward, input) = match op.detail {
            Detail::Gradient { of, input } => (&self.forward[of], input),
            _ => (op, None),
        };
        // Gradients of queries and of keys are different products.
        let input = input.map_or_else(String::new, |i| format!(" of input {i}"));
        let name = match op.kind {
            OpKind::Matmul { .. } => "matmul",
            OpKind::GroupedMatmul { .. } => "grouped matmul",
            OpKind::AttentionScores(_) => "attention scores",
            OpKind::AttentionContext(_) => "attention context",
            OpKind::Softmax(_) => "softmax",
            OpKind::Norm => match forward.detail {
                Detail::Norm {
                    kind: NormKind::RmsNorm,
                    ..
                } => "rms norm",
                _ => "layer norm",
            },
            OpKind::Activation { .. } => return format!("{}{input}", activation(forward)),
            OpKind::Add => "add",
            OpKind::Bias => "bias",
            OpKind::Dropout => "dropout",
            OpKind::Rope => "rotary embedding",
            OpKind::Scale => "scale",
            OpKind::Copy => "copy",
            OpKind::Embedding => "embedding",
            OpKind::CrossEntropy => "cross-entropy",
            OpKind::TopK => "routing",
            OpKind::Permute => "permute",
            OpKind::Unpermute => "unpermute",
            OpKind::Collective(_) => return collective(op),
        };
        format!("{name}{input}")
    }

    /// Type that a product casts its operands to, or of the first operand that is no index.
    fn element_type(&self, op: &Op) -> String {
        if self.is_eight_bit(op) {
            return "f8".to_owned();
        }
        let mut types = op
            .inputs
            .iter()
            .chain(&op.outputs)
            .map(|&id| self.tensor(id).dtype);
        let float = types.find(|d| matches!(d, catalog::DType::F32 | catalog::DType::Bf16));
        format!("{:?}", float.unwrap_or(catalog::DType::F32)).to_lowercase()
    }

    fn sizes(&self, op: &Op, ranks: impl Fn(Axis) -> u64) -> Vec<u64> {
        match op.kind {
            OpKind::Matmul { m, n, k } => vec![m, n, k],
            OpKind::GroupedMatmul { groups, m, n, k } => vec![groups, m, n, k],
            OpKind::AttentionScores(s) => vec![s.batch * s.heads, s.q_len, s.kv_len, s.qk_dim],
            OpKind::AttentionContext(s) => vec![s.batch * s.heads, s.q_len, s.kv_len, s.v_dim],
            OpKind::Softmax(s) => vec![s.batch * s.heads * s.q_len, s.kv_len],
            OpKind::Collective(c) => vec![ranks(c.axis), self.largest(op)],
            _ => {
                let elements = self.largest(op);
                let columns = self.columns(op).clamp(1, elements);
                vec![elements.div_ceil(columns), columns]
            }
        }
        .into_iter()
        .map(|size| size.max(1))
        .collect()
    }

    /// Elements of the largest activation an operator touches.
    fn largest(&self, op: &Op) -> u64 {
        let ids = op.inputs.iter().chain(&op.outputs);
        ids.map(|&id| self.tensor(id))
            .filter(|t| t.role != TensorRole::Parameter)
            .map(crate::trace::TensorInfo::elements)
            .max()
            .unwrap_or(1)
    }

    /// Its last dimension.
    fn columns(&self, op: &Op) -> u64 {
        let ids = op.inputs.iter().chain(&op.outputs);
        ids.map(|&id| self.tensor(id))
            .filter(|t| t.role != TensorRole::Parameter)
            .max_by_key(|t| t.elements())
            .and_then(|t| t.shape.last().copied())
            .unwrap_or(1)
    }
}

fn activation(forward: &Op) -> String {
    let gated = matches!(forward.kind, OpKind::Activation { gated: true });
    match forward.detail {
        Detail::Activation { function, tanh } => {
            let name = format!("{function:?}").to_lowercase();
            let tanh = if tanh { " tanh" } else { "" };
            format!("{name}{tanh}{}", if gated { " gated" } else { "" })
        }
        _ => "activation".to_owned(),
    }
}

fn collective(op: &Op) -> String {
    let placement = |p: Placement| match p {
        Placement::Replicate => "replicate".to_owned(),
        Placement::Partial => "partial".to_owned(),
        Placement::Shard(dim) | Placement::Interleaved(dim, _) => format!("shard {dim}"),
    };
    match op.detail {
        Detail::Redistribute { from, to, .. } => {
            format!("{} to {}", placement(from), placement(to))
        }
        Detail::Dispatch { back: false } => "dispatch".to_owned(),
        Detail::Dispatch { back: true } => "combine".to_owned(),
        Detail::ExpertTensor { gather: true } => "expert gather".to_owned(),
        Detail::ExpertTensor { gather: false } => "expert reduce".to_owned(),
        Detail::VocabularySums { .. } => "vocabulary sums".to_owned(),
        _ => "ring exchange".to_owned(),
    }
}
