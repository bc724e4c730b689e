//! Configurations of training systems, one target for each dialect: read, checked, imported, priced,
//! and exported again.

use costmodel::Scenario;
use interop::check::check;
use interop::export::Dialect;
use interop::import::{Document, Given, ImportError, import};
use plans::Strategy;

use crate::mutate;
use crate::outcome::Outcome;
use crate::promises;
use crate::rng::Rng;
use crate::scene::Scene;
use crate::target::{Depth, Pool, Target};
use crate::tree::{self, Format};

#[derive(Clone, Copy)]
struct Documents(Dialect);

/// Plans of several shapes, so that every exporter takes some.
const PLANS: [(&str, &str); 15] = [
    ("llama3-8b", ""),
    ("llama3-8b", "zero=3"),
    ("llama3-8b", "tp=4,pp=2,zero=1"),
    ("llama3-8b", "tp=2,pp=2,vpp=4,zero=1,schedule=interleaved"),
    ("llama3-8b", "tp=2,pp=4,zero=1,stages=7/9/9/7"),
    (
        "llama3-8b",
        "tp=2,cp=4,cp_kind=all_gather,zero=3,recompute=selective_ops",
    ),
    ("llama3-8b", "pp=4,vpp=2,schedule=zb-v,zero=3"),
    ("llama3-8b", "tp=2,sp=off,zero=2"),
    ("llama3-8b", "cp=4,cp_kind=all_to_all,zero=3"),
    ("mixtral-8x7b", "tp=2,pp=4,ep=8,zero=1"),
    ("mixtral-8x7b", "ep=8,zero=3,recompute=full"),
    ("gpt2", "zero=2,recompute=full"),
    ("llama2-7b", "zero=1"),
    ("llama2-7b", "tp=2,pp=2,zero=0"),
    ("llama2-7b", "tp=4,pp=2,zero=0,recompute=full"),
];

/// A script as people write them: variables, arrays, substitutions.
const SCRIPT: &str = r#"#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-8}
TP="2"
source ./self.sh
DISTRIBUTED="--nproc_per_node $GPUS_PER_NODE --nnodes ${NNODES}"
MODEL_ARGS=(
    --num-layers 32        # as in the paper
    --hidden-size 4096
    --num-attention-heads 32
)
MODEL_ARGS+=(--group-query-attention --num-query-groups=8)
torchrun $DISTRIBUTED \
    pretrain_gpt.py "${MODEL_ARGS[@]}" \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $((TP * 2)) \
    --micro-batch-size 1 --global-batch-size 256 --seq-length 4096 --bf16 $EXTRA
"#;

fn scene(model: &str) -> Scene {
    Scene {
        model: model.to_owned(),
        runtime: "vescale".to_owned(),
        gpus: 64,
        seq: 4096,
        batch: 256,
        ..Scene::default()
    }
}

/// Files of one dialect.
pub(super) fn documents(dialect: Dialect) -> Target {
    let of = Documents(dialect);
    let name = match dialect {
        Dialect::MegatronLm => "megatron-lm",
        Dialect::MegatronBridge => "megatron-bridge",
        Dialect::Torchtitan03 => "torchtitan-0.3",
        Dialect::Torchtitan02 => "torchtitan-0.2",
        Dialect::TorchtitanMain => "torchtitan-main",
        Dialect::DeepSpeed => "deepspeed",
        Dialect::Accelerate => "accelerate",
        Dialect::Axolotl => "axolotl",
        Dialect::Transformers => "transformers",
        Dialect::TransformersDeepSpeed => "transformers-deepspeed",
        Dialect::LlamaFactory => "llama-factory",
        Dialect::Nanotron => "nanotron",
        Dialect::VeScale => "vescale",
    };
    Target {
        use_every: 128,
        ..Target::of_text(
            name,
            move || of.seeds(),
            move |pool, rng| of.changed(pool, rng),
            move |text, depth| of.read(text, depth),
        )
    }
}

impl Documents {
    fn format(&self) -> Option<Format> {
        match self.0 {
            Dialect::DeepSpeed => Some(Format::Json),
            Dialect::Transformers | Dialect::TransformersDeepSpeed => Some(Format::Json),
            Dialect::Accelerate | Dialect::Axolotl | Dialect::LlamaFactory | Dialect::Nanotron => {
                Some(Format::Yaml)
            }
            _ => None,
        }
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        let mut seeds = Vec::new();
        for (model, text) in PLANS {
            let scene = scene(model);
            let Ok(scenario) = scene.scenario() else {
                continue;
            };
            let Scenario {
                model,
                runtime,
                workload,
                ..
            } = &scenario;
            let Ok(strategy) = plans::grammar::parse(text, model, workload, runtime) else {
                continue;
            };
            if let Some(Ok(exported)) = promises::exported(&scenario, &strategy, self.0, None) {
                seeds.push(format!("{scene}\n{}", exported.files[0].text).into_bytes());
            }
        }
        if self.0 == Dialect::MegatronLm {
            seeds.push(format!("{}\n{SCRIPT}", scene("llama3-8b")).into_bytes());
        }
        seeds
    }

    fn changed(&self, pool: &Pool, rng: &mut Rng) -> Vec<u8> {
        let Some(format) = self.format().filter(|_| rng.percent(60)) else {
            return mutate::text(pool, rng);
        };
        let input = String::from_utf8_lossy(pool.pick(rng)).into_owned();
        let (scene, text) = Scene::split(&input);
        match format.parse(text) {
            Some(mut tree) => {
                for _ in 0..1 + rng.below(3) {
                    tree::change(&mut tree, pool, rng);
                }
                format!("{scene}\n{}", format.print(&tree)).into_bytes()
            }
            None => mutate::text(pool, rng),
        }
    }

    fn read(&self, text: &str, depth: Depth) -> Outcome {
        let (scene, text) = Scene::split(text);
        let include = |name: &str| name.ends_with("self.sh").then(|| text.to_owned());
        // Whatever it looks like, detection must not fall over it.
        let _ = Document::read(text, "input", None, &include);
        let document = match Document::read(text, "input", Some(self.0), &include) {
            Ok(document) => document,
            Err(error) => return Outcome::malformed(&error),
        };
        let Ok(scenario) = scene.scenario() else {
            return Outcome::malformed(&"no scene".to_owned());
        };
        let findings = match check(&document, Some(&scenario.model)) {
            Ok(findings) => findings,
            Err(error) => return Outcome::refused(&error),
        };
        for finding in &findings {
            let shown = finding.to_string();
            let broken = finding.message.trim().is_empty();
            if broken {
                let mut outcome = Outcome::refused(&shown);
                outcome.expect(false, || "a finding without a message".to_owned());
                return outcome;
            }
        }
        let given = Given {
            model: &scenario.model,
            gpus: Some(scenario.workload.gpus),
            seq_len: (!self.0.has_sequence_length()).then_some(scenario.workload.seq_len),
            gpus_per_node: 8,
        };
        match import(&document, &given) {
            Ok(imported) => self.imported(imported, &scenario, depth),
            Err(ImportError::NotImportable { .. }) => match findings.first() {
                Some(finding) => Outcome {
                    class: Outcome::refused(&finding.message).class,
                    ..Outcome::refused(&"")
                },
                None => Outcome::accepted("checked"),
            },
            Err(error) => Outcome::refused(&error),
        }
    }

    fn imported(
        &self,
        imported: interop::import::Imported,
        scenario: &Scenario,
        depth: Depth,
    ) -> Outcome {
        let w = &imported.workload;
        let workload = match crate::scene::workload(w.gpus, w.seq_len, w.global_batch, w.precision)
        {
            Ok(workload) => workload,
            Err(error) => return Outcome::refused(&error),
        };
        let scenario = Scenario {
            workload,
            ..scenario.clone()
        };
        let decisions = imported.decisions_under(&scenario.model, &scenario.runtime);
        let strategy = match Strategy::new(decisions, &scenario.model, &scenario.workload) {
            Ok(strategy) => strategy,
            Err(error) => return Outcome::refused(&error),
        };
        let features = plans::grammar::short(&strategy).replace(char::is_numeric, "0");
        let mut outcome = Outcome::accepted(features);
        promises::of_strategy(&scenario, &strategy, &mut outcome);
        if depth == Depth::Use {
            promises::round_trip(&scenario, &strategy, self.0, &mut outcome);
            if scenario
                .cluster
                .check_devices(scenario.workload.gpus)
                .is_ok()
            {
                promises::predicted(&scenario, &strategy, &mut outcome);
            }
        }
        outcome
    }
}
