//! A sum that does not depend on the order of its terms: a fixed-point number wide enough for the
//! squares and sums of all 32-bit floats (Kulisch accumulator).

/// Bits per limb that a term may fill; the rest of a limb's 64 bits hold carries of 2^31 terms.
const LIMB: i32 = 32;
/// Exponent of the lowest bit: squares of the smallest subnormals are 2^−298.
const LOWEST: i32 = -320;
const LIMBS: usize = 20;

/// A fixed-point accumulator in 64-bit limbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExactSum {
    limbs: [i64; LIMBS],
    terms: u32,
    /// Whether any term was infinite or NaN; the sum is then NaN.
    poisoned: bool,
}

impl Default for ExactSum {
    fn default() -> Self {
        Self {
            limbs: [0; LIMBS],
            terms: 0,
            poisoned: false,
        }
    }
}

impl ExactSum {
    /// Adds a number without rounding.
    pub fn add(&mut self, x: f64) {
        if !x.is_finite() {
            self.poisoned = true;
            return;
        }
        if x == 0.0 {
            return;
        }
        let bits = x.to_bits();
        let exponent = ((bits >> 52) & 0x7FF) as i32;
        let fraction = bits & ((1 << 52) - 1);
        let (mantissa, exponent) = if exponent == 0 {
            (fraction, -1074)
        } else {
            (fraction | 1 << 52, exponent - 1075)
        };
        // What lies below the lowest bit cannot come from squares of floats.
        let place = exponent - LOWEST;
        if place < 0 {
            return;
        }
        let limb = (place / LIMB) as usize;
        let wide = i128::from(mantissa) << (place % LIMB);
        let sign = if x < 0.0 { -1 } else { 1 };
        for i in 0..3 {
            let part = (wide >> (LIMB * i as i32)) as i64 & 0xFFFF_FFFF;
            match self.limbs.get_mut(limb + i) {
                Some(at) => *at += sign * part,
                None if part != 0 => self.poisoned = true,
                None => {}
            }
        }
        self.terms += 1;
        if self.terms >= 1 << 30 {
            self.carry();
        }
    }

    /// Adds all terms of another accumulator.
    pub fn merge(&mut self, other: &Self) {
        let mut other = other.clone();
        other.carry();
        self.carry();
        for (a, b) in self.limbs.iter_mut().zip(other.limbs) {
            *a += b;
        }
        self.poisoned |= other.poisoned;
        self.carry();
    }

    /// The sum, rounded; NaN when a term was not finite.
    #[must_use]
    pub fn value(&self) -> f64 {
        if self.poisoned {
            return f64::NAN;
        }
        let mut limbs = self.clone();
        limbs.carry();
        // From the top down; the first limbs decide, the rest only round.
        let scaled = |(i, &limb): (usize, &i64)| {
            limb as f64
                * 2f64.powi(LOWEST / 2 + LIMB * i as i32 / 2)
                * 2f64.powi(LOWEST - LOWEST / 2 + LIMB * i as i32 - LIMB * i as i32 / 2)
        };
        limbs.limbs.iter().enumerate().rev().map(scaled).sum()
    }

    fn carry(&mut self) {
        self.terms = 0;
        for i in 0..LIMBS - 1 {
            let over = self.limbs[i] >> LIMB;
            self.limbs[i] -= over << LIMB;
            self.limbs[i + 1] += over;
        }
    }

    /// The accumulator's state as bytes, to send to another rank.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut carried = self.clone();
        carried.carry();
        let mut bytes: Vec<u8> = carried.limbs.iter().flat_map(|l| l.to_le_bytes()).collect();
        bytes.push(u8::from(self.poisoned));
        bytes
    }

    /// Reads what [`ExactSum::bytes`] wrote.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut sum = Self::default();
        for (limb, bytes) in sum.limbs.iter_mut().zip(bytes.chunks_exact(8)) {
            *limb = i64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        }
        sum.poisoned = bytes.last() == Some(&1);
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn order_and_grouping_do_not_matter(values in prop::collection::vec(-1e20f32..1e20, 0..60), split in 0usize..60) {
            let mut forward = ExactSum::default();
            let mut parts = [ExactSum::default(), ExactSum::default()];
            for (i, v) in values.iter().enumerate() {
                forward.add(f64::from(*v));
                parts[usize::from(i >= split)].add(f64::from(*v));
            }
            let [mut a, b] = parts;
            a.merge(&ExactSum::from_bytes(&b.bytes()));
            prop_assert_eq!(forward.value().to_bits(), a.value().to_bits());
            let plain: f64 = values.iter().map(|v| f64::from(*v)).sum();
            prop_assert!((forward.value() - plain).abs() <= 1e-9 * values.iter().map(|v| f64::from(v.abs())).sum::<f64>());
        }
    }

    #[test]
    fn what_is_not_finite_shows() {
        let mut sum = ExactSum::default();
        sum.add(f64::INFINITY);
        sum.add(1.0);
        assert!(sum.value().is_nan());
    }
}
