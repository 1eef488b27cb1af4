//! Random orders and samples that a seed decides, whatever the machine.

use zofo_hal::perturb::philox4x32_10;

/// What random numbers are drawn for. The key differs from that of perturbations, so that no stream repeats one of theirs.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum Purpose {
    /// Which rows of a file are taken.
    Sample = 1,
    /// Which examples are held out.
    HeldOut = 2,
    /// The order of an epoch.
    Epoch = 3,
    /// The next token.
    Token = 4,
    /// Lines of the embedded data.
    #[cfg(feature = "embedded")]
    DeviceLogs = 5,
    /// Examples of a bootstrap sample.
    Bootstrap = 6,
}

/// Philox words in sequence (see [`zofo_hal::perturb`]).
pub(crate) struct Stream {
    key: [u32; 2],
    sub: u32,
    next: u64,
}

impl Stream {
    /// Numbers of one purpose; `sub` tells its uses apart.
    pub(crate) fn new(seed: u64, purpose: Purpose, sub: u32) -> Self {
        Self { key: [seed as u32 ^ 0x7a6f_666f, (seed >> 32) as u32 ^ (purpose as u32).wrapping_mul(0x9e37_79b9)], sub, next: 0 }
    }

    /// A number in 0 .. 2^64.
    pub(crate) fn word(&mut self) -> u64 {
        let w = philox4x32_10([self.next as u32, (self.next >> 32) as u32, self.sub, 0], self.key);
        self.next += 1;
        (u64::from(w[0]) << 32) | u64::from(w[1])
    }

    /// A number in 0 .. n, for n above 0: the high half of a product, whose bias of n / 2^64 no test can see.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.word()) * n as u128) >> 64) as usize
    }

    /// A number in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// 0 .. n in random order (Fisher and Yates).
pub(crate) fn permutation(n: usize, mut stream: Stream) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, stream.below(i + 1));
    }
    order
}

/// A sample of at most `keep` items that takes each with the same chance, in their order, reading them once (Vitter's algorithm R).
pub(crate) struct Reservoir<T> {
    keep: usize,
    seen: usize,
    items: Vec<(usize, T)>,
    stream: Stream,
}

impl<T> Reservoir<T> {
    pub(crate) fn new(keep: usize, stream: Stream) -> Self {
        Self { keep, seen: 0, items: Vec::new(), stream }
    }

    /// Offers the next item.
    pub(crate) fn push(&mut self, item: T) {
        let place = if self.seen < self.keep { self.seen } else { self.stream.below(self.seen + 1) };
        if place < self.items.len() {
            self.items[place] = (self.seen, item);
        } else if self.items.len() < self.keep {
            self.items.push((self.seen, item));
        }
        self.seen += 1;
    }

    /// The sample.
    pub(crate) fn finish(mut self) -> Vec<T> {
        self.items.sort_by_key(|(at, _)| *at);
        self.items.into_iter().map(|(_, item)| item).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_has_every_number_once() {
        let order = permutation(1000, Stream::new(7, Purpose::Epoch, 0));
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
        assert_ne!(order, sorted);
        assert_eq!(order, permutation(1000, Stream::new(7, Purpose::Epoch, 0)));
        assert_ne!(order, permutation(1000, Stream::new(7, Purpose::Epoch, 1)));
        assert_ne!(order, permutation(1000, Stream::new(8, Purpose::Epoch, 0)));
        assert!(permutation(0, Stream::new(7, Purpose::Epoch, 0)).is_empty());
    }

    #[test]
    fn a_sample_takes_every_item_equally_often() {
        let (n, keep, runs) = (20, 5, 4000);
        let mut counts = vec![0u32; n];
        for run in 0..runs {
            let mut sample = Reservoir::new(keep, Stream::new(1, Purpose::Sample, run));
            (0..n).for_each(|i| sample.push(i));
            let sample = sample.finish();
            assert_eq!(sample.len(), keep);
            assert!(sample.is_sorted());
            sample.into_iter().for_each(|i| counts[i] += 1);
        }
        // Each count is binomial with p = 1/4: five deviations.
        let (mean, deviation) = (f64::from(runs) / 4.0, (f64::from(runs) * 3.0 / 16.0).sqrt());
        assert!(counts.iter().all(|c| (f64::from(*c) - mean).abs() < 5.0 * deviation), "{counts:?}");
    }

    #[test]
    fn a_sample_larger_than_what_there_is_takes_all() {
        let mut sample = Reservoir::new(9, Stream::new(1, Purpose::Sample, 0));
        (0..4).for_each(|i| sample.push(i));
        assert_eq!(sample.finish(), [0, 1, 2, 3]);
    }
}
