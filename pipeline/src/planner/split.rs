//! Dynamic programmes over where to cut a list of layers.

use super::Problem;
use std::ops::Range;

/// The ends of stages whose largest cost is least, `cost(i, layers)` being infinite where stage `i` cannot hold `layers`; `None` where no split
/// is possible. Costs grow with the layers. O(stages * layers^2) at most.
pub(super) fn min_max(layers: usize, stages: usize, cost: impl Fn(usize, &Range<usize>) -> f64) -> Option<(f64, Vec<usize>)> {
    let mut best = vec![vec![(f64::INFINITY, 0usize); layers + 1]; stages + 1];
    best[0][0] = (0.0, 0);
    for s in 1..=stages {
        for end in s..=layers {
            for start in (s - 1..end).rev() {
                let own = cost(s - 1, &(start..end));
                // More layers only cost more.
                if own >= best[s][end].0 {
                    break;
                }
                let here = own.max(best[s - 1][start].0);
                if here < best[s][end].0 {
                    best[s][end] = (here, start);
                }
            }
        }
    }
    let found = best[stages][layers].0;
    found.is_finite().then(|| (found, ends(layers, stages, |s, end| best[s][end].1)))
}

/// The ends that a table of starts leads back to.
fn ends(layers: usize, stages: usize, start: impl Fn(usize, usize) -> usize) -> Vec<usize> {
    let mut all = vec![layers; stages];
    for s in (1..stages).rev() {
        all[s - 1] = start(s + 1, all[s]);
    }
    all
}

/// Ends of stages of as equal a number of layers as can be, earlier ones taking the remainder.
pub(super) fn equal(layers: usize, stages: usize) -> Vec<usize> {
    let (each, more) = (layers / stages, layers % stages);
    (1..=stages).map(|s| s * each + s.min(more)).collect()
}

/// Whether a first-order stage of these layers fits device `d` with `kept` micro-batches under way; what is short otherwise.
pub(super) fn short_by(p: &Problem, d: usize, layers: &Range<usize>, kept: usize) -> Option<f64> {
    let limit = p.device(d).memory_bytes?;
    let needed = p.state_bytes(layers) + kept as f64 * p.activation_bytes(layers);
    (needed > limit).then_some(needed - limit)
}

/// Places where programmes over two lists cut a list of `n`: everywhere, or where there are more than `most` parts at every so many.
pub(super) fn places(n: usize, most: usize) -> Vec<usize> {
    let step = n.div_ceil(most).max(1);
    (0..n).step_by(step).chain([n]).collect()
}

/// Parts of the layers, and of the devices, that programmes over both tell apart: their time grows with the squares of both.
pub(super) const LAYER_PARTS: usize = 32;
/// See [`LAYER_PARTS`].
pub(super) const DEVICE_PARTS: usize = 16;
