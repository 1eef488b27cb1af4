//! Elementary functions as separately rounded f32 operations, so that loops over them vectorise and every tier gives the same bits.

/// Lanes of the running sums below; a multiple of every tier's vector.
pub(crate) const LANES: usize = 16;

/// Adds 16 lanes pairwise.
#[inline(always)]
pub(crate) fn sum_lanes(mut v: [f32; LANES]) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            v[i] += v[i + n];
        }
        n /= 2;
    }
    v[0]
}

/// `sum of f(i)` over `0..n` in 16 interleaved chains: an order that depends on `n` alone.
#[inline(always)]
pub(crate) fn sum(n: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = n - n % LANES;
    let mut i = 0;
    while i < whole {
        for (j, lane) in lanes.iter_mut().enumerate() {
            *lane += f(i + j);
        }
        i += LANES;
    }
    for (j, lane) in lanes.iter_mut().enumerate().take(n - whole) {
        *lane += f(whole + j);
    }
    sum_lanes(lanes)
}

/// e^x within 2 ulp; overflow gives infinity, underflow passes through the subnormals to 0, NaN stays NaN.
///
/// x = n ln 2 + r with ln 2 split in two (Cody & Waite 1980), a polynomial of degree 7 in r, and 2^n applied in two factors.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    // Beyond these the result is infinite or 0 anyway; written so that NaN passes.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -105.0 { -105.0 } else { x };
    let shifted = x * core::f32::consts::LOG2_E + SHIFT;
    let n = (shifted.to_bits() as i32).wrapping_sub(SHIFT.to_bits() as i32);
    let nf = shifted - SHIFT;
    let r = (x - nf * (355.0 / 512.0)) - nf * -2.121_944_4e-4;
    // Taylor's coefficients of (e^r - 1 - r) / r^2: at |r| <= ln 2 / 2 what is left out, r^8 / 8!, is below 6e-9 of the result.
    let p = 1.984_127e-4;
    let p = p * r + 1.388_888_9e-3;
    let p = p * r + 8.333_333e-3;
    let p = p * r + 4.166_666_8e-2;
    let p = p * r + 0.166_666_67;
    let p = p * r + 0.5;
    let y = (p * (r * r) + r) + 1.0;
    let half = n >> 1;
    let power = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    y * power(half) * power(n.wrapping_sub(half))
}

/// 1 / (1 + e^-x) within 3 ulp, also where it is tiny.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    let e = exp(-x.abs());
    let numerator = if x >= 0.0 { 1.0 } else { e };
    numerator / (1.0 + e)
}

/// Correctly rounded square root.
#[inline(always)]
pub(crate) fn sqrt(x: f32) -> f32 {
    #[cfg(feature = "std")]
    return x.sqrt();
    #[cfg(not(feature = "std"))]
    return libm::sqrtf(x);
}

/// `a b + c`, rounded once.
#[inline(always)]
pub(crate) fn fma(a: f32, b: f32, c: f32) -> f32 {
    #[cfg(feature = "std")]
    return a.mul_add(b, c);
    #[cfg(not(feature = "std"))]
    return libm::fmaf(a, b, c);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(got: f32, want: f64) -> f64 {
        let w = want as f32;
        let ulp = f64::from(f32::from_bits(w.to_bits() + 1)) - f64::from(w);
        (f64::from(got) - want).abs() / ulp
    }

    #[test]
    fn exp_is_within_two_ulp() {
        let mut worst = 0.0f64;
        for i in 0..200_000 {
            let x = -103.0 + i as f32 * (191.7 / 200_000.0);
            worst = worst.max(ulps(exp(x), f64::from(x).exp()));
        }
        assert!(worst < 2.0, "{worst}");
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(89.5), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sigmoid_is_within_four_ulp() {
        let mut worst = 0.0f64;
        for i in 0..200_000 {
            let x = -86.0 + i as f32 * (172.0 / 200_000.0);
            worst = worst.max(ulps(sigmoid(x), 1.0 / (1.0 + (-f64::from(x)).exp())));
        }
        assert!(worst < 4.0, "{worst}");
    }

    #[test]
    fn sums_take_every_element_once() {
        for n in [0, 1, 15, 16, 17, 100] {
            assert_eq!(sum(n, |i| i as f32), (n * n.saturating_sub(1) / 2) as f32);
        }
    }
}
