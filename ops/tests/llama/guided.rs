//! Guided estimates.

use zofo_hal::{
    op::Copies,
    perturb::{Factor, Projection},
};
use zofo_ops::{
    llama::{Factors, Input, RankActivations, SliceSpec, WeightSource},
    lora::{GradScope, Targets},
};

use crate::common::*;

/// In the layer above the cut the gradient of down_proj's B is `scale sum delta (x A^T)^T` exactly; below, an estimate is all it is.
#[test]
fn the_last_layers_guided_gradient_is_the_gradient() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(3, Targets::ALL));
    let mut exact = Rig::new(reference(), &source, &SliceSpec::new(&config, 0..2).with_backward(), &host);
    let batch = exact.batch(&packed(&config, &[7, 5]));
    let t = batch.block_rows();
    let delta = noise(8, t * config.hidden);
    let cut = exact.runner.constant_f32(t, config.hidden, &delta).unwrap();
    let (_, saved) = exact.slice.forward_saving(&mut exact.runner, &batch, &exact.adapters, Input::Tokens, false).unwrap();
    exact.slice.backward(&mut exact.runner, &batch, &exact.adapters, saved, &cut).unwrap();
    let exact = exact.grads();

    // The base forward alone, and a forward with tangents: both keep the same.
    let mut rig = Rig::new(reference(), &source, &SliceSpec::new(&config, 0..2), &host);
    rig.adapters.enable_grads(&mut rig.runner, GradScope::Guided).unwrap();
    let batch = rig.batch(&packed(&config, &[7, 5]));
    let cut = rig.runner.constant_f32(t, config.hidden, &delta).unwrap();
    let noise = perturbation(&mut rig, &directions(0.0), Factors::B);
    let mut seen = Vec::new();
    for (copies, perturbation) in [(Copies::BASE, None), (Copies::tangent(2), Some(&noise)), (Copies::value(1, true), None)] {
        let mut kept = RankActivations::new();
        let (runner, slice) = (&mut rig.runner, &rig.slice);
        slice.forward_copies(runner, &batch, &rig.adapters, Input::Tokens, copies, perturbation, Some(&mut kept)).unwrap();
        assert_eq!(kept.bytes(), 2 * 2 * t * 3 * 4);
        rig.adapters.zero_grad(runner).unwrap();
        rig.adapters.guide(runner, &batch, &cut, &kept).unwrap();
        seen.push(rig.grads());
    }
    assert!(seen.iter().all(|s| s == &seen[0]));
    let of = |grads: &[(zofo_hal::perturb::TensorId, Vec<f32>)], layer, p| {
        let found = grads.iter().find(|(id, _)| id.layer() == layer && id.projection() == p && id.factor() == Factor::B);
        found.unwrap().1.clone()
    };
    let same = relative(&of(&seen[0], 1, Projection::Down), &of(&exact, 1, Projection::Down));
    assert!(same < 1e-6, "{same}");
    let other = relative(&of(&seen[0], 1, Projection::O), &of(&exact, 1, Projection::O));
    assert!(other > 1e-3, "an estimate that is exact would be a surprise: {other}");
    assert_eq!(seen[0].len(), 4);
}

#[test]
fn guidance_needs_what_it_needs() {
    let source = tiny();
    let config = source.config().clone();
    let host = adapter(&config, &spec(2, "o,down".parse().unwrap()));
    let mut rig = Rig::new(reference(), &source, &SliceSpec::new(&config, 0..2), &host);
    let batch = rig.batch(&packed(&config, &[7]));
    let delta = rig.runner.constant_f32(16, 16, &[0.0; 256]).unwrap();
    let e = rig.adapters.guide(&mut rig.runner, &batch, &delta, &RankActivations::new()).unwrap_err();
    assert!(e.to_string().contains("gradient enabled"), "{e}");
    rig.adapters.enable_grads(&mut rig.runner, GradScope::Guided).unwrap();
    let e = rig.adapters.guide(&mut rig.runner, &batch, &delta, &RankActivations::new()).unwrap_err();
    assert!(e.to_string().contains("keeps on request"), "{e}");
    let mut kept = RankActivations::new();
    let copies = Copies::value(2, false);
    let (runner, slice) = (&mut rig.runner, &rig.slice);
    let e = slice.forward_copies(runner, &batch, &rig.adapters, Input::Tokens, copies, None, Some(&mut kept)).unwrap_err();
    assert!(e.to_string().contains("base block"), "{e}");
}
