//! The sharding plan: which parameters and module inputs and outputs have which placements.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, RwLock};

use catalog::{Axis, CpKind};
use regex::Regex;

use crate::placement::{BlockMesh, Placement, Placements};

/// An entry: names that match the pattern in full get the placements.
#[derive(Clone, Debug)]
pub struct Entry {
    /// A regular expression over the whole name.
    pub pattern: String,
    /// Placement per axis; axes not listed keep what they have.
    pub placements: Vec<(Axis, Placement)>,
    compiled: Arc<Regex>,
}

/// Everything that makes single-device model code run sharded.
#[derive(Clone, Debug)]
pub struct ShardingPlan {
    /// Sizes of the axes.
    pub mesh: BlockMesh,
    /// `module.weight` patterns. Parameters that none matches are replicated.
    pub parameter: Vec<Entry>,
    /// `module.input` and `module.output` patterns.
    pub forward: Vec<Entry>,
    /// Placements of the tensor that enters a block.
    pub input: Placements,
    /// How attention exchanges keys and values over the sharded sequence.
    pub attention_exchange: CpKind,
    /// How many rows reach the experts here.
    pub routing: Routing,
}

/// How many rows (a token's choice of an expert is one) reach the experts of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Routing {
    /// As many as its tokens send out.
    #[default]
    Balanced,
    /// As many as one did in a run.
    Recorded(RoutedRows),
}

/// Rows that reached the experts of a rank.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct RoutedRows {
    /// After the exchange between expert-parallel ranks.
    pub dispatched: u64,
    /// With those of the expert-tensor-parallel peers.
    pub gathered: u64,
}

impl Entry {
    /// An entry from a pattern.
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

    /// Whether a name matches in full.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        self.compiled.is_match(name)
    }
}

/// Patterns compiled so far: a search builds the same few for every layout, and compiling one takes
/// longer than tracing a block.
static COMPILED: LazyLock<RwLock<BTreeMap<String, Arc<Regex>>>> = LazyLock::new(RwLock::default);

fn compiled(pattern: &str) -> Result<Arc<Regex>, regex::Error> {
    let poisoned = "no thread panics while holding the patterns";
    if let Some(regex) = COMPILED.read().expect(poisoned).get(pattern) {
        return Ok(Arc::clone(regex));
    }
    let regex = Arc::new(Regex::new(&format!("^(?:{pattern})$"))?);
    COMPILED
        .write()
        .expect(poisoned)
        .insert(pattern.to_owned(), Arc::clone(&regex));
    Ok(regex)
}

impl ShardingPlan {
    /// Placements of a parameter; replicated when nothing matches.
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

    /// What a module's input or output is redistributed to, if the plan says so.
    #[must_use]
    pub fn forward(&self, name: &str) -> Option<&[(Axis, Placement)]> {
        self.forward
            .iter()
            .find(|e| e.matches(name))
            .map(|e| e.placements.as_slice())
    }
}
