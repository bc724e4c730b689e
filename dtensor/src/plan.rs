//! The sharding plan: the placements of parameters and of modules' inputs and outputs.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, RwLock};

use catalog::{Axis, CpKind};
use regex::Regex;
use rustc_hash::FxHashMap;

use crate::placement::{BlockMesh, Placement, Placements};

/// One entry: every name that matches the whole pattern gets the placements.
#[derive(Clone, Debug)]
pub struct Entry {
    /// A regular expression over the whole name.
    pub pattern: String,
    /// Placement per axis; axes not listed are left unchanged.
    pub placements: Vec<(Axis, Placement)>,
    compiled: Arc<Pattern>,
}

/// A compiled pattern and its answers so far by name: a search asks for the same few names for
/// every layout, and matching a name takes longer than looking it up.
#[derive(Debug)]
struct Pattern {
    regex: Regex,
    known: RwLock<FxHashMap<String, bool>>,
}

/// The sharding of a model, by which its single-device code runs on a mesh.
#[derive(Clone, Debug)]
pub struct ShardingPlan {
    /// Sizes of the mesh axes.
    pub mesh: BlockMesh,
    /// Placements by `module.weight` pattern. Parameters that match none are replicated.
    pub parameter: Vec<Entry>,
    /// Placements by `module.input` and `module.output` pattern.
    pub forward: Vec<Entry>,
    /// Placements of the tensor that enters a block.
    pub input: Placements,
    /// How attention exchanges keys and values when context parallelism shards the sequence.
    pub attention_exchange: CpKind,
    /// Whether tensor-parallel ranks that all have the tokens of a layer with experts share the rows of the tokens' experts, or every
    /// expert's columns, so that each computes a part of a sum.
    pub shares_rows: bool,
    /// How many rows reach the experts of this rank.
    pub routing: Routing,
}

/// How many rows (one per token and chosen expert) reach the experts of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Routing {
    /// As many as the rank's own tokens send: perfectly balanced routing.
    #[default]
    Balanced,
    /// As many as in a recorded run.
    Recorded(RoutedRows),
}

/// Number of rows that reached the experts of a rank.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct RoutedRows {
    /// Rows after the exchange between expert-parallel ranks.
    pub dispatched: u64,
    /// Rows after also gathering those of the expert-tensor-parallel peers.
    pub gathered: u64,
}

impl Entry {
    /// Makes an entry; compiles its pattern.
    ///
    /// # Errors
    /// When the pattern is not a regular expression.
    pub fn new(pattern: String, placements: Vec<(Axis, Placement)>) -> Result<Self, regex::Error> {
        let compiled = compiled(&pattern)?;
        Ok(Self {
            pattern,
            placements,
            compiled,
        })
    }

    /// Whether the whole name matches the pattern.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        let known = self
            .compiled
            .known
            .read()
            .expect(POISONED)
            .get(name)
            .copied();
        known.unwrap_or_else(|| {
            let matches = self.compiled.regex.is_match(name);
            let mut known = self.compiled.known.write().expect(POISONED);
            known.insert(name.to_owned(), matches);
            matches
        })
    }
}

/// Patterns compiled so far: a search builds the same few for every layout, and compiling one takes
/// longer than tracing a block.
static COMPILED: LazyLock<RwLock<BTreeMap<String, Arc<Pattern>>>> = LazyLock::new(RwLock::default);

const POISONED: &str = "no thread panics while holding the patterns";

fn compiled(pattern: &str) -> Result<Arc<Pattern>, regex::Error> {
    if let Some(compiled) = COMPILED.read().expect(POISONED).get(pattern) {
        return Ok(Arc::clone(compiled));
    }
    let compiled = Arc::new(Pattern {
        regex: Regex::new(&format!("^(?:{pattern})$"))?,
        known: RwLock::default(),
    });
    let mut all = COMPILED.write().expect(POISONED);
    all.insert(pattern.to_owned(), Arc::clone(&compiled));
    Ok(compiled)
}

impl ShardingPlan {
    /// Placements of a parameter; replicated when no entry matches.
    #[must_use]
    pub fn parameter(&self, name: &str) -> Placements {
        let mut placements = Placements::REPLICATE;
        for entry in self.parameter.iter().filter(|e| e.matches(name)) {
            for &(axis, placement) in &entry.placements {
                placements = placements.with(axis, placement);
            }
        }
        placements
    }

    /// The placements that a module's input or output is redistributed to, or `None` without an entry.
    #[must_use]
    pub fn forward(&self, name: &str) -> Option<&[(Axis, Placement)]> {
        self.forward
            .iter()
            .find(|e| e.matches(name))
            .map(|e| e.placements.as_slice())
    }
}
