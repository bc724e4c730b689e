//! Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011). The counter is the global linear index of the
//! element, so that every sharding draws the same numbers.

use catalog::elementary;

/// Multipliers and Weyl constants of the paper's Philox4x32.
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The four random words of a counter under a key.
#[must_use]
pub fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let product = |index: usize, word: u32| {
            let wide = u64::from(MULTIPLIERS[index]) * u64::from(word);
            ((wide >> 32) as u32, wide as u32)
        };
        let (high0, low0) = product(0, counter[0]);
        let (high1, low1) = product(1, counter[2]);
        counter = [
            high1 ^ counter[1] ^ key[0],
            low1,
            high0 ^ counter[3] ^ key[1],
            low0,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// The random numbers of one operator in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    high: [u32; 2],
}

impl Stream {
    /// The stream of `operator` (its dotted path in the model) at `step`.
    #[must_use]
    pub fn new(seed: u64, step: u32, operator: &str) -> Self {
        Self::of(seed, step, [operator, ""])
    }

    /// The stream of an operator whose path is in two parts.
    #[must_use]
    pub fn of(seed: u64, step: u32, [prefix, scope]: [&str; 2]) -> Self {
        Self {
            key: [seed as u32, (seed >> 32) as u32],
            high: [step, fnv1a(prefix.bytes().chain(scope.bytes()))],
        }
    }

    /// The key and the high half of the counters: what a device needs to draw the same numbers.
    #[must_use]
    pub fn words(&self) -> ([u32; 2], [u32; 2]) {
        (self.key, self.high)
    }

    /// The four random words of elements `4 · block .. 4 · block + 4`.
    #[must_use]
    pub fn block(&self, block: u64) -> [u32; 4] {
        let counter = [
            block as u32,
            (block >> 32) as u32,
            self.high[0],
            self.high[1],
        ];
        philox4x32_10(counter, self.key)
    }

    /// Uniform numbers in [0, 1) for the elements `first..first + out.len()`.
    pub fn uniforms(&self, first: u64, out: &mut [f32]) {
        self.each(first, out, |words, index| {
            uniform(words[(index % 4) as usize])
        });
    }

    /// Standard normal numbers for the elements `first..first + out.len()`: Box–Muller on words (0, 1) and (2, 3).
    pub fn normals(&self, first: u64, out: &mut [f32]) {
        let (mut known, mut two) = (u64::MAX, [0.0; 2]);
        self.each(first, out, |words, index| {
            if index / 2 != known {
                known = index / 2;
                let pair = (index & 2) as usize;
                two = normals([words[pair], words[pair + 1]]);
            }
            two[(index & 1) as usize]
        });
    }

    /// Sets every element of `out` to `value(words of its block, its index)`.
    fn each(&self, first: u64, out: &mut [f32], mut value: impl FnMut(&[u32; 4], u64) -> f32) {
        let mut block = u64::MAX;
        let mut words = [0; 4];
        for (index, x) in (first..).zip(out) {
            if index / 4 != block {
                block = index / 4;
                words = self.block(block);
            }
            *x = value(&words, index);
        }
    }
}

/// A word as a float in [0, 1) with 24 random bits.
fn uniform(word: u32) -> f32 {
    (word >> 8) as f32 / 16_777_216.0
}

/// Two standard normal numbers from two words.
fn normals(words: [u32; 2]) -> [f32; 2] {
    // (w + 1) / 2^32 lies in (0, 1], where the logarithm exists.
    let u = (f64::from(words[0]) + 1.0) / 4_294_967_296.0;
    let angle = f64::from(words[1]) / 4_294_967_296.0 * std::f64::consts::TAU;
    let radius = (-2.0 * elementary::ln(u)).sqrt();
    let (sine, cosine) = elementary::sin_cos(angle);
    [(radius * cosine) as f32, (radius * sine) as f32]
}

/// The 32-bit FNV-1a hash.
fn fnv1a(text: impl Iterator<Item = u8>) -> u32 {
    text.fold(0x811C_9DC5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        let check = |counter, key, expected| assert_eq!(philox4x32_10(counter, key), expected);
        check(
            [0; 4],
            [0; 2],
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
        );
        check(
            [u32::MAX; 4],
            [u32::MAX; 2],
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
        );
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn any_slice_draws_the_same_numbers() {
        let stream = Stream::new(7, 3, "model.layers.0.mlp");
        let mut whole = [0.0; 64];
        stream.normals(0, &mut whole);
        for first in 0..40 {
            let mut part = [0.0; 17];
            stream.normals(first as u64, &mut part);
            assert_eq!(part, whole[first..first + 17]);
        }
    }
}
