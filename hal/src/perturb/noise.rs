//! z over runs of elements.

use super::normal;
use super::philox::Stream;
use super::{Direction, Distribution, Site, Tier};
use crate::{Error, Result};
use alloc::format;

/// Elements generated at a time where a run does not begin and end with blocks: 1 KiB of stack, which stays in the nearest cache.
const CHUNK: usize = 256;

/// The numbers z of one direction at one site.
///
/// A run is `out.len()` consecutive elements of the unsharded tensor from element `(row, col)` of the local matrix on, and may begin and
/// end anywhere. So one call serves a piece of a row, or several rows of a matrix that has all the tensor's columns ([`Site::runs`]).
/// Nothing is allocated. Element numbers are taken modulo 2^32: [`Site::check`] is what refuses overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    /// `(seed lo, seed hi)`: the Philox key.
    pub seed: [u32; 2],
    /// Optimiser step.
    pub step: u32,
    /// Packed [`Direction`].
    pub direction: u32,
    /// Where, and under which law.
    pub site: Site,
    /// Instruction set.
    pub tier: Tier,
}

/// A kernel over whole blocks.
type Kernel<T> = unsafe fn(&Stream, u32, &mut [[T; 4]]);

impl Noise {
    /// The numbers of `direction` at `site`.
    pub const fn new(seed: u64, step: u32, direction: Direction, site: Site, tier: Tier) -> Self {
        Self { seed: [seed as u32, (seed >> 32) as u32], step, direction: direction.word(), site, tier }
    }

    /// The Philox words of a run.
    pub fn words_into(&self, row: u32, col: u32, out: &mut [u32]) {
        run(self.tier.table().words, &self.stream(self.direction), self.site.element(row, col), out);
    }

    /// z of a run.
    pub fn z_into(&self, row: u32, col: u32, out: &mut [f32]) {
        run(self.kernel(), &self.stream(self.direction), self.site.element(row, col), out);
    }

    /// `out = add(a, mul(eps, z))` of a run, each operation rounded to f32.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) where `a` and `out` differ in length.
    pub fn perturb_into(&self, row: u32, col: u32, a: &[f32], eps: f32, out: &mut [f32]) -> Result<()> {
        if a.len() != out.len() {
            return Err(Error::invalid(format!(
                "perturbation of {} elements into room for {}; both must be the same run",
                a.len(),
                out.len()
            )));
        }
        let (table, kernel, stream) = (self.tier.table(), self.kernel(), self.stream(self.direction));
        let mut z = [0.0; CHUNK];
        let mut done = 0;
        for (element, n) in chunks(self.site.element(row, col), out.len()) {
            let z = &mut z[..n];
            run(kernel, &stream, element, z);
            // Safety: a tier exists only where the CPU has its instructions.
            unsafe { (table.scaled_add)(&a[done..], eps, z, &mut out[done..]) };
            done += n;
        }
        Ok(())
    }

    /// `acc = add(acc, mul(coeffs[i], z_i))` of a run, i ascending, each operation rounded to f32; z_i is that of `directions[i]` (packed
    /// words), and the direction of `self` is not used. The fixed order makes an update that is replayed from seeds exact.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) where there are not as many coefficients as directions.
    pub fn accumulate(&self, row: u32, col: u32, acc: &mut [f32], coeffs: &[f32], directions: &[u32]) -> Result<()> {
        if coeffs.len() != directions.len() {
            return Err(Error::invalid(format!(
                "zeroth-order update with {} coefficients for {} directions; each direction has one",
                coeffs.len(),
                directions.len()
            )));
        }
        let (table, kernel) = (self.tier.table(), self.kernel());
        let mut z = [0.0; CHUNK];
        let mut rest = acc;
        for (element, n) in chunks(self.site.element(row, col), rest.len()) {
            let (now, later) = rest.split_at_mut(n);
            for (&c, &direction) in coeffs.iter().zip(directions) {
                let z = &mut z[..n];
                run(kernel, &self.stream(direction), element, z);
                // Safety: a tier exists only where the CPU has its instructions.
                unsafe { (table.accumulate)(now, c, z) };
            }
            rest = later;
        }
        Ok(())
    }

    /// z of one element. Slow: a block for each call.
    pub fn normal(&self, row: u32, col: u32) -> f32 {
        let element = self.site.element(row, col);
        let words = self.stream(self.direction).block(element / 4);
        let j = (element % 4) as usize;
        match self.site.distribution {
            Distribution::Gaussian => normal::normals(words)[j],
            Distribution::Rademacher => normal::rademacher(words[j]),
        }
    }

    const fn stream(&self, direction: u32) -> Stream {
        Stream::new(self.seed, self.site.tensor.word(), direction, self.step)
    }

    fn kernel(&self) -> Kernel<f32> {
        match self.site.distribution {
            Distribution::Gaussian => self.tier.table().normals,
            Distribution::Rademacher => self.tier.table().signs,
        }
    }
}

/// `(first element, length)` of the pieces of a run that fit a chunk; all but the first begin with a block.
fn chunks(element: u32, len: usize) -> impl Iterator<Item = (u32, usize)> {
    let (mut element, mut left) = (element, len);
    core::iter::from_fn(move || {
        let (first, n) = (element, (CHUNK - (element % 4) as usize).min(left));
        element = element.wrapping_add(n as u32);
        left -= n;
        (n > 0).then_some((first, n))
    })
}

/// Elements from `element` on: whole blocks go straight to `out`, anything else through a chunk on the stack.
fn run<T: Copy + Default>(kernel: Kernel<T>, s: &Stream, element: u32, out: &mut [T]) {
    let (mut element, mut rest) = (element, out);
    if element % 4 == 0 && rest.len() >= 4 {
        let (whole, tail) = rest.as_chunks_mut::<4>();
        // Safety: kernels come from a tier, which exists only where the CPU has its instructions.
        unsafe { kernel(s, element / 4, whole) };
        element = element.wrapping_add(whole.as_flattened().len() as u32);
        rest = tail;
        if rest.is_empty() {
            return;
        }
    }
    let mut blocks = [[T::default(); 4]; CHUNK / 4];
    for (element, n) in chunks(element, rest.len()) {
        let skip = (element % 4) as usize;
        // Safety: as above.
        unsafe { kernel(s, element / 4, &mut blocks[..(skip + n).div_ceil(4)]) };
        let (now, later) = rest.split_at_mut(n);
        now.copy_from_slice(&blocks.as_flattened()[skip..skip + n]);
        rest = later;
    }
}
