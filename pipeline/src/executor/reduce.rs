//! Gradients that several devices have parts of, the members of a stage or the pipelines that train copies of a layer: their sum is what each
//! optimiser takes.

use std::collections::BTreeMap;
use zofo_hal::perturb::TensorId;

/// Gradients by tensor.
pub(super) type Gradients = BTreeMap<TensorId, Vec<f32>>;

/// Sums over stages and ranks, tensor by tensor, in their order whichever device was first: f32 additions, one after the other.
pub(super) fn sum(mut of_stages: Vec<(usize, usize, Gradients)>) -> Gradients {
    of_stages.sort_by_key(|(stage, rank, _)| (*stage, *rank));
    let mut sums = Gradients::new();
    for (id, gradient) in of_stages.into_iter().flat_map(|(.., g)| g) {
        match sums.get_mut(&id) {
            None => drop(sums.insert(id, gradient)),
            Some(sum) => sum.iter_mut().zip(gradient).for_each(|(s, g)| *s += g),
        }
    }
    sums
}
