//! Keys that contradict each other, system by system: what their own parsers assert, and what only
//! shows when the ranks have started.

mod megatron;
mod others;
mod torchtitan;

use catalog::model::ModelConfig;

use super::Finding;
use crate::config::Value;
use crate::export::Dialect;
use crate::import::Document;

/// Findings of one document, collected.
struct Rules<'a> {
    doc: &'a Document,
    findings: &'a mut Vec<Finding>,
}

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
        Dialect::Nanotron => others::nanotron(&mut rules),
        Dialect::MegatronBridge => megatron::bridge(&mut rules, model),
        Dialect::VeScale => {}
    }
}

impl Rules<'_> {
    fn size(&self, key: &str) -> Option<u64> {
        // What is of the wrong kind was found already.
        self.doc.size(key).ok().flatten()
    }

    fn size_or_one(&self, key: &str) -> u64 {
        self.size(key).unwrap_or(1).max(1)
    }

    fn on(&self, key: &str) -> bool {
        self.doc.flag(key).ok().flatten() == Some(true)
    }

    fn has(&self, key: &str) -> bool {
        self.doc
            .find(key)
            .is_some_and(|node| node.value != Value::Null)
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.doc.text(key).ok().flatten()
    }

    fn require(&mut self, holds: bool, key: &str, message: impl Into<String>) {
        if !holds {
            self.findings.push(Finding {
                path: self.doc.path.clone(),
                line: self.doc.find(key).map_or(0, |node| node.line),
                key: key.to_owned(),
                message: message.into(),
            });
        }
    }
}

/// A product that does not overflow: nonsense sizes are found as such.
fn times(sizes: &[u64]) -> u64 {
    sizes.iter().fold(1, |all, &size| all.saturating_mul(size))
}
