//! Why a strategy has no price.

/// Why a strategy has no price.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CostError {
    /// The model cannot be traced under this layout.
    #[error("{0}")]
    Trace(String),
    /// The device or network has no prices.
    #[error("no prices for device {device}: {reason}")]
    Prices {
        /// Name of the device preset.
        device: String,
        /// Why there are no prices.
        reason: String,
    },
    /// The profile of this machine has no measurement of a kernel.
    #[error(
        "the profile has no measurement of `{kernel}`; expected strategies that need only what was measured (`--fix` and `--forbid` \
         leave others out), or a profile of more: `vescale-plan profile` measures what searches need, `vescale-plan profile PLAN` what \
         a plan needs (for GPUs with `--device cuda`)"
    )]
    NotMeasured {
        /// Name of the kernel.
        kernel: String,
    },
    /// The profile has no measurement of a message between that many GPUs.
    #[error(
        "the profile has no measurement of `{message}` between {ranks} GPUs; `vescale-plan profile --device cuda --gpus {ranks}` measures it"
    )]
    MessageNotMeasured {
        /// Name of the message.
        message: String,
        /// Number of GPUs in its group.
        ranks: u64,
    },
    /// Attention has to stay within documents, but profiles measure attention over whole sequences.
    #[error(
        "a profile has no kernel whose attention stays within the documents of a sequence; pack with --packing across, or pad with --packing padded"
    )]
    AcrossDocuments,
    /// A rate or time of the scenario is not a usable number.
    #[error("{name} is {value}: expected a {expected}")]
    Quantity {
        /// Name of the quantity.
        name: String,
        /// Its value as given.
        value: f64,
        /// Description of a usable value.
        expected: &'static str,
    },
    /// A pipeline rank would have GPUs of several pools.
    #[error(
        "a pipeline of pp={ranks} does not fill pools of {} GPUs one after the other: expected every pool to have the GPUs of a \
         whole number of pipeline ranks, and the pipeline to be the outermost axis", gpus.iter().map(u64::to_string).collect::<Vec<_>>().join(" and ")
    )]
    AcrossPools {
        /// Number of pipeline ranks.
        ranks: u64,
        /// Number of GPUs of every pool.
        gpus: Vec<u64>,
    },
    /// The strategy's schedule splits backward passes in two halves, but the runtime has no such schedule.
    #[error("runtime {runtime} does not run backward in two halves, as schedule {schedule} does")]
    WholeBackward {
        /// Name of the runtime.
        runtime: String,
        /// Name of the schedule.
        schedule: &'static str,
    },
    /// The times of a strategy sum to more than a floating-point number holds.
    #[error(
        "the predicted step time is not finite: some time or rate of the cluster or runtime is extreme"
    )]
    Endless,
    /// The strategy keeps states in host memory, and the cluster does not say what its host is.
    #[error(
        "cluster {cluster} does not say what its host is, which offload needs: add `host: {{link: …, memory_bandwidth: …}}` to its file"
    )]
    NoHost {
        /// Name of the cluster.
        cluster: String,
    },
    /// The strategy scales operands of 8-bit products in a way that GPUs of the cluster do not have.
    #[error("fp8_recipe={recipe} does not run on all GPUs of {cluster}: expected {has}")]
    NoRecipe {
        /// Name of the recipe that the strategy asks for.
        recipe: &'static str,
        /// Name of the cluster.
        cluster: String,
        /// Recipes that run on all GPUs of the cluster.
        has: String,
    },
    /// The strategy overlaps tensor-parallel messages with matrix products, and GPUs of the cluster do not reach each other's memory.
    #[error(
        "overlap of tensor-parallel messages does not run on {cluster}, whose GPUs do not reach each other's memory: expected \
         overlap={has}"
    )]
    NoPeers {
        /// Name of the cluster.
        cluster: String,
        /// The strategy's overlap without that of tensor-parallel messages.
        has: String,
    },
    /// The strategy sends tokens to experts by a library that does not run on the cluster.
    #[error(
        "dispatcher {dispatcher} does not run on {cluster} under this strategy: expected {has}"
    )]
    NoDispatcher {
        /// Name of the dispatcher that the strategy asks for.
        dispatcher: &'static str,
        /// Name of the cluster.
        cluster: String,
        /// The dispatchers of the runtime that run on the cluster if expert groups lie where this
        /// strategy puts them: inside one scale-up domain, or across several.
        has: String,
    },
    /// No kernel of the profile was measured in the requested precision.
    #[error("the profile has no measurement in {precision}: expected --precision {others}")]
    UnmeasuredPrecision {
        /// The requested precision.
        precision: String,
        /// The precisions in which kernels were measured.
        others: String,
    },
    /// The device has no matrix units for the requested precision.
    #[error("{device} has no matrix units for {precision}: expected --precision {others}")]
    NoUnits {
        /// Name of the device preset.
        device: String,
        /// The requested precision.
        precision: String,
        /// The precisions that it has units for.
        others: String,
    },
}
