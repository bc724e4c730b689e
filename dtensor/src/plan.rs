//! The sharding plan: which parameters and module inputs and outputs have which placements.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, RwLock};

use regex::Regex;
use spec::{Axis, CpKind};

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
