//! Finds configuration keys that contradict each other, by rules of each training system. The system's own parser would
//! refuse some of these contradictions; others fail only after the ranks have started.

mod collector;
mod megatron;
mod megatron_options;
mod others;
mod torchtitan;

use catalog::model::ModelConfig;

use self::collector::Rules;
use super::finding::Finding;
use crate::export::Dialect;
use crate::import::Document;

pub(super) fn contradictions(
    doc: &Document,
    model: Option<&ModelConfig>,
    findings: &mut Vec<Finding>,
) {
    let mut rules = Rules { doc, findings };
    match doc.dialect {
        Dialect::MegatronLm => megatron::megatron(&mut rules, model),
        Dialect::Torchtitan02 | Dialect::Torchtitan03 | Dialect::TorchtitanMain => {
            torchtitan::torchtitan(&mut rules, model);
        }
        Dialect::DeepSpeed => others::deepspeed(&mut rules),
        Dialect::Accelerate => others::accelerate(&mut rules),
        Dialect::Axolotl => others::axolotl(&mut rules),
        Dialect::Transformers | Dialect::TransformersDeepSpeed | Dialect::LlamaFactory => {
            others::trainer(&mut rules);
        }
        Dialect::Nanotron => others::nanotron(&mut rules),
        Dialect::MegatronBridge => megatron::bridge(&mut rules, model),
        Dialect::VeScale => {}
    }
}
