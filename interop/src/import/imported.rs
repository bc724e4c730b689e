//! Input of an importer beside the file, and its result.

use catalog::model::ModelConfig;
use catalog::runtime::Runtime;
use catalog::{Adapters, Precision, Workload, WorkloadSizes, Zero};

use super::document::Document;
use super::error::ImportError;
use super::kernels::SaidKernel;
use super::sizes::workload;
use super::titan_keys;
use crate::config::{Node, Value};
use crate::export::Dialect;
use plans::decisions::Decisions;

/// What the user says of a job, for what its configuration file leaves open.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The model that the file is for.
    pub model: &'a ModelConfig,
    /// Number of devices, where the file does not give it.
    pub gpus: Option<u64>,
    /// Tokens per sequence, where the file does not give them.
    pub seq_len: Option<u64>,
    /// Number of devices of a node, where the file does not give it.
    pub gpus_per_node: u64,
}

/// A configuration read as a strategy.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    /// The system and version that the file is for.
    pub dialect: Dialect,
    /// The decisions; their legality is not checked yet.
    pub decisions: Decisions,
    /// Number of devices, sequence length, batch, precision.
    pub workload: Workload,
    /// Adapters that are trained in place of the weights.
    pub adapters: Option<Adapters>,
    /// Sentences on settings that the strategy expresses only approximately, whatever the runtime.
    pub notes: Vec<String>,
    /// Kernels that the file switches.
    pub kernels: Vec<SaidKernel>,
}

impl Imported {
    /// The import of a file that trains all weights, without adapters.
    pub(super) fn new(
        doc: &Document,
        decisions: Decisions,
        sizes: WorkloadSizes,
        notes: Vec<String>,
    ) -> Result<Self, ImportError> {
        Ok(Self {
            dialect: doc.dialect,
            decisions,
            workload: workload(doc, sizes)?,
            adapters: None,
            notes,
            kernels: Vec::new(),
        })
    }

    /// The decisions in canonical form. An optional choice that equals the runtime's default is
    /// left unset (`None`).
    #[must_use]
    pub fn decisions_under(&self, model: &ModelConfig, runtime: &Runtime) -> Decisions {
        let decisions = self.decisions.clone();
        let under = decisions.under(runtime, self.workload.precision);
        let mut decisions = under.canonical(model);
        if decisions.cp == 1 {
            decisions.cp_kind = runtime.space.usual_cp_kind();
        }
        decisions
    }

    /// Sentences on settings that a prediction under a runtime follows only approximately.
    #[must_use]
    pub fn notes_under(&self, runtime: &Runtime) -> Vec<String> {
        let kernels = self.kernels.iter();
        let otherwise = kernels.filter_map(|said| said.note_under(runtime));
        let notes = self.notes.iter().map(String::as_str);
        notes.chain(otherwise).map(str::to_owned).collect()
    }

    /// Name of the runtime preset that runs such a strategy.
    #[must_use]
    pub fn runtime(&self, document: &Document) -> &'static str {
        let usual = self.dialect.runtime();
        let engine = document.find("deepspeed");
        let engine = engine.is_some_and(|node| !node.entries().is_empty())
            || document.find("distributed_type").and_then(Node::text) == Some("DEEPSPEED");
        let gathers = matches!(self.decisions.zero, Zero::Z2 | Zero::Z3);
        // In torchtitan from 0.2 on, `compile.components` is `[model, loss]` by default. From December 2024 (e8977b0) to April
        // 2025 (bbb1b61) the loss was not compiled.
        let components = document.find("compile.components").and_then(Node::list);
        let includes = |component: &str| {
            components.is_none_or(|list| list.iter().any(|of| of.text() == Some(component)))
        };
        let switched = document.flag("compile.enable").ok().flatten() == Some(true);
        let compiled = switched && includes("model");
        let loss = includes("loss") && !titan_keys::without_parallelism(&document.root);
        match usual {
            _ if engine => "hf-deepspeed",
            // LLaMA-Factory under torchrun: DDP, or FSDP by accelerate's settings, of weights in 32 bits (`init_adapter` in its
            // model/adapter.py).
            "hf-deepspeed" => "hf-trainer",
            // The Trainer runs the library's own layers; its preset has no axes beside data parallelism.
            "fsdp2" if self.dialect == Dialect::Axolotl && self.is_data_parallel() => "hf-trainer",
            "megatron-core" if gathers => "megatron-fsdp",
            "megatron-core" if self.holds_eight_bits(document) => "nemo",
            "torchtitan" if compiled && loss => "torchtitan-compile-2025",
            "torchtitan" if compiled => "torchtitan-compile",
            "torchtitan-2026" if compiled => "torchtitan-compile-2026",
            _ => usual,
        }
    }

    /// Whether data parallelism alone divides the work.
    fn is_data_parallel(&self) -> bool {
        let d = &self.decisions;
        [d.tp, d.pp, d.cp, d.ep].iter().all(|ranks| *ranks == 1)
    }

    /// Whether Megatron-LM or Megatron Bridge holds weights in 8 bits alone, as NeMo's recipes do.
    fn holds_eight_bits(&self, document: &Document) -> bool {
        let given = |key| document.flag(key).ok().flatten();
        let of_recipe = "mixed_precision.fp8_param_gather";
        self.workload.precision == Precision::Fp8
            && match self.dialect {
                Dialect::MegatronLm => given("--fp8-param-gather") == Some(true),
                Dialect::MegatronBridge => given(of_recipe).unwrap_or_else(|| {
                    // Named recipes but this switch it on; a `MixedPrecisionConfig` does not.
                    let recipe = document.find("mixed_precision").map(|node| &node.value);
                    recipe.is_some_and(|recipe| match recipe {
                        Value::Table(_) => false,
                        named => !named.shown().contains("subchannel"),
                    })
                }),
                _ => false,
            }
    }
}
