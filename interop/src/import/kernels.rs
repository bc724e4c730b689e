//! Kernels that a Megatron-LM script fuses or splits, and checkpoints of LLaMA-Factory and axolotl that stop early or not, with
//! notes for runtimes that do the opposite.

use catalog::Zero;
use catalog::model::{Activation, ModelConfig, Position};
use catalog::runtime::{AttentionKernel, Rewrite, Runtime};

use super::document::Document;
use super::error::ImportError;
use crate::config::Value;
use crate::export::Dialect;
use plans::decisions::Decisions;

/// Whether an option has an effect on a plan of a model.
pub(super) type When = fn(&Decisions, &ModelConfig) -> bool;

/// A kernel that a file fuses or not, or checkpoints that a file lets stop early or not.
#[derive(Clone, Debug, PartialEq)]
pub struct SaidKernel {
    kernel: Kernel,
    fused: bool,
    note: String,
}

/// What a fused kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    Attention,
    Of(Rewrite),
}

impl SaidKernel {
    /// The note on it, if the runtime does not do what the file says.
    pub(super) fn note_under(&self, runtime: &Runtime) -> Option<&str> {
        let fused = match self.kernel {
            Kernel::Attention => runtime.attention != AttentionKernel::Unfused,
            Kernel::Of(rewrite) => runtime.rewrites.contains(&rewrite),
        };
        (fused != self.fused).then_some(self.note.as_str())
    }
}

/// The option that selects the attention kernel, and its values that select a fused one.
const ATTENTION: (&str, [&str; 3]) = ("--attention-backend", ["auto", "flash", "fused"]);

/// The option by which one kernel sorts tokens for their experts.
const PERMUTE: &str = "--moe-permute-fusion";

/// Other options: the plans on which each has an effect, the kernel, whether the option makes it a
/// fused one, and what is planned under runtimes that do the opposite.
const SWITCHES: [(&str, When, Rewrite, bool, &str); 7] = [
    (
        "--cross-entropy-loss-fusion",
        |_, _| true,
        Rewrite::FuseCrossEntropy,
        true,
        "a loss of several kernels",
    ),
    (
        "--no-bias-dropout-fusion",
        |_, _| true,
        Rewrite::FuseBiasDropoutAdd,
        false,
        "the fused kernel of bias, dropout and sum",
    ),
    (
        "--no-gradient-accumulation-fusion",
        |d, _| d.zero <= Zero::Z1,
        Rewrite::FuseGradientAccumulation,
        false,
        "gradients that matrix products add up themselves",
    ),
    (
        "--no-rope-fusion",
        |_, model| matches!(model.position, Position::Rope { .. }),
        Rewrite::FuseRope,
        false,
        "the fused kernel of rotation",
    ),
    (
        "--no-bias-swiglu-fusion",
        |_, model| model.mlp.gated && model.mlp.activation == Activation::Silu,
        Rewrite::FuseSwiglu,
        false,
        "the fused kernel of SwiGLU",
    ),
    (
        "--no-bias-gelu-fusion",
        |_, model| model.mlp.bias && model.mlp.activation == Activation::Gelu,
        Rewrite::FuseBiasGelu,
        false,
        "the fused kernel of GELU",
    ),
    (
        PERMUTE,
        |_, model| model.moe.is_some(),
        Rewrite::FusePermute,
        true,
        "several kernels that sort tokens",
    ),
];

/// Whether an option switches a kernel.
pub(super) fn switches(option: &str) -> bool {
    option == ATTENTION.0 || SWITCHES.iter().any(|(name, ..)| *name == option)
}

/// The kernels that a script switches.
pub(super) fn said(doc: &Document, model: &ModelConfig, d: &Decisions) -> Vec<SaidKernel> {
    let set = |option: &str| {
        let value = &doc.root.get(option)?.value;
        (!matches!(value, Value::Null | Value::Bool(false))).then_some(value)
    };
    let note = |option: &str, value: &str, planned: &str| {
        let (place, said) = (doc.place(option), doc.in_own_words(option, value));
        format!("{place}: {said} is planned as {planned}")
    };
    let switched = SWITCHES.iter().filter_map(|row| {
        let (option, when, rewrite, fused, planned) = *row;
        set(option).filter(|_| when(d, model))?;
        Some(SaidKernel {
            kernel: Kernel::Of(rewrite),
            fused,
            note: note(option, "", planned),
        })
    });
    let attention = set(ATTENTION.0).map(|value| {
        let backend = value.plain();
        let fused = ATTENTION.1.contains(&backend.as_str());
        let planned = if fused { "unfused" } else { "fused" };
        SaidKernel {
            kernel: Kernel::Attention,
            fused,
            note: note(
                ATTENTION.0,
                &format!(" {backend}"),
                &format!("{planned} attention"),
            ),
        }
    });
    let unsorted = model.moe.is_some() && doc.root.get(PERMUTE).is_none();
    let unsorted = unsorted.then(|| SaidKernel {
        kernel: Kernel::Of(Rewrite::FusePermute),
        fused: false,
        note: assumed(doc, PERMUTE, "tokens are sorted by several kernels"),
    });
    switched.chain(attention).chain(unsorted).collect()
}

/// What checkpoints of LLaMA-Factory and axolotl do: they run whole layers again unless the file switches re-entrance off
/// (LLaMA-Factory, hparams/model_args.py, `use_reentrant_gc`; axolotl@067b021, utils/config/__init__.py, `normalize_config`).
pub(super) fn checkpoints(doc: &Document) -> Result<SaidKernel, ImportError> {
    let key = match doc.dialect {
        Dialect::Axolotl => "gradient_checkpointing_kwargs.use_reentrant",
        _ => "use_reentrant_gc",
    };
    let stop_early = doc.flag(key)? == Some(false);
    let planned = match stop_early {
        true => "checkpoints that stop early are planned as ones that run whole layers again",
        false => &format!(
            "checkpoints run whole layers again unless {key} is false; the plan has ones that stop early"
        ),
    };
    Ok(SaidKernel {
        kernel: Kernel::Of(Rewrite::EarlyStopRecompute),
        fused: stop_early,
        note: doc.note(key, planned),
    })
}

/// What axolotl's FSDP does with the embedding: its root module gathers and frees it with the head (axolotl@067b021,
/// monkeypatch/accelerate/fsdp2.py); `None` where nothing frees an embedding by itself.
pub(super) fn embedding(doc: &Document, model: &ModelConfig, d: &Decisions) -> Option<SaidKernel> {
    let frees = d.zero == Zero::Z3 && d.reshard_after_forward && !model.tied_embeddings;
    let planned = "axolotl keeps the embedding gathered until backward ends; the plan frees it after its forward pass, \
                   which takes less memory";
    (frees && doc.dialect == Dialect::Axolotl).then(|| SaidKernel {
        kernel: Kernel::Of(Rewrite::FreeEmbedding),
        fused: false,
        note: doc.note("fsdp_config", planned),
    })
}

/// A note on a switch that the plan assumes and the script does not set.
pub(super) fn assumed(doc: &Document, key: &str, without: &str) -> String {
    let path = &doc.path;
    format!(
        "{path}: the plan assumes {key}, which the script does not set: without it {without}, which takes longer"
    )
}
