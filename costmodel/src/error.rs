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
        /// Device preset.
        device: String,
        /// Why.
        reason: String,
    },
    /// The profile of this machine lacks a kernel.
    #[error(
        "the profile has no measurement of `{kernel}`; `vescale-plan profile PLAN` (for GPUs with `--device cuda`) measures what a plan needs"
    )]
    NotMeasured {
        /// Kernel.
        kernel: String,
    },
    /// A message between GPUs was not measured.
    #[error(
        "the profile has no measurement of `{message}` between {ranks} GPUs; `vescale-plan profile --device cuda --gpus {ranks}` measures it"
    )]
    MessageNotMeasured {
        /// Message.
        message: String,
        /// GPUs of its group.
        ranks: u64,
    },
    /// A rate or time of the scenario is not a usable number.
    #[error("{name} is {value}: expected a {expected}")]
    Quantity {
        /// What.
        name: String,
        /// As given.
        value: f64,
        /// What it must be.
        expected: &'static str,
    },
    /// The sum of a strategy's times is beyond what a number holds.
    #[error(
        "the predicted step time is not finite: some time or rate of the cluster or runtime is extreme"
    )]
    Endless,
    /// The device has no matrix rate for the asked precision.
    #[error("device {device} has no peak for {precision}")]
    NoPeak {
        /// Device preset.
        device: String,
        /// Asked precision.
        precision: String,
    },
}
