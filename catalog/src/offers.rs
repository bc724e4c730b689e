//! What a runtime does by default and can be told to do instead: state types, recomputed parts.

use crate::cluster::Cluster;
use crate::cuda_graphs::{CudaGraphs, GraphOption};
use crate::dispatcher::Dispatcher;
use crate::dtype::{DType, Precision};
use crate::fp8_recipe::Fp8Recipe;
use crate::model::ModelConfig;
use crate::offload::{Offload, OffloadOption};
use crate::parallelism::Zero;
use crate::prefetch::Ahead;
use crate::runtime::Runtime;
use crate::selection::Selection;
use crate::sharding::Unsharded;
use crate::state_types::{GradientTypes, OptimizerStates, StateTypes};

impl Runtime {
    /// Default types of gradients.
    #[must_use]
    pub fn own_gradients(&self, precision: Precision) -> GradientTypes {
        let states = self.states_in(precision);
        GradientTypes {
            held: states.gradient.unwrap_or(precision.activation()),
            reduced: states.reduce,
        }
    }

    /// Default types of parameters, gradients and optimizer states in jobs of this precision.
    #[must_use]
    pub fn states_in(&self, precision: Precision) -> StateTypes {
        match precision {
            Precision::Fp32 => StateTypes {
                master: self.states.master.filter(|_| self.master_in_f32_jobs),
                gradient: None,
                reduce: DType::F32,
                extra_gradient: None,
                ..self.states
            },
            Precision::Fp16 => match self.fp16_gradients {
                Some(gradients) => self.states.with_gradients(gradients.types(precision)),
                None if self.states.reduce == DType::Bf16 => StateTypes {
                    reduce: DType::F16,
                    ..self.states
                },
                None => self.states,
            },
            Precision::Bf16 | Precision::Fp8 => self.states,
        }
    }

    /// Whether jobs with tensor or pipeline parallelism must shard states to cast parameters.
    #[must_use]
    pub fn casts_only_shards(&self, precision: Precision) -> bool {
        precision != Precision::Fp32 && self.unsharded == Unsharded::PlainWithoutCasts
    }

    /// Whether jobs of this ZeRO level run block by block: parameters are gathered and gradients
    /// reduced one block at a time, even in groups of one rank.
    #[must_use]
    pub fn works_by_block(&self, zero: Zero) -> bool {
        match zero {
            Zero::Z0 => self.unsharded == Unsharded::Fsdp,
            Zero::Z1 | Zero::Z2 => false,
            Zero::Z3 => true,
        }
    }

    /// Gradient types that it can be told to use instead, at any ZeRO level; none in 32 bits.
    pub fn other_gradients(&self, precision: Precision) -> impl Iterator<Item = GradientTypes> {
        self.other_gradients_at(Zero::Z3, precision)
    }

    /// Gradient types that it can be told to use instead, at this ZeRO level.
    pub fn other_gradients_at(
        &self,
        zero: Zero,
        precision: Precision,
    ) -> impl Iterator<Item = GradientTypes> {
        let own = self.own_gradients(precision);
        let options = self.space.gradients.iter();
        let options = options.filter(move |option| option.from_zero <= zero);
        let types = options.map(move |option| option.types(precision));
        types.filter(move |types| *types != own && precision != Precision::Fp32)
    }

    /// Other ways to hold optimizer states in jobs of this precision, the largest first.
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

    /// How it keeps these states in host memory at this ZeRO level; `None` if it cannot.
    #[must_use]
    pub fn offload_option(&self, offload: Offload, zero: Zero) -> Option<&OffloadOption> {
        let mut options = self.space.offload.iter();
        options.find(|option| option.allows(offload, zero))
    }

    /// How many blocks ahead it gathers parameters under ZeRO-3 with this `prefetch` setting, or by
    /// default; `None` if it does not offer the setting.
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

    /// Ways to send tokens to experts that it can use on a cluster, its own first, for ranks within
    /// a scale-up domain or `across` several.
    #[must_use]
    pub fn dispatchers_on(&self, cluster: &Cluster, across: bool) -> Vec<Dispatcher> {
        let others = self.space.dispatchers.iter().copied();
        let others = others.filter(|of| *of != self.dispatcher && of.exists_on(cluster, across));
        [self.dispatcher].into_iter().chain(others).collect()
    }

    /// Ways to scale operands of 8-bit products that it can use on a cluster, its own first.
    #[must_use]
    pub fn fp8_recipes_on(&self, cluster: &Cluster) -> Vec<Fp8Recipe> {
        let others = self.space.fp8_recipes.iter().copied();
        let others =
            others.filter(|recipe| *recipe != self.fp8_recipe && recipe.exists_on(cluster));
        [self.fp8_recipe].into_iter().chain(others).collect()
    }

    /// How it captures this part of a step in CUDA graphs; `None` if it cannot.
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

    /// Sets of parts of this model that a search may recompute beside the runtime's own set.
    #[must_use]
    pub fn selections_of(&self, model: &ModelConfig) -> Vec<Selection> {
        let mut found = Vec::new();
        for offered in &self.space.selections {
            let selection = offered.of_model(model);
            let new =
                !selection.is_empty() && selection != self.selective && !found.contains(&selection);
            found.extend(new.then_some(selection));
        }
        found
    }

    /// All parts that it can recompute selectively.
    #[must_use]
    pub fn modules(&self) -> Selection {
        let offered = self.space.selections.iter().chain([&self.selective]);
        offered.copied().flat_map(Selection::modules).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::{DType, Precision};

    #[test]
    fn jobs_in_fp16_reduce_in_no_other_16_bits() {
        for (runtime, held, reduced) in [
            ("deepspeed", DType::F16, DType::F16),
            ("fsdp1", DType::F32, DType::F16),
            ("megatron-2021", DType::F16, DType::F16),
            ("fsdp2", DType::F32, DType::F32),
        ] {
            let runtime = crate::load::runtime(runtime).expect("a preset");
            let own = runtime.own_gradients(Precision::Fp16);
            assert_eq!((own.held, own.reduced), (held, reduced), "{}", runtime.name);
        }
    }

    #[test]
    fn jobs_in_32_bits_reduce_in_32_bits_and_some_keep_no_second_copy() {
        for (runtime, master) in [
            ("megatron-core", None),
            ("nemo", None),
            ("deepspeed", Some(DType::F32)),
            ("hf-trainer", None),
            ("vescale", Some(DType::F32)),
        ] {
            let runtime = crate::load::runtime(runtime).expect("a preset");
            let states = runtime.states_in(Precision::Fp32);
            assert_eq!(states.master, master, "{}", runtime.name);
            assert_eq!(states.reduce, DType::F32, "{}", runtime.name);
        }
    }

    #[test]
    fn gradients_in_16_bits_are_copied_for_megatrons_step() {
        use DType::{Bf16, F16, F32};
        // Runtime, precision, its own type of gradients, and whether the step copies them to 32 bits.
        for (name, precision, own, copied) in [
            ("megatron-core", Precision::Bf16, F32, false),
            ("nemo", Precision::Bf16, Bf16, true),
            ("nemo", Precision::Fp16, F16, true),
            ("nemo", Precision::Fp8, Bf16, true),
            ("megatron-fsdp", Precision::Bf16, Bf16, true),
            ("megatron-fsdp", Precision::Fp8, Bf16, true),
            ("megatron-fsdp", Precision::Fp32, F32, false),
        ] {
            let runtime = crate::load::runtime(name).expect("a preset");
            let types = runtime.own_gradients(precision);
            assert_eq!((types.held, types.reduced), (own, own), "{name}");
            let copies = precision != Precision::Fp32 && runtime.copies_gradients(precision, types);
            assert_eq!(copies, copied, "{name} {precision:?}");
            let wide = crate::state_types::GradientTypes::all(F32);
            let offered = runtime
                .other_gradients(precision)
                .any(|other| other == wide);
            assert_eq!(offered, own != F32, "{name} {precision:?}");
        }
    }
}
