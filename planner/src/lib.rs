//! Chooses a plan: the finite space of strategies, the exact pruned search over it, and explanations.
//! No formula lives here; costs and bounds come from `costmodel`.
//!
//! This is where to begin as a library. A [`costmodel::Scenario`] is a question, a [`SearchSpace`]
//! holds the possible answers, [`search()`] finds the best of them, and [`explain`] says why.
//!
//! ```
//! use catalog::{Precision, Workload, WorkloadSizes};
//! use costmodel::{CostModel, Scenario};
//! use planner::{Constraints, SearchOptions, SearchSpace, search};
//!
//! let scenario = Scenario {
//!     model: catalog::load::model("gpt2")?,
//!     cluster: catalog::load::cluster("h100 x 8 per node, 400 Gb/s x 8")?,
//!     runtime: catalog::load::runtime("torchtitan")?,
//!     workload: Workload::new(WorkloadSizes {
//!         gpus: 8,
//!         seq_len: 1024,
//!         global_batch: 64,
//!         precision: Precision::Bf16,
//!     })?,
//!     headroom: 0.05,
//! };
//! let costs = CostModel::new(scenario.clone())?;
//! let space = SearchSpace::new(&scenario, &Constraints::default());
//! let found = search(&costs, &space, &SearchOptions::default(), &|_| {})?;
//! let best = found.top.first().expect("gpt2 fits on eight H100");
//! assert!(best.prediction.fit.fits());
//!
//! // One strategy, priced alone.
//! let runtime = &scenario.runtime;
//! let mine = plans::grammar::parse("dp8 zero3", &scenario.model, &scenario.workload, runtime)?;
//! assert!(costs.predict(&mine)?.step_time >= best.prediction.step_time);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod branches;
mod chains;
pub mod choices;
pub mod constraints;
mod constraints_file;
mod contest;
mod error;
mod executions;
pub mod explain;
mod holders;
pub mod layouts;
pub mod legal_values;
pub mod nearby;
mod options;
pub mod present;
mod rates;
pub mod replicas;
pub mod sample;
pub mod search;
mod sets;
mod shapes;
mod shares;
pub mod simplicity;
pub mod size;
pub mod space;

pub use constraints::Constraints;
pub use contest::TIE;
pub use error::PlannerError;
pub use options::{Objective, RISK, SearchOptions};
pub use sample::sample;
pub use search::{has_within, search};
pub use space::SearchSpace;
