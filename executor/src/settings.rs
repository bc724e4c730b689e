//! Settings of a training job that are not part of its plan.

use std::time::Duration;

use catalog::Bytes;
use cpu_device::{AdamWStep, Numerics};

/// Settings of a training job.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Seed of every random number.
    pub seed: u64,
    /// Total number of steps.
    pub steps: u64,
    /// Exact or fast: how reductions that sharding splits are evaluated.
    pub numerics: Numerics,
    /// When model code runs.
    pub execution: Execution,
    /// Draw dropout masks by rank, as systems that seed each rank do, instead of by element; layouts then give
    /// different results. For comparisons only.
    pub dropout_by_rank: bool,
    /// Hyperparameters of the optimizer.
    pub optimizer: AdamW,
    /// Least size of a gradient bucket; buckets are reduced while backward runs.
    pub gradient_bucket: Bytes,
    /// How long a rank waits for another before it fails.
    pub timeout: Duration,
}

/// When model code runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Execution {
    /// Once per block, before training; passes replay the recorded trace.
    #[default]
    Replayed,
    /// Anew for every micro-batch, as in an eager framework.
    Eager,
    /// Once per block. The second step is captured as a graph, which later steps replay by one
    /// call, or by two with several ranks.
    Graph,
}

/// AdamW with linear warm-up and cosine decay (Loshchilov and Hutter 2019).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Learning rate at the end of the cosine decay.
    pub min_learning_rate: f64,
    /// Number of linear warm-up steps.
    pub warmup_steps: u64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay, applied to matrices.
    pub weight_decay: f64,
    /// Largest gradient norm; larger gradients are scaled down to it. `None` for no clipping.
    pub clip_norm: Option<f64>,
}

impl Default for AdamW {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            min_learning_rate: 1e-4,
            warmup_steps: 0,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            clip_norm: Some(1.0),
        }
    }
}

impl AdamW {
    /// Learning rate of step `step` (from 0) of `steps`.
    #[must_use]
    pub fn rate(&self, step: u64, steps: u64) -> f64 {
        if step < self.warmup_steps {
            return self.learning_rate * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let span = steps.saturating_sub(self.warmup_steps).max(1);
        let done = (step - self.warmup_steps) as f64 / span as f64;
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * done.min(1.0)).cos());
        self.min_learning_rate + (self.learning_rate - self.min_learning_rate) * cosine
    }

    /// AdamW constants of step `step` (from 0) of `steps`, for weights that decay.
    #[must_use]
    pub fn numbers(&self, step: u64, steps: u64) -> AdamWStep {
        let correct = |beta: f64| 1.0 - beta.powf((step + 1) as f64);
        let rate = self.rate(step, steps) as f32;
        AdamWStep {
            rate,
            betas: [self.beta1 as f32, self.beta2 as f32],
            corrections: [correct(self.beta1) as f32, correct(self.beta2) as f32],
            epsilon: self.epsilon as f32,
            keep: 1.0 - rate * self.weight_decay as f32,
        }
    }

    /// The clipping factor for a gradient of this norm; NaN if the norm is not finite.
    #[must_use]
    pub fn scale(&self, norm: f64) -> f32 {
        match self.clip_norm {
            Some(limit) if norm > limit => (limit / (norm + 1e-6)) as f32,
            _ if norm.is_finite() => 1.0,
            _ => f32::NAN,
        }
    }
}
