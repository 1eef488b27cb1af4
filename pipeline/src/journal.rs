//! The seed journal: what a zeroth-order update was made of, in exact bits.
//!
//! z depends on seeds alone, so (step, coefficients, optimiser constants) is a whole update: a lost zeroth-order stage is rebuilt on another
//! device by replaying the entries, bit for bit. `guided` updates are not made of seeds and are not journalled; such stages checkpoint
//! their adapters instead.
//!
//! Text, one line per step, floats as hexadecimal bits:
//! `step N lr BITS constants BITS... g DIRECTION:BITS ...`

use std::fmt::Write as _;
use zofo_hal::{Error, Result, op::HyperParams};

/// One update.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Entry {
    /// Optimiser step, counted from 0; also the step of the noise.
    pub step: u32,
    /// Everything of the optimiser but the gradient.
    pub hyper: HyperParams,
    /// Direction words in the order of the sum.
    pub directions: Vec<u32>,
    /// Coefficients (g after clipping, over Q, times lambda) in the same order.
    pub coefficients: Vec<f32>,
}

impl Entry {
    /// An entry.
    pub fn new(step: u32, hyper: HyperParams, directions: Vec<u32>, coefficients: Vec<f32>) -> Self {
        Self { step, hyper, directions, coefficients }
    }

    /// The entry as a line, without its end.
    pub fn to_line(&self) -> String {
        let mut line = format!("step {} hyper", self.step);
        for v in bytemuck::cast_slice::<HyperParams, u32>(&[self.hyper]) {
            let _ = write!(line, " {v:08x}");
        }
        line.push_str(" g");
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
        if words.next() != Some("step") {
            return Err(bad());
        }
        let step = words.next().and_then(|s| s.parse().ok()).ok_or_else(bad)?;
        if words.next() != Some("hyper") {
            return Err(bad());
        }
        let mut bits = [0u32; HyperParams::LEN];
        for b in &mut bits {
            *b = hex(words.next().ok_or_else(bad)?)?;
        }
        if words.next() != Some("g") {
            return Err(bad());
        }
        let (mut directions, mut coefficients) = (Vec::new(), Vec::new());
        for word in words {
            let (d, c) = word.split_once(':').ok_or_else(bad)?;
            directions.push(hex(d)?);
            coefficients.push(f32::from_bits(hex(c)?));
        }
        Ok(Self { step, hyper: bytemuck::cast(bits), directions, coefficients })
    }
}
