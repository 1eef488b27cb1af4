//! Gradients of the copies of a layer that several pipelines train: their sum is what each copy's optimiser takes.

use std::collections::BTreeMap;
use zofo_hal::perturb::TensorId;

/// Gradients by tensor.
pub(super) type Gradients = BTreeMap<TensorId, Vec<f32>>;

/// Sums over the stages, tensor by tensor, in the order of the stages whichever worker was first: f32 additions, one pipeline after the other.
pub(super) fn sum(mut of_stages: Vec<(usize, Gradients)>) -> Gradients {
    of_stages.sort_by_key(|(stage, _)| *stage);
    let mut sums = Gradients::new();
    for (id, gradient) in of_stages.into_iter().flat_map(|(_, g)| g) {
        match sums.get_mut(&id) {
            None => drop(sums.insert(id, gradient)),
            Some(sum) => sum.iter_mut().zip(gradient).for_each(|(s, g)| *s += g),
        }
    }
    sums
}
