//! Fresh data from a fixed seed.

/// SplitMix64 (Steele, Lea, Flood 2014): small, and good enough for test data.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The stream that belongs to a name, so that a test's data do not depend on which other tests run.
    pub fn named(name: &str) -> Self {
        // FNV-1a.
        Self(name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Uniform in [-1, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * (2.0 / (1u64 << 53) as f64) - 1.0
    }

    /// `n` distinct numbers below `of`, in random order.
    pub fn distinct(&mut self, n: usize, of: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..of as u32).collect();
        for i in 0..n {
            let j = i + self.below(of - i);
            all.swap(i, j);
        }
        all.truncate(n);
        all
    }
}
