//! One routine for each elementary function, so that every path has the same bits. They are
//! branch-free, so that loops over them vectorise.

/// `e^x`, with `x` cut to the range of normal results: 2^n · p(r), with r = x − n·ln 2 in two parts
/// (Cody and Waite) and a polynomial of degree 6 (Cephes `expf`).
#[must_use]
#[inline]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and taking away 1.5 · 2^23 rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    let clipped = x.clamp(-87.3, 88.3);
    let n = (clipped * LOG2_E + ROUND) - ROUND;
    let r = clipped - n * LN2_HIGH - n * LN2_LOW;
    let p = ((((1.987_569_2e-4 * r + 1.398_2e-3) * r + 8.333_452e-3) * r + 4.166_579_6e-2) * r
        + 1.666_666_5e-1)
        * r
        + 0.5;
    let y = p * r * r + r + 1.0;
    let scale = f32::from_bits(((n as i32 + 127) as u32) << 23);
    // Below the range the result is 0, as masked attention needs.
    if x < -87.3 { 0.0 } else { y * scale }
}

/// `tanh x = 1 − 2/(e^{2x} + 1)`.
#[must_use]
#[inline]
pub fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

/// `1/(1 + e^{−x})`.
#[must_use]
#[inline]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `out += terms`.
#[inline]
pub fn add(out: &mut [f32], terms: &[f32]) {
    for (sum, term) in out.iter_mut().zip(terms) {
        *sum += term;
    }
}

/// The sum of a row that is never sharded: eight running sums, which vectorise, added in a fixed order.
#[must_use]
#[inline]
pub fn row_sum(row: impl ExactSizeIterator<Item = f32>) -> f32 {
    let mut lanes = [0.0f32; 8];
    for (i, x) in row.enumerate() {
        lanes[i % 8] += x;
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_close_to_the_libraries() {
        for i in -8000..8000 {
            let x = i as f32 * 0.01;
            let close = |ours: f32, theirs: f64| {
                let error = (f64::from(ours) - theirs).abs();
                assert!(
                    error <= 3e-7 * theirs.abs().max(1e-30) + 2e-7 * f64::from(theirs.abs() < 1.0),
                    "{x}: {ours} {theirs}"
                );
            };
            let wide = f64::from(x);
            close(exp(x), wide.exp());
            close(tanh(x), wide.tanh());
            close(sigmoid(x), 1.0 / (1.0 + (-wide).exp()));
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
    }
}
