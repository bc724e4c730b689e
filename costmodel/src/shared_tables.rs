//! Vocabulary tables that several blocks of a stage share. A tied head reads the embedding's table, and multi-token-prediction
//! modules read the head's, and embed tokens too. Each block counts its table by itself; a rank holds and sends a shared one once.

use models::BlockClass;
use plans::Decisions;

use crate::Scenario;
use crate::stage::Run;
use crate::states::Weights;

/// The tables of a virtual stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedTables {
    /// Elements of a table on one rank.
    table: u64,
    /// Whether embedding and head are one table.
    tied: bool,
    /// Whether the stage has the embedding.
    embeds: bool,
}

impl SharedTables {
    /// The tables of a stage that consists of these blocks.
    pub(crate) fn of(scenario: &Scenario, strategy: &Decisions, runs: &[Run]) -> Self {
        let mut classes = runs.iter().map(|run| run.cost.key.class);
        Self {
            table: table(scenario, strategy),
            tied: scenario.model.tied_embeddings,
            embeds: classes.any(|class| class == BlockClass::Embedding),
        }
    }

    /// Weights of one block of a row, without tables that another block of the stage counts.
    pub(crate) fn own(&self, run: &Run) -> Weights {
        let mut own = run.cost.weights;
        own.share(match run.cost.key.class {
            BlockClass::Head if self.tied && self.embeds => self.table,
            BlockClass::Mtp if self.tied || self.embeds => self.table,
            // The head counts its own table. One module's stands for the copy of the embedding that a last stage needs.
            BlockClass::Mtp => self.table * (run.count - 1) / run.count,
            BlockClass::Embedding | BlockClass::Head | BlockClass::Layer(_) => 0,
        });
        own
    }
}

/// Elements of a vocabulary table on one rank.
pub(crate) fn table(scenario: &Scenario, strategy: &Decisions) -> u64 {
    let model = &scenario.model;
    dtensor::placement::chunk_size(model.vocab, strategy.tp) * model.hidden
}
