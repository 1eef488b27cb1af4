//! The seed journal: what a zeroth-order update was made of, in exact bits.
//!
//! z depends on seeds alone, so (step, learning rate, coefficients) with the run's seed and optimiser is a whole update: a lost zeroth-order
//! stage is rebuilt on another device by replaying the entries, bit for bit. `guided` updates are not made of seeds and are not journalled;
//! such stages checkpoint their adapters instead.
//!
//! Text, one line per step, floats as hexadecimal bits: `step N lr BITS g DIRECTION:BITS ...`

use std::fmt::Write as _;
use zofo_hal::{
    Error, Result,
    perturb::{Direction, Distribution, Domain, NoiseParams},
};
use zofo_ops::{
    Runner,
    optim::{Optimiser, ZoStep},
};

/// One update.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Entry {
    /// Optimiser step, counted from 0; also the step of the noise.
    pub step: u32,
    /// Learning rate.
    pub lr: f64,
    /// Direction words in the order of the sum.
    pub directions: Vec<u32>,
    /// Coefficients (g after clipping, over Q, times lambda) in the same order.
    pub coefficients: Vec<f32>,
}

impl Entry {
    /// An entry.
    pub fn new(step: u32, lr: f64, directions: Vec<u32>, coefficients: Vec<f32>) -> Self {
        Self { step, lr, directions, coefficients }
    }

    /// The entry as a line, without its end.
    pub fn to_line(&self) -> String {
        let mut line = format!("step {} lr {:016x} g", self.step, self.lr.to_bits());
        for (d, c) in self.directions.iter().zip(&self.coefficients) {
            let _ = write!(line, " {d:08x}:{:08x}", c.to_bits());
        }
        line
    }

    /// Reads a line.
    ///
    /// # Errors
    /// `Format` for anything that [`to_line`](Self::to_line) does not write.
    pub fn parse(line: &str) -> Result<Self> {
        let bad = || Error::format(format!("journal line `{}` is malformed", line.chars().take(60).collect::<String>()));
        let hex = |s: &str| u32::from_str_radix(s, 16).map_err(|_| bad());
        let mut words = line.split(' ');
        let mut expect = |name: &str| words.next().filter(|w| *w == name).map(drop).and_then(|()| words.next()).ok_or_else(bad);
        let step = expect("step")?.parse().map_err(|_| bad())?;
        let lr = f64::from_bits(u64::from_str_radix(expect("lr")?, 16).map_err(|_| bad())?);
        if words.next() != Some("g") {
            return Err(bad());
        }
        let (mut directions, mut coefficients) = (Vec::new(), Vec::new());
        for word in words {
            let (d, c) = word.split_once(':').ok_or_else(bad)?;
            directions.push(hex(d)?);
            coefficients.push(f32::from_bits(hex(c)?));
        }
        Ok(Self { step, lr, directions, coefficients })
    }

    /// Makes the update again on `optimiser`'s tensors, which must be where they were before it.
    ///
    /// # Errors
    /// Those of [`Optimiser::step_zo`].
    pub fn replay(&self, runner: &mut Runner, optimiser: &mut Optimiser, seed: u64) -> Result<()> {
        let noise = NoiseParams::new(seed, self.step, Direction::new(Domain::Main, 0, 0)?, 0.0);
        let (coefficients, directions) = (&self.coefficients[..], &self.directions[..]);
        optimiser.step_zo(runner, self.lr, &ZoStep { coefficients, directions, noise, distribution: Distribution::Gaussian })
    }
}
