//! Exponentials, logarithms and powers, the same to the last bit on every machine.
//!
//! The standard library calls the system's functions: glibc, musl, macOS and browsers differ in the
//! last bit, and so would plans, which must be the same wherever they are made. Square roots and
//! powers by small whole numbers (`powi`) are exact everywhere.

/// `e` to the power of `x`.
#[must_use]
pub fn exp(x: f64) -> f64 {
    libm::exp(x)
}

/// 2 to the power of `x`.
#[must_use]
pub fn exp2(x: f64) -> f64 {
    libm::exp2(x)
}

/// `e` to the power of `x`, less 1, precise for small `x`.
#[must_use]
pub fn exp_m1(x: f64) -> f64 {
    libm::expm1(x)
}

/// The natural logarithm of `x`.
#[must_use]
pub fn ln(x: f64) -> f64 {
    libm::log(x)
}

/// The natural logarithm of `1 + x`, precise for small `x`.
#[must_use]
pub fn ln_1p(x: f64) -> f64 {
    libm::log1p(x)
}

/// The logarithm of `x` to base 2.
#[must_use]
pub fn log2(x: f64) -> f64 {
    libm::log2(x)
}

/// `x` to the power of `y`.
#[must_use]
pub fn powf(x: f64, y: f64) -> f64 {
    libm::pow(x, y)
}

/// The sine and the cosine of an angle in radians.
#[must_use]
pub fn sin_cos(angle: f64) -> (f64, f64) {
    libm::sincos(angle)
}

/// The probability that a normal variable of mean 0 and standard deviation 1 is below `x`.
#[must_use]
pub fn normal_below(x: f64) -> f64 {
    libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2) * 0.5
}

/// The largest number that divides both.
#[must_use]
pub fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    match b {
        0 => a,
        _ => greatest_common_divisor(b, a % b),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn functions_are_the_same_on_every_machine() {
        let values = [
            super::exp(0.1),
            super::exp2(0.3),
            super::exp_m1(0.07),
            super::ln(3.7),
            super::ln_1p(0.01),
            super::log2(10.0),
            super::powf(1.7, 0.3),
            super::sin_cos(0.7).0,
            super::sin_cos(0.7).1,
            super::normal_below(0.7),
        ];
        // Bits that x86-64 gave.
        let bits = [
            0x3ff1_aec7_b35a_00d4,
            0x3ff3_b2c4_7bff_8329,
            0x3fb2_8fe5_6b2d_e69c,
            0x3ff4_eeee_650a_e550,
            0x3f84_60d6_ccca_3677,
            0x400a_934f_0979_a371,
            0x3ff2_c2cd_2586_22da,
            0x3fe4_9d6e_6946_19b8,
            0x3fe8_7996_529f_9d93,
            0x3fe8_41d5_715c_32a8,
        ];
        assert_eq!(values.map(f64::to_bits), bits);
    }

    #[test]
    fn powers_of_the_base_are_exact() {
        for power in -20..=20 {
            let power = f64::from(power);
            assert_eq!(super::log2(super::exp2(power)), power);
        }
    }
}
