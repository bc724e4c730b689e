//! The optimizer's kernel: AdamW over flat runs of weights (Loshchilov and Hutter 2019).

/// A contiguous run of weights with their optimizer states.
pub struct Weights<'a> {
    /// Master weights in 32 bits.
    pub master: &'a mut [f32],
    /// First moments.
    pub momentum: &'a mut [f32],
    /// Second moments.
    pub variance: &'a mut [f32],
    /// Gradients.
    pub gradient: &'a [f32],
}

/// Hyperparameters of one AdamW step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate.
    pub rate: f32,
    /// Decay of the moments.
    pub betas: [f32; 2],
    /// Bias corrections `1 − βᵗ` of both moments.
    pub corrections: [f32; 2],
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Factor that weights are multiplied by: `1 − rate · weight decay`.
    pub keep: f32,
}

/// Updates weights by their gradients times `scale`. It is elementwise, so sharding does not change the result.
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
