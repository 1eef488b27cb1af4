//! Tolerances by running error analysis (Higham, *Accuracy and Stability of Numerical Algorithms*, section 3.3).
//!
//! An op's result is computed once in f64 on values that carry a bound on what f32 arithmetic may have done to them: every operation
//! propagates the bounds of its operands and adds its own rounding. So the tolerance of each single element follows from its operands, the
//! length of its sums and the element types; no op has a number of its own. Sums are bounded for *any* order of addition.

use crate::host;
use std::ops::{Add, Div, Mul, Sub};
use zofo_hal::DType;

/// Unit roundoff of f32.
pub const U: f64 = 1.0 / (1u64 << 24) as f64;
/// What a device that flushes subnormals may lose.
const FLUSH: f64 = f32::MIN_POSITIVE as f64;
/// Relative error granted to exp, ln, sqrt and division: 4 ulp of f32, as the op vocabulary states it.
const FUNCTION: f64 = 8.0 * U;

/// A value and a bound on the error of its computed counterpart.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Est {
    /// The exact value, up to f64.
    pub v: f64,
    /// Largest distance of a correct result from it.
    pub e: f64,
}

impl From<f64> for Est {
    fn from(v: f64) -> Self {
        Self { v, e: 0.0 }
    }
}

impl Est {
    /// Zero.
    pub const ZERO: Self = Self { v: 0.0, e: 0.0 };

    fn rounded(v: f64, e: f64) -> Self {
        Self { v, e: e + U * (v.abs() + e) + FLUSH }
    }

    fn function(v: f64, e: f64) -> Self {
        Self { v, e: e + FUNCTION * (v.abs() + e) + FLUSH }
    }

    /// Widens by a relative error of `relative`.
    pub fn loosened(self, relative: f64) -> Self {
        Self { v: self.v, e: self.e + relative * self.v.abs() }
    }

    /// e^x
    pub fn exp(self) -> Self {
        let v = self.v.exp();
        Self::function(v, v * self.e.exp_m1())
    }

    /// ln x
    pub fn ln(self) -> Self {
        let low = (self.v - self.e).max(f64::MIN_POSITIVE);
        Self::function(self.v.ln(), if self.e == 0.0 { 0.0 } else { self.e / low })
    }

    /// sqrt x
    pub fn sqrt(self) -> Self {
        let v = self.v.sqrt();
        Self::function(v, if self.e == 0.0 { 0.0 } else { v - (self.v - self.e).max(0.0).sqrt() })
    }

    /// 1 / x
    pub fn recip(self) -> Self {
        Self::function(
            1.0 / self.v,
            if self.e == 0.0 { 0.0 } else { self.e / (self.v.abs() * (self.v.abs() - self.e).max(f64::MIN_POSITIVE)) },
        )
    }

    /// 1 / (1 + e^-x)
    pub fn sigmoid(self) -> Self {
        (Est::from(1.0) + (Est::ZERO - self).exp()).recip()
    }

    /// The sum of the terms, added in any order.
    pub fn sum(terms: impl IntoIterator<Item = Self>) -> Self {
        let mut acc = Acc::default();
        for t in terms {
            acc.add(t);
        }
        acc.done()
    }

    /// The interval of correct results once rounded to `dtype`.
    pub fn interval(self, dtype: DType) -> (f64, f64) {
        if self.e == 0.0 {
            let v = host::round(dtype, self.v);
            return (v, v);
        }
        (host::round(dtype, self.v - self.e), host::round(dtype, self.v + self.e))
    }

    /// Rounded to `dtype` in the middle of an op: exact where no rounding boundary is near, one unit of `dtype` wide where one is.
    pub fn rounded_to(self, dtype: DType) -> Self {
        let ((low, high), v) = (self.interval(dtype), host::round(dtype, self.v));
        Self { v, e: (high - v).max(v - low) }
    }

    /// Multiplied in the precision of a 16-bit `dtype`, which a device may do where an op's doc says so.
    pub fn in_type(self, dtype: DType) -> Self {
        match dtype {
            DType::F16 => self.loosened(1.0 / 2048.0),
            DType::Bf16 => self.loosened(1.0 / 256.0),
            _ => self,
        }
    }
}

/// A sum under construction, whose terms a device may form and add in any order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Acc {
    roundings: usize,
    v: f64,
    e: f64,
    size: f64,
}

impl Acc {
    /// One more term.
    pub fn add(&mut self, t: Est) {
        self.roundings += 1;
        self.v += t.v;
        self.e += t.e;
        self.size += t.v.abs() + t.e;
    }

    /// One more product. The second factor comes with the size of its parts, see [`crate::model::Mat::size`].
    pub fn add_product(&mut self, x: Est, (w, size): (Est, f64)) {
        self.roundings += 1;
        self.v += x.v * w.v;
        self.e += x.v.abs() * w.e + x.e * (w.v.abs() + w.e) + FLUSH;
        self.size += (x.v.abs() + x.e) * (size + w.e);
    }

    /// The terms of another sum, times `factor`.
    pub fn add_scaled(&mut self, other: Acc, factor: f64) {
        self.roundings += other.roundings + 1;
        self.v += factor * other.v;
        self.e += factor.abs() * other.e;
        self.size += factor.abs() * other.size;
    }

    /// The sum: a rounding per addition, and one for the product in each term, each as large as all terms together.
    pub fn done(self) -> Est {
        if self.roundings == 0 {
            return Est::ZERO;
        }
        Est { v: self.v, e: self.e + (self.roundings + 1) as f64 * U * self.size }
    }
}

impl Add for Est {
    type Output = Self;
    fn add(self, o: Self) -> Self {
        Self::rounded(self.v + o.v, self.e + o.e)
    }
}

impl Sub for Est {
    type Output = Self;
    fn sub(self, o: Self) -> Self {
        Self::rounded(self.v - o.v, self.e + o.e)
    }
}

impl Mul for Est {
    type Output = Self;
    fn mul(self, o: Self) -> Self {
        Self::rounded(self.v * o.v, self.v.abs() * o.e + o.v.abs() * self.e + self.e * o.e)
    }
}

impl Div for Est {
    type Output = Self;
    fn div(self, o: Self) -> Self {
        let inverse = o.recip();
        self.mul(inverse)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// The bound holds for f32 sums in both orders, and is not thousands of times too wide.
    #[test]
    fn a_sum_is_bounded_in_any_order() {
        let mut rng = Rng::new(1);
        for n in [1, 2, 17, 1000] {
            let x: Vec<f32> = (0..n).map(|_| rng.unit() as f32).collect();
            let est = Est::sum(x.iter().map(|&x| Est::from(f64::from(x))));
            let up: f32 = x.iter().sum();
            let down: f32 = x.iter().rev().sum();
            for got in [up, down] {
                assert!((f64::from(got) - est.v).abs() <= est.e, "{got} {est:?}");
            }
            assert!(est.e < 1e-4 * n as f64);
        }
    }

    #[test]
    fn functions_cover_f32() {
        let mut rng = Rng::new(2);
        for _ in 0..1000 {
            let x = rng.unit() * 10.0;
            let x32 = x as f32;
            let est = Est { v: x, e: (x - f64::from(x32)).abs() };
            for (e, got) in [(est.exp(), x32.exp()), (est.sigmoid(), 1.0 / (1.0 + (-x32).exp())), (est * est, x32 * x32)] {
                assert!((f64::from(got) - e.v).abs() <= e.e, "{x}: {got} {e:?}");
            }
        }
    }

    #[test]
    fn an_exact_value_has_no_room() {
        assert_eq!(Est::from(1.0 + 1e-9).interval(DType::F32), (1.0, 1.0));
        let near = Est { v: 1.00390625, e: 1e-9 }; // halfway between two bf16 numbers
        assert_eq!(near.interval(DType::Bf16), (1.0, 1.0078125));
        let far = Est { v: 1.003, e: 1e-9 };
        assert_eq!(far.rounded_to(DType::Bf16), Est { v: 1.0, e: 0.0 });
    }
}
