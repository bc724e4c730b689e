//! What a runtime can be told to do instead of its own choices: types of states, and parts of layers to recompute.

use crate::cluster::Cluster;
use crate::cuda_graphs::{CudaGraphs, GraphOption};
use crate::dispatcher::Dispatcher;
use crate::dtype::Precision;
use crate::fp8_recipe::Fp8Recipe;
use crate::model::ModelConfig;
use crate::offload::{Offload, OffloadOption};
use crate::parallelism::Zero;
use crate::prefetch::Ahead;
use crate::runtime::Runtime;
use crate::selection::{RecomputeModule, Selection};
use crate::state_types::{GradientTypes, OptimizerStates, StateTypes};

impl Runtime {
    /// The types of gradients that it uses unless it is told otherwise.
    #[must_use]
    pub fn own_gradients(&self, precision: Precision) -> GradientTypes {
        let states = self.states_in(precision);
        GradientTypes {
            held: states.gradient.unwrap_or(precision.activation()),
            reduced: states.reduce,
        }
    }

    /// Types of parameters, gradients and optimizer states of a job of that precision, unless it is told otherwise.
    #[must_use]
    pub fn states_in(&self, precision: Precision) -> StateTypes {
        let of_fp16 = self.fp16_gradients.filter(|_| precision == Precision::Fp16);
        of_fp16.map_or(self.states, |gradients| {
            self.states.with_gradients(gradients.types(precision))
        })
    }

    /// The types that it can be told to use instead. Training in 32 bits leaves no choice.
    pub fn other_gradients(&self, precision: Precision) -> impl Iterator<Item = GradientTypes> {
        let own = self.own_gradients(precision);
        let options = self.space.gradients.iter();
        let types = options.map(move |option| option.types(precision));
        types.filter(move |types| *types != own && precision != Precision::Fp32)
    }

    /// The ways of holding optimizer states that it offers beside its own for a job of that precision, the largest first.
    #[must_use]
    pub fn other_optimizers(&self, precision: Precision) -> Vec<OptimizerStates> {
        let possible = |states: &OptimizerStates| match states {
            OptimizerStates::SplitMaster => precision == Precision::Bf16,
            OptimizerStates::Bf16Moments => matches!(precision, Precision::Bf16 | Precision::Fp8),
            OptimizerStates::EightBitMoments => true,
        };
        let all = self.space.optimizer_states.iter().copied();
        all.filter(possible).collect()
    }

    /// How it keeps these states in host memory at a ZeRO level; `None` if it cannot.
    #[must_use]
    pub fn offload_option(&self, offload: Offload, zero: Zero) -> Option<&OffloadOption> {
        let mut options = self.space.offload.iter();
        options.find(|option| option.allows(offload, zero))
    }

    /// How many blocks ahead it gathers parameters that every pass gathers, if it is told so, or by itself; `None` if it cannot
    /// be told so.
    #[must_use]
    pub fn ahead(&self, prefetch: Option<u64>) -> Option<Ahead> {
        let Some(blocks) = prefetch else {
            return Some(Ahead::USUAL);
        };
        let mut options = self.space.prefetch.iter();
        options
            .find(|option| option.blocks == blocks)
            .map(|option| Ahead {
                forward: option.forward.unwrap_or(blocks),
                backward: blocks,
            })
    }

    /// The ways to send tokens to their experts that it can use on a cluster, its own first, for groups of ranks that lie
    /// within a scale-up domain or `across` several. Of those that cost the same only the first is listed.
    #[must_use]
    pub fn dispatchers_on(&self, cluster: &Cluster, across: bool) -> Vec<Dispatcher> {
        let mut found: Vec<Dispatcher> = vec![self.dispatcher];
        for &other in &self.space.dispatchers {
            let alike = |known: &Dispatcher| {
                *known == other || known.deduplicates() && other.deduplicates()
            };
            if other.exists_on(cluster, across) && !found.iter().any(alike) {
                found.push(other);
            }
        }
        found
    }

    /// The ways to scale the operands of 8-bit products that it can use on a cluster, its own first.
    #[must_use]
    pub fn fp8_recipes_on(&self, cluster: &Cluster) -> Vec<Fp8Recipe> {
        let others = self.space.fp8_recipes.iter().copied();
        let others =
            others.filter(|recipe| *recipe != self.fp8_recipe && recipe.exists_on(cluster));
        [self.fp8_recipe].into_iter().chain(others).collect()
    }

    /// How it can be told to capture that part of a step; `None` if it cannot.
    #[must_use]
    pub fn graph_option(&self, graphs: CudaGraphs) -> Option<GraphOption> {
        let mut options = self.space.graphs.iter();
        options.find(|option| option.captures == graphs).copied()
    }

    /// Whether gradients of these types are copied to 32 bits for the optimizer step.
    #[must_use]
    pub fn copies_gradients(&self, precision: Precision, types: GradientTypes) -> bool {
        let of_fp16 = self.fp16_gradients.iter();
        let mut options = (self.space.gradients.iter()).chain(of_fp16);
        options.any(|option| option.copied_for_step && option.types(precision) == types)
    }

    /// The sets of parts that a search may choose to recompute beside the runtime's own, as far as the model has these.
    #[must_use]
    pub fn selections_of(&self, model: &ModelConfig) -> Vec<Selection> {
        let all = RecomputeModule::ALL.into_iter().map(|(module, ..)| module);
        let there: Selection = all.filter(|module| module.is_in(model)).collect();
        let mut found = Vec::new();
        for offered in &self.space.selections {
            let selection = offered.and(there);
            let new = selection != Selection::default()
                && selection != self.selective
                && !found.contains(&selection);
            found.extend(new.then_some(selection));
        }
        found
    }

    /// All parts that it can recompute by themselves.
    #[must_use]
    pub fn modules(&self) -> Selection {
        let offered = self.space.selections.iter().chain([&self.selective]);
        offered.copied().flat_map(Selection::modules).collect()
    }
}
