//! Standard normal numbers from a seeded generator with a state.

use crate::Run;
use rand::{SeedableRng, rngs::SmallRng};
use rand_distr::{Distribution, StandardNormal};
use zofo_hal::Result;

/// Fills `count` numbers, again and again, on the calling thread.
pub fn prepare(count: usize) -> Result<Run> {
    let (mut rng, mut values) = (SmallRng::seed_from_u64(1), vec![0.0f32; count]);
    Ok(Box::new(move || {
        values.fill_with(|| StandardNormal.sample(&mut rng));
        std::hint::black_box(&values);
        Ok(())
    }))
}
