//! Names of operators in profiles, with the local sizes that decide their time.

use catalog::profile::Kernel;
use catalog::{Axis, Window};

use crate::epilogues::Epilogues;
use crate::operator::{AttentionPiece, CostClass, Gemm, Operator, Product};
use crate::tensor::TensorInfo;
use crate::trace::{AnyOp, Pass, Trace};

impl Trace {
    /// The kernel of an operator without fusion; `ranks` gives the size of a mesh axis.
    #[must_use]
    pub fn kernel(&self, op: AnyOp<'_>, ranks: impl Fn(Axis) -> u64) -> Kernel {
        let name = op.operator.class(op.factor).0.to_string();
        self.named(&name, op, ranks)
    }

    /// The kernel of an operator on a GPU. A product with a fused GELU is a kernel of its own, and the GELU then takes
    /// no time. A fused attention is a different kernel for each mask and each softmax variant.
    #[must_use]
    pub fn kernel_on_gpu(
        &self,
        op: AnyOp<'_>,
        epilogues: &Epilogues,
        ranks: impl Fn(Axis) -> u64,
    ) -> Kernel {
        let name = op.operator.class(op.factor).0;
        let [takes, taken] = match op.pass {
            Pass::Forward => [
                epilogues.gelu(op.index).is_some(),
                epilogues.is_gelu(op.index) || epilogues.is_bias(op.index),
            ],
            Pass::BackwardInput | Pass::BackwardWeight => [
                epilogues.gelu_gradient(op.index).is_some(),
                epilogues.is_gelu_gradient(op.index),
            ],
        };
        let name = match [takes, taken] {
            [true, _] => format!("gelu of {name}"),
            [_, true] => format!("{name} in matmul"),
            _ => format!("{name}{}", self.fused_with(op.operator)),
        };
        self.named(&name, op, ranks)
    }

    /// The suffix that names what core attention does in addition to its products when it runs as
    /// one kernel.
    fn fused_with(&self, operator: Operator) -> String {
        use AttentionPiece::{Context, Scores};
        let Operator::Attention(attention) = operator else {
            return String::new();
        };
        let (shape, pieces) = (attention.shape, self.attentions[attention.of]);
        if !matches!(attention.piece, Scores | Context) {
            return String::new();
        }
        let has = [
            (!shape.causal, " both ways"),
            (pieces.dropout.is_some(), " dropout"),
            (pieces.rule.cap.is_some(), " bounded"),
            (pieces.rule.sinks.is_some(), " sinks"),
            (pieces.rule.alibi.is_some(), " alibi"),
        ];
        let named = has.iter().filter(|(has, _)| *has).map(|(_, name)| *name);
        let window = shape.window.filter(|w| w.tokens() < shape.kv_len);
        let window = window.map(|window| match window {
            Window::Sliding(tokens) => format!(" window {tokens}"),
            Window::Chunk(tokens) => format!(" chunk {tokens}"),
        });
        named.map(str::to_owned).chain(window).collect()
    }

    fn named(&self, name: &str, op: AnyOp<'_>, ranks: impl Fn(Axis) -> u64) -> Kernel {
        let pass = match op.pass {
            Pass::Forward => "forward",
            Pass::BackwardInput => "backward",
            Pass::BackwardWeight => "weight gradient",
        };
        let name = format!("{name} {pass} {}", self.element_type(op));
        Kernel::new(name, self.sizes(op, ranks))
    }

    /// Element type in a kernel's name: FP8 for products that cast their operands, else that of the first non-index
    /// operand.
    fn element_type(&self, op: AnyOp<'_>) -> String {
        if matches!(op.operator, Operator::Product(product) if self.is_eight_bit(product)) {
            return "f8".to_owned();
        }
        let mut types = op
            .inputs
            .iter()
            .chain(op.outputs)
            .map(|&id| self.tensor(id).dtype);
        let float = types.find(|d| matches!(d, catalog::DType::F32 | catalog::DType::Bf16));
        format!("{:?}", float.unwrap_or(catalog::DType::F32)).to_lowercase()
    }

    fn sizes(&self, op: AnyOp<'_>, ranks: impl Fn(Axis) -> u64) -> Vec<u64> {
        let sizes = match op.cost() {
            CostClass::Product(Product::Matmul(Gemm { m, n, k }, _)) => vec![m, n, k],
            CostClass::Product(Product::GroupedMatmul(Gemm { m, n, k }, of)) => vec![of, m, n, k],
            CostClass::AttentionScores(s) => vec![s.batch * s.heads, s.q_len, s.kv_len, s.qk_dim],
            CostClass::AttentionContext(s) => vec![s.batch * s.heads, s.q_len, s.kv_len, s.v_dim],
            CostClass::Softmax(s) => vec![s.batch * s.heads * s.q_len, s.kv_len],
            CostClass::Scan(scan) => scan.sizes(),
            CostClass::Collective(c) => vec![ranks(c.axis), self.elements(op)],
            _ => {
                let elements = self.elements(op);
                let columns = self.largest(op).and_then(|t| t.shape.last().copied());
                let columns = columns.unwrap_or(1).clamp(1, elements);
                vec![elements.div_ceil(columns), columns]
            }
        };
        sizes.into_iter().map(|size| size.max(1)).collect()
    }

    /// Elements of the largest activation that an operator reads or writes.
    fn elements(&self, op: AnyOp<'_>) -> u64 {
        self.largest(op).map_or(1, TensorInfo::elements)
    }

    /// The largest activation that an operator reads or writes.
    fn largest(&self, op: AnyOp<'_>) -> Option<&TensorInfo> {
        let ids = op.inputs.iter().chain(op.outputs);
        ids.map(|&id| self.tensor(id))
            .filter(|t| !t.role.is_weight())
            .max_by_key(|t| t.elements())
    }
}
