//! Axes: round numbers for ticks.

/// A range of values and the ticks on it.
#[derive(Debug, PartialEq)]
pub(super) struct Axis {
    pub low: f64,
    pub high: f64,
    step: f64,
}

impl Axis {
    /// A range that takes in `low ..= high`, ends at a tick on both sides, and has about `ticks` of them; from 0 where that costs little.
    pub fn new(low: f64, high: f64, ticks: usize) -> Self {
        let low = if low > 0.0 && low < 0.4 * high { 0.0 } else { low };
        // A flat curve gets room on both sides.
        let (low, high) = if high > low { (low, high) } else { (low - 0.5 * low.abs().max(1e-3), high + 0.5 * high.abs().max(1e-3)) };
        let step = round_step((high - low) / ticks as f64);
        Self { low: (low / step).floor() * step, high: (high / step).ceil() * step, step }
    }

    /// A range that ends where the values end, with ticks at whole numbers.
    pub fn whole(low: f64, high: f64, ticks: usize) -> Self {
        let high = if high > low { high } else { low + 1.0 };
        Self { low, high, step: round_step((high - low) / ticks as f64).max(1.0) }
    }

    /// Where a value lies: 0 at the low end, 1 at the high one.
    pub fn place(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    /// Values of ticks and their labels.
    pub fn ticks(&self) -> Vec<(f64, String)> {
        let decimals = (-self.step.log10().floor()).clamp(0.0, 12.0) as usize;
        let first = (self.low / self.step - 1e-9).ceil() as i64;
        let last = (self.high / self.step + 1e-9).floor() as i64;
        (first..=last).map(|i| i as f64 * self.step).map(|v| (v, format!("{v:.decimals$}"))).collect()
    }
}

/// The next of 1, 2 and 5 times a power of ten.
fn round_step(raw: f64) -> f64 {
    // By division where the power is negative: 1 / 10 is the double nearest to 0.1, a product of 0.1s is not.
    let power = raw.log10().floor() as i32;
    let scale = |n: f64| if power < 0 { n / 10f64.powi(-power) } else { n * 10f64.powi(power) };
    [1.0, 2.0, 5.0, 10.0].map(scale).into_iter().find(|s| *s >= raw * 0.999_999).unwrap_or(raw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn labels(axis: &Axis) -> Vec<String> {
        axis.ticks().into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn round_numbers() {
        assert_eq!(labels(&Axis::new(0.31, 4.2, 5)), ["0", "1", "2", "3", "4", "5"]);
        assert_eq!(labels(&Axis::new(0.61, 0.72, 5)), ["0.60", "0.65", "0.70", "0.75"]);
        assert_eq!(labels(&Axis::whole(1.0, 200.0, 5)), ["50", "100", "150", "200"]);
        assert_eq!(labels(&Axis::whole(1.0, 3.0, 6)), ["1", "2", "3"]);
        assert_eq!(labels(&Axis::whole(1.0, 1.0, 6)), ["1", "2"]);
    }

    proptest! {
        #[test]
        fn ticks_are_few_and_within(low in -1e6..1e6f64, width in prop_oneof![Just(0.0), 1e-6..1e6f64]) {
            let axis = Axis::new(low, low + width, 5);
            prop_assert!(axis.low <= low && axis.high >= low + width && axis.low < axis.high);
            let ticks = axis.ticks();
            prop_assert!((2..=9).contains(&ticks.len()), "{} {axis:?}", ticks.len());
            prop_assert!(ticks.iter().all(|(v, _)| (-1e-6..=1.0 + 1e-6).contains(&axis.place(*v))));
        }
    }
}
