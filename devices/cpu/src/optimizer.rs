//! The optimizer's kernel: AdamW over flat runs of weights (Loshchilov and Hutter 2019).

/// A run of weights with their states.
pub struct Weights<'a> {
    /// In 32 bits.
    pub master: &'a mut [f32],
    /// First moments.
    pub momentum: &'a mut [f32],
    /// Second moments.
    pub variance: &'a mut [f32],
    /// Gradients.
    pub gradient: &'a [f32],
}

/// Numbers of one AdamW step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate.
    pub rate: f32,
    /// Decay of the moments.
    pub betas: [f32; 2],
    /// `1 − βᵗ` of both.
    pub corrections: [f32; 2],
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Factor of the weights: one less decoupled decay.
    pub keep: f32,
}

/// Updates weights by their gradients times `scale`. Elementwise, so a shard's update does not depend on
/// the sharding.
pub fn adamw(weights: &mut Weights<'_>, step: &AdamWStep, scale: f32) {
    let ([b1, b2], [c1, c2]) = (step.betas, step.corrections);
    let moments = weights.momentum.iter_mut().zip(weights.variance.iter_mut());
    for ((w, &g), (m, v)) in weights.master.iter_mut().zip(weights.gradient).zip(moments) {
        let g = g * scale;
        *m = b1 * *m + (1.0 - b1) * g;
        *v = b2 * *v + (1.0 - b2) * g * g;
        *w = *w * step.keep - step.rate * (*m / c1) / ((*v / c2).sqrt() + step.epsilon);
    }
}
